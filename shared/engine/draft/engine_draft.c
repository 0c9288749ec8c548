/* engine_draft.c - speculative decoding in the engine: the drafts of a step, and what became of
 * them. The tokens themselves are chosen as ever (engine_step.c).
 *
 * Thread: engine. */
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/engine/engine_state.h"

/* Where steps are submitted early, how often a sequence is asked in vain before that goes on
 * without asking it, and how many such steps lie between two in which it is asked again. */
enum { QUIET_MAX = 8, ASK_ALL_EVERY = 32 };

/* ---- life ---- */

enum status engine_draft_init(struct engine *e, struct err *err)
{
    struct engine_draft *d = &e->draft;
    const struct draft_config *c = e->opt.draft;
    if (!c || !c->ops) return OK;
    ASSERT(c->n_tokens >= 1 && c->n_tokens <= DRAFT_TOKENS_MAX);
    d->config = *c;
    e->opt.draft = &d->config;
    d->rates = MEM_ARRAY(struct draft_rate *, e->opt.max_seqs);
    d->seqs = MEM_ARRAY(struct seq *, e->opt.max_seqs);
    d->n_tokens = MEM_ARRAY(uint32_t, e->opt.max_seqs);
    d->n_wanted = MEM_ARRAY(uint32_t, e->opt.max_seqs);
    d->hidden = MEM_ARRAY(struct model_hidden_rows, e->opt.max_seqs);
    d->n_passes = c->ops->observes ? 1 : 0;
    d->requests = MEM_ARRAY(struct draft_request, e->opt.max_seqs);
    d->choices = MEM_ARRAY(struct draft_choice, e->opt.max_seqs);
    return c->ops->create(c, e, &d->drafter, err);
}

void engine_draft_release(struct engine *e)
{
    struct engine_draft *d = &e->draft;
    if (d->drafter) d->config.ops->free(d->drafter);
    mem_free(d->rates);
    mem_free(d->seqs);
    mem_free(d->n_tokens);
    mem_free(d->n_wanted);
    mem_free(d->hidden);
    mem_free(d->requests);
    mem_free(d->choices);
}

void engine_draft_end(struct engine *e, struct seq *s)
{
    if (s->draft) e->draft.config.ops->end(e->draft.drafter, s->draft);
    s->draft = NULL;
}

void engine_draft_tell_lack(struct engine *e)
{
    if (e->opt.model->config.n_draft_layers == 0 || e->draft.has_told_lack) return;
    e->draft.has_told_lack = true;
    log_warn("no drafts for sequences of a peer",
             "why=\"their prefill node has no draft layer: give it the same --speculative-config; "
             "answers are the same\"");
}

/* ---- before a step ---- */

/* The most tokens that it has when steps in flight are complete. */
static uint32_t most_tokens(const struct seq *s) { return s->n_tokens + s->n_future + s->n_maybe; }

/* Drafts that the sequence has room for: behind them comes one more token. */
static uint32_t room_of(const struct engine *e, const struct seq *s)
{
    const uint32_t n = most_tokens(s), most = e->draft.config.n_tokens,
                   left = n < s->n_tokens_max ? s->n_tokens_max - n : 0;
    if (left == 0) return 0;
    return left - 1 < most ? left - 1 : most;
}

/* Its last token is generated, and known, or chosen by the step in flight behind which its drafts
 * are. */
static bool can_have_drafts(const struct engine *e, const struct seq *s)
{
    return !s->prefill_only && s->n_computed >= s->n_prompt && room_of(e, s) > 0;
}

/* Rows that drafts may take. Half of what decodes leave, when prompts need rows as well. */
static uint32_t rows_for_drafts(struct engine *e)
{
    const struct batch *b = engine_batch(e);
    const uint32_t most = b->max_rows < b->max_logits ? b->max_rows : b->max_logits,
                   left = most - b->n_decodes;
    const bool has_prompts = !list_empty(&e->waiting) || e->n_running > b->n_decodes;
    return has_prompts ? left / 2 : left;
}

/* The sequences that may get drafts, and what the drafter is asked. */
static uint32_t make_requests(struct engine *e)
{
    struct engine_draft *d = &e->draft;
    uint32_t n = 0;
    LIST_FOREACH (s, &e->running, struct seq, node) {
        if (!s->in_step || !can_have_drafts(e, s)) continue;
        if (!s->draft) s->draft = d->config.ops->begin(d->drafter, s->n_tokens_max);
        if (!s->draft) continue;
        seq_trim(s, e->pool, e->opt.block_tokens); /* what the draft layer, or a draft, has tried */
        d->rates[n] = &s->draft_rate;
        d->requests[n++] = (struct draft_request){
            .seq = s->draft,
            .of = s,
            .tokens = s->tokens,
            .n_tokens = s->n_tokens,
            .n_max = room_of(e, s),
            .drafts = s->n_future ? s->draft_ids : s->tokens + s->n_tokens,
        };
    }
    return n;
}

