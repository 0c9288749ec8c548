/* test_sample.cc - sampling on a GPU against the sampler of the host, from the same logits and the
 * same sampling requests.
 *
 * A case is generated from a seed: a kind of logits, and parameters drawn from lists that contain
 * the boundaries of every rule. It is sampled alone and among others, and must equal what
 * shared/engine/sampler.c gives: token, rank and top tokens exactly, and logprobs but for the last
 * bits, because the GPU computes its own log of the log-sum-exp. Runs on a GPU or on tests/simt. */
#include <float.h>
#include <math.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "kernels/cuda/sampling/sample_encoder.h"
#include "tests/cuda/device_case.h"

extern "C" {
#include "kernels/host_math.h"
#include "shared/engine/sampler.h"
}

/* ---- rows ---- */

struct random_numbers { /* splitmix64 */
    uint64_t state;
    uint64_t next()
    {
        uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }
    uint32_t below(uint32_t n) { return (uint32_t)((next() >> 32) * n >> 32); }
    float uniform() { return (float)(next() >> 40) * 0x1p-24f; }
    float normal()
    {
        return uniform() + uniform() + uniform() + uniform() + uniform() + uniform() - 3.0f;
    }
    template <class T> T of(std::initializer_list<T> choices)
    {
        return choices.begin()[below((uint32_t)choices.size())];
    }
};

enum logits_kind { MODEL, FLAT, INTEGERS, EQUAL, STRANGE, UNUSABLE, PEAK, LARGEST, ZEROS, KINDS };

static float make_logit(random_numbers &r, logits_kind kind)
{
    switch (kind) {
    case MODEL: return 3 * r.normal() + (r.below(200) == 0 ? 8.0f : 0.0f);
    case FLAT: return 0.05f * r.normal();
    case INTEGERS: return (float)r.below(5);
    case EQUAL: return 1.5f;
    case STRANGE:
        return r.below(4) ? r.normal() : r.of({ NAN, -INFINITY, -NAN, FLT_MAX, -FLT_MAX });
    case UNUSABLE: return r.of({ NAN, -INFINITY });
    case PEAK: return 40 * r.normal();
    case LARGEST: return r.below(20) ? r.normal() : r.of({ INFINITY, FLT_MAX });
    default: return r.of({ 0.0f, -0.0f, -1.0f });
    }
}

struct sample_case {
    std::vector<float> logits;
    sampling_params params = {};
    std::vector<logit_bias> bias;
    std::vector<uint64_t> allowed;
    std::vector<int32_t> tokens, eos;
    uint32_t n_prompt = 0;
    int32_t score = -1;
    uint32_t n_future = 0; /* so many tokens at the end are known only to the GPU */
    /* Of the host, or with some of the tokens on the GPU. */
    sample_request request(const sample_future &future = {})
    {
        const uint32_t n_known = (uint32_t)tokens.size() - future.n_chosen - future.n_drafts;
        params.bias = bias.data(), params.n_bias = (uint32_t)bias.size();
        params.allowed = allowed.empty() ? nullptr : allowed.data();
        return { &params,
                 tokens.data(),
                 n_known,
                 n_prompt,
                 (uint32_t)tokens.size() - n_prompt,
                 future,
                 eos.data(),
                 (uint32_t)eos.size(),
                 score,
                 0,
                 0 };
    }
};

static void make_cuts(random_numbers &r, sampling_params *p, uint32_t n_vocab)
{
    const int32_t n = (int32_t)n_vocab;
    p->temperature = r.of<float>({ 0, 9e-6f, 1e-4f, 0.3f, 1, 1, 1.7f, 40, INFINITY, NAN });
    p->min_p = r.of({ 0.0f, 0.0f, 0.0f, 0.02f, 0.5f, 1.0f, 2.0f });
    p->top_k = r.of({ 0, 0, -1, 1, 2, 5, 40, n / 2, n - 1, n, n + 5 });
    p->top_p = r.of({ 1.0f, 1.0f, 0.95f, 0.9f, 0.5f, 0.1f, 0.0f, -1.0f, 0.9999999f, 1.5f });
    p->seed = r.next();
    p->n_logprobs = r.of({ -1, -1, -1, 0, 1, 5, 20, 25 });
}

