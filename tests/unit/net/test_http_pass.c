/* test_http_pass.c - a front server that passes what it gets to another node: scripted sockets that
 * answer, refuse, die, or are left. */
#include "shared/net/http/http_pass.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "shared/base/mem.h"
#include "shared/net/http/http_answer.h"
#include "tests/unit/net/net_fixture.h"

enum { TARGETS_MAX = 2 };

/* Passes each request to its targets in turn; answers 503 itself when none takes it. */
struct front {
    struct loop *loop;
    pthread_t thread;
    struct http_server *server;
    uint16_t port, targets[TARGETS_MAX];
    const char *host;
    int n_targets, i_target;
    uint32_t answer_ms, waited_ms;
    struct http_exchange *x;
    struct http_pass *pass;
    atomic_int n_done, n_gone, last_end, last_status;
};

static void front_pass(struct front *f);

static void front_on_done(void *arg, enum http_pass_end end, int status)
{
    struct front *f = arg;
    f->pass = NULL;
    atomic_store(&f->last_end, (int)end);
    atomic_store(&f->last_status, status);
    atomic_fetch_add(&f->n_done, 1);
    if (end == PASS_NOT_TAKEN || end == PASS_REFUSED || end == PASS_FULL) front_pass(f);
}

static void front_pass(struct front *f)
{
    while (f->i_target < f->n_targets) {
        struct http_pass_options o = {
            .loop = f->loop,
            .x = f->x,
            .host = f->host ? f->host : "127.0.0.1",
            .port = f->targets[f->i_target++],
            .path = "/v1/completions",
            .t_start_ns = clock_ns() - (uint64_t)f->waited_ms * 1000000,
            .from = "front:1",
            .broken_event = STR("{\"error\":\"gone\"}"),
            .broken_line = STR("{\"error_msg\":\"gone\"}"),
            .connect_ms = 2000,
            .answer_ms = f->answer_ms ? f->answer_ms : 20000,
            .done = front_on_done,
            .arg = f,
        };
        if (http_pass_start(&o, &f->pass) == OK) return;
    }
    http_reply(f->x, 503, "text/plain", NULL, STR("own answer"));
}

static void front_on_end(void *arg, bool gone)
{
    struct front *f = arg;
    if (gone) atomic_fetch_add(&f->n_gone, 1);
    if (f->pass) http_pass_cancel(f->pass);
    f->pass = NULL;
}

static void front_handle(void *arg, struct http_exchange *x)
{
    struct front *f = arg;
    f->x = x;
    f->i_target = 0;
    http_on_end(x, front_on_end, f);
    front_pass(f);
}

static void front_make(void *arg)
{
    struct front *f = arg;
    struct http_server_options o = {
        .loop = f->loop, .host = "127.0.0.1", .handler = front_handle, .arg = f
    };
    CHECK_OK(http_server_start(&o, &f->server, NULL));
    f->port = http_server_port(f->server);
}

static void front_unmake(void *arg)
{
    struct front *f = arg;
    http_server_stop(f->server, 0, NULL, NULL);
}

static void front_nothing(void *arg) { (void)arg; }

static struct front *front_open(void)
{
    struct front *f = MEM_NEW(struct front);
    f->thread = fixture_start(&f->loop);
    fixture_on_loop(f->loop, front_make, f);
    return f;
}

static void front_close(struct front *f)
{
    fixture_on_loop(f->loop, front_unmake, f);
    usleep(50000);
    fixture_on_loop(f->loop, front_nothing, f);
    fixture_stop(f->loop, f->thread);
    mem_free(f);
}

static int front_listen(struct front *f) { return fixture_listen(&f->targets[f->n_targets++]); }

#define POST_HEAD                                                                                  \
    "POST /v1//completions?a=b HTTP/1.1\r\nHost: me\r\nX-Baton-Hedge-Ms: 30\r\n"                   \
    "Authorization: Bearer k\r\n"                                                                  \
    "X-Request-Id: r-1\r\nCookie: secret\r\nConnection: close\r\nContent-Type: application/json"   \
    "\r\n"

