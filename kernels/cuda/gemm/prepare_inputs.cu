/* prepare_inputs.cu - prepares rows of GEMM inputs, one block per row. Bound by memory: a row is
 * read once from memory, and once more from the caches if it is normalised. A thread has the same
 * elements however the row is aligned, four at a time, so alignment changes no sum. The norm is
 * that of kernels/cpu, norm * (x * factor), except for the order of its sum. y is aligned to 16
 * bytes.
 * Thread: device; prepare_inputs_run: engine. */
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemm/prepare_inputs.h"
#include "kernels/cuda/gemm/prepare_inputs_rows.cuh"

static __global__ void __launch_bounds__(PREPARE_INPUTS_THREADS)
    prepare_inputs_kernel(const struct prepare_inputs in)
{
    grid_dependency_sync();
    const size_t row = blockIdx.x, n = in.n, n_padded = (n + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP;
    if (in.n_real && (int)row >= *in.n_real) return;
    const float *x = in.x + (in.x_rows ? (size_t)in.x_rows[row] : row) * in.x_stride;
    const bool aligned = is_aligned(x, 16), norm_aligned = is_aligned(in.norm, 16);
    const float factor = in.norm ? norm_factor(x, n, in.eps, aligned) : 1.0f;
    for (size_t k = threadIdx.x * QUAD; k < n_padded; k += PREPARE_INPUTS_THREADS * QUAD) {
        float4 v = read_quad(x, k, n, aligned);
        if (in.norm) v = norm_quad(v, read_quad(in.norm, k, n, norm_aligned), factor, k, n);
        const size_t at = row * n_padded + k;
        if (in.type == DTYPE_F32) *(float4 *)((float *)in.y + at) = v;
        else if (in.type == DTYPE_F16)
            *(uint2 *)((uint16_t *)in.y + at) = make_uint2(pack_f16(v.x, v.y), pack_f16(v.z, v.w));
        else
            *(uint2 *)((uint16_t *)in.y + at) = make_uint2(pack_bf16(v.x, v.y),
                                                           pack_bf16(v.z, v.w));
    }
}

cudaError_t prepare_inputs_run(cudaStream_t stream, const struct prepare_inputs *in)
{
    if (in->n_rows == 0 || in->n == 0) return cudaSuccess;
    if (in->type != DTYPE_F32 && in->type != DTYPE_F16 && in->type != DTYPE_BF16)
        return cudaErrorInvalidValue;
    return launch(stream, prepare_inputs_kernel, dim3((unsigned)in->n_rows),
                  dim3(PREPARE_INPUTS_THREADS), 0, *in);
}
