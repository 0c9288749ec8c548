/* test_prepare_inputs.cc - the kernels that prepare the inputs of products, against plain loops in
 * double. Runs on a GPU or on tests/simt. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/cuda/inputs/prepare_inputs.h"
#include "tests/cuda/device_case.h"
#include "tests/cuda/gemm_reference.h"

static size_t filled(size_t n) { return (n + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP; }

struct inputs_trial {
    size_t n_rows, n, x_stride;
    bool gathered, norm;
    enum dtype type;
    size_t y_bytes() const { return type == DTYPE_F32 ? 4 : 2; }
    float eps;
    std::vector<float> x, by;
    std::vector<int32_t> x_rows;
    std::vector<unsigned char> y;
};

static void run_inputs(inputs_trial *t)
{
    const size_t y_bytes = t->n_rows * filled(t->n) * t->y_bytes();
    std::vector<unsigned char> before(y_bytes + 64, GUARD);
    device_bytes x(t->x), by(t->by), x_rows(t->x_rows), y(before);
    struct prepare_inputs in = {};
    in.x = (const float *)x.p, in.x_stride = t->x_stride, in.n_rows = t->n_rows, in.n = t->n,
    in.y = y.p, in.type = t->type, in.eps = t->eps;
    if (t->gathered) in.x_rows = (const int32_t *)x_rows.p;
    if (t->norm) in.norm = (const float *)by.p;
    GOOD(prepare_inputs_run(nullptr, &in));
    GOOD(cudaDeviceSynchronize());
    t->y.resize(before.size());
    GOOD(cudaMemcpy(t->y.data(), y.p, before.size(), cudaMemcpyDeviceToHost));
    for (size_t i = y_bytes; i < before.size(); i++) CHECK_EQ_INT(t->y[i], GUARD);
    t->y.resize(y_bytes);
}

static double input_at(const inputs_trial &t, size_t row, size_t k)
{
    float v;
    uint16_t bits;
    memcpy(&v, &t.y[t.type == DTYPE_F32 ? (row * filled(t.n) + k) * 4 : 0], 4);
    memcpy(&bits, &t.y[(row * filled(t.n) + k) * 2], 2);
    return t.type == DTYPE_F32 ? v : float_of(t.type, bits);
}

static void check_inputs(const inputs_trial &t)
{
    for (size_t row = 0; row < t.n_rows; row++) {
        const float *x = &t.x[(size_t)t.x_rows[row] * t.x_stride];
        double squares = 0;
        for (size_t k = 0; k < t.n; k++) squares += (double)x[k] * (double)x[k];
        const double root = sqrt(squares / (double)t.n + (double)t.eps);
        for (size_t k = 0; k < filled(t.n); k++) {
            double want = k < t.n ? x[k] : 0;
            if (t.norm && k < t.n) want = (double)t.by[k] * (want / root);
            if (!t.norm && t.type != DTYPE_F32)
                want = float_of(t.type, bits_of(t.type, (float)want));
            const double rounding = t.type == DTYPE_F32   ? 0x1p-20
                                    : t.type == DTYPE_F16 ? 0x1.01p-11
                                                          : 0x1.01p-8;
            const double may_err = t.norm
                                       ? fabs(want) * rounding + (t.type == DTYPE_F16 ? 0x1p-25 : 0)
                                       : 0;
            if (!(fabs(input_at(t, row, k) - want) <= may_err))
                test_fail(__FILE__, __LINE__, "n %zu norm %d type %d: [%zu][%zu] is %.9g, not %.9g",
                          t.n, t.norm, t.type, row, k, input_at(t, row, k), want);
        }
    }
}

static inputs_trial make_inputs(size_t n_rows, size_t n, size_t x_stride, bool gathered, bool norm,
                                enum dtype type)
{
    inputs_trial t = {};
    numbers from = { n };
    t.n_rows = n_rows, t.n = n, t.x_stride = x_stride, t.gathered = gathered, t.norm = norm,
    t.type = type, t.eps = 1e-5f;
    t.x.resize((n_rows + 4) * x_stride);
    for (float &v : t.x) v = (float)(3 * from.next());
    t.by.resize(n);
    for (float &v : t.by) v = (float)from.next();
    for (size_t i = 0; i < n_rows; i++)
        t.x_rows.push_back((int32_t)(gathered ? (i * 3 + 1) % (n_rows + 4) : i));
    return t;
}

TEST(inputs_equal_a_plain_loop)
{
    need_gpu();
    for (size_t n : { 1, 3, 4, 63, 64, 130, 1024, 2049 })
        for (enum dtype type : { DTYPE_F32, DTYPE_F16, DTYPE_BF16 })
            for (int how = 0; how < 4; how++) {
                inputs_trial t = make_inputs(3, n, n + (n % 2 ? 2 : 4), how & 1, how & 2, type);
                run_inputs(&t);
                check_inputs(t);
            }
}

/* A row gives the same bits at every address, aligned to 16 bytes or not. */
TEST(inputs_do_not_depend_on_alignment)
{
    need_gpu();
    for (int norm = 0; norm < 2; norm++) {
        inputs_trial a = make_inputs(4, 1030, 1033, false, norm, DTYPE_F32), b = a;
        for (size_t row = 1; row < 4; row++)
            memcpy(&b.x[row * b.x_stride], b.x.data(), b.n * sizeof(float));
        run_inputs(&b);
        for (size_t row = 1; row < 4; row++)
            CHECK(memcmp(b.y.data(), &b.y[row * filled(b.n) * 4], filled(b.n) * 4) == 0);
        a.n_rows = 0;
        run_inputs(&a);
    }
}

