/* kernels.h - arithmetic on tensors: one ops table, one row per instruction set (ref, avx2, avx512,
 * avx512-vnni, amx), and cuda.
 *
 * A context computes on one device, whose memory everything lies in that the slots read and write:
 * activations, weights, norms, biases, the angles of rope, the KV pool (ctx->device; device.h moves
 * bytes there and back). The processor's rows compute in place; a GPU's only put work in a queue,
 * in order, and what the host reads of it is fetched with device_download, which waits. What a
 * step's rows are - ids, positions, sequences - is made on the host and handed over once per step,
 * by `upload_step`.
 *
 * The rule every slot obeys: a row of the output depends only on the same row of the input and on
 * the weights, never on the other rows, on n_rows or on the number of threads (bit for bit).
 * Reductions run in a fixed order. A card's products of bf16 obey it in contexts that are
 * `deterministic`; in others their last bits may follow n_rows.
 *
 * Two arithmetics (enum activations), chosen when the context is made and part of what peers
 * compare:
 *   F32    everything in f32: the exact path. y[n] is one chain of fused multiply-adds over k
 *          ascending, from +0, then + bias[n]; the weight of a quantised element is the f32 that
 *          its format means. The processor's rows all give the same bits; a card shares k among
 *          lanes, and is held to a bound.
 *   FAST   matrices of integer types take inputs rounded to two int8 terms
 *          (kernels/cpu/matmul/act_quant.h says how): products and sums inside a group of k's that
 *          share a scale are exact integers, groups are chained in f32; the processor's rows all
 *          give the same bits here too. Matrices of bf16 and f8 take inputs rounded to bf16 on rows
 *          whose processor multiplies bf16, f32 inputs on others. The KV cache is bf16 where
 *          nothing else is asked for, and then on those rows the queries are rounded to bf16 too:
 *          scores are bf16 products (but in MLA's naive form, whose keys are expanded in f32).
 * Attention takes keys in tiles of ATTN_TILE positions and segments of ATTN_SEGMENT, both counted
 * from position 0: online softmax from tile to tile, segments merged in ascending order, so that
 * the number of threads and the size of KV blocks change nothing.
 *
 * `ref` is the definition, in plain C; each other row states the bound within which it equals ref
 * and is held to it by tests/conformance/test_kernels.c.
 *
 * Activations are handed over as f32, but for ready rows (struct matmul_args). Shapes are
 * row-major, the last index contiguous. Pointers are borrowed for the call, outputs do not overlap
 * inputs except where said. Weights are packed once by weight_pack. Thread: engine (the processor's
 * rows fan out over ctx->pool themselves and return when done). No slot of a step allocates or
 * fails: shapes are checked when a model is bound, which also calls kernel_ctx_reserve. */
#ifndef BATON_KERNELS_KERNELS_H
#define BATON_KERNELS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/device.h"
#include "kernels/dtype.h"
#include "kernels/dummy_weights.h"
#include "kernels/host/compute_pool.h"
#include "shared/base/sampling.h"

enum {
    KERNEL_BLOCK_TOKENS_MAX = 256,
    KERNEL_HEAD_DIM_MAX = 256,
    KERNEL_LATENT_MAX = 1024 /* kv_lora + rope of MLA */
};
enum { ATTN_TILE = 64, ATTN_SEGMENT = 256 };
enum { KERNEL_EXPERTS_MAX = 1024, KERNEL_EXPERTS_USED_MAX = 64 };
enum { F8_BLOCK = 128 }; /* rows and columns that share a scale of F8_E4M3 weights */

/* Raised with every change of the values that some row computes: peers of other revisions would not
 * agree bit for bit, and are refused. */
enum { KERNEL_REVISION = 4 };

enum activations { ACTIVATIONS_F32, ACTIVATIONS_FAST };

/* What becomes of a bf16, f16 or f32 matrix while it is packed (facts: FastDeploy's --quantization;
 * kernels/quantize.h has the rules). */
enum quantize { QUANTIZE_NONE, QUANTIZE_WINT8, QUANTIZE_WINT4, QUANTIZE_BLOCK_FP8 };

/* A matrix as a checkpoint stores it, mapped from the file: [n_out, n_in] with n_in contiguous, or
 * transposed (plain types only): [n_in, n_out] with n_out contiguous. No alignment is promised. */
