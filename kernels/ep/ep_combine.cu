/* ep_combine.cu - combine: sends results back to the rows' ranks and sums them. A block returns one
 * slot after another; the write to the other GPU dominates the time. Thread: device. */
#include "kernels/ep/ep_rows.cuh"
#include "kernels/ep/ep_signals.cuh"

enum { RETURN_THREADS = 128, SUM_THREADS = 256, SUM_BLOCKS_MAX = 32 };
static const size_t RETURN_BLOCKS_MAX = 1024;

/* ---- return ---- */

/* Returns one result; called by the whole block. */
static __device__ void return_one(const ep_call &c, const float *out, int slot)
{
    const size_t n = (size_t)c.hidden;
    const int at = c.x_rows[slot];
    const unsigned char *row = (c.own + c.at.rows) + (size_t)at * c.at.row_bytes;
    const int2 from = *(const int2 *)(const void *)(row + c.at.tail_at);
    unsigned char *to = c.direct ? c.window[from.x] + c.at.back + (size_t)from.y * c.at.back_bytes
                                 : c.out_back + (size_t)at * c.at.back_bytes;
    for (size_t k = threadIdx.x * EP_QUAD; k < n; k += RETURN_THREADS * EP_QUAD) {
        const float4 v = quad_from(out + (size_t)slot * n, k, n);
        if (c.back == DTYPE_F32) *(float4 *)(void *)(to + k * 4) = v;
        else *(uint2 *)(void *)(to + k * 2) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
    }
}

static __global__ void __launch_bounds__(RETURN_THREADS) return_kernel(ep_call c, const float *out)
{
    grid_dependency_sync();
    if (block_has_fault(c)) return;
    for (int slot = (int)blockIdx.x; slot < c.recv_begin[c.n_local]; slot += (int)gridDim.x)
        return_one(c, out, slot);
    if (c.direct && is_last_block(c)) signal_all(c, EP_FLAG_BACK);
}

cudaError_t ep_run_return(cudaStream_t s, const struct ep_call *c, const float *out, size_t n_slots)
{
    const size_t blocks = n_slots < 1                   ? 1
                          : n_slots > RETURN_BLOCKS_MAX ? RETURN_BLOCKS_MAX
                                                        : n_slots;
    return launch(s, return_kernel, dim3((unsigned)blocks), dim3(RETURN_THREADS), 0, *c, out);
}

/* ---- sum ---- */

/* Sums one element of one row over its choices, ascending. */
static __device__ __forceinline__ void sum_one(const ep_call &c, const ep_combine_args &a,
                                               size_t row, size_t k)
{
    const size_t at = row * (size_t)c.hidden + k;
    float sum = a.add ? a.y[at] : 0;
    for (int j = 0; j < c.n_used; j++) {
        const size_t i = row * (size_t)c.n_used + j;
        const unsigned char *from = c.own + c.at.back + (size_t)c.back_at[i] * c.at.back_bytes;
        const float v = c.back == DTYPE_F32
                            ? ((const float *)(const void *)from)[k]
                            : bf16_to_float(((const uint16_t *)(const void *)from)[k]);
        sum = fmaf(a.weights[i], v, sum);
    }
    a.y[at] = sum;
}

/* blockIdx.x: the row; blocks of one row take SUM_THREADS elements in turn. After a fault y
 * is as it was, or a part of it: the host learns of it. */
static __global__ void __launch_bounds__(SUM_THREADS)
    sum_kernel(ep_call c, ep_combine_args a, bool waits)
{
    grid_dependency_sync();
    if (!have_all_come(c, EP_FLAG_BACK, waits) || (int)blockIdx.x >= real_rows(c)) return;
    for (size_t k = blockIdx.y * SUM_THREADS + threadIdx.x; k < (size_t)c.hidden;
         k += (size_t)gridDim.y * SUM_THREADS)
        sum_one(c, a, blockIdx.x, k);
}

cudaError_t ep_run_sum(cudaStream_t s, const struct ep_call *c, const struct ep_combine_args *a)
{
    unsigned wide = blocks_for((size_t)c->hidden, SUM_THREADS);
    if (wide > SUM_BLOCKS_MAX) wide = SUM_BLOCKS_MAX;
    const bool waits = c->n_rows > 0 && waits_itself(*c, (size_t)c->n_rows * wide);
    /* a rank without rows waits too: the next call writes where others read */
    const cudaError_t e = waits ? cudaSuccess : ep_run_wait(s, c, EP_FLAG_BACK);
    if (e != cudaSuccess || c->n_rows == 0) return e;
    return launch(s, sum_kernel, dim3((unsigned)c->n_rows, wide), dim3(SUM_THREADS), 0, *c, *a,
                  waits);
}
