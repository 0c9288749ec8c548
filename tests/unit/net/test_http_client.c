/* test_http_client.c - the client against the product's server, and against a scripted peer that
 * misbehaves. */
#include "shared/net/http/http_client.h"

#include <stdatomic.h>
#include <stdio.h>

#include "shared/base/mem.h"
#include "shared/net/http/http_server.h"
#include "tests/unit/net/net_fixture.h"

/* One request, started on the loop; the test's thread waits for it. */
struct ask {
    struct rig *rig;
    const char *method, *host, *path, *headers;
    struct str body;
    uint32_t timeout_ms;
    uint16_t port;
    enum status begun, st;
    int http_status, n_calls;
    struct buf answer;
    sem_t done;
};

struct rig {
    struct loop *loop;
    pthread_t thread;
    struct http_client *client;
    struct http_server *server;
    uint16_t port;
    atomic_int n_handled;
    char peers[64][64];
};

static void handle(void *arg, struct http_exchange *x)
{
    struct rig *g = arg;
    struct str path = http_path(x), id = http_header(x, "x-id"), body = http_body(x);
    struct buf b = { 0 };
    int n = atomic_fetch_add(&g->n_handled, 1);
    if (n < 64) snprintf(g->peers[n], sizeof g->peers[n], "%s", http_peer(x));
    if (str_eq_c(path, "/hang")) return;
    if (str_eq_c(path, "/stream")) {
        http_stream_begin(x, 200, "text/plain", NULL);
        for (int i = 0; i < 3; i++) CHECK_OK(http_stream_write(x, STR("part ")));
        http_stream_end(x);
        return;
    }
    buf_printf(&b, "%s %.*s %.*s %.*s", http_method(x), STR_ARG(path), STR_ARG(id), STR_ARG(body));
    http_reply(x, str_eq_c(path, "/missing") ? 404 : 200, "text/plain",
               str_eq_c(path, "/close") ? "X: y\r\n" : NULL, buf_str(&b));
    buf_release(&b);
}

static void rig_make(void *arg)
{
    struct rig *g = arg;
    struct http_client_options co = { .loop = g->loop, .body_max = 1000, .n_idle = 4 };
    struct http_server_options so = {
        .loop = g->loop, .host = "127.0.0.1", .handler = handle, .arg = g
    };
    g->client = http_client_create(&co);
    CHECK_OK(http_server_start(&so, &g->server, NULL));
    g->port = http_server_port(g->server);
}

static void rig_unmake(void *arg)
{
    struct rig *g = arg;
    http_client_free(g->client);
    http_server_stop(g->server, 0, NULL, NULL);
}

static void rig_nothing(void *arg) { (void)arg; }

static struct rig *rig_open(void)
{
    struct rig *g = MEM_NEW(struct rig);
    g->thread = fixture_start(&g->loop);
    fixture_on_loop(g->loop, rig_make, g);
    return g;
}

static void rig_close(struct rig *g)
{
    fixture_on_loop(g->loop, rig_unmake, g);
    usleep(50000);
    fixture_on_loop(g->loop, rig_nothing, g);
    fixture_stop(g->loop, g->thread);
    mem_free(g);
}

static void ask_on_answer(void *arg, enum status st, int http_status, struct str body)
{
    struct ask *a = arg;
    a->st = st;
    a->http_status = http_status;
    a->n_calls++;
    if (body.n > 0) buf_add_str(&a->answer, body);
    sem_post(&a->done);
}

static void ask_begin(void *arg)
{
    struct ask *a = arg;
    a->begun = http_client_request(a->rig->client, a->method, a->host, a->port, a->path, a->headers,
                                   a->body, a->timeout_ms, ask_on_answer, a);
}

static void ask_start(struct rig *g, struct ask *a)
{
    a->rig = g;
    if (!a->method) a->method = "GET";
    if (!a->host) a->host = "127.0.0.1";
    if (!a->port) a->port = g->port;
    if (!a->timeout_ms) a->timeout_ms = 5000;
    sem_init(&a->done, 0, 0);
    fixture_on_loop(g->loop, ask_begin, a);
}

