/* test_grpc_server.c - the gRPC server over real sockets, with clients that keep to the protocol:
 * calls of both kinds, how they end, deadlines, and clients that leave. */
#include "shared/net/grpc/grpc_server.h"

#include "tests/unit/net/grpc_site.h"

static void check_message(const struct h2_call *c, const char *text)
{
    CHECK_EQ_INT(c->data.len, 5 + strlen(text));
    CHECK_EQ_STR(c->data.data + 5, text);
}

TEST(a_call_of_one_message_is_answered)
{
    struct grpc_site s = { .port = 0 };
    struct h2_client c;
    site_open(&s);
    h2_open(&c, &s);
    struct h2_call *call = h2_call(&c, "/t.T/Echo", NULL, "hello");
    CHECK_EQ_INT(call->http, 200);
    CHECK_EQ_INT(call->status, GRPC_OK);
    CHECK_EQ_INT(call->error, NGHTTP2_NO_ERROR);
    check_message(call, "hello");
    call = h2_call(&c, "/t.T/Echo", NULL, "");
    CHECK_EQ_INT(call->status, GRPC_OK);
    CHECK_EQ_INT(call->data.len, 5);
    const struct h2_head proto = { .type = "application/grpc+proto", .encoding = "identity" };
    call = h2_call(&c, "/t.T/Echo", &proto, "again");
    check_message(call, "again");
    CHECK_EQ_INT(s.n_ended, 3);
    CHECK_EQ_INT(s.n_gone, 0);
    CHECK_EQ_INT(site_metric(&s, "baton_grpc_calls_total", "method=\"t.T/Echo\",code=\"OK\""), 3);
    h2_close(&c);
    site_close(&s);
}

TEST(an_error_comes_with_the_headers_and_its_text_is_escaped)
{
    struct grpc_site s = { .port = 0 };
    struct h2_client c;
    site_open(&s);
    h2_open(&c, &s);
    struct h2_call *call = h2_call(&c, "/t.T/Fail", NULL, "x");
    CHECK_EQ_INT(call->http, 200);
    CHECK_EQ_INT(call->status, GRPC_NOT_FOUND);
    CHECK_EQ_STR(call->text, "no, 100 %25 not%0A");
    CHECK_EQ_INT(call->data.len, 0);
    h2_close(&c);
    site_close(&s);
}

TEST(what_is_no_call_is_refused)
{
    static const struct {
        const char *path;
        struct h2_head head;
        int http, status;
    } cases[] = {
        { "/t.T/None", { .method = NULL }, 200, GRPC_UNIMPLEMENTED },
        { "/t.T/Echo/", { .method = NULL }, 200, GRPC_UNIMPLEMENTED },
        { "/", { .method = NULL }, 200, GRPC_UNIMPLEMENTED },
        { "/t.T/Echo", { .method = "PUT" }, 405, GRPC_INTERNAL },
        { "/t.T/Echo", { .type = "application/json" }, 415, -1 },
        { "/t.T/Echo", { .type = "application/grpcweb" }, 415, -1 },
        { "/t.T/Echo", { .type = "application/grpc-web+proto" }, 415, -1 },
        { "/t.T/Echo", { .encoding = "gzip" }, 200, GRPC_UNIMPLEMENTED },
        { "/t.T/Echo", { .timeout = "" }, 200, GRPC_INVALID_ARGUMENT },
        { "/t.T/Echo", { .timeout = "5" }, 200, GRPC_INVALID_ARGUMENT },
        { "/t.T/Echo", { .timeout = "S" }, 200, GRPC_INVALID_ARGUMENT },
        { "/t.T/Echo", { .timeout = "-1S" }, 200, GRPC_INVALID_ARGUMENT },
        { "/t.T/Echo", { .timeout = "123456789S" }, 200, GRPC_INVALID_ARGUMENT },
        { "/t.T/Echo", { .timeout = "1h" }, 200, GRPC_INVALID_ARGUMENT },
    };
    struct grpc_site s = { .port = 0 };
    struct h2_client c;
    site_open(&s);
    h2_open(&c, &s);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const struct h2_call *call = h2_call(&c, cases[i].path, &cases[i].head, "x");
        CHECK_EQ_INT(call->http, cases[i].http);
        if (call->http == 200) CHECK_EQ_INT(call->status, cases[i].status);
        if (call->http == 200) CHECK(call->text[0]);
    }
    CHECK_EQ_INT(s.n_begun, 0);
    CHECK_EQ_INT(h2_call(&c, "/t.T/Echo", NULL, "x")->status, GRPC_OK); /* it goes on */
    h2_close(&c);
    site_close(&s);
}

