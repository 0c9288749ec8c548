/* ep_host_rows_avx2.c - ep_host_rows.h with AVX2 and FMA. A row's sums stay in registers while its
 * results are read, 32 columns at a time. Thread: any. */
#include <immintrin.h>
#include <math.h>

#include "kernels/ep/ep_host_rows.h"
#include "kernels/float_bits.h"

enum { LANES = 8, SUMS = 4, STEP = LANES * SUMS };

/* float_from_bf16(float_to_bf16(v)) of each lane. */
static inline __m256 rounded(__m256 v)
{
    const __m256i bits = _mm256_castps_si256(v),
                  odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1)),
                  up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))),
                  quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_blendv_epi8(up, quiet, is_nan),
                                                _mm256_set1_epi32((int32_t)0xffff0000)));
}

static inline __m256 from_bf16(const uint16_t *from)
{
    const __m128i v = _mm_loadu_si128((const __m128i *)(const void *)from);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}

/* Adds STEP columns of a result. */
static inline void add_result(__m256 *y, __m256 w, const struct ep_row_result *r, size_t k,
                              bool rounds)
{
    for (int i = 0; i < SUMS && r->bf16; i++)
        y[i] = _mm256_fmadd_ps(w, from_bf16(r->bf16 + k + i * LANES), y[i]);
    for (int i = 0; i < SUMS && !r->bf16; i++) {
        const __m256 v = _mm256_loadu_ps(r->f32 + k + i * LANES);
        y[i] = _mm256_fmadd_ps(w, rounds ? rounded(v) : v, y[i]);
    }
}

static inline void sum_columns(const struct ep_row_sum *s, size_t k, bool rounds)
{
    __m256 y[SUMS];
    for (int i = 0; i < SUMS; i++)
        y[i] = s->add ? _mm256_loadu_ps(s->y + k + i * LANES) : _mm256_setzero_ps();
    for (size_t j = 0; j < s->n_used; j++)
        add_result(y, _mm256_set1_ps(s->weights[j]), &s->results[j], k, rounds);
    for (int i = 0; i < SUMS; i++) _mm256_storeu_ps(s->y + k + i * LANES, y[i]);
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

/* The upper halves of 16 lanes, in order. */
static void to_bf16(void *to, const float *x, size_t n)
{
    char *out = to;
    size_t k = 0;
    for (; k + 2 * LANES <= n; k += 2 * LANES) {
        const __m256i a = _mm256_srli_epi32(_mm256_castps_si256(rounded(_mm256_loadu_ps(x + k))),
                                            16),
                      b = _mm256_srli_epi32(
                          _mm256_castps_si256(rounded(_mm256_loadu_ps(x + k + LANES))), 16),
                      both = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
        _mm256_storeu_si256((__m256i *)(void *)(out + 2 * k), both);
    }
    ep_host_rows_plain.to_bf16(out + 2 * k, x + k, n - k);
}

const struct ep_host_rows ep_host_rows_avx2 = { .to_bf16 = to_bf16, .sum = sum };
