/* disk_format.c - see disk_format.h. Thread: any (values). */
#include "shared/kv/tier/disk/disk_format.h"

#include <inttypes.h>
#include <string.h>

#include "shared/base/arith.h"
#include "shared/base/assert.h"
#include "shared/kv/tier/block_copy.h"

enum { VERSION = 1, SUPERBLOCK_SUM_AT = DISK_SUPERBLOCK_BYTES - 8, HEADER_SUM_AT = 120 };
/* So many that they can be shared, of a size that is made soon; but each takes two file descriptors
 * of every process. */
enum { SEGMENTS_AT_LEAST = 16, SEGMENTS_MAX = 64, SEGMENT_MIB_MAX = 256 };

static const uint8_t SUPERBLOCK_MAGIC[8] = { 'B', 'A', 'T', 'O', 'N', 'K', 'V', '\n' };
static const uint32_t HEADER_MAGIC = 0x6c53764b; /* "KvSl" */

/* Fields one after another. */
struct field_writer {
    uint8_t *at;
};

static void put(struct field_writer *c, uint64_t v, size_t n)
{
    for (size_t i = 0; i < n; i++) *c->at++ = (uint8_t)(v >> (8 * i));
}

struct reader {
    const uint8_t *at;
};

static uint64_t take(struct reader *r, size_t n)
{
    uint64_t v = 0;
    for (size_t i = 0; i < n; i++) v |= (uint64_t)*r->at++ << (8 * i);
    return v;
}

uint64_t disk_header_offset(uint32_t slot)
{
    return DISK_SUPERBLOCK_BYTES + (uint64_t)slot * DISK_HEADER_BYTES;
}

uint64_t disk_data_begin(uint32_t n_slots)
{
    return round_up(disk_header_offset(n_slots), KV_SLOT_ALIGN);
}

uint64_t disk_file_bytes(const struct disk_superblock *s)
{
    return disk_data_begin(s->n_slots) + s->n_slots * s->slot_bytes;
}

uint32_t disk_segment_slots(uint64_t folder_bytes, uint64_t slot_bytes)
{
    const uint64_t head = disk_data_begin(1), most = (uint64_t)SEGMENT_MIB_MAX << 20,
                   least = folder_bytes / SEGMENTS_MAX;
    uint64_t bytes = folder_bytes / SEGMENTS_AT_LEAST;
    if (bytes > most) bytes = most;
    if (bytes < least) bytes = least;
    const uint64_t n = bytes > slot_bytes + head ? (bytes - head) / slot_bytes : 1;
    return n < DISK_SLOTS_MAX ? (uint32_t)n : DISK_SLOTS_MAX;
}

/* ---- the superblock ---- */

void disk_superblock_encode(const struct disk_superblock *s, uint8_t out[DISK_SUPERBLOCK_BYTES])
{
    struct buf layout = { 0 };
    struct field_writer c = { out + sizeof SUPERBLOCK_MAGIC };
    memset(out, 0, DISK_SUPERBLOCK_BYTES);
    memcpy(out, SUPERBLOCK_MAGIC, sizeof SUPERBLOCK_MAGIC);
    put(&c, VERSION, 4);
    put(&c, s->n_slots, 4);
    put(&c, s->id, 8);
    put(&c, s->slot_bytes, 8);
    kv_layout_encode(&s->layout, &layout);
    ASSERT(layout.len == KV_LAYOUT_WIRE_BYTES);
    memcpy(c.at, layout.data, layout.len);
    buf_release(&layout);
    c.at = out + SUPERBLOCK_SUM_AT;
    put(&c, hash_64(out, SUPERBLOCK_SUM_AT, 0), 8);
}

/* Sizes that would be used to find bytes in the file. */
static enum status check_sizes(const struct disk_superblock *s, struct err *err)
{
    if (s->n_slots < 1 || s->n_slots > DISK_SLOTS_MAX)
        return err_set(err, ERR_FORMAT, "a segment of %" PRIu32 " slots", s->n_slots);
    if (s->layout.n_blocks != 1 || s->slot_bytes != kv_slot_bytes(&s->layout))
        return err_set(err, ERR_FORMAT, "slots of %" PRIu64 " bytes do not fit the KV layout",
                       s->slot_bytes);
    if (s->slot_bytes > (uint64_t)INT64_MAX / (s->n_slots + 1u))
        return err_set(err, ERR_FORMAT, "a segment that is larger than any file");
    return OK;
}

