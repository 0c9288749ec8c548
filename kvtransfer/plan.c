/* plan.c - turns block ranges into copies, scattered memory and checksums; see plan.h. No state. */
#include "kvtransfer/plan.h"

#include <inttypes.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/hash/hash.h"

/* ---- peers ---- */

bool kvt_plan_direct(const struct kv_layout *from, const struct kv_layout *to)
{
    return from->dtype == to->dtype && from->block_tokens == to->block_tokens;
}

static enum status check_types(const struct kv_layout *from, const struct kv_layout *to, bool lossy,
                               struct err *err)
{
    if (lossy || kv_dtype_keeps(from->dtype, to->dtype)) return OK;
    return err_field(err, ERR_PEER_MISMATCH, "dtype",
                     "the KV element types differ: %s at the sender does not fit into %s at the "
                     "receiver without loss; give both the same type, "
                     "or allow answers to differ with BATON_KV_LOSSY=1 on either node",
                     kv_dtype_name(from->dtype), kv_dtype_name(to->dtype));
}

enum status kvt_plan_check(const struct kv_layout *mine, const struct kv_layout *theirs,
                           bool i_send, bool lossy, uint64_t staging_bytes, struct err *err)
{
    const struct kv_layout *from = i_send ? mine : theirs, *to = i_send ? theirs : mine;
    uint32_t first;
    TRY(kv_layout_same_model(mine, theirs, err));
    uint32_t n = kv_layout_common_heads(mine, theirs, &first);
    if (n == 0)
        return err_field(err, ERR_PEER_MISMATCH, "tp_rank",
                         "no KV head in common: rank %" PRIu32 " of %" PRIu32
                         " here (heads %" PRIu32 " to %" PRIu32 "), rank %" PRIu32 " of %" PRIu32
                         " at the peer (heads %" PRIu32 " to %" PRIu32 ")",
                         mine->tp_rank, mine->tp_size, mine->first_head,
                         mine->first_head + mine->n_kv_heads - 1, theirs->tp_rank, theirs->tp_size,
                         theirs->first_head, theirs->first_head + theirs->n_kv_heads - 1);
    TRY(check_types(from, to, lossy, err));
    struct kvt_head_slice slice = { to, 0, n };
    if (!kvt_plan_direct(from, to) &&
        kvt_head_slice_bytes(&slice, to->block_tokens) > staging_bytes)
        return err_field(
            err, ERR_UNSUPPORTED, "block_tokens",
            "a KV piece of the receiver (%" PRIu32 " tokens, %s) has %" PRIu64
            " bytes, more than the %" PRIu64 " in which the sender (%" PRIu32
            " tokens, %s) converts; start both with the same --block-size and element type",
            to->block_tokens, kv_dtype_name(to->dtype),
            kvt_head_slice_bytes(&slice, to->block_tokens), staging_bytes, from->block_tokens,
            kv_dtype_name(from->dtype));
    return OK;
}

enum status kvt_head_slice_of(const struct kv_layout *l, uint32_t first, uint32_t n,
                              struct kvt_head_slice *out)
{
    uint64_t mine = l->first_head;
    if (n == 0 || first < mine || (uint64_t)first + n > mine + l->n_kv_heads) return ERR_INVALID;
    *out = (struct kvt_head_slice){ l, (uint32_t)(first - mine), n };
    return OK;
}

/* ---- tokens and blocks ---- */

uint32_t kvt_plan_n_blocks(const struct kv_layout *l, uint32_t n_tokens)
{
    return n_tokens / l->block_tokens + (n_tokens % l->block_tokens != 0);
}

uint32_t kvt_plan_tokens(const struct kv_layout *l, uint32_t n_tokens, uint32_t i_block)
{
    uint64_t begin = (uint64_t)i_block * l->block_tokens;
    if (begin >= n_tokens) return 0;
    uint64_t left = n_tokens - begin;
    return left < l->block_tokens ? (uint32_t)left : l->block_tokens;
}

uint32_t kvt_plan_complete(const struct kv_layout *l, uint32_t n_tokens, uint32_t end)
{
    return end >= n_tokens ? kvt_plan_n_blocks(l, n_tokens) : end / l->block_tokens;
}

/* ---- bytes ---- */

