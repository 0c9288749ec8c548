/* simt_proxy.cc - which bytes of shared memory wgmma may read: those of a cp.async once its thread
 * has waited for it and then fenced, or, if it arrived at a barrier by itself, once the thread that
 * issues the wgmma has waited there and then fenced; those of a bulk copy once that thread has
 * waited.
 *
 * For every 16 bytes it keeps the last cp.async that wrote them: its thread, and how often that
 * thread had fenced when the copy completed. Ordinary stores cannot be observed, but their effects
 * can: bytes that differ from what wgmma read before, and since when no thread has fenced. Thread:
 * simt_block.h. */
#include <string.h>

#include "tests/simt/include/cuda_runtime.h"
#include "tests/simt/simt_block.h"
#include "tests/simt/simt_cluster.h"
#include "tests/simt/simt_shared.h"
#include "tests/simt/simt_sm90.h"

enum { PIECE = 16, MAX_THREADS = 1024 };

struct piece {
    uint16_t thread_plus_1; /* 0: no cp.async wrote here */
    bool in_flight, is_bulk;
    uint32_t n_fences;
    uint32_t n_arrived; /* up to this one; 0: the thread waited */
};

/* What wgmma read of 16 bytes that no cp.async wrote. */
struct reading {
    char bytes[PIECE];
    uint32_t n_fences; /* of all threads, in the block, and 1; 0: it read nothing yet */
};

enum { PIECES_OF_BLOCK = SIMT_SHARED_STRIDE / PIECE };
static piece pieces[SIMT_CLUSTER_MAX * PIECES_OF_BLOCK];
static reading readings[SIMT_CLUSTER_MAX * PIECES_OF_BLOCK];
static uint32_t n_fences[MAX_THREADS], n_all_fences, n_arrived, fenced[MAX_THREADS],
    waited[MAX_THREADS];
static bool is_used;
static unsigned n_blocks; /* of the last cluster */

void simt_proxy_begin(void)
{
    if (is_used) {
        memset(pieces, 0, n_blocks * PIECES_OF_BLOCK * sizeof pieces[0]);
        memset(readings, 0, n_blocks * PIECES_OF_BLOCK * sizeof readings[0]);
        memset(fenced, 0, sizeof fenced);
        memset(waited, 0, sizeof waited);
    }
    n_blocks = simt_n_blocks();
    is_used = false;
    n_all_fences = n_arrived = 0;
}

static void note(const void *shared, size_t bytes, bool in_flight, size_t thread, uint32_t arrived,
                 bool is_bulk = false)
{
    const size_t at = simt_shared_offset(shared, bytes);
    if (at == SIMT_NOT_SHARED) return; /* a static variable */
    is_used = true;
    for (size_t i = at / PIECE; i <= (at + bytes - 1) / PIECE; i++)
        pieces[i] = { (uint16_t)(thread + 1), in_flight, is_bulk, n_fences[thread], arrived };
}

void simt_proxy_ordered(const void *shared, size_t bytes)
{
    note(shared, bytes, true, simt_thread_number(), 0);
}
void simt_proxy_completed(const void *shared, size_t bytes)
{
    note(shared, bytes, false, simt_thread_number(), 0);
}
void simt_proxy_arrived(const void *shared, size_t bytes, unsigned thread)
{
    note(shared, bytes, false, thread, ++n_arrived);
}
void simt_proxy_bulk_ordered(const void *shared, size_t bytes)
{
    note(shared, bytes, true, simt_thread_number(), 0, true);
}
void simt_proxy_bulk_arrived(const void *shared, size_t bytes)
{
    note(shared, bytes, false, simt_thread_number(), ++n_arrived, true);
}
void simt_proxy_wait(void) { waited[simt_thread_number()] = n_arrived; }
uint32_t simt_proxy_waited(void) { return waited[simt_thread_number()]; }
void simt_fence_proxy_async(void)
{
    n_fences[simt_thread_number()]++;
    n_all_fences++;
    fenced[simt_thread_number()] = n_arrived;
}
uint32_t simt_proxy_fenced(void) { return fenced[simt_thread_number()]; }

static void check_stores(size_t i, const char *bytes)
{
    reading &r = readings[i];
    if (!n_all_fences ||
        (r.n_fences == n_all_fences + 1 && memcmp(r.bytes, bytes, sizeof r.bytes) != 0))
        simt_die("wgmma reads byte %zu of shared memory, which threads stored with no "
                 "fence.proxy.async after it",
                 i * PIECE);
    memcpy(r.bytes, bytes, sizeof r.bytes);
    r.n_fences = n_all_fences + 1;
    is_used = true;
}

static void check_bulk(const piece &p, size_t i, uint32_t reader_waited)
{
    if (p.in_flight)
        simt_die("wgmma reads byte %zu of shared memory, where a cp.async.bulk.tensor of thread %d "
                 "is still to come",
                 i * PIECE, p.thread_plus_1 - 1);
    if (p.n_arrived > reader_waited)
        simt_die("wgmma reads byte %zu of shared memory, where a cp.async.bulk.tensor came since "
                 "its thread last waited at a barrier",
                 i * PIECE);
}

void simt_proxy_check_read(const void *shared, size_t bytes, uint32_t reader_fenced,
                           uint32_t reader_waited)
{
    const size_t at = simt_shared_offset(shared, bytes);
    for (size_t i = at / PIECE; i <= (at + bytes - 1) / PIECE; i++) {
        const piece &p = pieces[i];
        if (!p.thread_plus_1) {
            check_stores(i, (const char *)shared + (i * PIECE - at));
            continue;
        }
        if (p.is_bulk) {
            check_bulk(p, i, reader_waited);
            continue;
        }
        if (p.in_flight)
            simt_die("wgmma reads byte %zu of shared memory, for whose cp.async thread %d has not "
                     "waited",
                     i * PIECE, p.thread_plus_1 - 1);
        if (p.n_arrived && p.n_arrived > reader_fenced)
            simt_die("wgmma reads byte %zu of shared memory, where a cp.async of thread %d arrived "
                     "at a barrier, with no fence.proxy.async of the reader after it",
                     i * PIECE, p.thread_plus_1 - 1);
        if (!p.n_arrived && n_fences[p.thread_plus_1 - 1] == p.n_fences)
            simt_die("wgmma reads byte %zu of shared memory, where a cp.async of thread %d wrote "
                     "with no fence.proxy.async after it",
                     i * PIECE, p.thread_plus_1 - 1);
    }
}
