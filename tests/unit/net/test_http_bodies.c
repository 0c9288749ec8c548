/* test_http_bodies.c - large bodies wait for each other, and one client's connections and requests
 * are limited. */
#include "tests/unit/net/http_site.h"

/* ---- large bodies ---- */

enum { LARGE_BODY = 150000 };

static const struct http_limits ONE_LARGE_BODY = { .large_bodies_bytes = 200000 };

/* Sends a request with a body of n bytes 'b' whose head says LARGE_BODY. */
static int send_large(const struct site *s, const char *path, const char *headers, size_t n)
{
    char head[256];
    char *body = mem_calloc(1, LARGE_BODY);
    int fd = fixture_dial(s->port);
    memset(body, 'b', LARGE_BODY);
    snprintf(head, sizeof head, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%s\r\n", path,
             LARGE_BODY, headers);
    CHECK(send_text(fd, head));
    CHECK(fixture_send(fd, body, n));
    mem_free(body);
    return fd;
}

static void wait_handled(struct site *s, int n)
{
    for (int i = 0; i < 5000 && atomic_load(&s->n_handled) < n; i++) usleep(1000);
    CHECK_EQ_INT(atomic_load(&s->n_handled), n);
}

static void check_begins(int fd, const char *text)
{
    struct buf got = { 0 };
    fixture_read(fd, &got, strlen(text), 10000);
    CHECK_EQ_STR(got.data ? got.data : "", text);
    buf_release(&got);
}

TEST(http_server_makes_large_bodies_wait_for_each_other)
{
    struct site *s = site_open(ONE_LARGE_BODY);
    int a = send_large(s, "/hang", "", LARGE_BODY);
    wait_handled(s, 1);
    int b = send_large(s, "/b", "", LARGE_BODY), c = send_large(s, "/c", "", LARGE_BODY);
    /* Small ones do not wait. */
    int small = fixture_dial(s->port);
    CHECK(send_text(small, "POST /s HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"));
    check_begins(small, "HTTP/1.1 200");
    CHECK_EQ_INT(atomic_load(&s->n_handled), 2);
    close(a);
    check_begins(b, "HTTP/1.1 200");
    close(b);
    check_begins(c, "HTTP/1.1 200");
    close(c);
    close(small);
    CHECK_EQ_INT(atomic_load(&s->n_handled), 4);
    site_close(s);
}

TEST(http_server_counts_a_body_until_its_taker_is_done)
{
    struct site *s = site_open(ONE_LARGE_BODY);
    int a = send_large(s, "/take", "", LARGE_BODY);
    check_begins(a, "HTTP/1.1 200");
    uint64_t t = clock_ms();
    int b = send_large(s, "/take", "", LARGE_BODY);
    check_begins(b, "HTTP/1.1 200");
    CHECK(clock_ms() - t >= 200);
    close(a);
    close(b);
    fixture_on_loop(s->loop, site_stop_on_loop, s); /* the second body outlives the server */
    while (sem_wait(&s->stopped) != 0) {}
    usleep(400000);
    fixture_stop(s->loop, s->thread);
    metrics_free(s->metrics);
    mem_free(s);
}

TEST(http_server_does_not_let_large_bodies_wait_for_ever)
{
    struct site *s = site_open((struct http_limits){
        .large_bodies_bytes = 200000, .body_wait_ms = 200, .body_contended_ms = 60000 });
    struct buf got = { 0 };
    int a = send_large(s, "/hang", "", LARGE_BODY);
    wait_handled(s, 1);
    int b = send_large(s, "/b", "", LARGE_BODY);
    CHECK(fixture_read(b, &got, SIZE_MAX, 5000));
    CHECK(strncmp(got.data, "HTTP/1.1 429 ", 13) == 0);
    CHECK(strstr(got.data, "\r\nRetry-After: 1\r\n"));
    CHECK(strstr(got.data, "\"code\":\"server_busy\""));
    close(b);
    b = send_large(s, "/b", "", LARGE_BODY);
    close(b); /* a client that leaves the queue */
    close(a);
    b = send_large(s, "/b", "", LARGE_BODY);
    check_begins(b, "HTTP/1.1 200");
    close(b);
    buf_release(&got);
    site_close(s);
}

