/* passer.c - see passer.h. Thread: loop. */
#include "scheduler/passer.h"

#include <stdio.h>
#include <string.h>

#include "scheduler/view.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/json/json_packed.h"
#include "shared/base/list.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/net/http/http_client.h"
#include "shared/net/http/http_pass.h"

enum {
    PASSES_MAX = 1024,  /* at once; above that the node answers itself */
    PASS_TRIES = 2,     /* nodes asked for one request */
    SNAPSHOT_MS = 1000, /* older ones are renewed before a request is passed */
    FULL_MS = 1000,     /* a full node is not chosen for so long, unless a snapshot comes first */
    SUSPECT_MS = 5000,  /* nor one that was lost, so that the directory has time to notice */
    CONNECT_MS = 2000,
    SILENT_MS = 1000,          /* then a node is asked for /live */
    LIVE_MS = 2000,            /* and is lost when it does not answer */
    LOOK_MS = 250,             /* between looks for silent nodes */
    NAMED_BODY_MAX = 64 << 10, /* of a longer body the model's name is not looked for */
    NAMED_VALUES_MAX = 4096,
    N_REASONS = 3
};

enum outcome { ANSWERED, BROKEN, REFUSED, GONE, N_OUTCOMES };

static const char *const REASON_NAMES[] = { "loading", "full", "draining" };
static const char *const OUTCOME_NAMES[] = { "answered", "broken", "refused", "gone" };

static const char NODE_IS_GONE[] =
    "this node, or the one to which the request was passed, is gone; send it again";

/* A node of the snapshot. */
struct candidate {
    struct node_record record;
    uint32_t n_passed; /* by this node since the snapshot, and not answered yet */
    uint64_t full_until_ms;
};

struct suspect {
    uint64_t node, until_ms;
};

struct passer {
    struct passer_options o;
    char name[NODE_NAME_MAX], host[NODE_NAME_MAX];
    uint64_t model;          /* 0: not known yet */
    struct candidate *nodes; /* [n_nodes], without this one */
    size_t n_nodes, n_next;  /* n_next: where the next choice begins, so that equals take turns */
    bool asking, draining, stopping;
    uint64_t t_snapshot_ms; /* 0: none yet */
    uint64_t n_snapshots;
    struct proofs proofs;
    const struct view *view; /* NULL: the directory is asked */
    uint64_t n_view;         /* the view's snapshot that the nodes are of */
    struct suspect suspects[16];
    size_t n_suspects; /* ever added; a ring */
    struct list passes;
    uint32_t n_passes;
    struct loop_timer *turn; /* starts what waits for a node, in the next turn of the loop */
    struct loop_timer *look; /* runs while there are passes */
    struct http_client *client;
    struct buf broken_event;
    struct counter *counters[N_REASONS][N_OUTCOMES];
};

/* One request. */
struct pass {
    struct list link;
    struct passer *passer;
    enum pass_reason reason;
    struct http_exchange *x;
    char *path, *request; /* the request's name in logs and for the other node */
    struct buf broken_line;
    void (*done)(void *arg, bool taken, int status);
    void *arg;
    struct http_pass *call; /* NULL: waits for a node */
    bool looked_for_name;
    struct buf name; /* the model that the request names, once looked for; "": none */
    uint64_t tried[PASS_TRIES];
    size_t n_tried;
    uint64_t counted_in;    /* the snapshot in which the last one's n_passed counts it; 0: none */
    char to[NODE_NAME_MAX]; /* the last one's name */
    char host[NODE_NAME_MAX];
    uint16_t port;
    bool asked_live;    /* its node was asked, and has not answered */
    uint64_t t_live_ms; /* when it last did */
    uint64_t t_start_ns;
};

/* ---- which node ---- */

static bool is_suspect(const struct passer *p, uint64_t node)
{
    uint64_t now = clock_ms();
    for (size_t i = 0; i < COUNT_OF(p->suspects); i++)
        if (p->suspects[i].node == node && p->suspects[i].until_ms > now) return true;
    return false;
}

static void suspect(struct passer *p, uint64_t node)
{
    p->suspects[p->n_suspects++ % COUNT_OF(p->suspects)] = (struct suspect){ node, clock_ms() +
                                                                                       SUSPECT_MS };
}

