/* attention_gqa.c - grouped-query attention:
 *
 *     h       = norm(x)
 *     q, k, v = Wq h + bq, Wk h + bk, Wv h + bv            biases: Qwen2, some Llamas
 *     q, k    = norm(q), norm(k)       per head            Qwen3
 *     q, k    = rope(q), rope(k)
 *     x      += Wo softmax(q k^T / sqrt(D)) v + bo         query head i reads key/value head i / (n_heads / n_kv_heads)
 *
 * K and V of a layer are complete before its attention begins, so on_layer is called between the
 * two: the bytes travel while the rest of the layer computes. */
#include <math.h>
#include <stdio.h>

#include "shared/base/mem.h"
#include "shared/model/sublayers.h"

static size_t q_width(const struct model_config *c) { return (size_t)c->n_heads * c->head_dim; }
static size_t kv_width(const struct model_config *c) { return (size_t)c->n_kv_heads * c->head_dim; }

/* ---- bind ---- */

static enum status bind_biases(struct binder *b, const char *prefix, struct attention_gqa *a)
{
    const struct model_config *c = &b->m->config;
    const size_t q = q_width(c), kv = kv_width(c);
    if (b->m->weights->gguf) { /* GGUF files have no switch for biases: what is there is used */
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

enum status attention_gqa_bind(struct binder *b, const char *layer, struct attention_gqa *a)
{
    const struct model_config *c = &b->m->config;
    const size_t hidden = c->hidden, q = q_width(c), kv = kv_width(c), all = q + 2 * kv;
    char prefix[TENSOR_NAME_BYTES_MAX / 2];
    snprintf(prefix, sizeof prefix, "%sself_attn.", layer);
    const struct {
        struct weight *to;
        struct matrix_spec spec;
    } matrices[] = {
        { &a->q,
          {
              .prefix = prefix,
              .leaf = "q_proj",
              .whole = "qkv_proj",
              .n_out = q,
              .n_in = hidden,
              .first = 0,
              .total = all,
          } },
        { &a->k,
          {
              .prefix = prefix,
              .leaf = "k_proj",
              .whole = "qkv_proj",
              .n_out = kv,
              .n_in = hidden,
              .first = q,
              .total = all,
          } },
        { &a->v,
          {
              .prefix = prefix,
              .leaf = "v_proj",
              .whole = "qkv_proj",
              .n_out = kv,
              .n_in = hidden,
              .first = q + kv,
              .total = all,
          } },
        { &a->o, { .prefix = prefix, .leaf = "o_proj", .n_out = hidden, .n_in = q } },
    };
    for (size_t i = 0; i < COUNT_OF(matrices); i++)
        TRY(bind_matrix(b, &matrices[i].spec, BIND_QUANTIZED, matrices[i].to));
    TRY(bind_biases(b, prefix, a));
    if (!c->qk_norm) return OK;
    TRY(bind_vector(b, prefix, "q_norm.weight", c->head_dim, &a->q_norm));
    return bind_vector(b, prefix, "k_norm.weight", c->head_dim, &a->k_norm);
}

void attention_gqa_bind_work(struct binder *b, struct attention_gqa_work *w)
{
    const struct model_config *c = &b->m->config;
    const size_t rows = b->m->max_rows;
    bind_floats(b, rows, q_width(c), &w->q);
    bind_floats(b, rows, kv_width(c), &w->k);
    bind_floats(b, rows, kv_width(c), &w->v);
    bind_floats(b, rows, q_width(c), &w->out);
    bind_reserve(b, 3 * rows, c->hidden);
    bind_reserve(b, rows, q_width(c));
}

void attention_gqa_release(struct kernel_ctx *k, struct attention_gqa *a)
{
    struct weight *weights[] = { &a->q, &a->k, &a->v, &a->o };
    for (size_t i = 0; i < COUNT_OF(weights); i++) weight_release(k, weights[i]);
}

/* ---- forward ---- */

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

/* The rows' keys and values into the pool. */
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

void attention_gqa_forward(const struct decoder_step *s, const struct attention_gqa *a,
                           const struct attention_gqa_work *w, const float *norm, uint32_t i_layer)
{
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
