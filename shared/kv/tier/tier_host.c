/* tier_host.c - the tier host: slots in one allocation of host memory, pinned for a GPU.
 *
 * Two threads copy: one of low priority saves blocks, so that it takes time that steps leave; one
 * of usual priority brings them back, since a sequence waits for it. Pages are touched first by
 * whoever copies into them, so a large tier costs nothing until it is used.
 * Thread: engine; `save` and `bring` run on the workers. */
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

#include "shared/base/arith.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/map.h"
#include "shared/base/mem.h"
#include "shared/kv/tier/block_copy.h"
#include "shared/kv/tier/kv_tier.h"
#include "shared/kv/tier/tier_worker.h"

enum {
    PUTS_MAX = 4, /* blocks of the pool that are held to be copied */
    GETS_MAX = 4096,
    PIECES_AT_ONCE = 16, /* of a layer: a cancel waits for the copy of these */
};
static const double EXPECTED_BYTES_PER_S = 2e9, EXPECTED_FIRST_S = 100e-6;

struct host_put {
    struct tier_job job;
    const void *from; /* NULL: `block` */
    int32_t block;
    void *to;
    uint32_t slot;
    uint64_t tag;
    enum status status; /* of the copy */
};

struct host_source {
    const void *bytes;
    struct hash128 key;
    uint32_t slot;
    int32_t block; /* destination */
};

struct host_get {
    struct tier_job job;
    uint64_t tag, ns;
    enum status status;
    uint32_t n, n_good, bad;    /* bad: the block whose bytes were others */
    _Atomic uint32_t *n_layers; /* NULL: block by block */
    struct host_source from[];
};

struct kv_tier_host {
    struct kv_tier base;
    struct device *device;
    struct dev_mem mem;
    size_t slot_bytes;
    uint64_t *checksums; /* [n_slots]; written by whoever fills the slot, before it is stored */
    uint64_t *sums;      /* [n_slots, n_layers] of the pieces, likewise */
    struct tier_index *index;
    struct block_copy *put_copy, *get_copy; /* of the workers */
    struct tier_worker *putter, *getter;
    void (*wake)(void *arg);
    void *wake_arg;
    void (*forgot)(void *arg, enum kv_tier_kind kind, const struct hash128 *key);
    void *forgot_arg;
    struct map gets; /* tag → struct host_get, those not cancelled */
    struct kv_tier_stats stats;
};

static struct kv_tier_host *host_of(struct kv_tier *t) { return (struct kv_tier_host *)t; }

static void *slot_at(const struct kv_tier_host *h, uint32_t slot)
{
    return (char *)h->mem.ptr + slot * h->slot_bytes;
}

static const struct kv_layout *slot_layout(const struct kv_tier_host *h)
{
    return block_copy_slot_layout(h->get_copy);
}

static uint64_t *sums_of(const struct kv_tier_host *h, uint32_t slot)
{
    return h->sums + (size_t)slot * slot_layout(h)->n_layers;
}

static bool host_has(struct kv_tier *t, const struct hash128 *key)
{
    return tier_index_find(host_of(t)->index, *key) >= 0;
}

/* ---- put ---- */

static void save(struct tier_job *j, struct tier_worker *w, void *arg)
{
    struct host_put *p = (struct host_put *)j;
    struct kv_tier_host *h = arg;
    (void)w;
    if (p->from) memcpy(p->to, p->from, kv_slot_used_bytes(slot_layout(h)));
    else p->status = block_copy_save(h->put_copy, p->block, p->to);
    const uint64_t sum = kv_slot_checksums(slot_layout(h), p->to, sums_of(h, p->slot));
    if (!p->from) h->checksums[p->slot] = sum;
}

static enum status host_put(struct kv_tier *t, const struct kv_tier_put *p)
{
    struct kv_tier_host *h = host_of(t);
    if (!tier_worker_has_room(h->putter)) return ERR_BUSY;
    if (tier_index_has(h->index, p->of.key)) return ERR_CONFLICT;
    const int32_t slot = tier_index_take(h->index, &p->of, true, clock_ns());
    if (slot < 0) return ERR_FULL;
    struct host_put *j = MEM_NEW(struct host_put);
    *j = (struct host_put){ .job.run = save,
                            .from = p->slot,
                            .block = p->block,
                            .to = slot_at(h, (uint32_t)slot),
                            .slot = (uint32_t)slot,
                            .tag = p->tag };
    h->checksums[slot] = p->checksum;
    const enum status st = tier_worker_give(h->putter, &j->job);
    ASSERT(st == OK);
    return OK;
}

