/* prepare_inputs_f8.cu - quantises rows of GEMM inputs to e4m3. One block per row; a warp has the
 * 128 elements of a scale, four per lane. Bound by memory. Thread: device; prepare_inputs_f8_run:
 * engine. */
#include "kernels/cuda/gemm/prepare_inputs_f8.h"
#include "kernels/cuda/gemm/prepare_inputs_rows.cuh"

static_assert(PREPARE_INPUTS_F8_BLOCK == WARP * QUAD, "a warp's elements share a scale");

static const float E4M3_MAX = 448.0f;

static __device__ __forceinline__ float4 read_bf16_quad(const uint16_t *x, size_t k, size_t n)
{
    if (k + QUAD <= n && is_aligned(x + k, 8)) {
        const uint2 v = *(const uint2 *)(x + k);
        return make_float4(bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y));
    }
    float4 v = make_float4(0, 0, 0, 0);
    if (k < n) v.x = bf16_to_float(x[k]);
    if (k + 1 < n) v.y = bf16_to_float(x[k + 1]);
    if (k + 2 < n) v.z = bf16_to_float(x[k + 2]);
    if (k + 3 < n) v.w = bf16_to_float(x[k + 3]);
    return v;
}

static __device__ __forceinline__ unsigned quad_to_e4m3(const float4 &v, float scale)
{
    return float_to_e4m3(__fdiv_rn(v.x, scale)) | float_to_e4m3(__fdiv_rn(v.y, scale)) << 8 |
           float_to_e4m3(__fdiv_rn(v.z, scale)) << 16 | float_to_e4m3(__fdiv_rn(v.w, scale)) << 24;
}

static __global__ void __launch_bounds__(PREPARE_INPUTS_THREADS)
    prepare_inputs_f8_kernel(const struct prepare_inputs_f8 in)
{
    grid_dependency_sync();
    const size_t row = blockIdx.x, n = in.n,
                 n_blocks = (n + PREPARE_INPUTS_F8_BLOCK - 1) / PREPARE_INPUTS_F8_BLOCK;
    if (in.n_real && (int)row >= *in.n_real) return;
    const size_t x_at = (in.x_rows ? (size_t)in.x_rows[row] : row) * in.x_stride;
    const float *x = (const float *)in.x + x_at;
    const bool aligned = is_aligned(x, 16), norm_aligned = is_aligned(in.norm, 16);
    const float factor = in.norm ? norm_factor(x, n, in.eps, aligned) : 1.0f;
    /* whole warps */
    for (size_t k = threadIdx.x * QUAD; k < n_blocks * PREPARE_INPUTS_F8_BLOCK;
         k += PREPARE_INPUTS_THREADS * QUAD) {
        float4 v = in.bf16 ? read_bf16_quad((const uint16_t *)in.x + x_at, k, n)
                           : read_quad(x, k, n, aligned);
        if (in.norm) v = norm_quad(v, read_quad(in.norm, k, n, norm_aligned), factor, k, n);
        const float largest = warp_max(
            fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
        const float scale = __fdiv_rn(fmaxf(largest, 1e-4f), E4M3_MAX);
        *(unsigned *)(in.y + row * n_blocks * PREPARE_INPUTS_F8_BLOCK + k) = quad_to_e4m3(v, scale);
        if (threadIdx.x % WARP == 0)
            in.scales[row * n_blocks + k / PREPARE_INPUTS_F8_BLOCK] = scale;
    }
}

cudaError_t prepare_inputs_f8_run(cudaStream_t stream, const struct prepare_inputs_f8 *in)
{
    if (in->n_rows == 0 || in->n == 0) return cudaSuccess;
    if (in->bf16 && in->norm) return cudaErrorInvalidValue;
    return launch(stream, prepare_inputs_f8_kernel, dim3((unsigned)in->n_rows),
                  dim3(PREPARE_INPUTS_THREADS), 0, *in);
}
