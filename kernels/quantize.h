/* quantize.h - checkpoint weights to FastDeploy's quantised forms while they are loaded (--quantization).
 *
 * Rules (facts: FastDeploy's weight-only and block-wise schemes; rounding is to nearest, ties to even; a is the largest magnitude):
 *   wint8           per output channel: scale = bf16(a / 127), q = clip(round(w / scale), -127, 127); a = 0: scale 0, q 0
 *   wint4           per output channel: scale = bf16(a / 7),   q = clip(round(w / scale), -7, 7)
 *   block_wise_fp8  per 128 x 128 block (edge blocks are smaller): scale = max(a, 1e-4) / 448 in f32, q = e4m3(w / scale), saturating
 * w / scale is one f32 division. tests/data/quant holds what an independent implementation makes of the same weights.
 * Thread: any. */
#ifndef BATON_KERNELS_QUANTIZE_H
#define BATON_KERNELS_QUANTIZE_H

#include "kernels/kernels.h"

/* One output channel: w [n] to q [n] with limit 127 or 7; returns the scale. */
float quantize_channel(const float *w, size_t n, int limit, int8_t *q);
/* One block: w [n_rows] rows of n_cols, w_stride floats apart, to q with q_stride; returns the scale. */
float quantize_f8_block(const float *w, size_t w_stride, size_t n_rows, size_t n_cols, uint8_t *q, size_t q_stride);
/* "none", "wint8", "wint4", "block_wise_fp8" (and "" as none). ERR_INVALID lists them. */
enum status quantize_from_name(const char *name, enum quantize *out, struct err *err) MUST_CHECK;
const char *quantize_name(enum quantize q);

#endif
