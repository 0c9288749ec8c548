/* decoder.c - the skeleton: embedding, layers, head. Thread: plan, pack and free on the loading
 * thread, forward on the engine thread. */
#include "shared/model/decoder.h"

#include <stdio.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/model/rope.h"
#include "shared/model/sublayers.h"

struct decoder_layer {
    float *attn_norm, *ffn_norm; /* [H] */
    struct attention_gqa gqa;    /* one of these two, by the configuration */
    struct attention_mla mla;
    struct ffn ffn; /* one of these two, by the layer */
    struct moe moe;
};

/* Bytes that the first pass counted. */
struct decoder_totals {
    size_t weights, vectors, buffers, host;
};

struct decoder {
    struct weight embed; /* [V, H] */
    struct weight head;  /* [V, H]; no data when the embedding serves */
    float *final_norm;   /* [H] */
    struct decoder_layer *layers;
    float *cos_sin; /* rope_table */
    /* Activations of one step. */
    float *x; /* [max_rows, H] */
    struct attention_gqa_work gqa;
    struct attention_mla_work mla;
    struct ffn_work ffn;
    struct moe_work moe;
    struct attn_list *lists; /* of the step: all its sequences, then
                              * attention_mla_lists */
    float *logits;           /* [max_logits, V]; NULL where the host's memory serves */
    /* Memory that all of these point into, norms and biases included. */
    struct dev_mem buffers, vectors, cos_sin_mem;
    struct weight_arena weight_arena;
    void *host;
    struct decoder_totals totals;
    struct weight *plan; /* [n_plan] of all weights, between plan and pack */
    size_t n_plan;
    struct read_ahead_range *sources; /* [n_sources] where they are in files, likewise */
    size_t n_sources;
};

/* ---- bind ---- */

static enum status bind_layer(struct binder *b, struct decoder_layer *l, uint32_t i)
{
    const struct model_config *c = &b->m->config;
    char layer[TENSOR_NAME_BYTES_MAX / 4], mlp[TENSOR_NAME_BYTES_MAX / 2];
    snprintf(layer, sizeof layer, "model.layers.%u.", i);
    snprintf(mlp, sizeof mlp, "%smlp.", layer);
    TRY(bind_vector(b, layer, "input_layernorm.weight", c->hidden, &l->attn_norm));
    TRY(bind_vector(b, layer, "post_attention_layernorm.weight", c->hidden, &l->ffn_norm));
    TRY(model_is_latent(c) ? attention_mla_bind(b, layer, &l->mla)
                           : attention_gqa_bind(b, layer, &l->gqa));
    return model_layer_is_sparse(c, i) ? moe_bind(b, layer, &l->moe)
                                       : ffn_bind(b, mlp, c->intermediate, &l->ffn);
}

/* Some tied exports still carry a head. It is used when it is not the embedding after all. */
static bool head_is_embedding(struct binder *b)
{
    const struct weights_tensor *embed = weights_find(b->m->weights, "model.embed_tokens.weight");
    if (!b->m->config.tied) return false;
    const struct weights_tensor *head = weights_take(b->m->weights, "lm_head.weight");
    if (!head) return true;
    return embed && head->dtype == embed->dtype && head->bytes == embed->bytes &&
           memcmp(head->data, embed->data, head->bytes) == 0;
}

static enum status bind_ends(struct binder *b, struct decoder *d)
{
    const struct model_config *c = &b->m->config;
    const struct matrix_spec embed = {
        .prefix = "model.",
        .leaf = "embed_tokens",
        .n_out = c->n_vocab,
        .n_in = c->hidden,
        .is_table = true,
    };
    const struct matrix_spec head = {
        .prefix = "", .leaf = "lm_head", .n_out = c->n_vocab, .n_in = c->hidden
    };
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
    if (!b->m->kernels->device->is_host) bind_floats(b, b->m->max_logits, c->n_vocab, &d->logits);
    d->lists = bind_host(b, b->m->max_rows + 2, sizeof *d->lists);
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
        err_field(err, ERR_FORMAT, "rope_freqs.weight", "tensor rope_freqs.weight holds %g",
                  (double)(*out)[i]);
        mem_free(*out);
        return ERR_FORMAT;
    }
    return OK;
}

