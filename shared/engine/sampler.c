/* sampler.c - one row of logits to one token.
 *
 * Greedy and drawn tokens share the steps up to the temperature, done on a scratch copy (skipped
 * when nothing changes the logits). A draw then works on p[i] = exp((x[i] - max) / T),
 * unnormalised, max p = 1. Truncation never sorts the vocabulary: min_p is one threshold, top_k and
 * top_p are found by a quickselect over the candidates that can still be in the set: for top_k
 * those above a value that enough entries are known to reach. All three end as one `struct cutoff`,
 * the last kept entry in the order (larger p first, then smaller id), and the draw walks the
 * vocabulary in index order. Sums are in double and in a fixed order (chunks of SUM_CHUNK entries,
 * each in SUM_LANES partial sums, so that a compiler can add several at once), exp is the kernels'
 * own: the same logits, parameters, seed and index give the same token on every host. Logits that
 * are NaN count as -inf, +inf as the largest float.
 *
 * Thread: that of the call; several samplers may work at once. */
#include "shared/engine/sampler.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/host_math.h"
#include "shared/base/assert.h"
#include "shared/base/mem.h"
#include "shared/base/rng.h"

#define TEMPERATURE_GREEDY 1e-5f /* below: no draw */
#define TEMPERATURE_MIN    1e-2f /* smaller ones become this, as in vLLM */
#define SEEN               0x80000000u

enum { SUM_CHUNK = 1024, SUM_LANES = 8, PIECES_PER_KEPT = 4, PIECE_MIN = 16 };

struct cand {
    float p;
    int32_t id;
};

/* The last kept entry in the order (larger p, then smaller id). */
struct cutoff {
    float p;
    int32_t id;
};

struct sampler {
    struct kernel_ctx *kernels;
    uint32_t n_vocab;
    double *sums;       /* [n_vocab / SUM_CHUNK + 1] kept mass of each chunk, from the last call of
                         * mass */
    float *x;           /* [n_vocab] processed logits, then p */
    uint32_t *count;    /* [n_vocab] occurrences while penalties are applied; all 0 between calls */
    struct cand *cands; /* [n_vocab] */
};

struct sampler *sampler_create(uint32_t n_vocab, struct kernel_ctx *kernels)
{
    struct sampler *s = MEM_NEW(struct sampler);
    s->kernels = kernels;
    s->sums = MEM_ARRAY(double, n_vocab / SUM_CHUNK + 1);
    s->n_vocab = n_vocab;
    s->x = MEM_ARRAY(float, n_vocab);
    s->count = MEM_ARRAY(uint32_t, n_vocab);
    s->cands = MEM_ARRAY(struct cand, n_vocab);
    return s;
}

void sampler_free(struct sampler *s)
{
    if (!s) return;
    mem_free(s->sums);
    mem_free(s->x);
    mem_free(s->count);
    mem_free(s->cands);
    mem_free(s);
}

static bool in_vocab(const struct sampler *s, int32_t id)
{
    return id >= 0 && (uint32_t)id < s->n_vocab;
}

static bool is_allowed(const uint64_t *allowed, uint32_t id)
{
    return (allowed[id / 64] >> (id % 64) & 1) != 0;
}

/* ---- what changes logits ---- */

static bool ends_too_early(const struct sampler_input *in)
{
    return in->n_tokens - in->n_prompt < in->params->min_tokens;
}

static bool changes_logits(const struct sampler_input *in)
{
    const struct sampling_params *p = in->params;
    return p->allowed || p->n_bias || sampling_has_penalties(p) || ends_too_early(in);
}

static void forbid_ids(struct sampler *s, const int32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (in_vocab(s, ids[i])) s->x[ids[i]] = -INFINITY;
}