static void make_edits(random_numbers &r, sample_case *row, uint32_t n_vocab)
{
    sampling_params &p = row->params;
    if (r.below(3) == 0) p.presence_penalty = r.of({ 0.7f, -1.0f });
    if (r.below(3) == 0) p.frequency_penalty = r.of({ 0.3f, -0.2f });
    if (r.below(3) == 0) p.repetition_penalty = r.of({ 1.3f, 0.8f, -2.0f, 0.0f });
    if (r.below(3) == 0) p.min_tokens = r.below(20);
    for (uint32_t n = r.below(4); n > 0; n--)
        p.stop_ids[p.n_stop_ids++] = (int32_t)r.below(n_vocab + 2) - 1;
    for (uint32_t n = r.below(4); n > 0; n--) row->eos.push_back((int32_t)r.below(n_vocab + 2) - 1);
    if (r.below(3) == 0) /* many, so that some tokens appear in several */
        for (uint32_t n = r.below(100); n > 0; n--)
            row->bias.push_back(
                { (int32_t)r.below(n_vocab + 2) - 1, r.of({ 3.0f, -100.0f, 0.1f, -1e9f }) });
}

static void make_mask(random_numbers &r, sample_case *row, uint32_t n_vocab)
{
    const uint32_t one_in = r.of({ 1u, 2u, 50u, 1000000u });
    row->allowed.assign((n_vocab + 63) / 64, 0);
    for (uint32_t i = 0; i < n_vocab; i++)
        if (r.below(one_in) == 0) row->allowed[i / 64] |= 1ull << (i % 64);
    /* bits beyond the vocabulary must be ignored */
    row->allowed.back() |= n_vocab % 64 ? ~0ull << (n_vocab % 64) : 0;
}

static sample_case make_row(uint64_t seed, uint32_t n_vocab)
{
    random_numbers r = { seed };
    sample_case row;
    const uint32_t kind = r.below(KINDS + 6); /* most rows are of the usual kind */
    row.logits.resize(n_vocab);
    for (float &v : row.logits) v = make_logit(r, kind < KINDS ? (logits_kind)kind : MODEL);
    row.params.repetition_penalty = 1;
    make_cuts(r, &row.params, n_vocab);
    for (uint32_t n = r.below(60); n > 0; n--)
        row.tokens.push_back((int32_t)r.below(n_vocab + 2) - 1);
    row.n_prompt = r.below((uint32_t)row.tokens.size() + 1);
    for (const uint32_t most = r.of({ 0u, 1u, 17u }); row.n_future < most; row.n_future++) {
        const size_t at = row.tokens.size() - 1 - row.n_future;
        if (row.n_prompt + row.n_future >= row.tokens.size() || row.tokens[at] < 0 ||
            row.tokens[at] >= (int32_t)n_vocab)
            break;
    }
    if (r.below(2)) make_edits(r, &row, n_vocab);
    if (r.below(4) == 0) make_mask(r, &row, n_vocab);
    if (r.below(8) == 0) row.score = (int32_t)r.below(n_vocab);
    return row;
}

static std::vector<sample_case> make_rows(uint64_t seed, size_t n, uint32_t n_vocab)
{
    std::vector<sample_case> rows;
    for (size_t i = 0; i < n; i++) rows.push_back(make_row(seed * 1000 + i, n_vocab));
    return rows;
}

/* ---- the host ---- */

