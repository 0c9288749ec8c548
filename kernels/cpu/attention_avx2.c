/* attention_avx2.c - one tile of keys and values for one query: the inner loop of attention.
 *
 * Scores: eight keys at a time, each with its 16 partial sums, added up in one transposed tree. Values: up to 64 elements of
 * the output stay in registers while all keys of the tile are added to them, one fused chain per element. Keys past n_keys
 * are never read. Thread: engine, pool. */
#include <math.h>

#include "kernels/cpu/lanes_avx2.h"
#include "kernels/cpu/loops_avx2.h"

/* Partial sums l + l+8 of q.k[i] for four keys. */
static inline __attribute__((always_inline)) void dot_four(__m256 out[4], const float *q, const float *const k[4], size_t dim)
{
    __m256 low[4], high[4];
    for (int i = 0; i < 4; i++) low[i] = high[i] = _mm256_setzero_ps();
    size_t d = 0;
    for (; d + 16 <= dim; d += 16) {
        __m256 q0 = _mm256_loadu_ps(q + d), q1 = _mm256_loadu_ps(q + d + 8);
        for (int i = 0; i < 4; i++) {
            low[i] = _mm256_fmadd_ps(q0, _mm256_loadu_ps(k[i] + d), low[i]);
            high[i] = _mm256_fmadd_ps(q1, _mm256_loadu_ps(k[i] + d + 8), high[i]);
        }
    }
    if (d < dim) {
        __m256i m0 = mask8(dim - d), m1 = mask8_from(dim - d, 8);
        __m256  q0 = _mm256_maskload_ps(q + d, m0), q1 = _mm256_maskload_ps(q + d + 8, m1);
        for (int i = 0; i < 4; i++) {
            low[i] = _mm256_fmadd_ps(q0, _mm256_maskload_ps(k[i] + d, m0), low[i]);
            high[i] = _mm256_fmadd_ps(q1, _mm256_maskload_ps(k[i] + d + 8, m1), high[i]);
        }
    }
    for (int i = 0; i < 4; i++) out[i] = _mm256_add_ps(low[i], high[i]);
}

/* score[0 .. n_keys rounded up to 16): -inf past n_keys. Returns the largest. */
static float tile_scores(float *score, const float *q, const struct attn_tile *t)
{
    __m256 scale = _mm256_set1_ps(t->scale), top = _mm256_set1_ps(-INFINITY);
    size_t n_padded = (t->n_keys + 15) / 16 * 16;
    for (size_t j = 0; j < n_padded; j += 8) {
        const float *k[8];
        __m256       sum[8], s;
        for (size_t i = 0; i < 8; i++) k[i] = t->k + (j + i < t->n_keys ? j + i : t->n_keys - 1) * t->head_dim;
        dot_four(sum, q, k, t->head_dim);
        dot_four(sum + 4, q, k + 4, t->head_dim);
        s = _mm256_mul_ps(tree8x8(sum), scale);
        s = _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), s, _mm256_castsi256_ps(mask8_from(t->n_keys, j)));
        _mm256_store_ps(score + j, s);
        top = _mm256_max_ps(s, top);
    }
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

/* score becomes exp(score - max), 0 past n_keys; returns sum16. */
static float tile_weights(float *score, float max, size_t n_keys)
{
    __m256       top = _mm256_set1_ps(max);
    struct sum16 s = { _mm256_setzero_ps(), _mm256_setzero_ps() };
    for (size_t j = 0; j < n_keys; j += 16) {
        __m256 e0 = exp8(_mm256_sub_ps(_mm256_load_ps(score + j), top));
        __m256 e1 = exp8(_mm256_sub_ps(_mm256_load_ps(score + j + 8), top));
        _mm256_store_ps(score + j, e0);
        _mm256_store_ps(score + j + 8, e1);
        s.low = _mm256_add_ps(s.low, e0);
        s.high = _mm256_add_ps(s.high, e1);
    }
    return sum16_tree(s);
}

/* out[0 .. 8 * n) = out * shrink + sum of weight[j] * v[j], for n whole registers. */
static inline __attribute__((always_inline)) void add_values(float *out, const float *v, const float *weight, float shrink,
                                                             const struct attn_tile *t, const int n)
{
    __m256 sum[8], f = _mm256_set1_ps(shrink);
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) sum[i] = _mm256_mul_ps(_mm256_loadu_ps(out + 8 * i), f);
    for (size_t j = 0; j < t->n_keys; j++, v += t->head_dim) {
        __m256 p = _mm256_broadcast_ss(weight + j);
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) sum[i] = _mm256_fmadd_ps(p, _mm256_loadu_ps(v + 8 * i), sum[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) _mm256_storeu_ps(out + 8 * i, sum[i]);
}

/* The last head_dim % 8 elements. */
static void add_values_masked(float *out, const float *v, const float *weight, float shrink, const struct attn_tile *t,
                              size_t n)
{
    __m256i m = mask8(n);
    __m256  sum = _mm256_mul_ps(_mm256_maskload_ps(out, m), _mm256_set1_ps(shrink));
    for (size_t j = 0; j < t->n_keys; j++, v += t->head_dim)
        sum = _mm256_fmadd_ps(_mm256_broadcast_ss(weight + j), _mm256_maskload_ps(v, m), sum);
    _mm256_maskstore_ps(out, m, sum);
}

void avx2_attend(float *out, struct attn_state *s, const float *q, const struct attn_tile *t)
{
    float score[KERNEL_BLOCK_TOKENS_MAX] __attribute__((aligned(32)));
    float tile_max = tile_scores(score, q, t), max = tile_max > s->max ? tile_max : s->max;
    float shrink = exp_ref(s->max - max);
    s->sum = s->sum * shrink + tile_weights(score, max, t->n_keys);
    s->max = max;
    size_t d = 0, dim = t->head_dim;
    for (; d + 64 <= dim; d += 64) add_values(out + d, t->v + d, score, shrink, t, 8);
    for (; d + 32 <= dim; d += 32) add_values(out + d, t->v + d, score, shrink, t, 4);
    for (; d + 8 <= dim; d += 8) add_values(out + d, t->v + d, score, shrink, t, 1);
    if (d < dim) add_values_masked(out + d, t->v + d, score, shrink, t, dim - d);
}
