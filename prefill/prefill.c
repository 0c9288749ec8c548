/* prefill.c - see prefill.h: each message, engine event or transfer event moves one prompt. */
#include "prefill/prefill.h"

#include "prefill/kv_route.h"
#include "prefill/prompt.h"
#include "shared/base/clock.h"
#include "shared/base/log/log_repeats.h"
#include "shared/base/map.h"
#include "shared/cluster/answer.h"
#include "shared/cluster/request_table.h"

enum {
    CREDIT_EXPIRES_MS = 15000, /* an unused credit is taken back (the decode nodes may be full) */
    SWEEP_MS = 500,
    STOPPED_MS = 1500 /* a sweep that comes so late shows that this process was stopped */
};

struct prefill_worker {
    struct prefill_options o;
    struct map by_id;
    struct request_table by_request;
    struct list live;
    struct list asked; /* prompt.queue, first come first served */
    uint32_t n_live;
    uint64_t next_id;
    uint64_t credited_tokens;
    struct kv_routes routes;
    struct loop_timer *sweep;
    uint64_t t_sweep_ms;
    struct counter *started, *sent, *failed, *canceled;
    struct gauge *asked_gauge, *credited_gauge;
    struct log_repeats refusals; /* of prompts, for want of room */
};

static void sweep(void *arg);

struct prefill_worker *prefill_create(const struct prefill_options *o)
{
    struct prefill_worker *w = MEM_NEW(struct prefill_worker);
    w->o = *o;
    list_init(&w->live);
    list_init(&w->asked);
    kv_routes_init(&w->routes, o->kvt, o->cluster);
    w->t_sweep_ms = clock_ms();
    w->sweep = loop_timer_start(o->loop, SWEEP_MS, SWEEP_MS, sweep, w);
    w->started = metrics_counter(o->metrics, "baton_prefill_started_total", "",
                                 "Prompts given to the engine for another node.");
    w->sent = metrics_counter(o->metrics, "baton_prefill_sent_total", "",
                              "Prompts whose KV a decode node has acknowledged.");
    w->failed = metrics_counter(o->metrics, "baton_prefill_failed_total", "",
                                "Prompts that ended with an error on this node.");
    w->canceled = metrics_counter(o->metrics, "baton_prefill_canceled_total", "",
                                  "Prompts that were cancelled.");
    w->asked_gauge = metrics_gauge(o->metrics, "baton_prefill_waiting_credit", "",
                                   "Prompts waiting for a start credit.");
    w->credited_gauge = metrics_gauge(o->metrics, "baton_prefill_credited_tokens", "",
                                      "Prompt tokens with a start credit and not yet computed.");
    return w;
}

void prefill_free(struct prefill_worker *w)
{
    if (!w) return;
    loop_timer_free(w->sweep);
    LIST_FOREACH (p, &w->live, struct prefill_prompt, link) {
        arena_release(&p->arena);
        mem_free(p);
    }
    kv_routes_release(&w->routes);
    map_release(&w->by_id);
    request_table_release(&w->by_request);
    mem_free(w);
}

uint32_t prefill_n_live(const struct prefill_worker *w) { return w->n_live; }

void prefill_on_kv_ready(struct kvt *kvt, uint64_t id, uint32_t layer, uint32_t begin, uint32_t end,
                         const int32_t *blocks, uint64_t event)
{
    /* After a refusal SEND_FAILED ends the transfer, on the loop. */
    enum status st = kvt_send_ready_after(kvt, id, layer, begin, end, blocks, event);
    if (st != OK && st != ERR_CANCELED)
        log_debug("kv piece not taken", "sequence=%016llx st=%s", (unsigned long long)id,
                  status_name(st));
}

/* ---- records ---- */

static struct request_key key_of(const struct prefill_prompt *p)
{
    return (struct request_key){ p->request, p->entry, p->attempt };
}

static struct prefill_prompt *add_prompt(struct prefill_worker *w, const struct cluster_message *m)
{
    struct prefill_prompt *p = MEM_NEW(struct prefill_prompt);
    p->id = w->o.id_base + ++w->next_id;
    p->request = m->request;
    p->attempt = m->attempt;
    p->entry = m->from;
    p->state = PROMPT_ASKED;
    arena_init(&p->arena);
    list_init(&p->queue);
    list_push(&w->live, &p->link);
    w->n_live++;
    map_put(&w->by_id, map_key_u64(&p->id), p);
    request_table_add(&w->by_request, key_of(p), p);
    log_debug("prompt begin", "request=%016llx sequence=%016llx attempt=%u entry=%s",
              (unsigned long long)p->request, (unsigned long long)p->id, p->attempt, m->from_name);
    return p;
}

