/* test_directory_server.c - the directory server's answers to calls that its client never makes. */
#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "scheduler/directory/meter_wire.h"
#include "scheduler/directory/server.h"
#include "scheduler/directory/wire.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/net/http/http_client.h"
#include "tests/fixtures/loop_turns.h"
#include "tests/fixtures/served_view.h"
#include "tests/harness/test.h"

struct answer {
    bool here;
    enum status st;
    int http_status;
    char body[1024];
};

static void on_answer(void *arg, enum status st, int http_status, struct str body)
{
    struct answer *a = arg;
    a->here = true;
    a->st = st;
    a->http_status = http_status;
    snprintf(a->body, sizeof a->body, "%.*s", STR_ARG(body));
}

struct rig {
    struct loop *loop;
    struct directory *local;
    struct directory_server *server;
    struct http_client *client;
};

static void turn(struct rig *r) { loop_turn(r->loop); }

static void rig_open(struct rig *r, struct str secret)
{
    struct err err = { 0 };
    CHECK_OK(loop_create(&r->loop, NULL));
    struct directory_options o = { .loop = r->loop, .topic = "default" };
    struct http_client_options c = { .loop = r->loop, .body_max = 1 << 20, .n_idle = 2 };
    CHECK_OK(directory_open("local", &o, &r->local, &err));
    CHECK_OK(directory_server_start(r->loop, r->local, "127.0.0.1", 0, secret, &r->server, &err));
    r->client = http_client_create(&c);
}

static void on_stopped(void *arg) { *(bool *)arg = true; }

static void rig_close(struct rig *r)
{
    bool stopped = false;
    http_client_free(r->client);
    directory_server_stop(r->server, on_stopped, &stopped);
    directory_close(r->local);
    for (uint64_t end = clock_ms() + 5000; !stopped && clock_ms() < end;) turn(r);
    CHECK(stopped);
    loop_free(r->loop);
}

static struct answer call_at(struct rig *r, uint16_t port, const char *path, const char *headers)
{
    struct answer a = { 0 };
    CHECK_OK(http_client_request(r->client, "POST", "127.0.0.1", port, path, headers, STR("{}"),
                                 3000, on_answer, &a));
    for (uint64_t end = clock_ms() + 5000; !a.here && clock_ms() < end;) turn(r);
    CHECK(a.here);
    CHECK_OK(a.st);
    return a;
}

static struct answer call(struct rig *r, const char *method, const char *path, const char *headers,
                          struct str body)
{
    struct answer a = { 0 };
    CHECK_OK(http_client_request(r->client, method, "127.0.0.1", directory_server_port(r->server),
                                 path, headers, body, 3000, on_answer, &a));
    for (uint64_t end = clock_ms() + 5000; !a.here && clock_ms() < end;) turn(r);
    CHECK(a.here);
    CHECK_OK(a.st);
    return a;
}

