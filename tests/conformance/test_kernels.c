/* test_kernels.c - every row of the kernel table against the definition.
 *
 * The bound is zero: each row gives the bits of ref, for any number of rows and threads. ref itself is held to formulas
 * written out here, in f64 where rounding is not part of the definition. Buffers have exactly the size a call may touch,
 * so that a sanitizer build sees every stray access. A row that this CPU cannot run is skipped by name. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/kernels.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

static uint32_t rng_state = 12345;

static uint32_t random_u32(void)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 17;
    rng_state ^= rng_state << 5;
    return rng_state;
}

static float random_float(float range) { return ((float)(random_u32() >> 8) * 0x1p-23f - 1.0f) * range; }

static float *random_floats(size_t n, float range)
{
    float *x = MEM_ARRAY(float, n);
    for (size_t i = 0; i < n; i++) x[i] = random_float(range);
    return x;
}

static struct kernel_ctx *open_row(const char *isa, int n_threads)
{
    struct err         err;
    struct kernel_ctx *c;
    for (const struct kernel_ops *const *row = KERNEL_ROWS; *row; row++) {
        static char why[64];
        if (strcmp((*row)->name, isa) != 0 || (*row)->available()) continue;
        snprintf(why, sizeof why, "this CPU cannot run the %s row", isa);
        SKIP(why);
    }
    CHECK_OK(kernel_ctx_create(isa, n_threads, &c, &err));
    return c;
}

static void check_bits(const float *got, const float *want, size_t n, const char *what, size_t a, size_t b)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(&got[i], &want[i], sizeof *got) != 0)
            test_fail(__FILE__, __LINE__, "%s (%zu, %zu): element %zu is %.9g, not %.9g", what, a, b, i, (double)got[i],
                      (double)want[i]);
}

/* ---- matmul ---- */

static void fill_block(enum dtype t, uint8_t *p)
{
    float    value = random_float(random_u32() % 16 ? 0.05f : 3e-7f); /* now and then a subnormal f16 */
    uint16_t half;
    uint32_t bits;
    switch (t) {
    case DTYPE_F32: memcpy(p, &value, 4); break;
    case DTYPE_F16:
        half = dtype_f32_to_f16(value);
        memcpy(p, &half, 2);
        break;
    case DTYPE_BF16:
        half = dtype_f32_to_bf16(value);
        memcpy(p, &half, 2);
        break;
    default:
        for (size_t i = 0; i < dtype_block_bytes(t); i++) p[i] = (uint8_t)random_u32();
        half = dtype_f32_to_f16(value);
        memcpy(p, &half, 2);
        bits = dtype_f32_to_f16(random_float(0.3f));
        if (t == DTYPE_Q4_1) memcpy(p + 2, &bits, 2);
    }
}

/* One matrix at an odd address, packed, its own f32 copy beside it. */
struct matrix {
    uint8_t          *bytes;
    struct weight_src src;
    struct weight     packed;
    float            *wide; /* [n_out, n_in] */
};

static struct matrix make_matrix(struct kernel_ctx *c, enum dtype t, size_t n_out, size_t n_in)
{
    size_t        row_bytes = dtype_row_bytes(t, n_in);
    struct matrix m = { .bytes = mem_calloc(n_out * row_bytes + 1, 1), .wide = MEM_ARRAY(float, n_out * n_in) };
    m.src = (struct weight_src){ .dtype = t, .data = m.bytes + 1, .n_out = n_out, .n_in = n_in };
    for (size_t i = 0; i < n_out * n_in / dtype_block(t); i++) fill_block(t, m.bytes + 1 + i * dtype_block_bytes(t));
    for (size_t i = 0; i < n_out; i++) dtype_to_f32(t, m.bytes + 1 + i * row_bytes, m.wide + i * n_in, n_in);
    CHECK_OK(c->ops->weight_pack(c, &m.src, &m.packed));
    float *row = MEM_ARRAY(float, n_in);
    for (size_t i = 0; i < n_out; i++) {
        weight_row(&m.packed, i, row);
        check_bits(row, m.wide + i * n_in, n_in, "weight_row", i, n_in);
    }
    mem_free(row);
    return m;
}

static void free_matrix(struct matrix *m)
{
    weight_release(&m->packed);
    weight_release(&m->packed); /* twice is harmless */
    mem_free(m->bytes);
    mem_free(m->wide);
}

