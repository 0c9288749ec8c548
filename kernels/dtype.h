/* dtype.h - element types of tensors: sizes and conversions to float.
 *
 * Block types hold DTYPE_BLOCK elements of one row with their scale; layouts are those of GGUF (ggml's published format):
 * Q8_0 { f16 d; i8 q[32] }, w = d*q; Q4_1 { f16 d; f16 m; u8 q[16] }, w = d*q + m, low nibbles are elements 0..15.
 * Thread: any. */
#ifndef BATON_KERNELS_DTYPE_H
#define BATON_KERNELS_DTYPE_H

#include <stddef.h>
#include <stdint.h>

#include "shared/base/status.h"

enum dtype { DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_Q8_0, DTYPE_Q4_1, DTYPE_COUNT };

enum { DTYPE_BLOCK = 32 };

const char *dtype_name(enum dtype t);
/* Elements per block (1 for plain types) and bytes per block. */
size_t      dtype_block(enum dtype t);
size_t      dtype_block_bytes(enum dtype t);
/* Bytes of a row of n elements; n must be a multiple of the block. */
size_t      dtype_row_bytes(enum dtype t, size_t n);
/* Convert n elements (whole blocks) to f32; src needs no alignment. */
void        dtype_to_f32(enum dtype t, const void *src, float *dst, size_t n);
float       dtype_f16_to_f32(uint16_t h);
float       dtype_bf16_to_f32(uint16_t h);
/* Round to nearest even. */
uint16_t    dtype_f32_to_bf16(float f);
uint16_t    dtype_f32_to_f16(float f);

#endif
