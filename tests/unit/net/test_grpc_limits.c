/* test_grpc_limits.c - the gRPC server against clients that break the protocol, or keep to it in
 * ways that only cost: each loses its call or its connection, and others are served meanwhile. */
#include "shared/net/grpc/grpc_server.h"
#include "tests/unit/net/grpc_site.h"

/* Another client is served. */
static void check_serves(struct grpc_site *s)
{
    struct h2_client c;
    h2_open_as(&c, s, true, 2);
    CHECK_EQ_INT(h2_call(&c, "/t.T/Echo", NULL, "x")->status, GRPC_OK);
    h2_close(&c);
}

/* Sends n times the frames, after the preface; the connection must end with this GOAWAY (-1: with
 * none). */
static void check_flood(struct grpc_site *s, const struct buf *once, int n, int error)
{
    struct buf got = { 0 };
    int fd = raw_open(s), sent = 0;
    while (sent < n && raw_send(s, fd, buf_str(once))) sent++;
    raw_read_all(s, fd, &got);
    CHECK_EQ_INT(raw_goaway(&got), error);
    buf_release(&got);
    close(fd);
    check_serves(s);
}

TEST(floods_of_frames_that_only_cost_end_the_connection)
{
    static const struct {
        const char *what;
        uint8_t type, flags;
        size_t n;
    } cases[] = {
        { "pings", NGHTTP2_PING, 0, 8 },
        { "settings", NGHTTP2_SETTINGS, 0, 0 },
    };
    struct grpc_site s = { .port = 0 };
    site_open(&s);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct buf b = { 0 };
        const char payload[8] = { 0, 0, 0, 3, 1, 0, 0, 0 };
        for (int k = 0; k < 100; k++)
            raw_frame(&b, cases[i].type, cases[i].flags, 0, payload, cases[i].n);
        check_flood(&s, &b, 100, NGHTTP2_ENHANCE_YOUR_CALM);
        CHECK_EQ_INT(site_metric(&s, "baton_grpc_floods_total", ""), i + 1);
        buf_release(&b);
    }
    site_close(&s);
}

/* As many as a client may send, and as many more as it had answers. */
TEST(pings_between_answers_are_no_flood)
{
    enum { N = 600 };
    struct grpc_site s = { .port = 0 };
    struct h2_client c;
    site_open(&s);
    h2_open(&c, &s);
    for (int i = 0; i < N; i++) {
        CHECK_OK(nghttp2_submit_ping(c.session, 0, NULL));
        CHECK_EQ_INT(h2_call(&c, "/t.T/Echo", NULL, "x")->status, GRPC_OK);
        CHECK(!c.closed);
    }
    CHECK_EQ_INT(c.n_goaways, 0);
    h2_close(&c);
    site_close(&s);
}

TEST(empty_data_frames_are_a_flood)
{
    struct grpc_site s = { .port = 0 };
    struct buf b = { 0 }, head = { 0 }, got = { 0 };
    site_open(&s);
    raw_head(&head, "/t.T/Each");
    int fd = raw_open(&s);
    raw_frame(&b, NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, 1, head.data, head.len);
    for (int i = 0; i < 5000; i++) raw_frame(&b, NGHTTP2_DATA, 0, 1, NULL, 0);
    (void)raw_send(&s, fd, buf_str(&b));
    raw_read_all(&s, fd, &got);
    CHECK_EQ_INT(raw_goaway(&got), NGHTTP2_ENHANCE_YOUR_CALM);
    CHECK_EQ_INT(s.n_gone, 1);
    close(fd);
    check_serves(&s);
    buf_release(&b);
    buf_release(&head);
    buf_release(&got);
    site_close(&s);
}

