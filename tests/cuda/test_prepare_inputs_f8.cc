/* test_prepare_inputs_f8.cc - rows rounded to e4m3 with scales on a GPU, against plain loops. Runs
 * on a GPU or on tests/simt. */
#include <math.h>
#include <string.h>

#include "kernels/cuda/inputs/prepare_inputs_f8.h"
#include "tests/cuda/device_case.h"
#include "tests/cuda/gemm_reference.h"

struct f8_trial {
    size_t n_rows, n, x_stride;
    bool gathered, norm, bf16;
    std::vector<float> x, by; /* x: after rounding to bf16, in cases that round */
    std::vector<int32_t> x_rows;
    std::vector<uint8_t> y;
    std::vector<float> scales;
    size_t n_blocks() const { return (n + PREPARE_INPUTS_F8_BLOCK - 1) / PREPARE_INPUTS_F8_BLOCK; }
};

static const float EPS = 1e-5f;

static f8_trial make_trial(size_t n_rows, size_t n, size_t more, bool gathered, bool norm,
                           bool bf16)
{
    f8_trial t = { n_rows, n, n + more, gathered, norm, bf16, {}, {}, {}, {}, {} };
    numbers from = { n };
    for (size_t i = 0; i < (n_rows + 4) * t.x_stride; i++) {
        /* some blocks have tiny numbers only */
        const float v = (float)(3 * pow(from.next(), i / 50 % 3 ? 1 : 9));
        t.x.push_back(bf16 ? float_of_bf16(bf16_of(v)) : v);
    }
    for (size_t i = 0; i < n; i++) t.by.push_back((float)from.next());
    for (size_t i = 0; i < n_rows; i++)
        t.x_rows.push_back((int32_t)(gathered ? (i * 3 + 1) % (n_rows + 4) : i));
    return t;
}

static void run_trial(f8_trial *t)
{
    std::vector<uint16_t> halves;
    for (float v : t->x) halves.push_back(bf16_of(v));
    std::vector<uint8_t> y_before(t->n_rows * t->n_blocks() * PREPARE_INPUTS_F8_BLOCK + 16, GUARD);
    std::vector<float> scales_before(t->n_rows * t->n_blocks() + 1, -1);
    device_bytes x(t->x), x_halves(halves), by(t->by), x_rows(t->x_rows), y(y_before),
        scales(scales_before);
    struct prepare_inputs_f8 in = {};
    in.x = t->bf16 ? x_halves.p : x.p, in.bf16 = t->bf16, in.x_stride = t->x_stride,
    in.n_rows = t->n_rows, in.n = t->n, in.eps = EPS;
    in.x_rows = t->gathered ? (const int32_t *)x_rows.p : nullptr;
    in.norm = t->norm ? (const float *)by.p : nullptr;
    in.y = (uint8_t *)y.p, in.scales = (float *)scales.p;
    GOOD(prepare_inputs_f8_run(nullptr, &in));
    GOOD(cudaDeviceSynchronize());
    t->y = y_before, t->scales = scales_before;
    GOOD(cudaMemcpy(t->y.data(), y.p, t->y.size(), cudaMemcpyDeviceToHost));
    GOOD(cudaMemcpy(t->scales.data(), scales.p, t->scales.size() * 4, cudaMemcpyDeviceToHost));
    for (size_t i = t->y.size() - 16; i < t->y.size(); i++) CHECK_EQ_INT(t->y[i], GUARD);
    CHECK(t->scales.back() == -1);
}

/* The error of an element is at most half a step: 1/16 of itself, and 2^-10 for subnormal ones. */
static void check_block(const f8_trial &t, size_t row, size_t block,
                        const std::vector<double> &want)
{
    const size_t at = (row * t.n_blocks() + block) * PREPARE_INPUTS_F8_BLOCK;
    const double scale = (double)t.scales[row * t.n_blocks() + block],
                 loose = t.norm ? 0x1p-18 : 0x1p-22;
    double largest = 1e-4;
    for (double v : want) largest = fmax(largest, fabs(v));
    CHECK_NEAR(scale, largest / 448, largest / 448 * loose);
    for (size_t i = 0; i < PREPARE_INPUTS_F8_BLOCK; i++) {
        const double v = i < want.size() ? want[i] : 0,
                     got = (double)float_of_e4m3(t.y[at + i]) * scale;
        if (!(fabs(got - v) <= fabs(v) * (0x1p-4 + loose) + scale * 0x1.01p-10))
            test_fail(__FILE__, __LINE__, "n %zu norm %d bf16 %d: [%zu][%zu] is %.9g, not %.9g",
                      t.n, t.norm, t.bf16, row, block * PREPARE_INPUTS_F8_BLOCK + i, got, v);
        if (i >= want.size()) CHECK_EQ_INT(t.y[at + i], 0);
    }
}

