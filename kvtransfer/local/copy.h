/* copy.h - copies KV bytes that this process will not read again: memcpy as the definition, and
 * implementations with non-temporal stores.
 *
 * A plain store reads the line that it overwrites and evicts other lines; a non-temporal store does
 * neither, which is faster for long copies. The receiver then verifies from memory instead of a
 * shared cache, which is still faster (docs/performance.md). Every implementation copies the same
 * bytes for any alignment and length (tests/unit/kvtransfer/test_copier.c), and its stores are
 * ordered before everything that the caller does afterwards (non-temporal ones end with a store
 * fence).
 * Thread: any (no state). */
#ifndef BATON_KVTRANSFER_LOCAL_COPY_H
#define BATON_KVTRANSFER_LOCAL_COPY_H

#include <stdbool.h>
#include <stddef.h>

struct copy_impl {
    const char *name;
    bool (*runs_here)(void);                            /* whether this CPU supports it */
    size_t from_bytes;                                  /* shorter copies go to memcpy */
    void (*copy)(void *to, const void *from, size_t n); /* ranges do not overlap */
};

extern const struct copy_impl copy_plain, copy_avx2, copy_avx512; /* the last two on x86-64 only */
/* Every implementation of this build, the preferred first; NULL ends. copy_plain is the last. */
extern const struct copy_impl *const copy_impls[];

/* The first implementation that this CPU supports. */
const struct copy_impl *copy_choose(void);

static inline void copy_bytes(const struct copy_impl *impl, void *to, const void *from, size_t n)
{
    if (n < impl->from_bytes) copy_plain.copy(to, from, n);
    else impl->copy(to, from, n);
}

#endif
