/* attention_avx512.c - one tile of keys and values for one query, as attention_avx2.c with 16 lanes: the 16 partial sums of a
 * score are one register, eight keys are in flight. Thread: engine, pool. */
#include <math.h>

#include "kernels/cpu/lanes_avx512.h"
#include "kernels/cpu/loops_avx512.h"

/* Scores of eight keys before scaling; the tree is that of tree8x8 after lanes l + l+8. */
static inline __m256 dot_eight(const float *q, const float *const k[8], size_t dim)
{
    __m512 sum[8];
    __m256 folded[8];
    for (int i = 0; i < 8; i++) sum[i] = _mm512_setzero_ps();
    for (size_t d = 0; d < dim; d += 16) {
        __mmask16 m = mask16(dim - d);
        __m512    qd = _mm512_maskz_loadu_ps(m, q + d);
        for (int i = 0; i < 8; i++) sum[i] = _mm512_fmadd_ps(qd, _mm512_maskz_loadu_ps(m, k[i] + d), sum[i]);
    }
    for (int i = 0; i < 8; i++) folded[i] = fold16(sum[i]);
    return tree8x8(folded);
}

/* score[0 .. n_keys rounded up to 16): -inf past n_keys. Returns the largest. */
static float tile_scores(float *score, const float *q, const struct attn_tile *t)
{
    __m256 scale = _mm256_set1_ps(t->scale), top = _mm256_set1_ps(-INFINITY);
    size_t n_padded = (t->n_keys + 15) / 16 * 16;
    for (size_t j = 0; j < n_padded; j += 8) {
        const float *k[8];
        for (size_t i = 0; i < 8; i++) k[i] = t->k + (j + i < t->n_keys ? j + i : t->n_keys - 1) * t->head_dim;
        __m256 s = _mm256_mul_ps(dot_eight(q, k, t->head_dim), scale);
        s = _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), s, _mm256_castsi256_ps(mask8_from(t->n_keys, j)));
        _mm256_store_ps(score + j, s);
        top = _mm256_max_ps(s, top);
    }
    return _mm512_reduce_max_ps(_mm512_insertf32x8(_mm512_castps256_ps512(top), top, 1));
}

/* score becomes exp(score - max), 0 past n_keys; returns sum16. */
static float tile_weights(float *score, float max, size_t n_keys)
{
    __m512 top = _mm512_set1_ps(max), sum = _mm512_setzero_ps();
    for (size_t j = 0; j < n_keys; j += 16) {
        __m512 e = exp16(_mm512_sub_ps(_mm512_loadu_ps(score + j), top));
        _mm512_storeu_ps(score + j, e);
        sum = _mm512_add_ps(sum, e);
    }
    return tree16(sum);
}

/* out[0 .. 16 * n) = out * shrink + sum of weight[j] * v[j]; `m` masks the last of the n registers. */
static inline __attribute__((always_inline)) void add_values(float *out, const float *v, const float *weight, float shrink,
                                                             const struct attn_tile *t, const int n, __mmask16 m)
{
    __m512 sum[8], f = _mm512_set1_ps(shrink);
#pragma GCC unroll 8
    for (int i = 0; i < n; i++)
        sum[i] = _mm512_mul_ps(_mm512_maskz_loadu_ps(i == n - 1 ? m : (__mmask16)0xffff, out + 16 * i), f);
    for (size_t j = 0; j < t->n_keys; j++, v += t->head_dim) {
        __m512 p = _mm512_set1_ps(weight[j]);
#pragma GCC unroll 8
        for (int i = 0; i < n; i++)
            sum[i] = _mm512_fmadd_ps(p, _mm512_maskz_loadu_ps(i == n - 1 ? m : (__mmask16)0xffff, v + 16 * i), sum[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) _mm512_mask_storeu_ps(out + 16 * i, i == n - 1 ? m : (__mmask16)0xffff, sum[i]);
}

void avx512_attend(float *out, struct attn_state *s, const float *q, const struct attn_tile *t)
{
    float score[KERNEL_BLOCK_TOKENS_MAX] __attribute__((aligned(64)));
    float tile_max = tile_scores(score, q, t), max = tile_max > s->max ? tile_max : s->max;
    float shrink = exp_ref(s->max - max);
    s->sum = s->sum * shrink + tile_weights(score, max, t->n_keys);
    s->max = max;
    size_t d = 0, dim = t->head_dim;
    for (; d + 128 <= dim; d += 128) add_values(out + d, t->v + d, score, shrink, t, 8, 0xffff);
    for (; d + 64 <= dim; d += 64) add_values(out + d, t->v + d, score, shrink, t, 4, 0xffff);
    for (; d < dim; d += 16) add_values(out + d, t->v + d, score, shrink, t, 1, mask16(dim - d));
}