struct weight_src {
    enum dtype dtype;
    const void *data;
    size_t n_out, n_in;
    size_t row_bytes; /* from one stored row to the next; 0: they lie one after the other */
    bool transposed;
    const float *scales;        /* F8_E4M3: [ceil(n_out / 128)][ceil(n_in / 128)], multiplied;
                                 * otherwise NULL */
    struct dummy_weights dummy; /* of a unit above 0: there is no data, elements (BF16 or F32) are
                                 * made up by their place among stored ones */
};

/* A matrix packed for a row of this table. Owned by whoever called weight_pack; freed with
 * weight_release. */
struct weight {
    int layout;    /* enum weight_layout of kernels/cpu/weights/weight_layout.h */
    bool paired;   /* two matrices of n_out / 2 rows, panel by panel in turn: gate and up
                    * of SwiGLU */
    bool borrowed; /* data belongs to somebody else's allocation */
    size_t n_out, n_in;
    void *data; /* in the device's memory */
    size_t bytes;
};

enum weight_join {
    JOIN_STACKED, /* outputs of the parts side by side, in order */
    JOIN_PAIRED   /* two parts of equal shape: MATMUL_SILU_MUL can follow */
};

struct weight_pack_args {
    const struct weight_src *parts; /* of equal n_in and dtype; when stacked, each n_out but the
                                     * last is a multiple of 16 */
    size_t n_parts;
    enum weight_join join;
    enum quantize quantize;
    /* Device memory to pack into, as many bytes as weight_plan says, or NULL: new memory. The
     * processor's rows take pages, which become the weight's, also of a call that fails; to others
     * it stays the caller's. */
    void *to;
};

/* Of the time that packing a model's weights took. */
struct weight_times {
    uint64_t copy_wait_ns; /* copies to the device were waited for */
};

struct kernel_ctx;

enum matmul_epilogue {
    MATMUL_STORE,   /* y  = w x + bias */
    MATMUL_ADD,     /* y += w x + bias */
    MATMUL_SILU_MUL /* y  = silu(gate) * up of a paired matrix; y [n_rows, n_out / 2] */
};

/* a ready row of n elements has room in n floats, rounded up to a multiple of this */
enum { MATMUL_PREQUANTIZED_ALIGN = 32 };

/* One product; rows of zero length and jobs of zero rows are allowed and do nothing.
 *
 * Ready rows: between two products that follow each other (SwiGLU, then down) rows need not be f32.
 * With `quantize_for` the first leaves them as the second takes its inputs, rounded where that
 * rounds, one after the other (y_stride means nothing); the second says `x_prequantized`. Only the
 * kernels know what is in them: both calls have the same context, and the second has quantize_for's
 * matrix. The values are those of the way over f32. */
struct matmul_args {
    const struct weight *w;
    const float *bias; /* [n_out] or NULL; of a paired matrix gate's, then up's */
    const float *x;    /* rows of n_in, x_stride floats apart; ready rows lie close and
                        * have no stride */
    size_t x_stride;
    const int32_t *x_rows; /* [n_rows]: which row of x; NULL: 0, 1, 2 .. Not of ready
                            * rows */
    const float *norm;     /* [n_in]: rows are rms_norm of those of x, by these weights and
                            * norm_eps; NULL: as they are. Not of ready rows */
    float norm_eps;
    bool x_prequantized;
    size_t n_rows;
    float *y; /* [n_rows, ..], y_stride floats apart */
    size_t y_stride;
    const struct weight *quantize_for; /* MATMUL_SILU_MUL: leave y ready for this one, whose n_in
                                        * is n_out / 2; NULL: y is f32 */
    enum matmul_epilogue epilogue;
};

/* Query rows of one sequence in a step, as the host writes it. */
struct attn_seq {
    int32_t q_begin; /* first row in q and out */
    int32_t n_q;     /* rows; row i has position pos_begin + i and sees keys 0 ..
                      * pos_begin + i */
    int32_t pos_begin;
    const int32_t *block_table; /* physical KV block of each logical block, enough for pos_begin +
                                 * n_q tokens */
    bool is_decode;             /* rows of answer tokens: where an architecture has two forms of
                                 * attention, the decode form is theirs */
};

/* Sequences that a call of kv_append or attention works on. Their rows lie one after the other in q
 * and out. */
struct attn_list {
    const struct attn_seq *seqs; /* [n_seqs], the host's */
    int32_t n_seqs;
    const void *uploaded; /* what `upload_step` made of them; the row's own */
};

