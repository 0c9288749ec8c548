/* decoder.c - the skeleton: embedding, layers, head. Thread: plan, pack and free on the loading thread, forward on the engine thread. */
#include "shared/model/decoder.h"

#include <stdio.h>
#include <string.h>

#include "kernels/cpu/pages.h"
#include "shared/base/assert.h"
#include "shared/base/mem.h"
#include "shared/model/blocks.h"
#include "shared/model/rope.h"

struct layer {
    float *attn_norm, *ffn_norm; /* [H] */
    struct attention_gqa gqa;    /* one of these two, by the configuration */
    struct attention_mla mla;
    struct ffn           ffn;    /* one of these two, by the layer */
    struct moe           moe;
};

struct decoder {
    struct weight embed;      /* [V, H] */
    struct weight head;       /* [V, H]; no data when the embedding serves */
    float        *final_norm; /* [H] */
    struct layer *layers;
    float        *angles;     /* rope_table */
    /* Activations of one step. */
    float                    *x; /* [max_rows, H] */
    struct attention_gqa_work gqa;
    struct attention_mla_work mla;
    struct ffn_work           ffn;
    struct moe_work           moe;
    void                     *buffers; /* what all of these point into */
    size_t                    buffers_bytes;
    struct weight            *plan;    /* [n_plan] of all weights, between plan and pack */
    size_t                    n_plan;
};

/* ---- bind -------------------------------------------------------------------------------------------------------- */

static enum status bind_layer(struct binder *b, struct layer *l, uint32_t i)
{
    const struct model_config *c = &b->m->config;
    char layer[NAME_BYTES_MAX / 4], mlp[NAME_BYTES_MAX / 2];
    snprintf(layer, sizeof layer, "model.layers.%u.", i);
    snprintf(mlp, sizeof mlp, "%smlp.", layer);
    TRY(bind_vector(b, layer, "input_layernorm.weight", c->hidden, &l->attn_norm));
    TRY(bind_vector(b, layer, "post_attention_layernorm.weight", c->hidden, &l->ffn_norm));
    TRY(model_is_latent(c) ? attention_mla_bind(b, layer, &l->mla) : attention_gqa_bind(b, layer, &l->gqa));
    return model_layer_is_sparse(c, i) ? moe_bind(b, layer, &l->moe) : ffn_bind(b, mlp, c->intermediate, &l->ffn);
}

/* Some tied exports still carry a head. It is used when it is not the embedding after all. */
static bool head_is_embedding(struct binder *b)
{
    const struct weights_tensor *embed = weights_find(b->m->weights, "model.embed_tokens.weight");
    if (!b->m->config.tied) return false;
    const struct weights_tensor *head = weights_take(b->m->weights, "lm_head.weight");
    if (!head) return true;
    return embed && head->dtype == embed->dtype && head->bytes == embed->bytes && memcmp(head->data, embed->data, head->bytes) == 0;
}

static enum status bind_ends(struct binder *b, struct decoder *d)
{
    const struct model_config *c = &b->m->config;
    const struct matrix_want   embed = { .prefix = "model.", .leaf = "embed_tokens", .n_out = c->n_vocab, .n_in = c->hidden, .is_table = true };
    const struct matrix_want   head = { .prefix = "", .leaf = "lm_head", .n_out = c->n_vocab, .n_in = c->hidden };
    TRY(bind_matrix(b, &embed, BIND_AS_STORED, &d->embed));
    TRY(bind_vector(b, "model.", "norm.weight", c->hidden, &d->final_norm));
    return head_is_embedding(b) ? OK : bind_matrix(b, &head, BIND_AS_STORED, &d->head);
}

static void bind_work(struct binder *b, struct decoder *d)
{
    const struct model_config *c = &b->m->config;
    bool dense = false, sparse = false;
    for (uint32_t i = 0; i < c->n_layers; i++) {
        sparse = sparse || model_layer_is_sparse(c, i);
        dense = dense || !model_layer_is_sparse(c, i);
    }
    bind_floats(b, b->m->max_rows, c->hidden, &d->x);
    bind_reserve(b, b->m->max_rows, c->hidden); /* the head */
    if (model_is_latent(c)) attention_mla_bind_work(b, &d->mla);
    else attention_gqa_bind_work(b, &d->gqa);
    if (dense) ffn_bind_work(b, &d->ffn);
    if (sparse) moe_bind_work(b, &d->moe);
}

