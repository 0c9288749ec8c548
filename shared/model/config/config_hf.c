/* config_hf.c - the configuration from config.json and generation_config.json.
 *
 * Absent members have the defaults of the family's configuration class in transformers
 * (model_ops.h), since its files omit members that are equal to them.
 *
 * Thread: any. */
#include "shared/model/config/config_hf.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "shared/model/config/config_check.h"
#include "shared/model/load/file_map.h"

enum { CONFIG_BYTES_MAX = 4 << 20 };

enum status config_hf_u32(const cJSON *o, const char *name, uint32_t min, uint32_t max,
                          uint32_t *out, struct err *err)
{
    int64_t v = *out;
    TRY(json_get_i64(o, name, min, max, &v, err));
    *out = (uint32_t)v;
    return OK;
}

enum status config_hf_need_u32(const cJSON *o, const char *name, uint32_t max, uint32_t *out,
                               struct err *err)
{
    if (!json_member(o, name)) return err_field(err, ERR_INVALID, name, "\"%s\" is missing", name);
    return config_hf_u32(o, name, 1, max, out, err);
}

enum status config_hf_first_i64(const cJSON *o, const char *name, int64_t min, int64_t max,
                                int64_t *out, struct err *err)
{
    const cJSON *v = json_member(o, name);
    if (!cJSON_IsArray(v)) return json_get_i64(o, name, min, max, out, err);
    v = cJSON_GetArrayItem(v, 0);
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= (double)min && v->valuedouble <= (double)max) ||
        v->valuedouble != floor(v->valuedouble))
        return err_field(err, ERR_INVALID, name,
                         "\"%s\" does not begin with a number from %" PRId64 " to %" PRId64, name,
                         min, max);
    *out = (int64_t)v->valuedouble;
    return OK;
}

enum status config_hf_choice(const cJSON *o, const char *name, const char *const *choices, int *out,
                             struct err *err)
{
    const char *v = NULL;
    struct buf known = { 0 };
    TRY(json_get_str(o, name, &v, err));
    if (!v) return OK;
    for (int i = 0; choices[i]; i++) {
        if (strcmp(choices[i], v) == 0) {
            buf_release(&known);
            *out = i;
            return OK;
        }
        buf_printf(&known, "%s\"%s\"", i ? ", " : "", choices[i]);
    }
    enum status st = err_field(err, ERR_UNSUPPORTED, name, "\"%s\" is \"%s\", supported: %s", name,
                               v, known.data);
    buf_release(&known);
    return st;
}

enum status config_hf_softmax_scores(const cJSON *o, struct err *err)
{
    static const char *const SCORES[] = { "softmax", NULL };
    int unused;
    return config_hf_choice(o, "scoring_func", SCORES, &unused, err);
}

/* ---- ids ---- */

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
    cJSON_ArrayForEach (one, v) {
        if (!cJSON_IsNumber(one) ||
            !(one->valuedouble >= 0 && one->valuedouble < CONFIG_VOCAB_MAX) ||
            one->valuedouble != floor(one->valuedouble))
            return err_field(err, ERR_INVALID, "eos_token_id",
                             "\"eos_token_id\" holds something that is not a token id");
        TRY(config_add_eos(c, (int64_t)one->valuedouble, err));
    }
    return OK;
}

static enum status read_bos(const cJSON *o, struct model_config *c, struct err *err)
{
    int64_t id = c->bos;
    /* a list (multi-language exports) is left to the tokenizer */
    if (!cJSON_IsArray(json_member(o, "bos_token_id")))
        TRY(json_get_i64(o, "bos_token_id", -1, CONFIG_VOCAB_MAX, &id, err));
    c->bos = (int32_t)id;
    return OK;
}

/* ---- the files ---- */

/* Reads "architectures", or "model_type", which very old files have alone. */
static enum status read_arch(const cJSON *top, const cJSON *o, struct model_config *c,
                             struct err *err)
{
    const cJSON *list = json_member(o, "architectures");
    if (!list) list = json_member(top, "architectures");
    const char *name = NULL;
    if (list) {
        const cJSON *first = cJSON_IsArray(list) && cJSON_GetArraySize(list) == 1
                                 ? cJSON_GetArrayItem(list, 0)
                                 : NULL;
        if (!cJSON_IsString(first))
            return err_field(err, ERR_INVALID, "architectures",
                             "\"architectures\" is not a list of one name");
        name = first->valuestring;
    } else {
        TRY(json_get_str(o, "model_type", &name, err));
        if (!name)
            return err_field(err, ERR_INVALID, "architectures",
                             "neither \"architectures\" nor \"model_type\" says what the model is");
    }
    if (strlen(name) >= sizeof c->arch)
        return err_field(err, ERR_UNSUPPORTED, "architectures",
                         "the architecture's name is too long");
    memcpy(c->arch, name, strlen(name) + 1);
    return OK;
}

