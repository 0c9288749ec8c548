/* test_kernels.c - the kernel_ops that work row by row, products of plain types in FAST, and the
 * context.
 *
 * The bound of the former is zero: each backend gives the bits of ref, for any number of rows and
 * threads. ref itself is compared with formulas written out here, in f64 unless rounding is part of
 * the definition. Buffers have exactly the size that a call may touch, so that a sanitizer build
 * finds every stray access. A backend that this CPU cannot run is skipped by name. */
#include "kernels/cpu/cpu_backend.h"
#include "kernels/host_math.h"
#include "tests/conformance/kernel_ops_on_device.h"

static const size_t LENGTHS[] = { 1, 2, 5, 8, 9, 15, 16, 17, 24, 31, 33, 96, 576, 1000, 4099 };

/* Rows of prompts have the bits that one has; rows apart, in place. */
static void check_many_norms(struct kernel_ctx *c, size_t n)
{
    enum { MANY = 1027 };
    const size_t stride = n + 4;
    float *x = random_floats(MANY * stride, 4), *w = random_floats(n, 2),
          *kept = mem_dup(x, MANY * stride * sizeof *x), *alone = MEM_ARRAY(float, n);
    on_rms_norm(c, x, stride, x, stride, w, MANY, n, 1e-5f);
    for (size_t i = 0; i < MANY; i += 342) {
        on_rms_norm(c, alone, n, kept + i * stride, n, w, 1, n, 1e-5f);
        check_bits(x + i * stride, alone, n, "rms_norm of many rows", n, i);
        if (i + 1 < MANY)
            check_bits(x + i * stride + n, kept + i * stride + n, 4, "between many rows", n, i);
    }
    mem_free(x), mem_free(w), mem_free(kept), mem_free(alone);
}

static void norm_cases(const char *isa)
{
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, 2),
                      *ref = open_backend("ref", ACTIVATIONS_F32, 1);
    for (size_t l = 0; l < COUNT_OF(LENGTHS); l++) {
        size_t n = LENGTHS[l], n_rows = 41;
        float *x = random_floats(n_rows * n, 4), *w = random_floats(n, 2);
        float *y = MEM_ARRAY(float, n_rows *n), *want = MEM_ARRAY(float, n_rows *n),
              *alone = MEM_ARRAY(float, n);
        on_rms_norm(c, y, n, x, n, w, n_rows, n, 1e-5f);
        ref->ops->rms_norm(ref, want, n, x, n, w, n_rows, n, 1e-5f);
        check_against_ref(c, y, want, n_rows * n, 1e-6, "rms_norm", n, n_rows);
        for (size_t i = 0; i < n_rows; i++) {
            double squares = 0;
            for (size_t j = 0; j < n; j++) squares += (double)x[i * n + j] * (double)x[i * n + j];
            double r = 1 / sqrt(squares / (double)n + (double)1e-5f);
            for (size_t j = 0; j < n; j++)
                CHECK_NEAR(want[i * n + j], (double)w[j] * (double)x[i * n + j] * r, 1e-5);
            on_rms_norm(c, alone, n, x + i * n, n, w, 1, n, 1e-5f);
            check_bits(alone, y + i * n, n, "rms_norm of one row", n, i);
        }
        float *wide = random_floats(n_rows * (n + 5) - 5, 4),
              *kept = mem_dup(wide, (n_rows * (n + 5) - 5) * sizeof *wide);
        for (size_t i = 0; i < n_rows; i++) memcpy(wide + i * (n + 5), x + i * n, n * sizeof *x);
        on_rms_norm(c, wide, n + 5, wide, n + 5, w, n_rows, n, 1e-5f);
        for (size_t i = 0; i < n_rows; i++) {
            check_bits(wide + i * (n + 5), y + i * n, n, "rms_norm in place, rows apart", n, i);
            if (i + 1 < n_rows)
                check_bits(wide + i * (n + 5) + n, kept + i * (n + 5) + n, 5, "between the rows", n,
                           i);
        }
        mem_free(wide), mem_free(kept);
        mem_free(x), mem_free(w), mem_free(y), mem_free(want), mem_free(alone);
    }
    static const size_t MANY[] = { 100, 2048, 2564, 4096 };
    for (size_t l = 0; l < COUNT_OF(MANY); l++) check_many_norms(c, MANY[l]);
    kernel_ctx_free(c);
    kernel_ctx_free(ref);
}

