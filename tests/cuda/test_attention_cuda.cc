/* test_attention_cuda.cc - attention_append and attention_run against a plain loop in double over the same rounded keys and values.
 *
 * A world is some sequences with their keys, values and queries for every position, in a pool whose blocks are scattered. A call is a list of
 * row ranges of sequences; every row's result has to be near the loop's, and have the same bits in whatever call the row is. Device memory is
 * NaN where nothing was appended, before and behind, so that reading too much shows; guards show writing too much.
 * Runs on a card or on tests/simt. Thread: one. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kernels/cuda/attention.h"

static int n_passed, n_failed;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { TEST_IS_SANITIZED = 1 }; /* as tests/harness/test.h has it */
#else
enum { TEST_IS_SANITIZED = 0 };
#endif

static const char *test_name = "";

#define CHECK(condition, ...)                                     \
    do {                                                          \
        if (!(condition)) {                                       \
            printf("  %s: %s:%d: ", test_name, __FILE__, __LINE__); \
            printf(__VA_ARGS__);                                  \
            printf("\n");                                         \
            is_good = false;                                      \
            return;                                               \
        }                                                         \
    } while (0)
static bool is_good;

static void test(const char *name, const std::function<void()> &body)
{
    test_name = name;
    is_good = true;
    body();
    (is_good ? n_passed : n_failed)++;
    printf("%s %s\n", is_good ? "ok    " : "FAILED", name);
    fflush(stdout);
}

/* ---- device memory with guards ---- */

enum { GUARD = 256 };

class memory {
public:
    explicit memory(size_t bytes) : size(bytes), all(bytes + 2 * GUARD, 0xff)
    {
        if (cudaMalloc((void **)&base, all.size()) != cudaSuccess) abort();
        cudaMemcpy(base, all.data(), all.size(), cudaMemcpyHostToDevice);
    }
    template <class T> explicit memory(const std::vector<T> &from) : memory(from.size() * sizeof(T)) { put(from.data()); }
    ~memory() { cudaFree(base); }
    memory(const memory &) = delete;
    memory &operator=(const memory &) = delete;
    template <class T> T *at() const { return (T *)(void *)(base + GUARD); }
    void put(const void *from)
    {
        if (size) cudaMemcpy(base + GUARD, from, size, cudaMemcpyHostToDevice);
    }
    void put_some(const std::vector<float> &from)
    {
        if (!from.empty()) cudaMemcpy(base + GUARD, from.data(), from.size() * sizeof(float), cudaMemcpyHostToDevice);
    }
    /* The bytes, when the guards are as they were. */
    bool get(std::vector<unsigned char> *to)
    {
        cudaMemcpy(all.data(), base, all.size(), cudaMemcpyDeviceToHost);
        to->assign(all.begin() + GUARD, all.end() - GUARD);
        for (size_t i = 0; i < GUARD; i++)
            if (all[i] != 0xff || all[all.size() - 1 - i] != 0xff) return false;
        return true;
    }

private:
    size_t                     size;
    std::vector<unsigned char> all;
    unsigned char             *base = nullptr;
};

/* ---- the world ---- */

struct shape {
    int        n_heads, kv_heads, head_dim, v_dim, block_tokens;
    enum dtype dtype;
    bool       latent, exact;
};

static uint32_t random_state = 1;
static uint32_t random_u32(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}
static float random_float(void) { return (float)(int)(random_u32() & 0xffff) / 32768.0f - 1.0f; }

static float round_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}

struct sequence {
    int                  n;          /* positions */
    std::vector<float>   k, v, q;    /* [n][kv_heads][head_dim], [n][n_heads][head_dim] */
    std::vector<int32_t> table;
};

/* Rows pos .. pos + n_q of a sequence. */
struct range {
    int  seq, pos, n_q;
    bool generated;
};

/* What a call is made with beside the list; wide: bounds of launches that are recorded for any list of twice as many rows. */
struct way {
    int  n_at_once, max_blocks;
    bool wide;
    int  shares; /* if not 0: rows are told that they share so many segments with the row before them */
};

using results = std::map<std::pair<int, int>, std::vector<float>>; /* by sequence and position */

class world {
public:
    struct shape           s;
    struct kv_layer        kv;
    std::vector<sequence>  seqs;
    float                  scale;
    std::vector<float>     pool_before;