static enum status bind_all(struct binder *b)
{
    struct decoder *d = b->m->decoder;
    TRY(bind_ends(b, d));
    for (uint32_t i = 0; i < b->m->config.n_layers; i++) TRY(bind_layer(b, &d->layers[i], i));
    bind_work(b, d);
    return OK;
}

/* Factors by which frequencies are divided: a tensor that GGUF files have for llama3 scaling. */
static enum status read_rope_factors(struct model *m, float **out, struct err *err)
{
    const size_t half = rope_dim(&m->config) / 2;
    *out = NULL;
    if (!weights_find(m->weights, "rope_freqs.weight")) return OK;
    TRY(weights_vector(m->weights, "rope_freqs.weight", half, out, err));
    for (size_t i = 0; i < half; i++) {
        if ((*out)[i] >= 1e-6f && (*out)[i] <= 1e6f) continue;
        err_field(err, ERR_FORMAT, "rope_freqs.weight", "tensor rope_freqs.weight holds %g", (double)(*out)[i]);
        mem_free(*out);
        return ERR_FORMAT;
    }
    return OK;
}

enum status decoder_plan(struct model *m, struct err *err)
{
    struct binder b = { .m = m, .err = err };
    float        *factors;
    m->decoder = MEM_NEW(struct decoder);
    m->decoder->layers = MEM_ARRAY(struct layer, m->config.n_layers);
    enum status st = bind_all(&b);
    m->decoder->plan = b.plan;
    m->decoder->n_plan = b.n_plan;
    TRY(st);
    TRY(read_rope_factors(m, &factors, err));
    mem_free(factors);
    TRY(weights_check_all_used(m->weights, m->ops, &m->config, err));
    m->weight_bytes = b.weight_bytes;
    m->buffer_bytes = b.buffer_bytes + b.rounded_rows * b.rounded_in * sizeof(float);
    m->rope_bytes = rope_table_bytes(&m->config, m->max_len);
    m->decoder->buffers_bytes = pages_round(b.buffer_bytes);
    return OK;
}

/* From the copy on disk, or packed and then put there. */
static enum status pack_weights(struct binder *b, const struct model_options *o, const struct packed_key *key)
{
    const struct decoder       *d = b->m->decoder;
    const char                 *base = strrchr(o->path, '/');
    const struct packed_options p = { .folder = o->packed_folder, .name = base ? base + 1 : o->path, .key = *key, .plan = d->plan, .n = d->n_plan,
                                      .pool = b->m->kernels->pool, .progress = o->progress, .progress_arg = o->progress_arg };
    b->packed = o->packed_folder ? packed_open(&p) : NULL;
    b->converting = !b->packed || !packed_is_ready(b->packed);
    if (!b->converting) b->progress = NULL; /* reading the copy was what took its time */
    const size_t room = pages_round(b->weight_total); /* some of which is that of vectors, which do not lie in it */
    if (b->converting && room > 0 && (b->room = pages_map(room))) b->room_bytes = room;
    enum status st = bind_all(b);
    pages_unmap(b->room, b->room_bytes); /* what nothing was packed into */
    if (st == OK && b->packed) packed_finish(b->packed);
    b->m->weights_mapped = b->packed && packed_is_ready(b->packed);
    packed_close(b->packed);
    return st;
}

