/* test_gemm_sm90.cc - products by the kernels of compute capability 9.0, called directly and
 * through gemm_run, against plain loops in double over the same rounded numbers. Runs on such a GPU
 * or on tests/simt, and is skipped on others. Guards around y must stay as they were. */
#include <math.h>
#include <string.h>

#include "tests/cuda/device_case.h"
#include "tests/cuda/gemm_reference.h"

#ifdef BATON_TESTS_SIMT_CUDA_RUNTIME_H
enum { EMULATED = 1 };
#else
enum { EMULATED = 0 };
#endif

enum { FIRST_ROW = 3, BY_RUN = -1 /* instead of a tile: gemm_run chooses */ };
static const size_t F8_STEP = 128, STEP_16 = GEMM_STEP;
static const enum gemm_weight_layout LAYOUTS[] = { GEMM_BF16, GEMM_F8, GEMM_F16, GEMM_W8, GEMM_W4 };

/* The SwiGLU epilogue for two interleaved matrices of a layout. */
static enum gemm_epilogue silu_epilogue_for(enum gemm_weight_layout layout)
{
    return layout == GEMM_F16 ? GEMM_SILU_F16 : GEMM_SILU_BF16;
}

static size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

struct product {
    enum gemm_weight_layout layout = GEMM_BF16;
    bool paired = false, bias = false, gathered = false;
    enum gemm_epilogue epilogue = GEMM_STORE;
    /* y_more: elements between two rows of y */
    size_t n_rows = 1, n_out = 1, n_in = 1, y_more = 2;
    /* rows of each group; if empty, there is one group and `begin` is not used */
    std::vector<int32_t> groups;
    int tile = GEMM_SM90_NARROW;
    bool f8() const { return layout == GEMM_F8; } /* with x in e4m3 */
    enum dtype x_type() const { return gemm_x_type(layout); }
    enum dtype y_type() const
    {
        return epilogue == GEMM_SILU_F16 ? DTYPE_F16 : y_bytes() == 2 ? DTYPE_BF16 : DTYPE_F32;
    }
    bool is_silu() const { return gemm_is_silu(epilogue); }
    size_t n_y() const
    {
        return gemm_outputs_16(epilogue) ? round_up(n_out / 2, GEMM_STEP)
               : is_silu()               ? n_out / 2
                                         : n_out;
    }
    size_t y_bytes() const
    {
        return gemm_outputs_16(epilogue) || epilogue == GEMM_STORE_BF16 ? 2 : 4;
    }
};

struct trial {
    product p;
    std::vector<reference_matrix> w;
    std::vector<double> x; /* [rows of x][n_in] */
    std::vector<unsigned char> x_bytes, y_before, y;
    std::vector<float> x_scales, bias;
    std::vector<int32_t> x_rows, begin;
    size_t x_stride, y_stride, scales_stride; /* where rows are gathered others lie behind the
                                               * scales of each */
};

/* Writes element k of a row of x and returns its rounded value. */
static double put_x(trial *t, size_t row, size_t k, double number)
{
    if (t->p.f8()) {
        unsigned char bits = (unsigned char)(int)floor((number + 1) * 127.9999);
        if ((bits & 127) == 127) bits--;
        t->x_bytes[row * t->x_stride + k] = bits;
        return (double)float_of_e4m3(bits) *
               (double)t->x_scales[row * t->scales_stride + k / F8_STEP];
    }
    const uint16_t bits = bits_of(t->p.x_type(), (float)number);
    memcpy(&t->x_bytes[(row * t->x_stride + k) * 2], &bits, 2);
    return float_of(t->p.x_type(), bits);
}

