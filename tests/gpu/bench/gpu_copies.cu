/* gpu_copies.cu - the kernel that copies KV in other shapes, to be measured beside the one that
 * nodes use. Thread: main. */
#include "tests/gpu/bench/gpu_copies.h"

#include "kernels/cuda/kv/kv_copy_bulk.cuh"

typedef cudaError_t (*run_fn)(cudaStream_t, const struct copy_stream_pair *, uint32_t, int);

enum copies_kind { BY_THREADS, BULK, BY_DRIVER };

struct copies_shape {
    copies_kind kind;
    int threads, ahead, blocks; /* bulk: bytes of a chunk, chunks of a ring, blocks */
    run_fn run;
    bool streamed;
};

template <int THREADS, int AHEAD, int BLOCKS, bool STREAMED = true>
static constexpr copies_shape by_threads()
{
    return { BY_THREADS,
             THREADS,
             AHEAD,
             BLOCKS,
             kv_copy_launch<kv_copy_shape<THREADS, AHEAD, BLOCKS, STREAMED>, GPU_COPIES_MAX>,
             STREAMED };
}
template <int CHUNK, int STAGES, int LAG, int BLOCKS> static constexpr copies_shape bulk()
{
    return { BULK,
             CHUNK,
             STAGES,
             BLOCKS,
             kv_copy_bulk_launch<kv_copy_bulk_shape<CHUNK, STAGES, LAG, BLOCKS>, GPU_COPIES_MAX>,
             true };
}

/* All copies by one call of the driver, which gives them to copy engines. */
static cudaError_t run_by_driver(cudaStream_t stream, const struct copy_stream_pair *copies,
                                 uint32_t n, int)
{
#if defined(__CUDACC__) && CUDART_VERSION >= 13000
    static void *to[GPU_COPIES_MAX];
    static const void *from[GPU_COPIES_MAX];
    static size_t bytes[GPU_COPIES_MAX];
    cudaMemcpyAttributes how = {};
    size_t first = 0;
    how.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    for (uint32_t i = 0; i < n; i++)
        to[i] = copies[i].to, from[i] = copies[i].from, bytes[i] = copies[i].bytes;
    return cudaMemcpyBatchAsync(to, from, bytes, n, &how, &first, 1, stream);
#else
    (void)stream, (void)copies, (void)n;
    return cudaErrorNotSupported;
#endif
}

enum { KIB = 1024, N_BULK = 8, N_BY_DRIVER = 1 }; /* at the end */

static const copies_shape SHAPES[] = {
    by_threads<256, 8, 4>(),    by_threads<512, 4, 2>(),
    by_threads<512, 8, 1>(),    by_threads<512, 8, 1, false>(),
    by_threads<512, 8, 2>(),    by_threads<1024, 4, 1>(),
    by_threads<1024, 8, 1>(),   bulk<8 * KIB, 8, 4, 1>(),
    bulk<16 * KIB, 4, 2, 1>(),  bulk<16 * KIB, 4, 2, 3>(),
    bulk<16 * KIB, 12, 4, 1>(), bulk<32 * KIB, 3, 1, 2>(),
    bulk<32 * KIB, 4, 2, 1>(),  bulk<32 * KIB, 6, 2, 1>(),
    bulk<64 * KIB, 3, 1, 1>(),  { BY_DRIVER, 0, 0, 0, run_by_driver, false },
};

static bool driver_copies_batches()
{
    char *p;
    if (cudaMalloc((void **)&p, 2 * KIB) != cudaSuccess) return false;
    const struct copy_stream_pair one = { p, p + KIB, KIB };
    cudaStream_t stream;
    cudaError_t e = cudaStreamCreate(&stream);
    if (e == cudaSuccess) {
        e = run_by_driver(stream, &one, 1, 0);
        if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
        (void)cudaStreamDestroy(stream);
    }
    (void)cudaFree(p);
    (void)cudaGetLastError();
    return e == cudaSuccess;
}

int gpu_copies_n_shapes(void)
{
    const int n = (int)(sizeof SHAPES / sizeof SHAPES[0]);
    typedef kv_copy_bulk_shape<32 * KIB, 4, 2, 1> any;
    const void *kernel = (const void *)kv_copy_bulk_kernel<any, GPU_COPIES_MAX>;
    if (!has_bulk_code(kernel)) return n - N_BULK - N_BY_DRIVER;
    static const bool batches = driver_copies_batches();
    return batches ? n : n - N_BY_DRIVER;
}

cudaError_t gpu_copies_run(int shape, cudaStream_t stream, const struct copy_stream_pair *copies,
                           uint32_t n, int n_multiprocessors)
{
    return SHAPES[shape].run(stream, copies, n, n_multiprocessors);
}

void gpu_copies_name(int shape, char *out, size_t cap)
{
    const copies_shape &s = SHAPES[shape];
    if (s.kind == BY_DRIVER) snprintf(out, cap, "cudaMemcpyBatchAsync");
    else if (s.kind == BULK)
        snprintf(out, cap, "bulk, ring of %d times %d KiB, %d blocks per multiprocessor", s.ahead,
                 s.threads / KIB, s.blocks);
    else
        snprintf(out, cap, "%d threads, %d loads ahead, %d blocks per multiprocessor%s", s.threads,
                 s.ahead, s.blocks, s.streamed ? "" : ", kept in L2");
}
