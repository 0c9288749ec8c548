/* ffn_dense.c - the dense feed-forward block, one SwiGLU:
 *
 *     h  = norm(x)
 *     x += Wdown (silu(Wgate h) * Wup h)
 *
 * Thread: loading, then engine. */
#include <stdio.h>

#include "shared/base/arith.h"
#include "shared/base/mem.h"
#include "shared/model/ffn.h"

struct ffn_dense {
    struct ffn_layer base;
    struct swiglu w;
};

struct ffn_dense_work {
    struct ffn_work base;
    float *act; /* [R, I], pre-quantised for down; f32 when the model is cut */
};

/* ---- one SwiGLU ---- */

enum status swiglu_bind(struct binder *b, const char *prefix, size_t n,
                        const struct model_share *share, struct swiglu *f)
{
    const size_t hidden = b->m->config.hidden;
    const struct matrix_spec gate = {
        .prefix = prefix,
        .leaf = "gate_proj",
        .whole = "gate_up_proj",
        .n_out = n,
        .n_in = hidden,
        .first = 0,
        .total = 2 * n,
        .part = &f->gate_up_cut.mine,
    };
    struct matrix_spec up = gate;
    up.leaf = "up_proj";
    up.first = n;
    const struct matrix_spec down = {
        .prefix = prefix,
        .leaf = "down_proj",
        .n_out = hidden,
        .n_in = n,
        .part = &f->down_cut.mine,
    };
    const size_t gate_unit = bind_unit(b, &gate, BIND_QUANTIZED),
                 up_unit = bind_unit(b, &up, BIND_QUANTIZED);
    f->gate_up_cut = share_cut(share, n, gate_unit > up_unit ? gate_unit : up_unit);
    f->down_cut = share_cut(share, hidden, bind_unit(b, &down, BIND_QUANTIZED));
    TRY(bind_pair(b, &gate, &up, BIND_QUANTIZED, &f->gate_up));
    TRY(bind_matrix(b, &down, BIND_QUANTIZED, &f->down));
    if (!b->m->config.mlp_bias) return OK;
    TRY(bind_vector_pair(b, prefix, "gate_proj.bias", "up_proj.bias", n, f->gate_up_cut.mine,
                         &f->gate_up_bias));
    return bind_vector_part(b, prefix, "down_proj.bias", hidden, f->down_cut.mine, &f->down_bias);
}

void swiglu_release(struct kernel_ctx *k, struct swiglu *f)
{
    weight_release(k, &f->gate_up);
    weight_release(k, &f->down);
}

/* ---- load ---- */

static struct ffn_layer *dense_create(const struct model *m, uint32_t i_layer)
{
    struct ffn_dense *f = MEM_NEW(struct ffn_dense);
    (void)m, (void)i_layer;
    f->base.ops = &ffn_dense_ops;
    return &f->base;
}

static struct ffn_work *dense_create_work(void)
{
    struct ffn_dense_work *w = MEM_NEW(struct ffn_dense_work);
    w->base.ops = &ffn_dense_ops;
    return &w->base;
}

static enum status dense_bind(struct binder *b, const char *layer, struct ffn_layer *base)
{
    struct ffn_dense *f = (struct ffn_dense *)base;
    char mlp[TENSOR_NAME_BYTES_MAX / 2];
    snprintf(mlp, sizeof mlp, "%smlp.", layer);
    return swiglu_bind(b, mlp, b->m->config.intermediate, &b->m->share, &f->w);
}

static void dense_bind_work(struct binder *b, struct ffn_work *base)
{
    struct ffn_dense_work *w = (struct ffn_dense_work *)base;
    const struct model_config *c = &b->m->config;
    bind_floats(b, b->m->max_rows, round_up(c->intermediate, MATMUL_PREQUANTIZED_ALIGN), &w->act);
    bind_reserve(b, b->m->max_rows, c->hidden);
    if (b->m->share.tp_size > 1) bind_reserve(b, b->m->max_rows, c->intermediate);
}

static void dense_release(struct kernel_ctx *k, struct ffn_layer *base)
{
    struct ffn_dense *f = (struct ffn_dense *)base;
    swiglu_release(k, &f->w);
    mem_free(f);
}

static void dense_release_work(struct ffn_work *w) { mem_free(w); }

static size_t dense_rows_at_once(const struct model *m)
{
    (void)m;
    return SIZE_MAX;
}

/* ---- step ---- */

static void dense_forward(const struct decoder_step *s, const struct ffn_layer *base,
                          const struct ffn_work *base_work, const float *norm)
{
    const struct swiglu *f = &((const struct ffn_dense *)base)->w;
    const struct ffn_dense_work *w = (const struct ffn_dense_work *)base_work;
    struct kernel_ctx *k = s->m->kernels;
    const size_t rows = s->n_rows, hidden = s->m->config.hidden;
    const struct share_cut *n = &f->gate_up_cut;
    /* Rows that are pre-quantised mean nothing to another rank. */
    const bool cut = decoder_is_cut(s);
    const struct matmul_args gate_up = {
        .w = &f->gate_up,
        .bias = f->gate_up_bias,
        .x = s->x,
        .x_stride = hidden,
        .norm = norm,
        .norm_eps = s->m->config.rms_eps,
        .n_rows = rows,
        .y = w->act + (cut ? n->mine.first : 0),
        .y_stride = n->n,
        .quantize_for = cut ? NULL : &f->down,
        .epilogue = MATMUL_SILU_MUL,
    };
    const struct matmul_args down = {
        .w = &f->down,
        .bias = f->down_bias,
        .x = w->act,
        .x_stride = n->n,
        .x_prequantized = !cut,
    };
    if (n->mine.n > 0 && decoder_goes_on(s)) k->ops->matmul(k, &gate_up, 1); /* [R, I] */
    decoder_gather(s, w->act, n->n, gate_up.y, n->n, rows, n);
    decoder_add_product(s, down, &f->down_cut); /* [R, H] */
}

const struct ffn_ops ffn_dense_ops = {
    .create = dense_create,
    .create_work = dense_create_work,
    .bind = dense_bind,
    .bind_work = dense_bind_work,
    .release = dense_release,
    .release_work = dense_release_work,
    .rows_at_once = dense_rows_at_once,
    .forward = dense_forward,
};