TEST(malformed_calls_are_answered)
{
    static const struct {
        const char *method, *path, *body;
        int want;
    } calls[] = {
        { "POST", "/cluster/v1/snapshot", "{}", 200 },
        { "POST", "/cluster/v1/snapshot", "", 400 },
        { "POST", "/cluster/v1/snapshot", "[]", 200 }, /* no topic has an empty name: no nodes */
        { "POST", "/cluster/v1/snapshot", "{\"topic\":1}", 400 },
        { "POST", "/cluster/v1/snapshot", "{\"owner\":1}", 400 },
        { "POST", "/cluster/v1/snapshot", "{\"topic\":\"x\"", 400 },
        { "GET", "/cluster/v1/snapshot", "", 404 },
        { "POST", "/cluster/v1/", "{}", 404 },
        { "POST", "/cluster/v2/snapshot", "{}", 404 },
        { "POST", "/", "{}", 404 },
        { "POST", "/cluster/v1/publish", "{}", 400 },
        { "POST", "/cluster/v1/publish", "{\"record\":{\"node\":\"0000000000000001\"}}", 400 },
        { "POST", "/cluster/v1/publish",
          "{\"record\":{\"node\":\"0000000000000001\",\"topic\":\"default\",\"role\":\"mixed\","
          "\"max_seqs\":1,\"n_blocks\":9}}",
          400 }, /* as earlier versions wrote it */
        { "POST", "/cluster/v1/publish",
          "{\"record\":{\"identity\":\"{\\\"node\\\":\\\"0000000000000001\\\","
          "\\\"topic\\\":\\\"default\\\",\\\"role\\\":\\\"mixed\\\",\\\"max_seqs\\\":1,"
          "\\\"n_blocks\\\":9}\"}}",
          200 },
        { "POST", "/cluster/v1/leave", "{}", 400 },
        { "POST", "/cluster/v1/leave", "{\"node\":\"00000000000000ff\"}", 200 },
        { "POST", "/cluster/v1/reserve",
          "{\"owner\":\"0000000000000009\",\"id\":\"0000000000000005\"}", 400 },
        /* no owner */
        { "POST", "/cluster/v1/reserve",
          "{\"id\":\"0000000000000005\",\"decode\":\"0000000000000001\"}", 400 },
        { "POST", "/cluster/v1/reserve",
          "{\"owner\":\"0000000000000009\",\"id\":\"0000000000000005\",\"decode\":"
          "\"0000000000000001\",\"blocks\":-1}",
          400 },
        { "POST", "/cluster/v1/reserve",
          "{\"owner\":\"0000000000000009\",\"id\":\"0000000000000005\",\"decode\":"
          "\"0000000000000001\",\"ttl_ms\":1e12}",
          400 },
        { "POST", "/cluster/v1/reserve",
          "{\"owner\":\"0000000000000009\",\"id\":\"0000000000000005\",\"decode\":"
          "\"0000000000000001\",\"ttl_ms\":9000}",
          200 },
        { "POST", "/cluster/v1/release", "{}", 400 },
        { "POST", "/cluster/v1/release", "{\"ids\":[1]}", 400 },
        { "POST", "/cluster/v1/release", "{\"ids\":[\"5\"]}", 400 },
        { "POST", "/cluster/v1/release", "{\"ids\":[\"0000000000000005\",\"0000000000000005\"]}",
          200 },
        { "POST", "/cluster/v1/meter", "{}", 400 },
        { "POST", "/cluster/v1/meter",
          "{\"topic\":\"t\",\"entry\":\"0000000000000009\",\"number\":1,\"uses\":[]}", 200 },
        { "POST", "/cluster/v1/meter",
          "{\"topic\":\"t\",\"entry\":\"0000000000000009\",\"number\":1,\"uses\":[["
          "\"0000000000000005\",1,2,3,4,5]]}",
          200 },
        { "POST", "/cluster/v1/meter", "{\"entry\":\"0000000000000009\",\"number\":1,\"uses\":[]}",
          400 },
        { "POST", "/cluster/v1/meter",
          "{\"topic\":\"a}b\",\"entry\":\"0000000000000009\",\"number\":1,\"uses\":[]}", 400 },
        { "POST", "/cluster/v1/meter",
          "{\"topic\":\"t\",\"entry\":\"0000000000000000\",\"number\":1,\"uses\":[]}", 400 },
        { "POST", "/cluster/v1/meter",
          "{\"topic\":\"t\",\"entry\":\"0000000000000009\",\"number\":0,\"uses\":[]}", 400 },
        { "POST", "/cluster/v1/meter",
          "{\"topic\":\"t\",\"entry\":\"0000000000000009\",\"number\":9007199254740992,\"uses\":[]"
          "}",
          400 },
        { "POST", "/cluster/v1/meter",
          "{\"topic\":\"t\",\"entry\":\"0000000000000009\",\"number\":1,\"uses\":{}}", 400 },
        { "POST", "/cluster/v1/meter",
          "{\"topic\":\"t\",\"entry\":\"0000000000000009\",\"number\":1,\"uses\":[7]}", 400 },
        { "POST", "/cluster/v1/meter",
          "{\"topic\":\"t\",\"entry\":\"0000000000000009\",\"number\":1,\"uses\":[[]]}", 400 },
        { "POST", "/cluster/v1/meter",
          "{\"topic\":\"t\",\"entry\":\"0000000000000009\",\"number\":1,\"uses\":[["
          "\"0000000000000000\",1,2,3,4,5]]}",
          400 },
        { "POST", "/cluster/v1/meter",
          "{\"topic\":\"t\",\"entry\":\"0000000000000009\",\"number\":1,\"uses\":[["
          "\"0000000000000005\",1,2,3,4]]}",
          400 },
        { "POST", "/cluster/v1/meter",
          "{\"topic\":\"t\",\"entry\":\"0000000000000009\",\"number\":1,\"uses\":[["
          "\"0000000000000005\",1,2,3,4,5,6]]}",
          400 },
        { "POST", "/cluster/v1/meter",
          "{\"topic\":\"t\",\"entry\":\"0000000000000009\",\"number\":1,\"uses\":[["
          "\"0000000000000005\",-1,2,3,4,5]]}",
          400 },
        { "POST", "/cluster/v1/meter",
          "{\"topic\":\"t\",\"entry\":\"0000000000000009\",\"number\":1,\"uses\":[["
          "\"0000000000000005\",1,1e14,3,4,5]]}",
          400 },
        { "POST", "/cluster/v1/meter",
          "{\"topic\":\"t\",\"entry\":\"0000000000000009\",\"number\":1,\"uses\":[["
          "\"0000000000000005\",1,2,3.5,4,5]]}",
          400 },
    };
    struct rig r;
    rig_open(&r, STR(""));
    for (size_t i = 0; i < COUNT_OF(calls); i++) {
        struct answer a = call(&r, calls[i].method, calls[i].path, NULL, str_of(calls[i].body));
        if (a.http_status != calls[i].want)
            test_fail(__FILE__, __LINE__, "%s %s %s: %d, not %d: %s", calls[i].method,
                      calls[i].path, calls[i].body, a.http_status, calls[i].want, a.body);
        CHECK((a.http_status == 200) != (strncmp(a.body, "{\"error\":", 9) == 0));
    }
    rig_close(&r);
}

