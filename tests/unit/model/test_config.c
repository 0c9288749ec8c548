/* test_config.c - config.json in all its spellings, GGUF metadata, and what is refused by name. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "shared/model/config/config_gguf.h"
#include "shared/model/config/config_hf.h"
#include "shared/model/load/foreign_checkpoint.h"
#include "tests/fixtures/gguf_write.h"
#include "tests/harness/test.h"

#define BASE                                                                                       \
    "\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":64,\"num_hidden_layers\":3,\"num_"   \
    "attention_heads\":4,\"intermediate_size\":88,"                                                \
    "\"vocab_size\":512"

static struct model_config c;
static struct model_generation g;
static struct err err;

static enum status parse(const char *config, const char *generation)
{
    err = (struct err){ 0 };
    return config_hf_parse(str_of(config), str_of(generation), &c, &g, &err);
}

TEST(defaults_of_absent_members)
{
    CHECK_OK(parse("{" BASE "}", ""));
    CHECK(c.n_kv_heads == 4 && c.head_dim == 16 && c.max_position == 2048 && !c.tied &&
          !c.attention_bias && !c.mlp_bias);
    CHECK_NEAR(c.rms_eps, 1e-6, 1e-12);
    CHECK_NEAR(c.rope_theta, 10000, 0);
    CHECK(c.rope.kind == ROPE_PLAIN && !c.rope_interleaved && c.bos == -1 && c.n_eos == 0);
    CHECK(isnan(g.temperature) && isnan(g.top_p) && g.top_k == -1);
}

TEST(spellings)
{
    CHECK_OK(parse(
        "{" BASE ",\"head_dim\":null,\"num_key_value_heads\":null,\"rope_scaling\":null,\"sliding_"
        "window\":null,\"rope_theta\":500000,"
        "\"rms_norm_eps\":1e-05,\"eos_token_id\":[1,2],\"bos_token_id\":0,\"dtype\":\"bfloat16\"}",
        "{\"eos_token_id\":[2,3],\"temperature\":0.6,\"top_p\":0.9,\"top_k\":20}"));
    CHECK_NEAR(c.rope_theta, 500000, 0);
    CHECK(c.n_eos == 3 && c.eos[0] == 1 && c.eos[1] == 2 && c.eos[2] == 3 && c.bos == 0);
    CHECK_NEAR(g.temperature, 0.6, 1e-12);
    CHECK_EQ_INT(g.top_k, 20);
    CHECK_OK(parse(
        "{" BASE ",\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":250000.0}}", ""));
    CHECK_NEAR(c.rope_theta, 250000, 0);
    CHECK_OK(parse("{" BASE ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.0}}", ""));
    CHECK(c.rope.kind == ROPE_LINEAR && c.rope.factor == 2.0);
    CHECK_OK(parse("{" BASE ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_"
                   "factor\":1,\"high_freq_factor\":4,"
                   "\"original_max_position_embeddings\":8192}}",
                   ""));
    CHECK(c.rope.kind == ROPE_LLAMA3 && c.rope.original_max == 8192.0);
    CHECK_OK(parse("{\"architectures\":[\"LlamaForCausalLM\"],\"text_config\":{\"hidden_size\":64,"
                   "\"num_hidden_layers\":3,\"num_attention_heads\":4,"
                   "\"intermediate_size\":88,\"vocab_size\":512},\"tie_word_embeddings\":true}",
                   ""));
    CHECK(c.hidden == 64 && c.tied);
    CHECK_OK(parse("{" BASE ",\"sliding_window\":128,\"use_sliding_window\":false,\"layer_types\":["
                   "\"full_attention\"],\"partial_rotary_factor\":1.0}",
                   ""));
}

static void refused(const char *extra, enum status want, const char *field)
{
    struct buf b = { 0 };
    buf_printf(&b, "{%s,%s}", BASE, extra);
    CHECK_STATUS(parse(b.data, ""), want);
    CHECK_EQ_STR(err.field, field);
    CHECK(strstr(err.text, "config.json: ") == err.text);
    buf_release(&b);
}

TEST(refused_by_name)
{
    refused("\"hidden_act\":\"gelu\"", ERR_UNSUPPORTED, "hidden_act");
    refused("\"quantization_config\":{\"dense_quant_type\":\"block_wise_fp8\"}", ERR_UNSUPPORTED,
            "quantization_config");
    CHECK(strstr(err.text, FOREIGN_FASTDEPLOY));
    refused("\"quantization_config\":{\"bits\":8}", ERR_UNSUPPORTED, "quantization_config");
    CHECK(strstr(err.text, "no \"quant_method\""));
    refused("\"quantization_config\":{\"quant_method\":\"awq\"}", ERR_UNSUPPORTED,
            "quantization_config");
    refused("\"quantization_config\":7", ERR_INVALID, "quantization_config");
    refused("\"layer_types\":[\"chunked_attention\"]", ERR_UNSUPPORTED, "layer_types");
    refused("\"layer_types\":[\"sliding_attention\"]", ERR_UNSUPPORTED, "layer_types");
    refused("\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":4}", ERR_UNSUPPORTED,
            "rope_scaling");
    refused("\"rope_scaling\":{\"type\":\"longrope\",\"factor\":4}", ERR_UNSUPPORTED,
            "rope_scaling");
    refused("\"rope_scaling\":{\"type\":\"linear\"}", ERR_INVALID, "factor");
    refused("\"rope_scaling\":{\"type\":\"yarn\"}", ERR_INVALID, "factor");
    refused("\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,\"truncate\":3}", ERR_INVALID,
            "truncate");
    refused("\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_"
            "factor\":4,\"original_max_position_embeddings\":9}",
            ERR_INVALID, "rope_scaling");
    refused("\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,\"extrapolation_factor\":0.5}",
            ERR_UNSUPPORTED, "extrapolation_factor");
    refused("\"rope_parameters\":{\"rope_type\":\"default\",\"llama_4_scaling_beta\":0.1}",
            ERR_UNSUPPORTED, "llama_4_scaling_beta");
    refused("\"routed_scaling_factor\":2.5", ERR_UNSUPPORTED, "routed_scaling_factor");
    refused("\"partial_rotary_factor\":0.5", ERR_UNSUPPORTED, "partial_rotary_factor");
    refused("\"rope_parameters\":{\"rope_type\":\"default\",\"partial_rotary_factor\":0.5}",
            ERR_UNSUPPORTED, "partial_rotary_factor");
    refused("\"num_local_experts\":8", ERR_UNSUPPORTED, "num_local_experts");
    refused("\"kv_lora_rank\":8", ERR_UNSUPPORTED, "kv_lora_rank");
    refused("\"compression_ratio\":2.0", ERR_UNSUPPORTED, "compression_ratio");
    refused("\"use_rmsnorm\":false", ERR_UNSUPPORTED, "use_rmsnorm");
    refused("\"num_key_value_heads\":3", ERR_INVALID, "num_key_value_heads");
    refused("\"head_dim\":15", ERR_UNSUPPORTED, "head_dim");
    refused("\"head_dim\":\"16\"", ERR_INVALID, "head_dim");
    refused("\"eos_token_id\":512", ERR_INVALID, "eos_token_id");
    refused("\"eos_token_id\":[1,\"2\"]", ERR_INVALID, "eos_token_id");
    refused("\"rms_norm_eps\":0", ERR_INVALID, "rms_norm_eps");
}

static void parse_with(const char *extra)
{
    struct buf b = { 0 };
    buf_printf(&b, "{%s,%s}", BASE, extra);
    if (parse(b.data, "") != OK) test_fail(__FILE__, __LINE__, "%s: %s", extra, err.text);
    buf_release(&b);
}

/* A window that every context fits in, or that is switched off, is ignored. */
TEST(windows)
{
    parse_with("\"sliding_window\":512,\"max_position_embeddings\":4096");
    CHECK_EQ_INT(c.window, 512);
    parse_with("\"sliding_window\":4096,\"max_position_embeddings\":4096");
    CHECK_EQ_INT(c.window, 0);
    parse_with("\"sliding_window\":512,\"use_sliding_window\":false");
    CHECK_EQ_INT(c.window, 0);
    /* of 3 layers */
    parse_with("\"sliding_window\":512,\"use_sliding_window\":true,\"max_window_layers\":3");
    CHECK_EQ_INT(c.window, 0);
    parse_with("\"sliding_window\":512,\"layer_types\":[\"full_attention\",\"sliding_attention\"]");
    CHECK_EQ_INT(c.window, 512);
    parse_with("\"sliding_window\":512,\"layer_types\":[\"full_attention\"]");
    CHECK_EQ_INT(c.window, 0);
    parse_with("\"sliding_window\":false");
    CHECK_EQ_INT(c.window, 0);
}

