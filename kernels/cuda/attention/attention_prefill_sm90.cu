/* attention_prefill_sm90.cu - the kernel of attention_prefill_sm90.cuh, and which models take it.
 * Thread: engine. */
#include "kernels/cuda/attention/attention_launch.cuh"
#include "kernels/cuda/attention/attention_prefill_sm90_consume.cuh"
#include "kernels/cuda/gemm/gemm_call.cuh"

static_assert(SM90_PAIRS == PREFILL_SETS_MAX * PREFILL_PAIRS, "tiles of as many pairs");
static_assert(SM90_PAIRS <= (int)CUDA_ATTN_SEGMENT, "of which a segment has as many keys");

template <int DIM>
static __global__ void __launch_bounds__(SM90_BOUND(SM90_ATTN_THREADS), 1)
    attn_prefill_sm90_kernel(const struct attn_prefill_call c)
{
    grid_dependency_sync();
#if SM90_CODE
    sm90_attn_init_barriers<DIM>();
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<SM90_PRODUCER_REGISTERS>();
        sm90_attn_produce<DIM>(c);
    } else {
        warpgroup_reg_alloc<SM90_CONSUMER_REGISTERS>();
        sm90_attn_consume<DIM>(c, warpgroup - 1);
    }
#else
    (void)c;
    __trap();
#endif
}

bool attention_prefill_sm90_supports(const struct kv_layer *kv)
{
    return kv->dtype == DTYPE_BF16 && !kv->latent && kv->block_tokens % SM90_BLOCK_TOKENS == 0 &&
           (kv->head_dim == 64 || kv->head_dim == 128) && gemm_sm90_available();
}

cudaError_t attention_prefill_sm90_launch(cudaStream_t stream, const struct attn_prefill_call *c,
                                          dim3 grid)
{
    const dim3 block(SM90_ATTN_THREADS);
    return c->kv.head_dim == 64 ? launch(stream, attn_prefill_sm90_kernel<64>, grid, block,
                                         (size_t)sm90_attn_layout<64>::SHARED, *c)
                                : launch(stream, attn_prefill_sm90_kernel<128>, grid, block,
                                         (size_t)sm90_attn_layout<128>::SHARED, *c);
}
