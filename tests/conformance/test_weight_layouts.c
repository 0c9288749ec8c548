/* test_weight_layouts.c - packed matrices have exactly the numbers of the file: every type, join,
 * orientation and odd size.
 *
 * The reference is a plain [n_out][n_in] f32 matrix that this file computes from the source bytes
 * with dtype_to_f32, or for --quantization with quantize_channel and quantize_f8_block
 * (tests/unit/kernels tests those). All comparisons are of bits. Sources are at odd addresses in
 * buffers of exactly their size, so that a sanitizer build finds every stray read. */
#include "kernels/cpu/weights/weight_layout.h"
#include "kernels/quantize.h"
#include "tests/conformance/kernel_fixture.h"

enum { PARTS_MAX = 3 };

static void release(struct weight *w)
{
    /* all CPU backends have the same release */
    struct kernel_ctx c = { .weight_ops = KERNEL_BACKENDS[0]->weight_ops };
    weight_release(&c, w);
}

/* ---- sources ---- */

struct shape {
    enum dtype dtype;
    enum quantize quantize;
    enum weight_join join;
    size_t n_parts, n_out[PARTS_MAX], n_in, gap; /* bytes between stored rows */
    bool transposed, scaled;
};

struct source {
    struct weight_src parts[PARTS_MAX];
    uint8_t *bytes[PARTS_MAX];
    float *scales[PARTS_MAX];
    struct weight_pack_args args;
    float *wide; /* [n_out][n_in]: what the packed matrix must hold */
    size_t n_out;
};

static size_t blocks_128(size_t n) { return (n + F8_BLOCK - 1) / F8_BLOCK; }

/* Converts the part to f32, directly from its bytes. */
static void upconvert_source(const struct weight_src *s, float *wide)
{
    size_t across = s->transposed ? s->n_out : s->n_in, down = s->transposed ? s->n_in : s->n_out;
    size_t stride = s->row_bytes ? s->row_bytes : dtype_row_bytes(s->dtype, across);
    float *row = MEM_ARRAY(float, across);
    for (size_t r = 0; r < down; r++) {
        dtype_to_f32(s->dtype, (const uint8_t *)s->data + r * stride, row, across);
        for (size_t c = 0; c < across; c++)
            wide[s->transposed ? c * s->n_in + r : r * s->n_in + c] = row[c];
    }
    mem_free(row);
    if (!s->scales) return;
    for (size_t i = 0; i < s->n_out; i++)
        for (size_t k = 0; k < s->n_in; k++)
            wide[i * s->n_in + k] *= s->scales[i / F8_BLOCK * blocks_128(s->n_in) + k / F8_BLOCK];
}

static void quantize_wide(float *wide, size_t n_out, size_t n_in, enum quantize how)
{
    int8_t *q = MEM_ARRAY(int8_t, n_in);
    for (size_t i = 0; how != QUANTIZE_BLOCK_FP8 && i < n_out; i++) {
        float scale = quantize_channel(wide + i * n_in, n_in, how == QUANTIZE_WINT8 ? 127 : 7, q);
        for (size_t k = 0; k < n_in; k++) wide[i * n_in + k] = scale * (float)q[k];
    }
    mem_free(q);
    for (size_t i = 0; how == QUANTIZE_BLOCK_FP8 && i < n_out; i += F8_BLOCK)
        for (size_t k = 0; k < n_in; k += F8_BLOCK) {
            uint8_t q8[F8_BLOCK * F8_BLOCK];
            size_t n_rows = n_out - i < F8_BLOCK ? n_out - i : F8_BLOCK,
                   n_k = n_in - k < F8_BLOCK ? n_in - k : F8_BLOCK;
            float scale = quantize_f8_block(wide + i * n_in + k, n_in, n_rows, n_k, q8, F8_BLOCK);
            for (size_t r = 0; r < n_rows; r++)
                for (size_t c = 0; c < n_k; c++)
                    wide[(i + r) * n_in + k + c] = dtype_f8_e4m3_to_f32(q8[r * F8_BLOCK + c]) *
                                                   scale;
        }
}

static bool is_quantizable(enum dtype t)
{
    return t == DTYPE_F32 || t == DTYPE_F16 || t == DTYPE_BF16;
}

