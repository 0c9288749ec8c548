/* test_route.c - the choice of experts for a token, against the formulas of each architecture
 * written out here in f64.
 *
 * The numbers are drawn so that no two candidates are closer than f32 can tell apart; ties and NaN
 * have tests of their own. */
#include "tests/conformance/kernel_ops_on_device.h"

enum { E = 64, K_MAX = 8, ROWS = 33 };

struct choice {
    int32_t experts[K_MAX];
    double weights[K_MAX];
};

static int best(const double *v, const bool *taken, int n)
{
    int b = -1;
    for (int i = 0; i < n; i++)
        if (!taken[i] && (b < 0 || v[i] > v[b])) b = i;
    return b;
}

/* Source: the reference implementations of Mixtral, Qwen3, ERNIE 4.5, DeepSeek V2 and V3. */
static struct choice route_by_formula(const struct route_args *a, const float *logits)
{
    struct choice c = { 0 };
    double p[E], v[E], sum = 0, top = -INFINITY;
    bool taken[E] = { false };
    int n = a->n_experts, size = n / a->n_groups;
    for (int e = 0; e < n; e++) top = fmax(top, (double)logits[e]);
    for (int e = 0; e < n; e++) sum += exp((double)logits[e] - top);
    for (int e = 0; e < n; e++) {
        p[e] = a->score == ROUTE_SOFTMAX ? exp((double)logits[e] - top) / sum
                                         : 1 / (1 + exp(-(double)logits[e]));
        v[e] = p[e] + (a->bias ? (double)a->bias[e] : 0);
    }
    if (a->n_groups > 1) {
        double score[E];
        bool kept[E] = { false };
        for (int g = 0; g < a->n_groups; g++) {
            bool used[E] = { false };
            int first = best(v + g * size, used, size);
            used[first] = true;
            score[g] = v[g * size + first];
            if (a->group_score == GROUP_TOP2_SUM)
                score[g] += v[g * size + best(v + g * size, used, size)];
        }
        for (int i = 0; i < a->topk_groups; i++) kept[best(score, kept, a->n_groups)] = true;
        for (int e = 0; e < n; e++) taken[e] = !kept[e / size];
    }
    sum = 0;
    for (int j = 0; j < a->n_used; j++) {
        c.experts[j] = best(v, taken, n);
        taken[c.experts[j]] = true;
        c.weights[j] = p[c.experts[j]];
        sum += c.weights[j];
    }
    double by = a->norm == NORM_MAX   ? fmax(sum, (double)a->norm_min)
                : a->norm == NORM_SUM ? sum + (double)a->norm_min
                                      : 1;
    for (int j = 0; j < a->n_used; j++) c.weights[j] = c.weights[j] / by * (double)a->scale;
    return c;
}

static void check_route(struct kernel_ctx *c, struct route_args a)
{
    float *logits = random_floats(ROWS * (size_t)a.n_experts, 4);
    int32_t experts[ROWS * K_MAX], alone[K_MAX];
    float weights[ROWS * K_MAX], one[K_MAX];
    a.logits = logits;
    a.experts = experts;
    a.weights = weights;
    a.n_rows = ROWS;
    on_route(c, a);
    for (size_t i = 0; i < ROWS; i++) {
        struct choice want = route_by_formula(&a, logits + i * (size_t)a.n_experts);
        struct route_args row = a;
        row.logits = logits + i * (size_t)a.n_experts;
        row.n_rows = 1;
        row.experts = alone;
        row.weights = one;
        on_route(c, row);
        for (int j = 0; j < a.n_used; j++) {
            CHECK(experts[i * (size_t)a.n_used + (size_t)j] == want.experts[j] &&
                  alone[j] == want.experts[j]);
            CHECK_NEAR(weights[i * (size_t)a.n_used + (size_t)j], want.weights[j],
                       1e-5 * fabs(want.weights[j]));
            check_bits(&one[j], &weights[i * (size_t)a.n_used + (size_t)j], 1, "a row alone", i,
                       (size_t)j);
        }
    }
    mem_free(logits);
}

/* Slots are ordered by expert, then by row. A backend that does not compute them leaves them as
 * they were. */
