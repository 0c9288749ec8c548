/* gemm_sm90.cu - GEMM of bf16 and of f16 with many rows of x on compute capability 9.0, and which
 * calls take that kernel. gemm_sm90.cuh has the pipeline.
 *
 * Both tile widths accumulate alike: the choice changes no bit as far as is known of the hardware
 * (the sum over an instruction's k does not depend on its columns). Thread: device; gemm_sm90:
 * engine. */
#include "kernels/cuda/gemm/gemm_sm90.cuh"

typedef sm90_tile<256, 4, 1> wide_tile;   /* 224 KiB */
typedef sm90_tile<128, 6, 2> narrow_tile; /* 224 KiB */

#if SM90_CODE
template <enum gemm_weight_layout F, int N>
static __device__ __forceinline__ void wgmma_of(float (&sums)[N], uint64_t x, uint64_t w, bool add)
{
    if (F == GEMM_F16) wgmma_f16(sums, x, w, add);
    else wgmma_bf16(sums, x, w, add);
}

template <enum gemm_weight_layout F, class T> struct multiplier {
    /* One stage: four steps of 16 k. */
    static __device__ __forceinline__ void begin_stage(float (&sums)[T::SUMS],
                                                       const sm90_operands &o, bool first)
    {
        wgmma_fence_operand(sums);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_BYTES / 32; k++)
            wgmma_of<F>(sums, o.x + (uint64_t)(k * WGMMA_K_STEP),
                        o.w + (uint64_t)(k * WGMMA_K_STEP), !first || k > 0);
        wgmma_commit();
        wgmma_fence_operand(sums);
    }

    /* The ring slot of a stage is released once the wgmma of that stage have completed, after those
     * of the next stage were issued. */
    static __device__ __forceinline__ void multiply(float (&sums)[T::SUMS], const gemm_call &,
                                                    const sm90_tile_position &,
                                                    const sm90_ring<T> &ring,
                                                    sm90_pipeline_state<T> *state,
                                                    const sm90_operands &first, int32_t n_stages,
                                                    int)
    {
        int before = state->index;
#pragma unroll 1
        for (int32_t stage = 0; stage < n_stages; stage++) {
            barrier_wait(ring.full + state->index, state->parity);
            __syncwarp();
            begin_stage(sums, operands_at<T>(first, state->index), stage == 0);
            wgmma_wait<1>();
            if (stage > 0) release_stage<T>(ring, before);
            before = state->index;
            advance<T>(state);
        }
        wgmma_wait<0>();
        wgmma_fence_operand(sums);
        release_stage<T>(ring, before);
    }
};
#endif

template <enum gemm_weight_layout F, class T>
static __global__ void __launch_bounds__(SM90_BOUND(SM90_THREADS), 1)
    sm90_kernel(const gemm_call c, int32_t n_row_tiles)
{
    grid_dependency_sync();
#if SM90_CODE
    sm90_body<T, multiplier<F, T>>(c, n_row_tiles, c.n_in_padded * 2 / K_BYTES, 2);
#else
    (void)c, (void)n_row_tiles;
    __trap();
#endif
}

/* ---- the host ---- */

static sm90_device query_device()
{
    sm90_device device = { false, 1 };
    int ordinal, major = 0, n_sms = 0;
    if (cudaGetDevice(&ordinal) != cudaSuccess) return device;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal) != cudaSuccess)
        return device;
    if (cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, ordinal) != cudaSuccess)
        return device;
    device.supported = major == 9 &&
                       has_sm90_code((const void *)sm90_kernel<GEMM_BF16, wide_tile>, SM90_THREADS);
    device.n_sms = n_sms;
    return device;
}

const sm90_device &sm90_this_device()
{
    static const sm90_device device = query_device();
    return device;
}

bool gemm_sm90_available(void) { return sm90_this_device().supported; }

/* Rows that fill tiles to more than a half, and work for half the SMs. */
enum { ROWS_AT_LEAST = 65, K_AT_LEAST = 128 };
bool gemm_sm90_supports(enum gemm_weight_layout layout, const struct gemm_call *c)
{
    const sm90_device &device = sm90_this_device();
    const bool is_layout = gemm_is_16(layout) ? !c->x_scales : layout == GEMM_F8 && c->x_scales;
    if (!device.supported || !is_layout || c->n_in_padded < K_AT_LEAST) return false;
    const int32_t rows = c->begin ? c->n_rows / c->n_groups : c->n_rows;
    const size_t n = sm90_tiles(*c, narrow_tile::COLUMNS);
    return rows >= ROWS_AT_LEAST && 2 * n >= (size_t)device.n_sms && n <= INT32_MAX;
}

/* Rounds of all SMs, each as long as its tiles are wide; the narrow tile moves more bytes for the
 * same work. */
static bool takes_wide(const gemm_call &c)
{
    const size_t n_sms = (size_t)sm90_this_device().n_sms;
    const size_t wide = blocks_for(sm90_tiles(c, wide_tile::COLUMNS), n_sms) * 2,
                 narrow = blocks_for(sm90_tiles(c, narrow_tile::COLUMNS), n_sms);
    return wide * 9 <= narrow * 10;
}

template <enum gemm_weight_layout F>
static cudaError_t run(cudaStream_t stream, const gemm_call &c, bool wide)
{
    if (wide) return launch_sm90<wide_tile>(stream, sm90_kernel<F, wide_tile>, c);
    return launch_sm90<narrow_tile>(stream, sm90_kernel<F, narrow_tile>, c);
}

cudaError_t gemm_sm90_16(cudaStream_t stream, enum gemm_weight_layout layout,
                         const struct gemm_call *c, bool wide)
{
    return layout == GEMM_F16 ? run<GEMM_F16>(stream, *c, wide) : run<GEMM_BF16>(stream, *c, wide);
}

cudaError_t gemm_sm90(cudaStream_t stream, enum gemm_weight_layout layout,
                      const struct gemm_call *c)
{
    return layout == GEMM_F8 ? gemm_sm90_f8(stream, c)
                             : gemm_sm90_16(stream, layout, c, takes_wide(*c));
}
