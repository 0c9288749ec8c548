/* model.h - a language model: its configuration, its weights, and a forward pass over a batch.
 *
 * model_load reads a folder (config.json, *.safetensors, tokenizer.json ...) or a GGUF file, finds
 * the row of MODEL_FAMILIES by architecture name, checks names, shapes and types of all weights
 * (every fault names the tensor or the member), adds up what the model takes in memory, and only
 * then packs. Anything in a configuration that is not understood and changes the result is refused
 * by name. A model knows no requests and no network. For measurements weights can be made up:
 * config.json is enough then.
 *
 * All families here are one pre-norm decoder (decoder.h) whose layers are an attention block and a
 * feed-forward block, each of one of two kinds. A family says what its configuration means and how
 * its files spell the tensors' names. Adding a family: write shared/model/<family>.c with one
 * `struct model_ops`, add it to MODEL_FAMILIES in model_registry.c. Thread: load on any; forward on
 * the engine thread. */
#ifndef BATON_MODEL_MODEL_H
#define BATON_MODEL_MODEL_H

#include "kernels/backend.h"
#include "shared/kv/kv_layout.h"

enum { MODEL_EOS_MAX = 16, MODEL_LAYERS_MAX = 4096 };

/* Rotary positions. angle(position, i) = position * inv_freq[i]; the kinds change inv_freq
 * (rope.h). */
struct rope_config {
    enum { ROPE_PLAIN, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN } kind;
    double factor, original_max;              /* of all kinds but PLAIN */
    double low_freq_factor, high_freq_factor; /* LLAMA3 */
    double beta_fast, beta_slow;              /* YARN */
    bool no_truncate;                         /* YARN: the ramp may begin and end between two
                                               * frequencies */
    double cos_sin_factor;                    /* cos and sin are multiplied by it; 0: not */
    double score_factor;                      /* attention scores are multiplied by it; 0: not */
};

/* Latent attention (DeepSeek): keys and values of all heads are made from one vector of kv_lora +
 * rope elements per token. */
struct mla_config {
    uint32_t q_lora;  /* 0: queries come straight from the hidden state */
    uint32_t kv_lora; /* 0: no latent attention, the rest is unused */
    uint32_t nope, rope, v;
};

struct moe_config {
    uint32_t n_experts;             /* 0: every layer is dense, the rest is unused */
    uint32_t n_used;                /* experts per token */
    uint32_t intermediate;          /* of one expert */
    uint32_t shared_intermediate;   /* of all shared experts together; 0: none */
    uint32_t n_groups, topk_groups; /* struct route_args says what these mean */
    int score, group_score, norm;
    float norm_min, scale;
    bool selection_bias;
    uint8_t sparse[MODEL_LAYERS_MAX / 8]; /* bit i: layer i has experts */
};

/* Common to all families, filled from config.json or GGUF metadata. */
struct model_config {
    char arch[64]; /* as the file spells it */
    uint32_t n_layers, hidden, n_heads, n_kv_heads, head_dim, intermediate, n_vocab, max_position;
    uint32_t window; /* positions that attention sees; 0: all. Only contexts that fit
                      * in it are served */
    float rms_eps;
    double rope_theta;
    struct rope_config rope;
    bool rope_interleaved;         /* pairs (2i, 2i+1) instead of (i, i + d/2) */
    bool tied;                     /* the head is the embedding */
    bool attention_bias, mlp_bias; /* q, k, v and o; gate, up and down */
    bool qkv_bias;                 /* q, k and v alone */
    bool qk_norm;                  /* queries and keys are normalised per head, before the
                                    * rotation */
    struct mla_config mla;
    struct moe_config moe;
    int32_t eos[MODEL_EOS_MAX];
    uint32_t n_eos;
    int32_t bos; /* -1: none */
};

static inline bool model_layer_is_sparse(const struct model_config *c, uint32_t i)
{
    return (c->moe.sparse[i / 8] >> (i % 8) & 1) != 0;
}
static inline bool model_is_latent(const struct model_config *c) { return c->mla.kv_lora > 0; }

/* Defaults for requests, from generation_config.json; NaN / -1 where the file says nothing. */
struct model_generation {
    double temperature, top_p, min_p, repetition_penalty;
    int64_t top_k;
};

