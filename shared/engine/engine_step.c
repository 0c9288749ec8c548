/* engine_step.c - steps: submits them, and completes them once their tokens are there.
 *
 * With sampling on the device, step n + 1 is submitted before step n completes: its decode rows
 * read the tokens of step n on the device, so the device never waits for the host. The host learns
 * late that a sequence has ended and discards the sequence's row of step n + 1 (engine_end.c).
 * No step is submitted early when KV of the step in flight has to be sent to a peer, or when it
 * might need blocks of a running sequence. Sampled on the host, or on a node of several ranks, a
 * step completes at once. LIMIT: the ranks that follow are sent each step's tokens by the host.
 * LIMIT: nor is one submitted early that may have drafts of the host, which begin with the last
 * token, or behind one that has some. Those that the device makes it verifies ahead (move_ahead).
 * Ranks that share experts agree on step n + 1 while n computes. The fetch of n's tokens tells of a
 * lost rank, but not in which step: both are given up, unless n was complete already.
 * Completion first publishes blocks, then takes tokens: one may end its sequence, which frees it.
 * Thread: engine. */
#include "kernels/copy_stream.h"
#include "kernels/host_math.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/engine/engine_state.h"

enum { TELL_PREFILL_MS = 10000 };

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

bool engine_ends_with(const struct engine *e, const struct seq *s, int32_t id, uint32_t n_tokens)
{
    return is_stop(e, s, id) || n_tokens >= s->n_tokens_max;
}

bool engine_take_token(struct engine *e, struct seq *s, const struct token_logprobs *lp)
{
    struct engine_event ev = {
        .kind = ENGINE_TOKEN, .id = s->id, .stop_token = -1, .index = seq_n_out(s), .lp = *lp
    };
    ASSERT(!seq_is_full(s));
    s->tokens[s->n_tokens++] = lp->id;
    if (!s->t_first_ns) s->t_first_ns = clock_ns();
    counter_add(e->metrics.generated, 1);
    /* The node that decodes decides what the first token means. */
    bool stops = !s->prefill_only && is_stop(e, s, lp->id);
    bool full = !s->prefill_only && seq_is_full(s);
    ev.lp.ends = stops ? FINISH_STOP : full ? FINISH_LENGTH : FINISH_NONE;
    ev.hidden = s->prefill_only ? s->hidden : NULL;
    ev.n_hidden = ev.hidden ? e->opt.model->config.hidden : 0;
    engine_emit(e, &ev);
    if (s->prefill_only) engine_finish(e, s, OK, FINISH_PREFILLED, -1);
    else if (ev.lp.ends != FINISH_NONE) engine_finish(e, s, OK, ev.lp.ends, stops ? lp->id : -1);
    else return true;
    return false;
}

static void score_prompt(struct engine *e, struct seq *s, uint32_t pos,
                         const struct token_logprobs *lp)
{
    struct engine_event ev = {
        .kind = ENGINE_PROMPT_LOGPROB, .id = s->id, .stop_token = -1, .index = pos + 1, .lp = *lp
    };
    s->lp_next = pos + 2;
    engine_emit(e, &ev);
}

/* ---- submission ---- */

/* Runs on a driver thread or the engine thread. */
static void count_layer(void *arg)
{
    atomic_fetch_add_explicit(&((struct engine *)arg)->load.n_progress, 1, memory_order_relaxed);
}

/* Announces a layer without waiting for it: the sender of the layer waits for its event, and so
 * does the progress count of a prefill step. A step of single rows is short and counted at once. */
static void on_layer(void *arg, uint32_t layer)
{
    struct engine *e = arg;
    const struct batch *b = engine_batch(e);
    if (b->streams) engine_await_layer(e, layer);
    uint64_t event = b->n_rows > b->n_chunks ? device_record_event(e->device) : 0;
    if (!event) count_layer(e);
    /* completion notices a failed device */
    else if (copy_stream_wait_event(e->progress_stream, event) != OK ||
             copy_stream_launch_host_fn(e->progress_stream, count_layer, e) != OK)
        count_layer(e);
    if (!e->opt.on_kv_ready) return;
    for (uint32_t i = 0; i < b->n_chunks; i++) {
        const struct batch_chunk *p = &b->chunks[i];
        if (!p->seq->prefill_only) continue;
        if (!event) event = device_record_event(e->device);
        e->opt.on_kv_ready(e->opt.arg, p->seq->id, layer, p->begin, p->end, p->seq->blocks, event);
    }
}

