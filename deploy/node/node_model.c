/* node_model.c - see node_model.h. */
#include "deploy/node/node_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/launch/launcher_watch.h"
#include "deploy/text/dummy_tokenizer.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/engine/engine.h"
#include "shared/kv/tier/block_copy.h"
#include "shared/model/config/config_gguf.h"
#include "shared/model/config/config_hf.h"
#include "shared/model/load/foreign_checkpoint.h"
#include "shared/model/load/model_files.h"

enum { TEMPLATE_MAX = 1 << 20 };

static enum status read_template(const char *path, struct buf *out, struct err *err)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return err_field(err, ERR_CONFIG, "chat-template",
                         "--chat-template %s: the file cannot be opened", path);
    size_t n = fread(buf_reserve(out, TEMPLATE_MAX), 1, TEMPLATE_MAX, f);
    bool whole = feof(f) != 0, failed = ferror(f) != 0;
    fclose(f);
    if (failed)
        return err_field(err, ERR_CONFIG, "chat-template",
                         "--chat-template %s: the file cannot be read", path);
    out->len += n;
    out->data[out->len] = 0;
    return whole ? OK
                 : err_field(err, ERR_CONFIG, "chat-template", "--chat-template %s: over %d bytes",
                             path, TEMPLATE_MAX);
}

static void name_token(const struct tokenizer *tok, int32_t id, char **text)
{
    struct str piece = tokenizer_piece(tok, id);
    if (!*text && piece.n > 0) *text = mem_strndup(piece.p, piece.n);
}

enum status node_model_tokenizer(struct model_text *t, struct tokenizer **out, struct err *err)
{
    struct tokenizer_files f = {
        .json = buf_str(&t->tokenizer_json),
        .config = buf_str(&t->tokenizer_config),
        .model = buf_str(&t->tokenizer_model),
        .model_name = t->tokenizer_model_name,
        .added = buf_str(&t->added_tokens),
        .specials = buf_str(&t->special_tokens),
    };
    struct tokenizer_vocab v = {
        .model = t->gguf_model,
        .pre = t->gguf_pre,
        .tokens = t->tokens,
        .kinds = t->kinds,
        .n_tokens = t->n_tokens,
        .merges = t->merges,
        .n_merges = t->n_merges,
        .bos = t->bos,
        .eos = t->eos,
        .add_bos = t->add_bos,
        .add_eos = t->add_eos,
        .scores = t->scores,
        .add_space_prefix = t->add_space_prefix,
    };
    TRY(t->n_tokens > 0 ? tokenizer_from_vocab(&v, out, err) : tokenizer_from_files(&f, out, err));
    name_token(*out, tokenizer_bos(*out), &t->bos_text);
    name_token(*out, tokenizer_eos(*out), &t->eos_text);
    return OK;
}

/* The chat template identifies the model family. A separate tool template, if present, defines the
 * tool-call format. */
static void find_formats(struct node_model *m, const struct node_options *o, struct str template,
                         struct str with_tools)
{
    if (strcmp(o->reasoning_parser, "auto") == 0)
        m->reasoning = reasoning_format_of_template(template);
    else m->reasoning = reasoning_format_find(str_of(o->reasoning_parser)); /* "none" gives NULL */
    if (strcmp(o->tool_parser, "auto") == 0)
        m->tools = tool_format_of_template(with_tools.n ? with_tools : template);
    else m->tools = tool_format_find(str_of(o->tool_parser));
    log_info("chat answers", "reasoning=%s tool_calls=%s",
             m->reasoning ? m->reasoning->name : "none", m->tools ? m->tools->name : "none");
}

/* Dummy weights are also served without a tokenizer of the model. */
static enum status make_tokenizer(struct model_text *t, const struct node_options *o,
                                  struct tokenizer **out, struct err *err)
{
    if (!o->dummy || t->tokenizer_json.len > 0 || t->tokenizer_model.len > 0)
        return node_model_tokenizer(t, out, err);
    log_warn("the model has no tokenizer",
             "path=%s a dummy one spells bytes: give prompts as token ids, or any text, a token "
             "a byte",
             o->model_path);
    return dummy_tokenizer_create(o->model_path, out, err);
}

