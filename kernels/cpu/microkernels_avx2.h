/* microkernels_avx2.h - the micro-kernels of backend avx2 that have files of their own; see struct
 * cpu_microkernels. Thread: engine, compute pool. */
#ifndef BATON_KERNELS_CPU_MICROKERNELS_AVX2_H
#define BATON_KERNELS_CPU_MICROKERNELS_AVX2_H

#include "kernels/cpu/cpu_backend.h"

void avx2_gemv(float *out, const float *x, const struct weight *w, size_t i_panel, size_t n_panels);
void avx2_dequantize(float *dst, const struct weight *w, size_t i_panel, size_t k_begin,
                     size_t n_k);
void avx2_tile(float *acc, const float *x, size_t x_stride, size_t n_rows, const float *w,
               size_t n_k);
void avx2_quantize(struct act_block *out, const float *x, size_t n);
void avx2_gemv_int(float *out, const struct act_block *x, size_t x_stride, size_t n_rows,
                   const struct weight *w, size_t i_panel, size_t n_panels);
/* gemv_int of 2 to SKINNY_ROWS_MAX rows. */
void avx2_gemv_int_few(float *out, const struct act_block *x, size_t x_stride, size_t n_rows,
                       const struct weight *w, size_t i_panel, size_t n_panels);
void avx2_unpack_int(struct unpacked_panel *dst, const struct weight *w, size_t i_panel,
                     size_t k_begin, size_t n_k);
void avx2_tile_int(float *acc, const struct act_block *x, size_t x_stride, size_t n_rows,
                   const struct unpacked_panel *w, size_t n_panels, int layout, size_t n_k);

#endif
