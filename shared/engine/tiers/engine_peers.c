/* engine_peers.c - blocks that come from a peer's memory, and blocks of this pool that are held for
 * a peer to read.
 *
 * Others carry the bytes and answer with engine_fetched (decode/kv_fetch.h, prefill/kv_lend.h), of
 * a node of several ranks once all of them have theirs: blocks have the same numbers there.
 * What a peer may write to belongs to nobody else until then: a sequence that fetches is not
 * preempted, and one that is canceled, or goes on without a peer that hangs, leaves its blocks in
 * quarantine.
 * Thread: engine. */
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/engine/engine_state.h"

static const double EXPECTED_FIRST_S = 3e-3, EXPECTED_BYTES_PER_S = 1e9;
/* A fetch is given up after so many times what was expected, but not sooner than that. */
static const double LATE_FACTOR = 10, LATE_AT_LEAST_S = 2, LATE_AT_MOST_S = 600;

/* What a sequence left to a peer that hangs. Owner: engine.left_fetches. */
struct left_fetch {
    uint64_t id;     /* of the sequence, which may have ended */
    int32_t *blocks; /* [n] in quarantine until engine_fetched */
    uint32_t n;
    struct list node;
};

static void free_left(struct left_fetch *l)
{
    list_remove(&l->node);
    mem_free(l->blocks);
    mem_free(l);
}

void engine_peers_release(struct engine *e)
{
    LIST_FOREACH (l, &e->left_fetches, struct left_fetch, node) free_left(l);
}

void engine_peers_init(struct engine *e)
{
    tier_rate_init(&e->peer_rate, EXPECTED_FIRST_S, EXPECTED_BYTES_PER_S,
                   kv_layout_block_bytes(&e->layout));
}

/* ---- from a peer ---- */

static uint32_t patience_ms(double bring_s)
{
    const double s = bring_s * LATE_FACTOR;
    return (uint32_t)(1e3 * (s < LATE_AT_LEAST_S  ? LATE_AT_LEAST_S
                             : s > LATE_AT_MOST_S ? LATE_AT_MOST_S
                                                  : s));
}

bool engine_fetch(struct engine *e, struct seq *s, uint32_t n_before, double *load_s,
                  double *compute_s)
{
    const double block_s = engine_block_seconds(e);
    s->fetch.n_good = 0; /* of blocks that a preemption has taken */
    const uint32_t most = seq_n_cacheable(s, e->opt.block_tokens),
                   says = s->fetch.n_peer_tokens / e->opt.block_tokens,
                   end = says < most ? says : most;
    if (!s->fetch.peer || s->started || !e->opt.prefix_cache || end <= n_before) return false;
    const uint32_t n = end - n_before;
    const double bring_s = tier_rate_seconds(&e->peer_rate, n, clock_ns());
    const bool always = e->opt.tiers && e->opt.tiers->always;
    if (bring_s > *load_s) *load_s = bring_s;
    *compute_s += block_s * n;
    if (block_s > 0 && bring_s >= block_s * n && !always) return false;
    s->fetch.runs = true;
    s->fetch.first = n_before;
    s->fetch.n = n;
    s->fetch.begin_ns = clock_ns();
    tier_rate_begin(&e->peer_rate, n);
    engine_emit(e, &(struct engine_event){ .kind = ENGINE_FETCH,
                                           .id = s->id,
                                           .stop_token = -1,
                                           .peer = s->fetch.peer,
                                           .n_peer_ranks = s->fetch.n_peer_ranks,
                                           .patience_ms = patience_ms(bring_s),
                                           .n_blocks = n,
                                           .blocks = s->blocks + n_before,
                                           .keys = s->hashes + n_before });
    return true;
}

/* The blocks follow those that the sequence has, unless a load of those ended short. */
static void take_fetched(struct engine *e, struct seq *s)
{
    const struct seq_fetch *f = &s->fetch;
    if (s->n_computed != f->first * e->opt.block_tokens || f->n_good == 0) return;
    s->n_computed += f->n_good * e->opt.block_tokens;
    s->cache.n_from[KV_TIER_PEER] = f->n_good * e->opt.block_tokens;
    const uint64_t ns = clock_ns() - f->begin_ns;
    if (ns > s->cache.load_ns) s->cache.load_ns = ns;
    engine_set_remaining(e, s, seq_n_pending(s));
    engine_publish(e, s, s->n_computed);
}

/* A peer that soon says that it has fewer blocks is not slow. */
static void count_fetch(struct engine *e, const struct seq_fetch *f, double seconds, uint64_t now)
{
    tier_rate_end(&e->peer_rate, f->n, f->n_good == f->n ? seconds : 0, now);
    if (f->n_good < f->n && seconds > tier_rate_seconds(&e->peer_rate, f->n, now))
        tier_rate_late(&e->peer_rate, now);
}

