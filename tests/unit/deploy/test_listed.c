/* test_listed.c - nodes that a router lists: their records come into its view and leave it, over
 * real sockets; and the bodies by which they are added over HTTP. */
#include "deploy/router/listed.h"

#include <stdio.h>
#include <string.h>

#include "deploy/router/instances.h"
#include "scheduler/directory/handler.h"
#include "scheduler/directory/local.h"
#include "scheduler/directory/wire.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "tests/fixtures/loop_turns.h"
#include "tests/harness/test.h"

enum { POLL_MS = 50, LEASE_MS = 400, WAIT_MS = 8000 };

/* A node: a port that gives a record, or says something else. */
struct fake {
    struct http_server *http;
    uint64_t node, second; /* second 0: none */
    const char *secret, *topic, *host;
    enum node_role role;
    int status;   /* 0: the record */
    bool babbles; /* it says much that is no record */
    int n_asked;
    bool others; /* it was told so, when it was asked last */
};

struct rig {
    struct loop *loop;
    struct directory *local;
    struct metrics *metrics;
    struct listed *listed;
    struct fake fakes[3];
    int n_stopped;
};

static void turn(struct rig *r) { loop_turn(r->loop); }

#define WAIT_FOR(r, cond) LOOP_WAIT((r)->loop, cond, WAIT_MS)

static void on_request(void *arg, struct http_exchange *x)
{
    struct fake *f = arg;
    struct buf body = { 0 };
    struct err err = { 0 };
    struct node_record me = {
        .node = f->node,
        .role = f->role,
        .cluster_port = 1,
        .http_port = 2,
        .max_seqs = 4,
    };
    f->n_asked++;
    f->others = str_eq_c(http_header(x, LISTED_OTHERS_HEADER), "1");
    CHECK(str_eq_c(http_path(x), "/cluster/v1/records"));
    CHECK_OK(directory_check_caller(str_of(f->secret), x, &err));
    snprintf(me.topic, sizeof me.topic, "%s", f->topic);
    snprintf(me.host, sizeof me.host, "%s", f->host);
    node_record_prove(&me, str_of(f->secret));
    buf_add_c(&body, "{\"records\":[");
    node_record_write(&me, &body);
    if (f->second) { /* behind the same port */
        me.node = f->second;
        node_record_prove(&me, str_of(f->secret));
        buf_add_char(&body, ',');
        node_record_write(&me, &body);
    }
    for (int i = 0; f->babbles && i < 100000; i++) buf_add_c(&body, ",0");
    buf_add_c(&body, "]}");
    if (f->status) http_reply(x, f->status, "application/json", NULL, STR("{\"error\":\"no\"}"));
    else http_reply(x, 200, "application/json", NULL, buf_str(&body));
    buf_release(&body);
}

static void rig_open(struct rig *r, const char *secret)
{
    struct err err = { 0 };
    *r = (struct rig){ 0 };
    CHECK_OK(loop_create(&r->loop, NULL));
    r->metrics = metrics_create();
    const struct directory_options d = { .loop = r->loop, .topic = "t", .lease_ms = LEASE_MS };
    CHECK_OK(directory_open("local", &d, &r->local, &err));
    const struct listed_options l = {
        .loop = r->loop,
        .directory = r->local,
        .secret = str_of(secret),
        .topic = "t",
        .metrics = r->metrics,
        .poll_ms = POLL_MS,
    };
    r->listed = listed_create(&l);
    for (size_t i = 0; i < COUNT_OF(r->fakes); i++) {
        struct fake *f = &r->fakes[i];
        *f = (struct fake){ .node = 100 + i,
                            .secret = secret,
                            .topic = "t",
                            .host = "127.0.0.1",
                            .role = i == 0 ? ROLE_PREFILL : ROLE_DECODE };
        const struct http_server_options o = { .loop = r->loop,
                                               .host = "127.0.0.1",
                                               .limits = HTTP_LIMITS_DEFAULT,
                                               .handler = on_request,
                                               .arg = f };
        CHECK_OK(http_server_start(&o, &f->http, &err));
    }
}

static void on_stopped(void *arg) { ++*(int *)arg; }

