/* weight_src.h - the sources of packed weights, for all backends: checks their shapes and
 * dequantises their rows to f32. Thread: any. */
#ifndef BATON_KERNELS_WEIGHT_SRC_H
#define BATON_KERNELS_WEIGHT_SRC_H

#include "kernels/backend.h"

enum {
    WEIGHT_PART_ALIGN = 16,      /* rows that a stacked part with another behind it is a multiple
                                  * of */
    WEIGHT_BLOCK_ROWS = F8_BLOCK /* rows read at a time: they share their scales */
};

/* Checks that these parts can be packed as one matrix, from their shapes alone, and fills paired,
 * n_out and n_in of *out. */
enum status weight_src_check(const struct weight_pack_args *a, struct weight *out,
                             struct err *err) MUST_CHECK;
/* Rows row0 .. row0 + n_rows of a source, all in one block of WEIGHT_BLOCK_ROWS, scales applied: to
 * [n_rows, n_in]. */
void weight_src_rows_f32(const struct weight_src *s, size_t row0, size_t n_rows, float *to);
/* Elements k0 .. k0 + n of a row of a dummy source, in its type. */
void weight_src_dummy_row(const struct weight_src *s, size_t row, size_t k0, size_t n, void *to);
static inline bool weight_src_is_dummy(const struct weight_src *s) { return s->dummy.unit > 0; }
/* Elements from row to row and from k to k of a source as it is stored. */
void weight_src_strides(const struct weight_src *s, size_t *row_stride, size_t *k_stride);

#endif
