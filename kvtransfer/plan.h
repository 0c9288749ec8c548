/* plan.h - from tokens and block tables to bytes: which pieces a token range completes, and the
 * fewest copies that move them.
 *
 * A transfer's unit is the receiver's piece: one (layer, block), or of it the heads that the grant
 * names. Its position is its place in the block table. Of a full piece such a slice is one run of
 * values (and of a type with scales one run of those); the last block of a prompt may be partly
 * filled, then only the runs of its valid tokens count (kv_layout.h). Pieces of one layer move in
 * order of position, each exactly once.
 *
 *   pools of equal element type and block size copies go from pool to pool: a slice of heads is a
 *   sub-range of the piece on both sides any others the sender makes the receiver's bytes in
 *   staging memory first (convert.h, staging.h; from a
 *                                                pool in a card's memory the card does: gpu_jobs.h)
 *
 * Invariants 1 The bytes of a span are the same on both sides, in the same order, whatever the
 *  block tables are: the receiver's runs, values first. 2 Sum over all spans of a transfer =
 *  kvt_plan_total_bytes: the layout's figure for the tokens not skipped. 3 Copies are in order of
 *  the receiver's bytes, so that a row may gather copies whose remote sides adjoin into one
 *  operation.
 * Thread: any (no state). */
#ifndef BATON_KVTRANSFER_PLAN_H
#define BATON_KVTRANSFER_PLAN_H

#include <sys/uio.h>

#include "kvtransfer/transport.h"

/* Positions [first, first + n) of one layer. */
struct kvt_block_range {
    uint32_t layer, first, n;
};

/* The pieces of a pool as far as a transfer goes: heads [first_head, first_head + n_heads) of that
 * pool's own. */
struct kvt_head_slice {
    const struct kv_layout *layout; /* borrowed */
    uint32_t first_head, n_heads;
};

/* Can KV go between these pools, and as what? ERR_PEER_MISMATCH or ERR_UNSUPPORTED with a sentence:
 * another model, no head in common, an element type that would lose what the sender's says without
 * `lossy`, a piece larger than `staging_bytes` where staging is needed. */
enum status kvt_plan_check(const struct kv_layout *mine, const struct kv_layout *theirs,
                           bool i_send, bool lossy, uint64_t staging_bytes,
                           struct err *err) MUST_CHECK;
/* Are bytes of `from` bytes of `to`, so that nothing needs staging? */
bool kvt_plan_direct(const struct kv_layout *from, const struct kv_layout *to);
struct kvt_head_slice kvt_head_slice_all(const struct kv_layout *l);
/* The view of heads [first, first + n) of the whole model. OK, or ERR_INVALID: this rank does not
 * have them all. */
enum status kvt_head_slice_of(const struct kv_layout *l, uint32_t first, uint32_t n,
                              struct kvt_head_slice *out) MUST_CHECK;

/* Blocks that hold n_tokens tokens. */
uint32_t kvt_plan_n_blocks(const struct kv_layout *l, uint32_t n_tokens);
/* Valid tokens of the block at `i_block` of a prompt of n_tokens: block_tokens, less in the last,
 * 0 past it. */
uint32_t kvt_plan_tokens(const struct kv_layout *l, uint32_t n_tokens, uint32_t i_block);
/* Positions that are complete when tokens [0, end) of n_tokens are there: a partly filled block
 * only with the last token. */
uint32_t kvt_plan_complete(const struct kv_layout *l, uint32_t n_tokens, uint32_t end);
/* Bytes of a piece of n_valid tokens, of a span, of all layers of a transfer (n_skip leading blocks
 * are not moved). */
uint64_t kvt_head_slice_bytes(const struct kvt_head_slice *v, uint32_t n_valid);
uint64_t kvt_plan_range_bytes(const struct kvt_head_slice *v, uint32_t n_tokens,
                              struct kvt_block_range s);
uint64_t kvt_head_slice_total_bytes(const struct kvt_head_slice *v, uint32_t n_tokens,
                                    uint32_t n_skip);
/* of all heads */
uint64_t kvt_plan_total_bytes(const struct kv_layout *l, uint32_t n_tokens, uint32_t n_skip);
/* How many of at most n positions fit into one put of about `bytes` bytes (at least 1, at most
 * KVT_BATCH_PIECES). */
uint32_t kvt_plan_batch(const struct kvt_head_slice *v, uint32_t n, uint64_t bytes);
/* Most copies a put can need whose sender has the layout l, whatever the receiver's is. */
uint32_t kvt_plan_max_copies(const struct kv_layout *l);
/* Copies of a span from the pool `src` to the pool `dst` (kvt_plan_direct; views of as many heads);
 * neighbours that are adjacent on both sides are joined. Tables are indexed by position and hold
 * block numbers of their pools. `out` has room for kvt_plan_max_copies. Returns how many. */
uint32_t kvt_plan_copies(const struct kvt_head_slice *src, const int32_t *src_blocks,
                         const struct kvt_head_slice *dst, const int32_t *dst_blocks,
                         uint32_t n_tokens, struct kvt_block_range s, struct kvt_copy *out);
/* As kvt_plan_copies, from a span's bytes that lie one after the other at `local`. */
uint32_t kvt_plan_copies_from(uint64_t local, const struct kvt_head_slice *dst,
                              const int32_t *dst_blocks, uint32_t n_tokens,
                              struct kvt_block_range s, struct kvt_copy *out);
/* Where byte `offset` of a span and what follows it lies in the pool at `base`: up to `cap`
 * scattered pieces; returns how many. */
int kvt_plan_iov(const struct kvt_head_slice *v, void *base, const int32_t *blocks,
                 uint32_t n_tokens, struct kvt_block_range s, uint64_t offset, struct iovec *iov,
                 int cap);
/* The valid runs of one piece as equal ones: bytes from the pool's begin, how far apart, how long,
 * how many. */
struct kvt_strides {
    uint64_t at, stride, segment_bytes;
    uint32_t n_segments;
};
/* Returns 1, or 2 where scales do not adjoin the values they are of: values, then scales. */
uint32_t kvt_plan_strides(const struct kvt_head_slice *v, uint32_t layer, int32_t block,
                          uint32_t n_valid, struct kvt_strides out[2]);
/* Tokens of one piece of `dst` that lie in one block of `src`, n of each of n_groups (head, part)
 * pairs: where their rows and scales begin in the pool of src and in the piece as it is sent (its
 * valid runs one after the other), and how many rows apart the pairs are. */
struct kvt_rows {
    uint64_t from, from_scales, to, to_scales;
    uint32_t n, n_groups, from_stride, to_stride;
};
/* Those from token `done` of the piece on. Views of as many heads. What kvt_convert_piece does is
 * one type to the other for all of them. */
struct kvt_rows kvt_plan_rows(const struct kvt_head_slice *src, const int32_t *src_blocks,
                              const struct kvt_head_slice *dst, uint32_t n_tokens, uint32_t layer,
                              uint32_t i_block, uint32_t done);
/* XXH3 over the valid runs of one piece in order. `scratch` has kv_layout_piece_bytes. */
uint64_t kvt_plan_checksum(const struct kvt_head_slice *v, const void *base, uint32_t layer,
                           int32_t block, uint32_t n_valid, void *scratch);

#endif