static bool has_prefill_only(const struct batch *b)
{
    for (uint32_t i = 0; i < b->n_chunks; i++)
        if (b->chunks[i].seq->prefill_only) return true;
    return false;
}

/* The known token that the row scores; -1: the row samples a token. */
static int32_t score_of(const struct batch_logit *l)
{
    return l->sample ? -1 : l->seq->tokens[l->pos + 1];
}

/* Rows of logits from the i-th on that choose tokens of one sequence. */
static uint32_t n_choices(const struct batch *b, uint32_t i)
{
    uint32_t n = 1;
    while (i + n < b->n_logits && b->logits[i + n].sample &&
           b->logits[i + n].seq == b->logits[i].seq)
        n++;
    return n;
}

/* What the host does not know before the choice behind n_drafts drafts: the tokens of the step
 * before, of whose drafts `move` says how many were right, and these drafts, which the device has
 * made. */
static struct sample_future future_of(const struct engine *e, const struct seq *s,
                                      uint32_t n_drafts, uint32_t move)
{
    if (s->n_future == 0) return (struct sample_future){ 0 };
    return (struct sample_future){
        .n_chosen = 1,
        .after = move,
        .first_chosen = (int32_t)s->future_row,
        .n_drafts = n_drafts,
        .first_draft = n_drafts ? -1 - s->draft_ids[0] : 0,
        .draft_stride = (int32_t)e->opt.model->max_logits,
    };
}

/* Says how the i-th row of logits chooses: it is behind n_drafts drafts of its sequence, and has
 * n_verify behind it. To those behind it a draft that the host has counts as known. */
static void fill_sample_request(struct engine *e, uint32_t i, uint32_t n_drafts, uint32_t n_verify)
{
    const struct model_config *c = &e->opt.model->config;
    const struct batch *b = engine_batch(e);
    const struct batch_logit *l = &b->logits[i];
    const struct seq *s = l->seq;
    const uint32_t move = s->n_maybe > 0
                              ? model_number_right(e->opt.model, e->parity ^ 1, s->future_row)
                              : 0;
    e->sample_requests[i] = (struct sample_request){
        .params = &s->sampling,
        .tokens = s->tokens,
        .n_tokens = l->sample && s->n_future == 0 ? l->pos + 1 : s->n_tokens,
        .n_prompt = s->n_prompt,
        .n_out = (l->sample ? l->pos + 1 : s->n_tokens) - s->n_prompt,
        .future = future_of(e, s, n_drafts, move),
        .eos = c->eos,
        .n_eos = c->n_eos,
        .score = score_of(l),
        .kept_at = (int32_t)i,
        .n_verify = n_verify,
    };
}

static void fill_sample_requests(struct engine *e)
{
    const struct batch *b = engine_batch(e);
    const bool counts = e->draft.drafter && e->draft.config.ops->observes &&
                        !engine_is_of_ranks(e); /* for passes behind the step, and the step ahead */
    for (uint32_t i = 0, n; i < b->n_logits; i += n) {
        n = b->logits[i].sample ? n_choices(b, i) : 1;
        for (uint32_t k = 0; k < n; k++)
            fill_sample_request(e, i + k, k, k == 0 && counts ? n - 1 : 0);
    }
}

/* Waits for the tokens that the device has chosen. */
static void fetch(struct engine *e, int parity)
{
    model_fetch(e->opt.model, parity, e->fetched, e->batches[parity].n_logits);
}

/* group_rows: of the busiest rank; 0 without a group. */
static bool submit(struct engine *e, uint32_t group_rows)
{
    struct batch *b = engine_batch(e);
    struct model_batch mb = {
        .n_rows = (int32_t)b->n_rows,
        .ids = b->ids,
        .pos = b->pos,
        .seqs = b->seqs,
        .n_seqs = (int32_t)b->n_seqs,
        .logit_rows = b->logit_rows,
        .n_logits = (int32_t)b->n_logits,
        .logits = e->logits,
        .sample_requests = e->sample_requests,
        .parity = e->parity,
        .moves = b->moves,
        .n_moves = (int32_t)b->n_moves,
        .kv = e->kv.ptr,
        .block_tokens = e->opt.block_tokens,
        .n_blocks = e->layout.n_blocks,
        .on_layer = on_layer,
        .on_layer_arg = e,
        .eager = (e->opt.on_kv_ready && has_prefill_only(b)) || b->streams || e->node.is_eager,
        .group_rows = group_rows,
    };
    fill_sample_requests(e);
    return model_submit(e->opt.model, &mb);
}

