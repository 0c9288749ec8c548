/* config_check.c - checks common to config.json and GGUF metadata. Thread: any. */
#include "shared/model/config_check.h"

#include <inttypes.h>
#include <math.h>

enum status config_add_eos(struct model_config *c, int64_t id, struct err *err)
{
    if (id < 0 || id > CONFIG_VOCAB_MAX) return err_field(err, ERR_INVALID, "eos_token_id", "eos_token_id %" PRId64 " is not a token id", id);
    for (uint32_t i = 0; i < c->n_eos; i++)
        if (c->eos[i] == id) return OK;
    if (c->n_eos == MODEL_EOS_MAX)
        return err_field(err, ERR_INVALID, "eos_token_id", "more than %d different eos_token_id are given", MODEL_EOS_MAX);
    c->eos[c->n_eos++] = (int32_t)id;
    return OK;
}

struct model_generation config_no_generation(void)
{
    return (struct model_generation){ .temperature = NAN, .top_p = NAN, .min_p = NAN, .repetition_penalty = NAN, .top_k = -1 };
}

enum status config_check(const struct model_config *c, struct err *err)
{
    if (c->n_heads % c->n_kv_heads != 0)
        return err_field(err, ERR_INVALID, "num_key_value_heads", "%" PRIu32 " attention heads cannot share %" PRIu32 " key/value heads evenly",
                         c->n_heads, c->n_kv_heads);
    if (c->head_dim < 2 || c->head_dim % 2 != 0 || c->head_dim > KERNEL_HEAD_DIM_MAX)
        return err_field(err, ERR_UNSUPPORTED, "head_dim", "a head size of %" PRIu32 " is not supported (even numbers from 2 to %d are)",
                         c->head_dim, KERNEL_HEAD_DIM_MAX);
    if (c->rope.kind == ROPE_LLAMA3 && !(c->rope.low_freq_factor < c->rope.high_freq_factor))
        return err_field(err, ERR_INVALID, "rope_scaling", "llama3 rope scaling: low_freq_factor %g is not below high_freq_factor %g",
                         c->rope.low_freq_factor, c->rope.high_freq_factor);
    if (c->bos >= (int64_t)c->n_vocab)
        return err_field(err, ERR_INVALID, "bos_token_id", "bos_token_id %d is not in the vocabulary of %" PRIu32, c->bos, c->n_vocab);
    for (uint32_t i = 0; i < c->n_eos; i++)
        if (c->eos[i] >= (int64_t)c->n_vocab)
            return err_field(err, ERR_INVALID, "eos_token_id", "eos_token_id %d is not in the vocabulary of %" PRIu32, c->eos[i], c->n_vocab);
    return OK;
}
