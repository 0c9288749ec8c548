/* draft_mtp.c - drafts of the model's own draft layer (multi-token prediction; struct model_draft).
 *
 *     a step computes  positions t, t + 1 .. of a sequence, and chooses the tokens behind them
 *     pass 1           the same positions, with the token behind each: the layer's KV, and from the
 *                      last position the first draft
 *     pass 2, 3 ..     one position more, with the last draft as token and what the layer made of
 *                      the position before as hidden state: the next draft
 *
 * Pass 1 follows every step, of prompts too, so that the layer's KV is as complete as the model's;
 * the others only write positions that the next step writes again. All ranks of a group make as
 * many passes, some without rows; those of a node are told of each by their leader. LIMIT: the KV
 * of a block's last position belongs to the token that followed when the block was computed: a
 * sequence that found the block in the prefix cache may go on otherwise. Its drafts can be a little
 * worse. Thread: engine. */
#include <assert.h>

#include "shared/base/arith.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/engine/engine_state.h"

/* Positions of a sequence that a step computes, and what is known behind them. */
struct mtp_part {
    struct seq *s;       /* NULL, of a step that completes: it ended meanwhile */
    uint32_t i_chunk;    /* of the step's */
    uint32_t begin, n;   /* positions; their tokens are in s->tokens, but the one behind the last */
    uint32_t row;        /* of the step: of the first position */
    int32_t last;        /* token behind the last position */
    const float *hidden; /* of that position, from elsewhere; NULL: of the row */
    uint32_t n_tokens;   /* of the sequence, once it has the step's tokens */
    uint32_t n_wanted;   /* drafts */
    bool ends;           /* with one of these tokens */
    /* Of a step that is not complete. The device has the tokens behind the last 1 + n_verify
     * positions, as row of logits `logit` and the next ones have chosen them; how many positions
     * count is number `right` (kernel_move), and the part begins up to n_most positions later, by
     * number `move`. */
    bool chooses;
    uint32_t logit, n_verify, right, move, n_most;
    uint32_t n_made; /* drafts, submitted */
};

/* The parts of a step, until its drafts were fetched. */
struct mtp_step {
    struct mtp_part *parts; /* [max_seqs] */
    uint32_t n_parts;
};

struct mtp_drafter {
    struct drafter base;
    struct engine *e;
    struct mtp_step steps[2]; /* [parity] */
    struct mtp_step *step;    /* whose passes are being made */
    uint64_t n_submits;
    /* Of a pass, of at most max_rows rows. */
    uint32_t i_pass, max_rows, n_rows, n_seqs, n_hidden, n_logits, n_moves;
    int32_t *ids, *pos, *logit_rows;       /* [max_rows], [.], [max_seqs] */
    struct attn_seq *attn;                 /* [2 max_seqs] */
    struct kernel_move *moves;             /* [max_seqs] */
    struct model_hidden_rows *hidden;      /* [max_seqs] */
    struct step_plan_announced *announced; /* [max_seqs] */
    uint32_t n_announced;
    bool fetches;                           /* some drafts are on the device */
    struct mtp_part **of_logits;            /* [max_seqs] whose draft a row of logits chooses */
    struct sample_request *sample_requests; /* [max_seqs] */
    struct token_logprobs *chosen;          /* [max_seqs] */
};

struct mtp_seq {
    struct draft_seq base;
    uint32_t n_tokens; /* behind which the drafts are, once they are fetched */
    uint64_t i_submit; /* of the passes that made them */
    uint32_t n;
    int32_t drafts[DRAFT_TOKENS_MAX]; /* below 0: as ids of a step, until they are fetched */
};

static_assert((int)DRAFT_TOKENS_MAX <= (int)MODEL_DRAFT_PASSES_MAX, "a pass for each draft");

/* ---- life ---- */

static struct mtp_drafter *drafter_of(struct drafter *base) { return (struct mtp_drafter *)base; }

static struct mtp_seq *seq_of(const struct seq *s) { return (struct mtp_seq *)s->draft; }

