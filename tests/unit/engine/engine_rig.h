/* engine_rig.h - an engine with a tiny checkpoint (Llama's by default), and what came out of it.
 *
 * The events of a request are gathered in a `struct answer`. Requests are made from numbers, so a
 * test gives (length, seed). Only the engine's test programs include this.
 * Thread: the test's; events arrive through a mailbox. */
#ifndef BATON_TESTS_UNIT_ENGINE_ENGINE_RIG_H
#define BATON_TESTS_UNIT_ENGINE_ENGINE_RIG_H

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shared/base/mailbox.h"
#include "shared/base/mem.h"
#include "shared/base/rng.h"
#include "shared/engine/engine.h"
#include "tests/harness/test.h"

enum {
    RIG_BLOCK_TOKENS = 16,
    RIG_TOKENS_MAX = 2048,
    RIG_OUT_MAX = 256,
    RIG_BLOCKS_MAX = 128,
    RIG_WAIT_MS = 30000,
    RIG_EVENT_MS = 120000, /* the longest steps of an emulated GPU, with --all, on a busy host */
    RIG_HIDDEN_MAX = 256,
    RIG_VOCAB = 512
};

struct rig_event {
    struct engine_event ev;
    int32_t blocks[RIG_BLOCKS_MAX]; /* RESERVED */
};

struct rig {
    struct kernel_ctx *kernels;
    struct metrics *metrics;
    struct engine *engine;
    struct mailbox *events;
    const struct model *model; /* the engine's */
    /* Of the last TOKEN: what its event pointed to. For requests that run one by one. */
    float hidden[RIG_HIDDEN_MAX];
    uint32_t n_hidden;
};

struct rig_options {
    uint32_t n_blocks, max_seqs, max_batched_tokens, max_waiting;
    bool no_prefix_cache;
    const struct kv_store_options *tiers;
    uint32_t tell_prefill_ms;
    const char *model;  /* of the goldens; NULL: llama */
    const char *config; /* instead: config.json of a model with dummy weights */
    const char *path;   /* instead: a model anywhere */
    bool loose;         /* deterministic mode off */
    enum activations activations;
    const char *isa; /* kernel backend; NULL: the CPU's best */
    bool eager;
    const struct pace_curve *pace;
    const struct engine_fault_plan *fault;
    const struct draft_config *draft;
    bool draft_layer; /* the model's, with `draft` */
    size_t sampling_edit_bytes;
    const struct model_share *share; /* of a rank; NULL: the whole */
    void (*on_group)(void *arg, const struct engine_group_event *ev);
    void (*on_node_bell)(void *arg, uint64_t step);
    void (*on_fault)(void *arg, const struct err *err); /* NULL: the test fails */
    void (*on_kv_ready)(void *arg, uint64_t id, uint32_t layer, uint32_t begin, uint32_t end,
                        const int32_t *blocks, uint64_t event);
};

struct answer {
    uint64_t id;
    bool done, canceled;
    struct engine_event end;
    uint32_t n_out, n_scored, first_index;
    struct token_logprobs out[RIG_OUT_MAX];
    int32_t scored_id[RIG_TOKENS_MAX];
    float scored[RIG_TOKENS_MAX]; /* by prompt position */
};

__attribute__((unused)) static void rig_on_event(void *arg, const struct engine_event *ev)
{
    struct rig *r = arg;
    struct rig_event e = { .ev = *ev };
    if (ev->blocks) memcpy(e.blocks, ev->blocks, ev->n_blocks * sizeof *ev->blocks);
    if (ev->kind == ENGINE_TOKEN) {
        CHECK(ev->n_hidden <= RIG_HIDDEN_MAX && (ev->hidden != NULL) == (ev->n_hidden > 0));
        r->n_hidden = ev->n_hidden;
        if (ev->hidden) memcpy(r->hidden, ev->hidden, ev->n_hidden * sizeof *ev->hidden);
    }
    e.ev.blocks = NULL;
    e.ev.hidden = NULL;
    CHECK_OK(mailbox_post(r->events, &e));
}

__attribute__((unused)) static void rig_on_fault(void *arg, const struct err *err)
{
    (void)arg;
    test_fail(__FILE__, __LINE__, "%s", err->text);
}

