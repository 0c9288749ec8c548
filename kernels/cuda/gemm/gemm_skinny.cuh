/* gemm_skinny.cuh - what the kernels for few rows of x share: how a block divides a tile of W among
 * its warps, how it splits k, and how stored weights become operands. Thread: device. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_SKINNY_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_SKINNY_CUH

#include "kernels/cuda/gemm/gemm_split_k.cuh"
#include "kernels/cuda/gemm/gemm_upconvert.cuh"

enum { SKINNY_W_ROWS = 16, SKINNY_PARTIAL = SKINNY_W_ROWS * GEMM_SKINNY_ROWS };
enum { SKINNY_WARPS = 8, SKINNY_THREADS = SKINNY_WARPS * WARP, SKINNY_SPAN = GEMM_SKINNY_K_STEP };
static_assert((int)SKINNY_SPAN == (int)GEMM_F8_BLOCK, "a span of F8 has one scale");

/* About a block per SM, which has enough loads in flight to read at its share of the bandwidth; a
 * slice has at least two spans per warp. More slices would read no faster, and joining them takes
 * about a microsecond at the end of a launch. */
enum { SKINNY_BLOCKS_WANTED = 128, SKINNY_SPLIT_LEAST = 2 * SKINNY_WARPS * SKINNY_SPAN };
static_assert((int)SKINNY_BLOCKS_WANTED <= (int)SPLIT_K_TILES_MAX &&
                  2 * SKINNY_BLOCKS_WANTED * SKINNY_PARTIAL <= SPLIT_K_FUSED_FLOATS,
              "see choose_n_splits");

/* seen: F8, the bytes so far; more than 0x7f if one was NaN. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ void skinny_upconvert(unsigned out[4], const unsigned *in,
                                                        unsigned *seen)
{
    if (F != GEMM_F8) {
        upconvert_8<F>(out, in);
        return;
    }
    upconvert_e4m3_numbers(out, in);
    /* nan_e4m3 without its last step */
    for (int i = 0; i < 2; i++) *seen |= (in[i] & 0x7f7f7f7fu) + 0x01010101u;
}

#endif
