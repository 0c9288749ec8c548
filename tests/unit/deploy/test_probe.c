/* test_probe.c - probe messages keep their ranges and steps their order; probe servers measure each
 * other and refuse clients without the secret. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/probe/measurement.h"
#include "deploy/probe/server.h"
#include "deploy/probe/session.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

static enum status decode(const struct probe_request *r, struct probe_request *back,
                          struct err *err)
{
    struct buf b = { 0 };
    probe_request_encode(r, &b);
    enum status st = probe_request_decode(buf_str(&b), back, err);
    buf_release(&b);
    return st;
}

TEST(a_request_comes_back_as_it_was)
{
    struct probe_request r = { .step = PROBE_OPEN,
                               .transport = "ipc",
                               .address = "10.0.0.1",
                               .piece_bytes = 4096,
                               .n_layers = 2,
                               .n_blocks = 3,
                               .checksum = true,
                               .contiguous = true,
                               .copiers = 4,
                               .connections = 5,
                               .n_transfers = 6,
                               .tool = PROBE_IPERF3,
                               .port = 7,
                               .n_bytes = 8, },
                         back;
    struct err err = { 0 };
    buf_add_c(&r.data, "opaque");
    CHECK_OK(decode(&r, &back, &err));
    CHECK_EQ_INT(back.step, PROBE_OPEN);
    CHECK_EQ_STR(back.transport, "ipc");
    CHECK_EQ_STR(back.address, "10.0.0.1");
    CHECK(back.piece_bytes == 4096 && back.n_layers == 2 && back.n_blocks == 3 && back.checksum &&
          back.contiguous && back.copiers == 4 && back.connections == 5);
    CHECK(back.n_transfers == 6 && back.tool == PROBE_IPERF3 && back.port == 7 &&
          back.n_bytes == 8);
    CHECK_EQ_STR(back.data.data, "opaque");
    probe_request_release(&r);
    probe_request_release(&back);
}

static void check_refused(struct probe_request r, const char *says)
{
    struct probe_request back;
    struct err err = { 0 };
    CHECK_STATUS(decode(&r, &back, &err), ERR_INVALID);
    if (!strstr(err.text, says))
        test_fail(__FILE__, __LINE__, "'%s' does not say '%s'", err.text, says);
    CHECK(back.data.data == NULL && back.step == 0);
}

TEST(what_is_out_of_range_is_refused_by_name)
{
    const struct probe_request open = {
        .step = PROBE_OPEN, .transport = "ipc", .piece_bytes = 4096, .n_layers = 2, .n_blocks = 3
    };
    struct probe_request r = open;
    check_refused((struct probe_request){ .step = 0 }, "step");
    check_refused((struct probe_request){ .step = PROBE_STEP_END }, "step");
    r.piece_bytes = 16;
    check_refused(r, "piece_bytes");
    r = open;
    r.n_layers = 0;
    check_refused(r, "n_layers");
    r = open;
    r.n_blocks = PROBE_BLOCKS_MAX + 1;
    check_refused(r, "n_blocks");
    r = open;
    r.piece_bytes = PROBE_PIECE_MAX;
    r.n_layers = 128;
    r.n_blocks = PROBE_BLOCKS_MAX;
    check_refused(r, "pool");
    r = open;
    r.copiers = 17;
    check_refused(r, "copiers");
    r = open;
    r.connections = 1000;
    check_refused(r, "connections");
    r = open;
    snprintf(r.address, sizeof r.address, "example.org");
    check_refused(r, "numeric");
    r = open;
    snprintf(r.transport, sizeof r.transport, "../x");
    check_refused(r, "character");
    check_refused((struct probe_request){ .step = PROBE_EXPECT, .n_blocks = 1, .n_transfers = 0 },
                  "n_transfers");
    check_refused((struct probe_request){ .step = PROBE_SEND, .n_blocks = 0, .n_transfers = 1 },
                  "n_blocks");
    check_refused(
        (struct probe_request){
            .step = PROBE_TOOL_RUN, .piece_bytes = 4096, .n_bytes = 1, .tool = PROBE_TOOL_END },
        "tool");
    check_refused((struct probe_request){ .step = PROBE_STREAM, .n_bytes = PROBE_STREAM_MAX + 1 },
                  "n_bytes");
}

TEST(a_reply_shows_nothing_that_a_terminal_would_obey)
{
    struct probe_reply *r = MEM_NEW(struct probe_reply), *back = MEM_NEW(struct probe_reply);
    struct buf b = { 0 };
    struct err err = { 0 };
    snprintf(r->text, sizeof r->text, "\x1b[2Jgone\n");
    snprintf(r->host, sizeof r->host, "h\x07");
    r->status = ERR_NODEV;
    r->n_ns = 2;
    r->ns[1] = 77;
    probe_reply_encode(r, &b);
    CHECK_OK(probe_reply_decode(buf_str(&b), back, &err));
    CHECK_EQ_STR(back->text, "?[2Jgone?");
    CHECK_EQ_STR(back->host, "h?");
    CHECK_EQ_INT(back->status, ERR_NODEV);
    CHECK(back->n_ns == 2 && back->ns[1] == 77);
    probe_reply_release(back);
    r->status = (enum status)5;
    buf_clear(&b);
    probe_reply_encode(r, &b);
    CHECK_STATUS(probe_reply_decode(buf_str(&b), back, &err), ERR_FORMAT);
    buf_release(&b);
    mem_free(r);
    mem_free(back);
}

/* ---- a session without its server ---- */

