/* config_refuse.c - members of config.json that change the arithmetic in ways not computed here.
 * Thread: any. */
#include <string.h>

#include "shared/base/mem.h"
#include "shared/model/config/config_check.h"
#include "shared/model/config/config_hf.h"
#include "shared/model/load/foreign_checkpoint.h"

/* A value that switches the feature off is accepted: null, false, an empty list, and the number
 * here. */
enum config_off { OFF_ZERO, OFF_ONE, OFF_TRUE };

static const struct {
    const char *name, *what;
    enum config_off off;
} REFUSED[] = {
    { "compression_config", "compressed weights", OFF_ZERO },
    { "partial_rotary_factor", "rotary embedding of a part of each head", OFF_ONE },
    { "attn_logit_softcapping", "soft-capped attention scores", OFF_ZERO },
    { "final_logit_softcapping", "soft-capped logits", OFF_ZERO },
    { "query_pre_attn_scalar", "another attention scale", OFF_ZERO },
    { "attention_multiplier", "another attention scale", OFF_ZERO },
    { "embedding_multiplier", "scaled embeddings", OFF_ONE },
    { "residual_multiplier", "scaled residuals", OFF_ONE },
    { "logits_scaling", "scaled logits", OFF_ONE },
    { "logit_scale", "scaled logits", OFF_ONE },
    { "scale_emb", "scaled embeddings", OFF_ONE },
    { "scale_depth", "scaled residuals", OFF_ONE },
    { "compression_ratio", "compressed positions", OFF_ONE },
    { "rope_3d", "positions of three dimensions", OFF_ZERO },
    { "use_rmsnorm", "another normalisation", OFF_TRUE },
    { "clip_qkv", "clipped queries, keys and values", OFF_ZERO },
    { "alibi", "biases by distance", OFF_ZERO },
    { "attention_bias", "biases in attention", OFF_ZERO },
    { "mlp_bias", "biases in the feed-forward blocks", OFF_ZERO },
    { "use_bias", "biases", OFF_ZERO },
    { "num_local_experts", "a mixture of experts", OFF_ZERO },
    { "num_experts", "a mixture of experts", OFF_ZERO },
    { "n_routed_experts", "a mixture of experts", OFF_ZERO },
    { "moe_num_experts", "a mixture of experts", OFF_ZERO },
    { "n_shared_experts", "shared experts", OFF_ZERO },
    { "num_shared_experts", "shared experts", OFF_ZERO },
    { "moe_num_shared_experts", "shared experts", OFF_ZERO },
    { "shared_expert_intermediate_size", "a gated shared expert", OFF_ZERO },
    { "n_group", "experts chosen by group", OFF_ONE },
    { "topk_group", "experts chosen by group", OFF_ONE },
    { "moe_group_experts", "experts chosen by group", OFF_ZERO },
    { "routed_scaling_factor", "scaled weights of experts", OFF_ONE },
    { "moe_norm_gate_logits", "weights of experts that do not add up to one", OFF_TRUE },
    { "q_lora_rank", "latent attention", OFF_ZERO },
    { "kv_lora_rank", "latent attention", OFF_ZERO },
    { "index_topk", "sparse attention", OFF_ZERO },
    { "index_n_heads", "sparse attention", OFF_ZERO },
    { "use_qk_norm", "normalised queries and keys", OFF_ZERO },
    { "qk_layernorm", "normalised queries and keys", OFF_ZERO },
    { "no_rope_layers", "layers without rotary embedding", OFF_ZERO },
    { "no_rope_layer_interval", "layers without rotary embedding", OFF_ZERO },
    { "attention_chunk_size", "chunked attention", OFF_ZERO },
    { "attn_temperature_tuning", "attention scaled by position", OFF_ZERO },
    { "use_parallel_residual", "parallel residuals", OFF_ZERO },
    { "is_encoder_decoder", "an encoder", OFF_ZERO },
};

static bool is_off(const cJSON *v, enum config_off off)
{
    if (cJSON_IsFalse(v)) return off != OFF_TRUE;
    if (cJSON_IsTrue(v)) return off == OFF_TRUE;
    if (cJSON_IsArray(v)) return cJSON_GetArraySize(v) == 0;
    return cJSON_IsNumber(v) && off != OFF_TRUE && v->valuedouble == (off == OFF_ONE ? 1.0 : 0.0);
}

