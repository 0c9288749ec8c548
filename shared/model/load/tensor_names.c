/* tensor_names.c - translation of tensor names.
 *
 * Thread: any. */
#include "shared/model/load/tensor_names.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/mem.h"

/* Hugging Face on the left, GGUF on the right. */
static const char *const GLOBAL_NAMES[][2] = {
    { "model.embed_tokens.weight", "token_embd.weight" },
    { "model.norm.weight", "output_norm.weight" },
    { "lm_head.weight", "output.weight" },
    { "lm_head.bias", "output.bias" },
    { "rope_freqs.weight", "rope_freqs.weight" },
};
/* In a layer, before ".weight" or ".bias". */
static const char *const LAYER_NAMES[][2] = {
    { "input_layernorm", "attn_norm" },
    { "post_attention_layernorm", "ffn_norm" },
    { "self_attn.q_proj", "attn_q" },
    { "self_attn.k_proj", "attn_k" },
    { "self_attn.v_proj", "attn_v" },
    { "self_attn.qkv_proj", "attn_qkv" },
    { "self_attn.o_proj", "attn_output" },
    { "self_attn.q_norm", "attn_q_norm" },
    { "self_attn.k_norm", "attn_k_norm" },
    { "self_attn.q_a_proj", "attn_q_a" },
    { "self_attn.q_a_layernorm", "attn_q_a_norm" },
    { "self_attn.q_b_proj", "attn_q_b" },
    { "self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa" },
    { "self_attn.kv_a_layernorm", "attn_kv_a_norm" },
    { "self_attn.kv_b_proj", "attn_kv_b" },
    { "mlp.gate_proj", "ffn_gate" },
    { "mlp.up_proj", "ffn_up" },
    { "mlp.down_proj", "ffn_down" },
    { "mlp.gate", "ffn_gate_inp" },
    { "mlp.shared_experts.gate_proj", "ffn_gate_shexp" },
    { "mlp.shared_experts.up_proj", "ffn_up_shexp" },
    { "mlp.shared_experts.down_proj", "ffn_down_shexp" },
    { "eh_proj", "nextn.eh_proj" },
    { "enorm", "nextn.enorm" },
    { "hnorm", "nextn.hnorm" },
    { "embed_tokens", "nextn.embed_tokens" },
    { "shared_head.norm", "nextn.shared_head_norm" },
    { "shared_head.head", "nextn.shared_head_head" },
};
/* In a layer, whole names. */
static const char *const LAYER_WHOLE_NAMES[][2] = {
    { "mlp.gate.e_score_correction_bias", "exp_probs_b.bias" },
    { "mlp.experts.gate_proj", "ffn_gate_exps.weight" },
    { "mlp.experts.up_proj", "ffn_up_exps.weight" },
    { "mlp.experts.down_proj", "ffn_down_exps.weight" },
    { "mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight" },
    { "self_attn.k_b_proj", "attn_k_b.weight" },
    { "self_attn.v_b_proj", "attn_v_b.weight" },
};

static const struct weights_alias PADDLE_ALIASES[] = {
    { ".gate_up_proj.", ".up_gate_proj." },
    { "mlp.gate.e_score_correction_bias", "mlp.moe_statics.e_score_correction_bias" },
    { NULL, NULL },
};

/* ---- GGUF ---- */

static const char *stem_in_gguf(const char *part, size_t n)
{
    for (size_t i = 0; i < COUNT_OF(LAYER_NAMES); i++)
        if (strlen(LAYER_NAMES[i][0]) == n && memcmp(part, LAYER_NAMES[i][0], n) == 0)
            return LAYER_NAMES[i][1];
    return NULL;
}

