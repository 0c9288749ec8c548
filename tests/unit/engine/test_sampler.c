/* test_sampler.c - each rule of the sampler against values computed by hand, and the draw against
 * its distribution. */
#include "shared/engine/sampler.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/mem.h"
#include "shared/base/rng.h"
#include "tests/harness/test.h"

enum { V = 8 };

static const float LOGITS[V] = { 0.5f, 2.0f, -1.0f, 3.0f, 2.0f, 0.0f, -3.0f, 1.0f };
static const int32_t PROMPT[3] = { 1, 3, 3 };

static struct sampling_params greedy(void)
{
    return (struct sampling_params){
        .top_p = 1, .repetition_penalty = 1, .n_logprobs = -1, .seed = 1, .max_tokens = 100
    };
}

/* One context for all tests, never freed. */
static struct kernel_ctx *kernels(void)
{
    static struct kernel_ctx *c;
    struct err err;
    if (!c)
        CHECK_OK(kernel_ctx_create(kernel_options_default("auto", ACTIVATIONS_F32, 1), &c, &err));
    return c;
}

static struct sampling_params warm(float temperature)
{
    struct sampling_params p = greedy();
    p.temperature = temperature;
    return p;
}

static int32_t sample_row(const float *logits, uint32_t n_vocab, const struct sampling_params *p,
                          const int32_t *tokens, uint32_t n_tokens, uint32_t n_prompt)
{
    static const int32_t eos[1] = { 3 };
    struct sampler *s = sampler_create(n_vocab, kernels());
    struct token_logprobs lp;
    struct sampler_input in = {
        .logits = logits,
        .params = p,
        .tokens = tokens,
        .n_tokens = n_tokens,
        .n_prompt = n_prompt,
        .eos = eos,
        .n_eos = 1,
    };
    int32_t id = sampler_sample(s, &in, &lp);
    CHECK_EQ_INT(lp.id, id);
    sampler_free(s);
    return id;
}

static int32_t sample(const struct sampling_params *p)
{
    return sample_row(LOGITS, V, p, PROMPT, 3, 3);
}

/* The set of ids in 400 draws, as bits. */
static unsigned support(const float *logits, struct sampling_params p)
{
    unsigned seen = 0;
    for (uint64_t seed = 0; seed < 400; seed++) {
        p.seed = seed;
        seen |= 1u << sample_row(logits, V, &p, PROMPT, 3, 3);
    }
    return seen;
}

TEST(greedy_takes_the_first_largest)
{
    struct sampling_params p = greedy();
    const float tie[V] = { 0, 1, 5, 5, 5, 0, 0, 0 };
    CHECK_EQ_INT(sample(&p), 3);
    CHECK_EQ_INT(sample_row(tie, V, &p, PROMPT, 3, 3), 2);
    p.temperature = 9e-6f;
    CHECK_EQ_INT(sample(&p), 3);
    p.temperature = NAN;
    CHECK_EQ_INT(sample(&p), 3);
}

TEST(bias_moves_the_choice)
{
    const struct logit_bias bias[4] = { { 6, 6.5f }, { 3, -100 }, { -1, 100 }, { V, 100 } };
    struct sampling_params p = greedy();
    p.bias = bias;
    p.n_bias = 4;
    CHECK_EQ_INT(sample(&p), 6);
}

TEST(mask_leaves_only_allowed_ids)
{
    uint64_t allowed = 1u << 2 | 1u << 6;
    struct sampling_params p = greedy();
    p.allowed = &allowed;
    CHECK_EQ_INT(sample(&p), 2);
    p = warm(5);
    p.allowed = &allowed;
    CHECK_EQ_INT(support(LOGITS, p), 1u << 2 | 1u << 6);
}

TEST(end_tokens_wait_for_min_tokens)
{
    struct sampling_params p = greedy();
    int32_t tokens[6] = { 0, 0, 0, 5, 5, 5 };
    p.min_tokens = 2;
    p.n_stop_ids = 1;
    p.stop_ids[0] = 1;
    /* not 3 (end token), not 1 (stop id) */
    CHECK_EQ_INT(sample_row(LOGITS, V, &p, tokens, 3, 3), 4);
    CHECK_EQ_INT(sample_row(LOGITS, V, &p, tokens, 4, 3), 4);
    CHECK_EQ_INT(sample_row(LOGITS, V, &p, tokens, 5, 3), 3);
}