struct host_sampler {
    uint32_t n_vocab;
    kernel_ctx *kernels;
    sampler *s;
    explicit host_sampler(uint32_t n) : n_vocab(n)
    {
        struct err err;
        CHECK_OK(
            kernel_ctx_create(kernel_options_default("auto", ACTIVATIONS_F32, 1), &kernels, &err));
        s = sampler_create(n, kernels);
    }
    ~host_sampler()
    {
        sampler_free(s);
        kernel_ctx_free(kernels);
    }
    host_sampler(const host_sampler &) = delete;
    token_logprobs run(sample_case &row)
    {
        const sample_request w = row.request();
        token_logprobs out;
        float lse;
        host_log_sum_exp(kernels, &lse, row.logits.data(), n_vocab, 1, n_vocab);
        const sampler_input in = { row.logits.data(), lse,        w.params, w.tokens,
                                   w.n_tokens,        w.n_prompt, w.eos,    w.n_eos };
        if (row.score < 0) (void)sampler_sample(s, &in, &out);
        else sampler_logprobs(s, row.logits.data(), lse, row.score, w.params->n_logprobs, &out);
        return out;
    }
};

/* ---- on the GPU ---- */

enum { UNTOUCHED = -77 };

struct encoded_rows {
    std::vector<float> logits;
    std::vector<sample_row_params> row_params;
    std::vector<sample_edit> edits;
    std::vector<uint64_t> allowed;
    /* Kept before the call: a row's first future tokens at the index of another row, the other ones
     * behind all rows, a number of rows apart. */
    std::vector<int32_t> ids;
    unsigned work = 0;
};

static encoded_rows encode_rows(std::vector<sample_case> &rows, uint32_t n_vocab, size_t stride)
{
    encoded_rows all;
    sample_encoder *m = sample_encoder_create(n_vocab);
    all.logits.assign(rows.size() * stride, 1e30f); /* reading between rows would choose these */
    all.ids.assign(rows.size() * SAMPLE_FUTURE_MAX, UNTOUCHED);
    for (size_t i = 0; i < rows.size(); i++) {
        const size_t place = rows.size() - 1 - i;
        const uint32_t n = rows[i].n_future;
        const int32_t *future = rows[i].tokens.data() + rows[i].tokens.size() - n;
        sample_request w = rows[i].request({ n > 0, 0, (int32_t)place, n > 0 ? n - 1 : 0,
                                             (int32_t)(rows.size() + i), (int32_t)rows.size() });
        sample_encoded made;
        w.kept_at = (int32_t)i;
        if (n > 0) all.ids[place] = future[0];
        for (uint32_t k = 1; k < n; k++) all.ids[k * rows.size() + i] = future[k];
        sample_encoder_encode(m, &w, &made);
        made.params.edits = (int32_t)all.edits.size();
        if (made.n_words) made.params.allowed = (int32_t)all.allowed.size();
        all.edits.insert(all.edits.end(), made.edits, made.edits + made.params.n_edits);
        all.allowed.insert(all.allowed.end(), made.allowed, made.allowed + made.n_words);
        all.row_params.push_back(made.params);
        all.work |= made.work;
        std::copy(rows[i].logits.begin(), rows[i].logits.end(),
                  all.logits.begin() + (ptrdiff_t)(i * stride));
    }
    sample_encoder_free(m);
    return all;
}

struct answers {
    std::vector<token_logprobs> results;
    std::vector<int32_t> ids, before; /* after the call and before it */
};

/* Device scratch that is kept between calls. */
struct gpu_scratch : device_bytes {
    gpu_scratch(size_t n_rows, uint32_t n_vocab)
        : device_bytes(std::vector<unsigned char>(sample_scratch_bytes(n_rows, n_vocab)))
    {}
};

