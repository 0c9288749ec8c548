/* kv_store_down.c - copies of published blocks to the tiers, in the background.
 *
 * The first tier's queue gets what is offered, the next one's what the tier before it has stored.
 * A queue has keys alone: when a block's turn comes it is held, or pinned, for as long as it is
 * copied, if it is still there. Thread: engine. */
#include <math.h>
#include <time.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/kv/tier/kv_store_internal.h"

enum { SETTLE_POLL_NS = 50000 };

/* ---- queues ---- */

static void queue_push(struct store_tier *t, const struct tier_block *b)
{
    struct store_queue *q = &t->queue;
    if (q->n == q->cap) { /* the oldest: it is the next to be evicted */
        q->first = (q->first + 1) % q->cap;
        q->n--;
        t->n_lost++;
    }
    q->blocks[(q->first + q->n++) % q->cap] = *b;
}

static const struct tier_block *queue_front(const struct store_queue *q)
{
    return q->n ? &q->blocks[q->first] : NULL;
}

static void queue_pop(struct store_queue *q)
{
    q->first = (q->first + 1) % q->cap;
    q->n--;
}

void store_down_init(struct kv_store *s)
{
    uint32_t cap = s->of.layout.n_blocks;
    for (uint32_t i = 0; i < s->n_tiers; i++) {
        struct kv_tier_stats st;
        s->tiers[i].queue = (struct store_queue){ .blocks = MEM_ARRAY(struct tier_block, cap),
                                                  .cap = cap };
        s->tiers[i].tier->ops->stats(s->tiers[i].tier, &st);
        if (st.n_slots > cap) cap = st.n_slots; /* as many as the tier may have for the next one */
    }
}

/* The tiers are gone, and with them whoever read the blocks. */
void store_down_release(struct kv_store *s)
{
    for (uint32_t i = 0; i < s->n_tiers; i++) {
        struct store_tier *t = &s->tiers[i];
        for (uint32_t k = 0; k < STORE_PUTS_MAX; k++)
            if (t->puts[k].runs && t->puts[k].block >= 0)
                kv_pool_unref(s->of.pool, t->puts[k].block);
        mem_free(t->queue.blocks);
    }
}

void kv_store_offer(struct kv_store *s, const struct tier_block *b)
{
    if (s->n_tiers > 0) queue_push(&s->tiers[0], b);
}

/* ---- copies ---- */

/* Holds the block where it lies, in the tier before or in the pool; false: it is there no more. */
static bool hold(struct kv_store *s, uint32_t tier, struct store_put *p)
{
    struct kv_tier *before = tier ? s->tiers[tier - 1].tier : NULL;
    p->block = -1;
    if (before && (before->ops->caps & KV_TIER_PINS) &&
        before->ops->pin(before, &p->of.key, &p->pin))
        return true;
    p->block = kv_pool_hold(s->of.pool, p->of.key);
    return p->block >= 0;
}

static void let_go(struct kv_store *s, uint32_t tier, struct store_put *p)
{
    struct kv_tier *before = tier ? s->tiers[tier - 1].tier : NULL;
    if (p->block >= 0) kv_pool_unref(s->of.pool, p->block);
    else before->ops->unpin(before, &p->pin);
    p->runs = false;
}

static enum status begin_put(struct kv_store *s, uint32_t tier, struct store_put *p, uint64_t tag)
{
    struct kv_tier *t = s->tiers[tier].tier;
    const struct kv_tier_put put = {
        .of = p->of,
        .block = p->block,
        .slot = p->block < 0 ? p->pin.bytes : NULL,
        .checksum = p->block < 0 ? p->pin.checksum : 0,
        .tag = tag,
    };
    return t->ops->put(t, &put);
}

/* Begins the copy of the first block of the queue. False: later. */
static bool begin_next(struct kv_store *s, uint32_t tier)
{
    struct store_tier *t = &s->tiers[tier];
    const struct tier_block *b = queue_front(&t->queue);
    uint32_t k = 0;
    while (k < STORE_PUTS_MAX && t->puts[k].runs) k++;
    if (!b || k == STORE_PUTS_MAX) return false;
    struct store_put *p = &t->puts[k];
    *p = (struct store_put){ .of = *b };
    if (t->tier->ops->has(t->tier, &b->key)) {
        queue_pop(&t->queue);
        return true;
    }
    if (!hold(s, tier, p)) {
        queue_pop(&t->queue);
        t->n_lost++;
        return true;
    }
    p->runs = true;
    const enum status st = begin_put(s, tier, p, k);
    if (st == OK) t->n_puts++;
    else let_go(s, tier, p);
    if (st == ERR_BUSY) return false;
    queue_pop(&t->queue);
    if (st != OK && st != ERR_CONFLICT) t->n_refused++;
    return true;
}

