/* model.h - a language model: its configuration, its weights, and a step over a batch of rows.
 *
 * model_load reads a folder (config.json, *.safetensors, tokenizer.json ...) or a GGUF file, finds
 * the family of the architecture (model_registry.h), checks names, shapes and types of all weights,
 * adds up the memory that the model needs, and only then packs. Every error names the tensor or the
 * member. A member of a configuration that is not understood and changes the result is refused. A
 * model knows no requests and no network. With dummy weights, config.json is enough.
 *
 * All families are one pre-norm decoder (decoder.h), whose layers have an attention (attention.h)
 * and an FFN (ffn.h). A family says what its configuration means and how its files name tensors.
 * CONTRIBUTING.md says how to add one.
 * Thread: any for loading, the engine thread for steps. */
#ifndef BATON_MODEL_MODEL_H
#define BATON_MODEL_MODEL_H

#include "kernels/backend.h"
#include "kernels/ep/ep.h"
#include "shared/kv/kv_layout.h"
#include "shared/model/expert_rows.h"
#include "shared/model/experts.h"
#include "shared/model/share.h"

enum { MODEL_EOS_MAX = 16, MODEL_LAYERS_MAX = 4096 };
/* Rows of a pass of the draft layer; its caller cuts a longer one, which bounds the buffers. */
enum { MODEL_DRAFT_ROWS_MAX = 1024, MODEL_DRAFT_PASSES_MAX = 8 };

/* RoPE: angle(position, i) = position * inv_freq[i]; the kinds differ in inv_freq (rope.h). */
struct rope_config {
    enum { ROPE_PLAIN, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN } kind;
    double factor, original_max;              /* of all kinds but PLAIN */
    double low_freq_factor, high_freq_factor; /* LLAMA3 */
    double beta_fast, beta_slow;              /* YARN */
    bool no_truncate;      /* YARN: the ramp may begin and end between two frequencies */
    double cos_sin_factor; /* of cos and sin; 0: none */
    double score_factor;   /* of attention scores; 0: none */
};

/* Latent attention (DeepSeek): keys and values of all heads are made from one vector of kv_lora +
 * rope elements per token. */
struct mla_config {
    uint32_t q_lora;  /* 0: queries are projected from the hidden state directly */
    uint32_t kv_lora; /* 0: no latent attention, the other members are unused */
    uint32_t nope, rope, v;
};

struct moe_config {
    uint32_t n_experts;             /* 0: every layer is dense, the others are unused */
    uint32_t n_used;                /* experts per token */
    uint32_t intermediate;          /* of one expert */
    uint32_t shared_intermediate;   /* of all shared experts together; 0: none */
    uint32_t n_groups, topk_groups; /* struct route_args says what these mean */
    int score, group_score, norm;
    float norm_min, scale;
    bool selection_bias;
    uint8_t sparse[MODEL_LAYERS_MAX / 8]; /* bit i: layer i has experts; bit n_layers: the draft
                                           * layer */
};

