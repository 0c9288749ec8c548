/* attention_cases.h - tests of attention on a GPU that are parameterised by a shape: results near
 * the reference, the same bits in every call, and from a captured graph.
 *
 * Empty for C. Thread: one. */
#ifndef BATON_TESTS_CUDA_ATTENTION_CASES_H
#define BATON_TESTS_CUDA_ATTENTION_CASES_H

#ifdef __cplusplus
#include "tests/cuda/attention_fixture.h"

static inline struct shape heads(int n_heads, int kv_heads, int dim, int block_tokens, enum dtype t,
                                 bool exact)
{
    return { n_heads, kv_heads, dim, dim, block_tokens, t, false, exact };
}

static inline void near_reference(const struct shape &s, const std::vector<int> &lengths,
                                  const std::vector<range> &ranges, int every = 1)
{
    char name[160];
    snprintf(name, sizeof name, "%d/%d heads of %d/%d, blocks of %d, %s%s%s", s.n_heads, s.kv_heads,
             s.head_dim, s.v_dim, s.block_tokens, type_name(s.dtype), s.latent ? ", latent" : "",
             s.exact ? ", exact" : "");
    test(name, [&] {
        world w(s, lengths);
        results r;
        w.append_all();
        w.check_pool();
        w.run(ranges, &r);
        if (is_good) w.check(r, ranges, every);
        printf("       worst %.2g of what is allowed\n", w.worst);
    });
}

/* Makes the first n positions of `to` those of `from`, in the same blocks. */
static inline void share(world *w, size_t from, size_t to, int n)
{
    const size_t width = (size_t)(w->s.kv_heads * w->s.head_dim);
    const sequence &a = w->seqs[from];
    sequence &b = w->seqs[to];
    std::copy_n(a.k.begin(), (size_t)n * width, b.k.begin());
    std::copy_n(a.v.begin(), (size_t)n * width, b.v.begin());
    std::copy_n(a.table.begin(), n / w->s.block_tokens, b.table.begin());
}

static inline void shared_beginnings(const struct shape &s)
{
    char name[160];
    snprintf(name, sizeof name, "beginnings that rows share: %d/%d heads of %d, blocks of %d",
             s.n_heads, s.kv_heads, s.head_dim, s.block_tokens);
    test(name, [&] {
        world w(s, { 1700, 1100, 1500, 700, 90, 1300 });
        const std::vector<range> all = { { 0, 1690, 1, true }, { 1, 1099, 1, true },
                                         { 2, 1400, 3, true }, { 5, 1200, 1, true },
                                         { 3, 699, 1, true },  { 4, 89, 1, true },
                                         { 1, 511, 1, true },  { 0, 900, 1, true },
                                         { 3, 500, 6, false } };
        for (size_t to : { 1, 2, 5 }) share(&w, 0, to, 1088);
        share(&w, 0, 3, 576);
        w.append_all();
        w.check_pool();
        std::vector<int32_t> begins;
        world::staged st;
        world::place(all, &begins);
        w.stage(&st, all, begins);
        world::unstage(&st);
        const int shared[] = { 0, 8, 8, 10, 10, 8, 4, 0, 0, 4, 0, 0, 0, 0, 0, 0 };
        for (size_t i = 0; i < st.rows.size(); i++)
            CHECK(st.rows[i].shared == shared[i], "row %zu shares %d segments, not %d", i,
                  st.rows[i].shared, shared[i]);
        results together, alone, waves, wide;
        w.run(all, &together);
        for (const range &r : all)
            for (int i = 0; i < r.n_q; i++) w.run({ { r.seq, r.pos + i, 1, r.generated } }, &alone);
        CHECK(same(together, alone), "rows depend on whom they share keys with");
        w.run(all, &waves, { 3, 0, false, 0 });
        CHECK(same(together, waves), "rows depend on how many segments run at a time");
        w.run(all, &wide, { 0, 2, true, 0 });
        CHECK(same(together, wide), "rows depend on bounds");
        w.check(together, all, 1);
    });
}

