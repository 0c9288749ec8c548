/* draft_model.c - drafts of a small model with the same vocabulary, in the same process.
 *
 * It has a KV pool of its own, for as many tokens as the engine's, and computes before the step
 * that verifies its drafts: on the CPU on the same threads, on a GPU in a kernel context of its
 * own, since captured steps belong to one. A sequence's tokens are computed when it decodes, at
 * most CATCH_UP_ROWS of all sequences before a step, so that a long prompt delays no others; it
 * gets drafts once its last token is computed. Where blocks run out a sequence gets none, and after
 * a fault of its GPU nobody: the engine's own steps say what that means. Thread: engine. */
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/engine/engine_state.h"

enum {
    CATCH_UP_ROWS = 256,
    PADDING_MAX = 1024 /* ids that one of two models of a vocabulary has behind its tokens */
};

struct model_seq {
    struct draft_seq base;
    int32_t *blocks; /* [cap_blocks] */
    uint32_t n_blocks, cap_blocks;
    uint32_t n_computed; /* positions whose KV is in the blocks */
    /* Behind n_tokens tokens it drafted n; those but the last are computed. */
    uint32_t n_tokens, n, n_wanted;
    int32_t drafts[DRAFT_TOKENS_MAX];
};

struct model_drafter {
    struct drafter base;
    struct engine *e;
    struct model *m;
    struct kv_layout layout;
    struct dev_mem kv;
    struct kv_pool *pool;
    uint32_t max_rows;
    bool has_failed;
    /* Of a pass */
    uint32_t n_rows, n_seqs, n_logits;
    int32_t *ids, *pos, *logit_rows;        /* [max_rows], [.], [max_seqs] */
    struct attn_seq *attn;                  /* [2 max_seqs] */
    struct draft_request **of_logits;       /* [max_seqs] */
    float *logits;                          /* [max_seqs, n_vocab] */
    struct sample_request *sample_requests; /* [max_seqs] */
    struct token_logprobs *chosen;          /* likewise */
    struct seq **seqs;                      /* [max_seqs], for engine_draft_want */
    uint32_t *n_tokens, *n_wanted;
};

/* ---- life ---- */

static struct model_drafter *drafter_of(struct drafter *base)
{
    return (struct model_drafter *)base;
}

static struct model_seq *seq_of(const struct draft_request *r)
{
    return (struct model_seq *)r->seq;
}

static void free_drafter(struct drafter *base)
{
    struct model_drafter *d = drafter_of(base);
    kv_pool_destroy(d->pool);
    if (d->kv.ptr) device_mem_free(d->m->kernels->device, &d->kv);
    mem_free(d->ids);
    mem_free(d->pos);
    mem_free(d->logit_rows);
    mem_free(d->attn);
    mem_free(d->of_logits);
    mem_free(d->logits);
    mem_free(d->sample_requests);
    mem_free(d->chosen);
    mem_free(d->seqs);
    mem_free(d->n_tokens);
    mem_free(d->n_wanted);
    mem_free(d);
}

static enum status check_model(const struct draft_config *c, const struct engine *e,
                               struct err *err)
{
    const struct model *m = c->draft_model;
    if (!m)
        return err_field(err, ERR_CONFIG, "model", "method draft needs \"model\": a small model");
    const int64_t n = m->config.n_vocab, of_model = e->opt.model->config.n_vocab;
    if (n - of_model > PADDING_MAX || of_model - n > PADDING_MAX)
        return err_field(err, ERR_CONFIG, "model",
                         "the draft model has %u tokens and the model %u: both need the same "
                         "vocabulary, but for padding",
                         m->config.n_vocab, e->opt.model->config.n_vocab);
    return OK;
}

static void make_arrays(struct model_drafter *d, size_t n)
{
    d->ids = MEM_ARRAY(int32_t, d->max_rows);
    d->pos = MEM_ARRAY(int32_t, d->max_rows);
    d->logit_rows = MEM_ARRAY(int32_t, n);
    d->attn = MEM_ARRAY(struct attn_seq, 2 * n);
    d->of_logits = MEM_ARRAY(struct draft_request *, n);
    d->logits = MEM_ARRAY(float, n * d->m->config.n_vocab);
    d->sample_requests = MEM_ARRAY(struct sample_request, n);
    d->chosen = MEM_ARRAY(struct token_logprobs, n);
    d->seqs = MEM_ARRAY(struct seq *, n);
    d->n_tokens = MEM_ARRAY(uint32_t, n);
    d->n_wanted = MEM_ARRAY(uint32_t, n);
}

