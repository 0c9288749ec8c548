/* test_matmul.c - matmul of every CPU backend, for every weight type, under F32 and FAST.
 *
 * F32: the accumulation order of kernels.h, written out here, bit for bit. FAST: for integer types
 * the bits of ref, and ref itself within the rounding of int8 inputs of the exact product; for bf16
 * and f8 within the rounding of bf16 inputs. Epilogues (bias, addition, SwiGLU), gathered rows and
 * many products at once give the same as single plain products. Buffers have exactly the size that
 * a call may touch. */
#include "tests/conformance/kernel_fixture.h"
#include "tests/harness/two_nodes.h"

/* Runs one product in several equivalent ways. y is [n_rows, n_out] with 3 floats between rows,
 * which must stay as they are. */
static void run(struct kernel_ctx *c, struct matmul_args a, float *y, const char *what)
{
    size_t stride = a.w->n_out + 3;
    float *wide = MEM_ARRAY(float, a.n_rows *stride - 3);
    for (size_t i = 0; i < a.n_rows * stride - 3; i++) wide[i] = 777;
    a.y = wide;
    a.y_stride = stride;
    c->ops->matmul(c, &a, 1);
    for (size_t i = 0; i < a.n_rows; i++) {
        memcpy(y + i * a.w->n_out, wide + i * stride, a.w->n_out * sizeof *y);
        for (size_t j = a.w->n_out; i + 1 < a.n_rows && j < stride; j++)
            if (wide[i * stride + j] != 777)
                test_fail(__FILE__, __LINE__, "%s writes outside its rows", what);
    }
    mem_free(wide);
}

/* ---- f32: the definition ---- */

/* The product by its definition: [n_rows, n_out]. */
static float *multiply_in_order(const struct matrix *m, const float *x, size_t n_rows)
{
    size_t n_out = m->src.n_out, n_in = m->src.n_in;
    float *y = MEM_ARRAY(float, n_rows *n_out);
    for (size_t i = 0; i < n_rows; i++)
        for (size_t j = 0; j < n_out; j++) {
            float sum = 0;
            const float *w = m->wide + j * n_in, *from = x + i * n_in;
            for (size_t k = 0; k < n_in; k++) sum = fmaf(w[k], from[k], sum);
            y[i * n_out + j] = sum;
        }
    return y;
}

/* The backend on three threads of a host with two NUMA nodes. */
static struct kernel_ctx *open_on_two_nodes(const char *isa, enum activations activations)
{
    struct kernel_ctx *c = open_backend(isa, activations, 3);
    struct numa_nodes nodes = two_nodes();
    struct err err;
    compute_pool_free(c->pool);
    CHECK_OK(compute_pool_create_on(&nodes, 3, &c->pool, &err));
    return c;
}

/* A backend on one thread and on three. The expected product does not depend on the threads, so it
 * is computed once. */
struct contexts {
    struct kernel_ctx *c[2];
};

static struct contexts open_contexts(const char *isa, enum activations activations)
{
    return (struct contexts){ { open_backend(isa, activations, 1),
                                open_on_two_nodes(isa, activations) } };
}

static void free_contexts(struct contexts *on)
{
    for (size_t i = 0; i < COUNT_OF(on->c); i++) kernel_ctx_free(on->c[i]);
}

struct product { /* rows of x, and the expected results without and with a bias */
    const struct matrix *m;
    const float *x, *bias, *plain, *biased;
};

static void check_product(struct kernel_ctx *c, const struct product *p, size_t n_rows_max,
                          size_t n_rows_step)
{
    size_t n_out = p->m->src.n_out, n_in = p->m->src.n_in;
    const char *name = dtype_name(p->m->src.dtype);
    struct weight w = pack_one(c, p->m);
    float *y = MEM_ARRAY(float, n_rows_max *n_out);
    CHECK_OK(kernel_ctx_reserve(c, n_rows_max, n_in));
    for (size_t n = 1; n <= n_rows_max; n += n_rows_step) {
        run(c, (struct matmul_args){ .w = &w, .x = p->x, .x_stride = n_in, .n_rows = n }, y, name);
        check_bits(y, p->plain, n * n_out, name, n, n_in);
        run(c,
            (struct matmul_args){
                .w = &w, .bias = p->bias, .x = p->x, .x_stride = n_in, .n_rows = n },
            y, name);
        check_bits(y, p->biased, n * n_out, name, n, n_in);
    }
    weight_release(c, &w);
    weight_release(c, &w); /* a second release does nothing */
    mem_free(y);
}

