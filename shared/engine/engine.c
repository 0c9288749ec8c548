/* engine.c - life cycle, the public calls and the thread of the engine.
 *
 * The calls check and copy on the caller's thread, then post a command (engine_command.c). The
 * thread alternates between commands and steps and sleeps in mailbox_wait when there are neither.
 * The owner calls engine_free after all threads that post have stopped. */
#include "shared/engine/engine.h"

#include <string.h>

#include "kernels/copy_stream.h"
#include "shared/base/assert.h"
#include "shared/base/mem.h"
#include "shared/engine/engine_state.h"

/* how often an idle engine checks its device */
enum { IDLE_CHECK_MS = 1000 };
/* Commands of one sequence in flight: one to enter, then activate, cancel, fence or release; some
 * room to spare. */
enum { COMMANDS_PER_SEQ = 4, COMMANDS_SPARE = 4096 };

/* ---- the thread ---- */

/* Why the engine cannot go on. */
static bool find_fault(struct engine *e, struct err *err)
{
    if (device_fault(e->device, err) != OK) return true;
    if (e->node.fault.code != OK) *err = e->node.fault;
    return e->node.fault.code != OK;
}

/* How long an idle engine sleeps: it wakes up to see a lost device, and for its tiers. */
static int idle_ms(const struct engine *e)
{
    const int tiers_ms = engine_tiers_wait_ms(e);
    if (tiers_ms >= 0) return tiers_ms;
    return e->device->is_host ? -1 : IDLE_CHECK_MS;
}

static void *engine_main(void *arg)
{
    struct engine *e = arg;
    struct engine_command c;
    struct err err;
    thread_become(THREAD_ENGINE, "engine");
    compute_pool_bind_caller(e->opt.model->kernels->pool);
    while (!atomic_load_explicit(&e->stop, memory_order_acquire)) {
        /* Before a command leaves the mailbox: engine_get_stats always finds it in one of both. */
        atomic_store_explicit(&e->load.stepping, true, memory_order_relaxed);
        while (mailbox_take(e->commands, &c)) engine_command_run(e, &c);
        engine_tiers_run(e);
        engine_update_metrics(e);
        bool worked = e->opt.follows ? engine_follow_step(e) : engine_step(e);
        atomic_store_explicit(&e->load.stepping, worked, memory_order_relaxed);
        if (find_fault(e, &err)) {
            if (!atomic_load_explicit(&e->stop, memory_order_acquire))
                e->opt.on_fault(e->opt.arg, &err);
            break;
        }
        if (worked) continue;
        engine_update_metrics(e);
        if (!mailbox_wait(e->commands, idle_ms(e))) (void)device_available(e->device);
    }
    device_wait(e->device); /* a step in flight writes to the pool */
    return NULL;
}

/* ---- create and free ---- */

static enum status check_options(const struct engine_options *o, struct err *err)
{
    ASSERT(o->model && o->metrics && o->on_event);
    if (o->block_tokens < 1 || o->block_tokens > KERNEL_BLOCK_TOKENS_MAX)
        return err_field(err, ERR_CONFIG, "block-size",
                         "block-size is %u; it must be between 1 and %d tokens.", o->block_tokens,
                         KERNEL_BLOCK_TOKENS_MAX);
    ASSERT(o->follows == (o->model->share.tp_rank > 0));
    ASSERT(o->model->share.tp_size == 1 || (o->on_node_bell && o->on_fault));
    if (o->n_blocks < 1)
        return err_set(err, ERR_CONFIG, "The KV cache has no blocks; it needs at least 1.");
    if (o->max_seqs < 1 || o->max_waiting < 1 || o->max_batched_tokens < 1)
        return err_set(err, ERR_CONFIG,
                       "The limits of sequences per step (%u), waiting sequences (%u) and tokens "
                       "per step (%u) must be at least 1.",
                       o->max_seqs, o->max_waiting, o->max_batched_tokens);
    if (o->max_batched_tokens > o->model->max_rows)
        return err_set(err, ERR_CONFIG,
                       "Steps of %u tokens were asked for, but the model was loaded for %u.",
                       o->max_batched_tokens, o->model->max_rows);
    return OK;
}

