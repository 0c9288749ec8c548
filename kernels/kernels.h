/* kernels.h - the arithmetic of a model's step on tensors: one ops table, struct kernel_ops.
 *
 * The rule every op obeys: a row of the output depends only on the same row of the input and on the
 * weights, bit for bit: never on the other rows, on n_rows or on the number of threads. Sums have a
 * fixed order. On a GPU bf16 products obey it with kernel_options.deterministic; otherwise their
 * last bits may depend on n_rows. `ref` is the definition, in plain C; every other backend states
 * its error bound, and tests/conformance holds it to that.
 * Tensors are row-major f32 (prequantised rows apart: struct matmul_args); the last index is
 * contiguous. Pointers are borrowed for the call; outputs do not overlap inputs except where said.
 * docs/kernels.md describes the two arithmetics and the order of sums.
 * Thread: engine; CPU backends fan out over ctx->pool and return when done. No op allocates or
 * fails: shapes are checked when a model is bound. */
#ifndef BATON_KERNELS_KERNELS_H
#define BATON_KERNELS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/step.h"
#include "kernels/weights.h"

enum {
    KERNEL_BLOCK_TOKENS_MAX = 256,
    KERNEL_HEAD_DIM_MAX = 256,
    KERNEL_LATENT_MAX = 1024 /* kv_lora + rope of MLA */
};
enum { ATTN_TILE = 64, CPU_ATTN_SEGMENT = 256 };
enum { KERNEL_EXPERTS_MAX = 1024, KERNEL_EXPERTS_USED_MAX = 64 };

/* Raised whenever some backend computes other bits: peers of another revision are refused. */
enum { KERNEL_REVISION = 6 };

enum activations { ACTIVATIONS_F32, ACTIVATIONS_FAST };

enum matmul_epilogue {
    MATMUL_STORE,   /* y  = w x + bias */
    MATMUL_ADD,     /* y += w x + bias */
    MATMUL_SILU_MUL /* y  = silu(gate) * up of a paired matrix; y [n_rows, n_out / 2] */
};

/* A prequantised row of n elements fits in n floats, rounded up to a multiple of this. */
enum { MATMUL_PREQUANTIZED_ALIGN = 32 };

/* One product. Rows of length zero and jobs without rows are allowed and do nothing.
 *
 * Prequantised rows: between two consecutive products (gate/up of SwiGLU, then down) the
 * activations need not go through f32. With `quantize_for` the first product writes its output
 * quantised as the second one wants its input, contiguous (y_stride is ignored), and the second
 * says `x_prequantized`. The format is private to the context: both calls use the same one, and the
 * second multiplies by quantize_for. The values equal those of the way through f32. */
struct matmul_args {
    const struct weight *w;
    const float *bias; /* [n_out] or NULL; of a paired matrix gate's, then up's */
    const float *x;    /* [.., n_in], rows x_stride floats apart; prequantised rows: contiguous */
    size_t x_stride;
    const int32_t *x_rows; /* [n_rows] rows of x to take; NULL: 0, 1, 2 ..; not if prequantised */
    const float *norm;     /* [n_in] weights of an rms_norm (norm_eps) of each row of x; NULL: none;
                            * not if prequantised */
    float norm_eps;
    bool x_prequantized;
    size_t n_rows;
    float *y; /* [n_rows, ..], y_stride floats apart */
    size_t y_stride;
    const struct weight *quantize_for; /* MATMUL_SILU_MUL: quantise y for this matrix, whose n_in is
                                        * n_out / 2; NULL: y is f32 */
    enum matmul_epilogue epilogue;
};

/* The KV pool of one layer. GQA: [block][kv_head][k|v][block_tokens][head_dim]. MLA's latents:
 * [block][block_tokens][head_dim], one head, whose first v_dim elements are also the values. Types
 * with scales (kv_rows.h; GQA only) append f32 scales [kv_head][k|v][block_tokens] to each block;
 * both together are one piece (kv_layout.h). */
struct kv_layer {
    void *data;
    enum dtype dtype; /* one that kv_rows.h knows */
    bool latent;
    int32_t n_heads;  /* 1 when latent */
    int32_t head_dim; /* of a key: kv_lora + rope when latent */
    int32_t block_tokens;
};

/* Heads that are rotated in place: x [n_rows, n_heads, head_dim], rows x_stride floats apart. */
struct rope_heads {
    float *x;
    size_t x_stride, n_heads, head_dim;
    const float
        *norm; /* [head_dim] weights of an rms_norm of each head before the rotation (Qwen3's
                * q and k); NULL: none */
};

enum { ROPE_HEADS_MAX = 2 }; /* q and k */

