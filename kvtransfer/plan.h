/* plan.h - from tokens and block tables to bytes: which pieces a token range completes, and the
 * fewest copies that move them.
 *
 * The unit of a transfer is the receiver's piece, one (layer, block), or the granted heads of it.
 * Its position is its index in the block table. A full piece of a head slice is one contiguous
 * segment of values (and one of scales, for types that have them). The last block of a prompt may
 * be partly filled; then each head's valid tokens are a segment (kv_layout.h). Pieces of a layer
 * move in order of position, each once. Between pools of equal element type and block size, copies
 * go directly from pool to pool; otherwise the sender converts into staging memory first
 * (convert.h, gpu_jobs.h).
 *
 * Invariants: both sides see the bytes of a block range in the same order, the receiver's segments
 * with values first, whatever the block tables are. Copies are in the order of the receiver's
 * bytes, so that a transport may gather copies with adjacent destinations.
 * Thread: any (no state). */
#ifndef BATON_KVTRANSFER_PLAN_H
#define BATON_KVTRANSFER_PLAN_H

#include <sys/uio.h>

#include "kvtransfer/transport.h"

/* Positions [first, first + n) of one layer. */
struct kvt_block_range {
    uint32_t layer, first, n;
};

/* The same positions of a layer and of more_layers after it: what a NOTE names. */
struct kvt_note_range {
    uint32_t layer, more_layers, first, n;
};

static inline uint32_t kvt_note_pieces(const struct kvt_note_range *r)
{
    return r->n * (r->more_layers + 1);
}

/* The part of a pool's pieces that a transfer moves: heads [first_head, first_head + n_heads) of
 * the pool. */
struct kvt_head_slice {
    const struct kv_layout *layout; /* borrowed */
    uint32_t first_head, n_heads;
};

/* Checks whether KV can move between these pools. ERR_PEER_MISMATCH or ERR_UNSUPPORTED with a
 * sentence: another model, no common head, an element type that would lose precision without
 * `lossy`, a piece larger than `staging_bytes` if staging is needed. */
enum status kvt_plan_check(const struct kv_layout *mine, const struct kv_layout *theirs,
                           bool i_send, bool lossy, uint64_t staging_bytes,
                           struct err *err) MUST_CHECK;
/* Whether the bytes of `from` are valid in `to`, so that nothing needs staging. */
bool kvt_plan_direct(const struct kv_layout *from, const struct kv_layout *to);
/* The slice of heads [first, first + n) of the whole model. ERR_INVALID: this rank does not have
 * them all. */
enum status kvt_head_slice_of(const struct kv_layout *l, uint32_t first, uint32_t n,
                              struct kvt_head_slice *out) MUST_CHECK;

/* Blocks that hold n_tokens tokens. */
uint32_t kvt_plan_n_blocks(const struct kv_layout *l, uint32_t n_tokens);
/* Valid tokens of the block at `i_block` of a prompt of n_tokens: block_tokens, less in the last,
 * 0 past it. */
uint32_t kvt_plan_tokens(const struct kv_layout *l, uint32_t n_tokens, uint32_t i_block);
/* Positions that are complete after tokens [0, end) of n_tokens: a partly filled block only with
 * the last token. */
uint32_t kvt_plan_complete(const struct kv_layout *l, uint32_t n_tokens, uint32_t end);
/* Bytes of a piece of n_valid tokens, and of a block range. */
uint64_t kvt_head_slice_bytes(const struct kvt_head_slice *v, uint32_t n_valid);
uint64_t kvt_plan_range_bytes(const struct kvt_head_slice *v, uint32_t n_tokens,
                              struct kvt_block_range s);
/* How many of at most n positions fit into one put of about `bytes` bytes (at least 1, at most
 * `most`). */
uint32_t kvt_plan_batch(const struct kvt_head_slice *v, uint32_t n, uint64_t bytes, uint32_t most);
/* The most copies that a put from layout l can need, whatever the receiver's layout. */
uint32_t kvt_plan_max_copies(const struct kv_layout *l);
/* Copies of a block range from pool `src` to pool `dst` (kvt_plan_direct; slices of as many heads).
 * Copies that are adjacent on both sides are joined. Tables are indexed by position and hold block
 * numbers of their pools. `out` has room for kvt_plan_max_copies. Returns how many. */
uint32_t kvt_plan_copies(const struct kvt_head_slice *src, const int32_t *src_blocks,
                         const struct kvt_head_slice *dst, const int32_t *dst_blocks,
                         uint32_t n_tokens, struct kvt_block_range s, struct kvt_copy *out);
/* As kvt_plan_copies, with the range's bytes contiguous at `local`. */
uint32_t kvt_plan_copies_from(uint64_t local, const struct kvt_head_slice *dst,
                              const int32_t *dst_blocks, uint32_t n_tokens,
                              struct kvt_block_range s, struct kvt_copy *out);
/* Where the bytes of a block range from `offset` on lie in the pool at `base`: fills up to `cap`
 * entries and returns how many. */
int kvt_plan_iov(const struct kvt_head_slice *v, void *base, const int32_t *blocks,
                 uint32_t n_tokens, struct kvt_block_range s, uint64_t offset, struct iovec *iov,
                 int cap);
/* The valid segments of one piece, equal in length and distance. */
struct kvt_strides {
    uint64_t at, stride, segment_bytes; /* bytes; `at` counts from the pool's begin */
    uint32_t n_segments;
};
/* Returns 1, or 2 if scales are not adjacent to their values: values, then scales. */
uint32_t kvt_plan_strides(const struct kvt_head_slice *v, uint32_t layer, int32_t block,
                          uint32_t n_valid, struct kvt_strides out[2]);
/* The tokens of one piece of `dst` that lie in one block of `src`: n rows of each of n_groups
 * (head, K or V) pairs. Offsets of their rows and scales in the pool of src and in the piece as it
 * is sent (its valid segments one after the other); strides are rows from pair to pair. */
struct kvt_rows {
    uint64_t from, from_scales, to, to_scales;
    uint32_t n, n_groups, from_stride, to_stride;
};
/* The rows from token `done` of the piece on. Slices of as many heads. kvt_convert_piece converts
 * the type of all of them. */
struct kvt_rows kvt_plan_rows(const struct kvt_head_slice *src, const int32_t *src_blocks,
                              const struct kvt_head_slice *dst, uint32_t n_tokens, uint32_t layer,
                              uint32_t i_block, uint32_t done);
/* XXH3 over the valid segments of one piece in order. `scratch` has kv_layout_piece_bytes. */
uint64_t kvt_plan_checksum(const struct kvt_head_slice *v, const void *base, uint32_t layer,
                           int32_t block, uint32_t n_valid, void *scratch);
/* The same for every piece of a block range. */
void kvt_plan_checksums(const struct kvt_head_slice *v, const void *base, const int32_t *blocks,
                        uint32_t n_tokens, struct kvt_block_range s, void *scratch,
                        uint64_t sums[KVT_BATCH_PIECES]);
#endif
