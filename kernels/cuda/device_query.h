/* device_query.h - what the current GPU and its driver can do, asked before any work is submitted.
 * Thread: the one that opens the device. */
#ifndef BATON_KERNELS_CUDA_DEVICE_QUERY_H
#define BATON_KERNELS_CUDA_DEVICE_QUERY_H

#include <cuda_runtime_api.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Does this build have kernels for the GPU? If not: cudaErrorNoKernelImageForDevice or
 * cudaErrorInvalidDeviceFunction. */
cudaError_t device_query_has_kernels(void);
/* Does a kernel's launch overlap the end of the one before (programmatic dependent launch)? A
 * decode step is hundreds of small kernels with a microsecond of idle time between them otherwise.
 * Needs compute capability 9.0 and a driver for CUDA 12.3, which can capture such launches;
 * BATON_CUDA_OVERLAP=off turns it off. Asked once; any thread. Source: CUDA Programming Guide. */
bool device_query_supports_pdl(void);

#ifdef __cplusplus
}
#endif
#endif
