/* test_families.c - what the configuration of each family means, and what it refuses by name. */
#include <stdio.h>
#include <string.h>

#include "shared/model/config/config_hf.h"
#include "tests/harness/test.h"

#define SIZES                                                                                      \
    "\"hidden_size\":64,\"num_hidden_layers\":6,\"num_attention_heads\":4,\"intermediate_size\":"  \
    "96,\"vocab_size\":512"
#define ERNIE "\"moe_num_experts\":8,\"moe_k\":3,\"moe_intermediate_size\":48"
#define DEEPSEEK                                                                                   \
    "\"kv_lora_rank\":32,\"qk_nope_head_dim\":16,\"qk_rope_head_dim\":8,\"v_head_dim\":24"
#define DEEPSEEK_MOE                                                                               \
    DEEPSEEK ",\"n_routed_experts\":16,\"num_experts_per_tok\":4,\"moe_intermediate_size\":40"

static struct model_config c;
static struct err err;

static enum status parse(const char *arch, const char *extra)
{
    struct model_generation g;
    struct buf b = { 0 };
    err = (struct err){ 0 };
    buf_printf(&b, "{\"architectures\":[\"%s\"],%s%s%s}", arch, SIZES, *extra ? "," : "", extra);
    enum status st = config_hf_parse(buf_str(&b), STR(""), &c, &g, &err);
    buf_release(&b);
    return st;
}

static void accepted(const char *arch, const char *extra)
{
    if (parse(arch, extra) != OK)
        test_fail(__FILE__, __LINE__, "%s with %s: %s", arch, extra, err.text);
}

static void refused(const char *arch, const char *extra, enum status want, const char *field)
{
    enum status st = parse(arch, extra);
    if (st != want || strcmp(err.field, field) != 0)
        test_fail(__FILE__, __LINE__, "%s with %s: status %d, field %s: %s", arch, extra, (int)st,
                  err.field, err.text);
}

/* Which of the six layers have experts, as a string of digits. */
static const char *sparse(void)
{
    static char text[8];
    for (uint32_t i = 0; i < 6; i++) text[i] = model_layer_is_sparse(&c, i) ? '1' : '0';
    return text;
}

TEST(llama_and_mistral)
{
    accepted("LlamaForCausalLM", "\"attention_bias\":true,\"mlp_bias\":true");
    CHECK(c.attention_bias && c.mlp_bias && !c.tied && !c.qk_norm && !c.rope_interleaved &&
          c.moe.n_experts == 0);
    accepted("MistralForCausalLM", "\"sliding_window\":4096,\"max_position_embeddings\":32768");
    CHECK_EQ_INT(c.window, 4096);
    refused("LlamaForCausalLM", "\"num_experts\":4", ERR_UNSUPPORTED, "num_experts");
}

TEST(qwen)
{
    accepted("Qwen2ForCausalLM", "\"sliding_window\":128,\"max_window_layers\":2");
    /* use_sliding_window is off by default */
    CHECK(c.qkv_bias && !c.qk_norm && c.window == 0 && c.max_position == 32768);
    accepted("Qwen2ForCausalLM",
             "\"sliding_window\":128,\"max_window_layers\":2,\"use_sliding_window\":true");
    CHECK_EQ_INT(c.window, 128);
    refused("Qwen2ForCausalLM", "\"attention_bias\":true", ERR_UNSUPPORTED, "attention_bias");
    accepted("Qwen3ForCausalLM", "\"attention_bias\":true");
    CHECK(c.qk_norm && c.attention_bias && c.head_dim == 128);
    accepted("Qwen3ForCausalLM", "\"head_dim\":24");
    CHECK_EQ_INT(c.head_dim, 24);
    refused("Qwen3ForCausalLM", "\"num_experts\":8", ERR_UNSUPPORTED, "num_experts");
}

