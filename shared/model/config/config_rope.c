/* config_rope.c - RoPE in config.json.
 *
 * Thread: any. */
#include <string.h>

#include "shared/base/mem.h"
#include "shared/model/config/config_check.h"
#include "shared/model/config/config_hf.h"
#include "shared/model/rope.h"

static enum status need_f64(const cJSON *o, const char *name, double min, double max, double *out,
                            struct err *err)
{
    if (!json_member(o, name)) return err_field(err, ERR_INVALID, name, "\"%s\" is missing", name);
    return json_get_f64(o, name, min, max, out, err);
}

/* The object with original_max_position_embeddings: transformers 5 moved it one level up in some
 * files. */
static const cJSON *where_original_max(const cJSON *config, const cJSON *r)
{
    return json_member(r, "original_max_position_embeddings") ? r : config;
}

static enum status read_llama3(const cJSON *config, const cJSON *r, struct model_config *c,
                               struct err *err)
{
    c->rope.kind = ROPE_LLAMA3;
    TRY(need_f64(r, "factor", 1, 1e6, &c->rope.factor, err));
    TRY(need_f64(r, "low_freq_factor", 1e-6, 1e6, &c->rope.low_freq_factor, err));
    TRY(need_f64(r, "high_freq_factor", 1e-6, 1e6, &c->rope.high_freq_factor, err));
    return need_f64(where_original_max(config, r), "original_max_position_embeddings", 1,
                    CONFIG_POSITIONS_MAX, &c->rope.original_max, err);
}

/* The factor of cos and sin is "attention_factor", else the ratio of DeepSeek's mscale values, else
 * the paper's formula. */
static enum status read_yarn(const cJSON *config, const cJSON *r, struct model_config *c,
                             struct err *err)
{
    struct rope_config *y = &c->rope;
    double mscale = 0, mscale_all_dim = 0;
    bool truncate = true;
    y->kind = ROPE_YARN;
    y->original_max = c->max_position;
    y->beta_fast = 32;
    y->beta_slow = 1;
    TRY(need_f64(r, "factor", 1, 1e6, &y->factor, err));
    TRY(json_get_f64(where_original_max(config, r), "original_max_position_embeddings", 1,
                     CONFIG_POSITIONS_MAX, &y->original_max, err));
    TRY(json_get_f64(r, "beta_fast", 1e-3, 1e6, &y->beta_fast, err));
    TRY(json_get_f64(r, "beta_slow", 1e-3, 1e6, &y->beta_slow, err));
    TRY(json_get_f64(r, "mscale", 0, 100, &mscale, err));
    TRY(json_get_f64(r, "mscale_all_dim", 0, 100, &mscale_all_dim, err));
    TRY(json_get_f64(r, "attention_factor", 1e-3, 1e3, &y->cos_sin_factor, err));
    TRY(json_get_bool(r, "truncate", &truncate, err));
    y->no_truncate = !truncate;
    config_extend_positions(c);
    double all = rope_mscale(y->factor, mscale_all_dim);
    if (y->cos_sin_factor == 0)
        y->cos_sin_factor = mscale > 0 && mscale_all_dim > 0 ? rope_mscale(y->factor, mscale) / all
                                                             : rope_mscale(y->factor, 1);
    if (mscale_all_dim > 0) y->score_factor = all * all;
    return OK;
}

static enum status read_linear(const cJSON *r, struct model_config *c, struct err *err)
{
    c->rope.kind = ROPE_LINEAR;
    return need_f64(r, "factor", 1e-6, 1e6, &c->rope.factor, err);
}

/* Refuses unknown members: every member of this object changes the positions. */
static enum status refuse_unknown(const cJSON *r, const char *member, struct err *err)
{
    static const char *const KNOWN[] = {
        "type",
        "rope_type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        /* has no effect */
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
        "partial_rotary_factor",
        "finetuned",
    };
    const cJSON *v;
    cJSON_ArrayForEach (v, r) {
        bool known = cJSON_IsNull(v);
        for (size_t i = 0; i < COUNT_OF(KNOWN); i++)
            known = known || strcmp(KNOWN[i], v->string) == 0;
        if (!known)
            return err_field(err, ERR_UNSUPPORTED, v->string,
                             "\"%s\" holds \"%s\", which is not supported", member, v->string);
    }
    return OK;
}

/* transformers 5 writes "rope_parameters", with theta and scaling; older versions "rope_theta" and
 * "rope_scaling" (null, or {"type" or "rope_type": ..}). */
enum status config_hf_rope(const cJSON *o, const struct model_ops *family, struct model_config *c,
                           struct err *err)
{
    const char *member = json_member(o, "rope_parameters") ? "rope_parameters" : "rope_scaling",
               *type = "default";
    const cJSON *r = json_member(o, member), *v;
    c->rope_theta = family->defaults.rope_theta;
    TRY(json_get_f64(o, "rope_theta", 1.001, 1e15, &c->rope_theta, err));
    if (!r) return OK;
    if (!cJSON_IsObject(r))
        return err_field(err, ERR_INVALID, member, "\"%s\" is not an object", member);
    TRY(json_get_f64(r, "rope_theta", 1.001, 1e15, &c->rope_theta, err));
    TRY(json_get_str(r, "type", &type, err));
    TRY(json_get_str(r, "rope_type", &type, err));
    cJSON_ArrayForEach (v, r)
        if (cJSON_IsObject(v))
            return err_field(err, ERR_UNSUPPORTED, member,
                             "\"%s\" differs between layers, which is not supported", member);
    TRY(config_hf_refuse(r, family, err)); /* partial_rotary_factor is here now */
    if (strcmp(type, "llama3") == 0) TRY(read_llama3(o, r, c, err));
    else if (strcmp(type, "yarn") == 0) TRY(read_yarn(o, r, c, err));
    else if (strcmp(type, "linear") == 0) TRY(read_linear(r, c, err));
    else if (strcmp(type, "default") != 0)
        return err_field(err, ERR_UNSUPPORTED, member,
                         "rope type \"%s\" is not supported (default, linear, llama3 and yarn are)",
                         type);
    return refuse_unknown(r, member, err);
}
