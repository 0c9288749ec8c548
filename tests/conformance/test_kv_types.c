/* test_kv_types.c - GQA pools of every element type that kernel_kv_check accepts, on every CPU
 * backend.
 *
 * The values that a pool holds for a KV row are computed here by the formulas, in f64. Attention
 * over the pool must equal, bit for bit, f32 attention over an f32 pool with those values, in every
 * backend and however the tokens are split into steps; test_attention.c compares f32 attention with
 * the softmax, and this file does so for `ref`. The bytes that kv_append writes are read where
 * kv_layout.h places them. A backend that this CPU cannot run is skipped by name. */
#include "kernels/kv_rows.h"
#include "shared/kv/kv_layout.h"
#include "tests/conformance/kernel_fixture.h"

enum { N_SEQS = 3 };

struct shape {
    enum dtype dtype;
    size_t n_heads, n_kv, dim, block_tokens;
};

struct world {
    struct shape s;
    size_t n_tokens[N_SEQS], pool_bytes;
    int32_t *table[N_SEQS];
    float *q[N_SEQS], *k[N_SEQS], *v[N_SEQS], *held_k[N_SEQS], *held_v[N_SEQS], *want[N_SEQS];
    char *pool;
};

static size_t div_up(size_t n, size_t by) { return (n + by - 1) / by; }

static struct kv_layout layout_of(const struct shape *s, enum dtype t, uint32_t n_blocks)
{
    struct kv_layout l = {
        .dtype = t,
        .block_tokens = (uint32_t)s->block_tokens,
        .n_layers = 1,
        .n_kv_heads = (uint32_t)s->n_kv,
        .model_kv_heads = (uint32_t)s->n_kv,
        .head_dim = (uint32_t)s->dim,
        .tp_size = 1,
        .n_blocks = n_blocks,
    };
    struct err err;
    CHECK_OK(kv_layout_check(&l, &err));
    return l;
}

static void lay_out(struct world *w, size_t block_tokens)
{
    uint32_t n_blocks = 0, next = 0;
    w->s.block_tokens = block_tokens;
    for (size_t s = 0; s < N_SEQS; s++) n_blocks += (uint32_t)div_up(w->n_tokens[s], block_tokens);
    for (size_t s = 0; s < N_SEQS; s++) {
        size_t n = div_up(w->n_tokens[s], block_tokens);
        mem_free(w->table[s]);
        w->table[s] = MEM_ARRAY(int32_t, n);
        /* blocks in descending order */
        for (size_t b = 0; b < n; b++) w->table[s][b] = (int32_t)(n_blocks - 1 - next++);
    }
    /* with scales, short KV rows can take more bytes */
    struct kv_layout wide = layout_of(&w->s, DTYPE_F32, n_blocks),
                     l = layout_of(&w->s, w->s.dtype, n_blocks);
    w->pool_bytes = kv_layout_pool_bytes(&wide) > kv_layout_pool_bytes(&l)
                        ? kv_layout_pool_bytes(&wide)
                        : kv_layout_pool_bytes(&l);
    mem_free(w->pool);
    w->pool = mem_calloc(w->pool_bytes, 1);
}

/* ---- values that a pool holds, in f64 ---- */

/* The e4m3 value nearest to r: its last place is 2^-3 of the power of two below r, at least
 * 2^-9. */
static double nearest_e4m3(double r)
{
    int exponent;
    frexp(r, &exponent); /* r = m * 2^exponent, m in [1/2, 1) */
    double place = ldexp(1, exponent - 4 < -9 ? -9 : exponent - 4),
           q = nearbyint(r / place) * place;
    return q > 448 ? 448 : q < -448 ? -448 : q;
}

static float held(enum dtype t, float x, float scale)
{
    if (t == DTYPE_F32) return x;
    if (t == DTYPE_BF16) return dtype_bf16_to_f32(dtype_f32_to_bf16(x));
    if (t == DTYPE_F16) return float_from_f16(dtype_f32_to_f16(x));
    if (scale == 0) return 0;
    const double largest = t == DTYPE_I8 ? 127 : 448,
                 r = fmax(-largest, fmin((double)(x / scale), largest));
    return (float)((t == DTYPE_I8 ? nearbyint(r) : nearest_e4m3(r)) * (double)scale);
}