/* Rows of prompts, which a warp has each, have the bits that few rows have. */
TEST(inputs_of_many_rows_have_the_bits_of_few)
{
    need_gpu();
    for (size_t n : { 192, 2048, 2560, 3136 }) {
        const enum dtype type = n % 128 ? DTYPE_F16 : DTYPE_BF16;
        inputs_trial many = make_inputs(1027, n, n + 4, n == 2560, true, type), few = many;
        run_inputs(&many);
        if (n < 2048) check_inputs(many);
        few.n_rows = 5;
        few.x_rows[4] = few.x_rows[1026];
        if (n != 2560)
            memcpy(&few.x[4 * few.x_stride], &few.x[1026 * few.x_stride], n * sizeof(float));
        run_inputs(&few);
        const size_t row = n * few.y_bytes();
        CHECK(memcmp(few.y.data(), many.y.data(), 4 * row) == 0);
        CHECK(memcmp(&few.y[4 * row], &many.y[1026 * row], row) == 0);
    }
}

/* Zeros times an infinite factor (eps 0) are NaN, as the formula says; padding stays zero. */
TEST(inputs_fill_up_with_zeros_whatever_the_row_is)
{
    need_gpu();
    for (enum dtype type : { DTYPE_F16, DTYPE_BF16 }) {
        inputs_trial t = make_inputs(1, 5, 8, false, true, type);
        for (float &v : t.x) v = 0;
        t.eps = 0;
        run_inputs(&t);
        for (size_t k = 0; k < 64; k++)
            CHECK(k < 5 ? isnan(input_at(t, 0, k)) : input_at(t, 0, k) == 0);
    }
}

/* Every f16, the midpoints between two of them and the floats next to those round to nearest even,
 * subnormal numbers too. */
TEST(inputs_round_to_every_f16)
{
    need_gpu();
    std::vector<float> x;
    for (unsigned i = 0; i < 0x7bff; i++) {
        const float low = float_of_f16((uint16_t)i),
                    half = low + (float_of_f16((uint16_t)(i + 1)) - low) / 2;
        for (float v : { low, nextafterf(half, 0), half, nextafterf(half, 1e9f) })
            x.push_back(i % 3 ? v : -v);
    }
    inputs_trial t = make_inputs(1, x.size(), x.size(), false, false, DTYPE_F16);
    memcpy(t.x.data(), x.data(), x.size() * sizeof(float));
    run_inputs(&t);
    check_inputs(t);
}

/* A number beyond f16 becomes its largest number; a NaN stays a NaN. */
TEST(inputs_beyond_f16_end_at_its_largest)
{
    need_gpu();
    static const float X[] = { 65504,    65505,     65519.996f, 65520,   65536,
                               -65504,   -65520,    -1e9f,      FLT_MAX, -FLT_MAX,
                               INFINITY, -INFINITY, NAN,        -NAN,    1 };
    inputs_trial t = make_inputs(2, 15, 16, false, false, DTYPE_F16);
    for (size_t row = 0; row < 2; row++) memcpy(&t.x[row * t.x_stride], X, sizeof X);
    run_inputs(&t);
    for (size_t row = 0; row < 2; row++)
        for (size_t k = 0; k < 15; k++) {
            const double want = isfinite(X[k]) ? fmin(fmax(X[k], -65504), 65504) : X[k],
                         got = input_at(t, row, k);
            CHECK(isnan(want) ? isnan(got) : got == want);
        }
}

