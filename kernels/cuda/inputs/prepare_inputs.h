/* prepare_inputs.h - prepares GEMM inputs on the GPU: gathers, normalises, rounds to 16 bits (to
 * nearest even). A row's result depends only on the row. f16 ends at 65504: a number beyond that
 * becomes +-65504, not an infinity. Infinities and NaNs are kept.
 * Thread: engine. Calls enqueue work on the stream and return. */
#ifndef BATON_KERNELS_CUDA_INPUTS_PREPARE_INPUTS_H
#define BATON_KERNELS_CUDA_INPUTS_PREPARE_INPUTS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* All pointers are to device memory. */
struct prepare_inputs {
    const void *x;
    enum dtype from;       /* of x: F32; without norm also BF16, and F8_E4M3 whose rows are aligned
                            * to 4 bytes */
    size_t scales_at;      /* of e4m3: bytes from a row's beginning to its f32 scales, one for every
                            * 128 elements */
    size_t x_stride;       /* elements */
    const int32_t *x_rows; /* [n_rows]: which row of x; NULL: 0, 1, 2 .. */
    const float *norm;     /* [n]: y = norm * x / sqrt(mean(x^2) + eps); NULL: as they are */
    float eps;
    size_t n_rows, n;
    const int32_t *n_real; /* how many of the rows are prepared; NULL: all */
    void *y;               /* rows of n, filled up with zeros to a multiple of GEMM_STEP
                      * elements */
    enum dtype type;       /* of y: F32, F16 or BF16 */
};
/* cudaErrorInvalidValue: other types, or a norm of narrow ones. */
cudaError_t prepare_inputs_run(cudaStream_t stream, const struct prepare_inputs *in);

#ifdef __cplusplus
}
#endif
#endif
