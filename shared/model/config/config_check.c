/* config_check.c - checks common to config.json and GGUF metadata.
 *
 * Thread: any. */
#include "shared/model/config/config_check.h"

#include <inttypes.h>
#include <math.h>

enum status config_add_eos(struct model_config *c, int64_t id, struct err *err)
{
    if (id < 0 || id > CONFIG_VOCAB_MAX)
        return err_field(err, ERR_INVALID, "eos_token_id",
                         "eos_token_id %" PRId64 " is not a token id", id);
    for (uint32_t i = 0; i < c->n_eos; i++)
        if (c->eos[i] == id) return OK;
    if (c->n_eos == MODEL_EOS_MAX)
        return err_field(err, ERR_INVALID, "eos_token_id",
                         "more than %d different eos_token_id are given", MODEL_EOS_MAX);
    c->eos[c->n_eos++] = (int32_t)id;
    return OK;
}

void config_extend_positions(struct model_config *c)
{
    double n_positions = c->rope.original_max * c->rope.factor;
    if (n_positions > (double)c->max_position && n_positions <= (double)CONFIG_POSITIONS_MAX)
        c->max_position = (uint32_t)n_positions;
}

void config_set_sparse(struct model_config *c, uint32_t i_layer)
{
    c->moe.sparse[i_layer / 8] |= (uint8_t)(1u << (i_layer % 8));
}

struct model_generation config_no_generation(void)
{
    return (struct model_generation){
        .temperature = NAN, .top_p = NAN, .min_p = NAN, .repetition_penalty = NAN, .top_k = -1
    };
}

static enum status check_heads(const struct model_config *c, struct err *err)
{
    if (c->n_heads % c->n_kv_heads != 0)
        return err_field(err, ERR_INVALID, "num_key_value_heads",
                         "%" PRIu32 " attention heads cannot share %" PRIu32
                         " key/value heads evenly",
                         c->n_heads, c->n_kv_heads);
    if (c->head_dim < 2 || c->head_dim % 2 != 0 || c->head_dim > KERNEL_HEAD_DIM_MAX)
        return err_field(err, ERR_UNSUPPORTED, "head_dim",
                         "a head size of %" PRIu32
                         " is not supported (even numbers from 2 to %d are)",
                         c->head_dim, KERNEL_HEAD_DIM_MAX);
    return OK;
}

static enum status check_latent(const struct mla_config *m, struct err *err)
{
    if (m->rope < 2 || m->rope % 2 != 0)
        return err_field(
            err, ERR_UNSUPPORTED, "qk_rope_head_dim",
            "a rotated part of %" PRIu32 " elements is not supported (even numbers are)", m->rope);
    if ((uint64_t)m->kv_lora + m->rope > KERNEL_LATENT_MAX)
        return err_field(err, ERR_UNSUPPORTED, "kv_lora_rank",
                         "a latent of kv_lora_rank %" PRIu32 " + qk_rope_head_dim %" PRIu32
                         " elements is not supported (up to %d together are)",
                         m->kv_lora, m->rope, KERNEL_LATENT_MAX);
    if (m->nope < 1 || (uint64_t)m->nope + m->rope > KERNEL_HEAD_DIM_MAX)
        return err_field(err, ERR_UNSUPPORTED, "qk_nope_head_dim",
                         "heads of qk_nope_head_dim %" PRIu32 " + qk_rope_head_dim %" PRIu32
                         " elements are not supported (1 or more, up to %d together, are)",
                         m->nope, m->rope, KERNEL_HEAD_DIM_MAX);
    if (m->v < 1 || m->v > KERNEL_HEAD_DIM_MAX)
        return err_field(err, ERR_UNSUPPORTED, "v_head_dim",
                         "values of v_head_dim %" PRIu32
                         " elements are not supported (1 to %d are)",
                         m->v, KERNEL_HEAD_DIM_MAX);
    return OK;
}

static enum status check_experts(const struct moe_config *m, struct err *err)
{
    if (m->n_experts > KERNEL_EXPERTS_MAX)
        return err_field(err, ERR_UNSUPPORTED, "num_experts",
                         "%" PRIu32 " experts are not supported (up to %d are)", m->n_experts,
                         KERNEL_EXPERTS_MAX);
    if (m->n_used < 1 || m->n_used > m->n_experts || m->n_used > KERNEL_EXPERTS_USED_MAX)
        return err_field(err, ERR_INVALID, "num_experts_per_tok",
                         "%" PRIu32 " of %" PRIu32
                         " experts per token are not supported (up to %d are)",
                         m->n_used, m->n_experts, KERNEL_EXPERTS_USED_MAX);
    if (m->intermediate < 1)
        return err_field(err, ERR_INVALID, "moe_intermediate_size",
                         "the experts' size is not given");
    if (m->n_groups < 1 || m->n_experts % m->n_groups != 0)
        return err_field(err, ERR_INVALID, "n_group",
                         "%" PRIu32 " experts do not make %" PRIu32 " groups", m->n_experts,
                         m->n_groups);
    if (m->topk_groups < 1 || m->topk_groups > m->n_groups ||
        m->n_used > m->topk_groups * (m->n_experts / m->n_groups))
        return err_field(err, ERR_INVALID, "topk_group",
                         "%" PRIu32 " of %" PRIu32 " groups cannot give %" PRIu32 " experts",
                         m->topk_groups, m->n_groups, m->n_used);
    return OK;
}

enum status config_check(const struct model_config *c, struct err *err)
{
    TRY(model_is_latent(c) ? check_latent(&c->mla, err) : check_heads(c, err));
    if (c->moe.n_experts > 0) TRY(check_experts(&c->moe, err));
    if (c->rope.kind == ROPE_LLAMA3 && !(c->rope.low_freq_factor < c->rope.high_freq_factor))
        return err_field(err, ERR_INVALID, "rope_scaling",
                         "llama3 rope scaling: low_freq_factor %g is not below high_freq_factor %g",
                         c->rope.low_freq_factor, c->rope.high_freq_factor);
    if (c->bos >= (int64_t)c->n_vocab)
        return err_field(err, ERR_INVALID, "bos_token_id",
                         "bos_token_id %d is not in the vocabulary of %" PRIu32, c->bos,
                         c->n_vocab);
    for (uint32_t i = 0; i < c->n_eos; i++)
        if (c->eos[i] >= (int64_t)c->n_vocab)
            return err_field(err, ERR_INVALID, "eos_token_id",
                             "eos_token_id %d is not in the vocabulary of %" PRIu32, c->eos[i],
                             c->n_vocab);
    return OK;
}
