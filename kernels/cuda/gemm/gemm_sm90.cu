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
/* What is stored beside products takes more registers. */
struct overlapped_tile : wide_tile {
    enum { PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232 };
};

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

/* ---- tiles stored beside products ----
 *
 * A warpgroup's sums are two halves of columns, and the first and the last TAIL stages of a tile
 * are multiplied by one half after the other: while one half is stored, the products of the other
 * are in flight, of this tile or of the next. The ring has room for both tiles' stages. k ascends
 * in every sum, as elsewhere. */

#if SM90_CODE
enum { TAIL = 2, HALF_COLUMNS = 128, NEXT_HALF = HALF_COLUMNS * K_BYTES / 16 /* of W */ };

template <enum gemm_epilogue E, class T> struct overlapped_tiles {
    static_assert(T::STAGES >= 2 * TAIL && T::HALVES == 1 && T::COLUMNS == 2 * HALF_COLUMNS,
                  "the last stages of a tile and the first ones of the next; two halves");
    typedef float halves[2][HALF_COLUMNS / 2];
    const gemm_call &c;
    const sm90_ring<T> &ring;
    sm90_operands first;
    int32_t n_stages;
    int warpgroup;
    sm90_pipeline_state<T> next; /* stage to multiply */
    int oldest;                  /* place of the stage to release */

    __device__ __forceinline__ void release(int n)
    {
        for (int i = 0; i < n; i++) {
            release_stage<T>(ring, oldest);
            oldest = oldest + 1 < T::STAGES ? oldest + 1 : 0;
        }
    }

    /* TAIL stages from `from` on, of one half. NEW: they have not been waited for. */
    template <int HALF, bool NEW>
    __device__ __forceinline__ void begin_half(halves &sums, sm90_pipeline_state<T> from, bool add)
    {
#pragma unroll
        for (int stage = 0; stage < TAIL; stage++) {
            if (NEW) wait_for_stage<T>(ring, from);
            const sm90_operands o = operands_at<T>(first, from.index);
            wgmma_fence_operand(sums[HALF]);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < K_BYTES / 32; k++)
                wgmma_bf16(sums[HALF], o.x + (uint64_t)(k * WGMMA_K_STEP),
                           o.w + (uint64_t)(HALF * NEXT_HALF + k * WGMMA_K_STEP),
                           add || stage > 0 || k > 0);
            advance<T>(&from);
        }
        wgmma_commit();
        wgmma_fence_operand(sums[HALF]);
    }

    __device__ __forceinline__ void step_over_tail()
    {
#pragma unroll
        for (int stage = 0; stage < TAIL; stage++) advance<T>(&next);
    }

    __device__ __forceinline__ void begin_stage(halves &sums)
    {
        wait_for_stage<T>(ring, next);
        const sm90_operands o = operands_at<T>(first, next.index);
        wgmma_fence_operand(sums[0]), wgmma_fence_operand(sums[1]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_BYTES / 32; k++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                wgmma_bf16(sums[half], o.x + (uint64_t)(k * WGMMA_K_STEP),
                           o.w + (uint64_t)(half * NEXT_HALF + k * WGMMA_K_STEP), true);
        wgmma_commit();
        wgmma_fence_operand(sums[0]), wgmma_fence_operand(sums[1]);
        advance<T>(&next);
    }

    /* The rest of a tile whose first half's first stages are in flight, until its second half's
     * last ones are; the first half is complete. */
    __device__ __forceinline__ void multiply(halves &sums)
    {
        begin_half<1, false>(sums, next, false);
        step_over_tail();
        int before = TAIL;
#pragma unroll 1
        for (int32_t stage = 2 * TAIL; stage < n_stages; stage++) {
            begin_stage(sums);
            wgmma_wait<1>();
            release(before);
            before = 1;
        }
        begin_half<0, true>(sums, next, true);
        wgmma_wait<1>();
        release(before);
        begin_half<1, false>(sums, next, true);
        step_over_tail();
        wgmma_wait<1>();
        wgmma_fence_operand(sums[0]);
    }

    __device__ __forceinline__ void store(const sm90_position *at, int half,
                                          const float (&sums)[HALF_COLUMNS / 2])
    {
        sm90_result r = result_of<T>(ring, at, warpgroup, 0);
        if (r.rows.n <= 0) return;
        r.column += half * HALF_COLUMNS;
        if (E == GEMM_STORE_BF16) store_bf16(c, r, sums);
        else if (E == GEMM_SILU_BF16) store_swiglu<GEMM_BF16>(c, r, sums);
        else store_columns<GEMM_BF16, E>(c, r, sums);
    }

    __device__ __forceinline__ void finish(const sm90_position *at, float (&sums)[HALF_COLUMNS / 2])
    {
        wgmma_fence_operand(sums);
        release(TAIL);
        store(at, 1, sums);
    }

    /* The position of the tile that begins with the next stage, and how many rows it has. */
    __device__ __forceinline__ const sm90_position *tile(int n_tiles, int32_t *n)
    {
        const sm90_position *at = ring.positions + n_tiles % POSITIONS;
        barrier_wait(ring.full + next.index, next.parity);
        *n = __shfl_sync(0xffffffffu, at->n, 0);
        return at;
    }

    __device__ __forceinline__ void consume()
    {
        halves sums;
        int32_t n;
        int n_tiles = 0;
        const sm90_position *at = tile(0, &n);
        while (n >= 0) {
            if (n <= warpgroup * BLOCK_ROWS) {
                skip_tile<T>(ring, &next, n_stages);
                oldest = next.index;
                at = tile(++n_tiles, &n);
                continue;
            }
            begin_half<0, true>(sums, next, false);
            for (;;) {
                const sm90_position *stored = at;
                multiply(sums);
                store(stored, 0, sums[0]);
                at = tile(++n_tiles, &n);
                wgmma_wait<0>();
                wgmma_fence_operand(sums[1]);
                release(TAIL);
                if (n <= warpgroup * BLOCK_ROWS) {
                    store(stored, 1, sums[1]);
                    break;
                }
                begin_half<0, true>(sums, next, false);
                store(stored, 1, sums[1]);
            }
        }
    }
};