static void free_drafter(struct drafter *base)
{
    struct mtp_drafter *d = drafter_of(base);
    for (int i = 0; i < 2; i++) mem_free(d->steps[i].parts);
    mem_free(d->moves);
    mem_free(d->ids);
    mem_free(d->pos);
    mem_free(d->logit_rows);
    mem_free(d->attn);
    mem_free(d->hidden);
    mem_free(d->announced);
    mem_free(d->of_logits);
    mem_free(d->sample_requests);
    mem_free(d->chosen);
    mem_free(d);
}

static enum status create(const struct draft_config *c, struct engine *e, struct drafter **out,
                          struct err *err)
{
    ASSERT(e != NULL);
    const struct model *m = e->opt.model;
    const size_t n = e->opt.max_seqs;
    if (m->max_draft_rows == 0)
        return err_field(err, ERR_CONFIG, "method", "the model was loaded without its draft layer");
    struct mtp_drafter *d = MEM_NEW(struct mtp_drafter);
    *d = (struct mtp_drafter){ .base = { *c }, .e = e, .max_rows = m->max_draft_rows };
    for (int i = 0; i < 2; i++) d->steps[i].parts = MEM_ARRAY(struct mtp_part, n);
    d->moves = MEM_ARRAY(struct kernel_move, n);
    d->ids = MEM_ARRAY(int32_t, d->max_rows);
    d->pos = MEM_ARRAY(int32_t, d->max_rows);
    d->logit_rows = MEM_ARRAY(int32_t, n);
    d->attn = MEM_ARRAY(struct attn_seq, 2 * n);
    d->hidden = MEM_ARRAY(struct model_hidden_rows, n);
    d->announced = MEM_ARRAY(struct step_plan_announced, n);
    d->of_logits = MEM_ARRAY(struct mtp_part *, n);
    d->sample_requests = MEM_ARRAY(struct sample_request, n);
    d->chosen = MEM_ARRAY(struct token_logprobs, n);
    *out = &d->base;
    return OK;
}

static struct draft_seq *begin(struct drafter *d, uint32_t n_tokens_max)
{
    struct mtp_seq *s = mem_try_calloc(1, sizeof *s);
    (void)d;
    if (s) s->base.n_tokens_max = n_tokens_max;
    return s ? &s->base : NULL;
}

static void end(struct drafter *d, struct draft_seq *s)
{
    (void)d;
    mem_free(s);
}

/* ---- what a step has computed ---- */

/* The part of a chunk whose rows of logits [n] chose `chosen`; n 0: it chose nothing. */
static struct mtp_part part_of(const struct engine *e, const struct batch_chunk *c, uint32_t row,
                               const struct token_logprobs *chosen, uint32_t n)
{
    struct seq *s = c->seq;
    struct mtp_part p = { .s = s, .begin = c->begin, .row = row, .n_tokens = s->n_tokens };
    if (n == 0) { /* a piece of a prompt; behind the end of all tokens there is nothing */
        const uint32_t end = c->end < s->n_tokens ? c->end : s->n_tokens - 1;
        p.n = end - c->begin;
        p.last = s->tokens[end];
        return p;
    }
    const uint32_t n_right = engine_draft_n_right(s, chosen, n - 1);
    p.n = c->end - c->begin - (n - 1) + n_right;
    p.last = chosen[n_right].id;
    p.n_tokens = s->n_tokens + n_right + 1;
    p.n_wanted = c->n_wanted;
    for (uint32_t i = 0; i <= n_right; i++)
        p.ends |= engine_ends_with(e, s, chosen[i].id, s->n_tokens + i + 1);
    const uint32_t left = s->n_tokens_max - p.n_tokens, room = left > 0 ? left - 1 : 0;
    if (p.ends) p.n_wanted = 0;
    if (p.n_wanted > room) p.n_wanted = room;
    return p;
}

/* Rows of logits from *at on that choose tokens of s. Skips those of sequences that ended
 * meanwhile, and those that only score prompt tokens. */
static uint32_t choices_of(const struct batch *b, const struct seq *s, uint32_t *at)
{
    uint32_t n = 0;
    while (*at < b->n_logits && !b->logits[*at].seq) ++*at;
    while (*at < b->n_logits && b->logits[*at].seq == s && !b->logits[*at].sample) ++*at;
    while (*at + n < b->n_logits && b->logits[*at + n].seq == s && b->logits[*at + n].sample) n++;
    return n;
}

