/* llama.c - the Llama family: pre-norm, grouped-query attention, rotary positions, SwiGLU.
 *
 *     x = E[token]
 *     per layer:  x += Wo attention(rope(Wq h), rope(Wk h), Wv h),  h = norm(x)
 *                 x += Wdown (silu(Wgate h) * Wup h),               h = norm(x)
 *     logits = Whead norm(x)
 *
 * Shapes beside the calls: R rows of the step, H hidden, D head_dim, Q = n_heads * D, KV = n_kv_heads * D, I intermediate, V
 * vocabulary. K and V of a layer are complete before its attention begins, so on_layer is called between the two: the bytes
 * travel while the rest of the layer computes.
 * Thread: bind and release on the loading thread, forward on the engine thread. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/mem.h"
#include "shared/model/layers.h"
#include "shared/model/model_rows.h"

struct layer {
    float        *attn_norm, *ffn_norm; /* [H] */
    struct linear q, k, v, o, gate_up, down;
};

struct llama {
    struct weight embed;      /* [V, H] */
    struct linear head;       /* [V, H]; no parts when the embedding serves */
    float        *final_norm; /* [H] */
    struct layer *layers;
    float        *rope;       /* [max_len, D/2, 2] */
    /* Activations of one step, max_rows rows each. */
    float *x, *h, *q, *k, *v, *attn, *act;
};

/* ---- bind -------------------------------------------------------------------------------------------------------- */

static enum status bind_layer(struct model *m, struct layer *l, uint32_t i_layer, struct err *err)
{
    const struct model_config *c = &m->config;
    const size_t hidden = c->hidden, q = (size_t)c->n_heads * c->head_dim, kv = (size_t)c->n_kv_heads * c->head_dim;
    /* GGUF files have no switch for biases: what is there is used. */
    const int attn_bias = m->weights->gguf ? BIAS_IF_PRESENT : c->attention_bias ? BIAS_NEEDED : BIAS_NONE;
    const int mlp_bias = m->weights->gguf ? BIAS_IF_PRESENT : c->mlp_bias ? BIAS_NEEDED : BIAS_NONE;
    const struct {
        struct linear     *to;
        struct linear_spec spec;
    } linears[] = {
        { &l->q, { { "self_attn.q_proj" }, { q }, 1, hidden, attn_bias } },
        { &l->k, { { "self_attn.k_proj" }, { kv }, 1, hidden, attn_bias } },
        { &l->v, { { "self_attn.v_proj" }, { kv }, 1, hidden, attn_bias } },
        { &l->o, { { "self_attn.o_proj" }, { hidden }, 1, q, attn_bias } },
        { &l->gate_up, { { "mlp.gate_proj", "mlp.up_proj" }, { c->intermediate, c->intermediate }, 2, hidden, mlp_bias, .paired = true } },
        { &l->down, { { "mlp.down_proj" }, { hidden }, 1, c->intermediate, mlp_bias } },
    };
    char prefix[64], name[128];
    snprintf(prefix, sizeof prefix, "model.layers.%u.", i_layer);
    snprintf(name, sizeof name, "%sinput_layernorm.weight", prefix);
    TRY(weights_vector(m->weights, name, hidden, &l->attn_norm, err));
    snprintf(name, sizeof name, "%spost_attention_layernorm.weight", prefix);
    TRY(weights_vector(m->weights, name, hidden, &l->ffn_norm, err));
    for (size_t i = 0; i < COUNT_OF(linears); i++) {
        TRY(linear_load(linears[i].to, m->weights, m->kernels, prefix, &linears[i].spec, err));
        m->weight_bytes += linear_bytes(linears[i].to);
    }
    return OK;
}

/* Some tied exports still carry a head. It is used when it is not the embedding after all. */
static bool head_is_embedding(struct model *m, const struct weight_src *embed)
{
    if (!m->config.tied) return false;
    const struct weights_tensor *head = weights_take(m->weights, "lm_head.weight");
    if (!head) return true;
    return head->dtype == (int)embed->dtype && head->bytes == embed->n_out * dtype_row_bytes(embed->dtype, embed->n_in) &&
           memcmp(head->data, embed->data, head->bytes) == 0;
}

static enum status bind_ends(struct model *m, struct llama *w, struct err *err)
{
    const struct model_config *c = &m->config;
    struct weight_src          embed;
    TRY(weights_matrix(m->weights, "model.embed_tokens.weight", c->n_vocab, c->hidden, &embed, err));
    const struct weight_pack_args pack = { .parts = &embed, .n_parts = 1 };
    enum status st = m->kernels->ops->weight_pack(m->kernels, &pack, &w->embed);
    if (st != OK) return err_set(err, st, "no memory to pack the embedding (%u x %u)", c->n_vocab, c->hidden);
    m->weight_bytes += w->embed.bytes;
    TRY(weights_vector(m->weights, "model.norm.weight", c->hidden, &w->final_norm, err));
    if (head_is_embedding(m, &embed)) return OK;
    const struct linear_spec head = { { "lm_head" }, { c->n_vocab }, 1, c->hidden, BIAS_NONE };
    TRY(linear_load(&w->head, m->weights, m->kernels, "", &head, err));
    m->weight_bytes += linear_bytes(&w->head);
    return OK;
}