static struct source make_source(const struct shape *s)
{
    struct source src = {
        .args = { .n_parts = s->n_parts, .join = s->join, .quantize = s->quantize },
    };
    size_t total = 0, at = 0;
    for (size_t p = 0; p < s->n_parts; p++) total += s->n_out[p];
    src.n_out = total;
    src.wide = MEM_ARRAY(float, total * s->n_in);
    for (size_t p = 0; p < s->n_parts; p++) {
        size_t across = s->transposed ? s->n_out[p] : s->n_in,
               down = s->transposed ? s->n_in : s->n_out[p];
        size_t row_bytes = dtype_row_bytes(s->dtype, across), stride = row_bytes + s->gap;
        src.bytes[p] = mem_calloc(1 + down * stride - s->gap, 1);
        for (size_t r = 0; r < down; r++)
            for (size_t b = 0; b < row_bytes; b += dtype_block_bytes(s->dtype))
                random_block(s->dtype, src.bytes[p] + 1 + r * stride + b);
        src.parts[p] = (struct weight_src){
            .dtype = s->dtype,
            .data = src.bytes[p] + 1,
            .n_out = s->n_out[p],
            .n_in = s->n_in,
            .row_bytes = s->gap ? stride : 0,
            .transposed = s->transposed,
        };
        if (s->scaled) {
            size_t n = blocks_128(s->n_out[p]) * blocks_128(s->n_in);
            src.scales[p] = MEM_ARRAY(float, n);
            for (size_t i = 0; i < n; i++) src.scales[p][i] = 0.01f + fabsf(random_float(0.1f));
            src.parts[p].scales = src.scales[p];
        }
        upconvert_source(&src.parts[p], src.wide + at * s->n_in);
        if (is_quantizable(s->dtype) && s->quantize != QUANTIZE_NONE)
            quantize_wide(src.wide + at * s->n_in, s->n_out[p], s->n_in, s->quantize);
        at += s->n_out[p];
    }
    return src;
}

static void free_source(struct source *s)
{
    for (size_t p = 0; p < s->args.n_parts; p++) {
        mem_free(s->bytes[p]);
        mem_free(s->scales[p]);
    }
    mem_free(s->wide);
}

/* ---- checks ---- */

static bool same(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b));
}

static void check_same(float got, float want, const struct shape *s, const char *what, size_t i,
                       size_t k)
{
    if (!same(got, want))
        test_fail(__FILE__, __LINE__,
                  "%s of %s, quantize %d, join %d, %s, n_in %zu: [%zu][%zu] is %.9g, not %.9g",
                  what, dtype_name(s->dtype), (int)s->quantize, (int)s->join,
                  s->transposed ? "transposed" : "straight", s->n_in, i, k, (double)got,
                  (double)want);
}

/* The panel and lane of output i. */
static size_t panel_of_row(const struct weight *w, size_t i, size_t *lane)
{
    size_t half = w->n_out / 2, in_part = w->paired && i >= half ? i - half : i;
    *lane = in_part % PANEL;
    return w->paired ? in_part / PANEL * 2 + (i >= half) : in_part / PANEL;
}

static void check_wide_ints(const struct weight *w, const struct source *src, const struct shape *s)
{
    const struct weight_layout_info *f = weight_layout_info(w->layout);
    static struct unpacked_panel wide;
    for (size_t p = 0; p < panel_count(w); p++)
        for (size_t k0 = 0; k0 < w->n_in; k0 += UNPACK_K) {
            size_t n_k = w->n_in - k0 < UNPACK_K ? (w->n_in - k0 + BLOCK_K - 1) / BLOCK_K * BLOCK_K
                                                 : UNPACK_K;
            const float *scale = weight_layout_channel_scale(w, p);
            CHECK((scale != NULL) == (f->group == 0));
            memset(&wide, 0xee, sizeof wide);
            weight_layout_unpack_int(&wide, w, p, k0, n_k);
            for (size_t i = 0; i < src->n_out; i++) {
                size_t lane;
                if (panel_of_row(w, i, &lane) != p) continue;
                for (size_t k = 0; k < n_k; k++) {
                    int q = wide.q[k / 4][lane][k % 4];
                    if (k0 + k >= w->n_in) {
                        CHECK_EQ_INT(q, 0);
                        continue;
                    }
                    size_t g = f->group ? k / (size_t)f->group : 0;
                    float d = scale ? scale[lane] : wide.d[g][lane], m = wide.m[g][lane],
                          q_f = (float)(q - f->zero);
                    check_same(f->has_m ? fmaf(d, q_f, m) : d * q_f,
                               src->wide[i * w->n_in + k0 + k], s, "unpack_int", i, k0 + k);
                }
            }
        }
}

