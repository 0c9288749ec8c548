/* engine_follow.c - steps of a tensor-parallel node: the first rank plans them, all take them.
 *
 *     leader:   batch ── plan ──▶ [agreement of the group, verdict] ── step ── [verdict] ── tokens
 *     follower:          plan ──▶ [agreement of the group, verdict] ── step ── [verdict]
 *
 * Passes of the draft layer follow their step, each with a plan of its own, without agreement.
 * Plans travel through the node's ep object, usually in one message: each plan says how long the
 * next one's first message is. A plan without a step puts the node to sleep; the next one comes
 * after a bell. With a group, the brackets: ranks may see the group fail at different moments. What
 * did not go well for all of them counts for none, and every rank of the node leaves the group.
 * Before its first step they ask each other whether all are in it. When it fails in a step, the
 * node's gathers are made to the end (decoder_goes_on), so that all make the same calls.
 *
 * Thread: engine, where it is not said otherwise. */
#include <string.h>

#include "shared/base/arith.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/engine/engine_state.h"

enum {
    FIRST_WORDS = 128 /* of the first plan's first message */,
    SPARE_WORDS = 64,
    AGREEMENT_BITS = 2 /* of enum engine_agreement */
};

/* ---- life ---- */

static struct step_plan_limits limits_of(const struct engine *e)
{
    return (struct step_plan_limits){
        .model_fingerprint = e->layout.model_fingerprint,
        .max_rows = e->opt.max_batched_tokens,
        .max_seqs = e->opt.max_seqs,
        .max_logits = engine_max_logits(e->opt.max_seqs),
        .max_len = e->limits.max_len,
        .block_tokens = e->opt.block_tokens,
        .n_blocks = e->opt.n_blocks,
        .max_draft_rows = e->opt.model->max_draft_rows,
    };
}

void engine_node_init(struct engine *e)
{
    struct engine_node *n = &e->node;
    const struct step_plan_limits l = limits_of(e);
    n->max_words = (uint32_t)step_plan_max_words(&l);
    n->first_words = (uint32_t)min_size(FIRST_WORDS, n->max_words);
    n->plan = MEM_ARRAY(uint64_t, n->max_words / 2 + 1);
    n->asleep = true;
}

void engine_node_release(struct engine *e)
{
    mem_free(e->node.plan);
    pthread_mutex_destroy(&e->node.lock);
}

void engine_node_leave(struct engine *e)
{
    if (!e->node.ep) return;
    model_set_gather(e->opt.model, NULL);
    ep_discard(e->node.ep);
    e->node.ep = NULL;
}

size_t engine_node_needs(const struct engine *e, struct ep_config *c)
{
    const struct step_plan_limits l = limits_of(e);
    const size_t gather = model_gather_bytes(e->opt.model),
                 words = max_size(step_plan_max_words(&l) * sizeof(uint32_t), EP_WORDS_BYTES);
    c->mode = e->device->is_host ? EP_THROUGHPUT : EP_LOW_LATENCY;
    c->collective_bytes = e->device->is_host ? max_size(gather, words) : gather;
    c->placement.n_logical = 0;
    c->progress = (uint64_t *)&e->load.n_waits;
    return words;
}

static enum status gather_columns(void *arg, float *y, size_t y_stride, const float *mine,
                                  size_t mine_stride, size_t n_rows, const size_t *first,
                                  struct err *err)
{
    return ep_gather_columns(arg, y, y_stride, mine, mine_stride, n_rows, first, err);
}

void engine_node_command(struct engine *e, const struct engine_command *c)
{
    struct engine_node *n = &e->node;
    const struct model_gather g = { .arg = c->ep,
                                    .ep = e->device->is_host ? NULL : c->ep,
                                    .columns = gather_columns };
    ASSERT(!n->ep);
    pthread_mutex_lock(&n->lock);
    n->ep = c->ep;
    if (n->aborted) ep_abort(n->ep);
    pthread_mutex_unlock(&n->lock);
    model_set_gather(e->opt.model, &g);
}

