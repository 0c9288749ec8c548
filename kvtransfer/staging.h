/* staging.h - staging memory: pieces for peers of another layout are converted here, and transports
 * put from it (transport.h, KVT_STAGING).
 *
 * For a pool in GPU memory, pieces are copied here for transports that read host memory, and
 * received pieces arrive here first. The GPU converts in device memory of the same size, chunk for
 * chunk under the same numbers. One allocation lives as long as the kvt, so that transports
 * register it once; its pages are backed when they are first used. A stage is a run of neighbouring
 * chunks, so that the bytes of a put are contiguous. A peer may hold at most as much as is left
 * free after it (dynamic thresholds as in shared-memory switches, Choudhury and Hahne 1998), so one
 * that does not drain cannot starve the others. When it is full, sessions wait until a put
 * completes.
 * Thread: transfer; create and free: the owner's. */
#ifndef BATON_KVTRANSFER_STAGING_H
#define BATON_KVTRANSFER_STAGING_H

#include <stdbool.h>

#include "kernels/device.h"

enum { KVT_STAGING_CHUNK = 64 * 1024, KVT_STAGING_BYTES = 8 << 20 };

struct kvt_staging;

struct kvt_stage {
    uint32_t first, n; /* chunks; n == 0: none */
};

/* `bytes` is rounded up to chunks. With `device`: memory that it can access (DEVICE_MEM_HOST),
 * backed at once; NULL: plain host memory. ERR_NOMEM. */
enum status kvt_staging_create(struct device *device, uint64_t bytes, struct kvt_staging **out,
                               struct err *err) MUST_CHECK;
/* Adds as much device memory, for pieces that the GPU converts. ERR_NOMEM. */
enum status kvt_staging_add_device(struct kvt_staging *s, struct err *err) MUST_CHECK;
void kvt_staging_free(struct kvt_staging *s);
/* NULL without kvt_staging_add_device. */
const struct dev_mem *kvt_staging_device_mem(const struct kvt_staging *s);
const struct dev_mem *kvt_staging_mem(const struct kvt_staging *s);
/* The largest piece that is accepted: a quarter of the memory, so that several peers fit. */
uint64_t kvt_staging_piece_max(const struct kvt_staging *s);
/* Acquires chunks for `bytes`; *held counts the peer's chunks. False: wait until a stage is
 * released. `least`: the peer cannot use less than this, so one that holds nothing may exceed its
 * share. LIMIT: about log2(memory / piece) peers that do not drain leave nothing for one more until
 * the stall deadline of their transfers. */
bool kvt_staging_acquire(struct kvt_staging *s, uint64_t bytes, bool least, uint32_t *held,
                         struct kvt_stage *out);
/* Releases a stage; one with n == 0 is fine. */
void kvt_staging_release(struct kvt_staging *s, uint32_t *held, struct kvt_stage *stage);
/* Offset of the stage's first byte in the staging memory, and its address. */
uint64_t kvt_staging_offset(struct kvt_stage stage);
void *kvt_staging_at(const struct kvt_staging *s, struct kvt_stage stage);
/* Its address in the device's half. */
void *kvt_staging_device_at(const struct kvt_staging *s, struct kvt_stage stage);

#endif
