/* test_attention_kv.cc - attention_kv_append and attention_run over pools of f16, int8 and e4m3:
 * the pool has the bytes and scales that kv_row_store writes, and results are near a plain loop
 * over what kv_row_load returns. attention_fixture.h states the bounds. Runs on a GPU or on
 * tests/simt. Thread: one. */
#include <float.h>

#include "tests/cuda/attention_cases.h"

static const enum dtype TYPES[] = { DTYPE_F16, DTYPE_I8, DTYPE_F8_E4M3 };

/* ---- appending ---- */

/* Rows with an unusual scale or rounding. None with a NaN in f16, of which it is not specified
 * which NaN a pool stores. */
static void make_special(world *w, size_t i_row, float *x, size_t n)
{
    const bool is_scaled = kv_rows_scaled(w->s.dtype);
    const float odd[] = { 0.5f,   1.5f,          -2.5f,  126.5f,        -126.5f,        127,
                          -3.5f,  0.49999997f,   447.9f, 0.0009765625f, -0.0029296875f, 65519.996f,
                          -65520, 5.9604645e-08f };
    switch (i_row % 12) {
    case 0: std::fill_n(x, n, i_row % 24 ? 0.0f : -0.0f); break;
    case 1: x[n / 2] = is_scaled ? NAN : INFINITY; break;
    case 2: x[n - 1] = -INFINITY; break;
    case 3:
        for (size_t d = 0; d < n; d++) x[d] *= FLT_MAX;
        break;
    /* 190 times the least float, so that the scale is the least float or 0 */
    case 4:
        for (size_t d = 0; d < n; d++) x[d] *= 2.66e-43f;
        x[0] = 2.66e-43f;
        break;
    case 5:
        for (size_t d = 0; d < n; d++) x[d] *= 1e-37f;
        break;
    case 6:
        for (size_t d = 0; d < n; d++) x[d] = odd[(d + i_row) % 14];
        x[0] = i_row % 24 < 12 ? 127.0f : 448.0f;
        break;
    case 7: x[n / 3] = 1e4f; break;
    default: break;
    }
}

static void append(enum dtype t, int kv_heads, int dim, int block_tokens)
{
    char name[160];
    snprintf(name, sizeof name, "append: %s, %d heads of %d, blocks of %d", type_name(t), kv_heads,
             dim, block_tokens);
    test(name, [&] {
        world w({ kv_heads, kv_heads, dim, dim, block_tokens, t, false, false }, { 70, 1, 33 });
        const size_t n = (size_t)dim;
        for (sequence &q : w.seqs)
            for (size_t i = 0; i < q.k.size() / n; i++)
                make_special(&w, i, &q.k[i * n], n), make_special(&w, i + 5, &q.v[i * n], n);
        w.append({ { 0, 0, 9, false } });
        w.append({ { 2, 0, 33, false }, { 0, 9, 1, true }, { 1, 0, 1, false } });
        w.append({ { 0, 10, 60, false } });
        w.check_pool();
    });
}

static void test_append(void)
{
    const int dims[] = { 1, 3, 4, 20, 31, 64, 80, 96, 128, 132, 255, 256 },
              blocks[] = { 1, 16, 17, 64 };
    int i = 0;
    for (enum dtype t : TYPES)
        for (int dim : dims) append(t, i % 3 + 1, dim, blocks[i % 4]), i++;
    append(DTYPE_BF16, 2, 64, 16);
    test("types that no pool has, and latents of types with scales", [] {
        world w({ 2, 2, 64, 64, 16, DTYPE_I8, false, false }, { 5 });
        w.append_all();
        world::staged st;
        std::vector<int32_t> begins;
        world::place({ { 0, 0, 5, false } }, &begins);
        w.stage(&st, { { 0, 0, 5, false } }, begins);
        struct attention a = { w.kv,  &st.list, nullptr, nullptr, 2,       64,     1,
                               false, nullptr,  0,       0,       nullptr, nullptr };
        a.kv.dtype = DTYPE_Q8_0;
        CHECK(attention_kv_append(nullptr, &a.kv, &st.list, nullptr, nullptr, nullptr) ==
                  cudaErrorInvalidValue,
              "a pool of q8_0");
        CHECK(attention_run(nullptr, &a) == cudaErrorInvalidValue, "a pool of q8_0, attended");
        a.kv = w.kv;
        a.kv.latent = true;
        CHECK(attention_kv_append(nullptr, &a.kv, &st.list, nullptr, nullptr, nullptr) ==
                  cudaErrorInvalidValue,
              "latents of int8");
        CHECK(attention_run(nullptr, &a) == cudaErrorInvalidValue, "latents of int8, attended");
        world::unstage(&st);
        w.check_pool();
    });
}

