/* kv_rows.h - what one row of a KV pool, the head_dim values of a key or a value, is held as: the
 * one place that has the formulas.
 *
 *   F32, BF16, F16   the value, rounded to nearest even where that rounds
 *   I8               q = x / scale rounded to nearest even, -127 .. 127, with scale = max|x| / 127
 *                    (symmetric absmax quantisation, LLM.int8(), Dettmers et al. 2022, equation 3,
 *                    per row)
 *   F8_E4M3          q = e4m3(x / scale), with scale = max|x| / 448 (e4m3's largest; the same per
 *                    row)
 * I8 and F8_E4M3 have an f32 scale per row; q * scale, rounded to f32 once, stands for x. A row of
 * zeros, or one too small for a scale, has scale 0 and q 0. A row that holds an infinity or a NaN
 * has no scale: NaN, so that all of it reads back as NaN and never passes for numbers. kv_layout.h
 * says where values and scales lie. Rows that compute may multiply by a key's scale after the
 * product, and the weight of a value by its scale before it: kernels.h's bounds cover that. Not
 * for: weights (dtype.h, quantize.h). Thread: any (no state). */
#ifndef BATON_KERNELS_KV_ROWS_H
#define BATON_KERNELS_KV_ROWS_H

#include <stdbool.h>

#include "kernels/dtype.h"
#include "shared/base/err.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Is t a type that a KV pool may have? */
bool kv_rows_known(enum dtype t);
bool kv_rows_scaled(enum dtype t);
/* The type that a person calls so: "bf16" or "bfloat16", "fp8", .. as vLLM, SGLang and FastDeploy
 * spell them too. ERR_INVALID with a sentence. */
enum status kv_rows_from_name(const char *name, enum dtype *out, struct err *err) MUST_CHECK;
const char *kv_rows_name(enum dtype t); /* "unknown" for what kv_rows_known does not know and no
                                         * file has */
/* Bytes of a row's values. */
size_t kv_rows_bytes(enum dtype t, size_t n);
/* One row of n values from f32, and to f32. `scale`: of a scaled type where its f32 goes or is,
 * otherwise not looked at. Nothing needs alignment. */
void kv_row_store(enum dtype t, const float *x, void *values, void *scale, size_t n);
void kv_row_load(enum dtype t, const void *values, const void *scale, float *x, size_t n);

#ifdef __cplusplus
}
#endif
#endif
