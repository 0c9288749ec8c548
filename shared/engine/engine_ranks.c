/* engine_ranks.c - what the ranks of a group compute, and how long they wait for each other: for
 * metrics, and for whoever asks why a step takes long.
 *
 * With its words for a step each rank says what it did since the last: rows, and time that it
 * waited in exchanges. Whoever waited least is the one that the others waited for.
 * Thread: engine, except engine_get_ranks. */
#include "shared/base/assert.h"
#include "shared/engine/engine_state.h"
#include "shared/model/expert_rows.h"

enum { NS_PER_US = 1000 };

/* Only the engine thread writes, so that it needs no read-modify-write. */
static void grow(_Atomic uint64_t *of, uint64_t n)
{
    atomic_store_explicit(of, atomic_load_explicit(of, memory_order_relaxed) + n,
                          memory_order_relaxed);
}

/* Counts the bytes since the last call, and returns the microseconds that this rank waited. */
static uint64_t take_traffic(struct engine *e)
{
    struct engine_group *g = &e->group;
    const struct ep_traffic now = g->ep->traffic;
    const uint64_t wait_us = (now.waited_ns - g->counted.waited_ns) / NS_PER_US;
    grow(&e->load.sent, now.sent - g->counted.sent);
    grow(&e->load.received, now.received - g->counted.received);
    g->counted = now;
    return wait_us;
}

void engine_ranks_say(struct engine *e, struct engine_group_words *mine)
{
    struct engine_group *g = &e->group;
    const uint64_t rows = model_computed_rows(e->opt.model), wait_us = take_traffic(e);
    mine->rank = e->opt.model->share.ep_rank;
    mine->rows = rows - g->counted_rows;
    mine->wait_us = wait_us > UINT32_MAX ? UINT32_MAX : (uint32_t)wait_us;
    g->counted_rows = rows;
}

void engine_ranks_hear(struct engine *e)
{
    const struct engine_group *g = &e->group;
    const struct engine_group_words *mine = &g->words[g->ep->config.rank], *least = mine;
    for (int32_t i = 0; i < g->ep->config.size; i++) {
        const struct engine_group_words *w = &g->words[i];
        if (w->rank >= EP_RANKS_MAX) continue;
        grow(&g->sums[w->rank].rows, w->rows);
        grow(&g->sums[w->rank].wait_us, w->wait_us);
        if (w->wait_us < least->wait_us) least = w;
    }
    grow(&g->sums[least->rank].late_us, mine->wait_us - least->wait_us);
}

void engine_ranks_end(struct engine *e)
{
    struct engine_group *g = &e->group;
    struct engine_rank_sums *mine = &g->sums[e->opt.model->share.ep_rank];
    const uint64_t rows = model_computed_rows(e->opt.model);
    if (g->ep) grow(&mine->wait_us, take_traffic(e));
    grow(&mine->rows, rows - g->counted_rows);
    g->counted_rows = rows;
    g->counted = (struct ep_traffic){ 0 };
}

void engine_get_ranks(const struct engine *e, uint32_t n, struct engine_rank *out)
{
    ASSERT(engine_is_grouped(e) && n <= EP_RANKS_MAX);
    for (uint32_t r = 0; r < n; r++) {
        const struct engine_rank_sums *s = &e->group.sums[r];
        out[r].rows = atomic_load_explicit(&s->rows, memory_order_relaxed);
        out[r].wait_us = atomic_load_explicit(&s->wait_us, memory_order_relaxed);
        out[r].late_us = atomic_load_explicit(&s->late_us, memory_order_relaxed);
    }
}
