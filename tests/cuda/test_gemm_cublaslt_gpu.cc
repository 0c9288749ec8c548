/* test_gemm_cublaslt_gpu.cc - the same call of gemm_run with cublasLt and without, on a GPU, and
 * some of its elements against plain loops in double.
 *
 * The library is the one that BATON_CUBLASLT or the system names. Where there is none, or only the
 * fake one of test_gemm_cublaslt.cc, the cases are skipped: an emulated GPU has none. */
#include <math.h>
#include <string.h>

#include "kernels/cuda/gemm/gemm_cublaslt.h"
#include "tests/cuda/device_case.h"
#include "tests/cuda/gemm_reference.h"

enum { X_MORE = GEMM_STEP, Y_MORE = 8, GUARD_ROWS = 2, SAMPLES = 64 };

static struct gemm_cublaslt *open_library(void)
{
    struct gemm_cublaslt *l = nullptr;
    struct err err = {};
    need_gpu();
    if (gemm_cublaslt_create(&l, &err) != OK) SKIP(err.text);
    if (strstr(gemm_cublaslt_path(l), "fake_cublaslt")) SKIP("there is only a fake cublasLt");
    return l;
}

/* The numbers of all products of one matrix, in host memory and on the GPU. */
struct inputs {
    enum gemm_weight_layout layout;
    size_t n_out, n_in, n_rows, x_stride, y_stride;
    numbers from;
    reference_matrix w;
    std::vector<uint16_t> x, w_magnitude, x_magnitude;
    std::vector<float> y, bias;

