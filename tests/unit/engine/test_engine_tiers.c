/* test_engine_tiers.c - an engine with memories behind its pool: the same bits as without, whatever
 * was evicted, brought back, cancelled or broken on the way. */
#include <stdio.h>
#include <unistd.h>

#include "shared/base/clock.h"
#include "tests/unit/engine/engine_rig.h"
#include "tests/unit/engine/gated_tier.h"

enum { FEW_BLOCKS = 16, N_TEXTS = 6, TEXT = 150, MIB = 1 << 20 };

static struct answer *reference(const struct engine_request *reqs, uint32_t n, const char *model,
                                const char *isa)
{
    struct rig r;
    rig_open(&r,
             (struct rig_options){
                 .no_prefix_cache = true, .max_batched_tokens = 2048, .model = model, .isa = isa });
    struct answer *all = MEM_ARRAY(struct answer, n);
    for (uint32_t i = 0; i < n; i++) {
        struct answer *one = rig_run(&r, &reqs[i], 1);
        all[i] = *one;
        mem_free(one);
    }
    rig_close(&r);
    return all;
}

static uint64_t count(struct rig *r, const char *what)
{
    char name[64];
    snprintf(name, sizeof name, "baton_kv_tier_%s_total", what);
    return counter_value(metrics_counter(r->metrics, name, "tier=\"host\"", ""));
}

static double gauge(struct rig *r, const char *name, const char *labels)
{
    return gauge_value(metrics_gauge(r->metrics, name, labels, ""));
}

/* A turn of the engine's thread. */
static void turn(struct rig *r) { CHECK_OK(engine_cancel(r->engine, 999999, true)); }

/* Waits until the blocks of what ended are copied: nothing waits for a copy or is held for one. */
static void await_copies(struct rig *r)
{
    for (int ms = 0; ms < RIG_WAIT_MS; ms++) {
        if (gauge(r, "baton_kv_tier_waiting_blocks", "tier=\"host\"") == 0 &&
            gauge(r, "baton_kv_blocks", "state=\"held\"") == 0)
            return;
        turn(r); /* which writes the gauges */
        usleep(1000);
    }
    test_fail(__FILE__, __LINE__, "blocks still wait to be copied");
}

static struct kv_store_options tiers_of(struct gate *gate)
{
    atomic_store(&gate->n_good, -1);
    atomic_store(&gate->max_layers, UINT32_MAX);
    return (struct kv_store_options){
        .host_bytes = 64 * MIB, .always = true, .wrap = gated_tier_wrap, .wrap_arg = gate
    };
}

static struct engine_request text(uint64_t id, uint32_t i)
{
    struct engine_request q = rig_request(id, TEXT + i, 50 + i, 20);
    q.sampling.temperature = i % 2 ? 0.8f : 0;
    return q;
}

/* One after the other, so that each finds the pool full of the others' blocks. */
static struct answer *one_by_one(struct rig *r, const struct engine_request *reqs, uint32_t n)
{
    struct answer *all = MEM_ARRAY(struct answer, n);
    for (uint32_t i = 0; i < n; i++) {
        struct answer *one = rig_run(r, &reqs[i], 1);
        all[i] = *one;
        mem_free(one);
        await_copies(r);
    }
    return all;
}

static void check_all_same(const struct answer *a, const struct answer *b, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) check_same(&a[i], &b[i]);
}

/* ---- the same bits ---- */

/* n: texts, two of which are more than the pool holds. */
static void comes_back(const char *model, const char *isa, bool by_layers, uint32_t n)
{
    struct engine_request reqs[2 * N_TEXTS];
    struct gate gate = { .by_layers = by_layers };
    const struct kv_store_options tiers = tiers_of(&gate);
    struct rig r;
    for (uint32_t i = 0; i < 2 * n; i++) reqs[i] = text(1 + i, i % n);
    struct answer *want = reference(reqs, n, model, isa);
    rig_open(&r, (struct rig_options){
                     .n_blocks = FEW_BLOCKS, .tiers = &tiers, .model = model, .isa = isa });
    struct answer *got = one_by_one(&r, reqs, 2 * n);
    check_all_same(want, got, n);
    check_all_same(want, got + n, n);
    for (uint32_t i = n; i < 2 * n; i++) {
        const struct engine_event *end = &got[i].end;
        const uint32_t full = (reqs[i].n_tokens - 1) / RIG_BLOCK_TOKENS * RIG_BLOCK_TOKENS;
        CHECK_EQ_INT(end->n_cached, full);
        CHECK(end->cache.n_from[KV_TIER_HOST] > 0 &&
              end->cache.n_from[KV_TIER_HOST] <= end->n_cached);
        CHECK(end->cache.load_ns > 0);
    }
    CHECK(rig_count(&r, "baton_kv_evictions_total") > 0);
    CHECK(count(&r, "promoted_blocks") > 0);
    CHECK_EQ_INT(count(&r, "lost_blocks"), 0);
    CHECK_EQ_INT(count(&r, "checksum_failures"), 0);
    CHECK(by_layers ? atomic_load(&gate.n_layered) > 0 : atomic_load(&gate.n_layered) == 0);
    rig_await_free_blocks(&r, FEW_BLOCKS);
    rig_close(&r);
    mem_free(want);
    mem_free(got);
}

