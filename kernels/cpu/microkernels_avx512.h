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

extern const struct elementwise_microkernels avx512_elementwise;
extern const struct attention_microkernels avx512_attention;

/* Of a gemm table, what all backends with AVX-512 share: all but the integer products. */
#define AVX512_GEMM_MICROKERNELS                                                                   \
    .gemv = avx512_gemv, .dequantize = avx512_dequantize, .tile = avx512_tile,                     \
    .quantize = avx512_quantize, .unpack_int = avx512_unpack_int

#endif
