/* dtype.c - sizes of element types and their conversions to f32, in plain C.
 *
 * Conversions of scalar types have no branches, so that whole matrices are converted at memory
 * speed; block types go through the integers of dtype_blocks.h. Thread: any. */
#include "kernels/dtype.h"

#include <string.h>

#include "kernels/dtype_blocks.h"
#include "kernels/float_bits.h"
#include "shared/base/assert.h"

struct dtype_info {
    const char *name;
    size_t block, block_bytes;
};

static const struct dtype_info DTYPES[DTYPE_COUNT] = {
    [DTYPE_F32] = { "f32", 1, 4 },
    [DTYPE_F16] = { "f16", 1, 2 },
    [DTYPE_BF16] = { "bf16", 1, 2 },
    [DTYPE_F8_E4M3] = { "f8_e4m3", 1, 1 },
    [DTYPE_Q8_0] = { "q8_0", DTYPE_BLOCK, 34 },
    [DTYPE_Q4_0] = { "q4_0", DTYPE_BLOCK, 18 },
    [DTYPE_Q4_1] = { "q4_1", DTYPE_BLOCK, 20 },
    [DTYPE_Q5_0] = { "q5_0", DTYPE_BLOCK, 22 },
    [DTYPE_Q5_1] = { "q5_1", DTYPE_BLOCK, 24 },
    [DTYPE_IQ4_NL] = { "iq4_nl", DTYPE_BLOCK, 18 },
    [DTYPE_Q2_K] = { "q2_k", DTYPE_SUPERBLOCK, 84 },
    [DTYPE_Q3_K] = { "q3_k", DTYPE_SUPERBLOCK, 110 },
    [DTYPE_Q4_K] = { "q4_k", DTYPE_SUPERBLOCK, 144 },
    [DTYPE_Q5_K] = { "q5_k", DTYPE_SUPERBLOCK, 176 },
    [DTYPE_Q6_K] = { "q6_k", DTYPE_SUPERBLOCK, 210 },
    [DTYPE_IQ4_XS] = { "iq4_xs", DTYPE_SUPERBLOCK, 136 },
};

static const struct dtype_info *info(enum dtype t)
{
    ASSERT((unsigned)t < DTYPE_COUNT);
    return &DTYPES[t];
}

const char *dtype_name(enum dtype t) { return info(t)->name; }
size_t dtype_block(enum dtype t) { return info(t)->block; }
size_t dtype_block_bytes(enum dtype t) { return info(t)->block_bytes; }

size_t dtype_row_bytes(enum dtype t, size_t n)
{
    ASSERT(n % info(t)->block == 0);
    return n / info(t)->block * info(t)->block_bytes;
}

/* ---- single values ---- */

float dtype_bf16_to_f32(uint16_t h) { return float_from_bf16(h); }
float dtype_f8_e4m3_to_f32(uint8_t b) { return float_from_f8(b); }
uint16_t dtype_f32_to_bf16(float f) { return float_to_bf16(f); }

uint16_t dtype_f32_to_f16(float f)
{
    uint32_t b = bits_of_float(f), sign = b >> 16 & 0x8000, magnitude = b & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    /* 65520 and more round to infinity */
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) {
        /* Below 2^-14: adding 0.5 makes the f32 adder round to a multiple of 2^-24, to nearest
         * even. */
        return (uint16_t)(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000));
    }
    uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((rounded >> 13) - (112u << 10)));
}

/* ---- rows ---- */

static void blocks_to_f32(const struct dtype_info *t, const struct dtype_blocks *b,
                          const uint8_t *src, float *dst, size_t n)
{
    struct dtype_unpacked_block ints;
    size_t group = t->block == DTYPE_BLOCK ? DTYPE_BLOCK : DTYPE_GROUP;
    for (size_t k = 0; k < n; k += t->block, src += t->block_bytes) {
        b->unpack(&ints, src);
        float d = float_from_f16(ints.d), m = float_from_f16(ints.m);
        for (size_t i = 0; i < t->block; i++) {
            bool scaled = group == DTYPE_GROUP;
            float unit = scaled ? d * (float)ints.scale[i / group] : d,
                  offset = scaled ? -(m * (float)ints.min[i / group]) : m;
            float w = unit * (float)(ints.q[i] - b->zero);
            dst[k + i] = b->has_m ? w + offset : w;
        }
    }
}

void dtype_to_f32(enum dtype t, const void *src, float *dst, size_t n)
{
    const struct dtype_blocks *blocks = dtype_blocks_of(t);
    const uint8_t *p = src;
    uint16_t h;
    ASSERT(n % info(t)->block == 0);
    if (blocks) blocks_to_f32(info(t), blocks, p, dst, n);
    else if (t == DTYPE_F32) memcpy(dst, src, n * sizeof *dst);
    else if (t == DTYPE_F8_E4M3)
        for (size_t i = 0; i < n; i++) dst[i] = float_from_f8(p[i]);
    else if (t == DTYPE_F16)
        for (size_t i = 0; i < n; i++) {
            memcpy(&h, p + 2 * i, sizeof h);
            dst[i] = float_from_f16(h);
        }
    else
        for (size_t i = 0; i < n; i++) {
            memcpy(&h, p + 2 * i, sizeof h);
            dst[i] = float_from_bf16(h);
        }
}