static void make_x(trial *t, numbers *from)
{
    const product &p = t->p;
    const size_t n_x_rows = p.n_rows + FIRST_ROW + 5,
                 filled = round_up(p.n_in, p.f8() ? F8_STEP : STEP_16);
    t->x_stride = filled + (p.f8() ? F8_STEP : STEP_16);
    t->scales_stride = round_up(p.n_in, F8_STEP) / F8_STEP + (p.gathered ? 3 : 0);
    t->x_bytes.assign(n_x_rows * t->x_stride * (p.f8() ? 1 : 2), 0xff); /* NaN behind the rows */
    t->x.resize(n_x_rows * p.n_in);
    for (size_t i = 0; p.f8() && i < n_x_rows * t->scales_stride; i++)
        t->x_scales.push_back((float)((1.5 + from->next()) / 64));
    for (size_t row = 0; row < n_x_rows; row++) {
        memset(&t->x_bytes[row * t->x_stride * (p.f8() ? 1 : 2)], 0, filled * (p.f8() ? 1 : 2));
        for (size_t k = 0; k < p.n_in; k++) t->x[row * p.n_in + k] = put_x(t, row, k, from->next());
    }
    for (size_t i = 0; p.gathered && i < p.n_rows + FIRST_ROW; i++)
        t->x_rows.push_back((int32_t)((i * 7 + 2) % n_x_rows));
}

static trial make_trial(const product &p, uint64_t seed)
{
    trial t;
    numbers from = { seed };
    t.p = p;
    for (size_t g = 0; g < (p.groups.empty() ? 1 : p.groups.size()); g++)
        t.w.push_back(reference_pack(p.layout, p.paired, p.n_out, p.n_in, &from));
    make_x(&t, &from);
    for (size_t i = 0; p.bias && i < p.n_out; i++) t.bias.push_back((float)from.next());
    int32_t at = FIRST_ROW;
    for (size_t g = 0; g < p.groups.size(); at += p.groups[g++]) t.begin.push_back(at);
    if (!p.groups.empty()) t.begin.push_back(at);
    t.y_stride = p.n_y() + p.y_more;
    t.y_before.assign((p.n_rows + FIRST_ROW + 2) * t.y_stride * p.y_bytes(), GUARD);
    for (size_t i = 0; p.epilogue == GEMM_ADD && i < t.y_before.size() / 4; i++) {
        const float v = (float)from.next();
        memcpy(&t.y_before[4 * i], &v, 4);
    }
    return t;
}

static void run_trial(trial *t)
{
    const product &p = t->p;
    std::vector<unsigned char> all;
    for (const reference_matrix &w : t->w) all.insert(all.end(), w.bytes.begin(), w.bytes.end());
    device_bytes w(all), x(t->x_bytes), x_scales(t->x_scales), x_rows(t->x_rows), begin(t->begin),
        bias(t->bias), y(t->y_before);
    struct gemm g = {};
    g.layout = p.layout, g.paired = p.paired, g.n_out = p.n_out, g.n_in = p.n_in,
    g.epilogue = p.epilogue;
    g.w = w.p, g.w_stride = t->w[0].bytes.size(), g.n_groups = (int32_t)t->w.size();
    g.begin = p.groups.empty() ? nullptr : (const int32_t *)begin.p;
    g.n_rows = p.n_rows, g.x = x.p, g.x_stride = t->x_stride;
    g.x_scales = p.f8() ? (const float *)x_scales.p : nullptr;
    g.x_scales_stride = p.gathered ? t->scales_stride : 0; /* 0: one behind the other */
    g.x_rows = p.gathered ? (const int32_t *)x_rows.p : nullptr;
    g.bias = p.bias ? (const float *)bias.p : nullptr;
    g.y = y.p, g.y_stride = t->y_stride;
    if (p.tile == BY_RUN) CHECK(gemm_uses_sm90(&g) || p.f8());
    GOOD(p.tile == BY_RUN ? gemm_run(nullptr, &g)
                          : gemm_run_sm90(nullptr, &g, (enum gemm_sm90_tile)p.tile));
    GOOD(cudaDeviceSynchronize());
    t->y.resize(t->y_before.size());
    GOOD(cudaMemcpy(t->y.data(), y.p, t->y.size(), cudaMemcpyDeviceToHost));
}

/* ---- what it should be ---- */

struct expected {
    double value, may_err;
};

/* Tensor cores accumulate products of bf16 in about f32, and those of e4m3 truncated to some 13
 * bits below the largest. */
static expected expected_sum(const trial &t, size_t group, size_t row, size_t column)
{
    const product &p = t.p;
    const reference_sum s = reference_dot(
        t.w[group], p.n_in, column,
        &t.x[(size_t)(p.gathered ? t.x_rows[row] : (int32_t)row) * p.n_in]);
    const double bias = p.bias ? t.bias[p.paired ? column / 2 + column % 2 * (p.n_out / 2) : column]
                               : 0;
    const double roundings = EMULATED ? ((double)p.n_in + 8) * 0x1p-24
                             : p.f8() ? 0x1p-7
                                      : ((double)p.n_in + 8) * 0x1p-22;
    return { s.value + bias, roundings * s.magnitude + 0x1p-22 * fabs(bias) };
}