TEST(evicted_prompts_come_back_with_the_same_bits)
{
    comes_back("llama", NULL, false, N_TEXTS);
    comes_back("llama", NULL, true, N_TEXTS);
    comes_back("deepseek_v3", NULL, false, N_TEXTS); /* latents, and two attention paths */
    comes_back("deepseek_v3", NULL, true, N_TEXTS);
}

TEST(evicted_prompts_of_a_gpu_come_back)
{
    if (device_count("cuda") == 0) SKIP("no CUDA device, or a build without");
    if (test_runs_long()) comes_back("llama", "cuda", false, 2);
    comes_back("llama", "cuda", true, 2);
}

/* Random arrivals and cancels in a pool that is too small. */
static void random_company(bool by_layers)
{
    enum { N = 60, FEWER = 24, BLOCKS = 24 };
    const uint32_t n = test_runs_long() ? N : FEWER;
    struct engine_request reqs[N];
    struct gate gate = { .by_layers = by_layers };
    const struct kv_store_options tiers = tiers_of(&gate);
    struct rig r;
    for (uint32_t i = 0; i < n; i++) {
        const double u = rng_uniform(98, 0, i);
        reqs[i] = rig_request(i, 1 + (uint32_t)(u * 150), i % 5,
                              1 + (uint32_t)(rng_uniform(98, 1, i) * 50));
        if (i % 3 == 0) reqs[i].sampling.temperature = 1.2f;
        reqs[i].want_prompt_logprobs = i % 11 == 0;
        reqs[i].cache_salt = i % 2;
    }
    struct answer *want = reference(reqs, n, NULL, NULL), *got = MEM_ARRAY(struct answer, N);
    rig_open(&r,
             (struct rig_options){
                 .n_blocks = BLOCKS, .max_seqs = 8, .max_batched_tokens = 40, .tiers = &tiers });
    for (uint32_t i = 0; i < n; i++) {
        got[i].id = i;
        CHECK_OK(engine_submit(r.engine, &reqs[i]));
        if (i % 9 == 4) CHECK_OK(engine_cancel(r.engine, i, true));
        if (i % 7 == 0) usleep(3000);
    }
    rig_gather(&r, got, n);
    for (uint32_t i = 0; i < n; i++)
        if (!got[i].canceled) check_same(&want[i], &got[i]);
    CHECK(count(&r, "demoted_blocks") > 0);
    rig_await_free_blocks(&r, BLOCKS);
    rig_close(&r);
    mem_free(want);
    mem_free(got);
}

TEST(random_company_gives_the_same)
{
    random_company(false);
    random_company(true);
}

TEST(salts_keep_tenants_apart)
{
    struct gate gate = { 0 };
    const struct kv_store_options tiers = tiers_of(&gate);
    struct rig r;
    rig_open(&r, (struct rig_options){ .n_blocks = FEW_BLOCKS, .tiers = &tiers });
    struct engine_request reqs[4] = { text(1, 0), text(2, 1), text(3, 0), text(4, 0) };
    reqs[0].cache_salt = reqs[3].cache_salt = 7;
    struct answer *got = one_by_one(&r, reqs, 4);
    check_same(&got[0], &got[2]);
    check_same(&got[0], &got[3]);
    CHECK_EQ_INT(got[2].end.n_cached, 0); /* of another tenant */
    CHECK(got[3].end.n_cached > 0);
    rig_close(&r);
    mem_free(got);
}

/* ---- preempted sequences ---- */

static void swaps(const char *model, bool no_prefix_cache, bool by_layers)
{
    enum { N = 8 };
    struct engine_request reqs[N];
    struct answer got[N];
    struct gate gate = { .by_layers = by_layers };
    const struct kv_store_options tiers = tiers_of(&gate);
    struct rig r;
    for (uint32_t i = 0; i < N; i++) {
        reqs[i] = rig_request(1 + i, 20 + 11 * i, 200 + i, 60);
        reqs[i].sampling.temperature = i % 2 ? 0.9f : 0;
        got[i] = (struct answer){ .id = 1 + i };
    }
    struct answer *want = reference(reqs, N, model, NULL);
    rig_open(&r, (struct rig_options){ .n_blocks = FEW_BLOCKS,
                                       .no_prefix_cache = no_prefix_cache,
                                       .tiers = &tiers,
                                       .model = model });
    for (uint32_t i = 0; i < N; i++) CHECK_OK(engine_submit(r.engine, &reqs[i]));
    rig_gather(&r, got, N);
    check_all_same(want, got, N);
    CHECK(rig_count(&r, "baton_engine_preemptions_total") > 0);
    CHECK(rig_count(&r, "baton_engine_swaps_total") > 0);
    rig_await_free_blocks(&r, FEW_BLOCKS);
    if (no_prefix_cache) /* what was kept for one sequence ends with it */
        CHECK_EQ_INT(gauge(&r, "baton_kv_tier_blocks", "tier=\"host\""), 0);
    rig_close(&r);
    mem_free(want);
}