    world(const struct shape &shape, const std::vector<int> &lengths, uint32_t seed = 1) : s(shape)
    {
        random_state = seed * 7919u;
        scale = 2.0f / sqrtf((float)s.head_dim);
        int n_blocks = 3;
        for (int n : lengths) n_blocks += (n + s.block_tokens - 1) / s.block_tokens;
        std::vector<int32_t> order((size_t)n_blocks);
        for (int i = 0; i < n_blocks; i++) order[(size_t)i] = i;
        for (int i = n_blocks - 1; i > 0; i--) std::swap(order[(size_t)i], order[random_u32() % (unsigned)(i + 1)]);
        size_t used = 0;
        for (int n : lengths) {
            sequence q;
            q.n = n;
            fill(&q.k, (size_t)n * (size_t)(s.kv_heads * s.head_dim));
            if (!s.latent) fill(&q.v, q.k.size());
            fill(&q.q, (size_t)n * (size_t)(s.n_heads * s.head_dim));
            for (int i = 0; i < n; i += s.block_tokens) q.table.push_back(order[used++]);
            seqs.push_back(q);
        }
        pool_bytes = (size_t)n_blocks * (size_t)(s.kv_heads * s.block_tokens * s.head_dim) * (s.latent ? 1 : 2) * element();
        pool = new memory(pool_bytes);
        kv = { pool->at<void>(), s.dtype, s.latent, s.kv_heads, s.head_dim, s.block_tokens };
    }
    ~world() { delete pool; }
    world(const world &) = delete;
    world &operator=(const world &) = delete;

    size_t element() const { return s.dtype == DTYPE_F32 ? 4 : 2; }
    float  rounded(float x) const { return s.dtype == DTYPE_F32 ? x : round_bf16(x); }

    /* The list on the device, its rows in q and out by `rows`: where each range begins. */
    struct staged {
        std::vector<attn_seq>  host;
        std::vector<cuda_seq>  seqs;
        std::vector<cuda_row>  rows;
        std::vector<int32_t>   tables;
        memory                *device[4];
        struct cuda_list       list;
    };
    void stage(staged *st, const std::vector<range> &ranges, const std::vector<int32_t> &begins)
    {
        size_t n_rows = 0;
        for (size_t i = 0; i < ranges.size(); i++) {
            const range &r = ranges[i];
            st->host.push_back({ begins[i], r.n_q, r.pos, seqs[(size_t)r.seq].table.data(), r.generated });
            st->seqs.push_back({ begins[i], r.n_q, r.pos, (int32_t)st->tables.size() });
            st->tables.insert(st->tables.end(), seqs[(size_t)r.seq].table.begin(), seqs[(size_t)r.seq].table.end());
            n_rows += (size_t)r.n_q;
        }
        st->rows.resize(n_rows);
        st->list = {};
        struct cuda_counts counts;
        attention_list_rows(&counts, st->host.data(), (int32_t)st->host.size(), s.block_tokens, st->rows.data());
        st->list.bounds = counts;
        st->device[0] = new memory(st->seqs);
        st->device[1] = new memory(st->rows);
        st->device[2] = new memory(st->tables);
        st->list.seqs = st->device[0]->at<cuda_seq>();
        st->list.rows = st->device[1]->at<cuda_row>();
        st->list.tables = st->device[2]->at<int32_t>();
        st->device[3] = new memory(std::vector<struct cuda_counts>(1, counts));
        st->list.counts = st->device[3]->at<struct cuda_counts>();
    }
    static void unstage(staged *st)
    {
        for (memory *m : st->device) delete m;
    }

    /* Ranges one after the other with a gap before each, the last range first. */
    static int32_t place(const std::vector<range> &ranges, std::vector<int32_t> *begins)
    {
        int32_t at = 0;
        begins->resize(ranges.size());
        for (size_t i = ranges.size(); i-- > 0;) {
            at += (int32_t)(i % 3);
            (*begins)[i] = at;
            at += ranges[i].n_q;
        }
        return at + 1;
    }

    std::vector<float> rows_of(const std::vector<range> &ranges, const std::vector<int32_t> &begins, int32_t n_rows, size_t width,
                               std::vector<float> sequence::*member) const
    {
        std::vector<float> all((size_t)n_rows * width, NAN);
        for (size_t i = 0; i < ranges.size(); i++) {
            const std::vector<float> &from = seqs[(size_t)ranges[i].seq].*member;
            std::copy_n(from.begin() + (ptrdiff_t)((size_t)ranges[i].pos * width), (size_t)ranges[i].n_q * width,
                        all.begin() + (ptrdiff_t)((size_t)begins[i] * width));
        }
        return all;
    }

    void append(const std::vector<range> &ranges)
    {
        std::vector<int32_t> begins;
        int32_t n_rows = place(ranges, &begins);
        size_t  width = (size_t)(s.kv_heads * s.head_dim);
        staged  st;
        stage(&st, ranges, begins);
        memory k(rows_of(ranges, begins, n_rows, width, &sequence::k));
        memory v(s.latent ? std::vector<float>() : rows_of(ranges, begins, n_rows, width, &sequence::v));
        CHECK(attention_append(nullptr, &kv, &st.list, k.at<float>(), s.latent ? nullptr : v.at<float>()) == cudaSuccess, "append");
        CHECK(cudaDeviceSynchronize() == cudaSuccess, "append failed");
        unstage(&st);
    }
    void append_all()
    {
        std::vector<range> ranges;
        for (size_t i = 0; i < seqs.size(); i++) ranges.push_back({ (int)i, 0, seqs[i].n, false });
        append(ranges);
    }