static float *held_rows(enum dtype t, const float *x, size_t n_rows, size_t dim)
{
    float *y = MEM_ARRAY(float, n_rows *dim);
    for (size_t i = 0; i < n_rows; i++) {
        float top = 0;
        for (size_t d = 0; d < dim; d++) top = fmaxf(top, fabsf(x[i * dim + d]));
        for (size_t d = 0; d < dim; d++)
            y[i * dim + d] = held(t, x[i * dim + d], top / (t == DTYPE_I8 ? 127.0f : 448.0f));
    }
    return y;
}

/* ---- running ---- */

/* Runs one step: feeds `count` tokens of each sequence from `begin` on to a pool of type t, and
 * appends their results to those of earlier steps. */
static void step(struct kernel_ctx *c, struct world *w, enum dtype t, float *const *k_of,
                 float *const *v_of, const size_t begin[N_SEQS], const size_t count[N_SEQS],
                 float *out[N_SEQS])
{
    struct attn_seq seqs[N_SEQS];
    size_t n_rows = 0, q_row = w->s.n_heads * w->s.dim, kv_row = w->s.n_kv * w->s.dim, row = 0;
    for (size_t s = 0; s < N_SEQS; s++) n_rows += count[s];
    float *q = MEM_ARRAY(float, n_rows *q_row), *rows = MEM_ARRAY(float, n_rows *q_row);
    float *k = MEM_ARRAY(float, n_rows *kv_row), *v = MEM_ARRAY(float, n_rows *kv_row);
    for (size_t s = 0; s < N_SEQS; row += count[s++]) {
        seqs[s] = (struct attn_seq){
            .q_begin = (int32_t)row,
            .n_q = (int32_t)count[s],
            .pos_begin = (int32_t)begin[s],
            .block_table = w->table[s],
        };
        memcpy(q + row * q_row, w->q[s] + begin[s] * q_row, count[s] * q_row * sizeof *q);
        memcpy(k + row * kv_row, k_of[s] + begin[s] * kv_row, count[s] * kv_row * sizeof *k);
        memcpy(v + row * kv_row, v_of[s] + begin[s] * kv_row, count[s] * kv_row * sizeof *v);
    }
    const struct kv_layer kv = {
        .data = w->pool,
        .dtype = t,
        .n_heads = (int32_t)w->s.n_kv,
        .head_dim = (int32_t)w->s.dim,
        .block_tokens = (int32_t)w->s.block_tokens,
    };
    struct kv_append_args append = { .k = k, .v = v, .kv = kv, .on = { seqs, N_SEQS } };
    const struct attn_args attn = {
        .q = q,
        .out = rows,
        .kv = kv,
        .on = { seqs, N_SEQS },
        .n_heads = (int32_t)w->s.n_heads,
        .v_dim = (int32_t)w->s.dim,
        .scale = 1 / sqrtf((float)w->s.dim),
    };
    c->ops->kv_append(c, &append);
    c->ops->attention(c, &attn);
    for (size_t s = 0; s < N_SEQS; s++)
        memcpy(out[s] + begin[s] * q_row, rows + (size_t)seqs[s].q_begin * q_row,
               count[s] * q_row * sizeof *rows);
    mem_free(q), mem_free(k), mem_free(v), mem_free(rows);
}

static void run_world(struct kernel_ctx *c, struct world *w, enum dtype t, float *const *k,
                      float *const *v, size_t chunk, float *out[N_SEQS])
{
    size_t begin[N_SEQS] = { 0 }, count[N_SEQS], left;
    /* NaN in every type (int8: by its scale): unwritten values must not be read */
    memset(w->pool, 0xff, w->pool_bytes);
    for (;;) {
        left = 0;
        for (size_t s = 0; s < N_SEQS; s++) {
            count[s] = w->n_tokens[s] - begin[s] < chunk ? w->n_tokens[s] - begin[s] : chunk;
            left += count[s];
        }
        if (left == 0) return;
        step(c, w, t, k, v, begin, count, out);
        for (size_t s = 0; s < N_SEQS; s++) begin[s] += count[s];
    }
}