static void check_order(const struct kernel_ctx *c, const struct route_args *a)
{
    int32_t slot = 0, n = (int32_t)a->n_rows * a->n_used;
    if (c->device->is_host) {
        for (int32_t i = 0; i < n; i++) CHECK(a->rows[i] == -7 && a->index[i] == -7);
        return;
    }
    for (int32_t e = 0; e < a->n_experts; e++) {
        CHECK_EQ_INT(a->begin[e], slot);
        for (int32_t i = 0; i < n; i++) {
            if (a->experts[i] != e) continue;
            CHECK(a->index[i] == slot && a->rows[slot] == i / a->n_used);
            slot++;
        }
    }
    CHECK_EQ_INT(a->begin[a->n_experts], n);
}

/* The experts are the same with an order and without. */
static void check_with_order(struct kernel_ctx *c, size_t n_rows, int32_t n_experts, int32_t n_used)
{
    const size_t used = n_rows * (size_t)n_used;
    float *logits = random_floats(n_rows * (size_t)n_experts, 4), *weights = MEM_ARRAY(float, used),
          *plain_weights = MEM_ARRAY(float, used);
    int32_t *experts = MEM_ARRAY(int32_t, used), *plain = MEM_ARRAY(int32_t, used),
            *order = MEM_ARRAY(int32_t, 2 * used + (size_t)n_experts + 1);
    for (size_t i = 0; i < 2 * used; i++) order[i] = -7;
    struct route_args a = {
        .logits = logits,
        .n_rows = n_rows,
        .n_experts = n_experts,
        .n_used = n_used,
        .n_groups = 1,
        .topk_groups = 1,
        .norm = NORM_SUM,
        .scale = 1,
        .experts = plain,
        .weights = plain_weights,
    };
    on_route(c, a);
    a.experts = experts, a.weights = weights;
    a.rows = order, a.index = order + used, a.begin = order + 2 * used;
    on_route(c, a);
    CHECK(memcmp(experts, plain, used * sizeof *experts) == 0);
    check_bits(weights, plain_weights, used, "weights", n_rows, (size_t)n_used);
    check_order(c, &a);
    mem_free(logits), mem_free(weights), mem_free(plain_weights), mem_free(experts),
        mem_free(plain), mem_free(order);
}

/* At numbers of rows for every way of computing it; those of the largest take long under a
 * sanitizer, on the emulated GPU. */
static void check_orders(struct kernel_ctx *c, int32_t n_experts, int32_t n_used)
{
    static const size_t N_ROWS[] = { 1, 5, 32, 33, 128, 129, 300, 700 };
    const size_t n = COUNT_OF(N_ROWS) - (test_runs_long() ? 0 : 2);
    for (size_t k = 0; k < n; k++) check_with_order(c, N_ROWS[k], n_experts, n_used);
}

static void check_all(struct kernel_ctx *c)
{
    float bias[E];
    for (int e = 0; e < E; e++) bias[e] = random_float(0.3f);
    /* Mixtral */
    check_route(c, (struct route_args){
                       .n_experts = 8,
                       .n_used = 2,
                       .n_groups = 1,
                       .topk_groups = 1,
                       .norm = NORM_SUM,
                       .scale = 1,
                   });
    /* Qwen3, no norm */
    check_route(c, (struct route_args){
                       .n_experts = 64,
                       .n_used = 8,
                       .n_groups = 1,
                       .topk_groups = 1,
                       .norm = NORM_NONE,
                       .scale = 1,
                   });
    check_route(c, (struct route_args){
                       .n_experts = 64,
                       .n_used = 6,
                       .n_groups = 1,
                       .topk_groups = 1,
                       .bias = bias,
                       .norm = NORM_MAX,
                       .norm_min = 1e-12f,
                       /* ERNIE */
                       .scale = 1,
                   });
    check_route(c, (struct route_args){
                       .n_experts = 64,
                       .n_used = 8,
                       .n_groups = 8,
                       .topk_groups = 4,
                       .bias = bias,
                       .score = ROUTE_SIGMOID,
                       /* DeepSeek V3 */
                       .group_score = GROUP_TOP2_SUM,
                       .norm = NORM_SUM,
                       .norm_min = 1e-20f,
                       .scale = 2.5f,
                   });
    /* V2, grouped */
    check_route(c, (struct route_args){
                       .n_experts = 64,
                       .n_used = 6,
                       .n_groups = 8,
                       .topk_groups = 3,
                       .norm = NORM_NONE,
                       .scale = 16,
                   });
    check_route(c, (struct route_args){
                       .n_experts = 1,
                       .n_used = 1,
                       .n_groups = 1,
                       .topk_groups = 1,
                       .norm = NORM_SUM,
                       .scale = 1,
                   });
}

