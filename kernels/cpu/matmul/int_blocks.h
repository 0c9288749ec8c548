/* int_blocks.h - where the integers of a block of 32 k's lie in a panel, for loops that are compiled once per form.
 *
 * `form` is a constant at every call; block_kind tells what of form_info the code of a form depends on, so that forms that differ only in
 * where their words come from share one tile. Thread: any. */
#ifndef BATON_KERNELS_CPU_MATMUL_INT_BLOCKS_H
#define BATON_KERNELS_CPU_MATMUL_INT_BLOCKS_H

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/weights/weight_layout_offsets.h"

#define BLOCK_INLINE static inline __attribute__((always_inline))

enum {
    WORDS = FORM_BLOCK / 4,
    INT_TILE_ROWS = 6, /* rows of a tile of int chains */
    AHEAD = 8192       /* bytes of a panel asked for ahead of use: some 200 ns; the hardware does not look beyond a page */
};

/* What of a form the arithmetic depends on; constants once inlined. */
struct block_kind {
    bool zero;   /* stored numbers are offset */
    bool scaled; /* groups have a d: all but C forms */
    bool halves; /* groups of 16 */
    bool has_m;
    bool bytes;  /* q above 15 occurs */
};

BLOCK_INLINE struct block_kind block_kind(const int form)
{
    const struct form_info *f = &FORMS[form];
    return (struct block_kind){ .zero = f->zero != 0, .scaled = f->group != 0, .halves = f->group == FORM_BLOCK / 2, .has_m = f->has_m, .bytes = f->bits == 8 };
}

/* Of the forms whose unpacked blocks are summed up by the same code, the zero point apart, the one that names it. */
static inline int block_alike(int form)
{
    const struct form_info *f = form_info(form);
    if (f->group == 0) return FORM_C8;
    if (f->group == FORM_BLOCK / 2) return f->zero ? FORM_K8 : FORM_K4;
    if (f->has_m) return f->zero ? FORM_S8 : FORM_U4M;
    return FORM_I8;
}

/* A statement of a switch over forms, compiled once for each with FORM a constant:
 *     switch (w->form) { INTEGER_FORMS(FORM_CASE, f(x, FORM)) } */
#define FORM_CASE(name, ...) case FORM_##name: { enum { FORM = FORM_##name }; __VA_ARGS__; break; }

/* Blocks of 32 k's that lie together, in a super block or alone. */
BLOCK_INLINE size_t blocks_together(const int form) { return FORM_LAYOUTS[form].k / FORM_BLOCK; }

/* Bytes of a panel per 32 k's. */
BLOCK_INLINE size_t block_bytes(const int form) { return FORM_LAYOUTS[form].bytes / blocks_together(form); }

/* What block b of a panel lies in. */
BLOCK_INLINE const char *block_at(const int form, const char *panel, size_t b) { return panel + b / blocks_together(form) * FORM_LAYOUTS[form].bytes; }

/* Its words: 8 per lane, or 4 of nibbles. */
BLOCK_INLINE const uint32_t (*block_words(const int form, const char *panel, size_t b))[PANEL]
{
    const size_t bytes = FORM_BLOCK * PANEL * (size_t)FORMS[form].bits / 8;
    return (const uint32_t(*)[PANEL])(const void *)(block_at(form, panel, b) + FORM_LAYOUTS[form].q + b % blocks_together(form) * bytes);
}

/* Where the scales of a super block's group begin, `part` of block b, among those of all its groups. */
BLOCK_INLINE size_t block_group(const int form, size_t b, size_t part)
{
    return (b % blocks_together(form) * (FORM_BLOCK / (size_t)FORMS[form].group) + part) * PANEL;
}

#endif
