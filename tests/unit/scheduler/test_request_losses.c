/* test_request_losses.c - what costs a request no node of its own: a pair that cannot exchange KV,
 * nodes that give requests back or are blamed, all nodes full, a directory that cannot tell; and
 * what such losses cost the requests after it. The test plays the nodes (test_request.c). */
#include "scheduler/scheduler_internal.h"
#include "tests/unit/scheduler/scheduler_rig.h"

static const struct ask TEN = { .max_tokens = 10 };

/* Submits a request and plays it to its end, split; returns where it was decoded. */
static struct peer_node *serve_split(struct world *w)
{
    struct client c;
    CHECK_OK(client_submit(w, &c, TEN));
    struct attempt a = play_split(w, &c, AT_DECODE, 1);
    play_rest(w, &c, &a, 10);
    return a.decode;
}

static struct breaker_entry *breaker_entry(struct world *w)
{
    CHECK(w->s->entry.view.breaker.n > 0);
    return &w->s->entry.view.breaker.entries[0];
}

/* ---- the pair ---- */

TEST(losses_of_a_pair_avoid_the_pair_and_neither_node)
{
    struct world w;
    struct client c, one, two;
    world_open(&w, "pdd", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_PREFILL, 0);
    reply_blame(a.prefill, &a, ERR_TIMEOUT, BLAME_PAIR);
    struct attempt b = play_split(&w, &c, AT_DECODE, 1);
    CHECK(b.prefill == a.prefill && b.decode != a.decode); /* the reporter is not to blame */
    play_rest(&w, &c, &b, 10);
    CHECK_EQ_INT(c.end.trace.n_moves, 1);
    CHECK_EQ_INT(cells(&w, "prefill", "pair", "move"), 1);
    CHECK_EQ_INT(breakers(&w, "pair", "open"), 1);
    for (int i = 0; i < 20; i++) CHECK(serve_split(&w) != a.decode); /* the others pay nothing */
    /* When the pause is over one request probes it, and only one. */
    breaker_entry(&w)->until_ms = 1;
    CHECK_OK(client_submit(&w, &one, TEN));
    struct attempt p1 = play_split(&w, &one, AT_PREFILL, 0);
    CHECK_OK(client_submit(&w, &two, TEN));
    struct attempt p2 = play_split(&w, &two, AT_PREFILL, 0);
    CHECK((p1.decode == a.decode) + (p2.decode == a.decode) == 1);
    CHECK_EQ_INT(breakers(&w, "pair", "half_open"), 1);
    struct attempt *probe = p1.decode == a.decode ? &p1 : &p2;
    struct client *prober = probe == &p1 ? &one : &two, *other = probe == &p1 ? &two : &one;
    for (int i = 0; i < 10; i++) CHECK(serve_split(&w) != a.decode);
    play_rest(&w, prober, probe, 10);
    CHECK_EQ_INT(breakers(&w, "pair", "closed"), 1);
    CHECK_EQ_INT(w.s->entry.view.breaker.n, 0);
    play_rest(&w, other, probe == &p1 ? &p2 : &p1, 10);
    CHECK_EQ_INT(cells(&w, "prefill", "pair", "move"), 1); /* that first request alone paid */
    world_check_idle(&w);
    world_close(&w);
}

/* A connection that does not come up: nobody pays a move, the request goes to the other decode node
 * at once, and after a few the pair is not proposed. */
TEST(losses_of_a_pair_that_is_connecting_cost_no_move)
{
    struct world w;
    const struct peer_node *mute = NULL;
    world_open(&w, "pdd", 1000);
    for (int n_refused = 0; n_refused < BREAKER_FAILURES;) {
        struct client c;
        CHECK_OK(client_submit(&w, &c, TEN));
        struct attempt a = play_split(&w, &c, AT_PREFILL, 0);
        if (!mute) mute = a.decode;
        if (a.decode == mute) {
            reply_blame(a.prefill, &a, ERR_BUSY, BLAME_PAIR);
            a = play_split(&w, &c, AT_PREFILL, 1);
            n_refused++;
        }
        CHECK(a.decode != mute);
        play_rest(&w, &c, &a, 10);
        CHECK_EQ_INT(c.end.trace.n_moves, 0);
    }
    CHECK_EQ_INT(cells(&w, "prefill", "busy", "requeue"), BREAKER_FAILURES);
    CHECK_EQ_INT(breakers(&w, "pair", "open"), 1);
    for (int i = 0; i < 10; i++) CHECK(serve_split(&w) != mute);
    world_check_idle(&w);
    world_close(&w);
}

