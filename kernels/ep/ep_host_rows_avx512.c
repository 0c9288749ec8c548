/* ep_host_rows_avx512.c - ep_host_rows.h with AVX-512. Rounding to bf16 is done with integers:
 * vcvtneps2bf16 makes subnormal inputs zero, which the definition does not, and takes no fewer
 * instructions once they are looked for. Thread: any. */
#include <immintrin.h>
#include <math.h>

#include "kernels/ep/ep_host_rows.h"
#include "kernels/float_bits.h"

enum { LANES = 16, SUMS = 4, STEP = LANES * SUMS };

/* The upper half of each lane is float_to_bf16(v), the lower one is anything. */
static inline __m512i rounded_half(__m512 v)
{
    const __m512i bits = _mm512_castps_si512(v);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000)),
                    is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    __m512i up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    up = _mm512_mask_add_epi32(up, odd, bits, _mm512_set1_epi32(0x8000));
    return _mm512_mask_or_epi32(up, is_nan, bits, _mm512_set1_epi32(0x400000));
}

/* float_from_bf16(float_to_bf16(v)) of each lane. */
static inline __m512 rounded(__m512 v)
{
    return _mm512_castsi512_ps(
        _mm512_and_si512(rounded_half(v), _mm512_set1_epi32((int32_t)0xffff0000)));
}

static inline __m512 from_bf16(const uint16_t *from)
{
    const __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

/* Adds STEP columns of a result. */
static inline void add_result(__m512 *y, __m512 w, const struct ep_row_result *r, size_t k,
                              bool rounds)
{
    for (int i = 0; i < SUMS && r->bf16; i++)
        y[i] = _mm512_fmadd_ps(w, from_bf16(r->bf16 + k + i * LANES), y[i]);
    for (int i = 0; i < SUMS && !r->bf16; i++) {
        const __m512 v = _mm512_loadu_ps(r->f32 + k + i * LANES);
        y[i] = _mm512_fmadd_ps(w, rounds ? rounded(v) : v, y[i]);
    }
}

static inline void sum_columns(const struct ep_row_sum *s, size_t k, bool rounds)
{
    __m512 y[SUMS];
    for (int i = 0; i < SUMS; i++)
        y[i] = s->add ? _mm512_loadu_ps(s->y + k + i * LANES) : _mm512_setzero_ps();
    for (size_t j = 0; j < s->n_used; j++)
        add_result(y, _mm512_set1_ps(s->weights[j]), &s->results[j], k, rounds);
    for (int i = 0; i < SUMS; i++) _mm512_storeu_ps(s->y + k + i * LANES, y[i]);
}

static void sum(const struct ep_row_sum *s)
{
    size_t k = 0;
    if (s->rounds)
        for (; k + STEP <= s->n; k += STEP) sum_columns(s, k, true);
    else
        for (; k + STEP <= s->n; k += STEP) sum_columns(s, k, false);
    for (; k < s->n; k++) s->y[k] = ep_row_sum_of(s, k);
}

/* The upper halves of 32 lanes, in order. */
static void to_bf16(void *to, const float *x, size_t n)
{
    static const uint16_t upper[2 * LANES] = { 1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                               23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                               45, 47, 49, 51, 53, 55, 57, 59, 61, 63 };
    const __m512i halves = _mm512_loadu_si512(upper);
    char *out = to;
    size_t k = 0;
    for (; k + 2 * LANES <= n; k += 2 * LANES) {
        const __m512i a = rounded_half(_mm512_loadu_ps(x + k)),
                      b = rounded_half(_mm512_loadu_ps(x + k + LANES));
        _mm512_storeu_si512(out + 2 * k, _mm512_permutex2var_epi16(a, halves, b));
    }
    ep_host_rows_plain.to_bf16(out + 2 * k, x + k, n - k);
}

const struct ep_host_rows ep_host_rows_avx512 = { .to_bf16 = to_bf16, .sum = sum };
