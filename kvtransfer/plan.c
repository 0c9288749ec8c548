/* plan.c - spans of pieces to copies, scattered memory and checksums; see plan.h. No state. */
#include "kvtransfer/plan.h"

#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/hash.h"

/* Bytes of n_tokens tokens in one piece; the runs of a piece share them evenly. */
static uint64_t valid_bytes(const struct kv_layout *l, uint32_t n_tokens)
{
    return (uint64_t)kv_layout_token_bytes(l) * n_tokens;
}

uint32_t kvt_plan_n_blocks(const struct kv_layout *l, uint32_t n_tokens)
{
    return n_tokens / l->block_tokens + (n_tokens % l->block_tokens != 0);
}

uint32_t kvt_plan_tokens(const struct kv_layout *l, uint32_t n_tokens, uint32_t position)
{
    uint64_t begin = (uint64_t)position * l->block_tokens;
    if (begin >= n_tokens) return 0;
    uint64_t left = n_tokens - begin;
    return left < l->block_tokens ? (uint32_t)left : l->block_tokens;
}

uint32_t kvt_plan_complete(const struct kv_layout *l, uint32_t n_tokens, uint32_t end)
{
    return end >= n_tokens ? kvt_plan_n_blocks(l, n_tokens) : end / l->block_tokens;
}

uint64_t kvt_plan_span_bytes(const struct kv_layout *l, uint32_t n_tokens, struct kvt_span s)
{
    if (s.n == 0) return 0;
    uint32_t last = kvt_plan_tokens(l, n_tokens, s.first + s.n - 1);
    return (uint64_t)kv_layout_piece_bytes(l) * (s.n - 1) + valid_bytes(l, last);
}

uint64_t kvt_plan_total_bytes(const struct kv_layout *l, uint32_t n_tokens, uint32_t n_skip)
{
    uint32_t n = kvt_plan_n_blocks(l, n_tokens);
    if (n_skip >= n) return 0;
    return kvt_plan_span_bytes(l, n_tokens, (struct kvt_span){ 0, n_skip, n - n_skip }) * l->n_layers;
}

uint32_t kvt_plan_batch(const struct kv_layout *l, uint32_t n, uint64_t bytes)
{
    uint64_t fit = bytes / kv_layout_piece_bytes(l);
    if (fit < 1) fit = 1;
    if (fit > KVT_BATCH_PIECES) fit = KVT_BATCH_PIECES;
    return n < fit ? n : (uint32_t)fit;
}

uint32_t kvt_plan_max_copies(const struct kv_layout *l)
{
    return KVT_BATCH_PIECES + kv_layout_n_runs(l);
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

uint32_t kvt_plan_copies(const struct kv_layout *src, const int32_t *src_blocks, const struct kv_layout *dst, const int32_t *dst_blocks,
                         uint32_t n_tokens, struct kvt_span s, struct kvt_copy *out)
{
    uint32_t n = 0;
    ASSERT(s.n <= KVT_BATCH_PIECES);
    for (uint32_t i = s.first; i < s.first + s.n; i++) {
        uint32_t valid = kvt_plan_tokens(src, n_tokens, i);
        struct kvt_copy c = { .local = kv_layout_offset(src, s.layer, (uint32_t)src_blocks[i]),
                              .remote = kv_layout_offset(dst, s.layer, (uint32_t)dst_blocks[i]) };
        uint32_t n_runs = valid == src->block_tokens ? 1 : kv_layout_n_runs(src);
        c.bytes = valid_bytes(src, valid) / n_runs;
        size_t stride = kv_layout_run_stride(src);
        for (uint32_t run = 0; run < n_runs; run++, c.local += stride, c.remote += stride) n = add_copy(out, n, c);
    }
    return n;
}

int kvt_plan_iov(const struct kv_layout *l, void *base, const int32_t *blocks, uint32_t n_tokens, struct kvt_span s, uint64_t offset,
                 struct iovec *iov, int cap)
{
    uint64_t piece = kv_layout_piece_bytes(l);
    uint64_t skipped = offset / piece < s.n ? offset / piece : s.n; /* only the last piece can be shorter than `piece` */
    offset -= skipped * piece;
    int n = 0;
    for (uint32_t i = s.first + (uint32_t)skipped; i < s.first + s.n && n < cap; i++) {
        uint32_t valid = kvt_plan_tokens(l, n_tokens, i);
        uint32_t n_runs = valid == l->block_tokens ? 1 : kv_layout_n_runs(l);
        uint64_t run_bytes = valid_bytes(l, valid) / n_runs;
        char *p = (char *)base + kv_layout_offset(l, s.layer, (uint32_t)blocks[i]);
        for (uint32_t run = 0; run < n_runs && n < cap; run++, p += kv_layout_run_stride(l)) {
            if (offset >= run_bytes) {
                offset -= run_bytes;
                continue;
            }
            char *begin = p + offset;
            uint64_t bytes = run_bytes - offset;
            offset = 0;
            if (n && (char *)iov[n - 1].iov_base + iov[n - 1].iov_len == begin) iov[n - 1].iov_len += bytes;
            else iov[n++] = (struct iovec){ begin, bytes };
        }
    }
    return n;
}

uint64_t kvt_plan_checksum(const struct kv_layout *l, const void *base, uint32_t layer, int32_t block, uint32_t n_valid, void *scratch)
{
    const char *p = (const char *)base + kv_layout_offset(l, layer, (uint32_t)block);
    if (n_valid == l->block_tokens) return hash_64(p, kv_layout_piece_bytes(l), 0);
    uint32_t n_runs = kv_layout_n_runs(l);
    size_t bytes = valid_bytes(l, n_valid) / n_runs;
    for (uint32_t run = 0; run < n_runs; run++) memcpy((char *)scratch + run * bytes, p + run * kv_layout_run_stride(l), bytes);
    return hash_64(scratch, n_runs * bytes, 0);
}