/* Common to all families, filled from config.json or GGUF metadata. */
struct model_config {
    char arch[64]; /* as the file spells it */
    uint32_t n_layers, hidden, n_heads, n_kv_heads, head_dim, intermediate, n_vocab, max_position;
    uint32_t n_next;         /* draft layers that the files have (multi-token prediction) */
    uint32_t n_draft_layers; /* that are loaded, behind the n_layers: 0 or 1 */
    uint32_t window; /* positions that attention sees; 0: all. Longer contexts are not served */
    float rms_eps;
    double rope_theta;
    struct rope_config rope;
    bool rope_interleaved;         /* pairs (2i, 2i+1) instead of (i, i + d/2) */
    bool tied;                     /* the head is the embedding */
    bool attention_bias, mlp_bias; /* q, k, v and o; gate, up and down */
    bool qkv_bias;                 /* q, k and v alone */
    bool qk_norm;                  /* queries and keys are normalised per head, before RoPE */
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
/* The draft layer included. */
static inline uint32_t model_n_all_layers(const struct model_config *c)
{
    return c->n_layers + c->n_draft_layers;
}
/* Layers with experts among the first i. */
static inline uint32_t model_n_sparse(const struct model_config *c, uint32_t i)
{
    uint32_t n = 0;
    while (i > 0) n += model_layer_is_sparse(c, --i);
    return n;
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
    const int32_t *ids;          /* [n_rows] tokens; below 0: kept ones (kernel_step) */
    const int32_t *pos;          /* [n_rows] their positions */
    const struct attn_seq *seqs; /* [n_seqs] the rows of each sequence */
    int32_t n_seqs;
    const int32_t *logit_rows; /* [n_logits] rows whose logits are wanted, ascending */
    int32_t n_logits;
    float *logits; /* [n_logits, n_vocab], out; NULL on a GPU: nobody looks */
    /* For sampling on the device (kernel_step). NULL: the caller wants the logits. */
    const struct sample_request *sample_requests; /* [n_logits] */
    int parity;                                   /* where the sampled tokens are kept */
    /* What is only known when the step before has chosen its tokens (kernel_step): ids, pos and
     * seqs are as if none of its drafts were right. */
    const struct kernel_move *moves; /* [n_moves] */
    int32_t n_moves;
    void *kv;              /* pool memory, layout model_kv_layout */
    uint32_t n_blocks;     /* of the pool */
    uint32_t block_tokens; /* tokens per block of the pool */
    /* Called on this thread once the write of a layer's K and V of all rows is queued; an event
     * recorded now (device_record_event) completes after it. A step that replays a captured graph
     * does not call it. May be NULL. */
    void (*on_layer)(void *arg, uint32_t layer);
    void *on_layer_arg;
    bool eager; /* launch every kernel: do not replay a captured graph, call on_layer */
    /* With model.ep: the most rows that one of its ranks routes in this step, the same number on
     * all of them (model_routed_rows). A rank without rows takes part with n_rows 0. */
    uint32_t group_rows;
};

/* Rows whose hidden states a pass of the draft layer begins with, one after another. */
struct model_hidden_rows {
    uint32_t first, n;
    const float *host; /* [n, H] instead: of model_get_hidden, from another time or node */
};

/* A pass of the draft layer (multi-token prediction), which predicts the token after the next one:
 *
 *     x       = W [norm(E[next token]), norm(hidden)]     [R, 2H] -> [R, H]
 *     x      += attention(norm(x)), x += ffn(norm(x))     the layer behind the model's last one
 *     logits  = Whead norm(x)
 *
 * A hidden state is what the model's head takes of its row of the last step; chained: what this
 * layer has made of its row of the last pass. The layer's KV is the pool's last layer, at the
 * positions of the rows. */
struct model_draft {
    struct model_batch batch; /* its ids are the next tokens, at most model.max_draft_rows */
    const struct model_hidden_rows *hidden; /* [n_hidden] all rows, in order */
    uint32_t n_hidden;
    bool chained;
    /* Sampled on the device, its tokens are kept among the first n_kept of the i_pass-th pass
     * behind the step, 1 to MODEL_DRAFT_PASSES_MAX (model_kept_of_pass). */
    uint32_t i_pass, n_kept;
};

/* How the ranks of a tensor-parallel node exchange what they computed. Every rank makes the same
 * calls in the same order.
 * columns: y [n_rows, first[tp_size]], rows y_stride floats apart, gets the columns
 * [first[r], first[r + 1]) of every rank r; this rank's are `mine`, rows mine_stride floats apart,
 * which may be their place in y. A rank can have none. Called on the engine thread, which it may
 * block. After an error no more calls are made in this step (model.gather_fault). On a GPU y and
 * `mine` are its memory, calls enqueue work on its stream, and `ep` is the object that does it, by
 * which faults are found; if its calls can be captured, so can steps. NULL on the CPU. */
struct model_gather {
    void *arg;
    struct ep *ep;
    enum status (*columns)(void *arg, float *y, size_t y_stride, const float *mine,
                           size_t mine_stride, size_t n_rows, const size_t *first, struct err *err);
};

struct model_options {
    const char *path;                  /* folder or .gguf file */
    uint32_t max_rows;                 /* rows per step, sizes the activation buffers */
    uint32_t max_logits;               /* rows per step whose logits are wanted; 0: max_rows */
    uint32_t max_model_len;            /* 0: the lesser of default_len and the model's length */
    uint32_t default_len;              /* 0: the model's length */
    bool dummy;                        /* --load-format dummy: `path` is a folder, only its
                                      * config.json is read */
    bool draft_layer;                  /* load the draft layer; ERR_CONFIG when there is none */
    const char *draft_path;            /* where its tensors are; NULL: in the model's files */
    enum quantize quantize;            /* for unquantised matrices of attention and FFN */
    const char *weight_cache_folder;   /* weight_cache.h; NULL: no cache */
    struct kernel_ctx *kernels;        /* borrowed until model_free */
    const struct model_share *share;   /* what this rank holds; NULL: the whole */
    const struct model_gather *gather; /* a share's steps need it; NULL: model_set_gather */
    /* Progress in 0..1 while weights are packed; false stops the load. May be NULL. */
    bool (*progress)(void *arg, double done);
    void *progress_arg;
};

struct model_ops;
struct decoder;

struct model {
    const struct model_ops *ops;
    struct model_config config;
    struct model_generation generation;
    struct kernel_ctx *kernels;
    struct model_share share;   /* n_experts is a number */
    struct model_gather gather; /* columns NULL: none */
    struct ep *ep;              /* model_set_ep; NULL: all experts are here */
    /* Why an exchange of rows through `ep`, and why a gather, failed in the last step that was
     * submitted or fetched; code OK: none did. After a fetch it may have been in a later step than
     * the one that was fetched. After a failure the step's logits and KV mean nothing, and on_layer
     * was not called for the layers from there on. After an exchange that failed the step's other
     * gathers were made all the same, so that the node's ranks stay in line. */
    struct err exchange_fault, gather_fault;
    uint32_t n_step_rows; /* of the last step, with the padding of a captured one */
    /* How many steps are captured. Ranks of a tensor-parallel node whose models have experts must
     * have the same ones, or launch all steps kernel by kernel (model_batch.eager): the rows that a
     * node divides are those of the captured step. */
    uint32_t n_captured;
    struct weights *weights;       /* NULL once they are packed, unless experts may be taken */
    struct weights *draft_weights; /* of model_options.draft_path; NULL: those of `weights` */
    struct decoder *decoder;
    struct expert_store *expert_store;
    struct expert_rows *expert_rows;     /* NULL: no sparse layers */
    const struct model_experts *experts; /* of the next steps; NULL: some are missing, a step needs
                                          * `ep` */
    uint64_t fingerprint;                /* of the whole model, whatever the share */
    char precision[64]; /* what the fingerprint says of numbers, for people: "q4_1 on cpu" */
    uint32_t max_rows, max_logits, max_len;
    uint32_t max_draft_rows; /* of a pass of the draft layer: max_rows, up to MODEL_DRAFT_ROWS_MAX;
                              * 0: none was loaded */
    enum quantize quantize;
    /* Attention rounds differently for prompt tokens and decode tokens (attn_seq.is_decode). */
    bool two_attention_paths;
    size_t source_bytes; /* of the files' matrices that this rank reads */
    size_t weight_bytes; /* packed */
    size_t buffer_bytes; /* activations of a step */
    size_t rope_bytes;   /* the table of cos and sin */
    size_t group_bytes;  /* GPU memory of ep objects, which are made later: of the node, of this
                          * group, and of the next while both are there */
    size_t mapped_bytes; /* of the weights: mapped from the weight cache; Linux counts this memory
                          * as available */
};

/* Do rows travel to other ranks as less than they are multiplied as here? */
static inline bool model_rows_are_narrow(const struct model *m)
{
    return m->share.ep_size > 1 && m->config.moe.n_experts > 0 && m->share.ep_rows != DTYPE_F32;
}

enum status model_load(const struct model_options *o, struct model **out,
                       struct err *err) MUST_CHECK;
/* Does what model_load does before it packs: checks files' headers and the memory, reads no
 * weights. Same errors. */
enum status model_check(const struct model_options *o, struct err *err) MUST_CHECK;
void model_free(struct model *m);
/* The layout of a pool of n_blocks blocks of block_tokens tokens for this model. */
void model_kv_layout(const struct model *m, uint32_t block_tokens, uint32_t n_blocks,
                     struct kv_layout *out);
/* The same from a configuration alone, before anything is loaded; the fingerprint stays 0. With
 * fewer KV heads than ranks each rank's head counts as a head of its own: such a layout agrees only
 * with those of the same tensor-parallel size (kv_layout_same_model). `share` NULL: the whole. */
void model_config_kv_layout(const struct model_config *c, const struct model_share *share,
                            enum dtype kv, uint32_t block_tokens, uint32_t n_blocks,
                            struct kv_layout *out);
/* Rows of a step of n_rows that this rank routes to experts: the ranks of a tensor-parallel node
 * divide them. At most model_routed_rows_max on any of them. */
struct share_part model_routed_rows(const struct model *m, size_t n_rows);
static inline size_t model_routed_rows_max(const struct model *m, size_t n_rows)
{
    return (n_rows + m->share.tp_size - 1) / m->share.tp_size;
}
/* The step's results are gathered by `g` from now on; NULL: by nothing, no step follows. On a GPU
 * steps are captured anew. Engine thread, between steps. */
void model_set_gather(struct model *m, const struct model_gather *g);
/* The most bytes that a rank gives in one gather: at least as many as they are, whatever the
 * rank. */
size_t model_gather_bytes(const struct model *m);
/* What the model needs of an ep object: mode, max_rows, hidden, n_used, max_slots, load and
 * placement.n_logical; the other members are left as they are. */
void model_ep_needs(const struct model *m, struct ep_config *c);
/* Rows of the next steps travel to experts of other ranks through `ep`, whose placement gives this
 * rank the experts of the set x; NULL: those of the share, which can be used until a set was
 * dropped. Borrowed; replaces both of the call before; NULL, NULL: no other ranks. On a GPU steps
 * are captured anew, if the object's calls can be; what was submitted has to end by itself. Engine
 * thread, between steps. */
void model_set_ep(struct model *m, struct ep *ep, struct model_experts *x);
/* Submits a step. True: the device chooses its tokens, and model_fetch waits for them; steps that
 * are submitted meanwhile run after it. At most two steps may be sampled and not fetched, of
 * different parity. False: the step is complete, logits and KV are there. Always false without
 * sample_requests. */
bool model_submit(struct model *m, const struct model_batch *b);
void model_fetch(struct model *m, int parity, struct token_logprobs *out, uint32_t n);

/* As model_submit, of a pass of the draft layer. After a step of those rows, and before the next
 * one. True: the device chooses its tokens; passes that are submitted meanwhile run after it. */
bool model_submit_draft(struct model *m, const struct model_draft *d);
/* The index among all kept tokens (kernel_step) of the k-th of the i_pass-th pass: as an id of what
 * follows it is -1 - that. */
static inline uint32_t model_kept_of_pass(const struct model *m, uint32_t i_pass, uint32_t k)
{
    return i_pass * m->max_logits + k;
}
/* The number (kernel_move) of the drafts behind row `logit` of the logits of the last step of that
 * parity which were right. */
static inline uint32_t model_number_right(const struct model *m, int parity, uint32_t logit)
{
    return 1 + (uint32_t)parity * m->max_logits + logit;
}
/* Waits for all sampled passes behind the step of that parity, and for what they exchanged. Returns
 * the tokens that they chose, by their index among all kept ones; valid until the next pass of that
 * parity. */
const int32_t *model_fetch_drafts(struct model *m, int parity);
/* Copies the hidden state [H] of a row of the last step, for a pass of this model's draft layer,
 * here or elsewhere. */
void model_get_hidden(struct model *m, uint32_t row, float *out);

/* The engine's limits and its KV pool. */
struct model_prepare_args {
    uint32_t max_seqs, block_tokens, n_blocks;
    void *kv;
    bool capture_graphs; /* capture graphs of the usual steps, if the backend can */
};
/* Allocates for all steps within the limits and captures graphs, before the first step.
 * ERR_NOMEM. */
enum status model_prepare(struct model *m, const struct model_prepare_args *s,
                          struct err *err) MUST_CHECK;

#endif
