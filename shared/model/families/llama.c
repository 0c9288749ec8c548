/* llama.c - the Llama family and Mistral's dense models, which differ only in a window that newer
 * ones do not have. GGUF files call Mixtral "llama", too, and order the rows of q and k so that the
 * two elements of a rotation are neighbours. Thread: loading. */
#include "shared/model/model_registry.h"

static void gguf_defaults(struct model_config *c)
{
    c->rope_interleaved = true;
    c->moe.norm = NORM_SUM;
}

static const char *const ARCHS[] = { "LlamaForCausalLM", "MistralForCausalLM", "llama", "mistral",
                                     NULL };
static const char *const UNDERSTANDS[] = { "attention_bias", "mlp_bias", "expert_count", NULL };

const struct model_ops model_llama_ops = {
    .name = "llama",
    .archs = ARCHS,
    .understands = UNDERSTANDS,
    .defaults = { .rope_theta = 10000, .rms_eps = 1e-6, .max_position = 2048 },
    .gguf_defaults = gguf_defaults,
    .read_hf = model_no_hf_members,
    .is_draft = model_no_draft,
};
