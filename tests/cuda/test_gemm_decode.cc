/* test_gemm_decode.cc - the kernels of decode steps have the bits of those for more rows, whether x
 * is prepared or f32.
 *
 * Runs on a GPU or on tests/simt. test_gemm.cc checks what a product computes. */
#include <math.h>
#include <string.h>

#include "kernels/cuda/inputs/prepare_inputs.h"
#include "tests/cuda/device_case.h"
#include "tests/cuda/gemm_reference.h"

static std::vector<float> some_floats(size_t n, numbers *from)
{
    std::vector<float> v(n);
    for (float &f : v) f = (float)from->next();
    return v;
}

/* A product, or one per group of rows. */
struct decode_trial {
    enum gemm_weight_layout layout = GEMM_BF16;
    enum gemm_epilogue epilogue = GEMM_STORE;
    size_t n_rows = 1, n_x_rows = 1, n_out = 16, n_in = 128;
    std::vector<int32_t> begin, x_rows; /* begin is empty: one matrix for all rows */
    bool norm = false, nan = false;
    bool is_silu() const { return gemm_is_silu(epilogue); }
};

/* How its rows of x are given. */
enum how { PREPARED, F32 };

struct decode_memory {
    decode_trial t;
    size_t w_stride, y_bytes;
    device_bytes w, x, norm, begin, x_rows, bias, ready, y, scratch;
};

static std::vector<unsigned char> matrices(const decode_trial &t, size_t *stride)
{
    numbers from = { 7 + (uint64_t)t.layout };
    std::vector<unsigned char> all;
    for (size_t g = 0; g + 1 < (t.begin.empty() ? 2 : t.begin.size()); g++) {
        reference_matrix m = reference_pack(t.layout, t.is_silu(), t.n_out, t.n_in, &from);
        if (t.nan) m.bytes[5 * gemm_row_bytes(t.layout, t.n_in) + t.n_in - 3] = 0x7f;
        *stride = m.bytes.size();
        all.insert(all.end(), m.bytes.begin(), m.bytes.end());
    }
    return all;
}

/* Enough for every epilogue: rows of 16-bit results are padded. */
static size_t y_stride_of(const decode_trial &t) { return t.n_out + GEMM_STEP; }
static size_t y_bytes_of(const decode_trial &t)
{
    return t.n_rows * y_stride_of(t) * (gemm_outputs_16(t.epilogue) ? 2 : 4);
}

static decode_memory *make(const decode_trial &t)
{
    numbers of_x = { 3 }, of_norm = { 4 }, of_bias = { 5 };
    size_t stride = 0;
    const std::vector<unsigned char> w = matrices(t, &stride);
    const std::vector<float> x = some_floats(t.n_x_rows * t.n_in, &of_x),
                             by = some_floats(t.n_in, &of_norm),
                             bias = some_floats(t.n_out, &of_bias);
    const size_t y_bytes = y_bytes_of(t);
    return new decode_memory{ t,
                              stride,
                              y_bytes,
                              device_bytes(w),
                              device_bytes(x),
                              device_bytes(by),
                              device_bytes(t.begin),
                              device_bytes(t.x_rows),
                              device_bytes(bias),
                              device_bytes(std::vector<unsigned char>(t.n_x_rows * t.n_in * 2)),
                              device_bytes(std::vector<unsigned char>(y_bytes)),
                              device_bytes(std::vector<unsigned char>(gemm_scratch_bytes())) };
}

static void prepare(const decode_memory &m)
{
    struct prepare_inputs in = {};
    in.x = (const float *)m.x.p, in.x_stride = m.t.n_in, in.n_rows = m.t.n_x_rows, in.n = m.t.n_in,
    in.y = m.ready.p, in.type = gemm_x_type(m.t.layout), in.eps = 1e-5f;
    if (m.t.norm) in.norm = (const float *)m.norm.p;
    GOOD(prepare_inputs_run(nullptr, &in));
}

