/* device_query.cu - device capability queries. empty_kernel exists so that cudaFuncGetAttributes
 * can tell whether this build has code for the GPU: all kernels are compiled for the same GPUs.
 * Thread: any. */
#include "kernels/cuda/device_query.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/launch.cuh"

static __global__ void __launch_bounds__(WARP) empty_kernel() { grid_dependency_sync(); }

cudaError_t device_query_has_kernels(void)
{
    cudaFuncAttributes a;
    const cudaError_t e = cudaFuncGetAttributes(&a, empty_kernel);
    if (e != cudaSuccess) (void)cudaGetLastError(); /* this is the answer, not a fault */
    /* drivers return one or the other */
    return e == cudaErrorInvalidDeviceFunction ? cudaErrorNoKernelImageForDevice : e;
}

enum { PDL_MAJOR = 9, PDL_PTX = 90, PDL_DRIVER = 12030 };

/* Code for older GPUs that the driver has translated for this one does not wait
 * (grid_dependency_sync). */
static bool query_pdl()
{
    const char *setting = getenv("BATON_CUDA_OVERLAP");
    int device = 0, major = 0, driver = 0;
    cudaFuncAttributes a;
    if (setting && strcmp(setting, "off") == 0) return false;
    if (cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDriverGetVersion(&driver) == cudaSuccess &&
        cudaFuncGetAttributes(&a, empty_kernel) == cudaSuccess)
        return major >= PDL_MAJOR && driver >= PDL_DRIVER && a.ptxVersion >= PDL_PTX;
    (void)cudaGetLastError(); /* what is wrong shows at the launch */
    return false;
}

bool device_query_supports_pdl(void)
{
    static const bool supported = query_pdl();
    return supported;
}