static void check_f32(const struct contexts *on, enum dtype t, size_t n_out, size_t n_in,
                      size_t n_rows_max, size_t n_rows_step)
{
    struct matrix m = make_matrix(t, n_out, n_in);
    float *x = random_floats(n_rows_max * n_in, 2), *bias = random_floats(n_out, 1),
          *plain = multiply_in_order(&m, x, n_rows_max);
    float *biased = mem_dup(plain, n_rows_max * n_out * sizeof *plain);
    for (size_t i = 0; i < n_rows_max * n_out; i++) biased[i] += bias[i % n_out];
    for (size_t i = 0; i < COUNT_OF(on->c); i++)
        check_product(
            on->c[i],
            &(struct product){ .m = &m, .x = x, .bias = bias, .plain = plain, .biased = biased },
            n_rows_max, n_rows_step);
    mem_free(x), mem_free(bias), mem_free(plain), mem_free(biased);
    free_matrix(&m);
}

static const size_t SIZES[][2] = {
    { 1, 256 }, { 16, 256 }, { 17, 512 }, { 70, 768 }, { 130, 256 }
};
static const size_t SMALL[][2] = { { 17, 64 }, { 70, 96 }, { 100, 544 } };
static const size_t ODD[][2] = { { 1, 1 },    { 5, 7 },    { 33, 33 },
                                 { 48, 257 }, { 20, 301 }, { 129, 48 } };

/* From one number of rows to the next, for products of `step`: ref, which computes every row alone,
 * is slow. */
static size_t step_of(const char *isa, size_t step)
{
    return strcmp(isa, "ref") == 0 && !test_runs_all() ? step + 6 : step;
}

static void f32_cases(const char *isa)
{
    struct contexts on = open_contexts(isa, ACTIVATIONS_F32);
    for (enum dtype t = 0; t < DTYPE_COUNT; t++) {
        for (size_t i = 0; i < COUNT_OF(SIZES); i++)
            check_f32(&on, t, SIZES[i][0], SIZES[i][1], i == 2 ? 30 : 200,
                      step_of(isa, i == 2 ? 1 : 66));
        for (size_t i = 0; i < COUNT_OF(SMALL) && dtype_block(t) <= 32; i++)
            check_f32(&on, t, SMALL[i][0], SMALL[i][1], 24, step_of(isa, 5));
        for (size_t i = 0; i < COUNT_OF(ODD) && dtype_block(t) == 1; i++)
            check_f32(&on, t, ODD[i][0], ODD[i][1], 24, step_of(isa, 1));
    }
    free_contexts(&on);
}

/* ---- fast ---- */

/* The largest error from rounding the inputs, half a step in each block of 32 for int8 and 2^-8 of
 * each product for bf16, and from sums in f32. */
static double rounding_bound(const struct matrix *m, const float *x, size_t out, bool int8)
{
    double bound = 0, magnitude = 0;
    for (size_t k0 = 0; k0 < m->src.n_in; k0 += 32) {
        double most = 0, weights = 0;
        for (size_t k = k0; k < k0 + 32 && k < m->src.n_in; k++) {
            double w = fabs((double)m->wide[out * m->src.n_in + k]);
            most = fmax(most, fabs((double)x[k]));
            weights += w;
            magnitude += w * fabs((double)x[k]);
        }
        bound += weights * most * 0.5 / 16256;
    }
    return (int8 ? bound : magnitude / 256) + magnitude * 1e-5 * (double)m->src.n_in / 32 + 1e-9;
}

/* Checks rows of x against the exact product. */
static void check_near(const struct matrix *m, const float *x, const float *y, size_t n_rows,
                       bool int8)
{
    size_t n_out = m->src.n_out, n_in = m->src.n_in;
    for (size_t i = 0; i < n_rows; i++)
        for (size_t j = 0; j < n_out; j++) {
            double exact = 0;
            for (size_t k = 0; k < n_in; k++)
                exact += (double)m->wide[j * n_in + k] * (double)x[i * n_in + k];
            double off = fabs((double)y[i * n_out + j] - exact),
                   bound = rounding_bound(m, x + i * n_in, j, int8);
            if (!(off <= bound))
                test_fail(__FILE__, __LINE__,
                          "%s: row %zu, output %zu of %zu x %zu is %g off, the bound is %g",
                          dtype_name(m->src.dtype), i, j, n_out, n_in, off, bound);
        }
}