/* How the token after a row is to be chosen, or which token is to be scored there.
 * shared/engine/sampler.h has the rules; these are its inputs. */
struct sample_request {
    const struct sampling_params *params;
    const int32_t *tokens; /* prompt, then output: [n_tokens] that the host
                            * knows */
    uint32_t n_tokens, n_prompt;
    uint32_t n_out;       /* output tokens before the one asked for, those
                           * included that only the device knows yet */
    int32_t future_token; /* which is one at most: -1 - i as in
                           * kernel_step's ids; 0: there is none */
    const int32_t *eos;   /* the model's end tokens */
    uint32_t n_eos;
    int32_t score; /* the token whose logprobs are asked for; -1: choose
                    * one */
};

/* What a step's rows are. `upload_step` makes pointers the row's own, and may raise the counts:
 * rows are then filled up to what launches were recorded for. What is computed for those that were
 * added means nothing and reaches neither the KV pool nor the results. */
struct kernel_step {
    int32_t n_rows, n_logits, n_lists;
    const int32_t *ids;        /* [n_rows]; -1 - i: the token that the last step which sampled
                                * chose for its i-th row of logits */
    const int32_t *pos;        /* [n_rows] */
    const int32_t *logit_rows; /* [n_logits] */
    struct attn_list *lists;   /* [n_lists] */
    int32_t block_tokens;      /* of the KV pool that their block tables name */
    const struct sample_request *sample_requests; /* [n_logits]: choose tokens on the device where
                                                   * it can; NULL: logits are fetched */
    int parity;          /* 0 or 1: where the results of sampling go; the last ones of
                          * that parity must have been fetched */
    bool eager;          /* something happens between the layers: no recorded launches */
    bool sampled;        /* out: the device chooses the tokens: call sample after submit,
                          * and fetch later */
    bool graph_launched; /* out: the whole step is in the queue: no slot but submit
                          * is called */
};

/* What all steps stay within, so that nothing is allocated once they run. */
struct kernel_limits {
    uint32_t max_rows, max_logits, max_len, n_vocab, block_tokens;
    uint32_t max_seqs;       /* sequences in a step */
    uint32_t n_lists;        /* of a step that may be recorded */
    uint32_t max_lists;      /* of any */
    uint32_t n_heads, v_dim; /* of attention's results */
    bool latent;
    uint32_t n_kv_heads, head_dim; /* of the pool */
    uint32_t max_graph_rows;       /* rows of a step whose launches may be recorded; 0: none are */
};

/* The KV pool of one layer. Heads: [block][kv_head][k|v][block_tokens][head_dim]. Latent (MLA):
 * [block][block_tokens][head_dim], one head, whose first v_dim elements are the values too. Types
 * with scales (kv_rows.h; pools of heads alone) have behind the values of each block f32 scales
 * [kv_head][k|v][block_tokens], which count to the block: kv_layout.h's piece. */
struct kv_layer {
    void *data;
    enum dtype dtype; /* one of kv_rows.h's */
    bool latent;
    int32_t n_heads;  /* 1 when latent */
    int32_t head_dim; /* of a key: kv_lora + rope when latent */
    int32_t block_tokens;
};

/* Heads that are rotated in place: x [n_rows, n_heads, head_dim], rows x_stride floats apart. */
struct rope_heads {
    float *x;
    size_t x_stride, n_heads, head_dim;
    const float *norm; /* [head_dim]: a head is its rms_norm, by these weights, before it is rotated
                        * (Qwen3's q and k); NULL: as it is */
};

enum { ROPE_HEADS_MAX = 2 }; /* q and k */

/* Pairs are (i, i + rot_dim / 2), or (2i, 2i + 1) when interleaved. Dims from rot_dim on are not
 * rotated. */
struct rope_args {
    struct rope_heads heads[ROPE_HEADS_MAX];
    size_t n_heads; /* of `heads` */
    size_t n_rows, rot_dim;
    const float *cos_sin; /* [max_pos][rot_dim / 2][2] */
    const int32_t *pos;   /* [n_rows] */
    bool interleaved;
    float norm_eps;
};

struct kv_append_args {
    const float *k, *v; /* [n_rows, n_heads, head_dim]; v NULL when latent */
    struct kv_layer kv;
    struct attn_list on;
    const struct rope_args *rope; /* is done first, of the rows that are appended: queries, and k,
                                   * of pools of heads. NULL: nothing */
};