static expected expected_y(const trial &t, size_t group, size_t row, size_t i,
                           const std::vector<unsigned char> &before)
{
    const product &p = t.p;
    if (!p.is_silu()) {
        expected e = expected_sum(t, group, row, i);
        float on = 0;
        if (p.epilogue == GEMM_ADD) memcpy(&on, &before[(row * t.y_stride + i) * 4], 4);
        if (p.y_bytes() == 2) e.may_err += 0x1p-8 * fabs(e.value) + 1e-30;
        return { e.value + (double)on,
                 e.may_err +
                     (p.epilogue == GEMM_ADD ? 0x1p-22 * (fabs(e.value + (double)on) + 1) : 0) };
    }
    if (i >= p.n_out / 2) return { 0, 0 };
    const expected gate = expected_sum(t, group, row, 2 * i),
                   up = expected_sum(t, group, row, 2 * i + 1);
    /* silu' is at most 1.1 */
    const double silu = gate.value / (1 + exp(-gate.value)), value = silu * up.value;
    const double of_value = p.y_type() == DTYPE_BF16  ? 0x1p-8
                            : p.y_type() == DTYPE_F16 ? 0x1p-11
                                                      : 0x1p-20;
    /* the steps of f16 are at least 2^-24, and its largest number is 65504 */
    const double rounding = fabs(value) * of_value + (p.y_type() == DTYPE_F16 ? 0x1p-25 : 1e-30);
    const double stored = p.y_type() == DTYPE_F16 ? fmin(fmax(value, -65504), 65504) : value;
    return { stored, 1.1 * gate.may_err * (fabs(up.value) + up.may_err) + fabs(silu) * up.may_err +
                         rounding };
}

static double read_y(const trial &t, size_t row, size_t i)
{
    float v;
    uint16_t bits;
    if (t.p.y_bytes() == 2) {
        memcpy(&bits, &t.y[(row * t.y_stride + i) * 2], 2);
        return float_of(t.p.y_type(), bits);
    }
    memcpy(&v, &t.y[(row * t.y_stride + i) * 4], 4);
    return v;
}

static void fail_at(const trial &t, size_t row, size_t i, double got, double want, double may_err)
{
    const product &p = t.p;
    test_fail(__FILE__, __LINE__,
              "layout %d epilogue %d paired %d bias %d gathered %d groups %zu tile %d, %zu rows "
              "of %zu x %zu: y[%zu][%zu] is %.9g, not %.9g +- %.3g",
              p.layout, p.epilogue, p.paired, p.bias, p.gathered, p.groups.size(), p.tile, p.n_rows,
              p.n_out, p.n_in, row, i, got, want, may_err);
}

static void check_rows(trial *t, size_t group, size_t begin, size_t n)
{
    for (size_t row = begin; row < begin + n; row++) {
        for (size_t i = 0; i < t->p.n_y(); i++) {
            const expected want = expected_y(*t, group, row, i, t->y_before);
            const double got = read_y(*t, row, i);
            if (!(fabs(got - want.value) <= want.may_err))
                fail_at(*t, row, i, got, want.value, want.may_err);
        }
        /* resets the bytes that were checked: all the others must be untouched */
        const size_t at = row * t->y_stride * t->p.y_bytes();
        memcpy(&t->y_before[at], &t->y[at], t->p.n_y() * t->p.y_bytes());
    }
}

static trial try_product(const product &p, uint64_t seed = 1)
{
    trial t = make_trial(p, seed);
    const trial made = t;
    run_trial(&t);
    trial checked = t;
    if (p.groups.empty()) check_rows(&checked, 0, 0, p.n_rows);
    for (size_t g = 0; g < p.groups.size(); g++)
        check_rows(&checked, g, (size_t)t.begin[g], (size_t)p.groups[g]);
    for (size_t i = 0; i < t.y.size(); i++)
        if (checked.y_before[i] != t.y[i])
            fail_at(t, i / p.y_bytes() / t.y_stride, i / p.y_bytes() % t.y_stride, t.y[i],
                    made.y_before[i], 0);
    return t;
}

