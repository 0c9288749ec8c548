/* test_experts.c - the ops experts and expert_slots of every backend, against the same result
 * computed by one product per row and choice.
 *
 * CPU backends give the same bits: which rows share a product changes nothing. A GPU's result is
 * within the rounding of bf16 rows, and a row alone gives the bits that it gives among others. The
 * cases include experts that no row chose, one that all rows chose, and no rows at all. */
#include "kernels/ep/ep_backend.h"
#include "kernels/ep/ep_host_rows.h"
#include "tests/conformance/kernel_ops_on_device.h"

enum { HIDDEN_MAX = 128, EXPERTS = 6, USED = 3, ROWS_MAX = 40, MANY_ROWS = 160, NARROW_MANY = 420 };

struct layer {
    struct matrix gate[EXPERTS], up[EXPERTS], down[EXPERTS], shared_gate, shared_up, shared_down;
    struct weight gate_up[EXPERTS], last[EXPERTS], shared_gate_up, shared_last;
    size_t hidden, inner;
    float *bias; /* of the shared expert's gate and up */
};

static struct weight pair(struct kernel_ctx *c, const struct matrix *gate, const struct matrix *up)
{
    const struct weight_src parts[] = { gate->src, up->src };
    const struct weight_pack_args a = { .parts = parts, .n_parts = 2, .join = JOIN_PAIRED };
    struct weight w;
    CHECK_OK(c->weight_ops->pack(c, &a, &w, NULL));
    return w;
}

static struct weight single(struct kernel_ctx *c, const struct matrix *m)
{
    const struct weight_pack_args a = { .parts = &m->src, .n_parts = 1 };
    struct weight w;
    CHECK_OK(c->weight_ops->pack(c, &a, &w, NULL));
    return w;
}

/* The matrices have type t, but every second expert's gate and up and every third one's down have
 * type `other`. */
static struct layer *make_layer(struct kernel_ctx *c, enum dtype t, enum dtype other, size_t hidden,
                                size_t inner)
{
    struct layer *l = MEM_NEW(struct layer);
    l->hidden = hidden, l->inner = inner;
    l->bias = random_floats(2 * inner, 1);
    for (size_t e = 0; e < EXPERTS; e++) {
        const enum dtype in = e % 2 ? other : t, out = e % 3 == 2 ? other : t;
        l->gate[e] = make_matrix(in, inner, hidden), l->up[e] = make_matrix(in, inner, hidden),
        l->down[e] = make_matrix(out, hidden, inner);
        l->gate_up[e] = pair(c, &l->gate[e], &l->up[e]);
        l->last[e] = single(c, &l->down[e]);
    }
    l->shared_gate = make_matrix(t, inner, hidden), l->shared_up = make_matrix(t, inner, hidden),
    l->shared_down = make_matrix(t, hidden, inner);
    l->shared_gate_up = pair(c, &l->shared_gate, &l->shared_up);
    l->shared_last = single(c, &l->shared_down);
    CHECK_OK(kernel_ctx_reserve(c, MANY_ROWS * (2 * USED + 1), hidden > inner ? hidden : inner));
    return l;
}

static void free_layer(struct kernel_ctx *c, struct layer *l)
{
    for (size_t e = 0; e < EXPERTS; e++) {
        free_matrix(&l->gate[e]), free_matrix(&l->up[e]), free_matrix(&l->down[e]);
        weight_release(c, &l->gate_up[e]), weight_release(c, &l->last[e]);
    }
    free_matrix(&l->shared_gate), free_matrix(&l->shared_up), free_matrix(&l->shared_down);
    weight_release(c, &l->shared_gate_up), weight_release(c, &l->shared_last);
    mem_free(l->bias);
    mem_free(l);
}

/* One row through one expert: out [down->n_out]. */
static void through(struct kernel_ctx *c, const struct weight *gate_up, const struct weight *down,
                    const float *bias, const float *h, float *out)
{
    float *act = MEM_ARRAY(float, prequantized_floats(1, down->n_in));
    const struct matmul_args first = {
        .w = gate_up,
        .bias = bias,
        .x = h,
        .x_stride = gate_up->n_in,
        .n_rows = 1,
        .y = act,
        .quantize_for = down,
        .epilogue = MATMUL_SILU_MUL,
    };
    const struct matmul_args then = {
        .w = down, .x = act, .x_prequantized = true, .n_rows = 1, .y = out, .y_stride = down->n_out
    };
    on_matmul(c, &first, 1);
    on_matmul(c, &then, 1);
    mem_free(act);
}