/* The definition of kernels.h, on the unpacked matrix. */
static float *naive_matmul(const struct matrix *m, const float *x, size_t n_rows, const float *bias)
{
    size_t n_out = m->src.n_out, n_in = m->src.n_in;
    float *y = MEM_ARRAY(float, n_rows * n_out);
    for (size_t i = 0; i < n_rows; i++)
        for (size_t j = 0; j < n_out; j++) {
            float sum = 0;
            for (size_t k = 0; k < n_in; k++) sum = fmaf(m->wide[j * n_in + k], x[i * n_in + k], sum);
            y[i * n_out + j] = bias ? sum + bias[j] : sum;
        }
    return y;
}

static void check_matmul(struct kernel_ctx *c, const struct matrix *m, size_t n_rows_max, size_t n_rows_step)
{
    size_t n_out = m->src.n_out, n_in = m->src.n_in, stride = n_out + 3;
    float *x = random_floats(n_rows_max * n_in, 2), *bias = random_floats(n_out, 1);
    float *plain = naive_matmul(m, x, n_rows_max, NULL), *biased = naive_matmul(m, x, n_rows_max, bias);
    for (size_t n = 1; n <= n_rows_max; n += n_rows_step) {
        float *y = MEM_ARRAY(float, n * stride - 3), *dense = MEM_ARRAY(float, n * n_out);
        for (size_t i = 0; i < n * stride - 3; i++) y[i] = 777;
        c->ops->matmul(c, y, stride, x, n, &m->packed, bias);
        c->ops->matmul(c, dense, n_out, x, n, &m->packed, NULL);
        check_bits(dense, plain, n * n_out, dtype_name(m->src.dtype), n, n_in);
        for (size_t i = 0; i < n; i++) {
            check_bits(y + i * stride, biased + i * n_out, n_out, dtype_name(m->src.dtype), n, n_in);
            for (size_t j = n_out; i + 1 < n && j < stride; j++) CHECK(y[i * stride + j] == 777);
        }
        mem_free(y);
        mem_free(dense);
    }
    mem_free(x);
    mem_free(bias);
    mem_free(plain);
    mem_free(biased);
}

static void matmul_cases(const char *isa)
{
    static const size_t sizes[][2] = { { 1, 32 }, { 16, 32 }, { 17, 64 }, { 70, 96 }, { 130, 288 }, { 100, 544 } };
    static const size_t odd[][2] = { { 1, 1 }, { 5, 7 }, { 33, 33 }, { 48, 257 }, { 20, 301 }, { 129, 48 } };
    for (int n_threads = 1; n_threads <= 3; n_threads++) {
        struct kernel_ctx *c = open_row(isa, n_threads);
        for (int t = 0; t < DTYPE_COUNT; t++) {
            for (size_t i = 0; i < COUNT_OF(sizes); i++) {
                struct matrix m = make_matrix(c, (enum dtype)t, sizes[i][0], sizes[i][1]);
                check_matmul(c, &m, i == 2 ? 70 : 200, i == 2 ? 1 : 66);
                free_matrix(&m);
            }
            for (size_t i = 0; i < COUNT_OF(odd) && dtype_block((enum dtype)t) == 1; i++) {
                struct matrix m = make_matrix(c, (enum dtype)t, odd[i][0], odd[i][1]);
                check_matmul(c, &m, 24, 1);
                free_matrix(&m);
            }
        }
        kernel_ctx_free(c);
    }
}

TEST(weight_pack_refuses_what_it_cannot_hold)
{
    struct kernel_ctx *c = open_row("ref", 1);
    struct weight      w = { 0 };
    struct weight_src  src = { .dtype = DTYPE_Q8_0, .data = "", .n_out = 1, .n_in = 33 };
    CHECK_STATUS(c->ops->weight_pack(c, &src, &w), ERR_INVALID);
    src = (struct weight_src){ .dtype = DTYPE_F32, .data = "", .n_out = 0, .n_in = 32 };
    CHECK_STATUS(c->ops->weight_pack(c, &src, &w), ERR_INVALID);
    src = (struct weight_src){ .dtype = DTYPE_F32, .data = "", .n_out = (size_t)1 << 40, .n_in = 32 };
    CHECK_STATUS(c->ops->weight_pack(c, &src, &w), ERR_TOO_LONG);
    src = (struct weight_src){ .dtype = DTYPE_COUNT, .data = "", .n_out = 1, .n_in = 32 };
    CHECK_STATUS(c->ops->weight_pack(c, &src, &w), ERR_UNSUPPORTED);
    CHECK(w.data == NULL);
    kernel_ctx_free(c);
}