TEST(preempted_sequences_go_on_from_host_memory)
{
    swaps("llama", false, false);
    swaps("llama", true, false);
    swaps("deepseek_v3", false, true);
}

/* ---- in LOADING ---- */

/* An engine whose first text is in the host tier and not in the pool, with the gate shut. */
static void open_loading(struct rig *r, struct gate *gate, struct kv_store_options *tiers,
                         struct rig_options o)
{
    struct engine_request first = text(901, 0), fill = rig_request(902, 230, 77, 4);
    *tiers = tiers_of(gate);
    o.n_blocks = FEW_BLOCKS;
    o.tiers = tiers;
    rig_open(r, o);
    mem_free(rig_run(r, &first, 1));
    await_copies(r);
    mem_free(rig_run(r, &fill, 1));
    await_copies(r);
    atomic_store(&gate->is_shut, true);
}

static void await_get(const struct gate *gate, uint32_t n)
{
    for (int ms = 0; ms < RIG_WAIT_MS && atomic_load(&gate->n_got) < n; ms++) usleep(1000);
    CHECK(atomic_load(&gate->n_got) >= n);
}

static void open_gate(struct rig *r, struct gate *gate)
{
    atomic_store(&gate->is_shut, false);
    turn(r);
}

TEST(others_run_while_one_loads)
{
    struct gate gate = { 0 };
    struct kv_store_options tiers;
    struct rig r;
    open_loading(&r, &gate, &tiers, (struct rig_options){ 0 });
    struct engine_request q = text(1, 0), small = rig_request(2, 10, 5, 10);
    struct answer *want = reference(&q, 1, NULL, NULL), got = { .id = 1 };
    CHECK_OK(engine_submit(r.engine, &q));
    await_get(&gate, 1);
    struct answer *other = rig_run(&r, &small, 1);
    CHECK_EQ_INT(other->n_out, 10);
    open_gate(&r, &gate);
    rig_gather(&r, &got, 1);
    check_same(want, &got);
    rig_await_free_blocks(&r, FEW_BLOCKS);
    rig_close(&r);
    mem_free(other);
    mem_free(want);
}

TEST(a_cancel_while_loading_gives_the_blocks_back)
{
    struct gate gate = { 0 };
    struct kv_store_options tiers;
    struct rig r;
    open_loading(&r, &gate, &tiers, (struct rig_options){ 0 });
    struct engine_request q = text(1, 0);
    struct answer got = { .id = 1 };
    CHECK_OK(engine_submit(r.engine, &q));
    await_get(&gate, 1);
    CHECK_OK(engine_cancel(r.engine, 1, true));
    rig_gather(&r, &got, 1);
    CHECK(got.canceled);
    rig_await_free_blocks(&r, FEW_BLOCKS);
    open_gate(&r, &gate);
    q.id = 2;
    struct answer *again = rig_run(&r, &q, 1), *want = reference(&q, 1, NULL, NULL);
    check_same(want, again);
    rig_close(&r);
    mem_free(again);
    mem_free(want);
}

TEST(an_engine_ends_while_one_loads)
{
    struct gate gate = { 0 };
    struct kv_store_options tiers;
    struct rig r;
    open_loading(&r, &gate, &tiers, (struct rig_options){ 0 });
    struct engine_request q = text(1, 0);
    CHECK_OK(engine_submit(r.engine, &q));
    await_get(&gate, 1);
    rig_close(&r);
}

/* An older sequence needs the blocks of the one that loads, which waits and starts again. */
TEST(one_that_loads_is_preempted)
{
    /* The older one has few blocks yet when the other one comes. */
    const struct pace_curve slow = { .decode.row_us = 2000 };
    struct gate gate = { 0 };
    struct kv_store_options tiers;
    struct rig r;
    open_loading(&r, &gate, &tiers, (struct rig_options){ .pace = &slow });
    struct engine_request older = rig_request(1, 20, 9, 200), q = text(2, 0);
    struct engine_request both[2] = { older, q };
    struct answer *want = reference(both, 2, NULL, NULL), got[2] = { { .id = 1 }, { .id = 2 } };
    CHECK_OK(engine_submit(r.engine, &older));
    CHECK_OK(engine_submit(r.engine, &q));
    await_get(&gate, 1);
    rig_gather(&r, got, 1); /* 14 blocks, while the other one holds 10 or 11 of 16 */
    CHECK(rig_count(&r, "baton_engine_preemptions_total") > 0);
    open_gate(&r, &gate);
    rig_gather(&r, got + 1, 1);
    check_all_same(want, got, 2);
    rig_await_free_blocks(&r, FEW_BLOCKS);
    rig_close(&r);
    mem_free(want);
}

