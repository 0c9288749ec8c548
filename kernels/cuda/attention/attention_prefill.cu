/* attention_prefill.cu - which kernel of attention_prefill.cuh a model's shape takes, if any.
 * Thread: engine. */
#include "kernels/cuda/attention/attention_launch.cuh"

/* Types that tensor cores take, or that become such; bytes only where 16 of them can be copied at a
 * time in every block. */
static bool is_for_products(const struct kv_layer *kv)
{
    if (kv->dtype == DTYPE_I8) return kv_block_bytes<DTYPE_I8>(*kv) % 16 == 0;
    if (kv->dtype == DTYPE_F8_E4M3) return kv_block_bytes<DTYPE_F8_E4M3>(*kv) % 16 == 0;
    return kv->dtype == DTYPE_BF16 || kv->dtype == DTYPE_F16;
}

bool attention_prefill_supports(const struct attention *a)
{
    if (a->exact || a->kv.latent || !is_for_products(&a->kv) || a->v_dim != a->kv.head_dim ||
        a->n_heads / a->kv.n_heads > PREFILL_PAIRS)
        return false;
    return a->kv.head_dim == 64 || a->kv.head_dim == 128;
}

template <int DIM> static cudaError_t room_for_sets(int device, bool *is_room)
{
    /* a little more than without scales */
    const int want = (int)attn_prefill_shared_bytes<DTYPE_I8, DIM, PREFILL_SETS_MAX>();
    int smem_per_block = 0, smem_per_sm = 0, reserved = 0;
    cudaError_t e = cudaDeviceGetAttribute(&smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                           device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&smem_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                   device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
    *is_room = smem_per_block >= want && smem_per_sm >= 2 * (want + reserved);
    return e;
}

/* Two sets for the kernel of compute capability 9.0. Otherwise two if that leaves two blocks per
 * SM, and an SM has room for two. */
cudaError_t attention_prefill_sets(const struct attention *a, int32_t n_rows, int32_t n_at_once,
                                   int32_t *n_sets)
{
    const size_t per_tile = (size_t)(PREFILL_SETS_MAX * PREFILL_PAIRS /
                                     (a->n_heads / a->kv.n_heads));
    const size_t n_units = blocks_for((size_t)n_rows, per_tile) * (size_t)a->kv.n_heads *
                           (size_t)(n_at_once > 0 ? n_at_once : 1);
    int device = 0, n_sms = 0;
    bool is_room = false;
    *n_sets = attention_prefill_sm90_supports(&a->kv) ? PREFILL_SETS_MAX : 1;
    if (*n_sets > 1) return cudaSuccess;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
    if (e == cudaSuccess)
        e = a->kv.head_dim == 64 ? room_for_sets<64>(device, &is_room)
                                 : room_for_sets<128>(device, &is_room);
    if (e == cudaSuccess && is_room && n_units >= (size_t)(2 * n_sms)) *n_sets = PREFILL_SETS_MAX;
    return e;
}

template <enum dtype T, int DIM>
static cudaError_t launch_sets(cudaStream_t stream, const struct attn_prefill_call *c, dim3 grid)
{
    const dim3 block(PREFILL_THREADS);
    if (c->n_sets == 1)
        return launch(stream, attn_prefill_kernel<T, DIM, 1>, grid, block,
                      attn_prefill_shared_bytes<T, DIM, 1>(), *c);
    return launch(stream, attn_prefill_kernel<T, DIM, PREFILL_SETS_MAX>, grid, block,
                  attn_prefill_shared_bytes<T, DIM, PREFILL_SETS_MAX>(), *c);
}

template <enum dtype T>
static cudaError_t launch_prefill(cudaStream_t stream, const struct attn_prefill_call *c, dim3 grid)
{
    return c->kv.head_dim == 64 ? launch_sets<T, 64>(stream, c, grid)
                                : launch_sets<T, 128>(stream, c, grid);
}

cudaError_t attention_prefill_launch(cudaStream_t stream, const struct attn_prefill_call *c,
                                     int32_t n_windows, int max_blocks)
{
    const bool sm90 = attention_prefill_sm90_supports(&c->kv);
    const int per_sm = sm90 ? 1 : c->n_at_once > 0 ? PREFILL_BLOCKS_SPLIT : PREFILL_BLOCKS_WHOLE;
    dim3 grid;
    cudaError_t e = attention_grid((size_t)n_windows * (size_t)c->kv.n_heads *
                                       (size_t)(c->n_at_once > 0 ? c->n_at_once : 1),
                                   per_sm, max_blocks, &grid);
    if (e != cudaSuccess) return e;
    if (sm90) return attention_prefill_sm90_launch(stream, c, grid);
    switch (c->kv.dtype) {
    case DTYPE_BF16: return launch_prefill<DTYPE_BF16>(stream, c, grid);
    case DTYPE_F16: return launch_prefill<DTYPE_F16>(stream, c, grid);
    case DTYPE_I8: return launch_prefill<DTYPE_I8>(stream, c, grid);
    case DTYPE_F8_E4M3: return launch_prefill<DTYPE_F8_E4M3>(stream, c, grid);
    default: return cudaErrorInvalidValue;
    }
}