/* Calls from this address of the host, on a connection of its own, with a wrong secret. */
static void call_from(struct rig *r, const char *address)
{
    static const char text[] = "POST /cluster/v1/snapshot HTTP/1.1\r\nHost: x\r\n"
                               "Content-Length: 2\r\nConnection: close\r\n\r\n{}";
    struct sockaddr_in from = { .sin_family = AF_INET }, to = from;
    char answer[1024];
    ssize_t n = -1;
    CHECK(inet_pton(AF_INET, address, &from.sin_addr) == 1);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(directory_server_port(r->server));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(fd, (struct sockaddr *)&from, sizeof from) == 0);
    CHECK(connect(fd, (struct sockaddr *)&to, sizeof to) == 0);
    CHECK_EQ_INT(send(fd, text, sizeof text - 1, 0), sizeof text - 1);
    for (uint64_t end = clock_ms() + 5000; n < 0 && clock_ms() < end;) {
        turn(r);
        n = recv(fd, answer, sizeof answer - 1, MSG_DONTWAIT);
    }
    CHECK(n > 12 && strncmp(answer + 9, "401", 3) == 0);
    close(fd);
}

static char log_path[600];

static void open_log(void)
{
    const struct log_file_options o = { .dir = test_tmpdir(), .name = "refused" };
    CHECK_OK(log_set_file(&o));
    snprintf(log_path, sizeof log_path, "%s/%s", o.dir, o.name);
}

