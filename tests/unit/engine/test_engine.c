/* test_engine.c - the tokens of a request do not depend on what happens around it: goldens,
 * chunking, batches, prefix cache, preemption, moving, prefill in one engine with decode in
 * another, and all of that with drafts. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "shared/base/json/json.h"
#include "tests/unit/engine/draft_book.h"
#include "tests/unit/engine/engine_pair.h"
#include "tests/unit/engine/engine_rig.h"

enum { N_MIXED = 12 };

/* What the case runs on. Each case is a process of its own. */
static struct {
    const char *model;
    enum activations activations;
    uint32_t n_drafts; /* of a sequence in a step; 0: none */
    enum draft_book_kind drafts;
} the_kind;

static struct draft_book the_book; /* of the last reference answers */

static struct rig_options of_kind(struct rig_options o)
{
    if (the_kind.n_drafts > 0 && the_book.n > 0) o.draft = &the_book.config;
    o.model = the_kind.model;
    o.activations = the_kind.activations;
    return o;
}

static void open_rig(struct rig *r, struct rig_options o) { rig_open(r, of_kind(o)); }

/* Requests of many lengths: odd ones sampled with every parameter set, even ones greedy. */
static void mixed_requests(struct engine_request *reqs, uint64_t first_id)
{
    static const uint32_t lengths[N_MIXED] = { 1, 2, 15, 16, 17, 31, 33, 48, 64, 65, 100, 150 };
    static const struct logit_bias bias[2] = { { 7, 2 }, { 9, -3 } };
    for (uint32_t i = 0; i < N_MIXED; i++) {
        reqs[i] = rig_request(first_id + i, lengths[i], 1000 + i, 30);
        if (i % 2 == 0) continue;
        struct sampling_params *p = &reqs[i].sampling;
        p->temperature = 0.9f;
        p->top_p = 0.95f;
        p->top_k = i % 4 == 1 ? 40 : 0;
        p->min_p = i % 4 == 3 ? 0.02f : 0;
        p->repetition_penalty = 1.1f;
        p->frequency_penalty = 0.2f;
        p->presence_penalty = 0.1f;
        p->bias = bias;
        p->n_bias = 2;
    }
}

/* The reference: one request at a time, without prefix cache, a whole prompt per step. */
static struct answer *reference_answers(const struct engine_request *reqs, uint32_t n)
{
    struct rig r;
    the_book.n = 0;
    open_rig(&r, (struct rig_options){ .no_prefix_cache = true, .max_batched_tokens = 2048 });
    struct answer *all = MEM_ARRAY(struct answer, n);
    for (uint32_t i = 0; i < n; i++) {
        struct answer *one = rig_run(&r, &reqs[i], 1);
        all[i] = *one;
        mem_free(one);
    }
    rig_await_free_blocks(&r, RIG_BLOCKS_MAX);
    rig_close(&r);
    draft_book_init(&the_book, the_kind.drafts, the_kind.n_drafts, reqs, all, n);
    return all;
}

static void check_all_same(const struct answer *a, const struct answer *b, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) check_same(&a[i], &b[i]);
}

/* ---- against the reference implementation ---- */

/* Line i of a file in the goldens, which the caller frees. NULL past the end. */
static cJSON *golden_line(const char *name, int i)
{
    char *line = NULL;
    size_t cap = 0;
    ssize_t n = -1;
    cJSON *doc = NULL;
    FILE *f = fopen(test_data(name), "r");
    if (!f) SKIP("tests/data/goldens/llama is not there");
    for (int k = 0; k <= i; k++) n = getline(&line, &cap, f);
    if (n > 0) CHECK_OK(json_parse((struct str){ line, (size_t)n }, false, &doc, NULL));
    free(line);
    fclose(f);
    return doc;
}