static enum status prepare(struct model_drafter *d, struct err *err)
{
    const struct engine *e = d->e;
    struct model_prepare_args s = {
        .max_seqs = engine_max_attn_seqs(e->opt.max_seqs),
        .block_tokens = e->opt.block_tokens,
        .n_blocks = e->opt.n_blocks,
        .capture_graphs = !e->opt.eager,
    };
    model_kv_layout(d->m, e->opt.block_tokens, e->opt.n_blocks, &d->layout);
    TRY(kv_layout_check(&d->layout, err));
    TRY(device_mem_alloc(d->m->kernels->device, kv_layout_pool_bytes(&d->layout),
                         DEVICE_MEM_PRIVATE, &d->kv, err));
    s.kv = d->kv.ptr;
    return model_prepare(d->m, &s, err);
}

static enum status create(const struct draft_config *c, struct engine *e, struct drafter **out,
                          struct err *err)
{
    TRY(check_model(c, e, err));
    struct model_drafter *d = MEM_NEW(struct model_drafter);
    *d = (struct model_drafter){ .base = { *c }, .e = e, .m = c->draft_model };
    d->max_rows = d->m->max_rows < CATCH_UP_ROWS ? d->m->max_rows : CATCH_UP_ROWS;
    const enum status st = prepare(d, err);
    if (st != OK) {
        free_drafter(&d->base);
        return st;
    }
    d->pool = kv_pool_create(e->opt.n_blocks, e->opt.block_tokens, false);
    make_arrays(d, e->opt.max_seqs);
    *out = &d->base;
    return OK;
}

static struct draft_seq *begin(struct drafter *base, uint32_t n_tokens_max)
{
    struct model_seq *s = mem_try_calloc(1, sizeof *s);
    if (!s) return NULL;
    s->base.n_tokens_max = n_tokens_max;
    s->cap_blocks = seq_blocks_for(n_tokens_max, drafter_of(base)->layout.block_tokens);
    s->blocks = mem_try_calloc(s->cap_blocks, sizeof *s->blocks);
    if (s->blocks) return &s->base;
    mem_free(s);
    return NULL;
}

static void end(struct drafter *base, struct draft_seq *of)
{
    struct model_seq *s = (struct model_seq *)of;
    if (!s) return;
    while (s->n_blocks > 0) kv_pool_unref(drafter_of(base)->pool, s->blocks[--s->n_blocks]);
    mem_free(s->blocks);
    mem_free(s);
}

/* ---- a pass ---- */

/* Has it blocks for the first n positions, or can it get them? */
static bool has_blocks(struct model_drafter *d, struct model_seq *s, uint32_t n)
{
    if (n > d->m->max_len) return false;
    while (s->n_blocks * d->layout.block_tokens < n) {
        if (s->n_blocks == s->cap_blocks ||
            kv_pool_alloc(d->pool, 1, s->blocks + s->n_blocks) != OK)
            return false;
        s->n_blocks++;
    }
    return true;
}

/* Rows of positions [first, first + n), whose ids are set. */
static void add_rows(struct model_drafter *d, struct draft_request *r, uint32_t first, uint32_t n)
{
    struct model_seq *s = seq_of(r);
    d->attn[d->n_seqs++] = (struct attn_seq){
        .q_begin = (int32_t)d->n_rows,
        .n_q = (int32_t)n,
        .pos_begin = (int32_t)first,
        .block_table = s->blocks,
        .is_decode = n == 1,
    };
    for (uint32_t i = 0; i < n; i++) d->pos[d->n_rows + i] = (int32_t)(first + i);
    d->n_rows += n;
    s->n_computed = first + n;
}

/* The last row added chooses a draft. */
static void want_logits(struct model_drafter *d, struct draft_request *r)
{
    const uint32_t i = d->n_logits++;
    d->of_logits[i] = r;
    d->logit_rows[i] = (int32_t)d->n_rows - 1;
    d->sample_requests[i] = drafter_greedy(r->tokens, i);
}

/* Nothing is drafted any more after a fault. */
static bool has_failed(struct model_drafter *d)
{
    struct err why;
    if (d->has_failed || device_fault(d->m->kernels->device, &why) == OK) return d->has_failed;
    log_error("drafting has ended", "why=\"%s\"", why.text);
    d->has_failed = true;
    return true;
}

static void run_pass(struct model_drafter *d)
{
    const struct model_batch b = {
        .n_rows = (int32_t)d->n_rows,
        .ids = d->ids,
        .pos = d->pos,
        .seqs = d->attn,
        .n_seqs = (int32_t)d->n_seqs,
        .logit_rows = d->logit_rows,
        .n_logits = (int32_t)d->n_logits,
        .logits = d->logits,
        .sample_requests = d->sample_requests,
        .kv = d->kv.ptr,
        .n_blocks = d->layout.n_blocks,
        .block_tokens = d->layout.block_tokens,
    };
    if (model_submit(d->m, &b)) model_fetch(d->m, b.parity, d->chosen, d->n_logits);
    else drafter_choose_on_host(d->m, d->logits, d->n_logits, d->chosen);
    if (has_failed(d)) return;
    for (uint32_t i = 0; i < d->n_logits; i++) {
        struct model_seq *s = seq_of(d->of_logits[i]);
        const int32_t id = d->chosen[i].id;
        s->drafts[s->n++] = id < 0 ? 0 : id;
    }
}

