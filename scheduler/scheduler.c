/* scheduler.c - see scheduler.h: the backend, the view of the nodes, and the timers that move
 * requests. */
#include "scheduler/scheduler.h"

#include <stdio.h>
#include <string.h>

#include "scheduler/scheduler_internal.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum {
    TICK_MS = 25,           /* deadlines and pauses; everything else is driven by messages */
    SNAPSHOT_MS = 1000,     /* a fresh view this often while nothing asks for one sooner */
    SNAPSHOT_SOON_MS = 100, /* and at most this often when something does */
    RENEW_MS = 700
};

static void wake(struct scheduler *s);

/* ---- view ---- */

static void on_snapshot(void *arg, enum status st, const struct directory_snapshot *snap)
{
    struct scheduler *s = arg;
    s->asking = false;
    s->t_snapshot_ms = clock_ms();
    if (st != OK) return; /* the last view stands */
    mem_free(s->nodes);
    s->n_nodes = snap->n;
    s->nodes = snap->n ? mem_dup(snap->nodes, snap->n * sizeof *s->nodes) : NULL;
    snprintf(s->topics, sizeof s->topics, "%s", snap->topics);
    for (size_t i = 0; i < s->n_nodes; i++)
        if (s->nodes[i].cluster_port)
            cluster_learn(s->o.cluster, s->nodes[i].node, s->nodes[i].host,
                          s->nodes[i].cluster_port);
    gauge_set(s->m.nodes, (double)s->n_nodes);
    LIST_FOREACH (r, &s->live, struct request, link)
        if (r->state == REQUEST_PLACING) request_advance(s, r);
}

static void ask_snapshot(struct scheduler *s)
{
    s->ask_again = false;
    s->asking = directory_snapshot(s->o.directory, on_snapshot, s) == OK;
    if (!s->asking) s->t_snapshot_ms = clock_ms();
}

void scheduler_refresh(struct scheduler *s) { s->ask_again = true; }

struct node_record *scheduler_find_node(struct scheduler *s, uint64_t node)
{
    for (size_t i = 0; i < s->n_nodes; i++)
        if (s->nodes[i].node == node) return &s->nodes[i];
    return NULL;
}

static void drop_old_suspects(struct scheduler *s)
{
    uint64_t now = clock_ms();
    for (size_t i = 0; i < s->n_suspects;) {
        if (s->suspects[i].until_ms <= now) s->suspects[i] = s->suspects[--s->n_suspects];
        else i++;
    }
}

static void suspect(struct scheduler *s, uint64_t node)
{
    drop_old_suspects(s);
    size_t i = s->n_suspects < SUSPECTS_MAX ? s->n_suspects++ : 0;
    s->suspects[i].node = node;
    s->suspects[i].until_ms = clock_ms() + SUSPECT_MS;
}

size_t scheduler_avoid(const struct scheduler *s, const struct request *r, uint64_t *out,
                       size_t cap)
{
    size_t n = 0;
    uint32_t n_own = r->n_avoid < REQUEST_AVOID_MAX ? r->n_avoid : REQUEST_AVOID_MAX;
    for (size_t i = 0; i < s->n_suspects && n < cap; i++) out[n++] = s->suspects[i].node;
    for (uint32_t i = 0; i < n_own && n < cap; i++) out[n++] = r->avoid[i];
    return n;
}

void scheduler_add_load(struct scheduler *s, const struct placement *p)
{
    struct node_record *prefill = scheduler_find_node(s, p->prefill ? p->prefill : p->decode),
                       *decode = scheduler_find_node(s, p->decode);
    if (prefill) prefill->placed_tokens += p->tokens;
    if (!decode) return;
    decode->placed_seqs++;
    decode->placed_blocks += p->blocks;
}

/* A snapshot in between may have been taken before this placement was counted: never below 0. The
 * directory has the last word. */
void scheduler_remove_load(struct scheduler *s, const struct placement *p)
{
    struct node_record *prefill = scheduler_find_node(s, p->prefill ? p->prefill : p->decode),
                       *decode = scheduler_find_node(s, p->decode);
    if (prefill)
        prefill->placed_tokens -= prefill->placed_tokens < p->tokens ? prefill->placed_tokens
                                                                     : p->tokens;
    if (decode) {
        decode->placed_seqs -= decode->placed_seqs > 0;
        decode->placed_blocks -= decode->placed_blocks < p->blocks ? decode->placed_blocks
                                                                   : p->blocks;
    }
    s->capacity_freed = true;
    if (s->tick) wake(s); /* else it was stopped, and the directory's last answers come in */
}