/* The node cannot go on; engine_main ends the engine, and tells its owner why, who knows whether
 * the ranks were to part. */
static void lose_node(struct engine *e, const struct err *why)
{
    struct engine_node *n = &e->node;
    n->fault = *why;
    if (n->ep) ep_abort(n->ep);
    if (engine_is_grouped(e) && e->group.ep) engine_group_lose(e, why);
}

/* Can plans be exchanged? */
static bool is_there(struct engine *e)
{
    struct engine_node *n = &e->node;
    struct err why = { 0 };
    pthread_mutex_lock(&n->lock);
    const bool aborted = n->aborted;
    pthread_mutex_unlock(&n->lock);
    if (aborted && n->fault.code == OK) {
        err_set(&why, ERR_PEER_LOST, "another rank of this node was lost");
        lose_node(e, &why);
    }
    return n->ep && n->fault.code == OK;
}

/* Did a bell come for the next plan? */
static bool is_rung(struct engine_node *n)
{
    pthread_mutex_lock(&n->lock);
    const bool rung = n->rung > n->step;
    pthread_mutex_unlock(&n->lock);
    return rung;
}

/* ---- exchanges ---- */

/* Words [at, at + n) of the plan, from the leader to all. */
static enum status pass_words(struct engine_node *n, size_t at, size_t n_words, struct err *err)
{
    size_t first[EP_RANKS_MAX + 1] = { 0 };
    float *words = (float *)(void *)n->plan + at;
    for (int32_t r = 1; r <= n->ep->config.size; r++) first[r] = n_words;
    return ep_gather_columns(ep_of_hosts(n->ep), words, n_words, words, n_words, 1, first, err);
}

/* What each rank of the node says; false: the node is lost. all [size]. */
static bool ask_all(struct engine *e, uint32_t mine, uint32_t *all)
{
    struct err err = { 0 };
    if (ep_gather_words(e->node.ep, all, &mine, sizeof mine, &err) == OK) return true;
    lose_node(e, &err);
    return false;
}

static bool are_all(const struct engine *e, const uint32_t *all, uint32_t want)
{
    for (int32_t r = 0; r < e->node.ep->config.size; r++)
        if (all[r] != want) return false;
    return true;
}

/* ---- with a group ---- */

/* A rank of the node is not in the group of `epoch` any more, or never was. */
static void leave_group(struct engine *e, uint64_t epoch)
{
    struct err why = { 0 };
    if (!e->group.ep || e->group.epoch > epoch) return;
    err_set(&why, ERR_PEER_LOST, "another rank of this node is not in the group of epoch %llu",
            (unsigned long long)epoch);
    engine_group_lose(e, &why);
}

enum presence { NOT_YET, IN, GONE };

static enum presence presence_in(struct engine *e, uint64_t epoch)
{
    if (engine_group_enter(e, epoch)) return IN;
    return e->group.epoch < epoch ? NOT_YET : GONE;
}

/* Are all ranks of the node in the group whose first step is planned? */
static bool all_are_in(struct engine *e, uint64_t epoch)
{
    struct engine_node *n = &e->node;
    uint32_t all[EP_RANKS_MAX];
    const enum presence mine = presence_in(e, epoch);
    if (mine != NOT_YET) n->ready_epoch = epoch;
    if (!ask_all(e, mine, all)) return false;
    for (int32_t r = 0; r < n->ep->config.size; r++)
        if (all[r] == GONE) leave_group(e, epoch);
    const bool all_in = are_all(e, all, IN);
    n->held_epoch = all_in ? 0 : epoch;
    return all_in;
}

/* Has this rank lost a group of which the node's other ranks may not know? */
static bool has_lost_one(const struct engine *e)
{
    return engine_is_grouped(e) && !e->group.ep && e->group.epoch > e->node.lost_epoch;
}