static void give_credits(struct prefill_worker *w);

static void return_credit(struct prefill_worker *w, struct prefill_prompt *p)
{
    if (!p->credited) return;
    p->credited = false;
    w->credited_tokens -= p->n_tokens;
    give_credits(w);
}

static void drop_if_over(struct prefill_worker *w, struct prefill_prompt *p)
{
    if (p->in_engine || p->in_transfer) return;
    log_debug("prompt end", "request=%016llx sequence=%016llx attempt=%u",
              (unsigned long long)p->request, (unsigned long long)p->id, p->attempt);
    request_table_remove(&w->by_request, key_of(p), p);
    list_remove(&p->queue);
    map_del(&w->by_id, map_key_u64(&p->id));
    list_remove(&p->link);
    w->n_live--;
    arena_release(&p->arena);
    mem_free(p);
}

/* ---- ends ---- */

/* Lets the engine free the prompt's blocks once the transfer does not read them any more. */
static void release_engine(struct prefill_worker *w, struct prefill_prompt *p)
{
    if (!p->in_engine || !p->computed || p->in_transfer) return;
    enum status st = engine_release(w->o.engine, p->id);
    if (st != OK && st != ERR_CANCELED)
        log_error("release not taken by the engine", "request=%016llx",
                  (unsigned long long)p->request);
    p->in_engine = false;
}

static void close_prompt(struct prefill_worker *w, struct prefill_prompt *p)
{
    if (p->state == PROMPT_CLOSING) return;
    p->state = PROMPT_CLOSING;
    request_table_remove(&w->by_request, key_of(p), p);
    list_remove(&p->queue);
    return_credit(w, p);
    if (p->in_transfer) kvt_send_cancel(w->o.kvt, p->id);
    if (p->in_engine && !p->computed && !p->in_transfer) {
        enum status st = engine_cancel(w->o.engine, p->id, true);
        if (st != OK) p->in_engine = false;
    }
    release_engine(w, p);
    drop_if_over(w, p);
}

/* While a node is full, each waiting request is refused many times a second. */
static void log_failure(struct prefill_worker *w, const struct prefill_prompt *p, enum status st,
                        const char *text)
{
    bool busy = status_class_of(st) == CLASS_BUSY;
    uint32_t n_unlogged = 0;
    enum log_level level = LOG_WARN;
    if (busy) level = log_repeats_level(&w->refusals, text, clock_ms(), LOG_INFO, &n_unlogged);
    log_line(level, busy ? "prompt refused" : "prompt failed",
             "request=%016llx sequence=%016llx attempt=%u st=%s why=\"%s\" repeats=%u",
             (unsigned long long)p->request, (unsigned long long)p->id, p->attempt, status_name(st),
             text, n_unlogged);
}

static void fail_prompt(struct prefill_worker *w, struct prefill_prompt *p, enum status st,
                        const char *text)
{
    counter_add(w->failed, 1);
    log_failure(w, p, st, text);
    answer_send_failed(w->o.cluster, p->entry, p->request, p->attempt, st, text);
    close_prompt(w, p);
}

/* ---- credits ---- */

static void give_credits(struct prefill_worker *w)
{
    while (!list_empty(&w->asked)) {
        struct prefill_prompt *p = LIST_FIRST(&w->asked, struct prefill_prompt, queue);
        bool fits = w->credited_tokens == 0 ||
                    w->credited_tokens + p->n_tokens <= 2u * (uint64_t)w->o.step_tokens;
        if (!fits) break;
        Baton__Credit c = BATON__CREDIT__INIT;
        list_remove(&p->queue);
        p->state = PROMPT_CREDITED;
        p->credited = true;
        p->t_credit_ms = clock_ms();
        w->credited_tokens += p->n_tokens;
        if (cluster_send_proto(w->o.cluster, p->entry, FRAME_CREDIT, p->request, p->attempt,
                               &c.base) != OK)
            log_debug("credit not sent", "request=%016llx",
                      (unsigned long long)p->request); /* prefill_on_lost will close it */
    }
    gauge_set(w->credited_gauge, (double)w->credited_tokens);
}