static struct probe_reply *step(struct probe_session *s, struct probe_request r)
{
    struct probe_reply *reply = MEM_NEW(struct probe_reply);
    probe_session_do(s, &r, reply);
    return reply;
}

static void check_step(struct probe_session *s, struct probe_request r, enum status want,
                       const char *says)
{
    struct probe_reply *reply = step(s, r);
    if (reply->status != want)
        test_fail(__FILE__, __LINE__, "%s: %s: %s", probe_step_name(r.step),
                  status_name(reply->status), reply->text);
    if (!strstr(reply->text, says))
        test_fail(__FILE__, __LINE__, "'%s' does not say '%s'", reply->text, says);
    probe_reply_release(reply);
    mem_free(reply);
}

TEST(steps_out_of_order_are_refused)
{
    struct kvt_tuning tuning = { 0 };
    struct probe_session s;
    const struct probe_request open = {
        .step = PROBE_OPEN, .transport = "ipc", .piece_bytes = 4096, .n_layers = 1, .n_blocks = 4
    };
    struct probe_request elsewhere = open, nothing = open;
    log_set_level(LOG_ERROR);
    probe_session_init(&s, &tuning, true, "127.0.0.1");
    check_step(&s, (struct probe_request){ .step = PROBE_CONNECT }, ERR_INVALID, "needs OPEN");
    check_step(&s, (struct probe_request){ .step = PROBE_TAKE, .n_transfers = 1 }, ERR_INVALID,
               "needs OPEN");
    snprintf(elsewhere.address, sizeof elsewhere.address, "192.0.2.1");
    check_step(&s, elsewhere, ERR_UNAUTHORIZED, "loopback only");
    snprintf(nothing.transport, sizeof nothing.transport, "pigeon");
    check_step(&s, nothing, ERR_UNSUPPORTED, "pigeon");
    check_step(&s, open, OK, "");
    check_step(&s, (struct probe_request){ .step = PROBE_SEND, .n_transfers = 1, .n_blocks = 1 },
               ERR_INVALID, "not connected");
    check_step(&s, (struct probe_request){ .step = PROBE_EXPECT, .n_transfers = 1, .n_blocks = 5 },
               ERR_INVALID, "this pool has 4");
    check_step(&s, (struct probe_request){ .step = PROBE_ANSWER }, ERR_FORMAT, "");
    check_step(&s, (struct probe_request){ .step = PROBE_DRAIN, .n_bytes = 1 }, ERR_INVALID,
               "listen");
    check_step(&s, (struct probe_request){ .step = PROBE_CLOSE }, OK, "");
    probe_session_release(&s);
}

