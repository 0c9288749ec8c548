/* act.h - inputs of matrix products rounded for the FAST arithmetic: int8 with one scale per 32 k's, or bf16.
 *
 * int8: for each block of 32 values (the last is filled up with zeros) a = max |x|, s = a / 127 in f32, q = x * (127 / a) rounded to
 * nearest even, so |q| <= 127 (symmetric absmax rounding, as GGUF's Q8_0 rounds weights, with s kept in f32). A block that holds an
 * infinity or a NaN has s = NaN: it never passes for numbers. All zero, or a below 2^-120 (where 127 / a would be
 * infinite): s = 0 and q = 0; q = 0 beside s = NaN too. `sum` adds up q over each half, for forms whose stored numbers are offset; `ssum` is
 * (float)(sum[0] + sum[1]) * s, what m of a group of 32 is multiplied by: once per row and block instead of once per panel.
 * The buffer belongs to the kernel context and is valid during one matmul call. Thread: engine, pool. */
#ifndef BATON_KERNELS_CPU_ACT_H
#define BATON_KERNELS_CPU_ACT_H

#include "kernels/cpu/form.h"

#define ACT_TOP_LEAST 0x1p-120f /* a below this counts as zero */

struct act_block {
    int8_t  q[FORM_BLOCK];
    float   s, ssum;
    int16_t sum[2]; /* of q[0..15] and q[16..31] */
};

static inline size_t act_blocks(size_t n_in) { return (n_in + FORM_BLOCK - 1) / FORM_BLOCK; }
/* bf16 rows are filled up with zeros to a multiple of 32 values. */
static inline size_t act_bf16_stride(size_t n_in) { return act_blocks(n_in) * FORM_BLOCK; }

#endif