static void on_ask(struct prefill_worker *w, const struct cluster_message *m)
{
    if (request_table_find(&w->by_request, request_key_of(m))) return;
    if (w->n_live >= w->o.max_prompts) {
        answer_send_failed(w->o.cluster, m->from, m->request, m->attempt, ERR_BUSY,
                           "the prefill node already has as many prompts waiting as it takes");
        return;
    }
    Baton__AskCredit *ask = baton__ask_credit__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    if (!ask) {
        answer_send_failed(w->o.cluster, m->from, m->request, m->attempt, ERR_FORMAT,
                           "the credit request is malformed");
        return;
    }
    struct prefill_prompt *p = add_prompt(w, m);
    p->n_tokens = ask->n_tokens;
    list_push(&w->asked, &p->queue);
    baton__ask_credit__free_unpacked(ask, NULL);
    give_credits(w);
}

/* ---- PREFILL ---- */

/* The data connection is up. The transfer is opened before the engine starts, since the first layer
 * needs it. */
static void start_compute(struct prefill_worker *w, struct prefill_prompt *p, uint64_t peer)
{
    struct err err = { 0 };
    enum status st = kvt_send_open(w->o.kvt, p->id, peer, p->grant, &err);
    if (st != OK) { /* a malformed grant is the decode node's fault, not the request's */
        fail_prompt(w, p, status_class_of(st) == CLASS_REQUEST ? ERR_PEER_MISMATCH : st, err.text);
        return;
    }
    p->in_transfer = true;
    struct engine_request r = {
        .id = p->id,
        .request = p->request,
        .tokens = p->wire.tokens,
        .n_tokens = p->wire.n_tokens,
        .n_prompt = p->wire.n_prompt,
        .sampling = p->wire.sampling,
        .cache_salt = p->wire.cache_salt,
        .want_prompt_logprobs = p->wire.prompt_logprobs,
        .prefill_only = true,
    };
    st = engine_submit(w->o.engine, &r);
    if (st != OK) {
        fail_prompt(w, p, st, "the prefill engine does not take the prompt");
        return;
    }
    p->in_engine = true;
    p->state = PROMPT_COMPUTING;
    counter_add(w->started, 1);
    arena_release(&p->arena); /* engine and kvtransfer have their copies */
}

static void start_or_wait(struct prefill_worker *w, struct prefill_prompt *p)
{
    struct kv_route *route = kv_routes_get(&w->routes, p->decode);
    if (!route)
        fail_prompt(w, p, ERR_PEER_LOST, "the decode node cannot be reached from the prefill node");
    else if (route->state == KV_ROUTE_UP) start_compute(w, p, route->peer);
    else list_push(&route->waiting, &p->queue);
}

static enum status take_prefill(struct prefill_prompt *p, const Baton__Prefill *body,
                                struct err *err)
{
    if (!body || !body->generation || !body->decode || body->kvt_grant.len == 0)
        return err_set(err, ERR_FORMAT, "the prefill message is malformed");
    if (body->decode->port == 0 || body->decode->port > 65535)
        return err_set(err, ERR_FORMAT, "the decode node's port is out of range");
    TRY(generation_wire_decode(body->generation, &p->arena, &p->wire, err));
    p->decode = body->decode->node;
    p->grant = (struct str){ arena_strndup(&p->arena, (const char *)body->kvt_grant.data,
                                           body->kvt_grant.len),
                             body->kvt_grant.len };
    return OK;
}

static void on_prefill(struct prefill_worker *w, const struct cluster_message *m)
{
    struct prefill_prompt *p = request_table_find(&w->by_request, request_key_of(m));
    struct err err = { 0 };
    if (!p || p->state != PROMPT_CREDITED) {
        answer_send_failed(w->o.cluster, m->from, m->request, m->attempt, ERR_STALE,
                           "the start credit has expired");
        return;
    }
    Baton__Prefill *body = baton__prefill__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    enum status st = w->o.kvt
                         ? take_prefill(p, body, &err)
                         : err_set(&err, ERR_PEER_REFUSED,
                                   "this node sends no KV: no cache transfer protocol is enabled");
    if (st == OK) {
        p->state = PROMPT_CONNECTING;
        cluster_learn(w->o.cluster, p->decode, body->decode->host, (uint16_t)body->decode->port);
        start_or_wait(w, p);
    } else {
        fail_prompt(w, p, st, err.text);
    }
    if (body) baton__prefill__free_unpacked(body, NULL);
}

/* ---- routes ---- */

static void fail_route(struct prefill_worker *w, struct kv_route *route, enum status st,
                       const char *text)
{
    while (!list_empty(&route->waiting)) {
        struct prefill_prompt *p = LIST_FIRST(&route->waiting, struct prefill_prompt, queue);
        list_remove(&p->queue);
        fail_prompt(w, p, st, text);
    }
    kv_routes_drop(&w->routes, route);
}