static void want_row(struct kernel_ctx *c, const struct layer *l, bool shared, const float *h,
                     const int32_t *experts, const float *weights, float *x)
{
    float out[HIDDEN_MAX];
    if (shared) {
        through(c, &l->shared_gate_up, &l->shared_last, l->bias, h, out);
        for (size_t i = 0; i < l->hidden; i++) x[i] += out[i];
    }
    for (size_t j = 0; j < USED; j++) {
        through(c, &l->gate_up[experts[j]], &l->last[experts[j]], NULL, h, out);
        for (size_t i = 0; i < l->hidden; i++) x[i] = fmaf(weights[j], out[i], x[i]);
    }
}

static struct experts_args args_of(const struct layer *l, bool shared, const float *h,
                                   const int32_t *experts, const float *weights, float *x, size_t n)
{
    struct experts_args a = {
        .gate_up = l->gate_up,
        .down = l->last,
        .n_experts = EXPERTS,
        .n_used = USED,
        .n_rows = n,
        .h = h,
        .experts = experts,
        .weights = weights,
        .x = x,
    };
    if (shared)
        a.shared = (struct shared_expert){
            .gate_up = &l->shared_gate_up,
            .down = &l->shared_last,
            .gate_up_bias = l->bias,
        };
    return a;
}

static void check_rows(struct kernel_ctx *c, const struct layer *l, size_t n, bool shared,
                       double bound)
{
    float *h = random_floats(n * l->hidden + 1, 2), *x = random_floats(n * l->hidden + 1, 1),
          *weights = random_floats(n * USED + 1, 1);
    float *got = mem_dup(x, (n * l->hidden + 1) * sizeof *x),
          *want = mem_dup(x, (n * l->hidden + 1) * sizeof *x);
    int32_t experts[ROWS_MAX * USED + 1];
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < USED; j++) /* expert 0 is chosen by all rows, 5 by none */
            experts[i * USED + j] = j == 0 ? 0 : (int32_t)(1 + (random_u32() % 2) * 2 + (j - 1));
    on_experts(c, args_of(l, shared, h, experts, weights, got, n));
    for (size_t i = 0; i < n; i++) {
        float alone[HIDDEN_MAX];
        want_row(c, l, shared, h + i * l->hidden, experts + i * USED, weights + i * USED,
                 want + i * l->hidden);
        memcpy(alone, x + i * l->hidden, l->hidden * sizeof *alone);
        on_experts(c, args_of(l, shared, h + i * l->hidden, experts + i * USED, weights + i * USED,
                              alone, 1));
        check_bits(alone, got + i * l->hidden, l->hidden, "a row alone", n, i);
    }
    check_against_ref(c, got, want, n * l->hidden, bound, "experts", n, shared);
    mem_free(h), mem_free(x), mem_free(weights), mem_free(got), mem_free(want);
}

enum { SPARE = 3 };

/* Rows of a rank: some experts have none, rows come from anywhere in a wider x of n_x rows, and
 * slots beyond the last expert's are left alone. */
static void check_slots(struct kernel_ctx *c, const struct layer *l, size_t n, size_t n_x,
                        double bound)
{
    const size_t stride = l->hidden + 32;
    float *x = random_floats(n_x * stride, 2), *want = MEM_ARRAY(float, (n + SPARE) * l->hidden),
          *got = MEM_ARRAY(float, (n + SPARE) * l->hidden);
    const size_t sizes[EXPERTS] = { n / 4, 0, n / 5, n / 5, n - n / 4 - 2 * (n / 5), 0 };
    int32_t rows[ROWS_MAX + SPARE] = { 0 }, begin[EXPERTS + 1] = { 0 };
    for (size_t i = 0; i < EXPERTS; i++) begin[i + 1] = begin[i] + (int32_t)sizes[i];
    for (size_t s = 0; s < n; s++) rows[s] = (int32_t)(random_u32() % n_x);
    for (size_t i = 0; i < (n + SPARE) * l->hidden; i++) got[i] = want[i] = 7.5f;
    for (int32_t e = 0; e < EXPERTS; e++)
        for (int32_t s = begin[e]; s < begin[e + 1]; s++)
            through(c, &l->gate_up[e], &l->last[e], NULL, x + (size_t)rows[s] * stride,
                    want + (size_t)s * l->hidden);
    on_expert_slots(c, (struct expert_slots_args){
                           .gate_up = l->gate_up,
                           .down = l->last,
                           .n_experts = EXPERTS,
                           .n_slots = n + SPARE,
                           .x = x,
                           .x_stride = stride,
                           .n_x_rows = n_x,
                           .rows = rows,
                           .begin = begin,
                           .out = got,
                       });
    check_against_ref(c, got, want, (n + SPARE) * l->hidden, bound, "expert_slots", n, 0);
    mem_free(x), mem_free(want), mem_free(got);
}