static const char *read_log(void)
{
    static char log[1 << 15];
    FILE *f = fopen(log_path, "r");
    CHECK(f);
    log[fread(log, 1, sizeof log - 1, f)] = 0;
    fclose(f);
    return log;
}

/* Each host that has another secret is named once, whatever ports it calls from. */
TEST(every_refused_host_is_logged)
{
    struct rig r;
    open_log();
    rig_open(&r, STR("s3cret"));
    for (int i = 0; i < 2; i++) {
        call_from(&r, "127.0.0.1");
        call_from(&r, "127.0.0.2");
    }
    rig_close(&r);
    const char *log = read_log();
    for (int i = 1; i <= 2; i++) {
        char line[64];
        snprintf(line, sizeof line, "directory call refused peer=127.0.0.%d:", i);
        const char *first = strstr(log, line);
        if (!first) test_fail(__FILE__, __LINE__, "no %s in %s", line, log);
        CHECK(!strstr(first + 1, line));
    }
}

/* It publishes more than once a second; one line tells the operator what to do. */
TEST(a_record_of_an_earlier_version_is_logged_once)
{
    struct rig r;
    open_log();
    rig_open(&r, STR(""));
    for (int i = 0; i < 3; i++) {
        struct answer a = call(&r, "POST", "/cluster/v1/publish", NULL,
                               STR("{\"record\":{\"node\":\"0000000000000001\",\"topic\":"
                                   "\"default\",\"role\":\"mixed\"}}"));
        CHECK_EQ_INT(a.http_status, 400);
        CHECK(strstr(a.body, "it has the form of an earlier version"));
    }
    rig_close(&r);
    const char *line = strstr(read_log(), "directory call refused peer=127.0.0.1:");
    CHECK(line && strstr(line, "why=\"it has the form of an earlier version"));
    CHECK(!strstr(line + 1, "directory call refused"));
}

/* What a newer version says of itself reaches the readers as it was signed. */
TEST(an_identity_is_served_byte_by_byte)
{
    static const char identity[] =
        "\"identity\":\"{ \\\"node\\\":\\\"0000000000000001\\\",\\\"topic\\\":\\\"default\\\","
        "\\\"role\\\":\\\"mixed\\\",\\\"trust\\\":[\\\"low\\\"]}\","
        "\"proof\":\"0123456789abcdef0123456789abcdef\"";
    struct buf body = { 0 };
    struct rig r;
    rig_open(&r, STR(""));
    buf_printf(&body, "{\"record\":{%s,\"n_running\":3}}", identity);
    CHECK_EQ_INT(call(&r, "POST", "/cluster/v1/publish", NULL, buf_str(&body)).http_status, 200);
    struct answer a = call(&r, "POST", "/cluster/v1/snapshot", NULL,
                           STR("{\"topic\":\"default\"}"));
    CHECK_EQ_INT(a.http_status, 200);
    CHECK(strstr(a.body, identity));
    buf_release(&body);
    rig_close(&r);
}

