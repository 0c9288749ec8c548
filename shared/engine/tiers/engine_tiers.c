/* engine_tiers.c - the memories behind the pool, as sequences see them.
 *
 * What is published goes down in the background (kv_store.h). A sequence that could start takes
 * what the tiers have of its prompt, if that is sooner than computing it. Such a sequence is
 * LOADING: it holds all its blocks, as when it runs, and others run meanwhile. When the load is
 * over, however it ended, it has computed as many tokens as came and begins with the rest. Of a
 * sequence that is preempted host memory keeps what may get lost, so that it goes on where it was.
 * Thread: engine. */
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/engine/engine_state.h"

enum { SETTLE_MS = 20, KEEP_MS = 20 };

static void wake(void *arg) { engine_wake(arg); }

enum status engine_tiers_create(struct engine *e, struct err *err)
{
    const struct kv_store_of of = {
        .layout = e->layout,
        .device = e->device,
        .memory = e->kv.ptr,
        .pool = e->pool,
        .metrics = e->opt.metrics,
        .wake = wake,
        .arg = e,
    };
    engine_peers_init(e);
    e->tier_keys = MEM_ARRAY(struct hash128, e->layout.n_blocks);
    if (!e->opt.tiers || e->opt.follows) return OK; /* followers: shared/kv/tier/ranks */
    ASSERT(!engine_is_node(e) || e->opt.tiers->ranks);
    e->tiers = *e->opt.tiers;
    e->opt.tiers = &e->tiers;
    return kv_store_create(&e->tiers, &of, &e->store, err);
}

int engine_tiers_wait_ms(const struct engine *e)
{
    return e->store ? kv_store_wait_ms(e->store) : -1;
}

double engine_block_seconds(const struct engine *e)
{
    const uint32_t per_s = engine_speed_prefill_per_s(&e->speed);
    return per_s ? (double)e->opt.block_tokens / per_s : 0;
}

/* ---- down ---- */

void engine_publish(struct engine *e, struct seq *s, uint32_t n_complete)
{
    uint32_t i = s->n_published;
    seq_publish_blocks(s, e->pool, e->opt.block_tokens, n_complete);
    if (!e->store || !e->opt.prefix_cache) return;
    for (; i < s->n_published; i++) {
        const struct tier_block b = { .key = s->hashes[i],
                                      .parent = i ? s->hashes[i - 1] : s->seed,
                                      .depth = i };
        kv_store_offer(e->store, &b);
    }
}

bool engine_settle_copies(struct engine *e)
{
    if (!e->store || kv_store_n_held(e->store) == 0) return false;
    kv_store_settle(e->store, SETTLE_MS);
    return kv_pool_available(e->pool) > 0;
}

/* ---- preempted sequences ---- */

/* The block that is not full has a key of the sequence's own, full ones their usual keys: without a
 * prefix cache nobody else looks for those. */
static struct tier_block kept_block(const struct engine *e, const struct seq *s, uint32_t i)
{
    const bool is_tail = i == s->swap.n_tokens / e->opt.block_tokens;
    return (struct tier_block){ .key = is_tail ? s->swap.tail : s->hashes[i],
                                .parent = i ? s->hashes[i - 1] : s->seed,
                                .depth = i };
}

static struct hash128 own_key(void)
{
    struct hash128 key;
    random_bytes(&key, sizeof key);
    return key;
}

static uint32_t n_missing(const struct engine *e, const struct seq *s, uint32_t n)
{
    uint32_t missing = 0;
    for (uint32_t i = 0; i < n; i++)
        missing += !kv_store_is_kept(e->store, kept_block(e, s, i).key);
    return missing;
}

static bool is_sooner(struct engine *e, uint32_t n_keep, uint32_t n)
{
    const double compute_s = engine_block_seconds(e) * n;
    if (e->opt.tiers->always || compute_s == 0) return true;
    return kv_store_swap_seconds(e->store, n_keep, n) < compute_s;
}

void engine_swap_out(struct engine *e, struct seq *s)
{
    const uint32_t n = seq_blocks_for(s->n_computed, e->opt.block_tokens);
    engine_drop_swap(e, s);
    if (!e->store || n == 0 || s->lp_next < s->n_prompt) return;
    seq_hash_blocks(s, e->opt.block_tokens, s->n_computed / e->opt.block_tokens);
    s->swap = (struct seq_swap){ .n_tokens = s->n_computed, .tail = own_key() };
    if (!is_sooner(e, n_missing(e, s, n), n)) {
        s->swap.n_tokens = 0;
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        const struct tier_block b = kept_block(e, s, i);
        if (kv_store_is_kept(e->store, b.key)) continue;
        if (kv_store_keep(e->store, &b, s->blocks[i], KEEP_MS) != OK)
            return; /* what is kept helps */
    }
}

void engine_drop_swap(struct engine *e, struct seq *s)
{
    const uint32_t n_full = s->swap.n_tokens / e->opt.block_tokens;
    if (s->swap.n_tokens == 0) return;
    kv_store_drop(e->store, s->swap.tail);
    for (uint32_t i = 0; !e->opt.prefix_cache && i < n_full; i++)
        kv_store_drop(e->store, s->hashes[i]);
    s->swap = (struct seq_swap){ 0 };
}

/* ---- up ---- */

