/* staging.c - allocates runs of chunks by first fit; see staging.h. There are about a hundred
 * chunks, so looking at all of them is cheap. */
#include "kvtransfer/staging.h"

#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/mem.h"

struct kvt_staging {
    struct device *device;
    bool own_device;
    struct dev_mem mem, device_mem; /* device_mem.ptr == NULL: host memory only */
    uint32_t n, n_free;
    bool *in_use; /* by chunk */
};

enum status kvt_staging_create(struct device *device, uint64_t bytes, struct kvt_staging **out,
                               struct err *err)
{
    struct kvt_staging *s = MEM_NEW(struct kvt_staging);
    s->mem.fd = s->device_mem.fd = -1;
    s->n = s->n_free = (uint32_t)((bytes + KVT_STAGING_CHUNK - 1) / KVT_STAGING_CHUNK);
    s->in_use = MEM_ARRAY(bool, s->n);
    s->device = device;
    s->own_device = !device;
    enum status st = device ? OK : device_open("cpu", &s->device, err);
    if (st == OK)
        st = device_mem_alloc(s->device, (size_t)s->n * KVT_STAGING_CHUNK,
                              device ? DEVICE_MEM_HOST : DEVICE_MEM_SHARED, &s->mem, err);
    if (st != OK) {
        kvt_staging_free(s);
        return st;
    }
    *out = s;
    return OK;
}

enum status kvt_staging_add_device(struct kvt_staging *s, struct err *err)
{
    ASSERT(!s->own_device);
    return device_mem_alloc(s->device, (size_t)s->n * KVT_STAGING_CHUNK, DEVICE_MEM_PRIVATE,
                            &s->device_mem, err);
}

void kvt_staging_free(struct kvt_staging *s)
{
    if (!s) return;
    if (s->device) device_mem_free(s->device, &s->mem);
    if (s->device) device_mem_free(s->device, &s->device_mem);
    if (s->own_device) device_close(s->device);
    mem_free(s->in_use);
    mem_free(s);
}

const struct dev_mem *kvt_staging_mem(const struct kvt_staging *s) { return &s->mem; }

const struct dev_mem *kvt_staging_device_mem(const struct kvt_staging *s)
{
    return s->device_mem.ptr ? &s->device_mem : NULL;
}

uint64_t kvt_staging_piece_max(const struct kvt_staging *s)
{
    return s ? (uint64_t)s->n * KVT_STAGING_CHUNK / 4 : 0;
}

/* The first run of n free chunks, or s->n. */
static uint32_t find_free_chunks(const struct kvt_staging *s, uint32_t n)
{
    uint32_t length = 0;
    for (uint32_t i = 0; i < s->n; i++) {
        length = s->in_use[i] ? 0 : length + 1;
        if (length == n) return i + 1 - n;
    }
    return s->n;
}

bool kvt_staging_acquire(struct kvt_staging *s, uint64_t bytes, bool least, uint32_t *held,
                         struct kvt_stage *out)
{
    uint64_t n = (bytes + KVT_STAGING_CHUNK - 1) / KVT_STAGING_CHUNK;
    if (n == 0 || n > s->n_free) return false;
    if (*held + n > s->n_free - n && !(least && *held == 0)) return false;
    uint32_t first = find_free_chunks(s, (uint32_t)n);
    if (first == s->n) return false;
    *out = (struct kvt_stage){ first, (uint32_t)n };
    memset(s->in_use + first, true, n);
    s->n_free -= out->n;
    *held += out->n;
    return true;
}

void kvt_staging_release(struct kvt_staging *s, uint32_t *held, struct kvt_stage *stage)
{
    if (stage->n == 0) return;
    for (uint32_t i = stage->first; i < stage->first + stage->n; i++) ASSERT(s->in_use[i]);
    memset(s->in_use + stage->first, false, stage->n);
    s->n_free += stage->n;
    *held -= stage->n;
    stage->n = 0;
}

uint64_t kvt_staging_offset(struct kvt_stage stage)
{
    return (uint64_t)stage.first * KVT_STAGING_CHUNK;
}

void *kvt_staging_at(const struct kvt_staging *s, struct kvt_stage stage)
{
    return (char *)s->mem.ptr + kvt_staging_offset(stage);
}

void *kvt_staging_device_at(const struct kvt_staging *s, struct kvt_stage stage)
{
    return (char *)s->device_mem.ptr + kvt_staging_offset(stage);
}