/* One of the two has no place for another transfer: nobody is to blame, and others have. */
TEST(losses_of_room_for_a_transfer_go_elsewhere)
{
    struct world w;
    struct client c;
    world_open(&w, "pdd", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_PREFILL, 0);
    reply_blame(a.prefill, &a, ERR_FULL, BLAME_PAIR);
    struct attempt b = play_split(&w, &c, AT_DECODE, 1);
    CHECK(b.decode != a.decode);
    play_rest(&w, &c, &b, 10);
    CHECK_EQ_INT(c.end.trace.n_moves, 0);
    CHECK_EQ_INT(breakers(&w, "pair", "open"), 0);
    CHECK_EQ_INT(w.s->entry.view.breaker.n, 0);
    world_check_idle(&w);
    world_close(&w);
}

TEST(losses_of_single_transfers_open_a_pair_only_in_a_row)
{
    struct world w;
    world_open(&w, "pd", 1000);
    for (int i = 0; i < BREAKER_FAILURES; i++) {
        struct client c;
        CHECK_OK(client_submit(&w, &c, TEN));
        struct attempt a = play_split(&w, &c, AT_PREFILL, 0);
        reply_blame(a.decode, &a, ERR_CHECKSUM, BLAME_PAIR);
        a = play_run(&w, &c); /* this request does without a transfer, at once */
        play_rest(&w, &c, &a, 10);
        CHECK_EQ_INT(breakers(&w, "pair", "open"), i + 1 == BREAKER_FAILURES);
    }
    struct client c;
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_run(&w, &c); /* and now so do the others */
    CHECK_EQ_INT(a.number, 1);
    play_rest(&w, &c, &a, 10);
    world_check_idle(&w);
    world_close(&w);
}

/* An answer whose KV came before the pair was cut says nothing of the pair when it ends. */
TEST(losses_of_a_pair_are_not_mended_by_answers_from_before)
{
    struct world w;
    struct client before, c;
    world_open(&w, "pd", 1000);
    CHECK_OK(client_submit(&w, &before, TEN));
    struct attempt old = play_split(&w, &before, AT_DECODE, 1);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_PREFILL, 0);
    reply_blame(a.prefill, &a, ERR_PEER_LOST, BLAME_PAIR);
    a = play_run(&w, &c);
    CHECK_EQ_INT(breaker_entry(&w)->state, BREAKER_OPEN);
    play_rest(&w, &before, &old, 10);
    CHECK_EQ_INT(breaker_entry(&w)->state, BREAKER_OPEN);
    CHECK_EQ_INT(breakers(&w, "pair", "closed"), 0);
    play_rest(&w, &c, &a, 10);
    CHECK_EQ_INT(breaker_entry(&w)->state, BREAKER_OPEN);
    world_check_idle(&w);
    world_close(&w);
}

/* A probe that is cancelled says nothing: the next request probes. */
TEST(losses_of_a_probe_that_leaves_let_the_next_one_probe)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_PREFILL, 0);
    reply_blame(a.prefill, &a, ERR_PEER_LOST, BLAME_PAIR);
    a = play_run(&w, &c);
    play_rest(&w, &c, &a, 10);
    breaker_entry(&w)->until_ms = 1;
    CHECK_OK(client_submit(&w, &c, TEN));
    (void)play_split(&w, &c, AT_RESERVE, 0);
    CHECK_EQ_INT(breaker_entry(&w)->state, BREAKER_HALF_OPEN);
    w.be.cancel(w.be.self, c.id);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_EQ_INT(breaker_entry(&w)->state, BREAKER_OPEN);
    (void)serve_split(&w);
    CHECK_EQ_INT(w.s->entry.view.breaker.n, 0);
    world_check_idle(&w);
    world_close(&w);
}