/* Finds the model that the request names; this takes well under a millisecond. */
static struct str name_of(struct pass *s)
{
    struct json_limits limits = {
        .packed_names = { "prompt", "prompt_token_ids", "tokens" },
        .n_values = NAMED_VALUES_MAX,
        .n_ints = NAMED_BODY_MAX,
    };
    struct json_packed packed = { 0 };
    struct buf text = { 0 };
    cJSON *doc = NULL;
    const char *name = NULL;
    struct err err;
    if (s->looked_for_name || http_body(s->x).n > NAMED_BODY_MAX) return buf_str(&s->name);
    s->looked_for_name = true;
    buf_add_str(&text, http_body(s->x));
    if (json_parse_packed(&text, &limits, &doc, &packed, &err) == OK &&
        json_get_str(doc, "model", &name, &err) == OK && name)
        buf_add_c(&s->name, name);
    cJSON_Delete(doc);
    json_packed_release(&packed);
    buf_release(&text);
    return buf_str(&s->name);
}

/* Returns the model that requests may be passed for; 0: none, or the nodes differ. */
static uint64_t model_of_topic(const struct passer *p)
{
    uint64_t model = p->model;
    for (size_t i = 0; !p->model && i < p->n_nodes; i++) {
        uint64_t other = p->nodes[i].record.model;
        if (model && other != model) return 0;
        model = other;
    }
    return model;
}

/* Without a node that decodes, the others could only refuse. This node is one of them once it has
 * its model. */
static bool somebody_decodes(const struct passer *p, uint64_t model)
{
    for (size_t i = 0; i < p->n_nodes; i++) {
        const struct node_record *r = &p->nodes[i].record;
        if (r->model == model && !r->draining && (p->o.unsplit || r->role != ROLE_PREFILL))
            return true;
    }
    return p->model != 0;
}

/* Returns the model that the nodes which serve a name have, where it can be decoded; 0: none, or
 * several have the name, so that it does not say which is meant. */
static uint64_t model_of_name(const struct passer *p, struct str name)
{
    uint64_t model = 0;
    for (size_t i = 0; i < p->n_nodes && name.n; i++) {
        const struct node_record *r = &p->nodes[i].record;
        if (r->model == model || !node_record_serves(r, name)) continue;
        if (!somebody_decodes(p, r->model)) continue;
        if (model) return 0;
        model = r->model;
    }
    return model;
}

static bool has_room(const struct candidate *c)
{
    const struct node_record *r = &c->record;
    return c->full_until_ms <= clock_ms() &&
           (r->max_requests == 0 || r->n_requests + c->n_passed < r->max_requests);
}

static uint64_t load_of(const struct candidate *c)
{
    return (uint64_t)c->record.n_requests + c->n_passed;
}

static struct candidate *choose(struct passer *p, struct pass *s)
{
    struct candidate *best = NULL;
    if (p->stopping) return NULL;
    uint64_t model = model_of_topic(p);
    bool named = !model && p->n_nodes;
    if (named) model = model_of_name(p, name_of(s));
    if (!model || !somebody_decodes(p, model)) return NULL;
    for (size_t k = 0; k < p->n_nodes; k++) {
        struct candidate *c = &p->nodes[(p->n_next + k) % p->n_nodes];
        const struct node_record *r = &c->record;
        if (r->model != model || r->draining || r->http_port == 0 || !r->host[0]) continue;
        if (!has_room(c) || is_suspect(p, r->node) || nodes_have(s->tried, s->n_tried, r->node))
            continue;
        if (named && !node_record_serves(r, buf_str(&s->name))) continue;
        if (!best || load_of(c) < load_of(best)) best = c;
    }
    return best;
}

static struct candidate *find(struct passer *p, uint64_t node)
{
    for (size_t i = 0; i < p->n_nodes; i++)
        if (p->nodes[i].record.node == node) return &p->nodes[i];
    return NULL;
}

/* ---- one request ---- */

static void count(const struct pass *s, enum outcome outcome, int status)
{
    const struct passer *p = s->passer;
    counter_add(p->counters[s->reason][outcome], 1);
    /* One that broke off is a loss, and told as those of this node's own requests are. */
    log_line(p->o.log_requests || outcome == BROKEN ? LOG_INFO : LOG_DEBUG, "request passed",
             "api_request=%s to=%s reason=%s outcome=%s status=%d tries=%zu ms=%.1f", s->request,
             s->to, REASON_NAMES[s->reason], OUTCOME_NAMES[outcome], status, s->n_tried,
             (double)(clock_ns() - s->t_start_ns) * 1e-6);
}