struct attn_args {
    const float *q; /* [n_rows, n_heads, head_dim] */
    float *out;     /* [n_rows, n_heads, v_dim] */
    struct kv_layer kv;
    struct attn_list on;
    int32_t n_heads, v_dim; /* v_dim: head_dim, or kv_lora when latent */
    float scale;
    /* Latent pools only: NULL for the absorbed form (q of kv_lora + rope elements, out of kv_lora).
     * Otherwise the naive form: keys and values of head h are k_up[h] c (nope elements, before the
     * cached rope part) and v_up[h] c of a position's latent c; q has nope + rope elements, out
     * v_dim = v_up->n_out. */
    const struct weight *k_up, *v_up; /* [n_heads]: [nope, kv_lora] and [v, kv_lora] */
};

/* Which experts a token goes to (models.md 1.4, 2.5, 3.1, 3.5 give each architecture's values). p =
 * softmax or sigmoid of the logits; selection by p + bias; among groups of n_experts / n_groups
 * consecutive experts the topk_groups best are kept; ties go to the lower index. Weights are p
 * (without bias), divided by max(sum, norm_min) or (sum + norm_min) when normalised, times
 * scale. */
struct route_args {
    const float *logits; /* [n_rows, n_experts] */
    const float *bias;   /* [n_experts] or NULL */
    size_t n_rows;
    int32_t n_experts, n_used, n_groups, topk_groups; /* n_groups 1: no groups */
    enum { ROUTE_SOFTMAX, ROUTE_SIGMOID } score;
    enum { GROUP_MAX, GROUP_TOP2_SUM } group_score;
    enum { NORM_NONE, NORM_MAX /* / max(sum, norm_min) */, NORM_SUM /* / (sum + norm_min) */ } norm;
    float norm_min, scale;
    int32_t *experts; /* [n_rows, n_used], in order of selection */
    float *weights;   /* [n_rows, n_used] */
    /* Those of the experts call that will follow with the same rows and says `sorted`: they may be
     * filled in at once. NULL: they are not. */
    int32_t *rows, *index, *begin;
};

/* y[i] = (add ? y[i] : 0) + sum over j ascending of weights[i][j] * rows[index[i][j]], a chain of
 * fused multiply-adds. */
struct combine_args {
    float *y;             /* [n_rows, n] */
    const float *rows;    /* [.., n] */
    const int32_t *index; /* [n_rows, n_used] */
    const float *weights; /* [n_rows, n_used] */
    size_t n_rows, n_used, n;
    bool add;
};

/* A SwiGLU that all rows of an experts call go through; gate_up NULL: none. */
struct shared_expert {
    const struct weight *gate_up, *down;
    const float *gate_up_bias, *down_bias; /* gate's, then up's; NULL: none */
    float *act;                            /* [n_rows, I], ready for down: to work in */
};

/* x[i] += Shared(h[i]); x[i] += sum over j ascending of weights[i][j] * Expert_experts[i][j](h[i]),
 * as combine adds it; each a SwiGLU, silu(gate h) * up h through down. Rows are sorted by expert:
 * slot s of that order holds one (row, choice), and every expert is one product over its slots. */
struct experts_args {
    const struct weight *gate_up, *down; /* [n_experts] paired [2 I, H], [H, I] */
    int32_t n_experts, n_used;
    size_t n_rows;
    const float *h;         /* [n_rows, H] */
    const int32_t *experts; /* [n_rows, n_used] */
    const float *weights;   /* [n_rows, n_used] */
    struct shared_expert shared;
    float *x; /* [n_rows, H] */
    /* To work in: */
    int32_t *rows, *index;    /* [n_rows n_used]: the row of a slot; the slot of (row,
                               * choice) */
    int32_t *begin;           /* [n_experts + 1]: slots of each expert */
    bool sorted;              /* the route call that made experts and weights had rows,
                               * index and begin: they may be filled in */
    float *act, *out;         /* [n_rows n_used, I], ready for down; [n_rows n_used, H];
                               * by slot */
    struct matmul_args *jobs; /* [n_experts + 1], the host's */
};

struct kernel_ops {
    const char *name; /* "ref", "avx2", "avx512", ..: --cpu-isa, logs, hello between peers */
    const char *weight_layouts; /* rows with equal ones pack the same source to the same
                                 * bytes */
    bool absorbed_only;      /* MLA's prompt tokens take the absorbed form too: attention is never
                              * called with k_up and v_up */
    bool (*available)(void); /* does this machine have what the row needs */

