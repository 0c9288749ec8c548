/* microkernels_avx512.h - the micro-kernels of backend avx512, which avx512-vnni, avx512-bf16 and
 * amx share; see struct cpu_microkernels. Thread: engine, compute pool. */
#ifndef BATON_KERNELS_CPU_MICROKERNELS_AVX512_H
#define BATON_KERNELS_CPU_MICROKERNELS_AVX512_H

#include "kernels/cpu/attention/attention.h"
#include "kernels/cpu/cpu_backend.h"

void avx512_gemv(float *out, const float *x, const struct weight *w, size_t i_panel,
                 size_t n_panels);
void avx512_dequantize(float *dst, const struct weight *w, size_t i_panel, size_t k_begin,
                       size_t n_k);
void avx512_tile(float *acc, const float *x, size_t x_stride, size_t n_rows, const float *w,
                 size_t n_k);
void avx512_quantize(struct act_block *out, const float *x, size_t n);
void avx512_unpack_int(struct unpacked_panel *dst, const struct weight *w, size_t i_panel,
                       size_t k_begin, size_t n_k);
void avx512_gemv_int(float *out, const struct act_block *x, size_t x_stride, size_t n_rows,
                     const struct weight *w, size_t i_panel, size_t n_panels);
void avx512_tile_int(float *acc, const struct act_block *x, size_t x_stride, size_t n_rows,
                     const struct unpacked_panel *w, size_t n_panels, int layout, size_t n_k);

float avx512_rms_factor(const float *x, size_t n, float eps);
void avx512_rms_apply(float *y, const float *x, const float *weight, float factor, size_t n);
void avx512_add(float *x, const float *y, size_t n);
void avx512_silu_mul(float *out, const float *gate, const float *up, size_t n);
void avx512_rope(float *x, const float *cs, size_t rot_dim, bool interleaved);
void avx512_axpy(float *y, const float *x, float factor, size_t n);
void avx512_scale(float *x, float factor, size_t n);
float avx512_max(const float *x, size_t n);
float avx512_sum_exp(const float *x, float max, size_t n);
void avx512_exp_terms(float *p, const float *x, size_t n, float max, float by);

/* All but what each row has of its own: the integer products, and those of bf16. */
#define AVX512_MICROKERNELS                                                                        \
    .gemv = avx512_gemv, .dequantize = avx512_dequantize, .tile = avx512_tile,                     \
    .quantize = avx512_quantize, .unpack_int = avx512_unpack_int, .rms_factor = avx512_rms_factor, \
    .rms_apply = avx512_rms_apply, .add = avx512_add, .silu_mul = avx512_silu_mul,                 \
    .rope = avx512_rope, .axpy = avx512_axpy, .scale = avx512_scale, .max = avx512_max,            \
    .sum_exp = avx512_sum_exp, .exp_terms = avx512_exp_terms, ATTENTION_MICROKERNELS(avx512)

#endif