static int ask_with(const struct front *f, const char *headers, const char *body)
{
    struct buf b = { 0 };
    int fd = fixture_dial(f->port);
    buf_printf(&b, POST_HEAD "%sContent-Length: %zu\r\n\r\n%s", headers, strlen(body), body);
    CHECK(fixture_send(fd, b.data, b.len));
    buf_release(&b);
    return fd;
}

static int ask(const struct front *f, const char *body) { return ask_with(f, "", body); }

static void say(int fd, const char *text) { CHECK(fixture_send(fd, text, strlen(text))); }

/* Accepts the front's connection and reads the request up to its body's end. */
static int take(int listener, struct buf *request, const char *until)
{
    int fd = accept(listener, NULL, NULL);
    CHECK(fd >= 0);
    fixture_read_until(fd, request, 0, until);
    return fd;
}

/* Reads the answer to its end and checks that the connection was closed, not reset. */
static void read_all(int fd, struct buf *answer)
{
    CHECK(fixture_read(fd, answer, SIZE_MAX, 10000));
    close(fd);
}

static void wait_for(const atomic_int *n, int value)
{
    for (int i = 0; i < 5000 && atomic_load(n) != value; i++) usleep(1000);
    CHECK_EQ_INT(atomic_load(n), value);
}

TEST(http_pass_carries_what_the_api_needs_and_no_more)
{
    struct front *f = front_open();
    struct buf got = { 0 }, answer = { 0 };
    int listener = front_listen(f), client = ask(f, "{\"a\":1}"),
        peer = take(listener, &got, "{\"a\":1}");
    char host[64];
    snprintf(host, sizeof host, "\r\nHost: 127.0.0.1:%u\r\n", f->targets[0]);
    CHECK(strstr(got.data, "POST /v1/completions HTTP/1.1\r\n") == got.data);
    CHECK(strstr(got.data, host) && strstr(got.data, "\r\nauthorization: Bearer k\r\n"));
    CHECK(strstr(got.data, "\r\nx-request-id: r-1\r\n"));
    CHECK(strstr(got.data, "\r\nx-baton-hedge-ms: 30\r\n"));
    CHECK(strstr(got.data, "\r\nx-baton-passed: front:1\r\n"));
    CHECK(strstr(got.data, "\r\nContent-Length: 7\r\n") && !strstr(got.data, "secret"));
    say(peer, "HTTP/1.1 200 OK\r\nDate: long ago\r\nContent-Type: application/json\r\n"
              "x-request-id: r-1\r\nEmpty:\r\nConnection: close\r\nContent-Length: 4\r\n\r\ndone");
    read_all(client, &answer);
    CHECK(strstr(answer.data, "HTTP/1.1 200 OK\r\n") && !strstr(answer.data, "long ago"));
    CHECK(strstr(answer.data, "\r\nContent-Type: application/json\r\n"));
    CHECK(strstr(answer.data, "\r\nx-request-id: r-1\r\n") &&
          strstr(answer.data, "\r\nEmpty: \r\n"));
    CHECK(strstr(answer.data, "\r\nContent-Length: 4\r\n\r\ndone"));
    CHECK_EQ_INT(atomic_load(&f->last_end), PASS_ANSWERED);
    CHECK_EQ_INT(atomic_load(&f->last_status), 200);
    close(peer);
    close(listener);
    buf_release(&got);
    buf_release(&answer);
    front_close(f);
}

/* The number in this header of the request, 0 when it has none. */
static long number_of(const struct buf *request, const char *header)
{
    const char *at = strstr(request->data, header);
    return at ? strtol(at + strlen(header), NULL, 10) : 0;
}

