/* test_attention_append.cc - attention that appends the rows' keys and values itself gives the pool
 * and the rows that appending and then attending give, bit for bit, with one launch less, and leaves
 * the other shapes and lists to two calls.
 *
 * Two worlds of the same contents go both ways. Runs on a GPU or on tests/simt. Thread: one. */
#include "tests/cuda/attention_cases.h"

enum { POSITIONS = 1300 };

struct way {
    bool q_norm, k_norm, interleaved;
    int rot_dim; /* 0: all */
};

/* Norms, rotations, and what is rotated with them. */
class rotation {
  public:
    rotation(const struct shape &s, const way &by)
        : is(by), dim((size_t)s.head_dim), n_heads((size_t)s.n_heads), kv_heads((size_t)s.kv_heads),
          norms(random(2 * dim)), turns(random(POSITIONS * dim))
    {}
    struct rope_args of(float *q, float *k) const
    {
        struct rope_args r = {};
        r.heads[0] = { q, n_heads * dim, n_heads, dim, is.q_norm ? norms.at<float>() : nullptr };
        r.heads[1] = { k, kv_heads * dim, kv_heads, dim,
                       is.k_norm ? norms.at<float>() + dim : nullptr };
        r.n_heads = 2;
        r.rot_dim = is.rot_dim ? (size_t)is.rot_dim : dim;
        r.cos_sin = turns.at<float>();
        r.interleaved = is.interleaved;
        r.norm_eps = 1e-5f;
        return r;
    }

  private:
    static std::vector<float> random(size_t n)
    {
        std::vector<float> x(n);
        for (float &f : x) f = random_float();
        return x;
    }
    way is;
    size_t dim, n_heads, kv_heads;
    memory norms, turns;
};

/* A step's memory on the device, and its calls. */
class step {
  public:
    step(world *of, const std::vector<range> &ranges, int32_t room)
        : w(of), n(world::place(ranges, &begins)), q(bytes(of->s.n_heads, room)),
          k(bytes(of->s.kv_heads, room)), v(bytes(of->s.kv_heads, room)),
          out(bytes(of->s.n_heads, room))
    {
        w->stage(&st, ranges, begins);
        put(ranges);
    }
    ~step() { world::unstage(&st); }
    step(const step &) = delete;
    step &operator=(const step &) = delete;
    void put(const std::vector<range> &ranges)
    {
        const size_t dim = (size_t)w->s.head_dim, mine = (size_t)w->s.n_heads * dim,
                     kv = (size_t)w->s.kv_heads * dim;
        q.put_some(w->rows_of(ranges, begins, n, mine, &sequence::q));
        k.put_some(w->rows_of(ranges, begins, n, kv, &sequence::k));
        v.put_some(w->rows_of(ranges, begins, n, kv, &sequence::v));
    }
    /* apart: appends first. */
    cudaError_t run(cudaStream_t stream, const struct cuda_attn_list *list, const rotation &r,
                    const launch_bounds &by, bool apart, float *scratch) const
    {
        const struct rope_args rope = r.of(q.at<float>(), k.at<float>());
        const struct attention_append append = { k.at<float>(), v.at<float>(), &rope };
        const struct attention a = { w->kv,           list,          q.at<float>(),
                                     out.at<float>(), w->s.n_heads,  w->s.v_dim,
                                     w->scale,        w->s.exact,    scratch,
                                     by.n_at_once,    by.max_blocks, apart ? nullptr : &append,
                                     nullptr };
        cudaError_t e = cudaSuccess;
        if (apart) e = attention_kv_append(stream, &w->kv, list, append.k, append.v, append.rope);
        return e == cudaSuccess ? attention_run(stream, &a) : e;
    }
    world *w;
    std::vector<int32_t> begins;
    int32_t n;
    memory q, k, v, out;
    world::staged st = {};

  private:
    size_t bytes(int heads, int32_t room) const
    {
        return (size_t)std::max(n, room) * (size_t)(heads * w->s.head_dim) * sizeof(float);
    }
};

static memory *scratch_of(const struct shape &s, int n_rows, int n_keys)
{
    memory *m = new memory(sizeof(float) *
                           attention_scratch_floats((size_t)n_rows, (size_t)s.n_heads,
                                                    (size_t)s.v_dim, (size_t)n_keys));
    if (attention_scratch_prepare(nullptr, m->at<float>()) != cudaSuccess) abort();
    return m;
}

