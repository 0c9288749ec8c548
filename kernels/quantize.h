/* quantize.h - online quantization: checkpoint weights are quantised to FastDeploy's formats while
 * they are loaded (--quantization). dtype_blocks.h has the types that GGUF files store.
 *
 * Rules (FastDeploy's weight-only and block-wise schemes; every operation is rounded to f32 on its
 * own; a is the largest magnitude):
 *   wint8           per output channel: q = round((w / a) * 127) with halves away from zero, scale
 *                   = bf16(a / 127); a = 0: scale 0, q 0
 *   wint4           the same with 7
 *   block_wise_fp8  per 128 x 128 block (edge blocks are smaller): a = max(a, 1e-4), q = e4m3(w *
 *                   (448 / a)) to nearest even, saturating; scale = a / 448 in f32
 * A channel with an infinity or a NaN gets scale NaN and q 0; a block with one has NaN among its
 * values. tests/data/quant has the results of an independent implementation for the same weights.
 * Thread: any. */
#ifndef BATON_KERNELS_QUANTIZE_H
#define BATON_KERNELS_QUANTIZE_H

#include "kernels/kernels.h"

/* One output channel: w [n] to q [n] with limit 127 or 7; returns the scale. */
float quantize_channel(const float *w, size_t n, int limit, int8_t *q);
/* One block: w [n_rows] rows of n_cols, w_stride floats apart, to q with q_stride; returns the
 * scale. */
float quantize_f8_block(const float *w, size_t w_stride, size_t n_rows, size_t n_cols, uint8_t *q,
                        size_t q_stride);
const char *quantize_name(enum quantize q);
/* "none", "wint8", "wint4", "block_wise_fp8" (and "" as none). ERR_INVALID lists them. */
enum status quantize_from_name(const char *name, enum quantize *out, struct err *err) MUST_CHECK;

#endif