static void ask_wait(struct rig *g, struct ask *a)
{
    ask_start(g, a);
    CHECK_OK(a->begun);
    while (sem_wait(&a->done) != 0) {}
    CHECK_EQ_INT(a->n_calls, 1);
}

TEST(http_client_asks_and_reuses_its_connection)
{
    struct rig *g = rig_open();
    for (int i = 0; i < 3; i++) {
        struct ask a = {
            .method = "POST", .path = "/p", .headers = "X-Id: 7\r\n", .body = STR("hello")
        };
        ask_wait(g, &a);
        CHECK_OK(a.st);
        CHECK_EQ_INT(a.http_status, 200);
        CHECK_EQ_STR(a.answer.data, "POST /p 7 hello");
        buf_release(&a.answer);
    }
    struct ask missing = { .path = "/missing" }, stream = { .path = "/stream" },
               head = { .method = "HEAD", .path = "/h" },
               named = { .path = "/n", .host = "localhost" };
    ask_wait(g, &missing);
    CHECK_OK(missing.st);
    CHECK_EQ_INT(missing.http_status, 404);
    ask_wait(g, &stream);
    CHECK_EQ_STR(stream.answer.data, "part part part ");
    ask_wait(g, &head);
    CHECK_OK(head.st);
    CHECK_EQ_INT(head.answer.len, 0);
    for (int i = 1; i < 6; i++) CHECK_EQ_STR(g->peers[i], g->peers[0]);
    buf_release(&missing.answer);
    buf_release(&stream.answer);
    ask_wait(g, &named);
    CHECK(named.st == OK || named.st == ERR_PEER_LOST); /* where localhost is ::1 first */
    buf_release(&named.answer);
    rig_close(g);
}

TEST(http_client_refuses_unsafe_requests)
{
    struct rig *g = rig_open();
    struct ask bad[] = { { .path = "/a b" },
                         { .path = "/a\r\nX: y" },
                         { .path = "a" },
                         { .path = "/", .headers = "X: y" },
                         { .path = "/", .headers = "X: y\r\n\r\nGET" },
                         { .path = "/", .method = "GET /x" },
                         { .path = "/", .host = "a\r\nb" } };
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        ask_start(g, &bad[i]);
        CHECK_STATUS(bad[i].begun, ERR_INVALID);
        CHECK_EQ_INT(bad[i].n_calls, 0);
    }
    rig_close(g);
}

TEST(http_client_reports_silence_refusal_and_unknown_names)
{
    struct rig *g = rig_open();
    uint16_t port;
    int fd = fixture_listen(&port);
    struct ask hang = { .path = "/hang", .timeout_ms = 100 }, dead = { .path = "/" },
               silent = { .path = "/", .port = port, .timeout_ms = 100 };
    ask_wait(g, &hang);
    CHECK_STATUS(hang.st, ERR_TIMEOUT);
    ask_wait(g, &silent);
    CHECK_STATUS(silent.st, ERR_TIMEOUT);
    close(fd);
    dead.port = port;
    ask_wait(g, &dead);
    CHECK_STATUS(dead.st, ERR_PEER_LOST);
    struct ask unknown = { .path = "/", .host = "no-such-host.invalid", .timeout_ms = 20000 };
    ask_wait(g, &unknown);
    CHECK(unknown.st == ERR_PEER_LOST || unknown.st == ERR_TIMEOUT);
    rig_close(g);
}

/* A peer that answers one request on one connection with `bytes` and closes. */
struct scripted {
    int fd;
    const char *bytes;
    int n_accepts;
};

