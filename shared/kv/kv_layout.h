/* kv_layout.h - what a KV block is: the small value that says where every byte lies, and that peers compare.
 *
 * A pool is n_layers equal regions, one after the other; a region is n_blocks pieces of `piece_bytes`; the piece of
 * (layer, block) is [kv_head][k|v][token][head_dim]. So a (layer, block) is contiguous, and so is each head of it.
 * Two pools are compatible when everything but n_blocks is equal. Thread: any (a value). */
#ifndef BATON_KV_KV_LAYOUT_H
#define BATON_KV_KV_LAYOUT_H

#include "kernels/dtype.h"
#include "shared/base/buf.h"
#include "shared/base/err.h"

struct kv_layout {
    uint64_t model_fingerprint; /* of the weights' identity and the arithmetic that fills the cache (kernel row) */
    uint32_t dtype;             /* enum dtype */
    uint32_t block_tokens;
    uint32_t n_layers;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t tp_size, tp_rank;
    uint32_t n_blocks;          /* of this pool; peers may differ here */
};

enum { KV_LAYOUT_WIRE_BYTES = 40 };

/* Bytes of one (layer, block), of one token in it, of one block over all layers, of the whole pool. */
size_t kv_layout_piece_bytes(const struct kv_layout *l);
size_t kv_layout_token_bytes(const struct kv_layout *l); /* one layer */
size_t kv_layout_block_bytes(const struct kv_layout *l);
size_t kv_layout_pool_bytes(const struct kv_layout *l);
/* Offset of (layer, block) in the pool. */
size_t kv_layout_offset(const struct kv_layout *l, uint32_t layer, uint32_t block);
/* Bytes of the valid tokens of a partly filled block: within a piece they are n_kv_heads * 2 runs of n_tokens * head_dim
 * elements, one run per (head, k|v), `stride` bytes apart. */
size_t kv_layout_run_bytes(const struct kv_layout *l, uint32_t n_tokens);
size_t kv_layout_run_stride(const struct kv_layout *l);
uint32_t kv_layout_n_runs(const struct kv_layout *l);
/* Sizes in range, dtype known, products that do not overflow. */
enum status kv_layout_check(const struct kv_layout *l, struct err *err) MUST_CHECK;
/* ERR_PEER_MISMATCH with a sentence that names the first difference and both values. */
enum status kv_layout_compatible(const struct kv_layout *mine, const struct kv_layout *theirs, struct err *err) MUST_CHECK;
void        kv_layout_encode(const struct kv_layout *l, struct buf *out); /* KV_LAYOUT_WIRE_BYTES, little endian */
enum status kv_layout_decode(struct str in, struct kv_layout *out, struct err *err) MUST_CHECK;

#endif
