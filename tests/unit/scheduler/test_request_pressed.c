/* test_request_pressed.c - requests whose nodes take their KV blocks for older ones. */
#include "scheduler/pressure/pressure.h"
#include "scheduler/request.h"
#include "scheduler/scheduler_internal.h"
#include "tests/unit/scheduler/scheduler_rig.h"

enum { SECOND_US = 1000000 };

static uint64_t counted(const struct world *w, enum pressure_action a)
{
    return counter_value(w->s->entry.metrics.preemptions[a]);
}

static uint32_t n_blocks_free = 500;

/* All nodes compute so many prompt tokens per second. */
static void set_speed(struct world *w, uint32_t tokens_per_s)
{
    for (size_t i = 0; i < w->n_nodes; i++) {
        struct node_record r = record_of(w, i);
        r.prefill_tokens_per_s = tokens_per_s;
        r.n_blocks_free = n_blocks_free;
        directory_publish(w->directory, &r);
    }
    view_refresh(&w->s->entry.view);
    RIG_WAIT(&w->rig, w->s->entry.view.n_nodes == w->n_nodes &&
                          w->s->entry.view.nodes[0].prefill_tokens_per_s == tokens_per_s);
}

/* An attempt at a request that one node does all of. */
static struct attempt play_whole(struct world *w, struct client *c, uint32_t n_new)
{
    struct attempt a = { 0 };
    struct received_message *h = world_expect(w, FRAME_RUN, &a.decode);
    a.request = h->request;
    a.number = h->attempt;
    check_generation(h, c->n_tokens);
    const uint32_t begin = c->n_tokens;
    reply_tokens(a.decode, &a, begin, begin + n_new, FINISH_NONE);
    RIG_WAIT(&w->rig, c->n_tokens == begin + n_new);
    return a;
}

static void preempt(const struct attempt *a, uint64_t wait_us)
{
    Baton__Preempted m = BATON__PREEMPTED__INIT;
    m.wait_us = wait_us;
    reply(a->decode, a, FRAME_PREEMPTED, &m.base);
}

TEST(pressed_request_goes_on_elsewhere_but_not_for_ever)
{
    struct world w;
    struct client c;
    world_open(&w, "ddd", 5000);
    set_speed(&w, 10000);
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 20 }));
    struct attempt a = play_whole(&w, &c, 3);
    for (uint64_t i = 0; i < PRESSURE_HAND_BACKS_MAX; i++) {
        preempt(&a, SECOND_US);
        struct peer_node *who;
        struct received_message *h = world_expect(&w, FRAME_CANCEL, &who);
        CHECK(who == a.decode && h->attempt == a.number);
        struct attempt b = play_whole(&w, &c, 2); /* behind the last token */
        CHECK(b.decode != a.decode);
        CHECK_EQ_INT(counted(&w, PRESSURE_HAND_BACK), i + 1);
        a = b;
    }
    preempt(&a, SECOND_US); /* now it stays */
    RIG_WAIT(&w.rig, counted(&w, PRESSURE_RECOMPUTE) == 1);
    play_rest(&w, &c, &a, 20);
    CHECK_EQ_INT(c.end.trace.n_moves, 0);
    CHECK_EQ_INT(cells(&w, "run", "handed_back", "requeue"), PRESSURE_HAND_BACKS_MAX);
    CHECK_EQ_INT(w.s->entry.view.breaker.n, 0);
    world_check_idle(&w);
    world_close(&w);
}

TEST(pressed_request_is_split_again_and_asks_the_node_that_would_compute_it)
{
    struct world w;
    struct client c;
    world_open(&w, "pdd", 5000);
    set_speed(&w, 10);
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 20 }));
    struct attempt a = play_split(&w, &c, AT_DECODE, 3);
    preempt(&a, SECOND_US); /* 43 tokens at 10 per second take longer */
    RIG_WAIT(&w.rig, counted(&w, PRESSURE_RECOMPUTE) == 1);
    set_speed(&w, 10000);
    preempt(&a, SECOND_US);
    struct attempt b = play_split(&w, &c, AT_DECODE, 2);
    CHECK(b.decode != a.decode);
    CHECK_EQ_INT(counted(&w, PRESSURE_HAND_BACK), 1);
    play_rest(&w, &c, &b, 20);
    world_check_idle(&w);
    world_close(&w);
}

