/* test_http_server.c - the server over real sockets: syntax and limits, framing attacks,
 * pipelining, streams, clients that leave. */
#include "shared/net/http/http_server.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "shared/base/mem.h"
#include "shared/base/metrics.h"
#include "shared/net/sse.h"
#include "tests/unit/net/http_site.h"

/* Sends, and reads to the end of the connection: the answer must have `status` and no handler may
 * run. */
static void check_refused(struct site *s, const char *bytes, size_t n, int status)
{
    char want[32];
    struct buf got = { 0 };
    int before = atomic_load(&s->n_handled), fd = fixture_dial(s->port);
    snprintf(want, sizeof want, "HTTP/1.1 %d ", status);
    fixture_send(fd, bytes, n);
    bool over = fixture_read(fd, &got, SIZE_MAX, 5000);
    if (!over || !got.data || strncmp(got.data, want, strlen(want)) != 0)
        test_fail(__FILE__, __LINE__, "wanted %d and the end for \"%.*s\", got \"%s\"", status,
                  (int)(n < 200 ? n : 200), bytes, got.data ? got.data : "nothing");
    CHECK(strstr(got.data, "\r\nConnection: close\r\n") != NULL);
    CHECK(strstr(got.data, "\r\n\r\n{\"error\":{\"message\":\"") != NULL);
    CHECK(strstr(got.data, "\"param\":null,\"code\":\"") != NULL);
    if (atomic_load(&s->n_handled) != before)
        test_fail(__FILE__, __LINE__, "a handler saw \"%.*s\"", (int)(n < 200 ? n : 200), bytes);
    buf_release(&got);
    close(fd);
}

