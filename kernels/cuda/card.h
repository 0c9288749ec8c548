/* card.h - what there is to know about the current card before anything is put on it. Thread: the one that opens the device. */
#ifndef BATON_KERNELS_CUDA_CARD_H
#define BATON_KERNELS_CUDA_CARD_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Does this build have kernels for it? cudaErrorNoKernelImageForDevice: it has not. */
cudaError_t card_has_kernels(void);

#ifdef __cplusplus
}
#endif
#endif
