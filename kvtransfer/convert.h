/* convert.h - the bytes of one pool's KV as another pool holds them: other element type, other
 * block size.
 *
 * Values go through f32: widening is exact, narrowing rounds to nearest even (dtype.h), int8 and
 * e4m3 are quantised per row of head_dim values; kernels/kv_rows.h has the formulas. Equal types
 * are copied bit for bit. Not for: deciding whether two pools may exchange KV (plan.h), where the
 * result lies (staging.h). Thread: any (no state). */
#ifndef BATON_KVTRANSFER_CONVERT_H
#define BATON_KVTRANSFER_CONVERT_H

#include "kvtransfer/plan.h"

/* One row of n values (n <= KV_ROW_MAX) of a type and, of a type that has one, its scale; neither
 * needs alignment. */
void kvt_convert_row(uint32_t from, const void *src, const void *src_scale, uint32_t to, void *dst,
                     void *dst_scale, uint32_t n);

/* Write the piece at `i_block` of a prompt of n_tokens as `dst` holds it, its valid runs one after
 * the other, to `out`: kvt_head_slice_bytes of them. `pool` is that of `src`; src_blocks is the
 * prompt's block table there, by position in blocks of src's size. Views of as many heads. */
void kvt_convert_piece(const struct kvt_head_slice *src, const void *pool,
                       const int32_t *src_blocks, const struct kvt_head_slice *dst,
                       uint32_t n_tokens, uint32_t layer, uint32_t i_block, void *out);

#endif