static void free_pass(struct pass *s)
{
    buf_release(&s->name);
    buf_release(&s->broken_line);
    mem_free(s->path);
    mem_free(s->request);
    mem_free(s);
}

/* A node of a later snapshot says itself how many requests it has. */
static void count_passed(struct pass *s, struct candidate *c)
{
    c->n_passed++;
    s->counted_in = s->passer->n_snapshots;
}

/* The node that was asked last does not have the request any more. */
static void uncount_passed(struct pass *s)
{
    struct candidate *c = s->n_tried ? find(s->passer, s->tried[s->n_tried - 1]) : NULL;
    if (c && s->counted_in == s->passer->n_snapshots) c->n_passed--;
    s->counted_in = 0;
}

static void end_pass(struct pass *s, enum outcome outcome, int status)
{
    struct passer *p = s->passer;
    uncount_passed(s);
    list_remove(&s->link);
    if (--p->n_passes == 0) {
        loop_timer_free(p->look);
        p->look = NULL;
    }
    if (s->n_tried) count(s, outcome, status); /* else there was nobody to pass it to */
    free_pass(s);
}

static void finish(struct pass *s, enum outcome outcome, int status)
{
    void (*done)(void *arg, bool taken, int status) = s->done;
    void *arg = s->arg;
    end_pass(s, outcome, status);
    done(arg, outcome != REFUSED, outcome == REFUSED ? 0 : status);
}

static void try_next(struct pass *s);

/* Whoever starts while the directory is away, or was emptied, or while other nodes are lost, is as
 * good an entry for its clients a moment later: when it has loaded, or the others are back. */
static bool waits_for_nodes(const struct pass *s)
{
    const struct passer *p = s->passer;
    uint64_t ms = p->n_snapshots ? p->o.wait_ms : p->o.wait_first_ms;
    return s->reason == PASS_WHILE_LOADING && !p->view && !p->stopping &&
           clock_ns() - s->t_start_ns < ms * 1000000;
}

static void on_call_end(void *arg, enum http_pass_end end, int status)
{
    struct pass *s = arg;
    struct passer *p = s->passer;
    s->call = NULL;
    if (end == PASS_CLIENT_GONE) {
        return; /* the exchange's on_end cancels the pass */
    } else if (end == PASS_ANSWERED) {
        finish(s, ANSWERED, status);
    } else {
        uint64_t node = s->tried[s->n_tried - 1];
        struct candidate *c = find(p, node);
        if (end == PASS_NOT_TAKEN || end == PASS_BROKEN) suspect(p, node);
        else if (c && end == PASS_FULL) c->full_until_ms = clock_ms() + FULL_MS;
        uncount_passed(s);
        if (end == PASS_BROKEN) finish(s, BROKEN, status);
        else try_next(s);
    }
}

static void try_next(struct pass *s)
{
    struct passer *p = s->passer;
    for (;;) {
        struct candidate *c = s->n_tried < PASS_TRIES ? choose(p, s) : NULL;
        if (!c) {
            if (!waits_for_nodes(s)) finish(s, REFUSED, 0);
            else s->n_tried = 0;
            return;
        }
        const struct node_record *r = &c->record;
        s->tried[s->n_tried++] = r->node;
        struct http_pass_options o = {
            .last = s->n_tried == PASS_TRIES || !choose(p, s),
            .loop = p->o.loop,
            .x = s->x,
            .host = r->host,
            .port = r->http_port,
            .path = s->path,
            .t_start_ns = s->t_start_ns,
            .from = p->name,
            .name = s->request,
            .broken_event = buf_str(&p->broken_event),
            .broken_line = buf_str(&s->broken_line),
            .connect_ms = CONNECT_MS,
            .answer_ms = p->o.ttl_s * 1000,
            .done = on_call_end,
            .arg = s,
        };
        p->n_next++;
        count_passed(s, c);
        s->port = r->http_port;
        snprintf(s->host, sizeof s->host, "%s", r->host);
        s->asked_live = false;
        snprintf(s->to, sizeof s->to, "%s", r->name);
        if (http_pass_start(&o, &s->call) == OK) return;
        suspect(p, r->node);
        uncount_passed(s);
    }
}

