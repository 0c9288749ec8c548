/* fill_dummy.cu - computes dummy weights on the GPU. An element takes about twenty integer
 * operations, so unquantised layouts are written at about memory bandwidth; quantised ones are
 * computed twice, once for the largest magnitude and once to be stored. Thread: device;
 * fill_dummy_run: loading. */
#include "kernels/cuda/dtype_convert.cuh"
#include "kernels/cuda/fill_dummy.h"

enum {
    FILL_DUMMY_THREADS = 256,
    FILL_DUMMY_BLOCK = 128 /* rows and columns that share a scale of F8 */
};

static __device__ __forceinline__ float element(const fill_dummy &f, size_t row, size_t k)
{
    return bf16_to_float(dummy_weight_bf16(&f.from, row * f.row_step + k * f.k_step));
}

static __device__ __forceinline__ unsigned char *row_at(const fill_dummy &f, size_t row)
{
    return (unsigned char *)f.rows + (f.first + row * f.row_interval) * f.row_bytes;
}

/* ---- as they are ---- */

static __global__ void __launch_bounds__(FILL_DUMMY_THREADS)
    fill_dummy_f32_kernel(const fill_dummy f)
{
    grid_dependency_sync();
    const size_t row = blockIdx.x, n_padded = f.row_bytes / sizeof(float);
    float *to = (float *)row_at(f, row);
    for (size_t k = threadIdx.x; k < n_padded; k += FILL_DUMMY_THREADS)
        to[k] = k < f.n_in ? element(f, row, k) : 0;
}

/* Two at a time. */
static __global__ void __launch_bounds__(FILL_DUMMY_THREADS)
    fill_dummy_bf16_kernel(const fill_dummy f)
{
    grid_dependency_sync();
    const size_t row = blockIdx.x, n_pairs = f.row_bytes / sizeof(unsigned), at = row * f.row_step;
    unsigned *to = (unsigned *)row_at(f, row);
    for (size_t i = threadIdx.x; i < n_pairs; i += FILL_DUMMY_THREADS) {
        const size_t k = 2 * i;
        const unsigned low = k < f.n_in ? dummy_weight_bf16(&f.from, at + k * f.k_step) : 0;
        const unsigned high = k + 1 < f.n_in ? dummy_weight_bf16(&f.from, at + (k + 1) * f.k_step)
                                             : 0;
        to[i] = low | high << 16;
    }
}

/* ---- wint8 and wint4: a scale a row ---- */

/* The largest value of the block, in every thread. */
static __device__ __forceinline__ float largest_of_block(float x)
{
    __shared__ float room[FILL_DUMMY_THREADS / WARP];
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = x;
    __syncthreads();
    float all = 0;
    for (unsigned i = 0; i < FILL_DUMMY_THREADS / WARP; i++) all = fmaxf(all, room[i]);
    __syncthreads();
    return all;
}

/* As quantize_channel: rounds halves away from zero; 0 for a row of zeros. */
static __device__ __forceinline__ int channel_number(float w, float a, float limit)
{
    if (a == 0) return 0;
    const float x = __fmul_rn(__fdiv_rn(w, a), limit), magnitude = fabsf(x);
    int whole = (int)magnitude;
    whole += magnitude - (float)whole >= 0.5f;
    return x < 0 ? -whole : whole;
}

static __device__ __forceinline__ float largest_of_row(const fill_dummy &f, size_t row, float limit)
{
    float a = 0;
    for (size_t k = threadIdx.x; k < f.n_in; k += FILL_DUMMY_THREADS)
        a = fmaxf(a, fabsf(element(f, row, k)));
    a = largest_of_block(a);
    if (threadIdx.x == 0)
        f.scales[f.first + row * f.row_interval] =
            a == 0 ? 0 : bf16_to_float(float_to_bf16(__fdiv_rn(a, limit)));
    return a;
}

static __global__ void __launch_bounds__(FILL_DUMMY_THREADS)
    fill_dummy_w8_kernel(const fill_dummy f)
{
    grid_dependency_sync();
    const size_t row = blockIdx.x;
    const float a = largest_of_row(f, row, 127);
    signed char *to = (signed char *)row_at(f, row);
    for (size_t k = threadIdx.x; k < f.row_bytes; k += FILL_DUMMY_THREADS)
        to[k] = (signed char)(k < f.n_in ? channel_number(element(f, row, k), a, 127) : 0);
}

