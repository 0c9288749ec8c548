/* test_kv_fetch.c - KV of a prompt that comes from a peer's memory: the same answer as computing it,
 * whatever the peer lacks, refuses or breaks off, and every block back. */
#include "tests/unit/decode/worker_rig.h"

enum { LONG = 300, BLOCK = 16, FULL = (LONG - 1) / BLOCK * BLOCK };

struct trio {
    struct cluster_rig rig;
    struct worker_node *has, *wants, *third;
    struct entry e;
    uint64_t next_request;
};

/* The tiny model computes sooner than anything could be fetched. */
static const struct kv_store_options ALWAYS = { .always = true };

static void trio_open_to_choose(struct trio *t, struct worker_options has,
                                struct worker_options wants)
{
    cluster_rig_open(&t->rig);
    t->has = worker_open(&t->rig, 1, has);
    t->wants = worker_open(&t->rig, 2, wants);
    t->third = NULL;
    t->next_request = 1;
    entry_open(&t->e, &t->rig);
}

static void trio_open(struct trio *t, struct worker_options has, struct worker_options wants)
{
    wants.tiers = &ALWAYS;
    trio_open_to_choose(t, has, wants);
}

static void trio_close(struct trio *t)
{
    if (t->has) RIG_WAIT(&t->rig, worker_is_idle(t->has));
    RIG_WAIT(&t->rig, worker_is_idle(t->wants));
    entry_close(&t->e);
    if (t->has) worker_close(t->has);
    worker_close(t->wants);
    if (t->third) worker_close(t->third);
    cluster_rig_close(&t->rig);
}

static uint64_t count(const struct worker_node *n, const char *name)
{
    return counter_value(metrics_counter(n->metrics, name, "", ""));
}

/* A request for the prompt of `seed`, of which the first n_kept tokens are said to be at `by`. */
static struct gen *ask(struct trio *t, uint64_t seed, const struct worker_node *by, uint32_t n_kept)
{
    struct gen *g = entry_add(&t->e, t->next_request++, LONG, seed, 20);
    if (!by) return g;
    g->kept_by = by->peer->id;
    g->kept_port = cluster_port(by->peer->c);
    g->n_kept = n_kept;
    return g;
}

static struct gen *run(struct trio *t, struct worker_node *on, uint64_t seed,
                       const struct worker_node *by, uint32_t n_kept)
{
    struct gen *g = ask(t, seed, by, n_kept);
    entry_generate(&t->e, g, on, FRAME_RUN);
    RIG_WAIT(&t->rig, g->finished || g->failed);
    if (g->failed) test_fail(__FILE__, __LINE__, "%s", g->text);
    return g;
}

/* ---- what a peer has ---- */

static void fetches(const char *protocols)
{
    struct trio t;
    trio_open(&t, (struct worker_options){ .protocols = protocols },
              (struct worker_options){ .protocols = protocols });
    for (uint64_t seed = 10; seed < 14; seed++) {
        struct gen *want = run(&t, t.has, seed, NULL, 0),
                   *got = run(&t, t.wants, seed, t.has, seed % 2 ? LONG : 100);
        check_same_answer(want, got);
        const uint32_t n = seed % 2 ? FULL : 100 / BLOCK * BLOCK;
        CHECK_EQ_INT(got->n_cached, n);
        CHECK_EQ_INT(got->n_peer, n);
    }
    CHECK(count(t.wants, "baton_kv_fetched_blocks_total") > 0);
    CHECK_EQ_INT(count(t.wants, "baton_kv_fetched_blocks_total"),
                 count(t.has, "baton_kv_lent_blocks_total"));
    CHECK_EQ_INT(count(t.wants, "baton_kv_fetch_failed_total"), 0);
    /* what came is its own now */
    struct gen *again = run(&t, t.wants, 11, t.has, LONG);
    CHECK_EQ_INT(again->n_peer, 0);
    CHECK(again->n_cached >= FULL);
    trio_close(&t);
}

TEST(kv_comes_from_a_peer_over_mem) { fetches("mem"); }
TEST(kv_comes_from_a_peer_over_tcp) { fetches("tcp"); }

/* The prompt of a split request: from a third node to the prefill node, from there to the decode
 * node. */