/* "mlp.experts.5.gate_proj.weight" → "ffn_gate.5.weight": Mixtral files of the first converters. */
static bool expert_in_gguf(const char *part, char *out, size_t cap)
{
    static const char *const MATRICES[][2] = { { "gate_proj.weight", "ffn_gate" },
                                               { "up_proj.weight", "ffn_up" },
                                               { "down_proj.weight", "ffn_down" } };
    static const char EXPERTS[] = "mlp.experts.";
    if (strncmp(part, EXPERTS, sizeof EXPERTS - 1) != 0 ||
        !isdigit((unsigned char)part[sizeof EXPERTS - 1]))
        return false;
    const char *number = part + sizeof EXPERTS - 1, *leaf = strchr(number, '.');
    for (size_t i = 0; leaf && i < COUNT_OF(MATRICES); i++)
        if (strcmp(leaf + 1, MATRICES[i][0]) == 0)
            snprintf(out, cap, "%s.%.*s.weight", MATRICES[i][1], (int)(leaf - number), number);
    return true;
}

static void part_in_gguf(const char *part, char *out, size_t cap)
{
    if (expert_in_gguf(part, out, cap)) return;
    for (size_t i = 0; i < COUNT_OF(LAYER_WHOLE_NAMES); i++)
        if (strcmp(part, LAYER_WHOLE_NAMES[i][0]) == 0) {
            snprintf(out, cap, "%s", LAYER_WHOLE_NAMES[i][1]);
            return;
        }
    const char *kind = strrchr(part, '.'),
               *stem = kind ? stem_in_gguf(part, (size_t)(kind - part)) : NULL;
    if (stem) snprintf(out, cap, "%s%s", stem, kind);
}

/* "model.layers.<n>.<part>" → "blk.<n>.<part>" */
static void in_gguf(const char *name, char out[TENSOR_NAME_BYTES_MAX])
{
    static const char LAYERS[] = "model.layers.";
    char part[TENSOR_NAME_BYTES_MAX / 2] = "";
    out[0] = 0;
    for (size_t i = 0; i < COUNT_OF(GLOBAL_NAMES); i++)
        if (strcmp(name, GLOBAL_NAMES[i][0]) == 0)
            snprintf(out, TENSOR_NAME_BYTES_MAX, "%s", GLOBAL_NAMES[i][1]);
    if (strncmp(name, LAYERS, sizeof LAYERS - 1) != 0) return;
    const char *number = name + sizeof LAYERS - 1, *dot = strchr(number, '.');
    if (dot) part_in_gguf(dot + 1, part, sizeof part);
    if (part[0])
        snprintf(out, TENSOR_NAME_BYTES_MAX, "blk.%.*s.%s", (int)(dot - number), number, part);
}

/* ---- safetensors ---- */

static void replace(char name[TENSOR_NAME_BYTES_MAX], const char *from, const char *to)
{
    char rest[TENSOR_NAME_BYTES_MAX];
    char *at = strstr(name, from);
    if (!at) return;
    snprintf(rest, sizeof rest, "%s", at + strlen(from));
    snprintf(at, TENSOR_NAME_BYTES_MAX - (size_t)(at - name), "%s%s", to, rest);
}

void tensor_names_in_file(const struct tensor_names *n, const char *name,
                          char out[TENSOR_NAME_BYTES_MAX])
{
    static const char MODEL[] = "model.";
    if (n->kind == TENSOR_NAMES_GGUF) {
        in_gguf(name, out);
        return;
    }
    bool inside = strncmp(name, MODEL, sizeof MODEL - 1) == 0;
    if (n->kind == TENSOR_NAMES_PADDLE)
        snprintf(out, TENSOR_NAME_BYTES_MAX, "%s%s", inside ? "ernie." : "",
                 inside ? name + sizeof MODEL - 1 : name);
    else
        snprintf(out, TENSOR_NAME_BYTES_MAX, "%s%s", n->prefix,
                 inside && n->drop_model ? name + sizeof MODEL - 1 : name);
    const struct weights_alias *a = n->kind == TENSOR_NAMES_PADDLE ? PADDLE_ALIASES : n->aliases;
    for (; a && a->ours; a++) replace(out, a->ours, a->theirs);
}
