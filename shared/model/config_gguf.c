/* config_gguf.c - hyperparameters from GGUF metadata ("llama.block_count" and its kin).
 *
 * Values that only some converters write have the defaults of the format's description. The vocabulary's size is the
 * embedding's: llama.vocab_size is often missing and sometimes wrong. */
#include "shared/model/config_gguf.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/mem.h"
#include "shared/model/config_check.h"
#include "shared/model/model_rows.h"

/* A key under the architecture's prefix; valid until the enclosing statement's struct dies. */
struct arch_key {
    char text[128];
};

static const char *key_of(struct arch_key *k, const struct model_config *c, const char *name)
{
    snprintf(k->text, sizeof k->text, "%s.%s", c->arch, name);
    return k->text;
}

/* `needed` keys have no default. Some converters write one value per layer: accepted when all are equal. */
static enum status get_size(const struct gguf *g, const struct model_config *c, const char *name, uint32_t max, bool needed, uint32_t *out,
                            struct err *err)
{
    struct arch_key k;
    key_of(&k, c, name);
    const struct gguf_kv *kv = gguf_find(g, k.text);
    if (!kv) return needed ? err_field(err, ERR_INVALID, k.text, "metadata %s is missing", k.text) : OK;
    uint64_t v = *out;
    if (kv->type == GGUF_ARRAY) {
        int32_t *values;
        size_t   n;
        TRY(gguf_get_i32s(g, k.text, &values, &n, err));
        bool same = n > 0;
        for (size_t i = 1; i < n; i++) same = same && values[i] == values[0];
        v = same && values[0] > 0 ? (uint64_t)values[0] : 0;
        mem_free(values);
        if (!same) return err_field(err, ERR_UNSUPPORTED, k.text, "metadata %s differs between layers, which is not supported", k.text);
        if (v == 0 || v > max) return err_field(err, ERR_INVALID, k.text, "metadata %s is out of range", k.text);
    } else {
        TRY(gguf_get_u64(g, k.text, 1, max, &v, err));
    }
    *out = (uint32_t)v;
    return OK;
}

static enum status read_sizes(const struct gguf *g, struct model_config *c, struct err *err)
{
    struct arch_key k;
    double          eps = 0;
    TRY(get_size(g, c, "block_count", CONFIG_LAYERS_MAX, true, &c->n_layers, err));
    TRY(get_size(g, c, "embedding_length", CONFIG_WIDTH_MAX, true, &c->hidden, err));
    TRY(get_size(g, c, "feed_forward_length", CONFIG_WIDTH_MAX, true, &c->intermediate, err));
    TRY(get_size(g, c, "attention.head_count", CONFIG_HEADS_MAX, true, &c->n_heads, err));
    TRY(get_size(g, c, "context_length", CONFIG_POSITIONS_MAX, true, &c->max_position, err));
    c->n_kv_heads = c->n_heads;
    TRY(get_size(g, c, "attention.head_count_kv", CONFIG_HEADS_MAX, false, &c->n_kv_heads, err));
    c->head_dim = c->hidden / c->n_heads;
    TRY(get_size(g, c, "attention.key_length", CONFIG_WIDTH_MAX, c->hidden % c->n_heads != 0, &c->head_dim, err));
    uint32_t value_length = c->head_dim, rot_dim = c->head_dim;
    TRY(get_size(g, c, "attention.value_length", CONFIG_WIDTH_MAX, false, &value_length, err));
    TRY(get_size(g, c, "rope.dimension_count", CONFIG_WIDTH_MAX, false, &rot_dim, err));
    if (value_length != c->head_dim)
        return err_field(err, ERR_UNSUPPORTED, "attention.value_length", "values of %" PRIu32 " elements beside keys of %" PRIu32 " are not supported",
                         value_length, c->head_dim);
    if (rot_dim != c->head_dim)
        return err_field(err, ERR_UNSUPPORTED, "rope.dimension_count", "rotary embedding of %" PRIu32 " of the %" PRIu32
                         " elements of a head is not supported", rot_dim, c->head_dim);
    key_of(&k, c, "attention.layer_norm_rms_epsilon");
    if (!gguf_find(g, k.text)) return err_field(err, ERR_INVALID, k.text, "metadata %s is missing", k.text);
    TRY(gguf_get_f64(g, k.text, 1e-12, 1, &eps, err));
    c->rms_eps = (float)eps;
    return OK;
}

static const struct gguf_tensor *find_tensor(const struct gguf *g, const char *name)
{
    for (size_t i = 0; i < g->n_tensors; i++)
        if (str_eq_c(g->tensors[i].name, name)) return &g->tensors[i];
    return NULL;
}

static enum status read_vocab(const struct gguf *g, struct model_config *c, struct err *err)
{
    const struct gguf_tensor *e = find_tensor(g, "token_embd.weight");
    if (!e || e->n_dims != 2) return err_field(err, ERR_FORMAT, "token_embd.weight", "tensor token_embd.weight is missing or not a matrix");
    if (e->ne[1] > CONFIG_VOCAB_MAX) return err_field(err, ERR_INVALID, "token_embd.weight", "a vocabulary of %" PRIu64 " is not plausible", e->ne[1]);
    c->n_vocab = (uint32_t)e->ne[1];
    c->tied = !find_tensor(g, "output.weight");
    /* GGUF has no switch for biases: the tensors are there or not. */
    c->attention_bias = find_tensor(g, "blk.0.attn_q.bias") != NULL;
    c->mlp_bias = find_tensor(g, "blk.0.ffn_gate.bias") != NULL;
    return OK;
}

