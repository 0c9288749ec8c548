/* config_gguf.c - the configuration from GGUF metadata ("llama.block_count" and so on).
 *
 * Values that only some converters write have the defaults of the GGUF specification or of the
 * family (model_ops.h). The tensors themselves decide the size of the vocabulary (llama.vocab_size
 * is often missing and sometimes wrong), which layers have experts, and the width of shared
 * experts.
 *
 * Thread: any. */
#include "shared/model/config/config_gguf.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/mem.h"
#include "shared/model/config/config_check.h"
#include "shared/model/model_registry.h"
#include "shared/model/rope.h"

/* A key with the architecture's prefix. */
struct arch_key {
    char text[128];
};

static const char *key_of(struct arch_key *k, const struct model_config *c, const char *name)
{
    snprintf(k->text, sizeof k->text, "%s.%s", c->arch, name);
    return k->text;
}

/* `needed` keys have no default. Some converters write a value per layer: these must be equal. */
static enum status get_size(const struct gguf *g, const struct model_config *c, const char *name,
                            uint32_t max, bool needed, uint32_t *out, struct err *err)
{
    struct arch_key k;
    key_of(&k, c, name);
    const struct gguf_kv *kv = gguf_find(g, k.text);
    if (!kv)
        return needed ? err_field(err, ERR_INVALID, k.text, "metadata %s is missing", k.text) : OK;
    uint64_t v = *out;
    if (kv->type == GGUF_ARRAY) {
        int32_t *values;
        size_t n;
        TRY(gguf_get_i32s(g, k.text, &values, &n, err));
        bool same = n > 0;
        for (size_t i = 1; i < n; i++) same = same && values[i] == values[0];
        v = same && values[0] > 0 ? (uint64_t)values[0] : 0;
        mem_free(values);
        if (!same)
            return err_field(err, ERR_UNSUPPORTED, k.text,
                             "metadata %s differs between layers, which is not supported", k.text);
        if (v == 0 || v > max)
            return err_field(err, ERR_INVALID, k.text, "metadata %s is out of range", k.text);
    } else {
        TRY(gguf_get_u64(g, k.text, 1, max, &v, err));
    }
    *out = (uint32_t)v;
    return OK;
}

/* Draft layers (multi-token prediction) are counted among the blocks, after the others. */
static enum status get_draft(const struct gguf *g, const struct model_config *c, uint32_t *out,
                             struct err *err)
{
    struct arch_key k;
    uint64_t n = 0;
    TRY(gguf_get_u64(g, key_of(&k, c, "nextn_predict_layers"), 0, c->n_layers - 1, &n, err));
    *out = (uint32_t)n;
    return OK;
}

static enum status read_heads(const struct gguf *g, struct model_config *c, struct err *err)
{
    c->n_kv_heads = c->n_heads;
    TRY(get_size(g, c, "attention.head_count_kv", CONFIG_HEADS_MAX, false, &c->n_kv_heads, err));
    c->head_dim = c->hidden / c->n_heads;
    TRY(get_size(g, c, "attention.key_length", CONFIG_WIDTH_MAX, c->hidden % c->n_heads != 0,
                 &c->head_dim, err));
    uint32_t value_length = c->head_dim, rot_dim = c->head_dim;
    TRY(get_size(g, c, "attention.value_length", CONFIG_WIDTH_MAX, false, &value_length, err));
    TRY(get_size(g, c, "rope.dimension_count", CONFIG_WIDTH_MAX, false, &rot_dim, err));
    if (value_length != c->head_dim)
        return err_field(err, ERR_UNSUPPORTED, "attention.value_length",
                         "values of %" PRIu32 " elements beside keys of %" PRIu32
                         " are not supported",
                         value_length, c->head_dim);
    if (rot_dim != c->head_dim)
        return err_field(err, ERR_UNSUPPORTED, "rope.dimension_count",
                         "rotary embedding of %" PRIu32 " of the %" PRIu32
                         " elements of a head is not supported",
                         rot_dim, c->head_dim);
    return OK;
}

