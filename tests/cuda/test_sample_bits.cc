/* test_sample_bits.cc - the intermediate results of sampling on a GPU, bit for bit: a last bit that
 * is wrong changes one token in billions, which no comparison of tokens finds. Built for tests/simt
 * only, because it reads the kernels' own headers. */
#include <math.h>
#include <string.h>

#include <algorithm>
#include <memory>

#include "kernels/cuda/sampling/sample_draw.cuh"
#include "tests/cuda/device_case.h"

extern "C" {
#include "kernels/backend.h"
#include "kernels/host_math.h"
#include "shared/base/rng.h"
}

static uint32_t bits_of(float x) { return __float_as_uint(x); }

TEST(exp_has_the_hosts_bits)
{
    for (uint64_t bits = 0; bits <= 0xffffffffu; bits += TEST_IS_SANITIZED ? 99991 : 997) {
        const float x = __uint_as_float((unsigned)bits), want = exp_ref(x), got = exp_as_host(x);
        if (isnan(want) ? !isnan(got) : bits_of(got) != bits_of(want))
            test_fail(__FILE__, __LINE__, "exp(%.9g) is %.9g, not %.9g", (double)x, (double)got,
                      (double)want);
    }
}

TEST(numbers_drawn_are_the_hosts)
{
    for (uint32_t i = 0; i < 1000; i++) {
        const uint64_t seed = i * 0x9e3779b97f4a7c15u;
        CHECK(draw_uniform(seed, i) == rng_uniform(seed, 0, i));
        CHECK(draw_uniform(i, 0xffffffffu - i) == rng_uniform(i, 0, 0xffffffffu - i));
    }
}

TEST(keys_go_by_value_then_by_id)
{
    const float sorted[] = { -INFINITY, -3e38f, -1, -1e-45f, 0, 1e-45f, 0.5f, 3e38f, INFINITY };
    for (int i = 0; i + 1 < 9; i++)
        CHECK(key_of(sorted[i + 1], 7) > key_of(sorted[i], 0) &&
              key_of(sorted[i], 3) > key_of(sorted[i], 4));
    for (float v : sorted)
        CHECK(value_of(key_of(v, 9)) == v && id_of(key_of(v, 9)) == 9 && key_of(v, INT32_MAX) > 0);
    CHECK(key_of(0.0f, 5) == key_of(-0.0f, 5) && key_of(NAN, 0) == 0 && key_of(-NAN, 0) == 0);
}

/* One row sampled without top_k, top_p or min_p, with logprobs, and its scratch afterwards. */
struct drawn_row {
    enum { N = 10001 };
    std::vector<float> logits = std::vector<float>(N);
    std::vector<unsigned char> scratch = std::vector<unsigned char>(sample_scratch_bytes(1, N));
    token_logprobs result;
    explicit drawn_row(unsigned work, float top_p)
    {
        sample_row_params ask = {};
        sample_call call = {};
        uint32_t mix = 1;
        for (float &v : logits)
            mix = mix * 1664525u + 1013904223u, v = (float)(int32_t)mix * 0x1p-28f;
        ask.temperature = 0.7f, ask.top_p = top_p, ask.allowed = ask.score = -1,
        ask.n_logprobs = work & SAMPLE_LOGPROBS ? 0 : -1;
        const device_bytes x(logits), row_params(&ask, sizeof ask), room(scratch);
        const device_bytes results(std::vector<token_logprobs>(1)), ids(std::vector<int32_t>(1));
        call.logits = (const float *)x.p, call.stride = N, call.n_vocab = N, call.n_rows = 1;
        call.work = work, call.row_params = (const sample_row_params *)row_params.p;
        call.results = (token_logprobs *)results.p, call.kept = (int32_t *)ids.p,
        call.scratch = room.p;
        GOOD(sample_run(nullptr, &call));
        GOOD(cudaDeviceSynchronize());
        GOOD(cudaMemcpy(scratch.data(), room.p, scratch.size(), cudaMemcpyDeviceToHost));
        GOOD(cudaMemcpy(&result, results.p, sizeof result, cudaMemcpyDeviceToHost));
    }
    template <class T> const T *at(size_t offset) const
    {
        return (const T *)(const void *)(scratch.data() + offset);
    }
};

static kernel_ctx *host_kernels()
{
    kernel_ctx *c;
    struct err err;
    CHECK_OK(kernel_ctx_create(kernel_options_default("auto", ACTIVATIONS_F32, 1), &c, &err));
    return c;
}

/* sampler.c's chunk_mass when all tokens are kept. */
static double chunk_mass(const float *p, size_t n)
{
    double lane[8] = {};
    for (size_t i = 0; i < n; i++) lane[i % 8] += (double)p[i];
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) +
           ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