static void check_values(const struct weight *w, const struct source *src, const struct shape *s)
{
    float *row = MEM_ARRAY(float, w->n_in);
    for (size_t i = 0; i < src->n_out; i++) {
        size_t lane, panel = panel_of_row(w, i, &lane);
        weight_layout_dequantize_row(w, i, row);
        for (size_t k = 0; k < w->n_in; k++) {
            check_same(weight_layout_element(w, panel, k, lane), src->wide[i * w->n_in + k], s,
                       "weight_layout_element", i, k);
            check_same(row[k], src->wide[i * w->n_in + k], s, "weight_row", i, k);
        }
    }
    mem_free(row);
    size_t part_out = w->paired ? w->n_out / 2 : w->n_out, last = panel_count(w) - 1;
    for (size_t lane = part_out % PANEL; lane > 0 && lane < PANEL; lane++)
        for (size_t k = 0; k < w->n_in; k++) CHECK(weight_layout_element(w, last, k, lane) == 0);
    if (weight_layout_info(w->layout)->integer) check_wide_ints(w, src, s);
}

static void check_shape(const struct shape *s)
{
    struct source src = make_source(s);
    struct weight one, many, plan;
    struct compute_pool *pools[2];
    struct err err;
    src.args.parts = src.parts;
    for (int i = 0; i < 2; i++) CHECK_OK(compute_pool_create(1 + 2 * i, &pools[i], &err));
    CHECK_OK(weight_layout_pack(&(struct kernel_ctx){ .pool = pools[0] }, &src.args, &one, NULL));
    CHECK_OK(weight_layout_pack(&(struct kernel_ctx){ .pool = pools[1] }, &src.args, &many, NULL));
    CHECK_EQ_INT(one.layout, weight_layout_of(s->dtype, s->quantize));
    CHECK_EQ_INT(one.n_out, src.n_out);
    CHECK_EQ_INT(one.n_in, s->n_in);
    CHECK_EQ_INT(one.paired, s->join == JOIN_PAIRED);
    CHECK(one.bytes == many.bytes && memcmp(one.data, many.data, one.bytes) == 0);
    CHECK_OK(weight_layout_plan(NULL, &src.args, &plan, NULL));
    CHECK(!plan.data && plan.layout == one.layout && plan.paired == one.paired &&
          plan.n_out == one.n_out && plan.n_in == one.n_in && plan.bytes == one.bytes);
    check_values(&one, &src, s);
    release(&one);
    release(&one); /* a second release does nothing */
    release(&many);
    for (int i = 0; i < 2; i++) compute_pool_free(pools[i]);
    free_source(&src);
}

/* Single, stacked and paired parts of odd sizes. */
static void check_joins(struct shape s)
{
    static const size_t ALONE[] = { 1, 15, 16, 17, 130, 272 };
    for (size_t i = 0; i < COUNT_OF(ALONE); i++) {
        s.join = JOIN_STACKED;
        s.n_parts = 1;
        s.n_out[0] = ALONE[i];
        check_shape(&s);
        s.join = JOIN_PAIRED;
        s.n_parts = 2;
        s.n_out[1] = s.n_out[0];
        check_shape(&s);
    }
    s.join = JOIN_STACKED;
    s.n_parts = 3;
    s.n_out[0] = 144; /* the last panel is in a second block of 128 rows */
    s.n_out[1] = 16;
    s.n_out[2] = 21;
    check_shape(&s);
}

/* ---- cases ---- */

static void check_plain(enum dtype t, enum quantize quantize)
{
    static const size_t N_IN[] = { 1, 2, 3, 31, 64, 129, 300 };
    for (size_t i = 0; i < COUNT_OF(N_IN); i++)
        for (int way = 0; way < 4; way++) {
            /* in a sanitizer's build each size has half of the ways */
            if (!test_runs_long() && (i / 2 + (size_t)way) % 2) continue;
            check_joins((struct shape){
                .dtype = t,
                .quantize = quantize,
                .n_in = N_IN[i],
                .transposed = way % 2 != 0,
                .gap = way / 2 ? 6 : 0,
                .scaled = t == DTYPE_F8_E4M3 && i % 2 == 0,
            });
        }
}

