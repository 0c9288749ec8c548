/* model.c - the registry of architectures, loading, the fingerprint. Thread: load on any; forward on the engine thread. */
#include "shared/model/model.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/hash.h"
#include "shared/base/mem.h"
#include "shared/model/config_gguf.h"
#include "shared/model/config_hf.h"
#include "shared/model/host_memory.h"
#include "shared/model/model_files.h"
#include "shared/model/model_rows.h"
#include "shared/model/weights.h"

static const struct model_ops *const MODEL_ROWS[] = { &model_llama_ops };

const struct model_ops *model_row_find(const char *arch, struct err *err)
{
    struct buf known = { 0 };
    for (size_t i = 0; i < COUNT_OF(MODEL_ROWS); i++)
        for (const char *const *name = MODEL_ROWS[i]->archs; *name; name++) {
            if (strcmp(*name, arch) == 0) {
                buf_release(&known);
                return MODEL_ROWS[i];
            }
            buf_printf(&known, "%s%s", known.len ? ", " : "", *name);
        }
    err_field(err, ERR_UNSUPPORTED, "architectures", "architecture %s is not supported; these are: %s", arch, known.data);
    buf_release(&known);
    return NULL;
}

/* ---- load -------------------------------------------------------------------------------------------------------- */

static enum status read_config(struct model *m, const char *path, struct err *err)
{
    if (!m->weights->gguf) return config_hf_load(path, &m->config, &m->generation, err);
    enum status st = config_gguf_parse(m->weights->gguf, &m->config, &m->generation, err);
    return st == OK ? OK : err_prefix(err, "%s: ", path);
}

static enum status choose_length(struct model *m, uint32_t asked, struct err *err)
{
    if (asked > m->config.max_position)
        return err_field(err, ERR_CONFIG, "max-model-len", "--max-model-len %" PRIu32 " is more than the %" PRIu32 " positions of this model",
                         asked, m->config.max_position);
    m->max_len = asked ? asked : m->config.max_position;
    return OK;
}

static double gib(uint64_t bytes) { return (double)bytes / (1024.0 * 1024.0 * 1024.0); }

/* Packed weights are as large as in the file, except that f16 is widened to f32. */
static uint64_t packed_bytes(const struct weights *w)
{
    uint64_t bytes = w->total_bytes;
    for (size_t i = 0; i < w->n_tensors; i++)
        if (w->tensors[i].dtype == DTYPE_F16) bytes += w->tensors[i].bytes;
    return bytes;
}

/* The widths below are those of the activation buffers. The KV pool is not in it: its owner knows what it asks for. */
static enum status check_memory(const struct model *m, struct err *err)
{
    const struct model_config *c = &m->config;
    uint64_t heads = (uint64_t)c->head_dim * (2ull * c->n_heads + 2ull * c->n_kv_heads);
    uint64_t rows = m->max_rows * (2ull * c->hidden + heads + 3ull * c->intermediate) * sizeof(float);
    uint64_t angles = (uint64_t)m->max_len * c->head_dim * sizeof(float);
    uint64_t weights = packed_bytes(m->weights), need = weights + rows + angles, have = host_memory_available();
    if (need <= have) return OK;
    return err_set(err, ERR_NOMEM,
                   "the model needs %.2f GiB (weights %.2f, %" PRIu32 " rows per step %.2f, %" PRIu32 " positions %.2f) and %.2f GiB are available; "
                   "lower --max-num-batched-tokens or --max-model-len, or take a smaller model",
                   gib(need), gib(weights), m->max_rows, gib(rows), m->max_len, gib(angles), gib(have));
}

