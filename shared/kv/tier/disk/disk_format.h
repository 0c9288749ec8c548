/* disk_format.h - what lies where in a segment, a file of the disk tier: all little endian.
 *
 *     0            superblock: DISK_SUPERBLOCK_BYTES
 *     4096         headers of all slots: DISK_HEADER_BYTES each
 *     data_begin   slots of slot_bytes, as block_copy.h makes them
 *
 * A slot's header is emptied before its bytes are written and written after them, so that a writer
 * that is killed leaves an empty slot. A header or superblock that is torn or foreign fails its own
 * checksum; bytes that do not belong to their header fail the block's. Whatever a file holds, it is
 * read as slots that can be used or as slots that cannot.
 * Thread: any (values). */
#ifndef BATON_KV_TIER_DISK_DISK_FORMAT_H
#define BATON_KV_TIER_DISK_DISK_FORMAT_H

#include "shared/base/err.h"
#include "shared/base/str.h"
#include "shared/kv/kv_layout.h"
#include "shared/kv/tier/tier_index.h"

enum { DISK_SUPERBLOCK_BYTES = 4096, DISK_HEADER_BYTES = 128, DISK_SLOTS_MAX = 1 << 20 };

struct disk_superblock {
    uint64_t id;             /* random */
    struct kv_layout layout; /* of its slots (kv_slot_layout) */
    uint64_t slot_bytes;
    uint32_t n_slots;
};

struct disk_header {
    struct tier_block block;
    uint64_t layout_hash; /* kv_layout_hash of the superblock's */
    uint64_t used_bytes;  /* of the slot */
    uint64_t checksum;    /* kv_slot_checksum */
    uint64_t generation;  /* of this slot's contents: grows */
    uint64_t written_s;   /* wall clock: how old it is, roughly, after a restart */
};

/* Offset of the first slot, and bytes of the whole file. */
uint64_t disk_data_begin(uint32_t n_slots);
uint64_t disk_file_bytes(const struct disk_superblock *s);
uint64_t disk_header_offset(uint32_t slot);
/* Slots of the segments that are made for a folder with so much room. */
uint32_t disk_segment_slots(uint64_t folder_bytes, uint64_t slot_bytes);

void disk_superblock_encode(const struct disk_superblock *s, uint8_t out[DISK_SUPERBLOCK_BYTES]);
/* ERR_FORMAT: not a superblock, or one with sizes that do not fit together. ERR_PEER_MISMATCH: of
 * another version. */
enum status disk_superblock_decode(struct str in, struct disk_superblock *out,
                                   struct err *err) MUST_CHECK;
void disk_header_encode(const struct disk_header *h, uint8_t out[DISK_HEADER_BYTES]);
/* ERR_NOT_FOUND: empty. ERR_FORMAT: torn, or of another layout than `s` has. */
enum status disk_header_decode(const struct disk_superblock *s, struct str in,
                               struct disk_header *out) MUST_CHECK;

#endif