TEST(plain_types_keep_every_bit)
{
    check_plain(DTYPE_F32, QUANTIZE_NONE);
    check_plain(DTYPE_F16, QUANTIZE_NONE);
    check_plain(DTYPE_BF16, QUANTIZE_NONE);
}
TEST(f8_keeps_every_bit_and_its_scales)
{
    check_plain(DTYPE_F8_E4M3, QUANTIZE_NONE);
    check_plain(DTYPE_F8_E4M3, QUANTIZE_WINT8); /* already quantised, so it stays */
}
TEST(wint8_is_quantised_per_channel)
{
    check_plain(DTYPE_BF16, QUANTIZE_WINT8);
    check_plain(DTYPE_F32, QUANTIZE_WINT8);
}
TEST(wint4_is_quantised_per_channel)
{
    check_plain(DTYPE_BF16, QUANTIZE_WINT4);
    check_plain(DTYPE_F16, QUANTIZE_WINT4);
}
TEST(block_wise_fp8_is_quantised_per_block)
{
    check_plain(DTYPE_BF16, QUANTIZE_BLOCK_FP8);
    check_plain(DTYPE_F32, QUANTIZE_BLOCK_FP8);
}

TEST(block_types_keep_every_bit)
{
    for (int t = 0; t < DTYPE_COUNT; t++) {
        size_t block = dtype_block((enum dtype)t);
        if (block == 1) continue;
        for (size_t n = 1; n <= 3; n++)
            for (int gap = 0; gap < 2; gap++) {
                if (!test_runs_long() && gap != (n == 3)) continue;
                check_joins((struct shape){
                    .dtype = (enum dtype)t,
                    .n_in = n * block,
                    .gap = gap ? 5 : 0,
                    .quantize = gap ? QUANTIZE_WINT4 : QUANTIZE_NONE,
                });
            }
    }
}

/* Infinities and NaNs in a checkpoint must not become numbers. */
TEST(infinities_and_nans_stay_visible)
{
    static const enum quantize HOW[] = { QUANTIZE_NONE, QUANTIZE_WINT8, QUANTIZE_WINT4,
                                         QUANTIZE_BLOCK_FP8 };
    for (size_t i = 0; i < COUNT_OF(HOW); i++) {
        struct shape s = {
            .dtype = DTYPE_F32, .quantize = HOW[i], .n_parts = 1, .n_out = { 3 }, .n_in = 40
        };
        struct source src = make_source(&s);
        struct weight w;
        struct compute_pool *pool;
        struct err err;
        src.args.parts = src.parts;
        float bad[2] = { INFINITY, NAN };
        memcpy(src.bytes[0] + 1 + 4 * 7, &bad[0], 4);        /* row 0 */
        memcpy(src.bytes[0] + 1 + 4 * (80 + 9), &bad[1], 4); /* row 2 */
        CHECK_OK(compute_pool_create(1, &pool, &err));
        CHECK_OK(weight_layout_pack(&(struct kernel_ctx){ .pool = pool }, &src.args, &w, NULL));
        CHECK(!isfinite(weight_layout_element(&w, 0, 7, 0)));
        CHECK(isnan(weight_layout_element(&w, 0, 9, 2)));
        if (HOW[i] != QUANTIZE_BLOCK_FP8) CHECK(isfinite(weight_layout_element(&w, 0, 7, 1)));
        release(&w);
        compute_pool_free(pool);
        free_source(&src);
    }
}

/* ---- places: read as weight_layout.h draws them, not through weight_layout.c ---- */

struct packed {
    struct source src;
    struct weight w;
    struct compute_pool *pool;
};

static struct packed packed_of(enum dtype t, enum quantize q, size_t n_out, size_t n_in)
{
    struct shape s = {
        .dtype = t,
        .quantize = q,
        .n_parts = 1,
        .n_out = { n_out },
        .n_in = n_in,
        .scaled = t == DTYPE_F8_E4M3,
    };
    struct packed p = { .src = make_source(&s) };
    struct err err;
    p.src.args.parts = p.src.parts;
    CHECK_OK(compute_pool_create(1, &p.pool, &err));
    CHECK_OK(weight_layout_pack(&(struct kernel_ctx){ .pool = p.pool }, &p.src.args, &p.w, NULL));
    return p;
}