static uint32_t overlap(uint32_t a_begin, uint32_t a_end, uint32_t b_begin, uint32_t b_end)
{
    uint32_t begin = a_begin > b_begin ? a_begin : b_begin, end = a_end < b_end ? a_end : b_end;
    return begin < end ? end - begin : 0;
}

/* A prompt that computes for long says how far it is, so that nobody takes it for a hang. After a
 * preemption it begins anew, with what the cache still has. */
static void tell_prefill(const struct engine *e, struct seq *s, uint64_t now)
{
    uint64_t since = s->t_told_ns > s->t_computes_ns ? s->t_told_ns : s->t_computes_ns,
             every = (e->opt.tell_prefill_ms ? e->opt.tell_prefill_ms : TELL_PREFILL_MS) *
                     UINT64_C(1000000);
    if (s->n_computed >= s->n_prompt || !s->t_computes_ns || now - since < every) return;
    double seconds = (double)(now - s->t_computes_ns) * 1e-9,
           rate = (s->n_computed - s->n_taken) / seconds;
    s->t_told_ns = now;
    log_info(
        "long prefill",
        "request=%016llx tokens=%u of=%u percent=%.0f after_s=%.0f tokens_per_s=%.1f left_s=%.0f",
        (unsigned long long)s->request, s->n_computed, s->n_prompt,
        100.0 * s->n_computed / s->n_prompt, seconds, rate,
        rate > 0 ? (s->n_prompt - s->n_computed) / rate : 0);
}

static void count_computed(struct engine *e)
{
    struct batch *b = engine_batch(e);
    uint64_t now = clock_ns();
    for (uint32_t i = 0; i < b->n_chunks; i++) {
        struct batch_chunk *p = &b->chunks[i];
        struct seq *s = p->seq;
        uint32_t again = overlap(p->begin, p->end, s->xfer_begin, s->xfer_end);
        s->n_recomputed += again;
        e->inflight[e->parity].n_recomputed += again;
        s->n_computed = p->end - p->n_draft; /* at least: those of right drafts come to it */
        p->n_remaining = s->n_remaining;
        tell_prefill(e, s, now);
        engine_set_remaining(
            e, s, s->n_remaining > p->end - p->begin ? s->n_remaining - (p->end - p->begin) : 0);
    }
}

static void count_future(struct engine *e)
{
    const struct batch *b = engine_batch(e);
    for (uint32_t i = 0, n; i < b->n_logits; i += n) {
        struct seq *s = b->logits[i].seq;
        n = 1;
        if (!b->logits[i].sample || !s) continue;
        n = n_choices(b, i);
        s->n_future++;
        s->n_maybe += n - 1;
        s->future_row = i;
    }
}

/* Takes back what count_computed and count_future have counted. */
static void uncount(struct engine *e, const struct batch *b)
{
    for (uint32_t i = 0; i < b->n_chunks; i++) {
        const struct batch_chunk *p = &b->chunks[i];
        struct seq *s = p->seq;
        if (!s) continue; /* it ended meanwhile */
        s->n_computed = p->begin;
        s->n_recomputed -= overlap(p->begin, p->end, s->xfer_begin, s->xfer_end);
        engine_set_remaining(e, s, p->n_remaining);
    }
    for (uint32_t i = 0, n; i < b->n_logits; i += n) {
        struct seq *s = b->logits[i].seq;
        n = 1;
        if (!b->logits[i].sample || !s) continue;
        n = n_choices(b, i);
        s->n_future--;
        s->n_maybe -= n - 1;
    }
}

/* The batch is computed again, but for prompts of which layers have left for a peer, where they
 * were announced once: those end. */
