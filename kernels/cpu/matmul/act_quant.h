/* act_quant.h - inputs of GEMMs quantised for the FAST arithmetic: two int8 terms with one scale
 * per 32 k, or bf16. docs/kernels.md, "GEMM on the CPU", has the formulas and their error.
 *
 * `sum` adds up the 15-bit numbers of each half, for layouts whose stored numbers have a zero
 * point; `ssum` is (float)(sum[0] + sum[1]) * s, which m of a group of 32 is multiplied by: once
 * per row and block instead of once per panel. Quantised rows lie in cpu_ctx.acts during one matmul
 * call, or, if the caller passes them on to the next GEMM (kernels.h, x_prequantized), in the
 * caller's memory.
 * Thread: engine, compute pool. */
#ifndef BATON_KERNELS_CPU_MATMUL_ACT_QUANT_H
#define BATON_KERNELS_CPU_MATMUL_ACT_QUANT_H

#include "kernels/cpu/weights/weight_layout.h"

#define ACT_Q_MAX      16256.0f  /* 127 * 128 */
#define ACT_ABSMAX_MIN 0x1p-112f /* a below this counts as zero */

enum { ACT_TERMS = 2, ACT_LOW_BITS = 7 };

struct act_block {
    int8_t q[ACT_TERMS][BLOCK_K]; /* high, low */
    float s, ssum;
    int32_t sum[2]; /* of numbers 0..15 and 16..31 */
};

static inline size_t act_blocks(size_t n_in) { return (n_in + BLOCK_K - 1) / BLOCK_K; }
/* bf16 rows are padded with zeros to a multiple of 32 values. */
static inline size_t act_bf16_stride(size_t n_in) { return act_blocks(n_in) * BLOCK_K; }

#endif