TEST(http_server_takes_the_place_of_a_client_that_sends_slowly)
{
    struct site *s = site_open(
        (struct http_limits){ .large_bodies_bytes = 200000, .body_contended_ms = 300 });
    struct buf got = { 0 };
    int a = send_large(s, "/a", "", 1000);
    usleep(800000); /* alone it may be slow */
    CHECK(!fixture_read(a, &got, 1, 0));
    int b = send_large(s, "/b", "", LARGE_BODY);
    CHECK(fixture_read(a, &got, SIZE_MAX, 5000));
    CHECK(strncmp(got.data, "HTTP/1.1 408 ", 13) == 0);
    check_begins(b, "HTTP/1.1 200");
    close(a);
    close(b);
    buf_release(&got);
    site_close(s);
}

TEST(http_server_gives_leave_to_send_a_large_body_when_it_has_a_place)
{
    struct site *s = site_open(ONE_LARGE_BODY);
    struct buf got = { 0 };
    int a = send_large(s, "/hang", "", LARGE_BODY);
    wait_handled(s, 1);
    int b = send_large(s, "/b", "Expect: 100-continue\r\n", 0);
    CHECK(!fixture_read(b, &got, 1, 200));
    close(a);
    check_begins(b, "HTTP/1.1 100 Continue\r\n\r\n");
    close(b);
    /* A chunked body needs a place once it is large. */
    char *block = mem_calloc(1, LARGE_BODY);
    memset(block, 'b', LARGE_BODY);
    int c = fixture_dial(s->port);
    CHECK(send_text(c, "POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"));
    for (int i = 0; i < 2; i++) {
        CHECK(send_text(c, "249f0\r\n"));
        CHECK(fixture_send(c, block, LARGE_BODY));
        CHECK(send_text(c, "\r\n"));
    }
    CHECK(send_text(c, "0\r\n\r\n"));
    check_begins(c, "HTTP/1.1 200");
    close(c);
    mem_free(block);
    buf_release(&got);
    site_close(s);
}

/* ---- clients ---- */

TEST(http_server_limits_what_one_address_may_do)
{
    struct site *s = site_open(
        (struct http_limits){ .n_client_requests = 2, .n_client_connections = 4 });
    const char *hang = "GET /hang HTTP/1.1\r\nHost: a\r\n\r\n",
               *echo = "GET /e HTTP/1.1\r\nHost: a\r\n\r\n";
    struct buf got = { 0 };
    int a = fixture_dial(s->port), b = fixture_dial(s->port), c = fixture_dial(s->port);
    CHECK(send_text(a, hang));
    CHECK(send_text(b, hang));
    wait_handled(s, 2);
    CHECK(send_text(c, echo));
    CHECK(fixture_read(c, &got, SIZE_MAX, 5000));
    CHECK(strncmp(got.data, "HTTP/1.1 429 ", 13) == 0);
    CHECK(strstr(got.data, "\"code\":\"too_many_requests\""));
    close(c);
    close(a);
    site_wait_gone(s, 1);
    a = fixture_dial(s->port);
    c = fixture_dial(s->port);
    int d = fixture_dial(s->port);
    check_begins(fixture_dial(s->port), "HTTP/1.1 429");
    CHECK(send_text(a, echo));
    check_begins(a, "HTTP/1.1 200");
    close(a);
    close(b);
    close(c);
    close(d);
    buf_release(&got);
    site_close(s);
}

TEST_MAIN(CASE(http_server_makes_large_bodies_wait_for_each_other),
          CASE(http_server_counts_a_body_until_its_taker_is_done),
          CASE(http_server_does_not_let_large_bodies_wait_for_ever),
          CASE(http_server_takes_the_place_of_a_client_that_sends_slowly),
          CASE(http_server_gives_leave_to_send_a_large_body_when_it_has_a_place),
          CASE(http_server_limits_what_one_address_may_do))