/* Computes the expected results with an f32 pool on context `one`. */
static struct world make_world(struct kernel_ctx *one, struct shape s,
                               const size_t n_tokens[N_SEQS])
{
    struct world w = { .s = s };
    for (size_t i = 0; i < N_SEQS; i++) {
        size_t n = w.n_tokens[i] = n_tokens[i];
        w.q[i] = random_floats(n * s.n_heads * s.dim, 2);
        w.k[i] = random_floats(n * s.n_kv * s.dim, 2);
        w.v[i] = random_floats(n * s.n_kv * s.dim, 2);
        /* a subnormal scale, and a row of zeros */
        for (size_t d = 0; d < s.dim; d++) w.v[i][n / 2 * s.n_kv * s.dim + d] *= 1e-42f;
        memset(w.k[i] + n / 2 * s.n_kv * s.dim, 0, s.dim * sizeof(float));
        w.held_k[i] = held_rows(s.dtype, w.k[i], n * s.n_kv, s.dim);
        w.held_v[i] = held_rows(s.dtype, w.v[i], n * s.n_kv, s.dim);
        w.want[i] = MEM_ARRAY(float, n *s.n_heads *s.dim);
    }
    lay_out(&w, s.block_tokens);
    run_world(one, &w, DTYPE_F32, w.held_k, w.held_v, 10000, w.want);
    return w;
}

static void free_world(struct world *w)
{
    for (size_t s = 0; s < N_SEQS; s++) {
        mem_free(w->table[s]), mem_free(w->q[s]), mem_free(w->k[s]), mem_free(w->v[s]);
        mem_free(w->held_k[s]), mem_free(w->held_v[s]), mem_free(w->want[s]);
    }
    mem_free(w->pool);
}

static void check_run(struct kernel_ctx *c, struct world *w, size_t chunk)
{
    float *out[N_SEQS];
    size_t row = w->s.n_heads * w->s.dim;
    for (size_t s = 0; s < N_SEQS; s++) out[s] = MEM_ARRAY(float, w->n_tokens[s] * row);
    run_world(c, w, w->s.dtype, w->k, w->v, chunk, out);
    for (size_t s = 0; s < N_SEQS; s++) {
        check_bits(out[s], w->want[s], w->n_tokens[s] * row, kv_rows_name(w->s.dtype), w->s.dim,
                   chunk);
        mem_free(out[s]);
    }
}

/* Compares every 29th position with the formula, in f64. */
static void check_against_softmax(const struct world *w)
{
    const struct shape *s = &w->s;
    for (size_t i = 0; i < N_SEQS; i++)
        for (size_t p = w->n_tokens[i] - 1; p < w->n_tokens[i]; p -= 29)
            for (size_t h = 0; h < s->n_heads; h++) {
                double sum = 0, out[KERNEL_HEAD_DIM_MAX] = { 0 };
                size_t head = h / (s->n_heads / s->n_kv);
                for (size_t j = 0; j <= p; j++) {
                    const float *q = w->q[i] + (p * s->n_heads + h) * s->dim,
                                *k = w->held_k[i] + (j * s->n_kv + head) * s->dim;
                    double dot = 0;
                    for (size_t d = 0; d < s->dim; d++) dot += (double)q[d] * (double)k[d];
                    double e = exp(dot / sqrt((double)s->dim));
                    sum += e;
                    for (size_t d = 0; d < s->dim; d++)
                        out[d] += e * (double)w->held_v[i][(j * s->n_kv + head) * s->dim + d];
                }
                for (size_t d = 0; d < s->dim; d++)
                    CHECK_NEAR(w->want[i][(p * s->n_heads + h) * s->dim + d], out[d] / sum, 2e-5);
            }
}

/* ---- cases ---- */

/* Few and many (head, token) pairs, grouped heads, odd row lengths with unaligned scales, the
 * longest heads. */
static const struct shape SHAPES[] = {
    { DTYPE_I8, 9, 3, 64, 64 },    { DTYPE_F8_E4M3, 9, 3, 64, 64 },  { DTYPE_F16, 9, 3, 64, 16 },
    { DTYPE_I8, 8, 8, 128, 16 },   { DTYPE_F8_E4M3, 16, 2, 128, 5 }, { DTYPE_F16, 2, 2, 33, 7 },
    { DTYPE_I8, 10, 10, 256, 64 }, { DTYPE_F8_E4M3, 6, 6, 256, 33 }, { DTYPE_I8, 14, 2, 33, 100 },
    { DTYPE_F8_E4M3, 5, 5, 1, 7 }, { DTYPE_I8, 4, 1, 47, 1 },        { DTYPE_F16, 4, 2, 256, 256 },
    { DTYPE_BF16, 9, 3, 64, 64 }, /* in f32 arithmetic */
};