/* ---- results ---- */

/* Shapes that reach every kernel, with lengths around tiles and segments. */
static void test_shapes(void)
{
    const int pairs[][2] = { { 2, 2 }, { 8, 2 }, { 8, 1 }, { 16, 1 }, { 32, 1 }, { 6, 3 } },
              dims[] = { 20, 64, 80, 96, 128, 256, 31 };
    const int blocks[] = { 16, 1, 64, 17 };
    int i = 0;
    for (enum dtype t : TYPES)
        for (int dim : dims)
            for (const int *p : pairs) {
                const std::vector<range> ranges = {
                    { 0, 99, 1, true }, { 1, 2, 5, false }, { 2, 0, 1, true }, { 3, 30, 10, false }
                };
                i++;
                /* Every 11th still has each type, size and pair of counts. */
                if ((TEST_IS_SANITIZED || (dim != 64 && dim != 128)) &&
                    i % (TEST_IS_SANITIZED ? 11 : 3) != 0)
                    continue;
                near_reference(heads(p[0], p[1], dim, blocks[i % 4], t, i % 8 == 0),
                               { 100, 7, 1, 40 }, ranges);
            }
    for (enum dtype t : TYPES)
        near_reference(heads(1, 1, 1, 1, t, true), { 20 }, { { 0, 0, 20, false } });
}

static void test_lengths(void)
{
    const std::vector<int> lengths = { 1, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1025, 1100 };
    std::vector<range> answers, prompts;
    for (size_t i = 0; i < lengths.size(); i++) {
        const int n = std::min(lengths[i], (int)(i * 7 % 20 + 3));
        answers.push_back({ (int)i, lengths[i] - 1, 1, true });
        prompts.push_back({ (int)i, lengths[i] - n, n, false });
    }
    for (enum dtype t : TYPES)
        for (int dim : { 64, 128 }) {
            if (TEST_IS_SANITIZED && dim != 64) continue;
            near_reference(heads(8, 2, dim, dim == 64 ? 16 : 17, t, false), lengths, answers);
            near_reference(heads(4, 2, dim, 64, t, false), lengths, prompts, 5);
            near_reference(heads(2, 2, dim, 17, t, t == DTYPE_I8), lengths, answers);
        }
    for (enum dtype t : TYPES)
        near_reference(heads(12, 2, 64, 16, t, false), { 700 }, { { 0, 470, 90, false } }, 11);
}

/* ---- bits ---- */

static void test_same_bits(void)
{
    for (enum dtype t : TYPES) {
        char name[80];
        snprintf(name, sizeof name, "same bits: 4/2 heads of 64, %s", type_name(t));
        same_bits(name, heads(4, 2, 64, 16, t, false), 512);
        snprintf(name, sizeof name, "same bits: 6/1 heads of 128, %s", type_name(t));
        same_bits(name, heads(6, 1, 128, 64, t, false), 512);
        snprintf(name, sizeof name, "same bits: 2/2 heads of 20, %s", type_name(t));
        same_bits(name, heads(2, 2, 20, 7, t, t == DTYPE_F16), 512);
    }
}

static void test_shared(void)
{
    shared_beginnings(heads(8, 2, 64, 16, DTYPE_I8, false));
    shared_beginnings(heads(5, 1, 128, 64, DTYPE_F8_E4M3, false));
    shared_beginnings(heads(4, 1, 128, 32, DTYPE_F16, false));
}

static void test_replay(void)
{
    for (enum dtype t : TYPES) {
        char name[80];
        snprintf(name, sizeof name, "one graph for all lists: 8/2 heads of 64, %s", type_name(t));
        replay(name, heads(8, 2, 64, 16, t, false));
    }
}

/* ---- numbers that are none ---- */

static void spoil(world *w, int seq, int pos, float with)
{
    const size_t row = (size_t)(w->s.kv_heads * w->s.head_dim), begin = (size_t)pos * row;
    sequence &q = w->seqs[(size_t)seq];
    for (size_t d = 0; d < row; d += (size_t)w->s.head_dim)
        q.k[begin + d] = q.v[begin + d + 1] = with;
}