static struct gemm product_of(const decode_memory &m, enum how how)
{
    const decode_trial &t = m.t;
    struct gemm g = {};
    g.layout = t.layout, g.paired = t.is_silu(), g.n_out = t.n_out, g.n_in = t.n_in, g.w = m.w.p,
    g.w_stride = m.w_stride, g.n_groups = t.begin.empty() ? 1 : (int32_t)t.begin.size() - 1,
    g.begin = t.begin.empty() ? nullptr : (const int32_t *)m.begin.p, g.n_rows = t.n_rows,
    g.x = how == F32 ? m.x.p : m.ready.p, g.x_stride = t.n_in,
    g.x_rows = t.x_rows.empty() ? nullptr : (const int32_t *)m.x_rows.p,
    g.bias = (const float *)m.bias.p, g.y = m.y.p, g.y_stride = y_stride_of(t),
    g.epilogue = t.epilogue, g.scratch = m.scratch.p;
    g.x_f32 = how == F32, g.norm_eps = 1e-5f;
    if (how == F32 && t.norm) g.norm = (const float *)m.norm.p;
    return g;
}

static std::vector<unsigned char> result(const decode_memory &m, const struct gemm &g)
{
    std::vector<unsigned char> y(m.y_bytes, 0x3e);
    GOOD(cudaMemcpy(m.y.p, y.data(), y.size(), cudaMemcpyHostToDevice));
    GOOD(gemm_run(nullptr, &g));
    GOOD(cudaDeviceSynchronize());
    GOOD(cudaMemcpy(y.data(), m.y.p, y.size(), cudaMemcpyDeviceToHost));
    std::vector<unsigned char> counters(3 * 1024);
    GOOD(cudaMemcpy(counters.data(), m.scratch.p, counters.size(), cudaMemcpyDeviceToHost));
    for (unsigned char byte : counters) CHECK_EQ_INT(byte, 0);
    return y;
}

static void check_same(const decode_trial &t, const std::vector<unsigned char> &got,
                       const std::vector<unsigned char> &want, const char *what)
{
    const size_t n = got.size() < want.size() ? got.size() : want.size();
    for (size_t i = 0; i < n; i++)
        if (got[i] != want[i]) {
            test_fail(__FILE__, __LINE__,
                      "layout %d epilogue %d, %zu rows of %zu, %zu x %zu: byte %zu of y differs "
                      "from %s",
                      t.layout, t.epilogue, t.n_rows, t.n_x_rows, t.n_out, t.n_in, i, what);
            return;
        }
}

static enum gemm_epilogue silu_epilogue_for(int layout)
{
    return layout == GEMM_F16 ? GEMM_SILU_F16 : GEMM_SILU_BF16;
}

/* ---- cases ---- */

/* Up to 8 rows among 12, which gemm_skinny.cu multiplies. */
static void check_dense(const decode_trial &t)
{
    decode_trial more = t;
    more.n_rows = more.n_x_rows = 12;
    decode_memory *all = make(more), *some = make(t);
    prepare(*all);
    const std::vector<unsigned char> want = result(*all, product_of(*all, PREPARED));
    prepare(*some);
    check_same(t, result(*some, product_of(*some, PREPARED)), want, "more rows");
    const struct gemm g = product_of(*some, F32);
    CHECK(gemm_takes_f32_x(&g));
    for (int again = 0; again < 2; again++) check_same(t, result(*some, g), want, "prepared rows");
    delete all;
    delete some;
}