bool engine_tiers_are_bringing(struct engine *e, struct seq *s)
{
    if (!e->store || !e->opt.prefix_cache || !kv_store_loads(e->store)) return false;
    const uint32_t n = seq_n_cacheable(s, e->opt.block_tokens),
                   n_hit = kv_pool_peek(e->pool, s->hashes, n, NULL);
    return n_hit < n && kv_store_is_loading(e->store, s->hashes[n_hit]);
}

static uint32_t microseconds(double s) { return s < 4000 ? (uint32_t)(s * 1e6) : UINT32_MAX; }

/* The blocks that tiers may have after the first n_hit, the tail of a preempted sequence as the
 * last. Returns how many; keys [blocks of the sequence]. */
static uint32_t list_keys(const struct engine *e, struct seq *s, uint32_t n_hit,
                          struct hash128 *keys)
{
    uint32_t n = e->opt.prefix_cache ? seq_n_cacheable(s, e->opt.block_tokens) : 0;
    const uint32_t n_kept = s->swap.n_tokens / e->opt.block_tokens;
    const bool has_tail = s->swap.n_tokens % e->opt.block_tokens != 0;
    if (s->swap.n_tokens > 0 && (n < n_kept || has_tail)) n = n_kept;
    for (uint32_t i = n_hit; i < n; i++) keys[i - n_hit] = s->hashes[i];
    if (!has_tail || n != n_kept || n_hit > n) return n > n_hit ? n - n_hit : 0;
    keys[n - n_hit] = s->swap.tail;
    return n - n_hit + 1;
}

/* The part of it that memories of this node bring. Returns how many lead blocks after those of the
 * pool; the two times are those of the plan. */
static uint32_t load_local(struct engine *e, struct seq *s, uint32_t n_hit, double *load_s,
                           double *compute_s)
{
    struct kv_store_plan plan = { .by_layers = engine_may_stream(e, s) };
    struct hash128 *keys = e->tier_keys;
    const uint32_t n = list_keys(e, s, n_hit, keys);
    if (!e->store) return 0;
    kv_store_touch(e->store, s->hashes, n_hit);
    kv_store_plan(e->store, keys, n, engine_block_seconds(e), &plan);
    *load_s = plan.load_s;
    *compute_s = plan.compute_s;
    s->swap.is_loading = plan.n > 0 && plan.n == n && hash128_eq(keys[n - 1], s->swap.tail);
    if (plan.n > 0) s->load = kv_store_load(e->store, keys, s->blocks + n_hit, &plan, s);
    else engine_drop_swap(e, s);
    return plan.n;
}

bool engine_load(struct engine *e, struct seq *s)
{
    const uint32_t n_hit = s->n_computed / e->opt.block_tokens;
    double load_s = 0, compute_s = 0;
    const uint32_t n_local = load_local(e, s, n_hit, &load_s, &compute_s);
    const bool fetches = engine_fetch(e, s, n_hit + n_local, &load_s, &compute_s);
    if (!s->started) {
        s->cache = (struct engine_cache_use){ .load_us = microseconds(load_s),
                                              .compute_us = microseconds(compute_s) };
    }
    return n_local > 0 || fetches;
}

uint32_t engine_plan_lent(struct engine *e, const struct hash128 *keys, uint32_t n,
                          struct kv_store_plan *out)
{
    if (!e->store || !e->opt.prefix_cache) return 0;
    kv_store_plan(e->store, keys, n, engine_block_seconds(e), out);
    return out->n;
}

void engine_stop_load(struct engine *e, struct seq *s)
{
    if (!s->load) return;
    kv_store_cancel(e->store, s->load);
    s->load = NULL;
    s->stream = (struct seq_stream){ 0 };
}

/* Tokens of the blocks that came. */
static uint32_t n_tokens_of(const struct engine *e, const struct seq *s, const struct kv_load *l)
{
    if (s->swap.is_loading && l->n_good == l->n) return s->swap.n_tokens - s->n_computed;
    return l->n_good * e->opt.block_tokens;
}

void engine_note_load(const struct engine *e, struct seq *s, const struct kv_load *l)
{
    for (int k = 0; k < KV_TIER_KINDS; k++)
        s->cache.n_from[k] += l->n_from[k] * e->opt.block_tokens;
    const uint64_t ns = s->stream.runs ? s->stream.before_ns + s->stream.step_ns : l->ns;
    if (ns > s->cache.load_ns) s->cache.load_ns = ns;
}

static void end_load(struct engine *e, struct seq *s)
{
    const struct kv_load *l = s->load;
    if (!s->started || s->stream.is_first) engine_note_load(e, s, l);
    log_debug("kv loaded", "request=%016llx blocks=%u of=%u after_ms=%.1f",
              (unsigned long long)s->request, l->n_good, l->n, (double)l->ns * 1e-6);
    if (s->stream.runs) {
        engine_end_stream_load(e, s);
        return;
    }
    s->load = NULL;
    s->n_computed += n_tokens_of(e, s, l);
    if (s->lends) return;
    if (s->swap.n_tokens > 0 && s->n_computed >= s->swap.n_tokens) counter_add(e->metrics.swaps, 1);
    engine_drop_swap(e, s);
    engine_set_remaining(e, s, seq_n_pending(s));
    engine_publish(e, s, s->n_computed);
}

void engine_tiers_run(struct engine *e)
{
    struct kv_load *l;
    if (!e->store || (engine_is_node(e) && !e->node.ep)) return; /* are the other ranks there? */
    kv_store_run(e->store);
    while ((l = kv_store_take_loaded(e->store))) {
        end_load(e, l->owner);
        kv_load_free(l);
    }
}
