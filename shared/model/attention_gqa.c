/* attention_gqa.c - grouped-query attention:
 *
 *     h       = norm(x)
 *     q, k, v = Wq h + bq, Wk h + bk, Wv h + bv            biases: Qwen2, some Llamas
 *     q, k    = norm(q), norm(k)       per head            Qwen3
 *     q, k    = rope(q), rope(k)
 *     x      += Wo softmax(q k^T / sqrt(D)) v + bo         query head i reads key/value head
 *                                                          i / (n_heads / n_kv_heads)
 *
 * In an eager batch K and V of a layer are complete before its attention begins, and on_layer is
 * called between the two: a peer receives the bytes while the layer still computes.
 * Thread: loading, then engine. */
#include <math.h>
#include <stdio.h>

#include "shared/base/mem.h"
#include "shared/model/attention.h"

struct attention_gqa {
    struct attention_layer base;
    struct weight q, k, v, o;
    struct share_cut o_cut;
    float *q_bias, *k_bias, *v_bias, *o_bias; /* NULL: none */
    float *q_norm, *k_norm;                   /* [D]; NULL: none */
};

struct attention_gqa_work {
    struct attention_work base;
    float *q, *k, *v, *out; /* [R, Q], [R, KV], [R, KV], [R, Q] */
    float *all_heads;       /* [R, Q] of all ranks; unused when the model is not cut */
};

/* Outputs of q, and of k and v, of all ranks. */
static size_t all_q(const struct model_config *c) { return (size_t)c->n_heads * c->head_dim; }
static size_t all_kv(const struct model_config *c) { return (size_t)c->n_kv_heads * c->head_dim; }

/* This rank's of them. */
static struct share_part q_part(const struct model *m)
{
    return share_times(share_heads(&m->share, m->config.n_heads), m->config.head_dim);
}

static struct share_part kv_part(const struct model *m)
{
    return share_times(share_kv_heads(&m->share, m->config.n_kv_heads), m->config.head_dim);
}

static size_t q_width(const struct model *m) { return q_part(m).n; }
static size_t kv_width(const struct model *m) { return kv_part(m).n; }

/* ---- load ---- */

static struct attention_layer *gqa_create(const struct model *m)
{
    struct attention_gqa *a = MEM_NEW(struct attention_gqa);
    (void)m;
    a->base.ops = &attention_gqa_ops;
    return &a->base;
}

static struct attention_work *gqa_create_work(void)
{
    struct attention_gqa_work *w = MEM_NEW(struct attention_gqa_work);
    w->base.ops = &attention_gqa_ops;
    return &w->base;
}

static enum status bind_biases(struct binder *b, const char *prefix, struct attention_gqa *a)
{
    const struct model_config *c = &b->m->config;
    const struct {
        float **to;
        const char *name;
        size_t n;
        struct share_part part;
        bool wanted;
    } biases[] = {
        { &a->q_bias, "q_proj.bias", all_q(c), q_part(b->m), c->attention_bias || c->qkv_bias },
        { &a->k_bias, "k_proj.bias", all_kv(c), kv_part(b->m), c->attention_bias || c->qkv_bias },
        { &a->v_bias, "v_proj.bias", all_kv(c), kv_part(b->m), c->attention_bias || c->qkv_bias },
        { &a->o_bias, "o_proj.bias", c->hidden, a->o_cut.mine, c->attention_bias },
    };
    for (size_t i = 0; i < COUNT_OF(biases); i++) {
        /* GGUF metadata does not say which biases there are. */
        if (b->m->weights->gguf)
            TRY(bind_vector_if_present(b, prefix, biases[i].name, biases[i].n, biases[i].part,
                                       biases[i].to));
        else if (biases[i].wanted)
            TRY(bind_vector_part(b, prefix, biases[i].name, biases[i].n, biases[i].part,
                                 biases[i].to));
    }
    return OK;
}

/* Three matrices, or rows of one. */
static enum status bind_qkv(struct binder *b, const char *prefix, struct attention_gqa *a)
{
    const struct model_config *c = &b->m->config;
    const size_t q = all_q(c), kv = all_kv(c);
    const struct {
        struct weight *to;
        const char *leaf;
        size_t n_out, first;
        struct share_part mine;
    } parts[] = {
        { &a->q, "q_proj", q, 0, q_part(b->m) },
        { &a->k, "k_proj", kv, q, kv_part(b->m) },
        { &a->v, "v_proj", kv, q + kv, kv_part(b->m) },
    };
    for (size_t i = 0; i < COUNT_OF(parts); i++) {
        const struct matrix_spec spec = {
            .prefix = prefix,
            .leaf = parts[i].leaf,
            .whole = "qkv_proj",
            .n_out = parts[i].n_out,
            .n_in = c->hidden,
            .first = parts[i].first,
            .total = q + 2 * kv,
            .part = &parts[i].mine,
        };
        TRY(bind_matrix(b, &spec, BIND_QUANTIZED, parts[i].to));
    }
    return OK;
}