/* All ranks replay captured steps if they have captured the same. */
static void choose_replay(struct engine *e, const uint32_t *captured)
{
    struct engine_node *n = &e->node;
    const bool is_eager = !are_all(e, captured, captured[0]);
    if (is_eager && !n->is_eager)
        log_warn("steps are launched kernel by kernel",
                 "why=\"this rank of the node has captured %u steps, and rank 0 %u\"",
                 captured[e->node.ep->config.rank], captured[0]);
    n->is_eager = is_eager;
}

/* Agrees with the group on the step of a plan, and with the node's ranks on what came of it. */
static bool agree(struct engine *e, const struct step_plan_head *h, uint32_t *group_rows)
{
    enum engine_agreement mine = ENGINE_AGREED_NOTHING;
    uint32_t all[EP_RANKS_MAX], captured[EP_RANKS_MAX];
    if (engine_group_is_in(e, h->epoch)) mine = engine_group_meet(e, h->n_rows, group_rows);
    if (!ask_all(e, e->opt.model->n_captured << AGREEMENT_BITS | mine, all)) return false;
    for (int32_t r = 0; r < e->node.ep->config.size; r++) {
        captured[r] = all[r] >> AGREEMENT_BITS;
        all[r] &= (1u << AGREEMENT_BITS) - 1;
    }
    choose_replay(e, captured);
    if (!are_all(e, all, mine)) leave_group(e, h->epoch);
    return are_all(e, all, ENGINE_AGREED_STEP);
}

/* Both sides, once they have a plan: is its step taken? If not, all sleep. */
static bool take_part(struct engine *e, uint32_t *group_rows)
{
    struct engine_node *n = &e->node;
    const struct step_plan_head h = *step_plan_at(n->plan).head;
    n->asleep = !h.is_step;
    if (!h.is_step && engine_is_grouped(e)) leave_group(e, h.epoch);
    if (!h.is_step || !h.epoch) return h.is_step;
    const bool takes = (!h.is_first || all_are_in(e, h.epoch)) && agree(e, &h, group_rows);
    n->asleep = !takes;
    return takes;
}

/* Did all ranks of the node divide as many rows among them? all: they, shifted by one bit. */
static bool divided_alike(struct engine *e, const uint32_t *all)
{
    const uint32_t mine = e->opt.model->n_step_rows;
    struct err why = { 0 };
    for (int32_t r = 0; r < e->node.ep->config.size && why.code == OK; r++)
        if (all[r] >> 1 != mine)
            err_set(&why, ERR_INTERNAL,
                    "rank %d of this node computed a step of %u rows, and this one of %u", r,
                    all[r] >> 1, mine);
    if (why.code != OK) lose_node(e, &why);
    return why.code == OK;
}

bool engine_node_settle(struct engine *e, uint32_t n_rows)
{
    struct model *m = e->opt.model;
    const uint32_t mine = m->n_step_rows << 1, lost = mine | 1;
    uint32_t all[EP_RANKS_MAX];
    if (m->gather_fault.code != OK) {
        lose_node(e, &m->gather_fault);
        return false;
    }
    if (!engine_is_grouped(e) || n_rows == 0) return true;
    if (!ask_all(e, m->exchange_fault.code != OK ? lost : mine, all)) return false;
    if (!divided_alike(e, all)) return false;
    if (!are_all(e, all, mine) && m->exchange_fault.code == OK)
        err_set(&m->exchange_fault, ERR_PEER_LOST, "another rank of this node lost the group");
    return true;
}

/* ---- leader ---- */

/* Should the ranks of the node take a step? */
static bool wants_step(struct engine *e)
{
    struct engine_node *n = &e->node;
    const uint32_t n_rows = engine_batch(e)->n_rows;
    if (!engine_is_grouped(e)) return n_rows > 0;
    engine_group_drop_aborted(e);
    if (!e->group.ep) return false;
    if (is_rung(n)) return true;
    return e->group.epoch != n->held_epoch && engine_group_is_called(e, n_rows);
}

