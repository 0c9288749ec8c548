/* block_copy.c - see block_copy.h. Thread: its owner's. */
#include "shared/kv/tier/block_copy.h"

#include <string.h>

#include "kernels/copy_stream.h"
#include "shared/base/arith.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

enum { SUMS_AT_ONCE = 64 };

struct block_copy {
    struct kv_layout pool_layout, slot;
    struct device *device;
    char *pool;
    struct copy_stream *stream;
    struct dev_mem staging;             /* a slot in the device's memory, to convert from */
    struct copy_stream_kv_rows *pieces; /* [n_layers], with a conversion; NULL: none */
};

enum status kv_slot_layout(const struct kv_layout *pool, enum dtype slot_dtype,
                           struct kv_layout *out, struct err *err)
{
    if (pool->latent && slot_dtype != (enum dtype)pool->dtype)
        return err_field(err, ERR_UNSUPPORTED, "kv-cache-tier-dtype",
                         "--kv-cache-tier-dtype %s: KV of latent attention (MLA) is kept as %s "
                         "alone; leave the option out",
                         kv_dtype_name((uint32_t)slot_dtype), kv_dtype_name(pool->dtype));
    struct kv_layout l = *pool;
    l.dtype = (uint32_t)slot_dtype;
    l.n_blocks = 1;
    TRY(kv_layout_check(&l, err));
    *out = l;
    return OK;
}

size_t kv_slot_used_bytes(const struct kv_layout *slot) { return kv_layout_block_bytes(slot); }

size_t kv_slot_bytes(const struct kv_layout *slot)
{
    return round_up(kv_slot_used_bytes(slot), KV_SLOT_ALIGN);
}

static uint64_t sum_up(const struct kv_layout *slot, const void *bytes, uint64_t *of_layers)
{
    const size_t piece = kv_layout_piece_bytes(slot);
    const void *at[SUMS_AT_ONCE];
    uint64_t sums[SUMS_AT_ONCE + 1] = { 0 }; /* the first: of all before */
    for (uint32_t layer = 0; layer < slot->n_layers;) {
        const uint32_t n = (uint32_t)min_size(slot->n_layers - layer, SUMS_AT_ONCE);
        for (uint32_t i = 0; i < n; i++) at[i] = (const char *)bytes + (layer + i) * piece;
        hash_64_each(at, n, piece, sums + 1);
        if (of_layers) memcpy(of_layers + layer, sums + 1, n * sizeof *sums);
        sums[0] = hash_64(sums, (n + 1) * sizeof *sums, 0);
        layer += n;
    }
    return sums[0];
}

uint64_t kv_slot_checksum(const struct kv_layout *slot, const void *bytes)
{
    return sum_up(slot, bytes, NULL);
}

uint64_t kv_slot_checksums(const struct kv_layout *slot, const void *bytes, uint64_t *of_layers)
{
    return sum_up(slot, bytes, of_layers);
}

/* ---- life ---- */

static enum status prepare_conversion(struct block_copy *c, struct err *err)
{
    if (c->slot.dtype == c->pool_layout.dtype) return OK;
    c->pieces = MEM_ARRAY(struct copy_stream_kv_rows, c->slot.n_layers);
    if (c->device->is_host) return OK;
    return device_mem_alloc(c->device, kv_slot_bytes(&c->slot), DEVICE_MEM_PRIVATE, &c->staging,
                            err);
}

enum status block_copy_create(const struct block_copy_options *o, struct block_copy **out,
                              struct err *err)
{
    struct block_copy *c = MEM_NEW(struct block_copy);
    c->pool_layout = o->pool_layout;
    c->device = o->device;
    c->pool = o->pool;
    enum status st = kv_slot_layout(&o->pool_layout, o->slot_dtype, &c->slot, err);
    if (st == OK) st = device_copy_stream(o->device, &c->stream, err);
    if (st == OK) st = prepare_conversion(c, err);
    if (st != OK) {
        block_copy_free(c);
        return st;
    }
    *out = c;
    return OK;
}

void block_copy_free(struct block_copy *c)
{
    if (!c) return;
    if (c->stream) copy_stream_close(c->stream);
    if (c->staging.ptr) device_mem_free(c->device, &c->staging);
    mem_free(c->pieces);
    mem_free(c);
}

