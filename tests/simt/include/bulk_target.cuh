/* bulk_target.cuh - bulk copies on the emulated GPU: what kernels/cuda/nvcc/bulk_target.cuh, which
 * has the comments, is for real ones.
 *
 * One thread of a block copies. A load takes place when its barrier is waited for, until then the
 * target holds 0xff; a store when it is waited for, with what shared memory holds then. So a
 * missing wait and an early reuse give wrong bytes. Thread: as there. */
#ifndef BATON_TESTS_SIMT_BULK_TARGET_CUH
#define BATON_TESTS_SIMT_BULK_TARGET_CUH

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <deque>

#include "tests/simt/include/simt.h"

#define BULK_CODE 1

struct simt_bulk_copy {
    void *to;
    const void *from;
    unsigned n;
    uint64_t *barrier;
};
static std::deque<simt_bulk_copy> simt_bulk_loads, simt_bulk_stores;

static inline bool has_bulk_code(const void *) { return true; }
static inline void bulk_barrier_init(uint64_t *b) { simt_mbarrier_init(b, 1); }

static inline void simt_bulk_die(const char *why)
{
    fprintf(stderr, "simt: a bulk copy: %s\n", why);
    abort();
}

static inline void simt_bulk_check(const void *a, const void *b, unsigned n)
{
    if (n == 0 || ((uintptr_t)a | (uintptr_t)b | n) % 16) simt_bulk_die("it is not aligned");
}

static inline void bulk_load(void *shared, const void *global, unsigned n, uint64_t *b)
{
    simt_bulk_check(shared, global, n);
    memset(shared, 0xff, n);
    simt_bulk_loads.push_back({ shared, global, n, b });
}

static inline void bulk_barrier_wait(uint64_t *b, unsigned parity)
{
    for (auto it = simt_bulk_loads.begin(); it != simt_bulk_loads.end(); ++it) {
        if (it->barrier != b) continue;
        memcpy(it->to, it->from, it->n);
        simt_bulk_loads.erase(it);
        simt_mbarrier_arrive(b);
        break;
    }
    if (!simt_mbarrier_try_wait_parity(b, parity))
        simt_bulk_die("its barrier is waited for, and no load is in flight");
}

static inline void bulk_store(void *global, const void *shared, unsigned n)
{
    simt_bulk_check(global, shared, n);
    simt_bulk_stores.push_back({ global, shared, n, nullptr });
}

static inline void simt_bulk_finish_stores(size_t n_left)
{
    for (; simt_bulk_stores.size() > n_left; simt_bulk_stores.pop_front())
        memcpy(simt_bulk_stores.front().to, simt_bulk_stores.front().from,
               simt_bulk_stores.front().n);
}
template <int N> static inline void bulk_wait_read() { simt_bulk_finish_stores(N); }
static inline void bulk_wait_written() { simt_bulk_finish_stores(0); }

#endif
