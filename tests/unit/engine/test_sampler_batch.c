/* test_sampler_batch.c - rows sampled in parallel equal rows sampled one by one, on any number of
 * threads. */
#include "shared/engine/sampler_batch.h"

#include <string.h>

#include "shared/base/mem.h"
#include "shared/base/rng.h"
#include "tests/harness/test.h"

enum { N_VOCAB = 70001, N_ROWS = 13, N_TOKENS = 40, N_PROMPT = 30 };

static float logits[N_ROWS][N_VOCAB];
static int32_t tokens[N_TOKENS];

/* Every kind of work of a row. */
static struct sampling_params params_of(int i)
{
    struct sampling_params p = {
        .top_p = 1,
        .repetition_penalty = 1,
        .n_logprobs = -1,
        .seed = 77 + (uint64_t)i,
        .max_tokens = 100,
    };
    if (i % 2) p.temperature = 0.9f;
    if (i % 3 == 1) p.top_k = 40;
    if (i % 5 == 1) p.top_p = 0.8f;
    if (i % 4 == 3) p.min_p = 0.02f;
    if (i % 3 == 2) p.presence_penalty = 0.4f, p.repetition_penalty = 1.3f;
    if (i % 4 == 0) p.n_logprobs = 3;
    return p;
}

static void check(int n_threads, size_t n_rows)
{
    struct sampling_params params[N_ROWS];
    struct sampler_row rows[N_ROWS] = { 0 };
    struct kernel_ctx *c;
    struct sampler_batch *b;
    struct err err;
    CHECK_OK(
        kernel_ctx_create(kernel_options_default("auto", ACTIVATIONS_F32, n_threads), &c, &err));
    CHECK_OK(sampler_batch_create(N_VOCAB, c, &b, &err));
    struct sampler *one = sampler_create(N_VOCAB, c);
    for (size_t i = 0; i < n_rows; i++) {
        params[i] = params_of((int)i);
        rows[i].score = i % 7 == 6 ? (int32_t)(i * 100) : -1;
        rows[i].in = (struct sampler_input){
            .logits = logits[i],
            .lse = 12.5f,
            .params = &params[i],
            .tokens = tokens,
            .n_tokens = N_TOKENS,
            .n_prompt = N_PROMPT,
        };
    }
    for (int again = 0; again < 3; again++) { /* with used scratch */
        sampler_batch_run(b, rows, n_rows);
        for (size_t i = 0; i < n_rows; i++) {
            struct token_logprobs want;
            if (rows[i].score < 0) CHECK_EQ_INT(sampler_sample(one, &rows[i].in, &want), want.id);
            else
                sampler_logprobs(one, logits[i], 12.5f, rows[i].score, params[i].n_logprobs, &want);
            const struct token_logprobs *have = &rows[i].out;
            CHECK_EQ_INT(have->id, want.id);
            CHECK(have->n_top == want.n_top && have->rank == want.rank &&
                  memcmp(&have->logprob, &want.logprob, sizeof want.logprob) == 0);
            CHECK(memcmp(have->top, want.top, want.n_top * sizeof *want.top) == 0);
        }
    }
    sampler_free(one);
    sampler_batch_free(b);
    kernel_ctx_free(c);
}

TEST(rows_side_by_side_are_rows_one_by_one)
{
    for (uint64_t i = 0; i < N_ROWS; i++)
        for (uint64_t k = 0; k < N_VOCAB; k++)
            logits[i][k] = (float)(14 * rng_uniform(i, 5, k) * rng_uniform(i, 6, k) - 4);
    for (int i = 0; i < N_TOKENS; i++) tokens[i] = i * i % 600;
    for (int n_threads = 1; n_threads <= 5; n_threads += 2) {
        check(n_threads, N_ROWS);
        check(n_threads, 2);
        check(n_threads, 1);
        check(n_threads, 0);
    }
}

TEST_MAIN(CASE_T(rows_side_by_side_are_rows_one_by_one, 120))