/* Everything that decides which bits the KV cache holds. max_len is not part of it: peers may serve different lengths. */
static uint64_t fingerprint(const struct model *m)
{
    const struct model_config *c = &m->config;
    struct buf                 b = { 0 };
    buf_printf(&b, "%s %d|%s|%u %u %u %u %u %u %u|%a %a|%d %a %a %a %a|%d %d %d %d", m->kernels->ops->name, (int)m->kernels->activations, m->ops->name, c->n_layers, c->hidden,
               c->n_heads, c->n_kv_heads, c->head_dim, c->intermediate, c->n_vocab, (double)c->rms_eps, c->rope_theta, (int)c->rope.kind,
               c->rope.factor, c->rope.low_freq_factor, c->rope.high_freq_factor, c->rope.original_max, c->rope_interleaved, c->tied,
               c->attention_bias, c->mlp_bias);
    uint64_t h = weights_fingerprint(m->weights, hash_64(b.data, b.len, 0));
    buf_release(&b);
    return h;
}

static enum status load(struct model *m, const struct model_options *o, const char *path, struct err *err)
{
    TRY(weights_open(path, &m->weights, err));
    m->weights->progress = o->progress;
    m->weights->progress_arg = o->progress_arg;
    TRY(read_config(m, path, err));
    m->ops = model_row_find(m->config.arch, err);
    if (!m->ops) return err->code;
    TRY(choose_length(m, o->max_model_len, err));
    TRY(check_memory(m, err));
    enum status st = m->ops->bind(m, err);
    if (st == OK) st = weights_check_all_used(m->weights, err);
    if (st != OK) return err_prefix(err, "%s: ", path);
    m->fingerprint = fingerprint(m);
    weights_close(m->weights);
    m->weights = NULL;
    if (o->progress) o->progress(o->progress_arg, 1.0);
    return OK;
}

enum status model_load(const struct model_options *o, struct model **out, struct err *err)
{
    struct err ignored;
    struct buf path = { 0 };
    if (!err) err = &ignored;
    if (o->max_rows == 0) return err_set(err, ERR_INVALID, "a step of 0 rows can compute nothing");
    TRY(model_find(o->path, &path, err));
    struct model *m = MEM_NEW(struct model);
    m->kernels = o->kernels;
    m->max_rows = o->max_rows;
    enum status st = load(m, o, path.data, err);
    buf_release(&path);
    if (st != OK) model_free(m);
    else *out = m;
    return st;
}

void model_free(struct model *m)
{
    if (!m) return;
    if (m->ops) m->ops->release(m);
    weights_close(m->weights);
    mem_free(m);
}

/* ---- use --------------------------------------------------------------------------------------------------------- */

void model_kv_layout(const struct model *m, uint32_t block_tokens, uint32_t n_blocks, struct kv_layout *out)
{
    *out = (struct kv_layout){ .model_fingerprint = m->fingerprint, .dtype = kernel_kv_dtype(m->kernels), .block_tokens = block_tokens,
                               .n_layers = m->config.n_layers, .n_kv_heads = m->config.n_kv_heads, .head_dim = m->config.head_dim,
                               .tp_size = 1, .tp_rank = 0, .n_blocks = n_blocks };
}

/* Ids and positions were checked where the request came in; a wrong one here would read past a table. */
static void check_batch(const struct model *m, const struct model_batch *b)
{
    ASSERT(b->n_rows >= 1 && (uint32_t)b->n_rows <= m->max_rows);
    ASSERT(b->block_tokens >= 1 && b->block_tokens <= KERNEL_BLOCK_TOKENS_MAX);
    ASSERT(b->n_logits >= 0 && b->n_logits <= b->n_rows);
    for (int32_t i = 0; i < b->n_rows; i++) {
        ASSERT(b->ids[i] >= 0 && (uint32_t)b->ids[i] < m->config.n_vocab);
        ASSERT(b->pos[i] >= 0 && (uint32_t)b->pos[i] < m->max_len);
    }
    for (int32_t i = 0; i < b->n_logits; i++) ASSERT(b->logit_rows[i] >= 0 && b->logit_rows[i] < b->n_rows);
}

void model_forward(struct model *m, const struct model_batch *b)
{
    check_batch(m, b);
    m->ops->forward(m, b);
}