static int status_of_bytes(struct h2_client *c, const char *path, const void *bytes, size_t n)
{
    struct h2_source from = { .n_sent = 0 };
    buf_add(&from.bytes, bytes, n);
    const struct h2_call *call = h2_begin(c, path, NULL, &from);
    H2_UNTIL(c, call->closed || c->closed);
    buf_release(&from.bytes);
    return call->status;
}

TEST(what_is_no_message_is_refused)
{
    struct grpc_site s = { .limits = { .message_bytes = 1000 } };
    struct h2_client c;
    site_open(&s);
    h2_open(&c, &s);
    CHECK_EQ_INT(status_of_bytes(&c, "/t.T/Echo", "", 0), GRPC_INVALID_ARGUMENT);
    CHECK_EQ_INT(status_of_bytes(&c, "/t.T/Echo", "\0\0", 2), GRPC_INVALID_ARGUMENT);
    CHECK_EQ_INT(status_of_bytes(&c, "/t.T/Echo", "\0\0\0\0\5abc", 8), GRPC_INVALID_ARGUMENT);
    CHECK_EQ_INT(status_of_bytes(&c, "/t.T/Echo", "\0\0\0\0\1a\0\0\0\0\1b", 12),
                 GRPC_INVALID_ARGUMENT);
    CHECK_EQ_INT(status_of_bytes(&c, "/t.T/Echo", "\1\0\0\0\1a", 6), GRPC_UNIMPLEMENTED);
    CHECK_EQ_INT(status_of_bytes(&c, "/t.T/Echo", "\7\0\0\0\1a", 6), GRPC_UNIMPLEMENTED);
    CHECK_EQ_INT(status_of_bytes(&c, "/t.T/Echo", "\0\0\0\3\351a", 6), GRPC_RESOURCE_EXHAUSTED);
    CHECK_EQ_INT(status_of_bytes(&c, "/t.T/Echo", "\0\377\377\377\377a", 6),
                 GRPC_RESOURCE_EXHAUSTED);
    CHECK_EQ_INT(status_of_bytes(&c, "/t.T/Each", "\0\0\0\0\1a\0\0", 8), GRPC_INVALID_ARGUMENT);
    CHECK_EQ_INT(s.n_messages, 1); /* the first of the last one */
    CHECK_EQ_INT(s.n_gone, 9);
    h2_close(&c);
    site_close(&s);
}

/* Pieces of every size: the head and the message may be cut anywhere. */
TEST(messages_of_a_stream_come_in_any_pieces)
{
    enum { N = 40 };
    struct grpc_site s = { .port = 0 };
    struct h2_client c;
    struct h2_source all = { .n_sent = 0 };
    char text[N + 1];
    site_open(&s);
    for (int i = 0; i < N; i++) {
        memset(text, 'a' + i % 26, (size_t)i);
        text[i] = 0;
        h2_add_message(&all, text);
    }
    for (size_t piece = 1; piece < 50; piece += 7) {
        h2_open(&c, &s);
        struct h2_source from = { .stays_open = true };
        struct h2_call *call = h2_begin(&c, "/t.T/Each", NULL, &from);
        for (size_t at = 0; at < all.bytes.len; at += piece) {
            const size_t left = all.bytes.len - at;
            buf_add(&from.bytes, all.bytes.data + at, left < piece ? left : piece);
            from.stays_open = left > piece;
            nghttp2_session_resume_data(c.session, call->stream);
            h2_turn(&c);
        }
        H2_UNTIL(&c, call->closed);
        CHECK_EQ_INT(call->status, GRPC_OK);
        CHECK_EQ_INT(call->data.len, all.bytes.len);
        CHECK(memcmp(call->data.data, all.bytes.data, all.bytes.len) == 0);
        buf_release(&from.bytes);
        h2_close(&c);
    }
    CHECK_EQ_INT(s.n_half_closed, 7);
    CHECK_EQ_INT(s.n_gone, 0);
    buf_release(&all.bytes);
    site_close(&s);
}

TEST(large_messages_go_both_ways)
{
    enum { N = 3 << 20 };
    struct grpc_site s = { .port = 0 };
    struct h2_client c;
    char *text = mem_calloc(N + 1, 1);
    memset(text, 'L', N);
    site_open(&s);
    h2_open(&c, &s);
    const struct h2_call *call = h2_call(&c, "/t.T/Echo", NULL, text);
    CHECK_EQ_INT(call->status, GRPC_OK);
    check_message(call, text);
    mem_free(text);
    h2_close(&c);
    site_close(&s);
}

