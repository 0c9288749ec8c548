/* prefill.c - see prefill.h: each message, engine event or transfer event moves one prompt. */
#include "prefill/prefill.h"

#include "kvtransfer/event_wire.h"
#include "prefill/kv_lend.h"
#include "prefill/prompt.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log/log_repeats.h"
#include "shared/base/map.h"
#include "shared/cluster/answer.h"
#include "shared/cluster/request_table.h"

enum {
    CREDIT_EXPIRES_MS = 15000, /* an unused credit is taken back (the decode nodes may be full) */
    SWEEP_MS = KV_ROUTE_DOUBT_AGAIN_MS,
    STOPPED_MS = 1500 /* a sweep that comes so late shows that this process was stopped */
};

struct prefill_worker {
    struct prefill_options o;
    struct map by_id;
    struct request_table by_request;
    struct list live;
    struct list asked; /* prompt.queue, in the order of credits */
    uint32_t n_live;
    uint64_t next_id;
    uint64_t credited_tokens;
    struct kv_sender sender;
    struct kv_lends lends;
    struct prefill_ranks ranks;
    bool broken; /* a follower was lost: the node takes nothing any more */
    bool leaves; /* prefill_set_leaving: nor does one that shuts down */
    bool settles;
    uint32_t role; /* 0: ASK_CREDIT for any is taken */
    struct loop_timer *sweep;
    uint64_t t_sweep_ms;
    struct counter *started, *sent, *failed, *canceled;
    struct gauge *asked_gauge, *credited_gauge;
    struct log_repeats refusals; /* of prompts, for want of room */
};

static void sweep(void *arg);
static void on_sends_open(void *arg, struct kv_sends *s);
static void on_sends_failed(void *arg, struct kv_sends *s, enum status st, const char *text);

struct prefill_worker *prefill_create(const struct prefill_options *o)
{
    struct prefill_worker *w = MEM_NEW(struct prefill_worker);
    w->o = *o;
    list_init(&w->live);
    list_init(&w->asked);
    w->sender = (struct kv_sender){ .kvt = o->kvt,
                                    .cluster = o->cluster,
                                    .on_open = on_sends_open,
                                    .on_failed = on_sends_failed,
                                    .arg = w };
    kv_sender_init(&w->sender);
    w->lends = (struct kv_lends){ .engine = o->engine,
                                  .ranks = &w->ranks,
                                  .sender = &w->sender,
                                  .id_base = o->id_base,
                                  .next_id = &w->next_id };
    kv_lends_init(&w->lends, o->metrics);
    ASSERT(o->n_followers < KV_RANKS_MAX);
    w->ranks = (struct prefill_ranks){ .cluster = o->cluster, .n_followers = o->n_followers };
    for (uint32_t i = 0; i < o->n_followers; i++) w->ranks.followers[i] = o->followers[i];
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
    kv_lends_release(&w->lends);
    kv_sender_release(&w->sender);
    map_release(&w->by_id);
    request_table_release(&w->by_request);
    mem_free(w);
}

uint32_t prefill_n_live(const struct prefill_worker *w) { return w->n_live + w->lends.n_live; }

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
    p->id = w->o.id_base + kv_parts_id(++w->next_id);
    p->request = m->request;
    p->attempt = m->attempt;
    p->entry = m->from;
    p->state = PROMPT_ASKED;
    arena_init(&p->arena);
    list_init(&p->queue);
    prompt_parts_init(&p->parts, p->id);
    list_push(&w->live, &p->link);
    w->n_live++;
    map_put(&w->by_id, map_key_u64(&p->id), p);
    request_table_add(&w->by_request, key_of(p), p);
    log_debug("prompt begin", "request=%016llx sequence=%016llx attempt=%u entry=%s",
              (unsigned long long)p->request, (unsigned long long)p->id, p->attempt, m->from_name);
    return p;
}

static void give_credits(struct prefill_worker *w);

static void take_credit(struct prefill_worker *w, struct prefill_prompt *p)
{
    if (p->credited) return;
    p->credited = true;
    w->credited_tokens += p->n_tokens;
}

static void return_credit(struct prefill_worker *w, struct prefill_prompt *p)
{
    if (!p->credited) return;
    p->credited = false;
    w->credited_tokens -= p->n_tokens;
    give_credits(w);
}

