/* kernels.h - arithmetic on tensors: one ops table, one row per instruction set (ref, avx2, avx512; cuda follows).
 *
 * The rule every slot obeys: a row of the output depends only on the same row of the input and on the weights, never on
 * the other rows, on n_rows or on the number of threads (bit for bit). Reductions run in a fixed order:
 *   matmul     y[n] is one chain of fused multiply-adds over k ascending, from +0, then + bias[n]; so all rows of this table
 *              give the same bits.
 *   attention  keys in tiles of one KV block, ascending, online softmax from tile to tile; inside a tile a fixed tree.
 *   rms_norm   a fixed tree over the row.
 * `ref` is the definition, in plain C; each other row states the bound within which it equals ref and is held to it by
 * tests/conformance/test_kernels.c.
 *
 * All activations are f32. Shapes are row-major, the last index contiguous. Pointers are borrowed for the call, outputs do
 * not overlap inputs except where said. Weights are packed once by weight_pack.
 * Thread: engine (the calls fan out over ctx->pool themselves and return when done). No slot allocates; none fails: shapes are
 * checked when a model is bound. */
#ifndef BATON_KERNELS_KERNELS_H
#define BATON_KERNELS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/pool.h"
#include "kernels/device.h"
#include "kernels/dtype.h"

enum { KERNEL_BLOCK_TOKENS_MAX = 256, KERNEL_HEAD_DIM_MAX = 256 };

/* A matrix as a checkpoint stores it: [n_out, n_in], row n_out contiguous, mapped from the file. */
struct weight_src {
    enum dtype  dtype;
    const void *data; /* n_out rows of dtype_row_bytes(dtype, n_in); no alignment promised */
    size_t      n_out, n_in;
};

/* A matrix packed for a row of this table. Owned by whoever called weight_pack; freed with weight_release. */
struct weight {
    enum dtype dtype; /* of the packed form */
    size_t     n_out, n_in;
    void      *data;
    size_t     bytes;
};

struct kernel_ctx;

/* Query rows of one sequence in a step. */
struct attn_seq {
    int32_t        q_begin;      /* first row in q and out */
    int32_t        n_q;          /* rows; row i has position pos_begin + i and sees keys 0 .. pos_begin + i */
    int32_t        pos_begin;
    const int32_t *block_table;  /* physical KV block of each logical block, enough for pos_begin + n_q tokens */
};

struct attn_args {
    const float           *q;    /* [n_rows, n_heads, head_dim] */
    float                 *out;  /* [n_rows, n_heads, head_dim] */
    const void            *kv;   /* this layer's pool: [block][kv_head][k|v][block_tokens][head_dim] f32 */
    const struct attn_seq *seqs; /* [n_seqs] */
    int32_t                n_seqs;
    int32_t                n_heads, n_kv_heads, head_dim, block_tokens;
    float                  scale;
};

struct kv_append_args {
    const float           *k, *v; /* [n_rows, n_kv_heads, head_dim] */
    void                  *kv;    /* as above */
    const struct attn_seq *seqs;
    int32_t                n_seqs;
    int32_t                n_kv_heads, head_dim, block_tokens;
};

struct kernel_ops {
    const char *name;      /* "ref", "avx2", "avx512": --cpu-isa, logs, hello between peers */
    bool (*available)(void); /* does this CPU have what the row needs */

    /* Copy and reorder `src` into the row's own form, in parallel on ctx->pool. */
    enum status (*weight_pack)(struct kernel_ctx *c, const struct weight_src *src, struct weight *out);
    /* y[i] = w x[i] + bias; x [n_rows, n_in], y [n_rows, n_out] with row stride y_stride floats, bias [n_out] or NULL. */
    void (*matmul)(struct kernel_ctx *c, float *y, size_t y_stride, const float *x, size_t n_rows, const struct weight *w,
                   const float *bias);
    /* y[i] = weight * x[i] / sqrt(mean(x[i]^2) + eps); x, y [n_rows, n]; y may be x. */
    void (*rms_norm)(struct kernel_ctx *c, float *y, const float *x, const float *weight, size_t n_rows, size_t n, float eps);
    /* x += y, both [n]. */
    void (*add)(struct kernel_ctx *c, float *x, const float *y, size_t n);
    /* out[i] = silu(gate_up[i][0..n)) * gate_up[i][n..2n); gate_up [n_rows, 2n], out [n_rows, n]. */
    void (*silu_mul)(struct kernel_ctx *c, float *out, const float *gate_up, size_t n_rows, size_t n);
    /* Rotate in place: x [n_rows, n_heads, head_dim] with row stride x_stride floats; cos_sin [max_pos][rot_dim/2][2];
     * pos [n_rows]. Pairs are (i, i + rot_dim/2), or (2i, 2i+1) when interleaved. Dims from rot_dim on are left alone. */
    void (*rope)(struct kernel_ctx *c, float *x, size_t x_stride, size_t n_rows, size_t n_heads, size_t head_dim, size_t rot_dim,
                 const float *cos_sin, const int32_t *pos, bool interleaved);
    void (*kv_append)(struct kernel_ctx *c, const struct kv_append_args *a);
    void (*attention)(struct kernel_ctx *c, const struct attn_args *a);
    /* lse[i] = log(sum_j exp(x[i][j])) of x [n_rows, n] with row stride x_stride, in a fixed order. */
    void (*log_sum_exp)(struct kernel_ctx *c, float *lse, const float *x, size_t x_stride, size_t n_rows, size_t n);
};

struct kernel_ctx {
    const struct kernel_ops *ops;
    struct compute_pool     *pool;
    void                    *scratch; /* per thread, owned by the context */
    size_t                   scratch_bytes_per_thread;
};

/* The rows, in order of preference, ended by NULL. */
extern const struct kernel_ops *const KERNEL_ROWS[];

/* `isa`: "auto" takes the first available row; a name takes that row or fails with a sentence listing what this CPU has. */
enum status kernel_ctx_create(const char *isa, int n_threads, struct kernel_ctx **out, struct err *err) MUST_CHECK;
void        kernel_ctx_free(struct kernel_ctx *c);
void        weight_release(struct weight *w);
/* One row of a packed matrix back to f32 (embedding lookup); dst [n_in]. */
void        weight_row(const struct weight *w, size_t row, float *dst);
/* Space-separated features of this CPU that matter here, for the start page and `baton version`. */
void        kernel_cpu_features(char *out, size_t cap);

#endif
