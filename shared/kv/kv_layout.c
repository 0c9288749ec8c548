/* kv_layout.c - sizes, comparison, and wire form of the KV layout value. Pure functions; thread:
 * any. */
#include "shared/kv/kv_layout.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/kv_rows.h"
#include "shared/base/hash/hash.h"

static_assert((int)KV_HEAD_DIM_MAX == (int)KERNEL_HEAD_DIM_MAX &&
                  (int)KV_LATENT_DIM_MAX == (int)KERNEL_LATENT_MAX,
              "what kernels compute can be moved");

enum {
    LAYERS_MAX = 4096,
    HEADS_MAX = 4096,
    TP_MAX = 1024,
    N_FIELDS = 12,            /* of 32 bits, behind the fingerprint */
    FIRST_VERSION_BYTES = 44, /* it knew neither first_head nor model_kv_heads */
    SECOND_VERSION_BYTES = 52 /* nor n_draft_layers */
};
static_assert(KV_LAYOUT_WIRE_BYTES == 8 + 4 * N_FIELDS, "wire size");

size_t kv_layout_element_bytes(const struct kv_layout *l)
{
    return kv_rows_bytes((enum dtype)l->dtype, 1);
}

size_t kv_layout_scale_bytes(const struct kv_layout *l)
{
    return kv_rows_scaled((enum dtype)l->dtype) ? sizeof(float) : 0;
}

size_t kv_layout_token_bytes(const struct kv_layout *l)
{
    return (size_t)kv_layout_n_segments(l) *
           (l->head_dim * kv_layout_element_bytes(l) + kv_layout_scale_bytes(l));
}

size_t kv_layout_scale_offset(const struct kv_layout *l)
{
    return kv_layout_segment_stride(l) * kv_layout_n_segments(l);
}

size_t kv_layout_piece_bytes(const struct kv_layout *l)
{
    return kv_layout_token_bytes(l) * l->block_tokens;
}

size_t kv_layout_block_bytes(const struct kv_layout *l)
{
    return kv_layout_piece_bytes(l) * l->n_layers;
}

size_t kv_layout_pool_bytes(const struct kv_layout *l)
{
    return kv_layout_block_bytes(l) * l->n_blocks;
}

size_t kv_layout_offset(const struct kv_layout *l, uint32_t layer, uint32_t block)
{
    return ((size_t)layer * l->n_blocks + block) * kv_layout_piece_bytes(l);
}

size_t kv_layout_segment_bytes(const struct kv_layout *l, uint32_t n_tokens)
{
    return (size_t)n_tokens * l->head_dim * kv_layout_element_bytes(l);
}

size_t kv_layout_segment_stride(const struct kv_layout *l)
{
    return kv_layout_segment_bytes(l, l->block_tokens);
}

uint32_t kv_layout_n_parts(const struct kv_layout *l) { return l->latent ? 1 : 2; }

uint32_t kv_layout_n_segments(const struct kv_layout *l)
{
    return l->n_kv_heads * kv_layout_n_parts(l);
}

static enum status check_range(const char *what, uint32_t value, uint32_t min, uint32_t max,
                               struct err *err)
{
    if (value >= min && value <= max) return OK;
    return err_field(err, ERR_INVALID, what,
                     "the KV layout's %s is %" PRIu32 ", not between %" PRIu32 " and %" PRIu32,
                     what, value, min, max);
}

enum status kv_layout_check(const struct kv_layout *l, struct err *err)
{
    /* Block-quantised weight types keep scales between the values; the layout has no place for
     * them. */
    if (!kv_rows_known((enum dtype)l->dtype))
        return err_field(err, ERR_UNSUPPORTED, "dtype",
                         "KV element type %" PRIu32 " is not one of f32, f16, bf16, int8, f8_e4m3",
                         l->dtype);
    TRY(check_range("block_tokens", l->block_tokens, 1, KERNEL_BLOCK_TOKENS_MAX, err));
    TRY(check_range("n_draft_layers", l->n_draft_layers, 0, 1, err));
    TRY(check_range("n_layers", l->n_layers, 1 + l->n_draft_layers, LAYERS_MAX, err));
    TRY(check_range("latent", l->latent, 0, 1, err));
    if (l->latent && l->n_kv_heads != 1)
        return err_field(err, ERR_INVALID, "n_kv_heads",
                         "a latent KV layout has one vector per token for all heads, not %" PRIu32,
                         l->n_kv_heads);
    TRY(check_range("model_kv_heads", l->model_kv_heads, 1, l->latent ? 1 : HEADS_MAX, err));
    TRY(check_range("n_kv_heads", l->n_kv_heads, 1, l->model_kv_heads, err));
    TRY(check_range("first_head", l->first_head, 0, l->model_kv_heads - l->n_kv_heads, err));
    TRY(check_range("head_dim", l->head_dim, 1, l->latent ? KV_LATENT_DIM_MAX : KV_HEAD_DIM_MAX,
                    err));
    TRY(check_range("tp_size", l->tp_size, 1, TP_MAX, err));
    TRY(check_range("tp_rank", l->tp_rank, 0, l->tp_size - 1, err));
    TRY(check_range("n_blocks", l->n_blocks, 1, INT32_MAX, err));
    /* With the ranges above a block is below 2^46 bytes, so only the last product can overflow. */
    size_t pool;
    if (__builtin_mul_overflow(kv_layout_block_bytes(l), (size_t)l->n_blocks, &pool) ||
        pool > (size_t)INT64_MAX)
        return err_field(err, ERR_INVALID, "n_blocks",
                         "a KV pool of %" PRIu32 " blocks of %zu bytes is larger than any memory",
                         l->n_blocks, kv_layout_block_bytes(l));
    return OK;
}

