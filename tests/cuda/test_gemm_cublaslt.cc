/* test_gemm_cublaslt.cc - finding cublasLt, and calling it: against a fake that computes in host
 * memory (fake_cublaslt.c). Needs no GPU, but for the capture, which is skipped without one. Tests
 * that need cublasLt.h are left out of a build that does not find it. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cuda/gemm/gemm_cublaslt.h"
#include "kernels/cuda/gemm/gemm_cublaslt_load.h"
#include "tests/cuda/device_case.h"
#include "tests/cuda/gemm_reference.h"

static enum status load(const char *named, gemm_cublaslt_loaded *l, struct err *err)
{
    memset(l, 0, sizeof *l);
    memset(err, 0, sizeof *err);
    return gemm_cublaslt_load(named, l, err);
}

TEST(gemm_cublaslt_is_found)
{
    gemm_cublaslt_loaded l;
    struct err err;
    CHECK_EQ_INT(load(FAKE_CUBLASLT, &l, &err), OK);
    CHECK(strcmp(l.path, FAKE_CUBLASLT) == 0);
    for (void *call : l.calls) CHECK(call != nullptr);
    CHECK(l.calls[GEMM_CUBLASLT_cublasLtMatmul] == dlsym(l.handle, "cublasLtMatmul"));
    gemm_cublaslt_unload(&l);
    gemm_cublaslt_unload(&l); /* a second unload does nothing */
}

/* A folder such as a Python package's contains the library under its usual name. */
TEST(gemm_cublaslt_is_found_in_a_folder)
{
    gemm_cublaslt_loaded l;
    struct err err;
    char folder[PATH_MAX], file[PATH_MAX + 32];
    snprintf(folder, sizeof folder, "%s", test_tmpdir());
    CHECK_EQ_INT(load(folder, &l, &err), ERR_NOT_FOUND);
    snprintf(file, sizeof file, "%s/libcublasLt.so.12", folder);
    CHECK_EQ_INT(symlink(FAKE_CUBLASLT, file), 0);
    CHECK_EQ_INT(load(folder, &l, &err), OK);
    CHECK(strcmp(l.path, file) == 0);
    gemm_cublaslt_unload(&l);
}

TEST(gemm_cublaslt_says_what_is_missing)
{
    gemm_cublaslt_loaded l;
    struct err err;
    CHECK_EQ_INT(load("/nowhere/libcublasLt.so.13", &l, &err), ERR_NOT_FOUND);
    CHECK(strstr(err.text, "/nowhere/libcublasLt.so.13") != nullptr);
    CHECK_EQ_INT(load(FAKE_CUBLASLT_LACKING, &l, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "it has no cublasLtMatmul") != nullptr);
    CHECK(l.handle == nullptr);
    CHECK_EQ_INT(load("off", &l, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "BATON_CUBLASLT") != nullptr);
}

static struct gemm a_product(void)
{
    struct gemm g = {};
    g.layout = GEMM_BF16, g.n_out = 70, g.n_in = 100, g.n_groups = 1, g.n_rows = GEMM_CUBLASLT_ROWS;
    g.x_stride = 128, g.y_stride = 72;
    g.w = g.x = g.y = (void *)0x1000;
    g.cublaslt = (struct gemm_cublaslt *)0x1000, g.workspace = (void *)0x1000;
    return g;
}

/* The products that are given to cublasLt, and one for each reason not to. */
TEST(gemm_cublaslt_takes_large_dense_products)
{
    const struct gemm plain = a_product();
    CHECK(gemm_cublaslt_fits(&plain));
    struct gemm f16 = plain;
    f16.layout = GEMM_F16;
    CHECK(gemm_cublaslt_fits(&f16));
    for (int i = 0; i < 15; i++) {
        struct gemm g = plain;
        switch (i) {
        case 0: g.deterministic = true; break;
        case 1: g.layout = GEMM_F8; break;
        case 2: g.layout = GEMM_F32; break;
        case 3: g.epilogue = GEMM_SILU; break;
        case 4: g.epilogue = GEMM_SILU_BF16; break;
        case 5: g.bias = (const float *)0x1000; break;
        case 6: g.begin = (const int32_t *)0x1000; break;
        case 7: g.n_groups = 2, g.y_group = 1; break;
        case 8: g.x_rows = (const int32_t *)0x1000; break;
        case 9: g.n_rows--; break;
        case 10: g.x = (const char *)g.x + 8; break;
        case 11: g.y_stride++; break;
        case 12: g.y = (char *)g.y + 4; break;
        case 13: g.cublaslt = nullptr; break;
        default: g.workspace = nullptr;
        }
        if (gemm_cublaslt_fits(&g))
            test_fail(__FILE__, __LINE__, "product %d is none of the library's", i);
    }
    struct gemm add = plain, groups = plain;
    add.epilogue = GEMM_ADD;
    CHECK(gemm_cublaslt_fits(&add));
    groups.n_groups = 2, groups.w_stride = 70 * 256, groups.y_group = 1024;
    CHECK(gemm_cublaslt_fits(&groups));
}

