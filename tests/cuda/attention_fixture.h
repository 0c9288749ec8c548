/* attention_fixture.h - what the tests of attention on a GPU share: a pool filled with known keys
 * and values, and the results expected of it.
 *
 * A `world` is a few sequences with keys, values and queries for every position, in a pool whose
 * blocks are scattered. A call is a list of row ranges of sequences. Every row's result must be
 * near a plain loop in double over the same rounded keys and values, and must have the same bits in
 * every call that contains the row. Device memory is NaN wherever nothing was appended, before and
 * behind, so a kernel that reads too much is found; guard bytes find one that writes too much. Runs
 * on a GPU or on tests/simt. Empty for C. Thread: one. */
#ifndef BATON_TESTS_CUDA_ATTENTION_FIXTURE_H
#define BATON_TESTS_CUDA_ATTENTION_FIXTURE_H

#ifdef __cplusplus
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kernels/cuda/attention/attention.h"
#include "kernels/float_bits.h"
#include "kernels/kv_rows.h"

static int n_passed, n_failed;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { TEST_IS_SANITIZED = 1 }; /* as in tests/harness/test.h */
#else
enum { TEST_IS_SANITIZED = 0 };
#endif

static const char *test_name = "";

#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("  %s: %s:%d: ", test_name, __FILE__, __LINE__);                                \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
            is_good = false;                                                                       \
            return;                                                                                \
        }                                                                                          \
    } while (0)
static bool is_good;

static inline void test(const char *name, const std::function<void()> &body)
{
    test_name = name;
    is_good = true;
    body();
    (is_good ? n_passed : n_failed)++;
    printf("%s %s\n", is_good ? "ok    " : "FAILED", name);
    fflush(stdout);
}

/* ---- device memory with guards ---- */

enum { GUARD = 256, N_COUNTER_BYTES = 4 << 17 }; /* as in attention.cu */

class memory {
  public:
    explicit memory(size_t bytes) : size(bytes), all(bytes + 2 * GUARD, 0xff)
    {
        if (cudaMalloc((void **)&base, all.size()) != cudaSuccess) abort();
        cudaMemcpy(base, all.data(), all.size(), cudaMemcpyHostToDevice);
    }
    template <class T> explicit memory(const std::vector<T> &from) : memory(from.size() * sizeof(T))
    {
        put(from.data());
    }
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
        if (!from.empty())
            cudaMemcpy(base + GUARD, from.data(), from.size() * sizeof(float),
                       cudaMemcpyHostToDevice);
    }
    /* Copies the bytes to the host. False: a guard was overwritten. */
    bool get(std::vector<unsigned char> *to)
    {
        cudaMemcpy(all.data(), base, all.size(), cudaMemcpyDeviceToHost);
        to->assign(all.begin() + GUARD, all.end() - GUARD);
        for (size_t i = 0; i < GUARD; i++)
            if (all[i] != 0xff || all[all.size() - 1 - i] != 0xff) return false;
        return true;
    }

  private:
    size_t size;
    std::vector<unsigned char> all;
    unsigned char *base = nullptr;
};

/* ---- the world ---- */

struct shape {
    int n_heads, kv_heads, head_dim, v_dim, block_tokens;
    enum dtype dtype;
    bool latent, exact;
};

static inline const char *type_name(enum dtype t)
{
    return t == DTYPE_F32    ? "f32"
           : t == DTYPE_BF16 ? "bf16"
           : t == DTYPE_F16  ? "f16"
           : t == DTYPE_I8   ? "int8"
                             : "e4m3";
}

static uint32_t random_state = 1;
static inline uint32_t random_u32(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}
static inline float random_float(void)
{
    return (float)(int)(random_u32() & 0xffff) / 32768.0f - 1.0f;
}

/* A row as it is read back from a pool of type t. */
static inline std::vector<float> held(enum dtype t, const float *x, size_t n)
{
    std::vector<unsigned char> bytes(kv_rows_bytes(t, n));
    std::vector<float> back(n);
    float scale = 0;
    kv_row_store(t, x, bytes.data(), &scale, n);
    kv_row_load(t, bytes.data(), &scale, back.data(), n);
    return back;
}

