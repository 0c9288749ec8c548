/* config_properties.h - checks the properties of an accepted configuration that weight binding and
 * the kernels rely on; a violation traps. */
#ifndef BATON_TESTS_FUZZ_CONFIG_PROPERTIES_H
#define BATON_TESTS_FUZZ_CONFIG_PROPERTIES_H

#include <string.h>

#include "shared/model/config/config_check.h"
#include "shared/model/rope.h"

static inline void config_property(bool holds)
{
    if (!holds) __builtin_trap();
}

static inline void config_properties(const struct model_config *c)
{
    const struct mla_config *l = &c->mla;
    const struct moe_config *e = &c->moe;
    config_property(memchr(c->arch, 0, sizeof c->arch) != NULL);
    config_property(c->n_layers > 0 && c->n_layers <= MODEL_LAYERS_MAX &&
                    c->n_eos <= MODEL_EOS_MAX && c->rms_eps > 0 && c->rope_theta > 1);
    config_property(rope_dim(c) >= 2 && rope_dim(c) % 2 == 0 && rope_dim(c) <= KERNEL_HEAD_DIM_MAX);
    if (c->rope.kind != ROPE_PLAIN) config_property(c->rope.factor > 0);
    if (c->rope.kind == ROPE_YARN)
        config_property(c->rope.original_max >= 1 && c->rope.beta_fast > 0 &&
                        c->rope.beta_slow > 0);
    if (model_is_latent(c)) {
        config_property(l->kv_lora + l->rope <= KERNEL_LATENT_MAX && l->nope > 0 &&
                        l->nope + l->rope <= KERNEL_HEAD_DIM_MAX);
        config_property(l->v > 0 && l->v <= KERNEL_HEAD_DIM_MAX);
    } else {
        config_property(c->n_heads % c->n_kv_heads == 0 && c->head_dim % 2 == 0);
    }
    /* of draft layers, too, which lie behind the others */
    for (uint32_t i = 0; i < MODEL_LAYERS_MAX; i++)
        config_property(!model_layer_is_sparse(c, i) ||
                        (i < c->n_layers + c->n_next && e->n_experts > 0));
    if (e->n_experts == 0) return;
    config_property(e->n_experts <= KERNEL_EXPERTS_MAX && e->n_used >= 1 &&
                    e->n_used <= e->n_experts && e->n_used <= KERNEL_EXPERTS_USED_MAX);
    config_property(e->intermediate > 0 && e->n_groups >= 1 && e->n_experts % e->n_groups == 0);
    config_property(e->topk_groups >= 1 && e->topk_groups <= e->n_groups &&
                    e->n_used <= e->topk_groups * (e->n_experts / e->n_groups));
}

#endif