/* ---- the nodes ---- */

static void start_waiting(void *arg)
{
    struct passer *p = arg;
    loop_timer_free(p->turn);
    p->turn = NULL;
    LIST_FOREACH (s, &p->passes, struct pass, link)
        if (!s->call && s->n_tried == 0) try_next(s);
}

static void set_nodes(struct passer *p, const struct node_record *nodes, size_t n)
{
    mem_free(p->nodes);
    p->nodes = n ? MEM_ARRAY(struct candidate, n) : NULL;
    p->n_nodes = 0;
    for (size_t i = 0; i < n; i++)
        if (strcmp(nodes[i].name, p->name) != 0) p->nodes[p->n_nodes++].record = nodes[i];
    p->t_snapshot_ms = clock_ms();
    p->n_snapshots++;
}

static void on_snapshot(void *arg, enum status st, const struct directory_snapshot *snap)
{
    struct passer *p = arg;
    p->asking = false;
    if (st == OK && !p->view) {
        struct node_record *nodes = snap->n ? mem_dup(snap->nodes, snap->n * sizeof *nodes) : NULL;
        set_nodes(p, nodes,
                  proofs_keep_proven(&p->proofs, p->o.secret, p->host, nodes, snap->n, NULL));
        mem_free(nodes);
    }
    start_waiting(p); /* with the last snapshot when there is no new one */
}

static void look_at_view(struct passer *p)
{
    if (!p->view || p->view->n_snapshots == p->n_view) return;
    p->n_view = p->view->n_snapshots;
    set_nodes(p, p->view->nodes, p->view->n_nodes);
}

/* A view renews itself. */
static bool is_fresh(const struct passer *p)
{
    if (p->view) return true;
    return p->t_snapshot_ms && clock_ms() - p->t_snapshot_ms < p->o.snapshot_ms;
}

/* Starts those that wait, once there is a fresh snapshot. */
static void ask_or_start(struct passer *p)
{
    if (p->asking || p->turn) return;
    if (!is_fresh(p)) p->asking = directory_snapshot(p->o.directory, on_snapshot, p) == OK;
    if (!p->asking) p->turn = loop_timer_start(p->o.loop, 0, 0, start_waiting, p);
}

/* ---- silent nodes ---- */

struct look {
    struct passer *passer;
    uint64_t node;
};

static uint64_t node_of(const struct pass *s) { return s->n_tried ? s->tried[s->n_tried - 1] : 0; }

static bool is_silent(const struct pass *s)
{
    uint64_t ms = s->passer->o.silent_ms;
    return s->call && http_pass_silent_ms(s->call) >= ms && clock_ms() - s->t_live_ms >= ms;
}

static void on_live(void *arg, enum status st, int http_status, struct str body)
{
    struct look *l = arg;
    (void)body;
    (void)http_status; /* any answer shows that its loop runs */
    LIST_FOREACH (s, &l->passer->passes, struct pass, link) {
        if (!s->asked_live || node_of(s) != l->node) continue;
        s->asked_live = false;
        s->t_live_ms = st == OK ? clock_ms() : 0;
        if (st != OK && is_silent(s)) http_pass_peer_lost(s->call);
    }
    mem_free(l);
}

/* One question for all requests of a node. */
static void ask_live(struct passer *p, const struct pass *of)
{
    struct look *l = MEM_NEW(struct look);
    *l = (struct look){ p, node_of(of) };
    if (http_client_request(p->client, "GET", of->host, of->port, "/live", NULL, STR(""),
                            p->o.live_ms, on_live, l) != OK) {
        mem_free(l);
        return;
    }
    LIST_FOREACH (s, &p->passes, struct pass, link)
        if (node_of(s) == l->node) s->asked_live = true;
}

/* Also takes up those that wait for nodes. */
static void look_for_silence(void *arg)
{
    struct passer *p = arg;
    bool waits = false;
    LIST_FOREACH (s, &p->passes, struct pass, link) {
        if (!s->asked_live && is_silent(s)) ask_live(p, s);
        waits |= !s->call && s->n_tried == 0;
    }
    if (waits) ask_or_start(p);
}

/* ---- life ---- */