/* A block that nobody waits for. */
static bool take_block(struct engine *e, struct seq *s)
{
    return kv_pool_available(e->pool) > e->draft.n_blocks_kept && seq_grow(s, e->pool) == OK;
}

/* Takes blocks for the positions of up to n drafts; returns how many have some. */
static uint32_t take_blocks(struct engine *e, struct seq *s, uint32_t n)
{
    const uint32_t block_tokens = e->opt.block_tokens, n_tokens = most_tokens(s);
    while (s->n_blocks * block_tokens < n_tokens + n)
        if (!take_block(e, s)) return s->n_blocks * block_tokens - n_tokens;
    return n;
}

bool engine_draft_has_block(struct engine *e, struct seq *s, uint32_t pos)
{
    if (pos < s->n_blocks * e->opt.block_tokens) return true;
    return s->n_blocks < s->cap_blocks && take_block(e, s) &&
           pos < s->n_blocks * e->opt.block_tokens;
}

static void keep(struct engine *e, struct seq *s, const struct draft_request *r, uint32_t n,
                 uint32_t *n_left)
{
    if (n > *n_left) n = *n_left;
    s->n_draft = take_blocks(e, s, n);
    if (s->n_draft == 0) seq_trim(s, e->pool, e->opt.block_tokens);
    s->draft_level = r->level;
    *n_left -= s->n_draft;
}

/* Of the choices [n], in a step of n_rows rows without drafts. */
static void choose(struct engine_draft *d, uint32_t n, uint32_t n_rows)
{
    draft_control_choose(&d->control, d->choices, n, n_rows);
    for (uint32_t i = 0; i < n; i++) {
        struct draft_choice *c = &d->choices[i];
        if (d->config.verify_all) c->n = c->n_max;
        if (c->n == 0 && c->n_max > 0) c->n = draft_control_tries(&d->control, d->rates[i], n_rows);
    }
}

void engine_draft_propose(struct engine *e)
{
    struct engine_draft *d = &e->draft;
    if (!d->drafter || (engine_has_inflight(e) && !e->inflight[e->parity ^ 1].drafted)) return;
    const uint32_t n = make_requests(e), n_rows = engine_batch(e)->n_decodes;
    uint32_t n_left = rows_for_drafts(e);
    d->n_blocks_kept = batch_next_blocks(e); /* from passes behind the step, too */
    if (n == 0) return;
    d->config.ops->propose(d->drafter, d->requests, n);
    for (uint32_t i = 0; i < n; i++)
        d->choices[i] = (struct draft_choice){
            .chance = draft_control_chance(&d->control, d->rates[i], d->requests[i].level),
            .n_max = d->requests[i].n,
        };
    const bool is_chosen = d->config.ops->chooses;
    if (!is_chosen) choose(d, n, n_rows);
    for (uint32_t i = 0; i < n; i++) {
        const struct draft_request *r = &d->requests[i];
        keep(e, r->of, r, is_chosen ? r->n : d->choices[i].n, &n_left);
        r->of->draft_rate.n_quiet++;
    }
}

/* Does a sequence that runs come with a hidden state, behind which its first drafts are? */
static bool has_hidden(const struct engine *e)
{
    LIST_FOREACH (s, &e->running, struct seq, node)
        if (s->hidden && !s->prefill_only) return true;
    return false;
}

/* Sequences that drafted nothing of late are asked now and then, all in the same step. */
bool engine_draft_is_wanted(struct engine *e)
{
    struct engine_draft *d = &e->draft;
    if (!d->drafter) return false;
    if (d->config.ops->observes) return !e->inflight[e->parity].drafted || has_hidden(e);
    const bool asks_all = ++d->n_ahead % ASK_ALL_EVERY == 0;
    LIST_FOREACH (s, &e->running, struct seq, node)
        if (!s->prefill_only && s->n_tokens + s->n_future + 1 < s->n_tokens_max &&
            (asks_all || s->draft_rate.n_quiet < QUIET_MAX))
            return true;
    return false;
}

/* Of the sequences that choose a token in the step and go on here. */
static uint32_t list_choosers(struct engine *e, struct seq **seqs, uint32_t *n_tokens)
{
    const struct batch *b = engine_batch(e);
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->n_chunks; i++) {
        const struct batch_chunk *c = &b->chunks[i];
        const uint32_t n_before = c->seq->n_tokens + c->seq->n_future;
        if (c->end - c->n_draft != n_before || !seq_wants_token(c->seq) || c->seq->prefill_only ||
            c->seq->lacks_draft_kv)
            continue;
        seqs[n] = c->seq;
        n_tokens[n++] = n_before + 1;
    }
    return n;
}