/* CVE-2023-44487: calls that are reset as soon as they are made. */
TEST(rapid_resets_end_the_connection)
{
    struct grpc_site s = { .limits = { .reset_burst = 100, .reset_per_s = 1 } };
    struct buf b = { 0 }, head = { 0 };
    const char cancel[4] = { 0, 0, 0, NGHTTP2_CANCEL };
    site_open(&s);
    raw_head(&head, "/t.T/HoldOne");
    for (uint32_t i = 0; i < 3000; i++) {
        raw_frame(&b, NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, 2 * i + 1, head.data, head.len);
        raw_frame(&b, NGHTTP2_RST_STREAM, 0, 2 * i + 1, cancel, sizeof cancel);
    }
    check_flood(&s, &b, 1, NGHTTP2_ENHANCE_YOUR_CALM);
    CHECK(s.n_begun >= 100 && s.n_begun < 200);
    buf_release(&b);
    buf_release(&head);
    site_close(&s);
}

/* CVE-2025-8671: the server is made to reset the calls itself. */
TEST(resets_that_the_server_was_made_to_send_count_too)
{
    struct grpc_site s = { .limits = { .reset_burst = 100, .reset_per_s = 1 } };
    struct buf b = { 0 }, head = { 0 };
    const char nothing[4] = { 0 };
    site_open(&s);
    raw_head(&head, "/t.T/Hold");
    for (uint32_t i = 0; i < 3000; i++) {
        raw_frame(&b, NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, 2 * i + 1, head.data, head.len);
        raw_frame(&b, NGHTTP2_WINDOW_UPDATE, 0, 2 * i + 1, nothing, sizeof nothing);
    }
    struct buf got = { 0 };
    int fd = raw_open(&s);
    (void)raw_send(&s, fd, buf_str(&b));
    raw_read_all(&s, fd, &got);
    CHECK(raw_goaway(&got) > 0);
    CHECK(s.n_begun < 700); /* far fewer than came: those of one turn of the loop, at most */
    CHECK_EQ_INT(s.n_gone, s.n_begun);
    close(fd);
    check_serves(&s);
    buf_release(&got);
    buf_release(&b);
    buf_release(&head);
    site_close(&s);
}

/* Calls beyond those that a connection may have are refused before there is anything to reset. */
TEST(a_flood_of_refused_calls_ends_the_connection)
{
    struct grpc_site s = { .limits = { .n_calls = 8, .reset_burst = 100, .reset_per_s = 1 } };
    struct buf b = { 0 }, head = { 0 };
    site_open(&s);
    raw_head(&head, "/t.T/HoldOne");
    for (uint32_t i = 0; i < 3000; i++)
        raw_frame(&b, NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, 2 * i + 1, head.data, head.len);
    check_flood(&s, &b, 1, NGHTTP2_ENHANCE_YOUR_CALM);
    CHECK_EQ_INT(s.n_begun, 8 + 1); /* and that of check_serves */
    buf_release(&b);
    buf_release(&head);
    site_close(&s);
}

/* CVE-2024-28182: a head without an end. */
TEST(a_head_in_endless_pieces_ends_the_connection)
{
    struct grpc_site s = { .port = 0 };
    struct buf b = { 0 }, head = { 0 }, got = { 0 };
    site_open(&s);
    raw_head(&head, "/t.T/Echo");
    int fd = raw_open(&s);
    raw_frame(&b, NGHTTP2_HEADERS, 0, 1, head.data, head.len);
    for (int i = 0; i < 20000; i++) raw_frame(&b, NGHTTP2_CONTINUATION, 0, 1, "\0\1a\1b", 5);
    (void)raw_send(&s, fd, buf_str(&b));
    raw_read_all(&s, fd, &got);
    CHECK_EQ_INT(s.n_begun, 0);
    close(fd);
    check_serves(&s);
    buf_release(&b);
    buf_release(&head);
    buf_release(&got);
    site_close(&s);
}

TEST(a_head_that_is_too_large_ends_its_call_alone)
{
    struct grpc_site s = { .port = 0 };
    struct h2_client c;
    char *value = mem_calloc(20000, 1);
    memset(value, 'v', 19999);
    const struct h2_head large = { .more = "x-large", .more_value = value };
    site_open(&s);
    h2_open(&c, &s);
    const struct h2_call *call = h2_call(&c, "/t.T/Echo", &large, "x");
    CHECK_EQ_INT(call->status, GRPC_RESOURCE_EXHAUSTED);
    CHECK_EQ_INT(s.n_begun, 0);
    CHECK_EQ_INT(h2_call(&c, "/t.T/Echo", NULL, "x")->status, GRPC_OK);
    mem_free(value);
    h2_close(&c);
    site_close(&s);
}

