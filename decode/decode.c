/* decode.c - the decode worker: messages, engine events and transfer events move one generation
 * each (decode.h). */
#include "decode/decode.h"

#include "decode/token_batcher.h"
#include "decode/decode_seq.h"
#include "shared/base/assert.h"
#include "shared/base/log.h"
#include "shared/base/map.h"
#include "shared/base/mem.h"
#include "shared/cluster/generation_wire.h"
#include "shared/cluster/request_key.h"

struct decode_worker {
    struct decode_options o;
    struct map by_id;      /* engine id -> generation */
    struct map by_request; /* (request, attempt, entry) -> generation, until it is
                            * CLOSING */
    struct list live;
    uint32_t n_live;
    uint64_t next_id;
    struct emit emit;
    struct counter *received_bytes, *received, *failed, *canceled;
};

struct decode_worker *decode_create(const struct decode_options *o)
{
    struct decode_worker *w = MEM_NEW(struct decode_worker);
    w->o = *o;
    list_init(&w->live);
    emit_init(&w->emit, o->cluster);
    w->received = metrics_counter(o->metrics, "baton_decode_received_total", "",
                                  "Generations whose KV arrived and was verified.");
    w->received_bytes = metrics_counter(o->metrics, "baton_decode_received_bytes_total", "",
                                        "KV bytes received for generations.");
    w->failed = metrics_counter(o->metrics, "baton_decode_failed_total", "",
                                "Generations that ended with an error on this node.");
    w->canceled = metrics_counter(o->metrics, "baton_decode_canceled_total", "",
                                  "Generations ended because nobody wants them any more.");
    return w;
}

void decode_free(struct decode_worker *w)
{
    if (!w) return;
    LIST_FOREACH (g, &w->live, struct generation, link) mem_free(g);
    map_release(&w->by_id);
    map_release(&w->by_request);
    emit_release(&w->emit);
    mem_free(w);
}

uint32_t decode_n_live(const struct decode_worker *w) { return w->n_live; }

/* ---- records ---- */

static struct generation *find_request(struct decode_worker *w, const struct cluster_message *m,
                                       uint64_t entry)
{
    struct request_key k = { m->request, entry, m->attempt };
    return map_get(&w->by_request, request_key_str(&k));
}

static void forget_request(struct decode_worker *w, const struct generation *g)
{
    struct request_key k = { g->request, g->entry, g->attempt };
    if (map_get(&w->by_request, request_key_str(&k)) == g)
        map_del(&w->by_request, request_key_str(&k));
}

static struct generation *add_generation(struct decode_worker *w, const struct cluster_message *m,
                                         enum generation_state state)
{
    struct generation *g = MEM_NEW(struct generation);
    g->id = w->o.id_base + ++w->next_id;
    g->request = m->request;
    g->attempt = m->attempt;
    g->entry = m->from;
    g->state = state;
    list_push(&w->live, &g->link);
    w->n_live++;
    map_put(&w->by_id, map_key_u64(&g->id), g);
    struct request_key k = { g->request, g->entry, g->attempt };
    map_put(&w->by_request, request_key_str(&k), g);
    return g;
}

/* Free the record once nobody owes an answer about it. */
static void drop_if_over(struct decode_worker *w, struct generation *g)
{
    if (g->in_engine || g->in_transfer) return;
    forget_request(w, g);
    map_del(&w->by_id, map_key_u64(&g->id));
    list_remove(&g->link);
    w->n_live--;
    mem_free(g);
}

/* ---- answers ---- */

/* The entry waits for each of these: one that does not fit takes the link with it, so that nobody
 * waits for ever. */
static void check_sent(struct decode_worker *w, uint64_t entry, uint64_t request, enum status st)
{
    if (st == ERR_FULL) cluster_disconnect(w->o.cluster, entry, "its queue of answers is full");
    else if (st != OK)
        log_debug("answer not sent", "req=%016llx st=%s", (unsigned long long)request,
                  status_name(st));
}

static void send_failed(struct decode_worker *w, uint64_t entry, uint64_t request, uint32_t attempt,
                        enum status st, const char *text)
{
    Baton__Failed f = BATON__FAILED__INIT;
    f.status = st;
    f.text = (char *)text;
    emit_flush_node(&w->emit, entry);
    check_sent(w, entry, request,
               cluster_send_proto(w->o.cluster, entry, FRAME_FAILED, request, attempt, &f.base));
}

/* Stop wanting a generation: engine and transfer are told, the record stays until both have
 * answered. */