static void apply_penalties(struct sampler *s, const struct sampler_input *in)
{
    const struct sampling_params *p = in->params;
    float r = p->repetition_penalty > 0 ? p->repetition_penalty : 1;
    for (uint32_t i = 0; i < in->n_tokens; i++) {
        int32_t t = in->tokens[i];
        if (!in_vocab(s, t)) continue;
        if (i < in->n_prompt) s->count[t] |= SEEN;
        else s->count[t]++;
    }
    for (uint32_t i = 0; i < in->n_tokens; i++) {
        int32_t t = in->tokens[i];
        if (!in_vocab(s, t) || !s->count[t]) continue; /* 0: done at an earlier occurrence */
        uint32_t n_out = s->count[t] & ~SEEN;
        float x = s->x[t];
        x = x > 0 ? x / r : x * r;
        x -= p->frequency_penalty * (float)n_out;
        if (n_out) x -= p->presence_penalty;
        s->x[t] = x;
        s->count[t] = 0;
    }
}

/* Applies mask, min_tokens, bias and penalties. Returns the caller's row if nothing applies. */
static const float *process(struct sampler *s, const struct sampler_input *in)
{
    const struct sampling_params *p = in->params;
    if (!changes_logits(in)) return in->logits;
    memcpy(s->x, in->logits, s->n_vocab * sizeof *s->x);
    if (p->allowed)
        for (uint32_t i = 0; i < s->n_vocab; i++)
            if (!is_allowed(p->allowed, i)) s->x[i] = -INFINITY;
    if (ends_too_early(in)) {
        forbid_ids(s, in->eos, in->n_eos);
        forbid_ids(s, p->stop_ids, p->n_stop_ids);
    }
    for (uint32_t i = 0; i < p->n_bias; i++)
        if (in_vocab(s, p->bias[i].id)) s->x[p->bias[i].id] += p->bias[i].bias;
    if (sampling_has_penalties(p)) apply_penalties(s, in);
    return s->x;
}

/* The first largest entry; the first allowed token if no value is usable. */
static int32_t argmax(const struct sampler *s, const float *x, const uint64_t *allowed)
{
    int32_t best = host_argmax(s->kernels, x, s->n_vocab);
    if (best >= 0) return best;
    for (uint32_t i = 0; allowed && i < s->n_vocab; i++)
        if (is_allowed(allowed, i)) return (int32_t)i;
    return 0;
}

/* ---- the draw ---- */

static void to_probabilities(struct sampler *s, const float *x, float max, float temperature)
{
    float by = 1.0f / (temperature < TEMPERATURE_MIN ? TEMPERATURE_MIN : temperature);
    host_exp_terms(s->kernels, s->x, x, s->n_vocab, max > FLT_MAX ? FLT_MAX : max, by);
}

static bool comes_before(struct cand a, struct cand b)
{
    return a.p > b.p || (a.p == b.p && a.id < b.id);
}

static bool is_kept(struct cutoff c, float p, int32_t id)
{
    return p > c.p || (p == c.p && id <= c.id);
}

/* Returns the last entry of the smallest prefix of c, in the order of comes_before, whose weight
 * (count, or mass of p) reaches `target`. Reorders c. Quickselect: a half without the border is
 * summed, never sorted. */
static struct cand select_border(struct cand *c, uint32_t n, double target, bool by_count)
{
    uint32_t lo = 0, hi = n, mix = 0x9e3779b9u;
    double before = 0; /* weight of c[0..lo) */
    ASSERT(n > 0);
    while (hi - lo > 1) {
        mix = mix * 1664525u +
              1013904223u; /* pseudo-random pivots: no order of the vocabulary is a bad case */
        struct cand pivot = c[lo + (uint32_t)((uint64_t)mix * (hi - lo) >> 32)];
        uint32_t m = lo;
        double weight = 0;
        for (uint32_t i = lo; i < hi; i++) {
            if (!comes_before(c[i], pivot)) continue;
            struct cand t = c[i];
            c[i] = c[m];
            c[m++] = t;
            weight += by_count ? 1 : (double)t.p;
        }
        if (m > lo && before + weight >= target) {
            hi = m;
            continue;
        }
        before += weight + (by_count ? 1 : (double)pivot.p);
        if (before >= target) return pivot;
        /* The border comes after the pivot: moves the pivot to the end of the prefix. */
        for (uint32_t i = m; i < hi; i++) {
            if (c[i].id != pivot.id) continue;
            c[i] = c[m];
            c[m] = pivot;
            break;
        }
        lo = m + 1;
        if (lo == hi) return pivot; /* the list weighs less than target (rounding) */
    }
    return c[lo];
}