/* Ties go to the lower index, and NaN harms only its row. */
static void check_ties(struct kernel_ctx *c)
{
    float logits[3 * 8] = { 1, 2, 2, 1, 2,       0, 0, 0, /* */ NAN, 1, 2, 3,
                            4, 5, 6, 7, /* */ 0, 0, 0, 0, 0,         0, 0, 0 },
                     weights[9];
    int32_t experts[9];
    struct route_args a = {
        .logits = logits,
        .n_rows = 3,
        .n_experts = 8,
        .n_used = 3,
        .n_groups = 1,
        .topk_groups = 1,
        .norm = NORM_SUM,
        .scale = 1,
        .experts = experts,
        .weights = weights,
    };
    on_route(c, a);
    CHECK(experts[0] == 1 && experts[1] == 2 && experts[2] == 4);
    for (int j = 3; j < 6; j++) CHECK(experts[j] >= 0 && experts[j] < 8 && isnan(weights[j]));
    CHECK(experts[6] == 0 && experts[7] == 1 && experts[8] == 2);
    CHECK_NEAR(weights[6], 1.0 / 3, 1e-7);
}

/* The results of a router's call. */
struct routed {
    float *h, *weights;
    int32_t *experts, *order;
};

static struct routed make_routed(size_t n_rows, size_t n_experts, size_t n_in)
{
    struct routed r = {
        .h = MEM_ARRAY(float, n_rows *n_in),
        .weights = MEM_ARRAY(float, n_rows *K_MAX),
        .experts = MEM_ARRAY(int32_t, n_rows * K_MAX),
        .order = MEM_ARRAY(int32_t, 2 * n_rows * K_MAX + n_experts + 1),
    };
    for (size_t i = 0; i < 2 * n_rows * K_MAX + n_experts + 1; i++) r.order[i] = -7;
    return r;
}

static void free_routed(struct routed *r)
{
    mem_free(r->h), mem_free(r->weights), mem_free(r->experts), mem_free(r->order);
}

static struct router_args router_to(struct router_args a, const struct routed *r)
{
    const size_t used = a.route.n_rows * (size_t)a.route.n_used;
    a.h = r->h;
    a.route.weights = r->weights, a.route.experts = r->experts;
    if (!a.route.rows) return a;
    a.route.rows = r->order, a.route.index = r->order + used, a.route.begin = r->order + 2 * used;
    return a;
}

/* A router gives the bits of its three ops. */
static void check_router(struct kernel_ctx *c, struct router_args a)
{
    const size_t n_rows = a.route.n_rows, n_experts = (size_t)a.route.n_experts, n = a.w->n_in,
                 used = n_rows * (size_t)a.route.n_used;
    struct routed one = make_routed(n_rows, n_experts, n),
                  three = make_routed(n_rows, n_experts, n);
    float *logits = random_floats(n_rows * n_experts, 1);
    a.route.logits = logits;
    for (int i = 0; i < 2; i++) on_router(c, router_to(a, &one)); /* leaves its counter as it was */
    a = router_to(a, &three);
    const struct matmul_args product = router_matmul(&a);
    on_rms_norm(c, a.h, n, a.x, n, a.norm, n_rows, n, a.eps);
    on_matmul(c, &product, 1);
    on_route(c, a.route);
    check_bits(one.h, three.h, n_rows * n, "normalised rows", n_rows, n);
    check_bits(one.weights, three.weights, used, "weights", n_rows, n);
    CHECK(memcmp(one.experts, three.experts, used * sizeof *one.experts) == 0);
    CHECK(memcmp(one.order, three.order, (2 * used + n_experts + 1) * sizeof *one.order) == 0);
    if (a.route.rows) check_order(c, &a.route);
    free_routed(&one), free_routed(&three);
    mem_free(logits);
}

/* Gives three experts equal logits, and one NaN, which a softmax hands to the row. */
static void spoil_experts(struct matrix *m, bool has_nan)
{
    const size_t n_in = m->src.n_in, bytes = n_in * sizeof(float);
    const float nan = NAN;
    for (size_t e = 2; e < m->src.n_out; e += m->src.n_out / 3)
        memcpy(m->bytes + 1 + e * bytes, m->bytes + 1, bytes);
    if (has_nan) memcpy(m->bytes + 1 + bytes, &nan, sizeof nan);
}

/* Of shapes whose product splits k over warps and others, with numbers of rows on both sides of
 * what one launch computes; the last needs too much shared memory for that. */