static void add_cases(const char *isa)
{
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, 2);
    for (size_t l = 0; l <= COUNT_OF(LENGTHS); l++) {
        size_t n = l < COUNT_OF(LENGTHS) ? LENGTHS[l] : 100003;
        float *x = random_floats(n, 4), *y = random_floats(n, 4), *want = MEM_ARRAY(float, n);
        for (size_t i = 0; i < n; i++) want[i] = x[i] + y[i];
        on_add(c, x, y, n);
        check_bits(x, want, n, "add", n, 0);
        mem_free(x), mem_free(y), mem_free(want);
    }
    kernel_ctx_free(c);
}

static void copy_cases(const char *isa)
{
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, 2);
    for (size_t l = 0; l < COUNT_OF(LENGTHS); l++) {
        enum { ROWS = 37 };
        size_t n = LENGTHS[l], to_stride = n + 3, from_stride = n + 1;
        int32_t rows[ROWS];
        float *to = random_floats(ROWS * to_stride - 3, 1),
              *from = random_floats(ROWS * from_stride - 1, 1),
              *want = mem_dup(to, (ROWS * to_stride - 3) * sizeof *to);
        for (size_t i = 0; i < ROWS; i++)
            memcpy(want + i * to_stride, from + i * from_stride, n * sizeof *to);
        on_copy_rows(c, to, to_stride, from, from_stride, ROWS, NULL, ROWS, n);
        check_bits(to, want, ROWS * to_stride - 3, "copy_rows", n, 0);
        on_copy_rows(c, to, to_stride, from, from_stride, ROWS, NULL, 0, n);
        for (size_t i = 0; i < ROWS; i++) {
            rows[i] = (int32_t)(i * i % ROWS); /* some twice, some never */
            memcpy(want + i * to_stride, from + (size_t)rows[i] * from_stride, n * sizeof *to);
        }
        on_copy_rows(c, to, to_stride, from, from_stride, ROWS, rows, ROWS, n);
        check_bits(to, want, ROWS * to_stride - 3, "copy_rows of some", n, 0);
        mem_free(to), mem_free(from), mem_free(want);
    }
    kernel_ctx_free(c);
}

enum { ROPE_ROWS = 19, ROPE_POS = 50 };

/* Element `at` of a head b after (norm and) rotation. */
static double rotated(const struct rope_args *a, const float *b, size_t dim, const float *norm,
                      const float *cs, size_t at)
{
    const size_t half = a->rot_dim / 2, pair = a->interleaved ? at / 2 : at % (half ? half : 1);
    const size_t i0 = a->interleaved ? 2 * pair : pair,
                 i1 = a->interleaved ? 2 * pair + 1 : pair + half;
    double squares = 0, factor = 1;
    for (size_t i = 0; i < dim; i++) squares += (double)b[i] * (double)b[i];
    if (norm) factor = 1 / sqrt(squares / (double)dim + (double)a->norm_eps);
#define ELEMENT(i) ((double)b[i] * factor * (norm ? (double)norm[i] : 1))
    if (at >= 2 * half) return ELEMENT(at);
    return at == i0 ? ELEMENT(i0) * (double)cs[2 * pair] - ELEMENT(i1) * (double)cs[2 * pair + 1]
                    : ELEMENT(i1) * (double)cs[2 * pair] + ELEMENT(i0) * (double)cs[2 * pair + 1];
#undef ELEMENT
}