/* ---- timers ---- */

/* The longest waiting first; when that one still finds no room those behind it are not looked
 * at. */
static void place_waiting_requests(struct scheduler *s)
{
    s->capacity_freed = false;
    LIST_FOREACH (r, &s->live, struct request, link)
        if (!request_place_if_waiting(s, r)) return;
}

static void on_tick(void *arg)
{
    struct scheduler *s = arg;
    uint64_t since = clock_ms() - s->t_snapshot_ms;
    uint32_t n_placing = 0;
    drop_old_suspects(s);
    if (!s->asking && (since >= SNAPSHOT_MS || (s->ask_again && since >= SNAPSHOT_SOON_MS)))
        ask_snapshot(s);
    if (s->capacity_freed) place_waiting_requests(s);
    LIST_FOREACH (r, &s->live, struct request, link) {
        n_placing += r->state == REQUEST_PLACING;
        request_advance(s, r);
    }
    gauge_set(s->m.live, s->n_live);
    gauge_set(s->m.placing, n_placing);
}

void scheduler_publish(struct scheduler *s)
{
    if (!s->o.describe || s->draining) return; /* a node that left must not come back */
    struct node_record me = { 0 };
    s->o.describe(s->o.arg, &me);
    s->model = me.model;
    directory_publish(s->o.directory, &me);
}

static void on_wake(void *arg)
{
    struct scheduler *s = arg;
    loop_timer_free(s->wake);
    s->wake = NULL;
    on_tick(s);
}

/* Tick with the next turn of the loop: sink functions must run neither inside submit nor inside
 * cancel. */
static void wake(struct scheduler *s)
{
    if (!s->wake) s->wake = loop_timer_start(s->o.loop, 0, 0, on_wake, s);
}

static void on_renew(void *arg) { scheduler_publish(arg); }

/* ---- backend ---- */

static uint64_t fresh_id(struct scheduler *s)
{
    uint64_t id;
    do random_bytes(&id, sizeof id);
    while (id == 0 || map_get(&s->by_id, map_key_u64(&id)));
    return id;
}

static enum status backend_submit(void *self, const struct gen_request *g,
                                  const struct gen_sink *sink, uint64_t *id, struct err *err)
{
    struct scheduler *s = self;
    if (s->draining)
        return err_set(err, ERR_UNAVAILABLE,
                       "this node is shutting down; send the request to another node");
    if (s->n_live >= s->o.max_requests) {
        counter_add(s->m.rejected, 1);
        return err_set(err, ERR_FULL,
                       "this node already holds %u requests, its limit; try again shortly",
                       s->o.max_requests);
    }
    struct request *r = request_create(s, fresh_id(s), g, sink);
    uint64_t latest = clock_ms() + (uint64_t)s->o.ttl_s * 1000;
    if (!r->deadline_ms || r->deadline_ms > latest) r->deadline_ms = latest;
    list_push(&s->live, &r->link);
    s->n_live++;
    map_put(&s->by_id, map_key_u64(&r->id), r);
    counter_add(s->m.requests, 1);
    counter_add(s->m.prompt_tokens, r->n_prompt);
    *id = r->id;
    wake(s);
    return OK;
}

static void backend_cancel(void *self, uint64_t id)
{
    struct scheduler *s = self;
    struct request *r = map_get(&s->by_id, map_key_u64(&id));
    if (!r) return;
    r->canceled = true;
    wake(s);
}

static void backend_stats(void *self, struct serve_backend_stats *out)
{
    struct scheduler *s = self;
    uint32_t n_decode = 0, n_mixed = 0; /* decode nodes alone can serve: they prefill themselves */
    *out = (struct serve_backend_stats){ 0 };
    LIST_FOREACH (r, &s->live, struct request, link) {
        if (r->state == REQUEST_PLACING || r->state == REQUEST_CREDIT) out->n_waiting++;
        else out->n_running++;
    }
    for (size_t i = 0; i < s->n_nodes; i++) {
        if (s->nodes[i].draining || (s->model && s->nodes[i].model != s->model)) continue;
        n_decode += s->nodes[i].role == ROLE_DECODE;
        n_mixed += s->nodes[i].role == ROLE_MIXED;
    }
    out->ready = !s->draining && (n_decode || n_mixed);
    if (s->draining) snprintf(out->why, sizeof out->why, "this node is shutting down");
    else if (!out->ready)
        snprintf(out->why, sizeof out->why,
                 "no node that can decode is in this topic; topics and roles seen: %.380s",
                 s->topics[0] ? s->topics : "none");
}