    /* kernel_ctx_create, kernel_ctx_free and kernel_ctx_reserve go here. */
    enum status (*create)(const struct kernel_ops *backend, enum activations activations,
                          int n_threads, struct kernel_ctx **out, struct err *err);
    void (*free)(struct kernel_ctx *c);
    enum status (*reserve)(struct kernel_ctx *c, size_t n_rows, size_t n_in);

    /* What weight_pack would make of the parts, before any packing and without looking at their
     * data: form, shape and bytes, a multiple of what the row's memory is handed out by; out->data
     * stays NULL. The reasons for which parts cannot be packed are here. */
    enum status (*weight_plan)(const struct kernel_ctx *c, const struct weight_pack_args *a,
                               struct weight *out, struct err *err);
    /* Copy and reorder the parts into the row's own form, in parallel on ctx->pool; quantises on
     * the way when asked to. `err` (may be NULL) says what is wrong with the parts, or how much
     * memory there was not. */
    enum status (*weight_pack)(struct kernel_ctx *c, const struct weight_pack_args *a,
                               struct weight *out, struct err *err);
    /* The weights of a model were packed: none is on its way any more, and memory that packing
     * alone needs is given back. Work that was put in queues by weight_pack may fail as late as
     * here. */
    enum status (*weights_finish)(struct kernel_ctx *c, struct weight_times *out, struct err *err);
    void (*weight_release)(struct kernel_ctx *c, struct weight *w);

    /* Hands a step over: pointers of `s` to ids, positions and rows become the row's own, and
     * `uploaded` of its lists is filled in; the sequences themselves stay where they are and are
     * needed until the step is over. Good until the next call. */
    void (*upload_step)(struct kernel_ctx *c, struct kernel_step *s);
    /* The next four are NULL in rows that compute as they are called.
     * Memory for all steps within the limits, before the first. ERR_NOMEM. */
    enum status (*prepare)(struct kernel_ctx *c, const struct kernel_limits *l, struct err *err);
    /* Begins the i-th recording: fills `s` in as upload_step does, then all slots of the step are
     * called, then submit. False: there are no more. */
    bool (*capture)(struct kernel_ctx *c, int32_t i, struct kernel_step *s);
    /* All slots of the step (or of the recording) have been called. */
    void (*submit)(struct kernel_ctx *c);
    /* Chooses the tokens of the submitted step's rows of logits, [n_logits, n_vocab]. */
    void (*sample)(struct kernel_ctx *c, const float *logits, size_t n_vocab);
    /* Waits for the step of that parity and hands over what was chosen for its n rows; logprobs
     * where they were asked for. */
    void (*fetch)(struct kernel_ctx *c, int parity, struct token_logprobs *out, size_t n);
    /* x[i] = row ids[i] of the matrix, as f32; x [n_rows, w->n_in]; ids as in kernel_step. */
    void (*embed)(struct kernel_ctx *c, float *x, const struct weight *w, const int32_t *ids,
                  size_t n_rows);
    /* Independent products in one go. Neighbouring jobs with the same x, x_stride, n_in, x_rows,
     * norm and n_rows share the rounding of x. */
    void (*matmul)(struct kernel_ctx *c, const struct matmul_args *jobs, size_t n_jobs);
    /* y[i] = weight * x[i] / sqrt(mean(x[i]^2) + eps); rows of n floats, strides in floats; y may
     * be x. */
    void (*rms_norm)(struct kernel_ctx *c, float *y, size_t y_stride, const float *x,
                     size_t x_stride, const float *weight, size_t n_rows, size_t n, float eps);
    /* x += y, both [n]. */
    void (*add)(struct kernel_ctx *c, float *x, const float *y, size_t n);
    /* Rows of n floats, strides in floats. */
    void (*copy_rows)(struct kernel_ctx *c, float *to, size_t to_stride, const float *from,
                      size_t from_stride, size_t n_rows, size_t n);
    void (*rope)(struct kernel_ctx *c, const struct rope_args *a);
    void (*kv_append)(struct kernel_ctx *c, const struct kv_append_args *a);
    void (*attention)(struct kernel_ctx *c, const struct attn_args *a);
    void (*route)(struct kernel_ctx *c, const struct route_args *a);
    void (*combine)(struct kernel_ctx *c, const struct combine_args *a);
    void (*experts)(struct kernel_ctx *c, const struct experts_args *a);
    /* The last three read the host's memory and are the processor's rows' alone: sampling has a
     * context of them (kernel_host). */
    /* lse[i] = log(sum_j exp(x[i][j])) of x [n_rows, n] with row stride x_stride, in a fixed
     * order. */
    void (*log_sum_exp)(struct kernel_ctx *c, float *lse, const float *x, size_t x_stride,
                        size_t n_rows, size_t n);
    /* Index of the largest of x [n], the first of equals; -1 when none is above -inf (NaN never
     * is). */
    int32_t (*argmax)(struct kernel_ctx *c, const float *x, size_t n);
    /* p[i] = exp((min(x[i], FLT_MAX) - max) * by) with the rows' own exp: the same bits everywhere;
     * 0 for NaN. p may be x. */
    void (*exp_terms)(struct kernel_ctx *c, float *p, const float *x, size_t n, float max,
                      float by);
};

