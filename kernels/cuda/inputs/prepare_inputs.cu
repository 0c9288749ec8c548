/* prepare_inputs.cu - prepares rows of GEMM inputs, one block per row, or a warp where many are
 * normalised. Bound by memory: a row is read once from memory, and by a block once more from the
 * caches if it is normalised. A thread has the same elements however the row is aligned, four at a
 * time, so alignment changes no sum. The norm is that of kernels/cpu, norm * (x * factor), except
 * for the order of its sum. y is aligned to 16 bytes.
 * Thread: device; prepare_inputs_run: engine. */
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/inputs/prepare_inputs.h"
#include "kernels/cuda/inputs/prepare_inputs_rows.cuh"
#include "kernels/cuda/rms_norm.cuh"

/* Elements k .. k + 3 of the row at x_at, of any type. */
static __device__ __forceinline__ float4 read_any_quad(const struct prepare_inputs &in, size_t x_at,
                                                       size_t k, bool aligned)
{
    if (in.from == DTYPE_F32) return read_quad((const float *)in.x + x_at, k, in.n, aligned);
    if (in.from == DTYPE_BF16) return read_bf16_quad((const uint16_t *)in.x + x_at, k, in.n);
    const unsigned char *row = (const unsigned char *)in.x + x_at;
    return read_e4m3_quad(row, (const float *)(const void *)(row + in.scales_at), k, in.n);
}

static __global__ void __launch_bounds__(PREPARE_INPUTS_THREADS)
    prepare_inputs_kernel(const struct prepare_inputs in)
{
    grid_dependency_sync();
    const size_t row = blockIdx.x, n = in.n, n_padded = (n + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP;
    if (in.n_real && (int)row >= *in.n_real) return;
    const size_t x_at = (in.x_rows ? (size_t)in.x_rows[row] : row) * in.x_stride;
    const float *x = (const float *)in.x + x_at;
    const bool aligned = is_aligned(x, 16), norm_aligned = is_aligned(in.norm, 16);
    const float factor = in.norm ? norm_factor(x, n, in.eps, aligned) : 1.0f;
    for (size_t k = threadIdx.x * QUAD; k < n_padded; k += PREPARE_INPUTS_THREADS * QUAD) {
        float4 v = read_any_quad(in, x_at, k, aligned);
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

/* Normalised rows of QUADS quads a thread (rms_norm.cuh), a warp each; 16 bits. */
template <int QUADS>
static __global__ void __launch_bounds__(RMS_ROWS_THREADS)
    prepare_inputs_by_warp(const struct prepare_inputs in)
{
    grid_dependency_sync();
    const size_t row = (size_t)blockIdx.x * RMS_ROWS_WARPS + threadIdx.x / WARP;
    const unsigned n = (unsigned)in.n;
    rms_row<QUADS> r;
    if (row >= in.n_rows || (in.n_real && (int)row >= *in.n_real)) return;
    rms_row_load<QUADS>(
        &r, (const float *)in.x + (in.x_rows ? (size_t)in.x_rows[row] : row) * in.x_stride, n);
    const float factor = rms_row_factor<QUADS>(r, n, in.eps);
#pragma unroll
    for (int w = 0; w < RMS_WARPS; w++)
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const unsigned k = rms_row_at(w, i);
            if (k >= n) continue;
            const float4 by = __ldg((const float4 *)(const void *)(in.norm + k)),
                         v = rms_apply(r.v[w][i], by, factor);
            *(uint2 *)((uint16_t *)in.y + row * n + k) =
                in.type == DTYPE_F16 ? make_uint2(pack_f16(v.x, v.y), pack_f16(v.z, v.w))
                                     : make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
        }
}

/* How many quads, or 0 where a block has a row. */
static int quads_by_warp(const struct prepare_inputs *in)
{
    const uintptr_t all = (uintptr_t)in->x | (uintptr_t)in->norm | in->x_stride * sizeof(float);
    return in->norm && in->type != DTYPE_F32 && in->n % GEMM_STEP == 0 && all % sizeof(float4) == 0
               ? rms_row_quads(in->n_rows, in->n)
               : 0;
}

static cudaError_t run_by_warp(cudaStream_t stream, const struct prepare_inputs *in, int quads)
{
    const dim3 grid(blocks_for(in->n_rows, RMS_ROWS_WARPS));
    return launch(stream,
                  quads <= 2   ? prepare_inputs_by_warp<2>
                  : quads == 3 ? prepare_inputs_by_warp<3>
                               : prepare_inputs_by_warp<RMS_ROWS_QUADS>,
                  grid, dim3(RMS_ROWS_THREADS), 0, *in);
}

cudaError_t prepare_inputs_run(cudaStream_t stream, const struct prepare_inputs *in)
{
    if (in->n_rows == 0 || in->n == 0) return cudaSuccess;
    if ((in->type != DTYPE_F32 && in->type != DTYPE_F16 && in->type != DTYPE_BF16) ||
        (in->from != DTYPE_F32 &&
         ((in->from != DTYPE_BF16 && in->from != DTYPE_F8_E4M3) || in->norm)))
        return cudaErrorInvalidValue;
    const int quads = quads_by_warp(in);
    if (quads > 0) return run_by_warp(stream, in, quads);
    return launch(stream, prepare_inputs_kernel, dim3((unsigned)in->n_rows),
                  dim3(PREPARE_INPUTS_THREADS), 0, *in);
}
