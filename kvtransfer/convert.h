/* convert.h - converts KV between two pools' layouts: another element type, another block size.
 *
 * Values go through f32. Upconverting is exact, downconverting rounds to nearest even (dtype.h),
 * and int8 and e4m3 are quantised per row of head_dim values (kernels/kv_rows.h has the formulas).
 * Equal types are copied bit for bit. plan.h decides whether two pools may exchange KV, staging.h
 * where the result lies.
 * Thread: any (no state). */
#ifndef BATON_KVTRANSFER_CONVERT_H
#define BATON_KVTRANSFER_CONVERT_H

#include "kvtransfer/plan.h"

/* Converts one row of n values (n <= KV_ROW_MAX) and, for types that have one, its scale; neither
 * needs alignment. `from` and `to` are enum dtype. */
void kvt_convert_row(uint32_t from, const void *src, const void *src_scale, uint32_t to, void *dst,
                     void *dst_scale, uint32_t n);

/* Writes to `out` the piece at `i_block` of a prompt of n_tokens in the layout of `dst`, its valid
 * segments one after the other: kvt_head_slice_bytes bytes. `pool` is the pool of `src`; src_blocks
 * is the prompt's block table there, in blocks of src's size. Both slices have as many heads. */
void kvt_convert_piece(const struct kvt_head_slice *src, const void *pool,
                       const int32_t *src_blocks, const struct kvt_head_slice *dst,
                       uint32_t n_tokens, uint32_t layer, uint32_t i_block, void *out);

#endif