/* Entry nodes of earlier versions know another query, and none: their choice stays. */
TEST(placements_of_every_version_are_counted)
{
    static const struct {
        const char *prefix;
        bool is_answered;
        int want;
    } placements[] = {
        { "", false, 200 },
        { ",\"prefix\":{\"rungs\":\"\",\"compute\":\"0000000000000001100000000000100000\"}", false,
          200 },
        { ",\"by_prefix\":{}", true, 200 },
        { ",\"by_prefix\":{\"ns\":20000,\"uses\":\"00000000000000031\",\"avoid\":\"\"}", true,
          200 },
        { ",\"by_prefix\":[]", false, 400 },
        { ",\"by_prefix\":{\"ns\":16777216}", false, 400 },
        { ",\"by_prefix\":{\"ns\":-1}", false, 400 },
        { ",\"by_prefix\":{\"uses\":\"0000000000000003\"}", false, 400 },
        { ",\"by_prefix\":{\"avoid\":\"x\"}", false, 400 },
    };
    struct rig r;
    rig_open(&r, STR(""));
    CHECK_EQ_INT(call(&r, "POST", "/cluster/v1/publish", NULL,
                      STR("{\"record\":{\"identity\":\"{\\\"node\\\":\\\"0000000000000001\\\","
                          "\\\"topic\\\":\\\"default\\\",\\\"role\\\":\\\"mixed\\\","
                          "\\\"max_seqs\\\":99,\\\"n_blocks\\\":9}\"}}"))
                     .http_status,
                 200);
    CHECK_EQ_INT(call(&r, "POST", "/cluster/v1/snapshot", NULL,
                      STR("{\"owner\":\"0000000000000009\",\"topic\":\"default\"}"))
                     .http_status,
                 200);
    for (size_t i = 0; i < COUNT_OF(placements); i++) {
        struct buf body = { 0 };
        buf_printf(&body,
                   "{\"owner\":\"0000000000000009\",\"id\":\"00000000000000%02zu\",\"decode\":"
                   "\"0000000000000001\",\"tokens\":70,\"ttl_ms\":9000%s}",
                   10 + i, placements[i].prefix);
        struct answer a = call(&r, "POST", "/cluster/v1/reserve", NULL, buf_str(&body));
        if (a.http_status != placements[i].want)
            test_fail(__FILE__, __LINE__, "%s: %d: %s", placements[i].prefix, a.http_status,
                      a.body);
        if (a.http_status == 200) CHECK(strstr(a.body, "\"status\":\"ok\""));
        CHECK((strstr(a.body, "\"placed\":") != NULL) == placements[i].is_answered);
        buf_release(&body);
    }
    rig_close(&r);
}

/* The longest report fits into a call; one tenant more is refused with the limit. */
TEST(reports_have_a_limit_of_tenants)
{
    static struct meter_use uses[METER_TENANTS_MAX];
    struct rig r;
    struct buf body = { 0 };
    rig_open(&r, STR(""));
    for (uint32_t i = 0; i < METER_TENANTS_MAX; i++)
        uses[i] = (struct meter_use){ UINT64_MAX - i, UINT32_MAX, UINT64_MAX,
                                      UINT64_MAX,     UINT32_MAX, UINT32_MAX };
    const struct meter_report report = { .entry = UINT64_MAX,
                                         .number = METER_NUMBER_END - 1,
                                         .uses = uses,
                                         .n_uses = METER_TENANTS_MAX };
    buf_add_c(&body, "{\"owner\":\"ffffffffffffffff\",\"fence\":\"ffffffffffffffff\",\"topic\":\"");
    for (int i = 1; i < NODE_NAME_MAX; i++) buf_add_char(&body, 'x');
    buf_add_c(&body, "\",");
    meter_report_write(&report, &body);
    CHECK(body.len + 1 < DIRECTORY_BODY_MAX);
    const size_t n = body.len;
    buf_add_char(&body, '}');
    CHECK_EQ_INT(call(&r, "POST", "/cluster/v1/meter", NULL, buf_str(&body)).http_status, 200);
    body.len = n - 1;
    buf_add_c(&body, ",[\"0000000000000005\",1,2,3,4,5]]}");
    struct answer a = call(&r, "POST", "/cluster/v1/meter", NULL, buf_str(&body));
    CHECK_EQ_INT(a.http_status, 400);
    CHECK(strstr(a.body, "uses must be an array of at most 256 tenants"));
    buf_release(&body);
    rig_close(&r);
}