static enum status gqa_bind(struct binder *b, const char *layer, struct attention_layer *base)
{
    struct attention_gqa *a = (struct attention_gqa *)base;
    const struct model_config *c = &b->m->config;
    char prefix[TENSOR_NAME_BYTES_MAX / 2];
    snprintf(prefix, sizeof prefix, "%sself_attn.", layer);
    const struct matrix_spec o = {
        .prefix = prefix,
        .leaf = "o_proj",
        .n_out = c->hidden,
        .n_in = all_q(c),
        .part = &a->o_cut.mine,
    };
    a->o_cut = share_cut(&b->m->share, c->hidden, bind_unit(b, &o, BIND_QUANTIZED));
    TRY(bind_qkv(b, prefix, a));
    TRY(bind_matrix(b, &o, BIND_QUANTIZED, &a->o));
    TRY(bind_biases(b, prefix, a));
    if (!c->qk_norm) return OK;
    TRY(bind_vector(b, prefix, "q_norm.weight", c->head_dim, &a->q_norm));
    return bind_vector(b, prefix, "k_norm.weight", c->head_dim, &a->k_norm);
}

static void gqa_bind_work(struct binder *b, struct attention_work *base)
{
    struct attention_gqa_work *w = (struct attention_gqa_work *)base;
    const struct model_config *c = &b->m->config;
    const size_t rows = b->m->max_rows;
    bind_floats(b, rows, q_width(b->m), &w->q);
    bind_floats(b, rows, kv_width(b->m), &w->k);
    bind_floats(b, rows, kv_width(b->m), &w->v);
    bind_floats(b, rows, q_width(b->m), &w->out);
    if (b->m->share.tp_size > 1) bind_floats(b, rows, all_q(c), &w->all_heads);
    bind_reserve(b, 3 * rows, c->hidden);
    bind_reserve(b, rows, all_q(c));
}

static void gqa_release(struct kernel_ctx *k, struct attention_layer *base)
{
    struct attention_gqa *a = (struct attention_gqa *)base;
    struct weight *weights[] = { &a->q, &a->k, &a->v, &a->o };
    for (size_t i = 0; i < COUNT_OF(weights); i++) weight_release(k, weights[i]);
    mem_free(a);
}

static void gqa_release_work(struct attention_work *w) { mem_free(w); }

/* ---- before the first step ---- */

static void gqa_limits(const struct model *m, struct kernel_limits *l)
{
    const struct model_config *c = &m->config;
    l->n_lists = l->max_lists = 1;
    l->v_dim = c->head_dim;
    l->latent = false;
    l->n_kv_heads = (uint32_t)share_kv_heads(&m->share, c->n_kv_heads).n;
    l->head_dim = c->head_dim;
}

static size_t gqa_rows_at_once(const struct model *m)
{
    (void)m;
    return SIZE_MAX;
}

static int32_t gqa_capture_lists(struct attention_work *w, struct attn_list *lists)
{
    (void)w, (void)lists;
    return 0;
}

static void gqa_capture_rows(struct attention_work *w, size_t n_rows) { (void)w, (void)n_rows; }

/* ---- step ---- */

static int32_t gqa_lists(const struct model *m, const struct model_batch *b,
                         struct attention_work *w, struct attn_list *lists)
{
    (void)m, (void)b, (void)w, (void)lists;
    return 0;
}

static void project(const struct decoder_step *s, const struct attention_gqa *a,
                    const struct attention_gqa_work *w, const float *norm)
{
    const struct model_config *c = &s->m->config;
    struct kernel_ctx *k = s->m->kernels;
    const size_t rows = s->n_rows, hidden = c->hidden, q = q_width(s->m), kv = kv_width(s->m);
    const struct matmul_args h = {
        .x = s->x, .x_stride = hidden, .norm = norm, .norm_eps = c->rms_eps, .n_rows = rows
    };
    struct matmul_args jobs[] = { h, h, h };
    /* [R, Q] */
    jobs[0].w = &a->q, jobs[0].bias = a->q_bias, jobs[0].y = w->q, jobs[0].y_stride = q;
    /* [R, KV] */
    jobs[1].w = &a->k, jobs[1].bias = a->k_bias, jobs[1].y = w->k, jobs[1].y_stride = kv;
    /* [R, KV] */
    jobs[2].w = &a->v, jobs[2].bias = a->v_bias, jobs[2].y = w->v, jobs[2].y_stride = kv;
    k->ops->matmul(k, jobs, COUNT_OF(jobs));
}