/* The sequences have 700, 90 and 1100 positions; one segment less for shapes that take long. */
static inline void same_bits(const char *name, const struct shape &s,
                             int less = TEST_IS_SANITIZED ? 512 : 0)
{
    test(name, [&] {
        const int first = 700 - less / 4, third = 1100 - less;
        world w(s, { first, 1, 90, third, 64 });
        w.append_all();
        std::vector<range> all = { { 0, first - 1, 1, true },
                                   { 1, 0, 1, false },
                                   { 2, 20, less ? 10 : 70, false },
                                   { 3, third - 3, 3, true } };
        all.push_back({ 4, 63, 1, true });
        if (!less) all.push_back({ 0, 500, 30, false });
        results together, alone, waves;
        w.run(all, &together);
        for (const range &r : all) w.run({ r }, &alone);
        CHECK(same(together, alone), "rows depend on the batch");
        for (int n : { 1, 2, 5 }) {
            if (TEST_IS_SANITIZED && n != 2) continue;
            w.run(all, &waves, { n, 0, false, 0 });
            CHECK(same(together, waves), "rows depend on how many segments run at a time (%d)", n);
        }
        const launch_bounds bounds[] = {
            { 0, 0, true, 0 }, { 0, 3, true, 0 }, { 0, 1, false, 0 }, { 1, 5, false, 0 }
        };
        for (const launch_bounds &by : bounds) {
            results others;
            w.run(all, &others, by);
            CHECK(same(together, others),
                  "rows depend on bounds or grids (at most %d blocks, %s bounds)", by.max_blocks,
                  by.wide ? "wide" : "exact");
        }
        results whole, chunks;
        const int begin = 480, end = less ? 520 : 630;
        w.run({ { 3, begin, end - begin, false } }, &whole);
        for (int pos = begin, n = 1; pos < end; pos += n, n = std::min(n * 3, end - pos))
            w.run({ { 2, 5, 1, false }, { 3, pos, n, false } }, &chunks, { n % 2, 0, false, 0 });
        CHECK(same(whole, chunks), "rows depend on how a prompt was chunked");
    });
}

/* The memory of the list that a graph was captured with, into which other lists are written. */
struct captured_attention {
    memory counts, seqs, rows, tables;
    captured_attention()
        : counts(sizeof(struct cuda_attn_counts)), seqs(16 * sizeof(cuda_attn_seq)),
          rows(64 * sizeof(cuda_attn_row)), tables(1024 * sizeof(int32_t))
    {}
    void put(const world::staged &st)
    {
        copy(counts, &st.list.bounds, sizeof st.list.bounds);
        copy(seqs, st.seqs.data(), st.seqs.size() * sizeof(cuda_attn_seq));
        copy(rows, st.rows.data(), st.rows.size() * sizeof(cuda_attn_row));
        copy(tables, st.tables.data(), st.tables.size() * sizeof(int32_t));
    }
    static void copy(const memory &to, const void *from, size_t bytes)
    {
        if (bytes) cudaMemcpy(to.at<char>(), from, bytes, cudaMemcpyHostToDevice);
    }
};

static inline cudaGraphExec_t capture(cudaStream_t stream,
                                      const std::function<cudaError_t()> &calls)
{
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) != cudaSuccess ||
        calls() != cudaSuccess)
        return nullptr;
    if (cudaStreamEndCapture(stream, &graph) != cudaSuccess ||
        cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess)
        return nullptr;
    cudaGraphDestroy(graph);
    return exec;
}

/* A captured graph of append and attention, replayed for other lists, gives the same pool and rows
 * as calls launched for those lists. */
