/* device_query.h - what there is to know about the current card before anything is put on it. Thread: the
 * one that opens the device. */
#ifndef BATON_KERNELS_CUDA_DEVICE_QUERY_H
#define BATON_KERNELS_CUDA_DEVICE_QUERY_H

#include <cuda_runtime_api.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Does this build have kernels for it? cudaErrorNoKernelImageForDevice or
 * cudaErrorInvalidDeviceFunction: it has not. */
cudaError_t device_query_has_kernels(void);
/* Is a kernel's launch begun while the one before it ends? Steps of an answer are hundreds of small
 * kernels, and between two of them the card does nothing for a microsecond otherwise. From compute
 * capability 9.0 on, with a driver for CUDA 12.3 or later, which records such launches;
 * BATON_CUDA_OVERLAP=off: not. Asked once; any thread. Source: CUDA Programming Guide, programmatic
 * dependent launch. */
bool device_query_supports_pdl(void);

#ifdef __cplusplus
}
#endif
#endif