/* llama3 scaling comes as a tensor of factors (rope_freqs.weight), which the architecture reads; the keys say "linear" or
 * nothing. rope.scale_linear is the name of an early version. */
static enum status read_rope(const struct gguf *g, struct model_config *c, struct err *err)
{
    struct arch_key k;
    struct str      type = STR("");
    double          factor = 1;
    c->rope_theta = 10000.0;
    TRY(gguf_get_f64(g, key_of(&k, c, "rope.freq_base"), 1, 1e15, &c->rope_theta, err));
    TRY(gguf_get_f64(g, key_of(&k, c, "rope.scale_linear"), 0, 1e6, &factor, err));
    TRY(gguf_get_f64(g, key_of(&k, c, "rope.scaling.factor"), 0, 1e6, &factor, err));
    TRY(gguf_get_str(g, key_of(&k, c, "rope.scaling.type"), &type, err));
    if (type.n > 0 && !str_eq_c(type, "none") && !str_eq_c(type, "linear"))
        return err_field(err, ERR_UNSUPPORTED, k.text, "rope scaling \"%.*s\" is not supported (none and linear are, and llama3 as rope_freqs.weight)",
                         (int)(type.n < 32 ? type.n : 32), type.p);
    if (str_eq_c(type, "none") || factor == 1 || factor == 0) return OK;
    c->rope.kind = ROPE_LINEAR;
    c->rope.factor = factor;
    return OK;
}

/* Keys that change the arithmetic; absent or this neutral value is accepted. */
static const struct {
    const char *name;
    double      neutral;
} REFUSED[] = {
    { "attention.sliding_window", 0 }, { "expert_count", 0 },       { "attention.scale", 0 },         { "logit_scale", 1 },
    { "residual_scale", 1 },           { "embedding_scale", 1 },    { "attn_logit_softcapping", 0 },  { "final_logit_softcapping", 0 },
    { "attention.max_alibi_bias", 0 }, { "attention.clamp_kqv", 0 }, { "rope.scaling.attn_factor", 1 },
};

static enum status refuse_unknown_arithmetic(const struct gguf *g, const struct model_config *c, struct err *err)
{
    struct arch_key k;
    for (size_t i = 0; i < COUNT_OF(REFUSED); i++) {
        double v = REFUSED[i].neutral;
        TRY(gguf_get_f64(g, key_of(&k, c, REFUSED[i].name), -1e300, 1e300, &v, err));
        if (v != REFUSED[i].neutral) return err_field(err, ERR_UNSUPPORTED, k.text, "metadata %s is %g, which is not supported", k.text, v);
    }
    bool causal = true, parallel = false;
    TRY(gguf_get_bool(g, key_of(&k, c, "use_parallel_residual"), &parallel, err));
    if (parallel) return err_field(err, ERR_UNSUPPORTED, k.text, "metadata %s is true, which is not supported", k.text);
    TRY(gguf_get_bool(g, key_of(&k, c, "attention.causal"), &causal, err));
    if (!causal) return err_field(err, ERR_UNSUPPORTED, k.text, "metadata %s is false, which is not supported", k.text);
    return OK;
}

/* End of turn and end of message end an answer as end of sequence does. */
static enum status read_ids(const struct gguf *g, struct model_config *c, struct err *err)
{
    static const char *const ENDS[] = { "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id" };
    uint64_t id = 0;
    if (gguf_find(g, "tokenizer.ggml.bos_token_id")) {
        TRY(gguf_get_u64(g, "tokenizer.ggml.bos_token_id", 0, CONFIG_VOCAB_MAX, &id, err));
        c->bos = (int32_t)id;
    }
    for (size_t i = 0; i < COUNT_OF(ENDS); i++) {
        if (!gguf_find(g, ENDS[i])) continue;
        TRY(gguf_get_u64(g, ENDS[i], 0, CONFIG_VOCAB_MAX, &id, err));
        TRY(config_add_eos(c, (int64_t)id, err));
    }
    return OK;
}

enum status config_gguf_parse(const struct gguf *g, struct model_config *out, struct model_generation *out_gen, struct err *err)
{
    struct model_config c = { .bos = -1 };
    struct str          arch = { 0 };
    TRY(gguf_get_str(g, "general.architecture", &arch, err));
    if (arch.n == 0 || arch.n >= sizeof c.arch || memchr(arch.p, 0, arch.n))
        return err_field(err, ERR_INVALID, "general.architecture", "metadata general.architecture is missing or not a name");
    memcpy(c.arch, arch.p, arch.n);
    if (!model_row_find(c.arch, err)) return err->code;
    TRY(refuse_unknown_arithmetic(g, &c, err));
    TRY(read_sizes(g, &c, err));
    TRY(read_vocab(g, &c, err));
    TRY(read_rope(g, &c, err));
    TRY(read_ids(g, &c, err));
    /* The converter reorders the q and k rows of this architecture (only) so that pairs are neighbours. */
    c.rope_interleaved = strcmp(c.arch, "llama") == 0;
    TRY(config_check(&c, err));
    *out = c;
    *out_gen = config_no_generation();
    return OK;
}