template <enum gemm_epilogue E, class T>
static __device__ __forceinline__ void overlapped_body(const gemm_call &c, int32_t n_row_tiles,
                                                       int32_t n_stages)
{
    typedef sm90_source<T> source;
    const sm90_ring<T> ring = make_ring<T>(source::ARRIVALS);
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<T::PRODUCER_REGISTERS>();
        produce_tiles<T, source>(c, ring, n_row_tiles, n_stages, 2);
    } else {
        warpgroup_reg_alloc<T::CONSUMER_REGISTERS>();
        overlapped_tiles<E, T> tiles = {
            c, ring, first_operands<T>(ring, warpgroup - 1), n_stages, warpgroup - 1, { 0, 0 }, 0
        };
        tiles.consume();
    }
}
#endif

template <enum gemm_epilogue E, class T>
static __global__ void __launch_bounds__(SM90_BOUND(SM90_THREADS), 1)
    sm90_overlapped_kernel(const gemm_call c, int32_t n_row_tiles)
{
    grid_dependency_sync();
#if SM90_CODE
    overlapped_body<E, T>(c, n_row_tiles, c.n_in_padded * 2 / K_BYTES);
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

/* Only what needs no bound checks of columns. */
bool gemm_sm90_overlaps(enum gemm_weight_layout layout, const struct gemm_call *c)
{
    enum { STAGES_AT_LEAST = 2 * 2, STAGE_K = K_BYTES / 2 };
    return layout == GEMM_BF16 && !c->bias && c->n_out % overlapped_tile::COLUMNS == 0 &&
           c->epilogue != GEMM_SILU && c->epilogue != GEMM_SILU_F16 && (uintptr_t)c->y % 16 == 0 &&
           (c->y_stride | c->y_group) % 8 == 0 && c->n_in_padded >= STAGES_AT_LEAST * STAGE_K;
}

static cudaError_t run_overlapped(cudaStream_t stream, const gemm_call &c)
{
    typedef overlapped_tile tile;
    switch (c.epilogue) {
    case GEMM_STORE_BF16:
        return launch_sm90<tile>(stream, sm90_overlapped_kernel<GEMM_STORE_BF16, tile>, c);
    case GEMM_STORE: return launch_sm90<tile>(stream, sm90_overlapped_kernel<GEMM_STORE, tile>, c);
    case GEMM_ADD: return launch_sm90<tile>(stream, sm90_overlapped_kernel<GEMM_ADD, tile>, c);
    default: return launch_sm90<tile>(stream, sm90_overlapped_kernel<GEMM_SILU_BF16, tile>, c);
    }
}

/* The time of a tile in rounds of all SMs. A wide one has the same work as two narrow ones and
 * takes fewer bytes from the second cache for it. */
template <class T> static size_t time_of(const gemm_call &c, size_t cost)
{
    const size_t n_sms = (size_t)sm90_this_device().n_sms;
    return blocks_for(sm90_tiles(c, T::ROWS, T::COLUMNS), n_sms) * cost;
}

/* Mean rows of a group that fill tall tiles: from 512 rows on they are 3 to 10 % faster on an H200,
 * with 128 rows 5 to 9 % slower. */
enum { TALL_ROWS = 384 };

/* Up to this k storing a tile is a third of its time. With more, instructions of 256 columns are
 * expected to win, which read x from shared memory once instead of twice; not measured yet. */
enum { SHORT_K = 1024 };

enum gemm_sm90_tile gemm_sm90_choose(enum gemm_weight_layout layout, const struct gemm_call *c)
{
    if (layout == GEMM_F8)
        return (c->begin ? c->n_rows / c->n_groups : c->n_rows) >= TALL_ROWS ? GEMM_SM90_TALL
                                                                             : GEMM_SM90_NARROW;
    if (time_of<wide_tile>(*c, 21) > time_of<narrow_tile>(*c, 12)) return GEMM_SM90_NARROW;
    return c->n_in_padded <= SHORT_K && gemm_sm90_overlaps(layout, c) ? GEMM_SM90_OVERLAPPED
                                                                      : GEMM_SM90_WIDE;
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
    if (tile == GEMM_SM90_OVERLAPPED) return run_overlapped(stream, *c);
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