/* One call and its memory. */
struct gpu_call {
    size_t n_rows;
    encoded_rows all;
    token_logprobs guard;
    device_bytes logits, row_params, edits, allowed, n_real, results, ids;
    sample_call call = {};
    gpu_call(std::vector<sample_case> &rows, uint32_t n_vocab, size_t stride, int32_t real,
             const gpu_scratch &scratch)
        : n_rows(rows.size()), all(encode_rows(rows, n_vocab, stride)), guard(make_guard()),
          logits(all.logits), row_params(all.row_params), edits(all.edits), allowed(all.allowed),
          n_real(&real, sizeof real), results(std::vector<token_logprobs>(n_rows, guard)),
          ids(all.ids)
    {
        call.logits = (const float *)logits.p, call.stride = stride,
        call.n_vocab = (int32_t)n_vocab, call.n_rows = (int32_t)n_rows;
        call.work = all.work, call.n_real_rows = real < 0 ? nullptr : (const int32_t *)n_real.p,
        call.row_params = (const sample_row_params *)row_params.p;
        call.edits = (const sample_edit *)edits.p, call.allowed = (const uint64_t *)allowed.p;
        call.results = (token_logprobs *)results.p, call.kept = (int32_t *)ids.p,
        call.scratch = scratch.p;
    }
    static token_logprobs make_guard()
    {
        token_logprobs g;
        memset(&g, GUARD, sizeof g);
        return g;
    }
    answers fetch() const
    {
        answers a = { std::vector<token_logprobs>(n_rows), std::vector<int32_t>(n_rows), all.ids };
        std::vector<float> after(all.logits.size());
        GOOD(cudaDeviceSynchronize());
        GOOD(cudaMemcpy(a.results.data(), results.p, n_rows * sizeof(token_logprobs),
                        cudaMemcpyDeviceToHost));
        GOOD(cudaMemcpy(a.ids.data(), ids.p, n_rows * sizeof(int32_t), cudaMemcpyDeviceToHost));
        GOOD(cudaMemcpy(after.data(), logits.p, after.size() * sizeof(float),
                        cudaMemcpyDeviceToHost));
        CHECK(memcmp(after.data(), all.logits.data(), after.size() * sizeof(float)) == 0);
        return a;
    }
};

static answers run_gpu(std::vector<sample_case> &rows, uint32_t n_vocab, size_t stride,
                       int32_t real, const gpu_scratch &scratch)
{
    const gpu_call c(rows, n_vocab, stride, real, scratch);
    GOOD(sample_run(nullptr, &c.call));
    return c.fetch();
}

/* ---- comparing ---- */

#define ROW_FAIL(what, got, want)                                                                  \
    test_fail(__FILE__, __LINE__,                                                                  \
              "vocabulary %u, row %zu: " what                                                      \
              " is %.9g, not %.9g (temperature %g, min_p %g, top_k %d, top_p %g, score %d)",       \
              n_vocab, i, (double)(got), (double)(want), (double)row.params.temperature,           \
              (double)row.params.min_p, row.params.top_k, (double)row.params.top_p, row.score)

static bool are_near(float a, float b)
{
    return a == b || fabsf(a - b) <= 2e-7f * fabsf(b) + 4e-6f;
}

static void check_row(const sample_case &row, uint32_t n_vocab, size_t i, const answers &a,
                      const token_logprobs &want)
{
    const token_logprobs &got = a.results[i];
    const int32_t id = a.ids[i];
    if (got.id != want.id) ROW_FAIL("the token", got.id, want.id);
    if (id != (row.score < 0 ? want.id : a.before[i])) ROW_FAIL("ids[]", id, want.id);
    if (got.rank != want.rank) ROW_FAIL("the rank", got.rank, want.rank);
    if (!are_near(got.logprob, want.logprob)) ROW_FAIL("the logprob", got.logprob, want.logprob);
    if (got.ends != want.ends) ROW_FAIL("ends", got.ends, want.ends);
    if (got.n_top != want.n_top) ROW_FAIL("n_top", got.n_top, want.n_top);
    for (size_t t = 0; t < SAMPLER_LOGPROBS_MAX; t++) {
        if (got.top[t].id != want.top[t].id)
            ROW_FAIL("an id of top", got.top[t].id, want.top[t].id);
        if (!are_near(got.top[t].logprob, want.top[t].logprob))
            ROW_FAIL("a logprob of top", got.top[t].logprob, want.top[t].logprob);
    }
}

static void check_rows(std::vector<sample_case> &rows, uint32_t n_vocab, const answers &a)
{
    host_sampler host(n_vocab);
    for (size_t i = 0; i < rows.size(); i++) check_row(rows[i], n_vocab, i, a, host.run(rows[i]));
}

