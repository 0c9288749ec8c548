/* gpu_ops.h - a kernel_ops table that counts and times its calls and forwards them to the context's
 * own table.
 *
 * A step is run many times with the same work and calls its ops in the same order each time, so a
 * call has a number. The first run counts (struct gpu_op_call: bytes and operations from the op's
 * arguments; which experts are used only the GPU knows, so that is fetched). Then windows of calls
 * are timed, one window per run: before its first call the GPU is kept busy until the host has
 * queued the whole window, and an event is recorded after every call. So a time is GPU time, from
 * the end of one call to the end of the next; about a microsecond of it is the event's. The rest of
 * each run is not timed. Steps of long calls are one window, since the host is ahead anyway. Life
 * cycle: put, remove. Thread: main. */
#ifndef BATON_TESTS_GPU_BENCH_GPU_OPS_H
#define BATON_TESTS_GPU_BENCH_GPU_OPS_H

#include "tests/gpu/bench/gpu.h"

enum {
    GPU_OP_WHAT_BYTES = 112,
    GPU_OPS_WINDOW = 64 /* of short calls */,
    GPU_OPS_WINDOW_MAX = 2048,
    GPU_OPS_STEPS_MAX = 64
};

/* One call of an op in a step. */
struct gpu_op_call {
    const char *op;
    char what[GPU_OP_WHAT_BYTES]; /* shapes */
    double must;                  /* bytes that every implementation has to read: weights, keys
                                   * and values */
    double bytes;                 /* `must`, and inputs and outputs, each once */
    double flops;
    double us; /* median of the rounds; 0: not timed */
};

struct gpu_ops;

struct gpu_ops *gpu_ops_put(struct kernel_ctx *c, const struct gpu_sizes *sizes);
/* Restores the context's own table. */
void gpu_ops_remove(struct gpu_ops *s);

/* Counts the step that `run` runs and times all of its calls, `window` of them per run. */
void gpu_ops_measure(struct gpu_ops *s, int rounds, size_t window, void (*run)(void *arg),
                     void *arg);
/* The last measurement, valid until the next one. */
const struct gpu_op_call *gpu_ops_calls(const struct gpu_ops *s, size_t *n);
/* Runs the step once more and returns the seconds of GPU time from the beginning of its first call
 * to the end of its last. Call after gpu_ops_measure of the same step. */
double gpu_ops_busy(struct gpu_ops *s, void (*run)(void *arg), void *arg);
/* For steps that are submitted one ahead of what is fetched. An event is recorded where each begins
 * (its first op, or the launch of its graph) and ends. gpu_ops_follow says how many steps follow.
 * Once all were fetched, gpu_ops_followed returns the medians: seconds of a step, and seconds from
 * the end of one to the beginning of the next. */
void gpu_ops_follow(struct gpu_ops *s, int n_steps);
void gpu_ops_followed(struct gpu_ops *s, double *busy, double *gap);

/* Prints a table of the measurement: calls of equal shape together, the longest first. */
void gpu_ops_print(const struct gpu_ops *s, const char *of, const struct gpu_limits *l);

#endif
