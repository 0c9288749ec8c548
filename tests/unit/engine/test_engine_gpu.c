/* test_engine_gpu.c - asynchronous steps and CUDA graphs on a GPU: the same tokens as one request
 * after the other, synchronously, without graphs and prefix cache. The emulated GPU is slow: few
 * requests, short ones. */
#include <stdlib.h>
#include <unistd.h>

#include "tests/unit/engine/draft_book.h"
#include "tests/unit/engine/engine_rig.h"
#include "tests/unit/engine/knowing_model.h"

#ifndef BATON_EMULATED_GPU
#define BATON_EMULATED_GPU 0
#endif

/* An emulated GPU takes minutes for what a GPU does in seconds. */
static bool runs_long(void)
{
    return BATON_EMULATED_GPU ? getenv("BATON_TEST_ALL") != NULL : test_runs_long();
}

/* What the case runs on. Each case is a process of its own. */
static struct {
    const char *model, *path; /* of the goldens, or, unless NULL, anywhere */
    enum activations activations;
} the_kind;

static void open_rig(struct rig *r, struct rig_options o)
{
    if (device_count("cuda") == 0) SKIP("no CUDA device, or a build without");
    o.isa = "cuda";
    o.model = the_kind.model;
    o.path = the_kind.path;
    o.activations = the_kind.activations;
    rig_open(r, o);
}

static struct answer *one_by_one(const struct engine_request *reqs, uint32_t n)
{
    static const struct logit_bias nothing = { 0, 0 }; /* changes no logit, but there is no room for
                                                        * it: the host chooses each token */
    struct rig r;
    open_rig(&r, (struct rig_options){
                     .no_prefix_cache = true, .eager = true, .sampling_edit_bytes = 1 });
    struct answer *all = MEM_ARRAY(struct answer, n);
    for (uint32_t i = 0; i < n; i++) {
        struct engine_request q = reqs[i];
        q.sampling.bias = &nothing;
        q.sampling.n_bias = 1;
        struct answer *one = rig_run(&r, &q, 1);
        all[i] = *one;
        mem_free(one);
    }
    CHECK_EQ_INT(rig_count(&r, "baton_engine_steps_recorded_total"), 0);
    CHECK_EQ_INT(rig_count(&r, "baton_engine_steps_ahead_total"), 0);
    CHECK(rig_count(&r, "baton_engine_steps_host_sampled_total") > 0);
    rig_close(&r);
    return all;
}

/* In turn greedy, sampled, and sampled among few; every other with logprobs and penalties, which
 * count the future token. */
static struct engine_request request(uint32_t i, uint32_t n_prompt, uint32_t n_out)
{
    struct engine_request q = rig_request(1 + i, n_prompt, 300 + i, n_out);
    q.sampling.temperature = i % 3 ? 1.0f : 0;
    q.sampling.top_k = i % 3 == 2 ? 20 : 0;
    q.sampling.min_tokens = 2;
    q.sampling.n_logprobs = i % 2 ? 3 : -1;
    if (i % 2) {
        q.sampling.frequency_penalty = 0.6f;
        q.sampling.presence_penalty = 0.3f;
        q.sampling.repetition_penalty = i % 4 == 1 ? 1.2f : 1;
    }
    return q;
}

/* Some end at a token that the host sees when the next step is in flight. */
static void check_ahead(void)
{
    enum { N = TEST_IS_SANITIZED ? 3 : 6 };
    struct engine_request reqs[N];
    struct rig r;
    for (uint32_t i = 0; i < N; i++)
        reqs[i] = request(i, 5 + 9 * i, runs_long() ? 5 + 2 * i : 4 + i);
    struct answer *want = one_by_one(reqs, N);
    for (uint32_t i = 0; i < N; i += 2) {
        reqs[i].sampling.stop_ids[0] = want[i].out[want[i].n_out / 2].id;
        reqs[i].sampling.n_stop_ids = 1;
    }
    mem_free(want);
    want = one_by_one(reqs, N);
    open_rig(&r, (struct rig_options){ .max_batched_tokens = 32 });
    for (int round = 0; round < 2; round++) { /* the second finds the prompts in the prefix cache */
        struct answer *got = rig_run(&r, reqs, N);
        for (uint32_t i = 0; i < N; i++) check_same(&want[i], &got[i]);
        mem_free(got);
    }
    rig_await_free_blocks(&r, RIG_BLOCKS_MAX);
    CHECK(rig_count(&r, "baton_engine_steps_ahead_total") > 0);
    CHECK(rig_count(&r, "baton_engine_steps_recorded_total") > 0);
    rig_close(&r);
    mem_free(want);
}