enum status decoder_plan(struct model *m, struct err *err)
{
    struct binder b = { .m = m, .err = err };
    float *factors;
    m->decoder = MEM_NEW(struct decoder);
    m->decoder->layers = MEM_ARRAY(struct decoder_layer, m->config.n_layers);
    enum status st = bind_all(&b);
    m->decoder->plan = b.plan;
    m->decoder->n_plan = b.n_plan;
    m->decoder->sources = b.sources;
    m->decoder->n_sources = b.n_sources;
    TRY(st);
    TRY(read_rope_factors(m, &factors, err));
    mem_free(factors);
    TRY(weights_check_all_used(m->weights, m->ops, &m->config, err));
    m->weight_bytes = b.weight_bytes + b.vectors.bytes;
    m->buffer_bytes = b.buffers.bytes + b.host.bytes +
                      b.rounded_rows * b.rounded_in * sizeof(float);
    m->rope_bytes = rope_table_bytes(&m->config, m->max_len);
    m->decoder->totals = (struct decoder_totals){
        .weights = b.weight_bytes,
        .vectors = b.vectors.bytes,
        .buffers = b.buffers.bytes,
        .host = b.host.bytes,
    };
    return OK;
}

/* ---- pack ---- */

static double ms(uint64_t ns) { return (double)ns / 1e6; }

/* What took the time: waiting for files, conversion (and quantisation), waiting for copies to the
 * device. All of them overlap with the others. */
static void log_speed(const struct binder *b, uint64_t all_ns, uint64_t end_ns,
                      const struct weight_times *t)
{
    /* inside weight_pack */
    const uint64_t copy_ns = t->copy_wait_ns > end_ns ? t->copy_wait_ns - end_ns : 0;
    const uint64_t convert_ns = b->pack_ns > copy_ns ? b->pack_ns - copy_ns : 0;
    const size_t bytes = b->source_bytes ? b->source_bytes : b->weight_bytes;
    log_info("weights packed",
             "read_mib=%.1f packed_mib=%.1f after_ms=%.0f gb_s=%.2f read_wait_ms=%.0f "
             "convert_ms=%.0f copy_wait_ms=%.0f",
             (double)b->source_bytes / (1 << 20), (double)b->weight_bytes / (1 << 20), ms(all_ns),
             (double)bytes / (double)(all_ns ? all_ns : 1), ms(read_ahead_wait_ns(b->ahead)),
             ms(convert_ns), ms(t->copy_wait_ns));
}

/* Read, convert and send, which overlap. */
static enum status pack_all(struct binder *b)
{
    struct kernel_ctx *k = b->m->kernels;
    const struct decoder *d = b->m->decoder;
    struct weight_times times;
    const uint64_t t0 = clock_ns();
    b->ahead = b->converting ? read_ahead_start(d->sources, d->n_sources) : NULL;
    enum status st = bind_all(b);
    const uint64_t t_end = clock_ns();
    const enum status ended = k->weight_ops->finish(k, &times, st == OK ? b->err : NULL);
    if (st == OK) st = ended;
    if (st == OK && b->converting) log_speed(b, clock_ns() - t0, clock_ns() - t_end, &times);
    read_ahead_stop(b->ahead);
    b->ahead = NULL;
    return st;
}

bool decoder_uses_weight_cache(const struct model *m, const struct model_options *o)
{
    /* making them up takes no longer than reading a copy */
    return o->weight_cache_folder && m->kernels->device->is_host && !m->weights->dummy;
}