struct sequence {
    int n;                             /* positions */
    std::vector<float> k, v, q;        /* [n][kv_heads][head_dim], [n][n_heads][head_dim] */
    std::vector<float> k_held, v_held; /* k and v as rounded by the pool */
    std::vector<int32_t> table;
};

/* The rule by which attention_run uses tensor cores. */
static inline bool takes_tensor_cores(const struct shape &s, bool generated)
{
    if (s.exact || s.dtype == DTYPE_F32) return false;
    const int group = s.n_heads / s.kv_heads;
    const bool is_scaled = kv_rows_scaled(s.dtype);
    if (s.latent) return s.dtype == DTYPE_BF16 && s.head_dim == 576 && s.v_dim == 512;
    /* then blocks are not a multiple of 16 bytes */
    if (is_scaled && s.kv_heads * s.block_tokens % 2) return false;
    return (!generated || group >= (is_scaled ? 2 : 4)) && group <= 64 &&
           (s.head_dim == 64 || s.head_dim == 128);
}

/* The rows pos .. pos + n_q of a sequence. */
struct range {
    int seq, pos, n_q;
    bool generated;
};

/* The arguments of a call besides the list. wide: its bounds are those of a graph captured for any
 * list of up to twice as many rows. */
struct launch_bounds {
    int n_at_once, max_blocks;
    bool wide;
    int shares; /* if not 0: each row is said to share that many segments with the previous row */
};

using results = std::map<std::pair<int, int>, std::vector<float>>; /* by sequence and position */

class world {
  public:
    struct shape s;
    struct kv_layer kv;
    std::vector<sequence> seqs;
    float scale;
    std::vector<float> pool_before;

    world(const struct shape &shape, const std::vector<int> &lengths, uint32_t seed = 1) : s(shape)
    {
        random_state = seed * 7919u;
        scale = 2.0f / sqrtf((float)s.head_dim);
        int n_blocks = 3;
        for (int n : lengths) n_blocks += (n + s.block_tokens - 1) / s.block_tokens;
        std::vector<int32_t> order((size_t)n_blocks);
        for (int i = 0; i < n_blocks; i++) order[(size_t)i] = i;
        for (int i = n_blocks - 1; i > 0; i--)
            std::swap(order[(size_t)i], order[random_u32() % (unsigned)(i + 1)]);
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
        pool_bytes = (size_t)n_blocks * pool_bytes_of_block();
        pool = new memory(pool_bytes);
        kv = { pool->at<void>(), s.dtype, s.latent, s.kv_heads, s.head_dim, s.block_tokens };
    }
    ~world() { delete pool; }
    world(const world &) = delete;
    world &operator=(const world &) = delete;

    size_t block_rows() const { return (size_t)(s.kv_heads * s.block_tokens) * (s.latent ? 1 : 2); }
    size_t row_bytes() const { return kv_rows_bytes(s.dtype, (size_t)s.head_dim); }

    /* The list on the device. rows[i] is the row of q and out at which range i begins. */
    struct staged {
        std::vector<attn_seq> host;
        std::vector<cuda_attn_seq> seqs;
        std::vector<cuda_attn_row> rows;
        std::vector<int32_t> tables;
        memory *device[4];
        struct cuda_attn_list list;
    };
    void stage(staged *st, const std::vector<range> &ranges, const std::vector<int32_t> &begins)
    {
        size_t n_rows = 0;
        for (size_t i = 0; i < ranges.size(); i++) {
            const range &r = ranges[i];
            st->host.push_back(
                { begins[i], r.n_q, r.pos, seqs[(size_t)r.seq].table.data(), r.generated, 0, 0 });
            st->seqs.push_back({ begins[i], r.n_q, r.pos, (int32_t)st->tables.size() });
            st->tables.insert(st->tables.end(), seqs[(size_t)r.seq].table.begin(),
                              seqs[(size_t)r.seq].table.end());
            n_rows += (size_t)r.n_q;
        }
        st->rows.resize(n_rows);
        st->list = {};
        struct cuda_attn_counts counts;
        attention_list_rows(&counts, st->host.data(), (int32_t)st->host.size(), s.block_tokens,
                            s.latent, st->rows.data());
        st->list.bounds = counts;
        for (cuda_attn_row &row : st->rows) row.table = st->seqs[(size_t)row.seq].table;
        st->device[0] = new memory(st->seqs);
        /* room for those of loosen_bounds */
        st->device[1] = new memory((2 * st->rows.size() + 3) * sizeof(cuda_attn_row));
        put_rows(*st);
        st->device[2] = new memory(st->tables);
        st->list.seqs = st->device[0]->at<cuda_attn_seq>();
        st->list.rows = st->device[1]->at<cuda_attn_row>();
        st->list.tables = st->device[2]->at<int32_t>();
        st->device[3] = new memory(std::vector<struct cuda_attn_counts>(1, counts));
        st->list.counts = st->device[3]->at<struct cuda_attn_counts>();
    }
    static void put_rows(const staged &st)
    {
        if (!st.rows.empty())
            cudaMemcpy(st.device[1]->at<void>(), st.rows.data(),
                       st.rows.size() * sizeof(cuda_attn_row), cudaMemcpyHostToDevice);
    }
    static void unstage(staged *st)
    {
        for (memory *m : st->device) delete m;
    }