TEST(answers_that_end_a_step_late) { check_ahead(); }

TEST(latents_in_bf16)
{
    the_kind.model = "deepseek_v3";
    the_kind.activations = ACTIVATIONS_FAST;
    check_ahead();
}

TEST(experts_in_bf16)
{
    if (!runs_long()) SKIP("takes long on an emulated GPU; tests/run.sh --all runs it");
    the_kind.model = "ernie_moe";
    the_kind.activations = ACTIVATIONS_FAST;
    check_ahead();
}

/* Blocks run out: steps wait for the previous one. */
TEST(steps_that_have_to_wait)
{
    enum { N = 4, BLOCKS = 8 };
    struct engine_request reqs[N];
    struct rig r;
    for (uint32_t i = 0; i < N; i++) reqs[i] = request(i, 14 + 5 * i, runs_long() ? 40 : 18);
    reqs[1].sampling.repetition_penalty = 1.2f;
    reqs[1].sampling.max_tokens = 6;
    struct answer *want = one_by_one(reqs, N);
    open_rig(&r, (struct rig_options){ .n_blocks = BLOCKS });
    struct answer *got = rig_run(&r, reqs, N);
    for (uint32_t i = 0; i < N; i++) check_same(&want[i], &got[i]);
    CHECK(rig_count(&r, "baton_engine_preemptions_total") > 0);
    CHECK(rig_count(&r, "baton_engine_steps_ahead_total") > 0);
    rig_await_free_blocks(&r, BLOCKS);
    rig_close(&r);
    mem_free(want);
    mem_free(got);
}

/* Requests arrive and are canceled while steps are in flight. */
TEST(commands_in_between)
{
    enum { N = 14, FEWER = 9, BLOCKS = 20 };
    const uint32_t n = runs_long() ? N : FEWER;
    struct engine_request reqs[N];
    struct answer got[N] = { 0 };
    struct rig r;
    for (uint32_t i = 0; i < n; i++)
        reqs[i] = request(i % 5, 4 + 7 * (i % 5), 8), reqs[i].id = 1 + i;
    struct answer *want = one_by_one(reqs, 5);
    open_rig(&r, (struct rig_options){ .n_blocks = BLOCKS, .max_seqs = 4 });
    for (uint32_t i = 0; i < n; i++) {
        got[i].id = reqs[i].id;
        CHECK_OK(engine_submit(r.engine, &reqs[i]));
        if (i % 4 == 3) CHECK_OK(engine_cancel(r.engine, reqs[i - 2].id, true));
        usleep((useconds_t)(rng_uniform(98, 1, i) * 20000));
    }
    rig_gather(&r, got, n);
    for (uint32_t i = 0; i < n; i++)
        if (!got[i].canceled) check_same(&want[i % 5], &got[i]);
    rig_await_free_blocks(&r, BLOCKS);
    rig_close(&r);
    mem_free(want);
}

/* Rows of drafts in captured steps, and in steps that the host samples. */
static void check_drafts(struct rig_options o, enum draft_source drafts, const char *counter)
{
    enum { N = TEST_IS_SANITIZED ? 3 : 5 };
    struct engine_request reqs[N];
    struct draft_book book;
    struct rig r;
    for (uint32_t i = 0; i < N; i++)
        reqs[i] = request(i, 5 + 9 * i, runs_long() ? 16 + 2 * i : 8 + i);
    struct answer *want = one_by_one(reqs, N);
    draft_book_init(&book, DRAFTS_MIXED, 4, reqs, want, N);
    draft_source_set(&o, drafts, &book);
    open_rig(&r, o);
    for (int round = runs_long() ? 0 : 1; round < 2; round++) {
        struct answer *got = rig_run(&r, reqs, N);
        for (uint32_t i = 0; i < N; i++) check_same(&want[i], &got[i]);
        mem_free(got);
    }
    rig_await_free_blocks(&r, RIG_BLOCKS_MAX);
    if (drafts == DRAFTS_OF_BOOK)
        CHECK(rig_count(&r, "baton_spec_decode_num_accepted_tokens_total") > 0);
    CHECK(rig_count(&r, "baton_spec_decode_num_draft_tokens_total") >
          rig_count(&r, "baton_spec_decode_num_accepted_tokens_total"));
    CHECK(rig_count(&r, counter) > 0);
    rig_close(&r);
    mem_free(want);
}

