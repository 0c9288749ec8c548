/* gemm_sm90_f8.cu - products of e4m3 by e4m3 on compute capability 9.0: x with a scale per row and
 * 128 k, W with one per 128 by 128.
 *
 * gemm_sm90.cuh has how; a stage is 128 elements of k. The tensor cores add e4m3 up in fewer bits
 * than f32 has, so their sums are taken over the 128 k that share scales, and added in f32
 * registers times both scales: y = sum over blocks of x_scale w_scale sum over k. That is a second
 * set of sums, of 64 rows at a time, so tiles are 128 columns wide; while one warpgroup adds, the
 * other's products are in flight. Thread: device; gemm_sm90_f8: engine. */
#include "kernels/cuda/gemm/gemm_sm90_multicast.cuh"

typedef sm90_tile<1, 128, 6> narrow_tile; /* 224 KiB */
typedef sm90_tile<2, 128, 4> tall_tile;
typedef sm90_tile<1, 128, 6, SHARERS> narrow_pair;
typedef sm90_tile<2, 128, 4, SHARERS> tall_pair;

#if SM90_CODE
/* The scales of a thread's two rows of x in each of H halves, and of even and of odd columns: one
 * per stage. The four lanes of a row have those of a stage each, of four stages in a row: the fence
 * before a stage's products waits for loads that are in flight, so there are few. */
enum { TOGETHER = 4 };
template <int H> struct f8_scales_of {
    const float *w[2];
    unsigned x_at[H][2]; /* in the call's x_scales */
};
template <int H> struct f8_factors {
    float x[H][2], w[2];
};

template <int H>
static __device__ __forceinline__ f8_scales_of<H> find_scales(const gemm_call &c,
                                                              const sm90_position &at,
                                                              int warpgroup)
{
    f8_scales_of<H> s;
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        s.w[i] = f8_scales(c, at.group, min(at.column, c.n_out - 1) + (c.paired ? i : 0));
#pragma unroll
        for (int half = 0; half < H; half++) {
            const int32_t block = (half * CONSUMERS + warpgroup) * BLOCK_ROWS,
                          row = at.begin + min(block + warp * 16 + lane / 4 + 8 * i, at.n - 1);
            s.x_at[half][i] = (unsigned)(c.x_rows ? c.x_rows[row] : row) *
                              (unsigned)c.x_scales_stride;
        }
    }
    return s;
}

/* Of the lane's stage among TOGETHER ones; those from n_stages on have the last one's. */
template <int H>
static __device__ __forceinline__ f8_factors<H> load_factors(const gemm_call &c,
                                                             const f8_scales_of<H> &s,
                                                             int32_t stage, int32_t n_stages)
{
    f8_factors<H> f;
    stage = min(stage + (int32_t)(threadIdx.x % TOGETHER), n_stages - 1);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        f.w[i] = __ldg(s.w[i] + stage);
#pragma unroll
        for (int half = 0; half < H; half++)
            f.x[half][i] = __ldca(c.x_scales + s.x_at[half][i] + stage);
    }
    return f;
}

static __device__ __forceinline__ float of_stage(float factor, int32_t stage)
{
    return __shfl_sync(0xffffffffu, factor, stage % TOGETHER, TOGETHER);
}