static void rig_close(struct rig *r)
{
    int want = 0;
    listed_free(r->listed);
    for (size_t i = 0; i < COUNT_OF(r->fakes); i++) {
        want++;
        http_server_stop(r->fakes[i].http, 0, on_stopped, &r->n_stopped);
    }
    WAIT_FOR(r, r->n_stopped == want);
    directory_close(r->local);
    for (int i = 0; i < 5; i++) turn(r);
    loop_free(r->loop);
    metrics_free(r->metrics);
}

static struct node_at at(const struct rig *r, size_t i)
{
    struct node_at a = { .role = r->fakes[i].role, .host = "127.0.0.1" };
    a.port = http_server_port(r->fakes[i].http);
    return a;
}

static void add(struct rig *r, size_t i)
{
    struct err err = { 0 };
    const struct node_at a = at(r, i);
    CHECK_OK(listed_add(r->listed, &a, &err));
    CHECK_OK(listed_add(r->listed, &a, &err)); /* twice is once */
}

/* Ids of the view's nodes, added. */
static uint64_t view_sum(struct rig *r)
{
    char topics[512];
    size_t n;
    uint64_t sum = 0;
    struct node_record *nodes = directory_local_view(r->local, "t", &n, topics);
    for (size_t i = 0; i < n; i++) sum += nodes[i].node;
    mem_free(nodes);
    return sum;
}

static bool lists(const struct rig *r, const char *part)
{
    struct buf text = { 0 };
    listed_write(r->listed, &text);
    const bool found = strstr(text.data, part) != NULL;
    buf_release(&text);
    return found;
}

TEST(records_come_and_go)
{
    struct rig r;
    rig_open(&r, "s3cret");
    for (size_t i = 0; i < 3; i++) add(&r, i);
    WAIT_FOR(&r, view_sum(&r) == 303);
    CHECK(!listed_why_down(r.listed));
    /* three leases later it is still there */
    for (uint64_t end = clock_ms() + 3 * LEASE_MS; clock_ms() < end;) turn(&r);
    CHECK_EQ_INT(view_sum(&r), 303);
    const struct node_at second = at(&r, 1);
    CHECK(listed_remove(r.listed, &second));
    CHECK(!listed_remove(r.listed, &second));
    CHECK_EQ_INT(view_sum(&r), 202);
    for (int i = 0; i < 50; i++) turn(&r); /* an answer on its way does not bring it back */
    CHECK_EQ_INT(view_sum(&r), 202);
    rig_close(&r);
}

TEST(a_node_that_does_not_answer_leaves_with_its_lease)
{
    struct rig r;
    rig_open(&r, "");
    add(&r, 0);
    add(&r, 1);
    WAIT_FOR(&r, view_sum(&r) == 201);
    r.fakes[1].status = 503;
    WAIT_FOR(&r, listed_why_down(r.listed));
    CHECK(strstr(listed_why_down(r.listed), "the listed decode node 127.0.0.1:"));
    CHECK(strstr(listed_why_down(r.listed), "cannot be used: no (status 503)"));
    WAIT_FOR(&r, view_sum(&r) == 100);
    CHECK(lists(&r, "\"state\":\"down\",\"why\":\"no (status 503)\""));
    r.fakes[1].status = 0;
    WAIT_FOR(&r, view_sum(&r) == 201);
    CHECK(!listed_why_down(r.listed));
    rig_close(&r);
}

TEST(a_node_is_told_whether_another_one_decodes)
{
    struct rig r;
    rig_open(&r, "s3cret");
    add(&r, 0);
    add(&r, 1);
    WAIT_FOR(&r, r.fakes[0].others); /* a prefill node: the second decodes */
    WAIT_FOR(&r, r.fakes[1].n_asked > 5);
    CHECK(!r.fakes[1].others);
    add(&r, 2);
    WAIT_FOR(&r, r.fakes[1].others && r.fakes[2].others);
    const struct node_at last = at(&r, 2);
    CHECK(listed_remove(r.listed, &last));
    WAIT_FOR(&r, !r.fakes[1].others);
    rig_close(&r);
}

/* The process of its past is not in the view for a lease more. */
TEST(a_node_that_started_again_replaces_itself)
{
    struct rig r;
    rig_open(&r, "");
    add(&r, 0);
    WAIT_FOR(&r, view_sum(&r) == 100);
    r.fakes[0].node = 900;
    uint64_t sum = 100;
    WAIT_FOR(&r, (sum = view_sum(&r)) != 100);
    CHECK_EQ_INT(sum, 900);
    rig_close(&r);
}

