/* quantize_avx2.c - the loops of --quantization with 8 numbers to a register. Thread: any. */
#include "kernels/quantize_kernels.h"

const struct quantize_kernels quantize_kernels_avx2 = QUANTIZE_KERNELS;
