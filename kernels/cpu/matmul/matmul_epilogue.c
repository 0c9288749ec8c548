/* matmul_epilogue.c - chain sums to where a product's results go.
 *
 * A block is some panels of some rows, so each row gets one or two cache lines, rows far apart: their lines are asked for ahead, and SwiGLU's
 * results are rounded here for the product that takes them, which halves the lines and spares it a pass over them. Thread: engine, pool. */
#include <string.h>

#include "kernels/cpu/matmul/matmul_job.h"
#include "shared/base/arith.h"

enum { ROWS_AHEAD = 12 }; /* whose lines are asked for: as many as fit the ways of a cache when rows are a power of two apart */

/* A panel's lanes, wherever they lie. */
typedef float lanes __attribute__((vector_size(PANEL * sizeof(float)), aligned(4), may_alias));

static void *row_of(const struct block *b, size_t row) { return (char *)b->job->a->y + (b->row0 + row) * b->job->y_row_bytes; }

/* ---- y = .., y += .. ---- */

static void finish_panel(const struct block *b, size_t row, size_t p)
{
    const struct matmul_args *a = b->job->a;
    const float *acc = block_sums(b, row, p);
    size_t at = (b->panel0 + p) * PANEL, n = min_size(PANEL, a->w->n_out - at);
    float *y = (float *)row_of(b, row) + at;
    if (n == PANEL) {
        lanes v = *(const lanes *)acc;
        if (a->bias) v += *(const lanes *)(a->bias + at);
        if (a->then == MATMUL_ADD) v += *(const lanes *)y;
        *(lanes *)y = v;
        return;
    }
    for (size_t j = 0; j < n; j++) { /* a matrix's last panel */
        float v = a->bias ? acc[j] + a->bias[at + j] : acc[j];
        y[j] = a->then == MATMUL_ADD ? y[j] + v : v;
    }
}

/* ---- y = silu(gate) * up ---- */

static void add_bias(const struct block *b, size_t row, size_t p)
{
    const struct matmul_args *a = b->job->a;
    float *gate = block_sums(b, row, p), *up = block_sums(b, row, p + 1);
    size_t half = a->w->n_out / 2, at = (b->panel0 + p) / 2 * PANEL, n = min_size(PANEL, half - at);
    for (size_t j = 0; j < n; j++) {
        gate[j] += a->bias[at + j];
        up[j] += a->bias[half + at + j];
    }
}

/* The results take the place of gate's sums. */
static void swiglu(const struct cpu_loops *loops, const struct block *b)
{
    const bool side_by_side = b->row_step == PANEL; /* all rows of a panel */
    for (size_t p = 0; p < b->n_panels; p += 2) {
        for (size_t i = 0; b->job->a->bias && i < b->n_rows; i++) add_bias(b, i, p);
        for (size_t i = 0; i < (side_by_side ? 1 : b->n_rows); i++) {
            float *gate = block_sums(b, i, p);
            loops->silu_mul(gate, gate, block_sums(b, i, p + 1), side_by_side ? b->n_rows * PANEL : PANEL);
        }
    }
}

static void store_row(const struct block *b, size_t row)
{
    const size_t half = b->job->a->w->n_out / 2, at = b->panel0 / 2 * PANEL;
    for (size_t p = 0; p < b->n_panels; p += 2) {
        size_t done = p / 2 * PANEL, n = min_size(PANEL, half - at - done);
        float *y = (float *)row_of(b, row) + at + done;
        if (n == PANEL) *(lanes *)y = *(const lanes *)block_sums(b, row, p);
        else memcpy(y, block_sums(b, row, p), n * sizeof *y);
    }
}

/* READY_PANELS panels are one block of the row, filled up with zeros. */
static void store_ready_row(const struct cpu_loops *loops, const struct block *b, size_t row)
{
    const enum arithmetic by = b->job->y_by;
    const size_t          half = b->job->a->w->n_out / 2;
    char *y = row_of(b, row);
    for (size_t p = 0; p < b->n_panels; p += READY_PANELS) {
        float  x[BLOCK_K];
        size_t at = (b->panel0 + p) / 2 * PANEL, n = min_size(BLOCK_K, half - at);
        *(lanes *)x = *(const lanes *)block_sums(b, row, p);
        if (n > PANEL) *(lanes *)(x + PANEL) = *(const lanes *)block_sums(b, row, p + 2);
        if (by == BY_INT) loops->quantize((struct act_block *)(y + matmul_row_bytes(by, at)), x, n);
        else loops->round_bf16((uint16_t *)(y + matmul_row_bytes(by, at)), x, n);
    }
}

/* ---- all of a block ---- */

/* Asks for the lines that a row's results go to. */
static void expect_row(const struct block *b, size_t row)
{
    const enum arithmetic by = b->job->y_by;
    const size_t per_panel = b->job->a->then == MATMUL_SILU_MUL ? PANEL / 2 : PANEL, bytes = matmul_row_bytes(by, b->n_panels * per_panel);
    const char  *y = (const char *)row_of(b, row) + matmul_row_bytes(by, b->panel0 * per_panel);
    for (size_t line = 0; line < bytes; line += CACHE_LINE) __builtin_prefetch(y + line, 1);
}

void matmul_finish(const struct cpu_loops *loops, const struct block *b)
{
    const bool pairs = b->job->a->then == MATMUL_SILU_MUL, ready = b->job->y_by != BY_F32;
    if (pairs) swiglu(loops, b);
    for (size_t i = 0; i < b->n_rows; i++) {
        if (i + ROWS_AHEAD < b->n_rows) expect_row(b, i + ROWS_AHEAD);
        if (ready) store_ready_row(loops, b, i);
        else if (pairs) store_row(b, i);
        else
            for (size_t p = 0; p < b->n_panels; p++) finish_panel(b, i, p);
    }
}