TEST(what_is_not_http2_is_told_so)
{
    static const char http1[] = "GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
                      tls[] = "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
    static const struct {
        struct str bytes;
        bool is_answered;
    } cases[] = {
        { { http1, sizeof http1 - 1 }, true },
        { { tls, sizeof tls - 1 }, false },
        { { "PRI * HTTP/1.0\r\n\r\nSM\r\n\r\n", 24 }, false },
        { { "PUT / HTTP/1.1\r\n\r\n", 18 }, true },
    };
    struct grpc_site s = { .port = 0 };
    site_open(&s);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct buf got = { 0 };
        int fd = fixture_dial_as(s.port, 1);
        fcntl(fd, F_SETFL, O_NONBLOCK);
        CHECK(raw_send(&s, fd, cases[i].bytes));
        if (cases[i].is_answered) shutdown(fd, SHUT_WR);
        raw_read_all(&s, fd, &got);
        if (cases[i].is_answered) CHECK(strncmp(got.data, "HTTP/1.1 400 ", 13) == 0);
        buf_release(&got);
        close(fd);
    }
    check_serves(&s);
    site_close(&s);
}

TEST(more_calls_than_one_connection_may_have_are_refused)
{
    struct grpc_site s = { .limits = { .n_calls = 8 } };
    struct h2_client c;
    static struct h2_source from[12];
    int n_refused = 0;
    site_open(&s);
    h2_open(&c, &s); /* which sends before it knows the limit */
    for (int i = 0; i < 12; i++) {
        h2_add_message(&from[i], "x");
        h2_begin(&c, "/t.T/HoldOne", NULL, &from[i]);
    }
    H2_UNTIL(&c, s.n_busy == 8 && (n_refused == 4 || c.calls[11].closed));
    for (int i = 0; i < 12; i++) {
        n_refused += c.calls[i].closed && c.calls[i].error == NGHTTP2_REFUSED_STREAM;
        buf_release(&from[i].bytes);
    }
    CHECK_EQ_INT(n_refused, 4); /* which clients send again by themselves */
    CHECK_EQ_INT(s.n_begun, 8);
    h2_close(&c);
    site_close(&s);
}

TEST(calls_are_limited_in_all)
{
    struct grpc_site s = { .limits = { .n_calls_all = 5 } };
    struct h2_client c[2];
    struct h2_source one = { .n_sent = 0 };
    site_open(&s);
    for (unsigned i = 0; i < 2; i++) h2_open_as(&c[i], &s, true, i + 1);
    for (uint32_t i = 0; i < 4; i++) {
        one = (struct h2_source){ .bytes = one.bytes };
        if (i == 0) h2_add_message(&one, "x");
        h2_begin(&c[0], "/t.T/HoldOne", NULL, &one);
        H2_UNTIL(&c[0], s.n_busy == i + 1);
    }
    CHECK_EQ_INT(h2_call(&c[1], "/t.T/Echo", NULL, "x")->status, GRPC_OK);
    one = (struct h2_source){ .bytes = one.bytes };
    h2_begin(&c[0], "/t.T/HoldOne", NULL, &one);
    H2_UNTIL(&c[0], s.n_busy == 5);
    CHECK_EQ_INT(h2_call(&c[1], "/t.T/Echo", NULL, "x")->status, GRPC_RESOURCE_EXHAUSTED);
    buf_release(&one.bytes);
    for (int i = 0; i < 2; i++) h2_close(&c[i]);
    site_close(&s);
}

