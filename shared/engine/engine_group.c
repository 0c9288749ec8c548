/* engine_group.c - steps that an engine takes together with the other ranks that share its model's
 * experts.
 *
 *     agree:  all-gather of {epoch, step, rows, next epoch}
 *       one has rows        ──▶ all run the step, with as many pieces as the busiest rank needs
 *       nobody has          ──▶ all sleep in their mailboxes until a command or a bell
 *       all have a next one ──▶ all step there, from this step on
 *
 * A rank that begins a step after all slept rings the others awake; step numbers make a bell that
 * comes late harmless. On GPUs the ranks meet for a step while the one before computes.
 * Thread: engine, where it is not said otherwise. */
#include "shared/base/assert.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/engine/engine_state.h"
#include "shared/model/experts.h"

_Static_assert(sizeof(struct engine_group_words) == ENGINE_GROUP_BYTES, "engine.h says so");

static void tell(struct engine *e, enum engine_group_event_kind kind, uint64_t epoch,
                 const struct err *why)
{
    const struct engine_group_event ev = {
        .kind = kind, .epoch = epoch, .step = e->group.step, .why = why
    };
    e->opt.on_group(e->opt.arg, &ev);
}

/* ---- joining and leaving ---- */

void engine_group_init(struct engine *e)
{
    pthread_mutex_init(&e->group.lock, NULL);
    e->group.words = MEM_ARRAY(struct engine_group_words, EP_RANKS_MAX);
    e->group.sums = MEM_ARRAY(struct engine_rank_sums, EP_RANKS_MAX);
}

/* Gives up what no group uses any more. */
static void discard(struct engine *e, struct ep *ep, struct model_experts *experts)
{
    ep_discard(ep);
    model_experts_drop(e->opt.model, experts);
}

void engine_group_leave(struct engine *e)
{
    struct engine_group *g = &e->group;
    model_set_ep(e->opt.model, NULL, NULL);
    discard(e, g->ep, g->experts);
    discard(e, g->next, g->next_experts);
    g->ep = g->next = NULL;
    g->experts = g->next_experts = NULL;
}

void engine_group_release(struct engine *e)
{
    mem_free(e->group.words);
    mem_free(e->group.sums);
    pthread_mutex_destroy(&e->group.lock);
}

/* Gives up an ep object of which nothing was used. */
static void tell_unused(struct engine *e, uint64_t epoch, const char *text)
{
    struct err why = { 0 };
    err_set(&why, ERR_CANCELED, "%s", text);
    tell(e, ENGINE_GROUP_LOST, epoch, &why);
}

/* Was it given up? Under the lock. */
static bool is_aborted(const struct engine_group *g, uint64_t epoch)
{
    for (uint32_t i = 0; i < ENGINE_ABORTED_MAX && i < g->n_aborted; i++)
        if (g->aborted[i] == epoch || g->aborted[i] == ENGINE_EVERY_EPOCH) return true;
    return false;
}

static bool was_aborted(struct engine_group *g, uint64_t epoch)
{
    pthread_mutex_lock(&g->lock);
    const bool yes = is_aborted(g, epoch);
    pthread_mutex_unlock(&g->lock);
    return yes;
}

/* Makes `ep` the group of the next steps, and gives up the one before. */
static void change(struct engine *e, struct ep *ep, struct model_experts *experts, uint64_t epoch)
{
    struct engine_group *g = &e->group;
    struct ep *was = g->ep;
    struct model_experts *experts_before = g->experts;
    engine_ranks_end(e);
    pthread_mutex_lock(&g->lock);
    g->ep = ep;
    g->experts = experts;
    g->epoch = epoch;
    if (ep && is_aborted(g, epoch)) ep_abort(ep); /* it was given up before it began */
    pthread_mutex_unlock(&g->lock);
    atomic_store_explicit(&e->load.backend, ep ? ep->ops->name : NULL, memory_order_relaxed);
    model_set_ep(e->opt.model, ep, experts);
    ep_free(was);
    model_experts_drop(e->opt.model, experts_before);
}

/* The group that was prepared takes over. The ranks of the old one are all here: freeing it is
 * collective. */
static void switch_to_next(struct engine *e)
{
    struct engine_group *g = &e->group;
    struct ep *next = g->next;
    struct model_experts *experts = g->next_experts;
    g->next = NULL;
    g->next_experts = NULL;
    change(e, next, experts, g->next_epoch);
    g->step = 0;
    g->asleep = false; /* all ranks come to the first agreement by themselves */
    if (!g->ep) tell(e, ENGINE_GROUP_LEFT, g->epoch, NULL);
}

/* The group that was prepared was given up; the one that steps goes on. */
static void drop_next(struct engine *e)
{
    struct engine_group *g = &e->group;
    const uint64_t epoch = g->next_epoch;
    discard(e, g->next, g->next_experts);
    g->next = NULL;
    g->next_experts = NULL;
    g->next_epoch = g->epoch;
    tell_unused(e, epoch, "it was given up before all ranks had it");
}