static void release_one(struct packed *p)
{
    release(&p->w);
    compute_pool_free(p->pool);
    free_source(&p->src);
}

static const char *panel_bytes_at(const struct packed *p, size_t i)
{
    return panel_at(&p->w, i, weight_layout_panel_bytes(p->w.layout, p->w.n_in));
}
static float wide_at(const struct packed *p, size_t i, size_t k)
{
    return p->src.wide[i * p->w.n_in + k];
}

TEST(plain_layouts_lie_as_drawn)
{
    struct packed f = packed_of(DTYPE_F32, QUANTIZE_NONE, 20, 7),
                  b = packed_of(DTYPE_BF16, QUANTIZE_NONE, 20, 7),
                  e = packed_of(DTYPE_F8_E4M3, QUANTIZE_NONE, 20, 131);
    for (size_t i = 0; i < 20; i++) {
        const float *floats = (const float *)panel_bytes_at(&f, i / 16);
        const uint32_t *pairs = (const uint32_t *)panel_bytes_at(&b, i / 16);
        const char *eights = panel_bytes_at(&e, i / 16);
        const float *scales = (const float *)(eights + 33 * 64);
        for (size_t k = 0; k < 7; k++) {
            CHECK(same(floats[k * 16 + i % 16], wide_at(&f, i, k)));
            CHECK(same(dtype_bf16_to_f32((uint16_t)(pairs[k / 2 * 16 + i % 16] >> 16 * (k % 2))),
                       wide_at(&b, i, k)));
        }
        CHECK_EQ_INT(pairs[3 * 16 + i % 16] >> 16, 0); /* padding after the last k */
        for (size_t k = 0; k < 131; k++)
            CHECK(same(dtype_f8_e4m3_to_f32((uint8_t)eights[k / 4 * 64 + i % 16 * 4 + k % 4]) *
                           scales[k / 128],
                       wide_at(&e, i, k)));
    }
    CHECK_EQ_INT(weight_layout_panel_bytes(LAYOUT_F8, 131), 33 * 64 + 64);
    release_one(&f);
    release_one(&b);
    release_one(&e);
}

static int byte_of(const uint32_t (*q)[PANEL], size_t k, size_t lane)
{
    return (int)(q[k / 4][lane] >> 8 * (k % 4) & 255);
}
static int nibble_of(const uint32_t (*q)[PANEL], size_t k, size_t lane)
{
    return (int)(q[k / 8][lane] >> (8 * (k % 4) + (k % 8 < 4 ? 0 : 4)) & 15);
}
static float half_of(uint16_t h) { return float_from_f16(h); }

TEST(blocks_of_32_lie_as_drawn)
{
    struct packed q8 = packed_of(DTYPE_Q8_0, QUANTIZE_NONE, 20, 64),
                  q8m = packed_of(DTYPE_Q5_1, QUANTIZE_NONE, 20, 64),
                  q4 = packed_of(DTYPE_Q4_0, QUANTIZE_NONE, 20, 64),
                  q4m = packed_of(DTYPE_Q4_1, QUANTIZE_NONE, 20, 64);
    for (size_t i = 0; i < 20; i++)
        for (size_t k = 0; k < 64; k++) {
            size_t b = k / 32, j = i % 16;
            const struct block_q8 *a = (const struct block_q8 *)panel_bytes_at(&q8, i / 16) + b;
            const struct block_q8m *am = (const struct block_q8m *)panel_bytes_at(&q8m, i / 16) + b;
            const struct block_q4 *u = (const struct block_q4 *)panel_bytes_at(&q4, i / 16) + b;
            const struct block_q4m *um = (const struct block_q4m *)panel_bytes_at(&q4m, i / 16) + b;
            CHECK(same(half_of(a->d[j]) * (float)(byte_of(a->q, k % 32, j) - 128),
                       wide_at(&q8, i, k)));
            CHECK(same(fmaf(half_of(am->d[j]), (float)byte_of(am->q, k % 32, j), half_of(am->m[j])),
                       wide_at(&q8m, i, k)));
            CHECK(same(half_of(u->d[j]) * (float)(nibble_of(u->q, k % 32, j) - 8),
                       wide_at(&q4, i, k)));
            CHECK(
                same(fmaf(half_of(um->d[j]), (float)nibble_of(um->q, k % 32, j), half_of(um->m[j])),
                     wide_at(&q4m, i, k)));
        }
    release_one(&q8);
    release_one(&q8m);
    release_one(&q4);
    release_one(&q4m);
}