static void need_sm90()
{
    need_gpu();
    struct gemm g = {};
    g.layout = GEMM_F8, g.n_groups = 1, g.n_rows = 4096, g.n_out = g.n_in = 4096;
    if (gemm_wants_f8_x(&g)) return;
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0) != cudaSuccess ||
        (major == 9 && minor == 0))
        test_fail(
            __FILE__, __LINE__,
            "this GPU is of compute capability 9.0, and the build has none of its kernels (90a)");
    SKIP("this GPU is not of compute capability 9.0: its kernels were NOT run");
}

/* ---- cases ---- */

static std::vector<int> tiles_of(const product &p)
{
    return { GEMM_SM90_NARROW, p.f8() ? GEMM_SM90_TALL : GEMM_SM90_WIDE };
}

static void try_thens(product p)
{
    for (int tile : tiles_of(p))
        for (enum gemm_epilogue epilogue :
             { GEMM_STORE, GEMM_ADD, GEMM_STORE_BF16, GEMM_SILU, GEMM_SILU_BF16, GEMM_SILU_F16 })
            for (int how = 0; how < 4; how++) {
                p.tile = tile, p.epilogue = epilogue, p.paired = how & 1, p.bias = how & 2;
                if ((p.is_silu() && !p.paired) || (p.paired && p.n_out % 2)) continue;
                try_product(p, p.n_rows + 100 * p.n_in);
            }
}

/* Sizes on both sides of a step of k, a stage, the ring, a tile and a warpgroup, with y written in
 * pairs and one by one. */
static void try_sizes(enum gemm_weight_layout layout)
{
    static const size_t sizes[][3] = { { 1, 1, 1 },      { 65, 2, 63 },     { 128, 37, 65 },
                                       { 64, 130, 127 }, { 131, 300, 200 }, { 7, 129, 1100 },
                                       { 200, 258, 129 } };
    for (const auto &size : sizes) {
        product p;
        p.layout = layout, p.n_rows = size[0], p.n_out = size[1], p.n_in = size[2],
        p.gathered = size[0] % 2, p.y_more = size[2] % 2 ? 3 : 2 + size[1] % 2;
        try_thens(p);
    }
}
TEST(gemm_sm90_bf16_equals_a_plain_loop) { need_sm90(), try_sizes(GEMM_BF16); }
TEST(gemm_sm90_f16_equals_a_plain_loop) { need_sm90(), try_sizes(GEMM_F16); }
TEST(gemm_sm90_f8_equals_a_plain_loop) { need_sm90(), try_sizes(GEMM_F8); }
TEST(gemm_sm90_w8_equals_a_plain_loop) { need_sm90(), try_sizes(GEMM_W8); }
TEST(gemm_sm90_w4_equals_a_plain_loop) { need_sm90(), try_sizes(GEMM_W4); }

/* Groups with 0 to many rows, beginning in the middle of y; n_rows is larger than the number of
 * rows. */
TEST(gemm_sm90_groups)
{
    need_sm90();
    std::vector<std::vector<int32_t>> lists = {
        { 0, 5, 0, 0, 133, 1, 300, 0 }, { 0, 0 }, { 64 }, { 40, 3 }, {}
    };
    for (int i = 0; i < 140; i++)
        lists.back().push_back(i % 29 == 0 ? 3 : i == 130 ? 135 : i % 7 == 0);
    for (const auto &list : lists)
        for (int how = 0; how < 8; how++) {
            product p;
            p.layout = LAYOUTS[how % 5],
            p.tile = p.f8() ? (int)(how > 4 ? GEMM_SM90_TALL : GEMM_SM90_NARROW) : (how + 1) % 2,
            p.groups = list, p.gathered = how % 2, p.n_out = 142, p.n_in = 140, p.n_rows = 4;
            for (int32_t n : list) p.n_rows += (size_t)n;
            p.paired = true, p.bias = true,
            p.epilogue = list.size() % 2 ? GEMM_STORE : silu_epilogue_for(p.layout);
            try_product(p);
        }
}

/* Through gemm_run: many tiles per block, wide and narrow ones, and small groups that use another
 * kernel. */