/* Never 0. */
static uint64_t hash_vocabulary(const struct tokenizer *t)
{
    uint64_t hash = tokenizer_n_vocab(t);
    for (size_t i = 0; i < tokenizer_n_vocab(t); i++) {
        const struct str piece = tokenizer_piece(t, (int32_t)i);
        hash = hash_64(piece.n ? piece.p : "", piece.n, hash);
    }
    return hash ? hash : 1;
}

static enum status load_text(struct node_model *m, const struct node_options *o, struct err *err)
{
    struct model_text text;
    TRY(model_text_load(o->model_path, &text, err));
    enum status st = make_tokenizer(&text, o, &m->tokenizer, err);
    if (st == OK) m->text = hash_vocabulary(m->tokenizer);
    if (st == OK && o->chat_template) {
        buf_clear(&text.chat_template);
        buf_clear(&text.tool_template);
        st = read_template(o->chat_template, &text.chat_template, err);
    }
    if (st == OK) find_formats(m, o, buf_str(&text.chat_template), buf_str(&text.tool_template));
    if (st == OK && text.chat_template.len) {
        struct chat_source s = {
            .template = buf_str(&text.chat_template),
            .tool_template = buf_str(&text.tool_template),
            .bos = text.bos_text,
            .eos = text.eos_text,
            .pad = text.pad_text,
            .unk = text.unk_text,
        };
        st = chat_create(&s, &m->chat, err);
        if (st != OK) err_prefix(err, "chat template: ");
    }
    model_text_release(&text);
    return st;
}

enum status node_model_config(const char *path, struct model_config *out,
                              struct model_generation *generation, struct err *err)
{
    struct gguf *g = NULL;
    if (!str_ends(str_of(path), ".gguf")) return config_hf_load(path, out, generation, err);
    TRY(gguf_open(path, &g, err));
    enum status st = config_gguf_parse(g, out, generation, err);
    gguf_close(g);
    return st;
}

/* Can the memories behind the KV pool hold this model's KV as they are told to? The config says so,
 * long before the pool is there. */
static enum status check_tiers(const struct node_options *o, struct err *err)
{
    struct model_generation generation;
    struct kv_layout pool, slot;
    if (!o->tiers.rounds || (!o->tiers.host_bytes && !o->tiers.disk.folder)) return OK;
    struct model_config *c = MEM_NEW(struct model_config);
    enum status st = node_model_config(o->model_path, c, &generation, err);
    if (st == OK) model_config_kv_layout(c, NULL, o->kv_dtype, o->block_tokens, 1, &pool);
    if (st == OK) st = kv_slot_layout(&pool, o->tiers.slot_dtype, &slot, err);
    mem_free(c);
    return st;
}

enum status node_model_load_text(struct node_model *m, const struct node_options *o,
                                 struct err *err)
{
    struct model_config *c = MEM_NEW(struct model_config);
    enum status st = foreign_checkpoint_check_folder(o->model_path, err);
    if (st == OK) st = node_model_config(o->model_path, c, &m->generation, err);
    if (st == OK) st = load_text(m, o, err);
    m->n_vocab = c->n_vocab;
    m->max_position = c->window > 0 && c->window < c->max_position ? c->window : c->max_position;
    mem_free(c);
    return st;
}

struct progress_bar {
    uint64_t t_last_ms;
    bool tty; /* a line that is redrawn; else log lines */
    const atomic_bool *stop;
};

static bool show_progress(void *arg, double done)
{
    struct progress_bar *bar = arg;
    uint64_t now = clock_ms();
    if (atomic_load(bar->stop)) return false;
    if (now - bar->t_last_ms < (bar->tty ? 100u : 5000u) && done < 1) return true;
    bar->t_last_ms = now;
    if (bar->tty) fprintf(stderr, "\rloading weights %3.0f%%%s", done * 100, done >= 1 ? "\n" : "");
    else if (done < 1) /* the log line at the end reports it */
        log_info("loading weights", "percent=%.0f", done * 100);
    return true;
}