/* Bytes of one row: head_dim values, and their scale. */
static uint64_t row_bytes(const struct kv_layout *l)
{
    return l->head_dim * kv_layout_element_bytes(l) + kv_layout_scale_bytes(l);
}

/* (head, K or V) pairs of a slice, and of those before it in the piece. */
static uint32_t n_groups(const struct kvt_head_slice *v)
{
    return v->n_heads * kv_layout_n_parts(v->layout);
}
static uint64_t first_group(const struct kvt_head_slice *v)
{
    return (uint64_t)v->first_head * kv_layout_n_parts(v->layout);
}

uint64_t kvt_head_slice_bytes(const struct kvt_head_slice *v, uint32_t n_valid)
{
    return (uint64_t)n_groups(v) * n_valid * row_bytes(v->layout);
}

uint64_t kvt_plan_range_bytes(const struct kvt_head_slice *v, uint32_t n_tokens,
                              struct kvt_block_range s)
{
    if (s.n == 0) return 0;
    uint32_t last = kvt_plan_tokens(v->layout, n_tokens, s.first + s.n - 1);
    return kvt_head_slice_bytes(v, v->layout->block_tokens) * (s.n - 1) +
           kvt_head_slice_bytes(v, last);
}

uint32_t kvt_plan_batch(const struct kvt_head_slice *v, uint32_t n, uint64_t bytes, uint32_t most)
{
    uint64_t fit = bytes / kvt_head_slice_bytes(v, v->layout->block_tokens);
    if (fit < 1) fit = 1;
    if (fit > most) fit = most;
    return n < fit ? n : (uint32_t)fit;
}

/* ---- segments: contiguous bytes of a slice's piece ---- */

struct plan_segment {
    uint64_t at, bytes; /* at: from the piece's beginning */
};

/* Segments of n_valid tokens: values, then scales if the type has them. Each is one segment if the
 * block is full, otherwise one per (head, K or V). */
static uint32_t n_segments(const struct kvt_head_slice *v, uint32_t n_valid)
{
    return (n_valid == v->layout->block_tokens ? 1 : n_groups(v)) *
           (kv_layout_scale_bytes(v->layout) ? 2 : 1);
}

static struct plan_segment segment_at(const struct kvt_head_slice *v, uint32_t n_valid, uint32_t i)
{
    const struct kv_layout *l = v->layout;
    bool full = n_valid == l->block_tokens;
    uint32_t per_kind = full ? 1 : n_groups(v);
    bool scales = i >= per_kind;
    /* of one token */
    uint64_t unit = scales ? kv_layout_scale_bytes(l) : l->head_dim * kv_layout_element_bytes(l);
    uint64_t stride = unit * l->block_tokens, base = scales ? kv_layout_scale_offset(l) : 0;
    uint64_t at = base + (first_group(v) + (scales ? i - per_kind : i)) * stride;
    return (struct plan_segment){ at, full ? n_groups(v) * stride : n_valid * unit };
}

uint32_t kvt_plan_max_copies(const struct kv_layout *l)
{
    return 2 * (KVT_PUT_PIECES + kv_layout_n_segments(l)); /* twice: values and scales */
}

static uint32_t add_copy(struct kvt_copy *out, uint32_t n, struct kvt_copy c)
{
    struct kvt_copy *last = n ? &out[n - 1] : NULL;
    if (last && last->local + last->bytes == c.local && last->remote + last->bytes == c.remote) {
        last->bytes += c.bytes;
        return n;
    }
    out[n] = c;
    return n + 1;
}

/* What all full pieces of a layer have in common: a put has hundreds, and between GPUs its copies
 * take no longer than this. */
struct plan_layer {
    uint64_t at, piece_bytes; /* of block 0, from the pool's beginning */
    uint32_t n_segments;
    struct plan_segment segments[2];
};

static struct plan_layer layer_of(const struct kvt_head_slice *v, uint32_t layer)
{
    const uint32_t full = v->layout->block_tokens;
    struct plan_layer l = {
        .at = kv_layout_offset(v->layout, layer, 0),
        .piece_bytes = kv_layout_piece_bytes(v->layout),
        .n_segments = n_segments(v, full),
    };
    for (uint32_t i = 0; i < l.n_segments; i++) l.segments[i] = segment_at(v, full, i);
    return l;
}