TEST(gemm_sm90_is_what_gemm_run_takes)
{
    need_sm90();
    static const size_t shapes[][2] = { { 1100, 2100 }, { 1200, 1030 } };
    for (const auto &shape : shapes)
        for (enum gemm_weight_layout layout : LAYOUTS) {
            product p;
            p.layout = layout, p.tile = BY_RUN, p.n_rows = shape[0], p.n_out = shape[1],
            p.n_in = 130, p.epilogue = GEMM_ADD, p.bias = true;
            if (TEST_IS_SANITIZED) p.n_rows /= 4, p.n_out /= 4;
            try_product(p);
        }
    for (enum gemm_weight_layout layout : LAYOUTS) {
        product p;
        p.layout = layout, p.tile = BY_RUN, p.groups = { 200, 7, 0, 130, 450, 16, 17 },
        p.n_rows = 820, p.n_out = 1400, p.n_in = 130;
        p.paired = p.gathered = true, p.epilogue = silu_epilogue_for(layout);
        try_product(p);
    }
}

/* The bits of a row do not depend on the rows around it, on the half of the tile that it is in, or
 * on the tile shape. */
TEST(gemm_sm90_rows_have_the_same_bits_among_others)
{
    need_sm90();
    for (enum gemm_weight_layout layout : LAYOUTS) {
        product p;
        p.layout = layout, p.n_rows = 200, p.n_out = 300, p.n_in = 500, p.bias = true;
        const trial all = try_product(p);
        for (size_t row : { 0, 70, 199 })
            for (int tile : tiles_of(p)) {
                trial one = all;
                one.p.tile = tile, one.p.n_rows = 1, one.p.gathered = true,
                one.x_rows = { (int32_t)row };
                run_trial(&one);
                CHECK(memcmp(one.y.data(), &all.y[row * all.y_stride * 4], p.n_out * 4) == 0);
            }
    }
}

/* ---- tiles that share W ---- */

struct shared_tile {
    int plain, multicast;
    size_t rows, columns;
};
static const shared_tile SHARED_16 = { GEMM_SM90_WIDE, GEMM_SM90_WIDE_MULTICAST, 128, 256 },
                         SHARED_F8[] = { { GEMM_SM90_NARROW, GEMM_SM90_NARROW_MULTICAST, 128, 128 },
                                         { GEMM_SM90_TALL, GEMM_SM90_TALL_MULTICAST, 256, 128 } };

/* The same product by both kinds of tiles: right, and equal bit for bit. */
static void try_shared(product p, const shared_tile &tile)
{
    p.tile = tile.plain;
    const trial plain = try_product(p, p.n_rows + p.n_out);
    p.tile = tile.multicast;
    const trial shared = try_product(p, p.n_rows + p.n_out);
    CHECK(shared.y == plain.y);
}

/* Groups of one, two, three and five tiles of rows, which end in the middle of one or of the first
 * of a pair, and of none; one, two and three tiles of columns, the last one partly outside of W. */
static void try_shared_groups(product p, const shared_tile &tile)
{
    const int32_t rows = (int32_t)tile.rows;
    const std::vector<int32_t> lists[] = { { rows + 1, 0, 2 * rows, 5, 3 * rows - 7 },
                                           { 1, rows, 5 * rows - 60 } };
    for (const auto &list : lists)
        for (size_t columns = 1; columns <= 3; columns++) {
            p.groups = list, p.n_rows = 0, p.gathered = columns != 2;
            for (int32_t n : list) p.n_rows += (size_t)n;
            p.n_out = columns * tile.columns - 26, p.n_in = columns == 2 ? 1030 : 136;
            if (TEST_IS_SANITIZED && columns == 3) continue;
            try_shared(p, tile);
        }
}

TEST(gemm_sm90_multicast_has_the_bits_of_plain_tiles)
{
    need_sm90();
    for (enum gemm_weight_layout layout : { GEMM_BF16, GEMM_F16 }) {
        product p;
        p.layout = layout, p.bias = true, p.paired = layout == GEMM_BF16,
        p.epilogue = p.paired ? GEMM_SILU_BF16 : GEMM_ADD;
        try_shared_groups(p, SHARED_16);
    }
}
TEST(gemm_sm90_multicast_has_the_bits_of_plain_tiles_in_f8)
{
    need_sm90();
    for (const shared_tile &tile : SHARED_F8) {
        product p;
        p.layout = GEMM_F8, p.paired = tile.rows > 128, p.epilogue = GEMM_STORE_BF16;
        try_shared_groups(p, tile);
    }
}