/* Two lists of heads in one call: 3 of head_dim elements, and `others` of another length. */
static void rope_case(struct kernel_ctx *c, struct kernel_ctx *ref, size_t head_dim, size_t rot_dim,
                      bool interleaved, size_t others)
{
    const size_t dims[] = { head_dim, head_dim + 4 }, n_heads[] = { 3, others };
    float *x[2], *want[2], *before[2], *norm[2], *table = random_floats(ROPE_POS * rot_dim, 1);
    int32_t pos[ROPE_ROWS];
    struct rope_args a = {
        .n_heads = others ? 2 : 1,
        .n_rows = ROPE_ROWS,
        .rot_dim = rot_dim,
        .cos_sin = table,
        .pos = pos,
        .interleaved = interleaved,
        .norm_eps = 1e-5f,
    };
    for (int i = 0; i < ROPE_ROWS; i++) pos[i] = (int32_t)(random_u32() % ROPE_POS);
    for (size_t l = 0; l < a.n_heads; l++) {
        const size_t stride = n_heads[l] * dims[l] + 5, n = ROPE_ROWS * stride - 5;
        x[l] = random_floats(n, 2), want[l] = mem_dup(x[l], n * sizeof **x),
        before[l] = mem_dup(x[l], n * sizeof **x);
        /* one of the two lists has a norm */
        norm[l] = others && (l == 0) == interleaved ? NULL : random_floats(dims[l], 1);
        a.heads[l] = (struct rope_heads){
            .x = x[l],
            .x_stride = stride,
            .n_heads = n_heads[l],
            .head_dim = dims[l],
            .norm = norm[l],
        };
    }
    on_rope(c, &a, ROPE_POS);
    for (size_t l = 0; l < a.n_heads; l++) a.heads[l].x = want[l];
    ref->ops->rope(ref, &a);
    for (size_t l = 0; l < a.n_heads; l++) {
        const size_t stride = a.heads[l].x_stride, dim = dims[l];
        check_against_ref(c, x[l], want[l], ROPE_ROWS * stride - 5, 2e-6,
                          interleaved ? "rope interleaved" : "rope half", head_dim, rot_dim);
        for (size_t i = 0; i < ROPE_ROWS; i++)
            for (size_t d = 0; d < n_heads[l] * dim; d++)
                CHECK_NEAR(want[l][i * stride + d],
                           rotated(&a, before[l] + i * stride + d / dim * dim, dim, norm[l],
                                   table + (size_t)pos[i] * rot_dim, d % dim),
                           2e-6);
        mem_free(x[l]), mem_free(want[l]), mem_free(before[l]), mem_free(norm[l]);
    }
    mem_free(table);
}

static void rope_cases(const char *isa)
{
    static const size_t dims[][2] = { { 2, 2 },   { 8, 6 },   { 16, 16 }, { 24, 24 },
                                      { 20, 12 }, { 64, 64 }, { 80, 40 }, { 128, 128 } };
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, 2),
                      *ref = open_backend("ref", ACTIVATIONS_F32, 1);
    for (size_t i = 0; i < COUNT_OF(dims); i++)
        for (int interleaved = 0; interleaved < 2; interleaved++)
            for (size_t others = 0; others < 3; others++)
                rope_case(c, ref, dims[i][0], dims[i][1], interleaved, others);
    kernel_ctx_free(c);
    kernel_ctx_free(ref);
}

static void lse_cases(const char *isa)
{
    static const size_t lengths[] = { 1, 5, 16, 17, 100, 1023, 1024, 1025, 5000, 49152 };
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, 2),
                      *ref = open_backend("ref", ACTIVATIONS_F32, 1);
    for (size_t l = 0; l < COUNT_OF(lengths); l++) {
        size_t n = lengths[l], n_rows = 4, stride = n + 7;
        float *x = random_floats(n_rows * stride - 7, 15), got[4], want[4], alone;
        for (size_t i = 0; i < n; i++) x[2 * stride + i] = -INFINITY;
        for (size_t i = 1; i < n; i += 3) x[3 * stride + i] = -INFINITY;
        host_log_sum_exp(c, got, x, stride, n_rows, n);
        host_log_sum_exp(ref, want, x, stride, n_rows, n);
        check_bits(got, want, n_rows, "log_sum_exp", n, n_rows);
        for (size_t i = 0; i < n_rows; i++) {
            double sum = 0;
            for (size_t j = 0; j < n; j++) sum += exp((double)x[i * stride + j]);
            if (i == 2) CHECK(want[i] == -INFINITY);
            else CHECK_NEAR(want[i], log(sum), 3e-6);
            host_log_sum_exp(c, &alone, x + i * stride, stride, 1, n);
            check_bits(&alone, &want[i], 1, "log_sum_exp of one row", n, i);
        }
        mem_free(x);
    }
    kernel_ctx_free(c);
    kernel_ctx_free(ref);
}

