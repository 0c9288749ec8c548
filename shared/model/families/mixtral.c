/* mixtral.c - Mixtral: experts in every layer, two per token, with renormalised weights. Its files
 * have other names: w1 is gate, w3 is up, w2 is down. Thread: loading. */
#include "shared/model/config/config_check.h"
#include "shared/model/config/config_hf.h"

static enum status read_hf(const cJSON *o, struct model_config *c, struct err *err)
{
    bool renormalise = true;
    TRY(json_get_bool(o, "norm_topk_prob", &renormalise, err));
    if (!renormalise)
        return err_field(err, ERR_UNSUPPORTED, "norm_topk_prob",
                         "\"norm_topk_prob\" is false, Mixtral's weights add up to one");
    TRY(config_hf_softmax_scores(o, err));
    TRY(config_hf_need_u32(o, "num_local_experts", KERNEL_EXPERTS_MAX, &c->moe.n_experts, err));
    TRY(config_hf_need_u32(o, "num_experts_per_tok", KERNEL_EXPERTS_MAX, &c->moe.n_used, err));
    c->moe.intermediate = c->intermediate;
    c->moe.norm = NORM_SUM;
    for (uint32_t i = 0; i < c->n_layers; i++) config_set_sparse(c, i);
    return OK;
}

static const char *const ARCHS[] = { "MixtralForCausalLM", "mixtral", NULL };
static const char *const UNDERSTANDS[] = { "num_local_experts", NULL };

static const struct weights_alias ALIASES[] = {
    { ".mlp.", ".block_sparse_moe." },
    { ".gate_proj.", ".w1." },
    { ".up_proj.", ".w3." },
    { ".down_proj.", ".w2." },
    { NULL, NULL },
};

const struct model_ops model_mixtral_ops = {
    .name = "mixtral",
    .archs = ARCHS,
    .understands = UNDERSTANDS,
    .defaults = { .rope_theta = 1e6, .rms_eps = 1e-5, .max_position = 131072 },
    .aliases = ALIASES,
    .read_hf = read_hf,
    .gguf_defaults = model_no_gguf_defaults,
    .is_draft = model_no_draft,
};
