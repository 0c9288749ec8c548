/* ernie.c - ERNIE-4.5, dense and with experts. RoPE pairs neighbours (2i, 2i+1).
 *
 * Experts are chosen by softmax score plus a correction bias, which is large and nearly constant
 * (it stays f32), and weighted by the scores without it, divided by max(sum, moe_norm_min). Layer i
 * has experts when moe_layer_start_index <= i <= moe_layer_end_index and (i + 1) %
 * moe_layer_interval = 0. Configurations of vision-language models have lists, with the text
 * model's value first. Thread: loading. */
#include "shared/model/config/config_check.h"
#include "shared/model/config/config_hf.h"

static enum status read_hf(const cJSON *o, struct model_config *c, struct err *err)
{
    (void)o, (void)err;
    c->rope_interleaved = true;
    return OK;
}

static enum status read_sizes(const cJSON *o, struct model_config *c, struct err *err)
{
    int64_t experts = 0, used = 0, width = 0, shared = 0;
    TRY(config_hf_first_i64(o, "moe_num_experts", 1, KERNEL_EXPERTS_MAX, &experts, err));
    TRY(config_hf_first_i64(o, "moe_k", 1, KERNEL_EXPERTS_MAX, &used, err));
    TRY(config_hf_first_i64(o, "moe_intermediate_size", 1, CONFIG_WIDTH_MAX, &width, err));
    TRY(config_hf_first_i64(o, "moe_num_shared_experts", 0, KERNEL_EXPERTS_USED_MAX, &shared, err));
    if (experts == 0 || used == 0 || width == 0) {
        const char *name = experts == 0 ? "moe_num_experts"
                           : used == 0  ? "moe_k"
                                        : "moe_intermediate_size";
        return err_field(err, ERR_INVALID, name, "\"%s\" is missing", name);
    }
    c->moe.n_experts = (uint32_t)experts;
    c->moe.n_used = (uint32_t)used;
    c->moe.intermediate = (uint32_t)width;
    c->moe.shared_intermediate = (uint32_t)(width * shared);
    return OK;
}

static enum status read_layers(const cJSON *o, struct model_config *c, struct err *err)
{
    int64_t start = 0, end = -1, interval = 1;
    TRY(config_hf_first_i64(o, "moe_layer_start_index", 0, CONFIG_LAYERS_MAX, &start, err));
    TRY(config_hf_first_i64(o, "moe_layer_end_index", -1, CONFIG_LAYERS_MAX, &end, err));
    TRY(config_hf_first_i64(o, "moe_layer_interval", 1, CONFIG_LAYERS_MAX, &interval, err));
    if (end < 0) end = (int64_t)c->n_layers - 1;
    for (uint32_t i = 0; i < c->n_layers; i++)
        if (i >= start && i <= end && (i + 1) % interval == 0) config_set_sparse(c, i);
    return OK;
}

static enum status moe_read_hf(const cJSON *o, struct model_config *c, struct err *err)
{
    static const char *const GATES[] = { "topk", NULL }, *const SCORES[] = { "softmax", "sigmoid",
                                                                             NULL };
    double norm_min = 1e-12;
    int gate = 0, score = 0;
    bool biased = true;
    c->rope_interleaved = true;
    TRY(read_sizes(o, c, err));
    TRY(read_layers(o, c, err));
    TRY(json_get_f64(o, "moe_norm_min", 0, 1, &norm_min, err));
    TRY(json_get_bool(o, "moe_use_aux_free", &biased, err));
    TRY(config_hf_choice(o, "moe_gate", GATES, &gate, err));
    TRY(config_hf_choice(o, "moe_gate_act", SCORES, &score, err));
    c->moe.score = score == 1 ? ROUTE_SIGMOID : ROUTE_SOFTMAX;
    c->moe.norm = NORM_MAX;
    c->moe.norm_min = (float)norm_min;
    c->moe.selection_bias = biased;
    return OK;
}

static void gguf_defaults(struct model_config *c)
{
    c->rope_interleaved = true;
    c->moe.norm = NORM_MAX;
    c->moe.norm_min = 1e-12f;
}

/* The draft layer for multi-token prediction: "model.mtp_block.0.self_attn.q_proj.weight" etc. */
static bool is_draft(const struct model_config *c, struct str name)
{
    static const char *const PREFIXES[] = { "model.", "ernie.", "" };
    static const char *const PARTS[] = { "mtp_block.", "mtp_emb_norm.", "mtp_hidden_norm.",
                                         "mtp_linear_proj." };
    (void)c;
    for (size_t i = 0; i < sizeof PREFIXES / sizeof PREFIXES[0]; i++) {
        if (!str_starts(name, PREFIXES[i])) continue;
        struct str part = str_sub(name, str_of(PREFIXES[i]).n, name.n);
        for (size_t j = 0; j < sizeof PARTS / sizeof PARTS[0]; j++)
            if (str_starts(part, PARTS[j])) return true;
    }
    return false;
}

/* Its FFN is dense, whatever the model's layers have. */
static const struct model_draft_names DRAFT_NAMES = {
    .layer = "model.mtp_block.0.",
    .norm_embed = "model.mtp_emb_norm.0.weight",
    .norm_hidden = "model.mtp_hidden_norm.0.weight",
    .projection = { "model.mtp_linear_proj.", "0" },
};

static const char *const ARCHS[] = { "Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM", "ernie4_5",
                                     NULL };
static const char *const MOE_ARCHS[] = { "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", "ernie4_5-moe",
                                         NULL };
static const char *const MOE_UNDERSTANDS[] = { "moe_num_experts", "moe_num_shared_experts",
                                               "expert_count", NULL };

static const struct weights_alias MOE_ALIASES[] = {
    { "mlp.gate.e_score_correction_bias", "mlp.moe_statics.e_score_correction_bias" },
    { NULL, NULL },
};

const struct model_ops model_ernie_ops = {
    .name = "ernie4_5",
    .archs = ARCHS,
    .defaults = { .tied = true, .rope_theta = 500000, .rms_eps = 1e-5, .max_position = 131072 },
    .read_hf = read_hf,
    .gguf_defaults = gguf_defaults,
    .is_draft = is_draft,
    .draft = &DRAFT_NAMES,
};

const struct model_ops model_ernie_moe_ops = {
    .name = "ernie4_5_moe",
    .archs = MOE_ARCHS,
    .understands = MOE_UNDERSTANDS,
    .defaults = { .tied = true, .rope_theta = 500000, .rms_eps = 1e-5, .max_position = 131072 },
    .wint4_experts_only = true,
    .aliases = MOE_ALIASES,
    .read_hf = moe_read_hf,
    .gguf_defaults = gguf_defaults,
    .is_draft = is_draft,
    .draft = &DRAFT_NAMES,
};
