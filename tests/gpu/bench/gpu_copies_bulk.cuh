/* gpu_copies_bulk.cuh - the kernel of kv_copy.cuh by bulk copies, for compute capability 9.0 and
 * newer: one thread of a block moves chunks through a ring in shared memory.
 *
 * A multiprocessor then reads and writes whole chunks with nothing in registers. Addresses and
 * sizes of all copies must be multiples of 16. Thread: device; kv_copy_bulk_launch: host. */
#ifndef BATON_TESTS_GPU_BENCH_GPU_COPIES_BULK_CUH
#define BATON_TESTS_GPU_BENCH_GPU_COPIES_BULK_CUH

#include "kernels/cuda/kv/kv_copy.cuh"

#include <bulk_target.cuh>

/* Bytes of a chunk, chunks of a block's ring, those of them that may be being written while the
 * others are read, blocks of a multiprocessor. */
template <int CHUNK, int STAGES, int LAG, int BLOCKS> struct kv_copy_bulk_shape {
    static constexpr int chunk = CHUNK, stages = STAGES, lag = LAG, blocks = BLOCKS;
    static_assert(CHUNK % 128 == 0 && LAG < STAGES, "a ring");
};

struct kv_copy_chunk {
    char *to;
    const char *from;
    unsigned n;
};

/* A block's place in its walk: as kv_copy_kernel's, one chunk at a time. */
struct kv_copy_walk {
    uint32_t item, turn;
};

/* The next chunk; false: there is none. */
template <int CHUNK, int MAX>
static __device__ __forceinline__ bool kv_copy_next(const kv_copy_list<MAX> &c, kv_copy_walk &walk,
                                                    kv_copy_chunk &out)
{
    for (; walk.item < c.n * c.chunks; walk.item += gridDim.x, walk.turn = 0) {
        const copy_stream_pair copy = c.copies[walk.item / c.chunks];
        const size_t at = ((size_t)walk.turn * c.chunks + walk.item % c.chunks) * CHUNK;
        if (at >= copy.bytes) continue;
        const size_t left = copy.bytes - at;
        out = { (char *)copy.to + at, (const char *)copy.from + at,
                left < CHUNK ? (unsigned)left : (unsigned)CHUNK };
        walk.turn++;
        return true;
    }
    return false;
}

template <class SHAPE, int MAX>
static __global__ void __launch_bounds__(WARP) kv_copy_bulk_kernel(const kv_copy_list<MAX> c)
{
    grid_dependency_sync();
#if BULK_CODE
    constexpr int CHUNK = SHAPE::chunk, STAGES = SHAPE::stages, LAG = SHAPE::lag;
    unsigned char *ring = shared_memory();
    uint64_t *barriers = (uint64_t *)(ring + STAGES * CHUNK);
    kv_copy_walk loads = { blockIdx.x, 0 }, stores = loads;
    kv_copy_chunk chunk;
    if (threadIdx.x > 0) return;
    for (int i = 0; i < STAGES; i++) bulk_barrier_init(&barriers[i]);
    for (int i = 0; i < STAGES - LAG && kv_copy_next<CHUNK>(c, loads, chunk); i++)
        bulk_load(ring + i * CHUNK, chunk.from, chunk.n, &barriers[i]);
    int at = 0, ahead = STAGES - LAG; /* stages */
    for (unsigned parity = 0; kv_copy_next<CHUNK>(c, stores, chunk);) {
        bulk_barrier_wait(&barriers[at], parity);
        bulk_store(chunk.to, ring + at * CHUNK, chunk.n);
        bulk_wait_read<LAG>();
        if (kv_copy_next<CHUNK>(c, loads, chunk))
            bulk_load(ring + ahead * CHUNK, chunk.from, chunk.n, &barriers[ahead]);
        if (++ahead == STAGES) ahead = 0;
        if (++at == STAGES) at = 0, parity ^= 1;
    }
    bulk_wait_written();
#endif
}

/* Launches at most MAX copies. */
template <class SHAPE, int MAX>
static cudaError_t kv_copy_bulk_launch(cudaStream_t stream, const struct copy_stream_pair *copies,
                                       uint32_t n, int n_multiprocessors)
{
    kv_copy_list<MAX> c;
    if (!kv_copy_fill(c, copies, n, SHAPE::chunk)) return cudaSuccess;
    const uint32_t items = n * c.chunks, most = (uint32_t)(n_multiprocessors * SHAPE::blocks);
    return launch(stream, kv_copy_bulk_kernel<SHAPE, MAX>, dim3(items < most ? items : most),
                  dim3(WARP), SHAPE::stages * (SHAPE::chunk + sizeof(uint64_t)), c);
}

#endif
