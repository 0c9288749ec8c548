/* gemm_sm90.cu - GEMM of bf16 and of f16 with many rows of x on compute capability 9.0, and which
 * calls take that kernel. gemm_sm90.cuh has the pipeline.
 *
 * All tiles accumulate alike: the choice changes no bit as far as is known of the hardware
 * (the sum over an instruction's k does not depend on its columns). Thread: device; gemm_sm90:
 * engine. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/gemm/gemm_sm90_multicast.cuh"

/* 200 to 224 KiB of shared memory */
typedef sm90_tile<1, 128, 6> narrow_tile;
typedef sm90_tile<1, 256, 4> wide_tile;
typedef sm90_tile<1, 256, 4, SHARERS> wide_pair;

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

template <enum gemm_weight_layout F, class T>
static __global__ void __launch_bounds__(SM90_BOUND(SM90_THREADS), 1)
    sm90_multicast_kernel(const gemm_call c, const __grid_constant__ tensor_map map,
                          int32_t n_pairs)
{
    grid_dependency_sync();
#if SM90_CODE
    sm90_multicast_body<T, multiplier<F, T>>(c, &map, n_pairs, c.n_in_padded * 2 / K_BYTES, 2);
#else
    (void)c, (void)map, (void)n_pairs;
    __trap();
#endif
}

/* ---- the host ---- */

/* BATON_CUDA_MULTICAST=on: gemm_sm90_choose takes tiles that share W. No GPU has run them yet. */
static bool query_sharing()
{
    const char *setting = getenv("BATON_CUDA_MULTICAST");
    return setting && strcmp(setting, "on") == 0;
}

static sm90_device query_device()
{
    sm90_device device = { false, false, false, 1 };
    int ordinal, major = 0, n_sms = 0;
    if (cudaGetDevice(&ordinal) != cudaSuccess) return device;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal) != cudaSuccess)
        return device;
    if (cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, ordinal) != cudaSuccess)
        return device;
    device.supported = major == 9 &&
                       has_sm90_code((const void *)sm90_kernel<GEMM_BF16, wide_tile>, SM90_THREADS);
    device.multicasts = device.supported && n_sms >= SHARERS && has_tensor_maps();
    device.shares = device.multicasts && query_sharing();
    device.n_sms = n_sms;
    return device;
}

const sm90_device &sm90_this_device()
{
    static const sm90_device device = query_device();
    return device;
}

bool gemm_sm90_available(void) { return sm90_this_device().supported; }
bool gemm_sm90_shares(void) { return sm90_this_device().shares; }

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

/* Experts' matrices may lie in memory in any order, and so at a distance that no map has. */
static bool fits_map(const gemm_call &c)
{
    const size_t stride = c.n_groups > 1 ? c.w_stride : 0;
    return c.begin && ((uintptr_t)c.w | c.row_bytes | stride) % 16 == 0 &&
           stride < TENSOR_MAP_STRIDE_END;
}

bool gemm_sm90_has_tile(enum gemm_weight_layout layout, const struct gemm_call *c,
                        enum gemm_sm90_tile tile)
{
    const bool f8 = layout == GEMM_F8;
    switch (tile) {
    case GEMM_SM90_NARROW: return true;
    case GEMM_SM90_WIDE: return !f8;
    case GEMM_SM90_TALL: return f8;
    case GEMM_SM90_NARROW_MULTICAST:
    case GEMM_SM90_TALL_MULTICAST: return f8 && fits_map(*c);
    case GEMM_SM90_WIDE_MULTICAST: return gemm_is_16(layout) && fits_map(*c);
    }
    return false;
}

/* Groups have two row tiles on average, so most find another tile to share W with. */
static enum gemm_sm90_tile or_multicast(enum gemm_weight_layout layout, const gemm_call &c,
                                        enum gemm_sm90_tile tile)
{
    const enum gemm_sm90_tile shared = tile == GEMM_SM90_WIDE   ? GEMM_SM90_WIDE_MULTICAST
                                       : tile == GEMM_SM90_TALL ? GEMM_SM90_TALL_MULTICAST
                                                                : GEMM_SM90_NARROW_MULTICAST;
    const int32_t rows = (tile == GEMM_SM90_TALL ? 2 : 1) * narrow_tile::ROWS;
    const bool shares = sm90_this_device().shares && gemm_sm90_has_tile(layout, &c, shared) &&
                        c.n_rows / c.n_groups >= SHARERS * rows;
    return shares ? shared : tile;
}

enum gemm_sm90_tile gemm_sm90_choose(enum gemm_weight_layout layout, const struct gemm_call *c)
{
    enum gemm_sm90_tile tile = GEMM_SM90_NARROW;
    if (layout == GEMM_F8) tile = is_tall(*c) ? GEMM_SM90_TALL : GEMM_SM90_NARROW;
    else if (time_of<wide_tile>(*c, 21) <= time_of<narrow_tile>(*c, 12)) tile = GEMM_SM90_WIDE;
    return or_multicast(layout, *c, tile);
}

template <enum gemm_weight_layout F>
static cudaError_t run(cudaStream_t stream, const gemm_call &c, enum gemm_sm90_tile tile)
{
    switch (tile) {
    case GEMM_SM90_NARROW: return launch_sm90<narrow_tile>(stream, sm90_kernel<F, narrow_tile>, c);
    case GEMM_SM90_WIDE: return launch_sm90<wide_tile>(stream, sm90_kernel<F, wide_tile>, c);
    case GEMM_SM90_WIDE_MULTICAST:
        return launch_multicast<wide_pair>(stream, sm90_multicast_kernel<F, wide_pair>, c);
    default: return cudaErrorInvalidValue;
    }
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
