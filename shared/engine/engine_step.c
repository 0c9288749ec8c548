/* engine_step.c - one step: forward pass, tokens out, sequences ended.
 *
 * The order after the pass matters: first every part's new positions count as computed and full blocks are offered to the
 * prefix cache, then the logits are used, because a token may end its sequence and free it.
 * Thread: engine. */
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/engine/engine_state.h"

void engine_emit(struct engine *e, const struct engine_event *ev)
{
    e->opt.on_event(e->opt.arg, ev);
}

/* ---- leaving ---- */

void engine_unlist(struct engine *e, struct seq *s)
{
    list_remove(&s->node);
    if (s->state == SEQ_WAITING) atomic_fetch_sub_explicit(&e->load.n_waiting, 1, memory_order_relaxed);
    if (s->state == SEQ_RUNNING) e->n_running--;
    if (s->state == SEQ_RESERVED) e->n_reserved--;
}

void engine_forget(struct engine *e, struct seq *s)
{
    engine_unlist(e, s);
    engine_set_owed(e, s, 0);
    seq_drop_blocks(s, e->pool);
    void *was = map_del(&e->seqs, map_key_u64(&s->id));
    ASSERT(was == s);
    seq_free(s);
}

/* Time in each stage; a stage that never began is 0, and so is what comes after it. */
static void fill_times(const struct seq *s, struct engine_event *ev)
{
    uint64_t now = clock_ns();
    uint64_t start = s->t_start_ns ? s->t_start_ns : now;
    uint64_t first = s->t_first_ns ? s->t_first_ns : now;
    ev->queue_ns = start - s->t_submit_ns;
    ev->prefill_ns = first - start;
    ev->decode_ns = now - first;
}

void engine_finish(struct engine *e, struct seq *s, enum status status, enum finish_reason why, int32_t stop_token)
{
    struct engine_event ev = {
        .kind = ENGINE_FINISHED,
        .id = s->id,
        .status = status,
        .finish = why,
        .stop_token = stop_token,
        .n_cached = s->n_cached,
        .n_recomputed = s->n_recomputed,
    };
    fill_times(s, &ev);
    if (s->prefill_only) {
        engine_unlist(e, s);
        engine_set_owed(e, s, 0);
        s->state = SEQ_HELD;
    } else {
        engine_forget(e, s);
    }
    engine_emit(e, &ev);
}

/* ---- tokens ---- */

static bool is_one_of(int32_t id, const int32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id) return true;
    return false;
}

static bool is_stop(const struct engine *e, const struct seq *s, int32_t id)
{
    const struct model_config *c = &e->opt.model->config;
    if (!s->sampling.ignore_eos && is_one_of(id, c->eos, c->n_eos)) return true;
    return is_one_of(id, s->sampling.stop_ids, s->sampling.n_stop_ids);
}

void engine_take_token(struct engine *e, struct seq *s, const struct token_logprobs *lp)
{
    struct engine_event ev = { .kind = ENGINE_TOKEN, .id = s->id, .stop_token = -1, .index = seq_n_out(s), .lp = *lp };
    ASSERT(seq_wants_token(s));
    s->tokens[s->n_tokens++] = lp->id;
    if (!s->t_first_ns) s->t_first_ns = clock_ns();
    counter_add(e->meters.generated, 1);
    /* The node that decodes decides what the first token means. */
    bool stops = !s->prefill_only && is_stop(e, s, lp->id);
    bool full = !s->prefill_only && !seq_wants_token(s);
    ev.lp.ends = stops ? FINISH_STOP : full ? FINISH_LENGTH : FINISH_NONE;
    engine_emit(e, &ev);
    if (s->prefill_only) engine_finish(e, s, OK, FINISH_PREFILLED, -1);
    else if (ev.lp.ends != FINISH_NONE) engine_finish(e, s, OK, ev.lp.ends, stops ? lp->id : -1);
}

static void fill_row(const struct engine *e, struct sampler_row *row, uint32_t i)
{
    const struct model_config *c = &e->opt.model->config;
    const struct batch_logit *l = &e->batch.logits[i];
    const struct seq *s = l->seq;
    row->score = l->sample ? -1 : s->tokens[l->pos + 1];
    row->in = (struct sampler_input){
        .logits = e->logits + (size_t)i * e->limits.n_vocab,
        .lse = e->lse[i],
        .params = &s->sampling,
        .tokens = s->tokens,
        .n_tokens = s->n_tokens,
        .n_prompt = s->n_prompt,
        .eos = c->eos,
        .n_eos = c->n_eos,
    };
}

static void score_prompt(struct engine *e, struct seq *s, uint32_t pos, const struct token_logprobs *lp)
{
    struct engine_event ev = { .kind = ENGINE_PROMPT_LOGPROB, .id = s->id, .stop_token = -1, .index = pos + 1, .lp = *lp };
    s->lp_next = pos + 2;
    engine_emit(e, &ev);
}

/* ---- the step ---- */