TEST(yarn_spellings)
{
    parse_with("\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,\"original_max_position_"
               "embeddings\":32768}");
    CHECK(c.rope.kind == ROPE_YARN && c.rope.original_max == 32768 && c.rope.beta_fast == 32 &&
          c.rope.beta_slow == 1 && !c.rope.no_truncate);
    CHECK_NEAR(c.rope.cos_sin_factor, 0.1 * log(4.0) + 1, 1e-12);
    CHECK(c.rope.score_factor == 0 && c.max_position == 131072); /* of 2048 without it */
    parse_with("\"max_position_embeddings\":163840,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":"
               "4.0,\"original_max_position_embeddings\":4096}");
    CHECK_EQ_INT(c.max_position, 163840);
    parse_with("\"max_position_embeddings\":64,\"sliding_window\":64,\"rope_scaling\":{\"type\":"
               "\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":64}");
    CHECK_EQ_INT(c.window, 64); /* which 256 positions do not fit in */
    parse_with("\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":4.0,\"attention_factor\":1."
               "5,\"truncate\":false,\"rope_theta\":1e6}");
    CHECK(c.rope.cos_sin_factor == 1.5 && c.rope.no_truncate && c.rope_theta == 1e6 &&
          c.rope.original_max == 2048);
    parse_with("\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,\"mscale\":1.0,\"mscale_all_"
               "dim\":1.0,\"attention_factor\":null}");
    CHECK(c.rope.cos_sin_factor == 1.0);
    CHECK_NEAR(c.rope.score_factor, 1.87385421, 1e-7);
    parse_with(
        "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,\"mscale\":1.0,\"mscale_all_dim\":0}");
    CHECK(c.rope.score_factor == 0);
}