void *passer_start(struct passer *p, enum pass_reason reason, const struct serve_pass *r)
{
    if (http_header(r->x, HTTP_PASS_HEADER).p || strcmp(http_method(r->x), "POST") != 0)
        return NULL;
    if (p->stopping || p->n_passes >= PASSES_MAX) return NULL;
    struct pass *s = MEM_NEW(struct pass);
    *s = (struct pass){ .passer = p, .reason = reason };
    s->x = r->x;
    s->done = r->done;
    s->arg = r->arg;
    s->path = mem_strdup(r->path);
    s->request = mem_strdup(r->name);
    serve_native_error_json(&s->broken_line, ERR_PEER_LOST, NODE_IS_GONE, http_body(r->x), r->name);
    s->t_start_ns = clock_ns();
    look_at_view(p);
    if (is_fresh(p) && !choose(p, s) && !waits_for_nodes(s)) {
        free_pass(s);
        return NULL;
    }
    list_push(&p->passes, &s->link);
    if (p->n_passes++ == 0)
        p->look = loop_timer_start(p->o.loop, LOOK_MS, LOOK_MS, look_for_silence, p);
    ask_or_start(p);
    return s;
}

void passer_cancel(struct passer *p, void *pass)
{
    struct pass *s = pass;
    ASSERT(s->passer == p);
    if (s->call) http_pass_cancel(s->call);
    end_pass(s, GONE, 499);
}

static void *start_when_full(void *self, const struct serve_pass *r)
{
    const struct passer *p = self;
    return passer_start(self, p->draining ? PASS_WHILE_DRAINING : PASS_WHEN_FULL, r);
}

static void cancel_when_full(void *self, void *pass) { passer_cancel(self, pass); }

struct serve_passer passer_when_full(struct passer *p)
{
    return (struct serve_passer){ .start = start_when_full, .cancel = cancel_when_full, .self = p };
}

void passer_set_model(struct passer *p, uint64_t model) { p->model = model; }

void passer_use_view(struct passer *p, const struct view *v)
{
    p->view = v;
    proofs_release(&p->proofs);
}

void passer_set_draining(struct passer *p) { p->draining = true; }

uint32_t passer_n_live(const struct passer *p) { return p->n_passes; }

uint64_t passer_n_taken(const struct passer *p)
{
    uint64_t n = 0;
    for (size_t i = 0; i < N_REASONS; i++)
        for (size_t k = 0; k < N_OUTCOMES; k++)
            if (k != REFUSED) n += counter_value(p->counters[i][k]);
    return n;
}

void passer_stop(struct passer *p)
{
    p->stopping = true;
    LIST_FOREACH (s, &p->passes, struct pass, link) {
        if (s->call) http_pass_peer_lost(s->call);
        else finish(s, REFUSED, 0);
    }
}

struct passer *passer_create(const struct passer_options *o)
{
    struct passer *p = MEM_NEW(struct passer);
    struct http_client_options c = { .loop = o->loop, .body_max = 4096, .n_idle = 4 };
    char labels[64];
    p->o = *o;
    if (!p->o.silent_ms) p->o.silent_ms = SILENT_MS;
    if (!p->o.live_ms) p->o.live_ms = LIVE_MS;
    if (!p->o.snapshot_ms) p->o.snapshot_ms = SNAPSHOT_MS;
    snprintf(p->name, sizeof p->name, "%s", o->name);
    snprintf(p->host, sizeof p->host, "%s", o->host ? o->host : "");
    list_init(&p->passes);
    p->client = http_client_create(&c);
    serve_error_json(&p->broken_event, ERR_PEER_LOST, NODE_IS_GONE, NULL);
    for (size_t i = 0; i < N_REASONS; i++)
        for (size_t k = 0; k < N_OUTCOMES; k++) {
            snprintf(labels, sizeof labels, "reason=\"%s\",outcome=\"%s\"", REASON_NAMES[i],
                     OUTCOME_NAMES[k]);
            p->counters[i][k] = metrics_counter(
                o->metrics, "baton_requests_passed_total", labels,
                "Requests passed to another node while this one was loading, full or shutting "
                "down; refused: no other node took it, so this one answered.");
        }
    return p;
}

void passer_free(struct passer *p)
{
    if (!p) return;
    ASSERT(list_empty(&p->passes));
    http_client_free(p->client);
    loop_timer_free(p->turn);
    buf_release(&p->broken_event);
    proofs_release(&p->proofs);
    mem_free(p->nodes);
    mem_free(p);
}