static void drop_if_over(struct prefill_worker *w, struct prefill_prompt *p)
{
    if (p->in_engine || p->parts.open) return;
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
    if (!p->in_engine || !p->computed || p->parts.open) return;
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
    kv_sender_cancel(&w->sender, &p->parts.sends);
    prompt_parts_tell(&p->parts, &w->ranks, FRAME_KV_CANCEL);
    if (p->in_engine && !p->computed && !p->parts.open) {
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
                        enum failed_blame blame, const char *text)
{
    counter_add(w->failed, 1);
    log_failure(w, p, st, text);
    answer_send_failed(w->o.cluster, p->entry, p->request, p->attempt,
                       &(struct failure){ st, blame, text });
    close_prompt(w, p);
}

/* Answers a message that becomes no prompt. */
static void refuse(struct prefill_worker *w, const struct cluster_message *m, enum status st,
                   enum failed_blame blame, const char *text)
{
    answer_send_failed(w->o.cluster, m->from, m->request, m->attempt,
                       &(struct failure){ st, blame, text });
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
        p->t_credit_ms = clock_ms();
        take_credit(w, p);
        answer_send(w->o.cluster, p->entry, FRAME_CREDIT, p->request, p->attempt, &c.base);
    }
    gauge_set(w->credited_gauge, (double)w->credited_tokens);
}

static void wait_for_credit(struct prefill_worker *w, struct prefill_prompt *p)
{
    struct list *at = w->asked.prev;
    while (p->goes_first && at != &w->asked &&
           !LIST_ENTRY(at, struct prefill_prompt, queue)->goes_first)
        at = at->prev;
    list_insert_after(at, &p->queue);
}

static const char LEAVES[] = "the prefill node shuts down and gives the request back";

static const char CHANGED[] =
    "the role of the prefill node has just changed, and it gives the request back";

/* The entry node's view is older than the role of this node. */
static bool is_of_role(const struct prefill_worker *w, const Baton__AskCredit *ask)
{
    return !w->settles && (!w->role || !ask->role || ask->role == w->role);
}

static void take_ask(struct prefill_worker *w, const struct cluster_message *m,
                     const Baton__AskCredit *ask)
{
    if (!is_of_role(w, ask)) {
        refuse(w, m, ERR_BUSY, BLAME_HANDED_BACK, CHANGED);
        return;
    }
    struct prefill_prompt *p = add_prompt(w, m);
    p->n_tokens = ask->n_tokens;
    p->goes_first = ask->goes_first;
    wait_for_credit(w, p);
    give_credits(w);
}

static void on_ask(struct prefill_worker *w, const struct cluster_message *m)
{
    if (request_table_find(&w->by_request, request_key_of(m))) return;
    if (w->broken) {
        refuse(w, m, ERR_PEER_LOST, BLAME_NODE, "a rank of the prefill node was lost");
        return;
    }
    if (w->leaves) {
        refuse(w, m, ERR_BUSY, BLAME_HANDED_BACK, LEAVES);
        return;
    }
    if (w->n_live >= w->o.max_prompts) {
        refuse(w, m, ERR_BUSY, BLAME_NOBODY,
               "the prefill node already has as many prompts waiting as it takes");
        return;
    }
    Baton__AskCredit *ask = baton__ask_credit__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    if (!ask) {
        refuse(w, m, ERR_FORMAT, BLAME_NOBODY, "the credit request is malformed");
        return;
    }
    take_ask(w, m, ask);
    baton__ask_credit__free_unpacked(ask, NULL);
}

/* ---- PREFILL ---- */

/* The transfers of all ranks are open, which the first layer needs: the engine starts. */
static void compute_if_open(struct prefill_worker *w, struct prefill_prompt *p)
{
    if (p->parts.opening) return;
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
        .goes_first = p->goes_first,
        .peer = p->kept.node,
        .n_peer_tokens = p->kept.n_tokens,
        .n_peer_ranks = p->kept.n_ranks,
    };
    enum status st = engine_submit(w->o.engine, &r);
    if (st != OK) {
        fail_prompt(w, p, st, failed_blame_of_engine(st),
                    "the prefill engine does not take the prompt");
        return;
    }
    p->in_engine = true;
    p->state = PROMPT_COMPUTING;
    take_credit(w, p); /* if it gave it back while it waited for its connections */
    counter_add(w->started, 1);
    arena_release(&p->arena); /* engine and kvtransfer have their copies */
}

static struct prefill_prompt *prompt_of(struct prefill_worker *w, const struct kv_sends *s)
{
    return map_get(&w->by_id, map_key_u64(&s->id));
}

static void on_sends_open(void *arg, struct kv_sends *s)
{
    struct prefill_worker *w = arg;
    if (kv_lends_on_open(&w->lends, s)) return;
    struct prefill_prompt *p = prompt_of(w, s);
    prompt_parts_opened(&p->parts);
    compute_if_open(w, p);
}

