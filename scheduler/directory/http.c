/* http.c - the `http` backend: small POST requests to the directory server of another process
 * (server.h).
 *
 * Several connections are in use at once, so requests may overtake one another. Where the order
 * matters, one waits for the other: a renewal is sent only after the one before was answered (the
 * latest record wins), and so is leave; reservations have ids of their own (remote.h). While the
 * server does not answer it is asked every renew_ms, so that on_up comes even when nobody calls.
 * A call in flight holds a pointer to the directory; close frees the client, which ends all
 * calls. Thread: loop. */
#include <stdio.h>
#include <string.h>

#include "scheduler/directory/backends.h"
#include "scheduler/directory/remote.h"
#include "scheduler/directory/wire.h"
#include "shared/base/address/host_port.h"
#include "shared/base/clock.h"
#include "shared/base/json/json_packed.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/net/http/http_client.h"

enum { IDLE_CONNECTIONS = 4, LEAVING_MAX = 64 };

struct directory_http {
    struct directory base;
    struct directory_remote remote;
    struct loop *loop;
    char topic[NODE_NAME_MAX];
    char *host;
    uint16_t port;
    char at[80]; /* both, for people */
    struct buf secret;
    struct http_client *client;
    struct loop_timer *probe;
    bool publishing;        /* a renewal is in flight */
    struct buf next_record; /* the renewal after it; empty: none */
    struct buf leaving;     /* ids of nodes that leave when the renewal is answered */
    uint32_t n_holds;       /* callbacks running */
    struct log_repeats refused_calls;
    bool closed;
};

struct directory_http_call {
    struct directory_http *d;
    enum directory_op op;
    directory_snapshot_fn *snapshot; /* NULL: a probe */
    directory_reserve_fn *reserve;
    void *arg;
    uint64_t request, id;
};

/* A parsed answer. */
struct directory_http_answer {
    enum status st;
    uint64_t fence;
    struct node_record *nodes; /* their identities lie in doc */
    cJSON *doc;
    struct directory_snapshot snapshot;
    char why[ERR_TEXT_MAX];
};

static void directory_http_free(struct directory_http *d)
{
    directory_remote_release(&d->remote);
    buf_release(&d->secret);
    buf_release(&d->next_record);
    buf_release(&d->leaving);
    mem_free(d->host);
    mem_free(d);
}

static void unhold(struct directory_http *d)
{
    if (--d->n_holds == 0 && d->closed) directory_http_free(d);
}

/* ---- requests ---- */

static void on_answer(void *arg, enum status st, int http_status, struct str body);

static enum status send_call(struct directory_http *d, struct directory_http_call call,
                             struct str body)
{
    static const char *const paths[] = { DIRECTORY_PATH "publish", DIRECTORY_PATH "leave",
                                         DIRECTORY_PATH "snapshot", DIRECTORY_PATH "reserve",
                                         DIRECTORY_PATH "release" };
    const char *path = paths[call.op];
    char proof[DIRECTORY_PROOF_HEADER_MAX], headers[DIRECTORY_PROOF_HEADER_MAX + 48];
    directory_prove_header(buf_str(&d->secret), "POST", str_of(path), body, proof);
    snprintf(headers, sizeof headers, "Content-Type: application/json\r\n%s", proof);
    struct directory_http_call *c = mem_try_calloc(1, sizeof *c);
    if (!c) return ERR_NOMEM;
    *c = call;
    c->d = d;
    enum status st = http_client_request(d->client, "POST", d->host, d->port, path, headers, body,
                                         DIRECTORY_REMOTE_TIMEOUT_MS, on_answer, c);
    if (st != OK) mem_free(c);
    return st;
}

static void begin_body(const struct directory_http *d, struct buf *b)
{
    buf_add_char(b, '{');
    directory_add_id(b, "owner", d->remote.owner);
    buf_add_char(b, ',');
    directory_add_id(b, "fence", d->remote.fence);
}

/* The record waits in next_record until the renewal before it is answered. */
static void send_publish(struct directory_http *d)
{
    struct buf body = { 0 };
    if (d->publishing || d->next_record.len == 0) return;
    begin_body(d, &body);
    buf_add_c(&body, ",\"record\":");
    buf_add_str(&body, buf_str(&d->next_record));
    buf_add_char(&body, '}');
    buf_clear(&d->next_record);
    d->publishing = send_call(d, (struct directory_http_call){ .op = DIRECTORY_OP_PUBLISH },
                              buf_str(&body)) == OK;
    buf_release(&body);
}