/* Newer files have the sizes of the absorbed path in key_length and value_length, those of heads in
 * .._mla. */
static enum status read_latent(const struct gguf *g, struct model_config *c, struct err *err)
{
    struct mla_config *m = &c->mla;
    uint32_t key = 0;
    TRY(get_size(g, c, "attention.q_lora_rank", CONFIG_WIDTH_MAX, false, &m->q_lora, err));
    TRY(get_size(g, c, "attention.kv_lora_rank", CONFIG_WIDTH_MAX, true, &m->kv_lora, err));
    TRY(get_size(g, c, "rope.dimension_count", CONFIG_WIDTH_MAX, true, &m->rope, err));
    TRY(get_size(g, c, "attention.key_length", CONFIG_WIDTH_MAX, true, &key, err));
    TRY(get_size(g, c, "attention.value_length", CONFIG_WIDTH_MAX, true, &m->v, err));
    TRY(get_size(g, c, "attention.key_length_mla", CONFIG_WIDTH_MAX, false, &key, err));
    TRY(get_size(g, c, "attention.value_length_mla", CONFIG_WIDTH_MAX, false, &m->v, err));
    if (key <= m->rope)
        return err_field(err, ERR_INVALID, "attention.key_length",
                         "keys of %" PRIu32 " elements, of which %" PRIu32
                         " are rotated, are not possible",
                         key, m->rope);
    m->nope = key - m->rope;
    c->head_dim = key;
    c->n_kv_heads = c->n_heads;
    return OK;
}

static enum status read_sizes(const struct gguf *g, struct model_config *c, struct err *err)
{
    struct arch_key k;
    double eps = 0;
    uint32_t n_draft = 0;
    TRY(get_size(g, c, "block_count", CONFIG_LAYERS_MAX, true, &c->n_layers, err));
    TRY(get_draft(g, c, &n_draft, err));
    c->n_layers -= n_draft;
    c->n_next = n_draft;
    TRY(get_size(g, c, "embedding_length", CONFIG_WIDTH_MAX, true, &c->hidden, err));
    TRY(get_size(g, c, "feed_forward_length", CONFIG_WIDTH_MAX, true, &c->intermediate, err));
    TRY(get_size(g, c, "attention.head_count", CONFIG_HEADS_MAX, true, &c->n_heads, err));
    TRY(get_size(g, c, "context_length", CONFIG_POSITIONS_MAX, true, &c->max_position, err));
    key_of(&k, c, "attention.layer_norm_rms_epsilon");
    if (!gguf_find(g, k.text))
        return err_field(err, ERR_INVALID, k.text, "metadata %s is missing", k.text);
    TRY(gguf_get_f64(g, k.text, 1e-12, 1, &eps, err));
    c->rms_eps = (float)eps;
    key_of(&k, c, "attention.kv_lora_rank");
    return gguf_find(g, k.text) ? read_latent(g, c, err) : read_heads(g, c, err);
}

static const struct gguf_tensor *find_tensor(const struct gguf *g, const char *name)
{
    for (size_t i = 0; i < g->n_tensors; i++)
        if (str_eq_c(g->tensors[i].name, name)) return &g->tensors[i];
    return NULL;
}

static enum status read_vocab(const struct gguf *g, struct model_config *c, struct err *err)
{
    const struct gguf_tensor *e = find_tensor(g, "token_embd.weight");
    if (!e || e->n_dims != 2)
        return err_field(err, ERR_FORMAT, "token_embd.weight",
                         "tensor token_embd.weight is missing or not a matrix");
    if (e->ne[1] > CONFIG_VOCAB_MAX)
        return err_field(err, ERR_INVALID, "token_embd.weight",
                         "a vocabulary of %" PRIu64 " is not plausible", e->ne[1]);
    c->n_vocab = (uint32_t)e->ne[1];
    c->tied = !find_tensor(g, "output.weight");
    /* GGUF metadata does not say which biases there are: the tensors do. */
    c->attention_bias = find_tensor(g, "blk.0.attn_q.bias") != NULL;
    c->mlp_bias = find_tensor(g, "blk.0.ffn_gate.bias") != NULL;
    return OK;
}