/* Opens the GPU first: a missing one must be reported before anything is loaded. */
static enum status make_kernels(const struct node_options *o, int n_threads,
                                struct kernel_ctx **out, struct err *err)
{
    struct device *d;
    const bool cuda = strcmp(o->device, "cuda") == 0;
    enum status st = cuda ? device_open("cuda", &d, err) : OK;
    if (st != OK) return err_prefix(err, "--device cuda: ");
    if (cuda) device_close(d);
    const struct kernel_options k = {
        .backend = cuda ? "cuda" : o->cpu_isa,
        .activations = o->activations,
        .n_threads = n_threads,
        .kv = o->kv_dtype,
        .deterministic = cuda && o->deterministic,
    };
    return kernel_ctx_create(k, out, err);
}

/* The layer may be named with the model's own folder, where it is looked for anyway. */
static bool has_own_draft_files(const struct node_options *o)
{
    return o->draft.model[0] && strcmp(o->draft.model, o->model) != 0 &&
           strcmp(o->draft.model, o->model_path) != 0;
}

/* share: where the rank's is written; must live as long as the options. */
static struct model_options model_options_of(const struct node_options *o,
                                             struct kernel_ctx *kernels, struct model_share *share)
{
    *share = (struct model_share){
        .tp_size = o->tp.size ? o->tp.size : 1,
        .tp_rank = o->tp.rank,
        .n_experts = SHARE_ALL_EXPERTS,
        .ep_rank = o->group.rank,
        .ep_size = o->group.size,
        .ep_rows = o->group.rows,
    };
    return (struct model_options){
        .path = o->model_path,
        .max_rows = o->max_batched_tokens,
        .max_logits = engine_max_logits(o->max_seqs),
        .max_model_len = o->max_model_len_given ? o->max_model_len : 0,
        .default_len = o->max_model_len,
        .kernels = kernels,
        .dummy = o->dummy,
        .quantize = o->quantize,
        .weight_cache_folder = o->weights_cache,
        .share = share,
        .draft_layer = o->draft.ops == &drafter_mtp_ops,
        .draft_path = has_own_draft_files(o) ? o->draft.model : NULL,
    };
}

enum status node_model_check(const struct node_options *o, struct err *err)
{
    struct kernel_ctx *kernels;
    TRY(make_kernels(o, o->n_threads, &kernels, err));
    struct model_share share;
    const struct model_options mo = model_options_of(o, kernels, &share);
    enum status st = model_check(&mo, err);
    if (st == OK) st = check_tiers(o, err);
    kernel_ctx_free(kernels);
    return st;
}

/* ---- the small model that drafts ---- */

/* Have both the same tokens under the ids that both have? One may be padded further. */
static bool is_same_vocabulary(const struct tokenizer *a, const struct tokenizer *b)
{
    const size_t n_a = tokenizer_n_vocab(a), n_b = tokenizer_n_vocab(b), n = n_a < n_b ? n_a : n_b;
    for (size_t i = 0; i < n; i++)
        if (!str_eq(tokenizer_piece(a, (int32_t)i), tokenizer_piece(b, (int32_t)i))) return false;
    return true;
}

/* How many tokens they may differ by the engine says. */
static enum status check_vocabulary(const struct node_model *m, const char *path, struct err *err)
{
    struct model_text text;
    struct tokenizer *tokenizer = NULL;
    TRY(model_text_load(path, &text, err));
    enum status st = node_model_tokenizer(&text, &tokenizer, err);
    if (st == OK && !is_same_vocabulary(tokenizer, m->tokenizer))
        st = err_field(err, ERR_CONFIG, "model",
                       "its vocabulary is not that of the model: token ids mean other text");
    tokenizer_free(tokenizer);
    model_text_release(&text);
    return st;
}

/* On the CPU it computes on the model's threads; on a GPU captured steps are of one model each. */
static enum status make_draft_kernels(struct node_model *m, const struct node_options *o,
                                      struct err *err)
{
    if (m->kernels->device->is_host) return OK;
    return make_kernels(o, 1, &m->draft_kernels, err);
}