/* Accepts DeepSeek's block-wise f8 only; every other method stores weights differently. */
static enum status check_quantization(const cJSON *o, struct err *err)
{
    static const char NAME[] = "quantization_config";
    const cJSON *q = json_member(o, NAME), *block;
    const char *method = "", *format = "e4m3", *scheme = "dynamic";
    if (!q || cJSON_IsFalse(q)) return OK;
    if (!cJSON_IsObject(q))
        return err_field(err, ERR_INVALID, NAME, "\"quantization_config\" is not an object");
    TRY(foreign_checkpoint_check_config(q, err));
    TRY(json_get_str(q, "quant_method", &method, err));
    if (!json_member(q, "quant_method"))
        return err_field(err, ERR_UNSUPPORTED, NAME,
                         "\"quantization_config\" has no \"quant_method\" (fp8 is supported)");
    TRY(json_get_str(q, "fmt", &format, err));
    TRY(json_get_str(q, "activation_scheme", &scheme, err));
    if (strcmp(method, "fp8") != 0)
        return err_field(
            err, ERR_UNSUPPORTED, NAME,
            "\"quantization_config\" has method \"%s\", which is not supported (fp8 is)", method);
    if (strcmp(format, "e4m3") != 0 || strcmp(scheme, "dynamic") != 0)
        return err_field(err, ERR_UNSUPPORTED, NAME,
                         "\"quantization_config\" asks for format \"%s\" and %s activations, only "
                         "e4m3 and dynamic are supported",
                         format, scheme);
    block = json_member(q, "weight_block_size");
    for (int i = 0; i < 2; i++) {
        const cJSON *n = cJSON_IsArray(block) && cJSON_GetArraySize(block) == 2
                             ? cJSON_GetArrayItem(block, i)
                             : NULL;
        if (!cJSON_IsNumber(n) || n->valuedouble != F8_BLOCK)
            return err_field(err, ERR_UNSUPPORTED, NAME,
                             "\"quantization_config\" has no \"weight_block_size\" of [128, 128], "
                             "others are not supported");
    }
    return OK;
}

enum status config_hf_refuse(const cJSON *o, const struct model_ops *family, struct err *err)
{
    static const char *const ACTIVATIONS[] = { "silu", "swish", NULL };
    for (size_t i = 0; i < COUNT_OF(REFUSED); i++) {
        const cJSON *v = json_member(o, REFUSED[i].name);
        if (!v || is_off(v, REFUSED[i].off) || model_understands(family, REFUSED[i].name)) continue;
        return err_field(err, ERR_UNSUPPORTED, REFUSED[i].name,
                         "\"%s\" asks for %s, which %s models here do not have", REFUSED[i].name,
                         REFUSED[i].what, family->name);
    }
    int unused;
    TRY(check_quantization(o, err));
    return config_hf_choice(o, "hidden_act", ACTIVATIONS, &unused, err);
}

/* ---- windows ---- */

/* *windowed: some layer has a window, by "layer_types" (transformers 5), which lists every
 * layer. */
static enum status read_layer_types(const cJSON *o, bool *windowed, struct err *err)
{
    const cJSON *t;
    cJSON_ArrayForEach (t, json_member(o, "layer_types")) {
        const char *type = cJSON_IsString(t) ? t->valuestring : "?";
        if (strcmp(type, "sliding_attention") == 0) *windowed = true;
        else if (strcmp(type, "full_attention") != 0)
            return err_field(err, ERR_UNSUPPORTED, "layer_types",
                             "\"layer_types\" holds \"%s\", only \"full_attention\" is supported",
                             type);
    }
    return OK;
}

/* A window is active when a size is given and nothing switches it off. It changes nothing in
 * contexts that fit in it, so model.c limits the length to it. Qwen's first max_window_layers
 * layers have none; by default no layer has. */
enum status config_hf_window(const cJSON *o, const struct model_ops *family, struct model_config *c,
                             struct err *err)
{
    bool use = !family->defaults.window_unused, windowed = false;
    uint32_t window = 0, free_layers = 0;
    TRY(json_get_bool(o, "use_sliding_window", &use, err));
    if (cJSON_IsFalse(json_member(o, "sliding_window"))) use = false;
    else TRY(config_hf_u32(o, "sliding_window", 0, CONFIG_POSITIONS_MAX, &window, err));
    TRY(config_hf_u32(o, "max_window_layers", 0, CONFIG_LAYERS_MAX, &free_layers, err));
    TRY(read_layer_types(o, &windowed, err));
    if (windowed && window == 0)
        return err_field(
            err, ERR_UNSUPPORTED, "layer_types",
            "\"layer_types\" holds \"sliding_attention\" and \"sliding_window\" gives no size");
    bool listed = json_member(o, "layer_types") != NULL;
    bool active = listed ? windowed : use && window > 0 && free_layers < c->n_layers;
    c->window = active && window < c->max_position ? window : 0;
    return OK;
}