static void send_leave(struct directory_http *d)
{
    if (d->publishing) return;
    for (size_t at = 0; at < d->leaving.len; at += sizeof(uint64_t)) {
        struct buf body = { 0 };
        uint64_t node;
        memcpy(&node, d->leaving.data + at, sizeof node);
        begin_body(d, &body);
        buf_add_char(&body, ',');
        directory_add_id(&body, "node", node);
        buf_add_char(&body, '}');
        if (send_call(d, (struct directory_http_call){ .op = DIRECTORY_OP_LEAVE },
                      buf_str(&body)) != OK)
            log_debug("leave not sent", "host=%s port=%u", d->host, d->port);
        buf_release(&body);
    }
    buf_clear(&d->leaving);
}

static void send_releases(struct directory_http *d)
{
    uint64_t ids[DIRECTORY_RELEASE_MAX];
    struct buf body = { 0 };
    if (d->remote.state == DIRECTORY_REMOTE_DOWN) return; /* they follow the first answer */
    size_t n = directory_remote_take_releases(&d->remote, ids, DIRECTORY_RELEASE_MAX);
    if (n == 0) return;
    begin_body(d, &body);
    buf_add_c(&body, ",\"ids\":[");
    for (size_t i = 0; i < n; i++)
        buf_printf(&body, "%s\"" DIRECTORY_ID "\"", i ? "," : "", ids[i]);
    buf_add_c(&body, "]}");
    if (send_call(d, (struct directory_http_call){ .op = DIRECTORY_OP_RELEASE }, buf_str(&body)) !=
        OK)
        directory_remote_on_released(&d->remote, false);
    buf_release(&body);
}

static enum status send_snapshot(struct directory_http *d, directory_snapshot_fn *cb, void *arg)
{
    struct buf body = { 0 };
    begin_body(d, &body);
    buf_add_c(&body, ",\"topic\":");
    json_add_string(&body, str_of(d->topic));
    buf_add_char(&body, '}');
    enum status st = send_call(
        d, (struct directory_http_call){ .op = DIRECTORY_OP_SNAPSHOT, .snapshot = cb, .arg = arg },
        buf_str(&body));
    buf_release(&body);
    return st;
}

/* ---- answers ---- */

static void read_snapshot(struct directory_http *d, const cJSON *doc,
                          struct directory_http_answer *a)
{
    const cJSON *list = json_member(doc, "nodes"), *one;
    const char *topics = "";
    int n = cJSON_IsArray(list) ? cJSON_GetArraySize(list) : -1;
    struct map seen = { 0 };
    struct err err;
    if (n < 0 || n > DIRECTORY_NODES_MAX || json_get_str(doc, "topics", &topics, NULL) != OK) {
        a->st = ERR_FORMAT;
        return;
    }
    a->nodes = mem_calloc((size_t)n, sizeof *a->nodes);
    cJSON_ArrayForEach (one, list) {
        struct node_record *r = &a->nodes[a->snapshot.n];
        enum status st = node_record_from_json(one, r, &err);
        if (st == OK && strcmp(r->topic, d->topic) != 0)
            st = err_set(&err, ERR_INVALID, "it is the record of a node of topic %s", r->topic);
        if (st == OK && map_get(&seen, map_key_u64(&r->node)))
            st = err_set(&err, ERR_INVALID, "the record of node %s comes more than once", r->name);
        if (st == OK) map_put(&seen, map_key_u64(&a->nodes[a->snapshot.n++].node), r);
        else directory_remote_refuse_record(&d->remote, STR(""), err.text);
    }
    map_release(&seen);
    a->snapshot.nodes = a->nodes;
    snprintf(a->snapshot.topics, sizeof a->snapshot.topics, "%s", topics);
}

static void read_reserved(const cJSON *doc, struct directory_http_answer *a)
{
    const char *text = "";
    bool is_well_formed = json_get_str(doc, "status", &text, NULL) == OK &&
                          directory_get_id(doc, "fence", &a->fence, NULL) == OK;
    if (is_well_formed && strcmp(text, "ok") == 0) return;
    if (is_well_formed && strcmp(text, "busy") == 0) a->st = ERR_BUSY;
    else if (is_well_formed && strcmp(text, "not_found") == 0) a->st = ERR_NOT_FOUND;
    else a->st = ERR_FORMAT;
}

/* An answer other than 200. */
static void read_error(const struct directory_http *d, int http_status, const cJSON *doc,
                       struct directory_http_answer *a)
{
    const char *said = "";
    if (json_get_str(doc, "error", &said, NULL) != OK) said = "";
    a->st = http_status == 401   ? ERR_UNAUTHORIZED
            : http_status == 429 ? ERR_FULL
            : http_status == 400 ? ERR_INVALID
                                 : ERR_IO;
    if (http_status == 401)
        snprintf(a->why, sizeof a->why,
                 "the directory server at %s has another cluster secret; give every node the same "
                 "BATON_CLUSTER_SECRET or --cluster-secret-file",
                 d->at);
    else
        snprintf(a->why, sizeof a->why, "the directory server at %s answered %d: %.160s", d->at,
                 http_status, said);
}