static void stop_fetch(struct engine *e, struct seq_fetch *f, uint32_t n_good)
{
    const uint64_t now = clock_ns();
    ASSERT(n_good <= f->n);
    f->runs = false;
    f->n_good = n_good;
    count_fetch(e, f, (double)(now - f->begin_ns) * 1e-9, now);
}

/* Nobody writes any more to what a sequence has left. */
static void end_left(struct engine *e, uint64_t id)
{
    LIST_FOREACH (l, &e->left_fetches, struct left_fetch, node) {
        if (l->id != id) continue;
        for (uint32_t i = 0; i < l->n; i++) kv_pool_free_quarantined(e->pool, l->blocks[i]);
        free_left(l);
    }
}

void engine_end_fetch(struct engine *e, uint64_t id, uint32_t n_good)
{
    struct seq *s = map_get(&e->seqs, map_key_u64(&id));
    if (!s || !s->fetch.runs) {
        end_left(e, id);
        return;
    }
    stop_fetch(e, &s->fetch, n_good);
    if (s->state == SEQ_LOADING) return; /* it starts with the next batch */
    ASSERT(s->state == SEQ_QUARANTINED);
    seq_free_quarantined_blocks(s, e->pool);
    engine_forget(e, s);
}

void engine_go_on_without_fetch(struct engine *e, uint64_t id)
{
    struct seq *s = map_get(&e->seqs, map_key_u64(&id));
    if (!s || !s->fetch.runs || s->state != SEQ_LOADING) return;
    const uint32_t n = s->fetch.n;
    int32_t *blocks = MEM_ARRAY(int32_t, n), *mine = s->blocks + s->fetch.first;
    if (kv_pool_alloc(e->pool, n, blocks) != OK) { /* none are free: it waits on */
        mem_free(blocks);
        return;
    }
    struct left_fetch *l = MEM_NEW(struct left_fetch);
    for (uint32_t i = 0; i < n; i++) {
        const int32_t written = mine[i];
        kv_pool_quarantine(e->pool, written);
        mine[i] = blocks[i];
        blocks[i] = written;
    }
    *l = (struct left_fetch){ .id = id, .blocks = blocks, .n = n };
    list_push(&e->left_fetches, &l->node);
    s->fetch.peer = 0; /* it is not asked again */
    stop_fetch(e, &s->fetch, 0);
}

void engine_leave_fetch(struct engine *e, struct seq *s)
{
    engine_stop_load(e, s);
    engine_unlist(e, s);
    engine_set_remaining(e, s, 0);
    /* No peer writes to those before: what tiers brought is published, and others may have it. */
    s->n_shared = s->fetch.first;
    seq_quarantine_blocks(s, e->pool);
    s->state = SEQ_QUARANTINED;
    engine_emit(e,
                &(struct engine_event){ .kind = ENGINE_FETCH_OFF, .id = s->id, .stop_token = -1 });
}

void engine_use_fetched(struct engine *e, struct seq *s)
{
    if (s->fetch.n_good > 0) take_fetched(e, s);
    s->fetch.n_good = 0;
}

/* ---- for a peer ---- */

void engine_begin_lend(struct engine *e, struct seq *s)
{
    struct kv_store_plan plan = { 0 };
    int32_t b;
    while (s->n_blocks < s->cap_blocks && (b = kv_pool_hold(e->pool, s->hashes[s->n_blocks])) >= 0)
        s->blocks[s->n_blocks++] = b;
    s->n_shared = s->n_blocks;
    s->n_computed = s->n_blocks * e->opt.block_tokens;
    const struct hash128 *rest = s->hashes + s->n_blocks;
    const uint32_t n = engine_plan_lent(e, rest, s->cap_blocks - s->n_blocks, &plan);
    if (n == 0 || kv_pool_alloc(e->pool, n, s->blocks + s->n_blocks) != OK) {
        engine_lent(e, s);
        return;
    }
    s->load = kv_store_load(e->store, rest, s->blocks + s->n_blocks, &plan, s);
    s->n_blocks += n;
    s->state = SEQ_LOADING; /* and takes no place of those that will run */
    list_push(&e->loading, &s->node);
}

void engine_lent(struct engine *e, struct seq *s)
{
    const uint32_t n = s->n_computed / e->opt.block_tokens;
    engine_unlist(e, s);
    s->state = SEQ_AWAITING_RELEASE;
    for (uint32_t i = s->n_shared; i < n; i++) kv_pool_publish(e->pool, s->blocks[i], s->hashes[i]);
    engine_emit(e, &(struct engine_event){ .kind = ENGINE_LENT,
                                           .id = s->id,
                                           .stop_token = -1,
                                           .n_blocks = n,
                                           .blocks = s->blocks });
}