/* DeepSeek's files give the factor of the logarithm in its mscale (0.1 times mscale_all_dim), and
 * no factor of cos and sin. */
static enum status read_yarn(const struct gguf *g, struct model_config *c, double factor,
                             struct err *err)
{
    struct arch_key k;
    struct rope_config *y = &c->rope;
    double log_factor = 0;
    *y = (struct rope_config){
        .kind = ROPE_YARN,
        .factor = factor,
        .original_max = c->max_position,
        .beta_fast = 32,
        .beta_slow = 1,
    };
    TRY(gguf_get_f64(g, key_of(&k, c, "rope.scaling.original_context_length"), 1,
                     CONFIG_POSITIONS_MAX, &y->original_max, err));
    TRY(gguf_get_f64(g, key_of(&k, c, "rope.scaling.yarn_beta_fast"), 1e-3, 1e6, &y->beta_fast,
                     err));
    TRY(gguf_get_f64(g, key_of(&k, c, "rope.scaling.yarn_beta_slow"), 1e-3, 1e6, &y->beta_slow,
                     err));
    TRY(gguf_get_f64(g, key_of(&k, c, "rope.scaling.yarn_log_multiplier"), 0, 10, &log_factor,
                     err));
    config_extend_positions(c);
    double mscale = rope_mscale(factor, 10 * log_factor);
    if (log_factor > 0) y->score_factor = mscale * mscale;
    else y->cos_sin_factor = rope_mscale(factor, 1);
    return OK;
}

/* llama3 scaling is a tensor of factors (rope_freqs.weight), which decoder_load.c reads. The keys
 * say "linear", "yarn" or nothing; rope.scale_linear is an older name. */
static enum status read_rope(const struct gguf *g, struct model_config *c, struct err *err)
{
    struct arch_key k;
    struct str type = STR("");
    double factor = 1;
    c->rope_theta = 10000.0;
    TRY(gguf_get_f64(g, key_of(&k, c, "rope.freq_base"), 1.001, 1e15, &c->rope_theta, err));
    TRY(gguf_get_f64(g, key_of(&k, c, "rope.scale_linear"), 0, 1e6, &factor, err));
    TRY(gguf_get_f64(g, key_of(&k, c, "rope.scaling.factor"), 0, 1e6, &factor, err));
    TRY(gguf_get_str(g, key_of(&k, c, "rope.scaling.type"), &type, err));
    if (type.n > 0 && !str_eq_c(type, "none") && !str_eq_c(type, "linear") &&
        !str_eq_c(type, "yarn"))
        return err_field(err, ERR_UNSUPPORTED, k.text,
                         "rope scaling \"%.*s\" is not supported (none, linear and yarn are, and "
                         "llama3 as rope_freqs.weight)",
                         (int)(type.n < 32 ? type.n : 32), type.p);
    if (str_eq_c(type, "none") || factor == 1 || factor == 0) return OK;
    if (str_eq_c(type, "yarn")) return read_yarn(g, c, factor, err);
    c->rope.kind = ROPE_LINEAR;
    c->rope.factor = factor;
    return OK;
}

/* ---- experts ---- */

static const struct gguf_tensor *find_in_layer(const struct gguf *g, uint32_t layer,
                                               const char *part)
{
    char name[64];
    snprintf(name, sizeof name, "blk.%" PRIu32 ".%s", layer, part);
    return find_tensor(g, name);
}

