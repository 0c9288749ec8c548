/* tensor_names.h - how each kind of file spells the names of tensors.
 *
 * Code asks by the names of Hugging Face's Llama checkpoints
 * ("model.layers.3.self_attn.q_proj.weight") and, for matrices that some files hold together, by:
 *     self_attn.qkv_proj.weight, mlp.gate_up_proj.weight    the rows of several matrices
 *     mlp.experts.gate_proj (up_proj, down_proj)            [n_experts, n_out, n_in]
 *     mlp.experts.gate_up_proj                              [n_experts, gate's n_out + up's, n_in]
 *     self_attn.k_b_proj, v_b_proj                          kv_b of latent attention by head
 *                                                           [n_heads, ..], k_b transposed
 *
 * Thread: any. */
#ifndef BATON_MODEL_LOAD_TENSOR_NAMES_H
#define BATON_MODEL_LOAD_TENSOR_NAMES_H

#include "shared/base/str.h"
#include "shared/model/model_ops.h"

enum { TENSOR_NAME_BYTES_MAX = 256 };

enum tensor_names_kind {
    TENSOR_NAMES_HF, /* Hugging Face: [n_out, n_in], the family's aliases */
    /* PaddlePaddle: "ernie." for "model.", matrices [n_in, n_out], gate and up in "up_gate_proj" */
    TENSOR_NAMES_PADDLE,
    TENSOR_NAMES_GGUF
};

struct tensor_names {
    enum tensor_names_kind kind;
    const char *prefix;                  /* TENSOR_NAMES_HF: put before the name */
    bool drop_model;                     /* drop the leading "model." of the name first */
    const struct weights_alias *aliases; /* of the family; NULL: none */
};

/* Writes the name that the file has for `name`; "" when files of this kind have no such tensor. */
void tensor_names_in_file(const struct tensor_names *n, const char *name,
                          char out[TENSOR_NAME_BYTES_MAX]);

#endif
