/* act_quant.h - inputs of matrix products rounded for the FAST arithmetic: two int8 terms with one
 * scale per 32 k's, or bf16.
 *
 * int8: for each block of 32 values (the last is filled up with zeros) a = max |x|, s = a / 16256
 * in f32, and x * (16256 / a) rounded to nearest even is 128 * high + low with |high| <= 127 and
 * -64 <= low < 64. One term alone would be GGUF's Q8_0; measured on a real model
 * (docs/performance.md) it moves log-probabilities by 0.07 on average, two terms by less than the
 * bf16 of the KV cache does, at 1.6 times the integer work of many rows and none more of one row,
 * which waits for memory. A block that holds an infinity or a NaN has s = NaN: it never passes for
 * numbers. All zero, or a below ACT_ABSMAX_MIN (where 16256 / a would be infinite): s = 0 and terms
 * 0; terms 0 beside s = NaN too. `sum` adds up the 15-bit numbers of each half, for forms whose
 * stored numbers are offset; `ssum` is (float)(sum[0] + sum[1]) * s, what m of a group of 32 is
 * multiplied by: once per row and block instead of once per panel. Such rows lie in cpu_ctx.acts
 * during one matmul call, or, as ready rows (kernels.h), where the caller wants them until the
 * product that they were made for. Thread: engine, pool. */
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
/* bf16 rows are filled up with zeros to a multiple of 32 values. */
static inline size_t act_bf16_stride(size_t n_in) { return act_blocks(n_in) * BLOCK_K; }

#endif
