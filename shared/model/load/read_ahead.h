/* read_ahead.h - threads that read pages of mapped files before they are used.
 *
 * A page fault of a packing thread reads a few pages and waits for them; a disk is fast only with
 * megabytes requested at several places. So reader threads request the ranges in the order of use,
 * a bounded number of bytes ahead. Ranges that they cannot read are read by page faults.
 * Life cycle: read_ahead_start, read_ahead_await for each range in order, read_ahead_stop.
 * Thread: one owner. */
#ifndef BATON_MODEL_LOAD_READ_AHEAD_H
#define BATON_MODEL_LOAD_READ_AHEAD_H

#include <stddef.h>
#include <stdint.h>

/* Mapped memory; NULL: nothing to read. */
struct read_ahead_range {
    const void *data;
    size_t bytes;
};

struct read_ahead;

/* `ranges` [n], in the order of use, are borrowed until read_ahead_stop. NULL: no thread could be
 * started; all other functions accept that. */
struct read_ahead *read_ahead_start(const struct read_ahead_range *ranges, size_t n);
/* Waits until range i and all before it have been read. The caller is done with those before it. */
void read_ahead_await(struct read_ahead *r, size_t i);
/* Nanoseconds spent in read_ahead_await. */
uint64_t read_ahead_wait_ns(const struct read_ahead *r);
void read_ahead_stop(struct read_ahead *r);

#endif
