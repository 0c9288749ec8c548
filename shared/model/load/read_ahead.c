/* read_ahead.c - see read_ahead.h.
 *
 * Ranges are split into chunks with consecutive numbers. A reader takes the next number, waits
 * while it is too far ahead of the owner, and reads the chunk. The owner waits for all chunks up to
 * the end of its range. Both waits poll: they are rare and long. */
#include "shared/model/load/read_ahead.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"

enum {
    READERS = 4,
    CHUNK_BYTES = 8 << 20,
    AHEAD_CHUNKS = 128 /* at most 1 GiB */,
    POLL_NS = 100000
};
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* since Linux 5.14 */
#endif

struct chunk {
    uintptr_t at;
    size_t bytes;
    atomic_bool read; /* release by its reader, acquire by the owner */
};

struct read_ahead {
    struct chunk *chunks;
    size_t *end; /* [n] of a piece: the chunk behind its last */
    size_t n_chunks, n_ranges;
    size_t seen; /* owner only: all chunks before it are read */
    uint64_t wait_ns;
    atomic_size_t next; /* next chunk to take; relaxed: it orders no other memory */
    atomic_size_t
        owner_chunk; /* the chunk that the owner waits for; relaxed: a stale value only delays */
    atomic_bool stop;
    pthread_t threads[READERS];
    size_t n_threads;
};

static void poll_sleep(void) { nanosleep(&(struct timespec){ .tv_nsec = POLL_NS }, NULL); }

/* ---- readers ---- */

/* Does not report pages that cannot be read: the thread that uses them faults. */
static void read_chunk(const struct chunk *c)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = c->at / page * page;
    const size_t bytes = c->at + c->bytes - begin;
    void *p = (void *)begin;                           /* mappings have whole pages */
    if (madvise(p, bytes, MADV_WILLNEED) != 0) return; /* requests all pages */
    (void)madvise(p, bytes,
                  MADV_POPULATE_READ); /* waits for them; with older kernels the first use does */
}

static void *reader(void *arg)
{
    struct read_ahead *r = arg;
    thread_become(THREAD_ANY, "read ahead");
    for (;;) {
        const size_t i = atomic_fetch_add_explicit(&r->next, 1, memory_order_relaxed);
        if (i >= r->n_chunks) return NULL;
        while (i >= atomic_load_explicit(&r->owner_chunk, memory_order_relaxed) + AHEAD_CHUNKS &&
               !atomic_load_explicit(&r->stop, memory_order_relaxed))
            poll_sleep();
        if (atomic_load_explicit(&r->stop, memory_order_relaxed)) return NULL;
        read_chunk(&r->chunks[i]);
        atomic_store_explicit(&r->chunks[i].read, true, memory_order_release);
    }
}

/* ---- the owner ---- */

static size_t n_chunks_of(const struct read_ahead_range *p)
{
    return p->data ? (p->bytes + CHUNK_BYTES - 1) / CHUNK_BYTES : 0;
}

static void make_chunks(struct read_ahead *r, const struct read_ahead_range *ranges, size_t n)
{
    size_t total = 0;
    for (size_t i = 0; i < n; i++) total += n_chunks_of(&ranges[i]);
    r->chunks = MEM_ARRAY(struct chunk, total);
    r->end = MEM_ARRAY(size_t, n);
    for (size_t i = 0; i < n; i++) {
        for (size_t at = 0; at < ranges[i].bytes && ranges[i].data; at += CHUNK_BYTES) {
            struct chunk *c = &r->chunks[r->n_chunks++];
            c->at = (uintptr_t)ranges[i].data + at;
            c->bytes = ranges[i].bytes - at < CHUNK_BYTES ? ranges[i].bytes - at : CHUNK_BYTES;
        }
        r->end[i] = r->n_chunks;
    }
    r->n_ranges = n;
}

struct read_ahead *read_ahead_start(const struct read_ahead_range *ranges, size_t n)
{
    struct read_ahead *r = MEM_NEW(struct read_ahead);
    make_chunks(r, ranges, n);
    while (r->n_threads < READERS && r->n_threads < r->n_chunks &&
           thread_start(&r->threads[r->n_threads], reader, r) == OK)
        r->n_threads++;
    if (r->n_threads > 0) return r;
    read_ahead_stop(r);
    return NULL;
}

void read_ahead_await(struct read_ahead *r, size_t i)
{
    if (!r || i >= r->n_ranges || r->seen >= r->end[i]) return;
    const uint64_t t0 = clock_ns();
    for (; r->seen < r->end[i]; r->seen++) {
        atomic_store_explicit(&r->owner_chunk, r->seen, memory_order_relaxed);
        while (!atomic_load_explicit(&r->chunks[r->seen].read, memory_order_acquire)) poll_sleep();
    }
    r->wait_ns += clock_ns() - t0;
}

uint64_t read_ahead_wait_ns(const struct read_ahead *r) { return r ? r->wait_ns : 0; }

void read_ahead_stop(struct read_ahead *r)
{
    if (!r) return;
    atomic_store_explicit(&r->stop, true, memory_order_relaxed);
    for (size_t i = 0; i < r->n_threads; i++) pthread_join(r->threads[i], NULL);
    mem_free(r->chunks);
    mem_free(r->end);
    mem_free(r);
}
