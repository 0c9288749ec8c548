/* model.c - loading, the memory that a model needs, the fingerprint.
 *
 * Thread: any for loading, the engine thread for steps. */
#include "shared/model/model.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kernels/quantize.h"
#include "shared/base/assert.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/model/config/config_gguf.h"
#include "shared/model/config/config_hf.h"
#include "shared/model/decoder.h"
#include "shared/model/expert_store.h"
#include "shared/model/load/bind.h"
#include "shared/model/load/file_map.h"
#include "shared/model/load/foreign_checkpoint.h"
#include "shared/model/load/model_files.h"
#include "shared/model/load/weight_cache.h"
#include "shared/model/load/weights.h"
#include "shared/model/model_registry.h"

enum { TYPES_MAX = 16 /* of weights that are told apart; further ones count with the last */ };

static enum status read_config(struct model *m, const char *path, struct err *err)
{
    if (!m->weights->gguf) return config_hf_load(path, &m->config, &m->generation, err);
    enum status st = config_gguf_parse(m->weights->gguf, &m->config, &m->generation, err);
    return st == OK ? OK : err_prefix(err, "%s: ", path);
}

static uint32_t at_most(uint32_t n, uint32_t limit) { return limit > 0 && limit < n ? limit : n; }

/* Chooses m->max_len. The table of cos and sin has that many positions, and a window has to hold as
 * many. */
static enum status choose_length(struct model *m, uint32_t asked, uint32_t default_len,
                                 struct err *err)
{
    const struct model_config *c = &m->config;
    if (asked > c->max_position)
        return err_field(err, ERR_CONFIG, "max-model-len",
                         "--max-model-len %" PRIu32 " is more than the %" PRIu32
                         " positions of this model",
                         asked, c->max_position);
    m->max_len = asked ? asked : at_most(c->max_position, default_len);
    if (!asked && default_len) m->max_len = at_most(m->max_len, c->window);
    if (c->window > 0 && m->max_len > c->window)
        return err_field(err, ERR_UNSUPPORTED, "sliding_window",
                         "\"sliding_window\" is %" PRIu32 " and contexts of %" PRIu32
                         " were asked for; only contexts that fit in the window are supported: "
                         "give --max-model-len %" PRIu32,
                         c->window, m->max_len, c->window);
    return OK;
}

/* All experts, or an even part of them where ranks share them. */
static void share_all_experts(struct model_share *s, const struct model_config *c)
{
    const uint32_t size = s->ep_size > 1 ? s->ep_size : 1;
    const struct share_part mine = share_experts(s->ep_rank, size, c->moe.n_experts);
    s->first_expert = (uint32_t)mine.first;
    s->n_experts = (uint32_t)mine.n;
}

static enum status choose_share(struct model *m, const struct model_options *o, struct err *err)
{
    m->share = o->share ? *o->share : model_share_whole(&m->config);
    if (m->share.n_experts == SHARE_ALL_EXPERTS) share_all_experts(&m->share, &m->config);
    if (o->gather) m->gather = *o->gather;
    TRY(model_share_check(&m->share, &m->config, err));
    if (m->share.tp_size <= EP_PEERS_MAX || m->kernels->device->is_host) return OK;
    return err_field(err, ERR_UNSUPPORTED, "tensor-parallel-size",
                     "--tensor-parallel-size %" PRIu32 " is more than the %d GPUs that exchange "
                     "what they compute",
                     m->share.tp_size, EP_PEERS_MAX);
}

/* ---- memory ---- */

static double mib(uint64_t bytes) { return (double)bytes / (1024.0 * 1024.0); }
static double gib(uint64_t bytes) { return mib(bytes) / 1024.0; }

/* Bytes by the plan, without the KV pool, whose owner adds its own. */
static uint64_t needed(const struct model *m)
{
    return (uint64_t)m->weight_bytes + m->buffer_bytes + m->rope_bytes + m->group_bytes;
}

