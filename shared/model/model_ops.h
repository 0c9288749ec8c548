/* model_ops.h - what a model family must provide: its names, the defaults of its configuration, and
 * how it reads the configuration. The entries are constants; model_registry.h lists them.
 *
 * Thread: any. */
#ifndef BATON_MODEL_MODEL_OPS_H
#define BATON_MODEL_MODEL_OPS_H

#include <cjson/cJSON.h>

#include "shared/base/str.h"
#include "shared/model/model.h"

/* A part of a tensor's name: Baton's spelling and the spelling in the family's files. */
struct weights_alias {
    const char *ours, *theirs;
};

/* How a family's files name the tensors of its draft layer (multi-token prediction), besides those
 * of any layer. "%u" stands for the number of the model's layers. */
struct model_draft_names {
    const char *layer; /* before the names that all layers have */
    const char *norm_embed, *norm_hidden;
    const char *projection[2];      /* prefix and leaf of [H, 2H], the embedding's half first */
    const char *norm_out;           /* NULL: the model's */
    const char *embed[2], *head[2]; /* prefix and leaf; where files do not have them the model's */
};

struct model_ops {
    const char *name;
    /* config.json "architectures" values and GGUF general.architecture values, NULL-ended */
    const char *const *archs;
    /* Members of config.json, or GGUF keys without the architecture, that this family reads and
     * that are refused for others; NULL-ended, may be NULL. */
    const char *const *understands;
    /* Values of transformers' configuration class, for members that config.json leaves out. */
    struct {
        bool tied, window_unused;
        double rope_theta, rms_eps;
        uint32_t max_position;
    } defaults;
    /* --quantization wint4 means wint8 for all but routed experts, as in FastDeploy. */
    bool wint4_experts_only;
    /* For safetensors, applied in order; ended by a NULL entry, may be NULL. */
    const struct weights_alias *aliases;
    /* Reads the family's own members of config.json (model_no_hf_members: it has none). Runs after
     * the members that every family has (sizes, rope, ids) and before the checks that hold for all.
     * Refuses by name what it does not understand. */
    enum status (*read_hf)(const cJSON *o, struct model_config *c, struct err *err);
    /* Sets what GGUF files do not say, before their metadata is read (model_no_gguf_defaults). */
    void (*gguf_defaults)(struct model_config *c);
    /* Does the tensor `name`, as the file spells it, belong to a draft model in the same files
     * (model_no_draft: there is none)? */
    bool (*is_draft)(const struct model_config *c, struct str name);
    const struct model_draft_names *draft; /* NULL: no draft layer is known */
};

#endif