static enum status load_draft(struct node_model *m, const struct node_options *o, struct err *err)
{
    struct buf path = { 0 };
    if (o->draft.ops != &drafter_model_ops) return OK;
    enum status st = node_options_find_model(o->draft.model, &path, err);
    if (st == OK && !o->dummy) st = check_vocabulary(m, path.data, err);
    if (st == OK) st = make_draft_kernels(m, o, err);
    const struct model_options mo = {
        .path = path.data,
        .max_rows = o->max_batched_tokens,
        .max_logits = engine_max_logits(o->max_seqs),
        .default_len = m->weights->max_len,
        .kernels = m->draft_kernels ? m->draft_kernels : m->kernels,
        .dummy = o->dummy,
        .quantize = o->quantize,
        .weight_cache_folder = o->weights_cache,
    };
    if (st == OK) st = model_load(&mo, &m->draft, err);
    if (st == OK)
        log_info("draft model loaded", "path=%s arch=%s layers=%u weights_mib=%.0f", path.data,
                 m->draft->config.arch, m->draft->config.n_layers,
                 (double)m->draft->weight_bytes / (1 << 20));
    buf_release(&path);
    return st == OK ? OK : err_prefix(err, "the model that drafts, %s: ", o->draft.model);
}

enum status node_model_load(struct node_model *m, const struct node_options *o,
                            const atomic_bool *stop, struct err *err)
{
    uint64_t t0 = clock_ms();
    struct progress_bar bar = {
        .t_last_ms = t0,
        .tty = isatty(STDERR_FILENO) && !launcher_watch_has_launcher() && log_level() >= LOG_INFO,
        .stop = stop,
    };
    TRY(foreign_checkpoint_check_folder(o->model_path, err));
    TRY(check_tiers(o, err));
    TRY(load_text(m, o, err));
    TRY(make_kernels(o, o->n_threads, &m->kernels, err));
    struct model_share share;
    struct model_options mo = model_options_of(o, m->kernels, &share);
    mo.progress = show_progress;
    mo.progress_arg = &bar;
    TRY(model_load(&mo, &m->weights, err));
    TRY(load_draft(m, o, err));
    m->generation = m->weights->generation;
    m->n_vocab = m->weights->config.n_vocab;
    log_info("model loaded",
             "path=%s arch=%s layers=%u weights_mib=%.0f kernels=%s threads=%d after_ms=%llu",
             o->model_path, m->weights->config.arch, m->weights->config.n_layers,
             (double)m->weights->weight_bytes / (1 << 20), m->kernels->backend->name, o->n_threads,
             (unsigned long long)(clock_ms() - t0));
    return OK;
}

void node_model_release(struct node_model *m)
{
    model_free(m->weights);
    model_free(m->draft);
    kernel_ctx_free(m->draft_kernels);
    kernel_ctx_free(m->kernels);
    chat_free(m->chat);
    tokenizer_free(m->tokenizer);
    *m = (struct node_model){ 0 };
}

/* Host memory of which the pool takes a share. This is available memory, not free pages: after some
 * days nearly all pages hold files that the kernel drops on demand. Mapped weights are such files
 * too, but every step reads them, so they are subtracted. */
static uint64_t host_memory_for_kv(const struct model *m, uint64_t memory)
{
    uint64_t available = device_available(m->kernels->device), weights = m->mapped_bytes;
    if (available > memory) available = memory;
    return available > weights ? available - weights : 0;
}

/* By a model that drafts in a context of its own. */
static uint64_t allocated_for_drafts(const struct model *m, const struct model *draft)
{
    struct device *of_draft = draft ? draft->kernels->device : NULL;
    return of_draft && of_draft != m->kernels->device ? device_allocated(of_draft) : 0;
}

/* GPU memory for the pool: the node's share less what it has allocated (weights, activations, all
 * else that steps need), and what it will for its group later. When other processes hold memory: at
 * most the same share of what is free, since CUDA graphs and the driver need some too. */
static uint64_t gpu_memory_for_kv(struct device *device, double share, uint64_t allocated,
                                  uint64_t later)
{
    const uint64_t taken = allocated + later,
                   ours = (uint64_t)((double)device_total(device) * share),
                   available = device_available(device),
                   left = available > later ? (uint64_t)((double)(available - later) * share) : 0;
    const uint64_t room = ours > taken ? ours - taken : 0;
    return room < left ? room : left;
}

