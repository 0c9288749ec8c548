/* decoder_load.c - the decoder's weights and buffers: plan, pack and free.
 *
 * Thread: the loading one. */
#include <stdio.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/model/decoder.h"
#include "shared/model/decoder_state.h"
#include "shared/model/expert_store.h"
#include "shared/model/rope.h"

/* ---- kinds ---- */

static const struct ffn_ops *const FFN_OPS[FFN_KINDS] = { &ffn_dense_ops, &ffn_moe_ops };

static const struct attention_ops *attention_ops_of(const struct model_config *c)
{
    return model_is_latent(c) ? &attention_mla_ops : &attention_gqa_ops;
}

static void create_layer(const struct model *m, struct decoder *d, uint32_t i)
{
    const struct model_config *c = &m->config;
    struct decoder_layer *l = &d->layers[i];
    const int kind = model_layer_is_sparse(c, i) ? 1 : 0;
    l->attention = attention_ops_of(c)->create(m);
    l->ffn = FFN_OPS[kind]->create(m, i);
    if (!d->ffn_works[kind]) d->ffn_works[kind] = FFN_OPS[kind]->create_work();
    l->ffn_work = d->ffn_works[kind];
}

static struct decoder *create_decoder(const struct model *m)
{
    const struct model_config *c = &m->config;
    struct decoder *d = MEM_NEW(struct decoder);
    const uint32_t n_layers = model_n_all_layers(c);
    d->layers = MEM_ARRAY(struct decoder_layer, n_layers);
    d->attention_work = attention_ops_of(c)->create_work();
    for (uint32_t i = 0; i < n_layers; i++) create_layer(m, d, i);
    return d;
}

/* ---- bind ---- */

enum status decoder_bind_layer(struct binder *b, struct decoder_layer *l, const char *layer)
{
    const struct model_config *c = &b->m->config;
    TRY(bind_vector(b, layer, "input_layernorm.weight", c->hidden, &l->attn_norm));
    TRY(bind_vector(b, layer, "post_attention_layernorm.weight", c->hidden, &l->ffn_norm));
    TRY(l->attention->ops->bind(b, layer, l->attention));
    return l->ffn->ops->bind(b, layer, l->ffn);
}

/* Some tied exports still have a head. It is used if it differs from the embedding. */
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
    struct matrix_spec head = {
        .prefix = "", .leaf = "lm_head", .n_out = c->n_vocab, .n_in = c->hidden
    };
    TRY(bind_matrix(b, &embed, BIND_AS_STORED, &d->embed));
    TRY(bind_vector(b, "model.", "norm.weight", c->hidden, &d->final_norm));
    const bool tied = head_is_embedding(b);
    if (tied) head = embed; /* whose rows a rank of several packs again */
    d->head_cut = share_cut(&b->m->share, c->n_vocab, bind_unit(b, &head, BIND_AS_STORED));
    head.part = &d->head_cut.mine;
    if (tied && b->m->share.tp_size == 1) return OK;
    return bind_matrix(b, &head, BIND_AS_STORED, &d->head);
}

static void bind_work(struct binder *b, struct decoder *d)
{
    const struct model_config *c = &b->m->config;
    bind_floats(b, b->m->max_rows, c->hidden, &d->x);
    if (!b->m->kernels->device->is_host) bind_floats(b, b->m->max_logits, c->n_vocab, &d->logits);
    d->lists = bind_host(b, b->m->max_rows + 2, sizeof *d->lists);
    bind_reserve(b, b->m->max_rows, c->hidden); /* the head */
    decoder_draft_bind_work(b, &d->draft);
    d->attention_work->ops->bind_work(b, d->attention_work);
    for (int i = 0; i < FFN_KINDS; i++)
        if (d->ffn_works[i]) d->ffn_works[i]->ops->bind_work(b, d->ffn_works[i]);
}