TEST(http_pass_carries_when_an_answer_is_wanted_and_what_was_promised)
{
    static const char wants[] = "X-Baton-TTFT-ms: 60000\r\nX-Baton-Deadline-ms: 90000\r\n"
                                "X-Baton-Retry: 1a.2.3c\r\nX-Stainless-Retry-Count: 2\r\n";
    struct front *f = front_open();
    struct buf got = { 0 };
    f->waited_ms = 20000; /* here, before the request is passed */
    int listener = front_listen(f), client = ask_with(f, wants, "{}"),
        peer = take(listener, &got, "{}");
    const long ttft = number_of(&got, "\r\nx-baton-ttft-ms: "),
               deadline = number_of(&got, "\r\nx-baton-deadline-ms: ");
    CHECK(ttft > 30000 && ttft <= 40000);
    CHECK(deadline > 60000 && deadline <= 70000);
    CHECK(strstr(got.data, "\r\nx-baton-retry: 1a.2.3c\r\n"));
    CHECK(strstr(got.data, "\r\nx-stainless-retry-count: 2\r\n"));
    close(peer);
    close(client);
    wait_for(&f->n_done, 1);
    buf_clear(&got);
    f->waited_ms = 70000; /* too late, which the other node finds; and what is no time */
    client = ask_with(f, "x-baton-ttft-ms: 60000\r\nx-baton-deadline-ms: soon\r\n", "{}");
    peer = take(listener, &got, "{}");
    CHECK_EQ_INT(number_of(&got, "\r\nx-baton-ttft-ms: "), 1);
    CHECK(strstr(got.data, "\r\nx-baton-deadline-ms: soon\r\n"));
    close(peer);
    close(client);
    close(listener);
    buf_release(&got);
    front_close(f);
}