static void check_trial(const f8_trial &t)
{
    for (size_t row = 0; row < t.n_rows; row++) {
        const float *x = &t.x[(size_t)t.x_rows[row] * t.x_stride];
        double squares = 0;
        for (size_t k = 0; k < t.n; k++) squares += (double)x[k] * (double)x[k];
        const double root = t.norm ? sqrt(squares / (double)t.n + (double)EPS) : 1;
        for (size_t block = 0; block < t.n_blocks(); block++) {
            std::vector<double> want;
            for (size_t k = block * PREPARE_INPUTS_F8_BLOCK;
                 k < t.n && k < (block + 1) * PREPARE_INPUTS_F8_BLOCK; k++)
                want.push_back((t.norm ? (double)t.by[k] : 1) * (double)x[k] / root);
            check_block(t, row, block, want);
        }
    }
}

TEST(inputs_f8_equal_a_plain_loop)
{
    need_gpu();
    for (size_t n : { 1, 3, 4, 127, 128, 130, 1024, 2049 })
        for (int how = 0; how < 8; how++) {
            f8_trial t = make_trial(3, n, n % 2 ? 2 : n % 128 ? 4 : 8, how & 1, how & 2, how & 4);
            if (t.norm && t.bf16) continue;
            run_trial(&t);
            check_trial(t);
        }
}

/* With a scale of 1 every number of e4m3 stays as it is, and a midpoint rounds to even. */
static void check_every_e4m3(bool bf16)
{
    f8_trial t = make_trial(1, 512, 0, false, false, bf16);
    for (int i = 0; i < 512; i++) t.x[(size_t)i] = 0;
    for (int i = 0; i < 127; i++) {
        const float v = float_of_e4m3((uint8_t)i),
                    next = i < 126 ? float_of_e4m3((uint8_t)(i + 1)) : v;
        t.x[(size_t)i] = v, t.x[(size_t)(128 + i)] = -v, t.x[(size_t)(256 + i)] = (v + next) / 2;
    }
    t.x[127] = t.x[255] = t.x[383] = 448;
    t.x[384] = NAN, t.x[385] = -NAN, t.x[386] = 448;
    run_trial(&t);
    for (int i = 0; i < 4; i++) CHECK(t.scales[(size_t)i] == 1);
    for (int i = 0; i < 127; i++) {
        CHECK_EQ_INT(t.y[(size_t)i], i);
        CHECK_EQ_INT(t.y[(size_t)(128 + i)], i | 128); /* -0 is -0 */
        CHECK_EQ_INT(t.y[(size_t)(256 + i)], i == 126 ? 126 : i + i % 2);
    }
    CHECK_EQ_INT(t.y[384] & 127, 127);
    CHECK_EQ_INT(t.y[385] & 127, 127);
}
TEST(inputs_f8_round_as_e4m3_does)
{
    need_gpu();
    for (bool bf16 : { false, true }) check_every_e4m3(bf16);
}

TEST(inputs_f8_refuse_a_norm_of_bf16)
{
    need_gpu();
    const float one = 1;
    struct prepare_inputs_f8 in = {};
    in.x = &one, in.norm = &one, in.bf16 = true, in.n_rows = in.n = 1;
    CHECK(prepare_inputs_f8_run(nullptr, &in) == cudaErrorInvalidValue);
    in.n_rows = 0;
    GOOD(prepare_inputs_f8_run(nullptr, &in));
}

TEST_MAIN(CASE(inputs_f8_equal_a_plain_loop), CASE(inputs_f8_round_as_e4m3_does),
          CASE(inputs_f8_refuse_a_norm_of_bf16))