static void on_sends_failed(void *arg, struct kv_sends *s, enum status st, const char *text)
{
    struct prefill_worker *w = arg;
    if (kv_lends_on_failed(&w->lends, s, text)) return;
    struct prefill_prompt *p = prompt_of(w, s);
    struct failure f = failure_of_transfer(st, text);
    prompt_parts_opened(&p->parts);
    fail_prompt(w, p, f.st, f.blame, f.text);
}

static struct prompt_parts_asked asked_of(const Baton__Prefill *m)
{
    return (struct prompt_parts_asked){
        .to = m->decode, .n_to = m->n_decode, .parts = m->parts, .n_parts = m->n_parts
    };
}

/* Every rank opens its own transfers. The first few that wait for a connection need no credit:
 * others, with connections, need not wait for them. */
static void open_transfers(struct prefill_worker *w, struct prefill_prompt *p,
                           const Baton__Prefill *body)
{
    const struct prompt_parts_asked asked = asked_of(body);
    p->state = PROMPT_CONNECTING;
    p->t_connect_ms = clock_ms();
    if (prompt_parts_ask(&p->parts, &w->ranks, &asked) != OK)
        fail_prompt(w, p, ERR_PEER_LOST, BLAME_NODE,
                    "a rank of the prefill node cannot be reached");
    else if (p->parts.sends.n && kv_sender_start(&w->sender, &p->parts.sends)) return_credit(w, p);
}

static enum status take_prefill(struct prefill_worker *w, struct prefill_prompt *p,
                                const Baton__Prefill *body, struct err *err)
{
    if (!body || !body->generation)
        return err_set(err, ERR_FORMAT, "the prefill message is malformed");
    const struct prompt_parts_asked asked = asked_of(body);
    TRY(prompt_parts_take(&p->parts, &w->ranks, &w->sender, &asked, &p->arena, err));
    p->decode = body->decode[0]->node;
    p->kept = kv_kept_learn(w->o.cluster, body->kept);
    return generation_wire_decode(body->generation, &p->arena, &p->wire, err);
}

static void on_prefill(struct prefill_worker *w, const struct cluster_message *m)
{
    struct prefill_prompt *p = request_table_find(&w->by_request, request_key_of(m));
    struct err err = { 0 };
    if (!p || p->state != PROMPT_CREDITED) {
        refuse(w, m, ERR_STALE, BLAME_NOBODY, "the start credit has expired");
        return;
    }
    Baton__Prefill *body = baton__prefill__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    enum status st = w->o.kvt
                         ? take_prefill(w, p, body, &err)
                         : err_set(&err, ERR_PEER_REFUSED,
                                   "this node sends no KV: no cache transfer protocol is enabled");
    if (st == OK) open_transfers(w, p, body);
    else /* the two do not fit, or the request is malformed */
        fail_prompt(w, p, st, status_class_of(st) == CLASS_PEER ? BLAME_PAIR : BLAME_NOBODY,
                    err.text);
    if (body) baton__prefill__free_unpacked(body, NULL);
}

/* ---- followers' answers ---- */

static void on_opened(struct prefill_worker *w, const struct cluster_message *m)
{
    struct prefill_prompt *p = map_get(&w->by_id, map_key_u64(&m->request));
    uint32_t rank = prefill_ranks_find(&w->ranks, m->from);
    if (!p || !rank || p->state != PROMPT_CONNECTING || !(p->parts.opening & 1u << rank)) return;
    p->parts.opening &= ~(1u << rank);
    compute_if_open(w, p);
}

static bool on_follower_event(struct prefill_worker *w, const struct cluster_message *m)
{
    struct kvt_event ev;
    uint32_t rank = prefill_ranks_find(&w->ranks, m->from);
    if (!rank || kvt_event_decode(m->body, &ev) != OK) return false;
    uint64_t id = kv_part_owner(ev.id);
    struct prefill_prompt *p = map_get(&w->by_id, map_key_u64(&id));
    const struct prompt_parts *parts = p ? &p->parts : kv_lends_parts(&w->lends, id);
    if (!parts) return false; /* of the decode worker, or of what has ended */
    if (prompt_parts_of_rank(parts, rank) & 1u << kv_part_index(ev.id)) prefill_on_kvt(w, &ev);
    return true;
}

