/* tier_ranks.c - see tier_ranks.h. Thread: engine, but for what any thread may call. */
#include "shared/kv/tier/ranks/tier_ranks.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/list.h"
#include "shared/base/log.h"
#include "shared/base/mailbox.h"
#include "shared/base/mem.h"

enum {
    GETS_MAX = 256,
    PUTS_MAX = 64,
    OWN = 0,             /* the leader's bit */
    LOG_AGAIN_MS = 60000 /* a tier that was on for less is not said to be off again */
};

/* A command that runs: bit 0 of `awaited` is the own tier, bit i + 1 follower i. */
struct ranks_op {
    struct list link;
    enum tier_command_kind kind;
    uint64_t id, tag;
    uint32_t awaited;
    bool is_canceled;
    enum status status;      /* the first that is not OK, or that of the least n_good */
    struct hash128 key;      /* PUT */
    uint32_t n, n_good;      /* GET */
    uint64_t begin_ns, t_ns; /* t_ns: of the last answer */
    struct hash128 keys[];   /* GET: [n] */
};

struct ranks_tier {
    struct kv_tier base;
    struct kv_tier_ops ops; /* with the own tier's name and kind */
    struct tier_ranks *ranks;
    struct kv_tier *own;
    struct list puts, gets, looks, done;
    uint32_t n_puts, n_gets;
    bool has_asked, is_ready; /* what all ranks kept before */
    uint64_t t_on_ms;         /* it is off until then */
    uint64_t t_end_ns;        /* of the last get */
    uint64_t n_bad, n_errors; /* of followers */
};

struct ranks_answer {
    uint32_t follower;
    uint64_t t_ns;
    struct tier_answer a;
};

struct tier_ranks {
    struct tier_ranks_options o;
    struct ranks_tier *tiers[KV_TIER_KINDS];
    uint64_t next_id;
    struct mailbox *answers;
    atomic_bool is_lost;  /* by abort, or a silent rank. Relaxed: the mailbox wakes who waits */
    pthread_mutex_t lock; /* of wake and wake_arg */
    void (*wake)(void *arg);
    void *wake_arg;
};

static struct ranks_tier *ranks_of(struct kv_tier *t) { return (struct ranks_tier *)t; }

static bool is_lost(const struct tier_ranks *r)
{
    return atomic_load_explicit(&r->is_lost, memory_order_relaxed);
}

static bool is_off(const struct ranks_tier *t)
{
    return is_lost(t->ranks) || clock_ms() < t->t_on_ms;
}

/* ---- commands ---- */

static void send(const struct ranks_tier *t, struct tier_command c)
{
    c.tier = t->ops.kind;
    t->ranks->o.send(t->ranks->o.arg, &c);
}

static void drop_everywhere(struct ranks_tier *t, const struct hash128 *key)
{
    t->own->ops->drop(t->own, key);
    send(t, (struct tier_command){ .kind = TIER_DROP, .of.key = *key });
}

void tier_ranks_forgot(void *ranks, enum kv_tier_kind kind, const struct hash128 *key)
{
    struct tier_ranks *r = ranks;
    r->o.send(r->o.arg, &(struct tier_command){ .kind = TIER_DROP, .tier = kind, .of.key = *key });
}

static struct ranks_op *new_op(struct ranks_tier *t, enum tier_command_kind kind, uint64_t tag,
                               uint32_t n)
{
    struct ranks_op *op = mem_calloc(1, sizeof *op + n * sizeof *op->keys);
    op->kind = kind;
    op->id = ++t->ranks->next_id;
    op->tag = tag;
    op->n = op->n_good = n;
    op->begin_ns = clock_ns();
    op->awaited = (uint32_t)((UINT64_C(2) << t->ranks->o.n_followers) - 1);
    return op;
}