static void rows_cases(const char *isa)
{
    static const size_t chunks[] = { 1, 7, 64, 10000 };
    const bool is_ref = strcmp(isa, "ref") == 0, some = is_ref || !test_runs_all();
    for (size_t i = 0; i < COUNT_OF(SHAPES); i++) {
        const size_t n_tokens[N_SEQS] = { 1, SHAPES[i].block_tokens + 3,
                                          is_ref              ? 70
                                          : TEST_IS_SANITIZED ? 140
                                                              : 330 };
        struct kernel_ctx *one = open_backend(isa, ACTIVATIONS_F32, 1);
        struct world w = make_world(one, SHAPES[i], n_tokens);
        if (i < 3) check_against_softmax(&w);
        kernel_ctx_free(one);
        for (int n_threads = 1; n_threads <= 3; n_threads++) {
            struct kernel_ctx *c = open_backend(isa,
                                                n_threads == 2 && SHAPES[i].dtype != DTYPE_BF16
                                                    ? ACTIVATIONS_FAST
                                                    : ACTIVATIONS_F32,
                                                n_threads);
            for (size_t k = 0; k < COUNT_OF(chunks); k++)
                if (!some || k % 3 + 1 == (size_t)n_threads) check_run(c, &w, chunks[k]);
            kernel_ctx_free(c);
        }
        free_world(&w);
    }
}

/* One long sequence whose segments are split over threads, and the same tokens with other block
 * sizes. */
static void long_cases(const char *isa)
{
    static const struct shape shapes[] = { { DTYPE_I8, 4, 2, 24, 64 },
                                           { DTYPE_F8_E4M3, 8, 8, 16, 32 } };
    static const size_t n_tokens[N_SEQS] = { 1100, 530, 3 }, sizes[] = { 1, 33, 100, 256 };
    /* the split is the same in every backend, and ref is slow */
    for (size_t i = strcmp(isa, "ref") == 0 ? 1 : 0; i < COUNT_OF(shapes); i++) {
        struct kernel_ctx *one = open_backend(isa, ACTIVATIONS_F32, 1),
                          *c = open_backend(isa, ACTIVATIONS_FAST, 5);
        struct world w = make_world(one, shapes[i], n_tokens);
        check_run(c, &w, 256);
        check_run(c, &w, 99);
        for (size_t k = 0; k < COUNT_OF(sizes); k++) {
            lay_out(&w, sizes[k]);
            check_run(c, &w, 256);
        }
        free_world(&w);
        kernel_ctx_free(one), kernel_ctx_free(c);
    }
}

/* NaN in keys and values of later positions must not reach earlier tokens. */
static void later_positions(const char *isa)
{
    enum { BROKEN = 77 };
    static const size_t n_tokens[N_SEQS] = { 150, 1, 1 };
    for (size_t i = 0; i < 3; i++) {
        struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, 2);
        struct world w = make_world(c, (struct shape){ SHAPES[i].dtype, 6, 2, 32, 64 }, n_tokens);
        float *out[N_SEQS];
        size_t row = w.s.n_heads * w.s.dim, n = n_tokens[0] * row;
        for (size_t s = 0; s < N_SEQS; s++) out[s] = MEM_ARRAY(float, w.n_tokens[s] * row);
        for (size_t j = BROKEN * w.s.n_kv * w.s.dim; j < n_tokens[0] * w.s.n_kv * w.s.dim; j++)
            w.k[0][j] = NAN, w.v[0][j] = j % 2 ? NAN : INFINITY;
        run_world(c, &w, w.s.dtype, w.k, w.v, 150, out);
        check_bits(out[0], w.want[0], BROKEN * row, "rows before a NaN", w.s.dtype, 150);
        for (size_t j = BROKEN * row; j < n; j++) CHECK(isnan(out[0][j]));
        for (size_t s = 0; s < N_SEQS; s++) mem_free(out[s]);
        free_world(&w);
        kernel_ctx_free(c);
    }
}

