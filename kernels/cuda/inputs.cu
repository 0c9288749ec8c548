/* inputs.cu - rows of inputs for products. One block a row; bound by memory: a row is read from there once, and from the caches once more when
 * it is normalised. A thread has the same elements however the row is aligned, four at a time, so that alignment changes no sum. The norm is
 * that of kernels/cpu, norm * (x * factor), but for the order of its sum. y is aligned to 16 bytes.
 * Thread: device; inputs_run: engine. */
#include "kernels/cuda/inputs.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/numbers.cuh"

enum { INPUTS_THREADS = 256, QUAD = 4 };

static __device__ __forceinline__ bool is_aligned(const void *p, size_t to) { return (uintptr_t)p % to == 0; }

/* Elements k .. k + 3, zeros from n on. */
static __device__ __forceinline__ float4 read_quad(const float *x, size_t k, size_t n, bool aligned)
{
    if (aligned && k + QUAD <= n) return *(const float4 *)(x + k);
    float4 v = make_float4(0, 0, 0, 0);
    if (k < n) v.x = x[k];
    if (k + 1 < n) v.y = x[k + 1];
    if (k + 2 < n) v.z = x[k + 2];
    if (k + 3 < n) v.w = x[k + 3];
    return v;
}

static __device__ __forceinline__ float norm_factor(const float *x, size_t n, float eps, bool aligned)
{
    __shared__ float room[INPUTS_THREADS / WARP];
    float sum = 0;
    for (size_t k = threadIdx.x * QUAD; k < n; k += INPUTS_THREADS * QUAD) {
        const float4 v = read_quad(x, k, n, aligned);
        sum = __fmaf_rn(v.x, v.x, sum);
        sum = __fmaf_rn(v.y, v.y, sum);
        sum = __fmaf_rn(v.z, v.z, sum);
        sum = __fmaf_rn(v.w, v.w, sum);
    }
    return 1.0f / sqrtf(block_sum(sum, room) / (float)n + eps);
}

/* What lies behind the row of x must not come through: an infinite factor would make NaN of the zeros. */
static __device__ __forceinline__ float4 keep_below(const float4 &v, size_t k, size_t n)
{
    return make_float4(k < n ? v.x : 0, k + 1 < n ? v.y : 0, k + 2 < n ? v.z : 0, k + 3 < n ? v.w : 0);
}

static __global__ void __launch_bounds__(INPUTS_THREADS) inputs_kernel(const struct inputs in)
{
    const size_t row = blockIdx.x, n = in.n, n_filled = (n + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP;
    const float *x = in.x + (in.x_rows ? (size_t)in.x_rows[row] : row) * in.x_stride;
    const bool aligned = is_aligned(x, 16), norm_aligned = is_aligned(in.norm, 16);
    const float factor = in.norm ? norm_factor(x, n, in.eps, aligned) : 1.0f;
    for (size_t k = threadIdx.x * QUAD; k < n_filled; k += INPUTS_THREADS * QUAD) {
        float4 v = read_quad(x, k, n, aligned);
        if (in.norm) {
            const float4 by = read_quad(in.norm, k, n, norm_aligned);
            v = keep_below(make_float4(by.x * (v.x * factor), by.y * (v.y * factor), by.z * (v.z * factor), by.w * (v.w * factor)), k, n);
        }
        const size_t at = row * n_filled + k;
        if (in.f32) *(float4 *)((float *)in.y + at) = v;
        else *(uint2 *)((uint16_t *)in.y + at) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
    }
}

cudaError_t inputs_run(cudaStream_t stream, const struct inputs *in)
{
    if (in->n_rows == 0 || in->n == 0) return cudaSuccess;
    return launch(stream, inputs_kernel, dim3((unsigned)in->n_rows), dim3(INPUTS_THREADS), 0, *in);
}