TEST(block_wise_f8)
{
    static const char *const BAD[] = {
        "{\"quant_method\":\"fp8\"}",
        "{\"quant_method\":\"fp8\",\"weight_block_size\":[64,64]}",
        "{\"quant_method\":\"fp8\",\"weight_block_size\":[128]}",
        "{\"quant_method\":\"fp8\",\"fmt\":\"e5m2\",\"weight_block_size\":[128,128]}",
        "{\"quant_method\":\"fp8\",\"activation_scheme\":\"static\",\"weight_block_size\":[128,128]"
        "}",
        "{\"quant_method\":\"gptq\",\"bits\":4}",
    };
    parse_with("\"quantization_config\":{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\",\"weight_block_"
               "size\":[128,128],"
               "\"activation_scheme\":\"dynamic\",\"scale_fmt\":\"ue8m0\"}");
    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        char extra[256];
        snprintf(extra, sizeof extra, "\"quantization_config\":%s", BAD[i]);
        refused(extra, ERR_UNSUPPORTED, "quantization_config");
    }
}

TEST(unknown_architecture_lists_the_known_ones)
{
    CHECK_STATUS(parse("{\"architectures\":[\"MambaForCausalLM\"]}", ""), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "MambaForCausalLM") && strstr(err.text, "LlamaForCausalLM"));
    CHECK_STATUS(parse("{}", ""), ERR_INVALID);
    CHECK_STATUS(parse("[]", ""), ERR_FORMAT);
    CHECK_STATUS(parse("", ""), ERR_FORMAT);
    CHECK_STATUS(parse("{" BASE "}", "{\"top_p\":\"x\"}"), ERR_INVALID);
    CHECK(strstr(err.text, "generation_config.json") == err.text);
}

/* ---- GGUF ---- */