enum status node_model_prepare(struct model *m, const struct node_options *o, struct err *err)
{
    const struct model_prepare_args s = {
        .max_seqs = engine_max_attn_seqs(o->max_seqs),
        .block_tokens = o->block_tokens,
    };
    return model_prepare(m, &s, err);
}

/* `block` and `memory` in GiB: one KV block, and the memory of the host or the GPU. */
static enum status too_much_kv(const struct node_options *o, uint64_t n, double block,
                               double memory, struct err *err)
{
    if (o->n_blocks)
        return err_field(err, ERR_CONFIG, "num-gpu-blocks-override",
                         "%s: %u KV blocks are %.1f GiB, but there are %.1f GiB of memory; ask for "
                         "less",
                         o->n_blocks_by ? o->n_blocks_by : "--num-gpu-blocks-override", o->n_blocks,
                         (double)n * block, memory);
    return err_field(
        err, ERR_CONFIG, "kv-cache-memory",
        "--kv-cache-memory %.1f is in GiB, and there are %.1f GiB of memory; ask for less",
        (double)n * block, memory);
}

uint64_t node_model_kv_blocks(uint64_t n_blocks, uint64_t kv_bytes, uint64_t room,
                              uint64_t block_bytes, uint64_t most)
{
    if (n_blocks) return n_blocks;
    uint64_t n = (kv_bytes ? kv_bytes : room) / block_bytes;
    return !kv_bytes && n > most ? most : n;
}

static size_t block_bytes_of(const struct model *m, const struct node_options *o)
{
    struct kv_layout l;
    model_kv_layout(m, o->block_tokens, 1, &l);
    return kv_layout_block_bytes(&l);
}

/* The option that says how many blocks there are. */
static const char *how_to_have_more(const struct node_options *o, const struct device *device)
{
    if (o->n_blocks) return o->n_blocks_by ? o->n_blocks_by : "--num-gpu-blocks-override";
    return device->is_host ? "--kv-cache-memory (or --num-gpu-blocks-override)"
                           : "--gpu-memory-utilization (or --num-gpu-blocks-override)";
}

enum status node_model_blocks(const struct model *m, const struct model *draft,
                              const struct node_options *o, uint32_t *n_blocks, struct err *err)
{
    uint32_t context = o->max_model_len;
    uint64_t per_context = (context + o->block_tokens - 1) / o->block_tokens;
    uint64_t most = per_context * o->max_seqs;
    /* the pool of a model that drafts has as many */
    const size_t block_bytes = block_bytes_of(m, o) + (draft ? block_bytes_of(draft, o) : 0);
    const uint32_t n_host_ranks = o->n_host_ranks ? o->n_host_ranks : 1;
    struct device *device = m->kernels->device;
    const uint64_t allocated = device_allocated(device) + allocated_for_drafts(m, draft);
    uint64_t memory = device->is_host ? device_total(device) : device_available(device);
    uint64_t room = device->is_host
                        ? host_memory_for_kv(m, memory) / NODE_KV_SHARE / n_host_ranks
                        : gpu_memory_for_kv(device, o->gpu_share, allocated, m->group_bytes);
    /* a GPU keeps the surplus blocks as prefix cache */
    uint64_t n = node_model_kv_blocks(o->n_blocks, o->kv_bytes, room, block_bytes,
                                      device->is_host ? most : UINT64_MAX);
    if (n > memory / block_bytes)
        return too_much_kv(o, n, (double)block_bytes / (1 << 30), (double)memory / (1 << 30), err);
    if (n < per_context)
        return err_field(
            err, ERR_CONFIG, "max-model-len",
            "--max-model-len %u needs %llu KV blocks of %u tokens (%.2f GiB), but there is room "
            "for %llu; lower --max-model-len or "
            "raise %s",
            context, (unsigned long long)per_context, o->block_tokens,
            (double)(per_context * block_bytes) / (1 << 30), (unsigned long long)n,
            how_to_have_more(o, device));
    if (n > UINT32_MAX / 2) n = UINT32_MAX / 2;
    *n_blocks = (uint32_t)n;
    return OK;
}