static enum status bind_rope(struct model *m, struct llama *w, struct err *err)
{
    float *factors = NULL;
    size_t half = m->config.head_dim / 2;
    if (weights_has(m->weights, "rope_freqs.weight")) {
        TRY(weights_vector(m->weights, "rope_freqs.weight", half, &factors, err));
        for (size_t i = 0; i < half; i++) {
            if (factors[i] >= 1e-6f && factors[i] <= 1e6f) continue;
            err_field(err, ERR_FORMAT, "rope_freqs.weight", "tensor rope_freqs.weight holds %g", (double)factors[i]);
            mem_free(factors);
            return ERR_FORMAT;
        }
    }
    w->rope = rope_table(&m->config, factors, m->max_len);
    mem_free(factors);
    return OK;
}

static void allocate_activations(const struct model *m, struct llama *w)
{
    const struct model_config *c = &m->config;
    const size_t rows = m->max_rows, q = (size_t)c->n_heads * c->head_dim, kv = (size_t)c->n_kv_heads * c->head_dim;
    const struct {
        float **to;
        size_t  width;
    } buffers[] = { { &w->x, c->hidden }, { &w->h, c->hidden },  { &w->q, q },           { &w->k, kv },
                    { &w->v, kv },        { &w->attn, q },       { &w->act, c->intermediate } };
    for (size_t i = 0; i < COUNT_OF(buffers); i++) *buffers[i].to = mem_aligned(64, rows * buffers[i].width * sizeof(float));
}

static enum status llama_bind(struct model *m, struct err *err)
{
    struct llama *w = MEM_NEW(struct llama);
    m->impl = w;
    w->layers = MEM_ARRAY(struct layer, m->config.n_layers);
    TRY(bind_ends(m, w, err));
    for (uint32_t i = 0; i < m->config.n_layers; i++) TRY(bind_layer(m, &w->layers[i], i, err));
    TRY(bind_rope(m, w, err));
    allocate_activations(m, w);
    size_t widest = m->config.intermediate > m->config.hidden ? m->config.intermediate : m->config.hidden;
    size_t attn = (size_t)m->config.n_heads * m->config.head_dim;
    return kernel_ctx_reserve(m->kernels, m->max_rows, widest > attn ? widest : attn);
}

