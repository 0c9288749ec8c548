/* copy.h - copies KV bytes that this process will not read again, and computes their checksums on
 * the way: memcpy and hash_64 as the definition, and implementations with non-temporal stores.
 *
 * A plain store reads the line that it overwrites and evicts other lines; a non-temporal store does
 * neither. The receiver then verifies from memory instead of a shared cache, which is still faster
 * (docs/performance.md). A hash of its own would read every byte again, so it is computed from the
 * same lines while they are copied; and scattered pieces begin with lines that nobody fetches ahead
 * of time, so those of the next piece are fetched meanwhile.
 *
 * Every implementation copies the same bytes and computes the same sums for any alignment and
 * length (tests/unit/kvtransfer/test_copier.c), and its stores are ordered before everything that
 * the caller does afterwards (non-temporal ones end with a store fence, one for all pieces).
 * Thread: any (no state). */
#ifndef BATON_KVTRANSFER_LOCAL_COPY_H
#define BATON_KVTRANSFER_LOCAL_COPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes that are contiguous on both sides; the ranges do not overlap. */
struct copy_run {
    char *to;
    const char *from;
    size_t n;
};

struct copy_impl {
    const char *name;
    bool (*runs_here)(void); /* whether this CPU supports it */
    void (*copy)(const struct copy_run *runs, size_t n_runs);
    /* The same, and sums[i] = hash_64(runs[i].from, runs[i].n, 0). */
    void (*copy_and_hash)(const struct copy_run *runs, size_t n_runs, uint64_t *sums);
};

extern const struct copy_impl copy_plain, copy_avx2, copy_avx512; /* the last two on x86-64 only */
/* Every implementation of this build, the preferred first; NULL ends. copy_plain is the last. */
extern const struct copy_impl *const copy_impls[];

/* The first implementation that this CPU supports. */
const struct copy_impl *copy_choose(void);

#endif