    /* Places the ranges one after the other, the last one first, with a gap before each. */
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

    std::vector<float> rows_of(const std::vector<range> &ranges, const std::vector<int32_t> &begins,
                               int32_t n_rows, size_t width,
                               std::vector<float> sequence::*member) const
    {
        std::vector<float> all((size_t)n_rows * width, NAN);
        for (size_t i = 0; i < ranges.size(); i++) {
            const std::vector<float> &from = seqs[(size_t)ranges[i].seq].*member;
            std::copy_n(from.begin() + (ptrdiff_t)((size_t)ranges[i].pos * width),
                        (size_t)ranges[i].n_q * width,
                        all.begin() + (ptrdiff_t)((size_t)begins[i] * width));
        }
        return all;
    }

    void append(const std::vector<range> &ranges)
    {
        std::vector<int32_t> begins;
        int32_t n_rows = place(ranges, &begins);
        size_t width = (size_t)(s.kv_heads * s.head_dim);
        staged st;
        stage(&st, ranges, begins);
        memory k(rows_of(ranges, begins, n_rows, width, &sequence::k));
        memory v(s.latent ? std::vector<float>()
                          : rows_of(ranges, begins, n_rows, width, &sequence::v));
        CHECK(attention_kv_append(nullptr, &kv, &st.list, k.at<float>(),
                                  s.latent ? nullptr : v.at<float>(), nullptr) == cudaSuccess,
              "append");
        CHECK(cudaDeviceSynchronize() == cudaSuccess, "append failed");
        unstage(&st);
        for (const range &r : ranges) hold(&seqs[(size_t)r.seq], r.pos, r.n_q);
    }
    void append_all()
    {
        std::vector<range> ranges;
        for (size_t i = 0; i < seqs.size(); i++) ranges.push_back({ (int)i, 0, seqs[i].n, false });
        append(ranges);
    }

    /* Checks the pool byte by byte; it must be 0xff where nothing was appended. */
    void check_pool()
    {
        std::vector<unsigned char> want(pool_bytes, 0xff), is;
        const size_t dim = (size_t)s.head_dim, values = block_rows() * row_bytes(),
                     block = pool_bytes_of_block();
        for (const sequence &q : seqs)
            for (size_t pos = 0; pos < (size_t)q.n; pos++)
                for (size_t i = 0; i < (size_t)s.kv_heads * (s.latent ? 1 : 2); i++) {
                    const size_t tokens = (size_t)s.block_tokens, head = s.latent ? i : i / 2,
                                 row = i * tokens + pos % tokens;
                    const float *x = &(
                        i % 2 && !s.latent ? q.v : q.k)[(pos * (size_t)s.kv_heads + head) * dim];
                    unsigned char *at = &want[(size_t)q.table[pos / tokens] * block];
                    kv_row_store(s.dtype, x, at + row * row_bytes(),
                                 at + values + row * sizeof(float), dim);
                }
        CHECK(pool->get(&is), "written outside the pool");
        CHECK(is == want, "the pool is not what was appended");
    }

    bool pool_now(std::vector<unsigned char> *bytes) { return pool->get(bytes); }