void engine_group_lose(struct engine *e, const struct err *why)
{
    struct engine_group *g = &e->group;
    if (g->ep && !e->device->is_host) ep_abort(g->ep); /* a GPU may wait for others in it */
    engine_abandon_steps(e);
    change(e, NULL, NULL, g->epoch);
    tell(e, ENGINE_GROUP_LOST, g->epoch, why);
    if (g->next_epoch > g->epoch) switch_to_next(e);
}

static void join(struct engine *e, const struct engine_command *c)
{
    const uint64_t epoch = c->epoch;
    struct engine_group *g = &e->group;
    if (epoch <= g->epoch || epoch <= g->next_epoch) {
        log_warn("group not joined", "epoch=%llu now=%llu next=%llu", (unsigned long long)epoch,
                 (unsigned long long)g->epoch, (unsigned long long)g->next_epoch);
        discard(e, c->ep, c->experts);
        tell_unused(e, epoch, "a group of a later epoch is there already");
        return;
    }
    if (g->next_epoch > g->epoch) drop_next(e);
    g->next = c->ep;
    g->next_experts = c->experts;
    g->next_epoch = epoch;
    g->is_told = false;
    if (!g->ep) switch_to_next(e);
}

void engine_group_command(struct engine *e, const struct engine_command *c)
{
    if (c->kind == ENGINE_COMMAND_JOIN) {
        join(e, c);
        return;
    }
    ASSERT(c->kind == ENGINE_COMMAND_WAKE);
    /* Before engine_group_agree looks why: acquire, as whoever finds it set has written that. */
    (void)atomic_exchange_explicit(&e->is_called, false, memory_order_acq_rel);
}

/* ---- agreement ---- */

/* Do the ranks' words fit together? They always do, unless a rank is wrong about its group. The
 * rows of one are exchanges on all. */
static enum status check_words(const struct engine *e, const struct engine_group_words *mine,
                               struct err *err)
{
    const struct engine_group *g = &e->group;
    const uint64_t most = model_routed_rows_max(e->opt.model, e->opt.max_batched_tokens);
    for (int32_t r = 0; r < g->ep->config.size; r++) {
        const struct engine_group_words *w = &g->words[r];
        if (w->epoch != mine->epoch || w->step != mine->step)
            return err_set(err, ERR_PEER_MISMATCH,
                           "rank %d is at step %llu of epoch %llu, and this one at step %llu of "
                           "epoch %llu",
                           r, (unsigned long long)w->step, (unsigned long long)w->epoch,
                           (unsigned long long)mine->step, (unsigned long long)mine->epoch);
        if (w->n_rows > most)
            return err_set(err, ERR_PEER_MISMATCH,
                           "rank %d has %llu rows for a step, in which there are at most %llu", r,
                           (unsigned long long)w->n_rows, (unsigned long long)most);
        if ((w->n_passes > 0) != (mine->n_passes > 0) || w->n_passes > DRAFT_TOKENS_MAX)
            return err_set(err, ERR_PEER_MISMATCH,
                           "rank %d wants %llu passes of the draft layer, and this one %llu: all "
                           "ranks need the same --speculative-config",
                           r, (unsigned long long)w->n_passes, (unsigned long long)mine->n_passes);
    }
    return OK;
}

static bool all_have_next(const struct engine_group *g)
{
    for (int32_t r = 0; r < g->ep->config.size; r++)
        if (g->words[r].next_epoch != g->next_epoch || g->next_epoch <= g->epoch) return false;
    return true;
}

static uint64_t most_passes(const struct engine_group *g)
{
    uint64_t most = 0;
    for (int32_t r = 0; r < g->ep->config.size; r++)
        if (g->words[r].n_passes > most) most = g->words[r].n_passes;
    return most;
}

static uint64_t most_rows(const struct engine_group *g)
{
    uint64_t most = 0;
    for (int32_t r = 0; r < g->ep->config.size; r++)
        if (g->words[r].n_rows > most) most = g->words[r].n_rows;
    return most;
}

/* A GPU's steps in flight exchange rows through the group that ends. False: it was lost. */
static bool end_steps(struct engine *e)
{
    struct err err = { 0 };
    if (!engine_has_inflight(e) || ep_wait(e->group.ep, &err) == OK) return true;
    engine_group_lose(e, &err);
    return false;
}

/* Did a bell come for the next step? */
static bool is_rung(struct engine_group *g)
{
    pthread_mutex_lock(&g->lock);
    const bool rung = g->rung_epoch == g->epoch && g->rung_step >= g->step;
    pthread_mutex_unlock(&g->lock);
    return rung;
}

/* Should a rank of a sleeping group get up? */
static bool is_called(struct engine_group *g, uint32_t n_rows)
{
    return n_rows > 0 || is_rung(g) || (g->next_epoch > g->epoch && !g->is_told);
}

