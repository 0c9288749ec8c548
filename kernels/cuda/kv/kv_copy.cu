/* kv_copy.cu - copies pieces of KV, up to LIST_LARGE per launch. A piece has dozens to hundreds of
 * KiB; a driver call for each would take the host longer than the GPU.
 *
 * The list is passed in the launch's arguments, so nothing must be kept until it has run. Up to 4
 * KiB of them work everywhere, up to 32,764 bytes with drivers for CUDA 12.1 and newer. A block
 * walks over chunks of the copies, with loads of 16 bytes if both sides are aligned, COPY_AHEAD in
 * flight per thread: what the multiprocessors hold at a time exceeds what memory has in flight.
 * Bound by memory, or by the link to the other GPU. Thread: device; kv_copy_run: one per stream. */
#include "kernels/cuda/kv/kv_copy.h"
#include "kernels/cuda/launch.cuh"

/* copies per launch; chunks per copy: a larger copy loops */
enum { LIST_SMALL = 160, LIST_MEDIUM = 512, LIST_LARGE = 1360, CHUNKS_MAX = 256 };
enum { COPY_THREADS = 512, COPY_AHEAD = 8, COPY_CHUNK = COPY_THREADS * COPY_AHEAD * 16 };
enum { BLOCKS_PER_MULTIPROCESSOR = 2, LARGE_ARGUMENTS_DRIVER = 12010 };

template <int MAX> struct copies_call {
    uint32_t n, chunks; /* of each copy, as many as the largest has */
    struct copy_stream_pair copies[MAX];
};
static_assert(sizeof(copies_call<LIST_SMALL>) <= 4096, "what a launch's arguments may take");
static_assert(sizeof(copies_call<LIST_LARGE>) <= 32764, "the same since CUDA 12.1");

static __device__ __forceinline__ void copy_16(uint4 *to, const uint4 *from, int n)
{
    int i = (int)threadIdx.x;
    for (; i + (COPY_AHEAD - 1) * COPY_THREADS < n; i += COPY_AHEAD * COPY_THREADS) {
        uint4 v[COPY_AHEAD];
        UNROLL for (int k = 0; k < COPY_AHEAD; k++) v[k] = __ldcs(from + i + k * COPY_THREADS);
        UNROLL for (int k = 0; k < COPY_AHEAD; k++) __stcs(to + i + k * COPY_THREADS, v[k]);
    }
    for (; i < n; i += COPY_THREADS) to[i] = from[i];
}

/* Item i of the walk: chunk i % chunks of copy i / chunks, and every `chunks` after it. */
template <int MAX>
static __global__ void __launch_bounds__(COPY_THREADS, BLOCKS_PER_MULTIPROCESSOR)
    copy_kernel(const copies_call<MAX> c)
{
    grid_dependency_sync();
    for (uint32_t item = blockIdx.x; item < c.n * c.chunks; item += gridDim.x) {
        const copy_stream_pair copy = c.copies[item / c.chunks];
        for (size_t at = (size_t)(item % c.chunks) * COPY_CHUNK; at < copy.bytes;
             at += (size_t)c.chunks * COPY_CHUNK) {
            char *to = (char *)copy.to + at;
            const char *from = (const char *)copy.from + at;
            const int n = (int)(copy.bytes - at < COPY_CHUNK ? copy.bytes - at
                                                             : (size_t)COPY_CHUNK);
            const int whole = ((uintptr_t)to | (uintptr_t)from) % 16 == 0 ? n / 16 : 0;
            copy_16((uint4 *)to, (const uint4 *)from, whole);
            for (int i = whole * 16 + (int)threadIdx.x; i < n; i += COPY_THREADS) to[i] = from[i];
        }
    }
}

template <int MAX>
static cudaError_t run_list(cudaStream_t stream, const struct copy_stream_pair *copies, uint32_t n,
                            uint32_t most_blocks)
{
    copies_call<MAX> c;
    size_t longest = 0;
    c.n = n;
    for (uint32_t i = 0; i < n; i++) {
        c.copies[i] = copies[i];
        if (copies[i].bytes > longest) longest = copies[i].bytes;
    }
    const unsigned chunks = blocks_for(longest, COPY_CHUNK);
    c.chunks = chunks < CHUNKS_MAX ? chunks : (unsigned)CHUNKS_MAX;
    if (longest == 0) return cudaSuccess;
    const uint32_t items = n * c.chunks;
    return launch(stream, copy_kernel<MAX>, dim3(items < most_blocks ? items : most_blocks),
                  dim3(COPY_THREADS), 0, c);
}

static bool query_large_arguments()
{
    int driver = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= LARGE_ARGUMENTS_DRIVER;
}

extern "C" cudaError_t kv_copy_run(cudaStream_t stream, const struct copy_stream_pair *copies,
                                   uint32_t n, int n_multiprocessors)
{
    static const bool large = query_large_arguments();
    const uint32_t most = large ? LIST_LARGE : LIST_SMALL,
                   blocks = (uint32_t)n_multiprocessors * BLOCKS_PER_MULTIPROCESSOR;
    cudaError_t e = cudaSuccess;
    for (uint32_t done = 0, part; done < n && e == cudaSuccess; done += part) {
        part = n - done < most ? n - done : most;
        e = part <= LIST_SMALL    ? run_list<LIST_SMALL>(stream, copies + done, part, blocks)
            : part <= LIST_MEDIUM ? run_list<LIST_MEDIUM>(stream, copies + done, part, blocks)
                                  : run_list<LIST_LARGE>(stream, copies + done, part, blocks);
    }
    return e;
}
