/* test_attention_cuda.cc - attention_kv_append and attention_run over pools of f32 and bf16, with
 * the fixture of attention_fixture.h.
 *
 * Runs on a GPU or on tests/simt. Thread: one. */
#include "tests/cuda/attention_cases.h"

/* ---- tests ---- */

static void test_shapes(void)
{
    const int pairs[4][2] = { { 8, 8 }, { 8, 2 }, { 4, 1 }, { 6, 3 } },
              dims[] = { 4, 10, 16, 64, 80, 128, 256 }, blocks[] = { 1, 7, 16, 64, 256 };
    int i = 0;
    for (int dim : dims)
        for (const int *p : pairs)
            for (int t = 0; t < 2; t++, i++) {
                if (TEST_IS_SANITIZED && i % 3 != 0) continue;
                const std::vector<range> ranges = {
                    { 0, 99, 1, true }, { 1, 2, 5, false }, { 2, 0, 1, true }, { 3, 30, 10, false }
                };
                near_reference(heads(p[0], p[1], dim, blocks[i % 5], t ? DTYPE_F32 : DTYPE_BF16,
                                     i / 2 % 2 != 0),
                               { 100, 7, 1, 40 }, ranges);
            }
    for (int block : blocks)
        near_reference(heads(4, 2, 64, block, DTYPE_BF16, false), { 150, 70 },
                       { { 0, 149, 1, true }, { 1, 3, 67, false } }, 7);
    near_reference(heads(1, 1, 1, 16, DTYPE_F32, true), { 20 }, { { 0, 0, 20, false } });
    near_reference(heads(20, 2, 32, 16, DTYPE_BF16, false), { 20 }, { { 0, 15, 5, true } });
}

static void test_lengths(void)
{
    const std::vector<int> lengths = { 1, 63, 64, 65, 511, 512, 513, 1024, 1025, 1500 };
    std::vector<range> ranges, prompts;
    for (size_t i = 0; i < lengths.size(); i++) {
        ranges.push_back({ (int)i, lengths[i] - 1, 1, i % 3 != 0 });
        int n = std::min(lengths[i], (int)(i * 7 % 20 + 3));
        prompts.push_back({ (int)i, lengths[i] - n, n, false });
    }
    for (int dim : { 20, 64, 128 }) {
        if (TEST_IS_SANITIZED && dim != 64) continue;
        near_reference(heads(4, 2, dim, 16, DTYPE_BF16, false), lengths, ranges);
        near_reference(heads(4, 2, dim, 7, DTYPE_F32, true), lengths, ranges);
        near_reference(heads(4, 2, dim, 64, DTYPE_BF16, false), lengths, prompts, 5);
    }
    near_reference(heads(12, 2, 64, 16, DTYPE_BF16, false), { 1200 }, { { 0, 470, 90, false } },
                   11);
}

/* The blocks merge what they compute if all of them can run at a time, and a launch does if the
 * segments come in waves. */
static void same_in_waves(const char *name, const struct shape &s, const std::vector<int> &lengths,
                          const std::vector<range> &ranges)
{
    test(name, [&] {
        world w(s, lengths);
        results together, waves;
        w.append_all();
        w.run(ranges, &together, { 0, 1000, false, 0 });
        for (int n : { 5, 70 }) {
            w.run(ranges, &waves, { n, 0, false, 0 });
            CHECK(same(together, waves), "rows depend on how many segments run at a time (%d)", n);
        }
    });
}

/* Positions around those from which on segments are longer; more segments than a warp merges in one
 * round. */