/* The same, of rows that came as bf16 or e4m3, as a GPU's products read them: slots that begin with
 * every step-th one's. decoded: what they mean. */
struct narrow_x {
    unsigned char *bytes;
    float *decoded;
    size_t row_bytes, scales_at;
};

static struct narrow_x make_narrow(enum dtype type, size_t n, size_t hidden)
{
    const struct ep_config of = { .hidden = (int32_t)hidden, .send = type };
    struct narrow_x x = { .decoded = random_floats(n * hidden, 2) };
    x.row_bytes = ep_row_bytes(&of, &x.scales_at);
    x.bytes = MEM_ARRAY(unsigned char, n *x.row_bytes);
    for (size_t i = 0; i < n; i++) {
        unsigned char *row = x.bytes + i * x.row_bytes;
        ep_host_rows_send(&ep_host_rows_plain, type, x.decoded + i * hidden, hidden, row,
                          x.scales_at);
        ep_host_rows_read(type, row, x.scales_at, x.decoded + i * hidden, hidden);
    }
    return x;
}

/* within: of the largest result. */
static void check_narrow_slots(struct kernel_ctx *c, const struct layer *l, size_t n,
                               enum dtype type, size_t step, double within)
{
    const size_t n_x = n + SPARE, hidden = l->hidden;
    struct narrow_x x = make_narrow(type, n_x, hidden);
    float *got = MEM_ARRAY(float, n *hidden), want[HIDDEN_MAX];
    int32_t *rows = MEM_ARRAY(int32_t, n + 1), begin[EXPERTS + 1] = {
        0,          (int32_t)(n / 4), (int32_t)(n / 4), (int32_t)(n / 2), (int32_t)(3 * n / 4),
        (int32_t)n, (int32_t)n
    };
    double largest = 0, off = 0;
    for (size_t s = 0; s < n; s++) rows[s] = (int32_t)(random_u32() % n_x);
    on_expert_slots(c, (struct expert_slots_args){
                           .gate_up = l->gate_up,
                           .down = l->last,
                           .n_experts = EXPERTS,
                           .n_slots = n,
                           .narrow = { x.bytes, type, x.scales_at },
                           .x_stride = x.row_bytes / dtype_block_bytes(type),
                           .n_x_rows = n_x,
                           .rows = rows,
                           .begin = begin,
                           .out = got,
                       });
    for (int32_t e = 0; e < EXPERTS; e++)
        for (int32_t s = begin[e]; s < begin[e + 1]; s++) {
            if ((size_t)s % step) continue;
            through(c, &l->gate_up[e], &l->last[e], NULL, x.decoded + (size_t)rows[s] * hidden,
                    want);
            for (size_t k = 0; k < hidden; k++) {
                largest = fmax(largest, fabs((double)want[k]));
                off = fmax(off, fabs((double)got[(size_t)s * hidden + k] - (double)want[k]));
            }
        }
    if (!(off <= within * largest))
        test_fail(__FILE__, __LINE__, "%zu slots of %s: %g off, of %g", n, dtype_name(type), off,
                  largest);
    mem_free(x.bytes), mem_free(x.decoded), mem_free(got), mem_free(rows);
}

/* Layouts whose products take bf16, f16 and f32, and e4m3 with scales in rows: of few rows they
 * become bf16, of many they are multiplied as they are where the GPU can, and what lies between the
 * two products is rounded to e4m3. */