static void check_golden(struct rig *r, const cJSON *request, const cJSON *want)
{
    static int32_t tokens[RIG_TOKENS_MAX];
    const cJSON *prompt = json_member(json_member(request, "body"), "prompt"),
                *greedy = json_member(want, "greedy");
    const cJSON *scores = json_member(want, "prompt_logprobs");
    struct engine_request q = rig_request(1, 1, 1, (uint32_t)cJSON_GetArraySize(greedy));
    q.n_tokens = q.n_prompt = (uint32_t)cJSON_GetArraySize(prompt);
    q.tokens = tokens;
    q.want_prompt_logprobs = true;
    q.sampling.n_logprobs = 5;
    for (uint32_t i = 0; i < q.n_tokens; i++)
        tokens[i] = (int32_t)cJSON_GetArrayItem(prompt, (int)i)->valuedouble;
    struct answer *a = rig_run(r, &q, 1);
    CHECK_EQ_INT(a->n_scored, q.n_prompt - 1);
    for (uint32_t i = 1; i < q.n_prompt; i++) {
        CHECK_EQ_INT(a->scored_id[i], tokens[i]);
        CHECK_NEAR(a->scored[i], cJSON_GetArrayItem(scores, (int)i)->valuedouble, 1e-3);
    }
    CHECK_EQ_INT(a->n_out, cJSON_GetArraySize(greedy));
    for (uint32_t i = 0; i < a->n_out; i++) {
        const cJSON *g = cJSON_GetArrayItem(greedy, (int)i), *top = json_member(g, "top");
        CHECK_EQ_INT(a->out[i].id, json_member(g, "id")->valuedouble);
        CHECK_NEAR(a->out[i].logprob, json_member(g, "logprob")->valuedouble, 1e-3);
        CHECK_EQ_INT(a->out[i].rank, 1);
        for (int k = 0; k < 5; k++)
            CHECK_NEAR(a->out[i].top[k].logprob,
                       cJSON_GetArrayItem(cJSON_GetArrayItem(top, k), 1)->valuedouble, 1e-3);
    }
    CHECK_EQ_INT(a->end.finish, FINISH_LENGTH);
    mem_free(a);
}

TEST(greedy_answers_equal_the_reference_implementation)
{
    struct rig r;
    int n = 0;
    open_rig(&r, (struct rig_options){ .max_batched_tokens = 64 });
    for (;; n++) {
        cJSON *request = golden_line("goldens/llama/requests.jsonl", n),
              *want = golden_line("goldens/llama/expected.jsonl", n);
        if (request) check_golden(&r, request, want);
        cJSON_Delete(request);
        cJSON_Delete(want);
        if (!request) break;
    }
    CHECK(n >= 8);
    rig_close(&r);
}

/* ---- the same bits ---- */

static void check_mixed_under(struct rig_options o, const char *counter)
{
    struct engine_request reqs[N_MIXED];
    struct rig r;
    mixed_requests(reqs, 1);
    struct answer *want = reference_answers(reqs, N_MIXED);
    open_rig(&r, o);
    struct answer *got = rig_run(&r, reqs, N_MIXED);
    check_all_same(want, got, N_MIXED);
    if (counter) CHECK(rig_count(&r, counter) > 0);
    rig_await_free_blocks(&r, o.n_blocks ? o.n_blocks : RIG_BLOCKS_MAX);
    rig_close(&r);
    mem_free(want);
    mem_free(got);
}

TEST(one_batch_gives_the_same_as_one_by_one)
{
    check_mixed_under((struct rig_options){ .max_batched_tokens = 2048 }, NULL);
}

TEST(chunked_prompts_give_the_same)
{
    check_mixed_under((struct rig_options){ .max_batched_tokens = 16 }, NULL);
    check_mixed_under((struct rig_options){ .max_batched_tokens = 7, .no_prefix_cache = true },
                      NULL);
}

TEST(few_places_per_step_give_the_same)
{
    check_mixed_under((struct rig_options){ .max_seqs = 2 }, NULL);
    check_mixed_under((struct rig_options){ .max_seqs = 12, .max_batched_tokens = 3 }, NULL);
}

TEST(preemption_gives_the_same)
{
    check_mixed_under((struct rig_options){ .n_blocks = 14 }, "baton_engine_preemptions_total");
    check_mixed_under(
        (struct rig_options){ .n_blocks = 13, .no_prefix_cache = true, .max_batched_tokens = 24 },
        "baton_engine_preemptions_total");
}

/* Random arrivals, cancels and shared prefixes in a pool that is too small: requests that are not
 * canceled get the same answers. */
