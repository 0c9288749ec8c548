/* qwen.c - Qwen2 and 2.5 (biases of q, k and v), Qwen3 (normalised queries and keys), Qwen3-MoE
 * (experts in some layers or all). Thread: loading. */
#include "shared/base/mem.h"
#include "shared/model/config/config_check.h"
#include "shared/model/config/config_hf.h"

static enum status qwen2_read_hf(const cJSON *o, struct model_config *c, struct err *err)
{
    (void)o, (void)err;
    c->qkv_bias = true;
    return OK;
}

static enum status qwen3_read_hf(const cJSON *o, struct model_config *c, struct err *err)
{
    c->qk_norm = true;
    if (json_member(o, "head_dim")) return OK;
    c->head_dim = 128; /* default of Qwen3Config; Qwen3MoeConfig has hidden_size / heads */
    (void)err;
    return OK;
}

static bool is_listed(const cJSON *list, uint32_t i)
{
    const cJSON *v;
    cJSON_ArrayForEach (v, list)
        if (cJSON_IsNumber(v) && v->valuedouble == i) return true;
    return false;
}

/* Every decoder_sparse_step-th layer has experts, except those of mlp_only_layers. */
static enum status qwen3_moe_read_hf(const cJSON *o, struct model_config *c, struct err *err)
{
    uint32_t step = 1;
    bool renormalise = false;
    const cJSON *dense = json_member(o, "mlp_only_layers");
    c->qk_norm = true;
    TRY(config_hf_need_u32(o, "num_experts", KERNEL_EXPERTS_MAX, &c->moe.n_experts, err));
    TRY(config_hf_need_u32(o, "num_experts_per_tok", KERNEL_EXPERTS_MAX, &c->moe.n_used, err));
    TRY(config_hf_need_u32(o, "moe_intermediate_size", CONFIG_WIDTH_MAX, &c->moe.intermediate,
                           err));
    TRY(config_hf_u32(o, "decoder_sparse_step", 1, CONFIG_LAYERS_MAX, &step, err));
    TRY(json_get_bool(o, "norm_topk_prob", &renormalise, err));
    TRY(config_hf_softmax_scores(o, err));
    if (dense && !cJSON_IsArray(dense))
        return err_field(err, ERR_INVALID, "mlp_only_layers", "\"mlp_only_layers\" is not a list");
    c->moe.norm = renormalise ? NORM_SUM : NORM_NONE;
    for (uint32_t i = 0; i < c->n_layers; i++)
        if ((i + 1) % step == 0 && !is_listed(dense, i)) config_set_sparse(c, i);
    return OK;
}

static void qwen3_gguf_defaults(struct model_config *c) { c->qk_norm = true; }

static void qwen3_moe_gguf_defaults(struct model_config *c)
{
    c->qk_norm = true;
    c->moe.norm = NORM_SUM;
}

static const char *const QWEN2_ARCHS[] = { "Qwen2ForCausalLM", "qwen2", NULL };
static const char *const QWEN3_ARCHS[] = { "Qwen3ForCausalLM", "qwen3", NULL };
static const char *const QWEN3_MOE_ARCHS[] = { "Qwen3MoeForCausalLM", "qwen3_moe", "qwen3moe",
                                               NULL };
static const char *const QWEN3_UNDERSTANDS[] = { "attention_bias", NULL };
static const char *const QWEN3_MOE_UNDERSTANDS[] = { "attention_bias", "num_experts",
                                                     "expert_count", NULL };

const struct model_ops model_qwen2_ops = {
    .name = "qwen2",
    .archs = QWEN2_ARCHS,
    .defaults = { .rope_theta = 10000,
                  .rms_eps = 1e-6,
                  .max_position = 32768,
                  .window_unused = true, },
    .read_hf = qwen2_read_hf,
    .gguf_defaults = model_no_gguf_defaults,
    .is_draft = model_no_draft,
};

const struct model_ops model_qwen3_ops = {
    .name = "qwen3",
    .archs = QWEN3_ARCHS,
    .understands = QWEN3_UNDERSTANDS,
    .defaults = { .rope_theta = 10000,
                  .rms_eps = 1e-6,
                  .max_position = 32768,
                  .window_unused = true, },
    .read_hf = qwen3_read_hf,
    .gguf_defaults = qwen3_gguf_defaults,
    .is_draft = model_no_draft,
};

const struct model_ops model_qwen3_moe_ops = {
    .name = "qwen3_moe",
    .archs = QWEN3_MOE_ARCHS,
    .understands = QWEN3_MOE_UNDERSTANDS,
    .defaults = { .rope_theta = 10000,
                  .rms_eps = 1e-6,
                  .max_position = 32768,
                  .window_unused = true, },
    .read_hf = qwen3_moe_read_hf,
    .gguf_defaults = qwen3_moe_gguf_defaults,
    .is_draft = model_no_draft,
};
