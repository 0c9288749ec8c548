/* tier_follow.c - see tier_follow.h. Thread: its own, but for what any thread may call. */
#include "shared/kv/tier/ranks/tier_follow.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/list.h"
#include "shared/base/log.h"
#include "shared/base/mailbox.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"

enum {
    COMMANDS_MAX = 65536,
    STORING_MAX = 256,  /* blocks of a disk that were copied and are being written */
    STORING_MS = 10000, /* one that is not found by then was not stored */
    RETRY_MS = 2
};

struct follow_op {
    struct list link;
    struct tier_command c; /* keys and blocks: behind it */
    uint64_t begin_ms;
    uint32_t n_asked; /* GET: of the tier */
    bool is_unwanted; /* PUT: it was dropped */
    bool is_pinned;
    struct kv_tier_pin pin; /* in the host tier, of a PUT from there */
};

struct follow_storing {
    struct hash128 key;
    uint64_t begin_ms;
    bool is_dropped; /* it will be once it is stored */
};

struct follow_tier {
    struct kv_tier *tier; /* NULL: this rank has none */
    struct list waiting, running;
    struct follow_storing storing[STORING_MAX];
    uint32_t n_storing;
};

struct tier_follower {
    struct tier_follow_options o;
    struct follow_tier tiers[KV_TIER_KINDS];
    struct mailbox *commands; /* struct follow_op *; NULL: look at the tiers */
    atomic_bool is_called;    /* a NULL is among them. Relaxed: the mailbox orders */
    atomic_bool stop;         /* likewise */
    bool has_thread;
    pthread_t thread;
    uint64_t t_tick_ms;
};

/* ---- answers ---- */

static void end_op(struct tier_follower *f, struct follow_op *op, enum status st, uint32_t n_good)
{
    const struct tier_answer a = {
        .tier = op->c.tier, .id = op->c.id, .status = st, .n_good = n_good
    };
    struct kv_tier *host = f->tiers[KV_TIER_HOST].tier;
    if (op->is_pinned) host->ops->unpin(host, &op->pin);
    list_remove(&op->link);
    mem_free(op);
    f->o.answer(f->o.arg, &a);
}

/* ---- blocks that are being stored ---- */

static struct follow_storing *find_storing(struct follow_tier *t, const struct hash128 *key)
{
    for (uint32_t i = 0; i < t->n_storing; i++)
        if (hash128_eq(t->storing[i].key, *key)) return &t->storing[i];
    return NULL;
}

static void forget_storing(struct follow_tier *t, struct follow_storing *s)
{
    const uint32_t i = (uint32_t)(s - t->storing);
    if (s->is_dropped) t->tier->ops->drop(t->tier, &s->key);
    memmove(s, s + 1, (--t->n_storing - i) * sizeof *s);
}

static void note_storing(struct follow_tier *t, const struct hash128 *key)
{
    if (t->n_storing == STORING_MAX) /* the oldest is stored by now, or never will be */
        forget_storing(t, &t->storing[0]);
    t->storing[t->n_storing++] = (struct follow_storing){ *key, clock_ms(), false };
}

/* A block that is dropped while it is being written keeps its slot until then: a put that did not
 * wait would evict another block, which the leader still has. */
static bool frees_slots(const struct follow_tier *t)
{
    bool frees = false;
    for (uint32_t i = 0; i < t->n_storing; i++) frees |= t->storing[i].is_dropped;
    return frees;
}

/* ---- commands ---- */

static bool is_late(const struct follow_op *op, uint64_t now_ms)
{
    return now_ms - op->begin_ms >= TIER_FOLLOW_PATIENCE_MS;
}

/* ERR_BUSY: later. */
static enum status begin_put(struct tier_follower *f, struct follow_tier *t, struct follow_op *op)
{
    struct kv_tier *host = f->tiers[KV_TIER_HOST].tier;
    if (op->is_unwanted) return ERR_CANCELED;
    if (frees_slots(t)) return ERR_BUSY;
    if (op->c.block < 0 && !op->is_pinned) {
        op->is_pinned = host && host->ops->pin(host, &op->c.of.key, &op->pin);
        if (!op->is_pinned) return ERR_NOT_FOUND;
    }
    const struct kv_tier_put p = {
        .of = op->c.of,
        .block = op->c.block,
        .slot = op->is_pinned ? op->pin.bytes : NULL,
        .checksum = op->is_pinned ? op->pin.checksum : 0,
        .tag = op->c.id,
    };
    return t->tier->ops->put(t->tier, &p);
}

