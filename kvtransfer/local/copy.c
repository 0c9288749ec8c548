/* copy.c - the plain implementation of copy.h and the choice among all.
 * Thread: any. */
#include "kvtransfer/local/copy.h"

#include <string.h>

#include "shared/base/hash/hash.h"

static bool always(void) { return true; }

static void copy(const struct copy_run *runs, size_t n_runs)
{
    for (size_t i = 0; i < n_runs; i++) memcpy(runs[i].to, runs[i].from, runs[i].n);
}

static void copy_and_hash(const struct copy_run *runs, size_t n_runs, uint64_t *sums)
{
    for (size_t i = 0; i < n_runs; i++) {
        memcpy(runs[i].to, runs[i].from, runs[i].n);
        sums[i] = hash_64(runs[i].from, runs[i].n, 0);
    }
}

const struct copy_impl copy_plain = {
    .name = "plain", .runs_here = always, .copy = copy, .copy_and_hash = copy_and_hash
};

#if defined(__x86_64__)
const struct copy_impl *const copy_impls[] = { &copy_avx512, &copy_avx2, &copy_plain, NULL };
#else
const struct copy_impl *const copy_impls[] = { &copy_plain, NULL };
#endif

const struct copy_impl *copy_choose(void)
{
    const struct copy_impl *const *impl = copy_impls;
    while (!(*impl)->runs_here()) impl++;
    return *impl;
}
