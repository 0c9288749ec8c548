/* config_hf.c - config.json and generation_config.json.
 *
 * Defaults of absent members are those of transformers' LlamaConfig, since its files leave out what equals them. */
#include "shared/model/config_hf.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "shared/base/json.h"
#include "shared/model/config_check.h"
#include "shared/model/file_map.h"
#include "shared/model/model_rows.h"

enum { CONFIG_BYTES_MAX = 4 << 20 };

static enum status get_u32(const cJSON *o, const char *name, uint32_t min, uint32_t max, uint32_t *out, struct err *err)
{
    int64_t v = *out;
    TRY(json_get_i64(o, name, min, max, &v, err));
    *out = (uint32_t)v;
    return OK;
}

static enum status need_u32(const cJSON *o, const char *name, uint32_t max, uint32_t *out, struct err *err)
{
    if (!json_member(o, name)) return err_field(err, ERR_INVALID, name, "\"%s\" is missing", name);
    return get_u32(o, name, 1, max, out, err);
}

static enum status need_f64(const cJSON *o, const char *name, double min, double max, double *out, struct err *err)
{
    if (!json_member(o, name)) return err_field(err, ERR_INVALID, name, "\"%s\" is missing", name);
    return json_get_f64(o, name, min, max, out, err);
}

/* ---- what is refused --------------------------------------------------------------------------------------------- */

/* Members that change the arithmetic in ways the families here do not have. A value that switches the feature off
 * (null, false, 0, and 1 for multipliers) is accepted. */
static const struct {
    const char *name, *what;
    bool        one_is_off;
} REFUSED[] = {
    { "quantization_config", "quantised safetensors weights", false },
    { "compression_config", "compressed weights", false },
    { "partial_rotary_factor", "rotary embedding of a part of each head", true },
    { "attn_logit_softcapping", "soft-capped attention scores", false },
    { "final_logit_softcapping", "soft-capped logits", false },
    { "query_pre_attn_scalar", "another attention scale", false },
    { "attention_multiplier", "another attention scale", false },
    { "embedding_multiplier", "scaled embeddings", true },
    { "residual_multiplier", "scaled residuals", true },
    { "logits_scaling", "scaled logits", true },
    { "logit_scale", "scaled logits", true },
    { "scale_emb", "scaled embeddings", true },
    { "scale_depth", "scaled residuals", true },
    { "num_local_experts", "a mixture of experts", false },
    { "num_experts", "a mixture of experts", false },
    { "n_routed_experts", "a mixture of experts", false },
    { "use_qk_norm", "normalised queries and keys", false },
    { "qk_layernorm", "normalised queries and keys", false },
    { "no_rope_layers", "layers without rotary embedding", false },
    { "attention_chunk_size", "chunked attention", false },
    { "use_parallel_residual", "parallel residuals", false },
    { "is_encoder_decoder", "an encoder", false },
};

static bool is_off(const cJSON *v, bool one_is_off)
{
    if (cJSON_IsFalse(v)) return true;
    if (cJSON_IsNumber(v)) return v->valuedouble == (one_is_off ? 1.0 : 0.0);
    return false;
}

static enum status refuse_unknown_arithmetic(const cJSON *o, struct err *err)
{
    for (size_t i = 0; i < sizeof REFUSED / sizeof REFUSED[0]; i++) {
        const cJSON *v = json_member(o, REFUSED[i].name);
        if (!v || is_off(v, REFUSED[i].one_is_off)) continue;
        return err_field(err, ERR_UNSUPPORTED, REFUSED[i].name, "\"%s\" asks for %s, which is not supported", REFUSED[i].name,
                         REFUSED[i].what);
    }
    const char *act = "silu";
    TRY(json_get_str(o, "hidden_act", &act, err));
    if (strcmp(act, "silu") != 0 && strcmp(act, "swish") != 0)
        return err_field(err, ERR_UNSUPPORTED, "hidden_act", "\"hidden_act\" is \"%s\", only \"silu\" is supported", act);
    return OK;
}