TEST(drafts_in_captured_steps)
{
    check_drafts((struct rig_options){ .max_batched_tokens = 32 }, DRAFTS_OF_BOOK,
                 "baton_engine_steps_recorded_total");
}

TEST(drafts_of_latents)
{
    if (!runs_long()) SKIP("takes long on an emulated GPU; tests/run.sh --all runs it");
    the_kind.model = "deepseek_v3";
    check_drafts((struct rig_options){ .max_batched_tokens = 32 }, DRAFTS_OF_BOOK,
                 "baton_engine_steps_recorded_total");
}

TEST(drafts_that_the_host_samples)
{
    check_drafts((struct rig_options){ .eager = true, .sampling_edit_bytes = 1 }, DRAFTS_OF_BOOK,
                 "baton_engine_steps_host_sampled_total");
}

/* Passes of the layer read what the step before has left on the device. */
TEST(drafts_of_a_draft_layer)
{
    if (!runs_long()) SKIP("takes long on an emulated GPU; tests/run.sh --all runs it");
    the_kind.model = "deepseek_v3";
    check_drafts((struct rig_options){ .max_batched_tokens = 32 }, DRAFTS_OF_LAYER,
                 "baton_engine_steps_recorded_total");
    the_kind.model = "ernie_moe";
    the_kind.activations = ACTIVATIONS_FAST;
    check_drafts((struct rig_options){ .eager = true, .sampling_edit_bytes = 1 }, DRAFTS_OF_LAYER,
                 "baton_engine_steps_host_sampled_total");
}

struct layer_case {
    uint32_t n_seqs, n_drafts;
    bool eager; /* captured steps compute their padding too, which takes long here */
};

/* Adds the drafts that were right to *n_accepted. */
static void run_layer(const struct layer_case *c, const struct engine_request *reqs,
                      const struct answer *want, uint64_t *n_accepted)
{
    const struct draft_config config = { .ops = &drafter_mtp_ops,
                                         .n_tokens = c->n_drafts,
                                         .verify_all = true };
    struct rig r;
    open_rig(&r, (struct rig_options){ .max_batched_tokens = 72,
                                       .draft = &config,
                                       .draft_layer = true,
                                       .eager = c->eager });
    struct answer *got = rig_run(&r, reqs, c->n_seqs);
    for (uint32_t k = 0; k < c->n_seqs; k++) check_same(&want[k], &got[k]);
    rig_await_free_blocks(&r, RIG_BLOCKS_MAX);
    const uint64_t n_passes = rig_count(&r, "baton_engine_draft_passes_total");
    CHECK(n_passes > 0);
    CHECK_EQ_INT(rig_count(&r, "baton_engine_draft_passes_recorded_total"),
                 c->eager ? 0 : n_passes);
    /* all steps but the first, and those behind which nothing was left */
    CHECK(2 * rig_count(&r, "baton_engine_steps_ahead_total") >
          rig_count(&r, "baton_engine_steps_total"));
    *n_accepted += rig_count(&r, "baton_spec_decode_num_accepted_tokens_total");
    rig_close(&r);
    mem_free(got);
}

/* n_out: on an emulated GPU; n_cases: there, but with --all. Every number of drafts, and several of
 * sequences; passes are recorded as steps are. A model with
 * weights drawn at random seldom drafts what it chooses. */
static void check_layer(uint32_t n_out, size_t n_cases)
{
    static const struct layer_case CASES[] = {
        { 1, 3, false }, { 2, 1, true }, { 2, 8, true }, { 5, 5, false },
        { 8, 2, true },  { 4, 4, true }, { 3, 6, true }, { 7, 7, true },
    };
    enum { N = 8, FEWER = 2 };
    struct engine_request reqs[N];
    uint64_t n_accepted = 0;
    const uint32_t n = runs_long() ? N : FEWER;
    for (uint32_t i = 0; i < n; i++)
        reqs[i] = request(i, 4 + 3 * i, (BATON_EMULATED_GPU ? n_out : 20) + i);
    struct answer *want = one_by_one(reqs, n);
    for (size_t i = 0; i < (runs_long() ? COUNT_OF(CASES) : n_cases); i++)
        run_layer(&CASES[i], reqs, want, &n_accepted);
    printf("%llu drafts accepted\n", (unsigned long long)n_accepted);
    CHECK(n_accepted > 0 || !the_kind.path);
    mem_free(want);
}

