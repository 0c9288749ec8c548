/* kv_rows_avx2.c - the loops over rows of KV with 8 numbers to a register. Thread: any. */
#include "kernels/kv_rows_kernels.h"

const struct kv_row_loops kv_row_loops_avx2 = KV_ROW_LOOPS;
