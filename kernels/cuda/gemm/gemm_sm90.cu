/* gemm_sm90.cu - products of bf16 and of f16 with many rows of x on compute capability 9.0, and which calls are that kernel's.
 *
 * gemm_sm90.cuh has how. A tile of 128 by 256 moves 48 KiB for each 64 k and multiplies for 1,024 of an SM's cycles; one of 128 by 128, which is
 * for matrices too narrow to give all SMs a wide one, 32 KiB for 512. Both add up alike: which of the two a call takes changes no bit as far as
 * is known of the hardware (the sum over an instruction's k does not depend on its columns). Thread: device; gemm_hopper: engine. */
#include "kernels/cuda/gemm/gemm_sm90.cuh"

typedef hopper_tile<256, 4, 1> wide_tile;   /* 224 KiB */
typedef hopper_tile<128, 6, 2> narrow_tile; /* 224 KiB */

#if HOPPER_CODE
template <enum gemm_weight_layout F, int N> static __device__ __forceinline__ void wgmma_of(float (&sums)[N], uint64_t x, uint64_t w, bool add)
{
    if (F == GEMM_F16) wgmma_f16(sums, x, w, add);
    else wgmma_bf16(sums, x, w, add);
}

template <enum gemm_weight_layout F, class T> struct multiplier {
    /* One stage: four steps of 16 k. */
    static __device__ __forceinline__ void begin_stage(float (&sums)[T::SUMS], const hopper_operands &o, bool first)
    {
        wgmma_hold(sums);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_BYTES / 32; k++)
            wgmma_of<F>(sums, o.x + (uint64_t)(k * WGMMA_K_STEP), o.w + (uint64_t)(k * WGMMA_K_STEP), !first || k > 0);
        wgmma_commit();
        wgmma_hold(sums);
    }

    /* A stage's place is free when the next stage has begun and it is over. */
    static __device__ __forceinline__ void multiply(float (&sums)[T::SUMS], const gemm_call &, const hopper_at &, const hopper_ring<T> &ring,
                                                    hopper_turn<T> *turn, const hopper_operands &first, int32_t n_stages, int)
    {
        int before = turn->place;
#pragma unroll 1
        for (int32_t stage = 0; stage < n_stages; stage++) {
            barrier_wait(ring.full + turn->place, turn->parity);
            __syncwarp();
            begin_stage(sums, operands_at<T>(first, turn->place), stage == 0);
            wgmma_wait<1>();
            if (stage > 0) release<T>(ring, before);
            before = turn->place;
            turn_on<T>(turn);
        }
        wgmma_wait<0>();
        wgmma_hold(sums);
        release<T>(ring, before);
    }
};
#endif

template <enum gemm_weight_layout F, class T>
static __global__ void __launch_bounds__(HOPPER_BOUND(HOPPER_THREADS), 1) hopper_kernel(const gemm_call c, int32_t n_row_tiles)
{
    grid_dependency_sync();
#if HOPPER_CODE
    hopper_body<T, multiplier<F, T>>(c, n_row_tiles, c.n_in_filled * 2 / K_BYTES, 2);
#else
    (void)c, (void)n_row_tiles;
    __trap();
#endif
}

/* ---- the host ---- */

static hopper_card ask_card()
{
    hopper_card card = { false, 1 };
    int         device, major = 0, n_sms = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return card;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return card;
    if (cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return card;
    card.can = major == 9 && has_hopper_code((const void *)hopper_kernel<GEMM_BF16, wide_tile>, HOPPER_THREADS);
    card.n_sms = n_sms;
    return card;
}

const hopper_card &hopper_this_card()
{
    static const hopper_card card = ask_card();
    return card;
}

bool gemm_has_hopper(void) { return hopper_this_card().can; }

/* Rows that fill tiles to more than a half, and work for half the SMs. */
enum { ROWS_AT_LEAST = 65, K_AT_LEAST = 128 };
bool gemm_hopper_fits(enum gemm_weight_layout layout, const struct gemm_call *c)
{
    const hopper_card &card = hopper_this_card();
    const bool is_layout = gemm_is_16(layout) ? !c->x_scales : layout == GEMM_F8 && c->x_scales;
    if (!card.can || !is_layout || c->n_in_filled < K_AT_LEAST) return false;
    const int32_t rows = c->begin ? c->n_rows / c->n_groups : c->n_rows;
    const size_t  n = hopper_tiles(*c, narrow_tile::COLUMNS);
    return rows >= ROWS_AT_LEAST && 2 * n >= (size_t)card.n_sms && n <= INT32_MAX;
}

/* Rounds of all SMs, each as long as its tiles are wide; the narrow tile moves more bytes for the same work. */
static bool takes_wide(const gemm_call &c)
{
    const size_t n_sms = (size_t)hopper_this_card().n_sms;
    const size_t wide = blocks_for(hopper_tiles(c, wide_tile::COLUMNS), n_sms) * 2, narrow = blocks_for(hopper_tiles(c, narrow_tile::COLUMNS), n_sms);
    return wide * 9 <= narrow * 10;
}

template <enum gemm_weight_layout F> static cudaError_t run(cudaStream_t stream, const gemm_call &c, bool wide)
{
    if (wide) return launch_hopper<wide_tile>(stream, hopper_kernel<F, wide_tile>, c);
    return launch_hopper<narrow_tile>(stream, hopper_kernel<F, narrow_tile>, c);
}

cudaError_t gemm_hopper_16(cudaStream_t stream, enum gemm_weight_layout layout, const struct gemm_call *c, bool wide)
{
    return layout == GEMM_F16 ? run<GEMM_F16>(stream, *c, wide) : run<GEMM_BF16>(stream, *c, wide);
}

cudaError_t gemm_hopper(cudaStream_t stream, enum gemm_weight_layout layout, const struct gemm_call *c)
{
    return layout == GEMM_F8 ? gemm_hopper_f8(stream, c) : gemm_hopper_16(stream, layout, c, takes_wide(*c));
}