/* ---- kernels over rows ---- */

static const size_t LENGTHS[] = { 1, 2, 5, 8, 9, 15, 16, 17, 24, 31, 33, 96, 576, 1000, 4099 };

static void norm_cases(const char *isa)
{
    struct kernel_ctx *c = open_row(isa, 2), *ref = open_row("ref", 1);
    for (size_t l = 0; l < COUNT_OF(LENGTHS); l++) {
        size_t n = LENGTHS[l], n_rows = 41;
        float *x = random_floats(n_rows * n, 4), *w = random_floats(n, 2);
        float *y = MEM_ARRAY(float, n_rows * n), *want = MEM_ARRAY(float, n_rows * n), *alone = MEM_ARRAY(float, n);
        c->ops->rms_norm(c, y, x, w, n_rows, n, 1e-5f);
        ref->ops->rms_norm(ref, want, x, w, n_rows, n, 1e-5f);
        check_bits(y, want, n_rows * n, "rms_norm", n, n_rows);
        for (size_t i = 0; i < n_rows; i++) {
            double squares = 0;
            for (size_t j = 0; j < n; j++) squares += (double)x[i * n + j] * (double)x[i * n + j];
            double r = 1 / sqrt(squares / (double)n + (double)1e-5f);
            for (size_t j = 0; j < n; j++) CHECK_NEAR(want[i * n + j], (double)w[j] * (double)x[i * n + j] * r, 1e-5);
            c->ops->rms_norm(c, alone, x + i * n, w, 1, n, 1e-5f);
            check_bits(alone, want + i * n, n, "rms_norm of one row", n, i);
        }
        c->ops->rms_norm(c, x, x, w, n_rows, n, 1e-5f);
        check_bits(x, want, n_rows * n, "rms_norm in place", n, n_rows);
        mem_free(x), mem_free(w), mem_free(y), mem_free(want), mem_free(alone);
    }
    kernel_ctx_free(c);
    kernel_ctx_free(ref);
}

static void add_cases(const char *isa)
{
    struct kernel_ctx *c = open_row(isa, 2);
    for (size_t l = 0; l <= COUNT_OF(LENGTHS); l++) {
        size_t n = l < COUNT_OF(LENGTHS) ? LENGTHS[l] : 100003;
        float *x = random_floats(n, 4), *y = random_floats(n, 4), *want = MEM_ARRAY(float, n);
        for (size_t i = 0; i < n; i++) want[i] = x[i] + y[i];
        c->ops->add(c, x, y, n);
        check_bits(x, want, n, "add", n, 0);
        mem_free(x), mem_free(y), mem_free(want);
    }
    kernel_ctx_free(c);
}

static void silu_cases(const char *isa)
{
    static const float extremes[] = { 0, -0.0f, 1e-30f, -1e-30f, 88, -88, 100, -100, 1e4f, -1e4f, 1e37f, -1e37f };
    struct kernel_ctx *c = open_row(isa, 2), *ref = open_row("ref", 1);
    for (size_t l = 0; l < COUNT_OF(LENGTHS); l++) {
        size_t n = LENGTHS[l], n_rows = 9;
        float *x = random_floats(n_rows * 2 * n, 20), *y = MEM_ARRAY(float, n_rows * n), *want = MEM_ARRAY(float, n_rows * n);
        for (size_t i = 0; i < n && i < COUNT_OF(extremes); i++) x[i] = extremes[i];
        c->ops->silu_mul(c, y, x, n_rows, n);
        ref->ops->silu_mul(ref, want, x, n_rows, n);
        check_bits(y, want, n_rows * n, "silu_mul", n, n_rows);
        for (size_t i = 0; i < n_rows; i++)
            for (size_t j = 0; j < n; j++) {
                double g = (double)x[i * 2 * n + j], u = (double)x[i * 2 * n + n + j], exact = g / (1 + exp(-g)) * u;
                CHECK_NEAR(want[i * n + j], exact, 1e-6 * fabs(exact) + 1e-34 * (fabs(g * u) + 1));
            }
        x[0] = NAN;
        c->ops->silu_mul(c, y, x, n_rows, n);
        CHECK(isnan(y[0]));
        mem_free(x), mem_free(y), mem_free(want);
    }
    kernel_ctx_free(c);
    kernel_ctx_free(ref);
}

