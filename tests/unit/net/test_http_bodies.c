/* test_http_bodies.c - bodies are counted as they arrive, wait for room in turn, and leave no memory
 * behind; one client's connections and requests are limited. */
#include "tests/unit/net/http_site.h"

/* ---- large bodies ---- */

enum { LARGE_BODY = 150000 };

static const struct http_limits ONE_LARGE_BODY = { .large_bodies_bytes = 200000 };

static void send_bytes(int fd, size_t n)
{
    char *body = mem_calloc(1, n + 1);
    memset(body, 'b', n);
    CHECK(fixture_send(fd, body, n));
    mem_free(body);
}

/* Sends, from 127.0.0.`host`, the first n of the `length` bytes of a body. */
static int send_body(const struct site *s, unsigned host, const char *path, const char *headers,
                     size_t length, size_t n)
{
    char head[256];
    int fd = fixture_dial_as(s->port, host);
    snprintf(head, sizeof head, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %zu\r\n%s\r\n",
             path, length, headers);
    CHECK(send_text(fd, head));
    send_bytes(fd, n);
    return fd;
}

/* The first n bytes of a body of LARGE_BODY. */
static int send_large(const struct site *s, const char *path, const char *headers, size_t n)
{
    return send_body(s, 1, path, headers, LARGE_BODY, n);
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

TEST(http_server_does_not_count_a_body_that_was_only_announced)
{
    struct site *s = site_open((struct http_limits){
        .large_bodies_bytes = 400000, .body_bytes = LARGE_BODY, .body_contended_ms = 60000 });
    int fds[200];
    for (int i = 0; i < 200; i++) fds[i] = send_large(s, "/a", "", 0);
    uint64_t t = clock_ms();
    int b = send_large(s, "/b", "", LARGE_BODY);
    check_begins(b, "HTTP/1.1 200");
    CHECK(clock_ms() - t < 30000); /* contended bodies wait a minute */
    close(b);
    for (int i = 0; i < 200; i++) close(fds[i]);
    site_close(s);
}

/* Eight bodies that together are four times the limit stop half-way, then go on. */
TEST(http_server_reads_half_read_bodies_to_their_end)
{
    enum { N = 8, LENGTH = 600000 };
    struct site *s = site_open(
        (struct http_limits){ .large_bodies_bytes = 1200000, .body_bytes = LENGTH });
    int fds[N];
    for (int i = 0; i < N; i++)
        fds[i] = send_body(s, 1 + (unsigned)i % 3, "/take", "", LENGTH, LENGTH / 2);
    usleep(200000);
    CHECK_EQ_INT(atomic_load(&s->n_handled), 0);
    for (int i = 0; i < N; i++) send_bytes(fds[i], LENGTH / 2);
    for (int i = 0; i < N; i++) check_begins(fds[i], "HTTP/1.1 200");
    for (int i = 0; i < N; i++) close(fds[i]);
    CHECK_EQ_INT(atomic_load(&s->n_handled), N);
    usleep(400000); /* until /take has released the last one */
    site_close(s);
}

TEST(http_server_gives_room_to_the_addresses_in_turn)
{
    struct site *s = site_open(ONE_LARGE_BODY);
    int a[6];
    for (int i = 0; i < 6; i++) {
        a[i] = send_large(s, "/hang", "", LARGE_BODY);
        if (i == 0) wait_handled(s, 1);
    }
    usleep(100000);
    int b = send_body(s, 2, "/b", "", LARGE_BODY, LARGE_BODY);
    usleep(100000);
    close(a[0]);
    wait_handled(s, 2);
    for (int i = 1; i < 6 && atomic_load(&s->n_handled) < 3; i++) {
        close(a[i]); /* whichever of them was read second */
        usleep(50000);
    }
    check_begins(b, "HTTP/1.1 200");
    CHECK(atomic_load(&s->n_handled) <= 4); /* two of the first address, b, and the next one */
    close(b);
    for (int i = 0; i < 6; i++) close(a[i]);
    site_close(s);
}

TEST(http_server_bounds_small_bodies_together)
{
    enum { LENGTH = 60000 };
    struct site *s = site_open(
        (struct http_limits){ .large_bodies_bytes = 400000, .body_wait_ms = 60000 });
    int a = send_body(s, 1, "/hang", "", LENGTH, LENGTH);
    wait_handled(s, 1);
    int b = send_body(s, 1, "/hang", "", LENGTH, LENGTH); /* more than half for one address */
    int c = send_body(s, 2, "/hang", "", LENGTH, LENGTH);
    wait_handled(s, 2);
    int d = send_body(s, 3, "/hang", "", LENGTH, LENGTH);
    wait_handled(s, 3);
    int e = send_body(s, 4, "/e", "", LENGTH, LENGTH); /* more than all may have */
    usleep(200000);
    CHECK_EQ_INT(atomic_load(&s->n_handled), 3);
    close(a);
    wait_handled(s, 4);
    usleep(100000);
    CHECK_EQ_INT(atomic_load(&s->n_handled), 4);
    close(b);
    check_begins(e, "HTTP/1.1 200");
    close(c);
    close(d);
    close(e);
    site_close(s);
}

TEST(http_server_takes_room_from_small_bodies_that_stall)
{
    struct site *s = site_open(
        (struct http_limits){ .large_bodies_bytes = 100000, .body_contended_ms = 300 });
    struct buf got = { 0 };
    int a = send_body(s, 1, "/a", "", 60000, 1);
    usleep(600000); /* alone it may be slow */
    CHECK(!fixture_read(a, &got, 1, 0));
    int b = send_body(s, 2, "/b", "", 60000, 60000);
    CHECK(fixture_read(a, &got, SIZE_MAX, 5000));
    CHECK(strncmp(got.data, "HTTP/1.1 408 ", 13) == 0);
    check_begins(b, "HTTP/1.1 200");
    close(a);
    close(b);
    buf_release(&got);
    site_close(s);
}

static long resident_kib(void)
{
    char line[128];
    long kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    CHECK(f);
    while (fgets(line, sizeof line, f))
        if (strncmp(line, "VmRSS:", 6) == 0) kib = strtol(line + 6, NULL, 10);
    fclose(f);
    return kib;
}

TEST(http_server_gives_memory_back_after_a_burst_of_small_bodies)
{
    if (TEST_IS_SANITIZED) SKIP("the sanitizer's allocator keeps what is freed");
    enum { N = 600, LENGTH = 60000 };
    struct site *s = site_default();
    int fds[N];
    for (int i = 0; i < N; i++)
        fds[i] = send_body(s, 1 + (unsigned)i % 4, "/hang", "", LENGTH, LENGTH);
    wait_handled(s, N);
    long most = resident_kib();
    for (int i = 0; i < N - 1; i++) close(fds[i]); /* the last one keeps the heap's end */
    site_wait_gone(s, N - 1);
    long left = most;
    for (int i = 0; i < 60 && left > most - 24 * 1024; i++) {
        usleep(100000);
        left = resident_kib();
    }
    if (left > most - 24 * 1024)
        test_fail(__FILE__, __LINE__, "%ld KiB of %ld are left", left, most);
    close(fds[N - 1]);
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
          CASE(http_server_does_not_count_a_body_that_was_only_announced),
          CASE(http_server_reads_half_read_bodies_to_their_end),
          CASE(http_server_gives_room_to_the_addresses_in_turn),
          CASE(http_server_bounds_small_bodies_together),
          CASE(http_server_takes_room_from_small_bodies_that_stall),
          CASE(http_server_gives_memory_back_after_a_burst_of_small_bodies),
          CASE(http_server_limits_what_one_address_may_do))