static void try_put(struct tier_follower *f, struct follow_tier *t, struct follow_op *op,
                    uint64_t now_ms)
{
    const enum status st = begin_put(f, t, op);
    if (st == ERR_BUSY && !is_late(op, now_ms)) return;
    if (st != OK) {
        end_op(f, op, st == ERR_CONFLICT ? OK : st, 0); /* it has it, or is storing it */
        return;
    }
    note_storing(t, &op->c.of.key);
    list_remove(&op->link);
    list_push(&t->running, &op->link);
}

/* Brings the lead blocks that it has. */
static void try_get(struct tier_follower *f, struct follow_tier *t, struct follow_op *op,
                    uint64_t now_ms)
{
    struct kv_tier_stats s;
    t->tier->ops->stats(t->tier, &s);
    const uint32_t n = kv_tier_find(t->tier, op->c.keys, op->c.n);
    const bool is_coming = !s.is_off && n < op->c.n && find_storing(t, &op->c.keys[n]);
    if (is_coming && !is_late(op, now_ms)) return;
    const struct kv_tier_get g = {
        .keys = op->c.keys, .blocks = op->c.blocks, .n = n, .tag = op->c.id
    };
    const enum status st = s.is_off ? ERR_UNAVAILABLE
                           : n == 0 ? ERR_NOT_FOUND
                                    : t->tier->ops->get(t->tier, &g);
    if (st == ERR_BUSY && !is_late(op, now_ms)) return;
    if (st != OK) {
        end_op(f, op, st, 0);
        return;
    }
    op->n_asked = n;
    list_remove(&op->link);
    list_push(&t->running, &op->link);
}

static void try_look(struct tier_follower *f, struct follow_tier *t, struct follow_op *op)
{
    struct kv_tier_stats s;
    t->tier->ops->stats(t->tier, &s);
    if (!s.is_looking) end_op(f, op, OK, 0);
}

static void try_op(struct tier_follower *f, struct follow_tier *t, struct follow_op *op)
{
    const uint64_t now_ms = clock_ms();
    if (!t->tier) end_op(f, op, ERR_UNSUPPORTED, 0);
    else if (op->c.kind == TIER_PUT) try_put(f, t, op, now_ms);
    else if (op->c.kind == TIER_GET) try_get(f, t, op, now_ms);
    else try_look(f, t, op);
}

static void try_waiting(struct tier_follower *f, struct follow_tier *t)
{
    LIST_FOREACH (op, &t->waiting, struct follow_op, link) try_op(f, t, op);
}

static struct follow_op *with_id(struct list *l, uint64_t id)
{
    LIST_FOREACH (op, l, struct follow_op, link)
        if (op->c.id == id) return op;
    return NULL;
}

/* One that is over has been answered. */
static void cancel(struct tier_follower *f, struct follow_tier *t, uint64_t id)
{
    struct follow_op *waits = with_id(&t->waiting, id), *runs = with_id(&t->running, id);
    if (runs && runs->c.kind == TIER_GET) {
        t->tier->ops->cancel(t->tier, id);
        end_op(f, runs, ERR_CANCELED, 0);
    } else if (waits && waits->c.kind == TIER_GET) {
        end_op(f, waits, ERR_CANCELED, 0);
    }
}

static void drop(struct follow_tier *t, const struct hash128 *key)
{
    struct follow_storing *s = find_storing(t, key);
    if (s) s->is_dropped = true;
    else if (t->tier) t->tier->ops->drop(t->tier, key);
    LIST_FOREACH (op, &t->waiting, struct follow_op, link)
        op->is_unwanted |= op->c.kind == TIER_PUT && hash128_eq(op->c.of.key, *key);
}