TEST(connections_are_limited_in_all_and_by_client)
{
    struct grpc_site s = { .limits = { .n_connections = 3, .n_client_connections = 2 } };
    struct h2_client c[5];
    site_open(&s);
    for (unsigned i = 0; i < 5; i++) {
        h2_open_as(&c[i], &s, true, i < 3 ? 1 : i);
        for (int k = 0; k < 50; k++) h2_turn(&c[i]);
    }
    CHECK(!c[0].closed && !c[1].closed && c[2].closed); /* three of one address */
    CHECK(!c[3].closed && c[4].closed);                 /* the fourth in all */
    CHECK_EQ_INT(site_metric(&s, "baton_grpc_turned_away_total", ""), 2);
    for (int i = 0; i < 5; i++) h2_close(&c[i]);
    site_close(&s);
}

TEST(requests_of_a_client_are_limited)
{
    struct grpc_site s = { .limits = { .n_client_requests = 2 } };
    struct h2_client a, b;
    struct h2_source two = { .stays_open = true };
    site_open(&s);
    h2_open_as(&a, &s, true, 1);
    h2_open_as(&b, &s, true, 1);
    h2_add_message(&two, "x");
    h2_add_message(&two, "x");
    h2_begin(&a, "/t.T/Hold", NULL, &two);
    H2_UNTIL(&a, s.n_busy == 2);
    CHECK_EQ_INT(h2_call(&b, "/t.T/HoldOne", NULL, "x")->status, GRPC_RESOURCE_EXHAUSTED);
    h2_close(&a);
    H2_UNTIL(&b, s.n_gone == 1);
    struct h2_source one = { .n_sent = 0 };
    h2_add_message(&one, "x");
    h2_begin(&b, "/t.T/HoldOne", NULL, &one);
    H2_UNTIL(&b, s.n_busy == 3);
    buf_release(&one.bytes);
    buf_release(&two.bytes);
    h2_close(&b);
    site_close(&s);
}

/* A stream's messages wait while as many requests of it run as may. */
TEST(messages_of_a_stream_wait_for_their_turn)
{
    struct grpc_site s = { .limits = { .n_requests = 3 } };
    struct h2_client c;
    struct h2_source from = { .n_sent = 0 };
    site_open(&s);
    h2_open(&c, &s);
    for (int i = 0; i < 10; i++) h2_add_message(&from, "x");
    h2_begin(&c, "/t.T/Hold", NULL, &from);
    H2_UNTIL(&c, s.n_busy == 3);
    for (int i = 0; i < 100; i++) h2_turn(&c);
    CHECK_EQ_INT(s.n_busy, 3);
    for (uint32_t n = 4; n <= 10; n++) {
        grpc_done(s.held);
        H2_UNTIL(&c, s.n_busy == n);
    }
    CHECK_EQ_INT(s.n_half_closed, 0); /* it comes after the last message */
    grpc_done(s.held);
    H2_UNTIL(&c, s.n_half_closed == 1);
    buf_release(&from.bytes);
    h2_close(&c);
    site_close(&s);
}

/* ---- slow clients ---- */

TEST(a_client_that_reads_nothing_loses_its_call)
{
    struct grpc_site s = { .port = 0 };
    struct h2_client c;
    struct h2_source from = { .n_sent = 0 };
    site_open(&s);
    h2_open_as(&c, &s, false, 1);
    h2_add_message(&from, "x");
    const struct h2_call *call = h2_begin(&c, "/t.T/Flood", NULL, &from);
    H2_UNTIL(&c, call->closed);
    CHECK_EQ_INT(call->error, NGHTTP2_ENHANCE_YOUR_CALM);
    CHECK_EQ_INT(s.n_full, 1); /* the handler heard that it is to stop */
    CHECK_EQ_INT(s.n_gone, 1);
    CHECK_EQ_INT(site_metric(&s, "baton_grpc_slow_readers_total", ""), 1);
    check_serves(&s);
    buf_release(&from.bytes);
    h2_close(&c);
    site_close(&s);
}

