/* blocks.h - where the integers of a block of 32 k's lie in a panel, for loops that are compiled once per form.
 *
 * `form` is a constant at every call; block_kind tells what of form_info the code of a form depends on, so that forms that differ only in
 * where their words come from share one tile. Thread: any. */
#ifndef BATON_KERNELS_CPU_BLOCKS_H
#define BATON_KERNELS_CPU_BLOCKS_H

#include "kernels/cpu/cpu_row.h"

#define BLOCK_INLINE static inline __attribute__((always_inline))

enum {
    WORDS = FORM_BLOCK / 4,
    INT_TILE_ROWS = 6, /* rows of a tile of int chains */
    AHEAD = 8192       /* bytes of a panel asked for ahead of use: some 200 ns; the hardware does not look beyond a page */
};

BLOCK_INLINE bool block_is_bytes(const int form) { return form == FORM_I8 || form == FORM_I8M || form == FORM_K8 || form == FORM_S8 || form == FORM_C8; }

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
    return (struct block_kind){ .zero = form != FORM_I8M && form != FORM_U4M && form != FORM_K4 && form != FORM_S4,
                                .scaled = form != FORM_C8 && form != FORM_C4,
                                .halves = form == FORM_K8 || form == FORM_K4,
                                .has_m = form == FORM_I8M || form == FORM_U4M || form == FORM_K8 || form == FORM_K4 || form == FORM_S8 || form == FORM_S4,
                                .bytes = block_is_bytes(form) };
}

BLOCK_INLINE int block_zero(const int form) { return !block_kind(form).zero ? 0 : block_is_bytes(form) ? 128 : 8; }

/* Of the forms whose unpacked blocks are summed up by the same code, the zero point apart, the one that names it. */
static inline int block_alike(const struct form_info *f)
{
    if (f->group == 0) return FORM_C8;
    if (f->group == 16) return f->zero ? FORM_K8 : FORM_K4;
    if (f->has_m) return f->zero ? FORM_S8 : FORM_U4M;
    return FORM_I8;
}

/* The form that an info describes, or one whose unpacked blocks have the same arithmetic (S4: U4M). */
static inline int block_form(const struct form_info *f)
{
    bool nibbles = f->bits == 4;
    if (f->group == 0) return nibbles ? FORM_C4 : FORM_C8;
    if (f->group == 16) return nibbles ? FORM_K4 : FORM_K8;
    if (f->has_m) return nibbles ? FORM_U4M : f->zero ? FORM_S8 : FORM_I8M;
    return nibbles ? FORM_U4 : FORM_I8;
}

/* Bytes of a panel per 32 k's (of a super block: an eighth). */
BLOCK_INLINE size_t block_bytes(const int form)
{
    switch (form) {
    case FORM_I8: return sizeof(struct block_i8);
    case FORM_I8M: return sizeof(struct block_i8m);
    case FORM_U4: return sizeof(struct block_u4);
    case FORM_U4M: return sizeof(struct block_u4m);
    case FORM_K8: return sizeof(struct block_k8) / 8;
    case FORM_K4: return sizeof(struct block_k4) / 8;
    case FORM_S8: return sizeof(struct block_s8) / 8;
    case FORM_S4: return sizeof(struct block_s4) / 8;
    case FORM_C4: return sizeof(uint32_t[WORDS / 2][PANEL]);
    default: return sizeof(uint32_t[WORDS][PANEL]);
    }
}

BLOCK_INLINE const uint32_t (*block_words(const int form, const char *panel, size_t b))[PANEL]
{
    switch (form) {
    case FORM_I8: return ((const struct block_i8 *)panel)[b].q;
    case FORM_I8M: return ((const struct block_i8m *)panel)[b].q;
    case FORM_U4: return ((const struct block_u4 *)panel)[b].q;
    case FORM_U4M: return ((const struct block_u4m *)panel)[b].q;
    case FORM_K8: return ((const struct block_k8 *)panel)[b / 8].q[b % 8];
    case FORM_K4: return ((const struct block_k4 *)panel)[b / 8].q[b % 8];
    case FORM_S8: return ((const struct block_s8 *)panel)[b / 8].q[b % 8];
    case FORM_S4: return ((const struct block_s4 *)panel)[b / 8].q[b % 8];
    case FORM_C4: return (const uint32_t(*)[PANEL])panel + b * (WORDS / 2);
    default: return (const uint32_t(*)[PANEL])panel + b * WORDS;
    }
}

#endif