/* Samples all rows at once, then in another order with the same scratch, and some of them alone. */
static void check_vocabulary(uint64_t seed, uint32_t n_vocab, size_t n_rows, size_t n_alone)
{
    need_gpu();
    std::vector<sample_case> rows = make_rows(seed, n_rows, n_vocab);
    const gpu_scratch scratch(n_rows, n_vocab);
    const answers first = run_gpu(rows, n_vocab, n_vocab + 3, -1, scratch);
    check_rows(rows, n_vocab, first);
    std::vector<sample_case> reordered = rows;
    std::rotate(reordered.begin(), reordered.begin() + 1, reordered.end());
    check_rows(reordered, n_vocab, run_gpu(reordered, n_vocab, n_vocab, -1, scratch));
    for (size_t i = 0; i < n_alone; i++) {
        std::vector<sample_case> alone(1, rows[i]);
        const answers a = run_gpu(alone, n_vocab, n_vocab, -1, scratch);
        CHECK(memcmp(&a.results[0], &first.results[i], sizeof(token_logprobs)) == 0);
    }
}

/* ---- cases ---- */

TEST(five_tokens_as_the_host) { check_vocabulary(1, 5, TEST_IS_SANITIZED ? 60 : 400, 30); }
TEST(one_token_as_the_host) { check_vocabulary(2, 1, 40, 4); }
TEST(hundred_tokens_as_the_host) { check_vocabulary(3, 100, TEST_IS_SANITIZED ? 60 : 400, 30); }
TEST(thousand_tokens_as_the_host) { check_vocabulary(4, 1000, TEST_IS_SANITIZED ? 60 : 400, 30); }
TEST(tokens_of_a_small_vocabulary_as_the_host)
{
    check_vocabulary(5, 32003, TEST_IS_SANITIZED ? 8 : 64, 4);
}
TEST(tokens_of_a_large_vocabulary_as_the_host)
{
    check_vocabulary(6, 151936, TEST_IS_SANITIZED ? 2 : 12, 1);
}

/* Many draws from one row equal those of the host, so that all paths through a chunk and from chunk
 * to chunk are taken. */
TEST(draws_as_the_host_for_many_seeds)
{
    need_gpu();
    const float temperatures[] = { 1, 1, 1e-4f /* is raised to 1e-2 */ }, top_ps[] = { 1, 0.9f, 1 };
    const uint32_t n_vocab = 5000;
    for (int way = 0; way < 3; way++) {
        std::vector<sample_case> rows;
        sample_case row;
        random_numbers r = { 7 };
        for (uint32_t i = 0; i < n_vocab; i++)
            row.logits.push_back(r.normal() * (way == 2 ? 1e-2f : 1.0f));
        row.params.temperature = temperatures[way], row.params.top_p = top_ps[way],
        row.params.repetition_penalty = 1, row.params.n_logprobs = -1;
        for (uint64_t seed = 0; seed < (TEST_IS_SANITIZED ? 20 : 200); seed++) {
            row.params.seed = seed;
            row.tokens.push_back(3); /* the index of the draw */
            rows.push_back(row);
        }
        const gpu_scratch scratch(rows.size(), n_vocab);
        check_rows(rows, n_vocab, run_gpu(rows, n_vocab, n_vocab, -1, scratch));
    }
}

/* Of equal values at the boundary of top_p, those with the lowest ids are kept. There are one or
 * two different values, so that sums are exact. */
TEST(equals_at_the_border_go_by_id)
{
    need_gpu();
    std::vector<sample_case> rows;
    /* at 40000 there are more equal values than a list holds */
    for (uint32_t n_vocab : { 7u, 9000u, 40000u }) {
        rows.clear();
        for (float top_p : { 0.5f, 0.25f, 0.001f, 0.75f })
            for (int32_t top_k : { 0, 3 })
                for (uint64_t seed = 0; seed < 8; seed += test_runs_long() ? 1 : 3) {
                    sample_case row;
                    row.logits.assign(n_vocab, 2.0f);
                    for (uint32_t i = 3; seed >= 4 && i < n_vocab; i += 97) row.logits[i] = 2.5f;
                    row.params.temperature = 0.5f, row.params.top_p = top_p,
                    row.params.top_k = top_k, row.params.repetition_penalty = 1;
                    row.params.seed = seed, row.params.n_logprobs = -1;
                    rows.push_back(row);
                }
        const gpu_scratch scratch(rows.size(), n_vocab);
        check_rows(rows, n_vocab, run_gpu(rows, n_vocab, n_vocab, -1, scratch));
    }
}

