/* test_matmul_prequantized.c - products that avoid rows in f32, for every CPU backend: rows that
 * are normalised while they are quantised, and SwiGLU's results prequantised for the next product.
 *
 * Each gives the same bits as with rows in f32, for every combination of types, number of rows,
 * gathered rows and number of threads; several pairs of products in one call do not affect each
 * other. Buffers have exactly the size that kernels.h says. */
#include "shared/base/arith.h"
#include "tests/conformance/kernel_fixture.h"

enum { ROWS_MAX = 200, HIDDEN = 640 /* more than is normalised at a time */, OUT = 37 };

static const float EPS = 1e-5f;

/* gate and up, interleaved, and down. */
struct block {
    struct matrix gate, up, down;
    struct weight pair, last;
    size_t inner;
};

static struct block make_block(struct kernel_ctx *c, enum dtype first, enum dtype then,
                               size_t inner)
{
    struct block b = {
        .gate = make_matrix(first, inner, HIDDEN),
        .up = make_matrix(first, inner, HIDDEN),
        .down = make_matrix(then, OUT, inner),
        .inner = inner,
    };
    const struct weight_src parts[] = { b.gate.src, b.up.src };
    const struct weight_pack_args pair = { .parts = parts, .n_parts = 2, .join = JOIN_PAIRED };
    CHECK_OK(c->weight_ops->pack(c, &pair, &b.pair, NULL));
    b.last = pack_one(c, &b.down);
    return b;
}

static void free_block(struct kernel_ctx *c, struct block *b)
{
    weight_release(c, &b->pair), weight_release(c, &b->last);
    free_matrix(&b->gate), free_matrix(&b->up), free_matrix(&b->down);
}

struct rows {
    const float *x, *norm, *bias; /* norm and bias may be NULL */
    const int32_t *which;         /* NULL: rows are not gathered */
    size_t n;
};

/* [n, OUT], with the result of each step in f32. */
static float *over_f32(struct kernel_ctx *c, const struct block *b, const struct rows *r)
{
    float *h = MEM_ARRAY(float, r->n *HIDDEN), *act = MEM_ARRAY(float, r->n * b->inner),
          *y = MEM_ARRAY(float, r->n *OUT);
    for (size_t i = 0; i < r->n; i++)
        memcpy(h + i * HIDDEN, r->x + (r->which ? (size_t)r->which[i] : i) * HIDDEN,
               HIDDEN * sizeof *h);
    if (r->norm) c->ops->rms_norm(c, h, HIDDEN, h, HIDDEN, r->norm, r->n, HIDDEN, EPS);
    c->ops->matmul(c,
                   &(struct matmul_args){
                       .w = &b->pair,
                       .bias = r->bias,
                       .x = h,
                       .x_stride = HIDDEN,
                       .n_rows = r->n,
                       .y = act,
                       .y_stride = b->inner,
                       .epilogue = MATMUL_SILU_MUL,
                   },
                   1);
    for (size_t i = 0; i < r->n * OUT; i++) y[i] = (float)i;
    c->ops->matmul(c,
                   &(struct matmul_args){
                       .w = &b->last,
                       .x = act,
                       .x_stride = b->inner,
                       .n_rows = r->n,
                       .y = y,
                       .y_stride = OUT,
                       .epilogue = MATMUL_ADD,
                   },
                   1);
    mem_free(h), mem_free(act);
    return y;
}

/* n floats of NaN, such as a previous step may have left. */
static float *stale(size_t n) { return memset(MEM_ARRAY(float, n), 0xff, n * sizeof(float)); }

static float *room(const struct block *b, size_t n_rows)
{
    return stale(n_rows * round_up(b->inner, MATMUL_PREQUANTIZED_ALIGN));
}

static struct matmul_args first_of(const struct block *b, const struct rows *r, float *act)
{
    return (struct matmul_args){
        .w = &b->pair,
        .bias = r->bias,
        .x = r->x,
        .x_stride = HIDDEN,
        .x_rows = r->which,
        .norm = r->norm,
        .norm_eps = EPS,
        .n_rows = r->n,
        .y = act,
        .quantize_for = &b->last,
        .epilogue = MATMUL_SILU_MUL,
    };
}