/* Rows in bf16, or in e4m3 with scales in each row, give what their numbers give in f32. */
static void check_narrow(enum dtype from, enum dtype type, size_t n)
{
    enum { N_ROWS = 5 };
    const size_t filled_n = filled(n), unit = from == DTYPE_BF16 ? 2 : 1,
                 scales_at = filled_n * unit,
                 row_bytes = (scales_at + (n + 127) / 128 * 4 + 127) / 128 * 128;
    numbers random = { 11 + n };
    inputs_trial t = {};
    std::vector<unsigned char> rows(N_ROWS * row_bytes, 0);
    t.n_rows = N_ROWS, t.n = n, t.x_stride = n, t.type = type, t.x.resize(N_ROWS * n);
    t.gathered = true, t.x_rows = { 3, 0, 0, 4, 1 };
    for (size_t row = 0; row < N_ROWS; row++)
        for (size_t k = 0; k < n; k++) {
            unsigned char *to = &rows[row * row_bytes];
            float *scale = (float *)(void *)(to + scales_at) + k / 128;
            const uint16_t half = bits_of(DTYPE_BF16, (float)random.next());
            const uint8_t byte = (uint8_t)((row * n + k) % 120);
            if (k % 128 == 0 && unit == 1) *scale = (float)(1.5 + random.next());
            if (unit == 2) memcpy(to + 2 * k, &half, 2);
            else to[k] = byte;
            t.x[row * n + k] = unit == 2 ? float_of(DTYPE_BF16, half)
                                         : float_of_e4m3(byte) * *scale;
        }
    run_inputs(&t);
    std::vector<unsigned char> y(N_ROWS * filled_n * t.y_bytes());
    device_bytes x(rows), x_rows(t.x_rows), got(y);
    struct prepare_inputs in = {};
    in.x = x.p, in.from = from, in.scales_at = scales_at, in.x_stride = row_bytes / unit,
    in.x_rows = (const int32_t *)x_rows.p, in.n_rows = N_ROWS, in.n = n, in.y = got.p,
    in.type = type;
    GOOD(prepare_inputs_run(nullptr, &in));
    GOOD(cudaDeviceSynchronize());
    GOOD(cudaMemcpy(y.data(), got.p, y.size(), cudaMemcpyDeviceToHost));
    CHECK(y == t.y);
}

TEST(inputs_of_narrow_rows_are_those_of_their_numbers)
{
    need_gpu();
    for (enum dtype type : { DTYPE_F32, DTYPE_F16, DTYPE_BF16 })
        for (size_t n : { 1, 70, 128, 333 }) {
            check_narrow(DTYPE_BF16, type, n);
            check_narrow(DTYPE_F8_E4M3, type, n);
        }
}

TEST(inputs_refuse_a_type_that_no_product_takes)
{
    need_gpu();
    struct prepare_inputs in = {};
    in.n_rows = in.n = 1, in.type = DTYPE_F8_E4M3;
    CHECK(prepare_inputs_run(nullptr, &in) == cudaErrorInvalidValue);
    const float norm = 1;
    in.type = DTYPE_BF16, in.from = DTYPE_BF16, in.norm = &norm;
    CHECK(prepare_inputs_run(nullptr, &in) == cudaErrorInvalidValue);
    in.from = DTYPE_F16, in.norm = nullptr;
    CHECK(prepare_inputs_run(nullptr, &in) == cudaErrorInvalidValue);
}

TEST_MAIN(CASE(inputs_equal_a_plain_loop), CASE(inputs_do_not_depend_on_alignment),
          CASE(inputs_of_many_rows_have_the_bits_of_few),
          CASE(inputs_fill_up_with_zeros_whatever_the_row_is), CASE(inputs_round_to_every_f16),
          CASE(inputs_of_narrow_rows_are_those_of_their_numbers),
          CASE(inputs_beyond_f16_end_at_its_largest),
          CASE(inputs_refuse_a_type_that_no_product_takes))