/* Exchanges words with the other ranks. */
static enum status meet(struct engine *e, uint32_t n_rows, struct err *err)
{
    struct engine_group *g = &e->group;
    struct engine_group_words mine = {
        .epoch = g->epoch,
        .step = g->step,
        .n_rows = model_routed_rows_max(e->opt.model, n_rows),
        .n_passes = e->draft.n_passes,
        .next_epoch = g->next_epoch > g->epoch ? g->next_epoch : g->epoch,
    };
    if (g->asleep && !is_rung(g) && !e->opt.follows) tell(e, ENGINE_GROUP_BELL, g->epoch, NULL);
    g->asleep = false;
    g->is_told = true;
    engine_ranks_say(e, &mine);
    TRY(ep_gather_words(g->ep, g->words, &mine, sizeof mine, err));
    TRY(check_words(e, &mine, err));
    engine_ranks_hear(e);
    return OK;
}

void engine_group_drop_aborted(struct engine *e)
{
    struct engine_group *g = &e->group;
    struct err err = { 0 };
    if (g->next_epoch > g->epoch && was_aborted(g, g->next_epoch)) drop_next(e);
    if (!g->ep || !was_aborted(g, g->epoch)) return;
    err_set(&err, ERR_CANCELED, "the group of epoch %llu was given up",
            (unsigned long long)g->epoch);
    engine_group_lose(e, &err);
}

bool engine_group_is_called(struct engine *e, uint32_t n_rows)
{
    struct engine_group *g = &e->group;
    return g->ep && (!g->asleep || is_called(g, n_rows));
}

enum engine_agreement engine_group_meet(struct engine *e, uint32_t n_rows, uint32_t *most)
{
    struct engine_group *g = &e->group;
    struct err err = { 0 };
    if (meet(e, n_rows, &err) != OK) {
        engine_group_lose(e, &err);
        return ENGINE_AGREED_NOTHING;
    }
    if (g->step++ == 0) tell(e, ENGINE_GROUP_JOINED, g->epoch, NULL);
    if (all_have_next(g)) {
        if (end_steps(e)) switch_to_next(e);
        return ENGINE_AGREED_CHANGE;
    }
    *most = (uint32_t)most_rows(g);
    e->draft.n_passes = (uint32_t)most_passes(g);
    g->asleep = *most == 0;
    return g->asleep ? ENGINE_AGREED_SLEEP : ENGINE_AGREED_STEP;
}

/* Rows that follow a step in flight mean nothing when that is abandoned: they are chosen anew. */
bool engine_group_agree(struct engine *e, uint32_t n_rows, uint32_t *most)
{
    const bool is_ahead = engine_has_inflight(e);
    enum engine_agreement a = ENGINE_AGREED_NOTHING;
    engine_group_drop_aborted(e);
    while (engine_has_inflight(e) == is_ahead && engine_group_is_called(e, n_rows) &&
           a != ENGINE_AGREED_STEP)
        a = engine_group_meet(e, n_rows, most);
    return a == ENGINE_AGREED_STEP && engine_has_inflight(e) == is_ahead;
}

bool engine_group_enter(struct engine *e, uint64_t epoch)
{
    struct engine_group *g = &e->group;
    struct err err = { 0 };
    if (g->ep && g->epoch < epoch && g->next && g->next_epoch == epoch) {
        err_set(&err, ERR_CANCELED, "the node's first rank is in the group of epoch %llu",
                (unsigned long long)epoch);
        engine_group_lose(e, &err);
    }
    return engine_group_is_in(e, epoch);
}

/* ---- any thread ---- */

enum status engine_join_group(struct engine *e, struct ep *ep, struct model_experts *experts,
                              uint64_t epoch)
{
    ASSERT(engine_is_grouped(e));
    ASSERT(!ep || ep->config.words || ep->config.collective_bytes >= ENGINE_GROUP_BYTES);
    const struct engine_command c = {
        .kind = ENGINE_COMMAND_JOIN, .ep = ep, .experts = experts, .epoch = epoch
    };
    return mailbox_post(e->commands, &c);
}

void engine_wake(struct engine *e)
{
    const struct engine_command c = { .kind = ENGINE_COMMAND_WAKE };
    if (atomic_exchange_explicit(&e->is_called, true, memory_order_acq_rel)) return;
    enum status st = mailbox_post(e->commands, &c);
    if (st == ERR_FULL) { /* once more, for whoever has found it set meanwhile */
        atomic_store_explicit(&e->is_called, false, memory_order_release);
        st = mailbox_post(e->commands, &c);
    }
    ASSERT(st == OK || st == ERR_FULL || st == ERR_CANCELED); /* full: it is awake */
}

void engine_bell(struct engine *e, uint64_t epoch, uint64_t step)
{
    struct engine_group *g = &e->group;
    pthread_mutex_lock(&g->lock);
    if (epoch > g->rung_epoch || (epoch == g->rung_epoch && step > g->rung_step)) {
        g->rung_epoch = epoch;
        g->rung_step = step;
    }
    pthread_mutex_unlock(&g->lock);
    engine_wake(e);
}

void engine_abort_group(struct engine *e, uint64_t epoch)
{
    struct engine_group *g = &e->group;
    pthread_mutex_lock(&g->lock);
    if (!is_aborted(g, epoch)) g->aborted[g->n_aborted++ % ENGINE_ABORTED_MAX] = epoch;
    if (g->ep && is_aborted(g, g->epoch)) ep_abort(g->ep);
    pthread_mutex_unlock(&g->lock);
    engine_wake(e);
}
