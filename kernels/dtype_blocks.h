/* dtype_blocks.h - block types of GGUF unpacked into the integers they store: what dtype_to_f32
 * and packing have in common.
 *
 * A block of 32 elements means w = d * (q - zero), or d * q + m where the type has an offset. A
 * block of 256 has 16 groups of 16 elements: w = (d * scale) * (q - zero) - m * min. d and m are
 * f16 bits. The products are exact in f32 (11 bits of d, 7 of a scale, at most 7 of q - zero), so
 * the sum rounds once, as a fused multiply-add would. q is unsigned: types with negative numbers
 * are shifted by `zero`, which is 128 if q needs 8 bits and 8 for Q4_0. Thread: any. */
#ifndef BATON_KERNELS_DTYPE_BLOCKS_H
#define BATON_KERNELS_DTYPE_BLOCKS_H

#include <stdbool.h>

#include "kernels/dtype.h"

enum { DTYPE_GROUP = 16, DTYPE_GROUPS = DTYPE_SUPERBLOCK / DTYPE_GROUP };

struct dtype_unpacked_block {
    _Alignas(16) uint8_t q[DTYPE_SUPERBLOCK]; /* in the order of the row; a block of 32 leaves the
                                               * rest alone */
    int8_t scale[DTYPE_GROUPS], min[DTYPE_GROUPS]; /* blocks of 256 only */
    uint16_t d, m;                                 /* f16; m 0 where the type has no offset */
};

struct dtype_blocks {
    void (*unpack)(struct dtype_unpacked_block *dst, const uint8_t *block);
    int zero;
    bool has_m;
};

/* NULL for scalar types. */
const struct dtype_blocks *dtype_blocks_of(enum dtype t);

#endif
