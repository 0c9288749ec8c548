/* attention_gqa.c - grouped-query attention:
 *
 *     h       = norm(x)
 *     q, k, v = Wq h + bq, Wk h + bk, Wv h + bv            biases: Qwen2, some Llamas
 *     q, k    = norm(q), norm(k)       per head            Qwen3
 *     q, k    = rope(q), rope(k)
 *     x      += Wo softmax(q k^T / sqrt(D)) v + bo         query head i reads key/value head
 *                                                          i / (n_heads / n_kv_heads)
 *
 * K and V of a layer are complete before its attention begins, so on_layer is called between the
 * two: a peer receives the bytes while the layer still computes. Thread: loading, then engine. */
#include <math.h>
#include <stdio.h>

#include "shared/base/mem.h"
#include "shared/model/attention.h"

struct attention_gqa {
    struct attention_layer base;
    struct weight q, k, v, o;
    float *q_bias, *k_bias, *v_bias, *o_bias; /* NULL: none */
    float *q_norm, *k_norm;                   /* [D]; NULL: none */
};

struct attention_gqa_work {
    struct attention_work base;
    float *q, *k, *v, *out; /* [R, Q], [R, KV], [R, KV], [R, Q] */
};

static size_t q_width(const struct model_config *c) { return (size_t)c->n_heads * c->head_dim; }
static size_t kv_width(const struct model_config *c) { return (size_t)c->n_kv_heads * c->head_dim; }

/* ---- load ---- */

static struct attention_layer *gqa_create(const struct model_config *c)
{
    struct attention_gqa *a = MEM_NEW(struct attention_gqa);
    (void)c;
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
    const size_t q = q_width(c), kv = kv_width(c);
    if (b->m->weights->gguf) { /* GGUF metadata does not say which biases there are */
        TRY(bind_vector_if_present(b, prefix, "q_proj.bias", q, &a->q_bias));
        TRY(bind_vector_if_present(b, prefix, "k_proj.bias", kv, &a->k_bias));
        TRY(bind_vector_if_present(b, prefix, "v_proj.bias", kv, &a->v_bias));
        return bind_vector_if_present(b, prefix, "o_proj.bias", c->hidden, &a->o_bias);
    }
    if (!c->attention_bias && !c->qkv_bias) return OK;
    TRY(bind_vector(b, prefix, "q_proj.bias", q, &a->q_bias));
    TRY(bind_vector(b, prefix, "k_proj.bias", kv, &a->k_bias));
    TRY(bind_vector(b, prefix, "v_proj.bias", kv, &a->v_bias));
    return c->attention_bias ? bind_vector(b, prefix, "o_proj.bias", c->hidden, &a->o_bias) : OK;
}

/* Three matrices, or rows of one. */
static enum status bind_qkv(struct binder *b, const char *prefix, struct attention_gqa *a)
{
    const struct model_config *c = &b->m->config;
    const size_t q = q_width(c), kv = kv_width(c);
    const struct {
        struct weight *to;
        const char *leaf;
        size_t n_out, first;
    } parts[] = {
        { &a->q, "q_proj", q, 0 },
        { &a->k, "k_proj", kv, q },
        { &a->v, "v_proj", kv, q + kv },
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
        .prefix = prefix, .leaf = "o_proj", .n_out = c->hidden, .n_in = q_width(c)
    };
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
    bind_floats(b, rows, q_width(c), &w->q);
    bind_floats(b, rows, kv_width(c), &w->k);
    bind_floats(b, rows, kv_width(c), &w->v);
    bind_floats(b, rows, q_width(c), &w->out);
    bind_reserve(b, 3 * rows, c->hidden);
    bind_reserve(b, rows, q_width(c));
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
    l->n_kv_heads = c->n_kv_heads;
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
    const size_t rows = s->n_rows, hidden = c->hidden, q = q_width(c), kv = kv_width(c);
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

/* Rotates queries and keys and adds the rows' K and V to the pool. */
static void append(const struct decoder_step *s, const struct attention_gqa *a,
                   const struct attention_gqa_work *w, const struct kv_layer *kv)
{
    const struct model_config *c = &s->m->config;
    const size_t dim = c->head_dim;
    const struct rope_args rope = {
        .heads = { {
                       .x = w->q,
                       .x_stride = q_width(c),
                       .n_heads = c->n_heads,
                       .head_dim = dim,
                       .norm = a->q_norm,
                   },
                   {
                       .x = w->k,
                       .x_stride = kv_width(c),
                       .n_heads = c->n_kv_heads,
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
    const struct kv_append_args append = {
        .k = w->k, .v = w->v, .kv = *kv, .on = s->all, .rope = &rope
    };
    s->m->kernels->ops->kv_append(s->m->kernels, &append);
}

static void gqa_forward(const struct decoder_step *s, const struct attention_layer *base,
                        const struct attention_work *base_work, const float *norm, uint32_t i_layer)
{
    const struct attention_gqa *a = (const struct attention_gqa *)base;
    const struct attention_gqa_work *w = (const struct attention_gqa_work *)base_work;
    const struct model_config *c = &s->m->config;
    struct kernel_ctx *k = s->m->kernels;
    const struct kv_layer kv = decoder_kv_layer(s, i_layer);
    project(s, a, w, norm);
    append(s, a, w, &kv);
    decoder_kv_written(s, i_layer);

    const struct attn_args attend = {
        .q = w->q,
        .out = w->out,
        .kv = kv,
        .on = s->all,
        .n_heads = (int32_t)c->n_heads,
        .v_dim = (int32_t)c->head_dim,
        .scale = (float)(1.0 / sqrt((double)c->head_dim)),
    };
    /* [R, Q] */
    k->ops->attention(k, &attend);
    const struct matmul_args out = {
        .w = &a->o,
        .bias = a->o_bias,
        .x = w->out,
        .x_stride = q_width(c),
        .n_rows = s->n_rows,
        .y = s->x,
        .y_stride = c->hidden,
        .epilogue = MATMUL_ADD,
    };
    /* [R, H] */
    k->ops->matmul(k, &out, 1);
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