TEST(a_server_that_stops_answers_those_that_still_call)
{
    struct rig r;
    bool stopped = false;
    rig_open(&r, STR(""));
    /* it leaves a kept connection, on which the next call goes */
    CHECK_EQ_INT(call(&r, "POST", "/cluster/v1/snapshot", NULL, STR("{}")).http_status, 200);
    directory_server_stop(r.server, on_stopped, &stopped);
    struct answer a = call(&r, "POST", "/cluster/v1/snapshot", NULL, STR("{}"));
    CHECK_EQ_INT(a.http_status, 503);
    CHECK(strstr(a.body, "shutting down"));
    for (uint64_t end = clock_ms() + 5000; !stopped && clock_ms() < end;) turn(&r);
    CHECK(stopped);
    http_client_free(r.client);
    directory_close(r.local);
    for (int i = 0; i < 10; i++) turn(&r);
    loop_free(r.loop);
}

TEST(long_bodies_are_refused)
{
    struct rig r;
    struct buf body = { 0 };
    rig_open(&r, STR(""));
    memset(buf_reserve(&body, DIRECTORY_BODY_MAX + 1), ' ', DIRECTORY_BODY_MAX + 1);
    body.len = DIRECTORY_BODY_MAX + 1;
    struct answer a = { 0 };
    CHECK_OK(http_client_request(r.client, "POST", "127.0.0.1", directory_server_port(r.server),
                                 "/cluster/v1/snapshot", NULL, buf_str(&body), 3000, on_answer,
                                 &a));
    for (uint64_t end = clock_ms() + 5000; !a.here && clock_ms() < end;) turn(&r);
    CHECK(a.here);
    CHECK(a.st != OK || a.http_status == 413); /* the connection may be cut before all was sent */
    buf_release(&body);
    rig_close(&r);
}

TEST(only_the_exact_proof_is_taken)
{
    struct rig r;
    char proof[DIRECTORY_PROOF_MAX], header[128];
    struct str body = STR("{\"topic\":\"default\"}"), secret = STR("k");
    const char *path = "/cluster/v1/snapshot";
    rig_open(&r, secret);
    CHECK_EQ_INT(call(&r, "POST", path, NULL, body).http_status, 401);
    CHECK_EQ_INT(call(&r, "POST", path, "Authorization: Baton \r\n", body).http_status, 401);
    CHECK_EQ_INT(call(&r, "POST", path, "Authorization: Bearer k\r\n", body).http_status, 401);
    directory_prove(secret, "POST", str_of(path), body, proof);
    snprintf(header, sizeof header, "Authorization: %s\r\n", proof);
    CHECK_EQ_INT(call(&r, "POST", path, header, body).http_status, 200);
    CHECK_EQ_INT(call(&r, "POST", path, header, STR("{\"topic\":\"default\"} ")).http_status, 401);
    CHECK_EQ_INT(call(&r, "POST", "/cluster/v1/leave", header, body).http_status, 401);
    snprintf(header, sizeof header, "Authorization: %.*s\r\n", (int)strlen(proof) - 1, proof);
    CHECK_EQ_INT(call(&r, "POST", path, header, body).http_status, 401);
    rig_close(&r);
}

/* What a router says of nodes that want to register and may not. */
TEST(who_is_not_let_in_is_known)
{
    struct rig r;
    struct served_view v = { 0 };
    struct err err = { 0 };
    bool stopped = false;
    const char *path = "/cluster/v1/publish", *who;
    rig_open(&r, STR(""));
    CHECK_OK(served_view_start(&v, r.loop, true, 1000, 0, STR("k"), &err));
    CHECK_EQ_INT(call_at(&r, v.port, "/cluster/v1/records", NULL).http_status, 401);
    CHECK(!directory_handler_stranger(v.handler)); /* another router's call */
    struct answer a = call_at(&r, v.port, path, NULL);
    CHECK(a.http_status == 401 && strstr(a.body, "the call proves none"));
    who = directory_handler_stranger(v.handler);
    CHECK(who && strstr(who, "on host 127.0.0.1") && strstr(who, "it has no cluster secret"));
    CHECK_EQ_INT(call_at(&r, v.port, path, "Authorization: Baton 00\r\n").http_status, 401);
    who = directory_handler_stranger(v.handler);
    CHECK(who && strstr(who, "another cluster secret") && strstr(who, "BATON_CLUSTER_SECRET"));
    served_view_stop(&v, on_stopped, &stopped);
    for (uint64_t end = clock_ms() + 5000; !stopped && clock_ms() < end;) turn(&r);
    CHECK(stopped);
    served_view_free(&v);
    rig_close(&r);
}

