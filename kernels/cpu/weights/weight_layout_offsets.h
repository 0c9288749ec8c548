/* weight_layout_offsets.h - where the parts of packed blocks lie, as numbers: one table serves writing (weight_layout_pack.c), reading (weight_layout.c) and the
 * loops (int_blocks.h), for which its numbers are constants.
 * Thread: any. */
#ifndef BATON_KERNELS_CPU_WEIGHTS_WEIGHT_LAYOUT_OFFSETS_H
#define BATON_KERNELS_CPU_WEIGHTS_WEIGHT_LAYOUT_OFFSETS_H

#include "kernels/cpu/weights/weight_layout.h"

struct form_layout {
    size_t k, bytes;              /* of a block; a plain form's block is one word of each lane */
    size_t d, m, scale, min, q;   /* offsets in a block of an integer form; those a form lacks are 0 */
};

enum { LANE_WORDS = PANEL * 4 /* bytes of one word per lane */ };

#define AT(type, part) offsetof(struct type, part)
static const struct form_layout FORM_LAYOUTS[FORM_COUNT] = {
    [FORM_F32] = { .k = 1, .bytes = LANE_WORDS },
    [FORM_F16] = { .k = 2, .bytes = LANE_WORDS },
    [FORM_BF16] = { .k = 2, .bytes = LANE_WORDS },
    [FORM_F8] = { .k = 4, .bytes = LANE_WORDS },
    [FORM_I8] = { FORM_BLOCK, sizeof(struct block_i8), .d = AT(block_i8, d), .q = AT(block_i8, q) },
    [FORM_I8M] = { FORM_BLOCK, sizeof(struct block_i8m), .d = AT(block_i8m, d), .m = AT(block_i8m, m), .q = AT(block_i8m, q) },
    [FORM_U4] = { FORM_BLOCK, sizeof(struct block_u4), .d = AT(block_u4, d), .q = AT(block_u4, q) },
    [FORM_U4M] = { FORM_BLOCK, sizeof(struct block_u4m), .d = AT(block_u4m, d), .m = AT(block_u4m, m), .q = AT(block_u4m, q) },
    [FORM_K8] = { FORM_SUPER, sizeof(struct block_k8), AT(block_k8, d), AT(block_k8, dmin), AT(block_k8, scale), AT(block_k8, min), AT(block_k8, q) },
    [FORM_K4] = { FORM_SUPER, sizeof(struct block_k4), AT(block_k4, d), AT(block_k4, dmin), AT(block_k4, scale), AT(block_k4, min), AT(block_k4, q) },
    [FORM_S8] = { FORM_SUPER, sizeof(struct block_s8), AT(block_s8, d), AT(block_s8, dmin), AT(block_s8, scale), AT(block_s8, min), AT(block_s8, q) },
    [FORM_S4] = { FORM_SUPER, sizeof(struct block_s4), AT(block_s4, d), AT(block_s4, dmin), AT(block_s4, scale), AT(block_s4, min), AT(block_s4, q) },
    [FORM_C8] = { .k = FORM_BLOCK, .bytes = FORM_BLOCK / 4 * LANE_WORDS },
    [FORM_C4] = { .k = FORM_BLOCK, .bytes = FORM_BLOCK / 8 * LANE_WORDS },
};
#undef AT

/* What follows the blocks of a panel: f32 scales of C forms (one per lane) and F8 (one per F8_BLOCK k's). */
static inline size_t form_tail_at(int form, size_t n_in)
{
    return (n_in + FORM_LAYOUTS[form].k - 1) / FORM_LAYOUTS[form].k * FORM_LAYOUTS[form].bytes;
}

#endif