static void stays_in_its_rows(enum dtype t, int dim, float with, bool exact)
{
    char name[120];
    snprintf(name, sizeof name, "%g stays where it is seen: %s, heads of %d%s", (double)with,
             type_name(t), dim, exact ? ", exact" : "");
    test(name, [&] {
        world w(heads(8, 2, dim, 16, t, exact), { 80, 80, 600 });
        results before, after;
        w.append_all();
        const std::vector<range> good = { { 0, 40, 30, false },
                                          { 2, 529, 1, true },
                                          { 1, 20, 1, true } };
        w.run(good, &before);
        spoil(&w, 1, 21, with);
        spoil(&w, 2, 530, with);
        w.append({ { 1, 21, 1, false }, { 2, 530, 1, true } });
        if (kv_rows_scaled(t)) w.check_pool(); /* which NaN f16 stores is not specified */
        const std::vector<range> bad = { { 1, 70, 2, false },
                                         { 1, 79, 1, true },
                                         { 2, 599, 1, true } };
        std::vector<range> both = { bad[0], good[0], bad[1], good[1], good[2], bad[2] };
        w.run(both, &after);
        CHECK(same(before, after), "it came into rows that do not see it");
        for (const range &r : bad)
            for (int i = 0; i < r.n_q; i++)
                /* the first element of the row; of a row without a scale, all of them */
                for (size_t h = 0; h < 8; h++)
                    CHECK(!isfinite(after.at({ r.seq, r.pos + i })[h * (size_t)dim + 1]),
                          "it was lost in sequence %d position %d", r.seq, r.pos + i);
    });
}

static void test_nan(void)
{
    for (enum dtype t : { DTYPE_I8, DTYPE_F8_E4M3 })
        for (bool exact : { false, true }) {
            stays_in_its_rows(t, 64, NAN, exact);
            stays_in_its_rows(t, 128, INFINITY, exact);
        }
    stays_in_its_rows(DTYPE_F16, 64, NAN, false);
    stays_in_its_rows(DTYPE_F16, 128, NAN, true);
}

/* Values of every magnitude that a row's scale can express, and queries beyond f16. */
static void test_sizes(void)
{
    for (enum dtype t : { DTYPE_I8, DTYPE_F8_E4M3 })
        for (float size : { 1e-20f, 1e20f })
            test(t == DTYPE_I8 ? "values of other sizes: int8" : "values of other sizes: e4m3",
                 [&] {
                     world w(heads(8, 2, 64, 16, t, false), { 600, 70 });
                     for (sequence &q : w.seqs) {
                         for (float &x : q.v) x *= size;
                         for (size_t i = 0; i < q.k.size(); i++)
                             q.k[i] *= i / 64 % 2 ? 1e-3f : 1.0f;
                     }
                     w.size = (double)size;
                     const std::vector<range> all = { { 0, 599, 1, true },
                                                      { 1, 60, 10, false },
                                                      { 0, 580, 3, false } };
                     results r;
                     w.append_all();
                     w.run(all, &r);
                     if (is_good) w.check(r, all, 1);
                 });
    test("queries beyond f16 are its largest", [] {
        world w(heads(8, 2, 64, 16, DTYPE_F16, false), { 40 });
        results large, largest;
        const std::vector<range> all = { { 0, 30, 5, false }, { 0, 36, 1, true } };
        w.append_all();
        for (size_t i = 0; i < w.seqs[0].q.size(); i += 7)
            w.seqs[0].q[i] = i % 2 ? 1e6f : -70000.0f;
        w.run(all, &large);
        for (float &x : w.seqs[0].q) x = std::min(65504.0f, std::max(-65504.0f, x));
        w.run(all, &largest);
        CHECK(same(large, largest), "not as the largest");
        for (const auto &row : large)
            for (float x : row.second) CHECK(isfinite(x), "not a number");
    });
}

int main(int argc, char **argv)
{
    return run_tests(argc, argv,
                     { { "append", test_append },
                       { "bits", test_same_bits },
                       { "lengths", test_lengths },
                       { "nan", test_nan },
                       { "replay", test_replay },
                       { "shapes", test_shapes },
                       { "shared", test_shared },
                       { "sizes", test_sizes } });
}