TEST(decode_rows_have_the_bits_of_more_rows)
{
    need_gpu();
    static const size_t shapes[][3] = {
        { 1, 530, 256 }, { 3, 18, 128 }, { 8, 64, 2048 }, { 1, 130, 4224 }, { 2, 2, 8192 }
    }; /* rows, n_out, n_in */
    for (int layout = GEMM_BF16; layout < GEMM_WEIGHT_LAYOUTS; layout++)
        for (const auto &shape : shapes) {
            if (TEST_IS_SANITIZED && shape[2] > 2048 && layout % 2) continue;
            for (enum gemm_epilogue epilogue :
                 { GEMM_STORE, GEMM_ADD, silu_epilogue_for(layout) }) {
                decode_trial t;
                if (TEST_IS_SANITIZED && epilogue == GEMM_STORE) continue;
                t.layout = (enum gemm_weight_layout)layout, t.epilogue = epilogue,
                t.n_rows = t.n_x_rows = shape[0], t.n_out = shape[1], t.n_in = shape[2];
                t.norm = epilogue != GEMM_ADD;
                check_dense(t);
            }
        }
}

/* Groups without rows and with up to 20, in n_rows that are more than there are. Without n_x_rows
 * gemm_skinny.cu and gemm_tiles.cu multiply them. */
static void check_groups(const decode_trial &t, bool same_kernel)
{
    decode_memory *m = make(t);
    prepare(*m);
    struct gemm g = product_of(*m, PREPARED);
    const std::vector<unsigned char> want = result(*m, g);
    g.n_x_rows = t.n_x_rows;
    for (int read = 0; read < 2; read++) {
        g.begin_is_read = read;
        if (same_kernel) check_same(t, result(*m, g), want, "the kernel for more rows");
    }
    const std::vector<unsigned char> of_ready = result(*m, g);
    g = product_of(*m, F32);
    g.n_x_rows = t.n_x_rows;
    CHECK(gemm_takes_f32_x(&g));
    check_same(t, result(*m, g), of_ready, "prepared rows");
    delete m;
}

TEST(decode_groups_have_the_bits_of_the_kernel_for_more_rows)
{
    need_gpu();
    std::vector<int32_t> sparse = { 0 };
    for (int i = 0; i < 140; i++) sparse.push_back(sparse.back() + (i % 17 == 3) + (i == 139) * 2);
    for (int layout = GEMM_BF16; layout < GEMM_WEIGHT_LAYOUTS; layout++)
        for (const std::vector<int32_t> &begin : { std::vector<int32_t>{ 0, 1, 1, 4, 13 }, sparse,
                                                   std::vector<int32_t>{ 0, 0, 20, 21 } }) {
            if (!test_runs_long() && begin.size() > 100 && layout % 2) continue;
            decode_trial t;
            t.layout = (enum gemm_weight_layout)layout, t.begin = begin, t.n_x_rows = 6,
            t.n_rows = (size_t)begin.back() + 2, t.n_out = 70, t.n_in = 384,
            t.epilogue = begin.size() > 4 ? silu_epilogue_for(layout) : GEMM_STORE;
            for (size_t i = 0; i < t.n_rows; i++) t.x_rows.push_back((int32_t)(i * 5 % t.n_x_rows));
            check_groups(t, begin.back() != 21);
        }
}

/* One row of x, whose experts have a slot each, or several; up to 128 groups, and more. */
TEST(decode_groups_of_one_row_have_the_bits_of_the_kernel_for_more_rows)
{
    need_gpu();
    std::vector<int32_t> many = { 0 };
    for (int i = 0; i < 128; i++) many.push_back(many.back() + (i % 18 == 5));
    std::vector<int32_t> more = many;
    more.push_back(more.back() + 1);
    for (int layout = GEMM_BF16; layout < GEMM_WEIGHT_LAYOUTS; layout++)
        for (const std::vector<int32_t> &begin :
             { std::vector<int32_t>{ 0, 1, 1, 4, 9 }, many, more, std::vector<int32_t>{ 0, 0 } }) {
            if (!test_runs_long() && begin.size() == 129 + (size_t)layout % 2) continue;
            decode_trial t;
            t.layout = (enum gemm_weight_layout)layout, t.begin = begin, t.n_x_rows = 1;
            t.n_rows = (size_t)begin.back() + 1, t.n_out = 1030,
            t.n_in = begin.size() > 9 ? 256 : 1152;
            if (TEST_IS_SANITIZED) t.n_out = 70;
            t.epilogue = begin.size() > 9 ? silu_epilogue_for(layout) : GEMM_STORE;
            t.norm = true;
            t.x_rows.assign(t.n_rows, 0);
            check_groups(t, true);
        }
}