enum status decoder_pack(struct model *m, const struct model_options *o, const struct packed_key *key, struct err *err)
{
    struct decoder *d = m->decoder;
    struct binder   b = { .m = m, .err = err, .packing = true, .weight_total = m->weight_bytes, .progress = o->progress, .progress_arg = o->progress_arg };
    float          *factors;
    b.buffers = d->buffers = pages_map(d->buffers_bytes); /* zeroed on first touch: rows that no step has cost nothing */
    if (!d->buffers) return err_set(err, ERR_NOMEM, "no memory for %zu bytes of activations; lower --max-num-batched-tokens", d->buffers_bytes);
    TRY(pack_weights(&b, o, key));
    ASSERT(b.weight_bytes == m->weight_bytes && b.buffer_bytes <= d->buffers_bytes); /* both passes saw the same */
    if (kernel_ctx_reserve(m->kernels, b.rounded_rows, b.rounded_in) != OK)
        return err_set(err, ERR_NOMEM, "no memory for inputs of %zu x %zu elements; lower --max-num-batched-tokens", b.rounded_rows, b.rounded_in);
    TRY(read_rope_factors(m, &factors, err));
    d->angles = rope_table(&m->config, factors, m->max_len, m->kernels->pool);
    mem_free(factors);
    return OK;
}

static void release_layer(struct layer *l)
{
    attention_gqa_release(&l->gqa);
    attention_mla_release(&l->mla);
    ffn_release(&l->ffn);
    moe_release(&l->moe);
    mem_free(l->attn_norm);
    mem_free(l->ffn_norm);
}

void decoder_free(struct model *m)
{
    struct decoder *d = m->decoder;
    if (!d) return;
    for (uint32_t i = 0; i < m->config.n_layers; i++) release_layer(&d->layers[i]);
    weight_release(&d->embed);
    weight_release(&d->head);
    pages_unmap(d->buffers, d->buffers_bytes);
    mem_free(d->final_norm);
    mem_free(d->angles);
    mem_free(d->layers);
    mem_free(d->plan);
    mem_free(d);
    m->decoder = NULL;
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

static void layer_forward(const struct step *s, struct decoder *d, uint32_t i)
{
    const struct layer *l = &d->layers[i];
    if (model_is_latent(&s->m->config)) attention_mla_forward(s, &l->mla, &d->mla, l->attn_norm, i); /* [R, H] */
    else attention_gqa_forward(s, &l->gqa, &d->gqa, l->attn_norm, i);
    if (model_layer_is_sparse(&s->m->config, i)) moe_forward(s, &l->moe, &d->moe, l->ffn_norm);      /* [R, H] */
    else ffn_forward(s, &l->ffn, &d->ffn, l->ffn_norm);
}

/* Only the rows that are sampled from go through the head: for a prompt chunk that is at most its last. */
static void head_forward(const struct step *s, struct decoder *d)
{
    const struct model_config *c = &s->m->config;
    const struct model_batch  *b = s->b;
    const struct matmul_args head = { .w = d->head.data ? &d->head : &d->embed, .x = d->x, .x_stride = c->hidden, .x_rows = b->logit_rows,
                                      .norm = d->final_norm, .norm_eps = c->rms_eps, .n_rows = (size_t)b->n_logits, .y = b->logits,
                                      .y_stride = c->n_vocab };
    s->m->kernels->ops->matmul(s->m->kernels, &head, 1); /* [n_logits, V] */
}

void decoder_forward(struct model *m, const struct model_batch *b)
{
    struct decoder   *d = m->decoder;
    struct embed_job  embed = { .embed = &d->embed, .ids = b->ids, .x = d->x };
    const struct step s = { .m = m, .b = b, .angles = d->angles, .x = d->x, .n_rows = (size_t)b->n_rows };
    compute_pool_run(m->kernels->pool, b->n_rows, embed_row, &embed);                    /* [R, H] */
    for (uint32_t i = 0; i < m->config.n_layers; i++) layer_forward(&s, d, i);
    if (b->n_logits > 0) head_forward(&s, d);
}

struct kv_layer block_kv_layer(const struct step *s, uint32_t i_layer)
{
    struct kv_layout l;
    model_kv_layout(s->m, s->b->block_tokens, s->b->n_blocks, &l);
    return (struct kv_layer){ .data = (char *)s->b->kv + kv_layout_offset(&l, i_layer, 0), .dtype = (enum dtype)l.dtype,
                              .latent = model_is_latent(&s->m->config), .n_heads = (int32_t)l.n_kv_heads, .head_dim = (int32_t)l.head_dim,
                              .block_tokens = (int32_t)l.block_tokens };
}