/* Ends prompts with an unused credit, and routes that did not come up. */
static void sweep(void *arg)
{
    struct prefill_worker *w = arg;
    uint64_t now = clock_ms(), since = now - w->t_sweep_ms;
    uint32_t n_asked = 0;
    w->t_sweep_ms = now;
    if (since >= STOPPED_MS) kv_routes_wait_longer(&w->sender.routes, since, now);
    LIST_FOREACH (p, &w->live, struct prefill_prompt, link) {
        n_asked += p->state == PROMPT_ASKED;
        /* Do not subtract: the credit may be younger than `now`, returned by a prompt that failed
         * in this loop. */
        if (p->state == PROMPT_CREDITED && now > p->t_credit_ms + CREDIT_EXPIRES_MS)
            fail_prompt(w, p, ERR_TIMEOUT, BLAME_NOBODY, "the start credit was not used in time");
        else if (p->state == PROMPT_CONNECTING && now > p->t_connect_ms + KV_ROUTE_DOUBT_MS)
            return_credit(w, p); /* a rank still waits, and only the first of those that do */
    }
    kv_sender_sweep(&w->sender, now);
    gauge_set(w->asked_gauge, n_asked);
}

/* ---- dispatch ---- */

bool prefill_on_message(struct prefill_worker *w, const struct cluster_message *m)
{
    switch (m->type) {
    case FRAME_ASK_CREDIT: on_ask(w, m); return true;
    case FRAME_PREFILL: on_prefill(w, m); return true;
    case FRAME_KVT_ANSWER: kv_sender_on_answer(&w->sender, m); return true;
    case FRAME_FETCH: kv_lends_on_message(&w->lends, m); return true;
    case FRAME_KV_OPENED: on_opened(w, m); return true;
    case FRAME_KV_EVENT: return on_follower_event(w, m);
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

static void end_if_sent(struct prefill_worker *w, struct prefill_prompt *p);

/* The node is lost as a whole with any of its ranks: its engine will end, and it takes no new
 * prompt. */
static void on_follower_lost(struct prefill_worker *w, uint32_t rank)
{
    w->broken = true;
    LIST_FOREACH (p, &w->live, struct prefill_prompt, link) {
        if (!prompt_parts_on_lost(&p->parts, rank)) continue;
        if (p->state == PROMPT_CLOSING) end_if_sent(w, p);
        else fail_prompt(w, p, ERR_PEER_LOST, BLAME_NODE, "a rank of the prefill node was lost");
    }
}

void prefill_on_lost(struct prefill_worker *w, uint64_t node)
{
    uint32_t rank = prefill_ranks_find(&w->ranks, node);
    if (rank) on_follower_lost(w, rank);
    kv_sender_on_lost(&w->sender, node);
    kv_lends_on_lost(&w->lends, node);
    LIST_FOREACH (p, &w->live, struct prefill_prompt, link) {
        if (p->state == PROMPT_CLOSING) continue;
        if (p->entry == node) close_prompt(w, p);
        else if (p->state >= PROMPT_CONNECTING &&
                 (p->decode == node || prompt_parts_go_to(&p->parts, node)))
            fail_prompt(w, p, ERR_PEER_LOST, BLAME_PAIR, "the decode node is gone");
    }
}

static void send_report(struct prefill_worker *w, const struct prefill_prompt *p)
{
    Baton__PrefillReport r = BATON__PREFILL_REPORT__INIT;
    Baton__CacheUse cache = BATON__CACHE_USE__INIT;
    r.queue_ns = p->queue_ns;
    r.prefill_ns = p->prefill_ns;
    r.n_cached = p->n_cached;
    cache.host_tokens = p->cache.n_from[KV_TIER_HOST];
    cache.disk_tokens = p->cache.n_from[KV_TIER_DISK];
    cache.peer_tokens = p->cache.n_from[KV_TIER_PEER];
    cache.load_ns = p->cache.load_ns;
    cache.load_us = p->cache.load_us;
    cache.compute_us = p->cache.compute_us;
    r.cache = &cache;
    r.kv_bytes = p->parts.bytes;
    r.kv_ns = p->parts.slowest.ns;
    r.kv_busy_ns = p->parts.slowest.busy_ns;
    r.kv_tail_ns = p->parts.slowest.tail_ns;
    r.kv_link_speed = p->parts.slowest.link_speed;
    r.transport = (char *)(p->parts.slowest.transport ? p->parts.slowest.transport : "");
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
    done.hidden.data = (uint8_t *)(uintptr_t)ev->hidden;
    done.hidden.len = ev->n_hidden * sizeof *ev->hidden;
    enum status st = cluster_send_proto(w->o.cluster, p->decode, FRAME_PREFILL_DONE, p->request,
                                        p->attempt, &done.base);
    buf_release(&record);
    if (st != OK)
        fail_prompt(w, p, ERR_PEER_LOST, BLAME_PAIR,
                    "the first token could not be sent to the decode node");
}

static void on_computed(struct prefill_worker *w, struct prefill_prompt *p,
                        const struct engine_event *ev)
{
    p->computed = true;
    p->queue_ns = ev->queue_ns;
    p->prefill_ns = ev->prefill_ns;
    p->n_cached = ev->n_cached;
    p->cache = ev->cache;
    return_credit(w, p);
    if (p->state == PROMPT_CLOSING) {
        release_engine(w, p);
        drop_if_over(w, p);
    } else if (ev->status != OK) {
        /* One that never entered the engine holds nothing there; another holds its blocks until it
         * is released, since a transfer may still read them. */
        if (ev->status == ERR_INVALID) p->in_engine = false;
        fail_prompt(w, p, ev->status, failed_blame_of_engine(ev->status),
                    "the prefill engine could not compute the prompt");
    } else {
        p->state = PROMPT_DRAINING;
        kvt_send_finish(w->o.kvt, p->id);
        prompt_parts_tell(&p->parts, &w->ranks, FRAME_KV_FINISH);
    }
}

void prefill_on_engine(struct prefill_worker *w, const struct engine_event *ev)
{
    struct prefill_prompt *p = map_get(&w->by_id, map_key_u64(&ev->id));
    if (ev->kind == ENGINE_LENT) kv_lends_on_engine(&w->lends, ev);
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
        if (st != OK)
            fail_prompt(w, p, ERR_BUSY, BLAME_NOBODY, "a prompt logprob could not be sent");
        break;
    }
    case ENGINE_PREEMPTED: /* one that loads: it starts again */
    case ENGINE_FETCH:
    case ENGINE_FETCH_OFF:
    case ENGINE_LENT:
    case ENGINE_STARTED:
    case ENGINE_RESERVED: break;
    }
}