/* Fewer tiles than the grid has clusters, and one group only; rows of W that are no whole stages. */
TEST(gemm_sm90_multicast_of_one_group)
{
    need_sm90();
    for (int32_t n : { 1, 130, 700 }) {
        product p;
        p.groups = { n }, p.n_rows = (size_t)n, p.n_out = 40, p.n_in = 70;
        try_shared(p, SHARED_16);
        p.layout = GEMM_F8;
        for (const shared_tile &tile : SHARED_F8) try_shared(p, tile);
    }
}

/* Experts of two row tiles and more, through gemm_run. */
TEST(gemm_sm90_multicast_is_what_gemm_run_takes)
{
    setenv("BATON_CUDA_MULTICAST", "on", 1); /* before the device is asked */
    need_sm90();
    CHECK(gemm_sm90_shares());
    for (enum gemm_weight_layout layout : { GEMM_BF16, GEMM_F8 }) {
        product p;
        p.layout = layout, p.tile = BY_RUN, p.groups = { 300, 40, 257, 500 }, p.n_rows = 1097,
        p.n_out = 2560, p.n_in = 130, p.gathered = true;
        try_product(p);
    }
}

/* Whole tiles of columns whose rows of y are aligned leave 16 bytes at a time; groups end in either
 * warpgroup's rows, within a warp's and in the rows that it stores together. */
TEST(gemm_sm90_stores_16_bytes_at_a_time)
{
    need_sm90();
    for (enum gemm_weight_layout layout : LAYOUTS)
        for (enum gemm_epilogue epilogue : { GEMM_STORE_BF16, silu_epilogue_for(layout) }) {
            product p;
            p.layout = layout, p.groups = { 0, 5, 64, 1, 195, 12, 14 }, p.n_rows = 300,
            p.n_out = 512, p.n_in = 130, p.y_more = 8, p.epilogue = epilogue;
            p.gathered = p.paired = p.is_silu();
            for (int tile : tiles_of(p)) p.tile = tile, try_product(p);
        }
}

/* A NaN in a row of x affects that row of y only. */
TEST(gemm_sm90_nan_stays_in_its_row)
{
    need_sm90();
    for (enum gemm_weight_layout layout : LAYOUTS) {
        product p;
        p.layout = layout, p.n_rows = 5, p.n_out = 21, p.n_in = 100;
        trial t = make_trial(p, 9);
        memset(&t.x_bytes[2 * t.x_stride * (p.f8() ? 1 : 2)], 0xff, 8);
        run_trial(&t);
        check_rows(&t, 0, 0, 2);
        check_rows(&t, 0, 3, 2);
        for (size_t i = 0; i < p.n_out; i++) CHECK(isnan(read_y(t, 2, i)));
    }
}

/* Every f16 as a weight: x is 1 in one place. */
TEST(gemm_sm90_every_f16)
{
    need_sm90();
    enum { ALL = 1 << 16, K = 5 };
    for (int tile : { GEMM_SM90_NARROW, GEMM_SM90_WIDE }) {
        product p;
        p.layout = GEMM_F16, p.tile = tile, p.n_rows = 1, p.n_out = ALL, p.n_in = 8;
        trial t = make_trial(p, 3);
        const size_t row_bytes = gemm_row_bytes(GEMM_F16, p.n_in);
        for (size_t k = 0; k < p.n_in; k++) put_x(&t, 0, k, k == K);
        for (size_t i = 0; i < ALL; i++) {
            const uint16_t bits = (uint16_t)i;
            memcpy(&t.w[0].bytes[i * row_bytes + 2 * K], &bits, 2);
        }
        run_trial(&t);
        for (size_t i = 0; i < ALL; i++) {
            const float want = float_of_f16((uint16_t)i);
            const double got = read_y(t, 0, i);
            if (isnan(want) ? !isnan(got) : got != (double)want)
                fail_at(t, 0, i, got, (double)want, 0);
        }
    }
}