static void check_routers(struct kernel_ctx *c)
{
    static const size_t SHAPES[][3] = { { 64, 1100, 8 },  { 33, 2560, 3 },  { 70, 1024, 2 },
                                        { 8, 100, 2 },    { 300, 1056, 6 }, { 600, 1030, 3 },
                                        { 128, 2080, 8 }, { 5, 1536, 5 },   { 16, 1024, 4 },
                                        { 16, 6000, 4 } }; /* experts, n_in, used */
    static const size_t N_ROWS[] = { 1, 3, 8, 29, 65 };
    int32_t order; /* asks for it */
    CHECK_OK(kernel_ctx_reserve(c, 65, 6000));
    for (size_t i = 0; i < COUNT_OF(SHAPES); i++) {
        const size_t n_experts = SHAPES[i][0], n_in = SHAPES[i][1];
        struct matrix m = make_matrix(DTYPE_F32, n_experts, n_in);
        spoil_experts(&m, i > 6);
        const struct weight_pack_args pack = { .parts = &m.src, .n_parts = 1 };
        struct weight w;
        CHECK_OK(c->weight_ops->pack(c, &pack, &w, NULL));
        float *x = random_floats(65 * n_in, 3), *norm = random_floats(n_in, 1),
              *bias = random_floats(n_experts, 0.1f);
        for (size_t k = 0; k < COUNT_OF(N_ROWS); k++) {
            /* one number of rows that one launch computes, and one that it does not, which takes the
             * emulated GPU seconds for many experts */
            if (!test_runs_long() && k != (k < 3 ? i % 3 : i % 6 ? 3 : 4)) continue;
            if (!test_runs_long() && k > 2 && n_experts > 300) continue;
            check_router(c, (struct router_args){
                                .w = &w,
                                .x = x,
                                .norm = norm,
                                .eps = 1e-6f,
                                .route = {
                                    .n_rows = N_ROWS[k],
                                    .bias = k % 2 ? bias : NULL,
                                    .n_experts = (int32_t)n_experts,
                                    .n_used = (int32_t)SHAPES[i][2],
                                    .n_groups = i == 0 ? 8 : 1,
                                    .topk_groups = i == 0 ? 3 : 1,
                                    .score = i % 2 ? ROUTE_SIGMOID : ROUTE_SOFTMAX,
                                    .norm = NORM_SUM,
                                    .scale = 1,
                                    .rows = k != 1 ? &order : NULL,
                                },
                            });
        }
        weight_release(c, &w);
        free_matrix(&m);
        mem_free(x), mem_free(norm), mem_free(bias);
    }
}

/* Logits of h times w: within 2^-21 of the sum of their products' magnitudes, but for row `nan`. */
static void check_logits(const float *logits, const float *h, const float *w, size_t n_rows,
                         size_t n_experts, size_t n_in, size_t nan)
{
    for (size_t i = 0; i < n_rows; i++)
        for (size_t e = 0; e < n_experts; e++) {
            const float got = logits[i * n_experts + e];
            double y = 0, size = 0;
            for (size_t k = 0; k < n_in; k++) {
                const double p = (double)h[i * n_in + k] * (double)w[e * n_in + k];
                y += p, size += fabs(p);
            }
            if (i == nan) CHECK(isnan(got));
            else if (!(fabs((double)got - y) <= size * 0x1p-21))
                test_fail(__FILE__, __LINE__, "row %zu, expert %zu: %.9g, not %.9g (of %.9g)", i, e,
                          (double)got, y, size);
        }
}

/* A prompt's rows, in the fast arithmetic, by weights that bf16 holds and others. A NaN stays in
 * its row, and rows have the same bits in two calls, of another number of rows. */