/* The functions with which sampling reads a row of logits. */
static void vocabulary_cases(const char *isa)
{
    static const size_t lengths[] = { 1, 7, 16, 17, 4095, 4096, 4097, 40000, 151936 };
    static const float odd[] = { NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 0, -0.0f };
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, 3),
                      *ref = open_backend("ref", ACTIVATIONS_F32, 1);
    for (size_t l = 0; l < COUNT_OF(lengths); l++) {
        size_t n = lengths[l], first = 0;
        float *x = random_floats(n, 20), *got = MEM_ARRAY(float, n), *want = MEM_ARRAY(float, n);
        for (size_t i = 1; i < n; i++) first = x[i] > x[first] ? i : first;
        CHECK_EQ_INT(host_argmax(c, x, n), (int)first);
        host_exp_terms(c, got, x, n, x[first], 1.25f);
        host_exp_terms(ref, want, x, n, x[first], 1.25f);
        check_bits(got, want, n, "exp_terms", n, 0);
        for (size_t i = 0; i < n; i++)
            CHECK_NEAR(want[i], exp(((double)x[i] - (double)x[first]) * 1.25), 4e-6);
        for (size_t i = 0; i < n && i < COUNT_OF(odd); i++) x[n - 1 - i] = odd[i];
        host_exp_terms(c, x, memcpy(got, x, n * sizeof *x), n, 20, 0.5f);
        host_exp_terms(ref, want, got, n, 20, 0.5f);
        check_bits(x, want, n, "exp_terms of odd values", n, 0);
        CHECK(want[n - 1] == 0); /* NaN */
        for (size_t i = 0; i < n; i++) x[i] = i == n / 2 || i + 1 == n ? 3 : NAN;
        CHECK_EQ_INT(host_argmax(c, x, n), (int)(n / 2));
        for (size_t i = 0; i < n; i++) x[i] = i % 2 ? NAN : -INFINITY;
        CHECK_EQ_INT(host_argmax(c, x, n), -1);
        mem_free(x), mem_free(got), mem_free(want);
    }
    kernel_ctx_free(c);
    kernel_ctx_free(ref);
}

static void combine_cases(const char *isa)
{
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, 2);
    for (size_t l = 0; l < COUNT_OF(LENGTHS); l++) {
        enum { ROWS = 23, USED = 5, SOURCE = 40 };
        size_t n = LENGTHS[l];
        float *rows = random_floats(SOURCE * n, 3), *weights = random_floats(ROWS * USED, 1),
              *y = random_floats(ROWS * n, 2);
        int32_t index[ROWS * USED];
        for (size_t i = 0; i < COUNT_OF(index); i++) index[i] = (int32_t)(random_u32() % SOURCE);
        for (int add = 0; add < 2; add++) {
            float *got = mem_dup(y, ROWS * n * sizeof *y), *want = mem_dup(y, ROWS * n * sizeof *y);
            for (size_t i = 0; i < ROWS; i++)
                for (size_t d = 0; d < n; d++) {
                    float sum = add ? want[i * n + d] : 0;
                    for (size_t j = 0; j < USED; j++)
                        sum = fmaf(weights[i * USED + j], rows[(size_t)index[i * USED + j] * n + d],
                                   sum);
                    want[i * n + d] = sum;
                }
            on_combine(c,
                       (struct combine_args){
                           .y = got,
                           .rows = rows,
                           .index = index,
                           .weights = weights,
                           .n_rows = ROWS,
                           .n_used = USED,
                           .n = n,
                           .add = add != 0,
                       },
                       SOURCE);
            check_bits(got, want, ROWS * n, "combine", n, (size_t)add);
            mem_free(got), mem_free(want);
        }
        mem_free(rows), mem_free(weights), mem_free(y);
    }
    kernel_ctx_free(c);
}

/* ---- the rows ---- */

TEST(every_backend_has_its_tests)
{
#define NAME(name, isa) isa,
    static const char *const tested[] = { EVERY_BACKEND(NAME) };
#undef NAME
    size_t n = 0;
    for (; KERNEL_BACKENDS[n]; n++) {
        bool found = false;
        for (size_t i = 0; i < COUNT_OF(tested); i++)
            found |= strcmp(tested[i], KERNEL_BACKENDS[n]->name) == 0;
        if (!found)
            test_fail(__FILE__, __LINE__, "EVERY_BACKEND lacks %s", KERNEL_BACKENDS[n]->name);
    }
    CHECK_EQ_INT(n, COUNT_OF(tested));
}