TEST(a_prefill_node_fetches_too)
{
    struct trio t;
    trio_open(&t, (struct worker_options){ 0 }, (struct worker_options){ 0 });
    t.third = worker_open(&t.rig, 3, (struct worker_options){ 0 });
    struct gen *want = run(&t, t.has, 20, NULL, 0), *got = ask(&t, 20, t.has, LONG);
    entry_split(&t.e, got, t.wants, t.third);
    RIG_WAIT(&t.rig, (got->finished && got->reported) || got->failed);
    if (got->failed) test_fail(__FILE__, __LINE__, "%s", got->text);
    check_same_answer(want, got);
    CHECK_EQ_INT(got->n_peer, FULL);
    RIG_WAIT(&t.rig, worker_is_idle(t.third));
    trio_close(&t);
}

/* What the peer has put away into its host memory comes back there first. */
TEST(a_peer_lends_from_its_tiers)
{
    const struct kv_store_options tiers = { .host_bytes = 64 << 20, .always = true };
    struct trio t;
    trio_open(&t, (struct worker_options){ .n_blocks = 24, .tiers = &tiers },
              (struct worker_options){ 0 });
    struct gen *want = run(&t, t.has, 30, NULL, 0);
    RIG_WAIT(&t.rig, gauge_value(metrics_gauge(t.has->metrics, "baton_kv_tier_blocks",
                                               "tier=\"host\"", "")) >= FULL / BLOCK);
    (void)run(&t, t.has, 31, NULL, 0); /* evicts it */
    struct gen *got = run(&t, t.wants, 30, t.has, LONG);
    check_same_answer(want, got);
    CHECK_EQ_INT(got->n_peer, FULL);
    trio_close(&t);
}

/* It has less than was said: that much is fetched, or nothing. */
TEST(what_a_peer_lacks_is_computed)
{
    struct trio t;
    trio_open(&t, (struct worker_options){ 0 }, (struct worker_options){ 0 });
    struct gen *part = entry_add(&t.e, t.next_request++, 100, 40, 4);
    entry_generate(&t.e, part, t.has, FRAME_RUN);
    RIG_WAIT(&t.rig, part->finished);
    struct gen *got = run(&t, t.wants, 40, t.has, LONG); /* begins with the same 100 tokens */
    CHECK_EQ_INT(got->n_peer, 100 / BLOCK * BLOCK);
    struct gen *want = run(&t, t.has, 40, NULL, 0);
    check_same_answer(want, got);
    want = run(&t, t.has, 41, NULL, 0);
    got = run(&t, t.wants, 42, t.has, LONG);
    CHECK_EQ_INT(got->n_peer, 0);
    CHECK_EQ_INT(count(t.wants, "baton_kv_fetch_failed_total"), 1);
    trio_close(&t);
}

/* Both times are told, and the shorter one was taken. */
TEST(a_peer_is_asked_when_that_is_sooner)
{
    struct trio t;
    trio_open_to_choose(&t, (struct worker_options){ .step_tokens = 64 },
                        (struct worker_options){ .step_tokens = 64 });
    for (uint64_t seed = 100; seed < 108; seed++) {
        struct gen *want = run(&t, t.has, seed, NULL, 0);
        (void)run(&t, t.wants, seed + 100, NULL, 0); /* it learns how fast it computes */
        struct gen *got = run(&t, t.wants, seed, t.has, LONG);
        check_same_answer(want, got);
        CHECK(got->load_us > 0 && got->compute_us > 0);
        CHECK(got->n_peer ? got->load_us < got->compute_us : got->load_us >= got->compute_us);
    }
    trio_close(&t);
}

/* ---- refusals ---- */

TEST(another_layout_is_refused)
{
    struct trio t;
    trio_open(&t, (struct worker_options){ .block_tokens = 8 }, (struct worker_options){ 0 });
    struct gen *want = run(&t, t.has, 50, NULL, 0), *got = run(&t, t.wants, 50, t.has, LONG);
    check_same_answer(want, got);
    CHECK_EQ_INT(got->n_peer, 0);
    CHECK_EQ_INT(count(t.has, "baton_kv_lend_refused_total"), 1);
    trio_close(&t);
}