static void abandon_batch(struct engine *e, struct batch *b)
{
    for (uint32_t i = 0; i < b->n_chunks; i++)
        if (b->chunks[i].seq && b->chunks[i].seq->prefill_only)
            engine_finish(e, b->chunks[i].seq, ERR_PEER_LOST, FINISH_ERROR, -1);
    b->n_rows = b->n_chunks = b->n_seqs = b->n_logits = 0;
    counter_add(e->metrics.abandoned, 1);
}

void engine_abandon_steps(struct engine *e)
{
    device_wait(e->device);
    for (int i = 0; i < 2; i++) { /* the later one first */
        const int parity = e->parity ^ i;
        if (!e->inflight[parity].active) continue;
        e->inflight[parity].active = false;
        uncount(e, &e->batches[parity]);
        abandon_batch(e, &e->batches[parity]);
    }
    engine_free_deferred(e);
}

/* Does this step show how fast prompts are computed? It does when they are half of what it may
 * have, or when it was filled, but not with more answers. That prompts are left says nothing: they
 * wait for a place or blocks, or came meanwhile, and the step took its time for a few rows. */
static bool is_full_of_prompts(const struct engine *e)
{
    const struct batch *b = &e->batches[e->parity];
    const struct pace_load l = pace_load_of(b->seqs, b->n_seqs);
    return (b->is_filled && l.prompt_rows >= l.decode_rows) || 2 * l.prompt_rows >= b->max_rows;
}

static void lose_group(struct engine *e)
{
    const struct err why = e->opt.model->exchange_fault;
    engine_group_lose(e, &why);
}

static void launch_step(struct engine *e, uint32_t group_rows)
{
    const struct kernel_ctx *k = e->opt.model->kernels;
    const uint64_t n_graph_steps = k->n_graph_steps[KERNEL_STEP];
    struct inflight_step *f = &e->inflight[e->parity];
    if (e->inflight[e->parity ^ 1].active) counter_add(e->metrics.ahead, 1);
    f->begin_ns = clock_ns();
    e->draft.group_rows = group_rows;
    f->sampled = submit(e, group_rows);
    if (engine_is_node(e) && f->sampled) fetch(e, e->parity);
    if (engine_is_node(e) && !engine_node_settle(e, engine_batch(e)->n_rows)) return;
    if (e->opt.model->exchange_fault.code != OK) {
        abandon_batch(e, engine_batch(e));
        lose_group(e);
        return;
    }
    if (engine_batch(e)->streams) engine_end_streams(e);
    f->active = true;
    f->n_recomputed = 0;
    counter_add(e->metrics.graph_steps, k->n_graph_steps[KERNEL_STEP] - n_graph_steps);
    if (!f->sampled && !e->device->is_host && engine_batch(e)->n_logits > 0)
        counter_add(e->metrics.host_sampled, 1);
    count_computed(e);
    count_future(e);
    f->is_full = is_full_of_prompts(e);
    f->drafted = f->sampled && engine_draft_submit(e);
}

/* ---- completion ---- */

/* Computes the log-sum-exp of the rows that need logprobs. */
static void normalise(struct engine *e, const struct batch *b)
{
    struct kernel_ctx *host = kernel_host(e->opt.model->kernels);
    size_t n_vocab = e->limits.n_vocab;
    bool wanted = false;
    for (uint32_t i = 0; i < b->n_logits; i++) {
        const struct batch_logit *l = &b->logits[i];
        wanted |= l->seq && (!l->sample || l->seq->sampling.n_logprobs >= 0);
    }
    if (wanted) host_log_sum_exp(host, e->lse, e->logits, n_vocab, b->n_logits, n_vocab);
}

/* The sampler's input for row i of the logits. */
static struct sampler_row row_of(const struct engine *e, const struct batch_logit *l, uint32_t i)
{
    const struct model_config *c = &e->opt.model->config;
    const struct seq *s = l->seq;
    const struct sampler_input in = {
        .logits = e->logits + (size_t)i * e->limits.n_vocab,
        .lse = e->lse[i],
        .params = &s->sampling,
        .tokens = s->tokens,
        .n_tokens = l->sample ? l->pos + 1 : s->n_tokens,
        .n_prompt = s->n_prompt,
        .eos = c->eos,
        .n_eos = c->n_eos,
    };
    return (struct sampler_row){ .in = in, .score = score_of(l) };
}