template <class T> struct f8_multiplier : sm90_multiplier<T> {
    static const enum gemm_weight_layout LAYOUT = GEMM_F8;

    /* One stage of a half: four steps of 32 k. */
    static __device__ __forceinline__ void begin_stage(float (&part)[T::SUMS],
                                                       const sm90_operands &o, int half)
    {
        wgmma_fence_operand(part);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_BYTES / 32; k++)
            wgmma_e4m3(part, o.x + (uint64_t)(k * WGMMA_K_STEP + half * OTHER_HALF),
                       o.w + (uint64_t)(k * WGMMA_K_STEP), k > 0);
        wgmma_commit();
        wgmma_fence_operand(part);
    }

    static __device__ __forceinline__ void add(float (&sums)[T::SUMS], const float (&part)[T::SUMS],
                                               const float (&by)[2][2])
    {
#pragma unroll
        for (int i = 0; i < T::SUMS; i++)
            sums[i] = __fmaf_rn(part[i], by[i / 2 % 2][i % 2], sums[i]);
    }

    /* A half's products, whose sums are then added while the other warpgroup's are in flight. The
     * next stage is waited for before: the wait and the fence are not between sums and products. */
    template <int H>
    __device__ __forceinline__ void multiply(float (&sums)[T::HALVES][T::SUMS],
                                             sm90_pipeline_state<T> *state) const
    {
        const f8_scales_of<H> scales = find_scales<H>(this->c, *this->at, this->warpgroup);
        f8_factors<H> factors = load_factors<H>(this->c, scales, 0, this->n_stages), next = factors;
        float part[T::SUMS];
#pragma unroll
        for (int half = 0; half < H; half++)
#pragma unroll
            for (int i = 0; i < T::SUMS; i++) sums[half][i] = 0;
        wait_for_stage<T>(this->ring, *state);
#pragma unroll 1
        for (int32_t stage = 0; stage < this->n_stages; stage++) {
            const int place = state->index;
            begin_stage(part, operands_at<T>(this->first, place), 0);
            float by[H][2][2];
#pragma unroll
            for (int i = 0; i < 4 * H; i++)
                by[i / 4][i / 2 % 2][i % 2] = __fmul_rn(
                    of_stage(factors.x[i / 4][i / 2 % 2], stage),
                    of_stage(factors.w[i % 2], stage));
            if (stage % TOGETHER == 0)
                next = load_factors<H>(this->c, scales, stage + TOGETHER, this->n_stages);
#pragma unroll
            for (int half = 0; half < H; half++) {
                if (half > 0) begin_stage(part, operands_at<T>(this->first, place), half);
                if (half == H - 1) {
                    advance<T>(state);
                    if (stage + 1 < this->n_stages) wait_for_stage<T>(this->ring, *state);
                }
                wgmma_wait<0>();
                wgmma_fence_operand(part);
                if (half == H - 1) release_stage<T>(this->ring, place);
                add(sums[half], part, by[half]);
            }
            if (stage % TOGETHER == TOGETHER - 1) factors = next;
        }
    }
};
#endif

template <class T>
static __global__ void __launch_bounds__(SM90_BOUND(SM90_THREADS), 1)
    sm90_f8_kernel(const gemm_call c, int32_t n_row_tiles)
{
    grid_dependency_sync();
#if SM90_CODE
    sm90_body<T, sm90_source<T>, f8_multiplier<T>>(c, n_row_tiles,
                                                   (c.n_in + GEMM_F8_BLOCK - 1) / GEMM_F8_BLOCK, 1);
#else
    (void)c, (void)n_row_tiles;
    __trap();
#endif
}

template <class T>
static __global__ void __launch_bounds__(SM90_BOUND(SM90_THREADS), 1)
    sm90_f8_multicast_kernel(const gemm_call c, const __grid_constant__ tensor_map map,
                             int32_t n_pairs)
{
    grid_dependency_sync();
#if SM90_CODE
    sm90_multicast_body<T, f8_multiplier<T>>(c, &map, n_pairs,
                                             (c.n_in + GEMM_F8_BLOCK - 1) / GEMM_F8_BLOCK, 1);
#else
    (void)c, (void)map, (void)n_pairs;
    __trap();
#endif
}

cudaError_t gemm_sm90_f8(cudaStream_t stream, const struct gemm_call *c, enum gemm_sm90_tile tile)
{
    switch (tile) {
    case GEMM_SM90_NARROW: return launch_sm90<narrow_tile>(stream, sm90_f8_kernel<narrow_tile>, *c);
    case GEMM_SM90_TALL: return launch_sm90<tall_tile>(stream, sm90_f8_kernel<tall_tile>, *c);
    case GEMM_SM90_NARROW_MULTICAST:
        return launch_multicast<narrow_pair>(stream, sm90_f8_multicast_kernel<narrow_pair>, *c);
    case GEMM_SM90_TALL_MULTICAST:
        return launch_multicast<tall_pair>(stream, sm90_f8_multicast_kernel<tall_pair>, *c);
    default: return cudaErrorInvalidValue;
    }
}