static void narrow_cases(const char *isa)
{
    static const struct {
        enum dtype t;
        size_t hidden, n, step;
        enum activations activations;
        double within;
    } cases[] = { { DTYPE_BF16, 72, 17, 1, ACTIVATIONS_FAST, 1e-5 },
                  { DTYPE_F16, 64, 9, 1, ACTIVATIONS_FAST, 1e-5 },
                  { DTYPE_F32, 64, 9, 1, ACTIVATIONS_F32, 1e-5 },
                  { DTYPE_F8_E4M3, HIDDEN_MAX, 17, 1, ACTIVATIONS_FAST, 1e-5 },
                  { DTYPE_F8_E4M3, HIDDEN_MAX, NARROW_MANY, 19, ACTIVATIONS_FAST, 0x1p-4 } };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct kernel_ctx *c = open_backend(isa, cases[i].activations, 2);
        struct layer *l = make_layer(c, cases[i].t, cases[i].t, cases[i].hidden, 128);
        CHECK_OK(kernel_ctx_reserve(c, 2 * NARROW_MANY, HIDDEN_MAX));
        check_narrow_slots(c, l, cases[i].n, DTYPE_BF16, cases[i].step, cases[i].within);
        check_narrow_slots(c, l, cases[i].n, DTYPE_F8_E4M3, cases[i].step, cases[i].within);
        free_layer(c, l);
        kernel_ctx_free(c);
    }
}

static void experts_cases(const char *isa)
{
    static const struct {
        enum dtype t, other;
        size_t hidden, inner;
        enum activations activations;
    } cases[] = { { DTYPE_F32, DTYPE_F32, 64, 40, ACTIVATIONS_F32 },
                  { DTYPE_BF16, DTYPE_BF16, 64, 40, ACTIVATIONS_FAST },
                  { DTYPE_F16, DTYPE_F16, 64, 40, ACTIVATIONS_FAST },
                  { DTYPE_Q8_0, DTYPE_Q8_0, 64, 96, ACTIVATIONS_FAST },
                  { DTYPE_F8_E4M3, DTYPE_F8_E4M3, 64, 72, ACTIVATIONS_FAST },
                  { DTYPE_Q4_1, DTYPE_Q4_1, 64, 64, ACTIVATIONS_F32 },
                  { DTYPE_F16, DTYPE_BF16, 64, 40, ACTIVATIONS_FAST },
                  { DTYPE_BF16, DTYPE_F32, 64, 40, ACTIVATIONS_FAST },
                  /* sizes that the kernels of decode steps take */
                  { DTYPE_BF16, DTYPE_BF16, HIDDEN_MAX, 128, ACTIVATIONS_FAST },
                  { DTYPE_F8_E4M3, DTYPE_F8_E4M3, HIDDEN_MAX, 128, ACTIVATIONS_FAST } };
    static const size_t counts[] = { 0, 1, 2, 17, ROWS_MAX };
    /* The emulated GPU is slow under a sanitizer, and 17 rows are two tiles there as 23 are. */
    const size_t n_counts[] = { COUNT_OF(counts), COUNT_OF(counts) - TEST_IS_SANITIZED };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        /* f16 and bf16 are one template on a GPU */
        if (!test_runs_long() && cases[i].t == DTYPE_F16) continue;
        struct kernel_ctx *c = open_backend(isa, cases[i].activations, 2);
        const size_t most = cases[i].hidden == HIDDEN_MAX ? 2 : ROWS_MAX;
        struct layer *l = make_layer(c, cases[i].t, cases[i].other, cases[i].hidden,
                                     cases[i].inner);
        for (size_t k = 0; k < n_counts[i > 0]; k++)
            for (int shared = 0; shared < 2; shared++) {
                /* others have each number of rows with or without a shared expert */
                if (!test_runs_long() && i > 0 && most > 2 && (i + k) % 2 == (size_t)shared)
                    continue;
                if (counts[k] <= most && (cases[i].other == cases[i].t ||
                                          counts[k] == 17)) /* the emulated GPU is slow */
                    check_rows(c, l, TEST_IS_SANITIZED && counts[k] == ROWS_MAX ? 23 : counts[k],
                               shared != 0, 1e-6);
            }
        for (size_t k = 0; k < n_counts[i > 0] && counts[k] <= most; k++) {
            const size_t n = TEST_IS_SANITIZED && counts[k] == ROWS_MAX ? 23 : counts[k];
            if (test_runs_long() || i == 0 || n == 2) check_slots(c, l, n, n + 1, 1e-6);
            if (n == (most > 17 ? 17 : most))
                check_slots(c, l, n, 4 * (n + SPARE), 1e-6); /* few of many */
        }
        free_layer(c, l);
        kernel_ctx_free(c);
    }
}