static __global__ void __launch_bounds__(FILL_DUMMY_THREADS)
    fill_dummy_w4_kernel(const fill_dummy f)
{
    grid_dependency_sync();
    const size_t row = blockIdx.x;
    const float a = largest_of_row(f, row, 7);
    unsigned char *to = row_at(f, row);
    for (size_t i = threadIdx.x; i < f.row_bytes; i += FILL_DUMMY_THREADS) {
        const size_t k = 2 * i;
        const int low = k < f.n_in ? channel_number(element(f, row, k), a, 7) : 0,
                  high = k + 1 < f.n_in ? channel_number(element(f, row, k + 1), a, 7) : 0;
        to[i] = (unsigned char)((low + 8) | (high + 8) << 4);
    }
}

/* ---- block_wise_fp8 ---- */

static __device__ __forceinline__ size_t at_most_block(size_t n)
{
    return n < FILL_DUMMY_BLOCK ? n : (size_t)FILL_DUMMY_BLOCK;
}

/* One thread block per 128 rows by 128 columns; a row's last block writes its padding. */
static __global__ void __launch_bounds__(FILL_DUMMY_THREADS)
    fill_dummy_f8_kernel(const fill_dummy f)
{
    grid_dependency_sync();
    const size_t across = (f.n_in + FILL_DUMMY_BLOCK - 1) / FILL_DUMMY_BLOCK,
                 row_block = blockIdx.x / across, k_block = blockIdx.x % across;
    const size_t row0 = row_block * FILL_DUMMY_BLOCK, k0 = k_block * FILL_DUMMY_BLOCK;
    const size_t n_rows = at_most_block(f.n_rows - row0), n_k = at_most_block(f.n_in - k0),
                 n_padded = at_most_block(f.row_bytes - k0);
    const size_t k = threadIdx.x % FILL_DUMMY_BLOCK;
    float a = 0;
    for (size_t i = threadIdx.x / FILL_DUMMY_BLOCK; i < n_rows && k < n_k;
         i += FILL_DUMMY_THREADS / FILL_DUMMY_BLOCK)
        a = fmaxf(a, fabsf(element(f, row0 + i, k0 + k)));
    a = fmaxf(largest_of_block(a), 1e-4f);
    const float factor = __fdiv_rn(448.0f, a);
    if (threadIdx.x == 0) f.scales[row_block * across + k_block] = __fdiv_rn(a, 448.0f);
    for (size_t i = threadIdx.x / FILL_DUMMY_BLOCK; i < n_rows && k < n_padded;
         i += FILL_DUMMY_THREADS / FILL_DUMMY_BLOCK)
        row_at(f, row0 + i)[k0 + k] =
            (unsigned char)(k < n_k ? float_to_e4m3(__fmul_rn(element(f, row0 + i, k0 + k), factor))
                                    : 0);
}

/* ---- which of them ---- */

cudaError_t fill_dummy_run(cudaStream_t stream, const struct fill_dummy *f)
{
    const dim3 threads(FILL_DUMMY_THREADS), rows((unsigned)f->n_rows);
    const size_t n_blocks = (size_t)blocks_for(f->n_rows, FILL_DUMMY_BLOCK) *
                            blocks_for(f->n_in, FILL_DUMMY_BLOCK);
    if (f->n_rows == 0 || f->n_in == 0) return cudaSuccess;
    if (f->n_rows > INT32_MAX || n_blocks > INT32_MAX) return cudaErrorInvalidValue;
    switch (f->layout) {
    case GEMM_F32: return launch(stream, fill_dummy_f32_kernel, rows, threads, 0, *f);
    case GEMM_BF16: return launch(stream, fill_dummy_bf16_kernel, rows, threads, 0, *f);
    case GEMM_W8: return launch(stream, fill_dummy_w8_kernel, rows, threads, 0, *f);
    case GEMM_W4: return launch(stream, fill_dummy_w4_kernel, rows, threads, 0, *f);
    case GEMM_F8:
        return launch(stream, fill_dummy_f8_kernel, dim3((unsigned)n_blocks), threads, 0, *f);
    default: return cudaErrorInvalidValue;
    }
}