/* The part of a chunk of a step that is not complete, which n rows of logits from `logit` on choose
 * tokens behind. Its drafts may be more than it has room for: the host looks when it knows. */
static struct mtp_part part_ahead(const struct mtp_drafter *d, const struct batch_chunk *c,
                                  uint32_t row, uint32_t logit, uint32_t n)
{
    struct mtp_part p = part_of(d->e, c, row, NULL, 0);
    if (n == 0) return p;
    p.n = c->end - c->begin;
    p.n_wanted = c->n_wanted;
    p.chooses = true;
    p.logit = logit;
    p.n_verify = n - 1;
    p.right = n > 1 ? model_number_right(d->e->opt.model, d->e->parity, logit) : 0;
    p.move = c->move;
    p.n_most = c->n_most;
    return p;
}

/* chosen NULL: the step is not complete. */
static void list_parts(struct mtp_drafter *d, const struct batch *b,
                       const struct token_logprobs *chosen)
{
    uint32_t at = 0, row = 0;
    d->step = &d->steps[b - d->e->batches];
    d->step->n_parts = 0;
    for (uint32_t i = 0; i < b->n_chunks; i++) {
        const struct batch_chunk *c = &b->chunks[i];
        const uint32_t first_row = row;
        row += c->end - c->begin;
        if (!c->seq) continue;
        const uint32_t n = choices_of(b, c->seq, &at);
        struct mtp_part p = chosen ? part_of(d->e, c, first_row, chosen + at, n)
                                   : part_ahead(d, c, first_row, at, n);
        p.i_chunk = i;
        at += n;
        if (p.n > 0) d->step->parts[d->step->n_parts++] = p;
    }
}

/* ---- a pass ---- */

static void begin_pass(struct mtp_drafter *d, uint32_t i_pass)
{
    d->i_pass = i_pass;
    d->n_rows = d->n_seqs = d->n_hidden = d->n_announced = d->n_logits = d->n_moves = 0;
}

/* Rows of positions [begin, begin + n), whose ids are set. Prompt and generated tokens take the
 * path of attention that they take in the model. */
static void add_rows(struct mtp_drafter *d, const struct seq *s, uint32_t first, uint32_t n,
                     struct model_hidden_rows hidden)
{
    for (uint32_t begin = first, left = n, some; left > 0; begin += some, left -= some) {
        const bool generated = begin >= s->n_prompt;
        some = !generated && begin + left > s->n_prompt ? s->n_prompt - begin : left;
        d->attn[d->n_seqs++] = (struct attn_seq){
            .q_begin = (int32_t)(d->n_rows + begin - first),
            .n_q = (int32_t)some,
            .pos_begin = (int32_t)begin,
            .block_table = s->blocks,
            .is_decode = generated,
        };
    }
    for (uint32_t i = 0; i < n; i++) d->pos[d->n_rows + i] = (int32_t)(first + i);
    d->hidden[d->n_hidden++] = hidden;
    d->n_rows += n;
}

/* The last row added chooses a draft of p, or, ahead of the step's tokens, one of the last ones. */
static void want_logits(struct mtp_drafter *d, struct mtp_part *p)
{
    const uint32_t i = d->n_logits++, slot = (uint32_t)(p - d->step->parts);
    d->of_logits[i] = p;
    d->logit_rows[i] = (int32_t)(d->n_rows - 1 - (d->i_pass == 1 ? p->n_verify : 0));
    d->sample_requests[i] = drafter_greedy(p->s->tokens,
                                           model_kept_of_pass(d->e->opt.model, d->i_pass, slot));
}

/* The n rows of p that were added last, which are all of one attention sequence, are moved as the
 * step's are, in chained passes also by its right drafts; so is the row that chooses. */
static void move_part(struct mtp_drafter *d, const struct mtp_part *p, uint32_t n,
                      bool wants_logits)
{
    const bool chained = d->i_pass > 1;
    const uint32_t by = chained ? p->right : 0;
    if (!p->move && !p->right) return;
    d->moves[d->n_moves++] = (struct kernel_move){
        .row = (int32_t)(d->n_rows - n),
        .n_rows = (int32_t)n,
        .by = { p->move, by },
        .from = d->i_pass == 2 ? p->right : 0,
        .logit_by = wants_logits && !chained ? p->right : 0,
        .logit = (int32_t)d->n_logits - 1,
    };
    if (!p->move && !by) return;
    d->attn[d->n_seqs - 1].move = d->n_moves;
    d->attn[d->n_seqs - 1].n_most = (int32_t)(p->n_most + (by ? p->n_verify : 0));
}