TEST(qwen3_moe)
{
    static const char MOE[] =
        "\"num_experts\":8,\"num_experts_per_tok\":2,\"moe_intermediate_size\":32";
    char extra[256];
    accepted("Qwen3MoeForCausalLM", MOE);
    CHECK_EQ_STR(sparse(), "111111");
    CHECK(c.qk_norm && c.head_dim == c.hidden / c.n_heads);
    CHECK(c.moe.norm == NORM_NONE && c.moe.score == ROUTE_SOFTMAX && c.moe.n_groups == 1 &&
          c.moe.scale == 1 && !c.moe.selection_bias);
    snprintf(extra, sizeof extra,
             "%s,\"mlp_only_layers\":[1,3],\"decoder_sparse_step\":2,\"norm_topk_prob\":true", MOE);
    accepted("Qwen3MoeForCausalLM", extra);
    CHECK_EQ_STR(sparse(), "000001"); /* of 1, 3, 5 two are listed */
    CHECK(c.moe.norm == NORM_SUM && c.moe.norm_min == 0);
    refused("Qwen3MoeForCausalLM", "\"num_experts\":8,\"moe_intermediate_size\":32", ERR_INVALID,
            "num_experts_per_tok");
    refused("Qwen3MoeForCausalLM",
            "\"num_experts\":8,\"num_experts_per_tok\":9,\"moe_intermediate_size\":32", ERR_INVALID,
            "num_experts_per_tok");
    refused("Qwen3MoeForCausalLM",
            "\"num_experts\":8,\"num_experts_per_tok\":2,\"moe_intermediate_size\":32,\"mlp_only_"
            "layers\":2",
            ERR_INVALID, "mlp_only_layers");
    refused("Qwen3MoeForCausalLM",
            "\"num_experts\":8,\"num_experts_per_tok\":2,\"moe_intermediate_size\":32,\"shared_"
            "expert_intermediate_size\":5",
            ERR_UNSUPPORTED, "shared_expert_intermediate_size");
    snprintf(extra, sizeof extra, "%s,\"scoring_func\":\"sigmoid\"", MOE);
    refused("Qwen3MoeForCausalLM", extra, ERR_UNSUPPORTED, "scoring_func");
    snprintf(extra, sizeof extra, "%s,\"n_group\":4,\"topk_group\":1", MOE);
    refused("Qwen3MoeForCausalLM", extra, ERR_UNSUPPORTED, "n_group");
}

TEST(mixtral)
{
    accepted("MixtralForCausalLM",
             "\"num_local_experts\":4,\"num_experts_per_tok\":2,\"sliding_window\":null");
    CHECK_EQ_STR(sparse(), "111111");
    CHECK(c.moe.intermediate == 96 && c.moe.norm == NORM_SUM && c.rope_theta == 1e6 &&
          c.window == 0);
    CHECK_NEAR(c.rms_eps, 1e-5, 1e-12);
    refused("MixtralForCausalLM",
            "\"num_local_experts\":4,\"num_experts_per_tok\":2,\"norm_topk_prob\":false",
            ERR_UNSUPPORTED, "norm_topk_prob");
    refused("MixtralForCausalLM", "", ERR_INVALID, "num_local_experts");
    refused("MixtralForCausalLM",
            "\"num_local_experts\":4,\"num_experts_per_tok\":2,\"attention_bias\":true",
            ERR_UNSUPPORTED, "attention_bias");
}