/* From the copy on disk, or packed and then put there. */
static enum status pack_weights(struct binder *b, const struct model_options *o,
                                const struct weight_cache_key *key)
{
    struct decoder *d = b->m->decoder;
    const char *base = strrchr(o->path, '/');
    const struct weight_cache_options p = {
        .folder = o->weight_cache_folder,
        .name = base ? base + 1 : o->path,
        .key = *key,
        .plan = d->plan,
        .n = d->n_plan,
        .pool = b->m->kernels->pool,
        .progress = o->progress,
        .progress_arg = o->progress_arg,
    };
    b->cache = decoder_uses_weight_cache(b->m, o) ? weight_cache_open(&p) : NULL;
    b->converting = !b->cache || !weight_cache_is_ready(b->cache);
    if (!b->converting) b->progress = NULL; /* reading the copy was what took its time */
    struct kernel_ctx *k = b->m->kernels;
    enum status st = OK;
    if (b->converting)
        st = k->weight_ops->arena_create(k, d->totals.weights, &d->weight_arena, b->err);
    if (st == OK) st = pack_all(b);
    if (st == OK && b->cache) weight_cache_finish(b->cache);
    b->m->weights_mapped = b->cache && weight_cache_is_ready(b->cache);
    weight_cache_close(b->cache);
    return st;
}

/* Rows that no step has are never touched, and cost nothing on the processor. */
static enum status alloc_buffers(struct binder *b)
{
    struct decoder *d = b->m->decoder;
    struct device *device = b->m->kernels->device;
    if (device_mem_alloc(device, d->totals.buffers, DEVICE_MEM_PRIVATE, &d->buffers, NULL) != OK ||
        !(d->host = mem_try_calloc(1, d->totals.host)))
        return err_set(b->err, ERR_NOMEM,
                       "no memory for %zu bytes of activations; lower --max-num-batched-tokens",
                       d->totals.buffers + d->totals.host);
    TRY(device_mem_alloc(device, d->totals.vectors, DEVICE_MEM_PRIVATE, &d->vectors, b->err));
    b->buffers.at = d->buffers.ptr;
    b->vectors.at = d->vectors.ptr;
    b->host.at = d->host;
    return OK;
}

static enum status make_cos_sin(struct model *m, struct err *err)
{
    struct decoder *d = m->decoder;
    struct device *device = m->kernels->device;
    float *factors, *table = NULL;
    TRY(device_mem_alloc(device, m->rope_bytes, DEVICE_MEM_PRIVATE, &d->cos_sin_mem, err));
    TRY(read_rope_factors(m, &factors, err));
    d->cos_sin = d->cos_sin_mem.ptr;
    if (!device->is_host) table = mem_aligned(64, m->rope_bytes);
    rope_table(&m->config, factors, m->max_len, m->kernels->pool,
               table ? table : d->cos_sin_mem.ptr);
    if (table) device_upload(device, d->cos_sin_mem.ptr, table, m->rope_bytes);
    mem_free(table);
    mem_free(factors);
    return OK;
}

enum status decoder_pack(struct model *m, const struct model_options *o,
                         const struct weight_cache_key *key, struct err *err)
{
    const struct decoder_totals *t = &m->decoder->totals;
    struct binder b = {
        .m = m,
        .err = err,
        .packing = true,
        .weight_arena = &m->decoder->weight_arena,
        .weight_total = t->weights,
        .progress = o->progress,
        .progress_arg = o->progress_arg,
    };
    TRY(alloc_buffers(&b));
    TRY(pack_weights(&b, o, key));
    /* both passes saw the same */
    ASSERT(b.weight_bytes == t->weights && b.vectors.bytes == t->vectors &&
           b.buffers.bytes == t->buffers && b.host.bytes == t->host);
    if (kernel_ctx_reserve(m->kernels, b.rounded_rows, b.rounded_in) != OK)
        return err_set(err, ERR_NOMEM,
                       "no memory for inputs of %zu x %zu elements; lower --max-num-batched-tokens",
                       b.rounded_rows, b.rounded_in);
    TRY(make_cos_sin(m, err));
    return device_fault(m->kernels->device, err);
}

static void release_layer(struct kernel_ctx *k, struct decoder_layer *l)
{
    attention_gqa_release(k, &l->gqa);
    attention_mla_release(k, &l->mla);
    ffn_release(k, &l->ffn);
    moe_release(k, &l->moe);
}