static enum status read_layers(const struct gguf *g, struct model_config *c, struct err *err)
{
    for (uint32_t i = 0; i < c->n_layers + (c->n_next > 0); i++) {
        const struct gguf_tensor *shared = find_in_layer(g, i, "ffn_gate_shexp.weight");
        if (!find_in_layer(g, i, "ffn_gate_inp.weight")) continue;
        config_set_sparse(c, i);
        if (find_in_layer(g, i, "exp_probs_b.bias")) c->moe.selection_bias = true;
        if (!shared) continue;
        if (shared->ne[1] < 1 || shared->ne[1] > CONFIG_WIDTH_MAX)
            return err_field(err, ERR_INVALID, "ffn_gate_shexp",
                             "shared experts of %" PRIu64 " elements are not plausible",
                             shared->ne[1]);
        c->moe.shared_intermediate = (uint32_t)shared->ne[1];
    }
    return OK;
}

static enum status read_weighting(const struct gguf *g, struct model_config *c, struct err *err)
{
    struct arch_key k;
    uint64_t score = 1;
    bool normalise = c->moe.norm != NORM_NONE;
    double scale = 1;
    TRY(gguf_get_u64(g, key_of(&k, c, "expert_gating_func"), 0, 2, &score, err));
    TRY(gguf_get_bool(g, key_of(&k, c, "expert_weights_norm"), &normalise, err));
    TRY(gguf_get_f64(g, key_of(&k, c, "expert_weights_scale"), -1e6, 1e6, &scale, err));
    c->moe.score = score == 2 ? ROUTE_SIGMOID : ROUTE_SOFTMAX;
    c->moe.norm = !normalise ? NORM_NONE : c->moe.norm == NORM_NONE ? NORM_SUM : c->moe.norm;
    c->moe.scale = scale == 0 ? 1 : (float)scale; /* converters write 0 for "none" */
    return OK;
}

static enum status read_experts(const struct gguf *g, struct model_config *c, struct err *err)
{
    struct arch_key k;
    uint64_t n = 0;
    TRY(gguf_get_u64(g, key_of(&k, c, "expert_count"), 0, KERNEL_EXPERTS_MAX, &n, err));
    if (n == 0) return OK;
    c->moe.n_experts = (uint32_t)n;
    c->moe.intermediate = c->intermediate;
    TRY(get_size(g, c, "expert_used_count", KERNEL_EXPERTS_USED_MAX, true, &c->moe.n_used, err));
    TRY(get_size(g, c, "expert_feed_forward_length", CONFIG_WIDTH_MAX, false, &c->moe.intermediate,
                 err));
    TRY(get_size(g, c, "expert_group_count", KERNEL_EXPERTS_MAX, false, &c->moe.n_groups, err));
    TRY(get_size(g, c, "expert_group_used_count", KERNEL_EXPERTS_MAX, false, &c->moe.topk_groups,
                 err));
    TRY(read_weighting(g, c, err));
    TRY(read_layers(g, c, err));
    c->moe.group_score = c->moe.selection_bias ? GROUP_TOP2_SUM : GROUP_MAX;
    return OK;
}

/* Keys that change the arithmetic: accepted only when absent or neutral. */
static const struct {
    const char *name;
    double neutral;
} REFUSED[] = {
    { "expert_count", 0 },
    { "attention.kv_lora_rank", 0 },
    { "nextn_predict_layers", 0 },
    { "attention.scale", 0 },
    { "logit_scale", 1 },
    { "residual_scale", 1 },
    { "embedding_scale", 1 },
    { "attn_logit_softcapping", 0 },
    { "final_logit_softcapping", 0 },
    { "attention.clamp_kqv", 0 },
    { "attention.max_alibi_bias", 0 },
    { "rope.scaling.attn_factor", 1 },
    { "rope.scaling.yarn_attn_factor", 1 },
    { "rope.scaling.yarn_ext_factor", 1 },
    { "attention.indexer.top_k", 0 },
    { "attention.temperature_scale", 0 },
};