static uint32_t gather(struct sampler *s, struct cutoff keep, float above)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_vocab; i++)
        if (s->x[i] > above && is_kept(keep, s->x[i], (int32_t)i))
            s->cands[n++] = (struct cand){ s->x[i], (int32_t)i };
    return n;
}

/* Mass and number of the kept entries of one chunk. */
static double chunk_mass(const float *p, uint32_t first, uint32_t n, struct cutoff keep,
                         uint32_t *count)
{
    double lane[SUM_LANES] = { 0 };
    uint32_t kept[SUM_LANES] = { 0 };
    uint32_t i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES)
        for (uint32_t l = 0; l < SUM_LANES; l++) {
            uint32_t in = is_kept(keep, p[i + l], (int32_t)(first + i + l));
            lane[l] += in ? (double)p[i + l] : 0;
            kept[l] += in;
        }
    for (uint32_t l = 0; i < n; i++, l++) {
        uint32_t in = is_kept(keep, p[i], (int32_t)(first + i));
        lane[l] += in ? (double)p[i] : 0;
        kept[l] += in;
    }
    for (uint32_t l = 0; l < SUM_LANES; l++) *count += kept[l];
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) +
           ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

static double mass(struct sampler *s, struct cutoff keep, uint32_t *count)
{
    double sum = 0;
    *count = 0;
    for (uint32_t first = 0; first < s->n_vocab; first += SUM_CHUNK) {
        uint32_t n = s->n_vocab - first < SUM_CHUNK ? s->n_vocab - first : SUM_CHUNK;
        sum += s->sums[first / SUM_CHUNK] = chunk_mass(s->x + first, first, n, keep, count);
    }
    return sum;
}

/* The kept entry at which the running mass passes u. The chunk sums give its chunk. */
static int32_t entry_at(const struct sampler *s, struct cutoff keep, double u, int32_t otherwise)
{
    double sum = 0;
    uint32_t first = 0;
    for (; first < s->n_vocab && sum + s->sums[first / SUM_CHUNK] <= u; first += SUM_CHUNK)
        sum += s->sums[first / SUM_CHUNK];
    for (uint32_t i = first; i < s->n_vocab; i++) {
        if (!is_kept(keep, s->x[i], (int32_t)i)) continue;
        sum += (double)s->x[i];
        if (sum > u) return (int32_t)i;
        otherwise = (int32_t)i; /* rounding may leave u beyond the chunk's last entry */
    }
    return otherwise;
}

/* A lower bound of the k largest entries: the k-th largest of the maxima of equal pieces of the
 * vocabulary. 0 if the pieces would be too small to pay off. */
static float floor_of_top(struct sampler *s, uint32_t k)
{
    const uint32_t piece = s->n_vocab / PIECES_PER_KEPT / k;
    uint32_t n = 0;
    if (piece < PIECE_MIN) return 0;
    for (uint32_t first = 0; first + piece <= s->n_vocab; first += piece) {
        float max = 0;
        for (uint32_t i = first; i < first + piece; i++) max = s->x[i] > max ? s->x[i] : max;
        s->cands[n] = (struct cand){ max, (int32_t)n };
        n++;
    }
    return select_border(s->cands, n, k, true).p;
}