TEST(random_company_gives_the_same)
{
    enum { N = 60, FEWER = 20, BLOCKS = 24 };
    const uint32_t n = test_runs_long() ? N : FEWER;
    struct engine_request reqs[N];
    struct rig r;
    for (uint32_t i = 0; i < n; i++) {
        double u = rng_uniform(99, 0, i);
        /* 7 texts */
        reqs[i] = rig_request(i, 1 + (uint32_t)(u * 150), i % 7,
                              1 + (uint32_t)(rng_uniform(99, 1, i) * 50));
        if (i % 3 == 0) reqs[i].sampling.temperature = 1.2f;
        reqs[i].want_prompt_logprobs = i % 11 == 0;
    }
    struct answer *want = reference_answers(reqs, n), *got = MEM_ARRAY(struct answer, N);
    open_rig(&r,
             (struct rig_options){ .n_blocks = BLOCKS, .max_seqs = 8, .max_batched_tokens = 40 });
    for (uint32_t i = 0; i < n; i++) {
        got[i].id = i;
        CHECK_OK(engine_submit(r.engine, &reqs[i]));
        if (i % 5 == 4) CHECK_OK(engine_cancel(r.engine, i - 3, true));
        usleep((useconds_t)(rng_uniform(99, 2, i) * 1500));
    }
    rig_gather(&r, got, n);
    for (uint32_t i = 0; i < n; i++) {
        if (got[i].canceled) continue;
        check_same(&want[i], &got[i]);
        CHECK_EQ_INT(got[i].n_scored, want[i].n_scored);
        CHECK(memcmp(got[i].scored, want[i].scored, sizeof got[i].scored) == 0);
    }
    rig_await_free_blocks(&r, BLOCKS);
    mem_free(got);
    mem_free(want);
    rig_close(&r);
}

TEST(prefix_cache_gives_the_same)
{
    struct engine_request reqs[N_MIXED];
    struct rig r;
    mixed_requests(reqs, 1);
    struct answer *want = reference_answers(reqs, N_MIXED);
    open_rig(&r, (struct rig_options){ 0 });
    for (int round = 0; round < 3; round++) {
        struct answer *got = rig_run(&r, reqs, N_MIXED);
        check_all_same(want, got, N_MIXED);
        for (uint32_t i = 0; i < N_MIXED && round > 0;
             i++) /* full blocks, without the last token */
            CHECK_EQ_INT(got[i].end.n_cached,
                         (reqs[i].n_tokens - 1) / RIG_BLOCK_TOKENS * RIG_BLOCK_TOKENS);
        mem_free(got);
    }
    CHECK(rig_count(&r, "baton_prefix_cache_hit_tokens_total") > 0);
    /* Another salt shares nothing. */
    reqs[N_MIXED - 1].cache_salt = 5;
    struct answer *salted = rig_run(&r, &reqs[N_MIXED - 1], 1);
    CHECK_EQ_INT(salted->end.n_cached, 0);
    check_same(&want[N_MIXED - 1], salted);
    rig_close(&r);
    mem_free(salted);
    mem_free(want);
}

TEST(generated_tokens_are_cached_too)
{
    struct rig r;
    int32_t tokens[64];
    open_rig(&r, (struct rig_options){ 0 });
    struct engine_request q = rig_request(1, 20, 5, 30);
    struct answer *a = rig_run(&r, &q, 1);
    memcpy(tokens, q.tokens, 20 * sizeof *tokens);
    for (uint32_t i = 0; i < 30; i++) tokens[20 + i] = a->out[i].id;
    struct engine_request next = rig_request(2, 50, 6, 4);
    next.tokens = tokens;
    struct answer *b = rig_run(&r, &next, 1);
    CHECK_EQ_INT(b->end.n_cached, 48);
    struct answer *want = reference_answers(&next, 1);
    check_same(want, b);
    rig_close(&r);
    mem_free(a);
    mem_free(b);
    mem_free(want);
}