/* A window is active when a size is given and nothing switches it off. */
static enum status refuse_windows(const cJSON *o, struct err *err)
{
    const cJSON *window = json_member(o, "sliding_window"), *types = json_member(o, "layer_types"), *t;
    bool         use = true;
    TRY(json_get_bool(o, "use_sliding_window", &use, err));
    if (window && use && !is_off(window, false))
        return err_field(err, ERR_UNSUPPORTED, "sliding_window", "\"sliding_window\" is active, which is not supported");
    cJSON_ArrayForEach(t, types)
        if (!cJSON_IsString(t) || strcmp(t->valuestring, "full_attention") != 0)
            return err_field(err, ERR_UNSUPPORTED, "layer_types", "\"layer_types\" holds \"%s\", only \"full_attention\" is supported",
                             cJSON_IsString(t) ? t->valuestring : "?");
    return OK;
}

/* ---- rope -------------------------------------------------------------------------------------------------------- */

static enum status read_llama3(const cJSON *config, const cJSON *r, struct model_config *c, struct err *err)
{
    c->rope.kind = ROPE_LLAMA3;
    TRY(need_f64(r, "factor", 1, 1e6, &c->rope.factor, err));
    TRY(need_f64(r, "low_freq_factor", 1e-6, 1e6, &c->rope.low_freq_factor, err));
    TRY(need_f64(r, "high_freq_factor", 1e-6, 1e6, &c->rope.high_freq_factor, err));
    /* transformers 5 moved it one level up in some files */
    const cJSON *where = json_member(r, "original_max_position_embeddings") ? r : config;
    return need_f64(where, "original_max_position_embeddings", 1, CONFIG_POSITIONS_MAX, &c->rope.original_max, err);
}

/* "rope_parameters" is what transformers 5 writes: theta and scaling in one object. Before: "rope_theta" and
 * "rope_scaling" (null, or {"type" or "rope_type": ..}). */
static enum status read_rope(const cJSON *o, struct model_config *c, struct err *err)
{
    const char  *member = json_member(o, "rope_parameters") ? "rope_parameters" : "rope_scaling", *type = "default";
    const cJSON *r = json_member(o, member);
    c->rope_theta = 10000.0;
    TRY(json_get_f64(o, "rope_theta", 1, 1e15, &c->rope_theta, err));
    if (!r) return OK;
    if (!cJSON_IsObject(r)) return err_field(err, ERR_INVALID, member, "\"%s\" is not an object", member);
    TRY(json_get_f64(r, "rope_theta", 1, 1e15, &c->rope_theta, err));
    TRY(json_get_str(r, "type", &type, err));
    TRY(json_get_str(r, "rope_type", &type, err));
    const cJSON *v;
    cJSON_ArrayForEach(v, r)
        if (cJSON_IsObject(v)) return err_field(err, ERR_UNSUPPORTED, member, "\"%s\" differs between layers, which is not supported", member);
    TRY(refuse_unknown_arithmetic(r, err)); /* partial_rotary_factor moved in here */
    if (strcmp(type, "default") == 0) return OK;
    if (strcmp(type, "llama3") == 0) return read_llama3(o, r, c, err);
    if (strcmp(type, "linear") != 0)
        return err_field(err, ERR_UNSUPPORTED, member, "rope type \"%s\" is not supported (default, linear and llama3 are)", type);
    c->rope.kind = ROPE_LINEAR;
    return need_f64(r, "factor", 1e-6, 1e6, &c->rope.factor, err);
}

/* ---- ids --------------------------------------------------------------------------------------------------------- */