/* Products of the same shape and x at equal distances are one call. */
TEST(gemm_cublaslt_joins_equal_products)
{
    struct gemm g[4], all;
    for (int i = 0; i < 4; i++) {
        g[i] = a_product();
        g[i].w = (const char *)g[i].w + i * 70 * 256, g[i].y = (float *)g[i].y + i * 72 * 100;
    }
    CHECK_EQ_INT(gemm_cublaslt_join(g, 1, &all), 1);
    CHECK_EQ_INT(gemm_cublaslt_join(g, 4, &all), 4);
    CHECK(all.n_groups == 4 && all.w_stride == 70 * 256 && all.y_group == 72 * 100);
    CHECK(all.x_group == 0 && all.w == g[0].w && all.y == g[0].y);
    g[2].y = (float *)g[2].y + 4; /* not as far as the others */
    CHECK_EQ_INT(gemm_cublaslt_join(g, 4, &all), 2);
    g[1].n_out = 20; /* q beside k and v */
    CHECK_EQ_INT(gemm_cublaslt_join(g, 4, &all), 1);
    CHECK(all.n_groups == 1 && all.y == g[0].y);
    for (struct gemm &one : g) one.deterministic = true;
    CHECK_EQ_INT(gemm_cublaslt_join(g + 2, 2, &all), 1);
}

#ifdef BATON_HAVE_CUBLASLT
#define CASES_WITH_HEADER                                                                          \
    CASE(gemm_cublaslt_computes_and_remembers), CASE(gemm_cublaslt_computes_groups),               \
        CASE(gemm_cublaslt_is_captured), CASE(gemm_cublaslt_times_algorithms),

struct fake {
    void *handle = dlopen(FAKE_CUBLASLT, RTLD_NOW);
    int &n_asked = *(int *)dlsym(handle, "fake_n_asked");
    int &n_run = *(int *)dlsym(handle, "fake_n_run");
    int &refuse = *(int *)dlsym(handle, "fake_refuse");
    int &n_algorithms = *(int *)dlsym(handle, "fake_n_algorithms");
    int &fastest = *(int *)dlsym(handle, "fake_fastest");
    int &algorithm = *(int *)dlsym(handle, "fake_algorithm");
    void (*&slow)(cudaStream_t) = *(void (**)(cudaStream_t))dlsym(handle, "fake_slow");
    cudaStream_t &stream = *(cudaStream_t *)dlsym(handle, "fake_stream");
};

static struct gemm_cublaslt *open_fake(void)
{
    struct gemm_cublaslt *l;
    struct err err;
    setenv("BATON_CUBLASLT", FAKE_CUBLASLT, 1);
    CHECK_EQ_INT(gemm_cublaslt_create(&l, &err), OK);
    CHECK(strcmp(gemm_cublaslt_path(l), FAKE_CUBLASLT) == 0);
    return l;
}