/* kv_append writes the bytes of kv_row_store where kv_layout.h places them, and no others. */
static void append_stores(const char *isa)
{
    static const enum dtype types[] = { DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_I8, DTYPE_F8_E4M3 };
    enum { HEADS = 2, DIM = 5, BLOCK = 4, ROWS = 6, BLOCKS = 3, ROW = HEADS * DIM };
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_FAST, 2);
    for (size_t t = 0; t < COUNT_OF(types); t++) {
        const struct shape s = { types[t], HEADS, HEADS, DIM, BLOCK };
        const struct kv_layout l = layout_of(&s, types[t], BLOCKS);
        const int32_t table[] = { 2, 0 };
        float *k = random_floats(ROWS * ROW, 3), *v = random_floats(ROWS * ROW, 3);
        char *pool = mem_calloc(kv_layout_pool_bytes(&l), 1),
             *want = mem_calloc(kv_layout_pool_bytes(&l), 1);
        const struct attn_seq seq = { .n_q = ROWS, .pos_begin = 1, .block_table = table };
        const struct kv_append_args a = { .k = k,
                                          .v = v,
                                          .on = { &seq, 1 },
                                          .kv = { .data = pool,
                                                  .dtype = types[t],
                                                  .n_heads = HEADS,
                                                  .head_dim = DIM,
                                                  .block_tokens = BLOCK, }, };
        k[3] = INFINITY;
        memset(pool, 0x11, kv_layout_pool_bytes(&l));
        memset(want, 0x11, kv_layout_pool_bytes(&l));
        for (size_t i = 0; i < ROWS * HEADS * 2; i++) {
            size_t pos = i / HEADS / 2 + 1, run = i % (HEADS * 2); /* run: (head, k or v) */
            char *piece = want + kv_layout_offset(&l, 0, (uint32_t)table[pos / BLOCK]);
            const float *x = (run % 2 ? v : k) + (pos - 1) * ROW + run / 2 * DIM;
            kv_row_store(types[t], x,
                         piece + run * kv_layout_segment_stride(&l) +
                             kv_layout_segment_bytes(&l, pos % BLOCK),
                         piece + kv_layout_scale_offset(&l) +
                             (run * BLOCK + pos % BLOCK) * kv_layout_scale_bytes(&l),
                         DIM);
        }
        c->ops->kv_append(c, &a);
        CHECK(memcmp(pool, want, kv_layout_pool_bytes(&l)) == 0);
        mem_free(k), mem_free(v), mem_free(pool), mem_free(want);
    }
    kernel_ctx_free(c);
}

TEST(what_may_be)
{
    static const enum dtype types[] = { DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_I8, DTYPE_F8_E4M3 };
    struct kernel_ctx *exact = open_backend("ref", ACTIVATIONS_F32, 1),
                      *fast = open_backend("ref", ACTIVATIONS_FAST, 1);
    struct err err;
    for (size_t i = 0; i < COUNT_OF(types); i++) {
        CHECK_OK(kernel_kv_check(ACTIVATIONS_F32, types[i], false, &err));
        if (types[i] != DTYPE_F32)
            CHECK_OK(kernel_kv_check(ACTIVATIONS_FAST, types[i], false, &err));
        CHECK_EQ_INT(kernel_kv_check(ACTIVATIONS_F32, types[i], true, &err),
                     types[i] == DTYPE_F32 ? OK : ERR_UNSUPPORTED);
        CHECK_EQ_INT(kernel_kv_check(ACTIVATIONS_FAST, types[i], true, &err),
                     types[i] == DTYPE_BF16 ? OK : ERR_UNSUPPORTED);
    }
    CHECK_STATUS(kernel_kv_check(ACTIVATIONS_FAST, DTYPE_I8, true, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "latents") && strstr(err.text, "as bf16, not as int8"));
    CHECK_STATUS(kernel_kv_check(ACTIVATIONS_FAST, DTYPE_F32, false, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "--activations f32"));
    CHECK_STATUS(kernel_kv_check(ACTIVATIONS_FAST, DTYPE_Q8_0, false, &err), ERR_UNSUPPORTED);
    kernel_ctx_free(exact), kernel_ctx_free(fast);
}

#define BACKEND_TESTS(name, isa)                                                                   \
    TEST(name##_rows) { rows_cases(isa); }                                                         \
    TEST(name##_long) { long_cases(isa); }                                                         \
    TEST(name##_later_positions) { later_positions(isa); }                                         \
    TEST(name##_append) { append_stores(isa); }
#define BACKEND_CASES(name)                                                                        \
    CASE_T(name##_rows, 240), CASE_T(name##_long, 240), CASE(name##_later_positions),              \
        CASE(name##_append)

EVERY_CPU_BACKEND(BACKEND_TESTS)

TEST_MAIN(CASE(what_may_be), EVERY_CPU_BACKEND_CASES(BACKEND_CASES))
