/* bench_sampler.c - time to sample a batch's tokens, next to reading the logits from memory once.
 *
 *     bench_sampler [isa] [threads] [batch]       defaults: auto, 2, 8
 *
 * The vocabulary has 151,936 tokens (Qwen's), the context 1,000, and the logits are distributed
 * like a model's: few are large, most small. They are rewritten before every step, outside of the
 * time, as the head would. Each line: milliseconds per step (the best of many), milliseconds to
 * read the logits once on these threads, and the ratio of the two. */
#include <math.h>
#include <stdlib.h>

#include "shared/base/mem.h"
#include "shared/engine/sampler_batch.h"
#include "tests/perf/limits.h"

enum { N_VOCAB = 151936, N_TOKENS = 1000, N_PROMPT = 800, BATCH_MAX = 256, STEPS = 20 };

static const struct {
    const char *name;
    struct sampling_params p;
} KINDS[] = {
    { "greedy", { .top_p = 1, .repetition_penalty = 1, .n_logprobs = -1 } },
    { "greedy, penalties",
      { .top_p = 1, .repetition_penalty = 1.1f, .presence_penalty = 0.5f, .n_logprobs = -1 } },
    { "temperature 1",
      { .temperature = 1, .top_p = 1, .repetition_penalty = 1, .n_logprobs = -1 } },
    { "top_p 0.95",
      { .temperature = 0.7f, .top_p = 0.95f, .repetition_penalty = 1, .n_logprobs = -1 } },
    { "top_k 50",
      { .temperature = 0.7f, .top_p = 1, .top_k = 50, .repetition_penalty = 1, .n_logprobs = -1 } },
    { "top_k 20, top_p 0.8, penalties",
      {
          .temperature = 0.7f,
          .top_p = 0.8f,
          .top_k = 20,
          .repetition_penalty = 1.05f,
          .n_logprobs = -1,
      } },
    { "greedy, 5 logprobs", { .top_p = 1, .repetition_penalty = 1, .n_logprobs = 5 } },
};

/* The sum of two uniform numbers, squared and signed: most of it small. */
static void fill(float *x, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        float a = (float)(seed >> 16 & 255) / 255, b = (float)(seed >> 24) / 255;
        x[i] = 18 * (a + b - 1) * fabsf(a + b - 1) - 3;
    }
}

int main(int argc, char **argv)
{
    struct err err;
    struct kernel_ctx *c;
    const size_t batch = argc > 3 ? (size_t)atoi(argv[3]) : 8;
    int32_t tokens[N_TOKENS];
    struct sampler_batch *s;
    static struct sampling_params params[BATCH_MAX];
    static struct sampler_row rows[BATCH_MAX];
    if (batch < 1 || batch > BATCH_MAX ||
        kernel_ctx_create(kernel_options_default(argc > 1 ? argv[1] : "auto", ACTIVATIONS_FAST,
                                                 argc > 2 ? atoi(argv[2]) : 2),
                          &c, &err) != OK) {
        fprintf(stderr, "usage: bench_sampler [isa] [threads] [batch of 1 to %d]\n", BATCH_MAX);
        return 2;
    }
    if (sampler_batch_create(N_VOCAB, c, &s, &err) != OK) return 1;
    float *logits = MEM_ARRAY(float, batch *N_VOCAB);
    for (int i = 0; i < N_TOKENS; i++) tokens[i] = i * 131 % 5000;
    const double gbytes = read_gbytes(c),
                 read_ms = (double)(batch * N_VOCAB * sizeof *logits) / gbytes * 1e-6;
    printf("%zu rows of %d, %s, %d threads; reading them at %.1f GB/s takes %.3f ms\n", batch,
           N_VOCAB, c->backend->name, compute_pool_threads(c->pool), gbytes, read_ms);
    for (size_t k = 0; k < COUNT_OF(KINDS); k++) {
        double best = INFINITY;
        for (uint32_t step = 0; step < STEPS; step++) {
            fill(logits, batch * N_VOCAB, step);
            for (size_t i = 0; i < batch; i++) {
                params[i] = KINDS[k].p;
                params[i].seed = i;
                rows[i].score = -1;
                rows[i].in = (struct sampler_input){
                    .logits = logits + i * N_VOCAB,
                    .lse = 20,
                    .params = &params[i],
                    .tokens = tokens,
                    .n_tokens = N_TOKENS,
                    .n_prompt = N_PROMPT,
                };
            }
            const uint64_t t0 = clock_ns();
            sampler_batch_run(s, rows, batch);
            const double ms = (double)(clock_ns() - t0) * 1e-6;
            best = ms < best ? ms : best;
        }
        printf("%-32s %8.3f ms   ratio %.3f\n", KINDS[k].name, best, read_ms / best);
    }
    mem_free(logits);
    sampler_batch_free(s);
    kernel_ctx_free(c);
    return 0;
}
