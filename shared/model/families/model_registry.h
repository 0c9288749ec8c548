/* model_registry.h - families of models: what a row is, and which row serves a name. Thread: any
 * (constants).
 *
 * read_hf runs after the members that every family has were read (sizes, rope, ids) and before the
 * checks that hold for all; it fills in what is the family's own and refuses by name what it does
 * not understand. */
#ifndef BATON_MODEL_FAMILIES_MODEL_REGISTRY_H
#define BATON_MODEL_FAMILIES_MODEL_REGISTRY_H

#include <cjson/cJSON.h>

#include "shared/base/str.h"
#include "shared/model/model.h"

/* A part of a tensor's name as this program asks for it, and as the family's files spell it. */
struct weights_alias {
    const char *ours, *theirs;
};

struct model_ops {
    const char *name;
    const char *const *archs; /* config.json "architectures" values and GGUF
                               * general.architecture values, NULL-ended */
    const char *const
        *understands; /* members of config.json, or GGUF keys without the architecture,
                       * that other families must not have */
    /* What transformers' configuration class of the family has where config.json says nothing. */
    struct {
        bool tied, window_unused;
        double rope_theta, rms_eps;
        uint32_t max_position;
    } defaults;
    bool wint4_experts_only; /* --quantization wint4 means wint8 for all but routed experts, as
                              * FastDeploy has it for this family */
    const struct weights_alias *aliases; /* for safetensors, ended by NULL; applied in order; may be
                                          * NULL */
    /* Reads the family's own members of config.json (model_no_hf_members: it has none). */
    enum status (*read_hf)(const cJSON *o, struct model_config *c, struct err *err);
    /* Sets what GGUF files do not say, before their metadata is read (model_no_gguf_defaults). */
    void (*gguf_defaults)(struct model_config *c);
    /* Does the tensor `name`, as the file spells it, belong to a draft model that comes in the same
     * files (model_no_draft: there is none)? */
    bool (*is_draft)(const struct model_config *c, struct str name);
};

enum status model_no_hf_members(const cJSON *o, struct model_config *c, struct err *err);
void model_no_gguf_defaults(struct model_config *c);
bool model_no_draft(const struct model_config *c, struct str name);

extern const struct model_ops model_llama_ops, model_qwen2_ops, model_qwen3_ops,
    model_qwen3_moe_ops, model_mixtral_ops, model_ernie_ops, model_ernie_moe_ops,
    model_deepseek_v2_ops, model_deepseek_v3_ops;

/* The row that lists `arch`; otherwise NULL, and *err (required) lists every name there is. */
const struct model_ops *model_registry_find(const char *arch, struct err *err);
/* True when `understands` of the family lists `name`. */
bool model_understands(const struct model_ops *family, const char *name);

#endif