/* Writes the plan of the batch; takes_step false: of none. */
static void write_plan(struct engine *e, bool takes_step)
{
    struct engine_node *n = &e->node;
    const struct step_plan_limits l = limits_of(e);
    step_plan_write(n->plan, &l, takes_step ? engine_batch(e) : NULL);
    struct step_plan_head *h = step_plan_at(n->plan).head;
    h->is_step = takes_step;
    if (!engine_is_grouped(e)) return;
    if (!e->group.ep) n->lost_epoch = e->group.epoch;
    h->epoch = takes_step || !e->group.ep ? e->group.epoch : 0;
    h->is_first = e->group.step == 0;
}

/* Sends the plan that was written. */
static bool send_words(struct engine *e)
{
    struct engine_node *n = &e->node;
    const size_t at = n->first_words;
    struct err err = { 0 };
    struct step_plan_head *h = step_plan_at(n->plan).head;
    h->step = n->step;
    h->next_words = (uint32_t)min_size(h->n_words + h->n_words / 8 + SPARE_WORDS, n->max_words);
    if (!h->is_step && !h->is_pass) h->next_words = n->first_words;
    ASSERT(h->n_words <= n->max_words);
    enum status st = pass_words(n, 0, at, &err);
    if (st == OK && h->n_words > at) st = pass_words(n, at, h->n_words - at, &err);
    if (st != OK) {
        lose_node(e, &err);
        return false;
    }
    n->step++;
    n->first_words = h->next_words;
    return true;
}

static bool send_plan(struct engine *e, bool takes_step)
{
    if (e->node.asleep) e->opt.on_node_bell(e->opt.arg, e->node.step);
    write_plan(e, takes_step);
    return send_words(e);
}

bool engine_lead_step(struct engine *e, uint32_t *group_rows)
{
    const struct engine_node *n = &e->node;
    while (is_there(e)) {
        const bool wants = wants_step(e);
        if (!wants && n->asleep && !has_lost_one(e)) return false;
        if (send_plan(e, wants) && take_part(e, group_rows)) return true;
    }
    return false;
}

bool engine_lead_pass(struct engine *e, const struct model_draft *pass,
                      const struct step_plan_announced *announced, uint32_t n_announced)
{
    struct engine_node *n = &e->node;
    const struct step_plan_limits l = limits_of(e);
    if (!is_there(e)) return false;
    step_plan_write_pass(n->plan, &l, pass, announced, n_announced);
    if (engine_is_grouped(e)) step_plan_at(n->plan).head->epoch = e->group.epoch;
    return send_words(e);
}

/* ---- follower ---- */

static enum status receive_plan(struct engine *e, struct err *err)
{
    struct engine_node *n = &e->node;
    const struct step_plan_limits l = limits_of(e);
    const size_t at = n->first_words;
    TRY(pass_words(n, 0, at, err));
    const struct step_plan_head *h = step_plan_at(n->plan).head;
    TRY(step_plan_check_head(h, &l, err));
    if (h->step != n->step || h->next_words < STEP_PLAN_HEAD_WORDS || h->next_words > n->max_words)
        return err_set(err, ERR_INTERNAL, "plan %llu came in place of plan %llu",
                       (unsigned long long)h->step, (unsigned long long)n->step);
    if (h->n_words > at) TRY(pass_words(n, at, h->n_words - at, err));
    const struct step_plan p = step_plan_at(n->plan);
    TRY(step_plan_check(&p, e->limits.n_vocab, err));
    n->step++;
    n->first_words = h->next_words;
    return OK;
}

static void announce(const struct engine *e, const struct step_plan *p,
                     const struct step_plan_announced *a, uint32_t layer, uint32_t begin,
                     uint32_t end, uint64_t event)
{
    if (begin == end || !e->opt.on_kv_ready) return;
    e->opt.on_kv_ready(e->opt.arg, a->id, layer, begin, end, p->blocks + a->table, event);
}

static void announce_cached(const struct engine *e, const struct step_plan *p)
{
    for (uint32_t i = 0; i < p->head->n_announced; i++)
        for (uint32_t layer = 0; layer < e->layout.n_layers; layer++)
            announce(e, p, &p->announced[i], layer, p->announced[i].told, p->announced[i].begin, 0);
}

