/* gemm_one_row.cuh - what the kernels for a step of one row share: which tiles a block has, found
 * by few instructions, and the row in shared memory.
 *
 * A kernel of such a step takes some microseconds, of which its first instructions, read from
 * memory as they are executed, took as long as its sums. So nothing here is general: one row of x,
 * at most 128 groups, of which 16 have rows, no barrier before the first loads of W.
 * Thread: device. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_ONE_ROW_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_ONE_ROW_CUH

#include "kernels/cuda/gemm/gemm_ring.cuh"
#include "kernels/cuda/rms_norm.cuh"

/* Deeper than usual: less else is in shared memory, and two blocks of an SM still have room. */
template <enum gemm_weight_layout F> struct one_ring {
    enum { DEPTH = F == GEMM_W4 ? 11 : 6, BYTES = ring_shape<F, DEPTH>::ALL_BYTES };
};
static inline size_t one_ring_bytes(enum gemm_weight_layout layout)
{
    return layout == GEMM_F8   ? (size_t)one_ring<GEMM_F8>::BYTES
           : layout == GEMM_W4 ? (size_t)one_ring<GEMM_W4>::BYTES
                               : (size_t)one_ring<GEMM_BF16>::BYTES;
}

enum { ONE_GROUPS_MAX = WARP * GROUPS_PER_LANE, ONE_USED_MAX = 16 };

/* The groups that have rows, in ascending order: a warp's own, so that warps need not wait for
 * each other. */
struct one_groups {
    gemm_rows of[ONE_USED_MAX];
};

/* By a whole warp; before grid_dependency_sync() too, if `begin` may be read then. *n: how many
 * there are. */
static __device__ __forceinline__ void one_find_groups(const gemm_call &c, one_groups *to, int *n)
{
    const int lane = (int)(threadIdx.x % WARP), first = lane * GROUPS_PER_LANE;
    const unsigned below = (1u << lane) - 1;
    const gemm_begins b = begins_of_lane<true>(c, first);
    int rank = 0, all = 0;
    bool has[GROUPS_PER_LANE];
#pragma unroll
    for (int i = 0; i < GROUPS_PER_LANE; i++) {
        has[i] = first + i < c.n_groups && b.of[i + 1] > b.of[i];
        const unsigned mask = __ballot_sync(0xffffffffu, has[i]);
        rank += __popc(mask & below), all += __popc(mask);
    }
#pragma unroll
    for (int i = 0; i < GROUPS_PER_LANE; i++) {
        if (!has[i]) continue;
        const int begin = min(max(b.of[i], 0), c.n_rows - 1);
        if (rank < ONE_USED_MAX)
            to->of[rank] = gemm_rows{ first + i, begin, min(b.of[i + 1], c.n_rows) - begin };
        rank++;
    }
    *n = min(all, (int)ONE_USED_MAX);
    __syncwarp();
}

/* A warp's rows of W of a tile into L2, from byte `at` on: what the ring has no room for, while
 * memory is idle. By one lane: the instruction takes uniform registers. */
static __device__ __forceinline__ void one_prefetch(const gemm_call &c, const unsigned char *w,
                                                    int tile, int at)
{
    const int bytes = (int)c.row_bytes - at;
    int row = tile * SKINNY_W_ROWS + (int)threadIdx.x / WARP;
    if (threadIdx.x % WARP != 0 || bytes <= 0) return;
#pragma unroll
    for (int i = 0; i < SKINNY_W_ROWS / RING_WARPS; i++, row += RING_WARPS)
        if (row < c.n_out) prefetch_l2(w + (size_t)row * c.row_bytes + at, (unsigned)bytes & ~15u);
}

/* Of n jobs the block's number, if each block has least or one more. */
static __device__ __forceinline__ int one_share(int n, int least)
{
    int end = least + 1;
#pragma unroll 1
    while (end > 0 && (int)blockIdx.x + (end - 1) * (int)gridDim.x >= n) end--;
    return end;
}

/* ---- the row ---- */

/* STEPS quads of a row in f32 and of its norm's weights. */
enum { ONE_STEP = (int)RMS_QUAD * RING_THREADS, ONE_STEPS_MAX = 4 };
enum { ONE_ROUNDED_MAX = ONE_STEPS_MAX * ONE_STEP };

template <int STEPS>
static __device__ __forceinline__ void one_load(float4 (&v)[STEPS], const float *row, int n)
{
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const int k = (int)threadIdx.x * RMS_QUAD + i * ONE_STEP;
        v[i] = make_float4(0, 0, 0, 0);
        if (k < n) v[i] = *(const float4 *)(row + k);
    }
}

/* The row, normalised if it has to be: with the bits of prepare_inputs.cu. A barrier follows. */
template <enum gemm_weight_layout F, int STEPS>
static __device__ __forceinline__ void one_round(const gemm_call &c, const float4 (&v)[STEPS],
                                                 const float4 (&weights)[STEPS], uint16_t *to)
{
    __shared__ float room[RING_WARPS];
    float factor = 1;
    if (c.norm) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < STEPS; i++) sum = add_squares(sum, v[i]);
        sum = warp_sum(sum);
        if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = sum;
        __syncthreads();
        factor = rms_factor(room, (unsigned)c.n_in, c.eps);
    }
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const int k = (int)threadIdx.x * RMS_QUAD + i * ONE_STEP;
        if (k < c.n_in)
            store_rounded<F>(to + k, c.norm ? rms_apply(v[i], weights[i], factor) : v[i]);
    }
}

#endif
