/* gpu_op_cost.h - what an op's call must read, write and compute, from its arguments. The functions
 * fill in all of `to` but `us`. Thread: main. */
#ifndef BATON_TESTS_GPU_BENCH_GPU_OP_COST_H
#define BATON_TESTS_GPU_BENCH_GPU_OP_COST_H

#include "tests/gpu/bench/gpu_ops.h"

void gpu_op_cost_matmul(const struct matmul_args *jobs, size_t n_jobs, struct gpu_op_call *to);
/* Fetches the experts to which rows are routed, and so waits for the GPU. */
void gpu_op_cost_experts(struct kernel_ctx *c, const struct experts_args *a,
                         struct gpu_op_call *to);
void gpu_op_cost_attention(const struct attn_args *a, struct gpu_op_call *to);
void gpu_op_cost_rope(const struct rope_args *a, struct gpu_op_call *to);
void gpu_op_cost_append(const struct kv_append_args *a, struct gpu_op_call *to);
/* For ops that read and write rows of f32, `reads` and `writes` of them. */
void gpu_op_cost_rows(const char *op, size_t n_rows, size_t n, double reads, double writes,
                      struct gpu_op_call *to);

#endif