/* No answer, or not one of this protocol. */
static void explain_failure(const struct directory_http *d, const struct err *err,
                            struct directory_http_answer *a)
{
    if (a->st == ERR_TOO_LONG || a->st == ERR_INVALID) {
        snprintf(a->why, sizeof a->why,
                 "the directory server at %s sent an answer of more than %d MiB or %d JSON values, "
                 "which was not read; does another program use that port?",
                 d->at, DIRECTORY_ANSWER_MAX >> 20, DIRECTORY_VALUES_MAX);
        a->st = ERR_FORMAT;
        return;
    }
    const char *why = err->text[0]             ? err->text
                      : a->st == ERR_TIMEOUT   ? "no answer within 1 s"
                      : a->st == ERR_PEER_LOST ? "the connection was refused or closed"
                                               : status_text(a->st);
    snprintf(a->why, sizeof a->why,
             "the directory server at %s cannot be reached: %.120s; is the node that serves it "
             "(--router names its control port) running? check with: baton doctor --router %s",
             d->at, why, d->at);
}

/* The server has not proven itself, so its answer is parsed in bounded memory. */
static enum status parse_answer(struct str body, cJSON **doc, struct err *err)
{
    struct json_limits limits = { .n_values = DIRECTORY_VALUES_MAX };
    struct json_packed packed = { 0 };
    struct buf text = { 0 };
    buf_add_str(&text, body);
    enum status st = json_parse_packed(&text, &limits, doc, &packed, err);
    json_packed_release(&packed);
    buf_release(&text);
    return st;
}

/* Returns whether the server works: a call it refused (malformed, a limit) says nothing about
 * others. */
static bool read_answer(struct directory_http *d, const struct directory_http_call *c,
                        enum status st, int http_status, struct str body,
                        struct directory_http_answer *a)
{
    struct err err = { 0 };
    cJSON *doc = NULL;
    a->st = st;
    if (st == OK) a->st = parse_answer(body, &doc, &err);
    if (a->st != OK) {
        explain_failure(d, &err, a);
    } else if (http_status != 200) {
        read_error(d, http_status, doc, a);
    } else {
        if (c->op == DIRECTORY_OP_SNAPSHOT) read_snapshot(d, doc, a);
        if (c->op == DIRECTORY_OP_RESERVE) read_reserved(doc, a);
        if (a->st == ERR_FORMAT)
            snprintf(a->why, sizeof a->why, "the directory server at %s sent a malformed answer",
                     d->at);
    }
    a->doc = doc;
    uint32_t n_unlogged;
    if ((a->st == ERR_FULL || a->st == ERR_INVALID) &&
        log_repeats_due(&d->refused_calls, a->why, clock_ms(), &n_unlogged))
        log_warn("directory call refused", "why=\"%s\" repeats=%u", a->why, n_unlogged);
    return a->st == OK || a->st == ERR_BUSY || a->st == ERR_NOT_FOUND || a->st == ERR_FULL ||
           a->st == ERR_INVALID;
}

/* Calls the caller's function, unless the directory was closed. */
static void deliver(struct directory_http *d, const struct directory_http_call *c,
                    struct directory_http_answer *a)
{
    bool is_answer = a->st == OK || a->st == ERR_BUSY || a->st == ERR_NOT_FOUND;
    if (d->closed) return;
    if (c->op == DIRECTORY_OP_RESERVE)
        c->reserve(c->arg, is_answer ? a->st : ERR_UNAVAILABLE, a->fence);
    if (c->op == DIRECTORY_OP_SNAPSHOT && c->snapshot)
        c->snapshot(c->arg, is_answer ? OK : ERR_UNAVAILABLE, is_answer ? &a->snapshot : NULL);
}

static void on_answer(void *arg, enum status st, int http_status, struct str body)
{
    struct directory_http_call *c = arg;
    struct directory_http *d = c->d;
    if (d->closed) { /* the client is being freed */
        mem_free(c);
        return;
    }
    struct directory_http_answer a = { 0 };
    bool reached = read_answer(d, c, st, http_status, body, &a);
    if (c->op == DIRECTORY_OP_PUBLISH) d->publishing = false;
    if (c->op == DIRECTORY_OP_RELEASE) directory_remote_on_released(&d->remote, reached);
    if (c->op == DIRECTORY_OP_RESERVE)
        directory_remote_on_reserved(&d->remote, c->request, c->id, a.st, a.fence);
    d->n_holds++;
    if (reached) directory_remote_up(&d->remote);
    else directory_remote_down(&d->remote, a.why);
    deliver(d, c, &a);
    if (!d->closed) {
        send_publish(d);
        send_leave(d);
        send_releases(d);
    }
    mem_free(a.nodes);
    cJSON_Delete(a.doc);
    mem_free(c);
    unhold(d);
}