TEST(hundreds_of_calls_at_once)
{
    enum { N = 400 };
    struct grpc_site s = { .port = 0 };
    struct h2_client c;
    static struct h2_source from[N];
    site_open(&s);
    h2_open(&c, &s);
    for (int i = 0; i < N; i++) {
        h2_add_message(&from[i], "some text");
        h2_begin(&c, i % 2 ? "/t.T/Echo" : "/t.T/Each", NULL, &from[i]);
    }
    for (int i = 0; i < N; i++) {
        H2_UNTIL(&c, c.calls[i].closed);
        CHECK_EQ_INT(c.calls[i].status, GRPC_OK);
        check_message(&c.calls[i], "some text");
        buf_release(&from[i].bytes);
    }
    h2_close(&c);
    site_close(&s);
}

TEST(the_clients_time_is_kept)
{
    struct grpc_site s = { .port = 0 };
    struct h2_client c;
    const struct h2_head soon = { .timeout = "40m" }, late = { .timeout = "5S" },
                         least = { .timeout = "1n" };
    site_open(&s);
    h2_open(&c, &s);
    const struct h2_call *call = h2_call(&c, "/t.T/HoldOne", &soon, "x");
    CHECK_EQ_INT(call->status, GRPC_DEADLINE_EXCEEDED);
    CHECK_EQ_INT(s.n_gone, 1); /* the handler knows */
    const uint64_t now = clock_ms();
    call = h2_call(&c, "/t.T/Echo", &late, "x");
    CHECK_EQ_INT(call->status, GRPC_OK);
    CHECK(s.deadline_ms > now + 4000 && s.deadline_ms <= clock_ms() + 5000);
    call = h2_call(&c, "/t.T/HoldOne", &least, "x");
    CHECK_EQ_INT(call->status, GRPC_DEADLINE_EXCEEDED);
    h2_call(&c, "/t.T/Echo", NULL, "x");
    CHECK_EQ_INT(s.deadline_ms, 0);
    h2_close(&c);
    site_close(&s);
}

TEST(a_client_that_resets_or_leaves_ends_its_calls_at_once)
{
    struct grpc_site s = { .port = 0 };
    struct h2_client c;
    struct h2_source one = { .n_sent = 0 }, two = { .stays_open = true };
    site_open(&s);
    h2_open(&c, &s);
    h2_add_message(&one, "x");
    h2_add_message(&two, "x");
    const struct h2_call *a = h2_begin(&c, "/t.T/HoldOne", NULL, &one);
    h2_begin(&c, "/t.T/Hold", NULL, &two);
    H2_UNTIL(&c, s.n_busy == 2);
    CHECK_OK(nghttp2_submit_rst_stream(c.session, 0, a->stream, NGHTTP2_CANCEL));
    H2_UNTIL(&c, s.n_gone == 1);
    CHECK_EQ_INT(
        site_metric(&s, "baton_grpc_calls_total", "method=\"t.T/HoldOne\",code=\"CANCELLED\""), 1);
    close(c.fd);
    c.fd = -1;
    for (int i = 0; i < 10000 && s.n_gone < 2; i++) site_turn(&s);
    CHECK_EQ_INT(s.n_gone, 2);
    buf_release(&one.bytes);
    buf_release(&two.bytes);
    h2_close(&c);
    site_close(&s);
}

/* The handler answers before the client has sent all: what still comes is dropped. */
TEST(an_early_answer_stops_the_client)
{
    enum { N = 1 << 20 };
    struct grpc_site s = { .limits = { .message_bytes = 1000 } };
    struct h2_client c;
    struct h2_source from = { .n_sent = 0 };
    char *text = mem_calloc(N + 1, 1);
    memset(text, 'x', N);
    site_open(&s);
    h2_open(&c, &s);
    h2_add_message(&from, text);
    const struct h2_call *call = h2_begin(&c, "/t.T/Echo", NULL, &from);
    H2_UNTIL(&c, call->closed);
    CHECK_EQ_INT(call->status, GRPC_RESOURCE_EXHAUSTED);
    CHECK(from.n_sent < N); /* it did not have to send all of it */
    CHECK_EQ_INT(h2_call(&c, "/t.T/Echo", NULL, "x")->status, GRPC_OK);
    mem_free(text);
    buf_release(&from.bytes);
    h2_close(&c);
    site_close(&s);
}

