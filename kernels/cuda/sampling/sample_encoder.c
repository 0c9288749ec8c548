/* sample_encoder.c - turns a request's parameters into edits of logits. Each source marks tokens in
 * a table of the vocabulary; a bit per token says which are marked, and scanning the bits gives the
 * edits in order of id without sorting. Thread: engine. */
#include "kernels/cuda/sampling/sample_encoder.h"

#include "shared/base/assert.h"
#include "shared/base/mem.h"

/* Flags in marks[]; the lower bits count occurrences in the output. */
#define IN_PROMPT 0x80000000u
#define FORBIDDEN 0x40000000u
#define BIASED    0x20000000u
#define FLAGS     (IN_PROMPT | FORBIDDEN | BIASED)

struct sample_encoder {
    uint32_t n_vocab;
    uint32_t *marks;                /* [n_vocab]; all 0 between calls */
    uint64_t *marked;               /* [n_vocab / 64 + 1] bits: marks[] is not 0; all 0 between
                                     * calls */
    int32_t *bias_of;               /* [n_vocab] of a BIASED token: its first bias */
    int32_t next[SAMPLER_BIAS_MAX]; /* the same token's next; -1: none */
    struct sample_edit *edits;      /* [n_vocab + SAMPLER_BIAS_MAX] */
};

struct sample_encoder *sample_encoder_create(uint32_t n_vocab)
{
    struct sample_encoder *m = MEM_NEW(struct sample_encoder);
    m->n_vocab = n_vocab;
    m->marks = MEM_ARRAY(uint32_t, n_vocab);
    m->marked = MEM_ARRAY(uint64_t, n_vocab / 64 + 1);
    m->bias_of = MEM_ARRAY(int32_t, n_vocab);
    m->edits = MEM_ARRAY(struct sample_edit, (size_t)n_vocab + SAMPLER_BIAS_MAX);
    return m;
}

void sample_encoder_free(struct sample_encoder *m)
{
    if (!m) return;
    mem_free(m->marks);
    mem_free(m->marked);
    mem_free(m->bias_of);
    mem_free(m->edits);
    mem_free(m);
}

/* The token's marks; NULL: not in the vocabulary. */
static uint32_t *mark(struct sample_encoder *m, int32_t id)
{
    if (id < 0 || (uint32_t)id >= m->n_vocab) return NULL;
    m->marked[id / 64] |= 1ull << (id % 64);
    return &m->marks[id];
}

static void mark_all(struct sample_encoder *m, const int32_t *ids, uint32_t n, uint32_t with)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t *marks = mark(m, ids[i]);
        if (marks) *marks |= with;
    }
}

/* Marks biased tokens. Biases of one token keep their order. */
static void mark_biases(struct sample_encoder *m, const struct sampling_params *p)
{
    ASSERT(p->n_bias <= SAMPLER_BIAS_MAX);
    for (int32_t i = (int32_t)p->n_bias - 1; i >= 0; i--) {
        int32_t id = p->bias[i].id;
        uint32_t *marks = mark(m, id);
        if (!marks) continue;
        m->next[i] = *marks & BIASED ? m->bias_of[id] : -1;
        m->bias_of[id] = i;
        *marks |= BIASED;
    }
}

static float repetition_of(const struct sampling_params *p)
{
    return p->repetition_penalty > 0 ? p->repetition_penalty : 1;
}

static void mark_occurrences(struct sample_encoder *m, const struct sample_request *w)
{
    /* Only repetition_penalty counts the prompt. */
    if (repetition_of(w->params) != 1) mark_all(m, w->tokens, w->n_prompt, IN_PROMPT);
    for (uint32_t i = w->n_prompt; i < w->n_tokens; i++) {
        uint32_t *marks = mark(m, w->tokens[i]);
        if (marks) ++*marks;
    }
}

