/* copy.h - copying KV bytes that this process will not read again: memcpy as the definition, and
 * rows with non-temporal stores.
 *
 * A plain store reads the line it is about to overwrite and pushes what was in the cache out; a
 * non-temporal one does neither, which wins for long runs. The receiver verifies from memory then,
 * not from a shared cache: measured, that still wins (docs/performance.md). Every row copies the
 * same bytes for any alignment and length (tests/unit/kvtransfer/test_copier.c), and its stores are
 * ordered before everything the caller does afterwards (the non-temporal rows end with a store
 * fence). Thread: any (no state). */
#ifndef BATON_KVTRANSFER_LOCAL_COPY_H
#define BATON_KVTRANSFER_LOCAL_COPY_H

#include <stdbool.h>
#include <stddef.h>

struct copy_impl {
    const char *name;
    bool (*runs_here)(void);                            /* the CPU has what it needs */
    size_t from_bytes;                                  /* shorter copies go to memcpy */
    void (*copy)(void *to, const void *from, size_t n); /* ranges do not overlap */
};

extern const struct copy_impl copy_plain, copy_avx2, copy_avx512; /* the last two on x86-64 only */
/* Every row of this build, the preferred first; NULL ends. copy_plain is the last. */
extern const struct copy_impl *const copy_impls[];

/* The first row that runs here. */
const struct copy_impl *copy_choose(void);

static inline void copy_bytes(const struct copy_impl *impl, void *to, const void *from, size_t n)
{
    if (n < impl->from_bytes) copy_plain.copy(to, from, n);
    else impl->copy(to, from, n);
}

#endif
