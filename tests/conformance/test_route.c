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

/* The experts are the same with an order and without, at numbers of rows for every way of computing
 * it. */
static void check_orders(struct kernel_ctx *c, int32_t n_experts, int32_t n_used)
{
    static const size_t N_ROWS[] = { 1, 5, 32, 33, 128, 129, 300, 700 };
    for (size_t k = 0; k < COUNT_OF(N_ROWS); k++) {
        const size_t n_rows = N_ROWS[k], used = n_rows * (size_t)n_used;
        float *logits = random_floats(n_rows * (size_t)n_experts, 4),
              *weights = MEM_ARRAY(float, used), *plain_weights = MEM_ARRAY(float, used);
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

static void route_cases(const char *isa)
{
    for (int n_threads = 1; n_threads <= 2; n_threads++) {
        struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, n_threads);
        for (int round = 0; round < 5; round++) check_all(c);
        check_ties(c);
        check_orders(c, E, K_MAX);
        check_orders(c, 1, 1);
        check_orders(c, KERNEL_EXPERTS_MAX, 3); /* exceeds the shared memory of one block */
        kernel_ctx_free(c);
    }
}

#define BACKEND_TESTS(name, isa)                                                                   \
    TEST(name##_route) { route_cases(isa); }
#define BACKEND_CASES(name) CASE(name##_route)
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
