/* simt_async.cc - cp.async: copies that a thread issues and that take place only when it waits for
 * them.
 *
 * Until then the target holds garbage, so that both mistakes are found: reading it before the wait,
 * and issuing the copy while others still read the previous contents. Source: PTX ISA, cp.async.
 * Thread: simt_block.h. */
#include <stdint.h>
#include <string.h>

#include <list>

#include "tests/simt/include/cuda_runtime.h"
#include "tests/simt/simt_block.h"
#include "tests/simt/simt_memory.h"
#include "tests/simt/simt_overlap.h"
#include "tests/simt/simt_sanitize.h"
#include "tests/simt/simt_sm90.h"
#include "tests/simt/simt_tsan.h"

/* Not checked under the thread sanitizer: the lock of the tables would order the threads of the
 * block. */
static void check_memory(const void *shared, const void *global)
{
#if !SIMT_TSAN
    if (simt_memory_is_device(shared))
        simt_die("cp.async to %p, which is not shared memory", shared);
    if (global && !simt_memory_is_visible(global))
        simt_die("cp.async from %p, which is no memory of the device", global);
#else
    (void)shared, (void)global;
#endif
}

void simt_cp_async(void *shared, const void *global, int bytes, int src_bytes)
{
    simt_copies &copies = simt_thread_copies();
    if (bytes != 4 && bytes != 8 && bytes != 16) simt_die("cp.async of %d bytes", bytes);
    if (src_bytes < 0 || src_bytes > bytes)
        simt_die("cp.async of %d bytes with %d from the source", bytes, src_bytes);
    if ((uintptr_t)shared % (unsigned)bytes || (src_bytes && (uintptr_t)global % (unsigned)bytes))
        simt_die("cp.async of %d bytes from %p to %p: not aligned", bytes, global, shared);
    check_memory(shared, src_bytes ? global : nullptr);
    if (simt_is_early && src_bytes) simt_overlap_check_read(global, (size_t)src_bytes);
    memset(shared, 0xff, (size_t)bytes);
    simt_proxy_ordered(shared, (size_t)bytes);
    copies.queue.push_back({ (char *)shared, (const char *)global, bytes, src_bytes });
}

void simt_prefetch(const void *global, unsigned n)
{
    if ((uintptr_t)global % 16 || n % 16 || n == 0)
        simt_die("cp.async.bulk.prefetch of %u bytes from %p: not aligned", n, global);
#if !SIMT_TSAN
    if (!simt_memory_is_visible(global))
        simt_die("cp.async.bulk.prefetch from %p, which is no memory of the device", global);
    if (simt_is_early) return; /* what another kernel writes may be prefetched */
    for (const volatile char *at = (const volatile char *)global, *end = at + n; at < end; at += 16)
        (void)at[0], (void)at[15];
#endif
}

void simt_cp_async_commit(void)
{
    simt_copies &copies = simt_thread_copies();
    size_t committed = 0;
    for (size_t n : copies.groups) committed += n;
    copies.groups.push_back(copies.queue.size() - committed);
}

static void perform_oldest(simt_copies &copies, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const simt_copy &c = copies.queue[i];
        memcpy(c.to, c.from, (size_t)c.source_bytes);
        memset(c.to + c.source_bytes, 0, (size_t)(c.bytes - c.source_bytes));
        simt_proxy_completed(c.to, (size_t)c.bytes);
    }
    copies.queue.erase(copies.queue.begin(), copies.queue.begin() + (ptrdiff_t)n);
}

void simt_cp_async_wait(int n_groups_left)
{
    simt_copies &copies = simt_thread_copies();
    if (n_groups_left < 0) simt_die("cp.async.wait_group %d", n_groups_left);
    while (copies.groups.size() > (size_t)n_groups_left) {
        perform_oldest(copies, copies.groups.front());
        copies.groups.erase(copies.groups.begin());
    }
}

/* Copies of a thread, and the barrier at which they arrive by themselves. They take place when
 * somebody waits there. */
struct arrival {
    void *barrier;
    unsigned thread;
    std::vector<simt_copy> copies;
};
static std::list<arrival> arrivals;

void simt_cp_async_mbarrier_arrive_noinc(void *barrier)
{
    simt_copies &copies = simt_thread_copies();
    simt_tsan_ignore_begin(); /* the list is the emulator's, not the kernel's */
    arrivals.push_back({ barrier, simt_thread_number(), copies.queue });
    simt_tsan_ignore_end();
    copies.queue.clear();
    copies.groups.clear();
}

void simt_async_arrive(void *barrier)
{
    simt_tsan_ignore_begin();
    for (auto a = arrivals.begin(); a != arrivals.end();) {
        if (a->barrier != barrier) {
            ++a;
            continue;
        }
        for (const simt_copy &c : a->copies) {
            memcpy(c.to, c.from, (size_t)c.source_bytes);
            memset(c.to + c.source_bytes, 0, (size_t)(c.bytes - c.source_bytes));
            simt_proxy_arrived(c.to, (size_t)c.bytes, a->thread);
        }
        a = arrivals.erase(a);
        simt_mbarrier_arrive(barrier);
    }
    simt_tsan_ignore_end();
}

void simt_async_end(void)
{
    if (!arrivals.empty())
        simt_die("a block ended and nobody had waited for the cp.async of thread %u",
                 arrivals.front().thread);
}

void simt_cp_async_wait_all(void)
{
    simt_copies &copies = simt_thread_copies();
    perform_oldest(copies, copies.queue.size());
    copies.groups.clear();
}