/* ---- probe servers ---- */

struct probe_servers {
    int pids[2];
    struct probe_dialer *dialer;
    struct probe_client *clients[2];
};

static void start_servers(struct probe_servers *a, const char *secret)
{
    struct probe_server_options o = { .host = "127.0.0.1", .secret = str_of(secret) };
    char where[2][32];
    struct err err = { 0 };
    log_set_level(LOG_ERROR);
    for (int i = 0; i < 2; i++) {
        uint16_t port;
        if (probe_server_fork(&o, &a->pids[i], &port, &err) != OK)
            test_fail(__FILE__, __LINE__, "%s", err.text);
        snprintf(where[i], sizeof where[i], "127.0.0.1:%u", port);
    }
    CHECK_OK(probe_dialer_create(o.secret, &a->dialer, &err));
    for (int i = 0; i < 2; i++)
        if (probe_dial(a->dialer, where[i], &a->clients[i], &err) != OK)
            test_fail(__FILE__, __LINE__, "%s", err.text);
}

static void stop_servers(struct probe_servers *a)
{
    for (int i = 0; i < 2; i++) probe_hang_up(a->clients[i]);
    probe_dialer_free(a->dialer);
    for (int i = 0; i < 2; i++) probe_server_child_stop(a->pids[i]);
}