/* Tables of microkernels hold function pointers and nothing else. */
static void check_complete(const char *name, const void *table, size_t bytes)
{
    void (*entry)(void);
    for (size_t at = 0; at < bytes; at += sizeof entry) {
        memcpy(&entry, (const char *)table + at, sizeof entry);
        if (!entry) test_fail(__FILE__, __LINE__, "%s: entry %zu is NULL", name, at / sizeof entry);
    }
}

TEST(microkernel_tables_are_complete)
{
    static const struct cpu_backend *const backends[] = {
        &cpu_backend_ref,         &cpu_backend_avx2,        &cpu_backend_avx512,
        &cpu_backend_avx512_vnni, &cpu_backend_avx512_bf16, &cpu_backend_amx,
    };
    for (size_t i = 0; i < COUNT_OF(backends); i++) {
        const char *name = backends[i]->base.name;
        const struct cpu_microkernels *k = &backends[i]->microkernels;
        check_complete(name, k->gemm, sizeof *k->gemm);
        check_complete(name, k->elementwise, sizeof *k->elementwise);
        check_complete(name, k->attention, sizeof *k->attention);
        if (k->bf16) check_complete(name, k->bf16, sizeof *k->bf16);
    }
}

/* ---- the context ---- */

TEST(context_names_what_this_machine_has)
{
    struct err err = { 0 };
    struct kernel_ctx *c = NULL;
    char features[128];
    CHECK_STATUS(kernel_ctx_create(kernel_options_default("sse9", ACTIVATIONS_FAST, 1), &c, &err),
                 ERR_INVALID);
    CHECK(strstr(err.text, "sse9") && strstr(err.text, "ref"));
    CHECK_STATUS(kernel_ctx_create(kernel_options_default("ref", ACTIVATIONS_FAST, 0), &c, &err),
                 ERR_INVALID);
    CHECK(c == NULL);
    CHECK_OK(kernel_ctx_create(kernel_options_default("auto", ACTIVATIONS_FAST, 2), &c, &err));
    CHECK(c->backend->available());
    CHECK(c->options.kv == DTYPE_BF16);
    kernel_ctx_free(c);
    kernel_ctx_free(NULL);
    kernel_cpu_features(features, sizeof features);
    printf("features: %s\n", features);
    kernel_cpu_features(features, 7);
    CHECK(strlen(features) < 7);
    for (const struct kernel_backend *const *row = KERNEL_BACKENDS; *row; row++)
        if (!(*row)->available())
            CHECK_STATUS(kernel_ctx_create(
                             kernel_options_default((*row)->name, ACTIVATIONS_FAST, 1), &c, &err),
                         ERR_UNSUPPORTED);
}

/* ---- products of plain types ---- */

enum { PRODUCT_ROWS = 70 };
static const enum dtype PRODUCT_TYPES[] = { DTYPE_F32, DTYPE_F16, DTYPE_BF16 };

static struct weight pack_parts(struct kernel_ctx *c, const struct weight_src *parts, size_t n,
                                enum weight_join join)
{
    const struct weight_pack_args a = { .parts = parts, .n_parts = n, .join = join };
    struct weight w;
    CHECK_OK(c->weight_ops->pack(c, &a, &w, NULL));
    return w;
}

/* The largest error of a product in FAST: inputs are rounded to at least the type's bits, and sums
 * are in f32. */
static void check_product(const struct matrix *m, const float *x, const float *y, size_t n_rows)
{
    const size_t n_out = m->src.n_out, n_in = m->src.n_in;
    const double rounding = m->src.dtype == DTYPE_BF16  ? 0x1p-8
                            : m->src.dtype == DTYPE_F16 ? 0x1p-11
                                                        : 0;
    for (size_t i = 0; i < n_rows * n_out; i++) {
        double exact = 0, magnitude = 0, weights = 0;
        for (size_t k = 0; k < n_in; k++) {
            const double w = (double)m->wide[i % n_out * n_in + k],
                         term = w * (double)x[i / n_out * n_in + k];
            exact += term, magnitude += fabs(term), weights += fabs(w);
        }
        const double bound = magnitude * (rounding + (double)(n_in + 8) * 0x1p-24) +
                             (m->src.dtype == DTYPE_F16 ? weights * 0x1p-25 : 0);
        if (!(fabs((double)y[i] - exact) <= bound))
            test_fail(__FILE__, __LINE__,
                      "%s, %zu rows of %zu x %zu: element %zu is %g off, the bound is %g",
                      dtype_name(m->src.dtype), n_rows, n_out, n_in, i, fabs((double)y[i] - exact),
                      bound);
    }
}