TEST(passes_of_a_layer_that_is_often_right)
{
    the_kind.path = knowing_model(6);
    check_layer(9, 2);
}

TEST(passes_of_latents)
{
    the_kind.model = "deepseek_v3";
    check_layer(4, 2);
}

TEST(passes_of_heads)
{
    the_kind.model = "ernie_moe";
    check_layer(4, 2);
}

static const struct draft_config LAYER = { .ops = &drafter_mtp_ops,
                                           .n_tokens = 3,
                                           .verify_all = true };

/* Blocks run out, and an answer ends among drafts while the next step verifies more of them. */
TEST(few_blocks_and_an_end_ahead_of_drafts)
{
    if (!runs_long()) SKIP("takes long on an emulated GPU; tests/run.sh --all runs it");
    enum { N = 3, BLOCKS = 5 };
    struct engine_request reqs[N];
    struct rig r;
    the_kind.path = knowing_model(6);
    for (uint32_t i = 0; i < N; i++) reqs[i] = request(i, 12 + 5 * i, 10);
    struct answer *want = one_by_one(reqs, N);
    reqs[0].sampling.stop_ids[0] = want[0].out[want[0].n_out - 3].id;
    reqs[0].sampling.n_stop_ids = 1;
    mem_free(want);
    want = one_by_one(reqs, N);
    open_rig(&r, (struct rig_options){ .max_batched_tokens = 32,
                                       .n_blocks = BLOCKS,
                                       .draft = &LAYER,
                                       .draft_layer = true,
                                       .eager = true });
    struct answer *got = rig_run(&r, reqs, N);
    for (uint32_t i = 0; i < N; i++) check_same(&want[i], &got[i]);
    CHECK(rig_count(&r, "baton_engine_steps_ahead_total") > 0);
    CHECK(rig_count(&r, "baton_spec_decode_num_accepted_tokens_total") > 0);
    CHECK(rig_count(&r, "baton_engine_preemptions_total") > 0);
    rig_await_free_blocks(&r, BLOCKS);
    rig_close(&r);
    mem_free(want);
    mem_free(got);
}

/* Drafts of one that runs, steps ahead, have the block that the next prompt lacks: it starts all the
 * same. On a GPU it would come when that answer is over. */
TEST(a_prompt_starts_with_a_block_of_drafts)
{
    enum { BLOCKS = 3 };
    struct engine_request reqs[2] = { request(0, 9, 20), request(2, RIG_BLOCK_TOKENS + 4, 1) };
    struct rig r;
    uint32_t n_before = 0;
    if (!BATON_EMULATED_GPU) SKIP("needs the emulated GPU, which is slow enough");
    the_kind.model = "deepseek_v3"; /* whose drafts are wrong */
    open_rig(&r, (struct rig_options){ .n_blocks = BLOCKS,
                                       .max_batched_tokens = 32,
                                       .draft = &LAYER,
                                       .draft_layer = true,
                                       .eager = true });
    CHECK_OK(engine_submit(r.engine, &reqs[0]));
    for (struct rig_event e; (e = rig_next(&r)).ev.id != reqs[1].id || e.ev.kind != ENGINE_TOKEN;) {
        if (e.ev.kind != ENGINE_TOKEN) continue;
        if (n_before++ == 0) CHECK_OK(engine_submit(r.engine, &reqs[1]));
    }
    CHECK(n_before < reqs[0].sampling.max_tokens);
    CHECK(rig_count(&r, "baton_engine_steps_ahead_total") > 0);
    CHECK_OK(engine_cancel(r.engine, reqs[0].id, true));
    rig_await_free_blocks(&r, BLOCKS);
    rig_close(&r);
}

