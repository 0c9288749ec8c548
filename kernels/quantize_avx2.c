/* quantize_avx2.c - the loops of --quantization with 8 numbers to a register. Thread: any. */
#include "kernels/quantize_kernels.h"

const struct quantize_loops quantize_loops_avx2 = QUANTIZE_LOOPS;
