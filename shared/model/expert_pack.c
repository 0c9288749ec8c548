/* expert_pack.c - packs experts for a load or a take: plans them, maps those that the expert cache
 * has, packs the rest and adds them to the cache.
 *
 * Thread: the loading one, or model_experts_take's. */
#include "shared/base/assert.h"
#include "shared/base/mem.h"
#include "shared/model/expert_store.h"
#include "shared/model/ffn_moe.h"

enum { MAP_AT_ONCE = 64, SOURCES = 3 /* of an expert: gate, up, down */ };

static uint32_t entry_of(const struct expert_pack *p, const struct expert *x)
{
    return x->i_sparse * p->m->expert_store->n_experts + x->i_expert;
}

static size_t bytes_of(const struct expert *x)
{
    return x->plan.gate_up.bytes + x->plan.down.bytes;
}

static bool go_on(void *arg)
{
    const struct expert_pack *p = arg;
    return !p->progress ||
           p->progress(p->progress_arg, (double)p->bytes_done / (double)p->bytes_total);
}

/* ---- mapping ---- */

struct map_job {
    struct expert_pack *p;
    struct expert **experts;
};

static void map_one(void *arg, int i, int thread)
{
    const struct map_job *j = arg;
    struct expert *x = j->experts[i];
    (void)thread;
    (void)expert_cache_map(j->p->m->expert_store->cache, entry_of(j->p, x), &x->plan, &x->w);
}

/* Maps what the cache has, on all threads, since every byte is hashed. */
static enum status map_cached(struct expert_pack *p, struct err *err)
{
    for (size_t i = 0; i < p->n; i++) p->experts[i]->packed_by = p->kernels;
    for (size_t i = 0; p->m->expert_store->cache && i < p->n; i += MAP_AT_ONCE) {
        struct map_job j = { p, p->experts + i };
        const size_t n = p->n - i < MAP_AT_ONCE ? p->n - i : MAP_AT_ONCE;
        compute_pool_run(p->kernels->pool, (int)n, map_one, &j);
        if (!go_on(p)) return bind_stopped(err);
    }
    for (size_t i = 0; i < p->n; i++) {
        struct expert *x = p->experts[i];
        x->is_mapped = x->w.down.data != NULL;
        if (!x->is_mapped) p->bytes += bytes_of(x);
    }
    return OK;
}

/* ---- planning ---- */

enum status expert_pack_plan(struct expert_pack *p, struct err *err)
{
    struct binder b = { .m = p->m, .kernels = p->kernels, .err = err };
    enum status st = OK;
    for (size_t i = 0; i < p->n && st == OK; i++) st = moe_bind_expert(&b, p->experts[i]);
    p->sources = b.sources;
    p->source_bytes = b.source_bytes;
    ASSERT(st != OK || b.n_sources == SOURCES * p->n);
    return st == OK ? map_cached(p, err) : st;
}

/* ---- packing ---- */

/* Packs an expert, or maps it if another process has packed it meanwhile. */
static enum status pack_one(struct expert_pack *p, struct binder *b, struct expert *x)
{
    struct expert_cache *cache = p->m->expert_store->cache;
    if (cache && expert_cache_claim(cache, entry_of(p, x), &x->plan, &x->w, go_on, p)) {
        b->n_sources += SOURCES;
        x->is_mapped = true;
        return OK;
    }
    TRY(moe_bind_expert(b, x));
    x->is_mapped = cache && expert_cache_put(cache, &x->w);
    return OK;
}

static enum status pack_all(struct expert_pack *p, struct binder *b)
{
    for (size_t i = 0; i < p->n; i++) {
        struct expert *x = p->experts[i];
        if (x->is_mapped) b->n_sources += SOURCES; /* which were not read */
        else TRY(pack_one(p, b, x));
        p->bytes_mapped += x->is_mapped ? bytes_of(x) : 0;
        p->bytes_done += bytes_of(x);
        if (!go_on(p)) return bind_stopped(b->err);
    }
    return OK;
}

enum status expert_pack_run(struct expert_pack *p, struct err *err)
{
    struct expert_cache *cache = p->m->expert_store->cache;
    struct binder b = { .m = p->m,
                        .kernels = p->kernels,
                        .err = err,
                        .packing = true,
                        .converting = true,
                        .weight_arena = p->arena };
    for (size_t i = 0; i < p->n; i++)
        for (size_t s = 0; p->experts[i]->is_mapped && s < SOURCES; s++)
            p->sources[SOURCES * i + s] = (struct read_ahead_range){ 0 };
    if (p->bytes > 0) b.ahead = read_ahead_start(p->sources, SOURCES * p->n);
    enum status st = pack_all(p, &b);
    if (cache) expert_cache_unclaim(cache);
    st = bind_end(&b, st, &p->times);
    p->source_bytes = b.source_bytes;
    return st;
}

void expert_pack_release(struct expert_pack *p)
{
    mem_free(p->sources);
    p->sources = NULL;
}