uint32_t kvt_plan_copies(const struct kvt_head_slice *src, const int32_t *src_blocks,
                         const struct kvt_head_slice *dst, const int32_t *dst_blocks,
                         uint32_t n_tokens, struct kvt_block_range s, struct kvt_copy *out)
{
    const struct plan_layer from = layer_of(src, s.layer), to = layer_of(dst, s.layer);
    uint32_t n = 0;
    ASSERT(s.n <= KVT_PUT_PIECES);
    ASSERT(src->n_heads == dst->n_heads);
    for (uint32_t i = s.first; i < s.first + s.n; i++) {
        uint32_t valid = kvt_plan_tokens(dst->layout, n_tokens, i);
        bool full = valid == dst->layout->block_tokens;
        uint64_t local = from.at + (uint32_t)src_blocks[i] * from.piece_bytes,
                 remote = to.at + (uint32_t)dst_blocks[i] * to.piece_bytes;
        uint32_t count = full ? to.n_segments : n_segments(dst, valid);
        for (uint32_t j = 0; j < count; j++) {
            struct plan_segment a = full ? from.segments[j] : segment_at(src, valid, j),
                                b = full ? to.segments[j] : segment_at(dst, valid, j);
            n = add_copy(out, n,
                         (struct kvt_copy){
                             .local = local + a.at, .remote = remote + b.at, .bytes = b.bytes });
        }
    }
    return n;
}

uint32_t kvt_plan_copies_from(uint64_t local, const struct kvt_head_slice *dst,
                              const int32_t *dst_blocks, uint32_t n_tokens,
                              struct kvt_block_range s, struct kvt_copy *out)
{
    uint32_t n = 0;
    ASSERT(s.n <= KVT_BATCH_PIECES);
    for (uint32_t i = s.first; i < s.first + s.n; i++) {
        uint32_t valid = kvt_plan_tokens(dst->layout, n_tokens, i);
        uint64_t to = kv_layout_offset(dst->layout, s.layer, (uint32_t)dst_blocks[i]);
        for (uint32_t j = 0; j < n_segments(dst, valid); j++) {
            struct plan_segment b = segment_at(dst, valid, j);
            n = add_copy(
                out, n, (struct kvt_copy){ .local = local, .remote = to + b.at, .bytes = b.bytes });
            local += b.bytes;
        }
    }
    return n;
}

int kvt_plan_iov(const struct kvt_head_slice *v, void *base, const int32_t *blocks,
                 uint32_t n_tokens, struct kvt_block_range s, uint64_t offset, struct iovec *iov,
                 int cap)
{
    const struct kv_layout *l = v->layout;
    uint64_t piece = kvt_head_slice_bytes(v, l->block_tokens);
    /* only the last piece can be shorter than `piece` */
    uint64_t skipped = offset / piece < s.n ? offset / piece : s.n;
    offset -= skipped * piece;
    int n = 0;
    for (uint32_t i = s.first + (uint32_t)skipped; i < s.first + s.n && n < cap; i++) {
        uint32_t valid = kvt_plan_tokens(l, n_tokens, i), count = n_segments(v, valid);
        char *p = (char *)base + kv_layout_offset(l, s.layer, (uint32_t)blocks[i]);
        for (uint32_t j = 0; j < count && n < cap; j++) {
            struct plan_segment r = segment_at(v, valid, j);
            if (offset >= r.bytes) {
                offset -= r.bytes;
                continue;
            }
            char *begin = p + r.at + offset;
            uint64_t bytes = r.bytes - offset;
            offset = 0;
            if (n && (char *)iov[n - 1].iov_base + iov[n - 1].iov_len == begin)
                iov[n - 1].iov_len += bytes;
            else iov[n++] = (struct iovec){ begin, bytes };
        }
    }
    return n;
}