/* A step whose rows have moved turns out to have more penalties than the device has room for. */
TEST(the_host_samples_a_step_that_is_ahead_of_drafts)
{
    enum { N = 2 };
    struct engine_request reqs[N];
    struct rig r;
    the_kind.path = knowing_model(6);
    for (uint32_t i = 0; i < N; i++) reqs[i] = request(3 * i, 4 + 3 * i, 10);
    struct answer *want = one_by_one(reqs, N);
    open_rig(&r, (struct rig_options){ .max_batched_tokens = 72,
                                       .draft = &LAYER,
                                       .draft_layer = true,
                                       .eager = true,
                                       .sampling_edit_bytes = 40 });
    struct answer *got = rig_run(&r, reqs, N);
    for (uint32_t i = 0; i < N; i++) check_same(&want[i], &got[i]);
    CHECK(rig_count(&r, "baton_engine_steps_host_sampled_total") > 0);
    CHECK(rig_count(&r, "baton_engine_steps_ahead_total") > 0);
    rig_await_free_blocks(&r, RIG_BLOCKS_MAX);
    rig_close(&r);
    mem_free(want);
    mem_free(got);
}

/* Sequences come and go while steps ahead verify drafts of others. */
TEST(commands_between_drafts)
{
    enum { N = 6, BLOCKS = 20 };
    struct engine_request reqs[N];
    struct answer got[N] = { 0 };
    struct rig r;
    the_kind.path = knowing_model(6);
    for (uint32_t i = 0; i < N; i++)
        reqs[i] = request(i % 3, 4 + 7 * (i % 3), 6), reqs[i].id = 1 + i;
    struct answer *want = one_by_one(reqs, 3);
    open_rig(&r, (struct rig_options){ .n_blocks = BLOCKS,
                                       .max_seqs = 3,
                                       .max_batched_tokens = 64,
                                       .draft = &LAYER,
                                       .draft_layer = true,
                                       .eager = true });
    for (uint32_t i = 0; i < N; i++) {
        got[i].id = reqs[i].id;
        CHECK_OK(engine_submit(r.engine, &reqs[i]));
        if (i % 3 == 2) CHECK_OK(engine_cancel(r.engine, reqs[i - 1].id, true));
        usleep((useconds_t)(rng_uniform(97, 1, i) * 400000));
    }
    rig_gather(&r, got, N);
    for (uint32_t i = 0; i < N; i++)
        if (!got[i].canceled) check_same(&want[i % 3], &got[i]);
    CHECK(rig_count(&r, "baton_engine_steps_ahead_total") > 0);
    CHECK(rig_count(&r, "baton_spec_decode_num_accepted_tokens_total") > 0);
    rig_await_free_blocks(&r, BLOCKS);
    rig_close(&r);
    mem_free(want);
}

/* A small model drafts on the same GPU, in a kernel context of its own. The model itself is one that
 * is often right. */
static void check_drafts_of_model(const char *draft, bool eager)
{
    struct draft_config c = { .ops = &drafter_model_ops, .n_tokens = 3, .verify_all = true };
    struct engine_request reqs[2] = { request(0, 9, 14), request(1, 40, 10) };
    struct kernel_ctx *k;
    struct err err = { 0 };
    struct rig r;
    struct answer *want = one_by_one(reqs, 2);
    CHECK_OK(kernel_ctx_create(kernel_options_default("cuda", the_kind.activations, 1), &k, &err));
    const struct model_options mo = {
        .path = test_data(draft), .max_rows = 64, .max_model_len = 1024, .kernels = k
    };
    CHECK_OK(model_load(&mo, &c.draft_model, &err));
    open_rig(&r, (struct rig_options){ .max_batched_tokens = 32, .draft = &c, .eager = eager });
    struct answer *got = rig_run(&r, reqs, 2);
    for (uint32_t i = 0; i < 2; i++) check_same(&want[i], &got[i]);
    CHECK(got[0].end.n_drafted + got[1].end.n_drafted > 0);
    if (strstr(draft, "/llama/")) CHECK(got[0].end.n_accepted > 0);
    rig_await_free_blocks(&r, RIG_BLOCKS_MAX);
    rig_close(&r);
    model_free(c.draft_model);
    kernel_ctx_free(k);
    mem_free(want);
    mem_free(got);
}

TEST(drafts_of_a_small_model)
{
    check_drafts_of_model("goldens/llama/model", false);
    if (runs_long()) check_drafts_of_model("goldens/qwen3/model", true);
}