/* The sequences' positions before those of the ranges, in both worlds. */
static void append_before(world *const w[2], const std::vector<range> &ranges)
{
    std::vector<range> before;
    for (const range &r : ranges) before.push_back({ r.seq, 0, r.pos, false });
    for (int i = 0; i < 2; i++) w[i]->append(before);
}

static void compare(world *const w[2], const step &a, const step &b)
{
    std::vector<unsigned char> x, y;
    CHECK(const_cast<memory &>(a.out).get(&x) && const_cast<memory &>(b.out).get(&y),
          "written outside out");
    CHECK(x == y, "not the rows of two calls");
    CHECK(w[0]->pool_now(&x) && w[1]->pool_now(&y), "written outside the pool");
    CHECK(x == y, "not the pool of two calls");
}

/* Kernels that a call launches. */
static size_t n_launches(const step &s, const rotation &r, const launch_bounds &by, bool apart,
                         float *scratch)
{
    cudaGraph_t graph = nullptr;
    cudaStream_t stream;
    size_t n = 0;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess ||
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) != cudaSuccess ||
        s.run(stream, &s.st.list, r, by, apart, scratch) != cudaSuccess ||
        cudaStreamEndCapture(stream, &graph) != cudaSuccess ||
        cudaGraphGetNodes(graph, nullptr, &n) != cudaSuccess)
        abort();
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    return n;
}

/* saved: launches. */
static void both_ways(world *const w[2], const std::vector<range> &ranges, const way &how,
                      const launch_bounds &by, size_t saved)
{
    append_before(w, ranges);
    const rotation r(w[0]->s, how);
    step apart(w[0], ranges, 0), together(w[1], ranges, 0);
    memory *scratch = scratch_of(w[0]->s, (int)apart.st.rows.size(), POSITIONS);
    const size_t n = n_launches(apart, r, by, true, scratch->at<float>()),
                 fewer = n_launches(together, r, by, false, scratch->at<float>());
    const bool ran = apart.run(nullptr, &apart.st.list, r, by, true, scratch->at<float>()) ==
                         cudaSuccess &&
                     together.run(nullptr, &together.st.list, r, by, false, scratch->at<float>()) ==
                         cudaSuccess &&
                     cudaDeviceSynchronize() == cudaSuccess;
    delete scratch;
    CHECK(ran, "a call failed");
    CHECK(n == fewer + saved, "%zu launches instead of %zu", fewer, n);
    compare(w, apart, together);
}

static std::vector<range> last_rows(const std::vector<int> &lengths)
{
    std::vector<range> ranges;
    for (size_t i = 0; i < lengths.size(); i++)
        ranges.push_back({ (int)i, lengths[i] - 1, 1, true });
    return ranges;
}

/* Each sequence's last position. */
static void lasts(const struct shape &s, const std::vector<int> &lengths, const way &how,
                  const launch_bounds &by, size_t saved)
{
    char name[200];
    snprintf(
        name, sizeof name,
        "%d/%d heads of %d, blocks of %d, %s, %zu rows%s%s%s, %d segments at a time, %d blocks",
        s.n_heads, s.kv_heads, s.head_dim, s.block_tokens, type_name(s.dtype), lengths.size(),
        how.q_norm ? ", q norm" : "", how.k_norm ? ", k norm" : "",
        how.interleaved ? ", interleaved" : "", by.n_at_once, by.max_blocks);
    test(name, [&] {
        world a(s, lengths), b(s, lengths);
        world *const w[2] = { &a, &b };
        both_ways(w, last_rows(lengths), how, by, saved);
    });
}

static const enum dtype TYPES[] = { DTYPE_BF16, DTYPE_F16, DTYPE_I8, DTYPE_F8_E4M3 };
static const std::vector<int> EDGES = { 1,   2,   16,  17,  32,  33,  64,  65,  127,
                                        128, 129, 256, 257, 300, 513, 640, 641, 1100 };

/* ---- tests ---- */