static void close_generation(struct decode_worker *w, struct generation *g)
{
    if (g->state == GENERATION_CLOSING) return;
    g->state = GENERATION_CLOSING;
    forget_request(w, g);
    if (g->in_transfer) kvt_expect_cancel(w->o.kvt, g->id);
    if (g->in_engine) {
        enum status st = engine_cancel(w->o.engine, g->id, !g->in_transfer);
        ASSERT(st == OK || st == ERR_CANCELED); /* the engine accepts cancels always; CANCELED: it
                                                 * is shutting down */
        if (st != OK) g->in_engine = false;
    }
    drop_if_over(w, g);
}

static void fail_generation(struct decode_worker *w, struct generation *g, enum status st,
                            const char *text)
{
    counter_add(w->failed, 1);
    log_warn("generation failed", "req=%016llx attempt=%u st=%s why=\"%s\"",
             (unsigned long long)g->request, g->attempt, status_name(st), text);
    send_failed(w, g->entry, g->request, g->attempt, st, text);
    close_generation(w, g);
}

/* ---- messages ---- */

/* Unpack a Generation into `arena`; answers FAILED itself when it is malformed. */
static enum status unpack(struct decode_worker *w, const struct cluster_message *m,
                          const Baton__Generation *pb, struct arena *arena,
                          struct generation_wire *out)
{
    struct err err = { 0 };
    enum status st = pb ? generation_wire_decode(pb, arena, out, &err)
                        : err_set(&err, ERR_FORMAT, "the generation is missing");
    if (st != OK) send_failed(w, m->from, m->request, m->attempt, st, err.text);
    return st;
}

static struct engine_request engine_request_of(const struct generation_wire *g, uint64_t id)
{
    return (struct engine_request){
        .id = id,
        .tokens = g->tokens,
        .n_tokens = g->n_tokens,
        .n_prompt = g->n_prompt,
        .sampling = g->sampling,
        .cache_salt = g->cache_salt,
        .want_prompt_logprobs = g->prompt_logprobs,
    };
}

static bool has_capacity(struct decode_worker *w, const struct cluster_message *m)
{
    if (w->n_live < w->o.max_generations) return true;
    send_failed(w, m->from, m->request, m->attempt, ERR_BUSY,
                "the decode node has as many generations as it may hold");
    return false;
}

static void on_reserve(struct decode_worker *w, const struct cluster_message *m)
{
    if (find_request(w, m, m->from) || !has_capacity(w, m)) return;
    if (!w->o.kvt) {
        send_failed(w, m->from, m->request, m->attempt, ERR_PEER_REFUSED,
                    "this node receives no KV: no cache transfer protocol is enabled");
        return;
    }
    Baton__Reserve *body = baton__reserve__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    struct arena arena;
    struct generation_wire wire;
    arena_init(&arena);
    if (unpack(w, m, body ? body->generation : NULL, &arena, &wire) == OK) {
        struct generation *g = add_generation(w, m, GENERATION_RESERVING);
        struct engine_request r = engine_request_of(&wire, g->id);
        r.want_prompt_logprobs = false; /* the prefill node makes them */
        g->n_tokens = wire.n_tokens;
        enum status st = engine_reserve(w->o.engine, &r);
        g->in_engine = st == OK;
        if (st != OK) fail_generation(w, g, st, "the decode engine does not take the reservation");
    }
    arena_release(&arena);
    if (body) baton__reserve__free_unpacked(body, NULL);
}

static const char *why_not_taken(enum status st)
{
    if (st == ERR_TOO_LONG) return "the request does not fit in this node's KV cache";
    return st == ERR_FULL || st == ERR_BUSY ? "the engine's queue is full" : status_text(st);
}

static void on_run(struct decode_worker *w, const struct cluster_message *m)
{
    if (find_request(w, m, m->from) || !has_capacity(w, m)) return;
    Baton__Run *body = baton__run__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    struct arena arena;
    struct generation_wire wire;
    arena_init(&arena);
    if (unpack(w, m, body ? body->generation : NULL, &arena, &wire) == OK) {
        struct generation *g = add_generation(w, m, GENERATION_RUNNING);
        struct engine_request r = engine_request_of(&wire, g->id);
        enum status st = engine_submit(w->o.engine, &r);
        g->in_engine = st == OK;
        if (st != OK) fail_generation(w, g, st, why_not_taken(st));
    }
    arena_release(&arena);
    if (body) baton__run__free_unpacked(body, NULL);
}

/* KV and first token are both here: decoding starts. */
static void start_if_complete(struct decode_worker *w, struct generation *g)
{
    if (g->state != GENERATION_GRANTED || !g->has_kv || !g->has_first) return;
    g->state = GENERATION_RUNNING;
    enum status st = engine_activate(w->o.engine, g->id, &g->first);
    if (st != OK) fail_generation(w, g, st, "the decode engine does not take the generation");
}