/* Embedding returns the stored elements; products of the same rows by matrices of all types in one
 * call give what each gives alone. */
static void product_cases(const char *isa)
{
    enum { N_OUT = 50, N_IN = 150, JOBS = 6 };
    static const enum dtype TYPES[JOBS] = { DTYPE_F16, DTYPE_F16, DTYPE_BF16,
                                            DTYPE_F16, DTYPE_F32, DTYPE_BF16 };
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_FAST, 2);
    struct matrix m[JOBS];
    struct weight w[JOBS];
    struct matmul_args jobs[JOBS];
    float *x = random_floats(PRODUCT_ROWS * N_IN, 2),
          *alone = MEM_ARRAY(float, PRODUCT_ROWS *N_OUT);
    CHECK_OK(kernel_ctx_reserve(c, JOBS * PRODUCT_ROWS, N_IN));
    for (size_t j = 0; j < JOBS; j++) {
        float wide[N_IN];
        m[j] = make_matrix(TYPES[j], N_OUT, N_IN);
        w[j] = pack_parts(c, &m[j].src, 1, JOIN_STACKED);
        for (int32_t i = 0; i < N_OUT; i++) {
            on_embed(c, wide, &w[j], &i, 1);
            check_bits(wide, m[j].wide + (size_t)i * N_IN, N_IN, dtype_name(m[j].src.dtype), j,
                       (size_t)i);
        }
    }
    for (size_t n = 1; n <= PRODUCT_ROWS; n += 23) {
        for (size_t j = 0; j < JOBS; j++)
            jobs[j] = (struct matmul_args){
                .w = &w[j],
                .x = x,
                .x_stride = N_IN,
                .n_rows = n,
                .y = MEM_ARRAY(float, n *N_OUT),
                .y_stride = N_OUT,
            };
        on_matmul(c, jobs, JOBS);
        for (size_t j = 0; j < JOBS; j++) {
            struct matmul_args one = jobs[j];
            check_product(&m[j], x, jobs[j].y, n);
            one.y = alone;
            on_matmul(c, &one, 1);
            check_bits(jobs[j].y, alone, n * N_OUT, dtype_name(m[j].src.dtype), j, n);
            mem_free(jobs[j].y);
        }
    }
    for (size_t j = 0; j < JOBS; j++) {
        weight_release(c, &w[j]);
        free_matrix(&m[j]);
    }
    mem_free(x), mem_free(alone);
    kernel_ctx_free(c);
}

/* SwiGLU's prequantised rows have the values that rows in f32 would give, for every pair of
 * types. */
static void check_prequantized(struct kernel_ctx *c, enum dtype first, enum dtype then, size_t n)
{
    enum { HIDDEN = 70, INNER = 90, OUT = 30 };
    struct matrix gate = make_matrix(first, INNER, HIDDEN), up = make_matrix(first, INNER, HIDDEN),
                  down = make_matrix(then, OUT, INNER);
    const struct weight_src parts[] = { gate.src, up.src };
    struct weight pair = pack_parts(c, parts, 2, JOIN_PAIRED),
                  last = pack_parts(c, &down.src, 1, JOIN_STACKED);
    float *x = random_floats(n * HIDDEN, 30),
          *act = MEM_ARRAY(float, prequantized_floats(n, INNER)),
          *wide = MEM_ARRAY(float, n *INNER);
    float *y = MEM_ARRAY(float, n *OUT), *want = MEM_ARRAY(float, n *OUT);
    struct matmul_args a = {
        .w = &pair,
        .x = x,
        .x_stride = HIDDEN,
        .n_rows = n,
        .y = act,
        .quantize_for = &last,
        .epilogue = MATMUL_SILU_MUL,
    };
    struct matmul_args b = {
        .w = &last, .x = act, .x_prequantized = true, .n_rows = n, .y = y, .y_stride = OUT
    };
    on_matmul(c, &a, 1);
    on_matmul(c, &b, 1);
    a.y = wide, a.y_stride = INNER, a.quantize_for = NULL;
    b.x = wide, b.x_stride = INNER, b.x_prequantized = false, b.y = want;
    on_matmul(c, &a, 1);
    on_matmul(c, &b, 1);
    check_bits(y, want, n * OUT, dtype_name(first), n, (size_t)then);
    check_product(&down, wide, y, n);
    weight_release(c, &pair), weight_release(c, &last);
    free_matrix(&gate), free_matrix(&up), free_matrix(&down);
    mem_free(x), mem_free(act), mem_free(wide), mem_free(y), mem_free(want);
}