static void on_probe(void *arg)
{
    struct directory_http *d = arg;
    if (d->remote.state == DIRECTORY_REMOTE_UP) return;
    if (send_snapshot(d, NULL, NULL) != OK)
        log_debug("probe not sent", "host=%s port=%u", d->host, d->port);
}

/* ---- backend ---- */

static void directory_http_close(struct directory *base)
{
    struct directory_http *d = (struct directory_http *)base;
    d->closed = true;
    d->n_holds++;
    loop_timer_free(d->probe);
    http_client_free(d->client);
    unhold(d);
}

static enum status directory_http_open(const struct directory_options *o, struct directory **out,
                                       struct err *err)
{
    if (!o->http_host || !o->http_host[0] || o->http_port == 0)
        return err_set(err, ERR_CONFIG,
                       "the directory \"http\" needs the address of the directory server");
    struct directory_http *d = MEM_NEW(struct directory_http);
    struct http_client_options c = {
        .loop = o->loop,
        .body_max = DIRECTORY_ANSWER_MAX,
        .n_idle = IDLE_CONNECTIONS,
    };
    d->base.ops = &directory_http_ops;
    d->loop = o->loop;
    directory_remote_init(&d->remote, o, "http");
    snprintf(d->topic, sizeof d->topic, "%s", o->topic);
    d->host = mem_strdup(o->http_host);
    d->port = o->http_port;
    char at[HOST_PORT_TEXT_MAX];
    snprintf(d->at, sizeof d->at, "%.79s", host_port_text(d->host, d->port, at));
    buf_add_str(&d->secret, o->secret);
    d->client = http_client_create(&c);
    d->probe = loop_timer_start(o->loop, 0, o->renew_ms, on_probe, d);
    *out = &d->base;
    return OK;
}

static void directory_http_publish(struct directory *base, const struct node_record *me)
{
    struct directory_http *d = (struct directory_http *)base;
    buf_clear(&d->next_record);
    node_record_write(me, &d->next_record);
    send_publish(d);
}

static void directory_http_leave(struct directory *base, uint64_t node)
{
    struct directory_http *d = (struct directory_http *)base;
    buf_clear(&d->next_record);
    if (d->leaving.len < LEAVING_MAX * sizeof node) buf_add(&d->leaving, &node, sizeof node);
    send_leave(d);
}

static enum status directory_http_snapshot(struct directory *base, directory_snapshot_fn *cb,
                                           void *arg)
{
    return send_snapshot((struct directory_http *)base, cb, arg);
}

static enum status directory_http_reserve(struct directory *base, const struct placement *p,
                                          directory_reserve_fn *cb, void *arg)
{
    struct directory_http *d = (struct directory_http *)base;
    struct directory_http_call call = {
        .op = DIRECTORY_OP_RESERVE, .reserve = cb, .arg = arg, .request = p->request
    };
    struct buf body = { 0 };
    /* Do not let the request wait for a timeout. */
    if (d->remote.state == DIRECTORY_REMOTE_DOWN) return ERR_UNAVAILABLE;
    TRY(directory_remote_reserve(&d->remote, p->request, &call.id));
    begin_body(d, &body);
    buf_add_char(&body, ',');
    directory_add_id(&body, "id", call.id);
    buf_add_char(&body, ',');
    directory_add_id(&body, "prefill", p->prefill);
    buf_add_char(&body, ',');
    directory_add_id(&body, "decode", p->decode);
    buf_printf(&body, ",\"tokens\":%u,\"blocks\":%u,\"ttl_ms\":%u}", p->tokens, p->blocks,
               p->ttl_ms);
    enum status st = send_call(d, call, buf_str(&body));
    buf_release(&body);
    /* Not sent, so nothing was counted. */
    if (st != OK) directory_remote_on_reserved(&d->remote, p->request, call.id, ERR_BUSY, 0);
    return st;
}

static void directory_http_release(struct directory *base, uint64_t request)
{
    struct directory_http *d = (struct directory_http *)base;
    directory_remote_drop(&d->remote, request);
    send_releases(d);
}

static enum status directory_http_meter(struct directory *base, const struct meter_report *r,
                                        directory_meter_fn *cb, void *arg)
{
    (void)base;
    (void)r;
    (void)cb;
    (void)arg;
    return ERR_UNSUPPORTED;
}

static const char *directory_http_why_down(const struct directory *base)
{
    return directory_remote_why_down(&((const struct directory_http *)base)->remote);
}

const struct directory_ops directory_http_ops = {
    .name = "http",
    .open = directory_http_open,
    .close = directory_http_close,
    .publish = directory_http_publish,
    .leave = directory_http_leave,
    .snapshot = directory_http_snapshot,
    .reserve = directory_http_reserve,
    .release = directory_http_release,
    .meter = directory_http_meter,
    .why_down = directory_http_why_down,
};
