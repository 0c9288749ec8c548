/* bench_ranks.h - engines of one process as ranks, and how long they take for sequences: what
 * benchmarks of nodes and groups share.
 *
 * Ranks are measured next to one that has the whole model and as many threads as they have
 * together, in turn. The best round of each counts, as others may be using the machine; where they
 * always are, the median of the rounds' ratios.
 * Thread: main; engines have their own, events arrive by atomic counts. */
#ifndef BATON_TESTS_PERF_BENCH_RANKS_H
#define BATON_TESTS_PERF_BENCH_RANKS_H

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/engine/engine.h"
#include "tests/fixtures/rank_meeting.h"

enum {
    BENCH_PROMPT_MAX = 256,
    BENCH_BLOCK = 64,
    BENCH_WAITING = 128,
    BENCH_ROUNDS_MAX = 64,
    BENCH_OUT_MAX = 64
};

struct bench_rank {
    struct kernel_ctx *kernels;
    struct engine *engine;
    struct metrics *metrics;
    struct model_share share;
    struct rank_seat seat;
    struct ep *ep;
    struct model_experts *experts; /* NULL: those of the share */
    pthread_t thread;
    size_t rows;    /* of what the rank's thread is to measure, */
    double seconds; /* and the result */
};

/* What all ranks of a comparison have in common. */
struct bench_model {
    const char *path;
    bool dummy;
    uint32_t step_rows, max_seqs, n_blocks; /* of a rank */
    void (*on_node_bell)(void *arg, uint64_t step);
    void (*on_group)(void *arg, const struct engine_group_event *ev);
};

static atomic_int bench_n_finished;
static atomic_ullong bench_first_ns; /* when the first token came */
/* When the first sequence's tokens came: written by its engine, read when all have finished. */
static uint64_t bench_token_ns[BENCH_OUT_MAX];

static inline void bench_on_event(void *arg, const struct engine_event *ev)
{
    unsigned long long none = 0;
    (void)arg;
    if (ev->kind == ENGINE_TOKEN)
        atomic_compare_exchange_strong(&bench_first_ns, &none, clock_ns());
    if (ev->kind == ENGINE_TOKEN && ev->id == 1) bench_token_ns[ev->index] = clock_ns();
    if (ev->kind != ENGINE_FINISHED) return;
    CHECK_OK(ev->status);
    atomic_fetch_add(&bench_n_finished, 1);
}

static inline void bench_on_fault(void *arg, const struct err *err)
{
    (void)arg;
    test_fail(__FILE__, __LINE__, "%s", err->text);
}