/* How queries and keys are rotated. */
static struct rope_args rope_of(const struct decoder_step *s, const struct attention_gqa *a,
                                const struct attention_gqa_work *w)
{
    const struct model_config *c = &s->m->config;
    const size_t dim = c->head_dim;
    return (struct rope_args){
        .heads = { {
                       .x = w->q,
                       .x_stride = q_width(s->m),
                       .n_heads = share_heads(&s->m->share, c->n_heads).n,
                       .head_dim = dim,
                       .norm = a->q_norm,
                   },
                   {
                       .x = w->k,
                       .x_stride = kv_width(s->m),
                       .n_heads = share_kv_heads(&s->m->share, c->n_kv_heads).n,
                       .head_dim = dim,
                       .norm = a->k_norm,
                   } },
        .n_heads = 2,
        .n_rows = s->n_rows,
        .rot_dim = dim,
        .cos_sin = s->cos_sin,
        .pos = s->pos,
        .interleaved = c->rope_interleaved,
        .norm_eps = c->rms_eps,
    };
}

/* The outputs of all heads: [R, Q] of all ranks. */
static const float *gather_heads(const struct decoder_step *s, const struct attention_gqa_work *w)
{
    const size_t all = all_q(&s->m->config), mine = q_width(s->m);
    const struct share_cut cut = share_cut(&s->m->share, all, mine);
    if (!decoder_is_cut(s)) return w->out;
    decoder_gather(s, w->all_heads, all, w->out, mine, s->n_rows, &cut);
    return w->all_heads;
}

/* The outputs of the rank's heads. Where nobody acts between layers, appending and attending are
 * one call, which may be one launch. */
static void attend(const struct decoder_step *s, const struct attention_gqa *a,
                   const struct attention_gqa_work *w, const float *norm, uint32_t i_layer)
{
    const struct model_config *c = &s->m->config;
    struct kernel_ctx *k = s->m->kernels;
    const struct kv_layer kv = decoder_kv_layer(s, i_layer);
    const struct rope_args rope = rope_of(s, a, w);
    const struct kv_append_args append = {
        .k = w->k, .v = w->v, .kv = kv, .on = s->all, .rope = &rope
    };
    const struct attn_args args = {
        .q = w->q,
        .out = w->out,
        .kv = kv,
        .on = s->all,
        .n_heads = (int32_t)share_heads(&s->m->share, c->n_heads).n,
        .v_dim = (int32_t)c->head_dim,
        .scale = (float)(1.0 / sqrt((double)c->head_dim)),
        .append = s->b->eager ? NULL : &append,
    };
    project(s, a, w, norm);
    if (s->b->eager) {
        k->ops->kv_append(k, &append);
        decoder_kv_written(s, i_layer);
    }
    /* [R, Q] */
    k->ops->attention(k, &args);
    if (!s->b->eager) decoder_kv_written(s, i_layer);
}

static void gqa_forward(const struct decoder_step *s, const struct attention_layer *base,
                        const struct attention_work *base_work, const float *norm, uint32_t i_layer)
{
    const struct attention_gqa *a = (const struct attention_gqa *)base;
    const struct attention_gqa_work *w = (const struct attention_gqa_work *)base_work;
    if (decoder_goes_on(s)) attend(s, a, w, norm, i_layer);
    const struct matmul_args out = {
        .w = &a->o,
        .bias = a->o_bias,
        .x = gather_heads(s, w),
        .x_stride = all_q(&s->m->config),
    };
    /* [R, H] */
    decoder_add_product(s, out, &a->o_cut);
}

const struct attention_ops attention_gqa_ops = {
    .create = gqa_create,
    .create_work = gqa_create_work,
    .bind = gqa_bind,
    .bind_work = gqa_bind_work,
    .release = gqa_release,
    .release_work = gqa_release_work,
    .limits = gqa_limits,
    .rows_at_once = gqa_rows_at_once,
    .capture_lists = gqa_capture_lists,
    .capture_rows = gqa_capture_rows,
    .lists = gqa_lists,
    .forward = gqa_forward,
};