    /* The pool as it has to be; 0xff where nothing was appended. */
    void check_pool()
    {
        std::vector<unsigned char> want(pool_bytes, 0xff), is;
        for (const sequence &q : seqs)
            for (int pos = 0; pos < q.n; pos++)
                for (int h = 0; h < s.kv_heads; h++)
                    for (int part = 0; part < (s.latent ? 1 : 2); part++)
                        for (int d = 0; d < s.head_dim; d++) {
                            size_t block = (size_t)q.table[(size_t)(pos / s.block_tokens)], parts = s.latent ? 1 : 2;
                            size_t row = ((block * (size_t)s.kv_heads + (size_t)h) * parts + (size_t)part) * (size_t)s.block_tokens;
                            float  x = rounded((part ? q.v : q.k)[((size_t)pos * (size_t)s.kv_heads + (size_t)h) * (size_t)s.head_dim + (size_t)d]);
                            row += (size_t)(pos % s.block_tokens);
                            unsigned char bits[4];
                            memcpy(bits, &x, 4);
                            memcpy(&want[(row * (size_t)s.head_dim + (size_t)d) * element()], bits + 4 - element(), element());
                        }
        CHECK(pool->get(&is), "written beside the pool");
        CHECK(is == want, "the pool is not what was appended");
    }

    void run(const std::vector<range> &ranges, results *to, const way &by = { 0, 0, false, 0 })
    {
        std::vector<int32_t> begins;
        int32_t n_rows = place(ranges, &begins);
        size_t  width = (size_t)(s.n_heads * s.v_dim);
        staged  st;
        stage(&st, ranges, begins);
        memory q(rows_of(ranges, begins, n_rows, (size_t)(s.n_heads * s.head_dim), &sequence::q));
        memory out((size_t)n_rows * width * sizeof(float));
        struct attention a = { kv, &st.list, q.at<float>(), out.at<float>(), s.n_heads, s.v_dim, scale, s.exact, nullptr, by.n_at_once, by.max_blocks };
        if (by.wide) widen(&a, &st.list);
        for (size_t i = 1; by.shares && i < st.rows.size(); i++) st.rows[i].shared = by.shares;
        st.device[1]->put(st.rows.data());
        const struct cuda_counts &of = st.list.bounds;
        memory scratch(attention_scratch_floats((size_t)of.n_rows, (size_t)s.n_heads, (size_t)s.v_dim, (size_t)of.n_keys_max) * sizeof(float));
        a.scratch = scratch.at<float>();
        CHECK(attention_run(nullptr, &a) == cudaSuccess, "attention_run");
        CHECK(cudaDeviceSynchronize() == cudaSuccess, "attention_run failed");
        std::vector<unsigned char> bytes, other;
        CHECK(out.get(&bytes), "written beside out");
        CHECK(scratch.get(&other), "written beside the scratch");
        unstage(&st);
        take(ranges, begins, bytes, width, to);
    }
    void take(const std::vector<range> &ranges, const std::vector<int32_t> &begins, memory *out, size_t width, results *to)
    {
        std::vector<unsigned char> bytes;
        CHECK(out->get(&bytes), "written beside out");
        take(ranges, begins, bytes, width, to);
    }

    /* One head of one row, and how far weights that are rounded one by one may move each element: 0 means not at all. */
    std::vector<double> reference(int seq, int pos, int head, bool bf16_query, std::vector<double> *noise) const
    {
        const sequence &q = seqs[(size_t)seq];
        size_t kv_head = (size_t)(head / (s.n_heads / s.kv_heads)), dim = (size_t)s.head_dim, row = (size_t)s.kv_heads * dim;
        const float *x = &q.q[((size_t)pos * (size_t)s.n_heads + (size_t)head) * dim];
        std::vector<double> score((size_t)pos + 1), o((size_t)s.v_dim, 0.0);
        double top = -INFINITY, sum = 0;
        noise->assign(o.size(), 0.0);
        for (size_t j = 0; j <= (size_t)pos; j++) {
            const float *k = &q.k[j * row + kv_head * dim];
            for (size_t d = 0; d < dim; d++) score[j] += (double)rounded(k[d]) * (double)(bf16_query ? round_bf16(x[d]) : x[d]);
            score[j] *= (double)scale;
            top = std::max(top, score[j]);
        }
        for (size_t j = 0; j <= (size_t)pos; j++) {
            const float *v = &(s.latent ? q.k : q.v)[j * row + kv_head * dim];
            double p = exp(score[j] - top);
            sum += p;
            for (size_t d = 0; d < o.size(); d++) {
                o[d] += p * (double)rounded(v[d]);
                (*noise)[d] += p * p * (double)v[d] * (double)v[d];
            }
        }
        for (size_t d = 0; d < o.size(); d++) {
            o[d] /= sum;
            (*noise)[d] = sqrt((*noise)[d]) / sum;
        }
        return o;
    }