static void on_answer(struct prefill_worker *w, const struct cluster_message *m)
{
    struct kv_route *route = kv_routes_find(&w->routes, m->from);
    struct err err = { 0 };
    if (!route) return;
    enum status st = kv_routes_on_answer(&w->routes, route, m, &err);
    if (st != OK) {
        log_warn("no kv route", "peer=%s st=%s why=\"%s\"", m->from_name, status_name(st),
                 err.text);
        fail_route(w, route, st, err.text);
    }
}

static void on_route_up(struct prefill_worker *w, uint64_t peer)
{
    struct kv_route *route = kv_routes_find_peer(&w->routes, peer);
    if (!route) return;
    route->state = KV_ROUTE_UP;
    while (!list_empty(&route->waiting)) {
        struct prefill_prompt *p = LIST_FIRST(&route->waiting, struct prefill_prompt, queue);
        list_remove(&p->queue);
        start_compute(w, p, route->peer);
    }
}

/* Ends prompts with an unused credit, and routes that did not come up. */
static void sweep(void *arg)
{
    struct prefill_worker *w = arg;
    uint64_t now = clock_ms(), since = now - w->t_sweep_ms;
    uint32_t n_asked = 0;
    w->t_sweep_ms = now;
    if (since >= STOPPED_MS) kv_routes_wait_longer(&w->routes, since, now);
    LIST_FOREACH (p, &w->live, struct prefill_prompt, link) {
        n_asked += p->state == PROMPT_ASKED;
        /* Do not subtract: the credit may be younger than `now`, returned by a prompt that failed
         * in this loop. */
        if (p->state == PROMPT_CREDITED && now > p->t_credit_ms + CREDIT_EXPIRES_MS)
            fail_prompt(w, p, ERR_TIMEOUT, "the start credit was not used in time");
    }
    LIST_FOREACH (route, &w->routes.all, struct kv_route, link)
        if (route->state != KV_ROUTE_UP && now > route->since_ms + KV_ROUTE_CONNECT_MS)
            fail_route(w, route, ERR_PEER_REFUSED,
                       "no KV connection to the decode node within 5 s");
    gauge_set(w->asked_gauge, n_asked);
}

/* ---- dispatch ---- */

bool prefill_on_message(struct prefill_worker *w, const struct cluster_message *m)
{
    switch (m->type) {
    case FRAME_ASK_CREDIT: on_ask(w, m); return true;
    case FRAME_PREFILL: on_prefill(w, m); return true;
    case FRAME_KVT_ANSWER: on_answer(w, m); return true;
    case FRAME_CANCEL: {
        struct prefill_prompt *p = request_table_find(&w->by_request, request_key_of(m));
        if (!p) return false; /* the decode worker may have it */
        counter_add(w->canceled, 1);
        close_prompt(w, p);
        return false;
    }
    default: return false;
    }
}

void prefill_on_lost(struct prefill_worker *w, uint64_t node)
{
    struct kv_route *route = kv_routes_find(&w->routes, node);
    if (route) fail_route(w, route, ERR_PEER_LOST, "the decode node is gone");
    LIST_FOREACH (p, &w->live, struct prefill_prompt, link) {
        if (p->state == PROMPT_CLOSING) continue;
        if (p->entry == node) close_prompt(w, p);
        else if (p->decode == node && p->state >= PROMPT_CONNECTING)
            fail_prompt(w, p, ERR_PEER_LOST, "the decode node is gone");
    }
}

static void send_report(struct prefill_worker *w, struct prefill_prompt *p,
                        const struct kvt_event *ev)
{
    Baton__PrefillReport r = BATON__PREFILL_REPORT__INIT;
    r.queue_ns = p->queue_ns;
    r.prefill_ns = p->prefill_ns;
    r.n_cached = p->n_cached;
    r.kv_bytes = ev->bytes;
    r.kv_ns = ev->ns;
    r.kv_busy_ns = ev->busy_ns;
    r.kv_tail_ns = ev->tail_ns;
    r.kv_link_speed = ev->link_speed;
    r.transport = (char *)(ev->transport ? ev->transport : "");
    if (cluster_send_proto(w->o.cluster, p->entry, FRAME_PREFILL_REPORT, p->request, p->attempt,
                           &r.base) != OK)
        log_debug("report not sent", "request=%016llx", (unsigned long long)p->request);
}

