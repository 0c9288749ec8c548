/* matmul_job.h - one GEMM of a matmul call in the CPU backends, and the steps before and after it.
 *
 *   matmul_inputs.c    x as the GEMM takes it: normalised, gathered, quantised
 *   cpu_matmul.c       how a call is split, and the micro-kernels
 *   matmul_epilogue.c  sums to y: bias, y += .., SwiGLU, quantised for the next GEMM
 *
 * Everything lives for one matmul call, in tables at the beginning of cpu_ctx.acts.
 * Thread: engine, compute pool. */
#ifndef BATON_KERNELS_CPU_MATMUL_MATMUL_JOB_H
#define BATON_KERNELS_CPU_MATMUL_MATMUL_JOB_H

#include "kernels/cpu/cpu_backend.h"

enum matmul_arithmetic { MATMUL_F32, MATMUL_INT, MATMUL_BF16 };

struct matmul_job {
    const struct matmul_args *a;
    enum matmul_arithmetic arithmetic;
    enum matmul_arithmetic y_arithmetic; /* whose inputs y will be; MATMUL_F32: y is f32 */
    size_t y_row_bytes;                  /* from row to row of y */
    const void *x;                       /* prepared rows: f32, act_block or bf16 */
    size_t x_stride;                     /* in those elements */
    size_t n_panels, panels_per_item, n_chunks, rows_per_chunk;
};

/* One input to prepare: rows of `a`, which are written to `to`. */
struct matmul_input {
    const struct matmul_args *a;
    enum matmul_arithmetic arithmetic;
    void *to;
    size_t row_end; /* rows of this input and all before it */
};

struct matmul_run {
    struct kernel_ctx *c;
    const struct cpu_microkernels *kernels;
    struct matmul_job *jobs;
    struct matmul_input *inputs;
    size_t *range_end; /* [n_groups][n_jobs]: items of a group's share of a job,
                        * and of all before it */
    size_t n_groups, n_jobs, n_inputs, n_items, rows_per_item;
};

enum { JOBS_PER_RUN = 1024 };

struct matmul_tables {
    struct matmul_job jobs[JOBS_PER_RUN];
    struct matmul_input inputs[JOBS_PER_RUN];
    size_t range_end[NUMA_NODES_MAX * JOBS_PER_RUN];
};

/* Returns which arithmetic the context multiplies w with. */
enum matmul_arithmetic matmul_arithmetic_of(const struct kernel_ctx *c, const struct weight *w);
/* Returns the bytes of a prepared row of n_in elements. */
size_t matmul_row_bytes(enum matmul_arithmetic arithmetic, size_t n_in);
/* Sets x and x_stride of every job, and prepares on the pool the inputs that need it. */
void matmul_prepare_inputs(struct matmul_run *r);

/* A block of results: sums of one job, rows from row0, panels from panel0 (a multiple of
 * PREQUANTIZED_PANELS if y is quantised). */
struct matmul_block {
    const struct matmul_job *job;
    size_t row0, n_rows, panel0, n_panels;
    float *acc;
    size_t row_step, panel_step; /* floats in acc from one row, one panel to the next */
};

/* Panels of a paired matrix that make one block of a quantised row. */
enum { PREQUANTIZED_PANELS = 2 * BLOCK_K / PANEL };

static inline float *block_acc(const struct matmul_block *b, size_t row, size_t p)
{
    return b->acc + row * b->row_step + p * b->panel_step;
}
/* Writes the block's sums to y, and overwrites acc meanwhile. */
void matmul_apply_epilogue(const struct cpu_microkernels *kernels, const struct matmul_block *b);

#endif