/* Makes a folder with a config.json, for dummy weights. */
static inline void bench_folder(char folder[static 24], const char *config)
{
    char path[40];
    snprintf(folder, 24, "/tmp/bench_XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *f = fopen(path, "w");
    CHECK(f != NULL && fputs(config, f) >= 0 && fclose(f) == 0);
}

static inline void bench_folder_remove(const char *folder)
{
    char path[40];
    snprintf(path, sizeof path, "%s/config.json", folder);
    CHECK(unlink(path) == 0 && rmdir(folder) == 0);
}

/* r->share has been set. */
static inline void bench_open(struct bench_rank *r, const struct bench_model *b, int n_threads)
{
    struct err err = { 0 };
    struct model *m;
    CHECK_OK(kernel_ctx_create(kernel_options_default("auto", ACTIVATIONS_FAST, n_threads),
                               &r->kernels, &err));
    const struct model_options mo = { .path = b->path,
                                      .dummy = b->dummy,
                                      .max_rows = b->step_rows,
                                      .max_logits = engine_max_logits(b->max_seqs),
                                      .kernels = r->kernels,
                                      .share = &r->share };
    if (model_load(&mo, &m, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    r->metrics = metrics_create();
    const struct engine_options eo = { .model = m,
                                       .block_tokens = BENCH_BLOCK,
                                       .n_blocks = b->n_blocks,
                                       .max_seqs = b->max_seqs,
                                       .max_batched_tokens = b->step_rows,
                                       .max_waiting = BENCH_WAITING,
                                       .metrics = r->metrics,
                                       .on_event = bench_on_event,
                                       .on_fault = bench_on_fault,
                                       .on_node_bell = b->on_node_bell,
                                       .on_group = b->on_group,
                                       .follows = r->share.tp_rank > 0,
                                       .arg = r };
    if (engine_create(&eo, &r->engine, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
}

/* All engines of a node or group have been stopped. */
static inline void bench_close(struct bench_rank *r)
{
    engine_free(r->engine);
    kernel_ctx_free(r->kernels);
    metrics_free(r->metrics);
}

/* Runs f on a thread for each of n ranks. */
static inline void bench_on_all(struct bench_rank *ranks, int n, void *(*f)(void *))
{
    for (int i = 0; i < n; i++) CHECK(pthread_create(&ranks[i].thread, NULL, f, &ranks[i]) == 0);
    for (int i = 0; i < n; i++) CHECK(pthread_join(ranks[i].thread, NULL) == 0);
}

struct bench_time {
    double wall, cpu, step; /* seconds; cpu: of all threads, the whole run; step: the shortest */
};

static inline double bench_cpu_seconds(void)
{
    struct timespec t;
    CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t) == 0);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* The least time from one of n tokens to the next, which other programs disturb least. */
static inline double bench_step(uint32_t n)
{
    double least = INFINITY;
    for (uint32_t i = 1; i < n; i++)
        least = fmin(least, (double)(bench_token_ns[i] - bench_token_ns[i - 1]) * 1e-9);
    return least;
}

/* Runs n sequences, given to n_ranks engines in turn; from the first token, or if there is one
 * each, from the beginning, to the last. */
static inline struct bench_time bench_run(struct bench_rank *ranks, int n_ranks, int n,
                                          uint32_t n_prompt, uint32_t n_out)
{
    int32_t tokens[BENCH_PROMPT_MAX];
    CHECK(n_prompt <= BENCH_PROMPT_MAX && n_out <= BENCH_OUT_MAX);
    const int32_t n_vocab = (int32_t)engine_model(ranks->engine)->config.n_vocab;
    atomic_store(&bench_n_finished, 0);
    atomic_store(&bench_first_ns, 0);
    const uint64_t begin_ns = clock_ns();
    const double cpu = bench_cpu_seconds();
    for (int i = 0; i < n; i++) {
        for (uint32_t t = 0; t < n_prompt; t++)
            tokens[t] = (int32_t)((uint32_t)i * 131 + t * 7919) % n_vocab;
        const struct engine_request q = {
            .id = (uint64_t)i + 1,
            .tokens = tokens,
            .n_tokens = n_prompt,
            .n_prompt = n_prompt,
            .sampling = { .top_p = 1,
                          .repetition_penalty = 1,
                          .max_tokens = n_out,
                          .ignore_eos = true,
                          .n_logprobs = -1 },
        };
        CHECK_OK(engine_submit(ranks[i % n_ranks].engine, &q));
    }
    while (atomic_load(&bench_n_finished) < n) usleep(200);
    const uint64_t from = n_out > 1 ? atomic_load(&bench_first_ns) : begin_ns;
    return (struct bench_time){ (double)(clock_ns() - from) * 1e-9, bench_cpu_seconds() - cpu,
                                bench_step(n_out) };
}

/* Rounds of both in turn. */
struct bench_rounds {
    int n;
    struct bench_time whole[BENCH_ROUNDS_MAX], ranks[BENCH_ROUNDS_MAX];
};

static inline void bench_take(struct bench_rounds *b, struct bench_time whole,
                              struct bench_time ranks)
{
    CHECK(b->n < BENCH_ROUNDS_MAX);
    b->whole[b->n] = whole;
    b->ranks[b->n++] = ranks;
}

/* The least of a member of all rounds. */
static inline struct bench_time bench_best(const struct bench_time *v, int n)
{
    struct bench_time best = { INFINITY, INFINITY, INFINITY };
    for (int i = 0; i < n; i++) {
        best.wall = fmin(best.wall, v[i].wall);
        best.cpu = fmin(best.cpu, v[i].cpu);
        best.step = fmin(best.step, v[i].step);
    }
    return best;
}

static inline int bench_compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Prints the rates of the best rounds, their ratio, the median of the rounds' ratios, and the CPU
 * time of one rank by that of the ranks, which other programs disturb less, and in which waiting
 * for each other is not seen. */
static inline void bench_print(const char *what, const char *kind, const struct bench_rounds *b,
                               double tokens)
{
    double ratios[BENCH_ROUNDS_MAX];
    const struct bench_time whole = bench_best(b->whole, b->n), best = bench_best(b->ranks, b->n);
    for (int i = 0; i < b->n; i++) ratios[i] = b->whole[i].wall / b->ranks[i].wall;
    qsort(ratios, (size_t)b->n, sizeof *ratios, bench_compare);
    printf("%-9s %s %8.1f tokens/s   one rank %8.1f tokens/s   ratio %.3f, median of the rounds' "
           "%.3f (goal: at least 0.9)   CPU time %.2f and %.2f s, ratio %.3f\n",
           what, kind, tokens / best.wall, tokens / whole.wall, whole.wall / best.wall,
           ratios[b->n / 2], best.cpu, whole.cpu, whole.cpu / best.cpu);
    if (isfinite(best.step))
        printf("%-9s shortest step %.2f and %.2f ms, ratio %.3f\n", what, best.step * 1e3,
               whole.step * 1e3, whole.step / best.step);
    fflush(stdout);
}

#endif