void decoder_free(struct model *m)
{
    struct decoder *d = m->decoder;
    if (!d) return;
    for (uint32_t i = 0; i < m->config.n_layers; i++) release_layer(m->kernels, &d->layers[i]);
    weight_release(m->kernels, &d->embed);
    weight_release(m->kernels, &d->head);
    m->kernels->weight_ops->arena_free(m->kernels, &d->weight_arena);
    struct dev_mem *all[] = { &d->buffers, &d->vectors, &d->cos_sin_mem };
    for (size_t i = 0; i < COUNT_OF(all); i++) device_mem_free(m->kernels->device, all[i]);
    mem_free(d->host);
    mem_free(d->layers);
    mem_free(d->plan);
    mem_free(d->sources);
    mem_free(d);
    m->decoder = NULL;
}

/* ---- forward ---- */

static void layer_forward(const struct decoder_step *s, struct decoder *d, uint32_t i)
{
    const struct decoder_layer *l = &d->layers[i];
    /* [R, H] */
    if (model_is_latent(&s->m->config)) attention_mla_forward(s, &l->mla, &d->mla, l->attn_norm, i);
    else attention_gqa_forward(s, &l->gqa, &d->gqa, l->attn_norm, i);
    /* [R, H] */
    if (model_layer_is_sparse(&s->m->config, i)) moe_forward(s, &l->moe, &d->moe, l->ffn_norm);
    else ffn_forward(s, &l->ffn, &d->ffn, l->ffn_norm);
}

/* Only the rows that are sampled from go through the head: for a prompt chunk that is at most its
 * last. */
static void head_forward(const struct decoder_step *s, const struct decoder *d,
                         const struct kernel_step *step, float *logits)
{
    const struct model_config *c = &s->m->config;
    struct kernel_ctx *k = s->m->kernels;
    const struct matmul_args head = {
        .w = d->head.data ? &d->head : &d->embed,
        .x = d->x,
        .x_stride = c->hidden,
        .x_rows = step->logit_rows,
        .norm = d->final_norm,
        .norm_eps = c->rms_eps,
        .n_rows = (size_t)step->n_logits,
        .y = logits,
        .y_stride = c->n_vocab,
    };
    k->ops->matmul(k, &head, 1); /* [n_logits, V] */
}

/* The slots of a staged step. */
static void compute(struct model *m, const struct model_batch *b, const struct kernel_step *step)
{
    struct decoder *d = m->decoder;
    struct kernel_ctx *k = m->kernels;
    const struct decoder_step s = {
        .m = m,
        .b = b,
        .pos = step->pos,
        .all = d->lists[0],
        .cos_sin = d->cos_sin,
        .x = d->x,
        .n_rows = (size_t)step->n_rows,
    };
    /* [R, H] */
    k->ops->embed(k, d->x, &d->embed, step->ids, s.n_rows);
    for (uint32_t i = 0; i < m->config.n_layers; i++) layer_forward(&s, d, i);
    if (step->n_logits > 0) head_forward(&s, d, step, d->logits ? d->logits : b->logits);
}

/* Wait for the step: once it returns, its KV blocks may be published, sent or freed. */
static void wait_for_logits(const struct model *m, const struct model_batch *b)
{
    struct device *device = m->kernels->device;
    const float *logits = m->decoder->logits;
    if (logits && b->n_logits > 0)
        device_download(device, b->logits, logits,
                        (size_t)b->n_logits * m->config.n_vocab * sizeof *logits);
    else device_wait(device);
}

bool decoder_forward(struct model *m, const struct model_batch *b)
{
    struct decoder *d = m->decoder;
    struct kernel_ctx *k = m->kernels;
    struct kernel_step step = {
        .n_rows = b->n_rows,
        .n_logits = b->n_logits,
        .ids = b->ids,
        .pos = b->pos,
        .logit_rows = b->logit_rows,
        .lists = d->lists,
        .n_lists = 1,
        .block_tokens = (int32_t)b->block_tokens,
        .sample_requests = b->sample_requests,
        .parity = b->parity,
        .eager = b->eager,
    };
    d->lists[0] = (struct attn_list){ .seqs = b->seqs, .n_seqs = b->n_seqs };
    if (model_is_latent(&m->config))
        step.n_lists += attention_mla_lists(m, b, &d->mla, d->lists + 1);
    k->step_ops->upload(k, &step);
    if (device_fault(k->device, NULL) != OK) return false; /* nothing was handed over */
    if (!step.graph_launched) compute(m, b, &step);
    k->step_ops->submit(k);
    if (step.sampled) k->step_ops->sample(k, d->logits, m->config.n_vocab);
    else wait_for_logits(m, b);
    return step.sampled;
}