static void *scripted_run(void *arg)
{
    struct scripted *p = arg;
    for (int i = 0; i < p->n_accepts; i++) {
        struct buf b = { 0 };
        int fd = accept(p->fd, NULL, NULL);
        fixture_read_until(fd, &b, 0, "\r\n\r\n");
        fixture_send(fd, p->bytes, strlen(p->bytes));
        shutdown(fd, SHUT_WR);
        fixture_read(fd, &b, SIZE_MAX, 500);
        close(fd);
        buf_release(&b);
    }
    return NULL;
}

static void check_scripted(struct rig *g, const char *bytes, enum status want, const char *body)
{
    struct ask a = { .path = "/" };
    struct scripted p = { .bytes = bytes, .n_accepts = 1 };
    pthread_t t;
    p.fd = fixture_listen(&a.port);
    CHECK_OK(thread_start(&t, scripted_run, &p));
    ask_wait(g, &a);
    if (a.st != want) test_fail(__FILE__, __LINE__, "\"%.60s\" gave %s", bytes, status_name(a.st));
    if (body) CHECK_EQ_STR(a.answer.data, body);
    pthread_join(t, NULL);
    close(p.fd);
    buf_release(&a.answer);
}

TEST(http_client_reads_every_kind_of_answer)
{
    struct rig *g = rig_open();
    struct buf b = { 0 };
    check_scripted(g, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", OK, "hi");
    check_scripted(g, "HTTP/1.1 200 OK\r\n\r\nuntil the end", OK, "until the end");
    check_scripted(g, "HTTP/1.0 200 OK\r\n\r\nuntil the end", OK, "until the end");
    check_scripted(g, "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
                   OK, "hi");
    check_scripted(g, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
                   OK, "hi");
    check_scripted(g, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi and more", OK, "hi");
    check_scripted(g, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhi", ERR_PEER_LOST, NULL);
    check_scripted(g, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n",
                   ERR_PEER_LOST, NULL);
    check_scripted(g, "", ERR_PEER_LOST, NULL);
    check_scripted(g, "SSH-2.0-x\r\n", ERR_IO, NULL);
    check_scripted(g, "HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", ERR_IO,
                   NULL);
    check_scripted(g, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nhi", ERR_IO,
                   NULL);
    buf_add_c(&b, "HTTP/1.1 200 OK\r\n\r\n");
    for (int i = 0; i < 1001; i++) buf_add_char(&b, 'x');
    check_scripted(g, b.data, ERR_TOO_LONG, NULL);
    buf_clear(&b);
    buf_add_c(&b, "HTTP/1.1 200 OK\r\nX: ");
    for (int i = 0; i < 200000; i++) buf_add_char(&b, 'x');
    check_scripted(g, b.data, ERR_TOO_LONG, NULL);
    buf_release(&b);
    rig_close(g);
}

static void free_client(void *arg)
{
    struct rig *g = arg;
    http_client_free(g->client);
    g->client = NULL;
}

TEST(http_client_cancels_what_is_pending_when_freed)
{
    struct rig *g = rig_open();
    struct ask a[5] = { { .path = "/hang" },
                        { .path = "/hang" },
                        { .path = "/hang" },
                        { .path = "/", .host = "no-such-host.invalid" },
                        { .path = "/hang" } };
    for (int i = 0; i < 5; i++) {
        ask_start(g, &a[i]);
        CHECK_OK(a[i].begun);
    }
    fixture_on_loop(g->loop, free_client, g);
    for (int i = 0; i < 5; i++) {
        CHECK_EQ_INT(a[i].n_calls, 1);
        /* A fast resolver may have refused the name already. */
        if (a[i].host && a[i].st == ERR_PEER_LOST) continue;
        CHECK_STATUS(a[i].st, ERR_CANCELED);
    }
    rig_close(g);
}

TEST_MAIN(CASE(http_client_asks_and_reuses_its_connection),
          CASE(http_client_refuses_unsafe_requests),
          CASE_T(http_client_reports_silence_refusal_and_unknown_names, 90),
          CASE(http_client_reads_every_kind_of_answer),
          CASE(http_client_cancels_what_is_pending_when_freed))