static void on_first_token(struct prefill_worker *w, struct prefill_prompt *p,
                           const struct engine_event *ev)
{
    struct buf record = { 0 };
    Baton__PrefillDone done = BATON__PREFILL_DONE__INIT;
    token_record_add(&record, p->request, p->attempt, ev->index, &ev->lp);
    done.first.data = (uint8_t *)record.data;
    done.first.len = record.len;
    enum status st = cluster_send_proto(w->o.cluster, p->decode, FRAME_PREFILL_DONE, p->request,
                                        p->attempt, &done.base);
    buf_release(&record);
    if (st != OK)
        fail_prompt(w, p, ERR_PEER_LOST, "the first token could not be sent to the decode node");
}

static void on_computed(struct prefill_worker *w, struct prefill_prompt *p,
                        const struct engine_event *ev)
{
    p->computed = true;
    p->queue_ns = ev->queue_ns;
    p->prefill_ns = ev->prefill_ns;
    p->n_cached = ev->n_cached;
    return_credit(w, p);
    if (p->state == PROMPT_CLOSING) {
        release_engine(w, p);
        drop_if_over(w, p);
    } else if (ev->status != OK) {
        /* One that never entered the engine holds nothing there; another holds its blocks until it
         * is released, since a transfer may still read them. */
        if (ev->status == ERR_INVALID) p->in_engine = false;
        fail_prompt(w, p, ev->status, "the prefill engine could not compute the prompt");
    } else {
        p->state = PROMPT_DRAINING;
        kvt_send_finish(w->o.kvt, p->id);
    }
}

void prefill_on_engine(struct prefill_worker *w, const struct engine_event *ev)
{
    struct prefill_prompt *p = map_get(&w->by_id, map_key_u64(&ev->id));
    if (!p) return;
    switch (ev->kind) {
    case ENGINE_TOKEN:
        if (p->state == PROMPT_COMPUTING) on_first_token(w, p, ev);
        break;
    case ENGINE_FINISHED: on_computed(w, p, ev); break;
    case ENGINE_CANCELED:
        p->in_engine = false;
        drop_if_over(w, p);
        break;
    case ENGINE_PROMPT_LOGPROB: {
        struct buf one = { 0 };
        Baton__PromptLogprobs m = BATON__PROMPT_LOGPROBS__INIT;
        token_record_add(&one, p->request, p->attempt, ev->index, &ev->lp);
        m.records.data = (uint8_t *)one.data;
        m.records.len = one.len;
        enum status st = OK;
        if (p->state == PROMPT_COMPUTING)
            st = cluster_send_proto(w->o.cluster, p->entry, FRAME_PROMPT_LOGPROBS, p->request,
                                    p->attempt, &m.base);
        buf_release(&one);
        /* The entry node waits for all of them. */
        if (st != OK) fail_prompt(w, p, ERR_BUSY, "a prompt logprob could not be sent");
        break;
    }
    case ENGINE_STARTED:
    case ENGINE_RESERVED: break;
    }
}

/* The transfer of a prompt ended, well or not: it does not read the blocks any more. */
static void on_send_over(struct prefill_worker *w, struct prefill_prompt *p,
                         const struct kvt_event *ev)
{
    p->in_transfer = false;
    if (ev->kind == KVT_SENT && p->state == PROMPT_DRAINING) {
        counter_add(w->sent, 1);
        send_report(w, p, ev);
    } else if (p->state != PROMPT_CLOSING) {
        /* A failed transfer is never the request's fault. */
        fail_prompt(w, p, status_class_of(ev->status) == CLASS_REQUEST ? ERR_IO : ev->status,
                    ev->text[0] ? ev->text : "the KV transfer failed");
        return;
    } else if (p->in_engine && !p->computed) { /* the cancel had to wait for the transfer's end */
        if (engine_cancel(w->o.engine, p->id, true) != OK) p->in_engine = false;
    }
    release_engine(w, p);
    drop_if_over(w, p);
}

void prefill_on_kvt(struct prefill_worker *w, const struct kvt_event *ev)
{
    if (ev->kind == KVT_CONNECTED) {
        on_route_up(w, ev->peer);
        return;
    }
    if (ev->kind == KVT_PEER_LOST) {
        struct kv_route *route = kv_routes_find_peer(&w->routes, ev->peer);
        if (route)
            fail_route(w, route, ev->status,
                       ev->text[0] ? ev->text : "the KV connection to the decode node was lost");
        return;
    }
    struct prefill_prompt *p = map_get(&w->by_id, map_key_u64(&ev->id));
    if (p && (ev->kind == KVT_SENT || ev->kind == KVT_SEND_FAILED)) on_send_over(w, p, ev);
}
