/* cpu_experts.c - the ops experts and expert_slots of the CPU backends: rows sorted by expert, so
 * that an expert is one GEMM over all rows that chose it, and all experts are one matmul call.
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

static size_t inner_stride(const struct weight *down)
{
    return round_up(down[0].n_in, MATMUL_PREQUANTIZED_ALIGN);
}

/* Writes the jobs of gate and up of all experts that have slots; returns how many. */
static size_t gate_up_jobs(const struct expert_slots_args *a)
{
    size_t n = 0;
    for (int32_t i = 0; i < a->n_experts; i++) {
        const size_t at = (size_t)a->begin[i], n_slots = (size_t)a->begin[i + 1] - at;
        if (n_slots == 0) continue;
        a->jobs[n++] = (struct matmul_args){
            .w = &a->gate_up[i],
            .x = a->x,
            .x_stride = a->x_stride,
            .x_rows = a->rows + at,
            .n_rows = n_slots,
            .y = a->act + at * inner_stride(a->down),
            .quantize_for = &a->down[i],
            .epilogue = MATMUL_SILU_MUL,
        };
    }
    return n;
}

/* The same for down. */
static size_t down_jobs(const struct expert_slots_args *a)
{
    const size_t hidden = a->down[0].n_out;
    size_t n = 0;
    for (int32_t i = 0; i < a->n_experts; i++) {
        const size_t at = (size_t)a->begin[i], n_slots = (size_t)a->begin[i + 1] - at;
        if (n_slots == 0) continue;
        a->jobs[n++] = (struct matmul_args){
            .w = &a->down[i],
            .x = a->act + at * inner_stride(a->down),
            .x_prequantized = true,
            .n_rows = n_slots,
            .y = a->out + at * hidden,
            .y_stride = hidden,
        };
    }
    return n;
}

static struct matmul_args shared_gate_up(const struct experts_args *a, size_t hidden)
{
    return (struct matmul_args){
        .w = a->shared.gate_up,
        .bias = a->shared.gate_up_bias,
        .x = a->h,
        .x_stride = hidden,
        .n_rows = a->n_rows,
        .y = a->shared.act,
        .quantize_for = a->shared.down,
        .epilogue = MATMUL_SILU_MUL,
    };
}

/* The shared expert adds to x. */
static struct matmul_args shared_down(const struct experts_args *a, size_t hidden)
{
    return (struct matmul_args){
        .w = a->shared.down,
        .bias = a->shared.down_bias,
        .x = a->shared.act,
        .x_prequantized = true,
        .n_rows = a->n_rows,
        .y = a->x,
        .y_stride = hidden,
        .epilogue = MATMUL_ADD,
    };
}

void cpu_experts(struct kernel_ctx *c, const struct experts_args *a)
{
    const size_t hidden = a->gate_up[0].n_in;
    const struct expert_slots_args slots = expert_slots_of(a);
    const bool shared = a->shared.gate_up != NULL;
    sort_by_expert(a);
    size_t n = gate_up_jobs(&slots);
    if (shared) a->jobs[n++] = shared_gate_up(a, hidden);
    c->ops->matmul(c, a->jobs, n); /* [rows used, I], [rows, shared I] */
    n = down_jobs(&slots);
    if (shared) a->jobs[n++] = shared_down(a, hidden);
    c->ops->matmul(c, a->jobs, n); /* [rows used, H], [rows, H] */
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

void cpu_expert_slots(struct kernel_ctx *c, const struct expert_slots_args *a)
{
    if (a->n_experts == 0) return;
    c->ops->matmul(c, a->jobs, gate_up_jobs(a)); /* [slots, I] */
    c->ops->matmul(c, a->jobs, down_jobs(a));    /* [slots, H] */
}
