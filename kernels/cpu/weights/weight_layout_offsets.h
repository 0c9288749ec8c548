/* weight_layout_offsets.h - offsets of the parts of packed blocks: one table serves writing
 * (weight_layout_pack.c), reading (weight_layout.c) and the micro-kernels (int_blocks.h), for which
 * its numbers are constants. Thread: any. */
#ifndef BATON_KERNELS_CPU_WEIGHTS_WEIGHT_LAYOUT_OFFSETS_H
#define BATON_KERNELS_CPU_WEIGHTS_WEIGHT_LAYOUT_OFFSETS_H

#include "kernels/cpu/weights/weight_layout.h"

struct weight_layout_offsets {
    size_t k, bytes;            /* of a block; a plain layout's block is one word per lane */
    size_t d, m, scale, min, q; /* offsets in a block of an integer layout; 0 if a layout lacks
                                 * it */
};

enum { LANE_WORDS = PANEL * 4 /* bytes of one word per lane */ };

#define AT(type, part) offsetof(struct type, part)
static const struct weight_layout_offsets LAYOUT_OFFSETS[LAYOUT_COUNT] = {
    [LAYOUT_F32] = { .k = 1, .bytes = LANE_WORDS },
    [LAYOUT_F16] = { .k = 2, .bytes = LANE_WORDS },
    [LAYOUT_BF16] = { .k = 2, .bytes = LANE_WORDS },
    [LAYOUT_F8] = { .k = 4, .bytes = LANE_WORDS },
    [LAYOUT_I8] = { BLOCK_K, sizeof(struct block_i8), .d = AT(block_i8, d), .q = AT(block_i8, q) },
    [LAYOUT_I8M] = { BLOCK_K, sizeof(struct block_i8m), .d = AT(block_i8m, d),
                     .m = AT(block_i8m, m), .q = AT(block_i8m, q) },
    [LAYOUT_U4] = { BLOCK_K, sizeof(struct block_u4), .d = AT(block_u4, d), .q = AT(block_u4, q) },
    [LAYOUT_U4M] = { BLOCK_K, sizeof(struct block_u4m), .d = AT(block_u4m, d),
                     .m = AT(block_u4m, m), .q = AT(block_u4m, q) },
    [LAYOUT_K8] = { SUPERBLOCK_K, sizeof(struct block_k8), AT(block_k8, d), AT(block_k8, dmin),
                    AT(block_k8, scale), AT(block_k8, min), AT(block_k8, q) },
    [LAYOUT_K4] = { SUPERBLOCK_K, sizeof(struct block_k4), AT(block_k4, d), AT(block_k4, dmin),
                    AT(block_k4, scale), AT(block_k4, min), AT(block_k4, q) },
    [LAYOUT_S8] = { SUPERBLOCK_K, sizeof(struct block_s8), AT(block_s8, d), AT(block_s8, dmin),
                    AT(block_s8, scale), AT(block_s8, min), AT(block_s8, q) },
    [LAYOUT_S4] = { SUPERBLOCK_K, sizeof(struct block_s4), AT(block_s4, d), AT(block_s4, dmin),
                    AT(block_s4, scale), AT(block_s4, min), AT(block_s4, q) },
    [LAYOUT_C8] = { .k = BLOCK_K, .bytes = BLOCK_K / 4 * LANE_WORDS },
    [LAYOUT_C4] = { .k = BLOCK_K, .bytes = BLOCK_K / 8 * LANE_WORDS },
};
#undef AT

/* Offset of what follows the blocks of a panel: f32 scales of C layouts (one per lane) and F8 (one
 * per F8_BLOCK k). */
static inline size_t weight_layout_tail_at(int layout, size_t n_in)
{
    return (n_in + LAYOUT_OFFSETS[layout].k - 1) / LAYOUT_OFFSETS[layout].k *
           LAYOUT_OFFSETS[layout].bytes;
}

#endif
