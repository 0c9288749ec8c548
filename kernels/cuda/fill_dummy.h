/* fill_dummy.h - dummy weights (kernels/dummy_weights.h) computed on the GPU in the layouts of
 * gemm.h: nothing is uploaded. The bits equal those that cuda_weight_pack.c makes of the same
 * source: elements, quantisation by quantize.h, scales. A call enqueues work and returns. Thread:
 * loading. */
#ifndef BATON_KERNELS_CUDA_FILL_DUMMY_H
#define BATON_KERNELS_CUDA_FILL_DUMMY_H

#include "kernels/cuda/gemm/gemm.h"
#include "kernels/dummy_weights.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Row i of this part is row first + i * row_interval of the whole matrix. */
struct fill_dummy {
    enum gemm_weight_layout layout;
    void *rows; /* the matrix in device memory, row 0 */
    size_t row_bytes;
    float *scales; /* W8, W4: of row 0; F8: of the part's first 128 rows */
    size_t first, row_interval;
    size_t n_rows, n_in;
    struct dummy_weights from;
    size_t row_step, k_step; /* strides of element indices */
};
cudaError_t fill_dummy_run(cudaStream_t stream, const struct fill_dummy *f);

#ifdef __cplusplus
}
#endif
#endif
