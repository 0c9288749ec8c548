/* copy_avx2.c - copies with 32-byte non-temporal stores. Compiled alone with its flags; see copy.h.
 * Thread: any. */
#include "kvtransfer/local/copy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { LINE = 64, HALF = LINE / 2, STEP = 2 * LINE };

static bool runs_here(void) { return __builtin_cpu_supports("avx2"); }

static void copy(void *to, const void *from, size_t n)
{
    char *d = to;
    const char *s = from;
    /* Streaming stores need whole lines: a partly written one costs a read of it. */
    size_t head = -(uintptr_t)d & (LINE - 1);
    if (head > n) head = n;
    memcpy(d, s, head);
    d += head, s += head, n -= head;
    for (; n >= STEP; d += STEP, s += STEP, n -= STEP) {
        __m256i a = _mm256_loadu_si256((const void *)s),
                b = _mm256_loadu_si256((const void *)(s + HALF));
        __m256i e = _mm256_loadu_si256((const void *)(s + 2 * HALF)),
                f = _mm256_loadu_si256((const void *)(s + 3 * HALF));
        _mm256_stream_si256((void *)d, a);
        _mm256_stream_si256((void *)(d + HALF), b);
        _mm256_stream_si256((void *)(d + 2 * HALF), e);
        _mm256_stream_si256((void *)(d + 3 * HALF), f);
    }
    /* Later stores could overtake streaming stores; the message that announces these bytes must
     * not. */
    _mm_sfence();
    memcpy(d, s, n);
}

const struct copy_impl copy_avx2 = {
    .name = "avx2", .runs_here = runs_here, .from_bytes = 16 * 1024, .copy = copy
};
#endif
