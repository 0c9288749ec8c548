/* prepare_inputs_f8.cu - quantises rows of GEMM inputs to e4m3. Bound by memory. One block per row,
 * where a warp has the 128 elements of a scale, four per lane; or, of bf16 as a GEMM leaves it, 16
 * threads for the elements of each scale, whatever the rows. Thread: device;
 * prepare_inputs_f8_run: engine. */
#include "kernels/cuda/inputs/prepare_inputs_f8.h"
#include "kernels/cuda/inputs/prepare_inputs_rows.cuh"

static_assert(PREPARE_INPUTS_F8_BLOCK == WARP * QUAD, "a warp's elements share a scale");

static const float E4M3_MAX = 448.0f;

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

/* ---- bf16 rows of whole blocks ---- */

enum { OCT = 8 /* elements of a thread */, THREADS_OF_SCALE = PREPARE_INPUTS_F8_BLOCK / OCT };

static __device__ __forceinline__ void read_oct(float v[OCT], const uint16_t *x)
{
    const uint4 q = *(const uint4 *)x;
    const unsigned words[4] = { q.x, q.y, q.z, q.w };
#pragma unroll
    for (int i = 0; i < 4; i++) v[2 * i] = bf16_low(words[i]), v[2 * i + 1] = bf16_high(words[i]);
}

/* x / scale of finite numbers, which __fdiv_rn would compute with a branch each; -0 stays -0. */
static __device__ __forceinline__ float divide(float x, float scale, float reciprocal)
{
    const float q = __fmul_rn(x, reciprocal);
    return copysignf(__fmaf_rn(__fmaf_rn(-q, scale, x), reciprocal, q), x);
}

static __device__ __forceinline__ unsigned two_to_e4m3(const float *v, float scale, bool finite)
{
    if (ROUNDS_E4M3 && finite) {
        const float reciprocal = __frcp_rn(scale);
        return round_e4m3x2(divide(v[0], scale, reciprocal), divide(v[1], scale, reciprocal));
    }
    return float_to_e4m3(__fdiv_rn(v[0], scale)) | float_to_e4m3(__fdiv_rn(v[1], scale)) << 8;
}

static __global__ void __launch_bounds__(PREPARE_INPUTS_THREADS)
    prepare_inputs_f8_blocks_kernel(const struct prepare_inputs_f8 in, unsigned n_scales)
{
    grid_dependency_sync();
    const unsigned thread = blockIdx.x * PREPARE_INPUTS_THREADS + threadIdx.x,
                   n_blocks = (unsigned)in.n / PREPARE_INPUTS_F8_BLOCK,
                   block = min(thread / THREADS_OF_SCALE, n_scales - 1),
                   at = thread % THREADS_OF_SCALE * OCT;
    float v[OCT];
    read_oct(v, (const uint16_t *)in.x + (size_t)(block / n_blocks) * in.x_stride +
                    block % n_blocks * PREPARE_INPUTS_F8_BLOCK + at);
    float largest = 0;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < OCT; i++)
        largest = fmaxf(largest, fabsf(v[i])), finite = finite && fabsf(v[i]) < INFINITY;
    for (int step = THREADS_OF_SCALE / 2; step > 0; step /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    const unsigned votes = __ballot_sync(0xffffffffu, finite) >> threadIdx.x % WARP / 16 * 16;
    finite = (votes & 0xffffu) == 0xffffu; /* of the threads of the scale */
    const float scale = __fdiv_rn(fmaxf(largest, 1e-4f), E4M3_MAX);
    const uint2 y = make_uint2(
        two_to_e4m3(v, scale, finite) | two_to_e4m3(v + 2, scale, finite) << 16,
        two_to_e4m3(v + 4, scale, finite) | two_to_e4m3(v + 6, scale, finite) << 16);
    if (thread / THREADS_OF_SCALE >= n_scales) return;
    *(uint2 *)(in.y + (size_t)block * PREPARE_INPUTS_F8_BLOCK + at) = y;
    if (at == 0) in.scales[block] = scale;
}

static bool has_whole_blocks(const struct prepare_inputs_f8 *in)
{
    return in->bf16 && !in->x_rows && in->n % PREPARE_INPUTS_F8_BLOCK == 0 &&
           in->x_stride % OCT == 0 && (uintptr_t)in->x % 16 == 0 &&
           in->n_rows * (in->n / PREPARE_INPUTS_F8_BLOCK) < UINT32_MAX / (2 * THREADS_OF_SCALE);
}

cudaError_t prepare_inputs_f8_run(cudaStream_t stream, const struct prepare_inputs_f8 *in)
{
    if (in->n_rows == 0 || in->n == 0) return cudaSuccess;
    if (in->bf16 && in->norm) return cudaErrorInvalidValue;
    if (has_whole_blocks(in)) {
        const unsigned n_scales = (unsigned)(in->n_rows * (in->n / PREPARE_INPUTS_F8_BLOCK));
        return launch(stream, prepare_inputs_f8_blocks_kernel,
                      dim3(blocks_for((size_t)n_scales * THREADS_OF_SCALE, PREPARE_INPUTS_THREADS)),
                      dim3(PREPARE_INPUTS_THREADS), 0, *in, n_scales);
    }
    return launch(stream, prepare_inputs_f8_kernel, dim3((unsigned)in->n_rows),
                  dim3(PREPARE_INPUTS_THREADS), 0, *in);
}