/* One step's work. */
struct model_batch {
    int32_t n_rows;
    const int32_t *ids;          /* [n_rows] token of each row; below 0 as in kernel_step, of
                                  * model_submit alone */
    const int32_t *pos;          /* [n_rows] its position */
    const struct attn_seq *seqs; /* [n_seqs] which rows belong to which sequence */
    int32_t n_seqs;
    const int32_t *logit_rows; /* [n_logits] rows whose logits are wanted, ascending */
    int32_t n_logits;
    float *logits; /* [n_logits, n_vocab], out */
    /* model_submit alone: how the tokens are chosen where the device does it, and where the results
     * go (kernel_step). */
    const struct sample_request *sample_requests; /* [n_logits]; NULL: logits are wanted */
    int parity;
    void *kv;              /* pool memory, layout model_kv_layout */
    uint32_t n_blocks;     /* of the pool */
    uint32_t block_tokens; /* tokens per block of the pool */
    /* Called on this thread after each layer's K and V of all rows are in the pool, or will be when
     * the device has done the work it was given so far (device_record_event says when); may be
     * NULL. A recorded step calls it for no layer. */
    void (*on_layer)(void *arg, uint32_t layer);
    void *on_layer_arg;
    bool eager; /* it must be called: the step is not a recorded one */
};

struct model_options {
    const char *path;                /* folder or .gguf file */
    uint32_t max_rows;               /* rows per step, sizes the activation buffers */
    uint32_t max_logits;             /* of them such whose logits are wanted; 0: max_rows */
    uint32_t max_model_len;          /* 0: default_len, or what the model has if that is less */
    uint32_t default_len;            /* 0: all that the model has */
    bool dummy;                      /* weights are made up: `path` is a folder of which
                                      * config.json is read and no weights (--load-format dummy) */
    enum quantize quantize;          /* of the plain matrices of attention, feed-forward blocks and
                                      * experts */
    const char *weight_cache_folder; /* where packed copies of weights are kept
                                      * (weight_cache.h); NULL: none are */
    struct kernel_ctx *kernels;      /* borrowed until model_free */
    /* Progress in 0..1 while weights are packed; may be NULL. */
    void (*progress)(void *arg, double done);
    void *progress_arg;
};

struct model_ops;
struct decoder;

struct model {
    const struct model_ops *ops;
    struct model_config config;
    struct model_generation generation;
    struct kernel_ctx *kernels;
    struct weights *weights; /* open files and name → tensor (weights.h); closed after
                              * bind */
    struct decoder *decoder;
    uint64_t fingerprint;
    uint32_t max_rows, max_logits, max_len;
    enum quantize quantize;
    bool two_attention_paths; /* attention of prompt tokens and of generated
                               * tokens rounds differently
                               * (attn_seq.is_decode) */
    /* packed weights; activations of a step; angles */
    size_t weight_bytes, buffer_bytes, rope_bytes;
    bool weights_mapped; /* from a copy on disk: the kernel counts their memory
                          * among what is available */
};

enum status model_load(const struct model_options *o, struct model **out,
                       struct err *err) MUST_CHECK;
/* Would model_load find everything and have the memory, as far as files' headers tell? The weights'
 * data is not read. Errors are model_load's. */
enum status model_check(const struct model_options *o, struct err *err) MUST_CHECK;
void model_free(struct model *m);
/* The layout of this model's KV for blocks of block_tokens; n_blocks as given. */
void model_kv_layout(const struct model *m, uint32_t block_tokens, uint32_t n_blocks,
                     struct kv_layout *out);
/* The same from a configuration alone, before anything is loaded; the fingerprint stays 0. */
void model_config_kv_layout(const struct model_config *c, enum dtype kv, uint32_t block_tokens,
                            uint32_t n_blocks, struct kv_layout *out);
/* Submits a step. True: the device chooses its tokens, and model_fetch waits for them; steps that
 * are submitted meanwhile run after it. At most two steps may be sampled and not fetched, of
 * different parity. False: the step is complete, logits and KV are there. Always false without
 * sample_requests. */
bool model_submit(struct model *m, const struct model_batch *b);
void model_fetch(struct model *m, int parity, struct token_logprobs *out, uint32_t n);

/* What the engine's steps will be like, once it has its pool. */
struct model_prepare_args {
    uint32_t max_seqs, block_tokens, n_blocks;
    void *kv;
    bool capture_graphs; /* launches of the usual steps are recorded, where the kernels can */
};
/* Makes room for all steps and records those that can be; before the first. Kernels that compute as
 * they are called need neither. ERR_NOMEM. */
enum status model_prepare(struct model *m, const struct model_prepare_args *s,
                          struct err *err) MUST_CHECK;

#endif