TEST(masses_are_added_as_on_the_host)
{
    const drawn_row row(SAMPLE_DRAW, 1);
    const size_t n = drawn_row::N;
    const sample_row_layout at = sample_row_layout_of(n);
    std::vector<float> p(n);
    kernel_ctx *c = host_kernels();
    float max = row.logits[0];
    for (float v : row.logits) max = v > max ? v : max;
    host_exp_terms(c, p.data(), row.logits.data(), n, max, 1.0f / 0.7f);
    CHECK(memcmp(p.data(), row.at<float>(at.x), n * sizeof(float)) == 0);
    for (size_t first = 0; first < n; first += SAMPLE_CHUNK)
        CHECK(row.at<double>(at.sums)[first / SAMPLE_CHUNK] ==
              chunk_mass(&p[first], std::min(n - first, (size_t)SAMPLE_CHUNK)));
    kernel_ctx_free(c);
}

/* After rounding, the drawn number may be beyond the last entry of the chunk whose mass exceeded
 * it. The walk then goes on to the next chunk, and uses the last entry if there is none. */
TEST(a_draw_walks_on_from_chunk_to_chunk)
{
    std::unique_ptr<sample_draw_smem> room(new sample_draw_smem());
    room->p[3] = 0.5f, room->p[900] = 0.25f, room->sum = 1, room->id = -5;
    draw_in_chunk(room.get(), 2048, 1.4);
    CHECK(room->found && room->id == 2048 + 3);
    room->found = false;
    draw_in_chunk(room.get(), 2048, 1.75); /* exactly equal */
    CHECK(!room->found && room->id == 2048 + 900 && room->sum == 1.75);
    memset(room->p, 0, sizeof room->p);
    draw_in_chunk(room.get(), 3072, 1.75);
    CHECK(!room->found && room->id == 2048 + 900 && room->sum == 1.75);
    room->p[1023] = 1;
    draw_in_chunk(room.get(), 4096, 1.75);
    CHECK(room->found && room->id == 4096 + 1023);
}

/* The sum of exp(x - max) over a chunk as kernels/cpu computes it: 16 partial sums in f32, then a
 * tree. */
static float chunk_sum_exp(const float *x, size_t n, float max)
{
    float lane[16] = {};
    for (size_t i = 0; i < n; i++) lane[i % 16] += exp_ref(x[i] - max);
    for (int half = 8; half > 0; half /= 2)
        for (int l = 0; l < half; l++) lane[l] += lane[l + half];
    return lane[0];
}

TEST(log_sum_exp_is_added_as_on_the_host)
{
    const drawn_row row(SAMPLE_DRAW | SAMPLE_LOGPROBS, 1);
    kernel_ctx *c = host_kernels();
    float lse;
    host_log_sum_exp(c, &lse, row.logits.data(), drawn_row::N, 1, drawn_row::N);
    CHECK(bits_of(row.result.logprob) == bits_of(row.logits[(size_t)row.result.id] - lse));
    /* the last phase has overwritten it with its own */
    const double *sums = row.at<double>(sample_row_layout_of(drawn_row::N).sums);
    const float max = *std::max_element(row.logits.begin(), row.logits.end());
    for (size_t first = 0; first < drawn_row::N; first += SAMPLE_CHUNK)
        CHECK(sums[first / SAMPLE_CHUNK] ==
              (double)chunk_sum_exp(&row.logits[first],
                                    std::min(drawn_row::N - first, (size_t)SAMPLE_CHUNK), max));
    kernel_ctx_free(c);
}

/* A GPU faults on unaligned reads that a CPU allows. */
TEST(parts_of_the_scratch_are_aligned)
{
    for (size_t n = 1; n <= SAMPLE_VOCAB_MAX; n += n < 9000 ? 1 : 1009) {
        const sample_row_layout at = sample_row_layout_of(n);
        CHECK(at.sums % 16 == 0 && at.tops % 16 == 0 && at.maxima % 16 == 0 && at.list % 16 == 0 &&
              at.x % 16 == 0 && at.bytes % 256 == 0);
        CHECK(at.bytes >= at.x + n * sizeof(float));
    }
}

TEST(counters_are_zero_when_a_call_is_over)
{
    const drawn_row row(SAMPLE_DRAW | SAMPLE_CUT | SAMPLE_LOGPROBS, 0.8f);
    const sample_row_state &s = *row.at<sample_row_state>(0);
    CHECK(s.draws && s.cuts); /* all phases ran */
    CHECK(s.best == 0 && s.raw_max == 0 && s.n_done == 0 && s.n_kept == 0 && s.n_listed == 0 &&
          s.n_reach == 0);
}

TEST_MAIN(CASE(exp_has_the_hosts_bits), CASE(numbers_drawn_are_the_hosts),
          CASE(keys_go_by_value_then_by_id), CASE(masses_are_added_as_on_the_host),
          CASE(a_draw_walks_on_from_chunk_to_chunk), CASE(log_sum_exp_is_added_as_on_the_host),
          CASE(parts_of_the_scratch_are_aligned), CASE(counters_are_zero_when_a_call_is_over))
