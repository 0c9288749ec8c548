/* matmul_inputs.c - prepares the inputs of a matmul call: each distinct one is written once to
 * cpu_ctx.acts, as its GEMMs take it.
 *
 * A row is normalised while it is quantised, a few cache lines at a time, so that only the result
 * goes through memory. Inputs that need no preparation (f32, neither gathered nor normalised;
 * prequantised rows) stay where they are. Thread: engine, compute pool. */
#include <string.h>

#include "kernels/cpu/matmul/matmul_job.h"
#include "shared/base/arith.h"
#include "shared/base/assert.h"

enum {
    PREPARE_ELEMENTS = 4096, /* of input per work item: some microsecond of work */
    NORM_ELEMENTS = 512      /* normalised before they are rounded: they stay in the first-level
                              * cache */
};
_Static_assert(NORM_ELEMENTS % BLOCK_K == 0, "whole blocks but for a row's last");

size_t matmul_acts_bytes(size_t n_rows, size_t n_in)
{
    /* f32 rows that are gathered are the largest kind; every input starts on a cache line */
    return round_up(sizeof(struct matmul_tables), 64) +
           n_rows * round_up(n_in, BLOCK_K) * sizeof(float) + 64 * (size_t)JOBS_PER_RUN;
}

enum matmul_arithmetic matmul_arithmetic_of(const struct kernel_ctx *c, const struct weight *w)
{
    if (c->options.activations == ACTIVATIONS_F32) return MATMUL_F32;
    if (weight_layout_info(w->layout)->integer) return MATMUL_INT;
    bool bf16 = w->layout == LAYOUT_BF16 || w->layout == LAYOUT_F8;
    return bf16 && cpu_has_bf16_products(c) ? MATMUL_BF16 : MATMUL_F32;
}

static const size_t ELEMENT[] = { [MATMUL_F32] = sizeof(float),
                                  [MATMUL_INT] = sizeof(struct act_block),
                                  [MATMUL_BF16] = sizeof(uint16_t) };

/* Returns the stride of prepared rows, in elements. */
static size_t row_stride(enum matmul_arithmetic arithmetic, size_t n_in)
{
    return arithmetic == MATMUL_INT    ? act_blocks(n_in)
           : arithmetic == MATMUL_BF16 ? act_bf16_stride(n_in)
                                       : n_in;
}

size_t matmul_row_bytes(enum matmul_arithmetic arithmetic, size_t n_in)
{
    return row_stride(arithmetic, n_in) * ELEMENT[arithmetic];
}

static void round_inputs(const struct cpu_microkernels *kernels, enum matmul_arithmetic arithmetic,
                         void *to, const float *x, size_t n)
{
    if (arithmetic == MATMUL_INT) kernels->gemm->quantize(to, x, n);
    else if (arithmetic == MATMUL_BF16) kernels->bf16->round_bf16(to, x, n);
    else memcpy(to, x, n * sizeof *x);
}

static void normalise_row(const struct cpu_microkernels *kernels, const struct matmul_input *in,
                          char *to, const float *x)
{
    const size_t n_in = in->a->w->n_in;
    const float factor = kernels->elementwise->rms_factor(x, n_in, in->a->norm_eps);
    float part[NORM_ELEMENTS];
    for (size_t k = 0; k < n_in; k += NORM_ELEMENTS) {
        size_t n = min_size(NORM_ELEMENTS, n_in - k);
        kernels->elementwise->rms_apply(part, x + k, in->a->norm + k, factor, n);
        round_inputs(kernels, in->arithmetic, to + matmul_row_bytes(in->arithmetic, k), part, n);
    }
}

static void prepare_rows(void *arg, int index, int thread)
{
    (void)thread;
    const struct matmul_run *r = arg;
    size_t row = (size_t)index * r->rows_per_item, i = 0;
    size_t end = min_size(row + r->rows_per_item, r->inputs[r->n_inputs - 1].row_end);
    while (r->inputs[i].row_end <= row) i++;
    for (; row < end; row++) {
        if (r->inputs[i].row_end <= row) i++;
        const struct matmul_input *in = &r->inputs[i];
        size_t n_in = in->a->w->n_in, local = row - (i ? r->inputs[i - 1].row_end : 0);
        size_t source = in->a->x_rows ? (size_t)in->a->x_rows[local] : local;
        const float *x = in->a->x + source * in->a->x_stride;
        char *to = (char *)in->to + local * matmul_row_bytes(in->arithmetic, n_in);
        if (in->a->norm) normalise_row(r->kernels, in, to, x);
        else round_inputs(r->kernels, in->arithmetic, to, x, n_in);
    }
}

/* Jobs of one input often follow each other (q, k and v, experts of one row), so only the last one
 * is compared. */
static bool same_input(const struct matmul_args *a, const struct matmul_args *b)
{
    return a->x == b->x && a->x_stride == b->x_stride && a->w->n_in == b->w->n_in &&
           a->n_rows == b->n_rows && a->x_rows == b->x_rows && a->norm == b->norm &&
           a->norm_eps == b->norm_eps;
}

void matmul_prepare_inputs(struct matmul_run *r)
{
    struct kernel_ctx *c = r->c;
    const struct cpu_ctx *cpu = cpu_ctx_of(c);
    char *at = (char *)cpu->acts + round_up(sizeof(struct matmul_tables), 64),
         *end = (char *)cpu->acts + cpu->acts_bytes;
    size_t rows = 0, elements = 0;
    for (size_t i = 0; i < r->n_jobs; i++) {
        struct matmul_job *j = &r->jobs[i];
        const struct matmul_args *a = j->a;
        struct matmul_input *last = r->n_inputs ? &r->inputs[r->n_inputs - 1] : NULL;
        ASSERT(!a->x_prequantized || (!a->x_rows && !a->norm));
        j->x_stride = row_stride(j->arithmetic, a->w->n_in);
        if (a->x_prequantized) {
            j->x = a->x;
        } else if (j->arithmetic == MATMUL_F32 && !a->x_rows && !a->norm) {
            j->x = a->x;
            j->x_stride = a->x_stride;
        } else if (last && last->arithmetic == j->arithmetic && same_input(last->a, a)) {
            j->x = last->to;
        } else {
            rows += a->n_rows;
            elements += a->n_rows * a->w->n_in;
            r->inputs[r->n_inputs++] = (struct matmul_input){
                .a = a, .arithmetic = j->arithmetic, .to = at, .row_end = rows
            };
            j->x = at;
            at += round_up(a->n_rows * matmul_row_bytes(j->arithmetic, a->w->n_in), 64);
        }
    }
    ASSERT(at <= end); /* kernel_ctx_reserve */
    if (rows == 0) return;
    r->rows_per_item = div_up(rows, min_size(rows, div_up(elements, PREPARE_ELEMENTS)));
    compute_pool_run(c->pool, (int)div_up(rows, r->rows_per_item), prepare_rows, r);
}
