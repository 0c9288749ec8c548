/* attention_decode_mma.cu - whether a model's decode rows take a kernel of
 * attention_decode_mma.cuh, and which. Thread: engine. */
#include "kernels/cuda/attention/attention_decode_mma.cuh"
#include "kernels/cuda/attention/attention_launch.cuh"

/* With fewer heads of a group attention_decode.cuh keeps up with the memory; with bytes, each of
 * which it must dequantise first, not as far. */
bool attention_decode_mma_supports(const struct attention *a)
{
    const bool is_bytes = a->kv.dtype == DTYPE_I8 || a->kv.dtype == DTYPE_F8_E4M3;
    return attention_prefill_supports(a) &&
           a->n_heads / a->kv.n_heads >= (is_bytes ? ATTN_MMA_HEADS_MIN_BYTES : ATTN_MMA_HEADS_MIN);
}

/* A lane's registers have both elements of each pair, and one block has all queries of a key. */
bool attention_decode_mma_appends(const struct attention *a)
{
    const struct rope_args *r = a->append->rope;
    const size_t dim = (size_t)a->kv.head_dim;
    return r && attention_decode_mma_supports(a) && !r->heads[0].norm == !r->heads[1].norm &&
           a->n_heads / a->kv.n_heads <= ATTN_MMA_HEADS &&
           attention_rotates_keys(r, &a->kv, a->append->k) && r->rot_dim == dim &&
           r->heads[0].x == a->q && r->heads[0].head_dim == dim &&
           r->heads[0].n_heads == (size_t)a->n_heads &&
           r->heads[0].x_stride == (size_t)a->n_heads * dim;
}

static size_t n_units(int n_heads, int n_kv_heads, int32_t n_items)
{
    return (size_t)n_items * (size_t)n_kv_heads *
           blocks_for((size_t)(n_heads / n_kv_heads), (size_t)ATTN_MMA_HEADS);
}

bool attention_decode_mma_is_one_wave(const struct attention *a, int32_t n_items)
{
    const size_t n = n_units(a->n_heads, a->kv.n_heads, n_items);
    dim3 grid;
    return attention_grid(n, ATTN_MMA_BLOCKS, a->max_blocks, &grid) == cudaSuccess && grid.x == n;
}

template <enum dtype T, int DIM>
static cudaError_t launch_mma(cudaStream_t stream, struct attn_decode_call c, int max_blocks)
{
    dim3 grid;
    c.n_runs = (c.n_heads / c.kv.n_heads + ATTN_MMA_HEADS - 1) / ATTN_MMA_HEADS;
    cudaError_t e = attention_grid(n_units(c.n_heads, c.kv.n_heads, c.item_end - c.item_begin),
                                   ATTN_MMA_BLOCKS, max_blocks, &grid);
    void (*const kernel)(struct attn_decode_call) = c.append.k ? attn_mma_kernel<T, DIM, true>
                                                               : attn_mma_kernel<T, DIM, false>;
    return e == cudaSuccess ? launch(stream, kernel, grid, dim3(ATTN_MMA_THREADS),
                                     attn_mma_shape<T, DIM>::BYTES, c)
                            : e;
}

template <enum dtype T>
static cudaError_t launch_dims(cudaStream_t stream, const struct attn_decode_call *c,
                               int max_blocks)
{
    return c->kv.head_dim == 64 ? launch_mma<T, 64>(stream, *c, max_blocks)
                                : launch_mma<T, 128>(stream, *c, max_blocks);
}

cudaError_t attention_decode_mma_launch(cudaStream_t stream, const struct attn_decode_call *c,
                                        int max_blocks)
{
    switch (c->kv.dtype) {
    case DTYPE_BF16: return launch_dims<DTYPE_BF16>(stream, c, max_blocks);
    case DTYPE_F16: return launch_dims<DTYPE_F16>(stream, c, max_blocks);
    case DTYPE_I8: return launch_dims<DTYPE_I8>(stream, c, max_blocks);
    case DTYPE_F8_E4M3: return launch_dims<DTYPE_F8_E4M3>(stream, c, max_blocks);
    default: return cudaErrorInvalidValue;
    }
}
