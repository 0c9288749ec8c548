/* attention_decode_select.cu - which kernel of attention_decode.cuh a model's shape takes.
 * Thread: engine. */
#include "kernels/cuda/attention/attention_launch.cuh"

template <enum dtype T, int LANES, int HEADS, bool WHOLE>
static cudaError_t launch_decode(cudaStream_t stream, struct attn_decode_call c, int max_blocks)
{
    dim3 grid;
    c.n_runs = (c.n_heads / c.kv.n_heads + HEADS - 1) / HEADS;
    cudaError_t e = attention_grid((size_t)(c.item_end - c.item_begin) *
                                       (size_t)(c.kv.n_heads * c.n_runs),
                                   ATTN_DECODE_BLOCKS, max_blocks, &grid);
    if (e != cudaSuccess) return e;
    return launch(stream, attn_decode_kernel<T, LANES, HEADS, WHOLE>, grid,
                  dim3(ATTN_DECODE_THREADS), attn_decode_shared_bytes<T>(HEADS, c.kv.head_dim), c);
}

template <enum dtype T, int LANES>
static cudaError_t launch_heads(cudaStream_t stream, const struct attn_decode_call &c,
                                int max_blocks)
{
    const int group = c.n_heads / c.kv.n_heads;
    if (group == 1) return launch_decode<T, LANES, 1, true>(stream, c, max_blocks);
    if (group <= 4) return launch_decode<T, LANES, 4, true>(stream, c, max_blocks);
    return launch_decode<T, LANES, 8, true>(stream, c, max_blocks);
}

template <enum dtype T>
static cudaError_t launch_lanes(cudaStream_t stream, const struct attn_decode_call &c,
                                int max_blocks)
{
    if (c.kv.head_dim % CHUNK != 0 || c.v_dim % CHUNK != 0)
        return launch_decode<T, WARP, 4, false>(stream, c, max_blocks);
    if (c.kv.head_dim <= 8 * CHUNK) return launch_heads<T, 8>(stream, c, max_blocks);
    if (c.kv.head_dim <= 16 * CHUNK) return launch_heads<T, 16>(stream, c, max_blocks);
    return launch_heads<T, 32>(stream, c, max_blocks);
}

cudaError_t attention_decode_launch(cudaStream_t stream, const struct attn_decode_call *c,
                                    int max_blocks)
{
    switch (c->kv.dtype) {
    case DTYPE_F32: return launch_lanes<DTYPE_F32>(stream, *c, max_blocks);
    case DTYPE_BF16: return launch_lanes<DTYPE_BF16>(stream, *c, max_blocks);
    case DTYPE_F16: return launch_lanes<DTYPE_F16>(stream, *c, max_blocks);
    case DTYPE_I8: return launch_lanes<DTYPE_I8>(stream, *c, max_blocks);
    case DTYPE_F8_E4M3: return launch_lanes<DTYPE_F8_E4M3>(stream, *c, max_blocks);
    default: return cudaErrorInvalidValue;
    }
}