TEST(blocks_of_256_lie_as_drawn)
{
    static const enum dtype TYPES[] = { DTYPE_Q2_K, DTYPE_Q3_K, DTYPE_Q4_K,
                                        DTYPE_Q5_K, DTYPE_Q6_K, DTYPE_IQ4_XS };
    for (size_t t = 0; t < COUNT_OF(TYPES); t++) {
        struct packed p = packed_of(TYPES[t], QUANTIZE_NONE, 20, 512);
        for (size_t i = 0; i < 20; i++)
            for (size_t k = 0; k < 512; k++) {
                size_t b = k / 256, g = k % 256 / 16, in = k % 32, j = i % 16;
                const struct block_q8k16 *q8k16 =
                    (const struct block_q8k16 *)panel_bytes_at(&p, i / 16) + b;
                const struct block_q4k16 *q4k16 =
                    (const struct block_q4k16 *)panel_bytes_at(&p, i / 16) + b;
                const struct block_q8k32 *q8k32 =
                    (const struct block_q8k32 *)panel_bytes_at(&p, i / 16) + b;
                const struct block_q4k32 *q4k32 =
                    (const struct block_q4k32 *)panel_bytes_at(&p, i / 16) + b;
                float w;
                if (p.w.layout == LAYOUT_Q8K16)
                    w = fmaf(half_of(q8k16->d[j]) * (float)q8k16->scale[g][j],
                             (float)(byte_of(q8k16->q[k % 256 / 32], in, j) - 128),
                             -(half_of(q8k16->dmin[j]) * (float)q8k16->min[g][j]));
                else if (p.w.layout == LAYOUT_Q8K32)
                    w = fmaf(half_of(q8k32->d[j]) * (float)q8k32->scale[g / 2][j],
                             (float)(byte_of(q8k32->q[k % 256 / 32], in, j) - 128),
                             -(half_of(q8k32->dmin[j]) * (float)q8k32->min[g / 2][j]));
                else if (p.w.layout == LAYOUT_Q4K32)
                    w = fmaf(half_of(q4k32->d[j]) * (float)q4k32->scale[g / 2][j],
                             (float)nibble_of(q4k32->q[k % 256 / 32], in, j),
                             -(half_of(q4k32->dmin[j]) * (float)q4k32->min[g / 2][j]));
                else
                    w = fmaf(half_of(q4k16->d[j]) * (float)q4k16->scale[g][j],
                             (float)nibble_of(q4k16->q[k % 256 / 32], in, j),
                             -(half_of(q4k16->dmin[j]) * (float)q4k16->min[g][j]));
                CHECK(same(w, wide_at(&p, i, k)));
            }
        release_one(&p);
    }
}

TEST(channel_layouts_lie_as_drawn)
{
    struct packed w8 = packed_of(DTYPE_BF16, QUANTIZE_WINT8, 20, 70),
                  w4 = packed_of(DTYPE_BF16, QUANTIZE_WINT4, 20, 70);
    for (size_t i = 0; i < 20; i++)
        for (size_t k = 0; k < 70; k++) {
            const uint32_t(*q8)[PANEL] = (const uint32_t(*)[PANEL])panel_bytes_at(&w8, i / 16);
            const uint32_t(*q4)[PANEL] = (const uint32_t(*)[PANEL])panel_bytes_at(&w4, i / 16);
            const float *scale8 = (const float *)q8[96 / 4], *scale4 = (const float *)q4[96 / 8];
            CHECK(same(scale8[i % 16] * (float)(byte_of(q8, k, i % 16) - 128), wide_at(&w8, i, k)));
            CHECK(same(scale4[i % 16] * (float)(nibble_of(q4, k, i % 16) - 8), wide_at(&w4, i, k)));
            CHECK(same(weight_layout_channel_scale(&w8.w, i / 16)[i % 16], scale8[i % 16]));
        }
    release_one(&w8);
    release_one(&w4);
}

/* ---- refusals ---- */

static struct compute_pool *pool_of_refusals;
static struct err why;

