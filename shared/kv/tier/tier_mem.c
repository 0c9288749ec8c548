/* tier_mem.c - the tier mem: an array of slots that is searched from end to end, the oldest used
 * again first; puts and gets are over when they return. What other tiers do is held against it. Not
 * for nodes. Thread: engine. */
#include <stdatomic.h>
#include <string.h>

#include "shared/base/mem.h"
#include "shared/kv/tier/block_copy.h"
#include "shared/kv/tier/kv_tier.h"

enum { DONE_MAX = 1024 };

struct mem_slot {
    bool stored;
    uint32_t n_pins;
    struct hash128 key;
    uint64_t checksum, put_at;
    char *bytes;
};

struct kv_tier_mem {
    struct kv_tier base;
    struct block_copy *copy;
    struct mem_slot *slots;
    uint32_t n_slots;
    struct kv_tier_done done[DONE_MAX]; /* in order */
    uint32_t n_done;
    struct kv_tier_stats stats;
    struct kv_tier_options o; /* wake, forgot */
};

static struct kv_tier_mem *mem_of(struct kv_tier *t) { return (struct kv_tier_mem *)t; }

static struct mem_slot *find(struct kv_tier_mem *m, const struct hash128 *key)
{
    for (uint32_t i = 0; i < m->n_slots; i++)
        if (m->slots[i].stored && hash128_eq(m->slots[i].key, *key)) return &m->slots[i];
    return NULL;
}

static bool mem_has(struct kv_tier *t, const struct hash128 *key)
{
    return find(mem_of(t), key) != NULL;
}

static void report(struct kv_tier_mem *m, struct kv_tier_done d)
{
    m->done[m->n_done++] = d;
    m->o.wake(m->o.arg);
}

/* A slot that stores nothing, else the oldest that is not pinned. */
static struct mem_slot *slot_to_fill(struct kv_tier_mem *m)
{
    struct mem_slot *oldest = NULL;
    for (uint32_t i = 0; i < m->n_slots; i++) {
        struct mem_slot *s = &m->slots[i];
        if (s->n_pins > 0) continue;
        if (!s->stored) return s;
        if (!oldest || s->put_at < oldest->put_at) oldest = s;
    }
    return oldest;
}

static enum status mem_put(struct kv_tier *t, const struct kv_tier_put *p)
{
    struct kv_tier_mem *m = mem_of(t);
    const struct kv_layout *l = block_copy_slot_layout(m->copy);
    if (m->n_done == DONE_MAX) return ERR_BUSY;
    if (find(m, &p->of.key)) return ERR_CONFLICT;
    struct mem_slot *s = slot_to_fill(m);
    if (!s) return ERR_FULL;
    m->stats.n_evicted += s->stored;
    if (s->stored && m->o.forgot) m->o.forgot(m->o.forgot_arg, KV_TIER_HOST, &s->key);
    s->stored = false;
    enum status st = OK;
    if (!p->slot) {
        st = block_copy_save(m->copy, p->block, s->bytes);
        s->checksum = kv_slot_checksum(l, s->bytes);
    } else {
        memcpy(s->bytes, p->slot, kv_slot_used_bytes(l));
        s->checksum = p->checksum;
    }
    if (st == OK) {
        s->key = p->of.key;
        s->stored = true;
        s->put_at = ++m->stats.n_puts;
    }
    report(m, (struct kv_tier_done){ .kind = KV_TIER_PUT, .tag = p->tag, .status = st });
    return OK;
}

static enum status mem_get(struct kv_tier *t, const struct kv_tier_get *g)
{
    struct kv_tier_mem *m = mem_of(t);
    const struct kv_layout *l = block_copy_slot_layout(m->copy);
    struct kv_tier_done d = { .kind = KV_TIER_GET, .tag = g->tag };
    if (m->n_done == DONE_MAX) return ERR_BUSY;
    if (kv_tier_find(t, g->keys, g->n) < g->n) return ERR_NOT_FOUND;
    for (; d.n_good < g->n && d.status == OK; d.n_good += d.status == OK) {
        struct mem_slot *s = find(m, &g->keys[d.n_good]);
        if (kv_slot_checksum(l, s->bytes) == s->checksum) {
            d.status = block_copy_load(m->copy, s->bytes, g->blocks[d.n_good]);
            continue;
        }
        d.status = ERR_CHECKSUM;
        s->stored = false;
        m->stats.n_bad_checksums++;
    }
    if (g->n_layers && d.n_good < g->n) d.n_good = 0;
    if (g->n_layers && d.n_good) atomic_store(g->n_layers, l->n_layers);
    m->stats.n_gets += d.n_good;
    report(m, d);
    return OK;
}