static struct model_draft pass_of(const struct mtp_drafter *d)
{
    const struct engine *e = d->e;
    return (struct model_draft){
        .batch = { .n_rows = (int32_t)d->n_rows,
                   .ids = d->ids,
                   .pos = d->pos,
                   .seqs = d->attn,
                   .n_seqs = (int32_t)d->n_seqs,
                   .logit_rows = d->logit_rows,
                   .n_logits = (int32_t)d->n_logits,
                   .logits = e->logits,
                   /* a node's ranks are sent what the host has chosen */
                   .sample_requests = engine_is_node(e) ? NULL : d->sample_requests,
                   .parity = e->parity,
                   .moves = d->moves,
                   .n_moves = (int32_t)d->n_moves,
                   .kv = e->kv.ptr,
                   .n_blocks = e->layout.n_blocks,
                   .block_tokens = e->opt.block_tokens,
                   .eager = engine_is_of_ranks(e),
                   .group_rows = engine_draft_pass_rows(e), },
        .hidden = d->hidden,
        .n_hidden = d->n_hidden,
        .chained = d->i_pass > 1,
        .i_pass = d->i_pass,
        .n_kept = d->step->n_parts,
    };
}

/* Peers get the layer's KV of prompts as that of any layer. */
static void announce(const struct mtp_drafter *d)
{
    const struct engine *e = d->e;
    const uint64_t event = d->n_announced > 0 ? device_record_event(e->device) : 0;
    for (uint32_t i = 0; i < d->n_announced; i++) {
        const struct step_plan_announced *a = &d->announced[i];
        e->opt.on_kv_ready(e->opt.arg, a->id, e->layout.n_layers - 1, a->begin, a->end,
                           d->attn[a->table].block_table, event);
    }
}

/* Waits for what the rows of logits have chosen. */
static void fetch_pass(struct mtp_drafter *d)
{
    const int32_t *kept = model_fetch_drafts(d->e->opt.model, d->e->parity);
    for (uint32_t i = 0; i < d->n_logits; i++)
        d->chosen[i].id = kept[d->sample_requests[i].kept_at];
}

/* The draft that the i-th row of logits chooses. */
static void append_draft(struct mtp_drafter *d, uint32_t i, bool is_kept)
{
    struct mtp_part *p = d->of_logits[i];
    struct mtp_seq *s = seq_of(p->s);
    s->drafts[s->n++] = is_kept ? -1 - d->sample_requests[i].kept_at : d->chosen[i].id;
    p->n_made = s->n;
}

/* Computes the rows, and appends the drafts that they choose. False: a rank was lost meanwhile. */
static bool run_pass(struct mtp_drafter *d)
{
    struct engine *e = d->e;
    struct model *m = e->opt.model;
    const struct model_draft pass = pass_of(d);
    if (engine_is_node(e) && !engine_lead_pass(e, &pass, d->announced, d->n_announced))
        return false;
    counter_add(e->metrics.passes, 1);
    const bool sampled = model_submit_draft(m, &pass), is_kept = sampled && !engine_is_of_ranks(e);
    d->fetches |= is_kept;
    if (!sampled) drafter_choose_on_host(m, e->logits, d->n_logits, d->chosen);
    else if (!is_kept) fetch_pass(d);
    if (engine_is_node(e) && !engine_node_settle(e, d->n_rows)) return false;
    if (m->exchange_fault.code != OK) return false;
    for (uint32_t i = 0; i < d->n_logits; i++) append_draft(d, i, is_kept);
    announce(d);
    return true;
}

/* Waits for the drafts that are on the device. */
static bool fetch_drafts(struct mtp_drafter *d)
{
    struct model *m = d->e->opt.model;
    if (!d->fetches) return true;
    const int32_t *kept = model_fetch_drafts(m, d->e->parity);
    for (uint32_t i = 0; i < d->step->n_parts; i++) {
        struct mtp_seq *s = seq_of(d->step->parts[i].s);
        for (uint32_t k = 0; s && k < s->n; k++)
            if (s->drafts[k] < 0) s->drafts[k] = kept[-1 - s->drafts[k]];
    }
    return m->exchange_fault.code == OK;
}