/* Writes a token's edits at e; returns how many. */
static int32_t write_edits(const struct sample_encoder *m, const struct sampling_params *p,
                           int32_t id, uint32_t marks, struct sample_edit *e)
{
    uint32_t n_out = marks & ~FLAGS;
    int32_t n = 1;
    e[0] = (struct sample_edit){ .id = id, .forbid = (marks & FORBIDDEN) != 0 };
    if (marks & BIASED) {
        e[0].bias = p->bias[m->bias_of[id]].bias;
        for (int32_t i = m->next[m->bias_of[id]]; i >= 0; i = m->next[i])
            e[n++] = (struct sample_edit){ .id = id, .bias = p->bias[i].bias };
    }
    if (n_out == 0 && !(marks & IN_PROMPT)) return n;
    e[n - 1].penalise = 1;
    e[n - 1].count = n_out;
    return n;
}

/* Collects the edits of all marked tokens and clears the marks. */
static int32_t collect_edits(struct sample_encoder *m, const struct sampling_params *p)
{
    int32_t n = 0;
    for (uint32_t i = 0; i < m->n_vocab / 64 + 1; i++) {
        for (uint64_t left = m->marked[i]; left; left &= left - 1) {
            int32_t id = (int32_t)(i * 64) + __builtin_ctzll(left);
            n += write_edits(m, p, id, m->marks[id], m->edits + n);
            m->marks[id] = 0;
        }
        m->marked[i] = 0;
    }
    return n;
}

static int32_t make_edits(struct sample_encoder *m, const struct sample_request *w)
{
    const struct sampling_params *p = w->params;
    bool too_early = w->n_out < p->min_tokens;
    if (!too_early && p->n_bias == 0 && !sampling_has_penalties(p)) return 0;
    if (too_early) {
        mark_all(m, w->eos, w->n_eos, FORBIDDEN);
        mark_all(m, p->stop_ids, p->n_stop_ids, FORBIDDEN);
    }
    mark_biases(m, p);
    if (sampling_has_penalties(p)) mark_occurrences(m, w);
    return collect_edits(m, p);
}

static unsigned work_of(const struct sample_row_params *a, uint32_t n_vocab)
{
    unsigned work = (a->score >= 0 || a->n_logprobs >= 0 ? SAMPLE_LOGPROBS : 0) |
                    (a->n_chosen + a->n_drafts > 0 ? SAMPLE_FUTURE : 0) |
                    (a->n_verify > 0 ? SAMPLE_VERIFY : 0);
    if (a->score >= 0 || !(a->temperature >= 1e-5f)) return work;
    if ((a->top_k > 0 && (uint32_t)a->top_k < n_vocab) || a->top_p < 1) work |= SAMPLE_CUT;
    return work | SAMPLE_DRAW;
}

void sample_encoder_encode(struct sample_encoder *m, const struct sample_request *w,
                           struct sample_encoded *out)
{
    const struct sampling_params *p = w->params;
    bool chooses = w->score < 0;
    ASSERT(w->n_tokens >= w->n_prompt);
    ASSERT(w->n_out == w->n_tokens - w->n_prompt + w->future.n_chosen + w->future.n_drafts);
    *out = (struct sample_encoded){
        .params = { .seed = p->seed,
                    .index = w->n_out,
                    .min_tokens = p->min_tokens,
                    .after = w->future.after,
                    .temperature = p->temperature,
                    .min_p = p->min_p,
                    .top_p = p->top_p,
                    .top_k = p->top_k,
                    .allowed = chooses && p->allowed ? 0 : -1,
                    .n_logprobs = p->n_logprobs,
                    .score = w->score,
                    .kept_at = w->kept_at,
                    .n_verify = (int32_t)w->n_verify, },
        .edits = m->edits,
        .allowed = chooses ? p->allowed : NULL,
        .n_words = chooses && p->allowed ? (m->n_vocab + 63) / 64 : 0,
    };
    if (chooses) out->params.n_edits = make_edits(m, w);
    if (chooses && sampling_has_penalties(p)) {
        out->params.repetition = repetition_of(p);
        out->params.frequency = p->frequency_penalty;
        out->params.presence = p->presence_penalty;
        out->params.n_chosen = w->future.n_chosen;
        out->params.first_chosen = w->future.first_chosen;
        out->params.n_drafts = w->future.n_drafts;
        out->params.first_draft = w->future.first_draft;
        out->params.draft_stride = w->future.draft_stride;
    }
    out->work = work_of(&out->params, m->n_vocab);
}
