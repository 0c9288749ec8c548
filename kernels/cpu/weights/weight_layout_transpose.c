/* weight_layout_transpose.c - transpositions with the unpack instructions that every x86-64 has,
 * enough to keep up with memory. Thread: any. */
#include "kernels/cpu/weights/weight_layout_transpose.h"

#include <emmintrin.h>
#include <string.h>

enum {
    QUAD = 4,
    OCTET = 8,
    LINE = 64,
    PREFETCH_ROWS = 32 /* rows of a transposed source being prefetched */
};

static inline __m128i load(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}
static inline void store(void *p, __m128i v) { _mm_storeu_si128((__m128i *)p, v); }

/* Transposes four rows of four words. */
static inline void transpose_words(void *dst, size_t dst_stride, const uint8_t *src,
                                   size_t src_stride)
{
    __m128i a = load(src), b = load(src + src_stride), c = load(src + 2 * src_stride),
            d = load(src + 3 * src_stride);
    __m128i ab0 = _mm_unpacklo_epi32(a, b), ab1 = _mm_unpackhi_epi32(a, b),
            cd0 = _mm_unpacklo_epi32(c, d), cd1 = _mm_unpackhi_epi32(c, d);
    char *p = dst;
    store(p, _mm_unpacklo_epi64(ab0, cd0));
    store(p + dst_stride, _mm_unpackhi_epi64(ab0, cd0));
    store(p + 2 * dst_stride, _mm_unpacklo_epi64(ab1, cd1));
    store(p + 3 * dst_stride, _mm_unpackhi_epi64(ab1, cd1));
}

/* Transposes eight rows of eight 16-bit elements: pairs, then pairs of pairs, then halves of
 * rows. */
static inline void transpose_halves(uint8_t *dst, size_t dst_stride, const uint8_t *src,
                                    size_t src_stride)
{
    __m128i r[OCTET], s[OCTET];
    for (int i = 0; i < OCTET; i++) r[i] = load(src + (size_t)i * src_stride);
    for (int i = 0; i < QUAD; i++) {
        s[2 * i] = _mm_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
        s[2 * i + 1] = _mm_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
    }
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 2; i++) { /* i: columns 0..3 or 4..7; h: rows 0..3 or 4..7 */
            r[4 * i + h] = _mm_unpacklo_epi32(s[4 * h + i], s[4 * h + 2 + i]);
            r[4 * i + 2 + h] = _mm_unpackhi_epi32(s[4 * h + i], s[4 * h + 2 + i]);
        }
    for (int i = 0; i < QUAD; i++) {
        store(dst + (size_t)(2 * i) * dst_stride, _mm_unpacklo_epi64(r[2 * i], r[2 * i + 1]));
        store(dst + (size_t)(2 * i + 1) * dst_stride, _mm_unpackhi_epi64(r[2 * i], r[2 * i + 1]));
    }
}

static void interleave_scalar(uint32_t *dst, const uint8_t *rows, size_t stride, size_t n_rows,
                              size_t begin, size_t n_bytes)
{
    for (size_t at = begin; at < n_bytes; at += sizeof *dst)
        for (size_t i = 0; i < n_rows; i++) {
            uint32_t word = 0;
            memcpy(&word, rows + i * stride + at,
                   n_bytes - at < sizeof word ? n_bytes - at : sizeof word);
            dst[at / sizeof *dst * PANEL + i] = word;
        }
}

void weight_layout_interleave_rows(uint32_t *dst, const uint8_t *rows, size_t stride, size_t n_rows,
                                   size_t n_bytes)
{
    size_t at = 0, step = QUAD * sizeof *dst, line = PANEL * sizeof *dst;
    if (n_rows == PANEL)
        for (; at + step <= n_bytes; at += step)
            for (size_t i = 0; i < PANEL; i += QUAD)
                transpose_words(dst + at / sizeof *dst * PANEL + i, line, rows + i * stride + at,
                                stride);
    interleave_scalar(dst, rows, stride, n_rows, at, n_bytes);
}

static void transpose_scalar(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride,
                             size_t i0, size_t n_i, size_t k0, size_t n_k, size_t size)
{
    for (size_t k = k0; k < n_k; k++)
        for (size_t i = i0; i < n_i; i++)
            memcpy(dst + i * dst_stride + k * size, src + k * src_stride + i * size, size);
}

/* Prefetches a few cache lines of each of many rows, which no hardware prefetcher predicts. Does
 * nothing past the end of the matrix. */
static void prefetch_rows(const uint8_t *row, size_t stride, size_t n_rows, size_t n_bytes)
{
    for (size_t i = 0; i < n_rows; i++)
        for (size_t at = 0; at < n_bytes; at += LINE)
            _mm_prefetch((const char *)(row + i * stride + at), _MM_HINT_T0);
}

void weight_layout_transpose(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride,
                             size_t n_i, size_t n_k, size_t size)
{
    size_t side = size == 2 ? OCTET : QUAD, k = 0, whole = size == 1 ? 0 : n_i / side * side;
    for (; whole && k + side <= n_k; k += side) {
        prefetch_rows(src + (k + PREFETCH_ROWS) * src_stride, src_stride, side, n_i * size);
        for (size_t i = 0; i < whole; i += side) {
            uint8_t *to = dst + i * dst_stride + k * size;
            const uint8_t *from = src + k * src_stride + i * size;
            if (size == 2) transpose_halves(to, dst_stride, from, src_stride);
            else transpose_words(to, dst_stride, from, src_stride);
        }
    }
    transpose_scalar(dst, dst_stride, src, src_stride, whole, n_i, 0, k, size);
    transpose_scalar(dst, dst_stride, src, src_stride, 0, n_i, k, n_k, size);
}