/* Asks the others for what they kept before; the own tier finds what it has as it goes. */
static void ask(struct ranks_tier *t)
{
    struct ranks_op *op = new_op(t, TIER_LOOK, 0, 0);
    op->awaited &= ~(1u << OWN);
    t->has_asked = true;
    list_push(&t->looks, &op->link);
    send(t, (struct tier_command){ .kind = TIER_LOOK, .id = op->id });
}

/* ---- answers ---- */

/* How long the ranks worked on it: they bring one get after the other. What the engine noticed late
 * does not count. */
static double seconds_of(const struct ranks_tier *t, const struct ranks_op *op)
{
    const uint64_t begin = op->begin_ns > t->t_end_ns ? op->begin_ns : t->t_end_ns;
    const double others = op->t_ns > begin ? (double)(op->t_ns - begin) * 1e-9 : 0,
                 own = t->own->rate.first_s + t->own->rate.block_s * op->n;
    return others > own ? others : own;
}

static void end_get(struct ranks_tier *t, struct ranks_op *op)
{
    const bool is_whole = op->n_good == op->n;
    t->n_gets--;
    tier_rate_end(&t->base.rate, op->n, is_whole ? seconds_of(t, op) : 0, clock_ns());
    if (op->t_ns > t->t_end_ns) t->t_end_ns = op->t_ns;
}

/* All ranks have answered. */
static void end_op(struct ranks_tier *t, struct ranks_op *op)
{
    list_remove(&op->link);
    if (op->kind == TIER_GET) end_get(t, op);
    if (op->kind == TIER_LOOK) t->is_ready = true;
    if (op->kind == TIER_PUT) {
        t->n_puts--;
        if (op->status != OK) drop_everywhere(t, &op->key);
    }
    if (op->kind == TIER_LOOK || op->is_canceled) mem_free(op);
    else list_push(&t->done, &op->link);
}

/* Is it the tier that failed there, and not the block that is missing? */
static bool is_tier_error(enum status st)
{
    return st != OK && st != ERR_CHECKSUM && st != ERR_NOT_FOUND && st != ERR_CANCELED &&
           st != ERR_BUSY && st != ERR_FULL && st != ERR_CONFLICT;
}

static void count_failure(struct ranks_tier *t, uint32_t rank, enum status st)
{
    if (rank == OWN) return; /* the own tier counts and handles its errors itself */
    t->n_bad += st == ERR_CHECKSUM;
    if (!is_tier_error(st)) return;
    t->n_errors++;
    if (clock_ms() >= t->t_on_ms + LOG_AGAIN_MS || t->t_on_ms == 0)
        log_warn("kv tier switched off", "tier=%s rank=%u st=%s again_s=%d", t->ops.name, rank,
                 status_name(st), TIER_RANKS_OFF_MS / 1000);
    t->t_on_ms = clock_ms() + TIER_RANKS_OFF_MS;
}

/* A rank has not brought block n_good. Where a follower has not got it, it may lack those behind as
 * well: a tier that was emptied would else be found out block by block. */
static void drop_missing(struct ranks_tier *t, const struct ranks_op *op, uint32_t rank,
                         enum status st, uint32_t n_good)
{
    const bool all = rank != OWN && st == ERR_NOT_FOUND;
    if (n_good == op->n || (st != ERR_NOT_FOUND && st != ERR_CHECKSUM)) return;
    for (uint32_t i = n_good; i < (all ? op->n : n_good + 1); i++) drop_everywhere(t, &op->keys[i]);
}

static void take_answer(struct ranks_tier *t, struct ranks_op *op, uint32_t rank, enum status st,
                        uint32_t n_good)
{
    const uint32_t bit = 1u << rank;
    if (!(op->awaited & bit)) return;
    op->awaited &= ~bit;
    count_failure(t, rank, st);
    if (op->kind == TIER_GET) {
        if (n_good > op->n || (st != OK && n_good == op->n)) n_good = 0; /* it makes no sense */
        drop_missing(t, op, rank, st, n_good);
        if (n_good < op->n_good) op->n_good = n_good, op->status = st;
    } else if (op->status == OK) {
        op->status = st;
    }
    if (!op->awaited) end_op(t, op);
}