static void set_limits(struct engine *e)
{
    const struct model *m = e->opt.model;
    uint64_t pool_tokens = (uint64_t)e->opt.n_blocks * e->opt.block_tokens;
    e->limits = (struct seq_limits){
        .n_vocab = m->config.n_vocab,
        .max_len = pool_tokens < m->max_len ? (uint32_t)pool_tokens : m->max_len,
        .block_tokens = e->opt.block_tokens,
        .model_fingerprint = e->layout.model_fingerprint,
        .two_attention_paths = m->two_attention_paths,
    };
}

static enum status alloc_kv(struct engine *e, struct err *err)
{
    model_kv_layout(e->opt.model, e->opt.block_tokens, e->opt.n_blocks, &e->layout);
    TRY(kv_layout_check(&e->layout, err));
    return device_mem_alloc(e->device, kv_layout_pool_bytes(&e->layout), DEVICE_MEM_SHARED, &e->kv,
                            err);
}

static enum status prepare_model(struct engine *e, struct err *err)
{
    const struct model_prepare_args s = {
        .max_seqs = engine_max_attn_seqs(e->opt.max_seqs),
        .block_tokens = e->opt.block_tokens,
        .n_blocks = e->opt.n_blocks,
        .kv = e->kv.ptr,
        .capture_graphs = !e->opt.eager,
    };
    return model_prepare(e->opt.model, &s, err);
}

static void make_arrays(struct engine *e, size_t n_logits)
{
    e->rows = MEM_ARRAY(struct sampler_row, n_logits);
    e->logits = MEM_ARRAY(float, n_logits * e->limits.n_vocab);
    e->lse = MEM_ARRAY(float, n_logits);
    e->sample_requests = MEM_ARRAY(struct sample_request, n_logits);
    e->fetched = MEM_ARRAY(struct token_logprobs, n_logits);
    e->deferred_free = MEM_ARRAY(struct deferred_blocks, e->opt.max_seqs);
}

/* What chooses tokens, and drafts them. */
static enum status make_sampling(struct engine *e, struct err *err)
{
    struct kernel_ctx *host = kernel_host(e->opt.model->kernels);
    TRY(sampler_batch_create(e->limits.n_vocab, host, &e->sampler, err));
    make_arrays(e, engine_batch(e)->max_logits);
    return engine_draft_init(e, err);
}

static void release(struct engine *e)
{
    size_t pos = 0;
    struct str key;
    void *value;
    kv_store_free(e->store); /* first: its threads use the pool and wake the engine's */
    while (map_next(&e->seqs, &pos, &key, &value)) {
        struct seq *s = value;
        s->n_blocks = 0; /* the pool is freed as a whole */
        engine_draft_end(e, s);
        seq_free(s);
    }
    map_release(&e->seqs);
    mailbox_free(e->commands);
    for (uint32_t i = 0; i < e->n_deferred_free; i++) mem_free(e->deferred_free[i].blocks);
    mem_free(e->deferred_free);
    mem_free(e->tier_keys);
    engine_peers_release(e);
    kv_pool_destroy(e->pool);
    sampler_batch_free(e->sampler);
    mem_free(e->rows);
    mem_free(e->sample_requests);
    mem_free(e->fetched);
    for (int i = 0; i < 2; i++) batch_release(&e->batches[i]);
    mem_free(e->logits);
    mem_free(e->lse);
    copy_stream_close(e->progress_stream);
    if (e->kv.ptr) device_mem_free(e->device, &e->kv);
    if (engine_is_grouped(e)) engine_group_release(e);
    engine_node_release(e);
    engine_draft_release(e);
    mem_free(e);
}

/* The engine's own copies. */
static void keep_pace(struct engine *e)
{
    if (e->opt.pace) e->pace = *e->opt.pace;
    if (e->opt.fault) e->fault = *e->opt.fault;
    e->opt.pace = e->opt.pace ? &e->pace : NULL;
    e->opt.fault = e->opt.fault ? &e->fault : NULL;
}

static void init_lists(struct engine *e)
{
    list_init(&e->waiting);
    list_init(&e->loading);
    list_init(&e->running);
    list_init(&e->left_fetches);
}

