/* dtype.c - sizes of element types and their conversions to f32, in plain C.
 *
 * Conversions used on whole matrices run once, when weights are packed, so they favour clearness. Thread: any. */
#include "kernels/dtype.h"

#include <string.h>

#include "shared/base/assert.h"

struct dtype_info {
    const char *name;
    size_t      block, block_bytes;
};

static const struct dtype_info DTYPES[DTYPE_COUNT] = {
    [DTYPE_F32] = { "f32", 1, 4 },
    [DTYPE_F16] = { "f16", 1, 2 },
    [DTYPE_BF16] = { "bf16", 1, 2 },
    [DTYPE_Q8_0] = { "q8_0", DTYPE_BLOCK, 34 },
    [DTYPE_Q4_1] = { "q4_1", DTYPE_BLOCK, 20 },
};

static const struct dtype_info *info(enum dtype t)
{
    ASSERT(t >= 0 && t < DTYPE_COUNT);
    return &DTYPES[t];
}

const char *dtype_name(enum dtype t) { return info(t)->name; }
size_t      dtype_block(enum dtype t) { return info(t)->block; }
size_t      dtype_block_bytes(enum dtype t) { return info(t)->block_bytes; }

size_t dtype_row_bytes(enum dtype t, size_t n)
{
    ASSERT(n % info(t)->block == 0);
    return n / info(t)->block * info(t)->block_bytes;
}

static float float_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint32_t bits_of(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

float dtype_bf16_to_f32(uint16_t h) { return float_of((uint32_t)h << 16); }

float dtype_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 31) /* the quiet bit is set, as the hardware's conversion does */
        return float_of(sign | 0x7f800000 | (fraction ? 0x400000 | fraction << 13 : 0));
    if (exponent == 0) { /* fraction * 2^-24 is exact */
        float magnitude = (float)fraction * 0x1p-24f;
        return float_of(sign | bits_of(magnitude));
    }
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

uint16_t dtype_f32_to_bf16(float f)
{
    uint32_t b = bits_of(f);
    if ((b & 0x7fffffff) > 0x7f800000) return (uint16_t)(b >> 16 | 0x40); /* a NaN stays one */
    return (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

uint16_t dtype_f32_to_f16(float f)
{
    uint32_t b = bits_of(f), sign = b >> 16 & 0x8000, magnitude = b & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and more round to infinity */
    if (magnitude < 0x38800000) {
        /* Below 2^-14: adding 0.5 makes the f32 adder round to a multiple of 2^-24, to nearest even. */
        return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000));
    }
    uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((rounded >> 13) - (112u << 10)));
}

static uint16_t load16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

static void q8_0_to_f32(const uint8_t *src, float *dst)
{
    float d = dtype_f16_to_f32(load16(src));
    for (int i = 0; i < DTYPE_BLOCK; i++) dst[i] = d * (float)(int8_t)src[2 + i];
}

/* d*q is exact in f32 (11 + 4 bits), so the sum is rounded once, just as fmaf(d, q, m) would be. */
static void q4_1_to_f32(const uint8_t *src, float *dst)
{
    float d = dtype_f16_to_f32(load16(src)), m = dtype_f16_to_f32(load16(src + 2));
    for (int i = 0; i < DTYPE_BLOCK / 2; i++) {
        uint8_t pair = src[4 + i];
        dst[i] = d * (float)(pair & 15) + m;
        dst[i + DTYPE_BLOCK / 2] = d * (float)(pair >> 4) + m;
    }
}

void dtype_to_f32(enum dtype t, const void *src, float *dst, size_t n)
{
    const uint8_t *p = src;
    ASSERT(n % info(t)->block == 0);
    switch (t) {
    case DTYPE_F32: memcpy(dst, src, n * sizeof *dst); break;
    case DTYPE_F16:
        for (size_t i = 0; i < n; i++) dst[i] = dtype_f16_to_f32(load16(p + 2 * i));
        break;
    case DTYPE_BF16:
        for (size_t i = 0; i < n; i++) dst[i] = dtype_bf16_to_f32(load16(p + 2 * i));
        break;
    case DTYPE_Q8_0:
        for (size_t i = 0; i < n; i += DTYPE_BLOCK) q8_0_to_f32(p + i / DTYPE_BLOCK * 34, dst + i);
        break;
    case DTYPE_Q4_1:
        for (size_t i = 0; i < n; i += DTYPE_BLOCK) q4_1_to_f32(p + i / DTYPE_BLOCK * 20, dst + i);
        break;
    case DTYPE_COUNT: break;
    }
}