/* Pairs are (i, i + rot_dim / 2), or (2i, 2i + 1) when interleaved. Dims from rot_dim on are not
 * rotated. */
struct rope_args {
    struct rope_heads heads[ROPE_HEADS_MAX];
    size_t n_heads; /* of `heads` */
    size_t n_rows, rot_dim;
    const float *cos_sin; /* [positions][rot_dim / 2][2] */
    const int32_t *pos;   /* [n_rows] */
    bool interleaved;
    float norm_eps;
};

struct kv_append_args {
    const float *k, *v; /* [n_rows, n_heads, head_dim]; v NULL when latent */
    struct kv_layer kv;
    struct attn_list on;
    const struct rope_args *rope; /* applied first: to q and k of the appended rows (GQA); k may
                                   * stay as it is outside the pool. NULL: none */
};

struct attn_args {
    const float *q; /* [n_rows, n_heads, head_dim] */
    float *out;     /* [n_rows, n_heads, v_dim] */
    struct kv_layer kv;
    struct attn_list on;
    int32_t n_heads, v_dim; /* v_dim: head_dim, or kv_lora when latent */
    float scale;
    /* Done first, of the same pool and list (GQA): a GPU does both in one launch where it can.
     * Afterwards its q and k are not to be read. NULL: none */
    const struct kv_append_args *append;
    /* MLA only. NULL: the absorbed path, q has kv_lora + rope elements and out kv_lora. Else the
     * naive path: from a position's latent c, head h has the keys k_up[h] c (nope elements,
     * followed by the cached rope part) and the values v_up[h] c; q has nope + rope elements, out
     * v_up->n_out. */
    const struct weight *k_up, *v_up; /* [n_heads]: [nope, kv_lora] and [v, kv_lora] */
};

/* Chooses the experts of each token. p = softmax or sigmoid of the logits; experts are selected by
 * p + bias, within the topk_groups best of n_groups groups of consecutive experts; ties go to the
 * lower index. Weights are p without bias, if normalised divided by max(sum, norm_min) or
 * (sum + norm_min), times scale. shared/model/families set the values. */
struct route_args {
    float *logits;     /* [n_rows, n_experts]; scratch if rows are sorted */
    const float *bias; /* [n_experts] or NULL */
    size_t n_rows;
    int32_t n_experts, n_used, n_groups, topk_groups; /* n_groups 1: no groups */
    enum { ROUTE_SOFTMAX, ROUTE_SIGMOID } score;
    enum { GROUP_MAX, GROUP_TOP2_SUM } group_score;
    enum { NORM_NONE, NORM_MAX /* / max(sum, norm_min) */, NORM_SUM /* / (sum + norm_min) */ } norm;
    float norm_min, scale;
    int32_t *experts; /* [n_rows, n_used], in order of selection */
    float *weights;   /* [n_rows, n_used] */
    /* If not NULL, route also sorts the rows by expert for the experts call that follows, which
     * says `sorted` and has the same pointers. */
    int32_t *rows, *index, *begin;
};

/* What precedes a mixture of experts: h[i] = rms_norm(x[i]), logits[i] = w h[i] in f32, then route,
 * whose logits these are. */
struct router_args {
    const struct weight *w; /* [n_experts, H], f32 */
    const float *x, *norm;  /* [n_rows, H]; [H], weights of the norm */
    float eps;
    float *h; /* [n_rows, H] */
    struct route_args route;
};

/* The product of a router. */
static inline struct matmul_args router_matmul(const struct router_args *a)
{
    return (struct matmul_args){
        .w = a->w,
        .bias = NULL,
        .x = a->h,
        .x_stride = a->w->n_in,
        .x_rows = NULL,
        .norm = NULL,
        .norm_eps = 0,
        .x_prequantized = false,
        .n_rows = a->route.n_rows,
        .y = a->route.logits,
        .y_stride = (size_t)a->route.n_experts,
        .quantize_for = NULL,
        .epilogue = MATMUL_STORE,
    };
}

/* y[i] = (add ? y[i] : 0) + sum over j ascending of weights[i][j] * rows[index[i][j]], accumulated
 * by fused multiply-adds. */
struct combine_args {
    float *y;             /* [n_rows, n] */
    const float *rows;    /* [.., n] */
    const int32_t *index; /* [n_rows, n_used] */
    const float *weights; /* [n_rows, n_used] */
    size_t n_rows, n_used, n;
    bool add;
};

