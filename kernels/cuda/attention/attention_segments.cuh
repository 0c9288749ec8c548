/* attention_segments.cuh - how many keys the segments of a decode row have, which the host counts
 * for a step's lists and the GPU for rows that it moves. Thread: any. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_SEGMENTS_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_SEGMENTS_CUH

#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/launch.cuh"

/* n_keys: the row's. */
static __host__ __device__ inline int32_t decode_segment(int32_t n_keys)
{
    int32_t n = CUDA_ATTN_SEGMENT_LEAST;
    while (n < CUDA_ATTN_SEGMENT && n_keys > n * CUDA_ATTN_SEGMENTS_MANY) n *= 2;
    return n;
}

#endif