/* ---- after a step ---- */

/* The id of the token behind the i-th position of the part. */
static int32_t next_id(const struct mtp_part *p, uint32_t i)
{
    const uint32_t n_known = p->n - 1 - p->n_verify; /* positions before the choices */
    if (p->chooses && i >= n_known) return -1 - (int32_t)(p->logit + i - n_known);
    return i + 1 < p->n ? p->s->tokens[p->begin + i + 1] : p->last;
}

/* Adds as many positions of the part from `done` on as there is room for, and returns how many. The
 * rows of drafts stay together: one of them chooses. */
static uint32_t add_part(struct mtp_drafter *d, struct mtp_part *p, uint32_t done)
{
    const struct seq *s = p->s;
    const uint32_t room = d->max_rows - d->n_rows, left = p->n - done,
                   n = left < room ? left : room, first = p->begin + done;
    if (p->n_verify > 0 && n < left) return 0;
    if (s->prefill_only && d->e->opt.on_kv_ready)
        d->announced[d->n_announced++] = (struct step_plan_announced){
            .id = s->id, .told = first, .begin = first, .end = first + n, .table = d->n_seqs
        };
    for (uint32_t i = 0; i < n; i++) d->ids[d->n_rows + i] = next_id(p, done + i);
    add_rows(d, s, first, n,
             (struct model_hidden_rows){ .first = p->row + done, .n = n, .host = p->hidden });
    const bool wants = n == left && p->n_wanted > 0;
    if (wants) want_logits(d, p);
    move_part(d, p, n, wants);
    return n;
}

/* The position of p behind its i-th draft, with the hidden state of row `from` of the last pass. */
static void add_next(struct mtp_drafter *d, struct mtp_part *p, uint32_t i, int32_t from)
{
    const uint32_t pos = p->begin + p->n - p->n_verify - 1 + i,
                   most = pos + p->n_verify + p->n_most;
    if (p->n_wanted <= i || most >= p->s->n_tokens_max || !engine_draft_has_block(d->e, p->s, most))
        return;
    d->ids[d->n_rows] = seq_of(p->s)->drafts[i - 1];
    add_rows(d, p->s, pos, 1, (struct model_hidden_rows){ .first = (uint32_t)from, .n = 1 });
    want_logits(d, p);
    move_part(d, p, 1, true);
}

/* Passes 2, 3 .. of the sequences that the last pass has drafted a token of. Positions need blocks,
 * which the next step needs as well; nobody is preempted for them. */
static bool chain(struct mtp_drafter *d)
{
    const bool with_others = d->e->draft.group_rows > 0;
    for (uint32_t i = 1; i < d->e->draft.n_passes && (d->n_logits > 0 || with_others); i++) {
        const uint32_t n = d->n_logits;
        begin_pass(d, 1 + i);
        for (uint32_t k = 0; k < n; k++) add_next(d, d->of_logits[k], i, d->logit_rows[k]);
        if ((d->n_rows > 0 || with_others) && !run_pass(d)) return false;
    }
    return true;
}

/* How often pass 1 is made at least: as often as the rank with the most rows has to. */
static uint32_t n_first_passes(const struct mtp_drafter *d)
{
    const struct engine *e = d->e;
    const size_t rows = (size_t)e->draft.group_rows * e->opt.model->share.tp_size;
    return (uint32_t)div_up(rows, MODEL_DRAFT_ROWS_MAX);
}

static bool submit_passes(struct mtp_drafter *d)
{
    struct mtp_step *step = d->step;
    uint32_t n_passes = n_first_passes(d), done = 0;
    d->fetches = false;
    for (uint32_t i = 0; i < step->n_parts || n_passes > 0;) {
        begin_pass(d, 1);
        while (i < step->n_parts && d->n_rows < d->max_rows) {
            done += add_part(d, &step->parts[i], done);
            if (done < step->parts[i].n) break;
            i++;
            done = 0;
        }
        if (!run_pass(d) || !chain(d)) return false;
        if (n_passes > 0) n_passes--;
    }
    return true;
}

static bool run_passes(struct mtp_drafter *d) { return submit_passes(d) && fetch_drafts(d); }