struct kernel_ctx {
    const struct kernel_ops *ops;
    enum activations activations;
    bool deterministic;         /* set before use: a row's bits depend on neither the
                                 * other rows nor their number, where that costs speed
                                 * too */
    size_t sampling_edit_bytes; /* set before kernel_limits: bytes of changes to
                                 * logits that a step is sampled on the device
                                 * with; 0: as suits */
    enum dtype kv;              /* element type of KV pools; as suits the arithmetic, or set before
                                 * use to what kernel_kv_check lets pass */
    uint32_t n_graph_nodes;     /* that the smallest recorded step consists of; 0: none
                                 * is recorded */
    uint64_t n_graph_steps;     /* steps computed by recorded launches; engine thread */
    struct device *device;      /* whose memory the slots read and write; owned by the
                                 * context */
    struct compute_pool *pool;  /* of the host: packing, sampling, and all slots of the
                                 * processor's rows */
    struct kernel_ctx *host;    /* a processor's context with the same pool; NULL: this is
                                 * one */
    /* The processor's rows: */
    void *scratch; /* per thread, owned by the context */
    size_t scratch_bytes_per_thread;
    void *acts; /* the running matmul: its tables and the inputs that it made
                 * ready; owned by the context */
    size_t acts_bytes;
    void *attn; /* attention_workspace_bytes() of pages, touched as needed:
                 * attention's work table, owned by the context */
};

#ifdef __cplusplus
extern "C" {
#endif

/* The rows, in order of preference, ended by NULL. */
extern const struct kernel_ops *const KERNEL_BACKENDS[];

/* `isa`: "auto" takes the first available row of the processor; a name takes that row or fails with
 * a sentence listing what this machine has. */
enum status kernel_ctx_create(const char *isa, enum activations activations, int n_threads,
                              struct kernel_ctx **out, struct err *err) MUST_CHECK;
void kernel_ctx_free(struct kernel_ctx *c);
/* Room for the inputs of one matmul call: n_rows rows of at most n_in elements, n_rows summed over
 * its jobs. Only grows. ERR_NOMEM. Loading thread, no call running. */
enum status kernel_ctx_reserve(struct kernel_ctx *c, size_t n_rows, size_t n_in) MUST_CHECK;
/* The context that computes on what the host has, logits that were fetched above all: c itself, or
 * one that it owns. */
struct kernel_ctx *kernel_host(struct kernel_ctx *c);
/* Does a row's result depend on the row alone? Always so of the processor. */
bool kernel_is_deterministic(const struct kernel_ctx *c);
/* Do attention's results of prompt tokens and of generated ones (attn_seq.is_decode) round
 * differently? */
bool kernel_has_two_attention_paths(const struct kernel_ctx *c, bool latent);
/* The element type of KV pools that suits an arithmetic: f32, or bf16 of FAST. */
enum dtype kernel_kv_default(enum activations a);
/* May a pool of heads, or of latents, be of type t? Latents only of the type that suits the
 * arithmetic. ERR_UNSUPPORTED with a sentence. */
enum status kernel_kv_check(const struct kernel_ctx *c, enum dtype t, bool latent,
                            struct err *err) MUST_CHECK;
/* Frees what weight_pack made, if it is the weight's; twice is harmless. */
void weight_release(struct kernel_ctx *c, struct weight *w);
/* Space-separated features of this CPU that matter here, for the start page and `baton version`. */
void kernel_cpu_features(char *out, size_t cap);

#ifdef __cplusplus
}
#endif

#endif
