/* matmul_epilogue.c - stores a GEMM's sums.
 *
 * A block is some panels of some rows, so each row gets one or two cache lines and rows are far
 * apart: their lines are prefetched. SwiGLU's results are quantised here for the next GEMM, which
 * halves the lines and saves a pass. Thread: engine, compute pool. */
#include <string.h>

#include "kernels/cpu/matmul/matmul_job.h"
#include "shared/base/arith.h"

/* Rows whose lines are prefetched: as many as fit into the ways of a cache if rows are a power of
 * two apart. */
enum { PREFETCH_ROWS = 12 };

/* A panel's lanes, at any address. */
typedef float matmul_lanes
    __attribute__((vector_size(PANEL * sizeof(float)), aligned(4), may_alias));

static void *row_of(const struct matmul_block *b, size_t row)
{
    return (char *)b->job->a->y + (b->row0 + row) * b->job->y_row_bytes;
}

/* Prefetches the lines that a row's results are written to. */
static void prefetch_row(const struct matmul_block *b, size_t row)
{
    const enum matmul_arithmetic arithmetic = b->job->y_arithmetic;
    const size_t per_panel = b->job->a->epilogue == MATMUL_SILU_MUL ? PANEL / 2 : PANEL,
                 bytes = matmul_row_bytes(arithmetic, b->n_panels * per_panel);
    const char *y = (const char *)row_of(b, row) +
                    matmul_row_bytes(arithmetic, b->panel0 * per_panel);
    for (size_t line = 0; line < bytes; line += CACHE_LINE) __builtin_prefetch(y + line, 1);
}

/* ---- y = .., y += .. ---- */

static void store_panel(const struct matmul_block *b, size_t row, size_t p)
{
    const struct matmul_args *a = b->job->a;
    const float *acc = block_acc(b, row, p);
    size_t at = (b->panel0 + p) * PANEL, n = min_size(PANEL, a->w->n_out - at);
    float *y = (float *)row_of(b, row) + at;
    if (n == PANEL) {
        matmul_lanes v = *(const matmul_lanes *)acc;
        if (a->bias) v += *(const matmul_lanes *)(a->bias + at);
        if (a->epilogue == MATMUL_ADD) v += *(const matmul_lanes *)y;
        *(matmul_lanes *)y = v;
        return;
    }
    for (size_t j = 0; j < n; j++) { /* a matrix's last panel */
        float v = a->bias ? acc[j] + a->bias[at + j] : acc[j];
        y[j] = a->epilogue == MATMUL_ADD ? y[j] + v : v;
    }
}

/* ---- y = silu(gate) * up ---- */

static void add_bias(const struct matmul_block *b, size_t row, size_t p)
{
    const struct matmul_args *a = b->job->a;
    float *gate = block_acc(b, row, p), *up = block_acc(b, row, p + 1);
    size_t half = a->w->n_out / 2, at = (b->panel0 + p) / 2 * PANEL, n = min_size(PANEL, half - at);
    for (size_t j = 0; j < n; j++) {
        gate[j] += a->bias[at + j];
        up[j] += a->bias[half + at + j];
    }
}

/* Overwrites the gate's sums with the results. */
static void swiglu(const struct cpu_microkernels *kernels, const struct matmul_block *b)
{
    const bool side_by_side = b->row_step == PANEL; /* all rows of a panel */
    for (size_t p = 0; p < b->n_panels; p += 2) {
        for (size_t i = 0; b->job->a->bias && i < b->n_rows; i++) add_bias(b, i, p);
        for (size_t i = 0; i < (side_by_side ? 1 : b->n_rows); i++) {
            float *gate = block_acc(b, i, p);
            kernels->elementwise->silu_mul(gate, gate, block_acc(b, i, p + 1),
                                           side_by_side ? b->n_rows * PANEL : PANEL);
        }
    }
}

static void store_row(const struct matmul_block *b, size_t row)
{
    const size_t half = b->job->a->w->n_out / 2, at = b->panel0 / 2 * PANEL;
    for (size_t p = 0; p < b->n_panels; p += 2) {
        size_t done = p / 2 * PANEL, n = min_size(PANEL, half - at - done);
        float *y = (float *)row_of(b, row) + at + done;
        if (n == PANEL) *(matmul_lanes *)y = *(const matmul_lanes *)block_acc(b, row, p);
        else memcpy(y, block_acc(b, row, p), n * sizeof *y);
    }
}

/* Copies the results of panels p and p + 2 side by side, as one block of every row's input. */
static void gather_blocks(const struct matmul_block *b, size_t p, float (*x)[BLOCK_K])
{
    const bool whole = p + 2 < b->n_panels;
    for (size_t i = 0; i < b->n_rows; i++) {
        *(matmul_lanes *)x[i] = *(const matmul_lanes *)block_acc(b, i, p);
        if (whole) *(matmul_lanes *)(x[i] + PANEL) = *(const matmul_lanes *)block_acc(b, i, p + 2);
    }
}

/* PREQUANTIZED_PANELS panels make one block of each row, padded with zeros. All rows are gathered
 * before the first is rounded: a load as wide as the CPU's vectors cannot take its bytes from
 * several stores that still wait for the cache, and waits until the last of them is done. */
static void store_quantized(const struct cpu_microkernels *kernels, const struct matmul_block *b)
{
    const enum matmul_arithmetic arithmetic = b->job->y_arithmetic;
    const size_t half = b->job->a->w->n_out / 2;
    float x[GEMM_ROWS][BLOCK_K] __attribute__((aligned(CACHE_LINE)));
    for (size_t p = 0; p < b->n_panels; p += PREQUANTIZED_PANELS) {
        size_t at = (b->panel0 + p) / 2 * PANEL, n = min_size(BLOCK_K, half - at);
        gather_blocks(b, p, x);
        for (size_t i = 0; i < b->n_rows; i++) {
            char *y = (char *)row_of(b, i) + matmul_row_bytes(arithmetic, at);
            if (i + PREFETCH_ROWS < b->n_rows) prefetch_row(b, i + PREFETCH_ROWS);
            if (arithmetic == MATMUL_INT) kernels->gemm->quantize((struct act_block *)y, x[i], n);
            else kernels->bf16->round_bf16((uint16_t *)y, x[i], n);
        }
    }
}

/* ---- all of a block ---- */

void matmul_apply_epilogue(const struct cpu_microkernels *kernels, const struct matmul_block *b)
{
    const bool pairs = b->job->a->epilogue == MATMUL_SILU_MUL,
               quantized = b->job->y_arithmetic != MATMUL_F32;
    if (pairs) swiglu(kernels, b);
    if (quantized) {
        store_quantized(kernels, b);
        return;
    }
    for (size_t i = 0; i < b->n_rows; i++) {
        if (i + PREFETCH_ROWS < b->n_rows) prefetch_row(b, i + PREFETCH_ROWS);
        if (pairs) store_row(b, i);
        else
            for (size_t p = 0; p < b->n_panels; p++) store_panel(b, i, p);
    }
}
