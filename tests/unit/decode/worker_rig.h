/* worker_rig.h - whole nodes (engine, KV transfer, both workers) on one loop; the test plays their
 * entry node.
 *
 * Engine and transfer events go through a mailbox, which a timer empties on the loop. Included by
 * one test program each. */
#ifndef BATON_TESTS_UNIT_DECODE_WORKER_RIG_H
#define BATON_TESTS_UNIT_DECODE_WORKER_RIG_H

#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include "decode/decode.h"
#include "prefill/prefill.h"
#include "shared/base/list.h"
#include "shared/base/mailbox.h"
#include "shared/base/rng.h"
#include "shared/cluster/generation_wire.h"
#include "tests/unit/cluster/cluster_rig.h"

#ifndef WORKER_PROMPT_MAX
#define WORKER_PROMPT_MAX 1024
#endif
enum { ENTRY_ID = 100, VOCAB = 512, PROMPT_MAX = WORKER_PROMPT_MAX, OUT_MAX = 1024, POLL_MS = 1 };
#define DECODE_IDS  (UINT64_C(1) << 56)
#define PREFILL_IDS (UINT64_C(2) << 56)

struct worker_event {
    bool of_engine;
    struct engine_event engine;
    struct kvt_event kvt;
    int32_t blocks[256];
    struct hash128 keys[256];
};

struct worker_options {
    const char *model;     /* NULL: the small one of tests */
    uint32_t threads;      /* that compute; 0: 1 */
    const char *protocols; /* NULL: "tcp"; "": none */
    uint32_t n_blocks, max_seqs, step_tokens, max_decode_seqs, max_prompts, block_tokens;
    uint32_t resume_window_ms;
    bool wakes; /* events are taken at once, as a node does it; else every POLL_MS */
    const struct kv_store_options *tiers;
    size_t queue_bytes; /* of its links */
};

struct worker_node {
    struct peer_node *peer;
    struct kernel_ctx *kernels;
    struct metrics *metrics;
    struct engine *engine;
    struct kvt *kvt;
    pthread_mutex_t lock; /* of `pieces`: the engine must not call a transfer that is being freed */
    struct kvt *pieces;
    struct mailbox *events;
    struct loop *loop;
    struct loop_timer *poll;
    bool wakes; /* of the options */
    struct decode_worker *decode;
    struct prefill_worker *prefill;
};

static void worker_post(struct worker_node *n, const struct worker_event *ev)
{
    enum status st;
    while ((st = mailbox_post(n->events, ev)) == ERR_FULL) usleep(200);
}

static void worker_on_engine(void *arg, const struct engine_event *e)
{
    struct worker_event ev = { .of_engine = true, .engine = *e };
    CHECK(!e->blocks || e->n_blocks <= COUNT_OF(ev.blocks));
    if (e->blocks) memcpy(ev.blocks, e->blocks, e->n_blocks * sizeof *e->blocks);
    if (e->keys) memcpy(ev.keys, e->keys, e->n_blocks * sizeof *e->keys);
    worker_post(arg, &ev);
}

static void worker_on_kvt(void *arg, const struct kvt_event *e)
{
    worker_post(arg, &(struct worker_event){ .kvt = *e });
}

static void worker_on_kv_ready(void *arg, uint64_t id, uint32_t layer, uint32_t begin, uint32_t end,
                               const int32_t *blocks, uint64_t event)
{
    struct worker_node *n = arg;
    if (!(id & PREFILL_IDS)) return;
    pthread_mutex_lock(&n->lock);
    if (n->pieces) prefill_on_kv_ready(n->pieces, id, layer, begin, end, blocks, event);
    pthread_mutex_unlock(&n->lock);
}

static void worker_poll(void *arg)
{
    struct worker_node *n = arg;
    struct worker_event ev;
    while (mailbox_take(n->events, &ev)) {
        ev.engine.blocks = ev.blocks;
        ev.engine.keys = ev.keys;
        const bool fetches = ev.engine.kind == ENGINE_FETCH || ev.engine.kind == ENGINE_FETCH_OFF;
        bool of_peer = kvt_event_is_of_peer(ev.kvt.kind);
        if (ev.of_engine && (fetches || (ev.engine.id & DECODE_IDS)))
            decode_on_engine(n->decode, &ev.engine);
        else if (ev.of_engine) prefill_on_engine(n->prefill, &ev.engine);
        else if (!of_peer && (ev.kvt.id & DECODE_IDS)) decode_on_kvt(n->decode, &ev.kvt);
        else prefill_on_kvt(n->prefill, &ev.kvt);
    }
    decode_flush(n->decode);
}