static enum status read_sizes(const cJSON *o, const struct model_ops *family,
                              struct model_config *c, struct err *err)
{
    double eps = family->defaults.rms_eps;
    TRY(config_hf_need_u32(o, "num_hidden_layers", CONFIG_LAYERS_MAX, &c->n_layers, err));
    TRY(config_hf_u32(o, "num_nextn_predict_layers", 0, CONFIG_LAYERS_MAX, &c->n_next, err));
    TRY(config_hf_need_u32(o, "hidden_size", CONFIG_WIDTH_MAX, &c->hidden, err));
    TRY(config_hf_need_u32(o, "num_attention_heads", CONFIG_HEADS_MAX, &c->n_heads, err));
    TRY(config_hf_need_u32(o, "intermediate_size", CONFIG_WIDTH_MAX, &c->intermediate, err));
    TRY(config_hf_need_u32(o, "vocab_size", CONFIG_VOCAB_MAX, &c->n_vocab, err));
    c->n_kv_heads = c->n_heads;
    TRY(config_hf_u32(o, "num_key_value_heads", 1, CONFIG_HEADS_MAX, &c->n_kv_heads, err));
    if (!json_member(o, "head_dim") && !json_member(o, "kv_lora_rank") &&
        c->hidden % c->n_heads != 0)
        return err_field(err, ERR_INVALID, "hidden_size",
                         "hidden_size %" PRIu32 " is not divisible by %" PRIu32
                         " heads and \"head_dim\" is missing",
                         c->hidden, c->n_heads);
    c->head_dim = c->hidden / c->n_heads;
    TRY(config_hf_u32(o, "head_dim", 1, CONFIG_WIDTH_MAX, &c->head_dim, err));
    c->max_position = family->defaults.max_position;
    TRY(config_hf_u32(o, "max_position_embeddings", 1, CONFIG_POSITIONS_MAX, &c->max_position,
                      err));
    TRY(json_get_f64(o, "rms_norm_eps", 1e-12, 1, &eps, err));
    c->rms_eps = (float)eps;
    c->tied = family->defaults.tied;
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
    const struct model_ops *family = model_registry_find(c->arch, err);
    if (!family) return err->code; /* first: the other members depend on it */
    TRY(config_hf_refuse(top, family, err));
    if (o != top) TRY(config_hf_refuse(o, family, err));
    TRY(read_sizes(o, family, c, err));
    if (o != top) TRY(json_get_bool(top, "tie_word_embeddings", &c->tied, err));
    TRY(config_hf_rope(o, family, c, err));
    TRY(config_hf_window(o, family, c, err)); /* after RoPE has extended the length */
    TRY(read_eos(o, c, err));
    TRY(read_bos(o, c, err));
    return family->read_hf(o, c, err);
}

/* Does not read do_sample: as in vLLM these are defaults of requests, and a request says whether it
 * samples. */
static enum status read_generation(const cJSON *o, struct model_config *c,
                                   struct model_generation *g, struct err *err)
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

enum status config_hf_parse(struct str config, struct str generation, struct model_config *out,
                            struct model_generation *out_gen, struct err *err)
{
    struct model_config c = { .bos = -1, .moe = { .n_groups = 1, .topk_groups = 1, .scale = 1 } };
    struct model_generation g = config_no_generation();
    cJSON *doc;
    enum status st = json_parse(config, false, &doc, err);
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

enum status config_hf_load(const char *folder, struct model_config *out,
                           struct model_generation *out_gen, struct err *err)
{
    struct buf config = { 0 }, generation = { 0 }, path = { 0 };
    buf_printf(&path, "%s/config.json", folder);
    enum status st = file_read(path.data, CONFIG_BYTES_MAX, &config, err);
    if (st == OK) {
        buf_clear(&path);
        buf_printf(&path, "%s/generation_config.json", folder);
        if (file_is_regular(path.data))
            st = file_read(path.data, CONFIG_BYTES_MAX, &generation, err);
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