TEST(moved_request_goes_on_where_it_was)
{
    struct rig r;
    struct engine_request reqs[N_MIXED];
    int32_t tokens[256];
    mixed_requests(reqs, 1);
    struct answer *want = reference_answers(reqs, N_MIXED);
    open_rig(&r, (struct rig_options){ 0 });
    for (uint32_t i = 0; i < N_MIXED; i++) {
        uint32_t n_have = 1 + i * 2;
        struct engine_request q = reqs[i];
        memcpy(tokens, q.tokens, q.n_tokens * sizeof *tokens);
        for (uint32_t k = 0; k < n_have; k++) tokens[q.n_tokens + k] = want[i].out[k].id;
        q.tokens = tokens;
        q.n_tokens += n_have;
        struct answer *got = rig_run(&r, &q, 1);
        CHECK_EQ_INT(got->first_index, n_have);
        CHECK_EQ_INT(got->n_out, want[i].n_out - n_have);
        for (uint32_t k = 0; k < got->n_out; k++) {
            CHECK_EQ_INT(got->out[k].id, want[i].out[n_have + k].id);
            CHECK(memcmp(&got->out[k].logprob, &want[i].out[n_have + k].logprob, sizeof(float)) ==
                  0);
        }
        mem_free(got);
    }
    rig_close(&r);
    mem_free(want);
}

/* Counts the logprobs that differ between an answer as it was generated and the same text scored as
 * a prompt. */
static uint32_t scored_otherwise(const char *model)
{
    enum { PROMPT = 20, ANSWER = 60 };
    struct rig r;
    int32_t tokens[PROMPT + ANSWER];
    uint32_t n = 0;
    the_kind.model = model;
    open_rig(&r, (struct rig_options){ 0 });
    struct engine_request q = rig_request(1, PROMPT, 5, ANSWER),
                          scored = rig_request(2, PROMPT + ANSWER, 6, 1);
    struct answer *a = rig_run(&r, &q, 1);
    memcpy(tokens, q.tokens, PROMPT * sizeof *tokens);
    for (uint32_t i = 0; i < ANSWER; i++) tokens[PROMPT + i] = a->out[i].id;
    scored.tokens = tokens;
    scored.want_prompt_logprobs = true;
    struct answer *b = rig_run(&r, &scored, 1);
    for (uint32_t i = 0; i < ANSWER; i++) {
        CHECK_NEAR(b->scored[PROMPT + i], a->out[i].logprob, 1e-4);
        n += b->scored[PROMPT + i] != a->out[i].logprob;
        if (i == 0) CHECK_EQ_INT(n, 0); /* from the prompt's last row */
    }
    rig_close(&r);
    mem_free(a), mem_free(b);
    return n;
}

TEST(generated_tokens_take_the_decode_path)
{
    CHECK_EQ_INT(scored_otherwise("llama"), 0); /* one attention path */
    CHECK(scored_otherwise("deepseek_v3") > 0);
}

/* A request that continues an answer finds its generated blocks; a prompt of the same text finds
 * only blocks computed as a prompt. */
TEST(cached_blocks_are_reused_by_the_path_that_made_them)
{
    enum { PROMPT = 20, ANSWER = 60 };
    struct rig r;
    int32_t tokens[PROMPT + ANSWER];
    the_kind.model = "deepseek_v3";
    open_rig(&r, (struct rig_options){ 0 });
    struct engine_request q = rig_request(1, PROMPT, 5, ANSWER);
    struct answer *a = rig_run(&r, &q, 1);
    memcpy(tokens, q.tokens, PROMPT * sizeof *tokens);
    for (uint32_t i = 0; i < ANSWER; i++) tokens[PROMPT + i] = a->out[i].id;

    struct engine_request moved = q; /* with 30 of its tokens: its blocks are cached */
    moved.id = 2;
    moved.tokens = tokens;
    moved.n_tokens = PROMPT + 30;
    struct answer *b = rig_run(&r, &moved, 1);
    CHECK_EQ_INT(b->end.n_cached, 48);
    CHECK_EQ_INT(b->n_out, ANSWER - 30);
    for (uint32_t i = 0; i < b->n_out; i++)
        CHECK(b->out[i].id == a->out[30 + i].id && b->out[i].logprob == a->out[30 + i].logprob);

    /* the same text as a prompt: one block is cached */
    struct engine_request again = rig_request(3, PROMPT + ANSWER, 6, 20);
    again.tokens = tokens;
    struct answer *c = rig_run(&r, &again, 1);
    CHECK_EQ_INT(c->end.n_cached, 16);
    struct answer *want = reference_answers(&again, 1);
    check_same(want, c);

    again.id = 4; /* now all of it is cached */
    struct answer *d = rig_run(&r, &again, 1);
    CHECK_EQ_INT(d->end.n_cached, 64);
    check_same(want, d);
    rig_close(&r);
    mem_free(a), mem_free(b), mem_free(c), mem_free(d), mem_free(want);
}