static void worker_wake(void *arg)
{
    struct worker_node *n = arg;
    CHECK_OK(loop_post(n->loop, worker_poll, n));
}

static bool worker_on_message(void *arg, const struct cluster_message *m)
{
    struct worker_node *n = arg;
    return prefill_on_message(n->prefill, m) || decode_on_message(n->decode, m) ||
           m->type == FRAME_CANCEL;
}

static void worker_on_lost(void *arg, uint64_t node, const char *why)
{
    struct worker_node *n = arg;
    (void)why;
    prefill_on_lost(n->prefill, node);
    decode_on_lost(n->decode, node);
}

static void worker_open_engine(struct worker_node *n, const struct worker_options *o)
{
    struct err err = { 0 };
    struct stat sb;
    struct model *model;
    struct model_options mo = {
        .path = o->model ? o->model : test_data("goldens/llama/model"),
        .max_model_len = PROMPT_MAX,
    };
    if (stat(mo.path, &sb) != 0) SKIP("tests/data/goldens/llama is not there");
    const uint32_t threads = o->threads ? o->threads : 1;
    CHECK_OK(kernel_ctx_create(kernel_options_default("auto", ACTIVATIONS_FAST, threads),
                               &n->kernels, &err));
    struct engine_options eo = {
        .block_tokens = o->block_tokens ? o->block_tokens : 16,
        .n_blocks = o->n_blocks ? o->n_blocks : 128,
        .max_seqs = o->max_seqs ? o->max_seqs : 32,
        .max_batched_tokens = o->step_tokens ? o->step_tokens : 64,
        .max_waiting = 256,
        .prefix_cache = true,
        .tiers = o->tiers,
        .metrics = n->metrics,
        .on_event = worker_on_engine,
        .on_kv_ready = worker_on_kv_ready,
        .arg = n,
    };
    mo.max_rows = eo.max_batched_tokens;
    mo.kernels = n->kernels;
    if (model_load(&mo, &model, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    eo.model = model;
    if (engine_create(&eo, &n->engine, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
}

static struct worker_node *worker_open(struct cluster_rig *r, uint64_t id, struct worker_options o)
{
    struct worker_node *n = MEM_NEW(struct worker_node);
    struct err err = { 0 };
    pthread_mutex_init(&n->lock, NULL);
    n->metrics = metrics_create();
    n->loop = r->loop;
    n->wakes = o.wakes;
    n->events = mailbox_create(sizeof(struct worker_event), 4096, o.wakes ? worker_wake : NULL, n);
    worker_open_engine(n, &o);
    if (!o.protocols) o.protocols = "tcp";
    struct kvt_options ko = {
        .layout = *engine_kv_layout(n->engine),
        .mem = engine_kv_memory(n->engine),
        .protocols = o.protocols,
        .listen_host = "127.0.0.1",
        .checksum = true,
        .n_transfers = 64,
        .metrics = n->metrics,
        .on_event = worker_on_kvt,
        .arg = n,
    };
    if (*o.protocols && kvt_create(&ko, &n->kvt, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    pthread_mutex_lock(&n->lock);
    n->pieces = n->kvt;
    pthread_mutex_unlock(&n->lock);
    n->peer = peer_open(r, id, (struct peer_options){ .queue_bytes = o.queue_bytes });
    struct group_member me = { .node = id, .host = "127.0.0.1" };
    me.port = cluster_port(n->peer->c);
    struct decode_options d = {
        .loop = r->loop,
        .engine = n->engine,
        .kvt = n->kvt,
        .cluster = n->peer->c,
        .metrics = n->metrics,
        .max_decode_seqs = o.max_decode_seqs ? o.max_decode_seqs : 64,
        .id_base = DECODE_IDS,
        .resume_window_ms = o.resume_window_ms,
        .ranks = &me,
        .n_ranks = 1,
    };
    struct prefill_options p = {
        .loop = r->loop,
        .engine = n->engine,
        .kvt = n->kvt,
        .cluster = n->peer->c,
        .metrics = n->metrics,
        .step_tokens = o.step_tokens ? o.step_tokens : 64,
        .max_prompts = o.max_prompts ? o.max_prompts : 64,
        .id_base = PREFILL_IDS,
    };
    n->decode = decode_create(&d);
    n->prefill = prefill_create(&p);
    n->peer->hook = worker_on_message;
    n->peer->lost_hook = worker_on_lost;
    n->peer->arg = n;
    n->poll = loop_timer_start(r->loop, POLL_MS, POLL_MS, worker_poll, n);
    return n;
}

static void worker_close(struct worker_node *n)
{
    loop_timer_free(n->poll);
    mailbox_close(n->events);
    if (n->wakes) uv_run(loop_uv(n->loop), UV_RUN_NOWAIT); /* it may be called once more */
    peer_close(n->peer);
    pthread_mutex_lock(&n->lock);
    n->pieces = NULL;
    pthread_mutex_unlock(&n->lock);
    kvt_free(n->kvt); /* before the engine, whose pool the transfer thread uses */
    engine_free(n->engine);
    prefill_free(n->prefill);
    decode_free(n->decode);
    mailbox_free(n->events);
    kernel_ctx_free(n->kernels);
    metrics_free(n->metrics);
    mem_free(n);
}

/* Checks that nothing of any request is left on the node. */
static bool worker_is_idle(const struct worker_node *n)
{
    struct engine_stats st;
    engine_get_stats(n->engine, &st);
    return decode_n_live(n->decode) == 0 && prefill_n_live(n->prefill) == 0 &&
           st.n_running + st.n_waiting + st.n_reserved == 0 && st.n_blocks_free == st.n_blocks &&
           !st.has_work;
}

/* Nothing more fits into the queue of what the node tells the other one. */
__attribute__((unused)) static void worker_fill_queue(struct worker_node *n, uint64_t to)
{
    static const char body[4096];
    while (cluster_send(n->peer->c, to, FRAME_GRANT, 0, 0, (struct str){ body, sizeof body }) == OK)
        ;
    while (cluster_send(n->peer->c, to, FRAME_GRANT, 0, 0, STR("")) == OK)
        ;
}

/* Returns whether a sequence is in the engine's steps. */
__attribute__((unused)) static bool worker_computes(const struct worker_node *n)
{
    struct engine_stats st;
    engine_get_stats(n->engine, &st);
    return st.n_running > 0;
}

/* ---- the entry node, played by the test ---- */

/* One request as the entry node sees it. */
struct gen {
    uint64_t request;
    uint32_t attempt, n_prompt, n_out, n_lp, n_given;
    int32_t prompt[PROMPT_MAX];
    struct sampling_params sampling;
    bool prompt_logprobs;
    uint64_t resume_key; /* 0: none */
    bool hears_preempted, goes_first;
    uint32_t n_preempted; /* times that PREEMPTED came */
    uint32_t role;        /* that its nodes are chosen for; 0: not told */
    bool attached, detached;
    int32_t given[OUT_MAX]; /* [n_given] ids that came with ATTACHED */
    struct token_logprobs out[OUT_MAX];
    struct buf grant;
    bool credit, granted, finished, failed, reported;
    enum status status; /* of FAILED, as are these */
    uint32_t blame;
    char text[256];
    uint32_t finish, n_recomputed, n_tokens, n_cached;
    uint32_t load_us, compute_us; /* of FINISHED: what was expected of both */
    uint64_t load_ns;             /* of FINISHED: that the prompt waited for KV */
    uint32_t n_peer;  /* of n_cached, from a peer: of FINISHED or the prefill node's report */
    uint64_t kept_by; /* of RUN and PREFILL; 0: nobody is said to have KV of it */
    uint16_t kept_port;
    uint32_t n_kept;
    uint32_t most_computed; /* of RUN; 0: any number */
    bool lacks_prompt;      /* of FAILED, with n_cached */
    uint64_t kv_bytes;
    char transport[16];
    struct list link;
};

struct entry {
    struct cluster_rig *rig;
    struct peer_node *peer;
    struct list gens;
};

static struct gen *entry_find(struct entry *e, uint64_t request, uint32_t attempt)
{
    LIST_FOREACH (g, &e->gens, struct gen, link)
        if (g->request == request && g->attempt == attempt) return g;
    return NULL;
}

static void entry_tokens(struct entry *e, struct str rest)
{
    struct token_logprobs t;
    uint64_t request;
    uint32_t attempt, index;
    enum status st;
    while ((st = token_record_next(&rest, &request, &attempt, &index, &t)) == OK) {
        struct gen *g = entry_find(e, request, attempt);
        if (!g) continue;
        CHECK(!g->finished && !g->failed);
        CHECK_EQ_INT(index, g->n_given + g->n_out);
        CHECK(g->n_out < OUT_MAX);
        g->out[g->n_out++] = t;
    }
    CHECK_STATUS(st, ERR_NOT_FOUND);
}

static void entry_prompt_logprobs(struct gen *g, struct str rest)
{
    struct token_logprobs t;
    uint64_t request;
    uint32_t attempt, index;
    while (token_record_next(&rest, &request, &attempt, &index, &t) == OK)
        CHECK_EQ_INT(index, ++g->n_lp);
}

static bool entry_on_message(void *arg, const struct cluster_message *m)
{
    struct entry *e = arg;
    const uint8_t *p = (const uint8_t *)m->body.p;
    if (m->type == FRAME_TOKENS) {
        entry_tokens(e, m->body);
        return true;
    }
    struct gen *g = entry_find(e, m->request, m->attempt);
    if (!g) return true;
    if (m->type == FRAME_CREDIT) {
        CHECK(!g->credit);
        g->credit = true;
    } else if (m->type == FRAME_GRANT) {
        Baton__Grant *b = baton__grant__unpack(NULL, m->body.n, p);
        CHECK(b && !g->granted);
        g->granted = true;
        g->n_cached = b->n_cached;
        CHECK(b->n_parts == 1 && b->parts[0]->from == 0 && b->parts[0]->to == 0);
        buf_add(&g->grant, b->parts[0]->kvt_grant.data, b->parts[0]->kvt_grant.len);
        baton__grant__free_unpacked(b, NULL);
    } else if (m->type == FRAME_PREEMPTED) {
        Baton__Preempted *b = baton__preempted__unpack(NULL, m->body.n, p);
        CHECK(b && g->hears_preempted && !g->finished && !g->failed);
        g->n_preempted++;
        baton__preempted__free_unpacked(b, NULL);
    } else if (m->type == FRAME_PREFILL_REPORT) {
        Baton__PrefillReport *b = baton__prefill_report__unpack(NULL, m->body.n, p);
        CHECK(b != NULL);
        g->reported = true;
        g->n_peer = b->cache ? b->cache->peer_tokens : 0;
        baton__prefill_report__free_unpacked(b, NULL);
    } else if (m->type == FRAME_PROMPT_LOGPROBS) {
        Baton__PromptLogprobs *b = baton__prompt_logprobs__unpack(NULL, m->body.n, p);
        CHECK(b != NULL);
        entry_prompt_logprobs(g, (struct str){ (const char *)b->records.data, b->records.len });
        baton__prompt_logprobs__free_unpacked(b, NULL);
    } else if (m->type == FRAME_FINISHED) {
        Baton__Finished *b = baton__finished__unpack(NULL, m->body.n, p);
        CHECK(b && !g->finished && !g->failed);
        g->finished = true;
        g->finish = b->finish;
        g->n_tokens = b->n_tokens;
        g->n_recomputed = b->n_recomputed;
        if (!b->transport[0]) g->n_cached = b->n_cached;
        if (!b->transport[0] && b->cache) g->n_peer = b->cache->peer_tokens;
        if (b->cache) {
            g->load_ns = b->cache->load_ns;
            g->load_us = b->cache->load_us;
            g->compute_us = b->cache->compute_us;
        }
        g->kv_bytes = b->kv_bytes;
        snprintf(g->transport, sizeof g->transport, "%s", b->transport);
        baton__finished__free_unpacked(b, NULL);
    } else if (m->type == FRAME_ATTACHED) {
        Baton__Attached *b = baton__attached__unpack(NULL, m->body.n, p);
        CHECK(b && !g->attached && g->n_out == 0);
        CHECK(b->given.len == b->first * sizeof(int32_t) && b->first <= OUT_MAX);
        g->attached = true;
        g->n_given = b->first;
        if (b->given.len) memcpy(g->given, b->given.data, b->given.len);
        baton__attached__free_unpacked(b, NULL);
    } else if (m->type == FRAME_DETACHED) {
        CHECK(!g->detached && !g->finished && !g->failed);
        g->detached = true;
    } else if (m->type == FRAME_FAILED && !g->failed) { /* both nodes may send it */
        Baton__Failed *b = baton__failed__unpack(NULL, m->body.n, p);
        CHECK(b != NULL);
        g->failed = true;
        g->status = (enum status)b->status;
        g->blame = b->blame;
        g->lacks_prompt = b->lacks_prompt;
        if (b->lacks_prompt) g->n_cached = b->n_cached;
        snprintf(g->text, sizeof g->text, "%s", b->text);
        CHECK(g->text[0] != 0);
        baton__failed__free_unpacked(b, NULL);
    }
    return true;
}

static void entry_open_as(struct entry *e, struct cluster_rig *r, uint64_t id)
{
    e->rig = r;
    e->peer = peer_open(r, id, (struct peer_options){ 0 });
    e->peer->hook = entry_on_message;
    e->peer->arg = e;
    list_init(&e->gens);
}

static void entry_open(struct entry *e, struct cluster_rig *r) { entry_open_as(e, r, ENTRY_ID); }

/* Its process ends; what it knows of its requests stays for the test. */
__attribute__((unused)) static void entry_die(struct entry *e)
{
    peer_close(e->peer);
    e->peer = NULL;
}

__attribute__((unused)) static void entry_forget(struct entry *e)
{
    LIST_FOREACH (g, &e->gens, struct gen, link) {
        buf_release(&g->grant);
        list_remove(&g->link);
        mem_free(g);
    }
}

static void entry_close(struct entry *e)
{
    if (e->peer) peer_close(e->peer);
    entry_forget(e);
}

/* Makes a request of n random prompt tokens; an odd seed samples its answer too. */
static struct gen *entry_add(struct entry *e, uint64_t request, uint32_t n, uint64_t seed,
                             uint32_t n_out)
{
    struct gen *g = MEM_NEW(struct gen);
    CHECK(n <= PROMPT_MAX);
    g->request = request;
    g->attempt = 1;
    g->n_prompt = n;
    for (uint32_t i = 0; i < n; i++)
        g->prompt[i] = 4 + (int32_t)(rng_uniform(seed, 77, i) * (VOCAB - 4));
    g->sampling = (struct sampling_params){
        .top_p = 1,
        .repetition_penalty = 1,
        .temperature = seed % 2 ? 0.9f : 0,
        .seed = seed,
        .max_tokens = n_out,
        .ignore_eos = true,
        .n_logprobs = 2,
    };
    list_push(&e->gens, &g->link);
    return g;
}

static Baton__Generation *entry_generation(const struct gen *g, struct arena *arena)
{
    struct generation_wire w = {
        .tokens = g->prompt,
        .n_tokens = g->n_prompt,
        .n_prompt = g->n_prompt - g->n_given,
        .sampling = g->sampling,
        .prompt_logprobs = g->prompt_logprobs,
        .hears_preempted = g->hears_preempted,
        .has_resume_key = g->resume_key != 0,
        .resume_key = { g->resume_key, ~g->resume_key },
    };
    return generation_wire_encode(&w, arena);
}

/* NULL: nobody. */
static Baton__KvKept *entry_kept(const struct gen *g, struct arena *arena)
{
    if (!g->kept_by) return NULL;
    Baton__KvKept *k = ARENA_NEW(arena, Baton__KvKept);
    baton__kv_kept__init(k);
    k->node = ARENA_NEW(arena, Baton__NodeAddress);
    baton__node_address__init(k->node);
    k->node->node = g->kept_by;
    k->node->host = "127.0.0.1";
    k->node->port = g->kept_port;
    k->n_tokens = g->n_kept;
    return k;
}

static void entry_ask(struct entry *e, struct gen *g, struct worker_node *to)
{
    Baton__AskCredit m = BATON__ASK_CREDIT__INIT;
    m.n_tokens = g->n_prompt;
    m.role = g->role;
    m.goes_first = g->goes_first;
    peer_meet(e->peer, to->peer);
    CHECK_OK(cluster_send_proto(e->peer->c, to->peer->id, FRAME_ASK_CREDIT, g->request, g->attempt,
                                &m.base));
}

static void entry_generate(struct entry *e, struct gen *g, struct worker_node *to,
                           enum frame_type type)
{
    struct arena arena;
    Baton__Reserve reserve = BATON__RESERVE__INIT;
    Baton__Run run = BATON__RUN__INIT;
    arena_init(&arena);
    reserve.generation = run.generation = entry_generation(g, &arena);
    run.kept = entry_kept(g, &arena);
    run.most_computed = g->most_computed;
    reserve.role = g->role;
    peer_meet(e->peer, to->peer);
    CHECK_OK(cluster_send_proto(e->peer->c, to->peer->id, type, g->request, g->attempt,
                                type == FRAME_RUN ? &run.base : &reserve.base));
    arena_release(&arena);
}

static void entry_prefill(struct entry *e, struct gen *g, struct worker_node *prefill,
                          uint64_t decode, uint16_t port)
{
    struct arena arena;
    Baton__Prefill m = BATON__PREFILL__INIT;
    Baton__NodeAddress a = BATON__NODE_ADDRESS__INIT, *ranks[] = { &a };
    Baton__KvPart part = BATON__KV_PART__INIT, *parts[] = { &part };
    arena_init(&arena);
    a.node = decode;
    a.host = "127.0.0.1";
    a.port = port;
    m.generation = entry_generation(g, &arena);
    m.n_decode = 1;
    m.n_parts = g->grant.len > 0;
    m.decode = ranks;
    m.parts = parts;
    m.kept = entry_kept(g, &arena);
    part.kvt_grant = (ProtobufCBinaryData){ g->grant.len, (uint8_t *)g->grant.data };
    CHECK_OK(cluster_send_proto(e->peer->c, prefill->peer->id, FRAME_PREFILL, g->request,
                                g->attempt, &m.base));
    arena_release(&arena);
}

__attribute__((unused)) static void entry_cancel(struct entry *e, struct gen *g,
                                                 struct worker_node *to)
{
    Baton__Cancel m = BATON__CANCEL__INIT;
    CHECK_OK(cluster_send_proto(e->peer->c, to->peer->id, FRAME_CANCEL, g->request, g->attempt,
                                &m.base));
}

/* Plays a split request up to PREFILL. */
__attribute__((unused)) static void entry_split(struct entry *e, struct gen *g,
                                                struct worker_node *prefill,
                                                struct worker_node *decode)
{
    entry_ask(e, g, prefill);
    RIG_WAIT(e->rig, g->credit);
    entry_generate(e, g, decode, FRAME_RESERVE);
    RIG_WAIT(e->rig, g->granted || g->failed);
    if (g->failed) test_fail(__FILE__, __LINE__, "%s", g->text);
    entry_prefill(e, g, prefill, decode->peer->id, cluster_port(decode->peer->c));
}

__attribute__((unused)) static void check_same_answer(const struct gen *a, const struct gen *b)
{
    CHECK_EQ_INT(a->n_out, b->n_out);
    CHECK_EQ_INT(a->finish, b->finish);
    for (uint32_t i = 0; i < a->n_out; i++) {
        CHECK_EQ_INT(a->out[i].id, b->out[i].id);
        CHECK_EQ_INT(a->out[i].rank, b->out[i].rank);
        CHECK_EQ_INT(a->out[i].n_top, b->out[i].n_top);
        CHECK(memcmp(&a->out[i].logprob, &b->out[i].logprob, sizeof(float)) == 0); /* bit for bit */
    }
}

#endif