static void clear_pass(struct model_drafter *d) { d->n_rows = d->n_seqs = d->n_logits = 0; }

/* ---- proposals ---- */

/* Keeps the positions whose tokens are still what was computed: drafts that were right. */
static void forget_wrong(struct draft_request *r)
{
    struct model_seq *s = seq_of(r);
    uint32_t right = 0;
    while (right < s->n && s->n_tokens + right < r->n_tokens &&
           s->drafts[right] == r->tokens[s->n_tokens + right])
        right++;
    if (s->n_computed > s->n_tokens + right) s->n_computed = s->n_tokens + right;
    if (s->n_computed >= r->n_tokens) s->n_computed = r->n_tokens - 1; /* one chooses the draft */
    s->n_tokens = r->n_tokens;
    s->n = s->n_wanted = 0;
}

/* One that only the model has is taken for any other: what is drafted behind it may be wrong. */
static int32_t id_of(const struct model_drafter *d, int32_t token)
{
    return (uint32_t)token < d->m->config.n_vocab ? token : 0;
}

/* Computes known tokens that are not computed yet, as many as one pass takes. */
static void catch_up(struct model_drafter *d, struct draft_request *requests, uint32_t n)
{
    clear_pass(d);
    for (uint32_t i = 0; i < n && d->n_rows < d->max_rows; i++) {
        struct draft_request *r = &requests[i];
        struct model_seq *s = seq_of(r);
        const uint32_t room = d->max_rows - d->n_rows, left = r->n_tokens - s->n_computed,
                       some = left < room ? left : room, first = s->n_computed;
        if (!has_blocks(d, s, first + some)) continue;
        for (uint32_t k = 0; k < some; k++) d->ids[d->n_rows + k] = id_of(d, r->tokens[first + k]);
        add_rows(d, r, first, some);
        if (some == left && s->n_wanted > 0) want_logits(d, r);
    }
    if (d->n_rows > 0) run_pass(d);
}

/* Each draft is computed to choose the next one. */
static void chain(struct model_drafter *d)
{
    for (uint32_t i = 1; i < d->base.config.n_tokens && d->n_logits > 0 && !d->has_failed; i++) {
        const uint32_t n = d->n_logits;
        clear_pass(d);
        for (uint32_t k = 0; k < n; k++) {
            struct draft_request *r = d->of_logits[k];
            struct model_seq *s = seq_of(r);
            if (s->n_wanted <= i || !has_blocks(d, s, s->n_computed + 1)) continue;
            d->ids[d->n_rows] = s->drafts[i - 1];
            add_rows(d, r, s->n_computed, 1);
            want_logits(d, r);
        }
        if (d->n_rows > 0) run_pass(d);
    }
}

static void want_drafts(struct model_drafter *d, struct draft_request *requests, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        d->seqs[i] = requests[i].of;
        d->n_tokens[i] = requests[i].n_tokens;
    }
    engine_draft_want(d->e, d->seqs, d->n_tokens, n, d->n_wanted);
    for (uint32_t i = 0; i < n; i++) seq_of(&requests[i])->n_wanted = d->n_wanted[i];
}

static void propose(struct drafter *base, struct draft_request *requests, uint32_t n)
{
    struct model_drafter *d = drafter_of(base);
    const uint64_t t0 = clock_ns();
    const uint32_t n_vocab = d->e->opt.model->config.n_vocab;
    uint32_t n_drafts = 0;
    for (uint32_t i = 0; i < n; i++) forget_wrong(&requests[i]);
    want_drafts(d, requests, n);
    if (!has_failed(d)) catch_up(d, requests, n);
    chain(d);
    for (uint32_t i = 0; i < n; i++) {
        struct draft_request *r = &requests[i];
        const struct model_seq *s = seq_of(r);
        r->level = r->n = 0;
        for (; r->n < s->n && r->n < r->n_max; r->n++) {
            if ((uint32_t)s->drafts[r->n] >= n_vocab) break; /* only the small model has it */
            r->drafts[r->n] = s->drafts[r->n];
        }
        n_drafts += r->n;
    }
    draft_control_count_drafting(&d->e->draft.control, n_drafts, (double)(clock_ns() - t0) * 1e-9);
}

const struct drafter_ops drafter_model_ops = {
    .name = "draft",
    .chooses = true,
    .create = create,
    .free = free_drafter,
    .begin = begin,
    .observe = drafter_observe_nothing,
    .submit = drafter_submit_nothing,
    .collect = drafter_observe_nothing,
    .propose = propose,
    .end = end,
};