/* Many rows of each expert: on GPUs of compute capability 9.0 other kernels compute them than a few,
 * and results of experts are rounded to bf16 before they are added up. Held to that rounding of the
 * largest result. */
static void check_many_rows(struct kernel_ctx *c, const struct layer *l, size_t used)
{
    enum { N = MANY_ROWS * HIDDEN_MAX };
    float *h = random_floats(N, 2), *got = random_floats(N, 1), *want = mem_dup(got, N * 4),
          *weights = random_floats(MANY_ROWS * used, 1);
    int32_t experts[MANY_ROWS * EXPERTS];
    for (size_t i = 0; i < MANY_ROWS * used; i++)
        experts[i] = (int32_t)(used == EXPERTS ? i % EXPERTS : i % USED * 2 + random_u32() % 2);
    struct experts_args a = args_of(l, false, h, experts, weights, got, MANY_ROWS);
    a.n_used = (int32_t)used;
    on_experts(c, a);
    double largest = 0;
    /* a row alone takes the emulated GPU many launches */
    const size_t step = test_runs_long() ? 1 : 9;
    for (size_t i = 0; i < MANY_ROWS; i += step) {
        for (size_t j = i * used; j < (i + 1) * used; j += USED)
            want_row(c, l, false, h + i * HIDDEN_MAX, experts + j, weights + j,
                     want + i * HIDDEN_MAX);
        for (size_t k = 0; k < HIDDEN_MAX; k++)
            largest = fmax(largest, fabs((double)want[i * HIDDEN_MAX + k]));
    }
    for (size_t i = 0; i < N; i++)
        if (i / HIDDEN_MAX % step == 0) CHECK_NEAR(got[i], want[i], 0x1p-8 * largest);
    mem_free(h), mem_free(got), mem_free(want), mem_free(weights);
}

static void many_rows_case(const char *isa)
{
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_FAST, 2);
    struct layer *l = make_layer(c, DTYPE_BF16, DTYPE_BF16, HIDDEN_MAX, 128);
    check_many_rows(c, l, USED);
    check_many_rows(c, l, EXPERTS); /* as many as there is a kernel of its own for */
    free_layer(c, l);
    kernel_ctx_free(c);
}

enum { PROMPT = 1030 };

/* A router and then the experts that it chose, in one go; returns x. */
static float *run_prompt(struct kernel_ctx *c, const struct layer *l, const struct router_args *of,
                         const float *x)
{
    struct mirrors m = { .c = c };
    struct router_args r = *of;
    const size_t used = PROMPT * USED, act = prequantized_floats(used, l->inner);
    struct experts_args a = args_of(l, false, r.h, r.route.experts, r.route.weights,
                                    mem_dup(x, PROMPT * l->hidden * sizeof *x), PROMPT);
    float *result = a.x, *scratch[] = { MEM_ARRAY(float, act), MEM_ARRAY(float, used * l->hidden) };
    int32_t *order = MEM_ARRAY(int32_t, 2 * used + EXPERTS + 1);
    a.jobs = MEM_ARRAY(struct matmul_args, EXPERTS + 1);
    note_route(&m, &r.route);
    note(&m, r.x, floats(PROMPT * l->hidden), false);
    note(&m, r.norm, floats(l->hidden), false);
    note(&m, r.h, floats(PROMPT * l->hidden), true);
    note(&m, a.x, floats(PROMPT * l->hidden), true);
    note(&m, scratch[0], floats(act), false), note(&m, scratch[1], floats(used * l->hidden), false);
    note(&m, order, (2 * used + EXPERTS + 1) * sizeof *order, false);
    send(&m);
    r.route = route_there(&m, r.route);
    r.x = there(&m, r.x), r.norm = there(&m, r.norm), r.h = there(&m, r.h);
    a.h = r.h, a.experts = r.route.experts, a.weights = r.route.weights, a.x = there(&m, a.x);
    a.act = there(&m, scratch[0]), a.out = there(&m, scratch[1]);
    a.rows = there(&m, order), a.index = a.rows + used, a.begin = a.rows + 2 * used;
    c->ops->router(c, &r);
    c->ops->experts(c, &a);
    fetch(&m);
    mem_free(scratch[0]), mem_free(scratch[1]), mem_free(order), mem_free(a.jobs);
    return result;
}