static void on_layer(void *arg, uint32_t layer)
{
    struct engine *e = arg;
    atomic_fetch_add_explicit(&e->load.n_progress, 1, memory_order_relaxed);
    if (!e->opt.on_kv_ready) return;
    for (uint32_t i = 0; i < e->batch.n_parts; i++) {
        const struct batch_part *p = &e->batch.parts[i];
        if (p->seq->prefill_only) e->opt.on_kv_ready(e->opt.arg, p->seq->id, layer, p->begin, p->end, p->seq->blocks);
    }
}

static bool has_prefill_only(const struct batch *b)
{
    for (uint32_t i = 0; i < b->n_parts; i++)
        if (b->parts[i].seq->prefill_only) return true;
    return false;
}

static void forward(struct engine *e)
{
    struct batch *b = &e->batch;
    struct model_batch mb = {
        .n_rows = (int32_t)b->n_rows,
        .ids = b->ids,
        .pos = b->pos,
        .seqs = b->seqs,
        .n_seqs = (int32_t)b->n_seqs,
        .logit_rows = b->logit_rows,
        .n_logits = (int32_t)b->n_logits,
        .logits = e->logits,
        .kv = e->kv.ptr,
        .block_tokens = e->opt.block_tokens,
        .n_blocks = e->layout.n_blocks,
        .on_layer = on_layer,
        .on_layer_arg = e,
        .on_layer_reads = e->opt.on_kv_ready && has_prefill_only(b),
    };
    model_forward(e->opt.model, &mb);
}

static uint32_t overlap(uint32_t a_begin, uint32_t a_end, uint32_t b_begin, uint32_t b_end)
{
    uint32_t begin = a_begin > b_begin ? a_begin : b_begin, end = a_end < b_end ? a_end : b_end;
    return begin < end ? end - begin : 0;
}

static void count_computed(struct engine *e)
{
    for (uint32_t i = 0; i < e->batch.n_parts; i++) {
        const struct batch_part *p = &e->batch.parts[i];
        struct seq *s = p->seq;
        uint32_t again = overlap(p->begin, p->end, s->xfer_begin, s->xfer_end);
        s->n_recomputed += again;
        counter_add(e->meters.recomputed, again);
        s->n_computed = p->end;
        engine_set_owed(e, s, s->n_owed > p->end - p->begin ? s->n_owed - (p->end - p->begin) : 0);
        seq_name_blocks(s, e->pool, e->opt.block_tokens);
    }
}

/* log-sum-exp of the rows for which somebody wants logprobs. */
static void normalise(struct engine *e)
{
    struct kernel_ctx *host = kernel_host(e->opt.model->kernels);
    size_t n_vocab = e->limits.n_vocab;
    bool wanted = false;
    for (uint32_t i = 0; i < e->batch.n_logits; i++) {
        const struct batch_logit *l = &e->batch.logits[i];
        wanted |= !l->sample || l->seq->sampling.n_logprobs >= 0;
    }
    if (wanted) host->ops->log_sum_exp(host, e->lse, e->logits, n_vocab, e->batch.n_logits, n_vocab);
}

/* Sequences that have no token to ask for (echo with max_tokens 0) end with their last position. The others' parts are cleared
 * here: using their logits may free them. */
static void keep_silent_parts(struct engine *e)
{
    for (uint32_t i = 0; i < e->batch.n_parts; i++) {
        const struct seq *s = e->batch.parts[i].seq;
        if (seq_n_pending(s) > 0 || seq_wants_token(s)) e->batch.parts[i].seq = NULL;
    }
}

static void finish_silent_parts(struct engine *e)
{
    for (uint32_t i = 0; i < e->batch.n_parts; i++)
        if (e->batch.parts[i].seq) engine_finish(e, e->batch.parts[i].seq, OK, FINISH_LENGTH, -1);
}

static void use_logits(struct engine *e)
{
    const uint32_t n = e->batch.n_logits; /* all rows first: what comes of them may free sequences */
    for (uint32_t i = 0; i < n; i++) fill_row(e, &e->rows[i], i);
    sampler_batch_run(e->sampler, e->rows, n);
    for (uint32_t i = 0; i < n; i++) {
        const struct batch_logit *l = &e->batch.logits[i];
        if (l->sample) engine_take_token(e, l->seq, &e->rows[i].out);
        else score_prompt(e, l->seq, l->pos, &e->rows[i].out);
    }
}

/* A step of a device that failed has no results. */
static bool has_results(const struct engine *e) { return device_fault(e->device, NULL) == OK; }

bool engine_step(struct engine *e)
{
    uint64_t begin_ns = clock_ns();
    batch_build(e);
    if (e->batch.n_rows == 0) return e->batch.preempted; /* what was freed may let somebody start */
    forward(e);
    if (!has_results(e)) return false;
    count_computed(e);
    normalise(e);
    keep_silent_parts(e);
    use_logits(e);
    finish_silent_parts(e);
    counter_add(e->meters.steps, 1);
    histogram_observe(e->meters.step_seconds, (double)(clock_ns() - begin_ns) * 1e-9);
    atomic_fetch_add_explicit(&e->load.n_progress, 1, memory_order_relaxed);
    return true;
}