/* Sequences without drafts go on asynchronously, those that get some again as soon as they do. */
TEST(drafts_now_and_then)
{
    const struct draft_config c = {
        .ops = &drafter_ngram_ops, .n_tokens = 4, .lookup_min = 2, .lookup_max = 8
    };
    struct engine_request q = rig_request(1, 12, 3, runs_long() ? 60 : 30);
    struct rig r;
    q.sampling.temperature = 1.5f; /* nothing comes up again */
    struct answer *want = one_by_one(&q, 1);
    open_rig(&r, (struct rig_options){ .max_batched_tokens = 32, .draft = &c });
    struct answer *got = rig_run(&r, &q, 1);
    check_same(want, got);
    CHECK(rig_count(&r, "baton_engine_steps_ahead_total") > 10);
    rig_close(&r);
    mem_free(want);
    mem_free(got);
}

/* Wrong drafts, of some of the times that it is asked. */
struct seldom {
    struct draft_book book;
    uint32_t n_asked, first, last;
};

static uint32_t give_seldom(void *arg, const int32_t *tokens, uint32_t n_tokens, uint32_t n_max,
                            int32_t *drafts)
{
    struct seldom *s = arg;
    const uint32_t i = ++s->n_asked;
    if (i < s->first || i > s->last) return 0;
    return draft_book_give(&s->book, tokens, n_tokens, n_max, drafts);
}

/* What comes behind drafts is not known while they are verified: not where they are so seldom that
 * sequences go on asynchronously, and not behind the last drafts that an answer has room for. */
TEST(no_step_is_ahead_of_drafts)
{
    static const uint32_t ASKED[][2] = { { 8, 8 }, { 1, UINT32_MAX } };
    const struct engine_request q = rig_request(1, 12, 3, 16);
    struct answer *want = one_by_one(&q, 1);
    for (size_t i = 0; i < COUNT_OF(ASKED); i++) {
        struct seldom s = { .first = ASKED[i][0], .last = ASKED[i][1] };
        struct rig r;
        draft_book_init(&s.book, DRAFTS_WRONG, 1, &q, want, 1);
        s.book.config.given = give_seldom;
        s.book.config.given_arg = &s;
        open_rig(&r, (struct rig_options){ .max_batched_tokens = 32, .draft = &s.book.config });
        struct answer *got = rig_run(&r, &q, 1);
        CHECK(got->end.n_drafted > 0);
        check_same(want, got);
        rig_await_free_blocks(&r, RIG_BLOCKS_MAX);
        rig_close(&r);
        mem_free(got);
    }
    mem_free(want);
}

/* Only two rows have room for changes of logits. With more, the host samples the step, which was
 * submitted while a step was in flight that ends a sequence. */
TEST(steps_that_the_host_samples)
{
    enum { N = 24, FEWER = 10 };
    const uint32_t n = runs_long() ? N : FEWER;
    static struct logit_bias bias[SAMPLER_BIAS_MAX];
    struct engine_request reqs[N];
    struct rig r;
    for (uint32_t i = 0; i < SAMPLER_BIAS_MAX; i++)
        bias[i] = (struct logit_bias){ (int32_t)(4 + i % 500), i % 500 == 3 ? 1000 : 0 };
    for (uint32_t i = 0; i < n; i++) {
        struct sampling_params *p = &reqs[i].sampling;
        reqs[i] = rig_request(1 + i, 3 + i % 4, 300 + i, 30);
        p->n_logprobs = -1;
        p->bias = bias;
        p->n_bias = SAMPLER_BIAS_MAX;
        p->stop_ids[0] =
            7; /* the biases force this token, from the first one that may end the sequence */
        p->n_stop_ids = 1;
        p->min_tokens = 1 + i * 5 % 7;
    }
    open_rig(&r, (struct rig_options){
                     .max_batched_tokens = 8,
                     .max_seqs = 4,
                     .eager = true,
                     .sampling_edit_bytes = 40 << 10,
                 });
    struct answer *got = rig_run(&r, reqs, n);
    for (uint32_t i = 0; i < n; i++) CHECK_EQ_INT(got[i].n_out, 2 + i * 5 % 7);
    CHECK(rig_count(&r, "baton_engine_steps_host_sampled_total") > 0);
    CHECK(rig_count(&r, "baton_engine_steps_ahead_total") > 0);
    rig_close(&r);
    mem_free(got);
}