static bool take_put(struct kv_tier_host *h, struct kv_tier_done *out)
{
    struct host_put *j = (struct host_put *)tier_worker_take(h->putter);
    if (!j) return false;
    *out = (struct kv_tier_done){ .kind = KV_TIER_PUT, .tag = j->tag, .status = j->status };
    if (j->status == OK) {
        h->stats.n_puts += tier_index_commit(h->index, j->slot);
    } else {
        tier_index_abandon(h->index, j->slot);
        h->stats.n_errors++;
    }
    mem_free(j);
    return true;
}

/* ---- get ---- */

static enum status bring_one(struct kv_tier_host *h, struct host_get *g, struct tier_worker *w,
                             const struct host_source *s)
{
    if (tier_worker_is_stopping(w)) return ERR_CANCELED;
    if (kv_slot_checksum(slot_layout(h), s->bytes) != h->checksums[s->slot]) return ERR_CHECKSUM;
    if (!tier_worker_enter(w, &g->job)) return ERR_CANCELED;
    const enum status st = block_copy_load(h->get_copy, s->bytes, s->block);
    tier_worker_leave(w, &g->job);
    return st;
}

static void bring_blocks(struct kv_tier_host *h, struct host_get *g, struct tier_worker *w)
{
    while (g->n_good < g->n && g->status == OK) {
        g->status = bring_one(h, g, w, &g->from[g->n_good]);
        g->n_good += g->status == OK;
    }
    g->bad = g->n_good;
}

/* Are the pieces of blocks [begin, begin + n) what was put? */
static enum status check_pieces(const struct kv_tier_host *h, struct host_get *g, uint32_t layer,
                                uint32_t begin, uint32_t n)
{
    const size_t bytes = kv_layout_piece_bytes(slot_layout(h));
    const void *at[PIECES_AT_ONCE];
    uint64_t sums[PIECES_AT_ONCE];
    for (uint32_t i = 0; i < n; i++) at[i] = (const char *)g->from[begin + i].bytes + layer * bytes;
    hash_64_each(at, n, bytes, sums);
    for (uint32_t i = 0; i < n; i++) {
        if (sums[i] == sums_of(h, g->from[begin + i].slot)[layer]) continue;
        g->bad = begin + i;
        return ERR_CHECKSUM;
    }
    return OK;
}

static enum status bring_pieces(struct kv_tier_host *h, struct host_get *g, struct tier_worker *w,
                                uint32_t layer, uint32_t begin, uint32_t n)
{
    struct block_copy_piece pieces[PIECES_AT_ONCE];
    if (tier_worker_is_stopping(w)) return ERR_CANCELED;
    TRY(check_pieces(h, g, layer, begin, n));
    for (uint32_t i = 0; i < n; i++)
        pieces[i] = (struct block_copy_piece){ g->from[begin + i].bytes, g->from[begin + i].block };
    if (!tier_worker_enter(w, &g->job)) return ERR_CANCELED;
    const enum status st = block_copy_load_layer(h->get_copy, layer, pieces, n);
    if (st == OK && begin + n == g->n)
        atomic_store_explicit(g->n_layers, layer + 1, memory_order_release);
    tier_worker_leave(w, &g->job);
    return st;
}

/* The pieces that a layer reads are there before those of the next one. */
static void bring_layers(struct kv_tier_host *h, struct host_get *g, struct tier_worker *w)
{
    const uint32_t n_layers = slot_layout(h)->n_layers;
    for (uint32_t layer = 0; layer < n_layers && g->status == OK; layer++) {
        for (uint32_t i = 0; i < g->n && g->status == OK; i += PIECES_AT_ONCE)
            g->status = bring_pieces(h, g, w, layer, i,
                                     (uint32_t)min_size(g->n - i, PIECES_AT_ONCE));
        if (g->status == OK) h->wake(h->wake_arg);
    }
    if (g->status == OK) g->n_good = g->n;
}

static void bring(struct tier_job *j, struct tier_worker *w, void *arg)
{
    struct host_get *g = (struct host_get *)j;
    const uint64_t begin_ns = clock_ns();
    if (g->n_layers) bring_layers(arg, g, w);
    else bring_blocks(arg, g, w);
    g->ns = clock_ns() - begin_ns;
}