/* null, a number, or a list of numbers */
static enum status read_eos(const cJSON *o, struct model_config *c, struct err *err)
{
    const cJSON *v = json_member(o, "eos_token_id"), *one;
    if (!v) return OK;
    if (!cJSON_IsArray(v)) {
        int64_t id = 0;
        TRY(json_get_i64(o, "eos_token_id", 0, CONFIG_VOCAB_MAX, &id, err));
        return config_add_eos(c, id, err);
    }
    cJSON_ArrayForEach(one, v)
    {
        if (!cJSON_IsNumber(one) || !(one->valuedouble >= 0 && one->valuedouble < CONFIG_VOCAB_MAX) ||
            one->valuedouble != floor(one->valuedouble))
            return err_field(err, ERR_INVALID, "eos_token_id", "\"eos_token_id\" holds something that is not a token id");
        TRY(config_add_eos(c, (int64_t)one->valuedouble, err));
    }
    return OK;
}

static enum status read_bos(const cJSON *o, struct model_config *c, struct err *err)
{
    int64_t id = c->bos;
    /* a list (seen in multi-language exports) names no single start: left to the tokenizer */
    if (!cJSON_IsArray(json_member(o, "bos_token_id"))) TRY(json_get_i64(o, "bos_token_id", -1, CONFIG_VOCAB_MAX, &id, err));
    c->bos = (int32_t)id;
    return OK;
}

/* ---- the files --------------------------------------------------------------------------------------------------- */

/* "architectures" names the code that wrote the file; very old files have only "model_type". */
static enum status read_arch(const cJSON *top, const cJSON *o, struct model_config *c, struct err *err)
{
    const cJSON *list = json_member(o, "architectures");
    if (!list) list = json_member(top, "architectures");
    const char *name = NULL;
    if (list) {
        const cJSON *first = cJSON_IsArray(list) && cJSON_GetArraySize(list) == 1 ? cJSON_GetArrayItem(list, 0) : NULL;
        if (!cJSON_IsString(first)) return err_field(err, ERR_INVALID, "architectures", "\"architectures\" is not a list of one name");
        name = first->valuestring;
    } else {
        TRY(json_get_str(o, "model_type", &name, err));
        if (!name) return err_field(err, ERR_INVALID, "architectures", "neither \"architectures\" nor \"model_type\" says what the model is");
    }
    if (strlen(name) >= sizeof c->arch) return err_field(err, ERR_UNSUPPORTED, "architectures", "the architecture's name is too long");
    memcpy(c->arch, name, strlen(name) + 1);
    return model_row_find(c->arch, err) ? OK : err->code; /* before anything else: no other member means much then */
}

static enum status read_sizes(const cJSON *o, struct model_config *c, struct err *err)
{
    double eps = 1e-6;
    TRY(need_u32(o, "num_hidden_layers", CONFIG_LAYERS_MAX, &c->n_layers, err));
    TRY(need_u32(o, "hidden_size", CONFIG_WIDTH_MAX, &c->hidden, err));
    TRY(need_u32(o, "num_attention_heads", CONFIG_HEADS_MAX, &c->n_heads, err));
    TRY(need_u32(o, "intermediate_size", CONFIG_WIDTH_MAX, &c->intermediate, err));
    TRY(need_u32(o, "vocab_size", CONFIG_VOCAB_MAX, &c->n_vocab, err));
    c->n_kv_heads = c->n_heads;
    TRY(get_u32(o, "num_key_value_heads", 1, CONFIG_HEADS_MAX, &c->n_kv_heads, err));
    if (!json_member(o, "head_dim") && c->hidden % c->n_heads != 0)
        return err_field(err, ERR_INVALID, "hidden_size", "hidden_size %" PRIu32 " is not divisible by %" PRIu32 " heads and \"head_dim\" is missing",
                         c->hidden, c->n_heads);
    c->head_dim = c->hidden / c->n_heads;
    TRY(get_u32(o, "head_dim", 1, CONFIG_WIDTH_MAX, &c->head_dim, err));
    c->max_position = 2048;
    TRY(get_u32(o, "max_position_embeddings", 1, CONFIG_POSITIONS_MAX, &c->max_position, err));
    TRY(json_get_f64(o, "rms_norm_eps", 1e-12, 1, &eps, err));
    c->rms_eps = (float)eps;
    TRY(json_get_bool(o, "tie_word_embeddings", &c->tied, err));
    TRY(json_get_bool(o, "attention_bias", &c->attention_bias, err));
    return json_get_bool(o, "mlp_bias", &c->mlp_bias, err);
}

