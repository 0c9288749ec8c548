/* kv_copy.cu - copies pieces of KV, up to LIST_LARGE per launch. A piece has dozens to hundreds of
 * KiB; a driver call for each would take the host longer than the GPU.
 *
 * The list is passed in the launch's arguments, so nothing must be kept until it has run. Up to 4
 * KiB of them work everywhere, up to 32,764 bytes with drivers for CUDA 12.1 and newer. A block
 * walks over chunks of the copies, with loads of 16 bytes if both sides are aligned; what the
 * multiprocessors hold at a time exceeds what memory has in flight. Bound by memory, or by the link
 * to the other GPU. Thread: host, one per stream. */
#include "kernels/cuda/kv/kv_copy.cuh"
#include "kernels/cuda/kv/kv_copy.h"

enum { LIST_SMALL = 160, LIST_MEDIUM = 512, LIST_LARGE = 1360 };
enum { LARGE_ARGUMENTS_DRIVER = 12010 };

static_assert(sizeof(kv_copy_list<LIST_SMALL>) <= 4096, "what a launch's arguments may take");
static_assert(sizeof(kv_copy_list<LIST_LARGE>) <= 32764, "the same since CUDA 12.1");

/* Of those that bench_gpu push tries the fastest on an H200: 0.94 of cudaMemcpy, streamed 0.91. */
typedef kv_copy_shape<512, 8, 1, KEPT_BOTH> shape;

static bool query_large_arguments()
{
    int driver = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= LARGE_ARGUMENTS_DRIVER;
}

extern "C" cudaError_t kv_copy_run(cudaStream_t stream, const struct copy_stream_pair *copies,
                                   uint32_t n, int n_multiprocessors)
{
    static const bool large = query_large_arguments();
    const uint32_t most = large ? LIST_LARGE : LIST_SMALL;
    cudaError_t e = cudaSuccess;
    for (uint32_t part; n > 0 && e == cudaSuccess; n -= part, copies += part) {
        part = n < most ? n : most;
        e = part <= LIST_SMALL
                ? kv_copy_launch<shape, LIST_SMALL>(stream, copies, part, n_multiprocessors)
            : part <= LIST_MEDIUM
                ? kv_copy_launch<shape, LIST_MEDIUM>(stream, copies, part, n_multiprocessors)
                : kv_copy_launch<shape, LIST_LARGE>(stream, copies, part, n_multiprocessors);
    }
    return e;
}
