/* kv_layout.c - sizes, comparison and wire form of the KV layout value. Pure functions; thread: any. */
#include "shared/kv/kv_layout.h"

#include <inttypes.h>
#include <string.h>

#include "kernels/kernels.h"

enum { LAYERS_MAX = 4096, HEADS_MAX = 4096, TP_MAX = 1024 };

static size_t element_bytes(const struct kv_layout *l) { return dtype_row_bytes((enum dtype)l->dtype, 1); }

size_t kv_layout_token_bytes(const struct kv_layout *l) { return (size_t)l->n_kv_heads * 2 * l->head_dim * element_bytes(l); }

size_t kv_layout_piece_bytes(const struct kv_layout *l) { return kv_layout_token_bytes(l) * l->block_tokens; }

size_t kv_layout_block_bytes(const struct kv_layout *l) { return kv_layout_piece_bytes(l) * l->n_layers; }

size_t kv_layout_pool_bytes(const struct kv_layout *l) { return kv_layout_block_bytes(l) * l->n_blocks; }

size_t kv_layout_offset(const struct kv_layout *l, uint32_t layer, uint32_t block)
{
    return ((size_t)layer * l->n_blocks + block) * kv_layout_piece_bytes(l);
}

size_t kv_layout_run_bytes(const struct kv_layout *l, uint32_t n_tokens)
{
    return (size_t)n_tokens * l->head_dim * element_bytes(l);
}

size_t kv_layout_run_stride(const struct kv_layout *l) { return kv_layout_run_bytes(l, l->block_tokens); }

uint32_t kv_layout_n_runs(const struct kv_layout *l) { return l->n_kv_heads * 2; }

static enum status check_range(const char *what, uint32_t value, uint32_t min, uint32_t max, struct err *err)
{
    if (value >= min && value <= max) return OK;
    return err_field(err, ERR_INVALID, what, "the KV layout's %s is %" PRIu32 ", not between %" PRIu32 " and %" PRIu32, what, value,
                     min, max);
}

enum status kv_layout_check(const struct kv_layout *l, struct err *err)
{
    /* Block-quantised types keep scales beside the values; the layout has no place for them. */
    if (l->dtype != DTYPE_F32 && l->dtype != DTYPE_F16 && l->dtype != DTYPE_BF16)
        return err_field(err, ERR_UNSUPPORTED, "dtype", "KV element type %" PRIu32 " is not one of f32, f16, bf16", l->dtype);
    TRY(check_range("block_tokens", l->block_tokens, 1, KERNEL_BLOCK_TOKENS_MAX, err));
    TRY(check_range("n_layers", l->n_layers, 1, LAYERS_MAX, err));
    TRY(check_range("n_kv_heads", l->n_kv_heads, 1, HEADS_MAX, err));
    TRY(check_range("head_dim", l->head_dim, 1, KERNEL_HEAD_DIM_MAX, err));
    TRY(check_range("tp_size", l->tp_size, 1, TP_MAX, err));
    TRY(check_range("tp_rank", l->tp_rank, 0, l->tp_size - 1, err));
    TRY(check_range("n_blocks", l->n_blocks, 1, INT32_MAX, err));
    /* With the ranges above a block is below 2^46 bytes, so only the last product can overflow. */
    size_t pool;
    if (__builtin_mul_overflow(kv_layout_block_bytes(l), (size_t)l->n_blocks, &pool) || pool > (size_t)INT64_MAX)
        return err_field(err, ERR_INVALID, "n_blocks", "a KV pool of %" PRIu32 " blocks of %zu bytes is larger than any memory",
                         l->n_blocks, kv_layout_block_bytes(l));
    return OK;
}

static enum status check_equal(const char *what, uint32_t mine, uint32_t theirs, const char *hint, struct err *err)
{
    if (mine == theirs) return OK;
    return err_field(err, ERR_PEER_MISMATCH, what, "the KV layouts differ: %s is %" PRIu32 " here and %" PRIu32 " at the peer%s", what,
                     mine, theirs, hint);
}

static const char *kv_dtype_name(uint32_t t) { return t < DTYPE_COUNT ? dtype_name((enum dtype)t) : "unknown"; }

enum status kv_layout_compatible(const struct kv_layout *mine, const struct kv_layout *theirs, struct err *err)
{
    /* Shapes first: they say more than a fingerprint that differs because of them. */
    TRY(check_equal("n_layers", mine->n_layers, theirs->n_layers, " (another model)", err));
    TRY(check_equal("n_kv_heads", mine->n_kv_heads, theirs->n_kv_heads, " (another model)", err));
    TRY(check_equal("head_dim", mine->head_dim, theirs->head_dim, " (another model)", err));
    TRY(check_equal("block_tokens", mine->block_tokens, theirs->block_tokens, "; start both with the same --block-size", err));
    if (mine->dtype != theirs->dtype)
        return err_field(err, ERR_PEER_MISMATCH, "dtype", "the KV layouts differ: elements are %s here and %s at the peer",
                         kv_dtype_name(mine->dtype), kv_dtype_name(theirs->dtype));
    TRY(check_equal("tp_size", mine->tp_size, theirs->tp_size, "; start both with the same tensor-parallel size", err));
    TRY(check_equal("tp_rank", mine->tp_rank, theirs->tp_rank, "", err));
    if (mine->model_fingerprint != theirs->model_fingerprint)
        return err_field(err, ERR_PEER_MISMATCH, "model_fingerprint",
                         "the models differ: fingerprint %016" PRIx64 " here and %016" PRIx64
                         " at the peer (other weights, or other kernels: compare --model and --cpu-isa)",
                         mine->model_fingerprint, theirs->model_fingerprint);
    return OK;
}

void kv_layout_encode(const struct kv_layout *l, struct buf *out)
{
    buf_add_u64le(out, l->model_fingerprint);
    const uint32_t fields[] = { l->dtype, l->block_tokens, l->n_layers, l->n_kv_heads, l->head_dim, l->tp_size, l->tp_rank, l->n_blocks };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) buf_add_u32le(out, fields[i]);
}

static uint64_t read_le(const char *p, size_t n)
{
    uint64_t v = 0;
    for (size_t i = 0; i < n; i++) v |= (uint64_t)(unsigned char)p[i] << (8 * i);
    return v;
}

enum status kv_layout_decode(struct str in, struct kv_layout *out, struct err *err)
{
    if (in.n != KV_LAYOUT_WIRE_BYTES)
        return err_set(err, ERR_FORMAT, "a KV layout has %d bytes, %zu came", KV_LAYOUT_WIRE_BYTES, in.n);
    uint32_t f[8];
    for (size_t i = 0; i < 8; i++) f[i] = (uint32_t)read_le(in.p + 8 + 4 * i, 4);
    struct kv_layout l = { .model_fingerprint = read_le(in.p, 8), .dtype = f[0], .block_tokens = f[1], .n_layers = f[2],
                           .n_kv_heads = f[3], .head_dim = f[4], .tp_size = f[5], .tp_rank = f[6], .n_blocks = f[7] };
    TRY(kv_layout_check(&l, err));
    *out = l;
    return OK;
}