/* ---- prefill here, decode there ---- */

/* one_block_again: in the second round only the block of the last prompt token leaves the prefill
 * engine. */
static void check_pair(struct rig_options prefill, struct rig_options decode, bool one_block_again)
{
    static struct pair p;
    struct engine_request reqs[N_MIXED];
    mixed_requests(reqs, 0);
    struct answer *want = reference_answers(reqs, N_MIXED);
    pair_open(&p, of_kind(prefill), of_kind(decode));
    for (int round = 0; round < 2; round++) { /* the second finds cached prefixes on both sides */
        for (uint32_t i = 0; i < N_MIXED; i++) {
            struct answer *got = MEM_NEW(struct answer);
            got->id = reqs[i].id;
            size_t before = p.bytes;
            pair_start(&p, reqs[i]);
            rig_gather(&p.decode, got, 1);
            check_same(&want[i], got);
            CHECK_EQ_INT(got->end.n_recomputed, 0);
            if (round && one_block_again)
                CHECK_EQ_INT(p.bytes - before,
                             kv_layout_block_bytes(engine_kv_layout(p.decode.engine)));
            mem_free(got);
        }
    }
    rig_await_free_blocks(&p.prefill, prefill.n_blocks ? prefill.n_blocks : RIG_BLOCKS_MAX);
    rig_await_free_blocks(&p.decode, decode.n_blocks ? decode.n_blocks : RIG_BLOCKS_MAX);
    pair_close(&p);
    mem_free(want);
}

TEST(split_over_two_engines_gives_the_same)
{
    check_pair((struct rig_options){ .max_batched_tokens = 2048 }, (struct rig_options){ 0 }, true);
}

TEST(split_with_chunks_and_unequal_caches_gives_the_same)
{
    check_pair((struct rig_options){ .max_batched_tokens = 10 },
               (struct rig_options){ .no_prefix_cache = true }, false);
    check_pair(
        (struct rig_options){ .max_batched_tokens = 10, .no_prefix_cache = true, .n_blocks = 20 },
        (struct rig_options){ .n_blocks = 16 }, false);
}

/* Many activated at once in a small pool are preempted and recomputed, and report that. */
TEST(preempted_after_transfer_gives_the_same_and_is_counted)
{
    enum { N = 4 };
    static struct pair p;
    struct engine_request reqs[N];
    struct answer *got = MEM_ARRAY(struct answer, N);
    for (uint32_t i = 0; i < N; i++) reqs[i] = rig_request(i, 40, 50 + i, 60);
    struct answer *want = reference_answers(reqs, N);
    pair_open(&p, of_kind((struct rig_options){ 0 }),
              of_kind((struct rig_options){ .n_blocks = 13, .no_prefix_cache = true }));
    uint32_t n_recomputed = 0;
    for (uint32_t i = 0; i < N; i++) {
        struct engine_request q = reqs[i];
        CHECK_OK(engine_reserve(p.decode.engine, &q));
    }
    for (uint32_t i = 0; i < N; i++) {
        struct rig_event e = rig_next(&p.decode);
        CHECK_OK(e.ev.status);
        memcpy(p.blocks[e.ev.id], e.blocks, e.ev.n_blocks * sizeof *e.blocks);
        got[i].id = i;
    }
    for (uint32_t i = 0; i < N; i++) {
        struct engine_request q = reqs[i];
        q.prefill_only = true;
        struct answer *a = rig_run(&p.prefill, &q, 1);
        CHECK_OK(engine_activate(p.decode.engine, i, &a->out[0], NULL, 0));
        mem_free(a);
    }
    rig_gather(&p.decode, got, N);
    for (uint32_t i = 0; i < N; i++) {
        check_same(&want[i], &got[i]);
        CHECK(got[i].end.n_recomputed % 40 == 0);
        n_recomputed += got[i].end.n_recomputed;
    }
    CHECK(n_recomputed > 0);
    CHECK_EQ_INT(rig_count(&p.decode, "baton_engine_recomputed_tokens_total"), n_recomputed);
    rig_await_free_blocks(&p.decode, 13);
    pair_close(&p);
    mem_free(want);
    mem_free(got);
}