/* What came before the failure is used, the rest computed. */
TEST(what_does_not_come_is_computed)
{
    struct engine_request q = text(1, 0);
    struct answer *want = reference(&q, 1, NULL, NULL);
    for (int n_good = -1; n_good < 6; n_good++) {
        struct gate gate = { 0 };
        struct kv_store_options tiers;
        struct rig r;
        open_loading(&r, &gate, &tiers, (struct rig_options){ 0 });
        atomic_store(&gate.n_good, n_good);
        atomic_store(&gate.refuses, n_good < 0);
        open_gate(&r, &gate);
        struct answer *got = rig_run(&r, &q, 1);
        check_same(want, got);
        CHECK_EQ_INT(got->end.cache.n_from[KV_TIER_HOST],
                     n_good < 0 ? 0 : n_good * RIG_BLOCK_TOKENS);
        rig_await_free_blocks(&r, FEW_BLOCKS);
        rig_close(&r);
        mem_free(got);
    }
    mem_free(want);
}

/* One that never comes is given up. */
TEST(a_load_that_hangs_is_given_up)
{
    struct gate gate = { 0 };
    struct kv_store_options tiers;
    struct rig r;
    open_loading(&r, &gate, &tiers, (struct rig_options){ 0 });
    struct engine_request q = text(1, 0);
    struct answer *want = reference(&q, 1, NULL, NULL), *got = rig_run(&r, &q, 1);
    check_same(want, got);
    CHECK_EQ_INT(rig_count(&r, "baton_kv_tier_load_timeouts_total"), 1);
    rig_await_free_blocks(&r, FEW_BLOCKS);
    rig_close(&r);
    mem_free(got);
    mem_free(want);
}

/* Of several with the same prefix one brings it, and the others find it in the pool. */
TEST(a_prefix_is_brought_once)
{
    struct gate gate = { 0 };
    struct kv_store_options tiers;
    struct rig r;
    open_loading(&r, &gate, &tiers, (struct rig_options){ 0 });
    struct engine_request reqs[3];
    struct answer got[3];
    for (uint32_t i = 0; i < 3; i++) {
        reqs[i] = text(1 + i, 0);
        got[i] = (struct answer){ .id = 1 + i };
        CHECK_OK(engine_submit(r.engine, &reqs[i]));
    }
    await_get(&gate, 1);
    open_gate(&r, &gate);
    rig_gather(&r, got, 3);
    CHECK_EQ_INT(atomic_load(&gate.n_got), 1);
    check_same(&got[0], &got[1]);
    check_same(&got[0], &got[2]);
    CHECK(got[2].end.n_cached >= 9 * RIG_BLOCK_TOKENS);
    rig_close(&r);
}

/* ---- layer by layer ---- */

/* Beside a sequence that decodes, whose rows are in the same steps. */
static void layers_stop(uint32_t n_layers, bool hangs)
{
    struct gate gate = { .by_layers = true };
    struct kv_store_options tiers;
    struct rig r;
    open_loading(&r, &gate, &tiers, (struct rig_options){ 0 });
    struct engine_request reqs[2] = { rig_request(1, 10, 5, 60), text(2, 0) };
    struct answer *want = reference(reqs, 2, NULL, NULL), got[2] = { { .id = 1 }, { .id = 2 } };
    atomic_store(&gate.max_layers, n_layers);
    atomic_store(&gate.n_good, 0);
    atomic_store(&gate.is_shut, hangs);
    for (int i = 0; i < 2; i++) CHECK_OK(engine_submit(r.engine, &reqs[i]));
    rig_gather(&r, got, 2);
    check_all_same(want, got, 2);
    CHECK_EQ_INT(atomic_load(&gate.n_layered), 1);
    CHECK_EQ_INT(got[1].end.cache.n_from[KV_TIER_HOST], 0);
    CHECK(got[1].end.n_cached < 3 * RIG_BLOCK_TOKENS);
    atomic_store(&gate.is_shut, false);
    rig_await_free_blocks(&r, FEW_BLOCKS);
    rig_close(&r);
    mem_free(want);
}

TEST(a_layer_that_does_not_come_spoils_nothing)
{
    for (uint32_t n = 0; n < 2; n++) {
        layers_stop(n, false);
        layers_stop(n, true);
    }
}