enum status disk_superblock_decode(struct str in, struct disk_superblock *out, struct err *err)
{
    if (in.n != DISK_SUPERBLOCK_BYTES)
        return err_set(err, ERR_FORMAT, "a superblock has %d bytes, %zu came",
                       DISK_SUPERBLOCK_BYTES, in.n);
    const uint8_t *p = (const uint8_t *)in.p;
    struct reader r = { p + SUPERBLOCK_SUM_AT };
    if (memcmp(p, SUPERBLOCK_MAGIC, sizeof SUPERBLOCK_MAGIC) != 0)
        return err_set(err, ERR_FORMAT, "it does not begin as a segment does");
    if (take(&r, 8) != hash_64(p, SUPERBLOCK_SUM_AT, 0))
        return err_set(err, ERR_FORMAT, "the superblock's checksum is wrong");
    r.at = p + sizeof SUPERBLOCK_MAGIC;
    const uint32_t version = (uint32_t)take(&r, 4);
    if (version != VERSION)
        return err_set(err, ERR_PEER_MISMATCH, "a segment of version %" PRIu32 ", not %d", version,
                       VERSION);
    struct disk_superblock s = { .n_slots = (uint32_t)take(&r, 4) };
    s.id = take(&r, 8);
    s.slot_bytes = take(&r, 8);
    TRY(kv_layout_decode((struct str){ (const char *)r.at, KV_LAYOUT_WIRE_BYTES }, &s.layout, err));
    TRY(check_sizes(&s, err));
    uint8_t again[DISK_SUPERBLOCK_BYTES];
    disk_superblock_encode(&s, again);
    if (memcmp(again, p, sizeof again) != 0)
        return err_set(err, ERR_FORMAT, "the superblock has more in it than this version knows");
    *out = s;
    return OK;
}

/* ---- headers ---- */

static void put_hash(struct field_writer *c, struct hash128 h)
{
    put(c, h.lo, 8);
    put(c, h.hi, 8);
}

static struct hash128 take_hash(struct reader *r)
{
    const uint64_t lo = take(r, 8);
    return (struct hash128){ .lo = lo, .hi = take(r, 8) };
}

void disk_header_encode(const struct disk_header *h, uint8_t out[DISK_HEADER_BYTES])
{
    struct field_writer c = { out };
    memset(out, 0, DISK_HEADER_BYTES);
    put(&c, HEADER_MAGIC, 4);
    put(&c, VERSION, 4);
    put_hash(&c, h->block.key);
    put_hash(&c, h->block.parent);
    put(&c, h->block.depth, 8);
    put(&c, h->layout_hash, 8);
    put(&c, h->used_bytes, 8);
    put(&c, h->checksum, 8);
    put(&c, h->generation, 8);
    put(&c, h->written_s, 8);
    c.at = out + HEADER_SUM_AT;
    put(&c, hash_64(out, HEADER_SUM_AT, 0), 8);
}

static bool is_empty(const uint8_t *p)
{
    uint8_t any = 0;
    for (size_t i = 0; i < DISK_HEADER_BYTES; i++) any |= p[i];
    return any == 0;
}

enum status disk_header_decode(const struct disk_superblock *s, struct str in,
                               struct disk_header *out)
{
    if (in.n != DISK_HEADER_BYTES) return ERR_FORMAT;
    const uint8_t *p = (const uint8_t *)in.p;
    if (is_empty(p)) return ERR_NOT_FOUND;
    struct reader r = { p + HEADER_SUM_AT };
    if (take(&r, 8) != hash_64(p, HEADER_SUM_AT, 0)) return ERR_FORMAT;
    r.at = p;
    const bool is_header = take(&r, 4) == HEADER_MAGIC && take(&r, 4) == VERSION;
    struct disk_header h = { .block.key = take_hash(&r) };
    h.block.parent = take_hash(&r);
    const uint64_t depth = take(&r, 8);
    h.layout_hash = take(&r, 8);
    h.used_bytes = take(&r, 8);
    h.checksum = take(&r, 8);
    h.generation = take(&r, 8);
    h.written_s = take(&r, 8);
    if (!is_header || depth > UINT32_MAX || h.layout_hash != kv_layout_hash(&s->layout) ||
        h.used_bytes != kv_slot_used_bytes(&s->layout))
        return ERR_FORMAT;
    h.block.depth = (uint32_t)depth;
    uint8_t again[DISK_HEADER_BYTES];
    disk_header_encode(&h, again);
    if (memcmp(again, p, sizeof again) != 0) return ERR_FORMAT;
    *out = h;
    return OK;
}