static void on_layer(void *arg, uint32_t layer)
{
    struct engine *e = arg;
    const struct step_plan p = step_plan_at(e->node.plan);
    const uint64_t event = p.head->n_announced > 0 ? device_record_event(e->device) : 0;
    atomic_fetch_add_explicit(&e->load.n_progress, 1, memory_order_relaxed);
    for (uint32_t i = 0; i < p.head->n_announced; i++)
        announce(e, &p, &p.announced[i], layer, p.announced[i].begin, p.announced[i].end, event);
}

/* Fills in the batch's attention sequences and positions. */
static void read_seqs(const struct step_plan *p, struct batch *b)
{
    uint32_t row = 0;
    for (uint32_t i = 0; i < p->head->n_seqs; i++) {
        const struct step_plan_seq *s = &p->seqs[i];
        b->seqs[i] = (struct attn_seq){
            .q_begin = (int32_t)row,
            .n_q = (int32_t)s->n_q,
            .pos_begin = (int32_t)s->pos_begin,
            .block_table = p->blocks + s->table,
            .is_decode = s->is_decode != 0,
        };
        for (uint32_t j = 0; j < s->n_q; j++) b->pos[row++] = (int32_t)(s->pos_begin + j);
    }
}

static struct model_batch batch_of_plan(struct engine *e, const struct step_plan *p, bool eager,
                                        uint32_t group_rows)
{
    const struct batch *b = engine_batch(e);
    return (struct model_batch){
        .n_rows = (int32_t)p->head->n_rows,
        .ids = p->ids,
        .pos = b->pos,
        .seqs = b->seqs,
        .n_seqs = (int32_t)p->head->n_seqs,
        .logit_rows = p->logit_rows,
        .n_logits = (int32_t)p->head->n_logits,
        .logits = e->device->is_host ? e->logits : NULL,
        .kv = e->kv.ptr,
        .block_tokens = e->opt.block_tokens,
        .n_blocks = e->layout.n_blocks,
        .on_layer = on_layer,
        .on_layer_arg = e,
        .eager = eager,
        .group_rows = group_rows,
    };
}

static void run_plan(struct engine *e, uint32_t group_rows)
{
    const struct step_plan p = step_plan_at(e->node.plan);
    struct batch *b = engine_batch(e);
    const bool eager = e->node.is_eager || p.head->n_announced > 0;
    const struct model_batch mb = batch_of_plan(e, &p, eager, group_rows);
    read_seqs(&p, b);
    announce_cached(e, &p);
    const struct kernel_ctx *k = e->opt.model->kernels;
    const uint64_t n_graph_steps = k->n_graph_steps[KERNEL_STEP];
    const bool sampled = model_submit(e->opt.model, &mb);
    ASSERT(!sampled);
    if (!engine_node_settle(e, p.head->n_rows)) return;
    const struct err why = e->opt.model->exchange_fault;
    if (why.code != OK) {
        engine_group_lose(e, &why);
        return;
    }
    counter_add(e->metrics.steps, 1);
    counter_add(e->metrics.graph_steps, k->n_graph_steps[KERNEL_STEP] - n_graph_steps);
    atomic_fetch_add_explicit(&e->load.n_steps, 1, memory_order_relaxed);
}

/* Is this rank in the group of a pass? It may have left it in one before that had no rows of this
 * node, so that nobody asked; the ones that follow have none either. */
static bool is_in_pass(struct engine *e, const struct step_plan_head *h)
{
    struct err err = { 0 };
    if (!engine_is_grouped(e) || engine_group_is_in(e, h->epoch)) return true;
    if (h->n_rows == 0) return false;
    err_set(&err, ERR_INTERNAL,
            "a pass of %u rows is of the group of epoch %llu, and this rank not", h->n_rows,
            (unsigned long long)h->epoch);
    lose_node(e, &err);
    return false;
}

