/* gemm_sm90_f8.cu - products of e4m3 by e4m3 on compute capability 9.0: x with a scale per row and
 * 128 k, W with one per 128 by 128.
 *
 * gemm_sm90.cuh has how; a stage is 128 elements of k. The tensor cores add e4m3 up in fewer bits
 * than f32 has, so their sums are taken over the 128 k that share scales, and added in f32
 * registers times both scales: y = sum over blocks of x_scale w_scale sum over k. That is a second
 * set of sums, so tiles are 128 by 128; while one warpgroup adds, the other's products are under
 * way. Thread: device; gemm_sm90_f8: engine. */
#include "kernels/cuda/gemm/gemm_sm90.cuh"

typedef sm90_tile<1, 128, 6> f8_tile; /* 224 KiB */

#if SM90_CODE
/* Where a thread's scales begin, one per stage: of its two rows of x, of even and of odd
 * columns. */
struct f8_scales_of {
    const float *x[2], *w[2];
};
struct f8_factors {
    float x[2], w[2];
};

static __device__ __forceinline__ f8_scales_of find_scales(const gemm_call &c,
                                                           const sm90_position &at, int block)
{
    f8_scales_of s;
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP % 4;
    const int32_t per_row = (c.n_in + GEMM_F8_BLOCK - 1) / GEMM_F8_BLOCK;
    for (int i = 0; i < 2; i++) {
        const int32_t row = at.begin +
                            min(block * BLOCK_ROWS + warp * 16 + lane / 4 + 8 * i, at.n - 1);
        s.x[i] = c.x_scales + (size_t)(c.x_rows ? c.x_rows[row] : row) * (size_t)per_row;
        s.w[i] = f8_scales(c, at.group, min(at.column, c.n_out - 1) + (c.paired ? i : 0));
    }
    return s;
}

static __device__ __forceinline__ f8_factors factors_at(const f8_scales_of &s, int32_t stage)
{
    return f8_factors{ { __ldca(s.x[0] + stage), __ldca(s.x[1] + stage) },
                       { __ldg(s.w[0] + stage), __ldg(s.w[1] + stage) } };
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
                                               const f8_factors &f)
    {
        const float by[2][2] = { { __fmul_rn(f.x[0], f.w[0]), __fmul_rn(f.x[0], f.w[1]) },
                                 { __fmul_rn(f.x[1], f.w[0]), __fmul_rn(f.x[1], f.w[1]) } };
#pragma unroll
        for (int i = 0; i < T::SUMS; i++)
            sums[i] = __fmaf_rn(part[i], by[i / 2 % 2][i % 2], sums[i]);
    }

    /* A half's products, whose sums are then added while the other warpgroup's are under way. */
    template <int H>
    __device__ __forceinline__ void multiply(float (&sums)[T::HALVES][T::SUMS],
                                             sm90_pipeline_state<T> *state) const
    {
        f8_scales_of scales[H];
        f8_factors factors[H];
        float part[T::SUMS];
#pragma unroll
        for (int half = 0; half < H; half++) {
            scales[half] = find_scales(this->c, *this->at, half * CONSUMERS + this->warpgroup);
            factors[half] = factors_at(scales[half], 0);
#pragma unroll
            for (int i = 0; i < T::SUMS; i++) sums[half][i] = 0;
        }
#pragma unroll 1
        for (int32_t stage = 0; stage < this->n_stages; stage++) {
            wait_for_stage<T>(this->ring, *state);
#pragma unroll
            for (int half = 0; half < H; half++) {
                begin_stage(part, operands_at<T>(this->first, state->index), half);
                const f8_factors next = factors_at(scales[half],
                                                   min(stage + 1, this->n_stages - 1));
                wgmma_wait<0>();
                wgmma_fence_operand(part);
                if (half == H - 1) release_stage<T>(this->ring, state->index);
                add(sums[half], part, factors[half]);
                factors[half] = next;
            }
            advance<T>(state);
        }
    }
};
#endif

static __global__ void __launch_bounds__(SM90_BOUND(SM90_THREADS), 1)
    sm90_f8_kernel(const gemm_call c, int32_t n_row_tiles)
{
    grid_dependency_sync();
#if SM90_CODE
    sm90_body<f8_tile, sm90_source<f8_tile>, f8_multiplier<f8_tile>>(
        c, n_row_tiles, (c.n_in + GEMM_F8_BLOCK - 1) / GEMM_F8_BLOCK, 1);
#else
    (void)c, (void)n_row_tiles;
    __trap();
#endif
}

cudaError_t gemm_sm90_f8(cudaStream_t stream, const struct gemm_call *c)
{
    return launch_sm90<f8_tile>(stream, sm90_f8_kernel, *c);
}
