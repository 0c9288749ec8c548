/* weight_layout_offsets.h - offsets of the parts of packed blocks: one table serves writing
 * (weight_layout_pack.c), reading (weight_layout.c) and the micro-kernels (int_blocks.h), for which
 * its numbers are constants. Thread: any. */
#ifndef BATON_KERNELS_CPU_WEIGHTS_WEIGHT_LAYOUT_OFFSETS_H
#define BATON_KERNELS_CPU_WEIGHTS_WEIGHT_LAYOUT_OFFSETS_H

#include "kernels/cpu/weights/weight_layout.h"

struct weight_layout_offsets {
    size_t k, bytes;            /* of a block; of F32, F16, BF16 and F8: one word per lane */
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
    [LAYOUT_Q8] = { BLOCK_K, sizeof(struct block_q8), .d = AT(block_q8, d), .q = AT(block_q8, q) },
    [LAYOUT_Q8M] = { BLOCK_K, sizeof(struct block_q8m), .d = AT(block_q8m, d),
                     .m = AT(block_q8m, m), .q = AT(block_q8m, q) },
    [LAYOUT_Q4] = { BLOCK_K, sizeof(struct block_q4), .d = AT(block_q4, d), .q = AT(block_q4, q) },
    [LAYOUT_Q4M] = { BLOCK_K, sizeof(struct block_q4m), .d = AT(block_q4m, d),
                     .m = AT(block_q4m, m), .q = AT(block_q4m, q) },
    [LAYOUT_Q8K16] = { SUPERBLOCK_K, sizeof(struct block_q8k16), AT(block_q8k16, d),
                       AT(block_q8k16, dmin), AT(block_q8k16, scale), AT(block_q8k16, min),
                       AT(block_q8k16, q) },
    [LAYOUT_Q4K16] = { SUPERBLOCK_K, sizeof(struct block_q4k16), AT(block_q4k16, d),
                       AT(block_q4k16, dmin), AT(block_q4k16, scale), AT(block_q4k16, min),
                       AT(block_q4k16, q) },
    [LAYOUT_Q8K32] = { SUPERBLOCK_K, sizeof(struct block_q8k32), AT(block_q8k32, d),
                       AT(block_q8k32, dmin), AT(block_q8k32, scale), AT(block_q8k32, min),
                       AT(block_q8k32, q) },
    [LAYOUT_Q4K32] = { SUPERBLOCK_K, sizeof(struct block_q4k32), AT(block_q4k32, d),
                       AT(block_q4k32, dmin), AT(block_q4k32, scale), AT(block_q4k32, min),
                       AT(block_q4k32, q) },
    [LAYOUT_W8] = { .k = BLOCK_K, .bytes = BLOCK_K / 4 * LANE_WORDS },
    [LAYOUT_W4] = { .k = BLOCK_K, .bytes = BLOCK_K / 8 * LANE_WORDS },
};
#undef AT

/* Offset of what follows the blocks of a panel: f32 scales of W layouts (one per lane) and F8 (one
 * per F8_BLOCK k). */
static inline size_t weight_layout_tail_at(int layout, size_t n_in)
{
    return (n_in + LAYOUT_OFFSETS[layout].k - 1) / LAYOUT_OFFSETS[layout].k *
           LAYOUT_OFFSETS[layout].bytes;
}

#endif