void engine_draft_plan(struct engine *e)
{
    struct engine_draft *d = &e->draft;
    struct batch *b = engine_batch(e);
    if (!d->drafter || !d->config.ops->observes) return;
    const uint32_t n = list_choosers(e, d->seqs, d->n_tokens);
    d->n_passes = 1;
    engine_draft_want(e, d->seqs, d->n_tokens, n, d->n_wanted);
    for (uint32_t i = 0, k = 0; i < b->n_chunks && k < n; i++) {
        if (b->chunks[i].seq != d->seqs[k]) continue;
        b->chunks[i].n_wanted = d->n_wanted[k++];
        if (b->chunks[i].n_wanted > d->n_passes) d->n_passes = b->chunks[i].n_wanted;
    }
}

uint32_t engine_draft_pass_rows(const struct engine *e)
{
    const size_t most = model_routed_rows_max(e->opt.model, MODEL_DRAFT_ROWS_MAX);
    return e->draft.group_rows < most ? e->draft.group_rows : (uint32_t)most;
}

uint32_t engine_draft_want(struct engine *e, struct seq *const *seqs, const uint32_t *n_tokens,
                           uint32_t n, uint32_t *n_wanted)
{
    struct engine_draft *d = &e->draft;
    uint32_t n_all = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t left = seqs[i]->n_tokens_max - n_tokens[i], most = d->config.n_tokens;
        d->rates[i] = &seqs[i]->draft_rate;
        d->choices[i] = (struct draft_choice){
            .chance = draft_control_chance(&d->control, &seqs[i]->draft_rate, 0),
            .n_max = left == 0         ? 0
                     : left - 1 < most ? left - 1
                                       : most,
        };
    }
    if (n > 0) choose(d, n, n);
    for (uint32_t i = 0; i < n; i++) n_all += n_wanted[i] = d->choices[i].n;
    return n_all;
}

/* ---- after it ---- */

uint32_t engine_draft_n_right(const struct seq *s, const struct token_logprobs *chosen, uint32_t n)
{
    uint32_t n_right = 0;
    while (n_right < n && chosen[n_right].id == s->tokens[s->n_tokens + n_right]) n_right++;
    return n_right;
}

/* Their KV of the draft layer has not left for their peers, and cannot be made any more. */
static void end_prompts(struct engine *e, struct batch *b)
{
    for (uint32_t i = 0; i < b->n_chunks; i++) {
        struct seq *s = b->chunks[i].seq;
        if (!s || !s->prefill_only) continue;
        b->chunks[i].seq = NULL;
        for (uint32_t k = 0; k < b->n_logits; k++)
            if (b->logits[k].seq == s) b->logits[k].seq = NULL;
        engine_finish(e, s, ERR_PEER_LOST, FINISH_ERROR, -1);
    }
}

bool engine_draft_submit(struct engine *e)
{
    const struct drafter_ops *ops = e->draft.config.ops;
    return e->draft.drafter && ops->submit(e->draft.drafter, engine_batch(e));
}

bool engine_draft_observe(struct engine *e, struct batch *b)
{
    struct engine_draft *d = &e->draft;
    d->observe_ns = 0;
    if (!d->drafter || !d->config.ops->observes) return true;
    const uint64_t t0 = clock_ns();
    if (e->inflight[b - e->batches].drafted) d->config.ops->collect(d->drafter, b, e->fetched);
    else d->config.ops->observe(d->drafter, b, e->fetched);
    d->observe_ns = clock_ns() - t0;
    if (e->opt.model->exchange_fault.code == OK && e->node.fault.code == OK) return true;
    end_prompts(e, b);
    return false;
}

void engine_draft_count(struct engine *e, struct seq *s, uint32_t n, uint32_t n_accepted)
{
    struct engine_draft *d = &e->draft;
    struct engine_metrics *m = &e->metrics;
    s->n_verified++;
    s->n_drafted += n;
    s->n_accepted += n_accepted;
    draft_control_count(&d->control, &s->draft_rate, s->draft_level, n, n_accepted);
    counter_add(m->drafts, 1);
    counter_add(m->draft_tokens, n);
    counter_add(m->accepted, n_accepted);
    for (uint32_t i = 0; i < n_accepted; i++) counter_add(m->accepted_at[i], 1);
    gauge_set(m->accepted_length,
              1 + (double)counter_value(m->accepted) / (double)counter_value(m->drafts));
}

void engine_draft_count_step(struct engine *e, const struct attn_seq *seqs, uint32_t n_seqs,
                             uint64_t ns)
{
    const struct pace_load l = pace_load_of(seqs, n_seqs);
    if (!e->draft.drafter || l.prompt_rows > 0) return;
    const uint64_t drafting = e->draft.observe_ns < ns ? e->draft.observe_ns : ns;
    draft_control_count_step(&e->draft.control, (uint32_t)l.decode_rows,
                             (double)(ns - drafting) * 1e-9);
}