static enum status pack_status(const struct weight_src *parts, size_t n_parts,
                               enum weight_join join)
{
    struct weight w = { .layout = 77 };
    why = (struct err){ 0 };
    const struct weight_pack_args a = { .parts = parts, .n_parts = n_parts, .join = join };
    enum status st = weight_layout_pack(&(struct kernel_ctx){ .pool = pool_of_refusals }, &a, &w,
                                        &why);
    if (st == OK) release(&w);
    else CHECK_EQ_INT(w.layout, 77);                     /* outputs are only written on success */
    CHECK(st == why.code && (st == OK) == !why.text[0]); /* every refusal has a sentence */
    return st;
}

static enum status one_status(struct weight_src s) { return pack_status(&s, 1, JOIN_STACKED); }

TEST(bounds_are_refused)
{
    static const uint8_t bytes[1 << 14];
    static const float scales[4];
    struct err err;
    CHECK_OK(compute_pool_create(1, &pool_of_refusals, &err));
    struct weight_src good = { .dtype = DTYPE_BF16, .data = bytes, .n_out = 8, .n_in = 8 },
                      s = good;
    CHECK_OK(one_status(good));
    s.dtype = DTYPE_COUNT;
    CHECK_STATUS(one_status(s), ERR_UNSUPPORTED);
    s = good, s.n_out = 0;
    CHECK_STATUS(one_status(s), ERR_INVALID);
    s = good, s.n_in = 0;
    CHECK_STATUS(one_status(s), ERR_INVALID);
    s = good, s.n_out = (size_t)INT32_MAX + 1;
    CHECK_STATUS(one_status(s), ERR_TOO_LONG);
    s = good, s.n_in = (size_t)INT32_MAX + 1;
    CHECK_STATUS(one_status(s), ERR_TOO_LONG);
    s = good, s.row_bytes = 15;
    CHECK_STATUS(one_status(s), ERR_INVALID);
    s = good, s.scales = scales;
    CHECK_STATUS(one_status(s), ERR_INVALID);
    s = good, s.dtype = DTYPE_Q8_0;
    CHECK_STATUS(one_status(s), ERR_INVALID);
    s.n_in = 32, s.transposed = true;
    CHECK_STATUS(one_status(s), ERR_UNSUPPORTED);
    s = good, s.dtype = DTYPE_Q4_K, s.n_in = 128;
    CHECK_STATUS(one_status(s), ERR_INVALID);
    CHECK(strstr(why.text, "128") && strstr(why.text, "256") && strstr(why.text, "q4_k"));

    struct weight_src two[2] = { good, good };
    CHECK_STATUS(pack_status(two, 2, JOIN_STACKED), ERR_INVALID); /* 8 is not a whole panel */
    CHECK_OK(pack_status(two, 2, JOIN_PAIRED));
    CHECK_STATUS(pack_status(two, 1, JOIN_PAIRED), ERR_INVALID);
    CHECK_STATUS(pack_status(two, 0, JOIN_STACKED), ERR_INVALID);
    two[0].n_out = 16;
    CHECK_OK(pack_status(two, 2, JOIN_STACKED));
    CHECK_STATUS(pack_status(two, 2, JOIN_PAIRED), ERR_INVALID);
    two[1].n_in = 9;
    CHECK_STATUS(pack_status(two, 2, JOIN_STACKED), ERR_INVALID);
    two[1] = good, two[1].dtype = DTYPE_F16;
    CHECK_STATUS(pack_status(two, 2, JOIN_STACKED), ERR_INVALID);
    two[1] = good, two[1].transposed = true;
    CHECK_STATUS(pack_status(two, 2, JOIN_STACKED), ERR_INVALID);
    compute_pool_free(pool_of_refusals);
}

TEST_MAIN(CASE(plain_types_keep_every_bit), CASE(f8_keeps_every_bit_and_its_scales),
          CASE(wint8_is_quantised_per_channel), CASE(wint4_is_quantised_per_channel),
          CASE(block_wise_fp8_is_quantised_per_block), CASE(block_types_keep_every_bit),
          CASE(infinities_and_nans_stay_visible), CASE(plain_layouts_lie_as_drawn),
          CASE(blocks_of_32_lie_as_drawn), CASE(blocks_of_256_lie_as_drawn),
          CASE(channel_layouts_lie_as_drawn), CASE(bounds_are_refused))
