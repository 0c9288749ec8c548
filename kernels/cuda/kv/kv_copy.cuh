/* kv_copy.cuh - the kernel of kv_copy.cu, by its shape, so that other shapes can be measured beside
 * it. Thread: device. */
#ifndef BATON_KERNELS_CUDA_KV_KV_COPY_CUH
#define BATON_KERNELS_CUDA_KV_KV_COPY_CUH

#include "kernels/copy_stream.h"
#include "kernels/cuda/launch.cuh"

/* Which bytes L2 keeps like any others, instead of evicting them first. */
enum kv_copy_kept { KEPT_NONE = 0, KEPT_READ = 1, KEPT_WRITTEN = 2, KEPT_BOTH = 3 };

/* Threads of a block, loads of 16 bytes in flight per thread, blocks of a multiprocessor. */
template <int THREADS, int AHEAD, int BLOCKS, int KEPT> struct kv_copy_shape {
    static constexpr int threads = THREADS, ahead = AHEAD, blocks = BLOCKS,
                         chunk = THREADS * AHEAD * 16;
    static constexpr bool keeps_read = KEPT & KEPT_READ, keeps_written = KEPT & KEPT_WRITTEN;
};

template <int MAX> struct kv_copy_list {
    uint32_t n, chunks; /* of each copy, as many as the largest has */
    struct copy_stream_pair copies[MAX];
};

template <class SHAPE>
static __device__ __forceinline__ void kv_copy_16(uint4 *to, const uint4 *from, int n)
{
    constexpr int STRIDE = SHAPE::threads, AHEAD = SHAPE::ahead;
    int i = (int)threadIdx.x;
    for (; i + (AHEAD - 1) * STRIDE < n; i += AHEAD * STRIDE) {
        uint4 v[AHEAD];
        UNROLL for (int k = 0; k < AHEAD; k++) v[k] = SHAPE::keeps_read
                                                          ? __ldcg(from + i + k * STRIDE)
                                                          : __ldcs(from + i + k * STRIDE);
        UNROLL for (int k = 0; k < AHEAD; k++)
        {
            if (SHAPE::keeps_written) __stcg(to + i + k * STRIDE, v[k]);
            else __stcs(to + i + k * STRIDE, v[k]);
        }
    }
    for (; i < n; i += STRIDE) to[i] = from[i];
}

/* Item i of a block's walk: chunk i % chunks of copy i / chunks, and every `chunks` after it. */
template <class SHAPE, int MAX>
static __global__ void __launch_bounds__(SHAPE::threads, SHAPE::blocks)
    kv_copy_kernel(const kv_copy_list<MAX> c)
{
    grid_dependency_sync();
    constexpr int CHUNK = SHAPE::chunk;
    for (uint32_t item = blockIdx.x; item < c.n * c.chunks; item += gridDim.x) {
        const copy_stream_pair copy = c.copies[item / c.chunks];
        for (size_t at = (size_t)(item % c.chunks) * CHUNK; at < copy.bytes;
             at += (size_t)c.chunks * CHUNK) {
            char *to = (char *)copy.to + at;
            const char *from = (const char *)copy.from + at;
            const int n = (int)(copy.bytes - at < CHUNK ? copy.bytes - at : (size_t)CHUNK);
            const int whole = ((uintptr_t)to | (uintptr_t)from) % 16 == 0 ? n / 16 : 0;
            kv_copy_16<SHAPE>((uint4 *)to, (const uint4 *)from, whole);
            for (int i = whole * 16 + (int)threadIdx.x; i < n; i += SHAPE::threads) to[i] = from[i];
        }
    }
}

enum { KV_COPY_CHUNKS_MAX = 256 /* of a copy; a larger copy loops */ };

/* Fills the list; false: there is nothing to copy. */
template <int MAX>
static bool kv_copy_fill(kv_copy_list<MAX> &c, const struct copy_stream_pair *copies, uint32_t n,
                         int chunk)
{
    size_t longest = 0;
    c.n = n;
    for (uint32_t i = 0; i < n; i++) {
        c.copies[i] = copies[i];
        if (copies[i].bytes > longest) longest = copies[i].bytes;
    }
    const unsigned chunks = blocks_for(longest, (size_t)chunk);
    c.chunks = chunks < KV_COPY_CHUNKS_MAX ? chunks : (unsigned)KV_COPY_CHUNKS_MAX;
    return longest > 0;
}

/* Launches at most MAX copies. */
template <class SHAPE, int MAX>
static cudaError_t kv_copy_launch(cudaStream_t stream, const struct copy_stream_pair *copies,
                                  uint32_t n, int n_multiprocessors)
{
    kv_copy_list<MAX> c;
    if (!kv_copy_fill(c, copies, n, SHAPE::chunk)) return cudaSuccess;
    const uint32_t items = n * c.chunks, most = (uint32_t)(n_multiprocessors * SHAPE::blocks);
    return launch(stream, kv_copy_kernel<SHAPE, MAX>, dim3(items < most ? items : most),
                  dim3(SHAPE::threads), 0, c);
}

#endif