TEST(a_draining_server_sends_clients_elsewhere)
{
    struct grpc_site s = { .port = 0 };
    struct h2_client used, fresh;
    site_open(&s);
    h2_open(&used, &s);
    h2_call(&used, "/t.T/Echo", NULL, "x");
    h2_open(&fresh, &s);
    for (int i = 0; i < 50; i++) h2_turn(&fresh);
    grpc_server_drain(s.server);
    H2_UNTIL(&used, used.n_goaways == 1);
    CHECK_EQ_INT(used.goaway_error, NGHTTP2_NO_ERROR);
    CHECK_EQ_INT(used.goaway_last, INT32_MAX); /* what is on its way is still served */
    CHECK_EQ_INT(fresh.n_goaways, 0);          /* it has not had an answer */
    CHECK_EQ_INT(h2_call(&fresh, "/t.T/Echo", NULL, "x")->status, GRPC_OK);
    H2_UNTIL(&fresh, fresh.n_goaways == 1);
    h2_close(&used);
    h2_close(&fresh);
    site_close(&s);
}

TEST(a_stop_lets_calls_finish_and_ends_idle_streams)
{
    struct grpc_site s = { .port = 0 };
    struct h2_client c;
    struct h2_source idle = { .stays_open = true }, one = { .n_sent = 0 };
    site_open(&s);
    h2_open(&c, &s);
    h2_add_message(&one, "x");
    const struct h2_call *open = h2_begin(&c, "/t.T/Each", NULL, &idle),
                         *held = h2_begin(&c, "/t.T/HoldOne", NULL, &one);
    H2_UNTIL(&c, s.n_busy == 1 && s.n_begun == 2);
    grpc_server_stop(s.server, 20000, site_stopped, &s.n_stopped);
    H2_UNTIL(&c, open->closed);
    CHECK_EQ_INT(open->status, GRPC_UNAVAILABLE);
    CHECK(!held->closed && !s.n_stopped);
    CHECK_OK(grpc_send(s.held, STR("done")));
    grpc_finish(s.held, GRPC_OK, NULL);
    H2_UNTIL(&c, held->closed);
    CHECK_EQ_INT(held->status, GRPC_OK);
    check_message(held, "done");
    H2_UNTIL(&c, s.n_stopped && c.closed);
    CHECK_EQ_INT(c.goaway_last, held->stream); /* later ones may be sent again elsewhere */
    buf_release(&idle.bytes);
    buf_release(&one.bytes);
    h2_close(&c);
    site_close(&s);
}

TEST(a_stop_whose_time_is_over_ends_what_runs)
{
    struct grpc_site s = { .port = 0 };
    struct h2_client c;
    struct h2_source one = { .n_sent = 0 };
    site_open(&s);
    h2_open(&c, &s);
    h2_add_message(&one, "x");
    const struct h2_call *held = h2_begin(&c, "/t.T/HoldOne", NULL, &one);
    H2_UNTIL(&c, s.n_busy == 1);
    grpc_server_stop(s.server, 60000, site_stopped, &s.n_stopped);
    for (int i = 0; i < 100; i++) h2_turn(&c);
    CHECK(!s.n_stopped);
    grpc_server_hurry(s.server, 20);
    H2_UNTIL(&c, s.n_stopped);
    CHECK_EQ_INT(s.n_gone, 1);
    CHECK_EQ_INT(held->status, GRPC_UNAVAILABLE);
    buf_release(&one.bytes);
    h2_close(&c);
    site_close(&s);
}

TEST(a_port_that_is_taken_is_said)
{
    struct grpc_site s = { .port = 0 };
    struct err err = { 0 };
    struct grpc_server *other;
    site_open(&s);
    const struct grpc_server_options o = {
        .loop = s.loop,
        .host = "127.0.0.1",
        .port = s.port,
        .option = "--grpc-port",
        .methods = SITE_METHODS,
    };
    CHECK_EQ_INT(grpc_server_start(&o, &other, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "--grpc-port") != NULL);
    for (int i = 0; i < 20; i++) site_turn(&s);
    site_close(&s);
}

TEST_MAIN(CASE(a_call_of_one_message_is_answered),
          CASE(an_error_comes_with_the_headers_and_its_text_is_escaped),
          CASE(what_is_no_call_is_refused), CASE(what_is_no_message_is_refused),
          CASE(messages_of_a_stream_come_in_any_pieces), CASE(large_messages_go_both_ways),
          CASE(hundreds_of_calls_at_once), CASE(the_clients_time_is_kept),
          CASE(a_client_that_resets_or_leaves_ends_its_calls_at_once),
          CASE(an_early_answer_stops_the_client), CASE(a_draining_server_sends_clients_elsewhere),
          CASE(a_stop_lets_calls_finish_and_ends_idle_streams),
          CASE(a_stop_whose_time_is_over_ends_what_runs), CASE(a_port_that_is_taken_is_said))
