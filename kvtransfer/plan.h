/* plan.h - from tokens and block tables to bytes: which pieces a token range completes, and the fewest copies that move them.
 *
 * A transfer's unit is the piece: one (layer, block). Its position is its place in the block table. A full piece is one run; the
 * last block of a prompt may be partly filled, then only the runs of its valid tokens count (kv_layout.h). Pieces of one layer move
 * in order of position, each exactly once.
 * Invariants
 *  1 The bytes of a span are the same on both sides, in the same order, whatever the block tables are.
 *  2 Sum over all spans of a transfer = kvt_plan_total_bytes: the layout's figure for the tokens not skipped.
 * Not for: differing block sizes, dtypes or tensor-parallel sizes (refused when peers connect).
 * Thread: any (no state). */
#ifndef BATON_KVTRANSFER_PLAN_H
#define BATON_KVTRANSFER_PLAN_H

#include <sys/uio.h>

#include "kvtransfer/transport.h"

/* Positions [first, first + n) of one layer. */
struct kvt_span {
    uint32_t layer, first, n;
};

/* Blocks that hold n_tokens tokens. */
uint32_t kvt_plan_n_blocks(const struct kv_layout *l, uint32_t n_tokens);
/* Valid tokens of the block at `position` of a prompt of n_tokens: block_tokens, less in the last, 0 past it. */
uint32_t kvt_plan_tokens(const struct kv_layout *l, uint32_t n_tokens, uint32_t position);
/* Positions that are complete when tokens [0, end) of n_tokens are there: a partly filled block only with the last token. */
uint32_t kvt_plan_complete(const struct kv_layout *l, uint32_t n_tokens, uint32_t end);
uint64_t kvt_plan_span_bytes(const struct kv_layout *l, uint32_t n_tokens, struct kvt_span s);
uint64_t kvt_plan_total_bytes(const struct kv_layout *l, uint32_t n_tokens, uint32_t n_skip);
/* How many of at most n positions from `first` on fit into one put of about `bytes` bytes (at least 1, at most KVT_BATCH_PIECES). */
uint32_t kvt_plan_batch(const struct kv_layout *l, uint32_t n, uint64_t bytes);
/* Most copies a put of KVT_BATCH_PIECES pieces can need. */
uint32_t kvt_plan_max_copies(const struct kv_layout *l);
/* Copies of a span from the pool `src` to the pool `dst`; neighbours that are adjacent on both sides are joined. Tables are indexed by
 * position and hold block numbers of their pools. `out` has room for kvt_plan_max_copies. Returns how many. */
uint32_t kvt_plan_copies(const struct kv_layout *src, const int32_t *src_blocks, const struct kv_layout *dst, const int32_t *dst_blocks,
                         uint32_t n_tokens, struct kvt_span s, struct kvt_copy *out);
/* Where byte `offset` of a span and what follows it lies in the pool at `base`: up to `cap` scattered pieces; returns how many. */
int      kvt_plan_iov(const struct kv_layout *l, void *base, const int32_t *blocks, uint32_t n_tokens, struct kvt_span s, uint64_t offset,
                      struct iovec *iov, int cap);
/* XXH3 over the valid runs of one piece in order. `scratch` has kv_layout_piece_bytes. */
uint64_t kvt_plan_checksum(const struct kv_layout *l, const void *base, uint32_t layer, int32_t block, uint32_t n_valid, void *scratch);

#endif