static void log_plan(const struct model *m, const struct model_options *o, const char *path)
{
    struct kv_layout kv;
    model_kv_layout(m, 1, 1, &kv);
    if (o->dummy)
        log_warn("dummy weights",
                 "path=%s why=\"--load-format dummy: no weights are read, answers mean nothing\"",
                 path);
    log_info("model memory",
             "need_mib=%.1f weights_mib=%.1f activations_mib=%.1f rows_per_step=%" PRIu32
             " group_mib=%.1f rope_table_mib=%.1f positions=%" PRIu32
             " kv_bytes_per_token=%zu available_mib=%.0f",
             mib(needed(m)), mib(m->weight_bytes), mib(m->buffer_bytes), m->max_rows,
             mib(m->group_bytes), mib(m->rope_bytes), m->max_len, kv_layout_block_bytes(&kv),
             mib(device_available(m->kernels->device)));
}

static enum status check_memory(const struct model *m, struct err *err)
{
    uint64_t need = needed(m), have = device_available(m->kernels->device);
    if (need <= have) return OK;
    return err_set(err, ERR_NOMEM,
                   "the model needs %.2f GiB (weights %.2f, %" PRIu32
                   " rows per step %.2f, rows of other ranks %.2f, %" PRIu32
                   " positions %.2f) and %.2f GiB are available; "
                   "lower --max-num-batched-tokens or --max-model-len, give --quantization, or "
                   "take a smaller model",
                   gib(need), gib(m->weight_bytes), m->max_rows, gib(m->buffer_bytes),
                   gib(m->group_bytes), m->max_len, gib(m->rope_bytes), gib(have));
}

/* ---- fingerprint ---- */

static void print_config(struct buf *b, const struct model_config *c)
{
    const struct rope_config *r = &c->rope;
    const struct mla_config *l = &c->mla;
    const struct moe_config *e = &c->moe;
    buf_printf(b, "|%u %u %u %u %u %u %u|%a %a", c->n_layers, c->hidden, c->n_heads, c->n_kv_heads,
               c->head_dim, c->intermediate, c->n_vocab, (double)c->rms_eps, c->rope_theta);
    buf_printf(b, "|%d %a %a %a %a %a %a %d %a %a", (int)r->kind, r->factor, r->original_max,
               r->low_freq_factor, r->high_freq_factor, r->beta_fast, r->beta_slow, r->no_truncate,
               r->cos_sin_factor, r->score_factor);
    buf_printf(b, "|%d %d %d %d %d %d|%u %u %u %u %u", c->rope_interleaved, c->tied,
               c->attention_bias, c->mlp_bias, c->qkv_bias, c->qk_norm, l->q_lora, l->kv_lora,
               l->nope, l->rope, l->v);
    buf_printf(b, "|%u %u %u %u %u %u|%d %d %d %a %a %d|", e->n_experts, e->n_used, e->intermediate,
               e->shared_intermediate, e->n_groups, e->topk_groups, e->score, e->group_score,
               e->norm, (double)e->norm_min, (double)e->scale, e->selection_bias);
    for (uint32_t i = 0; i < c->n_layers; i += 8) {
        /* those of the model alone: peers may have a draft layer or none */
        const uint32_t n = c->n_layers - i < 8 ? c->n_layers - i : 8;
        buf_add_char(b, (char)(e->sparse[i / 8] & ((1u << n) - 1)));
    }
}

/* Hash of everything that decides the bits in the KV cache. max_len does not: peers may serve
 * different lengths. */
static uint64_t fingerprint(const struct model *m)
{
    struct buf b = { 0 };
    buf_printf(&b, "%s|%d|%d|%d|%d|%s", m->kernels->backend->name, KERNEL_REVISION,
               (int)m->kernels->options.activations, (int)kernel_is_deterministic(m->kernels),
               (int)m->quantize, m->ops->name);
    print_config(&b, &m->config);
    if (model_rows_are_narrow(m)) buf_printf(&b, "|rows %s", dtype_name(m->share.ep_rows));
    uint64_t h = weights_fingerprint(m->weights, hash_64(b.data, b.len, 0));
    buf_release(&b);
    return h;
}