/* Samples on the host for sequences that the previous step has not ended. Computes all rows before
 * it takes tokens, which may free sequences. */
static void sample(struct engine *e, const struct batch *b)
{
    uint32_t n = 0, at = 0;
    normalise(e, b);
    for (uint32_t i = 0; i < b->n_logits; i++)
        if (b->logits[i].seq) e->rows[n++] = row_of(e, &b->logits[i], i);
    sampler_batch_run(e->sampler, e->rows, n);
    for (uint32_t i = 0; i < b->n_logits; i++)
        if (b->logits[i].seq) e->fetched[i] = e->rows[at++].out;
}

static void publish_blocks(struct engine *e, const struct batch *b)
{
    for (uint32_t i = 0; i < b->n_chunks; i++) {
        const struct batch_chunk *c = &b->chunks[i];
        if (c->seq) engine_publish(e, c->seq, c->end - c->n_draft);
    }
}

/* Keeps only chunks of sequences that sample no token (echo with max_tokens 0), which end with
 * their last position. Taking the tokens of the others may free them. */
static void keep_tokenless_chunks(const struct batch *b)
{
    for (uint32_t i = 0; i < b->n_chunks; i++) {
        const struct seq *s = b->chunks[i].seq;
        if (s && !(b->chunks[i].end == s->n_tokens && s->n_future == 0 && seq_is_full(s)))
            b->chunks[i].seq = NULL;
    }
}

static void finish_tokenless_chunks(struct engine *e, const struct batch *b)
{
    for (uint32_t i = 0; i < b->n_chunks; i++)
        if (b->chunks[i].seq) engine_finish(e, b->chunks[i].seq, OK, FINISH_LENGTH, -1);
}

/* A step that is ahead of drafts (drafter_ops.submit) was built as if all of them were wrong, with
 * blocks for the case that all are right; the device moves its rows by how many are (kernel_move).
 * Now the host knows, too. */
static void move_ahead(struct batch *b, const struct seq *s, uint32_t n)
{
    for (uint32_t i = 0; i < b->n_chunks; i++)
        if (b->chunks[i].seq == s) b->chunks[i].begin += n, b->chunks[i].end += n;
    for (uint32_t i = 0; i < b->n_logits; i++)
        if (b->logits[i].seq == s) b->logits[i].pos += n;
}

/* Of a sequence's last token and of its n drafts the step has chosen what comes next. Takes choices
 * as long as the drafts before them are right and the sequence goes on, each as a step of its own
 * would: with its position complete. Returns how many. */
static uint32_t take_verified(struct engine *e, struct seq *s, const struct token_logprobs *chosen,
                              uint32_t n)
{
    const uint32_t n_right = engine_draft_n_right(s, chosen, n);
    engine_draft_count(e, s, n, n_right);
    s->n_computed += n_right;
    if (s->n_future > 0 && n_right > 0) move_ahead(engine_batch(e), s, n_right);
    for (uint32_t i = 0; i <= n_right; i++) {
        engine_publish(e, s, s->n_tokens);
        if (!engine_take_token(e, s, &chosen[i])) return i + 1;
    }
    seq_trim(s, e->pool, e->opt.block_tokens);
    return n_right + 1;
}

/* Blocks for drafts go back before the next step is built, so that nobody is preempted for them. */
static void take_tokens(struct engine *e, const struct batch *b, struct inflight_step *f)
{
    f->n_choosers = f->n_taken = 0;
    for (uint32_t i = 0, n; i < b->n_logits; i += n) {
        const struct batch_logit *l = &b->logits[i];
        n = 1;
        if (!l->seq) continue; /* it ended in the previous step */
        if (!l->sample) {
            score_prompt(e, l->seq, l->pos, &e->fetched[i]);
            continue;
        }
        n = n_choices(b, i);
        l->seq->n_future--;
        l->seq->n_maybe -= n - 1;
        f->n_choosers++;
        if (n == 1 && engine_take_token(e, l->seq, &e->fetched[i]) && e->draft.drafter)
            seq_trim(l->seq, e->pool, e->opt.block_tokens);
        f->n_taken += n > 1 ? take_verified(e, l->seq, &e->fetched[i], n - 1) : 1;
    }
}

/* A step of a device that failed, or of a node that was lost, has no results. */
static bool has_results(const struct engine *e)
{
    return device_fault(e->device, NULL) == OK && e->node.fault.code == OK;
}

