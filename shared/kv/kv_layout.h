/* kv_layout.h - the layout of a KV pool: where each byte lies. Peers compare it.
 *
 * A pool is n_layers equal regions, one after the other; a region is n_blocks pieces of
 * `piece_bytes`. There are two kinds of pieces:
 *   heads   [kv_head][k|v][token][head_dim]: a (layer, block) is contiguous, and so is each head of
 *           it; ranks hold different heads
 *   latent  [token][head_dim]: one vector per token stands for the keys and values of all heads
 *           (MLA), and every rank holds it whole
 * The last layer may be a draft layer (multi-token prediction), which a peer need not have.
 * The parts of a head are k and v, or the latent alone. kernels/kv_rows.h encodes a row of head_dim
 * values. For a type with scales (int8, e4m3) one f32 scale per row, [kv_head][part][token],
 * follows the values of a piece, unaligned where the shape makes it so. kvtransfer/plan.h decides
 * which two pools can exchange KV, and how.
 *
 * Thread: any (a value). */
#ifndef BATON_KV_KV_LAYOUT_H
#define BATON_KV_KV_LAYOUT_H

#include <stdbool.h>

#include "kernels/dtype.h"
#include "shared/base/buf.h"
#include "shared/base/err.h"

struct kv_layout {
    uint64_t model_fingerprint; /* of the weights and the arithmetic of the kernel backend */
    uint32_t dtype;             /* enum dtype, one that kv_rows.h supports */
    uint32_t block_tokens;
    uint32_t n_layers;       /* the draft layer included */
    uint32_t n_draft_layers; /* that are the last of these: 0 or 1 */
    /* KV heads of this rank: [first_head, first_head + n_kv_heads) of the model's model_kv_heads.
     * With more ranks than heads a head is on several. A latent is head 0 of 1 on every rank. */
    uint32_t n_kv_heads, first_head, model_kv_heads;
    uint32_t head_dim;
    uint32_t tp_size, tp_rank;
    uint32_t n_blocks; /* of this pool; peers may differ here */
    uint32_t latent;   /* 0: heads; 1: latent, n_kv_heads is 1 */
};

enum {
    KV_LAYOUT_WIRE_BYTES = 56,
    KV_HEAD_DIM_MAX = 256,
    KV_LATENT_DIM_MAX = 1024,
    KV_ROW_MAX = KV_LATENT_DIM_MAX
};

/* Bytes of one (layer, block), of one token in it, of one block over all layers, of the whole
 * pool. */
size_t kv_layout_piece_bytes(const struct kv_layout *l);
size_t kv_layout_token_bytes(const struct kv_layout *l); /* one layer */
size_t kv_layout_block_bytes(const struct kv_layout *l);
size_t kv_layout_pool_bytes(const struct kv_layout *l);
/* Offset of (layer, block) in the pool. */
size_t kv_layout_offset(const struct kv_layout *l, uint32_t layer, uint32_t block);
/* Parts of a head: 2, or 1 of a latent. */
uint32_t kv_layout_n_parts(const struct kv_layout *l);
/* Values of the valid tokens of a partly filled block: within a piece they are n_kv_heads * n_parts
 * runs of n_tokens * head_dim elements, one run per (head, part), `stride` bytes apart. */
size_t kv_layout_segment_bytes(const struct kv_layout *l, uint32_t n_tokens);
size_t kv_layout_segment_stride(const struct kv_layout *l);
uint32_t kv_layout_n_segments(const struct kv_layout *l);
/* Bytes of one element, and of the scale of one row of head_dim elements: 0 where the type has
 * none. */
size_t kv_layout_element_bytes(const struct kv_layout *l);
size_t kv_layout_scale_bytes(const struct kv_layout *l);
/* Offset of the scales in a piece: behind all its values. */
size_t kv_layout_scale_offset(const struct kv_layout *l);
/* Checks that sizes are in range, heads among the model's, dtype is known and no product
 * overflows. */
enum status kv_layout_check(const struct kv_layout *l, struct err *err) MUST_CHECK;
/* Checks that both layouts are of the same model: kind, layers, head_dim, KV heads of the model,
 * fingerprint. ERR_PEER_MISMATCH names the first difference and both values. Block size, element
 * type and ranks may differ, and one may have a draft layer that the other lacks. */
enum status kv_layout_same_model(const struct kv_layout *mine, const struct kv_layout *theirs,
                                 struct err *err) MUST_CHECK;
/* Layers that both have: the first ones of either. */
uint32_t kv_layout_common_layers(const struct kv_layout *a, const struct kv_layout *b);
/* Heads that both ranks hold, as numbers of the whole model: [*first, *first + n); returns n, 0
 * when there is none. Of a latent always 1, whatever the ranks: any rank of a sender can write it
 * for any rank of a receiver. */
uint32_t kv_layout_common_heads(const struct kv_layout *a, const struct kv_layout *b,
                                uint32_t *first);
/* Does a conversion from type `from` to `to` lose nothing? True for equal types and for every type
 * to f32. An int8 or e4m3 value means q * scale as f32 rounds it (kv_rows.h): kernels compute on
 * that f32, though the exact product has more bits. */
bool kv_dtype_keeps(uint32_t from, uint32_t to);
const char *kv_dtype_name(uint32_t dtype); /* "unknown" for others */
/* Equal for pools whose blocks have the same bytes for the same tokens: of all but n_blocks. */
uint64_t kv_layout_hash(const struct kv_layout *l);
/* KV_LAYOUT_WIRE_BYTES, little endian. ERR_PEER_MISMATCH: the bytes of an earlier version. */
void kv_layout_encode(const struct kv_layout *l, struct buf *out);
enum status kv_layout_decode(struct str in, struct kv_layout *out, struct err *err) MUST_CHECK;

#endif