    void check(const results &r, bool (*takes_bf16)(const struct shape &, bool), const std::vector<range> &ranges, int every)
    {
        for (const range &g : ranges)
            for (int i = 0; i < g.n_q; i++) {
                if ((i + g.pos) % every && i + 1 < g.n_q) continue;
                bool bf16 = takes_bf16(s, g.generated);
                for (int h = 0; h < s.n_heads; h++) {
                    std::vector<double> noise, want = reference(g.seq, g.pos + i, h, bf16, &noise);
                    const std::vector<float> &is = r.at({ g.seq, g.pos + i });
                    for (size_t d = 0; d < want.size(); d++) {
                        double e = fabs(want[d] - (double)is[(size_t)h * want.size() + d]);
                        double bound = (bf16 ? noise[d] / 96 : 0) + 2e-6; /* bf16: errs by 1/512 at most each */
                        worst = std::max(worst, e / bound);
                        CHECK(e < bound, "sequence %d position %d head %d element %zu: %g, not %g", g.seq, g.pos + i, h, d,
                              (double)is[(size_t)h * want.size() + d], want[d]);
                    }
                }
            }
    }
    double worst = 0;

private:
    void widen(const struct attention *a, struct cuda_list *list)
    {
        const struct cuda_counts exact = list->bounds;
        const int                n = 2 * exact.n_rows + 3;
        attention_recorded_bounds(a, n, n, n, 2 * exact.n_keys_max + 5000, &list->bounds);
        CHECK(attention_recordable(&list->bounds, &exact), "a list of half its bounds is not within them");
    }
    static void fill(std::vector<float> *v, size_t n)
    {
        v->resize(n);
        for (float &x : *v) x = random_float();
    }
    void take(const std::vector<range> &ranges, const std::vector<int32_t> &begins, const std::vector<unsigned char> &bytes, size_t width, results *to)
    {
        std::vector<bool> is_row(bytes.size() / 4 / width);
        for (size_t i = 0; i < ranges.size(); i++)
            for (int j = 0; j < ranges[i].n_q; j++) {
                std::vector<float> row(width);
                memcpy(row.data(), &bytes[(size_t)(begins[i] + j) * width * 4], width * 4);
                (*to)[{ ranges[i].seq, ranges[i].pos + j }] = row;
                is_row[(size_t)(begins[i] + j)] = true;
            }
        for (size_t i = 0; i < is_row.size(); i++)
            for (size_t b = 0; !is_row[i] && b < width * 4; b++) CHECK(bytes[i * width * 4 + b] == 0xff, "row %zu of out is nobody's and was written", i);
    }

    memory *pool;
    size_t  pool_bytes;
};

/* attention_run's rule for who goes through tensor cores. */
static bool takes_bf16(const struct shape &s, bool generated)
{
    if (s.exact || s.dtype != DTYPE_BF16) return false;
    const int group = s.n_heads / s.kv_heads;
    if (s.latent) return s.head_dim == 576 && s.v_dim == 512;
    return (!generated || group >= 4) && (s.head_dim == 64 || s.head_dim == 128);
}

static bool same(const results &a, const results &b)
{
    for (const auto &row : a) {
        auto other = b.find(row.first);
        if (other == b.end() || memcmp(row.second.data(), other->second.data(), row.second.size() * sizeof(float)) != 0) return false;
    }
    return true;
}

/* ---- tests ---- */

static struct shape heads(int n_heads, int kv_heads, int dim, int block_tokens, enum dtype t, bool exact)
{
    return { n_heads, kv_heads, dim, dim, block_tokens, t, false, exact };
}

static void near_reference(const struct shape &s, const std::vector<int> &lengths, const std::vector<range> &ranges, int every = 1)
{
    char name[160];
    snprintf(name, sizeof name, "%d/%d heads of %d/%d, blocks of %d, %s%s%s", s.n_heads, s.kv_heads, s.head_dim, s.v_dim, s.block_tokens,
             s.dtype == DTYPE_F32 ? "f32" : "bf16", s.latent ? ", latent" : "", s.exact ? ", exact" : "");
    test(name, [&] {
        world   w(s, lengths);
        results r;
        w.append_all();
        w.check_pool();
        w.run(ranges, &r);
        if (is_good) w.check(r, takes_bf16, ranges, every);
        printf("       worst %.2g of what is allowed\n", w.worst);
    });
}