static struct cutoff truncate(struct sampler *s, const struct sampling_params *p)
{
    struct cutoff keep = { FLT_MIN, INT32_MAX }; /* all with a probability */
    if (p->min_p > keep.p) keep.p = p->min_p < 1 ? p->min_p : 1;
    if (p->top_k > 0 && (uint32_t)p->top_k < s->n_vocab) {
        float reached = floor_of_top(s, (uint32_t)p->top_k);
        uint32_t n = gather(s, keep, reached > 0 ? nextafterf(reached, 0) : 0);
        /* values equal to the k-th stay */
        if ((uint32_t)p->top_k <= n) keep.p = select_border(s->cands, n, p->top_k, true).p;
    }
    if (p->top_p < 1) {
        uint32_t n;
        double total = mass(s, keep, &n), top_p = p->top_p > 0 ? (double)p->top_p : 0;
        /* Entries of at most (1 - top_p) / n of the mass each weigh at most 1 - top_p together, so
         * none is needed. */
        float needless = (float)((1 - top_p) * total / (double)n * 0.999);
        n = gather(s, keep, needless);
        struct cand border = select_border(s->cands, n, top_p * total, false);
        keep = (struct cutoff){ border.p, border.id };
    }
    return keep;
}

static int32_t draw(struct sampler *s, const struct sampler_input *in, const float *x)
{
    const struct sampling_params *p = in->params;
    int32_t best = argmax(s, x, p->allowed);
    float max = x[best];
    if (!(max > -INFINITY)) return best;
    to_probabilities(s, x, max, p->temperature);
    struct cutoff keep = truncate(s, p);
    uint32_t n_kept;
    double total = mass(s, keep, &n_kept);
    return entry_at(s, keep, rng_uniform(p->seed, 0, in->n_tokens - in->n_prompt) * total, best);
}

int32_t sampler_sample(struct sampler *s, const struct sampler_input *in,
                       struct token_logprobs *out)
{
    ASSERT(in->n_tokens >= in->n_prompt);
    const struct sampling_params *p = in->params;
    const float *x = process(s, in);
    bool greedy = !(p->temperature >= TEMPERATURE_GREEDY);
    int32_t id = greedy ? argmax(s, x, p->allowed) : draw(s, in, x);
    if (p->n_logprobs >= 0) sampler_logprobs(s, in->logits, in->lse, id, p->n_logprobs, out);
    else *out = (struct token_logprobs){ .id = id };
    return id;
}

/* ---- logprobs ---- */

static float logprob_of(float logit, float lse)
{
    float lp = logit - lse;
    return isnan(lp) ? -INFINITY : lp;
}

static void top_logits(const struct sampler *s, const float *logits, float lse, uint32_t n_top,
                       struct token_logprobs *out)
{
    float best[SAMPLER_LOGPROBS_MAX];
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_vocab; i++) {
        float v = logits[i];
        if (n == n_top && !(v > best[n - 1])) continue; /* on a tie the smaller id came first */
        if (isnan(v)) continue;
        uint32_t at = n < n_top ? n++ : n - 1;
        for (; at > 0 && v > best[at - 1]; at--) {
            best[at] = best[at - 1];
            out->top[at] = out->top[at - 1];
        }
        best[at] = v;
        out->top[at].id = (int32_t)i;
        out->top[at].logprob = logprob_of(v, lse);
    }
    out->n_top = n;
}

void sampler_logprobs(struct sampler *s, const float *logits, float lse, int32_t id, int32_t n_top,
                      struct token_logprobs *out)
{
    ASSERT(in_vocab(s, id));
    *out = (struct token_logprobs){ .id = id, .logprob = logprob_of(logits[id], lse) };
    for (uint32_t i = 0; i < s->n_vocab; i++) out->rank += logits[i] >= logits[id];
    if (out->rank == 0) out->rank = (int32_t)s->n_vocab; /* the token's own logit is NaN */
    if (n_top > SAMPLER_LOGPROBS_MAX) n_top = SAMPLER_LOGPROBS_MAX;
    if (n_top > 0) top_logits(s, logits, lse, (uint32_t)n_top, out);
}