enum status engine_create(const struct engine_options *o, struct engine **out, struct err *err)
{
    TRY(check_options(o, err));
    struct engine *e = MEM_NEW(struct engine);
    e->opt = *o;
    keep_pace(e);
    e->device = o->model->kernels->device;
    if (engine_is_grouped(e)) engine_group_init(e);
    pthread_mutex_init(&e->node.lock, NULL);
    init_lists(e);
    for (int i = 0; i < 2; i++) batch_init(&e->batches[i], o->max_batched_tokens, o->max_seqs);
    e->commands = mailbox_create(
        sizeof(struct engine_command),
        COMMANDS_SPARE + COMMANDS_PER_SEQ * ((size_t)o->max_waiting + o->max_seqs), NULL, NULL);
    enum status st = alloc_kv(e, err);
    if (st == OK) st = prepare_model(e, err);
    if (st == OK) st = device_copy_stream(e->device, &e->progress_stream, err);
    if (st != OK) goto err_engine;
    set_limits(e);
    e->pool = kv_pool_create(o->n_blocks, o->block_tokens, o->prefix_cache);
    st = make_sampling(e, err);
    if (st == OK) st = engine_tiers_create(e, err);
    if (st != OK) goto err_engine;
    if (engine_is_node(e)) engine_node_init(e);
    engine_metrics_init(&e->metrics, o->metrics, e->draft.drafter != NULL);
    gauge_set(e->metrics.paced, e->opt.pace != NULL);
    engine_update_metrics(e);
    st = thread_start(&e->thread, engine_main, e);
    if (st != OK) {
        err_set(err, st, "The engine thread could not be started.");
        goto err_engine;
    }
    *out = e;
    return OK;

err_engine:
    release(e);
    return st;
}

void engine_stop(struct engine *e)
{
    struct engine_command c;
    if (e->joined) return;
    atomic_store_explicit(&e->stop, true, memory_order_release);
    /* the node first: its ranks are not to take it for a group that is replaced by another */
    if (engine_is_node(e)) engine_abort_node(e);
    if (engine_is_grouped(e)) engine_abort_group(e, ENGINE_EVERY_EPOCH);
    mailbox_close(e->commands);
    pthread_join(e->thread, NULL);
    e->joined = true;
    while (mailbox_take(e->commands, &c)) engine_command_drop(e, &c);
    if (engine_is_grouped(e)) engine_group_leave(e);
    engine_node_leave(e);
}

void engine_free(struct engine *e)
{
    if (!e) return;
    engine_stop(e);
    kv_pool_verify(e->pool);
    model_free(e->opt.model);
    release(e);
}

/* ---- commands: any thread ---- */

static enum status post(struct engine *e, struct engine_command *c)
{
    enum status st = mailbox_post(e->commands, c);
    if (st != OK) engine_command_drop(e, c);
    return st;
}

enum status engine_submit(struct engine *e, const struct engine_request *r)
{
    ASSERT(!e->opt.follows);
    struct engine_command c = { .kind = ENGINE_COMMAND_SUBMIT, .id = r->id };
    TRY(seq_create(r, &e->limits, &c.seq));
    if (atomic_fetch_add_explicit(&e->load.n_waiting, 1, memory_order_relaxed) >=
        e->opt.max_waiting) {
        atomic_fetch_sub_explicit(&e->load.n_waiting, 1, memory_order_relaxed);
        engine_command_drop(e, &c);
        return ERR_FULL;
    }
    uint32_t n_tokens = c.seq->n_tokens;
    engine_set_remaining(e, c.seq, n_tokens);
    enum status st = post(e, &c);
    if (st != OK) {
        atomic_fetch_sub_explicit(&e->load.n_waiting, 1, memory_order_relaxed);
        atomic_fetch_sub_explicit(&e->load.waiting_tokens, n_tokens, memory_order_relaxed);
    }
    return st;
}

enum status engine_reserve(struct engine *e, const struct engine_request *r)
{
    ASSERT(!e->opt.follows);
    struct engine_command c = { .kind = ENGINE_COMMAND_RESERVE, .id = r->id };
    TRY(seq_create(r, &e->limits, &c.seq));
    if (!seq_wants_token(c.seq)) { /* nothing to decode */
        engine_command_drop(e, &c);
        return ERR_INVALID;
    }
    return post(e, &c);
}

/* NULL: nothing that a draft layer here could begin with. */
static float *copy_hidden(const struct engine *e, const float *hidden, uint32_t n)
{
    const struct model *m = e->opt.model;
    const bool fits = hidden && m->config.n_draft_layers > 0 && n == m->config.hidden;
    float *copy = fits ? mem_try_calloc(n, sizeof *copy) : NULL;
    if (copy) memcpy(copy, hidden, n * sizeof *copy);
    return copy;
}

