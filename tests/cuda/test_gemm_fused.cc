/* test_gemm_fused.cc - several products of the same rows by one launch have the bits of each alone,
 * and write nothing beside their results.
 *
 * Runs on a GPU or on tests/simt. test_gemm.cc checks what a single product computes. */
#include <string.h>

#include "tests/cuda/device_case.h"
#include "tests/cuda/gemm_reference.h"

enum { COUNTER_BYTES = 3 * 1024 }; /* at the beginning of scratch */

/* One of the products that share x. */
struct one_product {
    size_t n_out, y_stride;
    enum gemm_epilogue epilogue;
    bool bias;
};

/* The memory of three matrices and of the rows that they share. */
struct side_by_side {
    std::vector<device_bytes *> memory;
    std::vector<struct gemm> products;
    std::vector<void *> y;
    std::vector<size_t> y_bytes;
    ~side_by_side()
    {
        for (device_bytes *m : memory) delete m;
    }
    void *keep(const std::vector<unsigned char> &bytes)
    {
        memory.push_back(new device_bytes(bytes));
        return memory.back()->p;
    }
};

static std::vector<unsigned char> some_x(enum gemm_weight_layout layout, size_t n, numbers *from)
{
    std::vector<unsigned char> x(n * 2);
    for (size_t i = 0; i < n; i++) {
        const uint16_t bits = bits_of(gemm_x_type(layout), (float)from->next());
        memcpy(&x[2 * i], &bits, 2);
    }
    return x;
}

static std::vector<unsigned char> some_floats(size_t n, numbers *from)
{
    std::vector<unsigned char> f(n * 4);
    for (size_t i = 0; i < n; i++) {
        const float v = (float)from->next();
        memcpy(&f[4 * i], &v, 4);
    }
    return f;
}

static void make(side_by_side *s, enum gemm_weight_layout layout, size_t n_rows, size_t n_in,
                 const std::vector<one_product> &list, void *scratch)
{
    numbers from = { 5 + (uint64_t)layout };
    const size_t x_stride = (n_in + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP;
    void *x = s->keep(some_x(layout, n_rows * x_stride, &from));
    for (const one_product &o : list) {
        const reference_matrix w = reference_pack(layout, false, o.n_out, n_in, &from);
        struct gemm g = {};
        g.layout = layout, g.n_out = o.n_out, g.n_in = n_in, g.epilogue = o.epilogue,
        g.n_groups = 1, g.n_rows = n_rows, g.x = x, g.x_stride = x_stride;
        g.w = s->keep(w.bytes), g.w_stride = w.bytes.size(), g.scratch = scratch;
        if (o.bias) g.bias = (const float *)s->keep(some_floats(o.n_out, &from));
        s->y_bytes.push_back(n_rows * o.y_stride * 4);
        s->y.push_back(s->keep(some_floats(n_rows * o.y_stride, &from)));
        g.y = s->y.back(), g.y_stride = o.y_stride;
        s->products.push_back(g);
    }
}

/* Runs the products and returns all bytes of each y. */
static std::vector<std::vector<unsigned char>> run(
    const side_by_side &s, const std::vector<std::vector<unsigned char>> &before, bool together)
{
    std::vector<std::vector<unsigned char>> y = before;
    for (size_t i = 0; i < y.size(); i++)
        GOOD(cudaMemcpy(s.y[i], before[i].data(), s.y_bytes[i], cudaMemcpyHostToDevice));
    if (together) GOOD(gemm_run_fused(nullptr, s.products.data(), (int)s.products.size()));
    for (size_t i = 0; !together && i < y.size(); i++) GOOD(gemm_run(nullptr, &s.products[i]));
    GOOD(cudaDeviceSynchronize());
    for (size_t i = 0; i < y.size(); i++)
        GOOD(cudaMemcpy(y[i].data(), s.y[i], s.y_bytes[i], cudaMemcpyDeviceToHost));
    return y;
}

static void check(enum gemm_weight_layout layout, size_t n_rows, size_t n_in,
                  const std::vector<one_product> &list, bool sliced)
{
    const device_bytes scratch{ std::vector<unsigned char>(gemm_scratch_bytes()) };
    side_by_side s;
    make(&s, layout, n_rows, n_in, list, sliced ? scratch.p : nullptr);
    std::vector<std::vector<unsigned char>> before;
    for (size_t i = 0; i < list.size(); i++) {
        before.emplace_back(s.y_bytes[i]);
        GOOD(cudaMemcpy(before[i].data(), s.y[i], s.y_bytes[i], cudaMemcpyDeviceToHost));
    }
    const auto alone = run(s, before, false);
    /* The first call must leave scratch as the second needs it. */
    const int n_calls = n_in < 4096 || test_runs_long() ? 2 : 1;
    for (int again = 0; again < n_calls; again++) {
        const auto together = run(s, before, true);
        for (size_t i = 0; i < list.size(); i++)
            if (memcmp(alone[i].data(), together[i].data(), alone[i].size()) != 0)
                test_fail(__FILE__, __LINE__,
                          "layout %d, %zu rows of %zu, product %zu of %zu%s: other bits than alone",
                          layout, n_rows, n_in, i, list.size(), sliced ? ", in slices" : "");
    }
    std::vector<unsigned char> counters(COUNTER_BYTES);
    GOOD(cudaMemcpy(counters.data(), scratch.p, counters.size(), cudaMemcpyDeviceToHost));
    for (unsigned char byte : counters) CHECK_EQ_INT(byte, 0);
}

/* Shapes like q, k and v. Narrow ones use split-k, with different numbers of slices. */
TEST(fused_products_have_the_bits_of_single_ones)
{
    need_gpu();
    const std::vector<std::vector<one_product>> lists = {
        { { 96, 99, GEMM_STORE, false },
          { 32, 32, GEMM_STORE, false },
          { 32, 37, GEMM_STORE, false } },
        { { 128, 128, GEMM_STORE, true }, { 2, 5, GEMM_ADD, true }, { 61, 64, GEMM_STORE, false } },
        { { 1, 1, GEMM_STORE, true }, { 300, 300, GEMM_ADD, false } },
    };
    for (int layout = GEMM_BF16; layout < GEMM_WEIGHT_LAYOUTS; layout++)
        for (const auto &list : lists) {
            const bool alternates = !test_runs_long(); /* each n_in has some of the rows */
            const size_t i = (size_t)(&list - lists.data() + layout);
            for (size_t n_rows : { 1, 8, 9, 16, 17 }) /* 17 rows: one launch per product */
                for (size_t n_in : { 128, 192 })      /* 192 leaves a partial stage */
                    if (!alternates || (n_rows / 8 + n_in / 64 + i) % 2)
                        check((enum gemm_weight_layout)layout, n_rows, n_in, list, n_rows % 2 == 0);
            /* n_in of 4,096 uses split-k */
            if (!alternates || i % 3 == 0)
                check((enum gemm_weight_layout)layout, 9, 4096, list, true);
        }
}

/* Matrices so wide that a slice of one would be two of another. */
TEST(fused_wide_products_have_fewer_slices)
{
    need_gpu();
    check(GEMM_BF16, 3, 4096,
          { { 2560, 2560, GEMM_STORE, false },
            { 512, 512, GEMM_STORE, false },
            { 512, 512, GEMM_STORE, false } },
          true);
    check(GEMM_W4, 3, 4096, { { 16, 16, GEMM_STORE, false }, { 4112, 4112, GEMM_STORE, false } },
          true);
}

TEST_MAIN(CASE_T(fused_products_have_the_bits_of_single_ones, 250),
          CASE_T(fused_wide_products_have_fewer_slices, 250))
