/* test_launches.c - how many kernels a layer of a decode step launches, on the emulated GPU.
 *
 * A launch costs a step microseconds, so the numbers are held; fewer are welcome. A model with one
 * layer more tells what the layer adds. */
#include <stdlib.h>

#include "tests/fixtures/model_rig.h"

#ifdef BATON_EMULATED_GPU
#include <simt.h>

struct shape {
    const char *name, *config; /* with a place for the number of layers */
    size_t most;               /* launches of a sparse layer */
};

static const struct shape SHAPES[] = {
    { "Qwen3",
      "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"hidden_size\":256,\"intermediate_size\":512,"
      "\"num_hidden_layers\":%d,\"num_attention_heads\":8,\"num_key_value_heads\":2,\"head_dim\":"
      "64,\"vocab_size\":128,\"num_experts\":8,\"num_experts_per_tok\":4,"
      "\"moe_intermediate_size\":128,\"norm_topk_prob\":true}",
      8 },
    { "ERNIE",
      "{\"architectures\":[\"Ernie4_5_MoeForCausalLM\"],\"hidden_size\":256,"
      "\"intermediate_size\":512,\"num_hidden_layers\":%d,\"num_attention_heads\":8,"
      "\"num_key_value_heads\":2,\"vocab_size\":128,\"moe_num_experts\":8,\"moe_k\":4,"
      "\"moe_intermediate_size\":128,\"moe_num_shared_experts\":2,\"moe_layer_start_index\":1}",
      10 },
    { "DeepSeek",
      "{\"architectures\":[\"DeepseekV2ForCausalLM\"],\"hidden_size\":256,\"intermediate_size\":"
      "512,\"num_hidden_layers\":%d,\"num_attention_heads\":4,\"num_key_value_heads\":4,"
      "\"vocab_size\":128,\"kv_lora_rank\":512,\"q_lora_rank\":null,\"qk_nope_head_dim\":64,"
      "\"qk_rope_head_dim\":64,\"v_head_dim\":64,\"n_routed_experts\":8,\"n_shared_experts\":2,"
      "\"num_experts_per_tok\":4,\"moe_intermediate_size\":128,\"first_k_dense_replace\":1,"
      "\"moe_layer_freq\":1,\"n_group\":1,\"topk_group\":1,\"topk_method\":\"greedy\","
      "\"scoring_func\":\"softmax\",\"norm_topk_prob\":false,\"routed_scaling_factor\":1.0,"
      "\"max_position_embeddings\":2048,\"rope_theta\":10000}",
      16 },
};

enum { LAYERS = 2, PROMPT = 2, N_STEPS = 2 };

static const int N_ROWS[N_STEPS] = { 1, 8 };

/* Launches of a step of n rows of generated tokens, after position `pos`. */
static size_t launches_of_step(struct rig *r, int n, int pos)
{
    const int32_t ids[N_TABLES] = { 3, 1, 4, 1 };
    const int per = (n + N_TABLES - 1) / N_TABLES;
    struct feed feeds[N_TABLES];
    for (int t = 0; t < N_TABLES; t++) feeds[t] = (struct feed){ t, ids, per, pos, true };
    const size_t before = simt_n_kernels();
    feed_all(r, feeds, n < N_TABLES ? n : N_TABLES, NULL);
    return simt_n_kernels() - before;
}

/* Launches of a step for each of N_ROWS. */
static void launches_of(const struct shape *s, int n_layers, size_t launches[N_STEPS])
{
    char path[4200], config[4096];
    const char *folder = test_tmpdir();
    const int32_t ids[PROMPT] = { 3, 1 };
    struct feed feeds[N_TABLES];
    struct rig r;
    snprintf(config, sizeof config, s->config, n_layers);
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *f = fopen(path, "wb");
    CHECK(f && fputs(config, f) >= 0 && fclose(f) == 0);
    rig_open_with(&r, (struct model_options){ .path = folder, .dummy = true }, "cuda",
                  ACTIVATIONS_FAST);
    r.k->options.deterministic = false; /* the kernels of usual nodes */
    for (int t = 0; t < N_TABLES; t++) feeds[t] = (struct feed){ t, ids, PROMPT, 0, false };
    feed_all(&r, feeds, N_TABLES, NULL);
    for (int i = 0; i < N_STEPS; i++) launches[i] = launches_of_step(&r, N_ROWS[i], PROMPT);
    rig_close(&r);
}

/* A model with a draft layer, and what a pass has besides the launches of a layer: hidden states are
 * gathered, both inputs normalised and joined, and the head computed. */