static void test_shapes(void)
{
    const int pairs[4][2] = { { 8, 8 }, { 8, 2 }, { 4, 1 }, { 6, 3 } }, dims[] = { 4, 10, 16, 64, 80, 128, 256 }, blocks[] = { 1, 7, 16, 64, 256 };
    int i = 0;
    for (int dim : dims)
        for (const int *p : pairs)
            for (int t = 0; t < 2; t++, i++) {
                if (TEST_IS_SANITIZED && i % 3 != 0) continue;
                const std::vector<range> ranges = { { 0, 99, 1, true }, { 1, 2, 5, false }, { 2, 0, 1, true }, { 3, 30, 10, false } };
                near_reference(heads(p[0], p[1], dim, blocks[i % 5], t ? DTYPE_F32 : DTYPE_BF16, i / 2 % 2 != 0), { 100, 7, 1, 40 }, ranges);
            }
    for (int block : blocks) near_reference(heads(4, 2, 64, block, DTYPE_BF16, false), { 150, 70 }, { { 0, 149, 1, true }, { 1, 3, 67, false } }, 7);
    near_reference(heads(1, 1, 1, 16, DTYPE_F32, true), { 20 }, { { 0, 0, 20, false } });
    near_reference(heads(20, 2, 32, 16, DTYPE_BF16, false), { 20 }, { { 0, 15, 5, true } });
}

static void test_lengths(void)
{
    const std::vector<int>   lengths = { 1, 63, 64, 65, 511, 512, 513, 1024, 1025, 1500 };
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
    near_reference(heads(12, 2, 64, 16, DTYPE_BF16, false), { 1200 }, { { 0, 470, 90, false } }, 11);
}

/* Groups of heads that answer rows take through tensor cores, and their neighbours that do not. */
static void test_answers(void)
{
    const std::vector<int> lengths = { 1, 15, 16, 17, 33, 64, 65, 500, 512, 513, 1040, 1600 };
    const int groups[][3] = { { 4, 4, 16 }, { 20, 4, 64 }, { 16, 2, 7 }, { 12, 1, 1 }, { 32, 2, 256 }, { 3, 1, 16 }, { 17, 1, 16 }, { 40, 1, 16 } };
    std::vector<range> ranges;
    for (size_t i = 0; i < lengths.size(); i++) ranges.push_back({ (int)i, lengths[i] - 1, 1, true });
    ranges.push_back({ 11, 1020, 9, true });
    for (const int *g : groups)
        for (int dim : { 64, 128 })
            if (!TEST_IS_SANITIZED || (g[0] / g[1] > 8) == (dim == 64)) near_reference(heads(g[0], g[1], dim, g[2], DTYPE_BF16, false), lengths, ranges);
    for (int dim : { 64, 128 }) {
        test("an answer's row reads no key behind its own", [&] {
            world   w(heads(8, 2, dim, 16, DTYPE_BF16, false), { 600, 40 });
            results before, after;
            w.append_all();
            const std::vector<range> first = { { 0, 530, 1, true }, { 1, 20, 1, true } };
            w.run(first, &before);
            for (size_t d = 0; d < (size_t)(2 * dim); d++)
                w.seqs[0].k[531 * (size_t)(2 * dim) + d] = w.seqs[0].v[531 * (size_t)(2 * dim) + d] = w.seqs[1].v[21 * (size_t)(2 * dim) + d] = NAN;
            w.append_all();
            w.run(first, &after);
            CHECK(same(before, after), "a later position's NaN came in");
        });
    }
}

/* The first n positions of `to` become those of `from`, in its blocks. */
static void share(world *w, size_t from, size_t to, int n)
{
    const size_t width = (size_t)(w->s.kv_heads * w->s.head_dim);
    const sequence &a = w->seqs[from];
    sequence       &b = w->seqs[to];
    std::copy_n(a.k.begin(), (size_t)n * width, b.k.begin());
    std::copy_n(a.v.begin(), (size_t)n * width, b.v.begin());
    std::copy_n(a.table.begin(), n / w->s.block_tokens, b.table.begin());
}