/* Names the type that most bytes of the weights have, and the arithmetic. */
static void describe_precision(struct model *m)
{
    const struct weights *w = m->weights;
    struct {
        const char *name;
        size_t bytes;
    } types[TYPES_MAX] = { { "dummy weights", 0 } };
    size_t most = 0;
    for (size_t i = 0; i < w->n_tensors; i++) {
        size_t k = 1;
        while (k < TYPES_MAX - 1 && types[k].name &&
               strcmp(types[k].name, w->tensors[i].type_name) != 0)
            k++;
        types[k].name = w->tensors[i].type_name;
        types[k].bytes += w->tensors[i].bytes;
        if (types[k].bytes > types[most].bytes) most = k;
    }
    const bool narrow = model_rows_are_narrow(m);
    snprintf(m->precision, sizeof m->precision, "%.16s%s%.16s, activations %s, %.16s%s%.16s",
             types[most].name, m->quantize ? " as " : "",
             m->quantize ? quantize_name(m->quantize) : "",
             m->kernels->options.activations == ACTIVATIONS_F32 ? "f32" : "auto",
             m->kernels->backend->name, narrow ? ", rows " : "",
             narrow ? dtype_name(m->share.ep_rows) : "");
}

/* Hashes of everything that decides the packed bytes, with the configuration: it maps tensors to
 * matrices. */
static struct weight_cache_key weight_cache_key_of(const struct model *m)
{
    struct buf b = { 0 };
    buf_printf(&b, "packed|%s|%d|%d|%s", m->kernels->backend->weight_layouts,
               (int)m->kernels->options.activations, (int)m->quantize, m->ops->name);
    print_config(&b, &m->config);
    const struct weights *draft = m->draft_weights;
    if (m->config.n_draft_layers > 0) buf_add_c(&b, "|draft layer");
    struct weight_cache_key key = { weights_fingerprint(m->weights, hash_64(b.data, b.len, 0)),
                                    weights_files_state(m->weights) };
    if (draft) key.weights = weights_fingerprint(draft, key.weights);
    if (draft) key.files ^= weights_files_state(draft);
    buf_release(&b);
    return key;
}

/* ---- load ---- */

static enum status open_weights(struct model *m, const struct model_options *o, const char *path,
                                struct err *err)
{
    TRY(foreign_checkpoint_check_folder(path, err));
    if (!o->dummy) return weights_open(path, &m->weights, err);
    if (!file_is_folder(path))
        return err_set(err, ERR_CONFIG,
                       "--load-format dummy needs a folder with a config.json, and %s is a file",
                       path);
    weights_create_dummy(&m->weights);
    return OK;
}

/* Opens the draft layer's own files. */
static enum status open_draft(struct model *m, const char *path, struct err *err)
{
    if (m->share.ep_size > 1 || model_layer_is_sparse(&m->config, m->config.n_layers))
        return err_field(err, ERR_UNSUPPORTED, "model",
                         "the draft layer of this model has experts, which are read from the "
                         "model's own files: leave \"model\" out of --speculative-config");
    TRY(weights_open(path, &m->draft_weights, err));
    m->draft_weights->names.aliases = m->ops->aliases;
    return OK;
}

static enum status choose_draft(struct model *m, const struct model_options *o, struct err *err)
{
    if (!o->draft_layer) return OK;
    if (o->draft_path) TRY(open_draft(m, o->draft_path, err));
    if (!decoder_draft_is_there(m))
        return err_field(err, ERR_CONFIG, "method",
                         "method mtp of --speculative-config: %s has no draft layer for "
                         "multi-token prediction; take method ngram, which needs none",
                         o->draft_path ? o->draft_path : "the model");
    m->config.n_draft_layers = 1;
    return OK;
}