static enum status bind_all(struct binder *b)
{
    struct decoder *d = b->m->decoder;
    TRY(bind_ends(b, d));
    for (uint32_t i = 0; i < b->m->config.n_layers; i++) {
        char layer[TENSOR_NAME_BYTES_MAX / 4];
        snprintf(layer, sizeof layer, "model.layers.%u.", i);
        TRY(decoder_bind_layer(b, &d->layers[i], layer));
    }
    TRY(decoder_draft_bind(b, d));
    bind_work(b, d);
    return OK;
}

/* The factors that divide frequencies: a tensor of GGUF files with llama3 scaling. */
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

/* The share's own experts. */
static struct expert_pack own_experts(struct model *m)
{
    struct model_experts *own = m->expert_store->own;
    return (struct expert_pack){
        .m = m,
        .kernels = m->kernels,
        .experts = own->slots,
        .n = own->n_sparse * (size_t)own->n_local,
    };
}

static enum status plan_experts(struct model *m, struct err *err)
{
    struct expert_pack p = own_experts(m);
    const enum status st = expert_pack_plan(&p, err);
    m->source_bytes += p.source_bytes;
    m->decoder->totals.experts = p.bytes;
    expert_pack_release(&p);
    return st;
}

/* Of the object by which the ranks of a node gather. */
static size_t node_bytes(const struct model *m)
{
    const struct ep_config c = {
        .size = (int32_t)m->share.tp_size,
        .collective_bytes = model_gather_bytes(m),
    };
    return m->share.tp_size > 1 ? ep_peer_bytes(&c) : 0;
}

/* Of those by which rows reach experts. Twice, since a group is prepared while the one before
 * steps. With as many copies of experts as experts, placed by layer: these take little. */
static size_t experts_bytes(const struct model *m)
{
    const int32_t n_sparse = (int32_t)model_n_sparse(&m->config, model_n_all_layers(&m->config));
    if (m->share.ep_size < 2 || n_sparse == 0) return 0;
    struct ep_config c = {
        .rank = (int32_t)m->share.ep_rank,
        .size = (int32_t)m->share.ep_size,
        .placement = { .n_physical = 2 * (int32_t)m->config.moe.n_experts, .n_maps = n_sparse },
    };
    model_ep_needs(m, &c);
    return 2 * ep_peer_bytes(&c);
}

enum status decoder_plan(struct model *m, struct err *err)
{
    struct binder b = { .m = m, .kernels = m->kernels, .err = err };
    float *factors;
    m->expert_store = expert_store_create(m);
    m->expert_rows = expert_rows_create(m);
    m->decoder = create_decoder(m);
    enum status st = bind_all(&b);
    m->decoder->plan = b.plan;
    m->decoder->n_plan = b.n_plan;
    m->decoder->sources = b.sources;
    m->decoder->n_sources = b.n_sources;
    TRY(st);
    TRY(read_rope_factors(m, &factors, err));
    mem_free(factors);
    m->source_bytes = b.source_bytes;
    TRY(plan_experts(m, err));
    TRY(weights_check_all_used(m->weights, m->ops, &m->config, err));
    m->weight_bytes = b.weight_bytes + m->decoder->totals.experts + b.vectors.bytes;
    m->buffer_bytes = b.buffers.bytes + b.host.bytes +
                      b.rounded_rows * b.rounded_in * sizeof(float);
    m->rope_bytes = rope_table_bytes(&m->config, m->max_len);
    m->group_bytes = m->kernels->device->is_host ? 0 : node_bytes(m) + experts_bytes(m);
    m->decoder->totals.weights = b.weight_bytes;
    m->decoder->totals.vectors = b.vectors.bytes;
    m->decoder->totals.buffers = b.buffers.bytes;
    m->decoder->totals.host = b.host.bytes;
    return OK;
}

/* ---- pack ---- */

static double ms(uint64_t ns) { return (double)ns / 1e6; }

/* What was read and packed, and how long it took. */
struct packed {
    size_t read, bytes;
    struct bind_times times;
};

/* Logs the time spent waiting for files, converting (and quantising), and waiting for copies to the
 * device. These overlap. */