/* A step begins with its submission or, if later, when the previous step completed. */
static uint64_t begin_of(const struct engine *e, const struct inflight_step *f)
{
    return f->begin_ns > e->t_completed_ns ? f->begin_ns : e->t_completed_ns;
}

/* As its sequences have it, a step lasts from the end of the one before it, if there was one, and
 * also while other ranks let it wait. */
static void observe_time(struct engine *e, const struct inflight_step *f, const struct batch *b)
{
    const uint64_t begin = begin_of(e, f),
                   called = f->called_ns > e->t_completed_ns ? f->called_ns : e->t_completed_ns;
    e->t_completed_ns = clock_ns();
    engine_count_speed(e, b->seqs, b->n_seqs, f, e->t_completed_ns - called);
    engine_draft_count_step(e, b->seqs, b->n_seqs, e->t_completed_ns - begin);
    histogram_observe(e->metrics.step_seconds, (double)(e->t_completed_ns - begin) * 1e-9);
}

static void complete_step(struct engine *e, int parity)
{
    const struct batch *b = &e->batches[parity];
    struct inflight_step *f = &e->inflight[parity];
    if (f->sampled && !engine_is_node(e)) fetch(e, parity);
    if (!has_results(e)) return;
    if (f->sampled && e->opt.model->exchange_fault.code != OK) {
        lose_group(e);
        return;
    }
    f->active = false;
    if (!f->sampled) sample(e, b);
    engine_pace_step(e, begin_of(e, f), b->seqs, b->n_seqs);
    counter_add(e->metrics.recomputed, f->n_recomputed); /* before anybody hears of the tokens */
    publish_blocks(e, b);
    const bool goes_on = engine_draft_observe(e, &e->batches[parity]);
    engine_free_deferred(e); /* what drafts behind the step has left them, too */
    keep_tokenless_chunks(b);
    take_tokens(e, b, f);
    finish_tokenless_chunks(e, b);
    counter_add(e->metrics.steps, 1);
    observe_time(e, f, b);
    atomic_fetch_add_explicit(&e->load.n_steps, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&e->load.n_progress, 1, memory_order_relaxed);
    if (!goes_on && has_results(e)) lose_group(e);
}

/* ---- the step ---- */

/* May the next step be built while one is in flight? */
static bool may_launch_ahead(struct engine *e)
{
    if (engine_is_node(e)) return false; /* those that follow need the tokens */
    /* The host does not know how many are right. */
    if (engine_batch(e)->n_drafts > 0 && !e->inflight[e->parity].drafted) return false;
    if (kv_pool_available(e->pool) < e->n_running) return false; /* each may need a block */
    if (batch_next_needs_completion(e) || engine_draft_is_wanted(e)) return false;
    if (e->inflight[e->parity].drafted && batch_next_waits_for_drafts(e)) return false;
    LIST_FOREACH (s, &e->running, struct seq, node)
        if (s->prefill_only) return false;
    return true;
}

/* Is the batch to be computed, or, without rows, those of other ranks? */
static bool begin_step(struct engine *e, uint32_t *group_rows)
{
    const uint32_t n_rows = engine_batch(e)->n_rows;
    if (engine_is_node(e)) return engine_lead_step(e, group_rows);
    return engine_is_grouped(e) ? engine_group_agree(e, n_rows, group_rows) : n_rows > 0;
}

bool engine_step(struct engine *e)
{
    const int before = e->parity;
    bool worked = e->inflight[before].active;
    if (worked && !may_launch_ahead(e)) complete_step(e, before);
    if (!has_results(e)) return false;
    e->parity = before ^ 1;
    batch_build(e);
    engine_draft_plan(e);
    e->inflight[e->parity].called_ns = clock_ns();
    uint32_t group_rows = 0;
    const bool takes_step = begin_step(e, &group_rows);
    if (takes_step) launch_step(e, group_rows);
    if (e->inflight[before].active) complete_step(e, before);
    if (e->inflight[e->parity].active && (!e->inflight[e->parity].sampled || engine_is_node(e)))
        complete_step(e, e->parity);
    /* freed blocks may let a sequence start */
    return has_results(e) && (worked || takes_step || engine_batch(e)->preempted);
}