/* Sizes in whole tiles, as in real models, so that fused GEMMs are one launch. */
#define SMALL                                                                                      \
    "\"hidden_size\":256,\"intermediate_size\":256,\"num_attention_heads\":8,\"num_key_value_"     \
    "heads\":2,\"head_dim\":64,\"vocab_size\":512,"                                                \
    "\"max_position_embeddings\":2048,\"rms_norm_eps\":1e-5,\"rope_theta\":10000,\"hidden_act\":"  \
    "\"silu\",\"torch_dtype\":\"bfloat16\","                                                       \
    "\"bos_token_id\":0,\"eos_token_id\":1,\"tie_word_embeddings\":true,\"attention_bias\":false," \
    "\"num_hidden_layers\":%d,"

static uint32_t launches_of(const char *format, int n_layers)
{
    char config[2048];
    struct rig r;
    snprintf(config, sizeof config, format, n_layers);
    the_kind.activations = ACTIVATIONS_FAST;
    open_rig(&r, (struct rig_options){
                     .max_batched_tokens = 4, .max_seqs = 2, .config = config, .loose = true });
    const uint32_t n = r.kernels->n_graph_nodes;
    rig_close(&r);
    return n;
}

/* Launches take most of the time of a step of one sequence. Each layer has these (attention: q k v,
 * segments with RoPE and append, merge, o; dense FFN: gate and up, down; MoE: router, gate and up,
 * down and sum, two more for shared experts). */
TEST(a_step_has_few_launches)
{
    static const struct {
        const char *name, *config;
        uint32_t of_layer;
    } WANTED[] = {
        { "llama",
          "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\"," SMALL
          "\"use_cache\":true}",
          6 },
        { "qwen3_moe",
          "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"model_type\":\"qwen3_moe\"," SMALL
          "\"num_experts\":16,\"num_experts_per_tok\":4,\"moe_intermediate_size\":128,\"decoder_"
          "sparse_step\":1,\"mlp_only_layers\":[],\"norm_topk_prob\":true}",
          7 },
        { "ernie_moe",
          "{\"architectures\":[\"Ernie4_5_MoeForCausalLM\"],\"model_type\":\"ernie4_5_moe\"," SMALL
          "\"use_bias\":false,\"moe_num_experts\":16,\"moe_k\":4,\"moe_intermediate_size\":128,"
          "\"moe_num_shared_experts\":2,\"moe_layer_start_index\":1,"
          "\"moe_layer_end_index\":9,\"moe_layer_interval\":1,\"moe_use_aux_free\":true,\"moe_norm_"
          "min\":1e-12}",
          9 },
    };
    for (size_t i = 0; i < COUNT_OF(WANTED); i++) {
        const uint32_t two = launches_of(WANTED[i].config, 2),
                       three = launches_of(WANTED[i].config, 3);
        printf("%s: %u launches in a layer\n", WANTED[i].name, three - two);
        CHECK(two > 0 && three - two <= WANTED[i].of_layer);
    }
}

/* The engine is freed with steps in flight. */
TEST(an_end_with_steps_in_flight)
{
    struct rig r;
    open_rig(&r, (struct rig_options){ 0 });
    for (uint32_t i = 0; i < 3; i++) {
        struct engine_request q = request(i, 10, 200);
        CHECK_OK(engine_submit(r.engine, &q));
    }
    while (rig_next(&r).ev.kind != ENGINE_TOKEN) continue;
    rig_close(&r);
}

TEST_MAIN(CASE_T(answers_that_end_a_step_late, 120), CASE_T(latents_in_bf16, 900),
          CASE_T(experts_in_bf16, 900), CASE_T(steps_that_have_to_wait, 120),
          CASE_T(steps_that_the_host_samples, 900), CASE_T(commands_in_between, 120),
          CASE_T(drafts_in_captured_steps, 120), CASE_T(drafts_of_latents, 120),
          CASE_T(drafts_that_the_host_samples, 120), CASE_T(drafts_of_a_draft_layer, 900),
          CASE_T(passes_of_a_layer_that_is_often_right, 900), CASE_T(passes_of_latents, 900),
          CASE_T(passes_of_heads, 900), CASE_T(few_blocks_and_an_end_ahead_of_drafts, 900),
          CASE_T(commands_between_drafts, 900), CASE_T(a_prompt_starts_with_a_block_of_drafts, 120),
          CASE_T(the_host_samples_a_step_that_is_ahead_of_drafts, 120),
          CASE_T(drafts_of_a_small_model, 900), CASE_T(drafts_now_and_then, 120),
          CASE_T(no_step_is_ahead_of_drafts, 120), CASE_T(a_step_has_few_launches, 120),
          CASE_T(an_end_with_steps_in_flight, 120))
