/* test_tier_follow.c - what a rank above 0 does with commands while its tier is slow: one that
 * takes no puts, or has not stored what it took (shared/kv/tier/ranks/tier_follow.h). */
#include <stdatomic.h>

#include "shared/base/assert.h"
#include "shared/base/mailbox.h"
#include "tests/fixtures/tier_rig.h"

enum { SLOW_BLOCKS = 4, SLOW_MS = 50 };

/* A tier whose puts are over at once, and that has them when the test says so. */
struct slow_tier {
    struct kv_tier base;
    struct kv_tier *inner; /* what it stands for does nothing */
    struct slow_gate *gate;
    struct hash128 keys[SLOW_BLOCKS];
    uint32_t n_keys;
    struct kv_tier_done done[SLOW_BLOCKS];
    uint32_t n_done;
};

/* Set and read by the test. */
struct slow_gate {
    _Atomic bool is_busy, stores;
    _Atomic uint32_t n_puts, n_gets, n_drops;
    struct slow_tier tier;
};

static struct slow_tier *slow_of(struct kv_tier *t) { return (struct slow_tier *)t; }

static bool slow_has(struct kv_tier *t, const struct hash128 *key)
{
    const struct slow_tier *s = slow_of(t);
    for (uint32_t i = 0; i < s->n_keys; i++)
        if (hash128_eq(s->keys[i], *key)) return s->gate->stores;
    return false;
}

static void slow_report(struct slow_tier *s, struct kv_tier_done d)
{
    ASSERT(s->n_done < SLOW_BLOCKS);
    s->done[s->n_done++] = d;
}

static enum status slow_put(struct kv_tier *t, const struct kv_tier_put *p)
{
    struct slow_tier *s = slow_of(t);
    if (s->gate->is_busy) return ERR_BUSY;
    ASSERT(s->n_keys < SLOW_BLOCKS);
    s->keys[s->n_keys++] = p->of.key;
    s->gate->n_puts++;
    slow_report(s, (struct kv_tier_done){ .kind = KV_TIER_PUT, .tag = p->tag });
    return OK;
}

static enum status slow_get(struct kv_tier *t, const struct kv_tier_get *g)
{
    slow_of(t)->gate->n_gets++;
    slow_report(slow_of(t),
                (struct kv_tier_done){ .kind = KV_TIER_GET, .tag = g->tag, .n_good = g->n });
    return OK;
}

static void slow_drop(struct kv_tier *t, const struct hash128 *key)
{
    struct slow_tier *s = slow_of(t);
    for (uint32_t i = 0; i < s->n_keys; i++)
        if (hash128_eq(s->keys[i], *key)) s->keys[i] = s->keys[--s->n_keys];
    s->gate->n_drops++;
}

static bool slow_poll(struct kv_tier *t, struct kv_tier_done *out)
{
    struct slow_tier *s = slow_of(t);
    if (s->n_done == 0) return false;
    *out = s->done[--s->n_done];
    return true;
}

static void slow_cancel(struct kv_tier *t, uint64_t tag) { (void)t, (void)tag; }

static void slow_tick(struct kv_tier *t, uint64_t now_ms) { (void)t, (void)now_ms; }

static void slow_stats(const struct kv_tier *t, struct kv_tier_stats *out)
{
    (void)t;
    *out = (struct kv_tier_stats){ .n_slots = SLOW_BLOCKS };
}

static void slow_free(struct kv_tier *t) { slow_of(t)->inner->ops->free(slow_of(t)->inner); }

static const struct kv_tier_ops SLOW_OPS = { .name = "slow",
                                             .kind = KV_TIER_HOST,
                                             .free = slow_free,
                                             .has = slow_has,
                                             .put = slow_put,
                                             .get = slow_get,
                                             .cancel = slow_cancel,
                                             .drop = slow_drop,
                                             .poll = slow_poll,
                                             .tick = slow_tick,
                                             .stats = slow_stats };

static struct kv_tier *wrap_slow(void *arg, struct kv_tier *t)
{
    struct slow_gate *g = arg;
    g->tier = (struct slow_tier){ .base.ops = &SLOW_OPS, .inner = t, .gate = g };
    return &g->tier.base;
}

/* ---- a follower with such a tier ---- */

struct follow_rig {
    struct rig r;
    struct slow_gate gate;
    struct mailbox *answers;
    struct tier_follower *f;
};

static void note_answer(void *arg, const struct tier_answer *a)
{
    const enum status st = mailbox_post(arg, a);
    ASSERT(st == OK);
}

static void open_follower(struct follow_rig *g)
{
    struct err err = { 0 };
    rig_open_pool(&g->r, "cpu", DTYPE_BF16, DTYPE_BF16);
    g->answers = mailbox_create(sizeof(struct tier_answer), 64, NULL, NULL);
    const struct tier_follow_options o = { .layout = g->r.layout,
                                           .device = g->r.device,
                                           .pool = g->r.pool.ptr,
                                           .slot_dtype = DTYPE_BF16,
                                           .host_bytes = KV_SLOT_ALIGN,
                                           .answer = note_answer,
                                           .arg = g->answers,
                                           .wrap = wrap_slow,
                                           .wrap_arg = &g->gate };
    CHECK_OK(tier_follow_create(&o, &g->f, &err));
}