/* ---- other caches ---- */

/* In a sanitizer's build without what repeats, with another option, what stays. */
static void all_of_it(void)
{
    test_preemption_gives_the_same();
    test_random_company_gives_the_same();
    test_moved_request_goes_on_where_it_was();
    test_split_with_chunks_and_unequal_caches_gives_the_same();
    test_preempted_after_transfer_gives_the_same_and_is_counted();
    if (!test_runs_long()) return;
    test_chunked_prompts_give_the_same();
    test_few_places_per_step_give_the_same();
    test_prefix_cache_gives_the_same();
    test_split_over_two_engines_gives_the_same();
}

/* Latent KV, with prompt and generated tokens on different attention paths. */
TEST(two_attention_paths_give_the_same)
{
    the_kind.model = "deepseek_v3";
    all_of_it();
}

TEST(two_attention_paths_in_bf16_give_the_same)
{
    the_kind.model = "deepseek_v2_lite";
    the_kind.activations = ACTIVATIONS_FAST;
    all_of_it();
}

TEST(bf16_caches_give_the_same)
{
    struct rig r;
    the_kind.activations = ACTIVATIONS_FAST;
    open_rig(&r, (struct rig_options){ 0 });
    CHECK_EQ_INT(engine_kv_layout(r.engine)->dtype, DTYPE_BF16);
    rig_close(&r);
    all_of_it();
}

/* ---- drafts ---- */

static void all_with_drafts(const char *model, enum activations activations)
{
    static const uint32_t ns[DRAFT_BOOK_KINDS] = { 3, 8, 5 };
    the_kind.model = model;
    the_kind.activations = activations;
    for (int kind = test_runs_long() ? 0 : DRAFTS_MIXED; kind < DRAFT_BOOK_KINDS; kind++) {
        the_kind.drafts = (enum draft_book_kind)kind;
        the_kind.n_drafts = ns[kind];
        all_of_it();
    }
}

TEST(drafts_give_the_same) { all_with_drafts(NULL, ACTIVATIONS_F32); }

TEST(drafts_on_two_attention_paths_give_the_same)
{
    all_with_drafts("deepseek_v3", ACTIVATIONS_F32);
}

TEST(drafts_in_bf16_give_the_same) { all_with_drafts("ernie_moe", ACTIVATIONS_FAST); }

TEST_MAIN(CASE(greedy_answers_equal_the_reference_implementation),
          CASE(one_batch_gives_the_same_as_one_by_one), CASE(chunked_prompts_give_the_same),
          CASE(few_places_per_step_give_the_same), CASE(preemption_gives_the_same),
          CASE(random_company_gives_the_same), CASE(prefix_cache_gives_the_same),
          CASE(generated_tokens_are_cached_too), CASE(generated_tokens_take_the_decode_path),
          CASE(cached_blocks_are_reused_by_the_path_that_made_them),
          CASE(moved_request_goes_on_where_it_was), CASE(split_over_two_engines_gives_the_same),
          CASE(split_with_chunks_and_unequal_caches_gives_the_same),
          CASE(preempted_after_transfer_gives_the_same_and_is_counted),
          CASE_T(two_attention_paths_give_the_same, 240),
          CASE_T(two_attention_paths_in_bf16_give_the_same, 240),
          CASE_T(bf16_caches_give_the_same, 120), CASE_T(drafts_give_the_same, 240),
          CASE_T(drafts_on_two_attention_paths_give_the_same, 240),
          CASE_T(drafts_in_bf16_give_the_same, 240))