TEST(repetition_penalty_counts_prompt_and_output)
{
    struct sampling_params p = greedy();
    p.repetition_penalty = 2; /* 3 → 1.5 (once, though it occurs twice), 1 → 1.0; 4 stays 2.0 */
    CHECK_EQ_INT(sample(&p), 4);
    const float negative[V] = { -1, -1.5f, -9, -0.9f, -9, -9, -9, -9 };
    CHECK_EQ_INT(sample_row(negative, V, &p, PROMPT, 3, 3), 0); /* 3 → -1.8, 1 → -3 */
    int32_t tokens[4] = { 1, 3, 3, 4 };
    /* 1.5 against 1.0 (1, 4) and 1.0 (7) */
    CHECK_EQ_INT(sample_row(LOGITS, V, &p, tokens, 4, 3), 3);
}

TEST(presence_and_frequency_count_output_only)
{
    struct sampling_params p = greedy();
    int32_t tokens[6] = { 3, 3, 3, 3, 3, 1 };
    p.presence_penalty = 1.5f;
    CHECK_EQ_INT(sample_row(LOGITS, V, &p, tokens, 3, 3), 3);
    CHECK_EQ_INT(sample_row(LOGITS, V, &p, tokens, 5, 3), 1); /* 3 → 1.5 */
    CHECK_EQ_INT(sample_row(LOGITS, V, &p, tokens, 6, 3), 4); /* 1 → 0.5 as well */
    p.presence_penalty = 0;
    p.frequency_penalty = 0.6f;
    CHECK_EQ_INT(sample_row(LOGITS, V, &p, tokens, 4, 3), 3); /* 2.4 */
    CHECK_EQ_INT(sample_row(LOGITS, V, &p, tokens, 5, 3), 1); /* 1.8 */
    p.frequency_penalty = -1;
    CHECK_EQ_INT(sample_row(LOGITS, V, &p, tokens, 6, 3), 3);
}

TEST(penalties_leave_no_trace_for_the_next_call)
{
    struct sampler *s = sampler_create(V, kernels());
    struct sampling_params p = greedy();
    struct token_logprobs lp;
    struct sampler_input in = {
        .logits = LOGITS, .params = &p, .tokens = PROMPT, .n_tokens = 3, .n_prompt = 0
    };
    p.frequency_penalty = 1; /* 3 → 1.0, 1 → 1.0 */
    CHECK_EQ_INT(sampler_sample(s, &in, &lp), 4);
    in.n_tokens = 0;
    CHECK_EQ_INT(sampler_sample(s, &in, &lp), 3);
    sampler_free(s);
}

TEST(min_p_is_relative_to_the_best)
{
    struct sampling_params p = warm(1); /* p relative to 3: ids 1, 4: e^-1 = 0.368; 7: e^-2 = 0.135;
                                         * 0: e^-2.5 = 0.082 */
    p.min_p = 0.3f;
    CHECK_EQ_INT(support(LOGITS, p), 1u << 3 | 1u << 1 | 1u << 4);
    p.min_p = 0.13f;
    CHECK_EQ_INT(support(LOGITS, p), 1u << 3 | 1u << 1 | 1u << 4 | 1u << 7);
    p.min_p = 1;
    CHECK_EQ_INT(support(LOGITS, p), 1u << 3);
}

TEST(top_k_keeps_ties_with_the_last)
{
    struct sampling_params p = warm(1);
    p.top_k = 1;
    CHECK_EQ_INT(support(LOGITS, p), 1u << 3);
    p.top_k = 2; /* 1 and 4 are equal */
    CHECK_EQ_INT(support(LOGITS, p), 1u << 3 | 1u << 1 | 1u << 4);
    p.top_k = 4;
    CHECK_EQ_INT(support(LOGITS, p), 1u << 3 | 1u << 1 | 1u << 4 | 1u << 7);
    p.temperature = 10;
    p.top_k = V;
    CHECK_EQ_INT(support(LOGITS, p), (1u << V) - 1);
    p.top_k = 0;
    CHECK_EQ_INT(support(LOGITS, p), (1u << V) - 1);
    p.top_k = -1;
    CHECK_EQ_INT(support(LOGITS, p), (1u << V) - 1);
}

