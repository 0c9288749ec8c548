/* fuzz_kv_disk.c - a segment of the disk tier with any contents: superblock and headers are read
 * without a fault, and what is accepted is written back as the same bytes.
 *
 * The checksums are set right first, so that what is behind them is reached. */
#include <stdlib.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/hash/hash.h"
#include "shared/kv/tier/disk/disk_format.h"

enum { SUM_BYTES = 8 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The last SUM_BYTES of n. */
static void set_checksum(uint8_t *p, size_t n)
{
    const uint64_t sum = hash_64(p, n - SUM_BYTES, 0);
    memcpy(p + n - SUM_BYTES, &sum, SUM_BYTES);
}

static void try_header(const struct disk_superblock *s, const uint8_t *data)
{
    struct disk_header h;
    uint8_t bytes[DISK_HEADER_BYTES], again[DISK_HEADER_BYTES];
    const struct str in = { (const char *)bytes, sizeof bytes };
    memcpy(bytes, data, sizeof bytes);
    (void)!disk_header_decode(s, in, &h);
    set_checksum(bytes, sizeof bytes);
    if (disk_header_decode(s, in, &h) != OK) return;
    disk_header_encode(&h, again);
    ASSERT(memcmp(again, bytes, sizeof again) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct disk_superblock s;
    struct err err;
    uint8_t bytes[DISK_SUPERBLOCK_BYTES], again[DISK_SUPERBLOCK_BYTES];
    (void)!disk_superblock_decode((struct str){ (const char *)data, size }, &s, &err);
    if (size < sizeof bytes) return 0;
    memcpy(bytes, data, sizeof bytes);
    set_checksum(bytes, sizeof bytes);
    if (disk_superblock_decode((struct str){ (const char *)bytes, sizeof bytes }, &s, &err) != OK)
        return 0;
    ASSERT(disk_file_bytes(&s) > disk_data_begin(s.n_slots));
    disk_superblock_encode(&s, again);
    ASSERT(memcmp(again, bytes, sizeof again) == 0);
    for (size_t at = sizeof bytes; size - at >= DISK_HEADER_BYTES; at += DISK_HEADER_BYTES)
        try_header(&s, data + at);
    return 0;
}
