/* card.h - what the parts of bench_card share: the card's measured limits, its clock, and how a result is said.
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
 * All that fails ends the program with a sentence: what was taken goes with the process. Thread: main. */
#ifndef BATON_TESTS_GPU_BENCH_GPU_H
#define BATON_TESTS_GPU_BENCH_GPU_H

#include <cuda_runtime_api.h>

#include "kernels/kernels.h"

/* Sizes: those of a card, or small enough for one that is emulated, whose figures mean nothing. */
struct card_sizes {
    bool     tiny;
    size_t   read_bytes;            /* larger than any cache */
    int      rounds;
    size_t   product;               /* rows, columns and depth of the product that cuBLAS is measured with */
    int64_t  hold_cycles;           /* how long the card is kept busy while the host queues what is to be timed; 0: not */
};

struct card_limits {
    double read;       /* bytes per second: a kernel that reads memory */
    double copied;     /* bytes per second that cudaMemcpy copies from device memory to device memory; it reads and writes each */
    double bf16;       /* operations per second of cuBLAS on bf16 matrices of random numbers; 0: there is no cuBLAS here */
    double bf16_nominal; /* 0: not known. What products are held against where there is no cuBLAS */
};

struct card_figure {
    const char *name, *unit;
    double      value, limit;      /* limit 0: none */
    const char *limit_is;
    bool        less_is_better;    /* the ratio is value / limit all the same */
    double      wanted;            /* the ratio that is wanted: at least, or at most where less is better; 0: none */
};

struct card_sizes card_sizes(bool tiny);

/* ---- saying ---- */

/* Ends the program when it is not so. */
void card_need(bool ok, const char *what, const char *why);
void card_cuda(cudaError_t e, const char *what);
void card_fact(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
void card_note(const char *format, ...) __attribute__((format(printf, 1, 2)));
void card_say(const struct card_figure *f);
/* The operations per second that products are held against, and what that is. */
double card_product_limit(const struct card_limits *l, const char **what);

/* ---- measuring ---- */

struct card_timer {
    cudaEvent_t begin, end;
};

void   card_timer_init(struct card_timer *t);
void   card_timer_release(struct card_timer *t);
/* Seconds between the two, when both are over. */
double card_timer_s(const struct card_timer *t);
/* The middle one; sorts. */
double card_median(double *v, size_t n);

/* The stream that a context's slots put their work on. */
cudaStream_t card_stream(struct kernel_ctx *c);

void   card_limits_measure(const struct card_sizes *s, bool say, struct card_limits *out);
/* Operations per second; 0 and a note where there is no library. `by`: where it was found. */
double card_blas_bf16(const struct card_sizes *s, char *by, size_t by_bytes);

/* ---- commands, each an exit status ---- */

int card_limits_main(const struct card_sizes *s);
int card_model_main(const struct card_sizes *s, int argc, char **argv);
int card_attention_main(const struct card_sizes *s);
int card_push_main(const struct card_sizes *s, bool checksum);

#endif