/* ---- nodes, and nobody ---- */

TEST(losses_of_a_node_that_blames_itself_spare_the_others)
{
    struct world w;
    struct client c;
    world_open(&w, "dd", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_run(&w, &c);
    reply_blame(a.decode, &a, ERR_NODEV, BLAME_NODE);
    struct attempt b = play_run(&w, &c);
    CHECK(b.decode != a.decode);
    play_rest(&w, &c, &b, 10);
    CHECK_EQ_INT(cells(&w, "run", "node", "move"), 1);
    CHECK_EQ_INT(breakers(&w, "node", "open"), 1);
    for (int i = 0; i < 20; i++) {
        CHECK_OK(client_submit(&w, &c, TEN));
        b = play_run(&w, &c);
        CHECK(b.decode != a.decode && b.number == 1);
        play_rest(&w, &c, &b, 10);
    }
    world_check_idle(&w);
    world_close(&w);
}

/* It has a link, and does not answer: the requests after this one must not wait for it, too. */
TEST(losses_of_time_at_a_silent_decode_node_spare_the_others)
{
    struct world w;
    struct client c;
    world_open(&w, "pdd", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_RESERVE, 0);
    struct request *r = map_get(&w.s->entry.by_id, map_key_u64(&a.request));
    CHECK(r->wait_until_ms > clock_ms());
    r->wait_until_ms = 1; /* time passes */
    struct attempt b = play_split(&w, &c, AT_DECODE, 1);
    CHECK(b.decode != a.decode);
    play_rest(&w, &c, &b, 10);
    CHECK_EQ_INT(cells(&w, "reserve", "stuck", "move"), 1);
    CHECK_EQ_INT(breakers(&w, "node", "open"), 1);
    for (int i = 0; i < 10; i++) CHECK(serve_split(&w) != a.decode);
    world_check_idle(&w);
    world_close(&w);
}

TEST(losses_that_are_nobodys_avoid_nobody)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_CREDIT, 0);
    reply_blame(a.prefill, &a, ERR_TIMEOUT, BLAME_NOBODY);
    a = play_split(&w, &c, AT_DECODE, 1); /* not without the prefill node */
    CHECK_EQ_INT(a.number, 2);
    CHECK_EQ_INT(w.s->entry.view.breaker.n, 0);
    CHECK_EQ_INT(cells(&w, "credit", "peer", "move"), 1);
    play_rest(&w, &c, &a, 10);
    world_check_idle(&w);
    world_close(&w);
}

/* ---- handed back ---- */

TEST(losses_handed_back_cost_no_move_and_go_elsewhere)
{
    static const char *const states[] = { "credit", "reserve", "prefill", "decode" };
    for (enum stage stage = AT_CREDIT; stage <= AT_DECODE; stage++) {
        struct world w;
        struct client c;
        world_open(&w, "ppdd", 5000);
        CHECK_OK(client_submit(&w, &c, TEN));
        struct attempt a = play_split(&w, &c, stage, 3);
        bool by_prefill = stage == AT_CREDIT || stage == AT_PREFILL;
        reply_blame(by_prefill ? a.prefill : a.decode, &a, ERR_BUSY, BLAME_HANDED_BACK);
        struct attempt b = play_split(&w, &c, AT_DECODE, 2);
        CHECK(by_prefill ? b.prefill != a.prefill : b.decode != a.decode);
        CHECK_EQ_INT(cells(&w, states[stage], "handed_back", "requeue"), 1);
        play_rest(&w, &c, &b, 10);
        CHECK_EQ_INT(c.end.trace.n_moves, 0);
        CHECK_EQ_INT(w.s->entry.view.breaker.n, 0); /* the node is well */
        world_check_idle(&w);
        world_close(&w);
    }
}