TEST(ernie)
{
    accepted("Ernie4_5ForCausalLM", "\"head_dim\":128");
    CHECK(c.rope_interleaved && c.tied && c.rope_theta == 500000 && c.max_position == 131072 &&
          c.head_dim == 128);
    accepted("Ernie4_5_ForCausalLM",
             "\"tie_word_embeddings\":false,\"use_bias\":false,\"compression_ratio\":1.0");
    CHECK(!c.tied && c.head_dim == 16);
    refused("Ernie4_5ForCausalLM", "\"use_bias\":true", ERR_UNSUPPORTED, "use_bias");
    refused("Ernie4_5ForCausalLM", ERNIE, ERR_UNSUPPORTED, "moe_num_experts");
    accepted("Ernie4_5_MoeForCausalLM", ERNIE);
    CHECK_EQ_STR(sparse(), "111111");
    CHECK(c.moe.n_experts == 8 && c.moe.n_used == 3 && c.moe.intermediate == 48 &&
          c.moe.shared_intermediate == 0);
    CHECK(c.moe.norm == NORM_MAX && c.moe.norm_min == 1e-12f && c.moe.score == ROUTE_SOFTMAX &&
          c.moe.selection_bias);
    accepted("Ernie4_5_MoeForCausalLM",
             ERNIE ",\"moe_layer_start_index\":1,\"moe_layer_end_index\":-1,\"moe_layer_interval\":"
                   "2,\"moe_num_shared_experts\":2,"
                   "\"moe_capacity\":[64,64,64],\"moe_gate\":\"topk\",\"moe_gate_act\":\"sigmoid\","
                   "\"num_nextn_predict_layers\":1,\"moe_norm_min\":1e-9");
    CHECK_EQ_STR(sparse(), "010101");
    CHECK(c.moe.shared_intermediate == 96 && c.moe.score == ROUTE_SIGMOID &&
          c.moe.norm_min == 1e-9f);
    accepted("Ernie4_5_MoeForCausalLM",
             "\"moe_num_experts\":[8,4],\"moe_k\":2,\"moe_intermediate_size\":[48,16],\"moe_layer_"
             "start_index\":[2,1],"
             "\"moe_layer_end_index\":[4,5]"); /* vision-language: the text model's come first */
    CHECK_EQ_STR(sparse(), "001110");
    CHECK(c.moe.n_experts == 8 && c.moe.intermediate == 48);
    refused("Ernie4_5_MoeForCausalLM", "\"moe_num_experts\":8,\"moe_intermediate_size\":48",
            ERR_INVALID, "moe_k");
    refused("Ernie4_5_MoeForCausalLM",
            "\"moe_num_experts\":[],\"moe_k\":2,\"moe_intermediate_size\":48", ERR_INVALID,
            "moe_num_experts");
    refused("Ernie4_5_MoeForCausalLM", ERNIE ",\"moe_gate\":\"top2_fused\"", ERR_UNSUPPORTED,
            "moe_gate");
    refused("Ernie4_5_MoeForCausalLM", ERNIE ",\"moe_gate_act\":\"tanh\"", ERR_UNSUPPORTED,
            "moe_gate_act");
    refused("Ernie4_5_MoeForCausalLM", ERNIE ",\"moe_layer_interval\":0", ERR_INVALID,
            "moe_layer_interval");
    accepted("Ernie4_5_MoeForCausalLM",
             ERNIE ",\"moe_norm_gate_logits\":true,\"moe_group_experts\":false");
    refused("Ernie4_5_MoeForCausalLM", ERNIE ",\"moe_norm_gate_logits\":false", ERR_UNSUPPORTED,
            "moe_norm_gate_logits");
    refused("Ernie4_5_MoeForCausalLM", ERNIE ",\"moe_group_experts\":true", ERR_UNSUPPORTED,
            "moe_group_experts");
    refused("Ernie4_5_MoeForCausalLM", ERNIE ",\"rope_3d\":true", ERR_UNSUPPORTED, "rope_3d");
}

TEST(deepseek_v2)
{
    accepted("DeepseekV2ForCausalLM",
             DEEPSEEK_MOE ",\"q_lora_rank\":null,\"n_group\":4,\"topk_group\":2,\"topk_method\":"
                          "\"greedy\",\"n_shared_experts\":2,"
                          "\"first_k_dense_replace\":1,\"routed_scaling_factor\":16.0");
    CHECK(c.mla.q_lora == 0 && c.mla.kv_lora == 32 && c.mla.nope == 16 && c.mla.rope == 8 &&
          c.mla.v == 24 && c.rope_interleaved);
    CHECK(c.moe.n_groups == 1 && c.moe.norm == NORM_NONE && c.moe.scale == 16 &&
          c.moe.shared_intermediate == 80 && !c.moe.selection_bias);
    CHECK_EQ_STR(sparse(), "011111");
    accepted("DeepseekV2ForCausalLM",
             DEEPSEEK_MOE ",\"n_group\":4,\"topk_group\":2,\"topk_method\":\"group_limited_"
                          "greedy\",\"moe_layer_freq\":2");
    CHECK(c.moe.n_groups == 4 && c.moe.topk_groups == 2 && c.moe.group_score == GROUP_MAX);
    CHECK_EQ_STR(sparse(), "101010");
    accepted("DeepseekV2ForCausalLM", DEEPSEEK);
    CHECK_EQ_STR(sparse(), "000000");
    refused("DeepseekV2ForCausalLM", DEEPSEEK_MOE ",\"topk_method\":\"noaux_tc\"", ERR_UNSUPPORTED,
            "topk_method");
    refused("DeepseekV2ForCausalLM", DEEPSEEK_MOE ",\"scoring_func\":\"sigmoid\"", ERR_UNSUPPORTED,
            "scoring_func");
    refused("DeepseekV2ForCausalLM", DEEPSEEK_MOE ",\"norm_topk_prob\":true", ERR_UNSUPPORTED,
            "norm_topk_prob");
    refused("DeepseekV2ForCausalLM", "\"kv_lora_rank\":32", ERR_INVALID, "qk_nope_head_dim");
}

