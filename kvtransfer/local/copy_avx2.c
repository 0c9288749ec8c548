/* copy_avx2.c - copies with 32-byte non-temporal stores. Compiled alone with its flags; see copy.h.
 * Thread: any. */
#include "kvtransfer/local/copy.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "kvtransfer/local/copy_and_hash.h"

enum { HALF = COPY_LINE / 2 };

static bool runs_here(void) { return __builtin_cpu_supports("avx2"); }

HASH_INLINE void copy_lines(char *to, const char *from, size_t n)
{
    for (size_t i = 0; i < n; i += COPY_LINE) {
        __m256i low = _mm256_loadu_si256((const void *)(from + i)),
                high = _mm256_loadu_si256((const void *)(from + i + HALF));
        _mm256_stream_si256((void *)(to + i), low);
        _mm256_stream_si256((void *)(to + i + HALF), high);
    }
}

/* Both end with a fence: later stores could overtake streaming stores, and the message that
 * announces these bytes must not. */
static void copy(const struct copy_run *runs, size_t n_runs)
{
    copy_and_hash_by(copy_lines, runs, n_runs, NULL);
    _mm_sfence();
}

static void copy_and_hash(const struct copy_run *runs, size_t n_runs, uint64_t *sums)
{
    copy_and_hash_by(copy_lines, runs, n_runs, sums);
    _mm_sfence();
}

const struct copy_impl copy_avx2 = {
    .name = "avx2", .runs_here = runs_here, .copy = copy, .copy_and_hash = copy_and_hash
};
#endif
