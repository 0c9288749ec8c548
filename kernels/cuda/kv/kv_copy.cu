/* kv_copy.cu - copies pieces of KV, COPIES_AT_ONCE per launch. A piece has dozens to hundreds of
 * KiB; a driver call for each would take the host longer than the GPU.
 *
 * The list is passed in the launch's arguments, so nothing must be kept until it has run. A block
 * copies a chunk of one copy, with loads of 16 bytes if both sides are aligned, four in flight per
 * thread. Bound by memory, or by the link to the other GPU. Thread: device. */
#include "kernels/cuda/kv/kv_copy.h"
#include "kernels/cuda/launch.cuh"

/* copies per launch; chunks per copy: a larger copy loops */
static const uint32_t COPIES_AT_ONCE = 128, CHUNKS_AT_ONCE = 256;
enum { COPY_THREADS = 256, COPY_AHEAD = 4, COPY_CHUNK = 64 * 1024 };

struct copies_call {
    struct copy_stream_pair copies[COPIES_AT_ONCE];
};
static_assert(sizeof(struct copies_call) <= 4096, "what a launch's arguments may take");

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

/* Block (x, y): the x-th chunk of copy y, and every grid width after it. */
static __global__ void __launch_bounds__(COPY_THREADS) copy_kernel(const copies_call c)
{
    grid_dependency_sync();
    const copy_stream_pair copy = c.copies[blockIdx.y];
    for (size_t at = (size_t)blockIdx.x * COPY_CHUNK; at < copy.bytes;
         at += (size_t)gridDim.x * COPY_CHUNK) {
        char *to = (char *)copy.to + at;
        const char *from = (const char *)copy.from + at;
        const int n = (int)(copy.bytes - at < COPY_CHUNK ? copy.bytes - at : (size_t)COPY_CHUNK);
        const int whole = ((uintptr_t)to | (uintptr_t)from) % 16 == 0 ? n / 16 : 0;
        copy_16((uint4 *)to, (const uint4 *)from, whole);
        for (int i = whole * 16 + (int)threadIdx.x; i < n; i += COPY_THREADS) to[i] = from[i];
    }
}

extern "C" cudaError_t kv_copy_run(cudaStream_t stream, const struct copy_stream_pair *copies,
                                   uint32_t n)
{
    cudaError_t e = cudaSuccess;
    for (uint32_t done = 0, part; done < n && e == cudaSuccess; done += part) {
        copies_call c;
        size_t longest = 0;
        part = n - done < COPIES_AT_ONCE ? n - done : COPIES_AT_ONCE;
        for (uint32_t i = 0; i < part; i++) {
            c.copies[i] = copies[done + i];
            if (c.copies[i].bytes > longest) longest = c.copies[i].bytes;
        }
        const uint32_t chunks = blocks_for(longest, COPY_CHUNK);
        if (longest > 0)
            e = launch(stream, copy_kernel,
                       dim3(chunks < CHUNKS_AT_ONCE ? chunks : CHUNKS_AT_ONCE, part),
                       dim3(COPY_THREADS), 0, c);
    }
    return e;
}