const struct kv_layout *block_copy_slot_layout(const struct block_copy *c) { return &c->slot; }

/* ---- copies ---- */

static char *piece_of(const struct block_copy *c, uint32_t layer, int32_t block)
{
    return c->pool + kv_layout_offset(&c->pool_layout, layer, (uint32_t)block);
}

/* Between a block and a slot of the same type. */
static struct copy_stream_strided pieces_between(const struct block_copy *c, int32_t block)
{
    const size_t piece = kv_layout_piece_bytes(&c->slot);
    return (struct copy_stream_strided){ .to_stride = piece * c->pool_layout.n_blocks,
                                         .from_stride = piece,
                                         .bytes = piece,
                                         .n = c->slot.n_layers,
                                         .to = piece_of(c, 0, block) };
}

/* Converts the pieces of a block to those of a slot, or back. */
static enum status convert(struct block_copy *c, int32_t block, void *slot, bool to_slot)
{
    const struct kv_layout *in_pool = &c->pool_layout, *in_slot = &c->slot;
    const size_t piece = kv_layout_piece_bytes(in_slot);
    for (uint32_t layer = 0; layer < in_slot->n_layers; layer++) {
        char *a = piece_of(c, layer, block), *b = (char *)slot + layer * piece,
             *a_scales = a + kv_layout_scale_offset(in_pool),
             *b_scales = b + kv_layout_scale_offset(in_slot);
        c->pieces[layer] = (struct copy_stream_kv_rows){
            .to = to_slot ? b : a,
            .to_scales = to_slot ? b_scales : a_scales,
            .from = to_slot ? a : b,
            .from_scales = to_slot ? a_scales : b_scales,
            .n = kv_layout_n_segments(in_slot) * in_slot->block_tokens,
            .n_groups = 1,
        };
    }
    const struct copy_stream_conversion conversion = {
        .from = (enum dtype)(to_slot ? in_pool->dtype : in_slot->dtype),
        .to = (enum dtype)(to_slot ? in_slot->dtype : in_pool->dtype),
        .width = in_slot->head_dim,
        .n = in_slot->n_layers,
        .rows = c->pieces,
    };
    return copy_stream_convert(c->stream, &conversion);
}

enum status block_copy_save(struct block_copy *c, int32_t block, void *slot)
{
    if (c->pieces) {
        TRY(convert(c, block, slot, true));
    } else {
        struct copy_stream_strided s = pieces_between(c, block);
        s.from = s.to;
        s.from_stride = s.to_stride;
        s.to = slot;
        s.to_stride = s.bytes;
        TRY(copy_stream_copy(c->stream, &s));
    }
    return copy_stream_synchronize(c->stream);
}

/* A device converts from its own memory only. */
static enum status stage(struct block_copy *c, const void **slot)
{
    if (!c->staging.ptr) return OK;
    const struct copy_stream_strided s = {
        .to = c->staging.ptr, .from = *slot, .bytes = kv_slot_used_bytes(&c->slot), .n = 1
    };
    TRY(copy_stream_copy(c->stream, &s));
    *slot = c->staging.ptr;
    return OK;
}

enum status block_copy_load(struct block_copy *c, const void *slot, int32_t block)
{
    if (c->pieces) {
        TRY(stage(c, &slot));
        TRY(convert(c, block, (void *)(uintptr_t)slot, false));
    } else {
        struct copy_stream_strided s = pieces_between(c, block);
        s.from = slot;
        TRY(copy_stream_copy(c->stream, &s));
    }
    return copy_stream_synchronize(c->stream);
}

bool block_copy_has_layers(const struct block_copy *c) { return c->pieces == NULL; }

enum status block_copy_load_layer(struct block_copy *c, uint32_t layer,
                                  const struct block_copy_piece *pieces, uint32_t n)
{
    const size_t bytes = kv_layout_piece_bytes(&c->slot);
    for (uint32_t i = 0; i < n; i++) {
        const struct copy_stream_strided s = { .to = piece_of(c, layer, pieces[i].block),
                                               .from = (const char *)pieces[i].slot + layer * bytes,
                                               .bytes = bytes,
                                               .n = 1 };
        TRY(copy_stream_copy(c->stream, &s));
    }
    return copy_stream_synchronize(c->stream);
}