static void check_moves(struct probe_servers *a, const char *transport, bool contiguous)
{
    struct measurement p = {
        .sender = a->clients[0],
        .receiver = a->clients[1],
        .piece_bytes = 8192,
        .n_layers = 3,
        .n_blocks = 10,
        .checksum = true,
        .contiguous = contiguous,
    };
    struct measurement_round *r = MEM_NEW(struct measurement_round);
    struct err err = { 0 };
    double rate = 0;
    const char *what = NULL;
    snprintf(p.transport, sizeof p.transport, "%s", transport);
    if (measurement_begin(&p, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s: %s", transport, err.text);
    for (uint32_t n = 1; n <= 3; n++) {
        if (measurement_run(&p, n, 9, r, &err) != OK)
            test_fail(__FILE__, __LINE__, "%s: %s", transport, err.text);
        CHECK_EQ_INT(r->n_bytes, (uint64_t)8192 * 3 * 9 * n);
        CHECK(r->n == n && r->total_ns > 0);
        for (uint32_t i = 0; i < n; i++) CHECK(r->ns[i] > 0);
    }
    if (measurement_limit(&p, 1 << 20, &rate, &what, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s: %s", transport, err.text);
    CHECK(rate > 0 && what != NULL);
    measurement_end(&p);
    mem_free(r);
}

TEST(two_servers_move_blocks_and_measure_the_limit)
{
    struct probe_servers a;
    start_servers(&a, "a secret");
    check_moves(&a, "ipc", false);
    check_moves(&a, "ipc", true);
    check_moves(&a, "tcp", false);
    stop_servers(&a);
}

TEST(the_plain_stream_stands_in_for_iperf3)
{
    struct probe_servers a;
    struct measurement p = {
        .piece_bytes = 4096, .n_layers = 1, .n_blocks = 1, .connections = 3, .transport = "tcp"
    };
    struct err err = { 0 };
    double rate = 0;
    const char *what = NULL;
    setenv("PATH", "/nowhere", 1); /* no tool is installed for the servers */
    start_servers(&a, "");
    p.sender = a.clients[0];
    p.receiver = a.clients[1];
    if (measurement_limit(&p, 4 << 20, &rate, &what, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    CHECK_EQ_STR(what, "socket stream");
    CHECK(rate > 0);
    snprintf(p.transport, sizeof p.transport, "rdma");
    CHECK_STATUS(measurement_limit(&p, 4 << 20, &rate, &what, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "ib_write_bw is not installed") != NULL);
    stop_servers(&a);
}

TEST(an_unknown_transport_is_a_sentence_from_the_side_that_lacks_it)
{
    struct probe_servers a;
    struct measurement p = {
        .piece_bytes = 4096, .n_layers = 1, .n_blocks = 1, .transport = "pigeon"
    };
    struct err err = { 0 };
    start_servers(&a, "s");
    p.sender = a.clients[0];
    p.receiver = a.clients[1];
    CHECK_STATUS(measurement_begin(&p, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "pigeon") != NULL);
    CHECK(p.step == PROBE_OPEN && !p.at_sender);
    stop_servers(&a);
}

TEST(a_stranger_does_not_get_in)
{
    struct probe_servers a;
    struct probe_dialer *stranger;
    struct probe_client *c = NULL;
    struct err err = { 0 };
    char where[128];
    start_servers(&a, "right");
    snprintf(where, sizeof where, "%s", probe_peer(a.clients[0])->where);
    CHECK_OK(probe_dialer_create(str_of("wrong"), &stranger, &err));
    CHECK_STATUS(probe_dial(stranger, where, &c, &err), ERR_UNAUTHORIZED);
    CHECK(strstr(err.text, "another cluster secret") != NULL);
    CHECK_STATUS(probe_dial(stranger, "127.0.0.1:1", &c, &err), ERR_PEER_LOST);
    CHECK_STATUS(probe_dial(stranger, "here", &c, &err), ERR_CONFIG);
    probe_dialer_free(stranger);
    stop_servers(&a);
}

TEST(without_a_secret_a_server_stays_on_loopback)
{
    struct probe_server_options o = { .host = "0.0.0.0" };
    struct probe_server *a;
    struct err err = { 0 };
    CHECK_STATUS(probe_server_create(&o, &a, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "BATON_CLUSTER_SECRET") != NULL);
}

TEST(clients_are_bounded)
{
    struct probe_servers a;
    struct probe_client *more[PROBE_SERVER_CLIENTS_MAX] = { NULL };
    struct err err = { 0 };
    char where[128];
    uint32_t n = 1; /* start_servers holds one */
    start_servers(&a, "s");
    snprintf(where, sizeof where, "%s", probe_peer(a.clients[0])->where);
    while (n < PROBE_SERVER_CLIENTS_MAX && probe_dial(a.dialer, where, &more[n - 1], &err) == OK)
        n++;
    CHECK_EQ_INT(n, PROBE_SERVER_CLIENTS_MAX);
    CHECK(probe_dial(a.dialer, where, &more[n - 1], &err) != OK);
    probe_hang_up(more[0]);
    more[0] = NULL;
    /* A client that left makes room for another. */
    enum status st = ERR_BUSY;
    for (int i = 0; i < 100 && st != OK; i++) {
        st = probe_dial(a.dialer, where, &more[0], &err);
        if (st != OK) usleep(20000);
    }
    CHECK_OK(st);
    for (uint32_t i = 0; i < PROBE_SERVER_CLIENTS_MAX; i++) probe_hang_up(more[i]);
    stop_servers(&a);
}

TEST_MAIN(CASE(a_request_comes_back_as_it_was), CASE(what_is_out_of_range_is_refused_by_name),
          CASE(a_reply_shows_nothing_that_a_terminal_would_obey),
          CASE(steps_out_of_order_are_refused), CASE(two_servers_move_blocks_and_measure_the_limit),
          CASE(the_plain_stream_stands_in_for_iperf3),
          CASE(an_unknown_transport_is_a_sentence_from_the_side_that_lacks_it),
          CASE(a_stranger_does_not_get_in), CASE(without_a_secret_a_server_stays_on_loopback),
          CASE(clients_are_bounded))