/* The first layers compute before the last ones are there. */
TEST(a_step_begins_before_all_layers_are_there)
{
    struct gate gate = { .by_layers = true };
    struct kv_store_options tiers;
    struct rig r;
    open_loading(&r, &gate, &tiers, (struct rig_options){ 0 });
    struct engine_request q = text(1, 0);
    struct answer *want = reference(&q, 1, NULL, NULL), got = { .id = 1 };
    atomic_store(&gate.max_layers, 1);
    struct engine_stats was, now;
    engine_get_stats(r.engine, &was);
    CHECK_OK(engine_submit(r.engine, &q));
    do engine_get_stats(r.engine, &now);
    while (now.progress == was.progress); /* a layer was computed, or a slice of it */
    atomic_store(&gate.max_layers, UINT32_MAX);
    open_gate(&r, &gate);
    rig_gather(&r, &got, 1);
    check_same(want, &got);
    CHECK_EQ_INT(atomic_load(&gate.n_layered), 1);
    CHECK_EQ_INT(rig_count(&r, "baton_kv_tier_load_timeouts_total"), 0);
    rig_close(&r);
    mem_free(want);
}

/* All layers have been there for long when the load is given up, since nobody said that it was
 * over: the sequence, which has used them, keeps them. */
TEST(layers_that_are_all_there_are_not_late)
{
    const struct pace_curve slow = { .decode.row_us = 40000 };
    struct gate gate = { .by_layers = true };
    struct kv_store_options tiers;
    struct rig r;
    open_loading(&r, &gate, &tiers, (struct rig_options){ .pace = &slow });
    struct engine_request q = text(1, 0);
    q.sampling.max_tokens = 60; /* longer than a load is waited for */
    struct answer *want = reference(&q, 1, NULL, NULL), *got = rig_run(&r, &q, 1);
    check_same(want, got);
    CHECK_EQ_INT(rig_count(&r, "baton_kv_tier_load_timeouts_total"), 1);
    CHECK_EQ_INT(got->end.n_cached, TEXT / RIG_BLOCK_TOKENS * RIG_BLOCK_TOKENS);
    rig_close(&r);
    mem_free(got);
    mem_free(want);
}

/* ---- with a peer ---- */

enum { HEAD = 5 * RIG_BLOCK_TOKENS, FULL = TEXT / RIG_BLOCK_TOKENS };

/* An engine of which the host tier has the first blocks of text 0, and the pool one at most. */
static void open_with_head(struct rig *r, struct gate *gate, struct kv_store_options *tiers,
                           struct rig_options o)
{
    struct engine_request head = text(901, 0), fill = rig_request(902, 230, 77, 4);
    head.n_tokens = head.n_prompt = HEAD + 1;
    head.sampling.max_tokens = 1;
    *tiers = tiers_of(gate);
    o.n_blocks = FEW_BLOCKS;
    o.tiers = tiers;
    rig_open(r, o);
    mem_free(rig_run(r, &head, 1));
    await_copies(r);
    mem_free(rig_run(r, &fill, 1));
    await_copies(r);
}

static struct engine_request from_peer(uint64_t id)
{
    struct engine_request q = text(id, 0);
    q.peer = 7;
    q.n_peer_tokens = TEXT;
    return q;
}

/* Of the fetch that begins next: its blocks. */
static uint32_t await_fetch(struct rig *r)
{
    for (;;) {
        const struct rig_event e = rig_next(r);
        if (e.ev.kind == ENGINE_FETCH) return e.ev.n_blocks;
    }
}

/* Others have begun with what the tiers brought. */
TEST(a_cancel_while_a_peer_brings_the_rest)
{
    struct gate gate = { 0 };
    struct kv_store_options tiers;
    struct rig r;
    open_with_head(&r, &gate, &tiers, (struct rig_options){ 0 });
    struct engine_request q = from_peer(1), other = text(2, 0), again = text(3, 0);
    struct answer *want = reference(&again, 1, NULL, NULL), got = { .id = 1 };
    other.n_tokens = other.n_prompt = HEAD + 1;
    other.prefill_only = true; /* it keeps its blocks until it is released */
    CHECK_OK(engine_submit(r.engine, &q));
    CHECK_EQ_INT(await_fetch(&r), FULL - 5);
    for (int ms = 0; ms < RIG_WAIT_MS && count(&r, "promoted_blocks") < 4; ms++) {
        turn(&r);
        usleep(1000);
    }
    struct answer *one = rig_run(&r, &other, 1);
    CHECK_EQ_INT(one->end.n_cached, HEAD);
    CHECK_OK(engine_cancel(r.engine, 1, true));
    rig_gather(&r, &got, 1);
    CHECK(got.canceled);
    CHECK_OK(engine_fetched(r.engine, 1, 0));
    CHECK_OK(engine_release(r.engine, 2));
    rig_await_free_blocks(&r, FEW_BLOCKS);
    struct answer *last = rig_run(&r, &again, 1);
    check_same(want, last);
    rig_close(&r);
    mem_free(last);
    mem_free(one);
    mem_free(want);
}