/* Penalties count the only token so far, which would otherwise be chosen again, for every id and
 * with other changes to its logit. */
TEST(a_future_token_counts_everywhere)
{
    need_gpu();
    const uint32_t n_vocab = 9000;
    std::vector<sample_case> rows;
    for (int32_t id : { 0, 1, 4095, 4096, 4097, 8191, 8192, 8999 }) /* a chunk has 4,096 */
        for (int kind = 0; kind < 4; kind++) {
            sample_case row;
            row.logits.assign(n_vocab, 2.0f);
            row.logits[(size_t)id] = 2.5f;
            row.params.top_p = 1, row.params.repetition_penalty = kind == 1 ? 1.5f : 1,
            row.params.n_logprobs = -1;
            row.params.presence_penalty = kind == 1 ? 0 : 0.2f,
            row.params.frequency_penalty = kind == 1 ? 0 : 0.4f;
            if (kind == 2) row.bias = { { id, -0.25f }, { id, 0.25f } };
            if (kind == 3)
                row.bias = { { id == 0 ? 1 : id - 1, 0.25f }, { id == 8999 ? 0 : id + 1, 0.125f } };
            row.tokens = { id }, row.n_prompt = 0, row.n_future = 1;
            rows.push_back(row);
            row.tokens = { id, id, id == 7 ? 8 : 7, id }, row.n_future = 1 + (uint32_t)kind;
            rows.push_back(row);
        }
    const gpu_scratch scratch(rows.size(), n_vocab);
    const answers a = run_gpu(rows, n_vocab, n_vocab, -1, scratch);
    check_rows(rows, n_vocab, a);
    for (size_t i = 0; i < rows.size(); i++) CHECK(a.ids[i] != rows[i].tokens[0]);
}

TEST(padding_rows_are_left_alone)
{
    need_gpu();
    const uint32_t n_vocab = 300;
    const token_logprobs guard = gpu_call::make_guard();
    std::vector<sample_case> rows = make_rows(8, 12, n_vocab);
    const gpu_scratch scratch(rows.size(), n_vocab);
    for (int32_t real : { 0, 1, 7 }) {
        const answers a = run_gpu(rows, n_vocab, n_vocab, real, scratch);
        std::vector<sample_case> real_rows(rows.begin(), rows.begin() + real);
        check_rows(real_rows, n_vocab, a);
        for (size_t i = (size_t)real; i < rows.size(); i++) {
            CHECK_EQ_INT(a.ids[i], a.before[i]);
            CHECK(memcmp(&a.results[i], &guard, sizeof guard) == 0);
        }
    }
}