enum status engine_activate(struct engine *e, uint64_t id, const struct token_logprobs *first,
                            const float *hidden, uint32_t n_hidden)
{
    if (first->id < 0 || (uint32_t)first->id >= e->limits.n_vocab ||
        first->n_top > SAMPLER_LOGPROBS_MAX)
        return ERR_INVALID;
    struct engine_command c = {
        .kind = ENGINE_COMMAND_ACTIVATE,
        .id = id,
        .first = mem_try_calloc(1, sizeof *first),
    };
    if (!c.first) return ERR_NOMEM;
    *c.first = *first;
    c.hidden = copy_hidden(e, hidden, n_hidden);
    return post(e, &c);
}

enum status engine_cancel(struct engine *e, uint64_t id, bool fenced)
{
    return post(
        e, &(struct engine_command){ .kind = ENGINE_COMMAND_CANCEL, .id = id, .fenced = fenced });
}

enum status engine_free_quarantined(struct engine *e, uint64_t id)
{
    return post(e, &(struct engine_command){ .kind = ENGINE_COMMAND_FENCE, .id = id });
}

enum status engine_release(struct engine *e, uint64_t id)
{
    return post(e, &(struct engine_command){ .kind = ENGINE_COMMAND_RELEASE, .id = id });
}

enum status engine_fetched(struct engine *e, uint64_t id, uint32_t n_good)
{
    return post(
        e, &(struct engine_command){ .kind = ENGINE_COMMAND_FETCHED, .id = id, .n_good = n_good });
}

enum status engine_fetch_hangs(struct engine *e, uint64_t id)
{
    return post(e, &(struct engine_command){ .kind = ENGINE_COMMAND_FETCH_HANGS, .id = id });
}

enum status engine_lend(struct engine *e, uint64_t id, const struct hash128 *keys, uint32_t n)
{
    struct engine_command c = { .kind = ENGINE_COMMAND_LEND, .id = id };
    if (n == 0 || n > e->layout.n_blocks) return ERR_INVALID;
    TRY(seq_create_lent(id, keys, n, &c.seq));
    return post(e, &c);
}

/* ---- facts: any thread ---- */

void engine_get_stats(const struct engine *e, struct engine_stats *out)
{
    const struct engine_load *l = &e->load;
    *out = (struct engine_stats){
        .n_running = atomic_load_explicit(&l->n_running, memory_order_relaxed),
        .n_waiting = atomic_load_explicit(&l->n_waiting, memory_order_relaxed),
        .n_reserved = atomic_load_explicit(&l->n_reserved, memory_order_relaxed),
        .n_blocks = e->layout.n_blocks,
        .n_blocks_free = atomic_load_explicit(&l->n_blocks_free, memory_order_relaxed),
        .n_steps = atomic_load_explicit(&l->n_steps, memory_order_relaxed),
        .progress = atomic_load_explicit(&l->n_progress, memory_order_relaxed) +
                    __atomic_load_n(&l->n_waits, __ATOMIC_RELAXED) +
                    compute_pool_progress(e->opt.model->kernels->pool),
        .ep_backend = atomic_load_explicit(&l->backend, memory_order_relaxed),
        .sent = atomic_load_explicit(&l->sent, memory_order_relaxed),
        .received = atomic_load_explicit(&l->received, memory_order_relaxed),
        .waiting_tokens = atomic_load_explicit(&l->waiting_tokens, memory_order_relaxed),
        .prefill_tokens_per_s = atomic_load_explicit(&l->prefill_per_s, memory_order_relaxed),
        .step_us = atomic_load_explicit(&l->step_us, memory_order_relaxed),
        /* A waiting command counts as work, so that a thread that hangs in a callback is
         * noticed. The mailbox first: what has left it since is in `stepping`. */
        .has_work = mailbox_len(e->commands) > 0 ||
                    atomic_load_explicit(&l->stepping, memory_order_relaxed),
    };
}

const struct kv_layout *engine_kv_layout(const struct engine *e) { return &e->layout; }

/* Counts waiting in an exchange as progress, so that only the rank that the others wait for looks
 * stuck. */
void engine_ep_needs(const struct engine *e, struct ep_config *c)
{
    model_ep_needs(e->opt.model, c);
    c->progress = (uint64_t *)&e->load.n_waits;
}

struct model *engine_model(const struct engine *e) { return e->opt.model; }

const struct dev_mem *engine_kv_memory(const struct engine *e) { return &e->kv; }

struct device *engine_device(const struct engine *e) { return e->device; }
