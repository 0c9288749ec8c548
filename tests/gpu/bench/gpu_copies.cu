/* gpu_copies.cu - the kernel that copies KV in other shapes, to be measured beside the one that
 * nodes use. Thread: main. */
#include "tests/gpu/bench/gpu_copies.h"

#include <stdio.h>

#include "kernels/cuda/kv/kv_copy.cuh"

typedef cudaError_t (*run_fn)(cudaStream_t, const struct copy_stream_pair *, uint32_t, int);

struct copies_shape {
    int threads, ahead, blocks;
    int kept; /* kv_copy_kept */
    run_fn run;
};

template <int THREADS, int AHEAD, int BLOCKS, int KEPT> static constexpr copies_shape by_threads()
{
    return { THREADS, AHEAD, BLOCKS, KEPT,
             kv_copy_launch<kv_copy_shape<THREADS, AHEAD, BLOCKS, KEPT>, GPU_COPIES_MAX> };
}

static const copies_shape SHAPES[] = {
    by_threads<512, 8, 1, KEPT_NONE>(),    by_threads<512, 8, 1, KEPT_READ>(),
    by_threads<512, 8, 1, KEPT_WRITTEN>(), by_threads<512, 8, 1, KEPT_BOTH>(),
    by_threads<256, 8, 1, KEPT_BOTH>(),    by_threads<512, 4, 1, KEPT_BOTH>(),
    by_threads<512, 4, 2, KEPT_BOTH>(),    by_threads<1024, 4, 1, KEPT_BOTH>(),
    by_threads<1024, 8, 1, KEPT_BOTH>(),
};

int gpu_copies_n_shapes(void) { return (int)(sizeof SHAPES / sizeof SHAPES[0]); }

cudaError_t gpu_copies_run(int shape, cudaStream_t stream, const struct copy_stream_pair *copies,
                           uint32_t n, int n_multiprocessors)
{
    return SHAPES[shape].run(stream, copies, n, n_multiprocessors);
}

void gpu_copies_name(int shape, char *out, size_t cap)
{
    static const char *const kept[] = { "nothing", "reads", "writes", "all" };
    const copies_shape &s = SHAPES[shape];
    snprintf(out, cap, "%d threads, %d loads ahead, %d blocks per multiprocessor, L2 keeps %s",
             s.threads, s.ahead, s.blocks, kept[s.kept]);
}
