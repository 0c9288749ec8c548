/* copy_and_hash.h - the body of copy.h's implementations with non-temporal stores: one pass over
 * the runs that copies them, hashes them and fetches ahead. copy_avx2.c and copy_avx512.c each
 * compile it with their own stores and the vector code of XXH3 for the same instruction set.
 *
 * The CPU reads ahead by itself within a page, once it has seen a few lines of it. So the first
 * lines of what follows are fetched a page before they are needed, and short runs are copied side
 * by side, block by block in turns, so that it reads ahead in several of them.
 * Thread: any. */
#ifndef BATON_KVTRANSFER_LOCAL_COPY_AND_HASH_H
#define BATON_KVTRANSFER_LOCAL_COPY_AND_HASH_H

#include <string.h>

#include "kvtransfer/local/copy.h"
#include "shared/base/hash/hash_steps.h"

enum {
    COPY_LINE = 64,
    COPY_PAGE = 4096,
    COPY_FETCH = 8 * COPY_LINE, /* bytes of the first lines */
    COPY_TOGETHER = 2,          /* runs side by side; four are not faster */
    COPY_SHORT = 16 * 1024      /* bytes of the longest run that is copied beside another */
};

/* Copies n bytes, a multiple of COPY_LINE, to the beginning of a line, with stores that bypass the
 * cache. */
typedef void copy_lines_fn(char *to, const char *from, size_t n);

/* A run that is being copied. */
struct copy_progress {
    struct copy_run run;
    const struct copy_run *next; /* after it and those beside it; it may be empty */
    size_t copied;
    struct hash_steps hash;
};

/* Fetches the first lines of the page that is one page after offset `at`, in the next run if this
 * one ends before. */
HASH_INLINE void copy_fetch(const struct copy_progress *p, size_t at)
{
    size_t ahead = at + COPY_PAGE;
    bool in_next = ahead >= p->run.n;
    const struct copy_run *r = in_next ? p->next : &p->run;
    if (at % COPY_PAGE) return;
    if (in_next) ahead = 0;
    for (size_t i = 0; i < COPY_FETCH && ahead + i < r->n; i += COPY_LINE)
        __builtin_prefetch(r->from + ahead + i);
    /* The address of the next page to write is translated meanwhile, too. */
    if (ahead < r->n) __builtin_prefetch(r->to + ahead);
}

HASH_INLINE void copy_begin(struct copy_progress *p, const struct copy_run *run,
                            const struct copy_run *next)
{
    /* Streaming stores need whole lines: a partly written one costs a read of it. */
    size_t head = -(uintptr_t)run->to & (COPY_LINE - 1);
    p->run = *run;
    p->next = next;
    p->copied = head < run->n ? head : run->n;
    p->hash = hash_steps_begin();
    memcpy(run->to, run->from, p->copied);
}

/* The block at offset `at`, before the last one. What is copied is up to a line ahead of it. */
HASH_INLINE void copy_block(copy_lines_fn *copy, struct copy_progress *p, size_t at, bool hashes)
{
    copy_fetch(p, at);
    if (p->run.n - p->copied >= HASH_BLOCK) {
        copy(p->run.to + p->copied, p->run.from + p->copied, HASH_BLOCK);
        p->copied += HASH_BLOCK;
    }
    if (hashes) hash_steps_block(&p->hash, p->run.from + at);
}

HASH_INLINE void copy_end(copy_lines_fn *copy, struct copy_progress *p, size_t at, uint64_t *sum)
{
    const struct copy_run *r = &p->run;
    copy_fetch(p, at);
    size_t lines = (r->n - p->copied) / COPY_LINE * COPY_LINE;
    copy(r->to + p->copied, r->from + p->copied, lines);
    p->copied += lines;
    memcpy(r->to + p->copied, r->from + p->copied, r->n - p->copied);
    if (!sum) return;
    *sum = r->n > HASH_SHORT ? hash_steps_end(&p->hash, r->from, r->n) : hash_short(r->from, r->n);
}

/* Copies n_runs runs of equal length side by side; `n_next` follow them. */
HASH_INLINE void copy_together(copy_lines_fn *copy, const struct copy_run *runs, size_t n_runs,
                               size_t n_next, uint64_t *sums)
{
    static const struct copy_run none = { 0 };
    struct copy_progress p[COPY_TOGETHER];
    size_t at = 0, n = runs[0].n;
    for (size_t i = 0; i < n_runs; i++)
        copy_begin(&p[i], &runs[i], i < n_next ? &runs[n_runs + i] : &none);
    for (; at + HASH_BLOCK < n; at += HASH_BLOCK)
        for (size_t i = 0; i < n_runs; i++) copy_block(copy, &p[i], at, sums);
    for (size_t i = 0; i < n_runs; i++) copy_end(copy, &p[i], at, sums ? &sums[i] : NULL);
}

HASH_INLINE bool copy_can_be_together(const struct copy_run *runs, size_t n_runs)
{
    if (n_runs < COPY_TOGETHER || runs[0].n > COPY_SHORT) return false;
    for (size_t i = 1; i < COPY_TOGETHER; i++)
        if (runs[i].n != runs[0].n) return false;
    return true;
}

/* copy_impl.copy_and_hash, or with `sums` NULL copy_impl.copy, except for the fence. */
HASH_INLINE void copy_and_hash_by(copy_lines_fn *copy, const struct copy_run *runs, size_t n_runs,
                                  uint64_t *sums)
{
    for (size_t i = 0; i < n_runs;) {
        size_t left = n_runs - i;
        uint64_t *sum = sums ? sums + i : NULL;
        if (copy_can_be_together(runs + i, left)) {
            copy_together(copy, runs + i, COPY_TOGETHER, left - COPY_TOGETHER, sum);
            i += COPY_TOGETHER;
        } else {
            copy_together(copy, runs + i, 1, left - 1, sum);
            i++;
        }
    }
}

#endif
