/* gemm_sm90_wgmma.cuh - multiplies stages of 16-bit x and W (F: the layout; f16 for F16, otherwise
 * bf16) by wgmma, for the consumers of gemm_sm90.cuh. Thread: device. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_SM90_WGMMA_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_SM90_WGMMA_CUH

#include "kernels/cuda/gemm/gemm_sm90.cuh"

#if SM90_CODE
template <enum gemm_weight_layout F, int N>
static __device__ __forceinline__ void wgmma_of(float (&sums)[N], uint64_t x, uint64_t w, bool add)
{
    if (F == GEMM_F16) wgmma_f16(sums, x, w, add);
    else wgmma_bf16(sums, x, w, add);
}

template <enum gemm_weight_layout F, class T> struct multiplier : sm90_multiplier<T> {
    static const enum gemm_weight_layout LAYOUT = F;

    /* One stage: four steps of 16 k. */
    template <int H>
    static __device__ __forceinline__ void begin_stage(float (&sums)[T::HALVES][T::SUMS],
                                                       const sm90_operands &o, bool first)
    {
#pragma unroll
        for (int half = 0; half < H; half++) wgmma_fence_operand(sums[half]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_BYTES / 32; k++)
#pragma unroll
            for (int half = 0; half < H; half++)
                wgmma_of<F>(sums[half], o.x + (uint64_t)(k * WGMMA_K_STEP + half * OTHER_HALF),
                            o.w + (uint64_t)(k * WGMMA_K_STEP), !first || k > 0);
        wgmma_commit();
#pragma unroll
        for (int half = 0; half < H; half++) wgmma_fence_operand(sums[half]);
    }

    /* The ring slot of a stage is released once the wgmma of that stage have completed, after those
     * of the next stage were issued. */
    template <int H>
    __device__ __forceinline__ void multiply(float (&sums)[T::HALVES][T::SUMS],
                                             sm90_pipeline_state<T> *state) const
    {
        int before = state->index;
#pragma unroll 1
        for (int32_t stage = 0; stage < this->n_stages; stage++) {
            wait_for_stage<T>(this->ring, *state);
            begin_stage<H>(sums, operands_at<T>(this->first, state->index), stage == 0);
            wgmma_wait<1>();
            if (stage > 0) release_stage<T>(this->ring, before);
            before = state->index;
            advance<T>(state);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int half = 0; half < H; half++) wgmma_fence_operand(sums[half]);
        release_stage<T>(this->ring, before);
    }
};
#endif

#endif
