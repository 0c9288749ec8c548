/* read_ahead.h - the pages of mapped files brought into memory ahead of whoever works through them,
 * by threads of their own.
 *
 * A page fault of the packing threads brings one page's neighbourhood and waits for it; a disk is
 * fast only when asked for megabytes at several places at once. So readers ask for the ranges in
 * the order in which they will be wanted, a bounded number of bytes ahead, and the packing threads
 * find them there. What cannot be read ahead is left to them. Life cycle: read_ahead_start,
 * read_ahead_await per piece in order, read_ahead_stop. Thread: one owner. */
#ifndef BATON_MODEL_LOAD_READ_AHEAD_H
#define BATON_MODEL_LOAD_READ_AHEAD_H

#include <stddef.h>
#include <stdint.h>

/* Mapped memory; NULL: nothing is to be read. */
struct read_ahead_range {
    const void *data;
    size_t bytes;
};

struct read_ahead;

/* `ranges` [n] are kept until read_ahead_stop, in the order of use. NULL: no thread could be
 * started, everything goes on without. */
struct read_ahead *read_ahead_start(const struct read_ahead_range *ranges, size_t n);
/* Piece i, and all before it, are in memory; those before it are not needed any more. `r` may be
 * NULL. */
void read_ahead_await(struct read_ahead *r, size_t i);
/* Nanoseconds that were spent in read_ahead_await. */
uint64_t read_ahead_wait_ns(const struct read_ahead *r);
void read_ahead_stop(struct read_ahead *r);

#endif