/* The peer's blocks had come when an older sequence took them, and the tiers say to have all when
 * it starts again, but bring as many as the first time: the rest is computed. */
TEST(what_a_peer_brought_is_lost_with_its_blocks)
{
    const struct pace_curve slow = { .decode.row_us = 2000 };
    struct gate gate = { 0 };
    struct kv_store_options tiers;
    struct rig r;
    open_with_head(&r, &gate, &tiers, (struct rig_options){ .pace = &slow });
    struct engine_request older = rig_request(1, 20, 9, 200), q = from_peer(2);
    struct engine_request both[2] = { older, text(2, 0) };
    struct answer *want = reference(both, 2, NULL, NULL), got[2] = { { .id = 1 }, { .id = 2 } };
    atomic_store(&gate.is_shut, true);
    CHECK_OK(engine_submit(r.engine, &older));
    CHECK_OK(engine_submit(r.engine, &q));
    CHECK_EQ_INT(await_fetch(&r), FULL - 5);
    CHECK_OK(engine_fetched(r.engine, 2, FULL - 5));
    for (int ms = 0; ms < RIG_WAIT_MS && !rig_count(&r, "baton_engine_preemptions_total"); ms++)
        usleep(1000);
    atomic_store(&gate.claims, true);
    open_gate(&r, &gate);
    rig_gather(&r, got, 2);
    check_same(&want[1], &got[1]);
    CHECK_EQ_INT(got[1].end.cache.n_from[KV_TIER_PEER], 0);
    CHECK_EQ_INT(got[1].end.n_cached, HEAD);
    rig_close(&r);
    mem_free(want);
}

/* It says so at once, which tells nothing of how fast it could send. */
TEST(a_peer_that_has_nothing_is_not_slow)
{
    static const struct kv_store_options always = { .always = true };
    bool is_well = false;
    for (int i = 0; i < 20 && !is_well; i++) { /* this process may be slow */
        uint32_t load_us[2];
        struct rig r;
        rig_open(&r, (struct rig_options){ .tiers = &always });
        for (uint32_t k = 0; k < 2; k++) {
            struct engine_request q = rig_request(1 + k, TEXT, 300 + k, 1);
            struct answer got = { .id = 1 + k };
            q.peer = 7;
            q.n_peer_tokens = TEXT;
            CHECK_OK(engine_submit(r.engine, &q));
            CHECK_EQ_INT(await_fetch(&r), FULL);
            CHECK_OK(engine_fetched(r.engine, 1 + k, 0));
            rig_gather(&r, &got, 1);
            load_us[k] = got.end.cache.load_us;
        }
        is_well = load_us[1] < 2 * load_us[0];
        rig_close(&r);
    }
    CHECK(is_well);
}

/* Its peer may write to the blocks for long: the sequence takes others, and nobody gets those before
 * the peer's writes are over. Where there are no others it waits. */
TEST(a_sequence_goes_on_without_a_peer_that_hangs)
{
    static const struct kv_store_options always = { .always = true };
    for (uint32_t n_blocks = FEW_BLOCKS; n_blocks <= 2 * FEW_BLOCKS; n_blocks += FEW_BLOCKS) {
        struct engine_request q = from_peer(1);
        struct answer *want = reference(&q, 1, NULL, NULL), got = { .id = 1 };
        struct rig r;
        rig_open(&r, (struct rig_options){ .tiers = &always, .n_blocks = n_blocks });
        CHECK_OK(engine_submit(r.engine, &q));
        CHECK_EQ_INT(await_fetch(&r), FULL);
        for (int i = 0; i < 3; i++) CHECK_OK(engine_fetch_hangs(r.engine, 1));
        if (n_blocks == FEW_BLOCKS) {
            struct engine_request other = rig_request(2, 20, 9, 4); /* behind those commands */
            mem_free(rig_run(&r, &other, 1));
            rig_await_free_blocks(&r, n_blocks - (FULL + 1)); /* the first holds all of its own */
            CHECK_OK(engine_fetched(r.engine, 1, 0));
        }
        rig_gather(&r, &got, 1);
        check_same(want, &got);
        CHECK_EQ_INT(got.end.cache.n_from[KV_TIER_PEER], 0);
        if (n_blocks > FEW_BLOCKS) {
            rig_await_free_blocks(&r, n_blocks - FULL);
            CHECK_OK(engine_fetched(r.engine, 1, 0));
        }
        rig_await_free_blocks(&r, n_blocks);
        rig_close(&r);
        mem_free(want);
    }
}

/* The engine ends while the peer may still write. */
TEST(what_was_left_to_a_peer_ends_with_the_engine)
{
    static const struct kv_store_options always = { .always = true };
    struct engine_request q = from_peer(1);
    struct answer got = { .id = 1 };
    struct rig r;
    rig_open(&r, (struct rig_options){ .tiers = &always });
    CHECK_OK(engine_submit(r.engine, &q));
    CHECK_EQ_INT(await_fetch(&r), FULL);
    CHECK_OK(engine_fetch_hangs(r.engine, 1));
    rig_gather(&r, &got, 1);
    rig_close(&r);
}

