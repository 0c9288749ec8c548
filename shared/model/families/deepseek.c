/* deepseek.c - DeepSeek-V2 and V3 (and R1): latent attention, YaRN, first layers dense, then
 * experts.
 *
 * V2 scores by softmax, takes the best experts of all (greedy) or of the best groups, where a group
 * counts as its best expert, and does not renormalise. V3 scores by sigmoid, chooses by score plus
 * a correction bias, ranks groups by the sum of their two best, and divides by sum + 1e-20. Both
 * multiply weights by routed_scaling_factor. RoPE pairs neighbours (2i, 2i+1). GGUF files call both
 * "deepseek2". Thread: loading. */
#include <ctype.h>

#include "shared/model/config/config_check.h"
#include "shared/model/config/config_hf.h"

static enum status read_latent(const cJSON *o, struct model_config *c, struct err *err)
{
    struct mla_config *m = &c->mla;
    c->rope_interleaved = true;
    TRY(json_get_bool(o, "rope_interleave", &c->rope_interleaved, err));
    TRY(config_hf_u32(o, "q_lora_rank", 1, CONFIG_WIDTH_MAX, &m->q_lora, err));
    TRY(config_hf_need_u32(o, "kv_lora_rank", CONFIG_WIDTH_MAX, &m->kv_lora, err));
    TRY(config_hf_need_u32(o, "qk_nope_head_dim", CONFIG_WIDTH_MAX, &m->nope, err));
    TRY(config_hf_need_u32(o, "qk_rope_head_dim", CONFIG_WIDTH_MAX, &m->rope, err));
    TRY(config_hf_need_u32(o, "v_head_dim", CONFIG_WIDTH_MAX, &m->v, err));
    c->head_dim = m->nope + m->rope; /* num_key_value_heads and head_dim have no meaning here */
    c->n_kv_heads = c->n_heads;
    return OK;
}

static enum status read_experts(const cJSON *o, struct model_config *c, struct err *err)
{
    struct moe_config *m = &c->moe;
    uint32_t shared = 0, dense = 0, step = 1;
    double scale = (double)m->scale;
    TRY(config_hf_u32(o, "n_routed_experts", 1, KERNEL_EXPERTS_MAX, &m->n_experts, err));
    if (m->n_experts == 0) return OK;
    TRY(config_hf_need_u32(o, "num_experts_per_tok", KERNEL_EXPERTS_MAX, &m->n_used, err));
    TRY(config_hf_need_u32(o, "moe_intermediate_size", CONFIG_WIDTH_MAX, &m->intermediate, err));
    TRY(config_hf_u32(o, "n_shared_experts", 0, KERNEL_EXPERTS_USED_MAX, &shared, err));
    TRY(config_hf_u32(o, "n_group", 1, KERNEL_EXPERTS_MAX, &m->n_groups, err));
    TRY(config_hf_u32(o, "topk_group", 1, KERNEL_EXPERTS_MAX, &m->topk_groups, err));
    TRY(config_hf_u32(o, "first_k_dense_replace", 0, CONFIG_LAYERS_MAX, &dense, err));
    TRY(config_hf_u32(o, "moe_layer_freq", 1, CONFIG_LAYERS_MAX, &step, err));
    TRY(json_get_f64(o, "routed_scaling_factor", -1e6, 1e6, &scale, err));
    m->scale = (float)scale;
    m->shared_intermediate = shared * m->intermediate;
    for (uint32_t i = dense; i < c->n_layers + (c->n_next > 0); i++)
        if (i % step == 0) config_set_sparse(c, i);
    return OK;
}

static enum status v2_read_hf(const cJSON *o, struct model_config *c, struct err *err)
{
    static const char *const METHODS[] = { "greedy", "group_limited_greedy", NULL },
                             *const SCORES[] = { "softmax", NULL };
    int method = 0, score = 0;
    bool renormalise = false;
    TRY(read_latent(o, c, err));
    TRY(read_experts(o, c, err));
    TRY(config_hf_choice(o, "topk_method", METHODS, &method, err));
    TRY(config_hf_choice(o, "scoring_func", SCORES, &score, err));
    TRY(json_get_bool(o, "norm_topk_prob", &renormalise, err));
    /* Implementations disagree on the scaling factor then, and no released model has it. */
    if (renormalise)
        return err_field(
            err, ERR_UNSUPPORTED, "norm_topk_prob",
            "\"norm_topk_prob\" asks for renormalised weights, which %s models here do not have",
            c->arch);
    if (method == 0) c->moe.n_groups = c->moe.topk_groups = 1;
    c->moe.score = ROUTE_SOFTMAX;
    c->moe.group_score = GROUP_MAX;
    c->moe.norm = NORM_NONE;
    return OK;
}