static struct answer call_port(struct rig *r, uint16_t port, const char *path, size_t n_body)
{
    struct answer a = { 0 };
    struct buf body = { 0 };
    memset(buf_reserve(&body, n_body), ' ', n_body);
    body.len = n_body;
    CHECK_OK(http_client_request(r->client, "POST", "127.0.0.1", port, path, NULL, buf_str(&body),
                                 3000, on_answer, &a));
    for (uint64_t end = clock_ms() + 5000; !a.here && clock_ms() < end;) turn(r);
    CHECK(a.here);
    buf_release(&body);
    return a;
}

/* The view on an API's port bounds bodies as its own port does, and the API takes longer ones. */
TEST(a_mounted_view_has_a_limit_of_its_own)
{
    struct rig r;
    struct served_view v = { 0 };
    struct err err = { 0 };
    bool stopped = false;
    rig_open(&r, STR(""));
    CHECK_OK(served_view_start(&v, r.loop, true, 1000, 0, STR(""), &err));
    struct answer a = call_port(&r, v.port, "/v1/anything", DIRECTORY_BODY_MAX + 1);
    CHECK_OK(a.st);
    CHECK_EQ_STR(a.body, "32769");
    a = call_port(&r, v.port, "/cluster/v1/snapshot", DIRECTORY_BODY_MAX + 1);
    CHECK(a.st != OK || a.http_status == 413); /* the connection may be cut before all was sent */
    a = call_port(&r, v.port, "/cluster/v1/snapshot", DIRECTORY_BODY_MAX);
    CHECK_EQ_INT(a.http_status, 400); /* blanks are no JSON */
    CHECK_EQ_INT(call_port(&r, v.port, "/cluster/v1/nothing", 2).http_status, 404);
    served_view_stop(&v, on_stopped, &stopped);
    for (uint64_t end = clock_ms() + 5000; !stopped && clock_ms() < end;) turn(&r);
    CHECK(stopped);
    served_view_free(&v);
    rig_close(&r);
}

/* Without a secret the host of the caller is all there is to go by. */
TEST(without_a_secret_a_proxy_is_no_caller)
{
    static const char *const HEADERS[] = { "Forwarded: for=10.0.0.1\r\n",
                                           "X-Forwarded-For: 10.0.0.1\r\n", "Via: 1.1 x\r\n" };
    struct rig r;
    struct str body = STR("{\"topic\":\"default\"}");
    rig_open(&r, STR(""));
    CHECK_EQ_INT(call(&r, "POST", "/cluster/v1/snapshot", NULL, body).http_status, 200);
    for (size_t i = 0; i < COUNT_OF(HEADERS); i++) {
        struct answer a = call(&r, "POST", "/cluster/v1/snapshot", HEADERS[i], body);
        CHECK_EQ_INT(a.http_status, 401);
        CHECK(strstr(a.body, "BATON_CLUSTER_SECRET"));
    }
    rig_close(&r);
}

TEST_MAIN(CASE(malformed_calls_are_answered), CASE(every_refused_host_is_logged),
          CASE(a_record_of_an_earlier_version_is_logged_once),
          CASE(an_identity_is_served_byte_by_byte), CASE(placements_of_every_version_are_counted),
          CASE(reports_have_a_limit_of_tenants),
          CASE(a_server_that_stops_answers_those_that_still_call), CASE(long_bodies_are_refused),
          CASE(only_the_exact_proof_is_taken), CASE(who_is_not_let_in_is_known),
          CASE(a_mounted_view_has_a_limit_of_its_own), CASE(without_a_secret_a_proxy_is_no_caller))