static void test_long(void)
{
    const std::vector<range> ranges = { { 0, 8190, 3, true }, { 0, 16383, 2, true } };
    test("segments of a position", [] {
        const struct attn_seq seqs[] = { { 0, 1, 0, nullptr, true, 0, 0 },
                                         { 1, 2, 8191, nullptr, true, 0, 0 },
                                         { 3, 2, 16383, nullptr, true, 0, 0 },
                                         { 5, 1, 131071, nullptr, true, 0, 0 },
                                         { 6, 1, 8191, nullptr, false, 0, 0 } };
        const int of[][2] = { { 1, 128 },  { 64, 128 },  { 33, 256 }, { 64, 256 },
                              { 33, 512 }, { 256, 512 }, { 16, 512 } };
        struct cuda_attn_counts counts;
        struct cuda_attn_row rows[7];
        int32_t block = 0, n = 0;
        struct attn_seq with_table[5];
        for (int i = 0; i < 5; i++) with_table[i] = seqs[i], with_table[i].block_table = &block;
        attention_list_rows(&counts, with_table, 5, 1 << 20, false, rows);
        for (int i = 0; i < 7; i++) {
            CHECK(rows[i].per_segment == of[i][1] && rows[i].segment == n &&
                      rows[i].pos / rows[i].per_segment + 1 == of[i][0],
                  "row %d has %d segments of %d", i, rows[i].pos / rows[i].per_segment + 1,
                  rows[i].per_segment);
            n += of[i][0];
        }
        CHECK(counts.n_segments == n, "%d segments, not %d", counts.n_segments, n);
        for (int i = 0; i < 7; i++)
            CHECK(rows[i].n_old == 0, "row %d: a step with other rows of a sequence writes", i);
        with_table[3].n_q = 1, with_table[4].n_q = 0;
        attention_list_rows(&counts, with_table + 3, 2, 1 << 20, false, rows);
        CHECK(rows[0].n_old == 131071, "%d keys are old", rows[0].n_old);
        attention_list_rows(&counts, with_table, 1, 1 << 20, true, rows);
        CHECK(rows[0].per_segment == 512, "latents have segments of %d", rows[0].per_segment);
        for (int32_t i = 0; i < 7; i++)
            CHECK(attention_scratch_floats(1, 1, 4, (size_t)rows[i].pos + 1) >=
                      (size_t)(of[i][0] * 8),
                  "no room for row %d", i);
    });
    same_in_waves("many segments, by the blocks themselves and wave by wave",
                  heads(2, 1, 16, 16, DTYPE_BF16, false), { 16385 }, ranges);
    /* more groups than a warp merges at a time; a last group of one segment */
    for (int dim : { 64, 128 })
        if (!TEST_IS_SANITIZED || dim == 64)
            same_in_waves("many groups, by the blocks themselves and wave by wave",
                          heads(5, 1, dim, 64, DTYPE_BF16, false), { 36000 },
                          { { 0, 33300, 1, true }, { 0, 35999, 1, true }, { 0, 1024, 1, true } });
    near_reference(heads(4, 1, 64, 64, DTYPE_BF16, false), { 16385 }, ranges);
    if (!TEST_IS_SANITIZED) near_reference(heads(1, 1, 16, 16, DTYPE_F32, true), { 16385 }, ranges);
}

/* Tiles of several segments, of groups that fill a tile of compute capability 9.0 or leave some of
 * it, and several tiles of one prompt beside others. */
static void test_prompts(void)
{
    near_reference(heads(8, 1, 128, 64, DTYPE_BF16, false), { 1300, 200 },
                   { { 0, 500, 800, false }, { 1, 0, 200, false } }, 53);
    near_reference(heads(10, 2, 128, 128, DTYPE_BF16, false), { 1100, 700 },
                   { { 0, 1000, 100, false }, { 1, 3, 500, false } }, 29);
    near_reference(heads(3, 3, 64, 64, DTYPE_BF16, false), { 700 }, { { 0, 0, 700, false } }, 31);
    same_bits("same bits: 5/1 heads of 128, blocks of 64, bf16",
              heads(5, 1, 128, 64, DTYPE_BF16, false));
}