static void take(struct tier_follower *f, struct follow_op *op)
{
    struct follow_tier *t = &f->tiers[op->c.tier];
    if (op->c.kind == TIER_CANCEL) cancel(f, t, op->c.id);
    if (op->c.kind == TIER_DROP) drop(t, &op->c.of.key);
    if (op->c.kind == TIER_CANCEL || op->c.kind == TIER_DROP) {
        mem_free(op);
    } else if (with_id(&t->waiting, op->c.id) || with_id(&t->running, op->c.id)) {
        log_warn("kv tier command not taken", "id=%llu why=\"the id is in use\"",
                 (unsigned long long)op->c.id);
        mem_free(op);
    } else {
        op->begin_ms = clock_ms();
        list_push(&t->waiting, &op->link);
        try_op(f, t, op); /* before the next command: that may drop a block of it */
    }
}

/* ---- the thread ---- */

static void take_reports(struct tier_follower *f, struct follow_tier *t)
{
    struct kv_tier_done d;
    while (t->tier->ops->poll(t->tier, &d)) {
        struct follow_op *op = with_id(&t->running, d.tag);
        ASSERT(op);
        const bool is_short = op->c.kind == TIER_GET && d.status == OK && op->n_asked < op->c.n;
        struct follow_storing *s = find_storing(t, &op->c.of.key);
        if (op->c.kind == TIER_PUT && d.status != OK && s) forget_storing(t, s);
        end_op(f, op, is_short ? ERR_NOT_FOUND : d.status, d.n_good);
    }
}

static void forget_stored(struct follow_tier *t)
{
    const uint64_t now_ms = clock_ms();
    for (uint32_t i = t->n_storing; i-- > 0;) {
        struct follow_storing *s = &t->storing[i];
        const bool is_old = now_ms - s->begin_ms >= STORING_MS;
        if (is_old || t->tier->ops->has(t->tier, &s->key)) forget_storing(t, s);
    }
}

static void run_tier(struct tier_follower *f, struct follow_tier *t, uint64_t now_ms, bool ticks)
{
    if (t->tier) {
        take_reports(f, t);
        if (ticks) t->tier->ops->tick(t->tier, now_ms);
        forget_stored(t);
    }
    try_waiting(f, t);
}

static int wait_ms(const struct tier_follower *f)
{
    for (int k = 0; k < KV_TIER_KINDS; k++)
        if (!list_empty(&f->tiers[k].waiting)) return RETRY_MS;
    return KV_TIER_TICK_MS;
}

static void *follow_main(void *arg)
{
    struct tier_follower *f = arg;
    struct follow_op *op;
    thread_become(THREAD_ANY, "kv-tiers");
    while (!atomic_load_explicit(&f->stop, memory_order_relaxed)) {
        const uint64_t now_ms = clock_ms();
        const bool ticks = now_ms - f->t_tick_ms >= KV_TIER_TICK_MS;
        if (ticks) f->t_tick_ms = now_ms;
        while (mailbox_take(f->commands, &op)) {
            if (op) take(f, op);
            else atomic_store_explicit(&f->is_called, false, memory_order_relaxed);
        }
        for (int k = 0; k < KV_TIER_KINDS; k++) run_tier(f, &f->tiers[k], now_ms, ticks);
        (void)mailbox_wait(f->commands, wait_ms(f));
    }
    return NULL;
}

/* ---- life ---- */

/* A tier has something to report. Any thread. */
static void wake(void *arg)
{
    struct tier_follower *f = arg;
    struct follow_op *none = NULL;
    if (atomic_exchange_explicit(&f->is_called, true, memory_order_relaxed)) return;
    if (mailbox_post(f->commands, &none) != OK) /* so full that its thread does not sleep */
        atomic_store_explicit(&f->is_called, false, memory_order_relaxed);
}

static void add_tier(struct tier_follower *f, struct kv_tier *t)
{
    const enum kv_tier_kind kind = t->ops->kind;
    f->tiers[kind].tier = f->o.wrap ? f->o.wrap(f->o.wrap_arg, t) : t;
}

