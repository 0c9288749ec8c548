/* form_layout.h - where the parts of packed blocks lie, as numbers: one table serves writing (form_pack.c) and reading (form.c).
 * Thread: any. */
#ifndef BATON_KERNELS_CPU_FORM_LAYOUT_H
#define BATON_KERNELS_CPU_FORM_LAYOUT_H

#include "kernels/cpu/form.h"

struct form_layout {
    size_t k, bytes;              /* of a block; a plain form's block is one word of each lane */
    size_t d, m, scale, min, q;   /* offsets in a block of an integer form; those a form lacks are 0 */
};

extern const struct form_layout FORM_LAYOUTS[FORM_COUNT];

/* What follows the blocks of a panel: f32 scales of C forms (one per lane) and F8 (one per F8_BLOCK k's). */
static inline size_t form_tail_at(int form, size_t n_in)
{
    return (n_in + FORM_LAYOUTS[form].k - 1) / FORM_LAYOUTS[form].k * FORM_LAYOUTS[form].bytes;
}

#endif
