/* simt_mbarrier.cc - barriers in shared memory, which count threads and bytes. The 8 bytes hold the
 * number of an entry here, so that overwriting a barrier is found.
 *
 * For the thread sanitizer an arrival releases, and a successful wait acquires. Thread:
 * simt_block.h. */
#include <string.h>

#include <vector>

#include "tests/simt/include/cuda_runtime.h"
#include "tests/simt/simt_block.h"
#include "tests/simt/simt_cluster.h"
#include "tests/simt/simt_shared.h"
#include "tests/simt/simt_sm90.h"
#include "tests/simt/simt_tsan.h"

enum { COUNT_MAX = (1 << 20) - 1, BARRIERS_MAX = 256 };
static const uint32_t MAGIC = 0x7fb0ba21u;

struct mbarrier {
    void *at;
    unsigned count, to_come, phase;
    int bytes;       /* that are still to come; < 0: that came before they were expected */
    unsigned thread; /* whose init it was */
    bool is_visible; /* to other blocks */
};

static std::vector<mbarrier> barriers; /* of the cluster that runs */
static char syncs[BARRIERS_MAX][2];

void simt_mbarrier_begin(void) { barriers.clear(); }

static mbarrier *find(void *at, const char *what)
{
    uint32_t words[2];
    if (simt_shared_offset(at, sizeof words) == SIMT_NOT_SHARED)
        simt_die("%s: %p is not in dynamic shared memory", what, at);
    memcpy(words, at, sizeof words);
    if (words[1] != MAGIC || words[0] >= barriers.size() || barriers[words[0]].at != at)
        simt_die("%s: there is no mbarrier at %p", what, at);
    return &barriers[words[0]];
}

static char *sync_of(const mbarrier *b, unsigned phase)
{
    return &syncs[b - barriers.data()][phase & 1];
}

void simt_mbarrier_init(void *at, unsigned count)
{
    if (!simt_in_kernel()) simt_die("mbarrier.init outside a kernel");
    if ((uintptr_t)at % 8 || count == 0 || count > COUNT_MAX)
        simt_die("mbarrier.init of %p for %u arrivals", at, count);
    (void)simt_shared_address(at);
    for (const mbarrier &b : barriers)
        if (b.at == at) simt_die("mbarrier.init of %p, where there is one", at);
    if (barriers.size() == BARRIERS_MAX) simt_die("more than %d mbarriers", BARRIERS_MAX);
    const uint32_t words[2] = { (uint32_t)barriers.size(), MAGIC };
    memcpy(at, words, sizeof words);
    barriers.push_back({ at, count, count, 0, 0, simt_thread_number(), false });
}

void simt_fence_mbarrier_init(void)
{
    for (mbarrier &b : barriers)
        if (b.thread == simt_thread_number()) b.is_visible = true;
}

void simt_mbarrier_check_visible(void *at, const char *what)
{
    if (!find(at, what)->is_visible)
        simt_die("%s: a barrier of another block without a fence.mbarrier_init after its init",
                 what);
}

static void end_phase(mbarrier *b)
{
    if (b->to_come || b->bytes) return;
    b->to_come = b->count;
    b->phase++;
}

static void arrive(mbarrier *b)
{
    simt_tsan_release(sync_of(b, b->phase));
    b->to_come--;
    end_phase(b);
}

void simt_mbarrier_arrive(void *at)
{
    (void)simt_shared_address(at);
    mbarrier *b = find(at, "mbarrier.arrive");
    if (!b->to_come) simt_die("mbarrier.arrive: %u have, and bytes are still to come", b->count);
    arrive(b);
}

void simt_mbarrier_arrive_at(void *own, unsigned rank)
{
    static const char what[] = "mbarrier.arrive at another block's barrier";
    void *at = simt_shared_of(own, rank, what);
    if (rank != simt_block_rank()) simt_mbarrier_check_visible(at, what);
    mbarrier *b = find(at, what);
    if (!b->to_come) simt_die("mbarrier.arrive: %u have, and bytes are still to come", b->count);
    arrive(b);
}

void simt_mbarrier_expect(void *at, unsigned bytes)
{
    (void)simt_shared_address(at);
    mbarrier *b = find(at, "mbarrier.arrive.expect_tx");
    if (!b->to_come) simt_die("mbarrier.arrive.expect_tx: %u have arrived", b->count);
    b->bytes += (int)bytes;
    if (b->bytes > COUNT_MAX) simt_die("an mbarrier expects %d bytes", b->bytes);
    arrive(b);
}

void simt_mbarrier_complete(void *at, unsigned bytes)
{
    mbarrier *b = find(at, "cp.async.bulk.tensor");
    b->bytes -= (int)bytes;
    if (b->bytes < -COUNT_MAX) simt_die("%d bytes came that an mbarrier did not expect", -b->bytes);
    end_phase(b);
}

bool simt_mbarrier_try_wait_parity(void *at, unsigned parity)
{
    if (parity > 1) simt_die("mbarrier.try_wait.parity of %u", parity);
    (void)simt_shared_address(at);
    if ((find(at, "mbarrier.try_wait")->phase & 1) == parity)
        simt_async_arrive(at), simt_bulk_arrive(at);
    if ((find(at, "mbarrier.try_wait")->phase & 1) == parity) {
        simt_yield();
        return false;
    }
    simt_proxy_wait();
    simt_tsan_acquire(sync_of(find(at, "mbarrier.try_wait"), parity));
    return true;
}