/* Everything that needs no weights' data: files, configuration, shapes, memory. */
static enum status plan(struct model *m, const struct model_options *o, const char *path,
                        struct err *err)
{
    TRY(open_weights(m, o, path, err));
    if (m->weights->gguf) m->quantize = QUANTIZE_NONE; /* GGUF files keep their own types */
    TRY(read_config(m, path, err));
    m->weights->n_layers = m->config.n_layers;
    m->ops = model_registry_find(m->config.arch, err);
    if (!m->ops) return err->code;
    m->weights->names.aliases = m->ops->aliases;
    m->two_attention_paths = kernel_has_two_attention_paths(m->kernels,
                                                            model_is_latent(&m->config));
    TRY(kernel_kv_check(m->kernels->options.activations, m->kernels->options.kv,
                        model_is_latent(&m->config), err));
    TRY(choose_length(m, o->max_model_len, o->default_len, err));
    TRY(choose_share(m, o, err));
    TRY(choose_draft(m, o, err));
    enum status st = decoder_plan(m, err);
    return st == OK ? check_memory(m, err) : err_prefix(err, "%s: ", path);
}

/* A rank of several may have to read experts later. */
static void close_weights(struct model *m)
{
    weights_close(m->draft_weights);
    m->draft_weights = NULL;
    if (m->share.ep_size > 1 && m->config.moe.n_experts > 0) {
        weights_unload_pages(m->weights);
        return;
    }
    weights_close(m->weights);
    m->weights = NULL;
}

static enum status pack(struct model *m, const struct model_options *o, const char *path,
                        struct err *err)
{
    log_plan(m, o, path);
    const struct weight_cache_key key = decoder_uses_weight_cache(m, o)
                                            ? weight_cache_key_of(m)
                                            : (struct weight_cache_key){ 0 };
    enum status st = decoder_pack(m, o, &key, err);
    if (st != OK) return err_prefix(err, "%s: ", path);
    m->fingerprint = fingerprint(m);
    describe_precision(m);
    model_set_ep(m, NULL, NULL);
    close_weights(m);
    return !o->progress || o->progress(o->progress_arg, 1.0) ? OK : bind_stopped(err);
}

/* *out has been planned, or is NULL. */
static enum status open_model(const struct model_options *o, struct buf *path, struct model **out,
                              struct err *err)
{
    *out = NULL;
    if (o->max_rows == 0) return err_set(err, ERR_INVALID, "a step of 0 rows can compute nothing");
    TRY(model_find(o->path, path, err));
    struct model *m = MEM_NEW(struct model);
    m->kernels = o->kernels;
    m->max_rows = o->max_rows;
    m->max_logits = o->max_logits ? o->max_logits : o->max_rows;
    m->quantize = o->quantize;
    enum status st = plan(m, o, path->data, err);
    if (st != OK) model_free(m);
    else *out = m;
    return st;
}

enum status model_check(const struct model_options *o, struct err *err)
{
    struct buf path = { 0 };
    struct model *m;
    enum status st = open_model(o, &path, &m, err);
    buf_release(&path);
    model_free(m);
    return st;
}

enum status model_load(const struct model_options *o, struct model **out, struct err *err)
{
    struct err ignored;
    struct buf path = { 0 };
    struct model *m;
    if (!err) err = &ignored;
    enum status st = open_model(o, &path, &m, err);
    if (st == OK) st = pack(m, o, path.data, err);
    buf_release(&path);
    if (st != OK) model_free(m);
    else *out = m;
    return st;
}

void model_free(struct model *m)
{
    if (!m) return;
    decoder_free(m);
    weights_close(m->draft_weights);
    weights_close(m->weights);
    mem_free(m);
}

/* ---- use ---- */

void model_config_kv_layout(const struct model_config *c, const struct model_share *share,
                            enum dtype kv, uint32_t block_tokens, uint32_t n_blocks,
                            struct kv_layout *out)
{
    const struct model_share s = share ? *share : model_share_whole(c);
    const struct share_part heads = share_kv_heads(&s, c->n_kv_heads);
    *out = (struct kv_layout){
        .dtype = kv,
        .block_tokens = block_tokens,
        .n_layers = model_n_all_layers(c),
        .n_draft_layers = c->n_draft_layers,
        .n_kv_heads = (uint32_t)heads.n,
        .first_head = (uint32_t)heads.first,
        .model_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
        .tp_size = s.tp_size,
        .tp_rank = s.tp_rank,
        .n_blocks = n_blocks,
    };
    if (!model_is_latent(c)) return;
    out->latent = 1;
    out->first_head = 0;
    out->n_kv_heads = out->model_kv_heads = 1;
    out->head_dim = c->mla.kv_lora + c->mla.rope;
}

