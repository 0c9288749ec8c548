/* test_gemm.cc - products on a GPU, against plain loops in double over the same rounded numbers.
 *
 * Runs on a GPU or on tests/simt. Guards around every row of y show a kernel that writes beside it.
 */
#include <math.h>
#include <string.h>

#include "tests/cuda/device_case.h"
#include "tests/cuda/gemm_reference.h"

static const enum gemm_epilogue THENS[] = { GEMM_STORE, GEMM_ADD, GEMM_SILU, GEMM_SILU_BF16,
                                            GEMM_SILU_F16 };

/* The SwiGLU epilogue for two interleaved matrices of a layout. */
static enum gemm_epilogue silu_epilogue_for(enum gemm_weight_layout layout)
{
    return layout == GEMM_F16 ? GEMM_SILU_F16 : GEMM_SILU_BF16;
}

static size_t filled(size_t n) { return (n + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP; }

/* ---- one product ---- */

struct product {
    enum gemm_weight_layout layout = GEMM_BF16;
    enum gemm_epilogue epilogue = GEMM_STORE;
    bool paired = false, bias = false, gathered = false, deterministic = false, scratch = false;
    size_t n_rows = 1, n_out = 1, n_in = 1;
    bool tight = false;          /* rows of f32 follow each other without a gap */
    size_t each = 1;             /* groups that all have every row; `begin` is not used */
    std::vector<int32_t> groups; /* rows of each group; if empty, `begin` is not used */
    bool is_silu() const { return gemm_is_silu(epilogue); }
    bool is_ready() const { return gemm_outputs_16(epilogue); }
    enum dtype x_type() const { return gemm_x_type(layout); }
    enum dtype y_type() const
    {
        return epilogue == GEMM_SILU_F16 ? DTYPE_F16 : is_ready() ? DTYPE_BF16 : DTYPE_F32;
    }
};

/* The numbers of a product and its results. */
struct trial {
    product p;
    std::vector<reference_matrix> w;
    std::vector<double> x; /* [rows of x][each][n_in] */
    std::vector<int32_t> x_rows, begin;
    std::vector<float> bias;
    std::vector<unsigned char> x_bytes, y_before, y;
    /* y_bytes: bytes of an element of y; n_y: elements of a row */
    size_t n_x_rows, x_stride, x_group, y_stride, y_group, n_y, y_bytes;
};

enum { FIRST_ROW = 3, GUARD_ROWS = 2 };

static void make_x(trial *t, numbers *from)
{
    const product &p = t->p;
    const bool f32 = p.layout == GEMM_F32;
    /* exactly the rows that are needed, so that reading beyond them is found */
    t->n_x_rows = p.n_rows + (p.groups.empty() ? 0 : FIRST_ROW) + (p.gathered ? 5 : 0);
    t->x_group = p.tight ? p.n_in : f32 ? p.n_in + 1 : filled(p.n_in) + 8;
    t->x_stride = p.tight ? p.n_in
                  : f32   ? p.each * t->x_group + 2
                          : filled(p.each * t->x_group) + GEMM_STEP;
    t->x_bytes.assign(t->n_x_rows * t->x_stride * (f32 ? 4 : 2), 0xff); /* NaN behind the rows */
    t->x.resize(t->n_x_rows * p.each * p.n_in);
    for (size_t i = 0; i < t->n_x_rows * p.each; i++)
        for (size_t k = 0; k < (f32 ? p.n_in : filled(p.n_in)); k++) {
            const float v = k < p.n_in ? (float)from->next() : 0;
            const uint16_t bits = bits_of(p.x_type(), v);
            const size_t at = i / p.each * t->x_stride + i % p.each * t->x_group + k;
            if (f32) memcpy(&t->x_bytes[at * 4], &v, 4);
            else memcpy(&t->x_bytes[at * 2], &bits, 2);
            if (k < p.n_in) t->x[i * p.n_in + k] = f32 ? v : float_of(p.x_type(), bits);
        }
}

static void make_y(trial *t, numbers *from)
{
    const product &p = t->p;
    t->n_y = p.is_ready() ? filled(p.n_out / 2) : p.is_silu() ? p.n_out / 2 : p.n_out;
    t->y_bytes = p.is_ready() ? 2 : 4;
    t->y_group = t->n_y + 3;
    t->y_stride = (p.each - 1) * t->y_group + t->n_y + (p.is_ready() ? 8 : 5);
    t->y_before.assign((p.n_rows + FIRST_ROW + GUARD_ROWS) * t->y_stride * t->y_bytes, GUARD);
    if (p.epilogue != GEMM_ADD) return;
    for (size_t i = 0; i < t->y_before.size() / 4; i++) {
        const float v = (float)from->next();
        memcpy(&t->y_before[4 * i], &v, 4);
    }
}

static trial make_trial(const product &p, uint64_t seed)
{
    trial t;
    numbers from = { seed };
    t.p = p;
    const size_t n_groups = p.groups.empty() ? p.each : p.groups.size();
    for (size_t g = 0; g < n_groups; g++)
        t.w.push_back(reference_pack(p.layout, p.paired, p.n_out, p.n_in, &from));
    make_x(&t, &from);
    make_y(&t, &from);
    for (size_t i = 0; p.gathered && i < p.n_rows + FIRST_ROW; i++)
        t.x_rows.push_back((int32_t)((i * 7 + 2) % t.n_x_rows));
    for (size_t i = 0; p.bias && i < p.n_out; i++) t.bias.push_back((float)from.next());
    int32_t at = FIRST_ROW;
    for (size_t g = 0; g < p.groups.size(); at += p.groups[g++]) t.begin.push_back(at);
    if (!p.groups.empty()) t.begin.push_back(at);
    return t;
}

/* The scratch for all calls of a case, zeroed once. */
static void *scratch_of_case(void)
{
    static device_bytes all{ std::vector<unsigned char>(gemm_scratch_bytes()) };
    return all.p;
}

/* Checks that the counters at the beginning of scratch are zero again, as the next call needs. */
static void check_counters(const void *scratch)
{
    std::vector<unsigned char> counters(3 * 1024);
    GOOD(cudaMemcpy(counters.data(), scratch, counters.size(), cudaMemcpyDeviceToHost));
    for (unsigned char byte : counters) CHECK_EQ_INT(byte, 0);
}

/* With groups, the rows of y begin at FIRST_ROW, and n_rows is larger than their number. */
static void run_trial(trial *t)
{
    const product &p = t->p;
    std::vector<unsigned char> all;
    for (const reference_matrix &w : t->w) all.insert(all.end(), w.bytes.begin(), w.bytes.end());
    device_bytes w(all), x(t->x_bytes), x_rows(t->x_rows), begin(t->begin), bias(t->bias),
        y(t->y_before);
    struct gemm g = {};
    g.layout = p.layout, g.paired = p.paired, g.n_out = p.n_out, g.n_in = p.n_in,
    g.epilogue = p.epilogue, g.deterministic = p.deterministic;
    g.w = w.p, g.w_stride = t->w[0].bytes.size(), g.n_groups = (int32_t)t->w.size();
    g.begin = t->begin.empty() ? nullptr : (const int32_t *)begin.p;
    g.n_rows = p.n_rows;
    g.x = x.p, g.x_stride = t->x_stride;
    if (p.groups.empty()) g.x_group = t->x_group, g.y_group = t->y_group;
    g.x_rows = p.gathered ? (const int32_t *)x_rows.p : nullptr;
    g.bias = p.bias ? (const float *)bias.p : nullptr;
    g.y = y.p, g.y_stride = t->y_stride;
    g.scratch = p.scratch ? scratch_of_case() : nullptr;
    GOOD(gemm_run(nullptr, &g));
    GOOD(cudaDeviceSynchronize());
    if (p.scratch) check_counters(g.scratch);
    t->y.resize(t->y_before.size());
    GOOD(cudaMemcpy(t->y.data(), y.p, t->y.size(), cudaMemcpyDeviceToHost));
}

/* ---- what it should be ---- */

struct expected {
    double value, may_err;
};

static expected expected_sum(const trial &t, size_t group, size_t row, size_t column)
{
    const product &p = t.p;
    const size_t x_row = p.gathered ? (size_t)t.x_rows[row] : row;
    const reference_sum s = reference_dot(
        t.w[group], p.n_in, column, &t.x[(x_row * p.each + (p.each > 1 ? group : 0)) * p.n_in]);
    double bias = 0;
    if (p.bias) bias = t.bias[p.paired ? column / 2 + column % 2 * (p.n_out / 2) : column];
    const double roundings = ((double)p.n_in + 8) * 0x1p-24; /* of sums in f32 */
    return { s.value + bias, roundings * s.magnitude + 0x1p-22 * fabs(bias) };
}

/* silu' is at most 1.1 and |silu(x)| at most |x|. The steps of f16 are at least 2^-24, and its
 * largest number is 65504. */
static expected expected_silu(const expected &gate, const expected &up, enum dtype type)
{
    const double silu = gate.value / (1 + exp(-gate.value)), value = silu * up.value;
    const double rounding = type == DTYPE_BF16  ? 0x1p-8
                            : type == DTYPE_F16 ? 0x1p-11
                                                : 0x1p-20,
                 least = type == DTYPE_F16 ? 0x1p-25 : 1e-30;
    const double may_err = 1.1 * gate.may_err * (fabs(up.value) + up.may_err) +
                           fabs(silu) * up.may_err + fabs(value) * rounding + least;
    return { type == DTYPE_F16 ? fmin(fmax(value, -65504), 65504) : value, may_err };
}

static double read_y(const trial &t, const std::vector<unsigned char> &from, size_t row, size_t i)
{
    float v;
    uint16_t bits;
    if (t.y_bytes == 2) {
        memcpy(&bits, &from[(row * t.y_stride + i) * 2], 2);
        return float_of(t.p.y_type(), bits);
    }
    memcpy(&v, &from[(row * t.y_stride + i) * 4], 4);
    return v;
}

static void fail_at(const trial &t, size_t row, size_t i, double got, const expected &want)
{
    const product &p = t.p;
    test_fail(__FILE__, __LINE__,
              "layout %d epilogue %d paired %d bias %d gathered %d deterministic %d scratch %d "
              "groups %zu each %zu, %zu rows of %zu x %zu: y[%zu][%zu] is %.9g, "
              "not %.9g +- %.3g",
              p.layout, p.epilogue, p.paired, p.bias, p.gathered, p.deterministic, p.scratch,
              p.groups.size(), p.each, p.n_rows, p.n_out, p.n_in, row, i, got, want.value,
              want.may_err);
}

/* The position in a row of y at which a group's columns begin. */
static size_t column_in_y(const trial &t, size_t group, size_t i)
{
    return i + (t.p.each > 1 ? group * t.y_group : 0);
}

static expected expected_y(const trial &t, size_t group, size_t row, size_t i)
{
    const product &p = t.p;
    if (p.is_silu()) {
        if (i >= p.n_out / 2) return { 0, 0 };
        return expected_silu(expected_sum(t, group, row, 2 * i),
                             expected_sum(t, group, row, 2 * i + 1), p.y_type());
    }
    expected e = expected_sum(t, group, row, i);
    if (p.epilogue == GEMM_ADD)
        e.value += read_y(t, t.y_before, row, column_in_y(t, group, i)),
            e.may_err += 0x1p-22 * (fabs(e.value) + 1);
    return e;
}

/* Checks rows begin .. begin + n of a group and marks in `written` which bytes of y are results. */
static void check_rows(const trial &t, size_t group, size_t begin, size_t n,
                       std::vector<bool> *written)
{
    for (size_t row = begin; row < begin + n; row++)
        for (size_t i = 0; i < t.n_y; i++) {
            const size_t column = column_in_y(t, group, i);
            const expected want = expected_y(t, group, row, i);
            const double got = read_y(t, t.y, row, column);
            if (!(fabs(got - want.value) <= want.may_err)) fail_at(t, row, column, got, want);
            for (size_t b = 0; b < t.y_bytes; b++)
                (*written)[(row * t.y_stride + column) * t.y_bytes + b] = true;
        }
}

static void check_trial(const trial &t)
{
    std::vector<bool> written(t.y.size(), false);
    for (size_t g = 0; t.begin.empty() && g < t.p.each; g++)
        check_rows(t, g, 0, t.p.n_rows, &written);
    for (size_t g = 0; g + 1 < t.begin.size(); g++)
        check_rows(t, g, (size_t)t.begin[g], (size_t)(t.begin[g + 1] - t.begin[g]), &written);
    for (size_t i = 0; i < t.y.size(); i++)
        if (!written[i] && t.y[i] != t.y_before[i]) {
            const size_t at = i / t.y_bytes;
            fail_at(t, at / t.y_stride, at % t.y_stride, t.y[i], { (double)t.y_before[i], 0 });
        }
}

static trial try_product(const product &p, uint64_t seed = 1)
{
    trial t = make_trial(p, seed);
    run_trial(&t);
    check_trial(t);
    return t;
}

/* ---- cases ---- */

/* Tries every epilogue of the layout. */
static void try_thens(product p)
{
    for (enum gemm_epilogue epilogue : THENS)
        for (int paired = 0; paired < 2; paired++)
            for (int bias = 0; bias < 2; bias++) {
                p.epilogue = epilogue, p.paired = paired, p.bias = bias;
                if (p.is_silu() && !paired) continue;
                if (paired && p.n_out % 2) continue;
                try_product(p, p.n_rows + 100 * p.n_in);
            }
}

static const size_t SIZES[][2] = { { 1, 1 }, { 2, 63 }, { 37, 65 }, { 70, 200 } }; /* n_out, n_in */

static void try_layout(enum gemm_weight_layout layout)
{
    for (const auto &size : SIZES)
        for (size_t n_rows : { 0, 1, 2, 3, 8, 9, 17, 70, 130 }) {
            if (TEST_IS_SANITIZED && n_rows > 17 && size[0] < 70) continue;
            product p;
            p.layout = layout, p.n_out = size[0], p.n_in = size[1], p.n_rows = n_rows,
            p.scratch = n_rows % 2;
            try_thens(p);
            p.deterministic = true, p.gathered = true;
            if (n_rows < 10) try_thens(p);
        }
}

TEST(gemm_f32_equals_a_plain_loop) { need_gpu(), try_layout(GEMM_F32); }
TEST(gemm_bf16_equals_a_plain_loop) { need_gpu(), try_layout(GEMM_BF16); }
TEST(gemm_f16_equals_a_plain_loop) { need_gpu(), try_layout(GEMM_F16); }
TEST(gemm_w8_equals_a_plain_loop) { need_gpu(), try_layout(GEMM_W8); }
TEST(gemm_w4_equals_a_plain_loop) { need_gpu(), try_layout(GEMM_W4); }
TEST(gemm_f8_equals_a_plain_loop) { need_gpu(), try_layout(GEMM_F8); }

/* More tiles of rows than run at the same time. */
TEST(gemm_many_rows)
{
    need_gpu();
    for (enum gemm_weight_layout layout : { GEMM_F32, GEMM_BF16, GEMM_F16, GEMM_W4 }) {
        product p;
        p.layout = layout, p.n_rows = 600, p.n_out = 75, p.n_in = 70, p.epilogue = GEMM_ADD;
        try_product(p);
    }
}

/* Several rounds of the pipelines, work for all warps, several blocks of scales. */
TEST(gemm_long_rows_and_many_columns)
{
    need_gpu();
    for (int layout = 0; layout < GEMM_WEIGHT_LAYOUTS; layout++)
        for (size_t n_rows : { 1, 13, 20 }) {
            product p;
            p.layout = (enum gemm_weight_layout)layout, p.n_rows = n_rows, p.bias = true;
            p.n_out = 18, p.n_in = 4300;
            try_product(p);
            p.n_out = 530, p.n_in = 330;
            try_product(p);
            p.paired = true, p.epilogue = silu_epilogue_for(p.layout);
            try_product(p);
        }
}

/* More than a ring of stages for layouts that have their own main loop. */
static size_t wide_n_in(enum gemm_weight_layout layout)
{
    return TEST_IS_SANITIZED && (layout == GEMM_F32 || layout == GEMM_W8 || layout == GEMM_W4)
               ? 70
               : 150;
}

/* Every tile shape: the larger ones are used when there is work for all SMs. */
TEST(gemm_wide_matrices)
{
    need_gpu();
    /* rows, n_out */
    static const size_t shapes[][2] = { { 130, 8200 }, { 70, 16390 }, { 40, 8200 } };
    for (int layout = 0; layout < GEMM_WEIGHT_LAYOUTS; layout++)
        for (const auto &shape : shapes) {
            if (TEST_IS_SANITIZED && shape[1] > 8200) continue;
            product p;
            p.layout = (enum gemm_weight_layout)layout, p.n_rows = shape[0], p.n_out = shape[1],
            p.n_in = wide_n_in(p.layout), p.paired = true, p.bias = true;
            p.epilogue = layout == GEMM_F16 || layout % 2 ? silu_epilogue_for(p.layout) : GEMM_ADD;
            try_product(p);
        }
}

/* Groups with 0 to many rows, more groups than a warp counts at a time, beginning in the middle of
 * y; n_rows is larger than the number of rows. */
TEST(gemm_groups)
{
    need_gpu();
    std::vector<std::vector<int32_t>> lists = {
        { 0, 5, 0, 0, 33, 1, 17, 0 }, { 0, 0 }, { 16 }, { 40, 3 }, {}
    };
    for (int i = 0; i < 140; i++)
        lists.back().push_back(i % 29 == 0 ? 3 : i == 130 ? 35 : i % 7 == 0);
    for (const auto &list : lists)
        for (int layout = 0; layout < GEMM_WEIGHT_LAYOUTS; layout++)
            for (int deterministic = 0; deterministic < 2; deterministic++) {
                product p;
                p.layout = (enum gemm_weight_layout)layout, p.groups = list,
                p.deterministic = deterministic, p.gathered = layout % 2 == deterministic,
                p.n_out = 42, p.n_in = 140;
                p.n_rows = 4;
                for (int32_t n : list) p.n_rows += (size_t)n;
                p.paired = true, p.bias = true,
                p.epilogue = list.size() % 2 ? GEMM_STORE : silu_epilogue_for(p.layout);
                try_product(p);
            }
}

/* Groups of dozens of rows at most, with enough tiles for blocks that stay for several: tiles that
 * are not full, groups of two tiles, empty ones, more and fewer stages than are in flight. */
TEST(gemm_groups_of_dozens_of_rows)
{
    need_gpu();
    const std::vector<int32_t> rows = { 4, 0, 33, 1, 17, 0, 0, 9, 32, 2, 0, 21 };
    for (int layout = GEMM_BF16; layout < GEMM_WEIGHT_LAYOUTS; layout++)
        for (size_t n_in : { 60, 140, 700 })
            for (int i = 0; i < 4; i++) {
                product p;
                p.layout = (enum gemm_weight_layout)layout, p.groups = rows;
                p.n_out = 300, p.n_in = n_in, p.gathered = i % 2, p.bias = i < 2;
                p.n_rows = 3;
                for (int32_t n : rows) p.n_rows += (size_t)n;
                p.paired = i > 1;
                p.epilogue = i == 0   ? GEMM_STORE
                             : i == 1 ? GEMM_ADD
                             : i == 2 ? GEMM_SILU
                                      : silu_epilogue_for(p.layout);
                try_product(p);
            }
}

/* The same call gives the same bits, whichever of its blocks finishes last: every other launch runs
 * them in a different order. */
static void check_again(const trial &t)
{
    trial again = t;
    run_trial(&again);
    CHECK(again.y == t.y);
}

/* Every group has all rows, like the heads of MLA. */
TEST(gemm_groups_of_all_rows)
{
    need_gpu();
    for (int layout = 0; layout < GEMM_WEIGHT_LAYOUTS; layout++)
        for (size_t n_rows : { 1, 9, 16, 17, 70 })
            for (int deterministic = 0; deterministic < 2; deterministic++) {
                product p;
                p.layout = (enum gemm_weight_layout)layout, p.n_rows = n_rows, p.each = 3,
                p.n_out = 70, p.n_in = 136, p.deterministic = deterministic;
                p.gathered = n_rows % 2, p.epilogue = deterministic ? GEMM_ADD : GEMM_STORE;
                try_product(p);
                p.paired = true, p.bias = true,
                p.epilogue = deterministic ? silu_epilogue_for(p.layout) : GEMM_SILU;
                try_product(p);
            }
}

/* Checks that row `row` of t computed alone has the same bits. */
static void check_alone(const trial &t, size_t row)
{
    trial one = t;
    one.p.n_rows = 1;
    one.p.gathered = true;
    one.x_rows = { t.p.gathered ? t.x_rows[row] : (int32_t)row };
    one.y_before.resize(t.y_stride * t.y_bytes);
    memcpy(one.y_before.data(), &t.y_before[row * t.y_stride * t.y_bytes], one.y_before.size());
    run_trial(&one);
    if (memcmp(one.y.data(), &t.y[row * t.y_stride * t.y_bytes], one.y.size()) != 0)
        test_fail(__FILE__, __LINE__, "layout %d, epilogue %d: row %zu of %zu has other bits alone",
                  t.p.layout, t.p.epilogue, row, t.p.n_rows);
}

TEST(gemm_rows_have_the_same_bits_alone)
{
    need_gpu();
    for (int layout = 0; layout < GEMM_WEIGHT_LAYOUTS; layout++)
        for (size_t n_rows : { 2, 9, 16, 21, 130 }) {
            product p;
            p.layout = (enum gemm_weight_layout)layout, p.n_rows = n_rows, p.n_in = 1200,
            p.n_out = 40, p.deterministic = n_rows > 16, p.bias = true;
            p.scratch = layout % 2, p.n_in = 1200 + (p.scratch ? 1200 : 0);
            if (n_rows == 130) p.n_in = wide_n_in(p.layout), p.n_out = 8300;
            const trial t = try_product(p);
            for (size_t row : { (size_t)0, n_rows / 2, n_rows - 1 }) check_alone(t, row);
        }
}

/* Split-k of narrow matrices, whose last slice is whole or not. Every shape runs twice, because the
 * counters have to be zero again. */
TEST(gemm_slices)
{
    need_gpu();
    static const size_t shapes[][2] = { { 18, 2100 }, { 130, 4224 } }; /* n_out, n_in */
    for (int layout = GEMM_BF16; layout < GEMM_WEIGHT_LAYOUTS; layout++)
        for (const auto &shape : shapes)
            for (size_t n_rows : { 1, 11, 16, 17, 33, 65 }) {
                if (n_rows > 33 && (shape[0] > 18 || !gemm_is_16((enum gemm_weight_layout)layout)))
                    continue;
                product p;
                p.layout = (enum gemm_weight_layout)layout, p.n_rows = n_rows, p.n_out = shape[0],
                p.n_in = shape[1], p.scratch = true, p.bias = true;
                p.paired = n_rows % 2,
                p.epilogue = n_rows % 2 ? silu_epilogue_for(p.layout) : GEMM_ADD,
                p.gathered = n_rows == 11;
                const trial t = try_product(p);
                if (n_rows == 16 || n_rows == 33) check_again(t);
            }
}

/* Split-k sums a batch of 17 to 64 rows in the same order in every tile shape. */
TEST(gemm_batches_have_the_same_bits)
{
    need_gpu();
    for (int layout = GEMM_BF16; layout < GEMM_WEIGHT_LAYOUTS; layout++) {
        product p;
        p.layout = (enum gemm_weight_layout)layout, p.n_rows = 60, p.n_out = 140, p.n_in = 1700,
        p.scratch = true;
        const trial t = try_product(p);
        trial fewer = t;
        fewer.p.n_rows = 20;
        fewer.y_before.resize(20 * t.y_stride * t.y_bytes);
        run_trial(&fewer);
        CHECK(memcmp(fewer.y.data(), t.y.data(), fewer.y.size()) == 0);
    }
}

/* F32 splits k in one of two ways, depending on the matrix, each with three tile shapes, and one has
 * a kernel through shared memory. The bits of a row do not depend on any of these. */
TEST(gemm_f32_rows_have_the_same_bits_alone)
{
    need_gpu();
    static const size_t shapes[][3] = {
        { 3, 512, 1100 }, { 9, 70, 1030 }, { 300, 112, 1030 },
        { 3, 514, 300 },  { 9, 70, 96 },   { 600, 800, 70 }
    }; /* rows, n_out, n_in */
    for (const auto &shape : shapes)
        for (int aligned = 0; aligned < 2; aligned++) {
            /* long shapes run either aligned or not, to save time */
            if (shape[0] > 100 && aligned == (shape[1] > 512)) continue;
            product p;
            p.layout = GEMM_F32, p.n_rows = shape[0], p.n_out = shape[1], p.bias = true;
            p.n_in = shape[2] / 4 * 4 + (aligned ? 1 : 2); /* rows of x are n_in + 3 apart */
            const trial t = try_product(p);
            for (size_t row : { (size_t)0, p.n_rows / 2, p.n_rows - 1 }) check_alone(t, row);
        }
}

/* Many rows of a narrow matrix, as of a router, through shared memory: ends in the middle of tiles
 * and of a step, gathered rows, and groups; and enough rows for wide tiles. */
TEST(gemm_f32_staged_rows_have_the_same_bits_alone)
{
    need_gpu();
    for (int i = 0; i < 2; i++) {
        product p;
        p.layout = GEMM_F32, p.n_rows = 64 * 19 + 3, p.n_out = 50, p.n_in = i ? 1033 : 1029;
        p.bias = true, p.gathered = i == 1;
        if (i == 1) p.groups = { 700, 0, 1, 518 };
        const trial t = try_product(p);
        for (size_t row : { (size_t)0, (size_t)70, (size_t)699, p.n_rows - 1 }) {
            trial one = t;
            one.w = { t.w[i == 0 || row < 700 ? 0 : 3] };
            one.begin.clear();
            check_alone(one, (i == 1 ? FIRST_ROW : 0) + row);
        }
    }
}

TEST(gemm_f32_staged_wide_rows_have_the_same_bits_alone)
{
    need_gpu();
    product p;
    p.layout = GEMM_F32, p.n_rows = 64 * 95 + 5, p.n_out = 64, p.n_in = 1056, p.tight = true;
    const trial t = try_product(p);
    for (size_t row : { (size_t)0, (size_t)71, p.n_rows - 1 }) check_alone(t, row);
}

/* The rows of a group have the bits that a call for its matrix alone gives. */
TEST(gemm_deterministic_groups_have_the_bits_of_single_products)
{
    need_gpu();
    for (int layout = 0; layout < GEMM_WEIGHT_LAYOUTS; layout++) {
        product p;
        p.layout = (enum gemm_weight_layout)layout, p.groups = { 0, 30, 1, 4 }, p.n_rows = 35,
        p.n_out = 50, p.n_in = 300, p.deterministic = true;
        const trial t = try_product(p);
        for (size_t g = 1; g < p.groups.size(); g++) {
            trial one = t;
            one.w = { t.w[g] };
            one.begin.clear();
            check_alone(one, (size_t)t.begin[g]);
        }
    }
}

/* Sets element k of row `row` of x, of any type. */
static void set_x(trial *t, size_t row, size_t k, float v)
{
    const uint16_t bits = isnan(v) ? 0xffff : bits_of(t->p.x_type(), v);
    if (t->p.layout == GEMM_F32) memcpy(&t->x_bytes[(row * t->x_stride + k) * 4], &v, 4);
    else memcpy(&t->x_bytes[(row * t->x_stride + k) * 2], &bits, 2);
}

/* A NaN or an infinity in a row of x affects that row of y only. */
TEST(gemm_nan_stays_in_its_row)
{
    need_gpu();
    for (int layout = 0; layout < GEMM_WEIGHT_LAYOUTS; layout++)
        for (int how = 0; how < 4; how++) {
            product p;
            p.layout = (enum gemm_weight_layout)layout, p.n_rows = 5, p.n_out = 21, p.n_in = 100,
            p.deterministic = how & 1;
            trial t = make_trial(p, 9);
            set_x(&t, 2, 1, how & 2 ? -INFINITY : NAN);
            run_trial(&t);
            std::vector<bool> written(t.y.size());
            check_rows(t, 0, 0, 2, &written);
            check_rows(t, 0, 3, 2, &written);
            for (size_t i = 0; i < p.n_out; i++)
                CHECK(how & 2 ? !isfinite(read_y(t, t.y, 2, i)) : isnan(read_y(t, t.y, 2, i)));
        }
}

/* e4m3 has one NaN with either sign. Both kernels have to keep both bytes. */
TEST(gemm_f8_keeps_nan)
{
    need_gpu();
    for (int deterministic = 0; deterministic < 2; deterministic++)
        for (size_t k = 0; k < 16; k++) {
            product p;
            p.layout = GEMM_F8, p.n_rows = 2, p.n_out = 20, p.n_in = 100,
            p.deterministic = deterministic;
            trial t = make_trial(p, 11);
            t.w[0].bytes[7 * gemm_row_bytes(GEMM_F8, p.n_in) + k] = k % 2 ? 0xff : 0x7f;
            run_trial(&t);
            for (size_t i = 0; i < p.n_out; i++) CHECK(isnan(read_y(t, t.y, 1, i)) == (i == 7));
        }
}

/* Every byte and nibble that a weight can have, in both kernels: x is 1 in one place, and scales
 * are 1. */
TEST(gemm_every_stored_number)
{
    need_gpu();
    for (enum gemm_weight_layout layout : { GEMM_W8, GEMM_W4, GEMM_F8 })
        for (int deterministic = 0; deterministic < 2; deterministic++) {
            product p;
            p.layout = layout, p.n_rows = 1, p.n_out = 256, p.n_in = 8,
            p.deterministic = deterministic;
            trial t = make_trial(p, 12);
            for (size_t k = 0; k < 8; k++) {
                const uint16_t bits = bf16_of(k == 5 ? 1.0f : 0.0f);
                memcpy(&t.x_bytes[2 * k], &bits, 2);
            }
            std::vector<float> scales(
                (t.w[0].bytes.size() - gemm_scales_at(layout, p.n_out, p.n_in)) / 4, 1.0f);
            memcpy(t.w[0].bytes.data() + gemm_scales_at(layout, p.n_out, p.n_in), scales.data(),
                   scales.size() * 4);
            const size_t row_bytes = gemm_row_bytes(layout, p.n_in);
            for (size_t i = 0; i < 256; i++)
                if (layout != GEMM_F8 || (i & 127) != 127)
                    t.w[0].bytes[i * row_bytes + (layout == GEMM_W4 ? 2 : 5)] = (unsigned char)i;
            run_trial(&t);
            for (size_t i = 0; i < 256; i++) {
                const double want = layout == GEMM_W8   ? (double)(int8_t)i
                                    : layout == GEMM_W4 ? (double)((int)i / 16 - 8)
                                                        : float_of_e4m3((uint8_t)i);
                if (layout != GEMM_F8 || (i & 127) != 127) CHECK(read_y(t, t.y, 0, i) == want);
            }
        }
}

/* Every f16 as a weight, including subnormal numbers, infinities and NaNs: x is 1 in one place. */
TEST(gemm_every_f16)
{
    need_gpu();
    enum { ALL = 1 << 16, K = 5 };
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        product p;
        p.layout = GEMM_F16, p.n_rows = 1, p.n_out = ALL, p.n_in = 8,
        p.deterministic = deterministic;
        trial t = make_trial(p, 12);
        const size_t row_bytes = gemm_row_bytes(GEMM_F16, p.n_in);
        for (size_t k = 0; k < p.n_in; k++) set_x(&t, 0, k, k == K ? 1.0f : 0.0f);
        for (size_t i = 0; i < ALL; i++) {
            const uint16_t bits = (uint16_t)i;
            memcpy(&t.w[0].bytes[i * row_bytes + 2 * K], &bits, 2);
        }
        run_trial(&t);
        for (size_t i = 0; i < ALL; i++) {
            const float want = float_of_f16((uint16_t)i);
            const double got = read_y(t, t.y, 0, i);
            if (isnan(want) ? !isnan(got) : got != (double)want)
                fail_at(t, 0, i, got, { (double)want, 0 });
        }
    }
}

