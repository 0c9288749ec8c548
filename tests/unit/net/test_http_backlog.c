/* test_http_backlog.c - answers that nobody reads are bounded together, and those who read are never
 * cut for those who do not; who half-closes a connection has left. */
#include "tests/unit/net/http_site.h"

enum { LARGE = 20 << 20 /* bytes of an answer of /large */ };

static const struct http_limits ROOM_FOR_TWO = { .answers_bytes = 50 << 20 };

/* Asks for a large answer and does not read it. */
static int ask_large(struct site *s)
{
    int fd = fixture_dial(s->port), n = atomic_load(&s->n_handled);
    CHECK(send_text(fd, "GET /large HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"));
    for (int i = 0; i < 5000 && atomic_load(&s->n_handled) == n; i++) usleep(1000);
    CHECK_EQ_INT(atomic_load(&s->n_handled), n + 1);
    return fd;
}

static void check_whole(int fd, struct buf *got)
{
    CHECK(fixture_read(fd, got, SIZE_MAX, 20000));
    CHECK(strncmp(got->data, "HTTP/1.1 200 ", 13) == 0);
    CHECK(got->len > LARGE);
    buf_clear(got);
}

TEST(http_server_bounds_the_answers_that_nobody_reads)
{
    struct site *s = site_open(ROOM_FOR_TWO);
    struct buf got = { 0 };
    int a = ask_large(s), b = ask_large(s), c = ask_large(s);
    /* The first two may still begin to read: the third is refused, not they. */
    CHECK(fixture_read(c, &got, SIZE_MAX, 5000));
    CHECK(strncmp(got.data, "HTTP/1.1 503 ", 13) == 0);
    CHECK(strstr(got.data, "\r\nRetry-After: 1\r\n"));
    CHECK(strstr(got.data, "\"code\":\"server_busy\""));
    buf_clear(&got);
    CHECK_EQ_INT(atomic_load(&s->n_gone), 0);
    CHECK(site_metric(s, "\nbaton_http_answer_bytes ") > LARGE);
    /* A small answer needs no room. */
    int small = fixture_dial(s->port);
    CHECK(send_text(small, "GET /s HTTP/1.1\r\nHost: a\r\n\r\n"));
    fixture_read_until(small, &got, 0, "GET|/s|");
    buf_clear(&got);
    usleep(1200000);
    int d = ask_large(s); /* now the first is cut for it */
    check_whole(d, &got);
    site_wait_gone(s, 1);
    check_whole(b, &got);
    CHECK_EQ_INT(site_metric(s, "\nbaton_http_answers_dropped_total{how=\"cut\"} "), 1);
    CHECK_EQ_INT(site_metric(s, "\nbaton_http_answers_dropped_total{how=\"refused\"} "), 1);
    CHECK_EQ_INT(site_metric(s, "\nbaton_http_answer_bytes "), 0);
    close(a);
    close(b);
    close(c);
    close(d);
    close(small);
    buf_release(&got);
    site_close(s);
}

TEST(http_server_cuts_no_reader_for_one_that_does_not_read)
{
    struct site *s = site_open(ROOM_FOR_TWO);
    struct buf got = { 0 };
    int reader = ask_large(s); /* is the oldest */
    usleep(50000);
    int a = ask_large(s);
    for (int i = 0; i < 15; i++) {
        fixture_read(reader, &got, 256 << 10, 1000);
        usleep(100000);
    }
    int b = ask_large(s);
    site_wait_gone(s, 1);
    CHECK_EQ_INT(site_metric(s, "\nbaton_http_answers_dropped_total{how=\"cut\"} "), 1);
    check_whole(reader, &got);
    check_whole(b, &got);
    close(reader);
    close(a);
    close(b);
    buf_release(&got);
    site_close(s);
}

TEST(http_server_bounds_streams_that_nobody_reads)
{
    struct site *s = site_open((struct http_limits){ .answers_bytes = 8 << 20 });
    int fds[4];
    for (int i = 0; i < 4; i++) {
        fds[i] = fixture_dial(s->port);
        CHECK(send_text(fds[i], "GET /flood HTTP/1.1\r\nHost: a\r\n\r\n"));
    }
    site_wait_gone(s, 4); /* each is alone in the end, and is cut at its own limit */
    CHECK(site_metric(s, "\nbaton_http_answers_dropped_total{how=\"cut\"} ") >= 2);
    for (int i = 0; i < 4; i++) close(fds[i]);
    site_close(s);
}

TEST(http_server_sends_one_answer_that_is_larger_than_the_limit)
{
    struct site *s = site_open((struct http_limits){ .answers_bytes = 1 << 20 });
    struct buf got = { 0 };
    int a = ask_large(s);
    usleep(50000);
    check_whole(a, &got);
    close(a);
    buf_release(&got);
    site_close(s);
}

/* docs/protocol.md: the server cannot tell shutdown(SHUT_WR) from close(), and stops the work. */
TEST(http_server_takes_a_half_close_for_the_end_of_its_client)
{
    struct site *s = site_default();
    struct buf got = { 0 };
    int a = fixture_dial(s->port);
    CHECK(send_text(a, "GET /hang HTTP/1.1\r\nHost: a\r\n\r\n"));
    for (int i = 0; i < 5000 && atomic_load(&s->n_handled) < 1; i++) usleep(1000);
    CHECK(shutdown(a, SHUT_WR) == 0);
    site_wait_gone(s, 1);
    CHECK(fixture_read(a, &got, SIZE_MAX, 5000));
    CHECK_EQ_INT(got.len, 0);
    close(a);
    /* An answer that is complete by then is sent to its end. */
    a = ask_large(s);
    CHECK(shutdown(a, SHUT_WR) == 0);
    usleep(100000);
    check_whole(a, &got);
    CHECK_EQ_INT(atomic_load(&s->n_gone), 1);
    close(a);
    buf_release(&got);
    site_close(s);
}

TEST_MAIN(CASE(http_server_bounds_the_answers_that_nobody_reads),
          CASE(http_server_cuts_no_reader_for_one_that_does_not_read),
          CASE(http_server_bounds_streams_that_nobody_reads),
          CASE(http_server_sends_one_answer_that_is_larger_than_the_limit),
          CASE(http_server_takes_a_half_close_for_the_end_of_its_client))
