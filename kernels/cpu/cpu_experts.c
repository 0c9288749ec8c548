/* cpu_experts.c - the op experts of the CPU backends: sorts rows by expert, so that an expert is
 * one GEMM over all rows that chose it, and all experts are one matmul call.
 *
 * It is a counting sort on the calling thread: a step has a few thousand rows. A row's result
 * depends only on the row: the order changes where it is computed, not how. Thread: engine. */
#include <string.h>

#include "kernels/cpu/cpu_backend.h"
#include "shared/base/arith.h"

/* Sorts slots by expert, and within an expert by row. */
static void sort_by_expert(const struct experts_args *a)
{
    const size_t n = a->n_rows * (size_t)a->n_used;
    int32_t *begin = a->begin; /* while slots are assigned, begin[i] is expert i's next one */
    memset(begin, 0, ((size_t)a->n_experts + 1) * sizeof *begin);
    for (size_t i = 0; i < n; i++) begin[a->experts[i] + 1]++;
    for (int32_t i = 0; i < a->n_experts; i++) begin[i + 1] += begin[i];
    for (size_t i = 0; i < n; i++) {
        int32_t slot = begin[a->experts[i]]++;
        a->index[i] = slot;
        a->rows[slot] = (int32_t)(i / (size_t)a->n_used);
    }
    memmove(begin + 1, begin, (size_t)a->n_experts * sizeof *begin);
    begin[0] = 0;
}

struct expert_slots {
    size_t at, n;
};

static struct expert_slots slots_of(const struct experts_args *a, int32_t expert)
{
    size_t at = (size_t)a->begin[expert];
    return (struct expert_slots){ at, (size_t)a->begin[expert + 1] - at };
}

/* Computes gate and up of all experts and of the shared one. */
static void gate_up(struct kernel_ctx *c, const struct experts_args *a, size_t hidden, size_t inner)
{
    const struct shared_expert *shared = &a->shared;
    size_t n = 0;
    for (int32_t i = 0; i < a->n_experts; i++) {
        const struct expert_slots s = slots_of(a, i);
        if (s.n == 0) continue;
        a->jobs[n++] = (struct matmul_args){
            .w = &a->gate_up[i],
            .x = a->h,
            .x_stride = hidden,
            .x_rows = a->rows + s.at,
            .n_rows = s.n,
            .y = a->act + s.at * inner,
            .quantize_for = &a->down[i],
            .epilogue = MATMUL_SILU_MUL,
        };
    }
    if (shared->gate_up)
        a->jobs[n++] = (struct matmul_args){
            .w = shared->gate_up,
            .bias = shared->gate_up_bias,
            .x = a->h,
            .x_stride = hidden,
            .n_rows = a->n_rows,
            .y = shared->act,
            .quantize_for = shared->down,
            .epilogue = MATMUL_SILU_MUL,
        };
    c->ops->matmul(c, a->jobs, n); /* [rows used, I], [rows, shared I] */
}

/* Computes down: the shared expert adds to x, the others write their slots. */
static void down(struct kernel_ctx *c, const struct experts_args *a, size_t hidden, size_t inner)
{
    const struct shared_expert *shared = &a->shared;
    size_t n = 0;
    for (int32_t i = 0; i < a->n_experts; i++) {
        const struct expert_slots s = slots_of(a, i);
        if (s.n == 0) continue;
        a->jobs[n++] = (struct matmul_args){
            .w = &a->down[i],
            .x = a->act + s.at * inner,
            .x_prequantized = true,
            .n_rows = s.n,
            .y = a->out + s.at * hidden,
            .y_stride = hidden,
        };
    }
    if (shared->gate_up)
        a->jobs[n++] = (struct matmul_args){
            .w = shared->down,
            .bias = shared->down_bias,
            .x = shared->act,
            .x_prequantized = true,
            .n_rows = a->n_rows,
            .y = a->x,
            .y_stride = hidden,
            .epilogue = MATMUL_ADD,
        };
    c->ops->matmul(c, a->jobs, n); /* [rows used, H], [rows, H] */
}

void cpu_experts(struct kernel_ctx *c, const struct experts_args *a)
{
    const size_t hidden = a->gate_up[0].n_in,
                 inner = round_up(a->down[0].n_in, MATMUL_PREQUANTIZED_ALIGN);
    sort_by_expert(a);
    gate_up(c, a, hidden, inner);
    down(c, a, hidden, inner);
    const struct combine_args all = {
        .y = a->x,
        .rows = a->out,
        .index = a->index,
        .weights = a->weights,
        .n_rows = a->n_rows,
        .n_used = (size_t)a->n_used,
        .n = hidden,
        .add = true,
    };
    c->ops->combine(c, &all); /* [rows, H] */
}