/* All transfers of a prompt on all ranks have ended, well or not: none reads its blocks any
 * more. */
static void end_if_sent(struct prefill_worker *w, struct prefill_prompt *p)
{
    if (p->parts.open) return;
    if (p->state == PROMPT_DRAINING) {
        counter_add(w->sent, 1);
        send_report(w, p);
    } else if (p->in_engine && !p->computed) { /* the cancel had to wait for the transfers' end */
        if (engine_cancel(w->o.engine, p->id, true) != OK) p->in_engine = false;
    }
    release_engine(w, p);
    drop_if_over(w, p);
}

static void on_send_over(struct prefill_worker *w, struct prefill_prompt *p,
                         const struct kvt_event *ev)
{
    if (!prompt_parts_end(&p->parts, ev)) return;
    bool well = ev->kind == KVT_SENT && p->state == PROMPT_DRAINING;
    struct failure f = failure_of_transfer(ev->status, ev->text);
    if (well || p->state == PROMPT_CLOSING) end_if_sent(w, p);
    else fail_prompt(w, p, f.st, f.blame, f.text);
}

void prefill_on_kvt(struct prefill_worker *w, const struct kvt_event *ev)
{
    uint64_t id = kv_part_owner(ev->id);
    if (kv_sender_on_kvt(&w->sender, ev) || kv_lends_on_kvt(&w->lends, ev)) return;
    struct prefill_prompt *p = map_get(&w->by_id, map_key_u64(&id));
    if (p && (ev->kind == KVT_SENT || ev->kind == KVT_SEND_FAILED)) on_send_over(w, p, ev);
}

uint32_t prefill_n_old_credits(const struct prefill_worker *w)
{
    uint32_t n = 0;
    LIST_FOREACH (p, &w->live, struct prefill_prompt, link)
        n += p->of_old_role && p->state > PROMPT_ASKED && p->state < PROMPT_DRAINING;
    return n;
}

static void hand_back(struct prefill_worker *w, enum prefill_prompt_state before, const char *why)
{
    LIST_FOREACH (p, &w->live, struct prefill_prompt, link)
        if (p->state < before) fail_prompt(w, p, ERR_BUSY, BLAME_HANDED_BACK, why);
}

void prefill_set_role(struct prefill_worker *w, uint32_t role, bool settles)
{
    const bool changes = w->role && w->role != role;
    w->role = role;
    w->settles = settles;
    if (!changes) return;
    LIST_FOREACH (p, &w->live, struct prefill_prompt, link) p->of_old_role = true;
    hand_back(w, PROMPT_CREDITED, CHANGED);
}

void prefill_set_leaving(struct prefill_worker *w, bool leaves)
{
    w->leaves = leaves;
    if (leaves) hand_back(w, PROMPT_CREDITED, LEAVES);
}

void prefill_hand_back(struct prefill_worker *w)
{
    w->leaves = true;
    hand_back(w, PROMPT_DRAINING, LEAVES);
}