static bool is_integer(enum dtype t) { return t >= DTYPE_Q8_0; }

/* want: the result of ref. */
static void check_fast_on(struct kernel_ctx *c, const struct matrix *m, const float *x, float *want,
                          size_t n_rows_max, size_t step)
{
    size_t n_out = m->src.n_out, n_in = m->src.n_in;
    const char *name = dtype_name(m->src.dtype);
    struct weight w = pack_one(c, m);
    float *y = MEM_ARRAY(float, n_rows_max *n_out);
    CHECK_OK(kernel_ctx_reserve(c, n_rows_max, n_in));
    if (!is_integer(m->src.dtype)) { /* backends may multiply in bf16: then each is compared with
                                      * its own bits, for any number of rows */
        run(c, (struct matmul_args){ .w = &w, .x = x, .x_stride = n_in, .n_rows = n_rows_max },
            want, name);
        check_near(m, x, want, n_rows_max < 5 ? n_rows_max : 5, false);
    }
    for (size_t n = 1; n <= n_rows_max; n += step) {
        run(c, (struct matmul_args){ .w = &w, .x = x, .x_stride = n_in, .n_rows = n }, y, name);
        check_bits(y, want, n * n_out, name, n, n_in);
    }
    weight_release(c, &w);
    mem_free(y);
}

static void check_fast(const struct contexts *on, struct kernel_ctx *ref, enum dtype t,
                       size_t n_out, size_t n_in, size_t n_rows_max, size_t step)
{
    struct matrix m = make_matrix(t, n_out, n_in);
    struct weight w = pack_one(ref, &m);
    float *x = random_floats(n_rows_max * n_in, 2), *want = MEM_ARRAY(float, n_rows_max *n_out);
    memset(x + n_in / 2, 0, (n_in + 1) / 2 * sizeof *x); /* blocks of zeros */
    CHECK_OK(kernel_ctx_reserve(ref, n_rows_max, n_in));
    run(ref, (struct matmul_args){ .w = &w, .x = x, .x_stride = n_in, .n_rows = n_rows_max }, want,
        dtype_name(t));
    check_near(&m, x, want, n_rows_max < 5 ? n_rows_max : 5, is_integer(t));
    for (size_t i = 0; i < COUNT_OF(on->c); i++)
        check_fast_on(on->c[i], &m, x, want, n_rows_max, step);
    weight_release(ref, &w);
    mem_free(x), mem_free(want);
    free_matrix(&m);
}

static void fast_cases(const char *isa)
{
    struct contexts on = open_contexts(isa, ACTIVATIONS_FAST);
    struct kernel_ctx *ref = open_backend("ref", ACTIVATIONS_FAST, 1);
    for (enum dtype t = 0; t < DTYPE_COUNT; t++) {
        for (size_t i = 0; i < COUNT_OF(SIZES); i++)
            check_fast(&on, ref, t, SIZES[i][0], SIZES[i][1], i == 2 ? 30 : 200,
                       step_of(isa, i == 2 ? 1 : 66));
        for (size_t i = 0; i < COUNT_OF(SMALL) && dtype_block(t) <= 32; i++)
            check_fast(&on, ref, t, SMALL[i][0], SMALL[i][1], 24, step_of(isa, 5));
        for (size_t i = 0; i < COUNT_OF(ODD) && dtype_block(t) == 1; i++)
            check_fast(&on, ref, t, ODD[i][0], ODD[i][1], 24, step_of(isa, 1));
    }
    free_contexts(&on);
    kernel_ctx_free(ref);
}

/* A row with values that have no scale must not give numbers, and must not affect the other rows of
 * the batch. */
