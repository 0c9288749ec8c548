/* attention_mla_decode.cu - which kernel of attention_mla_decode.cuh a model's number of heads and
 * the GPU take, if any. Thread: engine. */
#include "kernels/cuda/attention/attention_launch.cuh"
#include "kernels/cuda/attention/attention_mla_decode.cuh"

bool attention_mla_decode_supports(const struct attention *a)
{
    return !a->exact && a->kv.latent && a->kv.dtype == DTYPE_BF16 && a->kv.head_dim == MLA_LATENT &&
           a->v_dim == MLA_VALUE;
}

template <int PAIRS, int WARPS>
static cudaError_t launch_mla(cudaStream_t stream, struct attn_decode_call c, int max_blocks)
{
    using S = attn_mla_shape<PAIRS, WARPS>;
    dim3 grid;
    c.n_runs = (c.n_heads + PAIRS - 1) / PAIRS;
    cudaError_t e = attention_grid((size_t)(c.item_end - c.item_begin) * (size_t)c.n_runs,
                                   MLA_BLOCKS, max_blocks, &grid);
    return e == cudaSuccess
               ? launch(stream, attn_mla_kernel<PAIRS, WARPS>, grid, dim3(S::THREADS), S::BYTES, c)
               : e;
}

cudaError_t attention_mla_decode_launch(cudaStream_t stream, const struct attn_decode_call *c,
                                        int max_blocks)
{
    int device = 0, room = 0;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (e != cudaSuccess) return e;
    if (c->n_heads > 16 && (size_t)room >= attn_mla_shape<64, 8>::BYTES)
        return launch_mla<64, 8>(stream, *c, max_blocks);
    return launch_mla<16, 4>(stream, *c, max_blocks);
}
