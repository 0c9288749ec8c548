/* device_query.cu - what the card can, and a kernel that is there to be asked for: all are compiled for the same cards. Thread: see card.h. */
#include "kernels/cuda/device_query.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/launch.cuh"

static __global__ void __launch_bounds__(WARP) nothing_kernel() { kernel_begins(); }

cudaError_t card_has_kernels(void)
{
    cudaFuncAttributes a;
    const cudaError_t  e = cudaFuncGetAttributes(&a, nothing_kernel);
    if (e != cudaSuccess) (void)cudaGetLastError(); /* the answer, no fault */
    return e == cudaErrorInvalidDeviceFunction ? cudaErrorNoKernelImageForDevice : e; /* drivers say one or the other */
}

enum { OVERLAP_MAJOR = 9, OVERLAP_PTX = 90, OVERLAP_DRIVER = 12030 };

/* Code for older cards, which the driver has translated for this one, does not wait (kernel_begins). */
static bool ask_overlap()
{
    const char *wish = getenv("BATON_CUDA_OVERLAP");
    int         device = 0, major = 0, driver = 0;
    cudaFuncAttributes a;
    if (wish && strcmp(wish, "off") == 0) return false;
    if (cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDriverGetVersion(&driver) == cudaSuccess && cudaFuncGetAttributes(&a, nothing_kernel) == cudaSuccess)
        return major >= OVERLAP_MAJOR && driver >= OVERLAP_DRIVER && a.ptxVersion >= OVERLAP_PTX;
    (void)cudaGetLastError(); /* what is wrong shows at the launch */
    return false;
}

bool card_overlaps_launches(void)
{
    static const bool overlaps = ask_overlap();
    return overlaps;
}