/* A folder with only this config.json; valid until the next call. */
__attribute__((unused)) static const char *rig_config_folder(const char *text)
{
    static char folder[4096];
    char path[4200];
    snprintf(folder, sizeof folder, "%s", test_tmpdir());
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *f = fopen(path, "wb");
    CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0);
    return folder;
}

__attribute__((unused)) static void rig_open(struct rig *r, struct rig_options o)
{
    struct err err = { 0 };
    struct stat sb;
    struct model *model;
    char path[256];
    snprintf(path, sizeof path, "goldens/%s/model", o.model ? o.model : "llama");
    struct model_options mo = {
        .path = o.path     ? o.path
                : o.config ? rig_config_folder(o.config)
                           : test_data(path),
        .max_model_len = RIG_TOKENS_MAX,
        .dummy = o.config != NULL,
        .share = o.share,
        .draft_layer = o.draft_layer,
    };
    if (stat(mo.path, &sb) != 0) SKIP("the golden's folder under tests/data is not there");
    *r = (struct rig){
        .metrics = metrics_create(),
        .events = mailbox_create(sizeof(struct rig_event), 16384, NULL, NULL),
    };
    struct kernel_options ko = kernel_options_default(o.isa ? o.isa : "auto", o.activations, 2);
    ko.deterministic = !o.loose;
    ko.sampling_edit_bytes = o.sampling_edit_bytes;
    CHECK_OK(kernel_ctx_create(ko, &r->kernels, &err));
    struct engine_options eo = {
        .block_tokens = RIG_BLOCK_TOKENS,
        .n_blocks = o.n_blocks ? o.n_blocks : RIG_BLOCKS_MAX,
        .max_seqs = o.max_seqs ? o.max_seqs : 64,
        .max_batched_tokens = o.max_batched_tokens ? o.max_batched_tokens : 256,
        .max_waiting = o.max_waiting ? o.max_waiting : 256,
        .prefix_cache = !o.no_prefix_cache,
        .tiers = o.tiers,
        .tell_prefill_ms = o.tell_prefill_ms,
        .metrics = r->metrics,
        .on_event = rig_on_event,
        .eager = o.eager,
        .pace = o.pace,
        .fault = o.fault,
        .draft = o.draft,
        .on_kv_ready = o.on_kv_ready,
        .on_fault = o.on_fault ? o.on_fault : rig_on_fault,
        .on_group = o.on_group,
        .on_node_bell = o.on_node_bell,
        .follows = o.share && o.share->tp_rank > 0,
        .arg = r,
    };
    mo.max_rows = eo.max_batched_tokens;
    mo.kernels = r->kernels;
    if (model_load(&mo, &model, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    eo.model = model;
    r->model = model;
    if (engine_create(&eo, &r->engine, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
}

__attribute__((unused)) static void rig_close(struct rig *r)
{
    engine_free(r->engine);
    kernel_ctx_free(r->kernels);
    metrics_free(r->metrics);
    mailbox_free(r->events);
}

/* A prompt of `n` tokens drawn from `seed`; greedy, `n_out` tokens, best 2 logprobs. The tokens are
 * valid for the next 64 calls. */
__attribute__((unused)) static struct engine_request rig_request(uint64_t id, uint32_t n,
                                                                 uint64_t seed, uint32_t n_out)
{
    static int32_t ring[64][RIG_TOKENS_MAX];
    static uint32_t at;
    int32_t *tokens = ring[at++ % 64];
    for (uint32_t i = 0; i < n; i++)
        tokens[i] = 4 + (int32_t)(rng_uniform(seed, 77, i) * (RIG_VOCAB - 4));
    return (struct engine_request){
        .id = id,
        .tokens = tokens,
        .n_tokens = n,
        .n_prompt = n,
        .sampling = { .top_p = 1,
                      .repetition_penalty = 1,
                      .seed = seed,
                      .max_tokens = n_out,
                      .ignore_eos = true,
                      .n_logprobs = 2, },
    };
}

/* The next event, within the time limit. */
__attribute__((unused)) static struct rig_event rig_next(struct rig *r)
{
    struct rig_event e;
    while (!mailbox_take(r->events, &e))
        if (!mailbox_wait(r->events, RIG_EVENT_MS))
            test_fail(__FILE__, __LINE__, "no event for %d s", RIG_EVENT_MS / 1000);
    return e;
}

__attribute__((unused)) static void answer_add(struct answer *a, const struct engine_event *ev)
{
    CHECK(!a->done);
    switch (ev->kind) {
    case ENGINE_TOKEN:
        CHECK(a->n_out < RIG_OUT_MAX);
        if (a->n_out == 0) a->first_index = ev->index;
        CHECK_EQ_INT(ev->index, a->first_index + a->n_out);
        a->out[a->n_out++] = ev->lp;
        break;
    case ENGINE_PROMPT_LOGPROB:
        CHECK_EQ_INT(a->n_out, 0);
        CHECK_EQ_INT(ev->index, ++a->n_scored); /* in order from 1, each once */
        a->scored_id[ev->index] = ev->lp.id;
        a->scored[ev->index] = ev->lp.logprob;
        break;
    case ENGINE_CANCELED: a->canceled = true; /* fall through */
    case ENGINE_FINISHED:
        a->done = true;
        a->end = *ev;
        break;
    default: break;
    }
}

/* Gathers events until all n answers, whose ids are set, are complete. */
__attribute__((unused)) static void rig_gather(struct rig *r, struct answer *answers, uint32_t n)
{
    for (uint32_t n_done = 0; n_done < n;) {
        struct rig_event e = rig_next(r);
        for (uint32_t i = 0; i < n; i++) {
            if (answers[i].id != e.ev.id) continue;
            answer_add(&answers[i], &e.ev);
            n_done += answers[i].done;
        }
    }
}

/* Submits all at once and waits for all. The caller frees the answers. */
__attribute__((unused)) static struct answer *rig_run(struct rig *r,
                                                      const struct engine_request *reqs, uint32_t n)
{
    struct answer *answers = MEM_ARRAY(struct answer, n);
    for (uint32_t i = 0; i < n; i++) {
        answers[i].id = reqs[i].id;
        CHECK_OK(engine_submit(r->engine, &reqs[i]));
    }
    rig_gather(r, answers, n);
    return answers;
}

/* Compares bit for bit: ids, logprobs, ranks, the best tokens, the reason. */
__attribute__((unused)) static void check_same(const struct answer *a, const struct answer *b)
{
    CHECK_EQ_INT(a->n_out, b->n_out);
    for (uint32_t i = 0; i < a->n_out; i++) {
        CHECK_EQ_INT(a->out[i].id, b->out[i].id);
        CHECK(memcmp(&a->out[i].logprob, &b->out[i].logprob, sizeof(float)) == 0);
        CHECK_EQ_INT(a->out[i].rank, b->out[i].rank);
        CHECK_EQ_INT(a->out[i].n_top, b->out[i].n_top);
        CHECK(memcmp(a->out[i].top, b->out[i].top, a->out[i].n_top * sizeof a->out[i].top[0]) == 0);
    }
    CHECK_EQ_INT(a->end.finish, b->end.finish);
}

__attribute__((unused)) static uint64_t rig_count(struct rig *r, const char *name)
{
    return counter_value(metrics_counter(r->metrics, name, "", ""));
}

/* Waits: the engine updates its load after it has sent its events. */
__attribute__((unused)) static void rig_await_free_blocks(struct rig *r, uint32_t want)
{
    struct engine_stats s = { 0 };
    for (int ms = 0; ms < RIG_WAIT_MS; ms++) {
        engine_get_stats(r->engine, &s);
        if (s.n_blocks_free == want) return;
        usleep(1000);
    }
    test_fail(__FILE__, __LINE__, "%u blocks are free, not %u", s.n_blocks_free, want);
}

/* Waits: the engine counts a step after it has sent its events. */
__attribute__((unused)) static void rig_await_steps(struct rig *r, uint64_t want)
{
    static const char NAME[] = "baton_engine_steps_total";
    for (int ms = 0; ms < RIG_WAIT_MS && rig_count(r, NAME) < want; ms++) usleep(1000);
    CHECK_EQ_INT(rig_count(r, NAME), want);
}

#endif
