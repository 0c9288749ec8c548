/* gemm_sm90.cu - GEMM of bf16 and of f16 with many rows of x on compute capability 9.0, and which
 * calls take that kernel. gemm_sm90.cuh has the pipeline.
 *
 * All tiles accumulate alike: the choice changes no bit as far as is known of the hardware
 * (the sum over an instruction's k does not depend on its columns). Thread: device; gemm_sm90:
 * engine. */
#include "kernels/cuda/gemm/gemm_sm90.cuh"

/* 200 to 224 KiB of shared memory */
typedef sm90_tile<1, 128, 6> narrow_tile;
typedef sm90_tile<1, 256, 4> wide_tile;

template <enum gemm_weight_layout F, class T>
static __global__ void __launch_bounds__(SM90_BOUND(SM90_THREADS), 1)
    sm90_kernel(const gemm_call c, int32_t n_row_tiles)
{
    grid_dependency_sync();
#if SM90_CODE
    sm90_body<T, sm90_source<T>, multiplier<F, T>>(c, n_row_tiles, c.n_in_padded * 2 / K_BYTES, 2);
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
    const bool is_layout = layout == GEMM_F8 ? c->x_scales != nullptr
                                             : layout != GEMM_F32 && !c->x_scales;
    if (!device.supported || !is_layout || c->n_in_padded < K_AT_LEAST) return false;
    const int32_t rows = c->begin ? c->n_rows / c->n_groups : c->n_rows;
    const size_t n = sm90_tiles(*c, narrow_tile::ROWS, narrow_tile::COLUMNS);
    return rows >= ROWS_AT_LEAST && 2 * n >= (size_t)device.n_sms && n <= INT32_MAX;
}

/* The time of a tile in rounds of all SMs. A wide one has the same work as two narrow ones and
 * takes fewer bytes from the second cache for it. */
template <class T> static size_t time_of(const gemm_call &c, size_t cost)
{
    const size_t n_sms = (size_t)sm90_this_device().n_sms;
    return blocks_for(sm90_tiles(c, T::ROWS, T::COLUMNS), n_sms) * cost;
}

/* From 384 rows of a group, on average, and a k of 2,048 on, tall tiles are 4 to 13 % faster on an
 * H200; with a smaller k, whose tiles spend more of their time on storing two halves, 4 to 11 %
 * slower, with 128 rows 2 to 16 %. ERNIE's gate and up (768 rows of a group, k of 2,560) is 12 %
 * slower on them, for which no reason is known: its shared expert is 9 % faster. */
enum { TALL_ROWS = 384, TALL_K = 2048 };
static bool is_tall(const gemm_call &c)
{
    return (c.begin ? c.n_rows / c.n_groups : c.n_rows) >= TALL_ROWS && c.n_in_padded >= TALL_K;
}

enum gemm_sm90_tile gemm_sm90_choose(enum gemm_weight_layout layout, const struct gemm_call *c)
{
    if (layout == GEMM_F8) return is_tall(*c) ? GEMM_SM90_TALL : GEMM_SM90_NARROW;
    return time_of<wide_tile>(*c, 21) <= time_of<narrow_tile>(*c, 12) ? GEMM_SM90_WIDE
                                                                      : GEMM_SM90_NARROW;
}

template <enum gemm_weight_layout F>
static cudaError_t run(cudaStream_t stream, const gemm_call &c, enum gemm_sm90_tile tile)
{
    if (tile == GEMM_SM90_WIDE) return launch_sm90<wide_tile>(stream, sm90_kernel<F, wide_tile>, c);
    return launch_sm90<narrow_tile>(stream, sm90_kernel<F, narrow_tile>, c);
}

cudaError_t gemm_sm90_16(cudaStream_t stream, enum gemm_weight_layout layout,
                         const struct gemm_call *c, enum gemm_sm90_tile tile)
{
    return layout == GEMM_F16 ? run<GEMM_F16>(stream, *c, tile) : run<GEMM_BF16>(stream, *c, tile);
}

cudaError_t gemm_sm90(cudaStream_t stream, enum gemm_weight_layout layout,
                      const struct gemm_call *c)
{
    const enum gemm_sm90_tile tile = gemm_sm90_choose(layout, c);
    if (layout == GEMM_F8) return gemm_sm90_f8(stream, c, tile);
    return gemm_is_16(layout) ? gemm_sm90_16(stream, layout, c, tile)
                              : gemm_sm90_upconvert(stream, layout, c, tile);
}
