/* prepare_inputs_f8.h - prepares inputs of F8 GEMMs with x in e4m3 (gemm.h, x_scales): gathers,
 * normalises, quantises with a scale per row and 128 elements. A row's result depends only on the
 * row.
 * Thread: engine. Calls enqueue work on the stream and return. */
#ifndef BATON_KERNELS_CUDA_INPUTS_PREPARE_INPUTS_F8_H
#define BATON_KERNELS_CUDA_INPUTS_PREPARE_INPUTS_F8_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* elements that share a scale, and that rows of y are filled up to */
enum { PREPARE_INPUTS_F8_BLOCK = 128 };

/* All pointers are to device memory. */
struct prepare_inputs_f8 {
    const void *x;         /* f32, or bf16 */
    bool bf16;             /* x is; without norm only */
    size_t x_stride;       /* elements */
    const int32_t *x_rows; /* [n_rows]: which row of x; NULL: 0, 1, 2 .. */
    const float *norm;     /* [n]: rows are norm * x / sqrt(mean(x^2) + eps), as prepare_inputs.h
                            * has it; NULL: as they are */
    float eps;
    size_t n_rows, n;
    const int32_t *n_real; /* as prepare_inputs.h has it */
    uint8_t *y;            /* e4m3: rows of n, filled up with zeros to a multiple of
                    * PREPARE_INPUTS_F8_BLOCK; aligned to 16 bytes */
    float *scales;         /* [n_rows][ceil(n / PREPARE_INPUTS_F8_BLOCK)]: the largest magnitude
                    * of the elements, 1e-4 at least, / 448 */
};
/* cudaErrorInvalidValue: norm of bf16. */
cudaError_t prepare_inputs_f8_run(cudaStream_t stream, const struct prepare_inputs_f8 *in);

#ifdef __cplusplus
}
#endif
#endif