/* Checks one product in host memory: W is n_out x n_in, rows of x and y have gaps between them. */
static void check_product(struct gemm_cublaslt *l, enum gemm_weight_layout layout, size_t n_rows,
                          size_t n_out, size_t n_in, bool add)
{
    numbers from = { n_rows + n_out };
    const size_t filled = (n_in + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP;
    reference_matrix w = reference_pack(layout, false, n_out, n_in, &from);
    /* behind each row there is NaN, in either type */
    std::vector<uint16_t> x(n_rows * (filled + GEMM_STEP), 0x7fc0);
    std::vector<float> y(n_rows * (n_out + 6), 3);
    std::vector<double> wide(n_rows * n_in);
    char workspace[16];
    for (size_t row = 0; row < n_rows; row++)
        for (size_t k = 0; k < filled; k++) {
            const uint16_t bits = k < n_in ? bits_of(gemm_x_type(layout), (float)from.next()) : 0;
            x[row * (filled + GEMM_STEP) + k] = bits;
            if (k < n_in) wide[row * n_in + k] = float_of(gemm_x_type(layout), bits);
        }
    struct gemm g = {};
    g.layout = layout, g.n_out = n_out, g.n_in = n_in, g.n_groups = 1, g.n_rows = n_rows,
    g.epilogue = add ? GEMM_ADD : GEMM_STORE;
    g.w = w.bytes.data(), g.x = x.data(), g.x_stride = filled + GEMM_STEP, g.y = y.data(),
    g.y_stride = n_out + 6;
    g.cublaslt = l, g.workspace = workspace;
    CHECK(gemm_cublaslt_run(nullptr, &g));
    for (size_t row = 0; row < n_rows; row++)
        for (size_t i = 0; i < n_out + 6; i++) {
            reference_sum want = { 0, 0 };
            if (i < n_out) want = reference_dot(w, n_in, i, &wide[row * n_in]);
            if (i >= n_out || add) want.value += 3;
            const double got = y[row * (n_out + 6) + i];
            if (!(got - want.value <= 1e-5 * (1 + want.magnitude) &&
                  want.value - got <= 1e-5 * (1 + want.magnitude)))
                test_fail(__FILE__, __LINE__, "y[%zu][%zu] is %.9g, not %.9g", row, i, got,
                          want.value);
        }
}

TEST(gemm_cublaslt_computes_and_remembers)
{
    fake f;
    struct gemm_cublaslt *l = open_fake();
    for (int round = 0; round < 2; round++) {
        check_product(l, GEMM_BF16, 5, 22, 100, false);
        check_product(l, GEMM_BF16, 5, 22, 100, true);
        check_product(l, GEMM_F16, 5, 22, 100, true); /* another shape with the same sizes */
        check_product(l, GEMM_BF16, 130, 10, 64, false);
    }
    CHECK_EQ_INT(f.n_asked, 4);
    CHECK_EQ_INT(f.n_run, 8);
    /* more shapes than the cache keeps */
    for (size_t n_rows = 1; n_rows < 1500; n_rows++)
        check_product(l, n_rows % 2 ? GEMM_BF16 : GEMM_F16, n_rows, 2, 1, false);
    check_product(l, GEMM_BF16, 5, 22, 100, true);
    gemm_cublaslt_free(l);
    gemm_cublaslt_free(nullptr);
}

/* A product of small numbers, in host memory. */
struct small_product {
    enum { ROWS = 20, OUT = 12, IN = 64, GROUPS = 3 };
    std::vector<uint16_t> x, w;
    std::vector<float> y;
    char workspace[16];
    struct gemm g = {};

    small_product(struct gemm_cublaslt *l)
        : x(ROWS * GROUPS * IN), w(GROUPS * OUT * IN), y(ROWS * GROUPS * OUT, 3)
    {
        numbers from = { 5 };
        for (uint16_t &bits : x) bits = bits_of(DTYPE_BF16, (float)from.next());
        for (uint16_t &bits : w) bits = bits_of(DTYPE_BF16, (float)from.next());
        g.layout = GEMM_BF16, g.n_out = OUT, g.n_in = IN, g.n_groups = 1, g.n_rows = ROWS;
        g.w = w.data(), g.x = x.data(), g.x_stride = GROUPS * IN, g.y = y.data();
        g.y_stride = GROUPS * OUT, g.epilogue = GEMM_ADD;
        g.cublaslt = l, g.workspace = workspace;
    }
};

/* Groups are the same as one product after the other, whether they share x or not. */
TEST(gemm_cublaslt_computes_groups)
{
    struct gemm_cublaslt *l = open_fake();
    for (int shared_x = 0; shared_x < 2; shared_x++) {
        small_product one(l), all(l);
        all.g.n_groups = small_product::GROUPS, all.g.w_stride = small_product::OUT * 128;
        all.g.x_group = shared_x ? 0 : small_product::IN, all.g.y_group = small_product::OUT;
        CHECK(gemm_cublaslt_run(nullptr, &all.g));
        for (size_t i = 0; i < small_product::GROUPS; i++) {
            struct gemm g = one.g;
            g.w = (const char *)g.w + i * all.g.w_stride;
            g.x = (const uint16_t *)g.x + i * all.g.x_group, g.y = (float *)g.y + i * g.n_out;
            CHECK(gemm_cublaslt_run(nullptr, &g));
        }
        CHECK(one.y == all.y);
    }
    gemm_cublaslt_free(l);
}

static void end_capture(cudaStream_t s)
{
    cudaGraph_t graph;
    GOOD(cudaStreamEndCapture(s, &graph));
    GOOD(cudaGraphDestroy(graph));
}

/* While a stream is captured a shape that did not run yet does so on another one first. */
TEST(gemm_cublaslt_is_captured)
{
    need_gpu();
    fake f;
    struct gemm_cublaslt *l = open_fake();
    small_product p(l);
    cudaStream_t s;
    GOOD(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    for (int refuse = 0; refuse < 2; refuse++) {
        f.n_run = 0;
        GOOD(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        CHECK(gemm_cublaslt_run(s, &p.g));
        CHECK(f.n_run == (refuse ? 1 : 2) && f.stream == s);
        CHECK(gemm_cublaslt_run(s, &p.g));
        CHECK(f.n_run == (refuse ? 2 : 3) && f.stream == s);
        struct gemm other = p.g;
        other.n_rows--;
        f.refuse = refuse ? 2 : 0;
        CHECK(gemm_cublaslt_run(s, &other) == !refuse);
        CHECK(f.n_run == (refuse ? 2 : 5));
        CHECK((f.stream == s) == !refuse); /* it was tried on the other stream alone */
        f.refuse = 0;
        end_capture(s);
        if (refuse == 0) gemm_cublaslt_free(l), l = open_fake(), p.g.cublaslt = l;
        CHECK(gemm_cublaslt_run(s, &p.g)); /* ran: nothing is left to load in a capture */
    }
    GOOD(cudaStreamDestroy(s));
    gemm_cublaslt_free(l);
}

static void sleep_for_a_moment(void *) { usleep(20000); }
static void sleep_in_stream(cudaStream_t s)
{
    GOOD(cudaLaunchHostFunc(s, sleep_for_a_moment, nullptr));
}

/* The fastest algorithm computes a prompt, and others of about as many rows without being timed
 * again. y, which the product is added to, is as if it had been computed once. */
TEST(gemm_cublaslt_times_algorithms)
{
    enum { ALGORITHMS = 3, TIMED = ALGORITHMS * 4 };
    need_gpu();
    fake f;
    struct gemm_cublaslt *l = open_fake();
    f.n_algorithms = ALGORITHMS, f.fastest = 2, f.slow = sleep_in_stream, f.n_run = 0;
    for (int add = 0; add < 2; add++) {
        check_product(l, GEMM_BF16, 1030, 3, 5, add);
        CHECK(f.algorithm == 2 && f.n_run == TIMED + 1);
        check_product(l, GEMM_BF16, 2047, 3, 5, add);
        CHECK(f.algorithm == 2 && f.n_run == TIMED + 2);
        check_product(l, GEMM_BF16, 1023, 3, 5, add); /* too few to be timed */
        CHECK(f.algorithm == 0 && f.n_run == TIMED + 3);
        f.n_run = 0;
    }
    f.fastest = 0;
    check_product(l, GEMM_BF16, 2048, 3, 5, true);
    CHECK(f.algorithm == 0 && f.n_run == TIMED + 1);
    f.n_algorithms = 1, f.slow = nullptr;
    gemm_cublaslt_free(l);
}

/* A product for which the library has no algorithm is left to Baton's kernels, and the library is
 * asked only once. */
TEST(gemm_cublaslt_refuses)
{
    for (int how = 1; how <= 2; how++) {
        fake f;
        struct gemm_cublaslt *l = open_fake();
        std::vector<uint16_t> x(64 * 200), w(64 * 8);
        std::vector<float> y(8 * 200, 3);
        struct gemm g = a_product();
        g.n_rows = 200, g.n_out = 8, g.n_in = 64, g.x_stride = 64, g.y_stride = 8, g.x = x.data(),
        g.w = w.data(), g.y = y.data(), g.cublaslt = l;
        f.refuse = how, f.n_asked = f.n_run = 0;
        for (int i = 0; i < 3; i++) CHECK(!gemm_cublaslt_run(nullptr, &g));
        CHECK_EQ_INT(f.n_asked, 1);
        CHECK_EQ_INT(f.n_run, 0);
        CHECK(y[0] == 3);
        f.refuse = 0;
        gemm_cublaslt_free(l);
    }
}
#else
#define CASES_WITH_HEADER

TEST(gemm_cublaslt_refuses)
{
    struct gemm_cublaslt *l = nullptr;
    struct err err;
    CHECK_EQ_INT(gemm_cublaslt_create(&l, &err), ERR_UNSUPPORTED);
    CHECK(l == nullptr && strstr(err.text, "cublasLt.h") != nullptr);
    gemm_cublaslt_free(l);
}
#endif

TEST_MAIN(CASE(gemm_cublaslt_is_found), CASE(gemm_cublaslt_is_found_in_a_folder),
          CASE(gemm_cublaslt_says_what_is_missing), CASE(gemm_cublaslt_takes_large_dense_products),
          CASE(gemm_cublaslt_joins_equal_products), CASES_WITH_HEADER CASE(gemm_cublaslt_refuses))