static void check_many_logits(struct kernel_ctx *c, size_t n_experts, size_t n_in, bool bf16)
{
    enum { MANY = 1091, FEWER = 1030, BAD = 70 };
    struct matrix m = make_matrix(DTYPE_F32, n_experts, n_in);
    for (size_t i = 0; i < n_experts * n_in; i++) {
        /* the last chunk's weights of bf16, or all */
        if (bf16 || i % n_in >= n_in - 32) m.bytes[1 + 4 * i] = m.bytes[1 + 4 * i + 1] = 0;
        memcpy(&m.wide[i], &m.bytes[1 + 4 * i], sizeof m.wide[i]);
    }
    const struct weight_pack_args pack = { .parts = &m.src, .n_parts = 1 };
    struct weight w;
    CHECK_OK(c->weight_ops->pack(c, &pack, &w, NULL));
    float *x = random_floats(MANY * n_in, 3), *norm = random_floats(n_in, 1),
          *logits[2] = { random_floats(MANY * n_experts, 1), random_floats(MANY * n_experts, 1) };
    struct routed r = make_routed(MANY, n_experts, n_in);
    x[BAD * n_in + 5] = NAN;
    for (int i = 0; i < 2; i++)
        on_router(c, router_to((struct router_args){ .w = &w,
                                                     .x = x,
                                                     .norm = norm,
                                                     .eps = 1e-6f,
                                                     .route = { .logits = logits[i],
                                                                .n_rows = i ? FEWER : MANY,
                                                                .n_experts = (int32_t)n_experts,
                                                                .n_used = 3,
                                                                .n_groups = 1,
                                                                .topk_groups = 1,
                                                                .norm = NORM_SUM,
                                                                .scale = 1, }, },
                               &r));
    check_logits(logits[0], r.h, m.wide, MANY, n_experts, n_in, BAD);
    check_bits(logits[1], logits[0], BAD * n_experts, "logits", FEWER, n_in);
    check_bits(logits[1] + (BAD + 1) * n_experts, logits[0] + (BAD + 1) * n_experts,
               (FEWER - BAD - 1) * n_experts, "logits", FEWER, n_in);
    weight_release(c, &w);
    free_matrix(&m), free_routed(&r);
    mem_free(x), mem_free(norm), mem_free(logits[0]), mem_free(logits[1]);
}

static void many_cases(const char *isa)
{
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_FAST, 2);
    CHECK_OK(kernel_ctx_reserve(c, 1091, 192));
    check_many_logits(c, 128, 128, true);
    check_many_logits(c, 97, 192, false);
    check_many_logits(c, 36, 64, false); /* a tile of 64 columns */
    kernel_ctx_free(c);
}

static void route_cases(const char *isa)
{
    const int n_rounds = test_runs_long() ? 5 : 1, most_threads = strcmp(isa, "cuda") ? 2 : 1;
    for (int n_threads = 1; n_threads <= most_threads; n_threads++) {
        struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, n_threads);
        for (int round = 0; round < n_rounds; round++) check_all(c);
        check_ties(c);
        check_orders(c, E, K_MAX);
        check_orders(c, 1, 1);
        check_orders(c, KERNEL_EXPERTS_MAX, 3); /* exceeds the shared memory of one block */
        if (n_threads == 1) check_with_order(c, 16 * 512 + 3, 5, 1); /* two rounds of a scan */
        kernel_ctx_free(c);
    }
}

static void router_cases(const char *isa)
{
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, 2);
    check_routers(c);
    kernel_ctx_free(c);
}

#define BACKEND_TESTS(name, isa)                                                                   \
    TEST(name##_route) { route_cases(isa); }                                                       \
    TEST(name##_router) { router_cases(isa); }                                                     \
    TEST(name##_router_of_a_prompt) { many_cases(isa); }
#define BACKEND_CASES(name) CASE(name##_route), CASE(name##_router), CASE(name##_router_of_a_prompt)
EVERY_BACKEND(BACKEND_TESTS)

/* With a correction bias of +40 an f32 score has a resolution of only 4e-6; the spread of real
 * biases is at least 0.005. */
TEST(a_large_common_bias_keeps_the_order)
{
    struct kernel_ctx *c = open_backend("ref", ACTIVATIONS_F32, 1);
    float bias[E], large[E];
    for (int e = 0; e < E; e++) large[e] = (bias[e] = random_float(0.02f)) + 40;
    float *logits = random_floats(ROWS * E, 4), w0[ROWS * 6], w1[ROWS * 6];
    int32_t e0[ROWS * 6], e1[ROWS * 6];
    size_t same = 0;
    struct route_args a = {
        .logits = logits,
        .n_rows = ROWS,
        .n_experts = E,
        .n_used = 6,
        .n_groups = 1,
        .topk_groups = 1,
        .norm = NORM_MAX,
        .norm_min = 1e-12f,
        .scale = 1,
        .bias = bias,
        .experts = e0,
        .weights = w0,
    };
    on_route(c, a);
    a.bias = large;
    a.experts = e1;
    a.weights = w1;
    on_route(c, a);
    for (size_t i = 0; i < COUNT_OF(e0); i++) same += e0[i] == e1[i];
    CHECK(same >= COUNT_OF(e0) - 4); /* near-ties may be decided differently */
    mem_free(logits);
    kernel_ctx_free(c);
}

TEST_MAIN(EVERY_BACKEND_CASES(BACKEND_CASES), CASE(a_large_common_bias_keeps_the_order))