static struct matmul_args then_of(const struct block *b, const struct rows *r, float *act, float *y)
{
    for (size_t i = 0; i < r->n * OUT; i++) y[i] = (float)i;
    return (struct matmul_args){
        .w = &b->last,
        .x = act,
        .x_prequantized = true,
        .n_rows = r->n,
        .y = y,
        .y_stride = OUT,
        .epilogue = MATMUL_ADD,
    };
}

/* Two blocks in one call, the second with other rows, and between them one without rows. */
static void check_pair(struct kernel_ctx *c, const struct block *a, const struct block *b,
                       const struct rows *ra, const struct rows *rb)
{
    float *want_a = over_f32(c, a, ra), *want_b = over_f32(c, b, rb), *act_a = room(a, ra->n),
          *act_b = room(b, rb->n);
    float *y_a = stale(ra->n * OUT), *y_b = stale(rb->n * OUT);
    const struct rows none = { .x = ra->x, .norm = ra->norm };
    c->ops->matmul(c,
                   (struct matmul_args[]){ first_of(a, ra, act_a), first_of(a, &none, act_b),
                                           first_of(b, rb, act_b) },
                   3);
    c->ops->matmul(c,
                   (struct matmul_args[]){ then_of(a, ra, act_a, y_a),
                                           then_of(a, &none, act_b, y_b),
                                           then_of(b, rb, act_b, y_b) },
                   3);
    check_bits(y_a, want_a, ra->n * OUT, "first block", ra->n, a->inner);
    check_bits(y_b, want_b, rb->n * OUT, "second block", rb->n, b->inner);
    mem_free(want_a), mem_free(want_b), mem_free(act_a), mem_free(act_b), mem_free(y_a),
        mem_free(y_b);
}

static void check_types(struct kernel_ctx *c, enum dtype first, enum dtype then, size_t inner,
                        const float *x, const float *norm)
{
    static const size_t counts[] = { 1, 2, 3, 8, 9, 40, ROWS_MAX };
    struct block a = make_block(c, first, then, inner),
                 b = make_block(c, then == DTYPE_Q8_0 ? DTYPE_BF16 : first, then, inner);
    float *bias = random_floats(2 * inner, 1);
    int32_t which[ROWS_MAX];
    for (size_t i = 0; i < ROWS_MAX; i++) which[i] = (int32_t)(random_u32() % ROWS_MAX);
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        const struct rows plain = {
            .x = x, .norm = i % 3 ? norm : NULL, .n = counts[i], .bias = i % 2 ? bias : NULL
        };
        const struct rows gathered = {
            .x = x,
            .norm = i % 2 ? norm : NULL,
            .n = counts[COUNT_OF(counts) - 1 - i],
            .which = which,
            .bias = i % 3 ? NULL : bias,
        };
        check_pair(c, &a, &b, &plain, &gathered);
    }
    mem_free(bias);
    free_block(c, &a), free_block(c, &b);
}

/* Products that may share the rounding of x, and similar ones with another norm: each gives what it
 * gives alone. */
static void check_sharing(struct kernel_ctx *c, const float *x, const float *norm,
                          const float *other)
{
    enum { JOBS = 6, ROWS = 20 };
    static const enum dtype types[] = { DTYPE_Q8_0, DTYPE_BF16, DTYPE_F32 };
    const struct {
        const float *norm;
        float eps;
    } ways[JOBS] = { { norm, EPS }, { norm, EPS },  { other, EPS },
                     { NULL, 0 },   { norm, 0.5f }, { norm, EPS } };
    for (size_t t = 0; t < COUNT_OF(types); t++) {
        struct matrix m = make_matrix(types[t], OUT, HIDDEN);
        struct weight w = pack_one(c, &m);
        struct matmul_args jobs[JOBS];
        float *alone = MEM_ARRAY(float, ROWS *OUT);
        for (int i = 0; i < JOBS; i++)
            jobs[i] = (struct matmul_args){
                .w = &w,
                .x = x,
                .x_stride = HIDDEN,
                .norm = ways[i].norm,
                .norm_eps = ways[i].eps,
                .n_rows = ROWS,
                .y = stale(ROWS * OUT),
                .y_stride = OUT,
            };
        c->ops->matmul(c, jobs, JOBS);
        for (int i = 0; i < JOBS; i++) {
            float *together = jobs[i].y;
            jobs[i].y = alone;
            c->ops->matmul(c, &jobs[i], 1);
            check_bits(together, alone, ROWS * OUT, "norm", (size_t)i, t);
            mem_free(together);
        }
        mem_free(alone);
        weight_release(c, &w);
        free_matrix(&m);
    }
}

