/* block_copy.h - copies a KV block between the pool and a slot: contiguous bytes of host memory.
 *
 * A slot has the block's pieces of all layers one after the other, laid out as the pool's pieces
 * are, or, for a tier that quantises, as those of a pool of another element type. It begins on a
 * multiple of KV_SLOT_ALIGN and takes a multiple of it, so that it can be written to a disk as it
 * is. Its checksum is XXH3 (hash_64) over the checksums of its pieces, which are kvtransfer's. It
 * is made from the slot's bytes when the block is saved and compared before they are used again.
 *
 * A pool in GPU memory is copied by the device (kernels/copy_stream.h); every call returns when the
 * copy is complete. The block must not change meanwhile: a full block that is held does not.
 * Thread: its owner's. Each thread that copies has one of its own. */
#ifndef BATON_KV_TIER_BLOCK_COPY_H
#define BATON_KV_TIER_BLOCK_COPY_H

#include "kernels/device.h"
#include "shared/kv/kv_layout.h"

enum { KV_SLOT_ALIGN = 4096 };

struct block_copy;

struct block_copy_options {
    struct kv_layout pool_layout;
    enum dtype slot_dtype; /* the pool's, or one that values are rounded to */
    struct device *device; /* the pool's; borrowed */
    void *pool;            /* borrowed */
};

/* The layout of a slot's pieces, as a pool of one block. ERR_UNSUPPORTED: latents, which are held
 * as they were computed. */
enum status kv_slot_layout(const struct kv_layout *pool, enum dtype slot_dtype,
                           struct kv_layout *out, struct err *err) MUST_CHECK;
/* Bytes that the pieces take; of a slot, with what rounds it up. */
size_t kv_slot_used_bytes(const struct kv_layout *slot);
size_t kv_slot_bytes(const struct kv_layout *slot);
uint64_t kv_slot_checksum(const struct kv_layout *slot, const void *bytes);
/* The same; of_layers [n_layers] gets the checksums of the pieces. */
uint64_t kv_slot_checksums(const struct kv_layout *slot, const void *bytes, uint64_t *of_layers);

enum status block_copy_create(const struct block_copy_options *o, struct block_copy **out,
                              struct err *err) MUST_CHECK;
void block_copy_free(struct block_copy *c);
const struct kv_layout *block_copy_slot_layout(const struct block_copy *c);
/* Saves a block of the pool to a slot. Its checksum is still to be made. ERR_NODEV: the device has
 * failed. */
enum status block_copy_save(struct block_copy *c, int32_t block, void *slot) MUST_CHECK;
/* Loads a slot into a block of the pool, whose checksum has been compared. */
enum status block_copy_load(struct block_copy *c, const void *slot, int32_t block) MUST_CHECK;

/* A piece of a slot, and the block that it goes to. */
struct block_copy_piece {
    const void *slot;
    int32_t block;
};
/* Can single layers be loaded? Not where values are converted. */
bool block_copy_has_layers(const struct block_copy *c);
/* Loads one layer of n slots. */
enum status block_copy_load_layer(struct block_copy *c, uint32_t layer,
                                  const struct block_copy_piece *pieces, uint32_t n) MUST_CHECK;

#endif