static void test_types(void)
{
    const int groups[][3] = { { 8, 2, 16 }, { 16, 1, 64 }, { 5, 1, 16 }, { 8, 1, 8 } };
    int i = 0;
    for (enum dtype t : TYPES)
        for (int dim : { 64, 128 })
            for (int n = 0; n < 2; n++, i++) {
                if (TEST_IS_SANITIZED && (i + i / 2) % 2) continue;
                const int *g = groups[(i + i / 4) % 4];
                const bool norm = (i + i / 4) % 2 == 0;
                const way how = { norm, norm, i / 4 % 2 == (n == 0), 0 };
                lasts(heads(g[0], g[1], dim, g[2], t, false), EDGES, how,
                      { 0, n ? 3 : 0, false, 0 }, 1);
            }
}

static void test_norms(void)
{
    for (int i = 0; i < 8; i++)
        lasts(heads(i % 2 ? 12 : 8, 1, i % 4 < 2 ? 128 : 64, 16, TYPES[i % 3 == 2 ? 2 : 0], false),
              { 1, 130, 77, 512 }, { (i & 1) != 0, (i & 2) != 0, (i & 4) != 0, 0 },
              { i % 3, i % 4, false, 0 }, (i & 1) == (i & 2) / 2);
}

static void test_rows(void)
{
    std::vector<int> many;
    for (int i = 0; i < 64; i++) many.push_back(i * 37 % 150 + 1);
    for (int n : { 1, 2, 7, 33, 64 })
        lasts(heads(4, 1, 64, 16, DTYPE_BF16, false), { many.begin(), many.begin() + n },
              { true, true, false, 0 }, { 0, n == 33 ? 5 : 0, false, 0 }, 1);
}

/* Two calls: groups of more queries than a block has, or so few that they need no tensor cores, f32,
 * a norm of one of the two, a rotation of half of a head, prompts, sequences of several rows. */
static void test_two_calls(void)
{
    const way how = { true, true, false, 0 };
    lasts(heads(17, 1, 64, 16, DTYPE_BF16, false), { 130, 5 }, how, {}, 0);
    lasts(heads(3, 1, 64, 16, DTYPE_BF16, false), { 130, 5 }, how, {}, 0);
    lasts(heads(4, 1, 32, 16, DTYPE_BF16, false), { 130, 5 }, how, {}, 0);
    lasts(heads(4, 1, 64, 16, DTYPE_F32, true), { 130, 5 }, how, {}, 0);
    lasts(heads(4, 1, 64, 16, DTYPE_BF16, false), { 130, 5 }, { true, true, false, 32 }, {}, 0);
    test("steps with prompts, and with several rows of a sequence", [&] {
        for (const range &other : { range{ 1, 3, 30, false }, range{ 1, 7, 2, true } }) {
            const struct shape s = heads(4, 1, 64, 16, DTYPE_BF16, false);
            world a(s, { 150, 40 }), b(s, { 150, 40 });
            world *const w[2] = { &a, &b };
            both_ways(w, { { 0, 149, 1, true }, other }, how, {}, 0);
            if (!is_good) return;
        }
    });
}

/* Prompts, whose queries are rotated into bf16 where heads of 128 allow it. */
static void test_prompts(void)
{
    const way ways[] = { { true, true, false, 0 },
                         { false, false, false, 0 },
                         { false, false, true, 0 },
                         { true, false, false, 0 } };
    for (const way &how : ways)
        for (int dim : { 64, 128 })
            if (!TEST_IS_SANITIZED || (dim == 64) == how.q_norm)
                test("prompts", [&] {
                    const struct shape s = heads(8, 2, dim, 64, DTYPE_BF16, false);
                    world a(s, { 150, 700 }), b(s, { 150, 700 });
                    world *const w[2] = { &a, &b };
                    both_ways(w, { { 0, 5, 140, false }, { 1, 620, 33, false } }, how, {}, 0);
                });
}

/* Rows whose first segments are one product have positions of their own. */
static void test_shared(void)
{
    for (int group : { 4, 8, 5 })
        for (int dim : { 64, 128 })
            test("rows that share segments", [&] {
                const struct shape s = heads(group, 1, dim, 16, DTYPE_BF16, false);
                const std::vector<int> lengths = { 520, 513, 390, 513, 257, 512 };
                world a(s, lengths), b(s, lengths);
                world *const w[2] = { &a, &b };
                for (world *x : w)
                    for (size_t to : { 1, 2, 3, 5 }) share(x, 0, to, to == 2 ? 384 : 496);
                both_ways(w, last_rows(lengths), { true, true, group == 5, 0 }, {}, 1);
            });
}