/* Returns how many drafts are wanted. */
static uint32_t begin_drafts(struct mtp_drafter *d)
{
    uint32_t n = 0;
    d->n_submits++;
    for (uint32_t i = 0; i < d->step->n_parts; i++) {
        struct mtp_part *p = &d->step->parts[i];
        struct mtp_seq *of;
        if (!p->s->draft) p->s->draft = begin(&d->base, p->s->n_tokens_max);
        if ((of = seq_of(p->s))) of->n_tokens = p->n_tokens;
        if (of) of->n = 0, of->i_submit = d->n_submits;
        else p->n_wanted = 0;
        if (p->n_wanted > d->e->draft.n_passes) p->n_wanted = d->e->draft.n_passes;
        n += p->n_wanted;
    }
    return n;
}

/* A peer that goes on with a prompt begins with the hidden state of its last token. */
static void keep_hidden(const struct mtp_drafter *d)
{
    struct model *m = d->e->opt.model;
    for (uint32_t i = 0; i < d->step->n_parts; i++) {
        const struct mtp_part *p = &d->step->parts[i];
        if (!p->s->prefill_only || p->n_tokens == p->s->n_tokens) continue;
        p->s->hidden = mem_try_calloc(m->config.hidden, sizeof *p->s->hidden);
        if (p->s->hidden) model_get_hidden(m, p->row + p->n - 1, p->s->hidden);
    }
}

static uint64_t n_recorded_passes(const struct engine *e)
{
    const uint64_t *n = e->opt.model->kernels->n_graph_steps;
    return n[KERNEL_PASS] + n[KERNEL_CHAINED_PASS];
}

static void observe(struct drafter *base, const struct batch *b,
                    const struct token_logprobs *chosen)
{
    struct mtp_drafter *d = drafter_of(base);
    const uint64_t t0 = clock_ns(), n_recorded = n_recorded_passes(d->e);
    list_parts(d, b, chosen);
    const uint32_t n_drafts = begin_drafts(d);
    keep_hidden(d);
    if (!run_passes(d)) /* what was drafted means nothing */
        for (uint32_t i = 0; i < d->step->n_parts; i++)
            if (seq_of(d->step->parts[i].s)) seq_of(d->step->parts[i].s)->n = 0;
    counter_add(d->e->metrics.graph_passes, n_recorded_passes(d->e) - n_recorded);
    draft_control_count_drafting(&d->e->draft.control, n_drafts, (double)(clock_ns() - t0) * 1e-9);
}

/* ---- behind a step that is not complete ---- */

/* Where a device samples, a draft stays there as the next pass's token (a kept token of
 * kernel_step), and the passes are submitted with the step: pass 1 computes the positions of all
 * its drafts, of which wrong ones are written again, and pass 2 begins at the last right one
 * (kernel_move). The host fetches all drafts with the step's tokens. LIMIT: behind prompts of
 * peers, which begin with a hidden state that the host keeps, and on ranks, passes wait for the
 * step's tokens. */

static bool has_peers(const struct batch *b)
{
    for (uint32_t i = 0; i < b->n_chunks; i++)
        if (b->chunks[i].seq->prefill_only) return true;
    return b->streams;
}

static bool submit(struct drafter *base, const struct batch *b)
{
    struct mtp_drafter *d = drafter_of(base);
    struct engine *e = d->e;
    if (engine_is_of_ranks(e) || has_peers(b)) return false;
    const uint64_t n_recorded = n_recorded_passes(e);
    list_parts(d, b, NULL);
    (void)begin_drafts(d);
    (void)submit_passes(d);                           /* alone */
    for (uint32_t i = 0; i < d->step->n_parts; i++) { /* drafts are of no use before `collect` */
        struct mtp_seq *of = seq_of(d->step->parts[i].s);
        if (of) of->n_tokens = UINT32_MAX;
    }
    counter_add(e->metrics.graph_passes, n_recorded_passes(e) - n_recorded);
    return true;
}

/* The drafts of p, of which the host has the tokens now: behind these, for the step that is ahead
 * and verifies them; or for the next one. */