static struct ranks_op *with_id(struct ranks_tier *t, uint64_t id)
{
    LIST_FOREACH (p, &t->puts, struct ranks_op, link)
        if (p->id == id) return p;
    LIST_FOREACH (g, &t->gets, struct ranks_op, link)
        if (g->id == id) return g;
    LIST_FOREACH (l, &t->looks, struct ranks_op, link)
        if (l->id == id) return l;
    return NULL;
}

/* Those of all tiers. */
static void take_answers(struct tier_ranks *r)
{
    struct ranks_answer m;
    while (mailbox_take(r->answers, &m)) {
        struct ranks_tier *t = r->tiers[m.a.tier];
        struct ranks_op *op = t ? with_id(t, m.a.id) : NULL;
        if (!op) continue;
        if (m.t_ns > op->t_ns) op->t_ns = m.t_ns;
        take_answer(t, op, m.follower + 1, m.a.status, m.a.n_good);
    }
}

static void take_own(struct ranks_tier *t)
{
    struct kv_tier_done d;
    while (t->own->ops->poll(t->own, &d)) {
        struct ranks_op *op = with_id(t, d.tag);
        ASSERT(op && (op->kind == TIER_GET) == (d.kind == KV_TIER_GET));
        take_answer(t, op, OWN, d.status, d.n_good);
    }
}

/* ---- ops ---- */

static bool is_being_put(const struct ranks_tier *t, const struct hash128 *key)
{
    LIST_FOREACH (op, &t->puts, struct ranks_op, link)
        if (hash128_eq(op->key, *key)) return true;
    return false;
}

static bool ranks_has(struct kv_tier *tier, const struct hash128 *key)
{
    struct ranks_tier *t = ranks_of(tier);
    /* Whether a rank was lost is for put and get: that changes at any moment, and what was found
     * has to stay so for as long as the engine plans a load. */
    return t->is_ready && clock_ms() >= t->t_on_ms && t->own->ops->has(t->own, key) &&
           !is_being_put(t, key);
}

static enum status ranks_put(struct kv_tier *tier, const struct kv_tier_put *p)
{
    struct ranks_tier *t = ranks_of(tier);
    if (is_off(t)) return ERR_UNAVAILABLE;
    if (!t->is_ready || t->n_puts == PUTS_MAX) return ERR_BUSY;
    if (is_being_put(t, &p->of.key)) return ERR_CONFLICT;
    struct ranks_op *op = new_op(t, TIER_PUT, p->tag, 0);
    struct kv_tier_put own = *p;
    own.tag = op->id;
    op->key = p->of.key;
    const enum status st = t->own->ops->put(t->own, &own);
    if (st != OK) {
        mem_free(op);
        return st;
    }
    list_push(&t->puts, &op->link);
    t->n_puts++;
    send(t, (struct tier_command){
                .kind = TIER_PUT, .id = op->id, .of = p->of, .block = p->slot ? -1 : p->block });
    return OK;
}

static enum status ranks_get(struct kv_tier *tier, const struct kv_tier_get *g)
{
    struct ranks_tier *t = ranks_of(tier);
    ASSERT(!g->n_layers); /* it has not the capability */
    if (is_off(t)) return ERR_UNAVAILABLE;
    if (t->n_gets == GETS_MAX) return ERR_BUSY;
    if (kv_tier_find(tier, g->keys, g->n) < g->n) return ERR_NOT_FOUND;
    struct ranks_op *op = new_op(t, TIER_GET, g->tag, g->n);
    struct kv_tier_get own = *g;
    own.tag = op->id;
    memcpy(op->keys, g->keys, g->n * sizeof *g->keys);
    const enum status st = t->own->ops->get(t->own, &own);
    if (st != OK) {
        mem_free(op);
        return st;
    }
    list_push(&t->gets, &op->link);
    t->n_gets++;
    tier_rate_begin(&tier->rate, g->n);
    send(t, (struct tier_command){
                .kind = TIER_GET, .id = op->id, .n = g->n, .keys = g->keys, .blocks = g->blocks });
    return OK;
}