    /* Elements from `first` on, and the same ones in bf16. */
    static void check_bf16(const std::vector<unsigned char> &out,
                           const std::vector<unsigned char> &rounded, size_t first, size_t n)
    {
        for (size_t i = first; i < first + n; i++) {
            float x;
            uint16_t got;
            memcpy(&x, &out[i * sizeof x], sizeof x);
            memcpy(&got, &rounded[i * sizeof got], sizeof got);
            CHECK(isnan(x) || got == float_to_bf16(x), "element %zu is %g, in bf16 %04x", i,
                  (double)x, got);
        }
    }

    void run(const std::vector<range> &ranges, results *to,
             const launch_bounds &by = { 0, 0, false, 0 })
    {
        std::vector<int32_t> begins;
        int32_t n_rows = place(ranges, &begins);
        size_t width = (size_t)(s.n_heads * s.v_dim);
        staged st;
        stage(&st, ranges, begins);
        memory q(rows_of(ranges, begins, n_rows, (size_t)(s.n_heads * s.head_dim), &sequence::q));
        memory out((size_t)n_rows * width * sizeof(float));
        struct attention a = { kv,        &st.list,     q.at<float>(), out.at<float>(),
                               s.n_heads, s.v_dim,      scale,         s.exact,
                               nullptr,   by.n_at_once, by.max_blocks, nullptr,
                               nullptr };
        if (by.wide) loosen_bounds(&a, &st.list);
        for (size_t i = 1; by.shares && i < st.rows.size(); i++) st.rows[i].shared = by.shares;
        put_rows(st);
        const struct cuda_attn_counts &of = st.list.bounds;
        memory scratch(attention_scratch_floats((size_t)of.n_rows, (size_t)s.n_heads,
                                                (size_t)s.v_dim, (size_t)of.n_keys_max) *
                       sizeof(float));
        a.scratch = scratch.at<float>();
        CHECK(attention_scratch_prepare(nullptr, a.scratch) == cudaSuccess, "scratch");
        memory rounded((size_t)n_rows * width * sizeof(uint16_t));
        if (attention_leaves_bf16(&a)) a.out_bf16 = rounded.at<uint16_t>();
        CHECK(attention_run(nullptr, &a) == cudaSuccess, "attention_run");
        CHECK(cudaDeviceSynchronize() == cudaSuccess, "attention_run failed");
        std::vector<unsigned char> bytes, other;
        CHECK(out.get(&bytes), "written outside out");
        CHECK(rounded.get(&other), "written outside out in bf16");
        for (size_t i = 0; a.out_bf16 && i < ranges.size(); i++)
            check_bf16(bytes, other, (size_t)begins[i] * width, (size_t)ranges[i].n_q * width);
        CHECK(scratch.get(&other), "written outside the scratch");
        CHECK(std::all_of(other.begin(), other.begin() + N_COUNTER_BYTES,
                          [](unsigned char b) { return b == 0; }),
              "counters are not zero after a call");
        unstage(&st);
        take(ranges, begins, bytes, width, to);
    }
    void take(const std::vector<range> &ranges, const std::vector<int32_t> &begins, memory *out,
              size_t width, results *to)
    {
        std::vector<unsigned char> bytes;
        CHECK(out->get(&bytes), "written outside out");
        take(ranges, begins, bytes, width, to);
    }

    /* One head of one row, and how far the rounding of softmax weights may move each element: 0 if
     * they are not rounded. */
    std::vector<double> reference(int seq, int pos, int head, bool rounds,
                                  std::vector<double> *noise) const
    {
        const sequence &q = seqs[(size_t)seq];
        size_t kv_head = (size_t)(head / (s.n_heads / s.kv_heads)), dim = (size_t)s.head_dim,
               row = (size_t)s.kv_heads * dim;
        const std::vector<float> x = query(
            &q.q[((size_t)pos * (size_t)s.n_heads + (size_t)head) * dim], rounds);
        std::vector<double> score((size_t)pos + 1), o((size_t)s.v_dim, 0.0);
        double top = -INFINITY, sum = 0;
        noise->assign(o.size(), 0.0);
        for (size_t j = 0; j <= (size_t)pos; j++) {
            const float *k = &q.k_held[j * row + kv_head * dim];
            for (size_t d = 0; d < dim; d++) score[j] += (double)k[d] * (double)x[d];
            score[j] *= (double)scale;
            top = std::max(top, score[j]);
        }
        for (size_t j = 0; j <= (size_t)pos; j++) {
            const float *v = &(s.latent ? q.k_held : q.v_held)[j * row + kv_head * dim];
            double p = exp(score[j] - top);
            sum += p;
            for (size_t d = 0; d < o.size(); d++) {
                o[d] += p * (double)v[d];
                (*noise)[d] += p * p * (double)v[d] * (double)v[d];
            }
        }
        for (size_t d = 0; d < o.size(); d++) {
            o[d] /= sum;
            (*noise)[d] = sqrt((*noise)[d]) / sum;
        }
        return o;
    }