static void take_drafts(const struct mtp_drafter *d, const struct mtp_part *p, uint32_t slot,
                        const struct token_logprobs *chosen, const int32_t *kept)
{
    struct seq *s = p->s;
    struct mtp_seq *of = seq_of(s);
    const bool is_ahead = s->n_future > 1;
    const uint32_t n_right = engine_draft_n_right(s, chosen + p->logit, p->n_verify),
                   n_tokens = s->n_tokens + n_right + 1,
                   room = n_tokens < s->n_tokens_max ? s->n_tokens_max - n_tokens : 0,
                   n = p->n_made < room ? p->n_made : room;
    int32_t *to = is_ahead ? s->tokens + n_tokens : of->drafts;
    for (uint32_t i = 0; i < n; i++) to[i] = kept[model_kept_of_pass(d->e->opt.model, 1 + i, slot)];
    if (is_ahead) return;
    of->n_tokens = n_tokens;
    of->n = n;
}

/* The passes run behind the step, so what they take is what the host waits for here, if it came
 * before the step's end. */
static void collect(struct drafter *base, const struct batch *b,
                    const struct token_logprobs *chosen)
{
    struct mtp_drafter *d = drafter_of(base);
    const int parity = (int)(b - d->e->batches);
    struct mtp_step *step = &d->steps[parity];
    const uint64_t t0 = clock_ns();
    const int32_t *kept = model_fetch_drafts(d->e->opt.model, parity);
    uint32_t n_drafts = 0;
    for (uint32_t i = 0; i < step->n_parts; i++) n_drafts += step->parts[i].n_made;
    draft_control_count_drafting(&d->e->draft.control, n_drafts, (double)(clock_ns() - t0) * 1e-9);
    for (uint32_t i = 0; i < step->n_parts; i++) {
        struct mtp_part *p = &step->parts[i];
        p->s = b->chunks[p->i_chunk].seq;
        if (p->chooses && p->s && p->s->draft) take_drafts(d, p, i, chosen, kept);
    }
}

/* ---- before a step ---- */

/* Sequences that came with the hidden state of their last computed token: no step here has computed
 * it, and what the layer drafts behind it. LIMIT: not where ranks make their passes together: those
 * draft from the first step on. */
static void draft_first(struct mtp_drafter *d, const struct draft_request *requests, uint32_t n)
{
    struct engine *e = d->e;
    d->step = &d->steps[e->parity];
    d->step->n_parts = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct seq *s = requests[i].of;
        if (!s->hidden || s->hidden_at + 2 != s->n_tokens) continue;
        struct mtp_part p = { .s = s,
                              .begin = s->hidden_at,
                              .n = 1,
                              .last = s->tokens[s->n_tokens - 1],
                              .hidden = s->hidden,
                              .n_tokens = s->n_tokens };
        engine_draft_want(e, &s, &s->n_tokens, 1, &p.n_wanted);
        if (p.n_wanted > e->draft.n_passes) e->draft.n_passes = p.n_wanted;
        d->step->parts[d->step->n_parts++] = p;
    }
    if (d->step->n_parts == 0 || engine_is_of_ranks(e)) return;
    e->draft.group_rows = 0;
    begin_drafts(d);
    (void)run_passes(d); /* alone */
}

static void propose(struct drafter *base, struct draft_request *requests, uint32_t n)
{
    struct mtp_drafter *d = drafter_of(base);
    if (!engine_has_inflight(d->e)) draft_first(d, requests, n);
    for (uint32_t i = 0; i < n; i++) {
        struct draft_request *r = &requests[i];
        const struct mtp_seq *s = seq_of(r->of);
        if (!engine_has_inflight(d->e)) {
            mem_free(r->of->hidden);
            r->of->hidden = NULL;
        }
        r->n = r->level = 0;
        if (r->of->n_future > 0 ? s->i_submit != d->n_submits : s->n_tokens != r->n_tokens)
            continue; /* of a step that was given up, or is not the last */
        for (; r->n < s->n && r->n < r->n_max; r->n++) r->drafts[r->n] = s->drafts[r->n];
    }
}

const struct drafter_ops drafter_mtp_ops = {
    .name = "mtp",
    .observes = true,
    .chooses = true,
    .create = create,
    .free = free_drafter,
    .begin = begin,
    .observe = observe,
    .submit = submit,
    .collect = collect,
    .propose = propose,
    .end = end,
};
