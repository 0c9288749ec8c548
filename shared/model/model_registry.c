/* model_registry.c - the registry of families.
 *
 * Thread: any. */
#include "shared/model/model_registry.h"

#include <string.h>

#include "shared/base/mem.h"

static const struct model_ops *const MODEL_FAMILIES[] = {
    &model_llama_ops,     &model_qwen2_ops,       &model_qwen3_ops,
    &model_qwen3_moe_ops, &model_mixtral_ops,     &model_ernie_ops,
    &model_ernie_moe_ops, &model_deepseek_v2_ops, &model_deepseek_v3_ops,
};

enum status model_no_hf_members(const cJSON *o, struct model_config *c, struct err *err)
{
    (void)o, (void)c, (void)err;
    return OK;
}

void model_no_gguf_defaults(struct model_config *c) { (void)c; }

bool model_no_draft(const struct model_config *c, struct str name)
{
    (void)c, (void)name;
    return false;
}

bool model_understands(const struct model_ops *family, const char *name)
{
    for (const char *const *u = family->understands; u && *u; u++)
        if (strcmp(*u, name) == 0) return true;
    return false;
}

const struct model_ops *model_registry_find(const char *arch, struct err *err)
{
    struct buf known = { 0 };
    for (size_t i = 0; i < COUNT_OF(MODEL_FAMILIES); i++)
        for (const char *const *name = MODEL_FAMILIES[i]->archs; *name; name++) {
            if (strcmp(*name, arch) == 0) {
                buf_release(&known);
                return MODEL_FAMILIES[i];
            }
            buf_printf(&known, "%s%s", known.len ? ", " : "", *name);
        }
    err_field(err, ERR_UNSUPPORTED, "architectures",
              "architecture %s is not supported; these are: %s", arch, known.data);
    buf_release(&known);
    return NULL;
}