/* Results of SwiGLU beyond the range of f16 become its largest number; infinities and NaNs stay. */
TEST(gemm_silu_stays_finite_in_f16)
{
    need_gpu();
    static const float WEIGHTS[][2] = { { 400, 400 },      { 400, -400 },   { 60000, 60000 },
                                        { 255.875f, 256 }, { INFINITY, 1 }, { INFINITY, -1 },
                                        { NAN, 1 } };
    static const float WANT[] = { 65504, -65504, 65504, 65504, INFINITY, -INFINITY, NAN };
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        product p;
        p.layout = GEMM_F16, p.epilogue = GEMM_SILU_F16, p.paired = true, p.n_rows = 3,
        p.n_out = 14, p.n_in = 8, p.deterministic = deterministic;
        trial t = make_trial(p, 13);
        for (size_t row = 0; row < p.n_rows; row++)
            for (size_t k = 0; k < p.n_in; k++) set_x(&t, row, k, k == 0 ? 1.0f : 0.0f);
        for (size_t i = 0; i < p.n_out; i++) {
            const uint16_t bits = f16_of(WEIGHTS[i / 2][i % 2]);
            memcpy(&t.w[0].bytes[i * gemm_row_bytes(GEMM_F16, p.n_in)], &bits, 2);
        }
        run_trial(&t);
        for (size_t row = 0; row < p.n_rows; row++)
            for (size_t i = 0; i < 7; i++) {
                const double got = read_y(t, t.y, row, i);
                CHECK(isnan(WANT[i]) ? isnan(got) : got == (double)WANT[i]);
            }
    }
}

