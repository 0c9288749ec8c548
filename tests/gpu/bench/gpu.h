/* gpu.h - what the parts of bench_gpu share: the GPU's measured limits, a timer, and printing
 * results.
 *
 * Results are lines of JSON on standard output, one object each, with a member "kind":
 *   fact    name, value                  a property of the machine
 *   figure  name, value, unit, and if there are: limit, limit_is, ratio, wanted, wanted_is
 *   op      of, op, what, calls, us, bytes, flops, of_limit     a line of the table of a step
 *   note    text                         what was not run, and why
 * Every failure ends the program with a sentence; the process's memory goes with it. Thread: main.
 */
#ifndef BATON_TESTS_GPU_BENCH_GPU_H
#define BATON_TESTS_GPU_BENCH_GPU_H

#include <cuda_runtime_api.h>

#include "kernels/backend.h"

/* Sizes for a real GPU, or small ones for an emulated GPU, whose figures mean nothing. */
struct gpu_sizes {
    bool tiny;
    size_t read_bytes; /* larger than any cache */
    int rounds;
    size_t product;      /* rows, columns and depth of the product that cuBLAS is
                          * measured with */
    int64_t hold_cycles; /* how long the GPU is kept busy while the host queues what is
                          * to be timed; 0: not at all */
};

struct gpu_limits {
    double read;         /* bytes per second: a kernel that reads memory */
    double copied;       /* bytes per second that cudaMemcpy copies from device memory to device
                          * memory; it reads and writes each */
    double bf16;         /* operations per second of cuBLAS on bf16 matrices of random numbers; 0:
                          * there is no cuBLAS on this machine */
    double bf16_nominal; /* by the data sheet, for when there is no cuBLAS; 0: not known */
};

struct gpu_figure {
    const char *name, *unit;
    double value, limit; /* limit 0: none */
    const char *limit_is;
    bool less_is_better; /* the ratio is value / limit all the same */
    double wanted;       /* the goal for the ratio: at least, or at most if less is better; 0:
                          * none */
};

struct gpu_sizes gpu_sizes(bool tiny);

/* ---- saying ---- */

/* Ends the program with a sentence if `ok` is false. */
void gpu_need(bool ok, const char *what, const char *why);
void gpu_cuda(cudaError_t e, const char *what);
void gpu_fact(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
void gpu_note(const char *format, ...) __attribute__((format(printf, 1, 2)));
void gpu_print_figure(const struct gpu_figure *f);
/* The limit of products in operations per second, and what that limit is. */
double gpu_product_limit(const struct gpu_limits *l, const char **what);

/* ---- measuring ---- */

struct gpu_timer {
    cudaEvent_t begin, end;
};

void gpu_timer_init(struct gpu_timer *t);
void gpu_timer_release(struct gpu_timer *t);
/* Waits for both events and returns the seconds between them. */
double gpu_timer_s(const struct gpu_timer *t);
/* The median. Sorts v. */
double gpu_median(double *v, size_t n);

/* The stream on which a context's ops launch. */
cudaStream_t gpu_stream(struct kernel_ctx *c);

void gpu_limits_measure(const struct gpu_sizes *s, bool print, struct gpu_limits *out);
/* Operations per second; 0 and a note if there is no library. `by`: which file was loaded. */
double gpu_cublas_bf16(const struct gpu_sizes *s, char *by, size_t by_bytes);

/* ---- commands, each an exit status ---- */

int gpu_limits_main(const struct gpu_sizes *s);
int gpu_model_main(const struct gpu_sizes *s, int argc, char **argv);
int gpu_attention_main(const struct gpu_sizes *s);
int gpu_gemm_main(const struct gpu_sizes *s);
int gpu_kv_push_main(const struct gpu_sizes *s, bool checksum);

#endif