static const char EVENTS_HEAD[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; "
                                  "charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";

static void say_chunk(int fd, const char *text)
{
    char head[32];
    snprintf(head, sizeof head, "%zx\r\n", strlen(text));
    say(fd, head);
    say(fd, text);
    say(fd, "\r\n");
}

TEST(http_pass_streams_event_by_event)
{
    struct front *f = front_open();
    struct buf got = { 0 }, answer = { 0 };
    int listener = front_listen(f), client = ask(f, "{}"), peer = take(listener, &got, "{}");
    say(peer, EVENTS_HEAD);
    for (int i = 0; i < 5; i++) {
        char event[32];
        snprintf(event, sizeof event, "data: {\"i\":%d}\n\n", i);
        say_chunk(peer, event);
        fixture_read_until(client, &answer, 0, event); /* before the next one is sent */
    }
    say_chunk(peer, "data: half ");
    say_chunk(peer, "of it\n\ndata: [DO");
    say_chunk(peer, "NE]\n\n");
    say(peer, "0\r\n\r\n");
    read_all(client, &answer);
    CHECK(strstr(answer.data, "data: half of it\n\n") && strstr(answer.data, "data: [DONE]\n\n"));
    CHECK(strstr(answer.data, "\r\n0\r\n\r\n"));
    CHECK_EQ_INT(atomic_load(&f->last_end), PASS_ANSWERED);
    close(peer);
    close(listener);
    buf_release(&got);
    buf_release(&answer);
    front_close(f);
}

TEST(http_pass_ends_a_stream_whose_node_died_with_an_error_event)
{
    struct front *f = front_open();
    struct buf got = { 0 }, answer = { 0 };
    int listener = front_listen(f), client = ask(f, "{}"), peer = take(listener, &got, "{}");
    say(peer, EVENTS_HEAD);
    say_chunk(peer, "data: {\"i\":0}\n\ndata: {\"lost\"");
    fixture_read_until(client, &answer, 0, "{\"i\":0}\n\n");
    close(peer);
    read_all(client, &answer);
    CHECK(strstr(answer.data, "data: {\"error\":\"gone\"}\n\n"));
    CHECK(strstr(answer.data, "data: [DONE]\n\n") && strstr(answer.data, "\r\n0\r\n\r\n"));
    CHECK(!strstr(answer.data, "lost"));
    CHECK_EQ_INT(atomic_load(&f->last_end), PASS_BROKEN);
    close(listener);
    buf_release(&got);
    buf_release(&answer);
    front_close(f);
}

TEST(http_pass_streams_line_by_line_and_ends_with_a_line)
{
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                               "x-baton-stream: lines\r\nTransfer-Encoding: chunked\r\n\r\n";
    for (int whole = 0; whole < 2; whole++) {
        struct front *f = front_open();
        struct buf got = { 0 }, answer = { 0 };
        int listener = front_listen(f), client = ask(f, "{}"), peer = take(listener, &got, "{}");
        say(peer, head);
        say_chunk(peer, "{\"i\":0}\n{\"i\"");
        fixture_read_until(client, &answer, 0, "{\"i\":0}\n");
        if (whole) say_chunk(peer, ":1}\n");
        if (whole) say(peer, "0\r\n\r\n");
        close(peer);
        read_all(client, &answer);
        CHECK(strstr(answer.data, "\r\nx-baton-stream: lines\r\n"));
        CHECK((strstr(answer.data, "{\"i\":1}\n") != NULL) == whole);
        CHECK((strstr(answer.data, "{\"error_msg\":\"gone\"}\n") != NULL) == !whole);
        CHECK(strstr(answer.data, "\r\n0\r\n\r\n"));
        CHECK(!strstr(answer.data, "data:") && !strstr(answer.data, "DONE"));
        CHECK_EQ_INT(atomic_load(&f->last_end), whole ? PASS_ANSWERED : PASS_BROKEN);
        close(listener);
        buf_release(&got);
        buf_release(&answer);
        front_close(f);
    }
}

TEST(http_pass_cuts_half_an_answer_that_is_no_stream)
{
    struct front *f = front_open();
    struct buf got = { 0 }, answer = { 0 };
    int listener = front_listen(f), client = ask(f, "{}"), peer = take(listener, &got, "{}");
    say(peer, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
              "Transfer-Encoding: chunked\r\n\r\n");
    say_chunk(peer, "{\"half\"");
    fixture_read_until(client, &answer, 0, "{\"half\"");
    close(peer);
    CHECK(fixture_read(client, &answer, SIZE_MAX, 5000));
    CHECK(!strstr(answer.data, "\r\n0\r\n\r\n")); /* it does not look complete */
    CHECK_EQ_INT(atomic_load(&f->last_end), PASS_BROKEN);
    close(client);
    close(listener);
    buf_release(&got);
    buf_release(&answer);
    front_close(f);
}

TEST(http_pass_tries_another_node_until_the_client_has_a_byte)
{
    static const struct {
        const char *answer;     /* of the first node, which then closes; NULL: it does not listen */
        int status;             /* that the caller is told, ... */
        enum http_pass_end end; /* ... and this */
    } cases[] = {
        { NULL, 0, PASS_NOT_TAKEN },
        { "", 0, PASS_NOT_TAKEN },
        { "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", 200, PASS_NOT_TAKEN },
        { "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\nwithout an end of its own", 0,
          PASS_NOT_TAKEN },
        { "HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", 0,
          PASS_NOT_TAKEN },
        { "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nhi", 0,
          PASS_NOT_TAKEN },
        { "HTTP/1.1 100 Continue\r\nContent-Length: 2\r\n\r\nhi", 0, PASS_NOT_TAKEN },
        { "SSH-2.0-x\r\n", 0, PASS_NOT_TAKEN },
        { "HTTP/1.1 429 Full\r\nContent-Length: 4\r\n\r\nfull", 429, PASS_FULL },
        { "HTTP/1.1 429 Not you\r\nx-baton-has-room: 1\r\nContent-Length: 4\r\n\r\nfull", 429,
          PASS_REFUSED },
        { "HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", 503, PASS_FULL },
        { "HTTP/1.1 404 Other model\r\nContent-Length: 0\r\n\r\n", 404, PASS_REFUSED },
        { "HTTP/1.1 401 Other key\r\nContent-Length: 0\r\n\r\n", 401, PASS_REFUSED },
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct front *f = front_open();
        struct buf got = { 0 }, answer = { 0 };
        int first = front_listen(f), second = front_listen(f), client, peer;
        if (!cases[i].answer) close(first);
        client = ask(f, "{\"body\":1}");
        if (cases[i].answer) {
            peer = take(first, &got, "{\"body\":1}");
            say(peer, cases[i].answer);
            close(peer);
            buf_clear(&got);
        }
        peer = take(second, &got, "{\"body\":1}"); /* the whole request again */
        CHECK_EQ_INT(atomic_load(&f->last_end), cases[i].end);
        CHECK_EQ_INT(atomic_load(&f->last_status), cases[i].status);
        say(peer, "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 Bad\r\nContent-Length: 3\r\n\r\nbad");
        read_all(client, &answer);
        CHECK(strstr(answer.data, "HTTP/1.1 400 ") && strstr(answer.data, "\r\n\r\nbad"));
        close(peer);
        if (cases[i].answer) close(first);
        close(second);
        buf_release(&got);
        buf_release(&answer);
        front_close(f);
    }
}

TEST(http_pass_leaves_the_answer_to_the_caller_when_nobody_takes_it)
{
    struct front *f = front_open();
    struct buf answer = { 0 };
    for (int i = 0; i < TARGETS_MAX; i++) close(front_listen(f));
    read_all(ask(f, "{}"), &answer);
    CHECK(strstr(answer.data, "HTTP/1.1 503 ") && strstr(answer.data, "own answer"));
    CHECK_EQ_INT(atomic_load(&f->n_done), 2);
    buf_release(&answer);
    front_close(f);
}

TEST(http_pass_stops_the_other_node_when_the_client_leaves)
{
    static const char *const before[] = { NULL, EVENTS_HEAD };
    for (size_t i = 0; i < COUNT_OF(before); i++) {
        struct front *f = front_open();
        struct buf got = { 0 };
        int listener = front_listen(f), client = ask(f, "{}"), peer = take(listener, &got, "{}");
        if (before[i]) say(peer, before[i]);
        close(client);
        CHECK(fixture_read(peer, &got, 1, 5000)); /* the front has closed */
        wait_for(&f->n_gone, 1);
        CHECK_EQ_INT(atomic_load(&f->n_done), 0);
        close(peer);
        close(listener);
        buf_release(&got);
        front_close(f);
    }
}

TEST(http_pass_gives_up_a_node_that_never_answers)
{
    struct front *f = front_open();
    struct buf got = { 0 }, answer = { 0 };
    f->answer_ms = 100;
    int listener = front_listen(f), client = ask(f, "{}"), peer = take(listener, &got, "{}");
    read_all(client, &answer);
    CHECK(strstr(answer.data, "own answer"));
    close(peer);
    close(listener);
    buf_release(&got);
    buf_release(&answer);
    front_close(f);
}

/* Sends blocks of `x` in chunks until the socket takes no more for 300 ms; returns the bytes. */
static size_t send_until_held(int fd)
{
    static char block[65536];
    size_t sent = 0;
    memset(block, 'x', sizeof block);
    for (;;) {
        struct pollfd p = { .fd = fd, .events = POLLOUT };
        if (poll(&p, 1, 300) <= 0) return sent;
        ssize_t k = send(fd, block, sizeof block, MSG_NOSIGNAL | MSG_DONTWAIT);
        CHECK(k > 0 && sent < (size_t)256 << 20);
        sent += (size_t)k;
    }
}

TEST(http_pass_does_not_read_what_the_client_does_not)
{
    enum { KERNEL_MAX = 16 << 20, ALL = 64 << 20 }; /* socket buffers, front's queue aside */
    struct front *f = front_open();
    struct buf got = { 0 }, answer = { 0 };
    int listener = front_listen(f), client = ask(f, "{}"), peer = take(listener, &got, "{}");
    char head[128];
    snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", ALL);
    say(peer, head);
    size_t held = send_until_held(peer);
    CHECK(held < KERNEL_MAX); /* of the 64 MiB that the answer has */
    char *rest = mem_calloc(ALL - held, 1);
    memset(rest, 'x', ALL - held);
    size_t n_before = 0, at = 0;
    while (at < ALL - held) { /* as the client reads, the rest comes */
        ssize_t k = send(peer, rest + at, ALL - held - at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (k > 0) at += (size_t)k;
        fixture_read(client, &answer, SIZE_MAX, 20);
        n_before = answer.len > n_before ? answer.len : n_before;
    }
    read_all(client, &answer);
    size_t n_x = 0;
    for (size_t i = 0; i < answer.len; i++) n_x += answer.data[i] == 'x';
    CHECK(n_x >= ALL); /* chunk heads and header names may have one more */
    CHECK_EQ_INT(memcmp(answer.data + answer.len - 7, "\r\n0\r\n\r\n", 7), 0);
    CHECK_EQ_INT(atomic_load(&f->last_end), PASS_ANSWERED);
    mem_free(rest);
    close(peer);
    close(listener);
    buf_release(&got);
    buf_release(&answer);
    front_close(f);
}

TEST(http_pass_carries_a_large_body_and_an_early_refusal_of_it)
{
    enum { BODY = 8 << 20 };
    char *body = mem_calloc(BODY + 1, 1);
    for (size_t i = 0; i < BODY; i++) body[i] = (char)('a' + i % 26);
    for (int early = 0; early < 2; early++) {
        struct front *f = front_open();
        struct buf got = { 0 }, answer = { 0 };
        int listener = front_listen(f), client = ask(f, body),
            peer = take(listener, &got, "\r\n\r\n");
        size_t n_head = (size_t)(strstr(got.data, "\r\n\r\n") - got.data) + 4;
        if (!early) {
            fixture_read(peer, &got, n_head + BODY - got.len, 10000);
            CHECK_EQ_INT(got.len, n_head + BODY);
            CHECK_EQ_INT(memcmp(got.data + n_head, body, BODY), 0);
        }
        say(peer, "HTTP/1.1 413 No\r\nContent-Length: 3\r\n\r\nbig");
        read_all(client, &answer);
        CHECK(strstr(answer.data, "HTTP/1.1 413 ") && strstr(answer.data, "\r\n\r\nbig"));
        close(peer);
        close(listener);
        buf_release(&got);
        buf_release(&answer);
        front_close(f);
    }
    mem_free(body);
}

TEST(http_pass_resolves_names)
{
    struct front *f = front_open();
    struct buf answer = { 0 };
    f->host = "no-such-host.invalid";
    close(front_listen(f));
    read_all(ask(f, "{}"), &answer);
    CHECK(strstr(answer.data, "own answer"));
    buf_release(&answer);
    front_close(f);
}

static enum status count_body(void *arg, struct str piece)
{
    *(size_t *)arg += piece.n;
    return OK;
}

/* The same bytes in pieces of every size give the same answer. */
TEST(http_answer_does_not_depend_on_the_pieces)
{
    static const char text[] =
        "HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nA:\r\nContent-Type: t/x\r\n"
        "B: c d\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\nT: "
        "r\r\n\r\n";
    for (size_t piece = 1; piece <= sizeof text - 1; piece++) {
        size_t n_body = 0;
        struct http_answer a = { .on_body = count_body, .arg = &n_body };
        http_answer_init(&a);
        for (size_t at = 0; at < sizeof text - 1; at += piece) {
            size_t left = sizeof text - 1 - at;
            CHECK_OK(http_answer_feed(&a, text + at, left < piece ? left : piece));
        }
        CHECK(a.complete);
        CHECK_EQ_INT(a.status, 200);
        CHECK_EQ_INT(n_body, 11);
        CHECK_EQ_STR(a.type.data, "t/x");
        CHECK_EQ_STR(a.headers.data, "A: \r\nB: c d\r\n");
        http_answer_release(&a);
    }
}

TEST(http_answer_bounds_its_head)
{
    struct http_answer a = { 0 };
    enum status st = OK;
    http_answer_init(&a);
    CHECK_OK(http_answer_feed(&a, "HTTP/1.1 200 OK\r\nX: ", 20));
    for (int i = 0; i <= HTTP_ANSWER_HEAD_MAX && st == OK; i++) st = http_answer_feed(&a, "x", 1);
    CHECK_STATUS(st, ERR_TOO_LONG);
    CHECK(a.value.len <= HTTP_ANSWER_HEAD_MAX);
    http_answer_release(&a);
}

TEST_MAIN(CASE(http_pass_carries_what_the_api_needs_and_no_more),
          CASE(http_pass_carries_when_an_answer_is_wanted_and_what_was_promised),
          CASE(http_pass_streams_event_by_event),
          CASE(http_pass_ends_a_stream_whose_node_died_with_an_error_event),
          CASE(http_pass_streams_line_by_line_and_ends_with_a_line),
          CASE(http_pass_cuts_half_an_answer_that_is_no_stream),
          CASE(http_pass_tries_another_node_until_the_client_has_a_byte),
          CASE(http_pass_leaves_the_answer_to_the_caller_when_nobody_takes_it),
          CASE(http_pass_stops_the_other_node_when_the_client_leaves),
          CASE(http_pass_gives_up_a_node_that_never_answers),
          CASE_T(http_pass_does_not_read_what_the_client_does_not, 120),
          CASE(http_pass_carries_a_large_body_and_an_early_refusal_of_it),
          CASE_T(http_pass_resolves_names, 60), CASE(http_answer_does_not_depend_on_the_pieces),
          CASE(http_answer_bounds_its_head))