/* By one that leaves, and so is in no directory any more: the next fetches from it all the same. */
TEST(losses_handed_back_name_who_has_the_kv)
{
    struct world w;
    struct client c;
    world_open(&w, "dd", 5000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = expect_run(&w);
    CHECK_EQ_INT(a.kept_node, 0);
    reply_tokens(a.decode, &a, 0, 3, FINISH_NONE);
    RIG_WAIT(&w.rig, c.n_tokens == 3);
    directory_leave(w.directory, a.decode->id);
    RIG_WAIT(&w.rig, !view_find(&w.s->entry.view, a.decode->id));
    reply_blame(a.decode, &a, ERR_BUSY, BLAME_HANDED_BACK);
    struct attempt b = expect_run(&w);
    CHECK(b.decode != a.decode);
    CHECK_EQ_INT(b.kept_node, a.decode->id);
    play_rest(&w, &c, &b, 10);
    world_check_idle(&w);
    world_close(&w);
}

TEST(losses_handed_back_more_often_than_a_request_may_move)
{
    enum { TIMES = REQUEST_MOVES_MAX + 4 };
    struct world w;
    struct client c;
    world_open(&w, "dd", 5000);
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = TIMES + 1 }));
    for (uint32_t i = 0; i < TIMES; i++) { /* with a token each */
        struct attempt a = play_run(&w, &c);
        reply_tokens(a.decode, &a, i, i + 1, FINISH_NONE);
        RIG_WAIT(&w.rig, c.n_tokens == i + 1);
        reply_blame(a.decode, &a, ERR_BUSY, BLAME_HANDED_BACK);
    }
    struct attempt a = play_run(&w, &c);
    play_rest(&w, &c, &a, TIMES + 1);
    CHECK_EQ_INT(c.end.trace.n_moves, 0);
    CHECK_EQ_INT(cells(&w, "run", "handed_back", "requeue"), TIMES);
    world_check_idle(&w);
    world_close(&w);
}

/* That it was handed back long ago says nothing of how full the nodes are now. */
TEST(losses_handed_back_late_do_not_end_it)
{
    struct world w;
    struct client c;
    world_open(&w, "ppdd", 5000);
    w.s->entry.max_queue_ms = 300;
    CHECK_OK(client_submit(&w, &c, TEN));
    for (int i = 0; i < 2; i++) {
        struct attempt a = play_split(&w, &c, AT_PREFILL, (uint32_t)i);
        rig_turn_ms(&w.rig, 400); /* a long prompt */
        reply_blame(a.prefill, &a, ERR_BUSY, BLAME_HANDED_BACK);
    }
    struct attempt b = play_split(&w, &c, AT_DECODE, 2);
    play_rest(&w, &c, &b, 10);
    CHECK_STATUS(c.end.status, OK);
    CHECK_EQ_INT(cells(&w, "prefill", "handed_back", "requeue"), 2);
    world_check_idle(&w);
    world_close(&w);
}

/* A node that has no blocks left is full, whatever the directory counts: who is given back by it
 * again and again does not wait for its ttl. */
TEST(losses_handed_back_for_want_of_blocks_end_with_429)
{
    struct world w;
    struct client c;
    world_open(&w, "pdd", 5000);
    w.s->entry.max_queue_ms = 300;
    CHECK_OK(client_submit(&w, &c, TEN));
    const uint64_t since_ms = clock_ms();
    while (!c.n_ended && clock_ms() < since_ms + 5000) {
        struct attempt a = play_split(&w, &c, AT_RESERVE, 0);
        reply_blame(a.decode, &a, ERR_FULL, BLAME_HANDED_BACK);
        RIG_WAIT(&w.rig, c.n_ended || received_count(w.nodes[0], FRAME_ASK_CREDIT) > 0);
    }
    CHECK_EQ_INT(c.n_ended, 1);
    CHECK(clock_ms() - since_ms >= 290);
    CHECK_STATUS(c.end.status, ERR_BUSY);
    CHECK(c.end.retry_after_s > 0 && strstr(c.end.text, "full"));
    CHECK_EQ_INT(cells(&w, "reserve", "handed_back", "fail"), 1);
    world_check_idle(&w);
    world_close(&w);
}