TEST(an_answer_that_nobody_reads_ends_after_a_while)
{
    struct grpc_site s = { .limits = { .write_stall_ms = 100 } };
    struct h2_client c;
    struct h2_source from = { .n_sent = 0 };
    site_open(&s);
    h2_open_as(&c, &s, false, 1);
    h2_add_message(&from, "1000000");
    const struct h2_call *call = h2_begin(&c, "/t.T/Give", NULL, &from);
    H2_UNTIL(&c, call->closed);
    CHECK_EQ_INT(call->error, NGHTTP2_ENHANCE_YOUR_CALM);
    CHECK_EQ_INT(s.n_gone, 1);
    buf_release(&from.bytes);
    h2_close(&c);
    site_close(&s);
}

/* One that does not even read from its socket. */
TEST(a_connection_that_takes_nothing_ends_after_a_while)
{
    struct grpc_site s = { .limits = { .write_stall_ms = 200 } };
    struct buf b = { 0 }, head = { 0 };
    const char window[6] = { 0,          NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE,
                             0x7F,       (char)0xFF,
                             (char)0xFF, (char)0xFF },
               more[4] = { 0x70, 0, 0, 0 };
    site_open(&s);
    raw_head(&head, "/t.T/Give");
    int fd = raw_open(&s);
    raw_frame(&b, NGHTTP2_SETTINGS, 0, 0, window, sizeof window);
    raw_frame(&b, NGHTTP2_WINDOW_UPDATE, 0, 0, more, sizeof more);
    for (uint32_t i = 0; i < 4; i++) {
        raw_frame(&b, NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, 2 * i + 1, head.data, head.len);
        raw_frame(&b, NGHTTP2_DATA, NGHTTP2_FLAG_END_STREAM, 2 * i + 1, "\0\0\0\0\01020000000", 13);
    }
    CHECK(raw_send(&s, fd, buf_str(&b)));
    for (int i = 0; i < 30000 && s.n_gone < 4; i++) site_turn(&s);
    CHECK_EQ_INT(s.n_gone, 4);
    check_serves(&s);
    close(fd);
    buf_release(&b);
    buf_release(&head);
    site_close(&s);
}

/* Together answers may hold so much; then those of clients that read nothing go. */
TEST(answers_that_wait_to_be_read_are_limited_together)
{
    struct grpc_site s = { .limits = { .answers_bytes = 3000000 } };
    struct h2_client slow, quick;
    struct h2_source from[3] = { { .n_sent = 0 } };
    site_open(&s);
    h2_open_as(&slow, &s, false, 1);
    h2_open_as(&quick, &s, true, 2);
    for (int i = 0; i < 3; i++) h2_add_message(&from[i], "1400000");
    h2_begin(&slow, "/t.T/Give", NULL, &from[0]);
    h2_begin(&slow, "/t.T/Give", NULL, &from[1]);
    for (int i = 0; i < 200; i++) h2_turn(&slow);
    CHECK_EQ_INT(s.n_full, 0);
    h2_begin(&slow, "/t.T/Give", NULL, &from[2]); /* the others have only just begun to wait */
    H2_UNTIL(&slow, slow.calls[2].closed);
    CHECK_EQ_INT(s.n_full, 1);
    usleep(1100000);
    const struct h2_call *call = h2_call(&quick, "/t.T/Give", NULL, "1400000");
    CHECK_EQ_INT(call->status, GRPC_OK);
    CHECK_EQ_INT(call->data.len, 1400005);
    H2_UNTIL(&slow, slow.calls[0].closed || slow.calls[1].closed);
    for (int i = 0; i < 3; i++) buf_release(&from[i].bytes);
    h2_close(&slow);
    h2_close(&quick);
    site_close(&s);
}

/* ---- slow senders ---- */

TEST(connections_that_say_nothing_end)
{
    struct grpc_site s = { .limits = { .begin_timeout_ms = 100 } };
    struct buf got = { 0 };
    site_open(&s);
    int silent = fixture_dial_as(s.port, 1), half = fixture_dial_as(s.port, 1);
    fcntl(silent, F_SETFL, O_NONBLOCK);
    fcntl(half, F_SETFL, O_NONBLOCK);
    CHECK(raw_send(&s, half, STR("PRI * HT")));
    raw_read_all(&s, silent, &got);
    raw_read_all(&s, half, &got);
    close(silent);
    close(half);
    check_serves(&s);
    buf_release(&got);
    site_close(&s);
}