TEST(http_server_refuses_ambiguous_and_malformed_requests)
{
#define HEAD "POST /x HTTP/1.1\r\nHost: a\r\n"
    static const struct {
        int status;
        const char *bytes;
    } cases[] = {
        /* framing */
        { 400, HEAD "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc" },
        { 400, HEAD "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n" },
        { 400, HEAD "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc" },
        { 400, HEAD "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd" },
        { 400, HEAD "Content-Length: 3, 3\r\n\r\nabc" },
        { 400, HEAD "Content-Length: +3\r\n\r\nabc" },
        { 400, HEAD "Content-Length: -3\r\n\r\nabc" },
        { 400, HEAD "Content-Length: 0x3\r\n\r\nabc" },
        { 400, HEAD "Content-Length: 3 3\r\n\r\nabc" },
        { 400, HEAD "Content-Length:\r\n\r\n" },
        { 400, HEAD "Content-Length: 99999999999999999999999\r\n\r\n" },
        { 400, HEAD "Content-Length : 3\r\n\r\nabc" },
        { 400, HEAD "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" },
        { 501, HEAD "Transfer-Encoding: gzip\r\n\r\n" },
        { 501, HEAD "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" },
        { 501, HEAD "Transfer-Encoding: identity\r\n\r\n" },
        { 501, HEAD "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" },
        { 400, HEAD "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" },
        { 400, "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" },
        { 411, HEAD "Content-Type: application/json\r\n\r\n" },
        /* chunks */
        { 400, HEAD "Transfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n" },
        { 400, HEAD "Transfer-Encoding: chunked\r\n\r\n5\r\nhelloX\r\n0\r\n\r\n" },
        { 400, HEAD "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\n0\r\n\r\n" },
        { 400, HEAD "Transfer-Encoding: chunked\r\n\r\n5 \r\nhello\r\n0\r\n\r\n" },
        { 400, HEAD "Transfer-Encoding: chunked\r\n\r\n 5\r\nhello\r\n0\r\n\r\n" },
        { 400, HEAD "Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n" },
        { 400, HEAD "Transfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n" },
        { 400, HEAD "Transfer-Encoding: chunked\r\n\r\n\r\nhello\r\n0\r\n\r\n" },
        { 400, HEAD "Transfer-Encoding: chunked\r\n\r\n00000000000000005\r\nhello\r\n0\r\n\r\n" },
        { 413, HEAD "Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nhello" },
        { 400, HEAD "Transfer-Encoding: chunked\r\n\r\n5;a=\x01\r\nhello\r\n0\r\n\r\n" },
        { 400,
          HEAD "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nContent-Length: 4\r\n\r\n" },
        { 400, HEAD "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nHost: b\r\n\r\n" },
        { 400, HEAD "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: b\n\r\n" },
        /* lines */
        { 400, "GET / HTTP/1.1\nHost: a\n\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a\r\n\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a\rX: y\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a\r\n\rX: y\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a\r\nX:\rTransfer-Encoding: chunked\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n folded\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n\tfolded\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\n Host: a\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a\r\nX: a\x01z\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a\r\nX\x7f: a\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a\r\nnocolon\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a\r\n: novalue\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a\r\nX(y): z\r\n\r\n" },
        { 400, "\r\n\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n" },
        /* request line */
        { 400, "GET /\r\n" },
        { 400, "GET  / HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 400, "GET / x HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 400, "GET /\tx HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 400, "GET / HTTP/1.1 \r\nHost: a\r\n\r\n" },
        { 400, "GET /\xc3\xa4 HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 400, "GET x HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 400, "GET /#f HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 400, "GET /%00 HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 400, "GET /%g0 HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 400, "GET /%4 HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 400, "GET * HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 505, "GET / HTTP/2.0\r\nHost: a\r\n\r\n" },
        { 505, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" },
        { 505, "GET / HTTP/1.2\r\nHost: a\r\n\r\n" },
        { 400, "OPTIONS / RTSP/1.0\r\nHost: a\r\n\r\n" },
        { 501, "BREW / HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 501, "get / HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 501, "PROPFIND / HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 405, "TRACE / HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 405, "CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 400, "\x16\x03\x01\x02" },
        /* headers that may be given once */
        { 400, "GET / HTTP/1.1\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n" },
        { 400, "GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a b\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: u@a\r\n\r\n" },
        { 400, "GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n" },
        { 400, "GET / HTTP/1.1\r\nHost: a\r\nAuthorization: x\r\nAuthorization: y\r\n\r\n" },
        { 417, HEAD "Expect: 200-ok\r\nContent-Length: 1\r\n\r\nx" },
    };
#undef HEAD
    struct site *s = site_default();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_refused(s, cases[i].bytes, strlen(cases[i].bytes), cases[i].status);
    static const char nul[] = "GET / HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n";
    check_refused(s, nul, sizeof nul - 1, 400);
    site_close(s);
}

static void fill(struct buf *b, char c, size_t n)
{
    for (size_t i = 0; i < n; i++) buf_add_char(b, c);
}

TEST(http_server_holds_its_limits)
{
    struct http_limits l = {
        .header_bytes = 1000, .n_headers = 5, .url_bytes = 100, .body_bytes = 2000
    };
    struct site *s = site_open(l);
    struct buf b = { 0 };
    /* The URL is refused before its line ends; so is a header block, whether one long value or many
     * short ones. */
    buf_add_c(&b, "GET /");
    fill(&b, 'u', 100);
    check_refused(s, b.data, b.len, 414);
    buf_clear(&b);
    fill(&b, 'G', 120);
    check_refused(s, b.data, b.len, 501);
    buf_clear(&b);
    buf_add_c(&b, "GET / HTTP/1.1\r\nHost: a\r\nX: ");
    fill(&b, 'v', 1000);
    check_refused(s, b.data, b.len, 431);
    buf_clear(&b);
    buf_add_c(&b, "GET / HTTP/1.1\r\nHost: a\r\n");
    for (int i = 0; i < 5; i++) buf_printf(&b, "X-%d: v\r\n", i);
    check_refused(s, b.data, b.len, 431);
    check_refused(s, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2001\r\n\r\n", 50, 413);
    buf_clear(&b);
    buf_add_c(&b, "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n");
    for (int i = 0; i < 2001; i++) buf_add_c(&b, "1\r\nz\r\n");
    check_refused(s, b.data, b.len, 413);
    /* Extensions: one too long, and many that are short. */
    buf_clear(&b);
    buf_add_c(&b, "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;");
    fill(&b, 'e', 300);
    check_refused(s, b.data, b.len, 400);
    buf_clear(&b);
    buf_add_c(&b, "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n");
    for (int i = 0; i < 101; i++) buf_add_c(&b, "1;eeeeeeeee\r\nz\r\n");
    check_refused(s, b.data, b.len, 400);
    buf_clear(&b);
    buf_add_c(&b, "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n");
    for (int i = 0; i < 5; i++) buf_printf(&b, "X-%d: v\r\n", i);
    check_refused(s, b.data, b.len, 431);
    buf_release(&b);
    site_close(s);
}

/* Sends at once and byte by byte; both answers must contain `want`. */
static void check_served(struct site *s, const char *request, const char *want)
{
    for (int bytewise = 0; bytewise < 2; bytewise++) {
        struct buf got = { 0 };
        int fd = fixture_dial(s->port);
        size_t n = strlen(request);
        for (size_t i = 0; bytewise && i < n; i++) {
            CHECK(fixture_send(fd, request + i, 1));
            if (i % 16 == 0) usleep(200);
        }
        if (!bytewise) CHECK(fixture_send(fd, request, n));
        fixture_read_until(fd, &got, 0, "\r\n\r\n");
        fixture_read_until(fd, &got, 0, want);
        CHECK(strncmp(got.data, "HTTP/1.1 200 OK\r\n", 17) == 0);
        buf_release(&got);
        close(fd);
    }
}

TEST(http_server_serves_every_legal_form)
{
    struct site *s = site_default();
    check_served(s, "GET /a%20b/%C3%A4?q=%201 HTTP/1.1\r\nHost: h:1\r\nx-iD:  seven \t\r\n\r\n",
                 "GET|/a b/\xc3\xa4|seven|");
    check_served(s, "GET / HTTP/1.1\r\nHost: [::1]:80\r\nX-Id:\r\n\r\n", "GET|/||");
    check_served(s, "GET / HTTP/1.1\r\nHost:\r\n\r\n", "GET|/||");
    check_served(s, "\r\nPOST /p HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
                 "POST|/p||hello");
    check_served(s, "POST /p HTTP/1.1\r\nHost: a\r\nContent-Length: 005 \r\n\r\nhello",
                 "POST|/p||hello");
    check_served(s, "POST /p HTTP/1.1\r\nHost: a\r\n\r\n", "POST|/p||");
    check_served(s,
                 "POST /p HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: "
                 "Chunked\r\n\r\n5\r\nhello\r\n6;a=b;c=\"d\"\r\n world\r\n0\r\nX-T: 1\r\n\r\n",
                 "POST|/p||hello world");
    check_served(s, "GET http://A:80/x?y HTTP/1.1\r\nHost: a:80\r\n\r\n", "GET|/x||");
    check_served(s, "GET http://a?y HTTP/1.1\r\nHost: a\r\n\r\n", "GET|/||");
    check_served(s, "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", "OPTIONS|*||");
    check_served(s, "GET / HTTP/1.0\r\n\r\n", "GET|/||");
    /* An upgrade to HTTP/2 is ignored, and the body is read as HTTP/1.1. */
    check_served(s,
                 "POST /p HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: "
                 "h2c\r\nHTTP2-Settings: AAMAAABk\r\nContent-Length: 2\r\n\r\nhi",
                 "POST|/p||hi");
    check_served(s,
                 "GET /p HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
                 "GET|/p||");
    site_close(s);
}

static void check_ends(const char *request, bool stays)
{
    struct site *s = site_default();
    struct buf got = { 0 };
    int fd = fixture_dial(s->port);
    CHECK(fixture_send(fd, request, strlen(request)));
    CHECK(fixture_read(fd, &got, SIZE_MAX, 300) == !stays);
    CHECK(strncmp(got.data, "HTTP/1.1 200 OK\r\n", 17) == 0);
    buf_release(&got);
    close(fd);
    site_close(s);
}

TEST(http_server_keeps_or_closes_the_connection_as_asked)
{
    check_ends("GET / HTTP/1.1\r\nHost: a\r\n\r\n", true);
    check_ends("GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", false);
    check_ends("GET / HTTP/1.0\r\nHost: a\r\n\r\n", false);
    check_ends("GET / HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n", true);
}

TEST(http_server_answers_pipelined_requests_in_order)
{
    struct site *s = site_default();
    struct buf out = { 0 }, got = { 0 };
    int fd = fixture_dial(s->port);
    buf_add_c(&out, "GET /later HTTP/1.1\r\nHost: a\r\n\r\n");
    for (int i = 0; i < 200; i++)
        buf_printf(&out, "POST /n%d HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc", i);
    CHECK(fixture_send(fd, out.data, out.len));
    fixture_read_until(fd, &got, 0, "later");
    for (int i = 0; i < 200; i++) {
        char want[32];
        snprintf(want, sizeof want, "POST|/n%d||abc", i);
        size_t from = got.len;
        fixture_read_until(fd, &got, from > 400 ? from - 400 : 0, want);
    }
    CHECK_EQ_INT(atomic_load(&s->n_handled), 201);
    close(fd);
    buf_release(&out);
    buf_release(&got);
    site_close(s);
}

TEST(http_server_drops_what_follows_the_last_request)
{
    struct site *s = site_default();
    struct buf got = { 0 };
    const char *two =
        "GET /1 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\n";
    int fd = fixture_dial(s->port);
    CHECK(fixture_send(fd, two, strlen(two)));
    CHECK(fixture_read(fd, &got, SIZE_MAX, 3000));
    CHECK(strstr(got.data, "GET|/1|") != NULL);
    CHECK(strstr(got.data, "GET|/2|") == NULL);
    CHECK_EQ_INT(atomic_load(&s->n_handled), 1);
    buf_release(&got);
    close(fd);
    site_close(s);
}

TEST(http_server_gives_leave_to_send_a_body)
{
    struct site *s = site_default();
    struct buf got = { 0 };
    const char *head =
        "POST /c HTTP/1.1\r\nHost: a\r\nExpect: 100-Continue\r\nContent-Length: 3\r\n\r\n";
    int fd = fixture_dial(s->port);
    for (int i = 0; i < 2; i++) {
        size_t from = got.len;
        CHECK(fixture_send(fd, head, strlen(head)));
        fixture_read_until(fd, &got, from, "HTTP/1.1 100 Continue\r\n\r\n");
        CHECK(send_text(fd, "abc"));
        fixture_read_until(fd, &got, from, "POST|/c||abc");
    }
    /* Too long: refused without 100 Continue. */
    buf_clear(&got);
    head = "POST /c HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: "
           "99999999999\r\n\r\n";
    CHECK(fixture_send(fd, head, strlen(head)));
    CHECK(fixture_read(fd, &got, SIZE_MAX, 3000));
    CHECK(strncmp(got.data, "HTTP/1.1 413 ", 13) == 0);
    buf_release(&got);
    close(fd);
    site_close(s);
}

TEST(http_server_delivers_a_refusal_while_the_client_still_sends)
{
    struct site *s = site_open((struct http_limits){ .body_bytes = 1000 });
    static char junk[4 << 20];
    struct buf got = { 0 };
    const char *head = "POST /c HTTP/1.1\r\nHost: a\r\nContent-Length: 4194304\r\n\r\n";
    int fd = fixture_dial(s->port);
    CHECK(fixture_send(fd, head, strlen(head)));
    CHECK(
        fixture_send(fd, junk, sizeof junk)); /* discarded, so that no reset destroys the answer */
    CHECK(fixture_read(fd, &got, SIZE_MAX, 5000));
    CHECK(strncmp(got.data, "HTTP/1.1 413 ", 13) == 0);
    buf_release(&got);
    close(fd);
    site_close(s);
}

TEST(http_server_answers_head_and_204_without_a_body)
{
    struct site *s = site_default();
    struct buf got = { 0 };
    const char *all = "HEAD /h HTTP/1.1\r\nHost: a\r\n\r\nHEAD /stream HTTP/1.1\r\nHost: a\r\n\r\n"
                      "GET /none HTTP/1.1\r\nHost: a\r\n\r\nGET /end HTTP/1.1\r\nHost: "
                      "a\r\nConnection: close\r\n\r\n";
    int fd = fixture_dial(s->port);
    CHECK(fixture_send(fd, all, strlen(all)));
    CHECK(fixture_read(fd, &got, SIZE_MAX, 3000));
    /* HEAD|/h|| */
    CHECK(strstr(got.data, "Content-Length: 9\r\n\r\nHTTP/1.1 200 OK\r\n") != NULL);
    CHECK(strstr(got.data, "Transfer-Encoding: chunked\r\n\r\nHTTP/1.1 204 No Content\r\n") !=
          NULL);
    CHECK(strstr(got.data, "\r\n\r\nHTTP/1.1 200 OK\r\n") != NULL);
    CHECK(strstr(got.data, "GET|/end||") != NULL);
    buf_release(&got);
    close(fd);
    site_close(s);
}

TEST(http_server_streams_events)
{
    struct site *s = site_default();
    struct buf got = { 0 };
    const char *get = "GET /stream HTTP/1.1\r\nHost: a\r\n\r\n";
    int fd = fixture_dial(s->port);
    CHECK(fixture_send(fd, get, strlen(get)));
    fixture_read_until(fd, &got, 0, "0\r\n\r\n");
    CHECK(strstr(got.data, "\r\nContent-Type: text/event-stream; charset=utf-8\r\n") != NULL);
    CHECK(strstr(got.data, "\r\nCache-Control: no-cache\r\n") != NULL);
    CHECK(strstr(got.data, "\r\nX-Accel-Buffering: no\r\n") != NULL);
    CHECK(strstr(got.data, "\r\nX-Id: 7\r\n") != NULL);
    CHECK(strstr(got.data, "Content-Length") == NULL);
    CHECK(strstr(got.data,
                 "\r\n\r\nf\r\ndata: {\"i\":0}\n\n\r\nf\r\ndata: {\"i\":1}\n\n\r\nf\r\ndata: "
                 "{\"i\":2}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n") != NULL);
    /* The connection can serve another request. */
    size_t from = got.len;
    CHECK(send_text(fd, "GET /z HTTP/1.1\r\nHost: a\r\n\r\n"));
    fixture_read_until(fd, &got, from, "GET|/z||");
    close(fd);
    /* HTTP/1.0 has no chunks: the end of the connection ends the body. */
    buf_clear(&got);
    fd = fixture_dial(s->port);
    CHECK(send_text(fd, "GET /stream HTTP/1.0\r\n\r\n"));
    CHECK(fixture_read(fd, &got, SIZE_MAX, 3000));
    CHECK(strstr(got.data, "\r\n\r\ndata: {\"i\":0}\n\n") != NULL);
    CHECK(strstr(got.data, "chunked") == NULL);
    close(fd);
    buf_release(&got);
    site_close(s);
}

TEST(http_server_sends_answers_larger_than_the_queue_limit)
{
    struct site *s = site_default();
    struct buf got = { 0 };
    int fd = fixture_dial(s->port);
    CHECK(send_text(fd, "GET /large HTTP/1.0\r\n\r\n"));
    usleep(50000);
    CHECK(fixture_read(fd, &got, SIZE_MAX, 20000));
    CHECK(got.len > (20u << 20));
    CHECK_EQ_INT(atomic_load(&s->n_gone), 0);
    buf_release(&got);
    close(fd);
    site_close(s);
}

static void leave_by_close(int fd) { close(fd); }
static void leave_by_half_close(int fd) { shutdown(fd, SHUT_WR); }
static void leave_by_reset(int fd)
{
    struct linger l = { 1, 0 };
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &l, sizeof l);
    close(fd);
}

TEST(http_server_notices_within_milliseconds_that_a_client_left)
{
    static void (*const leaves[])(int fd) = { leave_by_close, leave_by_half_close, leave_by_reset };
    struct site *s = site_default();
    int n_gone = 0;
    for (int pipelined = 0; pipelined < 2; pipelined++) {
        for (size_t i = 0; i < 3; i++) {
            struct buf out = { 0 };
            int fd = fixture_dial(s->port);
            buf_add_c(&out, "GET /hang HTTP/1.1\r\nHost: a\r\n\r\n");
            /* More than the server reads ahead, less than the kernel buffers: the server stops
             * reading and must still notice the client's end. */
            for (int k = 0; pipelined && k < 3500; k++)
                buf_add_c(&out, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n");
            CHECK(fixture_send(fd, out.data, out.len));
            usleep(30000);
            CHECK_EQ_INT(atomic_load(&s->n_gone), n_gone);
            uint64_t t = clock_ms();
            leaves[i](fd);
            site_wait_gone(s, ++n_gone);
            CHECK(atomic_load(&s->gone_ms) - t <= 100);
            if (leaves[i] == leave_by_half_close) close(fd);
            buf_release(&out);
        }
    }
    CHECK_EQ_INT(atomic_load(&s->n_handled), 6);
    site_close(s);
}

TEST(http_server_reads_on_after_holding_back)
{
    struct site *s = site_default();
    struct buf out = { 0 }, got = { 0 };
    int fd = fixture_dial(s->port);
    for (int round = 0; round < 3; round++) {
        buf_clear(&out);
        buf_add_c(&out, "GET /later HTTP/1.1\r\nHost: a\r\n\r\nPOST /big HTTP/1.1\r\nHost: "
                        "a\r\nContent-Length: 3000000\r\n\r\n");
        fill(&out, 'b', 3000000);
        buf_clear(&got);
        CHECK(fixture_send(fd, out.data, out.len));
        fixture_read_until(fd, &got, 0, "later");
        fixture_read_until(fd, &got, 0, "POST|/big||");
        fixture_read(fd, &got,
                     3000000 - (got.len - (size_t)(strstr(got.data, "||") + 2 - got.data)), 5000);
        CHECK(got.data[got.len - 1] == 'b');
    }
    close(fd);
    buf_release(&out);
    buf_release(&got);
    site_close(s);
}

TEST(http_server_cuts_a_reader_whose_queue_is_full)
{
    struct site *s = site_open((struct http_limits){ .write_queue_bytes = 1 << 20 });
    int fd = fixture_dial(s->port);
    CHECK(send_text(fd, "GET /flood HTTP/1.1\r\nHost: a\r\n\r\n"));
    site_wait_gone(s, 1);
    CHECK_EQ_INT(atomic_load(&s->n_full), 1);
    close(fd);
    site_close(s);
}

static void check_stalls(const char *request)
{
    struct site *s = site_open(
        (struct http_limits){ .write_stall_ms = 200, .write_queue_bytes = 64 << 20 });
    uint64_t t = clock_ms();
    int fd = fixture_dial(s->port);
    CHECK(send_text(fd, request));
    site_wait_gone(s, 1);
    CHECK(clock_ms() - t >= 190);
    CHECK_EQ_INT(atomic_load(&s->n_full), 0);
    close(fd);
    site_close(s);
}

TEST(http_server_cuts_a_reader_that_stalls)
{
    check_stalls("GET /large HTTP/1.1\r\nHost: a\r\n\r\n");
}

TEST(http_server_cuts_a_reader_that_stalls_while_its_answer_grows)
{
    check_stalls("GET /growing HTTP/1.1\r\nHost: a\r\n\r\n");
}

/* One that reads now and then is slow, and keeps its connection for many times the limit. */
TEST(http_server_keeps_a_slow_reader_whose_answer_grows)
{
    struct site *s = site_open(
        (struct http_limits){ .write_stall_ms = 1000, .write_queue_bytes = 64 << 20 });
    struct buf got = { 0 };
    int fd = fixture_dial(s->port);
    CHECK(send_text(fd, "GET /growing HTTP/1.1\r\nHost: a\r\n\r\n"));
    for (int i = 0; i < 9; i++) {
        buf_clear(&got);
        fixture_read(fd, &got, 2 << 20, 5000);
        CHECK(got.len == 2 << 20);
        usleep(200000);
    }
    CHECK_EQ_INT(atomic_load(&s->n_gone), 0);
    close(fd);
    site_wait_gone(s, 1);
    buf_release(&got);
    site_close(s);
}

TEST(http_server_has_deadlines_for_slow_requests)
{
    struct site *s = site_open((struct http_limits){
        .header_timeout_ms = 300, .body_timeout_ms = 300, .idle_timeout_ms = 300 });
    struct buf got = { 0 };
    /* The header deadline is for the whole head: single bytes do not extend it. */
    int fd = fixture_dial(s->port);
    uint64_t t = clock_ms();
    const char *slow = "GET / HTTP/1.1\r\nX: ";
    for (size_t i = 0; i < strlen(slow) && clock_ms() - t < 250; i++) {
        CHECK(fixture_send(fd, slow + i, 1));
        usleep(20000);
    }
    CHECK(fixture_read(fd, &got, SIZE_MAX, 10000));
    CHECK(strncmp(got.data, "HTTP/1.1 408 ", 13) == 0);
    close(fd);
    buf_clear(&got);
    fd = fixture_dial(s->port);
    CHECK(send_text(fd, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nab"));
    CHECK(fixture_read(fd, &got, SIZE_MAX, 2000));
    CHECK(strncmp(got.data, "HTTP/1.1 408 ", 13) == 0);
    close(fd);
    /* Without a request the connection is closed without an answer, also between requests. */
    buf_clear(&got);
    fd = fixture_dial(s->port);
    CHECK(fixture_read(fd, &got, SIZE_MAX, 2000));
    CHECK_EQ_INT(got.len, 0);
    close(fd);
    fd = fixture_dial(s->port);
    CHECK(send_text(fd, "GET /i HTTP/1.1\r\nHost: a\r\n\r\n"));
    CHECK(fixture_read(fd, &got, SIZE_MAX, 2000));
    CHECK(strstr(got.data, "GET|/i||") != NULL);
    CHECK(strstr(got.data + 1, "HTTP/1.1 ") == NULL); /* nothing after the answer */
    close(fd);
    buf_release(&got);
    site_close(s);
}

TEST(http_server_turns_away_connections_above_its_limit)
{
    struct site *s = site_open((struct http_limits){ .n_connections = 2 });
    struct buf got = { 0 };
    int a = fixture_dial(s->port), b = fixture_dial(s->port);
    CHECK(send_text(a, "GET /1 HTTP/1.1\r\nHost: a\r\n\r\n"));
    fixture_read_until(a, &got, 0, "GET|/1|");
    buf_clear(&got);
    int c = fixture_dial(s->port);
    CHECK(fixture_read(c, &got, SIZE_MAX, 3000));
    CHECK(strncmp(got.data, "HTTP/1.1 503 ", 13) == 0);
    CHECK(strstr(got.data, "\r\nRetry-After: 1\r\n") != NULL);
    close(b);
    close(c);
    usleep(50000);
    buf_clear(&got);
    c = fixture_dial(s->port);
    CHECK(send_text(c, "GET /3 HTTP/1.1\r\nHost: a\r\n\r\n"));
    fixture_read_until(c, &got, 0, "GET|/3|");
    close(a);
    close(c);
    buf_release(&got);
    site_close(s);
}

/* Without descriptors a connection waits in the kernel, and nobody is cut off. */
TEST(http_server_lets_connections_wait_for_descriptors)
{
    struct site *s = site_default();
    struct buf got = { 0 };
    struct sockaddr_in a = { .sin_family = AF_INET,
                             .sin_port = htons(s->port),
                             .sin_addr = { htonl(INADDR_LOOPBACK) } };
    int fds[8];
    struct rlimit before;
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    for (int i = 0; i < 8; i++) fds[i] = socket(AF_INET, SOCK_STREAM, 0);
    /* Room for one of eight connections. */
    struct rlimit few = { .rlim_cur = (rlim_t)fds[7] + 2, .rlim_max = before.rlim_max };
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    for (int i = 0; i < 8; i++) {
        CHECK(connect(fds[i], (struct sockaddr *)&a, sizeof a) == 0);
        CHECK(send_text(fds[i], "GET /x HTTP/1.1\r\nHost: a\r\n\r\n"));
    }
    usleep(300000);
    CHECK_EQ_INT(atomic_load(&s->n_handled), 1);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    for (int i = 0; i < 8; i++) {
        buf_clear(&got);
        fixture_read_until(fds[i], &got, 0, "GET|/x||");
        close(fds[i]);
    }
    buf_release(&got);
    site_close(s);
}

TEST(http_server_says_who_holds_its_port)
{
    struct site *s = site_default(), *second = MEM_NEW(struct site);
    char place[32];
    second->loop = s->loop;
    second->port = s->port;
    fixture_on_loop(s->loop, site_start_on_loop, second);
    CHECK_STATUS(second->st, ERR_CONFIG);
    snprintf(place, sizeof place, "127.0.0.1:%u", s->port);
    CHECK(strstr(second->err.text, place) != NULL);
    CHECK(strstr(second->err.text, "another port option of this node has the same port") != NULL);
    mem_free(second);
    site_close(s);
}

TEST(http_server_stops_with_grace_and_leaves_nothing)
{
    struct site *s = site_default();
    struct buf got = { 0 };
    int idle = fixture_dial(s->port), later = fixture_dial(s->port), hang = fixture_dial(s->port);
    CHECK(send_text(hang, "GET /hang HTTP/1.1\r\nHost: a\r\n\r\n"));
    CHECK(send_text(later, "GET /later HTTP/1.1\r\nHost: a\r\n\r\n"));
    while (atomic_load(&s->n_handled) < 2) usleep(1000);
    uint64_t t = clock_ms();
    fixture_on_loop(s->loop, site_stop_on_loop, s);
    CHECK(fixture_read(later, &got, SIZE_MAX, 2000));
    CHECK(strstr(got.data, "later") != NULL);
    CHECK(strstr(got.data, "Connection: close\r\n") != NULL);
    buf_clear(&got);
    CHECK(fixture_read(idle, &got, SIZE_MAX, 2000)); /* it might have sent something until then */
    CHECK(got.len == 0 && clock_ms() - t >= 290);
    while (sem_wait(&s->stopped) != 0) {}
    CHECK(clock_ms() - t >= 290);
    CHECK_EQ_INT(atomic_load(&s->n_gone), 1);
    fixture_stop(s->loop, s->thread);
    CHECK_EQ_INT(atomic_load(&s->n_ended), 2);
    close(idle);
    close(later);
    close(hang);
    buf_release(&got);
    metrics_free(s->metrics);
    mem_free(s);
}

static void drain_on_loop(void *arg)
{
    struct site *s = arg;
    http_server_drain(s->server);
}

TEST(http_server_says_close_while_it_drains_and_still_serves)
{
    struct site *s = site_default();
    struct buf got = { 0 };
    int kept = fixture_dial(s->port), later = fixture_dial(s->port);
    CHECK(send_text(kept, "GET /a HTTP/1.1\r\nHost: a\r\n\r\n"));
    fixture_read_until(kept, &got, 0, "GET|/a");
    CHECK(strstr(got.data, "Connection: close") == NULL);
    CHECK(send_text(later, "GET /later HTTP/1.1\r\nHost: a\r\n\r\n"));
    while (atomic_load(&s->n_handled) < 2) usleep(1000);
    fixture_on_loop(s->loop, drain_on_loop, s);
    /* An answer that had not begun, the next one of a connection, and one of a new connection. */
    buf_clear(&got);
    CHECK(fixture_read(later, &got, SIZE_MAX, 2000));
    CHECK(strstr(got.data, "Connection: close\r\n") && strstr(got.data, "later"));
    int fresh = fixture_dial(s->port), fds[] = { kept, fresh };
    for (size_t i = 0; i < COUNT_OF(fds); i++) {
        buf_clear(&got);
        CHECK(send_text(fds[i], "GET /b HTTP/1.1\r\nHost: a\r\n\r\n"));
        CHECK(fixture_read(fds[i], &got, SIZE_MAX, 2000));
        CHECK(strstr(got.data, "Connection: close\r\n") && strstr(got.data, "GET|/b"));
    }
    close(kept);
    close(later);
    close(fresh);
    buf_release(&got);
    site_close(s);
}

/* Requests arrive, on an idle connection and on one that nobody has accepted yet, and the loop does
 * not look at its sockets before the grace is over. */
static void stop_after_requests(void *arg)
{
    struct site *s = arg;
    CHECK(send_text(s->fds[0], "GET /kept HTTP/1.1\r\nHost: a\r\n\r\n"));
    s->fds[1] = fixture_dial(s->port);
    CHECK(send_text(s->fds[1], "GET /fresh HTTP/1.1\r\nHost: a\r\n\r\n"));
    site_stop_on_loop(s);
    usleep(350000);
}

TEST(http_server_answers_what_had_arrived_when_it_stopped)
{
    struct site *s = site_default();
    struct buf got = { 0 };
    s->fds[0] = fixture_dial(s->port);
    CHECK(send_text(s->fds[0], "GET /a HTTP/1.1\r\nHost: a\r\n\r\n"));
    fixture_read_until(s->fds[0], &got, 0, "GET|/a");
    fixture_on_loop(s->loop, stop_after_requests, s);
    for (int i = 0; i < 2; i++) {
        buf_clear(&got);
        CHECK(fixture_read(s->fds[i], &got, SIZE_MAX, 2000));
        CHECK(got.len && strstr(got.data, i ? "GET|/fresh" : "GET|/kept"));
        CHECK(strstr(got.data, "Connection: close\r\n"));
    }
    while (sem_wait(&s->stopped) != 0) {}
    for (int i = 0; i < 2; i++) close(s->fds[i]);
    fixture_stop(s->loop, s->thread);
    buf_release(&got);
    metrics_free(s->metrics);
    mem_free(s);
}

static void leave_on_loop(void *arg)
{
    struct site *s = arg;
    http_server_leave(s->server, 60000, 50, site_on_stopped, s);
}

static void hurry_on_loop(void *arg)
{
    struct site *s = arg;
    http_server_hurry(s->server, 100);
}

/* It serves for as long as something is open, on connections that are there; then it ends, whoever
 * keeps a connection that nothing comes on. */
TEST(http_server_leaves_when_nothing_is_open)
{
    struct site *s = site_default();
    struct buf got = { 0 };
    int idle = fixture_dial(s->port), kept = fixture_dial(s->port), hang = fixture_dial(s->port);
    CHECK(send_text(hang, "GET /hang HTTP/1.1\r\nHost: a\r\n\r\n"));
    CHECK(send_text(kept, "GET /a HTTP/1.1\r\nHost: a\r\n\r\n"));
    fixture_read_until(kept, &got, 0, "GET|/a");
    while (atomic_load(&s->n_handled) < 2) usleep(1000);
    fixture_on_loop(s->loop, leave_on_loop, s);
    usleep(500000);
    CHECK(sem_trywait(&s->stopped) != 0); /* one hangs */
    struct sockaddr_in a = {
        .sin_family = AF_INET,
        .sin_port = htons(s->port),
        .sin_addr = { htonl(INADDR_LOOPBACK) },
    };
    int fresh = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(fresh, (struct sockaddr *)&a, sizeof a) != 0 && errno == ECONNREFUSED);
    close(fresh);
    buf_clear(&got);
    CHECK(send_text(kept, "GET /b HTTP/1.1\r\nHost: a\r\n\r\n"));
    CHECK(fixture_read(kept, &got, SIZE_MAX, 2000));
    CHECK(strstr(got.data, "GET|/b") && strstr(got.data, "Connection: close\r\n"));
    close(hang);
    while (sem_wait(&s->stopped) != 0) {}
    buf_clear(&got);
    CHECK(fixture_read(idle, &got, SIZE_MAX, 2000) && got.len == 0);
    fixture_stop(s->loop, s->thread);
    close(idle);
    close(kept);
    buf_release(&got);
    metrics_free(s->metrics);
    mem_free(s);
}

TEST(http_server_is_hurried_when_its_time_is_over)
{
    struct site *s = site_default();
    int hang = fixture_dial(s->port);
    CHECK(send_text(hang, "GET /hang HTTP/1.1\r\nHost: a\r\n\r\n"));
    while (atomic_load(&s->n_handled) < 1) usleep(1000);
    fixture_on_loop(s->loop, leave_on_loop, s);
    usleep(200000);
    CHECK(sem_trywait(&s->stopped) != 0);
    uint64_t t = clock_ms();
    fixture_on_loop(s->loop, hurry_on_loop, s);
    while (sem_wait(&s->stopped) != 0) {}
    CHECK(clock_ms() - t >= 90);
    CHECK_EQ_INT(atomic_load(&s->n_gone), 1);
    fixture_stop(s->loop, s->thread);
    close(hang);
    metrics_free(s->metrics);
    mem_free(s);
}

struct hammer {
    uint16_t port;
    pthread_t thread;
    atomic_int *answered;
    int n_reset;
};

/* Sends requests without a pause, on a connection as long as the server keeps it, until none can be
 * made. */
static void *hammer_run(void *arg)
{
    struct hammer *h = arg;
    struct sockaddr_in a = {
        .sin_family = AF_INET,
        .sin_port = htons(h->port),
        .sin_addr = { htonl(INADDR_LOOPBACK) },
    };
    struct buf got = { 0 };
    for (int fd = -1;;) {
        if (fd < 0) {
            fd = socket(AF_INET, SOCK_STREAM, 0);
            struct timeval limit = { .tv_sec = 5 };
            setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
            if (connect(fd, (struct sockaddr *)&a, sizeof a) != 0) {
                CHECK_EQ_INT(errno, ECONNREFUSED);
                close(fd);
                break;
            }
        }
        buf_clear(&got);
        bool sent = send_text(fd, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n"), ended = !sent;
        while (!ended && !(got.len && strstr(got.data, "GET|/x||"))) {
            ssize_t n = recv(fd, buf_reserve(&got, 4096), 4095, 0);
            ended = n <= 0;
            if (n > 0) got.data[got.len += (size_t)n] = 0;
        }
        if (got.len && strstr(got.data, "GET|/x||")) atomic_fetch_add(h->answered, 1);
        else h->n_reset++;
        if (!ended && !strstr(got.data, "Connection: close\r\n")) continue;
        close(fd);
        fd = -1;
    }
    buf_release(&got);
    return NULL;
}

TEST(http_server_resets_nobody_while_it_stops_under_load)
{
    enum { ROUNDS = 4, CLIENTS = 8 };
    for (int round = 0; round < ROUNDS; round++) {
        struct site *s = site_default();
        struct hammer h[CLIENTS];
        atomic_int answered = 0;
        for (int i = 0; i < CLIENTS; i++) {
            h[i] = (struct hammer){ .port = s->port, .answered = &answered };
            CHECK_OK(thread_start(&h[i].thread, hammer_run, &h[i]));
        }
        while (atomic_load(&answered) < 1000) usleep(1000);
        if (round % 2) fixture_on_loop(s->loop, drain_on_loop, s);
        fixture_on_loop(s->loop, site_stop_on_loop, s);
        while (sem_wait(&s->stopped) != 0) {}
        for (int i = 0; i < CLIENTS; i++) {
            pthread_join(h[i].thread, NULL);
            CHECK_EQ_INT(h[i].n_reset, 0);
        }
        fixture_stop(s->loop, s->thread);
        CHECK_EQ_INT(atomic_load(&s->n_gone), 0);
        metrics_free(s->metrics);
        mem_free(s);
    }
}

TEST_MAIN(CASE(http_server_refuses_ambiguous_and_malformed_requests),
          CASE(http_server_holds_its_limits), CASE(http_server_serves_every_legal_form),
          CASE(http_server_keeps_or_closes_the_connection_as_asked),
          CASE(http_server_answers_pipelined_requests_in_order),
          CASE(http_server_drops_what_follows_the_last_request),
          CASE(http_server_gives_leave_to_send_a_body),
          CASE(http_server_delivers_a_refusal_while_the_client_still_sends),
          CASE(http_server_answers_head_and_204_without_a_body), CASE(http_server_streams_events),
          CASE(http_server_sends_answers_larger_than_the_queue_limit),
          CASE(http_server_notices_within_milliseconds_that_a_client_left),
          CASE(http_server_reads_on_after_holding_back),
          CASE(http_server_cuts_a_reader_whose_queue_is_full),
          CASE(http_server_cuts_a_reader_that_stalls),
          CASE(http_server_cuts_a_reader_that_stalls_while_its_answer_grows),
          CASE(http_server_keeps_a_slow_reader_whose_answer_grows),
          CASE(http_server_has_deadlines_for_slow_requests),
          CASE(http_server_turns_away_connections_above_its_limit),
          CASE(http_server_lets_connections_wait_for_descriptors),
          CASE(http_server_says_who_holds_its_port),
          CASE(http_server_stops_with_grace_and_leaves_nothing),
          CASE(http_server_says_close_while_it_drains_and_still_serves),
          CASE(http_server_answers_what_had_arrived_when_it_stopped),
          CASE(http_server_leaves_when_nothing_is_open),
          CASE(http_server_is_hurried_when_its_time_is_over),
          CASE(http_server_resets_nobody_while_it_stops_under_load))