/* ---- with the sums of the choices ---- */

/* Slots of rows: every row has n_used slots anywhere. */
struct choices {
    size_t n_rows, n_used;
    std::vector<int32_t> index;
    std::vector<float> weights, y;
};

static choices some_choices(const decode_trial &t, size_t n_rows)
{
    numbers from = { 11 };
    choices c = { n_rows, t.n_rows / n_rows, {}, {}, {} };
    for (size_t i = 0; i < n_rows * c.n_used; i++)
        c.index.push_back((int32_t)(i * 7 % (n_rows * c.n_used)));
    c.weights = some_floats(n_rows * c.n_used, &from);
    c.y = some_floats(n_rows * (t.n_out + 3), &from);
    return c;
}

static std::vector<float> run_combined(const decode_memory &m, const choices &c, bool read)
{
    device_bytes index(c.index), weights(c.weights), y(c.y);
    struct gemm g = product_of(m, PREPARED);
    const struct gemm_choices to = { (const int32_t *)index.p,
                                     (const float *)weights.p,
                                     (int32_t)c.n_rows,
                                     (int32_t)c.n_used,
                                     (float *)y.p,
                                     m.t.n_out + 3,
                                     true };
    g.bias = nullptr, g.n_x_rows = g.n_rows, g.begin_is_read = read;
    CHECK(gemm_can_combine(&g, &to));
    GOOD(gemm_run_combined(nullptr, &g, &to));
    GOOD(cudaDeviceSynchronize());
    std::vector<float> got(c.y.size());
    GOOD(cudaMemcpy(got.data(), y.p, got.size() * 4, cudaMemcpyDeviceToHost));
    return got;
}

/* Sums in f32 of n_in terms, and one rounding per choice. */
static void check_element(const decode_trial &t, const choices &c,
                          const std::vector<reference_matrix> &w, const std::vector<double> &x,
                          size_t row, size_t column, float got)
{
    double want = c.y[row * (t.n_out + 3) + column], may_err = 0x1p-22 * fabs(want) + 1e-30;
    for (size_t j = 0; j < c.n_used; j++) {
        const size_t choice = row * c.n_used + j, slot = (size_t)c.index[choice];
        size_t group = 0;
        while ((size_t)t.begin[group + 1] <= slot) group++;
        const reference_sum s = reference_dot(w[group], t.n_in, column, &x[slot * t.n_in]);
        want += (double)c.weights[choice] * s.value;
        may_err += fabs((double)c.weights[choice]) *
                   (((double)t.n_in + 8) * 0x1p-24 * s.magnitude + 0x1p-22 * fabs(s.value));
        may_err += 0x1p-23 * fabs(want);
    }
    if (!(fabs(got - want) <= may_err))
        test_fail(__FILE__, __LINE__,
                  "layout %d, %zu rows, %zu x %zu: y[%zu][%zu] is %.9g, not %.9g +- %.3g", t.layout,
                  c.n_rows, t.n_out, t.n_in, row, column, (double)got, want, may_err);
}

