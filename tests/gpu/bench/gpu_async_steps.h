/* gpu_async_steps.h - steps as the engine runs them: replayed from captured graphs if possible,
 * tokens sampled on the GPU, the host one step ahead. Thread: main. */
#ifndef BATON_TESTS_GPU_BENCH_GPU_ASYNC_STEPS_H
#define BATON_TESTS_GPU_BENCH_GPU_ASYNC_STEPS_H

#include "shared/model/model.h"
#include "tests/gpu/bench/gpu_ops.h"

/* Seconds. */
struct gpu_async_steps {
    double wall; /* from step to step, as the host sees it */
    double busy; /* of the card in a step, sampling included */
    double gap;  /* of the card between two steps */
};

/* Decode steps, all greedy, each continuing with the tokens that the card chose in the one before.
 * `b` has a row of logits for every row; ids, wants and turn are set here. False: the card does not
 * choose the tokens, and nothing was measured. */
bool gpu_async_steps_run(struct gpu_ops *ops, struct model *m, struct model_batch *b, int n_steps,
                         struct gpu_async_steps *out);

#endif