static void mem_cancel(struct kv_tier *t, uint64_t tag)
{
    struct kv_tier_mem *m = mem_of(t);
    for (uint32_t i = 0; i < m->n_done; i++) {
        if (m->done[i].kind != KV_TIER_GET || m->done[i].tag != tag) continue;
        memmove(&m->done[i], &m->done[i + 1], (--m->n_done - i) * sizeof *m->done);
        return;
    }
}

static void mem_drop(struct kv_tier *t, const struct hash128 *key)
{
    struct mem_slot *s = find(mem_of(t), key);
    if (s) s->stored = false;
}

static void mem_touch(struct kv_tier *t, const struct hash128 *key, uint64_t now_ns)
{
    (void)t, (void)key, (void)now_ns; /* the oldest goes first, used or not */
}

static bool mem_poll(struct kv_tier *t, struct kv_tier_done *out)
{
    struct kv_tier_mem *m = mem_of(t);
    if (m->n_done == 0) return false;
    *out = m->done[0];
    memmove(&m->done[0], &m->done[1], --m->n_done * sizeof *m->done);
    return true;
}

static void mem_tick(struct kv_tier *t, uint64_t now_ms) { (void)t, (void)now_ms; }

static void mem_stats(const struct kv_tier *t, struct kv_tier_stats *out)
{
    const struct kv_tier_mem *m = (const struct kv_tier_mem *)t;
    *out = m->stats;
    for (uint32_t i = 0; i < m->n_slots; i++) out->n_stored += m->slots[i].stored;
}

static bool mem_pin(struct kv_tier *t, const struct hash128 *key, struct kv_tier_pin *out)
{
    struct kv_tier_mem *m = mem_of(t);
    struct mem_slot *s = find(m, key);
    if (!s) return false;
    s->n_pins++;
    *out = (struct kv_tier_pin){ s->bytes, s->checksum, (uint32_t)(s - m->slots) };
    return true;
}

static void mem_unpin(struct kv_tier *t, const struct kv_tier_pin *pin)
{
    mem_of(t)->slots[pin->slot].n_pins--;
}

static void mem_free_tier(struct kv_tier *t)
{
    struct kv_tier_mem *m = mem_of(t);
    for (uint32_t i = 0; i < m->n_slots; i++) mem_free(m->slots[i].bytes);
    mem_free(m->slots);
    block_copy_free(m->copy);
    mem_free(m);
}

static const struct kv_tier_ops MEM_OPS = {
    .name = "mem",
    .caps = KV_TIER_PINS | KV_TIER_LAYERS,
    .kind = KV_TIER_HOST,
    .free = mem_free_tier,
    .has = mem_has,
    .put = mem_put,
    .get = mem_get,
    .cancel = mem_cancel,
    .drop = mem_drop,
    .touch = mem_touch,
    .poll = mem_poll,
    .tick = mem_tick,
    .stats = mem_stats,
    .pin = mem_pin,
    .unpin = mem_unpin,
};

enum status kv_tier_mem_create(const struct kv_tier_options *o, uint32_t n_slots,
                               struct kv_tier **out, struct err *err)
{
    struct kv_tier_mem *m = MEM_NEW(struct kv_tier_mem);
    m->base.ops = &MEM_OPS;
    m->o = *o;
    enum status st = block_copy_create(
        &(struct block_copy_options){ o->layout, o->slot_dtype, o->device, o->pool }, &m->copy,
        err);
    if (st != OK) {
        mem_free(m);
        return st;
    }
    m->n_slots = n_slots;
    m->slots = MEM_ARRAY(struct mem_slot, n_slots);
    m->stats.n_slots = n_slots;
    m->stats.slot_bytes = kv_slot_bytes(block_copy_slot_layout(m->copy));
    for (uint32_t i = 0; i < n_slots; i++)
        m->slots[i].bytes = mem_aligned(KV_SLOT_ALIGN, m->stats.slot_bytes);
    tier_rate_init(&m->base.rate, 1e-6, 1e10, m->stats.slot_bytes);
    *out = &m->base;
    return OK;
}
