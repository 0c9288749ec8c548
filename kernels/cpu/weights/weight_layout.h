/* weight_layout.h - packed layouts of a matrix: panels of 16 outputs, so that vector lanes run over
 * outputs. The table of layouts is below.
 *
 * Panel i holds outputs 16i .. 16i+15 (those past n_out are zero) for all k, at data + i *
 * weight_layout_panel_bytes. A lane accumulates one output, k ascending: there is no reduction
 * across lanes, and all instruction sets share one layout and one result. Thread: any (read only
 * once packed). */
#ifndef BATON_KERNELS_CPU_WEIGHTS_WEIGHT_LAYOUT_H
#define BATON_KERNELS_CPU_WEIGHTS_WEIGHT_LAYOUT_H

#include "kernels/backend.h"

enum { PANEL = 16, BLOCK_K = 32, SUPERBLOCK_K = 256 };

/* clang-format off: a table.
 *
 *   F32    [n_in][16] f32
 *   F16    [ceil(n_in/2)][16] pairs of u16: k even in the low half, k odd in the high half
 *   BF16   the same
 *   F8     [ceil(n_in/4)][16][4] bytes of e4m3, k = 4i + b in byte b; then f32 scales
 *          [ceil(n_in/128)]
 *   integers: w = d * (q - zero) + m with unsigned q of 8 or 4 bits, and one d (and m) per group of
 *   k and output. M: with an offset m; K16, K32: groups of a K-quant; W: one scale per output.
 *     name    from                      q       zero  group  d                   m
 *     Q8      Q8_0, Q5_0, IQ4_NL        byte    128   32     f16                 -
 *     Q8M     Q5_1                      byte    0     32     f16                 f16
 *     Q4      Q4_0                      nibble  8     32     f16                 -
 *     Q4M     Q4_1                      nibble  0     32     f16                 f16
 *     Q8K16   Q6_K                      byte    128   16     f16 * i8            -f16 * i8
 *     Q4K16   Q2_K, Q3_K                nibble  0     16     f16 * i8            -f16 * i8   (Q3_K: m = -4 d)
 *     Q8K32   Q5_K, IQ4_XS              byte    128   32     f16 * i8            -f16 * i8
 *     Q4K32   Q4_K                      nibble  0     32     f16 * i8            -f16 * i8
 *     W8      wint8                     byte    128   n_in   f32 per output      -
 *     W4      wint4                     nibble  8     n_in   f32 per output      -
 *
 * Integer blocks hold 32 k as `uint32_t q[n][16]`: word i of a byte layout has k = 4i + b in byte b
 * (8 words); word i of a nibble layout has k = 8i + b in the low and k = 8i + 4 + b in the high
 * nibble of byte b (4 words). So one word matches four neighbouring inputs of a dot-product
 * instruction, and the inputs keep their order. */
/* clang-format on */

/* X(name, ..) for each integer layout, with the arguments after the name passed on. */
#define INTEGER_LAYOUTS(X, ...)                                                                    \
    X(Q8, __VA_ARGS__)                                                                             \
    X(Q8M, __VA_ARGS__)                                                                            \
    X(Q4, __VA_ARGS__)                                                                             \
    X(Q4M, __VA_ARGS__)                                                                            \
    X(Q8K16, __VA_ARGS__)                                                                          \
    X(Q4K16, __VA_ARGS__)                                                                          \
    X(Q8K32, __VA_ARGS__) X(Q4K32, __VA_ARGS__) X(W8, __VA_ARGS__) X(W4, __VA_ARGS__)
#define LAYOUT_NAME(name, ...) LAYOUT_##name,

enum weight_layout {
    LAYOUT_F32,
    LAYOUT_F16,
    LAYOUT_BF16,
    LAYOUT_F8,
    INTEGER_LAYOUTS(LAYOUT_NAME) LAYOUT_COUNT
};

struct block_q8 {
    uint16_t d[PANEL]; /* f16 */
    uint32_t q[8][PANEL];
};
struct block_q8m {
    uint16_t d[PANEL], m[PANEL]; /* f16 */
    uint32_t q[8][PANEL];
};
struct block_q4 {
    uint16_t d[PANEL];
    uint32_t q[4][PANEL];
};
struct block_q4m {
    uint16_t d[PANEL], m[PANEL];
    uint32_t q[4][PANEL];
};
/* 256 k's: 16 groups of 16; d = d * scale, m = -(dmin * min). */
struct block_q8k16 {
    uint16_t d[PANEL], dmin[PANEL];
    int8_t scale[16][PANEL], min[16][PANEL];
    uint32_t q[8][8][PANEL];
};
struct block_q4k16 {
    uint16_t d[PANEL], dmin[PANEL];
    int8_t scale[16][PANEL], min[16][PANEL]; /* Q3_K's offset is 4 * scale */
    uint32_t q[8][4][PANEL];
};
/* The same with 8 groups of 32, so half as many scales. */
struct block_q8k32 {
    uint16_t d[PANEL], dmin[PANEL];
    int8_t scale[8][PANEL], min[8][PANEL];
    uint32_t q[8][8][PANEL];
};
struct block_q4k32 {
    uint16_t d[PANEL], dmin[PANEL];
    int8_t scale[8][PANEL], min[8][PANEL];
    uint32_t q[8][4][PANEL];
};
/* W8 and W4: the words of all k (n_in rounded up to 32), then f32 scale[16]. */