/* From a prefill node; the key's entry part is not known to it, so the request is found by walking
 * (few are GRANTED). */
static void on_prefill_done(struct decode_worker *w, const struct cluster_message *m)
{
    Baton__PrefillDone *body = baton__prefill_done__unpack(NULL, m->body.n,
                                                           (const uint8_t *)m->body.p);
    struct str records = body ? (struct str){ (const char *)body->first.data, body->first.len }
                              : (struct str){ 0 };
    struct token_logprobs first;
    uint64_t request;
    uint32_t attempt, index;
    if (body && token_record_next(&records, &request, &attempt, &index, &first) == OK) {
        LIST_FOREACH (g, &w->live, struct generation, link) {
            if (g->request != m->request || g->attempt != m->attempt ||
                g->state != GENERATION_GRANTED || g->has_first)
                continue;
            g->first = first;
            g->has_first = true;
            start_if_complete(w, g);
            break;
        }
    }
    if (body) baton__prefill_done__free_unpacked(body, NULL);
}

static void on_kvt_hello(struct decode_worker *w, const struct cluster_message *m)
{
    Baton__KvtHello *body = baton__kvt_hello__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    Baton__KvtAnswer answer = BATON__KVT_ANSWER__INIT;
    struct err err = { 0 };
    struct buf bytes = { 0 };
    enum status st = ERR_FORMAT;
    if (!w->o.kvt)
        st = err_set(&err, ERR_UNSUPPORTED,
                     "this node receives no KV: no cache transfer protocol is enabled");
    else if (body)
        st = kvt_answer(w->o.kvt, (struct str){ (const char *)body->hello.data, body->hello.len },
                        &bytes, &err);
    answer.status = st;
    answer.text = err.text;
    answer.answer.data = (uint8_t *)bytes.data;
    answer.answer.len = st == OK ? bytes.len : 0;
    if (cluster_send_proto(w->o.cluster, m->from, FRAME_KVT_ANSWER, m->request, m->attempt,
                           &answer.base) != OK)
        log_debug("kvt answer not sent", "peer=%s", m->from_name);
    if (st != OK) log_warn("kvt peer refused", "peer=%s why=\"%s\"", m->from_name, err.text);
    buf_release(&bytes);
    if (body) baton__kvt_hello__free_unpacked(body, NULL);
}

static void on_cancel(struct decode_worker *w, const struct cluster_message *m)
{
    struct generation *g = find_request(w, m, m->from);
    if (!g) return;
    counter_add(w->canceled, 1);
    close_generation(w, g);
}

bool decode_on_message(struct decode_worker *w, const struct cluster_message *m)
{
    switch (m->type) {
    case FRAME_RESERVE: on_reserve(w, m); return true;
    case FRAME_RUN: on_run(w, m); return true;
    case FRAME_PREFILL_DONE: on_prefill_done(w, m); return true;
    case FRAME_KVT_HELLO: on_kvt_hello(w, m); return true;
    case FRAME_CANCEL:
        on_cancel(w, m);
        return false; /* the prefill worker may hold the same
                       * request */
    default: return false;
    }
}

void decode_on_lost(struct decode_worker *w, uint64_t node)
{
    LIST_FOREACH (g, &w->live, struct generation, link)
        if (g->entry == node) close_generation(w, g);
    emit_drop(&w->emit, node);
}

/* ---- engine ---- */

static void on_reserved(struct decode_worker *w, struct generation *g,
                        const struct engine_event *ev)
{
    if (ev->status != OK) {
        g->in_engine = false;
        if (g->state == GENERATION_CLOSING) drop_if_over(w, g);
        else
            fail_generation(w, g, ev->status,
                            ev->status == ERR_BUSY
                                ? "no free KV blocks on the decode node"
                                : "the request does not fit in the decode node's KV cache");
        return;
    }
    if (g->state == GENERATION_CLOSING) return; /* the cancel is on its way to the engine */
    const struct kv_layout *l = engine_kv_layout(w->o.engine);
    Baton__Grant grant = BATON__GRANT__INIT;
    struct buf bytes = { 0 };
    enum status st = kvt_expect(w->o.kvt, g->id, ev->blocks, ev->n_blocks,
                                ev->n_cached / l->block_tokens, g->n_tokens, &bytes);
    if (st != OK) {
        fail_generation(w, g, st, "too many KV transfers at once");
    } else {
        g->in_transfer = true;
        g->state = GENERATION_GRANTED;
        g->n_cached = ev->n_cached;
        grant.kvt_grant.data = (uint8_t *)bytes.data;
        grant.kvt_grant.len = bytes.len;
        grant.n_cached = ev->n_cached;
        if (cluster_send_proto(w->o.cluster, g->entry, FRAME_GRANT, g->request, g->attempt,
                               &grant.base) != OK)
            close_generation(w, g);
    }
    buf_release(&bytes);
}