static void odd_inputs(const char *isa)
{
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_FAST, 2);
    static const float odd[] = { INFINITY, -INFINITY, NAN };
    for (int t = DTYPE_Q8_0; t <= DTYPE_IQ4_NL; t++) {
        struct matrix m = make_matrix((enum dtype)t, 33, 96);
        struct weight w = pack_one(c, &m);
        float *x = random_floats(12 * 96, 2), *plain = MEM_ARRAY(float, 12 * 33),
              *y = MEM_ARRAY(float, 12 * 33);
        CHECK_OK(kernel_ctx_reserve(c, 12, 96));
        run(c, (struct matmul_args){ .w = &w, .x = x, .x_stride = 96, .n_rows = 12 }, plain,
            "plain");
        for (size_t i = 0; i < COUNT_OF(odd); i++) {
            float kept = x[5 * 96 + 70];
            x[5 * 96 + 70] = odd[i];
            run(c, (struct matmul_args){ .w = &w, .x = x, .x_stride = 96, .n_rows = 12 }, y, "odd");
            for (size_t j = 0; j < 33; j++) CHECK(isnan(y[5 * 33 + j]));
            check_bits(y, plain, 5 * 33, "rows before", i, 0);
            check_bits(y + 6 * 33, plain + 6 * 33, 6 * 33, "rows after", i, 0);
            x[5 * 96 + 70] = kept;
        }
        for (size_t k = 0; k < 96; k++) x[k] = 1e-38f * (float)(k % 3);
        run(c, (struct matmul_args){ .w = &w, .x = x, .x_stride = 96, .n_rows = 1 }, y, "tiny");
        for (size_t j = 0; j < 33; j++) CHECK(isfinite(y[j]));
        weight_release(c, &w);
        mem_free(x), mem_free(plain), mem_free(y);
        free_matrix(&m);
    }
    kernel_ctx_free(c);
}

/* ---- what goes with a product ---- */

static void after_cases(const char *isa, enum activations activations, enum dtype t)
{
    enum { ROWS = 40, N = 41, K = 96 };
    struct kernel_ctx *c = open_backend(isa, activations, 2);
    struct matrix gate = make_matrix(t, N, K), up = make_matrix(t, N, K);
    struct weight wg = pack_one(c, &gate), wu = pack_one(c, &up), paired, stacked;
    const struct weight_src parts[] = { gate.src, up.src };
    const struct weight_pack_args pair = { .parts = parts, .n_parts = 2, .join = JOIN_PAIRED };
    CHECK_OK(c->weight_ops->pack(c, &pair, &paired, NULL));
    /* 41 is not a multiple of 16 */
    const struct weight_pack_args crooked = { .parts = parts, .n_parts = 2 };
    CHECK_STATUS(c->weight_ops->pack(c, &crooked, &stacked, NULL), ERR_INVALID);
    CHECK_OK(kernel_ctx_reserve(c, 4 * ROWS, K));
    float *x = random_floats(ROWS * K, 3), *bias = random_floats(2 * N, 1),
          *g = MEM_ARRAY(float, ROWS *N), *u = MEM_ARRAY(float, ROWS *N);
    for (size_t n = 1; n <= ROWS; n += 13) {
        run(c, (struct matmul_args){ .w = &wg, .bias = bias, .x = x, .x_stride = K, .n_rows = n },
            g, "gate");
        run(c,
            (struct matmul_args){ .w = &wu, .bias = bias + N, .x = x, .x_stride = K, .n_rows = n },
            u, "up");
        float *y = MEM_ARRAY(float, n *N), *sum = random_floats(n * N, 1),
              *was = mem_dup(sum, n * N * sizeof *sum);
        c->ops->matmul(c,
                       &(struct matmul_args){
                           .w = &paired,
                           .bias = bias,
                           .x = x,
                           .x_stride = K,
                           .n_rows = n,
                           .y = y,
                           .y_stride = N,
                           .epilogue = MATMUL_SILU_MUL,
                       },
                       1);
        for (size_t i = 0; i < n * N; i++) {
            double exact = (double)g[i] / (1 + exp(-(double)g[i])) * (double)u[i];
            CHECK_NEAR(y[i], exact, 1e-6 * fabs(exact) + 1e-30);
        }
        c->ops->matmul(c,
                       &(struct matmul_args){
                           .w = &wg,
                           .bias = bias,
                           .x = x,
                           .x_stride = K,
                           .n_rows = n,
                           .y = sum,
                           .y_stride = N,
                           .epilogue = MATMUL_ADD,
                       },
                       1);
        for (size_t i = 0; i < n * N; i++) was[i] += g[i];
        check_bits(sum, was, n * N, "added", n, 0);
        mem_free(y), mem_free(sum), mem_free(was);
    }
    weight_release(c, &wg), weight_release(c, &wu), weight_release(c, &paired);
    mem_free(x), mem_free(bias), mem_free(g), mem_free(u);
    free_matrix(&gate), free_matrix(&up);
    kernel_ctx_free(c);
}