void model_kv_layout(const struct model *m, uint32_t block_tokens, uint32_t n_blocks,
                     struct kv_layout *out)
{
    model_config_kv_layout(&m->config, &m->share, m->kernels->options.kv, block_tokens, n_blocks,
                           out);
    out->model_fingerprint = m->fingerprint;
}

struct share_part model_routed_rows(const struct model *m, size_t n_rows)
{
    return share_units(&m->share, n_rows, 1);
}

void model_set_ep(struct model *m, struct ep *ep, struct model_experts *x)
{
    ASSERT(ep || !x);
    m->ep = ep;
    m->experts = expert_store_use(m->expert_store, x, ep != NULL);
    ASSERT(!ep || (m->experts && ep->n_local == m->experts->n_local));
    decoder_capture_again(m);
}

void model_set_gather(struct model *m, const struct model_gather *g)
{
    m->gather = g ? *g : (struct model_gather){ 0 };
    ASSERT(!m->gather.ep || !m->kernels->device->is_host);
    decoder_capture_again(m);
}

/* Ids and positions were checked with the request; a wrong one would read past a table here. */
static void check_batch(const struct model *m, const struct model_batch *b)
{
    const uint32_t n_kept = model_kept_of_pass(m, 1 + decoder_n_passes(m), 0);
    ASSERT(m->share.tp_size == 1 || m->gather.columns);
    ASSERT(m->experts);
    ASSERT(b->n_rows >= (m->ep ? 0 : 1) && (uint32_t)b->n_rows <= m->max_rows);
    ASSERT(!m->ep || b->group_rows >= model_routed_rows_max(m, (size_t)b->n_rows));
    ASSERT(b->block_tokens >= 1 && b->block_tokens <= KERNEL_BLOCK_TOKENS_MAX);
    ASSERT(b->n_logits >= 0 && b->n_logits <= b->n_rows && (uint32_t)b->n_logits <= m->max_logits);
    for (int32_t i = 0; i < b->n_rows; i++) {
        ASSERT(b->ids[i] < 0 ? b->sample_requests && (uint32_t)(-1 - b->ids[i]) < n_kept
                             : (uint32_t)b->ids[i] < m->config.n_vocab);
        ASSERT(b->pos[i] >= 0 && (uint32_t)b->pos[i] < m->max_len);
    }
    for (int32_t i = 0; i < b->n_logits; i++)
        ASSERT(b->logit_rows[i] >= 0 && b->logit_rows[i] < b->n_rows);
}

bool model_submit(struct model *m, const struct model_batch *b)
{
    check_batch(m, b);
    return decoder_forward(m, b);
}

bool model_submit_draft(struct model *m, const struct model_draft *d)
{
    check_batch(m, &d->batch);
    ASSERT(m->config.n_draft_layers > 0 && (uint32_t)d->batch.n_rows <= m->max_draft_rows);
    ASSERT(!d->batch.sample_requests || (d->i_pass >= 1 && d->i_pass <= decoder_n_passes(m)));
    return decoder_draft_forward(m, d);
}

const int32_t *model_fetch_drafts(struct model *m, int parity)
{
    return decoder_fetch_drafts(m, parity);
}

void model_get_hidden(struct model *m, uint32_t row, float *out)
{
    decoder_get_hidden(m, row, out);
}

void model_fetch(struct model *m, int parity, struct token_logprobs *out, uint32_t n)
{
    decoder_fetch(m, parity, out, n);
}

enum status model_prepare(struct model *m, const struct model_prepare_args *s, struct err *err)
{
    return decoder_prepare(m, s, err);
}