static void shared_beginnings(const struct shape &s)
{
    char name[160];
    snprintf(name, sizeof name, "beginnings that rows share: %d/%d heads of %d, blocks of %d", s.n_heads, s.kv_heads, s.head_dim, s.block_tokens);
    test(name, [&] {
        world w(s, { 1700, 1100, 1500, 700, 90, 1300 });
        const std::vector<range> all = { { 0, 1690, 1, true }, { 1, 1099, 1, true }, { 2, 1400, 3, true }, { 5, 1200, 1, true }, { 3, 699, 1, true },
                                         { 4, 89, 1, true },   { 1, 511, 1, true },  { 0, 900, 1, true },  { 3, 500, 6, false } };
        for (size_t to : { 1, 2, 5 }) share(&w, 0, to, 1088);
        share(&w, 0, 3, 576);
        w.append_all();
        w.check_pool();
        std::vector<int32_t> begins;
        world::staged        st;
        world::place(all, &begins);
        w.stage(&st, all, begins);
        world::unstage(&st);
        const int shared[] = { 0, 2, 2, 2, 2, 2, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0 };
        for (size_t i = 0; i < st.rows.size(); i++)
            CHECK(st.rows[i].shared == shared[i], "row %zu shares %d segments, not %d", i, st.rows[i].shared, shared[i]);
        results together, alone, waves, wide;
        w.run(all, &together);
        for (const range &r : all)
            for (int i = 0; i < r.n_q; i++) w.run({ { r.seq, r.pos + i, 1, r.generated } }, &alone);
        CHECK(same(together, alone), "rows depend on whom they share keys with");
        w.run(all, &waves, { 3, 0, false, 0 });
        CHECK(same(together, waves), "rows depend on how many segments run at a time");
        w.run(all, &wide, { 0, 2, true, 0 });
        CHECK(same(together, wide), "rows depend on bounds");
        w.check(together, takes_bf16, all, 1);
    });
}

/* That what is shared is read once shows where a list says so and it is not true. */
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
        const std::vector<range> all = { { 0, 1099, 1, true }, { 1, 1199, 1, true }, { 2, 599, 1, true } };
        results told, truly;
        w.run(all, &told, { 0, 0, false, 1 });
        for (size_t to : { 1, 2 }) std::copy_n(w.seqs[0].table.begin(), 32, w.seqs[to].table.begin());
        w.run(all, &truly);
        CHECK(same(told, truly), "every row read keys of its own");
    });
}

static void test_latent(void)
{
    struct shape small = { 12, 1, 40, 32, 16, DTYPE_BF16, true, false }, large = { 16, 1, 576, 512, 64, DTYPE_BF16, true, false };
    const std::vector<range> ranges = { { 0, 599, 1, true }, { 1, 20, 13, false }, { 2, 0, 1, true } };
    near_reference(small, { 600, 33, 1 }, ranges);
    near_reference(large, { 600, 33, 1 }, ranges, 4);
    large.n_heads = 80;
    near_reference(large, { 100, 33, 1 }, { { 0, 99, 1, true }, { 1, 20, 3, false }, { 2, 0, 1, true } }, 4);
    large.n_heads = 16;
    small.dtype = large.dtype = DTYPE_F32;
    small.exact = large.exact = true;
    near_reference(small, { 600, 33, 1 }, ranges);
    near_reference(large, { 600, 33, 1 }, ranges, 4);
}

/* Sequences of 700, 90 and 1100 positions, or one segment less where a position costs much. */
static void same_bits(const char *name, const struct shape &s, int less = TEST_IS_SANITIZED ? 512 : 0)
{
    test(name, [&] {
        const int first = 700 - less / 4, third = 1100 - less;
        world     w(s, { first, 1, 90, third, 64 });
        w.append_all();
        std::vector<range> all = { { 0, first - 1, 1, true }, { 1, 0, 1, false }, { 2, 20, less ? 10 : 70, false }, { 3, third - 3, 3, true } };
        all.push_back({ 4, 63, 1, true });
        if (!less) all.push_back({ 0, 500, 30, false });
        results together, alone, waves;
        w.run(all, &together);
        for (const range &r : all) w.run({ r }, &alone);
        CHECK(same(together, alone), "rows depend on the batch");
        for (int n : { 1, 2, 5 }) {
            w.run(all, &waves, { n, 0, false, 0 });
            CHECK(same(together, waves), "rows depend on how many segments run at a time (%d)", n);
        }
        const way ways[] = { { 0, 0, true, 0 }, { 0, 3, true, 0 }, { 0, 1, false, 0 }, { 1, 5, false, 0 } };
        for (const way &by : ways) {
            results others;
            w.run(all, &others, by);
            CHECK(same(together, others), "rows depend on bounds or grids (at most %d blocks, %s bounds)", by.max_blocks, by.wide ? "wide" : "exact");
        }
        results   whole, chunks;
        const int begin = 480, end = less ? 520 : 630;
        w.run({ { 3, begin, end - begin, false } }, &whole);
        for (int pos = begin, n = 1; pos < end; pos += n, n = std::min(n * 3, end - pos))
            w.run({ { 2, 5, 1, false }, { 3, pos, n, false } }, &chunks, { n % 2, 0, false, 0 });
        CHECK(same(whole, chunks), "rows depend on how a prompt was chunked");
    });
}

