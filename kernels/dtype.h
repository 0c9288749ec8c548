/* dtype.h - element types of tensors in files: sizes and conversions to float.
 *
 * Block types hold 32 or 256 elements of one row with their scales; layouts are those of GGUF
 * (ggml's published format), for example Q8_0 { f16 d; i8 q[32] }, w = d*q; Q4_1 { f16 d; f16 m; u8
 * q[16] }, w = d*q + m, low nibbles are elements 0..15. F8_E4M3 is the "fn" form (no infinities,
 * 0x7f and 0xff are NaN, largest 448); its 128 x 128 block scales are a tensor of their own and not
 * part of the element. Thread: any. */
#ifndef BATON_KERNELS_DTYPE_H
#define BATON_KERNELS_DTYPE_H

#include <stddef.h>
#include <stdint.h>

#include "shared/base/status.h"

enum dtype {
    DTYPE_F32,
    DTYPE_F16,
    DTYPE_BF16,
    DTYPE_F8_E4M3,
    /* blocks of 32 */
    DTYPE_Q8_0,
    DTYPE_Q4_0,
    DTYPE_Q4_1,
    DTYPE_Q5_0,
    DTYPE_Q5_1,
    DTYPE_IQ4_NL,
    /* blocks of 256 */
    DTYPE_Q2_K,
    DTYPE_Q3_K,
    DTYPE_Q4_K,
    DTYPE_Q5_K,
    DTYPE_Q6_K,
    DTYPE_IQ4_XS,
    DTYPE_COUNT,
    DTYPE_I8 = 64 /* of KV pools alone, whose rows have a scale (kv_rows.h): no tensor of a file has
                   * it, and no function here knows it */
};

enum { DTYPE_BLOCK = 32, DTYPE_SUPERBLOCK = 256 };

const char *dtype_name(enum dtype t);
/* Elements per block and bytes per block. Scalar types (f32, f16, bf16, f8) have blocks of 1. */
size_t dtype_block(enum dtype t);
size_t dtype_block_bytes(enum dtype t);
/* Bytes of a row of n elements; n must be a multiple of the block. */
size_t dtype_row_bytes(enum dtype t, size_t n);
/* Converts n elements (whole blocks) to f32; src needs no alignment. Every value is rounded once:
 * it is the f32 nearest to the real number that the format's formula gives for the stored integers
 * and scales, where products of scales are formed in f32. */
void dtype_to_f32(enum dtype t, const void *src, float *dst, size_t n);
float dtype_bf16_to_f32(uint16_t h);
float dtype_f8_e4m3_to_f32(uint8_t b);
/* Rounds to nearest even. */
uint16_t dtype_f32_to_bf16(float f);
uint16_t dtype_f32_to_f16(float f);

#endif