static enum status read_config(const cJSON *top, struct model_config *c, struct err *err)
{
    if (!cJSON_IsObject(top)) return err_set(err, ERR_FORMAT, "it is not a JSON object");
    const cJSON *text = json_member(top, "text_config");
    const cJSON *o = cJSON_IsObject(text) && !json_member(top, "hidden_size") ? text : top;
    TRY(read_arch(top, o, c, err));
    TRY(refuse_unknown_arithmetic(top, err));
    if (o != top) TRY(refuse_unknown_arithmetic(o, err));
    TRY(refuse_windows(o, err));
    TRY(read_sizes(o, c, err));
    if (o != top) TRY(json_get_bool(top, "tie_word_embeddings", &c->tied, err));
    TRY(read_rope(o, c, err));
    TRY(read_eos(o, c, err));
    return read_bos(o, c, err);
}

/* do_sample is not read: as in vLLM the values are defaults of requests, and a request says whether it samples. */
static enum status read_generation(const cJSON *o, struct model_config *c, struct model_generation *g, struct err *err)
{
    if (!cJSON_IsObject(o)) return err_set(err, ERR_FORMAT, "it is not a JSON object");
    TRY(json_get_f64(o, "temperature", 0, 100, &g->temperature, err));
    TRY(json_get_f64(o, "top_p", 0, 1, &g->top_p, err));
    TRY(json_get_f64(o, "min_p", 0, 1, &g->min_p, err));
    TRY(json_get_f64(o, "repetition_penalty", 1e-6, 100, &g->repetition_penalty, err));
    TRY(json_get_i64(o, "top_k", -1, INT32_MAX, &g->top_k, err));
    TRY(read_eos(o, c, err));
    return c->bos < 0 ? read_bos(o, c, err) : OK;
}

enum status config_hf_parse(struct str config, struct str generation, struct model_config *out, struct model_generation *out_gen,
                            struct err *err)
{
    struct model_config     c = { .bos = -1 };
    struct model_generation g = config_no_generation();
    cJSON                  *doc;
    enum status             st = json_parse(config, false, &doc, err);
    if (st == OK) {
        st = read_config(doc, &c, err);
        cJSON_Delete(doc);
    }
    if (st != OK) return err_prefix(err, "config.json: ");
    if (generation.n > 0) {
        st = json_parse(generation, false, &doc, err);
        if (st == OK) {
            st = read_generation(doc, &c, &g, err);
            cJSON_Delete(doc);
        }
        if (st != OK) return err_prefix(err, "generation_config.json: ");
    }
    st = config_check(&c, err);
    if (st != OK) return err_prefix(err, "config.json: ");
    *out = c;
    *out_gen = g;
    return OK;
}

enum status config_hf_load(const char *folder, struct model_config *out, struct model_generation *out_gen, struct err *err)
{
    struct buf  config = { 0 }, generation = { 0 }, path = { 0 };
    buf_printf(&path, "%s/config.json", folder);
    enum status st = file_read(path.data, CONFIG_BYTES_MAX, &config, err);
    if (st == OK) {
        buf_clear(&path);
        buf_printf(&path, "%s/generation_config.json", folder);
        if (file_is_regular(path.data)) st = file_read(path.data, CONFIG_BYTES_MAX, &generation, err);
    }
    if (st == OK) {
        st = config_hf_parse(buf_str(&config), buf_str(&generation), out, out_gen, err);
        if (st != OK) err_prefix(err, "%s: ", folder);
    }
    buf_release(&config);
    buf_release(&generation);
    buf_release(&path);
    return st;
}