static void rope_case(struct kernel_ctx *c, struct kernel_ctx *ref, size_t head_dim, size_t rot_dim, bool interleaved)
{
    enum { N_ROWS = 19, N_POS = 50 };
    size_t  n_heads = 3, stride = n_heads * head_dim + 5, n = N_ROWS * stride - 5;
    float  *x = random_floats(n, 2), *want = mem_dup(x, n * sizeof *x), *table = random_floats(N_POS * rot_dim, 1);
    float  *before = mem_dup(x, n * sizeof *x);
    int32_t pos[N_ROWS];
    for (int i = 0; i < N_ROWS; i++) pos[i] = (int32_t)(random_u32() % N_POS);
    c->ops->rope(c, x, stride, N_ROWS, n_heads, head_dim, rot_dim, table, pos, interleaved);
    ref->ops->rope(ref, want, stride, N_ROWS, n_heads, head_dim, rot_dim, table, pos, interleaved);
    check_bits(x, want, n, interleaved ? "rope interleaved" : "rope half", head_dim, rot_dim);
    for (size_t i = 0; i < N_ROWS; i++)
        for (size_t d = 0; d < n_heads * head_dim; d++) {
            size_t in_head = d % head_dim, half = rot_dim / 2, pair = interleaved ? in_head / 2 : in_head % (half ? half : 1);
            const float *b = before + i * stride + d - in_head, *cs = table + (size_t)pos[i] * rot_dim + 2 * pair;
            size_t i0 = interleaved ? 2 * pair : pair, i1 = interleaved ? 2 * pair + 1 : pair + half;
            double exact = in_head >= rot_dim ? (double)b[in_head]
                           : in_head == i0    ? (double)b[i0] * (double)cs[0] - (double)b[i1] * (double)cs[1]
                                              : (double)b[i1] * (double)cs[0] + (double)b[i0] * (double)cs[1];
            CHECK_NEAR(want[i * stride + d], exact, 1e-6);
        }
    mem_free(x), mem_free(want), mem_free(table), mem_free(before);
}

static void rope_cases(const char *isa)
{
    static const size_t dims[][2] = { { 2, 2 }, { 8, 6 }, { 16, 16 }, { 24, 24 }, { 20, 12 }, { 64, 64 }, { 80, 40 }, { 128, 128 } };
    struct kernel_ctx *c = open_row(isa, 2), *ref = open_row("ref", 1);
    for (size_t i = 0; i < COUNT_OF(dims); i++)
        for (int interleaved = 0; interleaved < 2; interleaved++) rope_case(c, ref, dims[i][0], dims[i][1], interleaved);
    kernel_ctx_free(c);
    kernel_ctx_free(ref);
}

static void lse_cases(const char *isa)
{
    static const size_t lengths[] = { 1, 5, 16, 17, 100, 1023, 1024, 1025, 5000, 49152 };
    struct kernel_ctx *c = open_row(isa, 2), *ref = open_row("ref", 1);
    for (size_t l = 0; l < COUNT_OF(lengths); l++) {
        size_t n = lengths[l], n_rows = 4, stride = n + 7;
        float *x = random_floats(n_rows * stride - 7, 15), got[4], want[4], alone;
        for (size_t i = 0; i < n; i++) x[2 * stride + i] = -INFINITY;
        for (size_t i = 1; i < n; i += 3) x[3 * stride + i] = -INFINITY;
        c->ops->log_sum_exp(c, got, x, stride, n_rows, n);
        ref->ops->log_sum_exp(ref, want, x, stride, n_rows, n);
        check_bits(got, want, n_rows, "log_sum_exp", n, n_rows);
        for (size_t i = 0; i < n_rows; i++) {
            double sum = 0;
            for (size_t j = 0; j < n; j++) sum += exp((double)x[i * stride + j]);
            if (i == 2) CHECK(want[i] == -INFINITY);
            else CHECK_NEAR(want[i], log(sum), 3e-6);
            c->ops->log_sum_exp(c, &alone, x + i * stride, stride, 1, n);
            check_bits(&alone, &want[i], 1, "log_sum_exp of one row", n, i);
        }
        mem_free(x);
    }
    kernel_ctx_free(c);
    kernel_ctx_free(ref);
}

