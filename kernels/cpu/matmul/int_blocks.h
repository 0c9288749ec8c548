/* int_blocks.h - where the integers of a block of 32 k lie in a panel, for micro-kernels that are
 * compiled once per layout.
 *
 * `layout` is a constant at every call. block_kind has what the code depends on, so that layouts
 * which differ only in the place of their words share one tile. Thread: any. */
#ifndef BATON_KERNELS_CPU_MATMUL_INT_BLOCKS_H
#define BATON_KERNELS_CPU_MATMUL_INT_BLOCKS_H

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/weights/weight_layout_offsets.h"

#define BLOCK_INLINE static inline __attribute__((always_inline))

enum {
    WORDS = BLOCK_K / 4,
    INT_TILE_ROWS = 6,    /* rows of an integer tile */
    PREFETCH_BYTES = 8192 /* distance of prefetches in a panel, some 200 ns ahead; the
                           * hardware prefetcher stops at the end of a page */
};

/* The properties of a layout that the arithmetic depends on; they are constants once inlined. */
struct block_kind {
    bool zero;   /* stored numbers are offset */
    bool scaled; /* groups have a d: all layouts but W4 and W8 */
    bool halves; /* groups of 16 */
    bool has_m;
    bool bytes; /* q above 15 occurs */
};

BLOCK_INLINE struct block_kind block_kind(const int layout)
{
    const struct weight_layout_info *f = &LAYOUTS[layout];
    return (struct block_kind){
        .zero = f->zero != 0,
        .scaled = f->group != 0,
        .halves = f->group == BLOCK_K / 2,
        .has_m = f->has_m,
        .bytes = f->bits == 8,
    };
}

/* Layouts that differ only in their zero point share one microkernel; returns the layout that it is
 * named after. */
static inline int block_kernel_layout(int layout)
{
    const struct weight_layout_info *f = weight_layout_info(layout);
    if (f->group == 0) return LAYOUT_W8;
    if (f->group == BLOCK_K / 2) return f->zero ? LAYOUT_Q8K16 : LAYOUT_Q4K16;
    if (f->has_m) return f->zero ? LAYOUT_Q8K32 : LAYOUT_Q4M;
    return LAYOUT_Q8;
}

/* A statement of a switch over layouts, compiled once for each with LAYOUT a constant:
 *     switch (w->layout) { INTEGER_LAYOUTS(LAYOUT_CASE, f(x, LAYOUT)) } */
#define LAYOUT_CASE(name, ...)                                                                     \
    case LAYOUT_##name: {                                                                          \
        enum { LAYOUT = LAYOUT_##name };                                                           \
        __VA_ARGS__;                                                                               \
        break;                                                                                     \
    }

/* Returns how many blocks of 32 k are stored together: those of a super block, or one. */
BLOCK_INLINE size_t blocks_per_superblock(const int layout)
{
    return LAYOUT_OFFSETS[layout].k / BLOCK_K;
}

/* Returns the bytes of a panel per 32 k. */
BLOCK_INLINE size_t block_bytes(const int layout)
{
    return LAYOUT_OFFSETS[layout].bytes / blocks_per_superblock(layout);
}

/* Returns the block or super block that contains block b of a panel. */
BLOCK_INLINE const char *block_at(const int layout, const char *panel, size_t b)
{
    return panel + b / blocks_per_superblock(layout) * LAYOUT_OFFSETS[layout].bytes;
}

/* Returns its words: 8 per lane, or 4 for nibbles. */
BLOCK_INLINE const uint32_t (*block_words(const int layout, const char *panel, size_t b))[PANEL]
{
    const size_t bytes = BLOCK_K * PANEL * (size_t)LAYOUTS[layout].bits / 8;
    return (const uint32_t(*)[PANEL])(const void *)(block_at(layout, panel, b) +
                                                    LAYOUT_OFFSETS[layout].q +
                                                    b % blocks_per_superblock(layout) * bytes);
}

/* Returns the index of group `part` of block b among the groups of its super block. */
BLOCK_INLINE size_t block_group(const int layout, size_t b, size_t part)
{
    return (b % blocks_per_superblock(layout) * (BLOCK_K / (size_t)LAYOUTS[layout].group) + part) *
           PANEL;
}

#endif