/* NaN, infinity and rows of zeros, as the pool's type has them. */
static void test_special(void)
{
    for (enum dtype t : TYPES)
        test("keys and values that are no usual numbers", [&] {
            const struct shape s = heads(8, 2, 64, 16, t, false);
            const std::vector<int> lengths = { 20, 129, 64, 5 };
            world a(s, lengths), b(s, lengths);
            world *const w[2] = { &a, &b };
            for (world *x : w)
                for (size_t i = 0; i < 4; i++)
                    for (std::vector<float> *of : { &x->seqs[i].k, &x->seqs[i].v }) {
                        float *last = of->data() + of->size() - 128;
                        if (i == 0) std::fill_n(last, 128, 0.0f);
                        if (i == 1) last[5] = NAN, last[70] = INFINITY;
                        if (i == 2) last[3] = 1e30f, last[100] = -1e-40f;
                    }
            both_ways(w, last_rows(lengths), { false, false, true, 0 }, {}, 1);
        });
}

static void test_graph(void)
{
    for (enum dtype t : { DTYPE_BF16, DTYPE_I8 })
        test("one graph for many steps", [&] {
            const struct shape s = heads(8, 2, 128, 16, t, false);
            world a(s, { 700, 40, 160, 1 }), b(s, { 700, 40, 160, 1 });
            world *const w[2] = { &a, &b };
            const std::vector<std::vector<range>> steps = {
                { { 0, 500, 1, true }, { 1, 15, 1, true }, { 2, 127, 1, true }, { 3, 0, 1, true } },
                { { 0, 501, 1, true }, { 2, 128, 1, true } },
                {},
                { { 2, 129, 1, true }, { 1, 16, 1, true }, { 0, 502, 1, true } }
            };
            const rotation r(s, { true, true, false, 0 });
            const launch_bounds by = {};
            const int n_rows = 8;
            append_before(w, steps[0]);
            captured_attention on;
            struct cuda_attn_list list = { {},
                                           on.counts.at<struct cuda_attn_counts>(),
                                           on.seqs.at<cuda_attn_seq>(),
                                           on.rows.at<cuda_attn_row>(),
                                           on.tables.at<int32_t>() };
            struct attention shape = {};
            shape.kv = b.kv, shape.n_heads = s.n_heads, shape.v_dim = s.v_dim;
            attention_capture_bounds(&shape, n_rows, n_rows, 0, 900, &list.bounds);
            memory *scratch = scratch_of(s, n_rows, POSITIONS);
            cudaStream_t stream;
            CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess,
                  "no stream");
            step together(&b, steps[0], n_rows + 4);
            cudaGraphExec_t exec = capture(stream, [&] {
                return together.run(stream, &list, r, by, false, scratch->at<float>());
            });
            CHECK(exec, "the call cannot be captured");
            for (const std::vector<range> &ranges : steps) {
                step apart(&a, ranges, n_rows + 4);
                CHECK(attention_fits_capture(&list.bounds, &apart.st.list.bounds), "bounds");
                together.n = world::place(ranges, &together.begins);
                together.put(ranges);
                together.out.put(
                    std::vector<unsigned char>((size_t)(n_rows + 4) * 8 * 128 * 4, 0xff).data());
                on.put(apart.st);
                CHECK(cudaDeviceSynchronize() == cudaSuccess &&
                          cudaGraphLaunch(exec, stream) == cudaSuccess &&
                          cudaStreamSynchronize(stream) == cudaSuccess,
                      "the graph failed");
                CHECK(apart.run(nullptr, &apart.st.list, r, by, true, scratch->at<float>()) ==
                              cudaSuccess &&
                          cudaDeviceSynchronize() == cudaSuccess,
                      "a call failed");
                compare(w, apart, together);
                if (!is_good) return;
            }
            delete scratch;
            cudaGraphExecDestroy(exec);
            cudaStreamDestroy(stream);
        });
}

int main(int argc, char **argv)
{
    return run_tests(argc, argv,
                     { { "graph", test_graph },
                       { "norms", test_norms },
                       { "rows", test_rows },
                       { "shared", test_shared },
                       { "special", test_special },
                       { "two_calls", test_two_calls },
                       { "prompts", test_prompts },
                       { "types", test_types } });
}
