/* dtype_blocks.c - one function per block type, from the published layouts (ggml): stored bytes to
 * integers in row order.
 *
 * Loops run over bytes with fixed counts, so that a compiler makes vectors of them. Thread: any. */
#include "kernels/dtype_blocks.h"

#include <string.h>

#include "shared/base/assert.h"

enum { HALF = DTYPE_BLOCK / 2, BYTE_ZERO = 128 };

static uint16_t load16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

/* 16 bytes of nibbles to 32 elements: low halves are 0..15, high halves 16..31. */
static void unpack_nibbles(uint8_t *q, const uint8_t *qs)
{
    for (int i = 0; i < HALF; i++) {
        q[i] = qs[i] & 15;
        q[i + HALF] = qs[i] >> 4;
    }
}

/* Adds bit i of `bits`, times 16, to element i: eight at a time, a bit in each byte of a word. */
static void add_fifth_bits(uint8_t *q, const uint8_t *bits)
{
    for (int i = 0; i < DTYPE_BLOCK / 8; i++) {
        /* byte j is 0 or 1 << j; + 127 moves that to bit 7 */
        uint64_t eight, own = bits[i] * 0x0101010101010101u & 0x8040201008040201u;
        memcpy(&eight, q + 8 * i, sizeof eight);
        eight |= (own + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
        memcpy(q + 8 * i, &eight, sizeof eight);
    }
}

/* ---- blocks of 32 ---- */

static void unpack_q8_0(struct dtype_unpacked_block *b, const uint8_t *p) /* d | i8 q[32] */
{
    b->d = load16(p);
    b->m = 0;
    for (int i = 0; i < DTYPE_BLOCK; i++) b->q[i] = p[2 + i] ^ BYTE_ZERO;
}

static void unpack_q4_0(struct dtype_unpacked_block *b, const uint8_t *p) /* d | nibbles[16] */
{
    b->d = load16(p);
    b->m = 0;
    unpack_nibbles(b->q, p + 2);
}

static void unpack_q4_1(struct dtype_unpacked_block *b, const uint8_t *p) /* d | m | nibbles[16] */
{
    b->d = load16(p);
    b->m = load16(p + 2);
    unpack_nibbles(b->q, p + 4);
}

/* d | fifth bits[4] | nibbles[16]; q - 16 */
static void unpack_q5_0(struct dtype_unpacked_block *b, const uint8_t *p)
{
    b->d = load16(p);
    b->m = 0;
    unpack_nibbles(b->q, p + 6);
    add_fifth_bits(b->q, p + 2);
    for (int i = 0; i < DTYPE_BLOCK; i++) b->q[i] = (uint8_t)(b->q[i] + BYTE_ZERO - 16);
}

/* d | m | fifth bits[4] | nibbles[16] */
static void unpack_q5_1(struct dtype_unpacked_block *b, const uint8_t *p)
{
    b->d = load16(p);
    b->m = load16(p + 2);
    unpack_nibbles(b->q, p + 8);
    add_fifth_bits(b->q, p + 4);
}

/* The 16 values of the non-linear types, shifted by BYTE_ZERO. */
static const uint8_t NON_LINEAR[16] = { 1,   24,  45,  63,  79,  93,  106, 118,
                                        129, 141, 153, 166, 181, 197, 217, 241 };

static void unpack_non_linear(uint8_t *q, const uint8_t *qs)
{
    for (int i = 0; i < HALF; i++) {
        q[i] = NON_LINEAR[qs[i] & 15];
        q[i + HALF] = NON_LINEAR[qs[i] >> 4];
    }
}

static void unpack_iq4_nl(struct dtype_unpacked_block *b, const uint8_t *p) /* d | nibbles[16] */
{
    b->d = load16(p);
    b->m = 0;
    unpack_non_linear(b->q, p + 2);
}

/* ---- blocks of 256 ---- */

static void clear_mins(struct dtype_unpacked_block *b)
{
    b->m = 0;
    memset(b->min, 0, sizeof b->min);
}

/* Bit j of byte l, shifted left by `to`, into element 32j + l. */
static void add_bits(uint8_t *q, const uint8_t *bits, int to)
{
    for (int j = 0; j < 8; j++)
        for (int l = 0; l < 32; l++) q[32 * j + l] |= (uint8_t)((bits[l] >> j & 1) << to);
}

/* 64 bytes hold two bits of each element: byte 32h + l those of 128h + 32j + l for j = 0..3, from
 * the low end on. */
static void unpack_2bit(uint8_t *q, const uint8_t *qs)
{
    for (int h = 0; h < 2; h++)
        for (int j = 0; j < 4; j++)
            for (int l = 0; l < 32; l++) q[128 * h + 32 * j + l] = qs[32 * h + l] >> 2 * j & 3;
}

/* scale and min nibbles[16] | 2-bit parts[64] | d | dmin */
static void unpack_q2_k(struct dtype_unpacked_block *b, const uint8_t *p)
{
    for (int g = 0; g < DTYPE_GROUPS; g++) {
        b->scale[g] = (int8_t)(p[g] & 15);
        b->min[g] = (int8_t)(p[g] >> 4);
    }
    unpack_2bit(b->q, p + 16);
    b->d = load16(p + 80);
    b->m = load16(p + 82);
}

/* third bits[32] | 2-bit parts[64] | scales[12] | d. A clear third bit means q - 4: the offset of a
 * group is 4 * scale, in units of d. */
static void unpack_q3_k(struct dtype_unpacked_block *b, const uint8_t *p)
{
    const uint8_t *scales = p + 96;
    unpack_2bit(b->q, p + 32);
    add_bits(b->q, p, 2);
    for (int g = 0; g < DTYPE_GROUPS; g++) {
        int low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4,
            high = scales[8 + g % 4] >> 2 * (g / 4) & 3;
        b->scale[g] = (int8_t)((low | high << 4) - 32);
        b->min[g] = (int8_t)(4 * b->scale[g]);
    }
    b->d = b->m = load16(p + 108);
}

/* d | dmin | 12 bytes with 6 bits for the scale and the min of each of 8 groups of 32. */
static void unpack_scales_of_32(struct dtype_unpacked_block *b, const uint8_t *p)
{
    const uint8_t *s = p + 4;
    b->d = load16(p);
    b->m = load16(p + 2);
    for (int g = 0; g < 8; g++) {
        int scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
        int min = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
        b->scale[2 * g] = b->scale[2 * g + 1] = (int8_t)scale;
        b->min[2 * g] = b->min[2 * g + 1] = (int8_t)min;
    }
}

/* 32 bytes hold 64 elements: low halves are 0..31, high halves 32..63. */
static void unpack_nibbles_64(uint8_t *q, const uint8_t *qs)
{
    for (int c = 0; c < 4; c++)
        for (int l = 0; l < 32; l++) {
            q[64 * c + l] = qs[32 * c + l] & 15;
            q[64 * c + 32 + l] = qs[32 * c + l] >> 4;
        }
}

/* d | dmin | scales[12] | nibbles[128] */
static void unpack_q4_k(struct dtype_unpacked_block *b, const uint8_t *p)
{
    unpack_scales_of_32(b, p);
    unpack_nibbles_64(b->q, p + 16);
}

/* d | dmin | scales[12] | fifth bits[32] | nibbles[128] */
static void unpack_q5_k(struct dtype_unpacked_block *b, const uint8_t *p)
{
    unpack_scales_of_32(b, p);
    unpack_nibbles_64(b->q, p + 48);
    add_bits(b->q, p + 16, 4);
    for (int i = 0; i < DTYPE_SUPERBLOCK; i++) b->q[i] |= BYTE_ZERO;
}

/* low nibbles[128] | upper 2-bit parts[64] | i8 scales[16] | d; q - 32 */
static void unpack_q6_k(struct dtype_unpacked_block *b, const uint8_t *p)
{
    unpack_2bit(b->q, p + 128);
    for (int h = 0; h < 2; h++)
        for (int l = 0; l < 64; l++) {
            uint8_t *q = b->q + 128 * h + l, pair = p[64 * h + l];
            q[0] = (uint8_t)((q[0] << 4 | (pair & 15)) + BYTE_ZERO - 32);
            q[64] = (uint8_t)((q[64] << 4 | pair >> 4) + BYTE_ZERO - 32);
        }
    memcpy(b->scale, p + 192, sizeof b->scale);
    b->d = load16(p + 208);
    clear_mins(b);
}

/* d | u16 upper 2 bits of scales | low nibbles[4] | nibbles[128] */
static void unpack_iq4_xs(struct dtype_unpacked_block *b, const uint8_t *p)
{
    uint16_t high = load16(p + 2);
    for (int g = 0; g < 8; g++) {
        int scale = (p[4 + g / 2] >> 4 * (g % 2) & 15) | (high >> 2 * g & 3) << 4;
        b->scale[2 * g] = b->scale[2 * g + 1] = (int8_t)(scale - 32);
        unpack_non_linear(b->q + DTYPE_BLOCK * g, p + 8 + HALF * g);
    }
    b->d = load16(p);
    clear_mins(b);
}

static const struct dtype_blocks BLOCKS[DTYPE_COUNT] = {
    [DTYPE_Q8_0] = { unpack_q8_0, BYTE_ZERO, false },
    [DTYPE_Q4_0] = { unpack_q4_0, 8, false },
    [DTYPE_Q4_1] = { unpack_q4_1, 0, true },
    [DTYPE_Q5_0] = { unpack_q5_0, BYTE_ZERO, false },
    [DTYPE_Q5_1] = { unpack_q5_1, 0, true },
    [DTYPE_IQ4_NL] = { unpack_iq4_nl, BYTE_ZERO, false },
    [DTYPE_Q2_K] = { unpack_q2_k, 0, true },
    [DTYPE_Q3_K] = { unpack_q3_k, 0, true },
    [DTYPE_Q4_K] = { unpack_q4_k, 0, true },
    [DTYPE_Q5_K] = { unpack_q5_k, BYTE_ZERO, true },
    [DTYPE_Q6_K] = { unpack_q6_k, BYTE_ZERO, true },
    [DTYPE_IQ4_XS] = { unpack_iq4_xs, BYTE_ZERO, true },
};

const struct dtype_blocks *dtype_blocks_of(enum dtype t)
{
    ASSERT((unsigned)t < DTYPE_COUNT);
    return BLOCKS[t].unpack ? &BLOCKS[t] : NULL;
}