/* ---- before the first step ---- */

/* of a step: what is longer computes for longer than launching takes */
enum { GRAPH_ROWS_MAX = 512 };

/* A recorded step is in one piece everywhere. */
static uint32_t graph_rows_max(const struct model *m)
{
    const struct model_config *c = &m->config;
    uint32_t n = GRAPH_ROWS_MAX;
    if (c->moe.n_experts && m->decoder->moe.max_rows < n) n = m->decoder->moe.max_rows;
    if (model_is_latent(c) && attention_mla_range_rows(m) < n)
        n = (uint32_t)attention_mla_range_rows(m);
    return n;
}

static bool capture_graph(struct model *m, const struct model_batch *b, int32_t i)
{
    struct decoder *d = m->decoder;
    struct kernel_ctx *k = m->kernels;
    struct kernel_step s = {
        .lists = d->lists,
        .n_lists = 1,
        .block_tokens = (int32_t)b->block_tokens,
    };
    d->lists[0] = (struct attn_list){ .n_seqs = 1 };
    if (model_is_latent(&m->config))
        s.n_lists += attention_mla_capture_lists(&d->mla, d->lists + 1);
    if (!k->step_ops->capture(k, i, &s)) return false;
    if (model_is_latent(&m->config)) d->mla.ranges[0].n = (size_t)s.n_rows;
    compute(m, b, &s);
    k->step_ops->submit(k);
    return true;
}

enum status decoder_prepare(struct model *m, const struct model_prepare_args *s, struct err *err)
{
    const struct model_config *c = &m->config;
    const bool latent = model_is_latent(c);
    struct kernel_ctx *k = m->kernels;
    const struct kernel_limits l = {
        .max_rows = m->max_rows,
        .max_logits = m->max_logits,
        .max_len = m->max_len,
        .n_vocab = c->n_vocab,
        .block_tokens = s->block_tokens,
        .max_seqs = s->max_seqs,
        .n_lists = latent ? 3 : 1,
        .max_lists = latent ? 3 + (uint32_t)(m->max_rows / attention_mla_range_rows(m)) : 1,
        .n_heads = c->n_heads,
        .v_dim = latent ? c->mla.kv_lora : c->head_dim,
        .latent = latent,
        .n_kv_heads = latent ? 1 : c->n_kv_heads,
        .head_dim = latent ? c->mla.kv_lora + c->mla.rope : c->head_dim,
        .max_graph_rows = s->capture_graphs ? graph_rows_max(m) : 0
    };
    TRY(k->step_ops->prepare(k, &l, err));
    const struct model_batch b = {
        .kv = s->kv,
        .n_blocks = s->n_blocks,
        .block_tokens = s->block_tokens,
    };
    for (int32_t i = 0; l.max_graph_rows > 0 && capture_graph(m, &b, i); i++) continue;
    return device_fault(k->device, err);
}

/* ---- for the blocks ---- */

struct kv_layer decoder_kv_layer(const struct decoder_step *s, uint32_t i_layer)
{
    struct kv_layout l;
    model_kv_layout(s->m, s->b->block_tokens, s->b->n_blocks, &l);
    return (struct kv_layer){
        .data = (char *)s->b->kv + kv_layout_offset(&l, i_layer, 0),
        .dtype = (enum dtype)l.dtype,
        .latent = model_is_latent(&s->m->config),
        .n_heads = (int32_t)l.n_kv_heads,
        .head_dim = (int32_t)l.head_dim,
        .block_tokens = (int32_t)l.block_tokens,
    };
}

void decoder_kv_written(const struct decoder_step *s, uint32_t i_layer)
{
    if (device_fault(s->m->kernels->device, NULL) != OK) return;
    if (s->b->on_layer) s->b->on_layer(s->b->on_layer_arg, i_layer);
}