uint32_t kvt_plan_strides(const struct kvt_head_slice *v, uint32_t layer, int32_t block,
                          uint32_t n_valid, struct kvt_strides out[2])
{
    const struct kv_layout *l = v->layout;
    uint64_t pool = kv_layout_offset(l, layer, (uint32_t)block);
    uint32_t per_kind = n_valid == l->block_tokens ? 1 : n_groups(v);
    struct plan_segment values = segment_at(v, n_valid, 0);
    out[0] = (struct kvt_strides){
        .at = pool + values.at,
        .segment_bytes = values.bytes,
        .stride = kv_layout_segment_stride(l),
        .n_segments = per_kind,
    };
    if (!kv_layout_scale_bytes(l)) return 1;
    struct plan_segment scales = segment_at(v, n_valid, per_kind);
    if (per_kind == 1 && scales.at == values.at + values.bytes) { /* all heads of a full block */
        out[0].segment_bytes += scales.bytes;
        return 1;
    }
    out[1] = (struct kvt_strides){
        .at = pool + scales.at,
        .segment_bytes = scales.bytes,
        .stride = kv_layout_scale_bytes(l) * l->block_tokens,
        .n_segments = per_kind,
    };
    return 2;
}

struct kvt_rows kvt_plan_rows(const struct kvt_head_slice *src, const int32_t *src_blocks,
                              const struct kvt_head_slice *dst, uint32_t n_tokens, uint32_t layer,
                              uint32_t i_block, uint32_t done)
{
    const struct kv_layout *a = src->layout, *b = dst->layout;
    uint32_t n_valid = kvt_plan_tokens(b, n_tokens, i_block);
    ASSERT(src->n_heads == dst->n_heads);
    ASSERT(done < n_valid);
    uint32_t token = i_block * b->block_tokens + done, within = token % a->block_tokens,
             left = a->block_tokens - within;
    uint64_t piece = kv_layout_offset(a, layer, (uint32_t)src_blocks[token / a->block_tokens]),
             row = first_group(src) * a->block_tokens + within;
    uint64_t values = b->head_dim *
                      kv_layout_element_bytes(b); /* of a row in the receiver's type */
    return (struct kvt_rows){
        .from = piece + row * a->head_dim * kv_layout_element_bytes(a),
        .from_scales = piece + kv_layout_scale_offset(a) + row * kv_layout_scale_bytes(a),
        .to = done * values,
        .to_scales = (uint64_t)n_groups(dst) * n_valid * values + done * kv_layout_scale_bytes(b),
        .n = n_valid - done < left ? n_valid - done : left,
        .n_groups = n_groups(dst),
        .from_stride = a->block_tokens,
        .to_stride = n_valid
    };
}

uint64_t kvt_plan_checksum(const struct kvt_head_slice *v, const void *base, uint32_t layer,
                           int32_t block, uint32_t n_valid, void *scratch)
{
    const char *p = (const char *)base + kv_layout_offset(v->layout, layer, (uint32_t)block);
    uint32_t count = n_segments(v, n_valid);
    uint64_t n = 0;
    if (count == 1) {
        struct plan_segment r = segment_at(v, n_valid, 0);
        return hash_64(p + r.at, r.bytes, 0);
    }
    for (uint32_t i = 0; i < count; i++) {
        struct plan_segment r = segment_at(v, n_valid, i);
        memcpy((char *)scratch + n, p + r.at, r.bytes);
        n += r.bytes;
    }
    return hash_64(scratch, n, 0);
}

void kvt_plan_checksums(const struct kvt_head_slice *v, const void *base, const int32_t *blocks,
                        uint32_t n_tokens, struct kvt_block_range s, void *scratch,
                        uint64_t sums[KVT_BATCH_PIECES])
{
    const struct kv_layout *l = v->layout;
    const void *pieces[KVT_BATCH_PIECES];
    uint32_t n_full = 0, last = s.first + s.n;
    ASSERT(s.n <= KVT_BATCH_PIECES);
    if (n_segments(v, l->block_tokens) == 1) {
        struct plan_segment r = segment_at(v, l->block_tokens, 0);
        for (; n_full < s.n; n_full++) {
            uint32_t i = s.first + n_full;
            if (kvt_plan_tokens(l, n_tokens, i) < l->block_tokens) break;
            pieces[n_full] = (const char *)base +
                             kv_layout_offset(l, s.layer, (uint32_t)blocks[i]) + r.at;
        }
        hash_64_each(pieces, n_full, r.bytes, sums);
    }
    for (uint32_t i = s.first + n_full; i < last; i++)
        sums[i - s.first] = kvt_plan_checksum(v, base, s.layer, blocks[i],
                                              kvt_plan_tokens(l, n_tokens, i), scratch);
}