static struct gguf_write base(void)
{
    static const float embed[64 * 8] = { 0 };
    struct gguf_write w = { 0 };
    gguf_write_text(&w, "general.architecture", "llama");
    gguf_write_u32(&w, "llama.block_count", 2);
    gguf_write_u32(&w, "llama.embedding_length", 64);
    gguf_write_u32(&w, "llama.feed_forward_length", 96);
    gguf_write_u32(&w, "llama.attention.head_count", 4);
    gguf_write_u32(&w, "llama.context_length", 128);
    gguf_write_f32(&w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    gguf_write_tensor(&w, "token_embd.weight", 0, 2, (uint64_t[]){ 64, 8 }, embed, sizeof embed);
    return w;
}

static enum status parse_gguf(struct gguf_write *w)
{
    struct buf file = { 0 };
    struct gguf *file_gguf;
    gguf_write_finish(w, &file);
    CHECK_OK(gguf_parse(buf_str(&file), &file_gguf, &err));
    enum status st = config_gguf_parse(file_gguf, &c, &g, &err);
    gguf_close(file_gguf);
    buf_release(&file);
    return st;
}

TEST(gguf_defaults_and_values)
{
    struct gguf_write w = base();
    CHECK_OK(parse_gguf(&w));
    CHECK(c.n_layers == 2 && c.hidden == 64 && c.n_kv_heads == 4 && c.head_dim == 16 &&
          c.n_vocab == 8 && c.tied && c.rope_interleaved);
    CHECK(c.rope_theta == 10000.0 && c.rope.kind == ROPE_PLAIN);
    w = base();
    gguf_write_u32(&w, "llama.attention.head_count_kv", 2);
    gguf_write_u32(&w, "llama.rope.dimension_count", 16);
    gguf_write_text(&w, "llama.rope.scaling.type", "linear");
    gguf_write_f32(&w, "llama.rope.scaling.factor", 4);
    gguf_write_u32(&w, "tokenizer.ggml.eos_token_id", 2);
    gguf_write_u32(&w, "tokenizer.ggml.eot_token_id", 3);
    CHECK_OK(parse_gguf(&w));
    CHECK(c.n_kv_heads == 2 && c.rope.kind == ROPE_LINEAR && c.rope.factor == 4.0 && c.n_eos == 2 &&
          c.eos[1] == 3);
    w = base();
    gguf_write_i32s(&w, "llama.attention.head_count_kv", (int32_t[]){ 2, 2 }, 2);
    CHECK_OK(parse_gguf(&w));
    CHECK_EQ_INT(c.n_kv_heads, 2);
    w = base();
    gguf_write_u32(&w, "llama.attention.sliding_window", 64);
    CHECK_OK(parse_gguf(&w));
    CHECK_EQ_INT(c.window, 64);
    w = base();
    gguf_write_text(&w, "llama.rope.scaling.type", "yarn");
    gguf_write_f32(&w, "llama.rope.scaling.factor", 4);
    gguf_write_u32(&w, "llama.rope.scaling.original_context_length", 32);
    CHECK_OK(parse_gguf(&w));
    CHECK(c.rope.kind == ROPE_YARN && c.rope.original_max == 32 && c.rope.beta_fast == 32 &&
          c.window == 0);
    CHECK_NEAR(c.rope.cos_sin_factor, 0.1 * log(4.0) + 1, 1e-12);
    w = base();
    gguf_write_text(&w, "llama.rope.scaling.type", "yarn");
    gguf_write_f32(&w, "llama.rope.scaling.factor", 4);
    gguf_write_u32(&w, "llama.rope.scaling.original_context_length", 128);
    CHECK_OK(parse_gguf(&w));
    CHECK_EQ_INT(c.max_position, 512);
}

#define GGUF_REFUSES(write, words)                                                                 \
    do {                                                                                           \
        struct gguf_write w = base();                                                              \
        write;                                                                                     \
        CHECK(parse_gguf(&w) != OK);                                                               \
        if (!strstr(err.text, words))                                                              \
            test_fail(__FILE__, __LINE__, "\"%s\" does not say %s", err.text, words);              \
    } while (0)

TEST(gguf_refusals)
{
    GGUF_REFUSES(gguf_write_u32(&w, "llama.rope.dimension_count", 8), "rotary");
    GGUF_REFUSES(gguf_write_text(&w, "llama.rope.scaling.type", "longrope"), "longrope");
    GGUF_REFUSES(gguf_write_u32(&w, "llama.expert_count", 8), "llama.expert_used_count is missing");
    GGUF_REFUSES(gguf_write_u32(&w, "llama.attention.kv_lora_rank", 8),
                 "llama.attention.kv_lora_rank");
    GGUF_REFUSES(gguf_write_u32(&w, "llama.nextn_predict_layers", 1), "llama.nextn_predict_layers");
    GGUF_REFUSES(gguf_write_f32(&w, "llama.rope.scaling.attn_factor", 2), "attn_factor");
    GGUF_REFUSES(gguf_write_f32(&w, "llama.attention.temperature_scale", 0.1f),
                 "temperature_scale");
    GGUF_REFUSES(gguf_write_i32s(&w, "llama.attention.head_count_kv", (int32_t[]){ 2, 4 }, 2),
                 "between layers");
    GGUF_REFUSES(gguf_write_u32(&w, "llama.attention.head_count_kv", 3), "evenly");
    GGUF_REFUSES(gguf_write_u32(&w, "tokenizer.ggml.eos_token_id", 8), "vocabulary");
    GGUF_REFUSES(gguf_write_bool(&w, "llama.attention.causal", false), "causal");
    struct gguf_write w = { 0 };
    gguf_write_text(&w, "general.architecture", "mamba");
    CHECK_STATUS(parse_gguf(&w), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "mamba") && strstr(err.text, "llama"));
}

TEST_MAIN(CASE(defaults_of_absent_members), CASE(spellings), CASE(refused_by_name), CASE(windows),
          CASE(yarn_spellings), CASE(block_wise_f8),
          CASE(unknown_architecture_lists_the_known_ones), CASE(gguf_defaults_and_values),
          CASE(gguf_refusals))