TEST(top_p_keeps_the_smallest_set_that_reaches_it)
{
    /* p = 0.4, 0.3, 0.2, 0.1 */
    const float logits[V] = { logf(0.2f), logf(0.4f), -INFINITY, logf(0.1f),
                              logf(0.3f), -INFINITY,  NAN,       -INFINITY };
    struct sampling_params p = warm(1);
    p.top_p = 0.39f;
    CHECK_EQ_INT(support(logits, p), 1u << 1);
    p.top_p = 0.41f;
    CHECK_EQ_INT(support(logits, p), 1u << 1 | 1u << 4);
    p.top_p = 0.69f;
    CHECK_EQ_INT(support(logits, p), 1u << 1 | 1u << 4);
    p.top_p = 0.89f;
    CHECK_EQ_INT(support(logits, p), 1u << 1 | 1u << 4 | 1u << 0);
    p.top_p = 0.91f;
    CHECK_EQ_INT(support(logits, p), 1u << 1 | 1u << 4 | 1u << 0 | 1u << 3);
    p.top_p = 0;
    CHECK_EQ_INT(support(logits, p), 1u << 1);
    p.top_k = 3; /* the rest renormalised: 0.444, 0.333, 0.222 */
    p.top_p = 0.76f;
    CHECK_EQ_INT(support(logits, p), 1u << 1 | 1u << 4);
    p.top_p = 0.79f;
    CHECK_EQ_INT(support(logits, p), 1u << 1 | 1u << 4 | 1u << 0);
}

/* The same selection by sorting. */
static double sorted_mass(float *p, uint32_t n, int32_t top_k, double top_p, float *threshold)
{
    for (uint32_t i = 1; i < n; i++) { /* insertion sort, descending */
        float v = p[i];
        uint32_t j = i;
        for (; j > 0 && p[j - 1] < v; j--) p[j] = p[j - 1];
        p[j] = v;
    }
    uint32_t kept = top_k > 0 && (uint32_t)top_k < n ? (uint32_t)top_k : n;
    double total = 0, sum = 0;
    for (uint32_t i = 0; i < kept; i++) total += (double)p[i];
    uint32_t m = 0;
    while (m < kept && (m == 0 || sum < top_p * total)) sum += (double)p[m++];
    *threshold = p[m - 1];
    return sum;
}

TEST(truncation_agrees_with_sorting)
{
    enum { N = 300 };
    static float logits[N], p[N];
    for (uint64_t round = 0; round < 300; round++) {
        for (uint64_t i = 0; i < N; i++) logits[i] = (float)(8 * rng_uniform(round, 1, i));
        struct sampling_params sp = warm((float)(0.2 + 2 * rng_uniform(round, 2, 0)));
        sp.top_k = round % 3 ? (int32_t)(rng_uniform(round, 3, 0) * 2 * N) : 0;
        sp.top_p = (float)rng_uniform(round, 4, 0);
        for (uint32_t i = 0; i < N; i++)
            p[i] = (float)exp((double)(logits[i] - 8) / (double)sp.temperature);
        float threshold;
        sorted_mass(p, N, sp.top_k, (double)sp.top_p, &threshold);
        for (uint64_t seed = 0; seed < 20; seed++) {
            sp.seed = seed;
            int32_t id = sample_row(logits, N, &sp, PROMPT, 3, 3);
            CHECK(exp((double)(logits[id] - 8) / (double)sp.temperature) >=
                  (double)threshold * (1 - 1e-5));
        }
    }
}