/* Not without room, nor for an estimate that nobody made. */
TEST(pressed_request_stays_in_doubt)
{
    struct world w;
    struct client c;
    world_open(&w, "d", 5000);
    set_speed(&w, 10000);
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 20 }));
    struct attempt a = play_whole(&w, &c, 3);
    preempt(&a, SECOND_US);
    RIG_WAIT(&w.rig, counted(&w, PRESSURE_RECOMPUTE) == 1);
    n_blocks_free = 3; /* of the four for 40 tokens and 20 */
    size_t i = world_add(&w, ROLE_DECODE);
    set_speed(&w, 9999);
    preempt(&a, SECOND_US);
    RIG_WAIT(&w.rig, counted(&w, PRESSURE_RECOMPUTE) == 2);
    preempt(&a, 0);
    RIG_WAIT(&w.rig, counted(&w, PRESSURE_RECOMPUTE) == 3);
    n_blocks_free = 4;
    set_speed(&w, 10000);
    CHECK(received_take(w.nodes[i], FRAME_RUN) == NULL);
    rig_turn_ms(&w.rig, 200);
    CHECK_EQ_INT(counted(&w, PRESSURE_HAND_BACK), 0);
    preempt(&a, UINT64_MAX);
    struct attempt b = play_whole(&w, &c, 1);
    CHECK(b.decode == w.nodes[i]);
    preempt(&a, SECOND_US); /* of an attempt that is over */
    play_rest(&w, &c, &b, 20);
    CHECK_EQ_INT(counted(&w, PRESSURE_HAND_BACK) + counted(&w, PRESSURE_RECOMPUTE), 4);
    world_check_idle(&w);
    world_close(&w);
}

/* It stays while there is no room, and leaves when a node comes that has some; not when it is
 * nearly computed again, nor when it runs. */
TEST(pressed_request_leaves_when_room_comes)
{
    for (int runs = 0; runs < 2; runs++) {
        struct world w;
        struct client c;
        world_open(&w, "d", 5000);
        set_speed(&w, 10000);
        CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 20 }));
        struct attempt a = play_whole(&w, &c, 3);
        preempt(&a, 30 * SECOND_US);
        RIG_WAIT(&w.rig, counted(&w, PRESSURE_RECOMPUTE) == 1);
        if (runs) {
            reply_tokens(a.decode, &a, 3, 4, FINISH_NONE);
            RIG_WAIT(&w.rig, c.n_tokens == 4);
        }
        size_t i = world_add(&w, ROLE_DECODE);
        set_speed(&w, 10001);
        if (!runs) a = play_whole(&w, &c, 1);
        CHECK(a.decode == w.nodes[runs ? 0 : i]);
        CHECK_EQ_INT(counted(&w, PRESSURE_HAND_BACK), !runs);
        play_rest(&w, &c, &a, 20);
        world_check_idle(&w);
        world_close(&w);
    }
}

/* Room that several see is taken by one at a time: the next looks at the next view. */
TEST(pressed_requests_leave_one_by_one)
{
    enum { N = 3 };
    struct world w;
    struct client c[N];
    struct attempt a[N], b = { 0 };
    world_open(&w, "d", 5000);
    set_speed(&w, 10000);
    for (int k = 0; k < N; k++) {
        CHECK_OK(client_submit(&w, &c[k], (struct ask){ .max_tokens = 20 }));
        a[k] = play_whole(&w, &c[k], 3);
        preempt(&a[k], 30 * SECOND_US);
    }
    RIG_WAIT(&w.rig, counted(&w, PRESSURE_RECOMPUTE) == N);
    size_t i = world_add(&w, ROLE_DECODE);
    set_speed(&w, 10000);
    RIG_WAIT(&w.rig, counted(&w, PRESSURE_HAND_BACK) == 1); /* all at once, it would be 3 */
    world_expect(&w, FRAME_RUN, &b.decode);
    CHECK(b.decode == w.nodes[i]);
    RIG_WAIT(&w.rig, counted(&w, PRESSURE_HAND_BACK) == N);
    for (int k = 0; k < N; k++) w.be.cancel(w.be.self, c[k].id);
    RIG_WAIT(&w.rig, scheduler_n_live(w.s) == 0);
    world_check_idle(&w);
    world_close(&w);
}

/* When all others have become full, the node that gave it back is better than none. */
TEST(pressed_request_comes_back_when_all_others_are_full)
{
    struct world w;
    struct client c;
    world_open(&w, "dd", 5000);
    set_speed(&w, 10000);
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 20 }));
    struct attempt a = play_whole(&w, &c, 3);
    const size_t full = a.decode == w.nodes[0];
    reply_blame(a.decode, &a, ERR_BUSY, BLAME_HANDED_BACK);
    struct node_record r = record_of(&w, full);
    r.max_seqs = 1;
    r.prefill_tokens_per_s = 10000;
    struct placement p = {
        .request = 77, .decode = r.node, .tokens = 5, .blocks = 1, .ttl_ms = 60000
    };
    struct directory_placed placed;
    directory_publish(w.directory, &r);
    CHECK_OK(directory_local_reserve(w.directory, &p, 0, &placed));
    view_refresh(&w.s->entry.view);
    struct attempt b = play_whole(&w, &c, 2);
    CHECK(b.decode == a.decode);
    play_rest(&w, &c, &b, 20);
    directory_local_release(w.directory, 77);
    world_close(&w);
}

TEST_MAIN(CASE(pressed_request_goes_on_elsewhere_but_not_for_ever),
          CASE(pressed_request_is_split_again_and_asks_the_node_that_would_compute_it),
          CASE(pressed_request_stays_in_doubt), CASE(pressed_request_leaves_when_room_comes),
          CASE(pressed_requests_leave_one_by_one),
          CASE(pressed_request_comes_back_when_all_others_are_full))