static void on_finished(struct decode_worker *w, struct generation *g,
                        const struct engine_event *ev)
{
    g->in_engine = false;
    if (g->state != GENERATION_CLOSING) {
        if (ev->status != OK) {
            fail_generation(w, g, ev->status, "the engine ended the generation");
            return;
        }
        Baton__Finished f = BATON__FINISHED__INIT;
        f.finish = ev->finish;
        f.stop_token = ev->stop_token;
        f.n_cached = g->transport ? g->n_cached : ev->n_cached;
        f.n_recomputed = ev->n_recomputed;
        f.queue_ns = ev->queue_ns;
        f.prefill_ns = ev->prefill_ns;
        f.decode_ns = ev->decode_ns;
        f.kv_bytes = g->kv_bytes;
        f.kv_ns = g->kv_ns;
        f.kv_link_speed = g->kv_link_speed;
        f.transport = (char *)(g->transport ? g->transport : "");
        f.n_tokens = g->n_sent;
        emit_flush_node(&w->emit, g->entry);
        check_sent(w, g->entry, g->request,
                   cluster_send_proto(w->o.cluster, g->entry, FRAME_FINISHED, g->request,
                                      g->attempt, &f.base));
    }
    drop_if_over(w, g);
}

void decode_on_engine(struct decode_worker *w, const struct engine_event *ev)
{
    struct generation *g = map_get(&w->by_id, map_key_u64(&ev->id));
    if (!g) return;
    switch (ev->kind) {
    case ENGINE_RESERVED: on_reserved(w, g, ev); break;
    case ENGINE_FINISHED: on_finished(w, g, ev); break;
    case ENGINE_CANCELED:
        g->in_engine = false;
        drop_if_over(w, g);
        break;
    case ENGINE_TOKEN:
        if (g->state == GENERATION_CLOSING) break;
        g->n_sent++;
        emit_token(&w->emit, g->entry, g->request, g->attempt, ev->index, &ev->lp);
        break;
    case ENGINE_PROMPT_LOGPROB: {
        if (g->state == GENERATION_CLOSING) break;
        struct buf one = { 0 };
        Baton__PromptLogprobs p = BATON__PROMPT_LOGPROBS__INIT;
        token_record_add(&one, g->request, g->attempt, ev->index, &ev->lp);
        p.records.data = (uint8_t *)one.data;
        p.records.len = one.len;
        check_sent(w, g->entry, g->request,
                   cluster_send_proto(w->o.cluster, g->entry, FRAME_PROMPT_LOGPROBS, g->request,
                                      g->attempt, &p.base));
        buf_release(&one);
        break;
    }
    case ENGINE_STARTED: break;
    }
}

/* ---- transfer ---- */

void decode_on_kvt(struct decode_worker *w, const struct kvt_event *ev)
{
    struct generation *g = map_get(&w->by_id, map_key_u64(&ev->id));
    if (!g) return;
    switch (ev->kind) {
    case KVT_RECEIVED:
        if (g->state == GENERATION_CLOSING) break; /* FENCED follows the cancel */
        g->in_transfer = false;
        g->has_kv = true;
        g->kv_bytes = ev->bytes;
        g->kv_ns = ev->ns;
        g->kv_link_speed = ev->link_speed;
        g->transport = ev->transport;
        counter_add(w->received, 1);
        counter_add(w->received_bytes, ev->bytes);
        start_if_complete(w, g);
        break;
    case KVT_RECEIVE_FAILED:
        /* Whatever a transfer died of is no fault of the request. */
        if (g->state != GENERATION_CLOSING)
            fail_generation(w, g,
                            status_class_of(ev->status) == CLASS_REQUEST ? ERR_IO : ev->status,
                            ev->text[0] ? ev->text : "the KV transfer failed");
        break; /* FENCED follows */
    case KVT_FENCED: {
        g->in_transfer = false;
        enum status st = engine_fence(w->o.engine, g->id);
        if (st != OK)
            log_error("fence not taken by the engine", "req=%016llx st=%s",
                      (unsigned long long)g->request, status_name(st));
        drop_if_over(w, g);
        break;
    }
    default: break;
    }
}

void decode_flush(struct decode_worker *w) { emit_flush(&w->emit); }