/* ---- attention ---- */

enum { N_SEQS = 3 };

struct world { /* a pool, three sequences in it, their queries, keys and values */
    size_t          n_heads, n_kv, dim, block_tokens, n_tokens[N_SEQS], kv_floats;
    int32_t        *table[N_SEQS];
    float          *q[N_SEQS], *k[N_SEQS], *v[N_SEQS], *kv, *want[N_SEQS];
};

static void make_world(struct world *w, size_t n_heads, size_t n_kv, size_t dim, size_t block_tokens)
{
    *w = (struct world){ .n_heads = n_heads, .n_kv = n_kv, .dim = dim, .block_tokens = block_tokens,
                         .n_tokens = { 1, block_tokens + 3, 3 * block_tokens + 37 } };
    size_t n_blocks = 0, next = 0;
    for (int s = 0; s < N_SEQS; s++) n_blocks += (w->n_tokens[s] + block_tokens - 1) / block_tokens;
    for (int s = 0; s < N_SEQS; s++) {
        size_t n = w->n_tokens[s], blocks = (n + block_tokens - 1) / block_tokens;
        w->table[s] = MEM_ARRAY(int32_t, blocks);
        for (size_t b = 0; b < blocks; b++) w->table[s][b] = (int32_t)(next++ * 7 % n_blocks); /* scattered */
        w->q[s] = random_floats(n * n_heads * dim, 2);
        w->k[s] = random_floats(n * n_kv * dim, 2);
        w->v[s] = random_floats(n * n_kv * dim, 2);
        w->want[s] = MEM_ARRAY(float, n * n_heads * dim);
    }
    if (n_blocks % 7 == 0) /* 7 must not divide the modulus */
        for (int s = 0, b = 0; s < N_SEQS; s++)
            for (size_t i = 0; i * block_tokens < w->n_tokens[s]; i++) w->table[s][i] = b++;
    w->kv_floats = n_blocks * n_kv * 2 * block_tokens * dim;
    w->kv = MEM_ARRAY(float, w->kv_floats);
}

static void free_world(struct world *w)
{
    for (int s = 0; s < N_SEQS; s++)
        mem_free(w->table[s]), mem_free(w->q[s]), mem_free(w->k[s]), mem_free(w->v[s]), mem_free(w->want[s]);
    mem_free(w->kv);
}

/* Feed `count` tokens of each sequence in `mask` from `begin[s]` on in one step; returns their output rows. */
static float *step(struct kernel_ctx *c, struct world *w, const size_t begin[N_SEQS], const size_t count[N_SEQS])
{
    struct attn_seq seqs[N_SEQS];
    size_t n_rows = 0, q_row = w->n_heads * w->dim, kv_row = w->n_kv * w->dim;
    for (int s = 0; s < N_SEQS; s++) n_rows += count[s];
    float *q = MEM_ARRAY(float, n_rows * q_row), *out = MEM_ARRAY(float, n_rows * q_row);
    float *k = MEM_ARRAY(float, n_rows * kv_row), *v = MEM_ARRAY(float, n_rows * kv_row);
    size_t row = 0;
    for (int s = 0; s < N_SEQS; row += count[s++]) {
        seqs[s] = (struct attn_seq){ .q_begin = (int32_t)row, .n_q = (int32_t)count[s], .pos_begin = (int32_t)begin[s],
                                     .block_table = w->table[s] };
        memcpy(q + row * q_row, w->q[s] + begin[s] * q_row, count[s] * q_row * sizeof *q);
        memcpy(k + row * kv_row, w->k[s] + begin[s] * kv_row, count[s] * kv_row * sizeof *k);
        memcpy(v + row * kv_row, w->v[s] + begin[s] * kv_row, count[s] * kv_row * sizeof *v);
    }
    for (size_t i = 0; i < n_rows * q_row; i++) out[i] = NAN;
    struct kv_append_args append = { .k = k, .v = v, .kv = w->kv, .seqs = seqs, .n_seqs = N_SEQS, .n_kv_heads = (int32_t)w->n_kv,
                                     .head_dim = (int32_t)w->dim, .block_tokens = (int32_t)w->block_tokens };
    struct attn_args attn = { .q = q, .out = out, .kv = w->kv, .seqs = seqs, .n_seqs = N_SEQS, .n_heads = (int32_t)w->n_heads,
                              .n_kv_heads = (int32_t)w->n_kv, .head_dim = (int32_t)w->dim,
                              .block_tokens = (int32_t)w->block_tokens, .scale = 1.0f / sqrtf((float)w->dim) };
    c->ops->kv_append(c, &append);
    c->ops->attention(c, &attn);
    mem_free(q), mem_free(k), mem_free(v);
    return out;
}