/* ---- peers ---- */

static enum status check_equal(const char *what, uint32_t mine, uint32_t theirs, const char *hint,
                               struct err *err)
{
    if (mine == theirs) return OK;
    return err_field(err, ERR_PEER_MISMATCH, what,
                     "the KV layouts differ: %s is %" PRIu32 " here and %" PRIu32 " at the peer%s",
                     what, mine, theirs, hint);
}

const char *kv_dtype_name(uint32_t t) { return kv_rows_name((enum dtype)t); }

bool kv_dtype_keeps(uint32_t from, uint32_t to) { return from == to || to == DTYPE_F32; }

static const char *kind_name(const struct kv_layout *l)
{
    return l->latent ? "one latent vector per token" : "keys and values of heads";
}

static enum status check_heads(const struct kv_layout *mine, const struct kv_layout *theirs,
                               struct err *err)
{
    if (mine->latent != theirs->latent)
        return err_field(err, ERR_PEER_MISMATCH, "latent",
                         "the KV layouts differ: %s here and %s at the peer (another model)",
                         kind_name(mine), kind_name(theirs));
    return check_equal("model_kv_heads", mine->model_kv_heads, theirs->model_kv_heads,
                       " (another model)", err);
}

enum status kv_layout_same_model(const struct kv_layout *mine, const struct kv_layout *theirs,
                                 struct err *err)
{
    /* Shapes first: they say more than a fingerprint that differs because of them. */
    TRY(check_equal("n_layers", mine->n_layers - mine->n_draft_layers,
                    theirs->n_layers - theirs->n_draft_layers, " (another model)", err));
    TRY(check_heads(mine, theirs, err));
    TRY(check_equal("head_dim", mine->head_dim, theirs->head_dim, " (another model)", err));
    if (mine->model_fingerprint != theirs->model_fingerprint)
        return err_field(err, ERR_PEER_MISMATCH, "model_fingerprint",
                         "the models differ: fingerprint %016" PRIx64 " here and %016" PRIx64
                         " at the peer (other weights, or other kernels: compare --model, "
                         "--cpu-isa and the version of baton)",
                         mine->model_fingerprint, theirs->model_fingerprint);
    return OK;
}

uint32_t kv_layout_common_layers(const struct kv_layout *a, const struct kv_layout *b)
{
    return a->n_layers < b->n_layers ? a->n_layers : b->n_layers;
}

uint32_t kv_layout_common_heads(const struct kv_layout *a, const struct kv_layout *b,
                                uint32_t *first)
{
    /* below 2^13: kv_layout_check */
    uint32_t a_end = a->first_head + a->n_kv_heads, b_end = b->first_head + b->n_kv_heads;
    uint32_t begin = a->first_head > b->first_head ? a->first_head : b->first_head;
    uint32_t end = a_end < b_end ? a_end : b_end;
    *first = begin;
    return begin < end ? end - begin : 0;
}

void kv_layout_encode(const struct kv_layout *l, struct buf *out)
{
    buf_add_u64le(out, l->model_fingerprint);
    const uint32_t fields[N_FIELDS] = { l->dtype,      l->block_tokens,   l->n_layers,
                                        l->n_kv_heads, l->head_dim,       l->tp_size,
                                        l->tp_rank,    l->n_blocks,       l->latent,
                                        l->first_head, l->model_kv_heads, l->n_draft_layers };
    for (size_t i = 0; i < N_FIELDS; i++) buf_add_u32le(out, fields[i]);
}

uint64_t kv_layout_hash(const struct kv_layout *l)
{
    struct kv_layout one = *l;
    struct buf b = { 0 };
    one.n_blocks = 1;
    kv_layout_encode(&one, &b);
    const uint64_t h = hash_64(b.data, b.len, 0);
    buf_release(&b);
    return h;
}

static uint64_t read_le(const char *p, size_t n)
{
    uint64_t v = 0;
    for (size_t i = 0; i < n; i++) v |= (uint64_t)(unsigned char)p[i] << (8 * i);
    return v;
}

enum status kv_layout_decode(struct str in, struct kv_layout *out, struct err *err)
{
    if (in.n == FIRST_VERSION_BYTES || in.n == SECOND_VERSION_BYTES)
        return err_set(err, ERR_PEER_MISMATCH,
                       "the peer's KV layout is of version %d (%zu bytes), this node's of version "
                       "3 (%d bytes): run the same release on both",
                       in.n == FIRST_VERSION_BYTES ? 1 : 2, in.n, KV_LAYOUT_WIRE_BYTES);
    if (in.n != KV_LAYOUT_WIRE_BYTES)
        return err_set(err, ERR_FORMAT, "a KV layout has %d bytes, %zu came", KV_LAYOUT_WIRE_BYTES,
                       in.n);
    uint32_t f[N_FIELDS];
    for (size_t i = 0; i < N_FIELDS; i++) f[i] = (uint32_t)read_le(in.p + 8 + 4 * i, 4);
    struct kv_layout l = {
        .model_fingerprint = read_le(in.p, 8),
        .dtype = f[0],
        .block_tokens = f[1],
        .n_layers = f[2],
        .n_kv_heads = f[3],
        .head_dim = f[4],
        .tp_size = f[5],
        .tp_rank = f[6],
        .n_blocks = f[7],
        .latent = f[8],
        .first_head = f[9],
        .model_kv_heads = f[10],
        .n_draft_layers = f[11],
    };
    TRY(kv_layout_check(&l, err));
    *out = l;
    return OK;
}