static int larger_first(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* A draw among only the k largest values is the same, bit for bit, in vocabularies so large that
 * candidates are searched above a floor, with many equal values. */
TEST(top_k_of_large_vocabularies)
{
    enum { N = 20011 };
    static float logits[N], only[N], sorted[N];
    static const int32_t ks[] = { 1, 2, 7, 50, 300, 312, 313, 5000, N - 1 };
    for (uint64_t round = 0; round < 12; round++) {
        const double steps = round % 3 == 0 ? 40 : 1e6; /* few different values: the k-th has many
                                                         * equals */
        for (uint64_t i = 0; i < N; i++)
            logits[i] = sorted[i] = (float)(floor(rng_uniform(round, 1, i) * steps) / steps * 9);
        if (round % 4 == 1) logits[N - 1] = sorted[N - 1] = 20; /* after the last whole piece */
        /* the largest all in one piece */
        for (uint64_t i = 0; i < 50 && round % 4 == 2; i++) logits[i] = sorted[i] = 30;
        qsort(sorted, N, sizeof *sorted, larger_first);
        for (size_t k = 0; k < COUNT_OF(ks); k++) {
            struct sampling_params p = warm(0.8f), plain = p;
            p.top_k = ks[k];
            p.min_p = plain.min_p = round % 2 ? 0.01f : 0;
            for (uint32_t i = 0; i < N; i++)
                only[i] = logits[i] >= sorted[ks[k] - 1] ? logits[i] : -INFINITY;
            for (uint64_t seed = 0; seed < 5; seed++) {
                p.seed = plain.seed = seed;
                CHECK_EQ_INT(sample_row(logits, N, &p, PROMPT, 3, 3),
                             sample_row(only, N, &plain, PROMPT, 3, 3));
            }
        }
    }
}

TEST(draw_follows_the_distribution)
{
    enum { DRAWS = 40000 };
    const double want[4] = { 0.1, 0.2, 0.3, 0.4 };
    float logits[V];
    for (int i = 0; i < V; i++) logits[i] = i < 4 ? (float)log(want[i]) + 11 : -INFINITY;
    struct sampler *s = sampler_create(V, kernels());
    struct sampling_params p = warm(1);
    struct sampler_input in = {
        .logits = logits, .params = &p, .tokens = PROMPT, .n_tokens = 3, .n_prompt = 3
    };
    struct token_logprobs lp;
    int count[V] = { 0 };
    for (uint64_t seed = 0; seed < DRAWS; seed++) {
        p.seed = seed * 0x9e3779b97f4a7c15u;
        count[sampler_sample(s, &in, &lp)]++;
    }
    double chi2 = 0;
    for (int i = 0; i < 4; i++)
        chi2 += (count[i] - DRAWS * want[i]) * (count[i] - DRAWS * want[i]) / (DRAWS * want[i]);
    CHECK(chi2 < 16.3); /* three degrees of freedom, 0.1 % */
    sampler_free(s);
}

TEST(draw_at_temperature_two_flattens)
{
    enum { DRAWS = 20000 };
    const float logits[2] = { 0, 2 };
    struct sampling_params p = warm(2); /* p(1) = 1 / (1 + e^-1) */
    int ones = 0;
    for (uint64_t seed = 0; seed < DRAWS; seed++) {
        p.seed = seed;
        ones += sample_row(logits, 2, &p, PROMPT, 3, 3);
    }
    CHECK_NEAR((double)ones / DRAWS, 0.7310586, 0.012);
}

TEST(draw_depends_on_seed_and_index_only)
{
    enum { N = 64 };
    int32_t tokens[N + 3] = { 0 };
    struct sampling_params p = warm(3);
    int differ = 0, seed_differs = 0;
    for (uint32_t i = 0; i < N; i++) {
        p.seed = 42;
        int32_t a = sample_row(LOGITS, V, &p, tokens, 3 + i, 3),
                b = sample_row(LOGITS, V, &p, tokens, 1 + i, 1);
        CHECK_EQ_INT(a, b); /* the same output index after another prompt */
        if (i) differ += a != sample_row(LOGITS, V, &p, tokens, 3, 3);
        p.seed = 43;
        seed_differs += a != sample_row(LOGITS, V, &p, tokens, 3 + i, 3);
    }
    CHECK(differ > N / 4);
    CHECK(seed_differs > N / 4);
}

TEST(rows_without_usable_values_give_a_token)
{
    const float nan_row[V] = { NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN };
    const float mixed[V] = { NAN, -INFINITY, 1, NAN, 2, NAN, NAN, -1 };
    const float infinite[V] = { 0, INFINITY, 1, INFINITY, FLT_MAX, 0, 0, 0 };
    uint64_t allowed = 1u << 5;
    for (int i = 0; i < 3; i++) {
        struct sampling_params p = warm(i == 0 ? 0 : 0.7f);
        if (i == 2) p.top_p = 0.5f;
        CHECK_EQ_INT(sample_row(nan_row, V, &p, PROMPT, 3, 3), 0);
        unsigned id = (unsigned)sample_row(mixed, V, &p, PROMPT, 3, 3);
        CHECK(id == 2 || id == 4 || id == 7);
        id = (unsigned)sample_row(infinite, V, &p, PROMPT, 3, 3);
        CHECK(id == 1 || id == 3 || id == 4);
        p.allowed = &allowed;
        CHECK_EQ_INT(sample_row(nan_row, V, &p, PROMPT, 3, 3), 5);
    }
}

TEST(logprobs_are_of_the_untouched_logits)
{
    double sum = 0;
    for (int i = 0; i < V; i++) sum += exp((double)LOGITS[i]);
    float lse = (float)log(sum);
    const struct logit_bias bias = { 6, 50 };
    struct sampler *s = sampler_create(V, kernels());
    struct sampling_params p = greedy();
    struct token_logprobs lp;
    struct sampler_input in = {
        .logits = LOGITS, .lse = lse, .params = &p, .tokens = PROMPT, .n_tokens = 3, .n_prompt = 3
    };
    p.bias = &bias;
    p.n_bias = 1;
    p.n_logprobs = 4;
    CHECK_EQ_INT(sampler_sample(s, &in, &lp), 6);
    CHECK_NEAR(lp.logprob, -3 - lse, 1e-6);
    CHECK_EQ_INT(lp.rank, 8);
    CHECK_EQ_INT(lp.n_top, 4);
    const int32_t want[4] = { 3, 1, 4, 7 };
    for (int i = 0; i < 4; i++) {
        CHECK_EQ_INT(lp.top[i].id, want[i]);
        CHECK_NEAR(lp.top[i].logprob, LOGITS[want[i]] - lse, 1e-6);
    }
    p.n_logprobs = 0;
    sampler_sample(s, &in, &lp);
    CHECK_EQ_INT(lp.n_top, 0);
    CHECK_NEAR(lp.logprob, -3 - lse, 1e-6);
    sampler_free(s);
}

TEST(rank_counts_ties_and_survives_nan)
{
    const float row[V] = { 1, 2, 2, NAN, -INFINITY, 0, 0, 3 };
    struct sampler *s = sampler_create(V, kernels());
    struct token_logprobs lp;
    sampler_logprobs(s, row, 4, 1, 20, &lp);
    CHECK_EQ_INT(lp.rank, 3);
    CHECK_EQ_INT(lp.n_top, 7);
    CHECK_EQ_INT(lp.top[0].id, 7);
    CHECK_EQ_INT(lp.top[1].id, 1);
    CHECK_EQ_INT(lp.top[2].id, 2);
    CHECK_EQ_INT(lp.top[6].id, 4);
    sampler_logprobs(s, row, 4, 3, 1, &lp);
    CHECK(lp.logprob == -INFINITY);
    CHECK_EQ_INT(lp.rank, V);
    CHECK_EQ_INT(lp.n_top, 1);
    sampler_free(s);
}

TEST_MAIN(CASE(greedy_takes_the_first_largest), CASE(bias_moves_the_choice),
          CASE(mask_leaves_only_allowed_ids), CASE(end_tokens_wait_for_min_tokens),
          CASE(repetition_penalty_counts_prompt_and_output),
          CASE(presence_and_frequency_count_output_only),
          CASE(penalties_leave_no_trace_for_the_next_call), CASE(min_p_is_relative_to_the_best),
          CASE(top_k_keeps_ties_with_the_last), CASE(top_p_keeps_the_smallest_set_that_reaches_it),
          CASE(truncation_agrees_with_sorting), CASE(top_k_of_large_vocabularies),
          CASE(draw_follows_the_distribution), CASE(draw_at_temperature_two_flattens),
          CASE(draw_depends_on_seed_and_index_only), CASE(rows_without_usable_values_give_a_token),
          CASE(logprobs_are_of_the_untouched_logits), CASE(rank_counts_ties_and_survives_nan))