TEST(a_port_may_have_several_nodes_behind_it)
{
    struct rig r;
    rig_open(&r, "s3cret");
    r.fakes[0].second = 50;
    add(&r, 0);
    WAIT_FOR(&r, view_sum(&r) == 150);
    r.fakes[0].second = 70;
    WAIT_FOR(&r, view_sum(&r) == 170); /* the one that is not told of any more leaves at once */
    const struct node_at a = at(&r, 0);
    CHECK(listed_remove(r.listed, &a));
    CHECK_EQ_INT(view_sum(&r), 0);
    rig_close(&r);
}

TEST(records_that_cannot_be_used_say_why)
{
    struct rig r;
    rig_open(&r, "");
    add(&r, 0);
    r.fakes[0].host = "10.0.0.9";
    WAIT_FOR(&r, listed_why_down(r.listed));
    CHECK(strstr(listed_why_down(r.listed), "without a cluster secret"));
    r.fakes[0].host = "127.0.0.1";
    r.fakes[0].topic = "u";
    WAIT_FOR(&r, lists(&r, "it is in topic u and this router in topic t"));
    /* Whoever may list nodes may name anybody: what is said there is read in bounded time. */
    r.fakes[0].babbles = true;
    WAIT_FOR(&r, lists(&r, "it has more than 16384 JSON values"));
    CHECK_EQ_INT(view_sum(&r), 0);
    rig_close(&r);
}

static void on_asked(void *arg, const char *why) { snprintf(arg, 200, "%s", why ? why : "up"); }

TEST(who_waits_is_told_once)
{
    struct rig r;
    char first[200] = "", second[200] = "";
    struct err err = { 0 };
    struct node_at gone = { .role = ROLE_MIXED, .host = "127.0.0.1", .port = 1 };
    rig_open(&r, "");
    add(&r, 0);
    const struct node_at here = at(&r, 0);
    listed_when_asked(r.listed, &here, on_asked, first);
    CHECK_OK(listed_add(r.listed, &gone, &err));
    listed_when_asked(r.listed, &gone, on_asked, second);
    CHECK(!first[0] && !second[0]);
    WAIT_FOR(&r, first[0] && second[0]);
    CHECK_EQ_STR(first, "up");
    CHECK(strstr(second, "it does not answer"));
    second[0] = 0;
    listed_when_asked(r.listed, &gone, on_asked, second);
    listed_forget(r.listed, second);
    for (int i = 0; i < 50; i++) turn(&r);
    CHECK(!second[0]);
    /* removed while it is asked */
    listed_when_asked(r.listed, &gone, on_asked, second);
    CHECK(listed_remove(r.listed, &gone));
    WAIT_FOR(&r, second[0]);
    CHECK(!listed_has(r.listed, &gone));
    rig_close(&r);
}

TEST(the_list_is_bounded)
{
    struct rig r;
    struct err err = { 0 };
    rig_open(&r, "");
    struct node_at a = { .role = ROLE_DECODE, .host = "127.0.0.1" };
    for (int i = 0; i < LISTED_MAX; i++) {
        a.port = (uint16_t)(i + 1);
        CHECK_OK(listed_add(r.listed, &a, &err));
    }
    a.port = 60000;
    CHECK_STATUS(listed_add(r.listed, &a, &err), ERR_FULL);
    a.port = 7;
    CHECK(listed_remove(r.listed, &a));
    a.port = 60000;
    CHECK_OK(listed_add(r.listed, &a, &err));
    rig_close(&r);
}

/* ---- bodies ---- */