static void log_speed(const struct packed *p, uint64_t all_ns)
{
    const struct bind_times *t = &p->times;
    /* inside weight_ops.pack */
    const uint64_t copy_ns = t->copy_wait_ns > t->end_ns ? t->copy_wait_ns - t->end_ns : 0;
    const uint64_t convert_ns = t->pack_ns > copy_ns ? t->pack_ns - copy_ns : 0;
    const size_t bytes = p->read ? p->read : p->bytes;
    log_info("weights packed",
             "read_mib=%.1f packed_mib=%.1f after_ms=%.0f gb_s=%.2f read_wait_ms=%.0f "
             "convert_ms=%.0f copy_wait_ms=%.0f",
             (double)p->read / (1 << 20), (double)p->bytes / (1 << 20), ms(all_ns),
             (double)bytes / (double)(all_ns ? all_ns : 1), ms(t->read_wait_ns), ms(convert_ns),
             ms(t->copy_wait_ns));
}

/* Reads, converts and uploads, which overlap. */
static enum status pack_all(struct binder *b, struct packed *out)
{
    const struct decoder *d = b->m->decoder;
    b->ahead = b->converting ? read_ahead_start(d->sources, d->n_sources) : NULL;
    const enum status st = bind_end(b, bind_all(b), &out->times);
    if (!b->converting) return st;
    out->read += b->source_bytes;
    out->bytes += b->weight_bytes;
    return st;
}

bool decoder_uses_weight_cache(const struct model *m, const struct model_options *o)
{
    /* generating dummy weights takes no longer than reading them */
    return o->weight_cache_folder && m->kernels->device->is_host && !m->weights->dummy;
}

static const char *base_name(const struct model_options *o)
{
    const char *base = strrchr(o->path, '/');
    return base ? base + 1 : o->path;
}

/* The cache of all weights but routed experts: the ranks of a node have one each. LIMIT: they could
 * map parts of one, but queries, keys and values of a rank are three parts of a matrix. */
static struct weight_cache *open_cache(const struct binder *b, const struct model_options *o,
                                       struct weight_cache_key key)
{
    const struct decoder *d = b->m->decoder;
    const uint32_t parts[] = { b->m->share.tp_rank, b->m->share.tp_size };
    if (parts[1] > 1) key.weights = hash_64(parts, sizeof parts, key.weights);
    const struct weight_cache_options p = {
        .folder = o->weight_cache_folder,
        .name = base_name(o),
        .key = key,
        .plan = d->plan,
        .n = d->n_plan,
        .pool = b->m->kernels->pool,
        .progress = o->progress,
        .progress_arg = o->progress_arg,
    };
    return decoder_uses_weight_cache(b->m, o) ? weight_cache_open(&p) : NULL;
}

/* All shares have the same. */
static void open_expert_cache(struct model *m, const struct model_options *o,
                              const struct weight_cache_key *key)
{
    const struct expert_cache_options p = {
        .folder = o->weight_cache_folder,
        .name = base_name(o),
        .key = *key,
        .n = m->expert_store->n_sparse * m->expert_store->n_experts,
    };
    if (p.n > 0 && decoder_uses_weight_cache(m, o)) m->expert_store->cache = expert_cache_open(&p);
}

/* Maps all weights but routed experts from the weight cache, or packs them and fills the cache. It
 * is whole, and others can map it, before experts are packed, which takes longer. */
static enum status pack_base(struct binder *b, struct packed *done)
{
    enum status st = pack_all(b, done);
    if (st == OK && b->cache) weight_cache_finish(b->cache);
    if (b->cache && weight_cache_is_ready(b->cache))
        b->m->mapped_bytes += b->m->decoder->totals.weights;
    weight_cache_close(b->cache);
    b->cache = NULL;
    return st;
}

static enum status pack_experts(struct expert_pack *p, struct packed *done, struct err *err)
{
    const enum status st = expert_pack_run(p, err);
    p->m->mapped_bytes += p->bytes_mapped;
    done->read += p->source_bytes;
    done->bytes += p->bytes;
    done->times.pack_ns += p->times.pack_ns;
    done->times.read_wait_ns += p->times.read_wait_ns;
    done->times.copy_wait_ns += p->times.copy_wait_ns;
    done->times.end_ns += p->times.end_ns;
    return st;
}

