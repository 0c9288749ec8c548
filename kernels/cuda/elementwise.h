/* elementwise.h - the ops that work row by row on the GPU; kernels.h says what they compute.
 *
 * All pointers are device memory. Calls enqueue work on the stream and return. A row's result
 * depends only on the row, and sums run in a fixed order. Thread: engine. */
#ifndef BATON_KERNELS_CUDA_ELEMENTWISE_H
#define BATON_KERNELS_CUDA_ELEMENTWISE_H

#include "kernels/cuda/gemm/gemm.h"
#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Strides in floats. *rounded: where the rows of y go in bf16, too, [n_rows, n]; it becomes NULL if
 * that would take another launch. NULL: nowhere. */
cudaError_t elementwise_rms_norm(cudaStream_t s, float *y, size_t y_stride, const float *x,
                                 size_t x_stride, const float *weight, size_t n_rows, size_t n,
                                 float eps, uint16_t **rounded);
cudaError_t elementwise_copy_rows(cudaStream_t s, float *to, size_t to_stride, const float *from,
                                  size_t from_stride, const int32_t *rows, size_t n_rows, size_t n);
cudaError_t elementwise_add(cudaStream_t s, float *x, const float *y, size_t n);
cudaError_t elementwise_combine(cudaStream_t s, const struct combine_args *a);
/* The same of rows in bf16; n a multiple of 4, y and rows aligned to 16 bytes. */
cudaError_t elementwise_combine_bf16(cudaStream_t s, const struct combine_args *a);

cudaError_t elementwise_rope(cudaStream_t s, const struct rope_args *a);

/* Rows of a matrix of any layout as f32. */
struct embed_rows {
    float *x; /* [n_rows, n_in] */
    enum gemm_weight_layout layout;
    const void *w;
    size_t n_out, n_in, n_rows;
    const int32_t *ids; /* -1 - i: kept[i] */
    const int32_t *kept;
};
cudaError_t elementwise_embed(cudaStream_t s, const struct embed_rows *e);

#ifdef __cplusplus
}
#endif
#endif