/* ---- the end ---- */

/* A disk may still be writing from the host's slots. */
TEST(the_tier_that_reads_another_ends_first)
{
    struct gate gate = { 0 };
    struct kv_store_options tiers = tiers_of(&gate);
    struct rig r;
    tiers.disk = (struct tier_disk_options){ .folder = test_tmpdir(), .bytes = MIB };
    rig_open(&r, (struct rig_options){ .tiers = &tiers });
    rig_close(&r);
    CHECK_EQ_INT(atomic_load(&gate.first_freed), 1 + KV_TIER_DISK);
}

/* ---- what has to be there ---- */

static struct engine_event check_lacking(struct rig *r, struct engine_request q, uint32_t most)
{
    q.most_computed = most;
    struct answer *got = rig_run(r, &q, 1);
    const struct engine_event end = got->end;
    CHECK_STATUS(end.status, ERR_NOT_FOUND);
    CHECK_EQ_INT(got->n_out, 0);
    CHECK(end.n_cached + most < q.n_tokens);
    mem_free(got);
    return end;
}

static void check_enough(struct rig *r, struct engine_request q, uint32_t most,
                         const struct answer *want)
{
    q.most_computed = most;
    struct answer *got = rig_run(r, &q, 1);
    CHECK_OK(got->end.status);
    check_same(want, got);
    mem_free(got);
}

/* The limit is on what is left after pool, tiers and peer: beyond it nothing is computed, and what
 * waits behind it goes on. */
TEST(a_prompt_that_is_gone_is_not_computed)
{
    enum { LEFT = TEXT - TEXT / RIG_BLOCK_TOKENS * RIG_BLOCK_TOKENS };
    struct engine_request q = text(1, 0), behind = rig_request(2, 40, 9, 8);
    struct answer *want = reference(&q, 1, NULL, NULL), got[2] = { { .id = 1 }, { .id = 2 } };
    struct rig r;
    rig_open(&r, (struct rig_options){ .n_blocks = FEW_BLOCKS });
    CHECK_EQ_INT(check_lacking(&r, q, TEXT - 1).n_cached, 0);
    CHECK_EQ_INT(rig_count(&r, "baton_engine_prompt_tokens_total"), 0);
    check_enough(&r, q, TEXT, want);
    check_enough(&r, q, LEFT, want);
    CHECK_EQ_INT(check_lacking(&r, q, LEFT - 1).n_cached, TEXT - LEFT);
    q.most_computed = LEFT - 1;
    CHECK_OK(engine_submit(r.engine, &q));
    CHECK_OK(engine_submit(r.engine, &behind));
    rig_gather(&r, got, 2);
    CHECK_STATUS(got[0].end.status, ERR_NOT_FOUND);
    CHECK_EQ_INT(got[1].n_out, 8);
    rig_await_free_blocks(&r, FEW_BLOCKS);
    rig_close(&r);
    mem_free(want);
}

/* A peer is asked first. */
TEST(a_prompt_that_a_peer_has_not_either_is_not_computed)
{
    struct engine_request q = text(1, 0);
    struct answer got = { .id = 1 };
    struct rig_event ev;
    struct rig r;
    rig_open(&r, (struct rig_options){ .n_blocks = FEW_BLOCKS });
    q.most_computed = 32;
    q.peer = 7;
    q.n_peer_tokens = TEXT;
    CHECK_OK(engine_submit(r.engine, &q));
    do ev = rig_next(&r);
    while (ev.ev.kind != ENGINE_FETCH);
    CHECK_OK(engine_fetched(r.engine, 1, 0));
    rig_gather(&r, &got, 1);
    CHECK_STATUS(got.end.status, ERR_NOT_FOUND);
    rig_await_free_blocks(&r, FEW_BLOCKS);
    rig_close(&r);
}

/* One that tiers bring is there; one of which they bring too little is not. It starts when all is
 * there: what does not come layer by layer would be computed. */
TEST(a_prompt_that_does_not_come_is_not_computed)
{
    struct engine_request q = text(1, 0);
    struct answer *want = reference(&q, 1, NULL, NULL);
    for (int n_good = -2; n_good < 3; n_good++) {
        struct gate gate = { .by_layers = true };
        struct kv_store_options tiers;
        struct rig r;
        open_loading(&r, &gate, &tiers, (struct rig_options){ 0 });
        atomic_store(&gate.n_good, n_good < 0 ? -1 : n_good);
        atomic_store(&gate.refuses, n_good == -1);
        open_gate(&r, &gate);
        if (n_good == -2) {
            check_enough(&r, q, 32, want);
        } else {
            const uint32_t n_came = n_good < 0 ? 0 : (uint32_t)n_good;
            CHECK_EQ_INT(check_lacking(&r, q, 32).cache.n_from[KV_TIER_HOST],
                         n_came * RIG_BLOCK_TOKENS);
        }
        CHECK_EQ_INT(atomic_load(&gate.n_layered), 0);
        rig_await_free_blocks(&r, FEW_BLOCKS);
        rig_close(&r);
    }
    mem_free(want);
}

