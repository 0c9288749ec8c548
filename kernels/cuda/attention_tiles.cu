/* attention_tiles.cu - which of attention_tiles.cuh's kernels a model's shape takes, if any. Thread: engine. */
#include "kernels/cuda/attention_calls.cuh"

bool attention_tiles_fit(const struct attention *a)
{
    if (a->exact || a->kv.latent || a->kv.dtype != DTYPE_BF16 || a->v_dim != a->kv.head_dim || a->n_heads / a->kv.n_heads > TILE_PAIRS) return false;
    return a->kv.head_dim == 64 || a->kv.head_dim == 128;
}

cudaError_t attention_tiles_launch(cudaStream_t stream, const struct tiles_call *c, int32_t n_windows, int max_blocks)
{
    const dim3 block(TILE_THREADS);
    dim3       grid;
    cudaError_t e = attention_grid((size_t)n_windows * (size_t)c->kv.n_heads * (size_t)(c->n_at_once > 0 ? c->n_at_once : 1),
                                   c->n_at_once > 0 ? TILES_SPREAD : TILES_WHOLE, max_blocks, &grid);
    if (e != cudaSuccess) return e;
    if (c->kv.head_dim == 64) return launch(stream, attend_tiles<64>, grid, block, tile_shared_bytes<64>(), *c);
    return launch(stream, attend_tiles<128>, grid, block, tile_shared_bytes<128>(), *c);
}