static void close_follower(struct follow_rig *g)
{
    tier_follow_free(g->f);
    mailbox_free(g->answers);
    device_mem_free(g->r.device, &g->r.pool);
    device_close(g->r.device);
}

static void command(struct follow_rig *g, enum tier_command_kind kind, uint64_t id, uint32_t i)
{
    const struct tier_block of = block_named(i, 0);
    const int32_t block = 3;
    const struct tier_command c = { .kind = kind,
                                    .tier = KV_TIER_HOST,
                                    .id = id,
                                    .of = of,
                                    .block = block,
                                    .n = 1,
                                    .keys = &of.key,
                                    .blocks = &block };
    CHECK_OK(tier_follow_command(g->f, &c));
}

static void check_answer(struct follow_rig *g, uint64_t id, enum status st, uint32_t n_good)
{
    struct tier_answer a;
    CHECK(mailbox_wait(g->answers, WAIT_MS) && mailbox_take(g->answers, &a));
    CHECK_EQ_INT(a.id, id);
    CHECK_EQ_INT(a.tier, KV_TIER_HOST);
    CHECK_STATUS(a.status, st);
    CHECK_EQ_INT(a.n_good, n_good);
}

static void check_no_answer(struct follow_rig *g) { CHECK(!mailbox_wait(g->answers, SLOW_MS)); }

/* ---- cases ---- */

TEST(a_get_waits_for_what_is_being_stored)
{
    static struct follow_rig g;
    open_follower(&g);
    command(&g, TIER_PUT, 1, 7);
    check_answer(&g, 1, OK, 0);
    command(&g, TIER_GET, 2, 7);
    check_no_answer(&g);
    CHECK_EQ_INT(g.gate.n_gets, 0);
    g.gate.stores = true;
    check_answer(&g, 2, OK, 1);
    CHECK_EQ_INT(g.gate.n_gets, 1);
    command(&g, TIER_GET, 3, 8); /* one that nobody has put */
    check_answer(&g, 3, ERR_NOT_FOUND, 0);
    close_follower(&g);
}

/* Else it would take the slot of a block that stays. */
TEST(a_put_waits_for_the_slot_of_what_was_dropped)
{
    static struct follow_rig g;
    open_follower(&g);
    command(&g, TIER_PUT, 1, 7);
    check_answer(&g, 1, OK, 0);
    command(&g, TIER_DROP, 0, 7);
    command(&g, TIER_PUT, 2, 8);
    check_no_answer(&g);
    CHECK(g.gate.n_puts == 1 && g.gate.n_drops == 0);
    g.gate.stores = true;
    check_answer(&g, 2, OK, 0);
    CHECK(g.gate.n_puts == 2 && g.gate.n_drops == 1);
    close_follower(&g);
}

TEST(what_waits_can_be_dropped_and_cancelled)
{
    static struct follow_rig g;
    open_follower(&g);
    command(&g, TIER_PUT, 1, 7);
    check_answer(&g, 1, OK, 0);
    command(&g, TIER_GET, 2, 7);
    g.gate.is_busy = true;
    command(&g, TIER_PUT, 3, 8);
    check_no_answer(&g);
    command(&g, TIER_CANCEL, 2, 0);
    check_answer(&g, 2, ERR_CANCELED, 0);
    command(&g, TIER_DROP, 0, 8);
    check_answer(&g, 3, ERR_CANCELED, 0);
    CHECK(g.gate.n_gets == 0 && g.gate.n_puts == 1);
    close_follower(&g);
}

TEST(nothing_waits_for_ever)
{
    static struct follow_rig g;
    open_follower(&g);
    command(&g, TIER_PUT, 1, 7);
    check_answer(&g, 1, OK, 0);
    g.gate.is_busy = true;
    const uint64_t begin = clock_ms();
    command(&g, TIER_GET, 2, 7); /* it is never stored */
    check_answer(&g, 2, ERR_NOT_FOUND, 0);
    CHECK(clock_ms() - begin >= TIER_FOLLOW_PATIENCE_MS / 2);
    command(&g, TIER_PUT, 3, 8);
    check_answer(&g, 3, ERR_BUSY, 0);
    CHECK(clock_ms() - begin < 4 * TIER_FOLLOW_PATIENCE_MS);
    close_follower(&g);
}

TEST(an_id_that_is_in_use_is_not_taken)
{
    static struct follow_rig g;
    open_follower(&g);
    g.gate.is_busy = true;
    command(&g, TIER_PUT, 1, 7);
    command(&g, TIER_PUT, 1, 8);
    check_no_answer(&g);
    g.gate.is_busy = false;
    check_answer(&g, 1, OK, 0);
    check_no_answer(&g);
    CHECK_EQ_INT(g.gate.n_puts, 1);
    close_follower(&g);
}

TEST_MAIN(CASE(a_get_waits_for_what_is_being_stored),
          CASE(a_put_waits_for_the_slot_of_what_was_dropped),
          CASE(what_waits_can_be_dropped_and_cancelled), CASE(nothing_waits_for_ever),
          CASE(an_id_that_is_in_use_is_not_taken))