static enum status pack_weights(struct binder *b, const struct model_options *o,
                                const struct weight_cache_key *key)
{
    struct decoder *d = b->m->decoder;
    struct kernel_ctx *k = b->m->kernels;
    struct expert_pack experts = own_experts(b->m);
    struct packed done = { 0 };
    const uint64_t t0 = clock_ns();
    experts.arena = b->weight_arena;
    experts.progress = o->progress;
    experts.progress_arg = o->progress_arg;
    experts.bytes_total = b->weight_total;
    open_expert_cache(b->m, o, key);
    enum status st = expert_pack_plan(&experts, b->err);
    b->cache = st == OK ? open_cache(b, o, *key) : NULL;
    b->converting = !b->cache || !weight_cache_is_ready(b->cache);
    if (!b->converting) b->progress = NULL; /* weight_cache_open has reported it */
    const size_t bytes = (b->converting ? d->totals.weights : 0) + experts.bytes;
    if (st == OK && bytes > 0) st = k->weight_ops->arena_create(k, bytes, &d->weight_arena, b->err);
    if (st == OK) st = pack_base(b, &done);
    experts.bytes_done = b->weight_bytes;
    if (st == OK) st = pack_experts(&experts, &done, b->err);
    if (st == OK && done.bytes > 0) log_speed(&done, clock_ns() - t0);
    weight_cache_close(b->cache);
    expert_pack_release(&experts);
    return st;
}

/* Rows that no step uses are never touched and take no memory on the CPU. */
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
        .kernels = m->kernels,
        .err = err,
        .packing = true,
        .weight_arena = &m->decoder->weight_arena,
        .weight_total = t->weights + t->experts,
        .progress = o->progress,
        .progress_arg = o->progress_arg,
    };
    TRY(alloc_buffers(&b));
    TRY(expert_rows_place(m->expert_rows, m, err));
    TRY(pack_weights(&b, o, key));
    /* both passes bound the same things */
    ASSERT(b.weight_bytes == t->weights && b.vectors.bytes == t->vectors &&
           b.buffers.bytes == t->buffers && b.host.bytes == t->host);
    if (kernel_ctx_reserve(m->kernels, b.rounded_rows, b.rounded_in) != OK)
        return err_set(err, ERR_NOMEM,
                       "no memory for inputs of %zu x %zu elements; lower --max-num-batched-tokens",
                       b.rounded_rows, b.rounded_in);
    TRY(make_cos_sin(m, err));
    expert_set_finish(m->expert_store->own);
    return device_fault(m->kernels->device, err);
}

static void release_layer(struct kernel_ctx *k, struct decoder_layer *l)
{
    l->attention->ops->release(k, l->attention);
    l->ffn->ops->release(k, l->ffn);
}

void decoder_free(struct model *m)
{
    struct decoder *d = m->decoder;
    if (!d) return;
    for (uint32_t i = 0; i < model_n_all_layers(&m->config); i++)
        release_layer(m->kernels, &d->layers[i]);
    decoder_draft_release(m->kernels, &d->draft);
    weight_release(m->kernels, &d->embed);
    weight_release(m->kernels, &d->head);
    expert_store_free(m->expert_store);
    expert_rows_free(m->expert_rows);
    m->kernels->weight_ops->arena_free(m->kernels, &d->weight_arena);
    struct dev_mem *all[] = { &d->buffers, &d->vectors, &d->cos_sin_mem };
    for (size_t i = 0; i < COUNT_OF(all); i++) device_mem_free(m->kernels->device, all[i]);
    d->attention_work->ops->release_work(d->attention_work);
    for (int i = 0; i < FFN_KINDS; i++)
        if (d->ffn_works[i]) d->ffn_works[i]->ops->release_work(d->ffn_works[i]);
    mem_free(d->host);
    mem_free(d->layers);
    mem_free(d->plan);
    mem_free(d->sources);
    mem_free(d);
    m->decoder = NULL;
    m->expert_store = NULL;
    m->expert_rows = NULL;
}