/* Others may have some: even where nobody waits the first refusal is not the last word. */
TEST(losses_handed_back_for_want_of_blocks_go_elsewhere_first)
{
    struct world w;
    struct client c;
    world_open(&w, "pdd", 5000);
    w.s->entry.max_queue_ms = 0;
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_RESERVE, 0);
    reply_blame(a.decode, &a, ERR_FULL, BLAME_HANDED_BACK);
    struct attempt b = play_split(&w, &c, AT_DECODE, 2);
    CHECK(b.decode != a.decode);
    play_rest(&w, &c, &b, 10);
    CHECK_STATUS(c.end.status, OK);
    world_check_idle(&w);
    world_close(&w);
}

/* ---- all nodes are full ---- */

/* Node i takes one request at a time. */
static void make_small(struct world *w, size_t i)
{
    struct node_record r = record_of(w, i);
    r.max_seqs = 1;
    directory_publish(w->directory, &r);
    RIG_WAIT(&w->rig, view_find(&w->s->entry.view, r.node) &&
                          view_find(&w->s->entry.view, r.node)->max_seqs == 1);
}

TEST(losses_of_room_end_with_429_after_the_queue_time)
{
    struct world w;
    struct client c[3];
    world_open(&w, "d", 100);
    make_small(&w, 0);
    w.s->entry.max_queue_ms = 500;
    CHECK_OK(client_submit(&w, &c[0], TEN));
    struct attempt a = play_run(&w, &c[0]);
    uint64_t since_ms = clock_ms();
    CHECK_OK(client_submit(&w, &c[1], TEN));
    RIG_WAIT_MS(&w.rig, c[1].n_ended == 1, 5000);
    CHECK(clock_ms() - since_ms >= 490); /* not at once, and not after grace_ms */
    CHECK_STATUS(c[1].end.status, ERR_BUSY);
    CHECK_EQ_INT(status_http(c[1].end.status), 429);
    CHECK(c[1].end.retry_after_s > 0 && strstr(c[1].end.text, "full"));
    /* One that gets in before that is served. */
    CHECK_OK(client_submit(&w, &c[2], TEN));
    rig_turn_ms(&w.rig, 150);
    CHECK_EQ_INT(c[2].n_ended, 0);
    play_rest(&w, &c[0], &a, 10);
    a = play_run(&w, &c[2]);
    play_rest(&w, &c[2], &a, 10);
    world_check_idle(&w);
    world_close(&w);
}

/* By the view there is room, but the node refuses each time. */
TEST(losses_of_room_by_refusals_end_with_429_too)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 1000);
    w.s->entry.max_queue_ms = 400;
    CHECK_OK(client_submit(&w, &c, TEN));
    for (uint64_t end = clock_ms() + 5000; !c.n_ended && clock_ms() < end;) {
        struct received_message *h = received_take(w.nodes[0], FRAME_ASK_CREDIT);
        struct attempt a = { h ? h->request : 0, h ? h->attempt : 0, w.nodes[0], NULL, 0, 0 };
        if (h) reply_blame(w.nodes[0], &a, ERR_BUSY, BLAME_NOBODY);
        rig_turn_ms(&w.rig, 5);
    }
    CHECK_STATUS(c.end.status, ERR_BUSY);
    CHECK(cells(&w, "credit", "busy", "requeue") >= 3);
    CHECK_EQ_INT(cells(&w, "credit", "busy", "fail"), 1);
    CHECK_EQ_INT(c.end.trace.n_moves, 0);
    world_check_idle(&w);
    world_close(&w);
}

/* Its client has tokens already: it waits for a place however long, like one that was accepted. */
TEST(losses_of_room_do_not_end_an_answer_that_has_begun)
{
    struct world w;
    struct client c[2];
    struct attempt a[2];
    world_open(&w, "dd", 100);
    make_small(&w, 0);
    make_small(&w, 1);
    w.s->entry.max_queue_ms = 200;
    for (int i = 0; i < 2; i++) {
        CHECK_OK(client_submit(&w, &c[i], TEN));
        a[i] = play_run(&w, &c[i]);
        reply_tokens(a[i].decode, &a[i], 0, 2, FINISH_NONE);
        RIG_WAIT(&w.rig, c[i].n_tokens == 2);
    }
    CHECK(a[0].decode != a[1].decode);
    reply_blame(a[0].decode, &a[0], ERR_IO, BLAME_NODE);
    directory_leave(w.directory, a[0].decode->id);
    rig_turn_ms(&w.rig, 1800);
    CHECK_EQ_INT(c[0].n_ended, 0);
    play_rest(&w, &c[1], &a[1], 10);
    a[0] = play_run(&w, &c[0]);
    play_rest(&w, &c[0], &a[0], 10);
    world_check_idle(&w);
    world_close(&w);
}