/* A captured graph uses what is in memory when it is launched. */
TEST(a_captured_call_takes_other_requests)
{
    need_gpu();
    const uint32_t n_vocab = 3000;
    std::vector<sample_case> rows = make_rows(9, 10, n_vocab), others = make_rows(10, 10, n_vocab);
    for (size_t i = 0; i < rows.size(); i++)
        others[i].logits = rows[i].logits, others[i].allowed.clear(), others[i].bias.clear();
    const gpu_scratch scratch(rows.size(), n_vocab);
    gpu_call c(rows, n_vocab, n_vocab, -1, scratch);
    std::vector<sample_edit> room(n_vocab);
    const device_bytes edits(room);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    c.call.work = SAMPLE_DRAW | SAMPLE_CUT | SAMPLE_LOGPROBS | SAMPLE_FUTURE;
    c.call.edits = (const sample_edit *)edits.p;
    GOOD(cudaMemcpy(edits.p, c.all.edits.data(), c.all.edits.size() * sizeof(sample_edit),
                    cudaMemcpyHostToDevice));
    GOOD(cudaStreamCreate(&stream));
    GOOD(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    GOOD(sample_run(stream, &c.call));
    GOOD(cudaStreamEndCapture(stream, &graph));
    GOOD(cudaGraphInstantiate(&exec, graph, 0));
    GOOD(cudaGraphLaunch(exec, stream));
    check_rows(rows, n_vocab, c.fetch());
    const encoded_rows next = encode_rows(others, n_vocab, n_vocab);
    CHECK(next.edits.size() <= room.size());
    GOOD(cudaMemcpy(c.row_params.p, next.row_params.data(),
                    next.row_params.size() * sizeof(sample_row_params), cudaMemcpyHostToDevice));
    if (!next.edits.empty())
        GOOD(cudaMemcpy(edits.p, next.edits.data(), next.edits.size() * sizeof(sample_edit),
                        cudaMemcpyHostToDevice));
    GOOD(cudaMemcpy(c.ids.p, next.ids.data(), next.ids.size() * sizeof(int32_t),
                    cudaMemcpyHostToDevice));
    GOOD(cudaDeviceSynchronize());
    GOOD(cudaGraphLaunch(exec, stream));
    answers a = c.fetch();
    a.before = next.ids;
    check_rows(others, n_vocab, a);
    GOOD(cudaGraphExecDestroy(exec));
    GOOD(cudaGraphDestroy(graph));
    GOOD(cudaStreamDestroy(stream));
}

TEST(calls_out_of_bounds_are_refused)
{
    need_gpu();
    std::vector<sample_case> rows = make_rows(11, 1, 5);
    const gpu_scratch scratch(1, 5);
    gpu_call c(rows, 5, 5, -1, scratch);
    c.call.n_vocab = 0;
    CHECK_EQ_INT(sample_run(nullptr, &c.call), cudaErrorInvalidValue);
    c.call.n_vocab = SAMPLE_VOCAB_MAX + 1;
    CHECK_EQ_INT(sample_run(nullptr, &c.call), cudaErrorInvalidValue);
    c.call.n_vocab = 5, c.call.n_rows = SAMPLE_ROWS_MAX + 1;
    CHECK_EQ_INT(sample_run(nullptr, &c.call), cudaErrorInvalidValue);
    c.call.n_rows = 0;
    GOOD(sample_run(nullptr, &c.call));
    CHECK_EQ_INT(c.fetch().ids[0], UNTOUCHED);
}

/* Runs in a process of its own, because the error ends the process or the context. */
TEST(a_row_that_asks_for_more_than_the_call_has_ends_it)
{
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        int n = 0;
        if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) _exit(2);
        sample_case row;
        row.logits.assign(5, 1.0f);
        row.params.temperature = 1, row.params.top_p = 1, row.params.repetition_penalty = 1,
        row.params.n_logprobs = -1;
        std::vector<sample_case> rows(1, row);
        const gpu_scratch scratch(1, 5);
        gpu_call c(rows, 5, 5, -1, scratch);
        c.call.work = 0;
        _exit(sample_run(nullptr, &c.call) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess
                  ? 0
                  : 1);
    }
    int status;
    CHECK_EQ_INT(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 2)
        SKIP("no CUDA GPU, and no emulated one in this build");
    CHECK(!(WIFEXITED(status) && WEXITSTATUS(status) == 0));
}

/* The list of logit edits is sorted, keeps sampler.c's order for each token, and has no edit
 * without an effect. */