static void prequantized_cases(const char *isa)
{
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_FAST, 2);
    CHECK_OK(kernel_ctx_reserve(c, PRODUCT_ROWS, 100));
    for (size_t i = 0; i < COUNT_OF(PRODUCT_TYPES); i++)
        for (size_t j = 0; j < COUNT_OF(PRODUCT_TYPES); j++)
            for (size_t n = 1; n <= PRODUCT_ROWS; n += 23)
                check_prequantized(c, PRODUCT_TYPES[i], PRODUCT_TYPES[j], n);
    kernel_ctx_free(c);
}

/* The prompt whose attention and products below are computed; the results of attention lie at two
 * addresses, of which the second is a copy. */
struct prompt {
    enum { PROMPT_ROWS = 45, PROMPT_HEADS = 4, PROMPT_KV = 2, PROMPT_DIM = 64, PROMPT_OUT = 70 } of;
    float *q, *k, *v, *out, *copy, *y[3];
    char *pool;
    size_t pool_bytes;
};

static void note_prompt(struct mirrors *m, const struct prompt *p)
{
    const size_t width = PROMPT_HEADS * PROMPT_DIM, kv = PROMPT_ROWS * PROMPT_KV * PROMPT_DIM;
    note(m, p->pool, p->pool_bytes, true);
    note(m, p->q, floats(PROMPT_ROWS * width), false);
    note(m, p->k, floats(kv), false);
    note(m, p->v, floats(kv), false);
    note(m, p->out, floats(PROMPT_ROWS * width), true);
    note(m, p->copy, floats(PROMPT_ROWS * width), true);
    for (int i = 0; i < 3; i++) note(m, p->y[i], floats(PROMPT_ROWS * PROMPT_OUT), true);
}

static void run_prompt(struct kernel_ctx *c, const struct prompt *p, const struct weight *w)
{
    const size_t width = PROMPT_HEADS * PROMPT_DIM;
    struct mirrors m = { .c = c };
    const struct attn_seq seq = { .n_q = PROMPT_ROWS, .block_table = (int32_t[]){ 0 } };
    struct attn_list list = { .seqs = &seq, .n_seqs = 1 };
    struct kernel_step step = { .lists = &list, .n_lists = 1, .block_tokens = 64 };
    note_prompt(&m, p);
    send(&m);
    c->step_ops->upload(c, &step);
    const struct kv_layer layer = { .dtype = DTYPE_BF16,
                                    .n_heads = PROMPT_KV,
                                    .head_dim = PROMPT_DIM,
                                    .block_tokens = 64,
                                    .data = there(&m, p->pool) };
    const struct kv_append_args append = {
        .k = there(&m, p->k), .v = there(&m, p->v), .kv = layer, .on = list
    };
    const struct attn_args attend = { .q = there(&m, p->q),
                                      .out = there(&m, p->out),
                                      .kv = layer,
                                      .on = list,
                                      .n_heads = PROMPT_HEADS,
                                      .v_dim = PROMPT_DIM,
                                      .scale = 0.125f };
    struct matmul_args product = {
        .w = w, .x = attend.out, .x_stride = width, .n_rows = PROMPT_ROWS, .y_stride = PROMPT_OUT
    };
    c->ops->kv_append(c, &append);
    c->ops->attention(c, &attend);
    c->ops->copy_rows(c, there(&m, p->copy), width, attend.out, width, NULL, PROMPT_ROWS, width);
    c->ops->attention(c, &attend);
    for (int i = 0; i < 3; i++) {
        product.y = there(&m, p->y[i]);
        if (i == 1) product.x = there(&m, p->copy);
        c->ops->matmul(c, &product, 1);
        if (i == 0) c->ops->attention(c, &attend); /* whose results nobody takes */
    }
    fetch(&m);
}

