/* test_router.cc - the router of a step whose last rows are padding: they are chosen for as others
 * and get no slots. Runs on a GPU or on tests/simt; tests/conformance/test_route.c has the rest. */
#include <set>

#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/moe/moe_route.h"
#include "tests/cuda/device_case.h"
#include "tests/cuda/gemm_reference.h"

struct router_trial {
    size_t n_experts, n_in, n_used, n_rows;
    std::vector<float> w, x, norm;
    std::vector<int32_t> experts, order; /* order: rows, index, begin */
    std::vector<float> weights;
};

static router_trial make_router(size_t n_experts, size_t n_in, size_t n_used, size_t n_rows)
{
    router_trial t = {};
    numbers from = { n_experts + n_in };
    t.n_experts = n_experts, t.n_in = n_in, t.n_used = n_used, t.n_rows = n_rows;
    t.w.resize(n_experts * n_in), t.x.resize(n_rows * n_in), t.norm.resize(n_in);
    for (std::vector<float> *v : { &t.w, &t.x, &t.norm })
        for (float &value : *v) value = (float)from.next();
    return t;
}

/* n_real negative: all rows are real. */
static void run_router(router_trial *t, int32_t n_real)
{
    const size_t used = t->n_rows * t->n_used;
    t->experts.assign(used, -7), t->weights.assign(used, -7);
    t->order.assign(2 * used + t->n_experts + 1, -7);
    const std::vector<float> none(t->n_rows * (t->n_experts + t->n_in));
    const std::vector<unsigned char> zeros(MOE_ROUTER_SCRATCH);
    device_bytes w(t->w), x(t->x), norm(t->norm), h(none), logits(none), experts(t->experts),
        weights(t->weights), order(t->order), scratch(zeros), real(&n_real, sizeof n_real);
    struct weight matrix = {};
    matrix.data = w.p, matrix.n_in = t->n_in, matrix.n_out = t->n_experts;
    struct router_args a = {};
    a.w = &matrix, a.x = (const float *)x.p, a.norm = (const float *)norm.p, a.eps = 1e-6f;
    a.h = (float *)h.p;
    a.route.logits = (float *)logits.p, a.route.n_rows = t->n_rows;
    a.route.n_experts = (int32_t)t->n_experts, a.route.n_used = (int32_t)t->n_used;
    a.route.n_groups = a.route.topk_groups = 1;
    a.route.norm = route_args::NORM_SUM, a.route.scale = 1;
    a.route.experts = (int32_t *)experts.p, a.route.weights = (float *)weights.p;
    a.route.rows = (int32_t *)order.p, a.route.index = a.route.rows + used;
    a.route.begin = a.route.index + used;
    CHECK(moe_router_fits(&a));
    GOOD(moe_router(nullptr, &a, n_real < 0 ? nullptr : (const int32_t *)real.p, scratch.p));
    GOOD(cudaDeviceSynchronize());
    GOOD(cudaMemcpy(t->experts.data(), experts.p, used * sizeof(int32_t), cudaMemcpyDeviceToHost));
    GOOD(cudaMemcpy(t->weights.data(), weights.p, used * sizeof(float), cudaMemcpyDeviceToHost));
    GOOD(cudaMemcpy(t->order.data(), order.p, t->order.size() * sizeof(int32_t),
                    cudaMemcpyDeviceToHost));
}

static void check_order(const router_trial &t, size_t n_real)
{
    const size_t used = t.n_rows * t.n_used, n = n_real * t.n_used;
    const int32_t *rows = t.order.data(), *index = rows + used, *begin = index + used;
    int32_t slot = 0;
    for (size_t e = 0; e < t.n_experts; e++) {
        CHECK_EQ_INT(begin[e], slot);
        for (size_t i = 0; i < n; i++) {
            if (t.experts[i] != (int32_t)e) continue;
            CHECK_EQ_INT(index[i], slot);
            CHECK_EQ_INT(rows[slot], i / t.n_used);
            slot++;
        }
    }
    CHECK_EQ_INT(begin[t.n_experts], slot);
    for (size_t i = n; i < used; i++) CHECK(index[i] == 0 && rows[i] == -7);
}

TEST(padding_rows_get_no_slots)
{
    static const size_t SHAPES[][3] = { { 128, 1024, 8 }, { 64, 2560, 6 }, { 160, 1024, 4 } };
    need_gpu();
    for (const size_t(&shape)[3] : SHAPES)
        for (size_t n_rows : { 1, 2, 8, 16 }) {
            /* the emulated GPU is slow under a sanitizer: each shape has one of few and of many */
            if (!test_runs_long() && (n_rows + shape[0] / 32) % 3 == 0) continue;
            router_trial all = make_router(shape[0], shape[1], shape[2], n_rows);
            run_router(&all, -1);
            check_order(all, n_rows);
            for (size_t n_real : std::set<size_t>{ 0, 1, n_rows / 2, n_rows, n_rows + 1 }) {
                if (!test_runs_long() && n_real == 1 && n_rows > 1) continue;
                router_trial t = make_router(shape[0], shape[1], shape[2], n_rows);
                run_router(&t, (int32_t)n_real);
                CHECK(t.experts == all.experts && t.weights == all.weights);
                check_order(t, n_real < n_rows ? n_real : n_rows);
            }
        }
}

TEST_MAIN(CASE(padding_rows_get_no_slots))