TEST(edits_are_few_and_in_order)
{
    sample_encoder *m = sample_encoder_create(100);
    sample_case row;
    sample_encoded made;
    row.params.top_p = 1, row.params.repetition_penalty = 1, row.params.n_logprobs = -1;
    row.tokens = { 9, 8, 7, 8, 70 }, row.n_prompt = 2, row.eos = { 99, 100 };
    sample_request w = row.request();
    sample_encoder_encode(m, &w, &made);
    CHECK_EQ_INT(made.params.n_edits, 0);
    CHECK_EQ_INT(made.work, 0);
    CHECK_EQ_INT(made.params.allowed, -1);
    CHECK_EQ_INT(made.params.index, 3);
    row.params.frequency_penalty = 0.5f, row.params.min_tokens = 4, row.params.temperature = 1,
    row.params.top_k = 3;
    row.bias = { { 8, 1 }, { 3, 2 }, { 8, 4 }, { -1, 5 }, { 100, 6 } };
    row.allowed = { 5, 1 };
    w = row.request();
    for (int again = 0; again < 2; again++) { /* the first leaves nothing behind */
        sample_encoder_encode(m, &w, &made);
        const int32_t ids[] = { 3, 7, 8, 8, 70, 99 };
        CHECK_EQ_INT(made.params.n_edits, 6);
        for (int i = 0; i < 6; i++) CHECK_EQ_INT(made.edits[i].id, ids[i]);
        CHECK(made.edits[2].bias == 1 && made.edits[3].bias == 4 && !made.edits[2].penalise &&
              made.edits[3].penalise);
        CHECK(made.edits[3].count == 1 && made.edits[5].forbid && !made.edits[5].penalise);
        CHECK(made.params.frequency == 0.5f && made.params.presence == 0 &&
              made.params.repetition == 1 && made.params.n_chosen == 0);
        CHECK_EQ_INT(made.n_words, 2);
        CHECK(made.allowed == row.allowed.data() && made.params.allowed == 0);
        CHECK_EQ_INT(made.work, SAMPLE_DRAW | SAMPLE_CUT);
    }
    row.params.repetition_penalty = 2, row.params.presence_penalty = 0.7f;
    w = row.request();
    sample_encoder_encode(m, &w, &made);
    CHECK_EQ_INT(made.params.n_edits, 7);
    CHECK(made.edits[4].id == 9 && made.edits[4].penalise && made.edits[4].count == 0);
    CHECK(made.edits[1].id == 7 && made.edits[1].count == 1 && made.params.presence == 0.7f &&
          made.params.repetition == 2);
    w = row.request({ 1, 5, 2, 0, 0, 0 }); /* the last token, 70, is known only to the GPU */
    w.n_verify = 3, w.kept_at = 9;
    sample_encoder_encode(m, &w, &made);
    CHECK(made.params.n_edits == 6 && made.edits[5].id == 99 && made.params.n_chosen == 1 &&
          made.params.first_chosen == 2 && made.params.after == 5 && made.params.index == 3);
    CHECK(made.params.n_verify == 3 && made.params.kept_at == 9);
    CHECK_EQ_INT(made.work, SAMPLE_DRAW | SAMPLE_CUT | SAMPLE_FUTURE | SAMPLE_VERIFY);
    w = row.request();
    w.score = 5;
    sample_encoder_encode(m, &w, &made);
    CHECK(made.params.n_edits == 0 && made.n_words == 0 && made.params.allowed == -1 &&
          made.work == SAMPLE_LOGPROBS);
    sample_encoder_free(m);
}

TEST_MAIN(CASE_T(tokens_of_a_large_vocabulary_as_the_host, 250),
          CASE_T(tokens_of_a_small_vocabulary_as_the_host, 250),
          CASE_T(five_tokens_as_the_host, 250), CASE(one_token_as_the_host),
          CASE_T(hundred_tokens_as_the_host, 250), CASE_T(thousand_tokens_as_the_host, 250),
          CASE_T(draws_as_the_host_for_many_seeds, 250), CASE_T(equals_at_the_border_go_by_id, 250),
          CASE(a_future_token_counts_everywhere), CASE(padding_rows_are_left_alone),
          CASE(a_captured_call_takes_other_requests), CASE(calls_out_of_bounds_are_refused),
          CASE(a_row_that_asks_for_more_than_the_call_has_ends_it),
          CASE(edits_are_few_and_in_order))