TEST(without_a_transport_it_is_computed)
{
    struct trio t;
    trio_open(&t, (struct worker_options){ .protocols = "" }, (struct worker_options){ 0 });
    struct gen *want = run(&t, t.has, 51, NULL, 0), *got = run(&t, t.wants, 51, t.has, LONG);
    check_same_answer(want, got);
    trio_close(&t);
    trio_open(&t, (struct worker_options){ 0 }, (struct worker_options){ .protocols = "" });
    want = run(&t, t.has, 52, NULL, 0);
    got = run(&t, t.wants, 52, t.has, LONG);
    check_same_answer(want, got);
    CHECK_EQ_INT(got->n_peer, 0);
    trio_close(&t);
}

/* Nobody is there any more. */
TEST(a_peer_that_is_gone_costs_nothing_but_time)
{
    struct trio t;
    trio_open(&t, (struct worker_options){ 0 }, (struct worker_options){ 0 });
    struct gen *want = run(&t, t.wants, 60, NULL, 0), *got = ask(&t, 61, t.has, LONG);
    worker_close(t.has);
    t.has = NULL;
    entry_generate(&t.e, got, t.wants, FRAME_RUN);
    RIG_WAIT(&t.rig, got->finished || got->failed);
    CHECK(got->finished && got->n_peer == 0);
    CHECK_EQ_INT(want->n_out, got->n_out);
    trio_close(&t);
}

/* ---- broken off ---- */

/* At any moment: the peer ends, or the request is cancelled. */
static void broken_off(bool ends)
{
    for (uint64_t ms = 0; ms < 12; ms++) {
        struct trio t;
        trio_open(&t, (struct worker_options){ 0 }, (struct worker_options){ 0 });
        struct gen *want = run(&t, t.has, 70, NULL, 0), *got = ask(&t, 70, t.has, LONG);
        entry_generate(&t.e, got, t.wants, FRAME_RUN);
        rig_turn_ms(&t.rig, ms);
        if (ends) {
            worker_close(t.has);
            t.has = NULL;
            RIG_WAIT(&t.rig, got->finished || got->failed);
            CHECK(got->finished);
            check_same_answer(want, got);
        } else {
            entry_cancel(&t.e, got, t.wants);
            rig_turn_ms(&t.rig, 5);
            struct gen *again = run(&t, t.wants, 70, NULL, 0);
            check_same_answer(want, again);
        }
        trio_close(&t);
    }
}

TEST(a_peer_that_ends_while_it_sends) { broken_off(true); }
TEST(a_request_that_is_cancelled_while_it_fetches) { broken_off(false); }

/* A peer that takes the request and never answers: it is given up, and nothing is kept. */
static bool swallow(void *arg, const struct cluster_message *m)
{
    (void)arg;
    return m->type == FRAME_FETCH;
}

TEST(a_peer_that_is_silent_is_given_up)
{
    struct trio t;
    trio_open(&t, (struct worker_options){ 0 }, (struct worker_options){ 0 });
    struct peer_node *silent = peer_open(&t.rig, 9, (struct peer_options){ 0 });
    silent->hook = swallow;
    struct gen *got = ask(&t, 80, NULL, 0), *want = run(&t, t.has, 80, NULL, 0);
    got->kept_by = silent->id;
    got->kept_port = cluster_port(silent->c);
    got->n_kept = LONG;
    const uint64_t begin = clock_ms();
    entry_generate(&t.e, got, t.wants, FRAME_RUN);
    RIG_WAIT(&t.rig, got->finished || got->failed);
    CHECK(got->finished && clock_ms() - begin < RIG_LONG_MS - 5000);
    check_same_answer(want, got);
    peer_close(silent);
    trio_close(&t);
}

TEST_MAIN(CASE(kv_comes_from_a_peer_over_mem), CASE(kv_comes_from_a_peer_over_tcp),
          CASE(a_prefill_node_fetches_too), CASE(a_peer_lends_from_its_tiers),
          CASE(what_a_peer_lacks_is_computed), CASE(a_peer_is_asked_when_that_is_sooner),
          CASE(another_layout_is_refused), CASE(without_a_transport_it_is_computed),
          CASE(a_peer_that_is_gone_costs_nothing_but_time), CASE(a_peer_that_ends_while_it_sends),
          CASE(a_request_that_is_cancelled_while_it_fetches),
          CASE(a_peer_that_is_silent_is_given_up))