static void llama_release(struct model *m)
{
    struct llama *w = m->impl;
    if (!w) return;
    for (uint32_t i = 0; w->layers && i < m->config.n_layers; i++) {
        struct layer  *l = &w->layers[i];
        struct linear *linears[] = { &l->q, &l->k, &l->v, &l->o, &l->gate_up, &l->down };
        for (size_t j = 0; j < COUNT_OF(linears); j++) linear_release(linears[j]);
        mem_free(l->attn_norm);
        mem_free(l->ffn_norm);
    }
    weight_release(&w->embed);
    linear_release(&w->head);
    float *owned[] = { w->final_norm, w->rope, w->x, w->h, w->q, w->k, w->v, w->attn, w->act };
    for (size_t i = 0; i < COUNT_OF(owned); i++) mem_free(owned[i]);
    mem_free(w->layers);
    mem_free(w);
    m->impl = NULL;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

struct embed_job {
    const struct weight *embed;
    const int32_t       *ids;
    float               *x;
};

static void embed_row(void *arg, int row, int thread)
{
    const struct embed_job *j = arg;
    (void)thread;
    weight_row(j->embed, (size_t)j->ids[row], j->x + (size_t)row * j->embed->n_in);
}

static void attention_block(struct model *m, const struct model_batch *b, uint32_t i_layer)
{
    const struct model_config *c = &m->config;
    struct llama              *w = m->impl;
    const struct layer        *l = &w->layers[i_layer];
    struct kernel_ctx         *k = m->kernels;
    const size_t rows = (size_t)b->n_rows, n_q = (size_t)c->n_heads * c->head_dim, n_kv = (size_t)c->n_kv_heads * c->head_dim;
    struct kv_layout layout;
    model_kv_layout(m, b->block_tokens, b->n_blocks, &layout);
    struct matmul_args jobs[3 * LINEAR_PARTS_MAX];
    k->ops->rms_norm(k, w->h, c->hidden, w->x, c->hidden, l->attn_norm, rows, c->hidden, c->rms_eps);                   /* [R, H] */
    size_t n = linear_jobs(&l->q, jobs, w->q, n_q, w->h, rows, MATMUL_STORE);                                           /* [R, Q] */
    n += linear_jobs(&l->k, jobs + n, w->k, n_kv, w->h, rows, MATMUL_STORE);                                            /* [R, KV] */
    n += linear_jobs(&l->v, jobs + n, w->v, n_kv, w->h, rows, MATMUL_STORE);                                            /* [R, KV] */
    k->ops->matmul(k, jobs, n);
    k->ops->rope(k, w->q, n_q, rows, c->n_heads, c->head_dim, c->head_dim, w->rope, b->pos, c->rope_interleaved);       /* [R, Q] */
    k->ops->rope(k, w->k, n_kv, rows, c->n_kv_heads, c->head_dim, c->head_dim, w->rope, b->pos, c->rope_interleaved);   /* [R, KV] */

    const struct kv_layer kv = { .data = (char *)b->kv + kv_layout_offset(&layout, i_layer, 0), .dtype = (enum dtype)layout.dtype,
                                 .n_heads = (int32_t)c->n_kv_heads, .head_dim = (int32_t)c->head_dim, .block_tokens = (int32_t)b->block_tokens };
    const struct kv_append_args append = { .k = w->k, .v = w->v, .kv = kv, .seqs = b->seqs, .n_seqs = b->n_seqs };
    k->ops->kv_append(k, &append);
    if (b->on_layer) b->on_layer(b->on_layer_arg, i_layer);

    const struct attn_args attn = { .q = w->q, .out = w->attn, .kv = kv, .seqs = b->seqs, .n_seqs = b->n_seqs, .n_heads = (int32_t)c->n_heads,
                                    .v_dim = (int32_t)c->head_dim, .scale = (float)(1.0 / sqrt((double)c->head_dim)) };
    k->ops->attention(k, &attn);                                                                                        /* [R, Q] */
    linear_forward(k, &l->o, w->x, c->hidden, w->attn, rows, MATMUL_ADD);                                               /* [R, H] */
}

static void ffn_block(struct model *m, uint32_t i_layer, size_t rows)
{
    const struct model_config *c = &m->config;
    struct llama              *w = m->impl;
    const struct layer        *l = &w->layers[i_layer];
    struct kernel_ctx         *k = m->kernels;
    k->ops->rms_norm(k, w->h, c->hidden, w->x, c->hidden, l->ffn_norm, rows, c->hidden, c->rms_eps); /* [R, H] */
    linear_forward(k, &l->gate_up, w->act, c->intermediate, w->h, rows, MATMUL_SILU_MUL);            /* [R, I] */
    linear_forward(k, &l->down, w->x, c->hidden, w->act, rows, MATMUL_ADD);                          /* [R, H] */
}

/* Only the rows that are sampled from go through the head: for a prompt chunk that is at most its last. */
static void head_block(struct model *m, const struct model_batch *b)
{
    const struct model_config *c = &m->config;
    struct llama              *w = m->impl;
    struct kernel_ctx         *k = m->kernels;
    const size_t rows = (size_t)b->n_logits;
    for (size_t i = 0; i < rows; i++)
        memcpy(w->h + i * c->hidden, w->x + (size_t)b->logit_rows[i] * c->hidden, c->hidden * sizeof(float));
    const struct matmul_args tied = { .w = &w->embed, .x = w->h, .x_stride = c->hidden, .n_rows = rows, .y = b->logits, .y_stride = c->n_vocab };
    k->ops->rms_norm(k, w->h, c->hidden, w->h, c->hidden, w->final_norm, rows, c->hidden, c->rms_eps); /* [n_logits, H] */
    if (w->head.n_parts > 0) linear_forward(k, &w->head, b->logits, c->n_vocab, w->h, rows, MATMUL_STORE); /* [n_logits, V] */
    else k->ops->matmul(k, &tied, 1);
}

static void llama_forward(struct model *m, const struct model_batch *b)
{
    struct llama    *w = m->impl;
    struct embed_job embed = { .embed = &w->embed, .ids = b->ids, .x = w->x };
    compute_pool_run(m->kernels->pool, b->n_rows, embed_row, &embed); /* [R, H] */
    for (uint32_t i = 0; i < m->config.n_layers; i++) {
        attention_block(m, b, i);
        ffn_block(m, i, (size_t)b->n_rows);
    }
    if (b->n_logits > 0) head_block(m, b);
}

/* ---- row --------------------------------------------------------------------------------------------------------- */

static const char *const ARCHS[] = { "LlamaForCausalLM", "llama", NULL };

const struct model_ops model_llama_ops = {
    .name = "llama",
    .archs = ARCHS,
    .bind = llama_bind,
    .forward = llama_forward,
    .release = llama_release,
};