/* Some rank has not answered for long: what it does to its pool is not known any more. */
static void lose(struct tier_ranks *r)
{
    if (atomic_exchange_explicit(&r->is_lost, true, memory_order_relaxed)) return;
    log_error("kv tiers of a rank do not answer", "after_ms=%u", r->o.silent_ms);
    r->o.on_silent(r->o.arg);
}

/* Until nobody writes to the blocks of get `id`. */
static void await_end(struct ranks_tier *t, uint64_t id)
{
    struct tier_ranks *r = t->ranks;
    const uint64_t end = clock_ms() + r->o.silent_ms;
    take_answers(r);
    while (with_id(t, id) && !is_lost(r)) {
        const uint64_t now = clock_ms();
        if (now >= end) lose(r);
        else (void)mailbox_wait(r->answers, (int)(end - now));
        take_answers(r);
    }
}

static struct ranks_op *with_tag(struct list *l, uint64_t tag)
{
    LIST_FOREACH (op, l, struct ranks_op, link)
        if (op->kind == TIER_GET && op->tag == tag) return op;
    return NULL;
}

static void ranks_cancel(struct kv_tier *tier, uint64_t tag)
{
    struct ranks_tier *t = ranks_of(tier);
    struct ranks_op *done = with_tag(&t->done, tag), *op = with_tag(&t->gets, tag);
    if (done) {
        list_remove(&done->link);
        mem_free(done);
    }
    if (!op) return;
    const uint64_t id = op->id;
    op->is_canceled = true;
    op->tag = 0;
    send(t, (struct tier_command){ .kind = TIER_CANCEL, .id = id });
    t->own->ops->cancel(t->own, id);
    take_answer(t, op, OWN, ERR_CANCELED, 0); /* it may be over with that */
    await_end(t, id);
}

static void ranks_drop(struct kv_tier *tier, const struct hash128 *key)
{
    drop_everywhere(ranks_of(tier), key);
}

/* The own tier alone: it is the one that decides what is forgotten. */
static void ranks_touch(struct kv_tier *tier, const struct hash128 *key, uint64_t now_ns)
{
    struct ranks_tier *t = ranks_of(tier);
    t->own->ops->touch(t->own, key, now_ns);
}

static bool ranks_poll(struct kv_tier *tier, struct kv_tier_done *out)
{
    struct ranks_tier *t = ranks_of(tier);
    if (!t->has_asked) ask(t);
    take_answers(t->ranks);
    take_own(t);
    if (list_empty(&t->done)) return false;
    struct ranks_op *op = LIST_FIRST(&t->done, struct ranks_op, link);
    *out = (struct kv_tier_done){ .kind = op->kind == TIER_GET ? KV_TIER_GET : KV_TIER_PUT,
                                  .tag = op->tag,
                                  .status = op->status,
                                  .n_good = op->n_good };
    list_remove(&op->link);
    mem_free(op);
    return true;
}

static void ranks_tick(struct kv_tier *tier, uint64_t now_ms)
{
    struct ranks_tier *t = ranks_of(tier);
    t->own->ops->tick(t->own, now_ms);
}

static void ranks_stats(const struct kv_tier *tier, struct kv_tier_stats *out)
{
    const struct ranks_tier *t = (const struct ranks_tier *)tier;
    t->own->ops->stats(t->own, out);
    out->n_bad_checksums += t->n_bad;
    out->n_errors += t->n_errors;
    out->is_off |= is_off(t);
    out->is_looking |= !t->is_ready;
}

static bool ranks_pin(struct kv_tier *tier, const struct hash128 *key, struct kv_tier_pin *out)
{
    struct ranks_tier *t = ranks_of(tier);
    return ranks_has(tier, key) && t->own->ops->pin(t->own, key, out);
}