TEST(idle_connections_are_told_to_come_again)
{
    struct grpc_site s = { .limits = { .idle_timeout_ms = 100 } };
    struct h2_client c;
    site_open(&s);
    h2_open(&c, &s);
    const struct h2_call *call = h2_call(&c, "/t.T/Echo", NULL, "x");
    H2_UNTIL(&c, c.closed);
    CHECK_EQ_INT(c.goaway_error, NGHTTP2_NO_ERROR);
    CHECK_EQ_INT(c.goaway_last, call->stream);
    h2_close(&c);
    site_close(&s);
}

TEST(messages_that_do_not_arrive_end_their_calls)
{
    struct grpc_site s = { .limits = { .message_timeout_ms = 100 } };
    struct h2_client c;
    struct h2_source none = { .stays_open = true }, half = { .stays_open = true },
                     idle = { .stays_open = true };
    site_open(&s);
    h2_open(&c, &s);
    buf_add(&half.bytes, "\0\0\0\0\5ab", 7);
    h2_add_message(&idle, "x");
    const struct h2_call *a = h2_begin(&c, "/t.T/Echo", NULL, &none),
                         *b = h2_begin(&c, "/t.T/Each", NULL, &half),
                         *open = h2_begin(&c, "/t.T/Each", NULL, &idle);
    H2_UNTIL(&c, a->closed && b->closed);
    CHECK_EQ_INT(a->status, GRPC_DEADLINE_EXCEEDED);
    CHECK_EQ_INT(b->status, GRPC_DEADLINE_EXCEEDED);
    CHECK(!open->closed); /* between messages a stream may wait */
    buf_release(&half.bytes);
    buf_release(&idle.bytes);
    h2_close(&c);
    site_close(&s);
}

TEST(a_head_that_is_not_finished_ends_the_connection)
{
    struct grpc_site s = { .limits = { .begin_timeout_ms = 100 } };
    struct buf b = { 0 }, head = { 0 }, got = { 0 };
    site_open(&s);
    raw_head(&head, "/t.T/Echo");
    int fd = raw_open(&s);
    raw_frame(&b, NGHTTP2_HEADERS, 0, 1, head.data, head.len);
    CHECK(raw_send(&s, fd, buf_str(&b)));
    raw_read_all(&s, fd, &got);
    close(fd);
    check_serves(&s);
    buf_release(&b);
    buf_release(&head);
    buf_release(&got);
    site_close(&s);
}

/* ---- memory of messages ---- */

/* The handler keeps what the first messages count for; a later one waits for room, with its bytes
 * still at the client. */
TEST(messages_wait_for_room)
{
    enum { N = 300 * 1024 };
    struct grpc_site s = { .limits = { .message_bytes = N, .large_bodies_bytes = N } };
    struct h2_client c;
    struct h2_source from[3] = { { .n_sent = 0 } };
    char *text = mem_calloc(N + 1, 1);
    int n_sent_all = 0;
    memset(text, 'x', N);
    site_open(&s);
    h2_open(&c, &s);
    for (int i = 0; i < 3; i++) {
        h2_add_message(&from[i], text);
        h2_begin(&c, "/t.T/Take", NULL, &from[i]);
    }
    for (int i = 0; i < 500; i++) h2_turn(&c);
    CHECK(s.n_taken >= 1 && s.n_taken < 3);
    for (int i = 0; i < 3; i++) n_sent_all += from[i].n_sent == from[i].bytes.len;
    CHECK(n_sent_all < 3); /* its window is closed */
    check_serves(&s);
    for (int i = 0; s.n_taken < 3; i++) {
        const int before = s.n_taken;
        CHECK(i < before);
        http_taken_body_release(&s.taken[i]);
        H2_UNTIL(&c, s.n_taken > before || i + 1 < before);
    }
    H2_UNTIL(&c, c.calls[0].closed && c.calls[1].closed && c.calls[2].closed);
    CHECK_EQ_INT(s.n_largest, N);
    for (int i = 0; i < 3; i++) buf_release(&from[i].bytes);
    mem_free(text);
    h2_close(&c);
    site_close(&s);
}