/* All tokens in steps of at most `chunk` per sequence, each step a batch of all sequences that have some left. */
static void run_world(struct kernel_ctx *c, struct world *w, size_t chunk, float *out[N_SEQS])
{
    size_t begin[N_SEQS] = { 0 }, count[N_SEQS], left = 1, q_row = w->n_heads * w->dim;
    for (size_t i = 0; i < w->kv_floats; i++) w->kv[i] = NAN; /* what was never written must never be read */
    for (;;) {
        left = 0;
        for (int s = 0; s < N_SEQS; s++) {
            count[s] = w->n_tokens[s] - begin[s] < chunk ? w->n_tokens[s] - begin[s] : chunk;
            left += count[s];
        }
        if (left == 0) return;
        float *rows = step(c, w, begin, count);
        for (size_t s = 0, row = 0; s < N_SEQS; row += count[s++]) {
            memcpy(out[s] + begin[s] * q_row, rows + row * q_row, count[s] * q_row * sizeof *rows);
            begin[s] += count[s];
        }
        mem_free(rows);
    }
}

static void check_against_softmax(const struct world *w)
{
    size_t group = w->n_heads / w->n_kv;
    for (int s = 0; s < N_SEQS; s++)
        for (size_t p = 0; p < w->n_tokens[s]; p += 5)
            for (size_t h = 0; h < w->n_heads; h++) {
                const float *q = w->q[s] + (p * w->n_heads + h) * w->dim;
                double sum = 0, out[KERNEL_HEAD_DIM_MAX] = { 0 };
                for (size_t j = 0; j <= p; j++) {
                    size_t at = (j * w->n_kv + h / group) * w->dim;
                    double dot = 0;
                    for (size_t d = 0; d < w->dim; d++) dot += (double)q[d] * (double)w->k[s][at + d];
                    double e = exp(dot / sqrt((double)w->dim));
                    sum += e;
                    for (size_t d = 0; d < w->dim; d++) out[d] += e * (double)w->v[s][at + d];
                }
                for (size_t d = 0; d < w->dim; d++)
                    CHECK_NEAR(w->want[s][(p * w->n_heads + h) * w->dim + d], out[d] / sum, 1e-5);
            }
}

static void attention_cases(const char *isa)
{
    static const size_t shapes[][4] = { { 9, 3, 64, 64 }, { 4, 1, 24, 16 }, { 2, 2, 128, 64 }, { 6, 2, 16, 5 },
                                        { 3, 1, 20, 1 },  { 2, 1, 80, 33 }, { 1, 1, 256, 16 }, { 8, 1, 8, 256 } };
    static const size_t chunks[] = { 1, 7, 64, 10000 };
    for (int n_threads = 1; n_threads <= 2; n_threads++) {
        struct kernel_ctx *c = open_row(isa, n_threads), *ref = open_row("ref", 1);
        for (size_t i = 0; i < COUNT_OF(shapes); i++) {
            struct world w;
            float       *out[N_SEQS];
            make_world(&w, shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3]);
            run_world(ref, &w, 10000, w.want);
            check_against_softmax(&w);
            for (int s = 0; s < N_SEQS; s++) out[s] = MEM_ARRAY(float, w.n_tokens[s] * w.n_heads * w.dim);
            for (size_t k = 0; k < COUNT_OF(chunks); k++) {
                run_world(c, &w, chunks[k], out);
                for (int s = 0; s < N_SEQS; s++)
                    check_bits(out[s], w.want[s], w.n_tokens[s] * w.n_heads * w.dim, "attention", i, chunks[k]);
            }
            for (int s = 0; s < N_SEQS; s++) mem_free(out[s]);
            free_world(&w);
        }
        kernel_ctx_free(c);
        kernel_ctx_free(ref);
    }
}

