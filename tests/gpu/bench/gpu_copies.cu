/* gpu_copies.cu - the kernel that copies KV in other shapes, to be measured beside the one that
 * nodes use. Thread: main. */
#include "tests/gpu/bench/gpu_copies.h"

#include "tests/gpu/bench/gpu_copies_bulk.cuh"

typedef cudaError_t (*run_fn)(cudaStream_t, const struct copy_stream_pair *, uint32_t, int);

struct copies_shape {
    bool bulk;
    int threads, ahead, blocks; /* bulk: bytes of a chunk, chunks of a ring, blocks */
    int kept;                   /* kv_copy_kept */
    run_fn run;
};

template <int THREADS, int AHEAD, int BLOCKS, int KEPT> static constexpr copies_shape by_threads()
{
    return { false, THREADS,
             AHEAD, BLOCKS,
             KEPT,  kv_copy_launch<kv_copy_shape<THREADS, AHEAD, BLOCKS, KEPT>, GPU_COPIES_MAX> };
}
template <int CHUNK, int STAGES, int LAG, int BLOCKS> static constexpr copies_shape bulk()
{
    return { true,
             CHUNK,
             STAGES,
             BLOCKS,
             KEPT_BOTH,
             kv_copy_bulk_launch<kv_copy_bulk_shape<CHUNK, STAGES, LAG, BLOCKS>, GPU_COPIES_MAX> };
}

enum { KIB = 1024, N_BULK = 4 }; /* at the end */

static const copies_shape SHAPES[] = {
    by_threads<512, 8, 1, KEPT_NONE>(),
    by_threads<512, 8, 1, KEPT_READ>(),
    by_threads<512, 8, 1, KEPT_WRITTEN>(),
    by_threads<512, 8, 1, KEPT_BOTH>(),
    by_threads<256, 8, 1, KEPT_BOTH>(),
    by_threads<512, 4, 1, KEPT_BOTH>(),
    by_threads<512, 4, 2, KEPT_BOTH>(),
    by_threads<1024, 4, 1, KEPT_BOTH>(),
    by_threads<1024, 8, 1, KEPT_BOTH>(),
    bulk<8 * KIB, 8, 4, 1>(),
    bulk<16 * KIB, 12, 4, 1>(),
    bulk<32 * KIB, 3, 1, 2>(),
    bulk<64 * KIB, 3, 1, 1>(),
};

int gpu_copies_n_shapes(void)
{
    const int n = (int)(sizeof SHAPES / sizeof SHAPES[0]);
    typedef kv_copy_bulk_shape<64 * KIB, 3, 1, 1> any;
    const void *kernel = (const void *)kv_copy_bulk_kernel<any, GPU_COPIES_MAX>;
    return has_bulk_code(kernel) ? n : n - N_BULK;
}

cudaError_t gpu_copies_run(int shape, cudaStream_t stream, const struct copy_stream_pair *copies,
                           uint32_t n, int n_multiprocessors)
{
    return SHAPES[shape].run(stream, copies, n, n_multiprocessors);
}

void gpu_copies_name(int shape, char *out, size_t cap)
{
    static const char *const kept[] = { "nothing", "reads", "writes", "all" };
    const copies_shape &s = SHAPES[shape];
    if (s.bulk)
        snprintf(out, cap, "bulk, ring of %d times %d KiB, %d blocks per multiprocessor", s.ahead,
                 s.threads / KIB, s.blocks);
    else
        snprintf(out, cap, "%d threads, %d loads ahead, %d blocks per multiprocessor, L2 keeps %s",
                 s.threads, s.ahead, s.blocks, kept[s.kept]);
}
