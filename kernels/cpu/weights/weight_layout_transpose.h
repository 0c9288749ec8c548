/* weight_layout_transpose.h - the two transpositions of packing, in tiles that stay in registers.
 * Thread: any. */
#ifndef BATON_KERNELS_CPU_WEIGHTS_WEIGHT_LAYOUT_TRANSPOSE_H
#define BATON_KERNELS_CPU_WEIGHTS_WEIGHT_LAYOUT_TRANSPOSE_H

#include "kernels/cpu/weights/weight_layout.h"

/* Interleaves rows: word w of row i goes to dst[w * PANEL + i], for n_rows <= PANEL rows of n_bytes
 * (a last word is padded with zeros), stride bytes apart. Does not write lanes from n_rows on. */
void weight_layout_interleave_rows(uint32_t *dst, const uint8_t *rows, size_t stride, size_t n_rows,
                                   size_t n_bytes);
/* Transposes element [k][i] of src to [i][k] of dst, for elements of `size` bytes (1, 2 or 4). */
void weight_layout_transpose(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride,
                             size_t n_i, size_t n_k, size_t size);

#endif