    inputs(enum gemm_weight_layout of, size_t out, size_t in, size_t rows)
        : layout(of), n_out(out), n_in(in), n_rows(rows), from{ rows + out },
          w(reference_pack(of, false, out, in, &from))
    {
        const size_t filled = (n_in + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP;
        x_stride = filled + X_MORE, y_stride = n_out + Y_MORE;
        x.assign(n_rows * x_stride, 0x7fff); /* NaN behind the rows, in either type */
        for (size_t row = 0; row < n_rows; row++)
            for (size_t k = 0; k < filled; k++)
                x[row * x_stride + k] = k < n_in ? bits_of(gemm_x_type(layout), (float)from.next())
                                                 : 0;
        for (size_t i = 0; i < (n_rows + GUARD_ROWS) * y_stride; i++)
            y.push_back((float)from.next());
        for (size_t i = 0; i < n_out; i++) bias.push_back((float)from.next());
        x_magnitude = x, w_magnitude.resize(w.bytes.size() / 2);
        memcpy(w_magnitude.data(), w.bytes.data(), w.bytes.size());
        for (uint16_t &bits : x_magnitude) bits &= 0x7fff;
        for (uint16_t &bits : w_magnitude) bits &= 0x7fff;
    }
};

static std::vector<float> fetch(const device_bytes &from, size_t n)
{
    std::vector<float> v(n);
    GOOD(cudaDeviceSynchronize());
    GOOD(cudaMemcpy(v.data(), from.p, n * sizeof(float), cudaMemcpyDeviceToHost));
    return v;
}

/* y of one call. In `directly` the library itself is called, and must have a way. */
static std::vector<float> run(const inputs &in, struct gemm g, bool directly)
{
    device_bytes y(in.y);
    g.y = y.p;
    if (directly) CHECK(gemm_cublaslt_run(nullptr, &g));
    else GOOD(gemm_run(nullptr, &g));
    return fetch(y, in.y.size());
}

/* The same by a graph. For a shape that the library has not run yet, the capture is the first to
 * need its kernels. */
static std::vector<float> run_captured(const inputs &in, struct gemm g)
{
    device_bytes y(in.y);
    cudaStream_t s;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    g.y = y.p;
    GOOD(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    GOOD(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    GOOD(gemm_run(s, &g));
    GOOD(cudaStreamEndCapture(s, &graph));
    GOOD(cudaGraphInstantiate(&exec, graph, 0));
    GOOD(cudaMemcpy(y.p, in.y.data(), in.y.size() * sizeof(float), cudaMemcpyHostToDevice));
    GOOD(cudaGraphLaunch(exec, s));
    GOOD(cudaStreamSynchronize(s));
    GOOD(cudaGraphExecDestroy(exec));
    GOOD(cudaGraphDestroy(graph));
    GOOD(cudaStreamDestroy(s));
    return fetch(y, in.y.size());
}

static double plain_loop(const inputs &in, size_t row, size_t column)
{
    std::vector<double> x(in.n_in);
    for (size_t k = 0; k < in.n_in; k++)
        x[k] = float_of(gemm_x_type(in.layout), in.x[row * in.x_stride + k]);
    return reference_dot(in.w, in.n_in, column, x.data()).value;
}

/* Both are held to test_gemm_sm90's bound of real tensor cores, so they differ by twice that.
 * `magnitude` has the sums of the terms' magnitudes. */
static void compare(const inputs &in, const struct gemm &g, const std::vector<float> &with,
                    const std::vector<float> &without, const std::vector<float> &magnitude)
{
    const double roundings = ((double)in.n_in + 8) * 0x1p-22;
    const size_t total = g.n_rows * in.n_out;
    for (size_t row = 0; row < in.n_rows + GUARD_ROWS; row++)
        for (size_t i = 0; i < in.y_stride; i++) {
            const size_t at = row * in.y_stride + i, n = row * in.n_out + i;
            const bool is_result = row < g.n_rows && i < in.n_out;
            const double bias = is_result && g.bias ? in.bias[i] : 0,
                         on = !is_result || g.epilogue == GEMM_ADD ? in.y[at] : 0;
            const double may_err =
                is_result ? roundings * magnitude[at] + 0x1p-22 * (fabs(bias) + fabs(on) + 1) : 0;
            double want = is_result ? without[at] : on;
            if (!(fabs(with[at] - want) <= 2 * may_err))
                test_fail(__FILE__, __LINE__,
                          "layout %d epilogue %d, %zu rows of %zu x %zu: y[%zu][%zu] is %.9g, "
                          "without the library %.9g +- %.3g",
                          g.layout, g.epilogue, g.n_rows, in.n_out, in.n_in, row, i, with[at], want,
                          2 * may_err);
            if (!is_result || n % (total / SAMPLES + 1) != 0) continue;
            want = plain_loop(in, row, i) + bias + on;
            if (!(fabs(with[at] - want) <= may_err))
                test_fail(__FILE__, __LINE__, "y[%zu][%zu] is %.9g, not %.9g +- %.3g", row, i,
                          with[at], want, may_err);
        }
}

static void try_rows(const inputs &in, struct gemm g, const device_bytes &bias,
                     const std::vector<float> &magnitude, struct gemm_cublaslt *l)
{
    for (enum gemm_epilogue epilogue : { GEMM_STORE, GEMM_ADD })
        for (int with_bias = 0; with_bias < 2; with_bias++) {
            g.epilogue = epilogue;
            g.bias = with_bias ? (const float *)bias.p : nullptr;
            g.cublaslt = nullptr;
            const std::vector<float> without = run(in, g, false);
            g.cublaslt = l;
            const std::vector<float> captured = run_captured(in, g), with = run(in, g, false);
            compare(in, g, with, without, magnitude);
            CHECK(captured == with);
            CHECK(gemm_cublaslt_fits(&g) == !with_bias);
            /* the bits of the library, not of the kernels that are taken when it has no way */
            if (!with_bias) CHECK(run(in, g, true) == with);
        }
}

/* The two halves of a matrix as products that the library joins, as k and v are. */
static void try_halves(const inputs &in, const struct gemm &whole,
                       const std::vector<float> &magnitude, struct gemm_cublaslt *l)
{
    struct gemm g[2] = { whole, whole }, all;
    device_bytes y(in.y);
    for (size_t i = 0; i < 2; i++) {
        g[i].n_out = in.n_out / 2, g[i].cublaslt = l, g[i].epilogue = GEMM_STORE;
        g[i].w = (const char *)whole.w + i * g[i].n_out * gemm_row_bytes(in.layout, in.n_in);
        g[i].y = (float *)y.p + i * g[i].n_out;
    }
    CHECK_EQ_INT(gemm_cublaslt_join(g, 2, &all), 2);
    GOOD(gemm_run_fused(nullptr, g, 2));
    struct gemm plain = whole;
    plain.cublaslt = nullptr, plain.epilogue = GEMM_STORE;
    compare(in, plain, fetch(y, in.y.size()), run(in, plain, false), magnitude);
    CHECK(gemm_cublaslt_run(nullptr, &all));
}

static void try_matrix(struct gemm_cublaslt *l, enum gemm_weight_layout layout, size_t n_out,
                       size_t n_in, const std::vector<size_t> &rows)
{
    const inputs in(layout, n_out, n_in, rows.back());
    device_bytes w(in.w.bytes), x(in.x), w_magnitude(in.w_magnitude), x_magnitude(in.x_magnitude),
        bias(in.bias), scratch{ std::vector<unsigned char>(gemm_scratch_bytes()) },
        workspace{ std::vector<unsigned char>(GEMM_CUBLASLT_WORKSPACE) };
    struct gemm g = {};
    g.layout = layout, g.n_out = n_out, g.n_in = n_in, g.n_groups = 1, g.n_rows = in.n_rows;
    g.x_stride = in.x_stride, g.y_stride = in.y_stride;
    g.w = w_magnitude.p, g.x = x_magnitude.p, g.scratch = scratch.p, g.workspace = workspace.p;
    const std::vector<float> magnitude = run(in, g, false);
    g.w = w.p, g.x = x.p;
    for (size_t n_rows : rows) {
        g.n_rows = n_rows;
        try_rows(in, g, bias, magnitude, l);
        if (n_out % 8 == 0 && n_out >= 512) try_halves(in, g, magnitude, l);
    }
}

static void try_layout(enum gemm_weight_layout layout)
{
    struct gemm_cublaslt *l = open_library();
    try_matrix(l, layout, 72, 100, { 17, 64, 128, 129, 200, 1000, 8192 });
    try_matrix(l, layout, 512, 2048, { 17, 32, 64, 128, 512, 2047, 8192 });
    try_matrix(l, layout, 2560, 1024, { 20, 48, 128, 200, 1024, 4096, 8192 });
    gemm_cublaslt_free(l);
}

TEST(gemm_cublaslt_bf16_as_without) { try_layout(GEMM_BF16); }
TEST(gemm_cublaslt_f16_as_without) { try_layout(GEMM_F16); }

TEST_MAIN(CASE_T(gemm_cublaslt_bf16_as_without, 120), CASE_T(gemm_cublaslt_f16_as_without, 120))