static void backend_nodes(void *self, struct buf *out)
{
    struct scheduler *s = self;
    buf_add_c(out, "[");
    for (size_t i = 0; i < s->n_nodes; i++) {
        if (i) buf_add_c(out, ",");
        node_record_write(&s->nodes[i], out);
    }
    buf_add_c(out, "]");
}

struct serve_backend scheduler_backend(struct scheduler *s)
{
    return (struct serve_backend){
        .submit = backend_submit,
        .cancel = backend_cancel,
        .stats = backend_stats,
        .nodes = backend_nodes,
        .self = s,
    };
}

/* ---- messages ---- */

static void on_tokens(struct scheduler *s, const struct cluster_message *m)
{
    struct str rest = m->body;
    struct token_logprobs t;
    uint64_t id;
    uint32_t attempt, index;
    enum status st;
    while ((st = token_record_next(&rest, &id, &attempt, &index, &t)) == OK) {
        struct request *r = map_get(&s->by_id, map_key_u64(&id));
        if (r) request_on_token(s, r, m->from, attempt, index, &t);
    }
    if (st != ERR_NOT_FOUND)
        log_warn("malformed tokens", "peer=%s st=%s", m->from_name, status_name(st));
}

bool scheduler_on_message(struct scheduler *s, const struct cluster_message *m)
{
    switch (m->type) {
    case FRAME_TOKENS: on_tokens(s, m); return true;
    case FRAME_CREDIT:
    case FRAME_GRANT:
    case FRAME_PREFILL_REPORT:
    case FRAME_PROMPT_LOGPROBS:
    case FRAME_FINISHED:
    case FRAME_FAILED: {
        struct request *r = map_get(&s->by_id, map_key_u64(&m->request));
        if (r) request_on_message(s, r, m);
        return true;
    }
    default: return false;
    }
}

void scheduler_on_lost(struct scheduler *s, uint64_t node, const char *why)
{
    suspect(s, node);
    scheduler_refresh(s);
    LIST_FOREACH (r, &s->live, struct request, link) {
        if (r->decode.node == node)
            request_on_loss(s, r, LOSS_DECODE_NODE, ERR_PEER_LOST, node, why);
        else if (r->prefill.node == node)
            request_on_loss(s, r, LOSS_PREFILL_NODE, ERR_PEER_LOST, node, why);
    }
}

/* ---- life ---- */

struct scheduler *scheduler_create(const struct scheduler_options *o)
{
    struct scheduler *s = MEM_NEW(struct scheduler);
    s->o = *o;
    list_init(&s->live);
    list_init(&s->orphans);
    scheduler_metrics_register(&s->m, o->metrics);
    s->tick = loop_timer_start(o->loop, TICK_MS, TICK_MS, on_tick, s);
    s->renew = loop_timer_start(o->loop, RENEW_MS, RENEW_MS, on_renew, s);
    scheduler_publish(s);
    ask_snapshot(s);
    return s;
}

void scheduler_drain(struct scheduler *s)
{
    s->draining = true;
    if (!s->o.describe) return;
    struct node_record me = { 0 };
    s->o.describe(s->o.arg, &me);
    directory_leave(s->o.directory, me.node);
    loop_timer_free(s->renew); /* no renewal: the record must not come back */
    s->renew = NULL;
}

uint32_t scheduler_n_live(const struct scheduler *s) { return s->n_live; }

void scheduler_stop(struct scheduler *s)
{
    s->draining = true;
    LIST_FOREACH (r, &s->live, struct request, link)
        request_end(s, r, ERR_CANCELED, FINISH_NONE, -1, "the node is shutting down");
    loop_timer_free(s->tick);
    loop_timer_free(s->renew);
    loop_timer_free(s->wake);
    s->tick = s->renew = s->wake = NULL;
}

void scheduler_free(struct scheduler *s)
{
    if (!s) return;
    ASSERT(list_empty(&s->live));
    LIST_FOREACH (r, &s->orphans, struct request, link) request_free(r);
    map_release(&s->by_id);
    mem_free(s->nodes);
    mem_free(s);
}