/* Experts of a prompt's rows give the bits that they give of its h alone, also where the router
 * knows from the layer before what they take. */
static void router_before_case(const char *isa, enum dtype t)
{
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_FAST, 2);
    struct layer *l = make_layer(c, t, t, HIDDEN_MAX, 128);
    struct matrix matrix = make_matrix(DTYPE_F32, EXPERTS, HIDDEN_MAX);
    struct weight w = single(c, &matrix);
    enum { N = PROMPT * HIDDEN_MAX };
    float *x = random_floats(N, 2), *norm = random_floats(HIDDEN_MAX, 1), *h = MEM_ARRAY(float, N),
          *logits = MEM_ARRAY(float, PROMPT *EXPERTS), *weights = MEM_ARRAY(float, PROMPT *USED),
          *got[2];
    int32_t *experts = MEM_ARRAY(int32_t, PROMPT * USED);
    CHECK_OK(kernel_ctx_reserve(c, PROMPT * (USED + 1), HIDDEN_MAX));
    const struct router_args router = { .w = &w,
                                        .x = x,
                                        .norm = norm,
                                        .eps = 1e-6f,
                                        .h = h,
                                        .route = { .logits = logits,
                                                   .n_rows = PROMPT,
                                                   .n_experts = EXPERTS,
                                                   .n_used = USED,
                                                   .n_groups = 1,
                                                   .topk_groups = 1,
                                                   .norm = NORM_SUM,
                                                   .scale = 1,
                                                   .experts = experts,
                                                   .weights = weights } };
    got[0] = run_prompt(c, l, &router, x);
    got[1] = test_runs_long() || t == DTYPE_BF16 ? run_prompt(c, l, &router, x) : NULL;
    if (got[1]) check_bits(got[1], got[0], N, "experts after a router, again", PROMPT, (size_t)t);
    float *alone = mem_dup(x, N * sizeof *x);
    c->ops->add(c, NULL, NULL, 0); /* no longer right after the router */
    on_experts(c, args_of(l, false, h, experts, weights, alone, PROMPT));
    check_bits(alone, got[0], N, "experts alone", PROMPT, (size_t)t);
    mem_free(x), mem_free(norm), mem_free(h), mem_free(logits), mem_free(weights);
    mem_free(experts), mem_free(got[0]), mem_free(got[1]), mem_free(alone);
    weight_release(c, &w);
    free_matrix(&matrix), free_layer(c, l);
    kernel_ctx_free(c);
}

static void router_before_cases(const char *isa)
{
    router_before_case(isa, DTYPE_BF16);
    router_before_case(isa, DTYPE_F8_E4M3);
}

#define BACKEND_TESTS(name, isa)                                                                   \
    TEST(name##_experts_after_a_router) { router_before_cases(isa); }                              \
    TEST(name##_experts) { experts_cases(isa); }                                                   \
    TEST(name##_experts_of_many_rows) { many_rows_case(isa); }
#define BACKEND_CASES(name)                                                                        \
    CASE_T(name##_experts, 200), CASE_T(name##_experts_of_many_rows, 200),                         \
        CASE_T(name##_experts_after_a_router, 200)
EVERY_BACKEND(BACKEND_TESTS)
#ifdef BATON_HAVE_CUDA_KERNELS
TEST(cuda_experts_of_narrow_rows) { narrow_cases("cuda"); }
#else
TEST(cuda_experts_of_narrow_rows)
{
    (void)narrow_cases;
    SKIP("no GPU kernels in this build: rows of less than f32 were NOT multiplied");
}
#endif

TEST_MAIN(EVERY_BACKEND_CASES(BACKEND_CASES), CASE_T(cuda_experts_of_narrow_rows, 200))