/* The group sizes for which decode rows use tensor cores, and those next to them that do not. */
static void test_decode(void)
{
    const std::vector<int> lengths = { 1, 15, 16, 17, 33, 64, 65, 500, 512, 513, 1040, 1600 };
    const int groups[][3] = { { 4, 4, 16 },   { 20, 4, 64 }, { 16, 2, 7 },  { 12, 1, 1 },
                              { 32, 2, 256 }, { 3, 1, 16 },  { 17, 1, 16 }, { 40, 1, 16 } };
    std::vector<range> ranges;
    for (size_t i = 0; i < lengths.size(); i++)
        ranges.push_back({ (int)i, lengths[i] - 1, 1, true });
    ranges.push_back({ 11, 1020, 9, true });
    for (const int *g : groups)
        for (int dim : { 64, 128 })
            if (!TEST_IS_SANITIZED || (g[0] / g[1] > 8) == (dim == 64))
                near_reference(heads(g[0], g[1], dim, g[2], DTYPE_BF16, false), lengths, ranges);
    for (int dim : { 64, 128 }) {
        test("a decode row reads no key behind its own", [&] {
            world w(heads(8, 2, dim, 16, DTYPE_BF16, false), { 600, 40 });
            results before, after;
            w.append_all();
            const std::vector<range> first = { { 0, 530, 1, true }, { 1, 20, 1, true } };
            w.run(first, &before);
            for (size_t d = 0; d < (size_t)(2 * dim); d++)
                w.seqs[0].k[531 * (size_t)(2 * dim) + d] =
                    w.seqs[0].v[531 * (size_t)(2 * dim) + d] =
                        w.seqs[1].v[21 * (size_t)(2 * dim) + d] = NAN;
            w.append_all();
            w.run(first, &after);
            CHECK(same(before, after), "a later position's NaN came in");
        });
    }
}

/* A list that wrongly says that rows share segments shows that shared segments are read once. */
static void test_shared(void)
{
    shared_beginnings(heads(8, 2, 64, 16, DTYPE_BF16, false));
    shared_beginnings(heads(5, 1, 128, 64, DTYPE_BF16, false));
    shared_beginnings(heads(16, 2, 128, 32, DTYPE_BF16, false));
    shared_beginnings(heads(12, 1, 64, 16, DTYPE_BF16, false));
    shared_beginnings(heads(4, 2, 64, 16, DTYPE_BF16, false));
    test("shared segments are read once", [] {
        world w(heads(8, 2, 64, 16, DTYPE_BF16, false), { 1100, 1200, 600 });
        w.append_all();
        const std::vector<range> all = { { 0, 1099, 1, true },
                                         { 1, 1199, 1, true },
                                         { 2, 599, 1, true } };
        results hinted, exact;
        w.run(all, &hinted, { 0, 0, false, 1 });
        for (size_t to : { 1, 2 })
            std::copy_n(w.seqs[0].table.begin(), CUDA_ATTN_SEGMENT_LEAST / 16,
                        w.seqs[to].table.begin());
        w.run(all, &exact);
        CHECK(same(hinted, exact), "every row read keys of its own");
    });
}

static void test_latent(void)
{
    struct shape small = { 12, 1, 40, 32, 16, DTYPE_BF16, true, false },
                 large = { 16, 1, 576, 512, 64, DTYPE_BF16, true, false };
    const std::vector<range> ranges = { { 0, 599, 1, true },
                                        { 1, 20, 13, false },
                                        { 2, 0, 1, true } };
    near_reference(small, { 600, 33, 1 }, ranges);
    near_reference(large, { 600, 33, 1 }, ranges, 4);
    large.n_heads = 80;
    near_reference(large, { 100, 33, 1 },
                   { { 0, 99, 1, true }, { 1, 20, 3, false }, { 2, 0, 1, true } }, 4);
    large.n_heads = 16;
    small.dtype = large.dtype = DTYPE_F32;
    small.exact = large.exact = true;
    near_reference(small, { 600, 33, 1 }, ranges);
    near_reference(large, { 600, 33, 1 }, ranges, 4);
}

static void test_same_bits(void)
{
    same_bits("same bits: 4/2 heads of 64, bf16", heads(4, 2, 64, 16, DTYPE_BF16, false));
    same_bits("same bits: 16/2 heads of 64, bf16", heads(16, 2, 64, 64, DTYPE_BF16, false));
    same_bits("same bits: 6/1 heads of 128, bf16", heads(6, 1, 128, 7, DTYPE_BF16, false));
    same_bits("same bits: 2/2 heads of 80, f32, exact", heads(2, 2, 80, 64, DTYPE_F32, true));
    same_bits("same bits: 4/2 heads of 6, bf16", heads(4, 2, 6, 16, DTYPE_BF16, false));
    same_bits("same bits: 20 heads of latents on tensor cores",
              { 20, 1, 576, 512, 16, DTYPE_BF16, true, false }, 512);
    same_bits("same bits: latent", { 10, 1, 40, 32, 16, DTYPE_BF16, true, false });
}