/* A row with NaN or infinities does not affect the others, also when it is prequantised. */
static void check_odd_rows(struct kernel_ctx *c, enum dtype first, enum dtype then, const float *x,
                           const float *norm)
{
    enum { ROWS = 20, ODD = 7 };
    struct block b = make_block(c, first, then, 96);
    float *broken = mem_dup(x, ROWS * HIDDEN * sizeof *x), *act = room(&b, ROWS),
          *y = stale(ROWS * OUT);
    const struct rows whole = { .x = x, .norm = norm, .n = ROWS },
                      with = { .x = broken, .norm = norm, .n = ROWS };
    float *want = over_f32(c, &b, &whole);
    broken[ODD * HIDDEN + 3] = NAN;
    struct matmul_args a = first_of(&b, &with, act), then_a = then_of(&b, &with, act, y);
    c->ops->matmul(c, &a, 1);
    c->ops->matmul(c, &then_a, 1);
    check_bits(y, want, ODD * OUT, "rows before", (size_t)first, (size_t)then);
    check_bits(y + (ODD + 1) * OUT, want + (ODD + 1) * OUT, (ROWS - ODD - 1) * OUT, "rows after",
               (size_t)first, (size_t)then);
    for (size_t i = ODD * OUT; i < (ODD + 1) * OUT; i++) CHECK(isnan(y[i]));
    mem_free(broken), mem_free(act), mem_free(y), mem_free(want);
    free_block(c, &b);
}

static void prequantized_cases(const char *isa, enum activations activations)
{
    float *x = random_floats(ROWS_MAX * HIDDEN, 2), *norm = random_floats(HIDDEN, 1),
          *other = random_floats(HIDDEN, 1);
    for (int threads = 1; threads <= 3; threads += 2) {
        struct kernel_ctx *c = open_backend(isa, activations, threads);
        CHECK_OK(kernel_ctx_reserve(c, 2 * ROWS_MAX, HIDDEN));
        check_types(c, DTYPE_Q8_0, DTYPE_Q8_0, 160, x, norm);
        /* the last block of a row is partial: it ends in its first half, and below in its second */
        check_types(c, DTYPE_Q4_1, DTYPE_BF16, 41, x, norm);
        check_types(c, DTYPE_BF16, DTYPE_BF16, 88, x, norm);
        check_types(c, DTYPE_BF16, DTYPE_Q4_1, 96, x, norm);
        check_types(c, DTYPE_F32, DTYPE_F32, 57, x, norm);
        check_types(c, DTYPE_BF16, DTYPE_F8_E4M3, 130, x, norm);
        check_sharing(c, x, norm, other);
        check_odd_rows(c, DTYPE_Q8_0, DTYPE_Q8_0, x, norm);
        check_odd_rows(c, DTYPE_BF16, DTYPE_BF16, x, norm);
        kernel_ctx_free(c);
    }
    mem_free(x), mem_free(norm), mem_free(other);
}

#define BACKEND_TESTS(name, isa)                                                                   \
    TEST(name##_f32) { prequantized_cases(isa, ACTIVATIONS_F32); }                                 \
    TEST(name##_fast) { prequantized_cases(isa, ACTIVATIONS_FAST); }
#define BACKEND_CASES(name) CASE_T(name##_f32, 120), CASE_T(name##_fast, 120)

EVERY_CPU_BACKEND(BACKEND_TESTS)

TEST_MAIN(EVERY_CPU_BACKEND_CASES(BACKEND_CASES))