TEST(gemm_sm90_refuses_what_it_cannot_do)
{
    need_sm90();
    const float scale = 1;
    const int32_t row = 0;
    struct gemm g = {};
    g.layout = GEMM_F8, g.n_out = g.n_in = 4096, g.n_rows = 4096, g.n_groups = 1;
    CHECK(gemm_wants_f8_x(&g));
    g.n_rows = 8;
    CHECK(!gemm_wants_f8_x(&g)); /* decode steps are bound by reading W */
    g.n_rows = 4096, g.x_scales = &scale, g.deterministic = true;
    CHECK(!gemm_wants_f8_x(&g) && gemm_run(nullptr, &g) == cudaErrorInvalidValue &&
          gemm_run_sm90(nullptr, &g, GEMM_SM90_NARROW) == cudaErrorInvalidValue);
    g.deterministic = false, g.n_groups = 2;
    CHECK(!gemm_wants_f8_x(&g) && gemm_run(nullptr, &g) == cudaErrorInvalidValue);
    g.n_groups = 1, g.layout = GEMM_BF16;
    CHECK(!gemm_wants_f8_x(&g) && gemm_run(nullptr, &g) == cudaErrorInvalidValue);
    g.x_scales = nullptr, g.deterministic = true;
    CHECK(!gemm_uses_sm90(&g) &&
          gemm_run_sm90(nullptr, &g, GEMM_SM90_WIDE) == cudaErrorInvalidValue);
    g.deterministic = false;
    CHECK(gemm_uses_sm90(&g) &&
          gemm_run_sm90(nullptr, &g, GEMM_SM90_TALL) == cudaErrorInvalidValue);
    /* groups of a known number of rows have no neighbours to share W with */
    CHECK(gemm_run_sm90(nullptr, &g, GEMM_SM90_WIDE_MULTICAST) == cudaErrorInvalidValue);
    g.layout = GEMM_F16;
    CHECK(gemm_uses_sm90(&g) &&
          gemm_run_sm90(nullptr, &g, GEMM_SM90_TALL) == cudaErrorInvalidValue);
    g.layout = GEMM_W4, g.begin = &row;
    CHECK(gemm_run_sm90(nullptr, &g, GEMM_SM90_WIDE_MULTICAST) == cudaErrorInvalidValue &&
          gemm_run_sm90(nullptr, &g, GEMM_SM90_TALL_MULTICAST) == cudaErrorInvalidValue);
    /* matrices that lie in the other order in memory */
    g.layout = GEMM_F16, g.n_groups = 2, g.w_stride = (size_t)-4096;
    CHECK(gemm_run_sm90(nullptr, &g, GEMM_SM90_WIDE_MULTICAST) == cudaErrorInvalidValue);
    g.n_groups = 1, g.w_stride = 0, g.begin = nullptr;
    g.epilogue = GEMM_STORE_BF16, g.n_rows = 17;
    CHECK(!gemm_uses_sm90(&g) && gemm_run(nullptr, &g) == cudaErrorInvalidValue);
    g.n_rows = 4096, g.x_scales = &scale;
    CHECK(!gemm_uses_sm90(&g) &&
          gemm_run_sm90(nullptr, &g, GEMM_SM90_NARROW) == cudaErrorInvalidValue);
}

TEST_MAIN(CASE_T(gemm_sm90_bf16_equals_a_plain_loop, 250),
          CASE_T(gemm_sm90_f16_equals_a_plain_loop, 250),
          CASE_T(gemm_sm90_f8_equals_a_plain_loop, 250),
          CASE_T(gemm_sm90_w8_equals_a_plain_loop, 250),
          CASE_T(gemm_sm90_w4_equals_a_plain_loop, 250), CASE_T(gemm_sm90_groups, 250),
          CASE_T(gemm_sm90_every_f16, 250), CASE_T(gemm_sm90_is_what_gemm_run_takes, 250),
          CASE_T(gemm_sm90_rows_have_the_same_bits_among_others, 250),
          CASE_T(gemm_sm90_multicast_has_the_bits_of_plain_tiles, 250),
          CASE_T(gemm_sm90_multicast_has_the_bits_of_plain_tiles_in_f8, 250),
          CASE_T(gemm_sm90_multicast_of_one_group, 250),
          CASE_T(gemm_sm90_multicast_is_what_gemm_run_takes, 250),
          CASE_T(gemm_sm90_stores_16_bytes_at_a_time, 250), CASE(gemm_sm90_nan_stays_in_its_row),
          CASE(gemm_sm90_refuses_what_it_cannot_do))