static void check_combined(const decode_trial &t, size_t n_rows)
{
    const choices c = some_choices(t, n_rows);
    decode_memory *m = make(t);
    prepare(*m);
    numbers from = { 7 + (uint64_t)t.layout }; /* as `matrices` has it */
    std::vector<reference_matrix> w;
    for (size_t g = 0; g + 1 < t.begin.size(); g++)
        w.push_back(reference_pack(t.layout, false, t.n_out, t.n_in, &from));
    std::vector<uint16_t> bits(t.n_rows * t.n_in);
    GOOD(cudaMemcpy(bits.data(), m->ready.p, bits.size() * 2, cudaMemcpyDeviceToHost));
    std::vector<double> x;
    for (uint16_t b : bits) x.push_back(float_of(gemm_x_type(t.layout), b));
    const std::vector<float> got = run_combined(*m, c, false);
    for (size_t row = 0; row < n_rows; row++)
        for (size_t i = 0; i < t.n_out + 3; i++) {
            const size_t at = row * (t.n_out + 3) + i;
            if (i < t.n_out) check_element(t, c, w, x, row, i, got[at]);
            else CHECK(got[at] == c.y[at]); /* beside the row */
        }
    const std::vector<float> again = run_combined(*m, c, true);
    CHECK(memcmp(got.data(), again.data(), got.size() * 4) == 0);
    delete m;
}

/* One and several rows, groups without rows and with more than 8, more groups than warps, more
 * tiles than blocks. */
TEST(decode_combined_equals_a_plain_loop)
{
    need_gpu();
    for (int layout = GEMM_BF16; layout < GEMM_WEIGHT_LAYOUTS; layout++) {
        decode_trial t;
        t.layout = (enum gemm_weight_layout)layout;
        t.begin = { 0, 0, 1, 1, 2, 3, 3 }, t.n_rows = t.n_x_rows = 3, t.n_out = 300, t.n_in = 256;
        check_combined(t, 1);
        t.begin = { 0, 3, 3, 4, 7, 8 }, t.n_rows = t.n_x_rows = 8, t.n_out = 2066, t.n_in = 1152;
        if (TEST_IS_SANITIZED) t.n_out = 300;
        check_combined(t, 1);
        t.begin = { 0, 11, 12, 12, 24 }, t.n_rows = t.n_x_rows = 24, t.n_out = 41, t.n_in = 640;
        check_combined(t, 8);
        t.begin = { 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 }, t.n_rows = t.n_x_rows = 12,
        t.n_out = 16, t.n_in = 128;
        check_combined(t, 3);
    }
}

TEST(decode_keeps_nan_of_f8)
{
    need_gpu();
    decode_trial t;
    t.layout = GEMM_F8, t.nan = true, t.n_out = 20, t.n_in = 1280;
    for (size_t n_rows = 1; n_rows <= 2; n_rows++) {
        t.n_rows = t.n_x_rows = n_rows;
        decode_memory *m = make(t);
        const std::vector<unsigned char> y = result(*m, product_of(*m, F32));
        for (size_t i = 0; i < t.n_rows * t.n_out; i++) {
            float v;
            memcpy(&v, &y[4 * (i / t.n_out * y_stride_of(t) + i % t.n_out)], 4);
            CHECK(isnan(v) == (i % t.n_out == 5));
        }
        delete m;
    }
}

TEST(decode_refuses_f32_rows_that_no_kernel_takes)
{
    need_gpu();
    decode_trial t;
    decode_memory *m = make(t);
    struct gemm g = product_of(*m, F32);
    g.n_in = 100;
    CHECK(!gemm_takes_f32_x(&g) && gemm_run(nullptr, &g) == cudaErrorInvalidValue);
    g.n_in = 128, g.deterministic = true;
    CHECK(!gemm_takes_f32_x(&g) && gemm_run(nullptr, &g) == cudaErrorInvalidValue);
    delete m;
}

TEST_MAIN(CASE_T(decode_rows_have_the_bits_of_more_rows, 250),
          CASE_T(decode_groups_have_the_bits_of_the_kernel_for_more_rows, 250),
          CASE_T(decode_groups_of_one_row_have_the_bits_of_the_kernel_for_more_rows, 250),
          CASE_T(decode_combined_equals_a_plain_loop, 250), CASE(decode_keeps_nan_of_f8),
          CASE(decode_refuses_f32_rows_that_no_kernel_takes))
