/* gpu.h - what the parts of bench_gpu share: the card's measured limits, its clock, and how a
 * result is said.
 *
 *   bench_gpu.c      commands
 *   gpu_limits.c     what the card can do at most, measured by the same program in the same minute
 *   gpu_cublas.c       one of these limits: the rate of cuBLAS, if a cuBLAS is on the machine
 *   gpu_ops.c      a row of kernels.h whose slots are timed and counted
 *   gpu_model.c      steps of a model, one by one, and as an engine runs them (gpu_async_steps.c)
 *   gpu_attention.c  decode attention alone
 *   gpu_kv_push.c       KV from one process to another over CUDA IPC
 *   gpu_kernels.cu   kernels that only measure
 *
 * Results are lines of JSON on standard output, one object each, with a member "kind":
 *   fact    name, value                  what the machine is
 *   figure  name, value, unit, and where there are: limit, limit_is, ratio, wanted, wanted_is
 *   slot    of, slot, what, calls, us, bytes, flops, of_limit     one row of a step's table
 *   note    text                         what was not run, and why
 * All that fails ends the program with a sentence: what was taken goes with the process. Thread:
 * main. */
#ifndef BATON_TESTS_GPU_BENCH_GPU_H
#define BATON_TESTS_GPU_BENCH_GPU_H

#include <cuda_runtime_api.h>

#include "kernels/backend.h"

/* Sizes: those of a card, or small enough for one that is emulated, whose figures mean nothing. */
struct gpu_sizes {
    bool tiny;
    size_t read_bytes; /* larger than any cache */
    int rounds;
    size_t product;      /* rows, columns and depth of the product that cuBLAS is
                          * measured with */
    int64_t hold_cycles; /* how long the card is kept busy while the host queues what is
                          * to be timed; 0: not */
};

struct gpu_limits {
    double read;         /* bytes per second: a kernel that reads memory */
    double copied;       /* bytes per second that cudaMemcpy copies from device memory to device
                          * memory; it reads and writes each */
    double bf16;         /* operations per second of cuBLAS on bf16 matrices of random numbers; 0:
                          * there is no cuBLAS here */
    double bf16_nominal; /* 0: not known. What products are held against where there is no cuBLAS */
};

struct gpu_figure {
    const char *name, *unit;
    double value, limit; /* limit 0: none */
    const char *limit_is;
    bool less_is_better; /* the ratio is value / limit all the same */
    double wanted;       /* the ratio that is wanted: at least, or at most where less is
                          * better; 0: none */
};

struct gpu_sizes gpu_sizes(bool tiny);

/* ---- saying ---- */

/* Ends the program when it is not so. */
void gpu_need(bool ok, const char *what, const char *why);
void gpu_cuda(cudaError_t e, const char *what);
void gpu_fact(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
void gpu_note(const char *format, ...) __attribute__((format(printf, 1, 2)));
void gpu_print_figure(const struct gpu_figure *f);
/* The operations per second that products are held against, and what that is. */
double gpu_product_limit(const struct gpu_limits *l, const char **what);

/* ---- measuring ---- */

struct gpu_timer {
    cudaEvent_t begin, end;
};

void gpu_timer_init(struct gpu_timer *t);
void gpu_timer_release(struct gpu_timer *t);
/* Seconds between the two, when both are over. */
double gpu_timer_s(const struct gpu_timer *t);
/* The middle one; sorts. */
double gpu_median(double *v, size_t n);

/* The stream that a context's slots put their work on. */
cudaStream_t gpu_stream(struct kernel_ctx *c);

void gpu_limits_measure(const struct gpu_sizes *s, bool print, struct gpu_limits *out);
/* Operations per second; 0 and a note where there is no library. `by`: where it was found. */
double gpu_cublas_bf16(const struct gpu_sizes *s, char *by, size_t by_bytes);

/* ---- commands, each an exit status ---- */

int gpu_limits_main(const struct gpu_sizes *s);
int gpu_model_main(const struct gpu_sizes *s, int argc, char **argv);
int gpu_attention_main(const struct gpu_sizes *s);
int gpu_kv_push_main(const struct gpu_sizes *s, bool checksum);

#endif