/* A product has the same bits right after attention, which may have prepared its inputs, and of a
 * copy of what attention computed; also where other rows follow attention's. */
static void product_after_attention(const char *isa)
{
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_FAST, 2);
    const size_t width = PROMPT_HEADS * PROMPT_DIM, kv = PROMPT_ROWS * PROMPT_KV * PROMPT_DIM,
                 n = PROMPT_ROWS * PROMPT_OUT;
    struct matrix matrix = make_matrix(DTYPE_BF16, PROMPT_OUT, width);
    const struct weight_pack_args pack = { .parts = &matrix.src, .n_parts = 1 };
    struct weight w;
    struct prompt p = { .q = random_floats(PROMPT_ROWS * width, 2),
                        .k = random_floats(kv, 2),
                        .v = random_floats(kv, 2),
                        .out = random_floats(PROMPT_ROWS * width, 1),
                        .copy = random_floats(PROMPT_ROWS * width, 1),
                        .pool_bytes = (size_t)2 * 64 * PROMPT_KV * PROMPT_DIM * 2 };
    p.pool = mem_calloc(1, p.pool_bytes);
    for (int i = 0; i < 3; i++) p.y[i] = random_floats(n, 1);
    CHECK_OK(c->weight_ops->pack(c, &pack, &w, NULL));
    CHECK_OK(kernel_ctx_reserve(c, PROMPT_ROWS, width));
    run_prompt(c, &p, &w);
    check_bits(p.copy, p.out, PROMPT_ROWS * width, "attention", 0, 0);
    check_bits(p.y[0], p.y[1], n, "a product after attention", 0, 0);
    check_bits(p.y[2], p.y[1], n, "a product of a copy, again", 0, 0);
    weight_release(c, &w);
    free_matrix(&matrix);
    mem_free(p.q), mem_free(p.k), mem_free(p.v), mem_free(p.out), mem_free(p.copy);
    for (int i = 0; i < 3; i++) mem_free(p.y[i]);
    mem_free(p.pool);
    kernel_ctx_free(c);
}

#define BACKEND_TESTS(name, isa)                                                                   \
    TEST(name##_products) { product_cases(isa); }                                                  \
    TEST(name##_prequantized_rows) { prequantized_cases(isa); }                                    \
    TEST(name##_rms_norm) { norm_cases(isa); }                                                     \
    TEST(name##_add) { add_cases(isa); }                                                           \
    TEST(name##_copy_rows) { copy_cases(isa); }                                                    \
    TEST(name##_rope) { rope_cases(isa); }                                                         \
    TEST(name##_product_after_attention) { product_after_attention(isa); }                         \
    TEST(name##_combine) { combine_cases(isa); }
#define BACKEND_CASES(name)                                                                        \
    CASE(name##_products), CASE(name##_prequantized_rows), CASE(name##_rms_norm),                  \
        CASE(name##_add), CASE(name##_copy_rows), CASE(name##_rope), CASE(name##_combine),         \
        CASE(name##_product_after_attention)

/* The tests that exist only for CPU backends. */
#define CPU_BACKEND_TESTS(name, isa)                                                               \
    TEST(name##_vocabulary) { vocabulary_cases(isa); }                                             \
    TEST(name##_log_sum_exp) { lse_cases(isa); }
#define CPU_BACKEND_CASES(name) CASE(name##_vocabulary), CASE(name##_log_sum_exp)

EVERY_BACKEND(BACKEND_TESTS)
EVERY_CPU_BACKEND(CPU_BACKEND_TESTS)

TEST_MAIN(EVERY_BACKEND_CASES(BACKEND_CASES), EVERY_CPU_BACKEND_CASES(CPU_BACKEND_CASES),
          CASE(every_backend_has_its_tests), CASE(microkernel_tables_are_complete),
          CASE(context_names_what_this_machine_has))