TEST(deepseek_v3)
{
    accepted("DeepseekV3ForCausalLM",
             DEEPSEEK_MOE ",\"q_lora_rank\":48,\"n_group\":4,\"topk_group\":2,\"head_dim\":64,"
                          "\"num_key_value_heads\":4");
    CHECK(c.mla.q_lora == 48 && c.head_dim == 24 && c.moe.score == ROUTE_SIGMOID &&
          c.moe.group_score == GROUP_TOP2_SUM);
    CHECK(c.moe.norm == NORM_SUM && c.moe.norm_min == 1e-20f && c.moe.selection_bias);
    accepted("DeepseekV3ForCausalLM",
             DEEPSEEK_MOE ",\"norm_topk_prob\":false,\"rope_interleave\":false");
    CHECK(c.moe.norm == NORM_NONE && !c.rope_interleaved);
    /* by default */
    CHECK(c.moe.n_groups == 8 && c.moe.topk_groups == 4 && c.moe.scale == 2.5f);
    accepted("DeepseekV3ForCausalLM",
             DEEPSEEK_MOE ",\"n_group\":1,\"topk_group\":1,\"routed_scaling_factor\":2.446");
    CHECK(c.moe.n_groups == 1 && c.moe.topk_groups == 1 && c.moe.scale == 2.446f);
    refused("DeepseekV3ForCausalLM", DEEPSEEK_MOE ",\"topk_method\":\"greedy\"", ERR_UNSUPPORTED,
            "topk_method");
    refused("DeepseekV3ForCausalLM", DEEPSEEK_MOE ",\"attention_bias\":true", ERR_UNSUPPORTED,
            "attention_bias");
    refused("DeepseekV3ForCausalLM", DEEPSEEK_MOE ",\"index_topk\":2048", ERR_UNSUPPORTED,
            "index_topk");
    refused("DeepseekV3ForCausalLM", DEEPSEEK_MOE ",\"n_group\":3", ERR_INVALID, "n_group");
    /* two experts for four choices */
    refused("DeepseekV3ForCausalLM", DEEPSEEK_MOE ",\"n_group\":8,\"topk_group\":1", ERR_INVALID,
            "topk_group");
    refused("DeepseekV3ForCausalLM",
            "\"kv_lora_rank\":32,\"qk_nope_head_dim\":16,\"qk_rope_head_dim\":7,\"v_head_dim\":24",
            ERR_UNSUPPORTED, "qk_rope_head_dim");
    refused(
        "DeepseekV3ForCausalLM",
        "\"kv_lora_rank\":1024,\"qk_nope_head_dim\":16,\"qk_rope_head_dim\":8,\"v_head_dim\":24",
        ERR_UNSUPPORTED, "kv_lora_rank");
    refused("DeepseekV3ForCausalLM",
            "\"kv_lora_rank\":32,\"qk_nope_head_dim\":250,\"qk_rope_head_dim\":8,\"v_head_dim\":24",
            ERR_UNSUPPORTED, "qk_nope_head_dim");
    CHECK(strstr(err.text, "qk_nope_head_dim 250") && strstr(err.text, "qk_rope_head_dim 8") &&
          strstr(err.text, "256"));
    refused("DeepseekV3ForCausalLM",
            "\"kv_lora_rank\":32,\"qk_nope_head_dim\":16,\"qk_rope_head_dim\":8,\"v_head_dim\":257",
            ERR_UNSUPPORTED, "v_head_dim");
    CHECK(strstr(err.text, "v_head_dim 257") && strstr(err.text, "256"));
    accepted("DeepseekV3ForCausalLM", "\"kv_lora_rank\":960,\"qk_nope_head_dim\":192,\"qk_rope_"
                                      "head_dim\":64,\"v_head_dim\":256,"
                                      "\"n_routed_experts\":16,\"num_experts_per_tok\":4,\"moe_"
                                      "intermediate_size\":40"); /* each at its maximum */
}

TEST_MAIN(CASE(llama_and_mistral), CASE(qwen), CASE(qwen3_moe), CASE(mixtral), CASE(ernie),
          CASE(deepseek_v2), CASE(deepseek_v3))