static void test_replay(void)
{
    replay("one graph for all lists: 8/2 heads of 64, bf16",
           heads(8, 2, 64, 16, DTYPE_BF16, false));
    replay("one graph for all lists: 4/2 heads of 20, f32, exact",
           heads(4, 2, 20, 16, DTYPE_F32, true));
    replay("one graph for all lists: latent", { 10, 1, 40, 32, 16, DTYPE_BF16, true, false });
    test("lists that a graph does not compute", [] {
        const struct cuda_attn_counts bounds = { 8, 8, 8, 20, 20, 5000, 5000, 8 };
        struct cuda_attn_counts over = bounds;
        CHECK(attention_fits_capture(&bounds, &over), "its own bounds");
        for (int32_t *n : { &over.n_rows, &over.n_decode, &over.n_prefill, &over.n_segments,
                            &over.n_segments_decode, &over.n_keys_max, &over.n_keys_prefill,
                            &over.n_rows_seq }) {
            ++*n;
            CHECK(!attention_fits_capture(&bounds, &over), "more than the bounds have room for");
            --*n;
        }
    });
    test("bounds of a graph fit into one pass over the scratch", [] {
        struct attention a = {};
        struct cuda_attn_counts bounds;
        a.kv = { nullptr, DTYPE_BF16, true, 1, 576, 16 };
        a.n_heads = 128, a.v_dim = 512;
        attention_capture_bounds(&a, 256, 256, 256, 131072, &bounds);
        CHECK(bounds.n_segments > 0 && bounds.n_segments < 256 * 256, "%d segments",
              bounds.n_segments);
        CHECK(attention_scratch_floats(256, 128, 512, 131072) >=
                  (size_t)bounds.n_segments * 128 * 512,
              "%d segments have no room", bounds.n_segments);
    });
}

static void test_chunked_append(void)
{
    test("append in pieces", [] {
        world w(heads(4, 2, 20, 7, DTYPE_BF16, false), { 30, 12 });
        w.append({ { 0, 0, 9, false } });
        w.append({ { 0, 9, 1, true }, { 1, 0, 12, false } });
        w.append({ { 0, 10, 0, false }, { 0, 10, 20, false } });
        w.check_pool();
    });
}

static void test_nothing(void)
{
    test("empty lists and sequences without rows", [] {
        world w(heads(4, 2, 64, 16, DTYPE_BF16, false), { 30, 12 });
        results r;
        w.append({});
        w.append({ { 0, 0, 0, false } });
        w.append_all();
        w.run({}, &r);
        w.run({ { 0, 30, 0, true }, { 1, 3, 0, false } }, &r);
        CHECK(r.empty(), "rows from nowhere");
        w.run({ { 0, 30, 0, true }, { 1, 3, 2, false }, { 0, 3, 0, false } }, &r);
        if (is_good) w.check(r, { { 1, 3, 2, false } }, 1);
    });
}

static void test_nan(void)
{
    for (bool exact : { false, true })
        test(exact ? "NaN stays in its sequence, exact" : "NaN stays in its sequence", [&] {
            world w(heads(4, 2, 64, 16, DTYPE_BF16, exact), { 80, 80, 600 });
            const std::vector<range> good = { { 0, 40, 30, false }, { 2, 599, 1, true } },
                                     bad = { { 1, 70, 2, false }, { 1, 79, 1, true } };
            results before, after;
            w.append_all();
            w.run(good, &before);
            for (size_t d = 0; d < 128; d++) w.seqs[1].k[128 + d] = w.seqs[1].v[256 + d] = NAN;
            w.append({ { 1, 0, 80, false } });
            std::vector<range> both = { bad[0], good[0], bad[1], good[1] };
            w.run(both, &after);
            CHECK(same(before, after), "another sequence's NaN came in");
            for (const auto &row : after)
                if (row.first.first == 1)
                    for (float x : row.second) CHECK(isnan(x), "a NaN was lost");
        });
}

int main(int argc, char **argv)
{
    return run_tests(argc, argv,
                     { { "decode", test_decode },
                       { "append", test_chunked_append },
                       { "bits", test_same_bits },
                       { "latent", test_latent },
                       { "lengths", test_lengths },
                       { "long", test_long },
                       { "nan", test_nan },
                       { "nothing", test_nothing },
                       { "prompts", test_prompts },
                       { "replay", test_replay },
                       { "shapes", test_shapes },
                       { "shared", test_shared } });
}