/* ---- which is sooner ---- */

TEST(a_tier_that_is_slower_than_computing_is_not_asked)
{
    struct gate gate = { 0 };
    struct kv_store_options tiers = tiers_of(&gate);
    struct rig r;
    tiers.always = false;
    rig_open(&r, (struct rig_options){ .n_blocks = FEW_BLOCKS, .tiers = &tiers });
    struct engine_request reqs[12];
    for (uint32_t i = 0; i < 12; i++) reqs[i] = text(1 + i, i % N_TEXTS);
    struct answer *got = one_by_one(&r, reqs, 12);
    for (uint32_t i = N_TEXTS; i < 12; i++) {
        const struct engine_cache_use *c = &got[i].end.cache;
        CHECK(c->load_us > 0);
        if (c->n_from[KV_TIER_HOST] == 0) CHECK(c->load_us >= c->compute_us);
        else CHECK(c->compute_us == 0 || c->load_us < c->compute_us);
    }
    rig_close(&r);
    mem_free(got);
}

/* Runs one that fills the pool. From its token `at` on puts are kept; when it waits for 5 ms they are
 * not any more. */
static void fill_pool(struct rig *r, struct gate *gate, uint64_t id, uint32_t at)
{
    struct engine_request q = rig_request(id, 10, (uint32_t)id, FEW_BLOCKS * RIG_BLOCK_TOKENS - 12);
    struct rig_event e = { 0 };
    CHECK_OK(engine_submit(r->engine, &q));
    do {
        if (!mailbox_wait(r->events, 5)) atomic_store(&gate->keeps_puts, false);
        e = rig_next(r);
        if (e.ev.kind == ENGINE_TOKEN && e.ev.index == at) atomic_store(&gate->keeps_puts, true);
    } while (e.ev.kind != ENGINE_FINISHED);
}

/* Blocks of a sequence before it that are being copied do not cost a sequence its own: it waits for
 * the copies. Unless they take too long, as they may on a busy machine. */
TEST(blocks_held_for_copies_preempt_nobody)
{
    struct gate gate = { 0 };
    const struct kv_store_options tiers = tiers_of(&gate);
    struct rig r;
    uint64_t n_preempted = 1;
    rig_open(&r, (struct rig_options){ .n_blocks = FEW_BLOCKS, .tiers = &tiers });
    for (uint32_t round = 0; round < 30 && n_preempted > 0; round++) {
        const uint64_t before = rig_count(&r, "baton_engine_preemptions_total");
        fill_pool(&r, &gate, 1 + 2 * round, 100);
        fill_pool(&r, &gate, 2 + 2 * round, UINT32_MAX);
        n_preempted = rig_count(&r, "baton_engine_preemptions_total") - before;
    }
    CHECK_EQ_INT(n_preempted, 0);
    rig_close(&r);
}

TEST_MAIN(CASE(evicted_prompts_come_back_with_the_same_bits),
          CASE_T(evicted_prompts_of_a_gpu_come_back, 300), CASE(random_company_gives_the_same),
          CASE(salts_keep_tenants_apart), CASE(preempted_sequences_go_on_from_host_memory),
          CASE(others_run_while_one_loads), CASE(a_cancel_while_loading_gives_the_blocks_back),
          CASE(an_engine_ends_while_one_loads), CASE(one_that_loads_is_preempted),
          CASE(what_does_not_come_is_computed), CASE(a_load_that_hangs_is_given_up),
          CASE(a_prefix_is_brought_once), CASE(a_layer_that_does_not_come_spoils_nothing),
          CASE(layers_that_are_all_there_are_not_late), CASE(a_cancel_while_a_peer_brings_the_rest),
          CASE(what_a_peer_brought_is_lost_with_its_blocks),
          CASE(a_peer_that_has_nothing_is_not_slow),
          CASE(a_sequence_goes_on_without_a_peer_that_hangs),
          CASE(what_was_left_to_a_peer_ends_with_the_engine),
          CASE(the_tier_that_reads_another_ends_first), CASE(a_prompt_that_is_gone_is_not_computed),
          CASE(a_prompt_that_a_peer_has_not_either_is_not_computed),
          CASE(a_prompt_that_does_not_come_is_not_computed),
          CASE(a_step_begins_before_all_layers_are_there),
          CASE(a_tier_that_is_slower_than_computing_is_not_asked),
          CASE(blocks_held_for_copies_preempt_nobody))