static void make_blocks(struct world *w, size_t i, uint32_t n_blocks)
{
    struct node_record r = record_of(w, i);
    r.n_blocks = n_blocks;
    directory_publish(w->directory, &r);
    RIG_WAIT(&w->rig, view_find(&w->s->entry.view, r.node) &&
                          view_find(&w->s->entry.view, r.node)->n_blocks == n_blocks);
}

/* A long answer that has to move needs all of the other node: what becomes free there is not given
 * to a short request that came later. */
TEST(losses_of_a_long_answer_are_not_overtaken)
{
    enum { SMALL = 3, LONG_TOKENS = 55, LONG_BLOCKS = 6 };
    struct world w;
    struct client big, small[SMALL];
    struct attempt of_big, a[SMALL];
    world_open(&w, "dd", 1000);
    make_blocks(&w, 1, LONG_BLOCKS - 1);
    CHECK_OK(client_submit(&w, &big, (struct ask){ .max_tokens = LONG_TOKENS }));
    of_big = play_run(&w, &big);
    CHECK(of_big.decode == w.nodes[0]);
    reply_tokens(of_big.decode, &of_big, 0, LONG_TOKENS - 5, FINISH_NONE);
    RIG_WAIT(&w.rig, big.n_tokens == LONG_TOKENS - 5);
    make_blocks(&w, 1, LONG_BLOCKS);
    make_small(&w, 0);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(client_submit(&w, &small[i], TEN));
        a[i] = play_run(&w, &small[i]);
        CHECK(a[i].decode == w.nodes[1]);
    }
    reply_blame(of_big.decode, &of_big, ERR_IO, BLAME_NODE);
    directory_leave(w.directory, of_big.decode->id);
    RIG_WAIT(&w.rig, w.s->entry.view.n_nodes == 1);
    CHECK_OK(client_submit(&w, &small[2], TEN));
    play_rest(&w, &small[0], &a[0], 10);
    rig_turn_ms(&w.rig, 300);
    CHECK_EQ_INT(received_count(w.nodes[1], FRAME_RUN), 0);
    play_rest(&w, &small[1], &a[1], 10);
    of_big = play_run(&w, &big);
    play_rest(&w, &big, &of_big, LONG_TOKENS);
    a[2] = play_run(&w, &small[2]);
    play_rest(&w, &small[2], &a[2], 10);
    world_check_idle(&w);
    world_close(&w);
}

/* ---- a directory that lists the dead ---- */

