/* gpu_copies.cu - the kernel that copies KV in other shapes, to be measured beside the one that
 * nodes use. Thread: main. */
#include "tests/gpu/bench/gpu_copies.h"

#include "kernels/cuda/kv/kv_copy.cuh"

typedef cudaError_t (*run_fn)(cudaStream_t, const struct copy_stream_pair *, uint32_t, int);

template <int THREADS, int AHEAD, int BLOCKS> static constexpr run_fn run()
{
    return kv_copy_launch<kv_copy_shape<THREADS, AHEAD, BLOCKS>, GPU_COPIES_MAX>;
}

static const struct {
    int threads, ahead, blocks;
    run_fn run;
} SHAPES[] = {
    { 256, 4, 4, run<256, 4, 4>() },   { 256, 4, 8, run<256, 4, 8>() },
    { 256, 8, 2, run<256, 8, 2>() },   { 256, 8, 4, run<256, 8, 4>() },
    { 512, 4, 2, run<512, 4, 2>() },   { 512, 4, 4, run<512, 4, 4>() },
    { 512, 8, 1, run<512, 8, 1>() },   { 512, 8, 2, run<512, 8, 2>() },
    { 1024, 2, 2, run<1024, 2, 2>() }, { 1024, 4, 1, run<1024, 4, 1>() },
    { 1024, 4, 2, run<1024, 4, 2>() }, { 1024, 8, 1, run<1024, 8, 1>() },
};

int gpu_copies_n_shapes(void) { return (int)(sizeof SHAPES / sizeof SHAPES[0]); }

cudaError_t gpu_copies_run(int shape, cudaStream_t stream, const struct copy_stream_pair *copies,
                           uint32_t n, int n_multiprocessors)
{
    return SHAPES[shape].run(stream, copies, n, n_multiprocessors);
}

void gpu_copies_name(int shape, char *out, size_t cap)
{
    snprintf(out, cap, "%d threads, %d loads ahead, %d blocks per multiprocessor",
             SHAPES[shape].threads, SHAPES[shape].ahead, SHAPES[shape].blocks);
}
