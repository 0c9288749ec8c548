/* test_tensor_names.c - names of tensors in folders, PaddlePaddle's checkpoints and GGUF files. */
#include "shared/model/load/tensor_names.h"

#include <string.h>

#include "tests/harness/test.h"

static void is(const struct tensor_names *n, const char *name, const char *want)
{
    char have[TENSOR_NAME_BYTES_MAX];
    tensor_names_in_file(n, name, have);
    if (strcmp(have, want) != 0)
        test_fail(__FILE__, __LINE__, "%s is \"%s\", expected \"%s\"", name, have, want);
}

TEST(folders)
{
    static const struct weights_alias ALIASES[] = { { ".mlp.", ".block_sparse_moe." },
                                                    { ".up_proj.", ".w3." },
                                                    { NULL, NULL } };
    const struct tensor_names plain = { TENSOR_NAMES_HF, "", false, NULL },
                              wrapped = { TENSOR_NAMES_HF, "language_model.", false, NULL };
    const struct tensor_names bare = { TENSOR_NAMES_HF, "", true, NULL },
                              mixtral = { TENSOR_NAMES_HF, "", false, ALIASES };
    is(&plain, "model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.q_proj.weight");
    is(&wrapped, "model.norm.weight", "language_model.model.norm.weight");
    is(&wrapped, "lm_head.weight", "language_model.lm_head.weight");
    is(&bare, "model.norm.weight", "norm.weight");
    is(&bare, "lm_head.weight", "lm_head.weight");
    is(&mixtral, "model.layers.0.mlp.experts.7.up_proj.weight",
       "model.layers.0.block_sparse_moe.experts.7.w3.weight");
    is(&mixtral, "model.layers.0.self_attn.o_proj.weight",
       "model.layers.0.self_attn.o_proj.weight");
}

TEST(paddle)
{
    const struct tensor_names n = { TENSOR_NAMES_PADDLE, "", false, NULL };
    is(&n, "model.embed_tokens.weight", "ernie.embed_tokens.weight");
    is(&n, "lm_head.weight", "lm_head.weight");
    is(&n, "model.layers.1.self_attn.qkv_proj.weight", "ernie.layers.1.self_attn.qkv_proj.weight");
    is(&n, "model.layers.1.mlp.gate_up_proj.weight", "ernie.layers.1.mlp.up_gate_proj.weight");
    is(&n, "model.layers.1.mlp.experts.4.gate_up_proj.weight",
       "ernie.layers.1.mlp.experts.4.up_gate_proj.weight");
    is(&n, "model.layers.1.mlp.gate.e_score_correction_bias",
       "ernie.layers.1.mlp.moe_statics.e_score_correction_bias");
}

TEST(gguf)
{
    const struct tensor_names n = { .kind = TENSOR_NAMES_GGUF };
    is(&n, "model.embed_tokens.weight", "token_embd.weight");
    is(&n, "lm_head.weight", "output.weight");
    is(&n, "model.layers.12.post_attention_layernorm.weight", "blk.12.ffn_norm.weight");
    is(&n, "model.layers.12.self_attn.q_proj.bias", "blk.12.attn_q.bias");
    is(&n, "model.layers.0.mlp.gate.weight", "blk.0.ffn_gate_inp.weight");
    is(&n, "model.layers.0.mlp.gate.e_score_correction_bias", "blk.0.exp_probs_b.bias");
    is(&n, "model.layers.0.mlp.experts.gate_proj", "blk.0.ffn_gate_exps.weight");
    is(&n, "model.layers.0.mlp.experts.31.down_proj.weight", "blk.0.ffn_down.31.weight");
    is(&n, "model.layers.0.mlp.shared_experts.up_proj.weight", "blk.0.ffn_up_shexp.weight");
    is(&n, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "blk.0.attn_kv_a_mqa.weight");
    is(&n, "model.layers.0.self_attn.k_b_proj", "blk.0.attn_k_b.weight");
    is(&n, "rope_freqs.weight", "rope_freqs.weight");
    is(&n, "model.layers.0.mlp.experts.x.up_proj.weight", "");
    is(&n, "model.layers.0", "");
    is(&n, "something.else", "");
}

TEST_MAIN(CASE(folders), CASE(paddle), CASE(gguf))