/* The directory's lease is ten minutes here: as if it could not be reached. */
TEST(losses_of_a_node_that_stays_listed_cost_one_move)
{
    struct world w;
    struct client c;
    world_open(&w, "dd", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_run(&w, &c);
    uint64_t dead = a.decode->id;
    world_kill(&w, a.decode);
    a = play_run(&w, &c);
    play_rest(&w, &c, &a, 10);
    CHECK_EQ_INT(c.end.trace.n_moves, 1);
    rig_turn_ms(&w.rig, 2500); /* longer than its breaker's pause */
    for (int i = 0; i < 10; i++) {
        CHECK_OK(client_submit(&w, &c, TEN));
        a = play_run(&w, &c);
        CHECK_EQ_INT(a.number, 1);
        play_rest(&w, &c, &a, 10);
        CHECK_EQ_INT(c.end.trace.n_moves, 0);
    }
    CHECK(view_find(&w.s->entry.view, dead) && view_why_unreachable(&w.s->entry.view, dead));
    /* An attempt more than there were requests, which count once each. */
    CHECK_EQ_INT(counter_value(w.s->entry.metrics.local), 12);
    CHECK_EQ_INT(counter_value(w.s->entry.metrics.requests), 11);
    CHECK_EQ_INT(w.s->entry.metrics.n_one_node, 11);
    CHECK_EQ_INT(w.s->entry.metrics.n_split, 0);
    world_check_idle(&w);
    world_close(&w);
}

/* Nobody else is there: it waits for a node, and does not use up its moves on the dead one. */
TEST(losses_of_the_only_node_are_not_tried_again_and_again)
{
    struct world w;
    struct client c;
    world_open(&w, "d", 2500);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_run(&w, &c);
    world_kill(&w, a.decode);
    RIG_WAIT_MS(&w.rig, c.n_ended == 1, 10000);
    CHECK_STATUS(c.end.status, ERR_UNAVAILABLE);
    CHECK(strstr(c.end.text, "cannot be connected"));
    CHECK_EQ_INT(c.end.trace.n_moves, 1);
    world_check_idle(&w);
    world_close(&w);
}

/* ---- never split ---- */

TEST(losses_move_whole_requests_to_nodes_of_any_role)
{
    enum { CLIENTS = 8 }; /* of so many no node of three is left out */
    struct world w;
    struct client c[CLIENTS];
    struct attempt a[CLIENTS];
    bool used[NODES_MAX] = { false };
    world_open(&w, "pdm", 1000);
    w.s->entry.view.unsplit = true;
    for (int i = 0; i < CLIENTS; i++) {
        CHECK_OK(client_submit(&w, &c[i], TEN));
        a[i] = play_run(&w, &c[i]);
        reply_tokens(a[i].decode, &a[i], 0, 1, FINISH_NONE);
        RIG_WAIT(&w.rig, c[i].n_tokens == 1);
        used[a[i].decode->id - 1] = true;
    }
    CHECK(used[0] && used[1] && used[2]);
    struct peer_node *lost = w.nodes[1];
    world_kill(&w, lost);
    int n_lost = 0;
    for (int i = 0; i < CLIENTS; i++) n_lost += a[i].decode == lost;
    for (int i = 0; i < n_lost; i++) { /* in any order */
        struct attempt next = { 0 };
        struct received_message *h = world_expect(&w, FRAME_RUN, &next.decode);
        next.request = h->request;
        next.number = h->attempt;
        for (int k = 0; k < CLIENTS; k++)
            if (c[k].id == next.request) a[k] = next;
        CHECK(next.decode != lost);
    }
    for (int i = 0; i < CLIENTS; i++) {
        play_rest(&w, &c[i], &a[i], 10);
        CHECK_EQ_STR(c[i].end.trace.prefill_node, c[i].end.trace.decode_node);
    }
    world_check_idle(&w);
    world_close(&w);
}

TEST_MAIN(CASE(losses_of_a_pair_avoid_the_pair_and_neither_node),
          CASE(losses_of_a_pair_are_not_mended_by_answers_from_before),
          CASE(losses_handed_back_late_do_not_end_it),
          CASE(losses_handed_back_for_want_of_blocks_end_with_429),
          CASE(losses_handed_back_for_want_of_blocks_go_elsewhere_first),
          CASE(losses_of_a_long_answer_are_not_overtaken),
          CASE(losses_of_a_pair_that_is_connecting_cost_no_move),
          CASE(losses_of_room_for_a_transfer_go_elsewhere),
          CASE(losses_of_single_transfers_open_a_pair_only_in_a_row),
          CASE(losses_of_a_probe_that_leaves_let_the_next_one_probe),
          CASE(losses_of_a_node_that_blames_itself_spare_the_others),
          CASE(losses_of_time_at_a_silent_decode_node_spare_the_others),
          CASE(losses_that_are_nobodys_avoid_nobody),
          CASE(losses_handed_back_cost_no_move_and_go_elsewhere),
          CASE(losses_handed_back_name_who_has_the_kv),
          CASE(losses_handed_back_more_often_than_a_request_may_move),
          CASE(losses_of_room_end_with_429_after_the_queue_time),
          CASE(losses_of_room_by_refusals_end_with_429_too),
          CASE(losses_of_room_do_not_end_an_answer_that_has_begun),
          CASE(losses_of_a_node_that_stays_listed_cost_one_move),
          CASE(losses_of_the_only_node_are_not_tried_again_and_again),
          CASE(losses_move_whole_requests_to_nodes_of_any_role))
