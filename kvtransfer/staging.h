/* staging.h - memory in which pieces for peers of another layout are made, and from which rows put
 * them (transport.h, KVT_STAGING).
 *
 * Pieces of a pool in a card's memory are brought here for rows that read the processor's, and what
 * such rows receive lands here first. The card makes those of another layout in as much memory of
 * its own, the card's side, chunk for chunk under the same numbers; from there they are brought
 * here or put. One allocation for the life of a kvt, so that rows can register it once; its pages
 * are not backed before somebody needs them. It is given out in chunks, as runs of neighbouring
 * ones: a put's bytes lie one after the other. A peer may hold no more than what is left free after
 * it (dynamic thresholds as in shared-memory switches, Choudhury and Hahne 1998): one that does not
 * drain takes half, the next half of the rest, and there is always something for the others. Full
 * means wait: puts that end give theirs back. Thread: transfer; create and free: the owner's. */
#ifndef BATON_KVTRANSFER_STAGING_H
#define BATON_KVTRANSFER_STAGING_H

#include <stdbool.h>

#include "kernels/device.h"

enum { KVT_STAGING_CHUNK = 64 * 1024, KVT_STAGING_BYTES = 8 << 20 };

struct kvt_staging;

struct kvt_stage {
    uint32_t first, n; /* chunks; n == 0: none */
};

/* `bytes` are rounded up to chunks. Memory that `device` reaches (DEVICE_MEM_HOST), backed at once;
 * NULL: the processor's alone. ERR_NOMEM. */
enum status kvt_staging_create(struct device *device, uint64_t bytes, struct kvt_staging **out,
                               struct err *err) MUST_CHECK;
/* Have a card's side too: as much of the device's memory. ERR_NOMEM. */
enum status kvt_staging_add_device(struct kvt_staging *s, struct err *err) MUST_CHECK;
void kvt_staging_free(struct kvt_staging *s);
/* NULL: there is none. */
const struct dev_mem *kvt_staging_device_mem(const struct kvt_staging *s);
const struct dev_mem *kvt_staging_mem(const struct kvt_staging *s);
/* The largest piece it is for: a quarter, so that several peers find room. */
uint64_t kvt_staging_piece_max(const struct kvt_staging *s);
/* Room for `bytes`; *held counts the peer's chunks. False: wait until something was given back.
 * `least`: less than this the peer cannot use, so one that holds nothing gets it beyond its share
 * too. LIMIT: about log2(memory / piece) peers that do not drain leave nothing for one more until
 * their transfers' stall deadline. */
bool kvt_staging_acquire(struct kvt_staging *s, uint64_t bytes, bool least, uint32_t *held,
                         struct kvt_stage *out);
/* Give back; none is fine. */
void kvt_staging_release(struct kvt_staging *s, uint32_t *held, struct kvt_stage *stage);
/* Offset of the stage's first byte in the memory, and its address. */
uint64_t kvt_staging_offset(struct kvt_stage stage);
void *kvt_staging_at(const struct kvt_staging *s, struct kvt_stage stage);
/* on the card's side */
void *kvt_staging_device_at(const struct kvt_staging *s, struct kvt_stage stage);
uint32_t kvt_staging_n_free(const struct kvt_staging *s); /* chunks */

#endif