/* The shared expert: a SwiGLU of all rows of an experts call; gate_up NULL: none. */
struct shared_expert {
    const struct weight *gate_up, *down;
    const float *gate_up_bias, *down_bias; /* gate's, then up's; NULL: none */
    float *act;                            /* [n_rows, I] scratch, prequantised for down */
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
    /* Scratch: */
    int32_t *rows, *index;    /* [n_rows n_used] the row of a slot; the slot of (row, choice) */
    int32_t *begin;           /* [n_experts + 1] first slot of each expert */
    bool sorted;              /* the route call before filled in rows, index and begin */
    float *act, *out;         /* by slot: [n_rows n_used, I] prequantised for down;
                               * [n_rows n_used, H] */
    struct matmul_args *jobs; /* [n_experts + 1], host memory */
};

/* Rows as struct ep_batch has them: bf16 or e4m3, each aligned to 128 bytes, zeros up to a multiple
 * of 64 elements. NULL: none. */
struct narrow_rows {
    const void *at;
    enum dtype type;
    size_t scales_at; /* of e4m3: bytes from a row's beginning to its f32 scales, one for every 128
                       * elements */
};

/* out[s] = Expert_i(x[rows[s]]) for the slots s of every expert i, begin[i] .. begin[i + 1] - 1,
 * with the bits that `experts` computes for such a row: what a rank does for rows that other ranks
 * sent it (ep.h). Experts may have no slots. */
struct expert_slots_args {
    const struct weight *gate_up, *down; /* [n_experts] paired [2 I, H], [H, I] */
    int32_t n_experts;
    size_t n_slots;            /* at least begin[n_experts]; what is beyond is not computed */
    const float *x;            /* rows x_stride elements apart */
    struct narrow_rows narrow; /* on a GPU, instead of x */
    size_t x_stride;
    size_t n_x_rows;          /* rows[s] is below it */
    const int32_t *rows;      /* [n_slots] */
    const int32_t *begin;     /* [n_experts + 1] */
    float *out;               /* [n_slots, H] */
    float *act;               /* scratch: [n_slots, I] prequantised for down */
    struct matmul_args *jobs; /* scratch: [n_experts], host memory */
};

/* The slots of an experts call, once its rows are sorted. */
static inline struct expert_slots_args expert_slots_of(const struct experts_args *a)
{
    return (struct expert_slots_args){
        .gate_up = a->gate_up,
        .down = a->down,
        .n_experts = a->n_experts,
        .n_slots = a->n_rows * (size_t)a->n_used,
        .x = a->h,
        .narrow = { NULL, DTYPE_F32, 0 },
        .x_stride = a->gate_up[0].n_in,
        .n_x_rows = a->n_rows,
        .rows = a->rows,
        .begin = a->begin,
        .out = a->out,
        .act = a->act,
        .jobs = a->jobs,
    };
}

struct kernel_ops {
    /* x[i] = row ids[i] of the matrix, as f32; x [n_rows, w->n_in]; ids as in kernel_step. */
    void (*embed)(struct kernel_ctx *c, float *x, const struct weight *w, const int32_t *ids,
                  size_t n_rows);
    /* Independent products. Neighbouring jobs with the same x, x_stride, n_in, x_rows, norm and
     * n_rows share the quantisation of x. */
    void (*matmul)(struct kernel_ctx *c, const struct matmul_args *jobs, size_t n_jobs);
    /* y[i] = weight * x[i] / sqrt(mean(x[i]^2) + eps); rows of n floats, strides in floats; y may
     * be x. */
    void (*rms_norm)(struct kernel_ctx *c, float *y, size_t y_stride, const float *x,
                     size_t x_stride, const float *weight, size_t n_rows, size_t n, float eps);
    /* x += y, both [n]. */
    void (*add)(struct kernel_ctx *c, float *x, const float *y, size_t n);
    /* to[i] = from[rows[i]], rows of n floats, strides in floats; rows [n_rows], NULL: all in
     * order. */
    void (*copy_rows)(struct kernel_ctx *c, float *to, size_t to_stride, const float *from,
                      size_t from_stride, const int32_t *rows, size_t n_rows, size_t n);
    void (*rope)(struct kernel_ctx *c, const struct rope_args *a);
    void (*kv_append)(struct kernel_ctx *c, const struct kv_append_args *a);
    void (*attention)(struct kernel_ctx *c, const struct attn_args *a);
    void (*route)(struct kernel_ctx *c, const struct route_args *a);
    /* The bits of rms_norm, matmul and route one after the other; on a GPU, of many rows, the
     * logits have others unless deterministic. */
    void (*router)(struct kernel_ctx *c, const struct router_args *a);
    void (*combine)(struct kernel_ctx *c, const struct combine_args *a);
    void (*experts)(struct kernel_ctx *c, const struct experts_args *a);
    void (*expert_slots)(struct kernel_ctx *c, const struct expert_slots_args *a);
};

#endif