/* More sequences than one pass of the work table holds, each of one token. */
static void many_sequences(const char *isa)
{
    enum { N = 5000, DIM = 8 };
    struct kernel_ctx *c = open_row(isa, 2);
    struct attn_seq   *seqs = MEM_ARRAY(struct attn_seq, N);
    float *q = random_floats(N * DIM, 1), *v = random_floats(N * DIM, 1), *out = MEM_ARRAY(float, N * DIM);
    float *kv = MEM_ARRAY(float, N * 2 * DIM);
    int32_t *blocks = MEM_ARRAY(int32_t, N);
    for (int32_t i = 0; i < N; i++) {
        blocks[i] = i;
        seqs[i] = (struct attn_seq){ .q_begin = i, .n_q = i % 10 == 3 ? 0 : 1, .pos_begin = 0, .block_table = &blocks[i] };
    }
    struct kv_append_args append = { .k = q, .v = v, .kv = kv, .seqs = seqs, .n_seqs = N, .n_kv_heads = 1, .head_dim = DIM,
                                     .block_tokens = 1 };
    struct attn_args attn = { .q = q, .out = out, .kv = kv, .seqs = seqs, .n_seqs = N, .n_heads = 1, .n_kv_heads = 1,
                              .head_dim = DIM, .block_tokens = 1, .scale = 1 };
    c->ops->kv_append(c, &append);
    c->ops->attention(c, &attn);
    for (size_t i = 0; i < N; i++) /* one key: its weight is 1 */
        for (size_t d = 0; d < DIM; d++) CHECK(out[i * DIM + d] == (i % 10 == 3 ? 0 : v[i * DIM + d]));
    mem_free(q), mem_free(v), mem_free(out), mem_free(kv), mem_free(blocks), mem_free(seqs);
    kernel_ctx_free(c);
}

/* ---- the context ---- */

TEST(context_names_what_this_cpu_has)
{
    struct err         err = { 0 };
    struct kernel_ctx *c = NULL;
    char               features[128];
    CHECK_STATUS(kernel_ctx_create("sse9", 1, &c, &err), ERR_INVALID);
    CHECK(strstr(err.text, "sse9") && strstr(err.text, "ref"));
    CHECK_STATUS(kernel_ctx_create("ref", 0, &c, &err), ERR_INVALID);
    CHECK(c == NULL);
    CHECK_OK(kernel_ctx_create("auto", 2, &c, &err));
    CHECK(c->ops->available());
    kernel_ctx_free(c);
    kernel_ctx_free(NULL);
    kernel_cpu_features(features, sizeof features);
    printf("features: %s\n", features);
    kernel_cpu_features(features, 7);
    CHECK(strlen(features) < 7);
    for (const struct kernel_ops *const *row = KERNEL_ROWS; *row; row++)
        if (!(*row)->available()) CHECK_STATUS(kernel_ctx_create((*row)->name, 1, &c, &err), ERR_UNSUPPORTED);
}

#define ROW_TESTS(isa)                                           \
    TEST(isa##_matmul) { matmul_cases(#isa); }                   \
    TEST(isa##_rms_norm) { norm_cases(#isa); }                   \
    TEST(isa##_add) { add_cases(#isa); }                         \
    TEST(isa##_silu_mul) { silu_cases(#isa); }                   \
    TEST(isa##_rope) { rope_cases(#isa); }                       \
    TEST(isa##_log_sum_exp) { lse_cases(#isa); }                 \
    TEST(isa##_attention) { attention_cases(#isa); }             \
    TEST(isa##_attention_many_sequences) { many_sequences(#isa); }
#define ROW_CASES(isa)                                                                                          \
    CASE_T(isa##_matmul, 200), CASE(isa##_rms_norm), CASE(isa##_add), CASE(isa##_silu_mul), CASE(isa##_rope),   \
        CASE(isa##_log_sum_exp), CASE_T(isa##_attention, 200), CASE(isa##_attention_many_sequences)

ROW_TESTS(ref)
ROW_TESTS(avx2)
ROW_TESTS(avx512)

TEST_MAIN(ROW_CASES(ref), ROW_CASES(avx2), ROW_CASES(avx512), CASE(weight_pack_refuses_what_it_cannot_hold),
          CASE(context_names_what_this_cpu_has))