void store_begin_puts(struct kv_store *s)
{
    for (uint32_t i = 0; i < s->n_tiers; i++)
        while (begin_next(s, i)) {}
}

void store_end_put(struct kv_store *s, uint32_t tier, const struct kv_tier_done *d)
{
    struct store_tier *t = &s->tiers[tier];
    ASSERT(d->tag < STORE_PUTS_MAX && t->puts[d->tag].runs);
    struct store_put *p = &t->puts[d->tag];
    t->n_puts--;
    let_go(s, tier, p);
    if (d->status == OK && !p->is_kept && tier + 1 < s->n_tiers)
        queue_push(&s->tiers[tier + 1], &p->of);
    if (d->status != OK) t->n_refused++;
}

/* ---- preempted sequences ---- */

static struct store_tier *host_tier(const struct kv_store *s)
{
    const bool has = s->n_tiers > 0 && s->tiers[0].tier->ops->kind == KV_TIER_HOST;
    return has ? (struct store_tier *)&s->tiers[0] : NULL;
}

static struct store_put *free_put(struct store_tier *t)
{
    for (uint32_t k = 0; k < STORE_PUTS_MAX; k++)
        if (!t->puts[k].runs) return &t->puts[k];
    return NULL;
}

static enum status keep_now(struct kv_store *s, struct store_tier *t, const struct tier_block *b,
                            int32_t block)
{
    struct store_put *p = free_put(t);
    if (!p) return ERR_BUSY;
    *p = (struct store_put){ .runs = true, .is_kept = true, .of = *b, .block = block };
    kv_pool_ref(s->of.pool, block);
    const enum status st = begin_put(s, 0, p, (uint64_t)(p - t->puts));
    if (st == OK) t->n_puts++;
    else let_go(s, 0, p);
    return st == ERR_CONFLICT ? OK : st;
}

enum status kv_store_keep(struct kv_store *s, const struct tier_block *b, int32_t block,
                          uint32_t ms)
{
    const uint64_t end = clock_ms() + ms;
    struct store_tier *t = host_tier(s);
    enum status st = t ? ERR_BUSY : ERR_UNSUPPORTED;
    while (st == ERR_BUSY && (st = keep_now(s, t, b, block)) == ERR_BUSY && clock_ms() < end) {
        const struct timespec pause = { 0, SETTLE_POLL_NS };
        nanosleep(&pause, NULL);
        store_take_reports(s);
    }
    return st;
}

bool kv_store_is_kept(const struct kv_store *s, struct hash128 key)
{
    const struct store_tier *t = host_tier(s);
    return t && t->tier->ops->has(t->tier, &key);
}

double kv_store_swap_seconds(struct kv_store *s, uint32_t n_keep, uint32_t n)
{
    struct store_tier *t = host_tier(s);
    return t ? t->tier->rate.block_s * n_keep + tier_rate_seconds(&t->tier->rate, n, clock_ns())
             : INFINITY;
}

void kv_store_drop(struct kv_store *s, struct hash128 key)
{
    for (uint32_t i = 0; i < s->n_tiers; i++) s->tiers[i].tier->ops->drop(s->tiers[i].tier, &key);
}

uint32_t kv_store_n_held(const struct kv_store *s)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_tiers; i++)
        for (uint32_t k = 0; k < STORE_PUTS_MAX; k++)
            n += s->tiers[i].puts[k].runs && s->tiers[i].puts[k].block >= 0;
    return n;
}

void kv_store_settle(struct kv_store *s, uint32_t ms)
{
    const uint64_t end = clock_ms() + ms;
    while (kv_store_n_held(s) > 0 && clock_ms() < end) {
        const struct timespec pause = { 0, SETTLE_POLL_NS };
        nanosleep(&pause, NULL);
        store_take_reports(s);
    }
}