static inline void replay(const char *name, const struct shape &s)
{
    test(name, [&] {
        world w(s, { 700, 1, 90, 1100, 64 });
        w.append_all();
        const std::vector<std::vector<range>> lists = {
            { { 0, 699, 1, true }, { 1, 0, 1, false }, { 2, 70, 20, false }, { 3, 1097, 3, true } },
            { { 3, 1040, 1, true } },
            {},
            { { 4, 63, 1, true }, { 0, 200, 1, true }, { 3, 511, 2, false } },
            { { 2, 3, 33, false } }
        };
        const int n_rows = 64;
        const size_t q_row = (size_t)(s.n_heads * s.head_dim),
                     kv_row = (size_t)(s.kv_heads * s.head_dim),
                     out_row = (size_t)(s.n_heads * s.v_dim);
        captured_attention on;
        memory q(n_rows * q_row * 4), k(n_rows * kv_row * 4), v(n_rows * kv_row * 4),
            out(n_rows * out_row * 4);
        memory scratch(4 *
                       attention_scratch_floats(n_rows, (size_t)s.n_heads, (size_t)s.v_dim, 5000));
        CHECK(attention_scratch_prepare(nullptr, scratch.at<float>()) == cudaSuccess, "scratch");
        struct cuda_attn_list list = { {},
                                       on.counts.at<struct cuda_attn_counts>(),
                                       on.seqs.at<cuda_attn_seq>(),
                                       on.rows.at<cuda_attn_row>(),
                                       on.tables.at<int32_t>() };
        const struct attention a = {
            w.kv,    &list,   q.at<float>(), out.at<float>(),     s.n_heads,
            s.v_dim, w.scale, s.exact,       scratch.at<float>(), 0,
            0,       nullptr, nullptr
        };
        attention_capture_bounds(&a, n_rows, n_rows, n_rows, 5000, &list.bounds);
        cudaStream_t stream;
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess,
              "no stream");
        cudaGraphExec_t exec = capture(stream, [&] {
            cudaError_t e = attention_kv_append(stream, &w.kv, &list, k.at<float>(),
                                                s.latent ? nullptr : v.at<float>(), nullptr);
            return e == cudaSuccess ? attention_run(stream, &a) : e;
        });
        CHECK(exec, "the calls cannot be captured");
        for (size_t i = 0; i < lists.size(); i++) {
            results alone, again;
            std::vector<int32_t> begins;
            world::staged st;
            w.run(lists[i], &alone);
            const int32_t n = world::place(lists[i], &begins);
            w.stage(&st, lists[i], begins);
            CHECK(attention_fits_capture(&list.bounds, &st.list.bounds),
                  "list %zu is not within the bounds", i);
            on.put(st);
            w.unstage(&st);
            q.put_some(w.rows_of(lists[i], begins, n, q_row, &sequence::q));
            k.put_some(w.rows_of(lists[i], begins, n, kv_row, &sequence::k));
            if (!s.latent) v.put_some(w.rows_of(lists[i], begins, n, kv_row, &sequence::v));
            out.put(std::vector<unsigned char>(n_rows * out_row * 4, 0xff).data());
            CHECK(cudaDeviceSynchronize() == cudaSuccess &&
                      cudaGraphLaunch(exec, stream) == cudaSuccess,
                  "list %zu: no launch", i);
            CHECK(cudaStreamSynchronize(stream) == cudaSuccess, "list %zu failed", i);
            w.take(lists[i], begins, &out, out_row, &again);
            if (!is_good) return;
            CHECK(alone.size() == again.size() && same(alone, again),
                  "list %zu: not what a call gives", i);
        }
        w.check_pool();
        cudaGraphExecDestroy(exec);
        cudaStreamDestroy(stream);
    });
}

/* The main function of a program with these tests. An argument names a single test; --list prints
 * the names. */
static inline int run_tests(int argc, char **argv,
                            const std::map<std::string, void (*)(void)> &tests)
{
    int n_devices = 0;
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (const auto &t : tests) printf("%s\n", t.first.c_str());
        return 0;
    }
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        printf("SKIPPED, NOT TESTED: no CUDA GPU, and no emulated one in this build: the kernels "
               "were NOT run\n0 passed, 0 failed, 1 skipped\n");
        return 0;
    }
    if (argc > 1 && !tests.count(argv[1])) {
        fprintf(stderr, "there is no group \"%s\": --list names them\n", argv[1]);
        return 2;
    }
    for (const auto &t : tests)
        if (argc < 2 || t.first == argv[1]) t.second();
    printf("%d passed, %d failed, 0 skipped\n", n_passed, n_failed);
    return n_failed != 0;
}
#endif
#endif