/* The slots stay until the worker has left them. */
static void add_sources(struct kv_tier_host *h, struct host_get *j, const struct kv_tier_get *g)
{
    const uint64_t now = clock_ns();
    for (uint32_t i = 0; i < g->n; i++) {
        const uint32_t slot = (uint32_t)tier_index_find(h->index, g->keys[i]);
        tier_index_touch(h->index, slot, now);
        tier_index_pin(h->index, slot);
        j->from[i] = (struct host_source){
            .bytes = slot_at(h, slot), .key = g->keys[i], .slot = slot, .block = g->blocks[i]
        };
    }
}

static enum status host_get(struct kv_tier *t, const struct kv_tier_get *g)
{
    struct kv_tier_host *h = host_of(t);
    if (!tier_worker_has_room(h->getter)) return ERR_BUSY;
    if (kv_tier_find(t, g->keys, g->n) < g->n) return ERR_NOT_FOUND;
    struct host_get *j = mem_calloc(1, sizeof *j + g->n * sizeof *j->from);
    j->job.run = bring;
    j->tag = g->tag;
    j->n = g->n;
    j->n_layers = g->n_layers;
    ASSERT(!j->n_layers || block_copy_has_layers(h->get_copy));
    add_sources(h, j, g);
    void *was = map_put(&h->gets, map_key_u64(&j->tag), j);
    ASSERT(was == NULL);
    tier_rate_begin(&t->rate, j->n);
    const enum status st = tier_worker_give(h->getter, &j->job);
    ASSERT(st == OK);
    return OK;
}

static void host_cancel(struct kv_tier *t, uint64_t tag)
{
    struct kv_tier_host *h = host_of(t);
    struct host_get *j = map_del(&h->gets, map_key_u64(&tag));
    if (j) tier_worker_cancel(h->getter, &j->job);
}

/* The block whose bytes went bad is forgotten. */
static void end_get(struct kv_tier_host *h, const struct host_get *j)
{
    for (uint32_t i = 0; i < j->n; i++) tier_index_unpin(h->index, j->from[i].slot);
    if (j->status == ERR_CHECKSUM) {
        tier_index_drop(h->index, j->from[j->bad].key);
        h->stats.n_bad_checksums++;
    } else if (j->status != OK && j->status != ERR_CANCELED) {
        h->stats.n_errors++;
    }
    h->stats.n_gets += j->n_good;
    tier_rate_end(&h->base.rate, j->n, j->status == OK ? (double)j->ns * 1e-9 : 0, clock_ns());
}

/* False: none, or one that was cancelled. */
static bool take_get(struct kv_tier_host *h, struct kv_tier_done *out)
{
    struct host_get *j;
    bool is_wanted = false;
    while (!is_wanted && (j = (struct host_get *)tier_worker_take(h->getter))) {
        is_wanted = map_get(&h->gets, map_key_u64(&j->tag)) == j;
        if (is_wanted) map_del(&h->gets, map_key_u64(&j->tag));
        *out = (struct kv_tier_done){
            .kind = KV_TIER_GET, .tag = j->tag, .status = j->status, .n_good = j->n_good
        };
        end_get(h, j);
        mem_free(j);
    }
    return is_wanted;
}

static bool host_poll(struct kv_tier *t, struct kv_tier_done *out)
{
    struct kv_tier_host *h = host_of(t);
    return take_get(h, out) || take_put(h, out);
}

/* ---- the rest ---- */

static void host_drop(struct kv_tier *t, const struct hash128 *key)
{
    tier_index_drop(host_of(t)->index, *key);
}

static void host_touch(struct kv_tier *t, const struct hash128 *key, uint64_t now_ns)
{
    struct kv_tier_host *h = host_of(t);
    const int32_t slot = tier_index_find(h->index, *key);
    if (slot >= 0) tier_index_touch(h->index, (uint32_t)slot, now_ns);
}

static bool host_pin(struct kv_tier *t, const struct hash128 *key, struct kv_tier_pin *out)
{
    struct kv_tier_host *h = host_of(t);
    const int32_t slot = tier_index_find(h->index, *key);
    if (slot < 0) return false;
    tier_index_pin(h->index, (uint32_t)slot);
    *out = (struct kv_tier_pin){ slot_at(h, (uint32_t)slot), h->checksums[slot], (uint32_t)slot };
    return true;
}

static void host_unpin(struct kv_tier *t, const struct kv_tier_pin *pin)
{
    tier_index_unpin(host_of(t)->index, pin->slot);
}

static void host_tick(struct kv_tier *t, uint64_t now_ms) { (void)t, (void)now_ms; }

