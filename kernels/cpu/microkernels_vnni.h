/* microkernels_vnni.h - the integer and bf16 micro-kernels of backends avx512-vnni and avx512-bf16;
 * see struct cpu_microkernels. Thread: engine, compute pool. */
#ifndef BATON_KERNELS_CPU_MICROKERNELS_VNNI_H
#define BATON_KERNELS_CPU_MICROKERNELS_VNNI_H

#include "kernels/cpu/cpu_backend.h"

void vnni_gemv_int(float *out, const struct act_block *x, size_t x_stride, size_t n_rows,
                   const struct weight *w, size_t i_panel, size_t n_panels);
void vnni_tile_int(float *acc, const struct act_block *x, size_t x_stride, size_t n_rows,
                   const struct unpacked_panel *w, size_t n_panels, int layout, size_t n_k);

void bf16_round(uint16_t *out, const float *x, size_t n);
void bf16_gemv(float *out, const uint16_t *x, size_t x_stride, size_t n_rows,
               const struct weight *w, size_t i_panel, size_t n_panels);
void bf16_upconvert(uint32_t *dst, float *scale, const struct weight *w, size_t i_panel,
                    size_t k_begin, size_t n_k);
void bf16_tile(float *acc, const uint16_t *x, size_t x_stride, size_t n_rows, const uint32_t *w,
               size_t w_stride, size_t n_panels, const float *scale, size_t n_k);

void bf16_load_keys(uint32_t *dst, const struct kv_row_ptrs *rows, size_t n_keys, size_t dim);
void bf16_scores(float *scores, const uint16_t *q, size_t q_stride, size_t n_rows,
                 const uint32_t *keys, size_t n_panels, size_t dim);
void bf16_scores_skinny(float *scores, const uint16_t *q, size_t q_stride, size_t n_rows,
                        const struct kv_row_ptrs *keys, const struct kv_row_ptrs *prefetch,
                        size_t n_keys, size_t dim);

#define BF16_SCORE_MICROKERNELS                                                                    \
    .load_keys_bf16 = bf16_load_keys, .scores_bf16 = bf16_scores,                                  \
    .scores_skinny_bf16 = bf16_scores_skinny

#endif
