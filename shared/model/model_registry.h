/* model_registry.h - the model families, and which of them serves an architecture.
 *
 * Thread: any (constants). */
#ifndef BATON_MODEL_MODEL_REGISTRY_H
#define BATON_MODEL_MODEL_REGISTRY_H

#include "shared/model/model_ops.h"

enum status model_no_hf_members(const cJSON *o, struct model_config *c, struct err *err);
void model_no_gguf_defaults(struct model_config *c);
bool model_no_draft(const struct model_config *c, struct str name);

extern const struct model_ops model_llama_ops, model_qwen2_ops, model_qwen3_ops,
    model_qwen3_moe_ops, model_mixtral_ops, model_ernie_ops, model_ernie_moe_ops,
    model_deepseek_v2_ops, model_deepseek_v3_ops;

/* The family that lists `arch`. NULL if there is none: *err (required) then lists all names. */
const struct model_ops *model_registry_find(const char *arch, struct err *err);
/* True when `understands` of the family lists `name`. */
bool model_understands(const struct model_ops *family, const char *name);

#endif