TEST(gemm_refuses_what_it_cannot_do)
{
    need_gpu();
    struct gemm g = {};
    g.layout = GEMM_BF16, g.n_out = 2, g.n_in = 2, g.n_rows = 1, g.epilogue = GEMM_SILU,
    g.n_groups = 1;
    CHECK(gemm_run(nullptr, &g) != cudaSuccess);
    g.epilogue = GEMM_STORE, g.n_groups = 0;
    CHECK(gemm_run(nullptr, &g) != cudaSuccess);
    g.n_groups = 1, g.n_rows = 0;
    GOOD(gemm_run(nullptr, &g));
}

TEST_MAIN(CASE_T(gemm_f32_equals_a_plain_loop, 250), CASE_T(gemm_bf16_equals_a_plain_loop, 250),
          CASE_T(gemm_f16_equals_a_plain_loop, 250), CASE_T(gemm_w8_equals_a_plain_loop, 250),
          CASE_T(gemm_w4_equals_a_plain_loop, 250), CASE_T(gemm_f8_equals_a_plain_loop, 250),
          CASE_T(gemm_long_rows_and_many_columns, 250), CASE_T(gemm_wide_matrices, 250),
          CASE_T(gemm_groups, 250), CASE_T(gemm_groups_of_dozens_of_rows, 120),
          CASE_T(gemm_groups_of_all_rows, 250), CASE_T(gemm_slices, 250),
          CASE_T(gemm_batches_have_the_same_bits, 250),
          CASE_T(gemm_rows_have_the_same_bits_alone, 250),
          CASE_T(gemm_f32_rows_have_the_same_bits_alone, 250),
          CASE_T(gemm_f32_staged_rows_have_the_same_bits_alone, 250),
          CASE_T(gemm_f32_staged_wide_rows_have_the_same_bits_alone, 250), CASE(gemm_many_rows),
          CASE(gemm_deterministic_groups_have_the_bits_of_single_products),
          CASE(gemm_nan_stays_in_its_row), CASE(gemm_f8_keeps_nan), CASE(gemm_every_stored_number),
          CASE_T(gemm_every_f16, 250), CASE(gemm_silu_stays_finite_in_f16),
          CASE(gemm_refuses_what_it_cannot_do))
