/* simt_mbarrier.cc - barriers in shared memory. The 8 bytes hold the number of an entry here, so
 * that overwriting a barrier is found.
 *
 * For the thread sanitizer an arrival releases, and a successful wait acquires. Thread:
 * simt_block.h. */
#include <string.h>

#include <vector>

#include "tests/simt/include/cuda_runtime.h"
#include "tests/simt/simt_block.h"
#include "tests/simt/simt_sm90.h"
#include "tests/simt/simt_tsan.h"

enum { COUNT_MAX = (1 << 20) - 1, BARRIERS_MAX = 256 };
static const uint32_t MAGIC = 0x7fb0ba21u;

struct mbarrier {
    void *at;
    unsigned count, to_come, phase;
};

static std::vector<mbarrier> barriers; /* of the block that runs */
static char syncs[BARRIERS_MAX][2];

void simt_mbarrier_begin(void) { barriers.clear(); }

static mbarrier *find(void *at, const char *what)
{
    uint32_t words[2];
    (void)simt_shared_address(at);
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
    barriers.push_back({ at, count, count, 0 });
}

void simt_mbarrier_arrive(void *at)
{
    mbarrier *b = find(at, "mbarrier.arrive");
    simt_tsan_release(sync_of(b, b->phase));
    if (--b->to_come) return;
    b->to_come = b->count;
    b->phase++;
}

bool simt_mbarrier_try_wait_parity(void *at, unsigned parity)
{
    if (parity > 1) simt_die("mbarrier.try_wait.parity of %u", parity);
    if ((find(at, "mbarrier.try_wait")->phase & 1) == parity) simt_async_arrive(at);
    if ((find(at, "mbarrier.try_wait")->phase & 1) == parity) {
        simt_yield();
        return false;
    }
    simt_tsan_acquire(sync_of(find(at, "mbarrier.try_wait"), parity));
    return true;
}