/* Many products of different types, shapes, rows and epilogues in one call, some without rows, some
 * with gathered rows. */
static void many_jobs(const char *isa, enum activations activations)
{
    enum { JOBS = 1100, TYPES = 3, N = 37, K = 64, X_ROWS = 50 };
    static const enum dtype types[TYPES] = { DTYPE_Q4_1, DTYPE_BF16, DTYPE_F32 };
    struct kernel_ctx *c = open_on_two_nodes(isa, activations);
    struct matrix m[TYPES];
    struct weight w[TYPES];
    for (int i = 0; i < TYPES; i++) {
        m[i] = make_matrix(types[i], N, K);
        w[i] = pack_one(c, &m[i]);
    }
    struct matmul_args *jobs = MEM_ARRAY(struct matmul_args, JOBS);
    float *x = random_floats(X_ROWS * K, 2), *one = MEM_ARRAY(float, N);
    int32_t *rows = MEM_ARRAY(int32_t, JOBS * 30);
    size_t n_rows = 0;
    for (size_t i = 0; i < JOBS; i++) {
        size_t n = random_u32() % 8 ? random_u32() % 4 : random_u32() % 30;
        jobs[i] = (struct matmul_args){
            .w = &w[random_u32() % TYPES],
            .x = x,
            .x_stride = K,
            .n_rows = n,
            .y = MEM_ARRAY(float, n *N + 1),
            .y_stride = N,
        };
        if (random_u32() % 2) {
            jobs[i].x_rows = rows + 30 * i;
            for (size_t r = 0; r < n; r++) rows[30 * i + r] = (int32_t)(random_u32() % X_ROWS);
        }
        n_rows += n;
    }
    CHECK_OK(kernel_ctx_reserve(c, n_rows, K));
    c->ops->matmul(c, jobs, JOBS);
    for (size_t i = 0; i < JOBS; i++) {
        for (size_t r = 0; r < jobs[i].n_rows; r++) {
            size_t source = jobs[i].x_rows ? (size_t)jobs[i].x_rows[r] : r;
            c->ops->matmul(c,
                           &(struct matmul_args){
                               .w = jobs[i].w,
                               .x = x + source * K,
                               .x_stride = K,
                               .n_rows = 1,
                               .y = one,
                               .y_stride = N,
                           },
                           1);
            check_bits(jobs[i].y + r * N, one, N, "job", i, r);
        }
        mem_free(jobs[i].y);
    }
    c->ops->matmul(c, jobs, 0);
    for (int i = 0; i < TYPES; i++) {
        weight_release(c, &w[i]);
        free_matrix(&m[i]);
    }
    mem_free(jobs), mem_free(x), mem_free(one), mem_free(rows);
    kernel_ctx_free(c);
}

static void together(const char *isa)
{
    for (int a = 0; a < 2; a++) {
        after_cases(isa, (enum activations)a, DTYPE_F32);
        after_cases(isa, (enum activations)a, DTYPE_BF16);
        after_cases(isa, (enum activations)a, DTYPE_Q8_0);
        after_cases(isa, (enum activations)a, DTYPE_Q4_1);
        many_jobs(isa, (enum activations)a);
    }
}

#define BACKEND_TESTS(name, isa)                                                                   \
    TEST(name##_f32) { f32_cases(isa); }                                                           \
    TEST(name##_fast) { fast_cases(isa); }                                                         \
    TEST(name##_inputs_without_a_scale) { odd_inputs(isa); }                                       \
    TEST(name##_jobs_and_epilogues) { together(isa); }
#define BACKEND_CASES(name)                                                                        \
    CASE_T(name##_f32, 300), CASE_T(name##_fast, 300), CASE(name##_inputs_without_a_scale),        \
        CASE_T(name##_jobs_and_epilogues, 120)

EVERY_CPU_BACKEND(BACKEND_TESTS)

TEST_MAIN(EVERY_CPU_BACKEND_CASES(BACKEND_CASES))