static void test_same_bits(void)
{
    same_bits("same bits: 4/2 heads of 64, bf16", heads(4, 2, 64, 16, DTYPE_BF16, false));
    same_bits("same bits: 16/2 heads of 64, bf16", heads(16, 2, 64, 64, DTYPE_BF16, false));
    same_bits("same bits: 6/1 heads of 128, bf16", heads(6, 1, 128, 7, DTYPE_BF16, false));
    same_bits("same bits: 2/2 heads of 80, f32, exact", heads(2, 2, 80, 64, DTYPE_F32, true));
    same_bits("same bits: 4/2 heads of 6, bf16", heads(4, 2, 6, 16, DTYPE_BF16, false));
    same_bits("same bits: 20 heads of latents on tensor cores", { 20, 1, 576, 512, 16, DTYPE_BF16, true, false }, 512);
    same_bits("same bits: latent", { 10, 1, 40, 32, 16, DTYPE_BF16, true, false });
}

/* Memory of a list that launches were recorded with, and into which other lists are put. */
struct replayed {
    memory counts, seqs, rows, tables;
    replayed() : counts(sizeof(struct cuda_counts)), seqs(16 * sizeof(cuda_seq)), rows(64 * sizeof(cuda_row)), tables(1024 * sizeof(int32_t)) {}
    void put(const world::staged &st)
    {
        copy(counts, &st.list.bounds, sizeof st.list.bounds);
        copy(seqs, st.seqs.data(), st.seqs.size() * sizeof(cuda_seq));
        copy(rows, st.rows.data(), st.rows.size() * sizeof(cuda_row));
        copy(tables, st.tables.data(), st.tables.size() * sizeof(int32_t));
    }
    static void copy(const memory &to, const void *from, size_t bytes)
    {
        if (bytes) cudaMemcpy(to.at<char>(), from, bytes, cudaMemcpyHostToDevice);
    }
};

static cudaGraphExec_t record(cudaStream_t stream, const std::function<cudaError_t()> &calls)
{
    cudaGraph_t     graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess || calls() != cudaSuccess) return nullptr;
    if (cudaStreamEndCapture(stream, &graph) != cudaSuccess || cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess) return nullptr;
    cudaGraphDestroy(graph);
    return exec;
}

/* One recording of append and attention, run for other lists: the pool and all rows come out as from calls made for them. */
static void replay(const char *name, const struct shape &s)
{
    test(name, [&] {
        world w(s, { 700, 1, 90, 1100, 64 });
        w.append_all();
        const std::vector<std::vector<range>> lists = {
            { { 0, 699, 1, true }, { 1, 0, 1, false }, { 2, 70, 20, false }, { 3, 1097, 3, true } }, { { 3, 1040, 1, true } }, {},
            { { 4, 63, 1, true }, { 0, 200, 1, true }, { 3, 511, 2, false } }, { { 2, 3, 33, false } }
        };
        const int    n_rows = 64;
        const size_t q_row = (size_t)(s.n_heads * s.head_dim), kv_row = (size_t)(s.kv_heads * s.head_dim), out_row = (size_t)(s.n_heads * s.v_dim);
        replayed     on;
        memory       q(n_rows * q_row * 4), k(n_rows * kv_row * 4), v(n_rows * kv_row * 4), out(n_rows * out_row * 4);
        memory       scratch(4 * attention_scratch_floats(n_rows, (size_t)s.n_heads, (size_t)s.v_dim, 5000));
        struct cuda_list list = { {}, on.counts.at<struct cuda_counts>(), on.seqs.at<cuda_seq>(), on.rows.at<cuda_row>(), on.tables.at<int32_t>() };
        const struct attention a = { w.kv, &list, q.at<float>(), out.at<float>(), s.n_heads, s.v_dim, w.scale, s.exact, scratch.at<float>(), 0, 0 };
        attention_recorded_bounds(&a, n_rows, n_rows, n_rows, 5000, &list.bounds);
        cudaStream_t stream;
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "no stream");
        cudaGraphExec_t exec = record(stream, [&] {
            cudaError_t e = attention_append(stream, &w.kv, &list, k.at<float>(), s.latent ? nullptr : v.at<float>());
            return e == cudaSuccess ? attention_run(stream, &a) : e;
        });
        CHECK(exec, "the calls cannot be recorded");
        for (size_t i = 0; i < lists.size(); i++) {
            results              alone, again;
            std::vector<int32_t> begins;
            world::staged        st;
            w.run(lists[i], &alone);
            const int32_t n = world::place(lists[i], &begins);
            w.stage(&st, lists[i], begins);
            CHECK(attention_recordable(&list.bounds, &st.list.bounds), "list %zu is not within the bounds", i);
            on.put(st);
            w.unstage(&st);
            q.put_some(w.rows_of(lists[i], begins, n, q_row, &sequence::q));
            k.put_some(w.rows_of(lists[i], begins, n, kv_row, &sequence::k));
            if (!s.latent) v.put_some(w.rows_of(lists[i], begins, n, kv_row, &sequence::v));
            out.put(std::vector<unsigned char>(n_rows * out_row * 4, 0xff).data());
            CHECK(cudaDeviceSynchronize() == cudaSuccess && cudaGraphLaunch(exec, stream) == cudaSuccess, "list %zu: no launch", i);
            CHECK(cudaStreamSynchronize(stream) == cudaSuccess, "list %zu failed", i);
            w.take(lists[i], begins, &out, out_row, &again);
            if (!is_good) return;
            CHECK(alone.size() == again.size() && same(alone, again), "list %zu: not what a call gives", i);
        }
        w.check_pool();
        cudaGraphExecDestroy(exec);
        cudaStreamDestroy(stream);
    });
}

