/* test_draft_model.c - a small model that drafts: whatever it drafts the answers are the same, also
 * where its blocks run out, and one that is the model itself is right. */
#include "tests/unit/engine/engine_rig.h"

enum { N = 8, OUT = 40 };

/* With more tokens than the goldens have, and dummy weights. */
static const char PADDED[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"vocab_size\": 1000,"
    " \"hidden_size\": 64, \"num_hidden_layers\": 2, \"num_attention_heads\": 4,"
    " \"num_key_value_heads\": 1, \"head_dim\": 16, \"intermediate_size\": 88,"
    " \"max_position_embeddings\": 2048, \"rms_norm_eps\": 1e-5}";

/* The engine of a rig borrows the model that drafts. NULL for one: PADDED. */
struct drafting {
    struct rig r;
    struct draft_config config;
};

static void open_drafting(struct drafting *d, struct rig_options o, const char *draft, uint32_t n)
{
    struct kernel_ctx *k;
    struct err err = { 0 };
    CHECK_OK(kernel_ctx_create(kernel_options_default("auto", o.activations, 2), &k, &err));
    const struct model_options mo = {
        .path = draft ? test_data(draft) : rig_config_folder(PADDED),
        .dummy = !draft,
        .max_rows = 64,
        .max_model_len = 1024,
        .kernels = k,
    };
    d->config =
        (struct draft_config){ .ops = &drafter_model_ops, .n_tokens = n, .verify_all = true };
    if (model_load(&mo, &d->config.draft_model, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    o.draft = &d->config;
    rig_open(&d->r, o);
}

static void close_drafting(struct drafting *d)
{
    struct kernel_ctx *k = d->config.draft_model->kernels;
    rig_close(&d->r);
    model_free(d->config.draft_model);
    kernel_ctx_free(k);
}

static void make_requests(struct engine_request *reqs)
{
    static const uint32_t lengths[N] = { 1, 17, 300, 64, 33, 150, 2, 600 };
    for (uint32_t i = 0; i < N; i++) {
        reqs[i] = rig_request(1 + i, lengths[i], 90 + i, OUT);
        if (i % 2) reqs[i].sampling.temperature = 0.7f;
        if (i % 4 == 3) reqs[i].sampling.frequency_penalty = 0.4f;
    }
}

static void check_same_answers(struct rig_options o, const char *draft, uint32_t n)
{
    struct engine_request reqs[N];
    struct drafting d;
    struct rig plain;
    make_requests(reqs);
    rig_open(&plain, (struct rig_options){
                         .model = o.model, .config = o.config, .activations = o.activations });
    struct answer *want = rig_run(&plain, reqs, N);
    rig_close(&plain);
    open_drafting(&d, o, draft, n);
    struct answer *got = rig_run(&d.r, reqs, N);
    for (uint32_t i = 0; i < N; i++) check_same(&want[i], &got[i]);
    CHECK(rig_count(&d.r, "baton_spec_decode_num_draft_tokens_total") > 0);
    rig_await_free_blocks(&d.r, o.n_blocks ? o.n_blocks : RIG_BLOCKS_MAX);
    close_drafting(&d);
    mem_free(want);
    mem_free(got);
}

TEST(whatever_it_drafts_answers_are_the_same)
{
    for (uint32_t n = 1; n <= DRAFT_TOKENS_MAX; n++)
        check_same_answers((struct rig_options){ .model = "llama" }, "goldens/qwen3/model", n);
    check_same_answers((struct rig_options){ .model = "deepseek_v3", .max_batched_tokens = 24 },
                       "goldens/llama/model", 3);
    check_same_answers((struct rig_options){ .model = "llama", .activations = ACTIVATIONS_FAST },
                       "goldens/deepseek_v3/model", 4);
}

/* Either may have tokens that the other does not have. */
TEST(a_vocabulary_may_be_padded)
{
    check_same_answers((struct rig_options){ .config = PADDED }, "goldens/llama/model", 4);
    check_same_answers((struct rig_options){ .model = "llama" }, NULL, 4);
}

/* Blocks of both run out. */
TEST(a_small_pool_gives_the_same)
{
    check_same_answers((struct rig_options){ .model = "llama", .n_blocks = 42 },
                       "goldens/llama/model", 8);
    check_same_answers((struct rig_options){ .model = "llama", .n_blocks = 42, .max_seqs = 3 },
                       "goldens/qwen3/model", 5);
}

/* The model itself drafts what it will choose, once it has caught up with the prompt. */
TEST(the_model_itself_is_right)
{
    for (uint32_t n = 1; n <= DRAFT_TOKENS_MAX; n++) {
        struct drafting d;
        const struct engine_request q = rig_request(1, 20, 5, OUT);
        open_drafting(&d, (struct rig_options){ .model = "llama" }, "goldens/llama/model", n);
        struct answer *got = rig_run(&d.r, &q, 1);
        const uint32_t n_steps = (OUT - 1 + n) / (n + 1);
        rig_await_steps(&d.r, 1 + n_steps);
        CHECK_EQ_INT(got->end.n_accepted, OUT - 1 - n_steps);
        CHECK_EQ_INT(got->end.n_drafted, got->end.n_accepted);
        close_drafting(&d);
        mem_free(got);
    }
}

TEST(another_vocabulary_is_refused)
{
    struct kernel_ctx *k;
    struct model *draft, *model;
    struct engine *e;
    struct err err = { 0 };
    CHECK_OK(kernel_ctx_create(kernel_options_default("auto", ACTIVATIONS_F32, 1), &k, &err));
    struct model_options mo = { .path = test_data("goldens/llama/model"),
                                .max_rows = 16,
                                .kernels = k };
    CHECK_OK(model_load(&mo, &draft, &err));
    mo.path = test_data("goldens/qwen3/model");
    CHECK_OK(model_load(&mo, &model, &err));
    draft->config.n_vocab += 1025;
    struct draft_config c = { .ops = &drafter_model_ops, .n_tokens = 2, .draft_model = draft };
    struct metrics *metrics = metrics_create();
    const struct engine_options o = { .model = model,
                                      .block_tokens = 16,
                                      .n_blocks = 8,
                                      .max_seqs = 2,
                                      .max_batched_tokens = 16,
                                      .max_waiting = 4,
                                      .draft = &c,
                                      .metrics = metrics,
                                      .on_event = rig_on_event };
    CHECK_STATUS(engine_create(&o, &e, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "1537 tokens") != NULL);
    c.draft_model = NULL;
    CHECK_STATUS(engine_create(&o, &e, &err), ERR_CONFIG);
    CHECK_EQ_STR(err.field, "model");
    model_free(draft);
    model_free(model);
    kernel_ctx_free(k);
    metrics_free(metrics);
}

TEST_MAIN(CASE_T(whatever_it_drafts_answers_are_the_same, 120), CASE(a_vocabulary_may_be_padded),
          CASE_T(a_small_pool_gives_the_same, 120), CASE_T(the_model_itself_is_right, 120),
          CASE(another_vocabulary_is_refused))