static void ranks_unpin(struct kv_tier *tier, const struct kv_tier_pin *pin)
{
    struct ranks_tier *t = ranks_of(tier);
    t->own->ops->unpin(t->own, pin);
}

/* ---- life ---- */

static void free_ops(struct list *l)
{
    LIST_FOREACH (op, l, struct ranks_op, link) mem_free(op);
}

static void set_wake(struct tier_ranks *r, void (*wake)(void *arg), void *arg)
{
    pthread_mutex_lock(&r->lock);
    r->wake = wake;
    r->wake_arg = arg;
    pthread_mutex_unlock(&r->lock);
}

static void ranks_free(struct kv_tier *tier)
{
    struct ranks_tier *t = ranks_of(tier);
    t->own->ops->free(t->own);
    t->ranks->tiers[t->ops.kind] = NULL;
    set_wake(t->ranks, NULL, NULL);
    free_ops(&t->puts);
    free_ops(&t->gets);
    free_ops(&t->looks);
    free_ops(&t->done);
    mem_free(t);
}

static const struct kv_tier_ops RANKS_OPS = {
    .free = ranks_free,
    .has = ranks_has,
    .put = ranks_put,
    .get = ranks_get,
    .cancel = ranks_cancel,
    .drop = ranks_drop,
    .touch = ranks_touch,
    .poll = ranks_poll,
    .tick = ranks_tick,
    .stats = ranks_stats,
    .pin = ranks_pin,
    .unpin = ranks_unpin,
};

struct kv_tier *tier_ranks_wrap(struct tier_ranks *r, struct kv_tier *own, void (*wake)(void *arg),
                                void *arg)
{
    struct ranks_tier *t = MEM_NEW(struct ranks_tier);
    ASSERT(!r->tiers[own->ops->kind]);
    t->ops = RANKS_OPS;
    t->ops.name = own->ops->name;
    t->ops.kind = own->ops->kind;
    t->ops.caps = own->ops->caps & KV_TIER_PINS;
    t->base.ops = &t->ops;
    t->base.rate = own->rate;
    t->ranks = r;
    t->own = own;
    list_init(&t->puts);
    list_init(&t->gets);
    list_init(&t->looks);
    list_init(&t->done);
    r->tiers[t->ops.kind] = t;
    set_wake(r, wake, arg);
    return &t->base;
}

struct tier_ranks *tier_ranks_create(const struct tier_ranks_options *o)
{
    struct tier_ranks *r = MEM_NEW(struct tier_ranks);
    ASSERT(o->n_followers > 0 && o->n_followers < TIER_RANKS_MAX);
    r->o = *o;
    if (!r->o.silent_ms) r->o.silent_ms = TIER_RANKS_SILENT_MS;
    r->answers = mailbox_create(sizeof(struct ranks_answer),
                                (size_t)KV_TIER_KINDS * (GETS_MAX + PUTS_MAX + 1) * o->n_followers,
                                NULL, NULL);
    pthread_mutex_init(&r->lock, NULL);
    return r;
}

void tier_ranks_free(struct tier_ranks *r)
{
    if (!r) return;
    mailbox_free(r->answers);
    pthread_mutex_destroy(&r->lock);
    mem_free(r);
}

/* ---- any thread ---- */

enum status tier_ranks_answer(struct tier_ranks *r, uint32_t follower, const struct tier_answer *a)
{
    ASSERT(follower < r->o.n_followers && a->tier < KV_TIER_KINDS);
    const struct ranks_answer m = { .follower = follower, .t_ns = clock_ns(), .a = *a };
    const enum status st = mailbox_post(r->answers, &m);
    if (st == ERR_CANCELED) return OK; /* the node ends */
    pthread_mutex_lock(&r->lock);
    if (r->wake) r->wake(r->wake_arg);
    pthread_mutex_unlock(&r->lock);
    return st;
}

void tier_ranks_abort(struct tier_ranks *r)
{
    atomic_store_explicit(&r->is_lost, true, memory_order_relaxed);
    mailbox_close(r->answers);
}