static void host_stats(const struct kv_tier *t, struct kv_tier_stats *out)
{
    const struct kv_tier_host *h = (const struct kv_tier_host *)t;
    *out = h->stats;
    out->n_slots = tier_index_n_slots(h->index);
    out->n_stored = tier_index_n_stored(h->index);
    out->n_evicted = tier_index_n_evicted(h->index);
    out->slot_bytes = h->slot_bytes;
}

/* ---- life ---- */

static void host_free(struct kv_tier *t)
{
    struct kv_tier_host *h = host_of(t);
    struct kv_tier_done d;
    if (h->putter) tier_worker_stop(h->putter);
    if (h->getter) tier_worker_stop(h->getter);
    while (h->getter && take_get(h, &d)) {}
    while (h->putter && take_put(h, &d)) {}
    tier_worker_free(h->putter);
    tier_worker_free(h->getter);
    block_copy_free(h->put_copy);
    block_copy_free(h->get_copy);
    tier_index_free(h->index);
    map_release(&h->gets);
    mem_free(h->checksums);
    mem_free(h->sums);
    if (h->mem.ptr) device_mem_free(h->device, &h->mem);
    mem_free(h);
}

static const struct kv_tier_ops HOST_OPS = {
    .name = "host",
    .caps = KV_TIER_PINS | KV_TIER_LAYERS,
    .kind = KV_TIER_HOST,
    .free = host_free,
    .has = host_has,
    .put = host_put,
    .get = host_get,
    .cancel = host_cancel,
    .drop = host_drop,
    .touch = host_touch,
    .poll = host_poll,
    .tick = host_tick,
    .stats = host_stats,
    .pin = host_pin,
    .unpin = host_unpin,
};

static enum status start_workers(struct kv_tier_host *h, const struct kv_tier_options *o,
                                 struct err *err)
{
    const struct block_copy_options c = { o->layout, o->slot_dtype, o->device, o->pool };
    struct tier_worker_options w = { .name = "kv-to-host",
                                     .is_low = true,
                                     .max_jobs = PUTS_MAX,
                                     .wake = o->wake,
                                     .wake_arg = o->arg,
                                     .arg = h };
    TRY(block_copy_create(&c, &h->put_copy, err));
    TRY(block_copy_create(&c, &h->get_copy, err));
    TRY(tier_worker_create(&w, &h->putter, err));
    w.name = "kv-from-host";
    w.is_low = false;
    w.max_jobs = GETS_MAX;
    return tier_worker_create(&w, &h->getter, err);
}

static enum status get_memory(struct kv_tier_host *h, const struct kv_tier_options *o,
                              uint64_t bytes, struct err *err)
{
    struct kv_layout slot;
    TRY(kv_slot_layout(&o->layout, o->slot_dtype, &slot, err));
    h->slot_bytes = kv_slot_bytes(&slot);
    uint64_t n = bytes / h->slot_bytes;
    if (n > INT32_MAX) n = INT32_MAX;
    if (n == 0)
        return err_set(err, ERR_CONFIG,
                       "%" PRIu64 " bytes hold no KV block, which takes %zu: give more", bytes,
                       h->slot_bytes);
    TRY(device_mem_alloc(h->device, n * h->slot_bytes, DEVICE_MEM_HOST, &h->mem, err));
    h->checksums = MEM_ARRAY(uint64_t, n);
    h->sums = MEM_ARRAY(uint64_t, n * slot.n_layers);
    tier_index_add_slots(h->index, (uint32_t)n);
    return OK;
}

static void on_evicted(void *arg, const struct hash128 *key)
{
    const struct kv_tier_host *h = arg;
    if (h->forgot) h->forgot(h->forgot_arg, KV_TIER_HOST, key);
}

enum status kv_tier_host_create(const struct kv_tier_options *o, uint64_t bytes,
                                struct kv_tier **out, struct err *err)
{
    struct kv_tier_host *h = MEM_NEW(struct kv_tier_host);
    h->base.ops = &HOST_OPS;
    h->device = o->device;
    h->wake = o->wake;
    h->wake_arg = o->arg;
    h->forgot = o->forgot;
    h->forgot_arg = o->forgot_arg;
    h->index = tier_index_create();
    tier_index_on_evicted(h->index, on_evicted, h);
    enum status st = get_memory(h, o, bytes, err);
    if (st == OK) st = start_workers(h, o, err);
    if (st != OK) {
        host_free(&h->base);
        return st;
    }
    tier_rate_init(&h->base.rate, EXPECTED_FIRST_S, EXPECTED_BYTES_PER_S, h->slot_bytes);
    *out = &h->base;
    return OK;
}
