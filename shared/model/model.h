/* model.h - an architecture: one ops table, one row per family (llama here; others follow).
 *
 * model_load reads a folder (config.json, *.safetensors, tokenizer.json ...) or a GGUF file, finds the row by architecture
 * name, binds and packs the weights (names, shapes and types are checked; every fault names the tensor or the member) and
 * returns a model that can run forward passes. Anything in a configuration that is not understood and changes the result
 * is refused by name. A model knows no requests and no network.
 * Adding a family: write shared/model/<family>.c with one `struct model_ops`, add it to MODEL_ROWS in model.c.
 * Thread: load on any; forward on the engine thread. */
#ifndef BATON_MODEL_MODEL_H
#define BATON_MODEL_MODEL_H

#include "kernels/kernels.h"
#include "shared/kv/kv_layout.h"

enum { MODEL_EOS_MAX = 16 };

/* Common to all families, filled from config.json or GGUF metadata. */
struct model_config {
    char     arch[64];             /* as the file spells it */
    uint32_t n_layers, hidden, n_heads, n_kv_heads, head_dim, intermediate, n_vocab, max_position;
    float    rms_eps;
    double   rope_theta;
    struct {
        enum { ROPE_PLAIN, ROPE_LINEAR, ROPE_LLAMA3 } kind;
        double factor, low_freq_factor, high_freq_factor, original_max;
    } rope;
    bool     rope_interleaved;     /* pairs (2i, 2i+1): GGUF llama files */
    bool     tied;                 /* the head is the embedding */
    bool     attention_bias, mlp_bias;
    int32_t  eos[MODEL_EOS_MAX];
    uint32_t n_eos;
    int32_t  bos;                  /* -1: none */
};

/* Defaults for requests, from generation_config.json; NaN / -1 where the file says nothing. */
struct model_generation {
    double  temperature, top_p, min_p, repetition_penalty;
    int64_t top_k;
};

/* One step's work. */
struct model_batch {
    int32_t                n_rows;
    const int32_t         *ids;       /* [n_rows] token of each row */
    const int32_t         *pos;       /* [n_rows] its position */
    const struct attn_seq *seqs;      /* [n_seqs] which rows belong to which sequence */
    int32_t                n_seqs;
    const int32_t         *logit_rows;/* [n_logits] rows whose logits are wanted, ascending */
    int32_t                n_logits;
    float                 *logits;    /* [n_logits, n_vocab], out */
    void                  *kv;        /* pool memory, layout model_kv_layout */
    uint32_t               n_blocks;  /* of the pool */
    uint32_t               block_tokens; /* tokens per block of the pool */
    /* Called on this thread after each layer's K and V of all rows are in the pool; may be NULL. */
    void (*on_layer)(void *arg, uint32_t layer);
    void                  *on_layer_arg;
};

struct model;

struct model_ops {
    const char        *name;
    const char *const *archs; /* config.json "architectures" values and GGUF general.architecture values, NULL-ended */
    enum status (*bind)(struct model *m, struct err *err);                   /* weights → m->impl */
    void        (*forward)(struct model *m, const struct model_batch *b);
    void        (*release)(struct model *m);                                 /* frees m->impl */
};

struct model_options {
    const char        *path;          /* folder or .gguf file */
    uint32_t           max_rows;      /* rows per step, sizes the activation buffers */
    uint32_t           max_model_len; /* 0: the model's own limit */
    struct kernel_ctx *kernels;       /* borrowed until model_free */
    /* Progress in 0..1 while weights are packed; may be NULL. */
    void (*progress)(void *arg, double done);
    void              *progress_arg;
};

struct model {
    const struct model_ops *ops;
    struct model_config     config;
    struct model_generation generation;
    struct kernel_ctx      *kernels;
    struct weights         *weights;   /* open files and name → tensor (weights.h); closed after bind */
    void                   *impl;      /* the row's own data */
    uint64_t                fingerprint;
    uint32_t                max_rows, max_len;
    size_t                  weight_bytes;
};

enum status model_load(const struct model_options *o, struct model **out, struct err *err) MUST_CHECK;
void        model_free(struct model *m);
/* The layout of this model's KV for blocks of block_tokens; n_blocks as given. */
void        model_kv_layout(const struct model *m, uint32_t block_tokens, uint32_t n_blocks, struct kv_layout *out);
void        model_forward(struct model *m, const struct model_batch *b);

#endif
