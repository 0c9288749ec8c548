/* convert.c - converts rows between element types and pieces between block sizes; see convert.h. No
 * state. */
#include "kvtransfer/convert.h"

#include <string.h>

#include "kernels/kv_rows.h"
#include "shared/base/assert.h"

/* ---- rows ---- */

void kvt_convert_row(uint32_t from, const void *src, const void *src_scale, uint32_t to, void *dst,
                     void *dst_scale, uint32_t n)
{
    float x[KV_ROW_MAX];
    ASSERT(n <= KV_ROW_MAX);
    ASSERT(from != to);
    kv_row_load((enum dtype)from, src, src_scale, x, n);
    kv_row_store((enum dtype)to, x, dst, dst_scale, n);
}

/* ---- pieces ---- */

/* Rows of one (head, K or V) pair. */
struct convert_rows {
    char *values, *scales;
    size_t value_bytes, scale_bytes; /* of one row */
};

static struct convert_rows rows_after(struct convert_rows r, size_t n)
{
    r.values += n * r.value_bytes;
    r.scales += n * r.scale_bytes;
    return r;
}

static struct convert_rows rows_of(const struct kv_layout *l, char *values, char *scales)
{
    return (struct convert_rows){ values, scales, l->head_dim * kv_layout_element_bytes(l),
                                  kv_layout_scale_bytes(l) };
}

static void move_rows(uint32_t from, struct convert_rows src, uint32_t to, struct convert_rows dst,
                      uint32_t head_dim, uint32_t n)
{
    if (from == to) {
        memcpy(dst.values, src.values, n * dst.value_bytes);
        if (dst.scale_bytes) memcpy(dst.scales, src.scales, n * dst.scale_bytes);
        return;
    }
    for (uint32_t i = 0; i < n; i++, src = rows_after(src, 1), dst = rows_after(dst, 1))
        kvt_convert_row(from, src.values, src.scales, to, dst.values, dst.scales, head_dim);
}

void kvt_convert_piece(const struct kvt_head_slice *src, const void *pool,
                       const int32_t *src_blocks, const struct kvt_head_slice *dst,
                       uint32_t n_tokens, uint32_t layer, uint32_t i_block, void *out)
{
    const struct kv_layout *a = src->layout, *b = dst->layout;
    uint32_t n_valid = kvt_plan_tokens(b, n_tokens, i_block), parts = kv_layout_n_parts(b),
             n_groups = parts * dst->n_heads;
    ASSERT(src->n_heads == dst->n_heads);
    struct convert_rows to = rows_of(b, out, NULL);
    to.scales = to.values + (size_t)n_groups * n_valid * to.value_bytes;
    for (uint32_t done = 0; done < n_valid;) { /* token ranges in one block of the source */
        uint32_t token = i_block * b->block_tokens + done, within = token % a->block_tokens,
                 left = a->block_tokens - within;
        uint32_t n = n_valid - done < left ? n_valid - done : left;
        char *piece = (char *)(uintptr_t)pool +
                      kv_layout_offset(a, layer, (uint32_t)src_blocks[token / a->block_tokens]);
        struct convert_rows from = rows_of(a, piece, piece + kv_layout_scale_offset(a));
        for (uint32_t g = 0; g < n_groups; g++)
            move_rows(
                a->dtype,
                rows_after(from, (size_t)(parts * src->first_head + g) * a->block_tokens + within),
                b->dtype, rows_after(to, (size_t)g * n_valid + done), b->head_dim, n);
        done += n;
    }
}