static void test_replay(void)
{
    replay("one recording for all lists: 8/2 heads of 64, bf16", heads(8, 2, 64, 16, DTYPE_BF16, false));
    replay("one recording for all lists: 4/2 heads of 20, f32, exact", heads(4, 2, 20, 16, DTYPE_F32, true));
    replay("one recording for all lists: latent", { 10, 1, 40, 32, 16, DTYPE_BF16, true, false });
    test("lists that a recording does not compute", [] {
        const struct cuda_counts bounds = { 8, 8, 8, 20, 20, 5000, 5000 };
        struct cuda_counts       over = bounds;
        CHECK(attention_recordable(&bounds, &over), "its own bounds");
        for (int32_t *n : { &over.n_rows, &over.n_generated, &over.n_prompt, &over.n_segments, &over.n_segments_generated, &over.n_keys_max,
                            &over.n_keys_prompt }) {
            ++*n;
            CHECK(!attention_recordable(&bounds, &over), "more than the bounds have room for");
            --*n;
        }
    });
    test("bounds of a recording fit into one pass over the scratch", [] {
        struct attention a = {};
        struct cuda_counts bounds;
        a.kv = { nullptr, DTYPE_BF16, true, 1, 576, 16 };
        a.n_heads = 128, a.v_dim = 512;
        attention_recorded_bounds(&a, 256, 256, 256, 131072, &bounds);
        CHECK(bounds.n_segments > 0 && bounds.n_segments < 256 * 256, "%d segments", bounds.n_segments);
        CHECK(attention_scratch_floats(256, 128, 512, 131072) >= (size_t)bounds.n_segments * 128 * 512, "%d segments have no room", bounds.n_segments);
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
        world   w(heads(4, 2, 64, 16, DTYPE_BF16, false), { 30, 12 });
        results r;
        w.append({});
        w.append({ { 0, 0, 0, false } });
        w.append_all();
        w.run({}, &r);
        w.run({ { 0, 30, 0, true }, { 1, 3, 0, false } }, &r);
        CHECK(r.empty(), "rows from nowhere");
        w.run({ { 0, 30, 0, true }, { 1, 3, 2, false }, { 0, 3, 0, false } }, &r);
        if (is_good) w.check(r, takes_bf16, { { 1, 3, 2, false } }, 1);
    });
}

static void test_nan(void)
{
    for (bool exact : { false, true })
        test(exact ? "NaN stays in its sequence, exact" : "NaN stays in its sequence", [&] {
            world   w(heads(4, 2, 64, 16, DTYPE_BF16, exact), { 80, 80, 600 });
            const std::vector<range> good = { { 0, 40, 30, false }, { 2, 599, 1, true } }, bad = { { 1, 70, 2, false }, { 1, 79, 1, true } };
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
    const std::map<std::string, void (*)(void)> tests = { { "answers", test_answers }, { "append", test_chunked_append },
                                                          { "bits", test_same_bits }, { "latent", test_latent },
                                                          { "lengths", test_lengths }, { "nan", test_nan },
                                                          { "nothing", test_nothing }, { "replay", test_replay },
                                                          { "shapes", test_shapes }, { "shared", test_shared } };
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        printf("SKIPPED, NOT TESTED: no CUDA card, and no emulated one in this build: the kernels were NOT run\n0 passed, 0 failed, 1 skipped\n");
        return 0;
    }
    for (const auto &t : tests)
        if (argc < 2 || t.first == argv[1]) t.second();
    printf("%d passed, %d failed, 0 skipped\n", n_passed, n_failed);
    return n_failed != 0;
}