/* A pass of the draft layer, behind the step that this rank took last. */
static void run_pass(struct engine *e)
{
    const struct step_plan p = step_plan_at(e->node.plan);
    if (!is_in_pass(e, p.head)) return;
    struct batch *b = engine_batch(e);
    struct model_hidden_rows *hidden = e->draft.hidden;
    for (uint32_t i = 0; i < p.head->n_hidden; i++)
        hidden[i] = (struct model_hidden_rows){ .first = p.hidden[i].first, .n = p.hidden[i].n };
    const struct model_draft pass = {
        .batch = batch_of_plan(e, &p, true, engine_draft_pass_rows(e)),
        .hidden = hidden,
        .n_hidden = p.head->n_hidden,
        .chained = p.head->is_pass == STEP_PLAN_CHAINED_PASS,
    };
    read_seqs(&p, b);
    const bool sampled = model_submit_draft(e->opt.model, &pass);
    ASSERT(!sampled);
    if (!engine_node_settle(e, p.head->n_rows)) return;
    const struct err why = e->opt.model->exchange_fault;
    if (why.code != OK) engine_group_lose(e, &why);
}

/* Asks the leader for a step in which the others learn which group this rank was given, or has
 * lost. */
static void call_leader(struct engine *e)
{
    struct engine_node *n = &e->node;
    const struct engine_group *g = &e->group;
    if (!engine_is_grouped(e) || n->called > n->step) return;
    const bool is_new = g->step == 0 && n->ready_epoch < g->epoch,
               has_next = g->ep && g->next_epoch > g->epoch && !g->is_told;
    if (!is_new && !has_next && !has_lost_one(e)) return;
    if (!g->ep) n->lost_epoch = g->epoch;
    n->called = n->step + 1;
    e->opt.on_node_bell(e->opt.arg, n->step);
}

bool engine_follow_step(struct engine *e)
{
    struct engine_node *n = &e->node;
    struct err err = { 0 };
    uint32_t group_rows = 0;
    if (!is_there(e)) return false;
    if (n->asleep && engine_is_grouped(e)) engine_group_drop_aborted(e);
    if (n->asleep && !is_rung(n)) {
        call_leader(e);
        return false;
    }
    if (receive_plan(e, &err) != OK) {
        lose_node(e, &err);
        return false;
    }
    if (step_plan_at(n->plan).head->is_pass) {
        run_pass(e);
        return true;
    }
    /* not before: a step and its passes are of one group */
    if (engine_is_grouped(e)) engine_group_drop_aborted(e);
    if (take_part(e, &group_rows)) {
        e->draft.group_rows = group_rows;
        const uint64_t begin_ns = clock_ns();
        run_plan(e, group_rows);
        engine_pace_step(e, begin_ns, engine_batch(e)->seqs, step_plan_at(n->plan).head->n_seqs);
    }
    return true;
}

/* ---- any thread ---- */

enum status engine_set_node(struct engine *e, struct ep *ep)
{
    struct ep_config c = { 0 };
    const size_t words = engine_node_needs(e, &c);
    ASSERT(engine_is_node(e) && ep->config.collective_bytes >= c.collective_bytes);
    ASSERT(ep_of_hosts(ep)->config.collective_bytes >= words);
    ASSERT((uint32_t)ep->config.size == e->opt.model->share.tp_size &&
           (uint32_t)ep->config.rank == e->opt.model->share.tp_rank);
    return mailbox_post(e->commands,
                        &(struct engine_command){ .kind = ENGINE_COMMAND_NODE, .ep = ep });
}

void engine_node_bell(struct engine *e, uint64_t step)
{
    struct engine_node *n = &e->node;
    pthread_mutex_lock(&n->lock);
    if (step >= n->rung) n->rung = step + 1;
    pthread_mutex_unlock(&n->lock);
    engine_wake(e);
}

void engine_abort_node(struct engine *e)
{
    struct engine_node *n = &e->node;
    pthread_mutex_lock(&n->lock);
    n->aborted = true;
    if (n->ep) ep_abort(n->ep);
    pthread_mutex_unlock(&n->lock);
    engine_wake(e);
}
