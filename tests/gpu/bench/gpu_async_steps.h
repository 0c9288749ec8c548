/* gpu_async_steps.h - steps as the engine runs them: replayed from captured graphs if possible,
 * tokens sampled on the GPU, the host one step ahead. Thread: main. */
#ifndef BATON_TESTS_GPU_BENCH_GPU_ASYNC_STEPS_H
#define BATON_TESTS_GPU_BENCH_GPU_ASYNC_STEPS_H

#include "shared/model/model.h"
#include "tests/gpu/bench/gpu_ops.h"

/* Times in seconds. */
struct gpu_async_steps {
    double wall; /* from step to step, as the host sees it */
    double busy; /* GPU time of a step, including sampling */
    double gap;  /* GPU time between two steps */
};

/* Runs greedy decode steps, each with the tokens that the GPU sampled in the previous one. `b` has
 * a row of logits for every row; ids, wants and turn are set here. False: this backend does not
 * sample on the GPU, and nothing was measured. */
bool gpu_async_steps_run(struct gpu_ops *ops, struct model *m, struct model_batch *b, int n_steps,
                         struct gpu_async_steps *out);

#endif