struct weight_layout_info {
    bool integer;
    int bits; /* of q: 8 or 4; integers only */
    int zero;
    int group; /* k that share d and m: 32, 16, or 0: the whole row */
    bool has_m;
};
/* Indexed by constants in code that is compiled once per layout; elsewhere use
 * weight_layout_info. */
static const struct weight_layout_info LAYOUTS[LAYOUT_COUNT] = {
    [LAYOUT_F32] = { 0 },
    [LAYOUT_F16] = { 0 },
    [LAYOUT_BF16] = { 0 },
    [LAYOUT_F8] = { 0 },
    [LAYOUT_Q8] = { .integer = true, .bits = 8, .zero = 128, .group = 32 },
    [LAYOUT_Q8M] = { .integer = true, .bits = 8, .group = 32, .has_m = true },
    [LAYOUT_Q4] = { .integer = true, .bits = 4, .zero = 8, .group = 32 },
    [LAYOUT_Q4M] = { .integer = true, .bits = 4, .group = 32, .has_m = true },
    [LAYOUT_Q8K16] = { .integer = true, .bits = 8, .zero = 128, .group = 16, .has_m = true },
    [LAYOUT_Q4K16] = { .integer = true, .bits = 4, .group = 16, .has_m = true },
    [LAYOUT_Q8K32] = { .integer = true, .bits = 8, .zero = 128, .group = 32, .has_m = true },
    [LAYOUT_Q4K32] = { .integer = true, .bits = 4, .group = 32, .has_m = true },
    [LAYOUT_W8] = { .integer = true, .bits = 8, .zero = 128 },
    [LAYOUT_W4] = { .integer = true, .bits = 4, .zero = 8 },
};
const struct weight_layout_info *weight_layout_info(int layout);

/* Bytes of one panel of n_in k. */
size_t weight_layout_panel_bytes(int layout, size_t n_in);
/* The layout that a type is packed into. */
int weight_layout_of(enum dtype t, enum quantize q);
/* Dequantises n_k rows of a panel to f32, dst [n_k][PANEL]: the definition of the content of a
 * packed matrix. */
void weight_layout_dequantize(float *dst, const struct weight *w, size_t i_panel, size_t k_begin,
                              size_t n_k);
/* For tests: one element as f32. */
float weight_layout_element(const struct weight *w, size_t i_panel, size_t k, size_t lane);
/* Dequantises one row of a packed matrix to f32; dst [n_in]. */
void weight_layout_dequantize_row(const struct weight *w, size_t row, float *dst);
/* The weight ops of every CPU backend. */
enum status weight_layout_plan(const struct kernel_ctx *c, const struct weight_pack_args *a,
                               struct weight *out, struct err *err);
void weight_layout_release(struct kernel_ctx *c, struct weight *w);
enum status weight_layout_pack(struct kernel_ctx *c, const struct weight_pack_args *a,
                               struct weight *out, struct err *err);

/* A paired matrix has equally many panels for gate (the even ones) and up. */
static inline size_t panel_count(const struct weight *w)
{
    return w->paired ? 2 * ((w->n_out / 2 + PANEL - 1) / PANEL) : (w->n_out + PANEL - 1) / PANEL;
}

static inline const void *panel_at(const struct weight *w, size_t i_panel, size_t bytes_per_panel)
{
    return (const char *)w->data + i_panel * bytes_per_panel;
}

/* ---- unpacking integer layouts ---- */

enum { UNPACK_K = 256 };

/* UNPACK_K k of one panel with q in bytes for any layout, and f32 scales. Group i is k [i * group,
 * (i + 1) * group); W layouts have none and do not set d and m (their scale multiplies the finished
 * sum: weight_layout_channel_scale). */
struct unpacked_panel {
    _Alignas(64) uint8_t q[UNPACK_K / 4][PANEL][4];
    float d[UNPACK_K / 16][PANEL], m[UNPACK_K / 16][PANEL];
    /* Packed bytes that are probably unpacked next, which a tile may prefetch; 0 of them: none. */
    const char *next;
    size_t next_bytes;
};
/* Unpacks k_begin, a multiple of UNPACK_K, and n_k, of 32 (past n_in q and d are zero). The plain C
 * definition; the instruction sets have faster ones. */
void weight_layout_unpack_int(struct unpacked_panel *dst, const struct weight *w, size_t i_panel,
                              size_t k_begin, size_t n_k);
/* [16] factors of W layouts; NULL for others. */
const float *weight_layout_channel_scale(const struct weight *w, size_t i_panel);

#endif
