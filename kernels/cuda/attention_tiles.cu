/* attention_tiles.cu - which of attention_tiles.cuh's kernels a model's shape takes, if any. Thread: engine. */
#include "kernels/cuda/attention_calls.cuh"

bool attention_tiles_fit(const struct attention *a)
{
    if (a->exact || a->kv.latent || a->kv.dtype != DTYPE_BF16 || a->v_dim != a->kv.head_dim || a->n_heads / a->kv.n_heads > TILE_PAIRS) return false;
    return a->kv.head_dim == 64 || a->kv.head_dim == 128;
}

template <int DIM> static cudaError_t room_for_sets(int device, bool *is_room)
{
    const int want = (int)tile_shared_bytes<DIM, TILE_SETS_MAX>();
    int       of_block = 0, of_processor = 0, reserved = 0;
    cudaError_t e = cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&of_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
    *is_room = of_block >= want && of_processor >= 2 * (want + reserved);
    return e;
}

/* Two where that leaves two blocks for each processor, and each processor has room for two. */
cudaError_t attention_tiles_sets(const struct attention *a, int32_t n_rows, int32_t n_at_once, int32_t *n_sets)
{
    const size_t per_tile = (size_t)(TILE_SETS_MAX * TILE_PAIRS / (a->n_heads / a->kv.n_heads));
    const size_t n_units = blocks_for((size_t)n_rows, per_tile) * (size_t)a->kv.n_heads * (size_t)(n_at_once > 0 ? n_at_once : 1);
    int  device = 0, n_processors = 0;
    bool is_room = false;
    *n_sets = 1;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&n_processors, cudaDevAttrMultiProcessorCount, device);
    if (e == cudaSuccess) e = a->kv.head_dim == 64 ? room_for_sets<64>(device, &is_room) : room_for_sets<128>(device, &is_room);
    if (e == cudaSuccess && is_room && n_units >= (size_t)(2 * n_processors)) *n_sets = TILE_SETS_MAX;
    return e;
}

cudaError_t attention_tiles_launch(cudaStream_t stream, const struct tiles_call *c, int32_t n_windows, int max_blocks)
{
    const dim3 block(TILE_THREADS);
    dim3       grid;
    cudaError_t e = attention_grid((size_t)n_windows * (size_t)c->kv.n_heads * (size_t)(c->n_at_once > 0 ? c->n_at_once : 1),
                                   c->n_at_once > 0 ? TILES_SPREAD : TILES_WHOLE, max_blocks, &grid);
    if (e != cudaSuccess) return e;
    if (c->kv.head_dim == 64 && c->n_sets == 1) return launch(stream, attend_tiles<64, 1>, grid, block, tile_shared_bytes<64, 1>(), *c);
    if (c->kv.head_dim == 64) return launch(stream, attend_tiles<64, 2>, grid, block, tile_shared_bytes<64, 2>(), *c);
    if (c->n_sets == 1) return launch(stream, attend_tiles<128, 1>, grid, block, tile_shared_bytes<128, 1>(), *c);
    return launch(stream, attend_tiles<128, 2>, grid, block, tile_shared_bytes<128, 2>(), *c);
}