static const char WITH_DRAFT_LAYER[] =
    "{\"architectures\":[\"Ernie4_5_MoeForCausalLM\"],\"hidden_size\":256,"
    "\"intermediate_size\":512,\"num_hidden_layers\":2,\"num_attention_heads\":8,"
    "\"num_key_value_heads\":2,\"vocab_size\":128,\"moe_num_experts\":8,\"moe_k\":4,"
    "\"moe_intermediate_size\":128,\"moe_num_shared_experts\":2,\"moe_layer_start_index\":1,"
    "\"num_nextn_predict_layers\":1}";
enum { DRAFT_LAYER_MOST = 10, PASS_MOST = DRAFT_LAYER_MOST + 10 };

/* Launches of a pass of n rows behind the step of as many, one row of each sequence. */
static size_t launches_of_pass(struct rig *r, int32_t n, int32_t pos, bool chained)
{
    const int32_t ids[N_TABLES] = { 3, 1, 4, 1 }, rows[N_TABLES] = { 0, 1, 2, 3 },
                  at[N_TABLES] = { pos, pos, pos, pos };
    const struct model_hidden_rows hidden = { .n = (uint32_t)n };
    struct attn_seq seqs[N_TABLES];
    for (int32_t i = 0; i < n; i++)
        seqs[i] = (struct attn_seq){
            .q_begin = i, .n_q = 1, .pos_begin = pos, .block_table = r->tables[i], .is_decode = true
        };
    const struct model_draft pass = {
        .batch = { .n_rows = n,
                   .ids = ids,
                   .pos = at,
                   .seqs = seqs,
                   .n_seqs = n,
                   .logit_rows = rows,
                   .n_logits = n,
                   .logits = r->logits,
                   .kv = r->kv,
                   .n_blocks = r->n_blocks,
                   .block_tokens = BLOCK, },
        .hidden = &hidden,
        .n_hidden = 1,
        .chained = chained,
    };
    const size_t before = simt_n_kernels();
    (void)model_submit_draft(r->m, &pass);
    return simt_n_kernels() - before;
}

static void check_pass_launches(void)
{
    const int32_t ids[PROMPT] = { 3, 1 };
    const char *folder = test_tmpdir();
    struct feed feeds[N_TABLES];
    char path[4200];
    struct rig r;
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *f = fopen(path, "wb");
    CHECK(f && fputs(WITH_DRAFT_LAYER, f) >= 0 && fclose(f) == 0);
    rig_open_with(&r, (struct model_options){ .path = folder, .dummy = true, .draft_layer = true },
                  "cuda", ACTIVATIONS_FAST);
    r.k->options.deterministic = false;
    for (int t = 0; t < N_TABLES; t++) feeds[t] = (struct feed){ t, ids, PROMPT, 0, false };
    feed_all(&r, feeds, N_TABLES, NULL);
    for (int32_t n = 1; n <= N_TABLES; n += N_TABLES - 1) {
        (void)launches_of_step(&r, n, PROMPT);
        const size_t first = launches_of_pass(&r, n, PROMPT, false),
                     next = launches_of_pass(&r, n, PROMPT + 1, true);
        printf("a pass of %d rows: %zu launches, chained %zu\n", n, first, next);
        CHECK(first > 0 && first <= PASS_MOST && next == first - 1);
    }
    rig_close(&r);
}

static void check_launches(const struct shape *s)
{
    size_t fewer[N_STEPS], more[N_STEPS];
    launches_of(s, LAYERS, fewer);
    launches_of(s, LAYERS + 1, more);
    for (int i = 0; i < N_STEPS; i++)
        if (more[i] - fewer[i] > s->most)
            test_fail(__FILE__, __LINE__, "%s, %d rows: a layer has %zu launches, not %zu", s->name,
                      N_ROWS[i], more[i] - fewer[i], s->most);
}
#endif

TEST(launches_of_a_decode_layer)
{
#ifdef BATON_EMULATED_GPU
    for (size_t i = 0; i < COUNT_OF(SHAPES); i++) check_launches(&SHAPES[i]);
#else
    SKIP("no emulated GPU in this build: launches were NOT counted");
#endif
}

TEST(launches_of_a_pass_of_the_draft_layer)
{
#ifdef BATON_EMULATED_GPU
    check_pass_launches();
#else
    SKIP("no emulated GPU in this build: launches were NOT counted");
#endif
}

TEST_MAIN(CASE_T(launches_of_a_decode_layer, 250),
          CASE_T(launches_of_a_pass_of_the_draft_layer, 250))