static enum status v3_read_hf(const cJSON *o, struct model_config *c, struct err *err)
{
    static const char *const METHODS[] = { "noaux_tc", NULL }, *const SCORES[] = { "sigmoid",
                                                                                   NULL };
    int unused = 0;
    bool renormalise = true;
    c->moe.n_groups = 8; /* defaults of DeepseekV3Config; the tensors do not show them */
    c->moe.topk_groups = 4;
    c->moe.scale = 2.5f;
    TRY(read_latent(o, c, err));
    TRY(read_experts(o, c, err));
    TRY(config_hf_choice(o, "topk_method", METHODS, &unused, err));
    TRY(config_hf_choice(o, "scoring_func", SCORES, &unused, err));
    TRY(json_get_bool(o, "norm_topk_prob", &renormalise, err));
    c->moe.score = ROUTE_SIGMOID;
    c->moe.group_score = GROUP_TOP2_SUM;
    c->moe.norm = renormalise ? NORM_SUM : NORM_NONE;
    c->moe.norm_min = 1e-20f;
    c->moe.selection_bias = c->moe.n_experts > 0;
    return OK;
}

static void gguf_defaults(struct model_config *c)
{
    c->rope_interleaved = true;
    c->moe.norm_min = 1e-20f;
}

/* Layers after the last one are the draft model. */
static bool is_draft(const struct model_config *c, struct str name)
{
    static const char *const PREFIXES[] = { "model.layers.", "blk." };
    for (size_t i = 0; i < sizeof PREFIXES / sizeof PREFIXES[0]; i++) {
        uint64_t layer = 0;
        size_t at = str_of(PREFIXES[i]).n, from = at;
        if (!str_starts(name, PREFIXES[i])) continue;
        for (; at < name.n && at < from + 9 && isdigit((unsigned char)name.p[at]); at++)
            layer = layer * 10 + (uint64_t)(name.p[at] - '0');
        return at > from && at < name.n && name.p[at] == '.' && layer >= c->n_layers;
    }
    return false;
}

static const struct model_draft_names DRAFT_NAMES = {
    .layer = "model.layers.%u.",
    .norm_embed = "model.layers.%u.enorm.weight",
    .norm_hidden = "model.layers.%u.hnorm.weight",
    .projection = { "model.layers.%u.", "eh_proj" },
    .norm_out = "model.layers.%u.shared_head.norm.weight",
    .embed = { "model.layers.%u.", "embed_tokens" },
    .head = { "model.layers.%u.shared_head.", "head" },
};

static const char *const V2_ARCHS[] = { "DeepseekV2ForCausalLM", "deepseek_v2", NULL };
static const char *const V3_ARCHS[] = { "DeepseekV3ForCausalLM", "deepseek_v3", "deepseek2", NULL };
static const char *const UNDERSTANDS[] = {
    "n_routed_experts",       "n_shared_experts",     "n_group",      "topk_group",
    "routed_scaling_factor",  "q_lora_rank",          "kv_lora_rank", "expert_count",
    "attention.kv_lora_rank", "nextn_predict_layers", NULL,
};

const struct model_ops model_deepseek_v2_ops = {
    .name = "deepseek_v2",
    .archs = V2_ARCHS,
    .understands = UNDERSTANDS,
    .defaults = { .rope_theta = 10000, .rms_eps = 1e-6, .max_position = 2048 },
    .read_hf = v2_read_hf,
    .is_draft = is_draft,
    .gguf_defaults = model_no_gguf_defaults,
};

const struct model_ops model_deepseek_v3_ops = {
    .name = "deepseek_v3",
    .archs = V3_ARCHS,
    .understands = UNDERSTANDS,
    .defaults = { .rope_theta = 10000, .rms_eps = 1e-6, .max_position = 4096 },
    .read_hf = v3_read_hf,
    .gguf_defaults = gguf_defaults,
    .is_draft = is_draft,
    .draft = &DRAFT_NAMES,
};
