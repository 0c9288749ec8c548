/* kv_rows_avx2.c - the loops over rows of KV with 8 numbers to a register. Thread: any. */
#include "kernels/kv_rows_kernels.h"

const struct kv_row_kernels kv_row_kernels_avx2 = KV_ROW_KERNELS;
