/* copy_avx512.c - copies with 64-byte non-temporal stores. Compiled alone with its flags; see
 * copy.h.
 * Thread: any. */
#include "kvtransfer/local/copy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { LINE = 64, STEP = 4 * LINE };

static bool runs_here(void) { return __builtin_cpu_supports("avx512f"); }

static void copy(void *to, const void *from, size_t n)
{
    char *d = to;
    const char *s = from;
    size_t head = -(uintptr_t)d & (LINE - 1); /* streaming stores need whole lines */
    if (head > n) head = n;
    memcpy(d, s, head);
    d += head, s += head, n -= head;
    for (; n >= STEP; d += STEP, s += STEP, n -= STEP) {
        __m512i a = _mm512_loadu_si512(s), b = _mm512_loadu_si512(s + LINE);
        __m512i e = _mm512_loadu_si512(s + 2 * LINE), f = _mm512_loadu_si512(s + 3 * LINE);
        _mm512_stream_si512((void *)d, a);
        _mm512_stream_si512((void *)(d + LINE), b);
        _mm512_stream_si512((void *)(d + 2 * LINE), e);
        _mm512_stream_si512((void *)(d + 3 * LINE), f);
    }
    /* Later stores could overtake streaming stores; the message that announces these bytes must
     * not. */
    _mm_sfence();
    memcpy(d, s, n);
}

const struct copy_impl copy_avx512 = {
    .name = "avx512", .runs_here = runs_here, .from_bytes = 16 * 1024, .copy = copy
};
#endif