static enum status make_tiers(struct tier_follower *f, struct err *err)
{
    const struct tier_follow_options *o = &f->o;
    struct kv_tier *t;
    const struct kv_tier_options of_tier = {
        .layout = o->layout,
        .device = o->device,
        .pool = o->pool,
        .slot_dtype = o->slot_dtype,
        .wake = wake,
        .arg = f,
    };
    if (o->host_bytes) {
        if (kv_tier_host_create(&of_tier, o->host_bytes, &t, err) != OK)
            return err_prefix(err, "--swap-space: ");
        add_tier(f, t);
    }
    if (o->disk.folder) {
        TRY(kv_tier_disk_create(&of_tier, &o->disk, &t, err));
        add_tier(f, t);
    }
    return OK;
}

enum status tier_follow_create(const struct tier_follow_options *o, struct tier_follower **out,
                               struct err *err)
{
    struct tier_follower *f = MEM_NEW(struct tier_follower);
    f->o = *o;
    for (int k = 0; k < KV_TIER_KINDS; k++) {
        list_init(&f->tiers[k].waiting);
        list_init(&f->tiers[k].running);
    }
    f->commands = mailbox_create(sizeof(struct follow_op *), COMMANDS_MAX, NULL, NULL);
    enum status st = make_tiers(f, err);
    if (st == OK && (st = thread_start(&f->thread, follow_main, f)) != OK)
        err_set(err, st, "The thread of the KV tiers could not be started.");
    f->has_thread = st == OK;
    f->o.disk.folder = NULL;
    if (st != OK) {
        tier_follow_free(f);
        return st;
    }
    *out = f;
    return OK;
}

static void free_ops(struct list *l)
{
    LIST_FOREACH (op, l, struct follow_op, link) mem_free(op);
}

void tier_follow_free(struct tier_follower *f)
{
    struct follow_op *op;
    if (!f) return;
    atomic_store_explicit(&f->stop, true, memory_order_relaxed);
    mailbox_close(f->commands);
    if (f->has_thread) pthread_join(f->thread, NULL);
    /* The last first: it may still write from slots of the one before. */
    for (int k = KV_TIER_KINDS; k-- > 0;) {
        struct kv_tier *t = f->tiers[k].tier;
        if (t) t->ops->free(t);
        free_ops(&f->tiers[k].waiting);
        free_ops(&f->tiers[k].running);
    }
    while (mailbox_take(f->commands, &op)) mem_free(op);
    mailbox_free(f->commands);
    mem_free(f);
}

/* ---- any thread ---- */

static bool makes_sense(const struct tier_follower *f, const struct tier_command *c)
{
    const int32_t n_blocks = (int32_t)f->o.layout.n_blocks;
    if (c->kind >= TIER_COMMANDS || c->tier >= KV_TIER_KINDS) return false;
    if (c->kind == TIER_PUT)
        return c->block < n_blocks && (c->block >= 0 || c->tier != KV_TIER_HOST);
    if (c->kind != TIER_GET) return true;
    for (uint32_t i = 0; i < c->n; i++)
        if (c->blocks[i] < 0 || c->blocks[i] >= n_blocks) return false;
    return c->n > 0 && c->n <= f->o.layout.n_blocks;
}

enum status tier_follow_command(struct tier_follower *f, const struct tier_command *c)
{
    if (!makes_sense(f, c)) return ERR_INVALID;
    const uint32_t n = c->kind == TIER_GET ? c->n : 0;
    struct follow_op *op = mem_calloc(1, sizeof *op + n * (sizeof *c->keys + sizeof *c->blocks));
    struct hash128 *keys = (struct hash128 *)(op + 1);
    int32_t *blocks = (int32_t *)(keys + n);
    op->c = *c;
    op->c.keys = keys;
    op->c.blocks = blocks;
    if (n) memcpy(keys, c->keys, n * sizeof *keys);
    if (n) memcpy(blocks, c->blocks, n * sizeof *blocks);
    list_init(&op->link);
    const enum status st = mailbox_post(f->commands, &op);
    if (st != OK) mem_free(op);
    return st == ERR_CANCELED ? OK : st; /* the node ends */
}