    void check(const results &r, const std::vector<range> &ranges, int every)
    {
        for (const range &g : ranges)
            for (int i = 0; i < g.n_q; i++) {
                if ((i + g.pos) % every && i + 1 < g.n_q) continue;
                const bool rounds = takes_tensor_cores(s, g.generated);
                for (int h = 0; h < s.n_heads; h++) {
                    std::vector<double> noise,
                        want = reference(g.seq, g.pos + i, h, rounds, &noise);
                    const std::vector<float> &is = r.at({ g.seq, g.pos + i });
                    for (size_t d = 0; d < want.size(); d++) {
                        double e = fabs(want[d] - (double)is[(size_t)h * want.size() + d]);
                        /* the error of each weight is at most 1/4096 or 1/512 */
                        double bound = (rounds ? noise[d] / (s.dtype == DTYPE_F16 ? 768 : 96) : 0) +
                                       2e-6 * size;
                        worst = std::max(worst, e / bound);
                        CHECK(e < bound, "sequence %d position %d head %d element %zu: %g, not %g",
                              g.seq, g.pos + i, h, d, (double)is[(size_t)h * want.size() + d],
                              want[d]);
                    }
                }
            }
    }
    double worst = 0;
    double size = 1; /* magnitude of the values */

  private:
    size_t pool_bytes_of_block() const
    {
        return block_rows() * (row_bytes() + (kv_rows_scaled(s.dtype) ? sizeof(float) : 0));
    }
    void hold(sequence *q, int pos, int n) const
    {
        const size_t dim = (size_t)s.head_dim, heads = (size_t)s.kv_heads;
        q->k_held.resize(q->k.size());
        q->v_held.resize(q->v.size());
        for (size_t i = (size_t)pos * heads; i < (size_t)(pos + n) * heads; i++)
            for (int part = 0; part < (s.latent ? 1 : 2); part++) {
                const std::vector<float> row = held(s.dtype, &(part ? q->v : q->k)[i * dim], dim);
                std::copy(row.begin(), row.end(),
                          (part ? q->v_held : q->k_held).begin() + (ptrdiff_t)(i * dim));
            }
    }
    /* A query as the kernel reads it: for tensor cores in bf16, or f16 if the pool is f16. */
    std::vector<float> query(const float *x, bool rounds) const
    {
        return held(!rounds                ? DTYPE_F32
                    : s.dtype == DTYPE_F16 ? DTYPE_F16
                                           : DTYPE_BF16,
                    x, (size_t)s.head_dim);
    }
    void loosen_bounds(const struct attention *a, struct cuda_attn_list *list)
    {
        const struct cuda_attn_counts exact = list->bounds;
        const int n = 2 * exact.n_rows + 3;
        attention_capture_bounds(a, n, n, n, 2 * exact.n_keys_max + 5000, &list->bounds);
        CHECK(attention_fits_capture(&list->bounds, &exact),
              "a list of half its bounds is not within them");
    }
    static void fill(std::vector<float> *v, size_t n)
    {
        v->resize(n);
        for (float &x : *v) x = random_float();
    }
    void take(const std::vector<range> &ranges, const std::vector<int32_t> &begins,
              const std::vector<unsigned char> &bytes, size_t width, results *to)
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
            for (size_t b = 0; !is_row[i] && b < width * 4; b++)
                CHECK(bytes[i * width * 4 + b] == 0xff,
                      "row %zu of out is nobody's and was written", i);
    }

    memory *pool;
    size_t pool_bytes;
};

static inline bool same(const results &a, const results &b)
{
    for (const auto &row : a) {
        auto other = b.find(row.first);
        if (other == b.end() ||
            memcmp(row.second.data(), other->second.data(), row.second.size() * sizeof(float)) != 0)
            return false;
    }
    return true;
}
#endif
#endif