/* What waits at the server is little, and never in the way of a message that has room. */
TEST(messages_that_wait_do_not_block_their_connection)
{
    enum { N = 300 * 1024, N_CALLS = 12 };
    struct grpc_site s = { .limits = { .message_bytes = N, .large_bodies_bytes = N } };
    struct h2_client c;
    static struct h2_source from[N_CALLS];
    char *text = mem_calloc(N + 1, 1);
    int n_refused = 0, n_served = 0;
    memset(text, 'x', N);
    site_open(&s);
    h2_open(&c, &s);
    for (int i = 0; i < N_CALLS; i++) {
        h2_add_message(&from[i], text);
        h2_begin(&c, "/t.T/Echo", NULL, &from[i]);
    }
    for (int i = 0; i < N_CALLS; i++) {
        H2_UNTIL(&c, c.calls[i].closed);
        n_refused += c.calls[i].status == GRPC_RESOURCE_EXHAUSTED;
        n_served += c.calls[i].status == GRPC_OK;
        buf_release(&from[i].bytes);
    }
    CHECK_EQ_INT(n_refused + n_served, N_CALLS);
    CHECK(n_refused > 0 && n_served >= 4);
    mem_free(text);
    h2_close(&c);
    site_close(&s);
}

TEST(a_message_that_finds_no_room_is_refused_in_the_end)
{
    enum { N = 300 * 1024 };
    struct grpc_site s = { .limits = {
                               .message_bytes = N, .large_bodies_bytes = N, .body_wait_ms = 200 } };
    struct h2_client c;
    struct h2_source from[3] = { { .n_sent = 0 } };
    char *text = mem_calloc(N + 1, 1);
    int n_refused = 0;
    memset(text, 'x', N);
    site_open(&s);
    h2_open(&c, &s);
    for (int i = 0; i < 3; i++) {
        h2_add_message(&from[i], text);
        h2_begin(&c, "/t.T/Take", NULL, &from[i]);
    }
    H2_UNTIL(&c, c.calls[0].closed && c.calls[1].closed && c.calls[2].closed);
    for (int i = 0; i < 3; i++) {
        n_refused += c.calls[i].status == GRPC_RESOURCE_EXHAUSTED;
        buf_release(&from[i].bytes);
    }
    CHECK(n_refused >= 1 && n_refused + s.n_messages == 3);
    mem_free(text);
    h2_close(&c);
    site_close(&s);
}

TEST_MAIN(CASE(floods_of_frames_that_only_cost_end_the_connection),
          CASE(pings_between_answers_are_no_flood), CASE(empty_data_frames_are_a_flood),
          CASE(rapid_resets_end_the_connection),
          CASE(resets_that_the_server_was_made_to_send_count_too),
          CASE(a_flood_of_refused_calls_ends_the_connection),
          CASE(a_head_in_endless_pieces_ends_the_connection),
          CASE(a_head_that_is_too_large_ends_its_call_alone), CASE(what_is_not_http2_is_told_so),
          CASE(more_calls_than_one_connection_may_have_are_refused), CASE(calls_are_limited_in_all),
          CASE(connections_are_limited_in_all_and_by_client),
          CASE(requests_of_a_client_are_limited), CASE(messages_of_a_stream_wait_for_their_turn),
          CASE(a_client_that_reads_nothing_loses_its_call),
          CASE(an_answer_that_nobody_reads_ends_after_a_while),
          CASE(a_connection_that_takes_nothing_ends_after_a_while),
          CASE(answers_that_wait_to_be_read_are_limited_together),
          CASE(connections_that_say_nothing_end), CASE(idle_connections_are_told_to_come_again),
          CASE(messages_that_do_not_arrive_end_their_calls),
          CASE(a_head_that_is_not_finished_ends_the_connection), CASE(messages_wait_for_room),
          CASE(messages_that_wait_do_not_block_their_connection),
          CASE(a_message_that_finds_no_room_is_refused_in_the_end))
