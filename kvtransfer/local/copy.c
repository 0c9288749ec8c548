/* copy.c - the implementations of copy.h and the choice among them.
 * Thread: any. */
#include "kvtransfer/local/copy.h"

#include <string.h>

static bool always(void) { return true; }
static void plain(void *to, const void *from, size_t n) { memcpy(to, from, n); }

const struct copy_impl copy_plain = { .name = "plain", .runs_here = always, .copy = plain };

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