static enum status refuse_unknown_arithmetic(const struct gguf *g, const struct model_config *c,
                                             const struct model_ops *family, struct err *err)
{
    struct arch_key k;
    for (size_t i = 0; i < COUNT_OF(REFUSED); i++) {
        double v = REFUSED[i].neutral;
        if (model_understands(family, REFUSED[i].name)) continue;
        TRY(gguf_get_f64(g, key_of(&k, c, REFUSED[i].name), -1e300, 1e300, &v, err));
        if (v != REFUSED[i].neutral)
            return err_field(err, ERR_UNSUPPORTED, k.text,
                             "metadata %s is %g, which is not supported", k.text, v);
    }
    bool causal = true, parallel = false;
    TRY(gguf_get_bool(g, key_of(&k, c, "use_parallel_residual"), &parallel, err));
    if (parallel)
        return err_field(err, ERR_UNSUPPORTED, k.text,
                         "metadata %s is true, which is not supported", k.text);
    TRY(gguf_get_bool(g, key_of(&k, c, "attention.causal"), &causal, err));
    if (!causal)
        return err_field(err, ERR_UNSUPPORTED, k.text,
                         "metadata %s is false, which is not supported", k.text);
    return OK;
}

/* As in config.json, a window that every context fits in changes nothing. */
static enum status read_window(const struct gguf *g, struct model_config *c, struct err *err)
{
    struct arch_key k;
    uint64_t window = 0;
    TRY(gguf_get_u64(g, key_of(&k, c, "attention.sliding_window"), 0, CONFIG_POSITIONS_MAX, &window,
                     err));
    c->window = window < c->max_position ? (uint32_t)window : 0;
    return OK;
}

/* End of turn and end of message end an output like end of sequence. */
static enum status read_ids(const struct gguf *g, struct model_config *c, struct err *err)
{
    static const char *const ENDS[] = { "tokenizer.ggml.eos_token_id",
                                        "tokenizer.ggml.eot_token_id",
                                        "tokenizer.ggml.eom_token_id" };
    uint64_t id = 0;
    if (gguf_find(g, "tokenizer.ggml.bos_token_id")) {
        TRY(gguf_get_u64(g, "tokenizer.ggml.bos_token_id", 0, CONFIG_VOCAB_MAX, &id, err));
        c->bos = (int32_t)id;
    }
    for (size_t i = 0; i < COUNT_OF(ENDS); i++) {
        if (!gguf_find(g, ENDS[i])) continue;
        TRY(gguf_get_u64(g, ENDS[i], 0, CONFIG_VOCAB_MAX, &id, err));
        TRY(config_add_eos(c, (int64_t)id, err));
    }
    return OK;
}

enum status config_gguf_parse(const struct gguf *g, struct model_config *out,
                              struct model_generation *out_gen, struct err *err)
{
    struct model_config c = { .bos = -1, .moe = { .n_groups = 1, .topk_groups = 1, .scale = 1 } };
    struct str arch = { 0 };
    TRY(gguf_get_str(g, "general.architecture", &arch, err));
    if (arch.n == 0 || arch.n >= sizeof c.arch || memchr(arch.p, 0, arch.n))
        return err_field(err, ERR_INVALID, "general.architecture",
                         "metadata general.architecture is missing or not a name");
    memcpy(c.arch, arch.p, arch.n);
    const struct model_ops *family = model_registry_find(c.arch, err);
    if (!family) return err->code;
    family->gguf_defaults(&c);
    TRY(refuse_unknown_arithmetic(g, &c, family, err));
    TRY(read_sizes(g, &c, err));
    TRY(read_vocab(g, &c, err));
    TRY(read_rope(g, &c, err));
    TRY(read_window(g, &c, err)); /* after RoPE has extended the length */
    TRY(read_experts(g, &c, err));
    TRY(read_ids(g, &c, err));
    TRY(config_check(&c, err));
    *out = c;
    *out_gen = config_no_generation();
    return OK;
}