TEST(bodies_of_vllms_proxy)
{
    struct instances_change *c = MEM_NEW(struct instances_change);
    struct err err = { 0 };
    CHECK_OK(instances_read_change(
        STR("{\"type\":\"prefill\",\"instances\":[\"10.0.0.1:1\",\"h:2\"]}"), c, &err));
    CHECK(c->n == 2 && c->nodes[1].role == ROLE_PREFILL && c->nodes[1].port == 2);
    CHECK_OK(instances_read_change(STR("{\"type\":\"decode\",\"instances\":\"h:2\"}"), c, &err));
    CHECK(c->n == 1 && c->nodes[0].role == ROLE_DECODE);
    static const char *const WRONG[] = {
        "",
        "[]",
        "{}",
        "{\"type\":\"mixed\",\"instances\":\"h:2\"}",
        "{\"type\":\"decode\"}",
        "{\"type\":\"decode\",\"instances\":[]}",
        "{\"type\":\"decode\",\"instances\":[1]}",
        "{\"type\":\"decode\",\"instances\":{\"a\":\"h:2\"}}",
        "{\"type\":\"decode\",\"instances\":\"h\"}",
        "{\"type\":1,\"instances\":\"h:2\"}",
    };
    for (size_t i = 0; i < COUNT_OF(WRONG); i++) {
        err = (struct err){ 0 };
        CHECK(instances_read_change(str_of(WRONG[i]), c, &err) != OK && err.text[0]);
    }
    struct buf many = { 0 };
    buf_add_c(&many, "{\"type\":\"decode\",\"instances\":[\"h:2\"");
    for (int i = 0; i < INSTANCES_MAX; i++) buf_add_c(&many, ",\"h:2\"");
    buf_add_c(&many, "]}");
    CHECK_STATUS(instances_read_change(buf_str(&many), c, &err), ERR_INVALID);
    buf_release(&many);
    mem_free(c);
}

TEST(bodies_of_fastdeploys_servers)
{
    struct node_at a;
    struct err err = { 0 };
    CHECK_OK(instances_read_register(
        STR("{\"role\":\"PREFILL\",\"host_ip\":\"10.0.0.1\",\"port\":\"8000\",\"tp_size\":1}"), &a,
        &err));
    CHECK(a.role == ROLE_PREFILL && a.port == 8000);
    CHECK_OK(instances_read_register(STR("{\"role\":\"mixed\",\"host_ip\":\"::1\",\"port\":8000}"),
                                     &a, &err));
    CHECK_EQ_STR(a.host, "::1");
    static const char *const WRONG[] = {
        "",
        "{}",
        "{\"role\":\"mixed\"}",
        "{\"role\":\"mixed\",\"host_ip\":\"h\"}",
        "{\"role\":\"mixed\",\"host_ip\":\"h\",\"port\":\"x\"}",
        "{\"role\":\"mixed\",\"host_ip\":\"h\",\"port\":\"70000\"}",
        "{\"role\":\"mixed\",\"host_ip\":\"\",\"port\":1}",
        "{\"role\":\"mixed\",\"host_ip\":\"a b\",\"port\":1}",
        "{\"role\":\"other\",\"host_ip\":\"h\",\"port\":1}",
    };
    for (size_t i = 0; i < COUNT_OF(WRONG); i++) {
        err = (struct err){ 0 };
        CHECK(instances_read_register(str_of(WRONG[i]), &a, &err) != OK && err.text[0]);
    }
}

/* They are read on the loop, and who sends them has the limit of the API's bodies. */
TEST(long_bodies_are_not_read)
{
    struct instances_change *c = MEM_NEW(struct instances_change);
    struct node_at a;
    struct err err = { 0 };
    struct buf body = { 0 };
    buf_add_c(&body, "{\"type\":\"decode\",\"instances\":\"h:2\",\"role\":\"mixed\","
                     "\"host_ip\":\"h\",\"port\":1,\"more\":[0");
    for (int i = 0; i < 2000; i++) buf_add_c(&body, ",0");
    buf_add_c(&body, "]}");
    CHECK_STATUS(instances_read_change(buf_str(&body), c, &err), ERR_INVALID);
    CHECK_STATUS(instances_read_register(buf_str(&body), &a, &err), ERR_INVALID);
    CHECK(strstr(err.text, "more than 1024 JSON values"));
    while (body.len <= INSTANCES_BODY_MAX) buf_add_char(&body, ' ');
    CHECK_STATUS(instances_read_change(buf_str(&body), c, &err), ERR_TOO_LONG);
    CHECK_STATUS(instances_read_register(buf_str(&body), &a, &err), ERR_TOO_LONG);
    buf_release(&body);
    mem_free(c);
}

TEST_MAIN(CASE(records_come_and_go), CASE(a_node_is_told_whether_another_one_decodes),
          CASE(a_node_that_does_not_answer_leaves_with_its_lease),
          CASE(a_node_that_started_again_replaces_itself),
          CASE(a_port_may_have_several_nodes_behind_it), CASE(records_that_cannot_be_used_say_why),
          CASE(who_waits_is_told_once), CASE(the_list_is_bounded), CASE(bodies_of_vllms_proxy),
          CASE(bodies_of_fastdeploys_servers), CASE(long_bodies_are_not_read))
