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
#include "scheduler/directory/http_state.h"
#include "scheduler/directory/meter_wire.h"
#include "shared/base/address/host_port.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/net/http/http_client.h"

enum { IDLE_CONNECTIONS = 4, LEAVING_MAX = 64, PREFIX_AGAIN_MS = 10000 };

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

static void call_free(struct directory_http_call *c)
{
    mem_free(c->room);
    mem_free(c);
}

static enum status send_call(struct directory_http *d, struct directory_http_call call,
                             struct str body)
{
    static const char *const paths[] = { DIRECTORY_PATH "publish",  DIRECTORY_PATH "leave",
                                         DIRECTORY_PATH "snapshot", DIRECTORY_PATH "reserve",
                                         DIRECTORY_PATH "release",  DIRECTORY_PATH "meter" };
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

static void add_ids(struct buf *body, const char *name, const uint64_t *ids, size_t n)
{
    buf_printf(body, ",\"%s\":[", name);
    for (size_t i = 0; i < n; i++) buf_printf(body, "%s\"" DIRECTORY_ID "\"", i ? "," : "", ids[i]);
    buf_add_char(body, ']');
}

static void send_releases(struct directory_http *d)
{
    struct directory_remote_batch batch;
    struct buf body = { 0 };
    if (d->remote.state == DIRECTORY_REMOTE_DOWN) return; /* they follow the first answer */
    if (!directory_remote_take_batch(&d->remote, &batch)) return;
    begin_body(d, &body);
    add_ids(&body, "ids", batch.released, batch.n_released);
    add_ids(&body, "computed", batch.computed, batch.n_computed);
    buf_add_char(&body, '}');
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

/* Calls the caller's function, unless the directory was closed. */
static void deliver(struct directory_http *d, const struct directory_http_call *c,
                    struct directory_http_answer *a)
{
    bool is_answer = a->st == OK || a->st == ERR_BUSY || a->st == ERR_NOT_FOUND;
    if (d->closed) return;
    if (c->op == DIRECTORY_OP_RESERVE)
        c->reserve(c->arg, is_answer ? a->st : ERR_UNAVAILABLE, a->st == OK ? &a->placed : NULL);
    if (c->op == DIRECTORY_OP_METER) {
        const enum status st = directory_remote_on_metered(&d->remote, a->st);
        c->meter(c->arg, st, st == OK ? &a->sums : NULL);
    }
    if (c->op == DIRECTORY_OP_SNAPSHOT && c->snapshot)
        c->snapshot(c->arg, is_answer ? OK : ERR_UNAVAILABLE, is_answer ? &a->snapshot : NULL);
}

/* A server that says nothing of the prefix is of an earlier version, or its topic has no table. */
static void note_reserved(struct directory_http *d, const struct directory_http_call *c,
                          const struct directory_http_answer *a)
{
    directory_remote_on_reserved(&d->remote, c->request, c->id, a->st, a->placed.fence);
    if (a->st == OK && c->told_prefix && !a->placed.on.expected.known)
        d->prefix_from_ms = clock_ms() + PREFIX_AGAIN_MS;
}

static void on_answer(void *arg, enum status st, int http_status, struct str body)
{
    struct directory_http_call *c = arg;
    struct directory_http *d = c->d;
    if (d->closed) { /* the client is being freed */
        call_free(c);
        return;
    }
    struct directory_http_answer a = { 0 };
    bool reached = directory_http_read_answer(d, c, st, http_status, body, &a);
    if (c->op == DIRECTORY_OP_PUBLISH) d->publishing = false;
    if (c->op == DIRECTORY_OP_RELEASE) directory_remote_on_released(&d->remote, reached);
    if (c->op == DIRECTORY_OP_RESERVE) note_reserved(d, c, &a);
    d->n_holds++;
    if (reached) directory_remote_up(&d->remote);
    else directory_remote_down(&d->remote, a.why);
    deliver(d, c, &a);
    if (!d->closed) {
        send_publish(d);
        send_leave(d);
        send_releases(d);
    }
    directory_http_answer_release(&a);
    call_free(c);
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

static void add_list(struct buf *b, const char *name, struct str text)
{
    buf_printf(b, "\"%s\":\"%.*s\"", name, STR_ARG(text));
}

static void add_prefix(struct buf *b, const struct prefix_query *q)
{
    struct prefix_query_text t;
    struct buf lists = { 0 };
    prefix_query_write(q, &lists, &t);
    buf_printf(b, ",\"by_prefix\":{\"ns\":%u,\"blocks\":%u,", q->ns, q->blocks);
    add_list(b, "rungs", t.rungs);
    buf_add_char(b, ',');
    add_list(b, "uses", t.uses);
    buf_add_char(b, ',');
    add_list(b, "avoid", t.avoid);
    buf_add_char(b, ',');
    add_list(b, "drops", t.drops);
    buf_add_char(b, '}');
    buf_release(&lists);
}

static void write_placement(const struct placement *p, uint64_t id, bool tells_prefix,
                            struct buf *b)
{
    buf_add_char(b, ',');
    directory_add_id(b, "id", id);
    buf_add_char(b, ',');
    directory_add_id(b, "prefill", p->prefill);
    buf_add_char(b, ',');
    directory_add_id(b, "decode", p->decode);
    buf_printf(b, ",\"tokens\":%u,\"blocks\":%u,\"ttl_ms\":%u", p->tokens, p->blocks, p->ttl_ms);
    if (tells_prefix) add_prefix(b, p->prefix);
    buf_add_char(b, '}');
}

static enum status directory_http_reserve(struct directory *base, const struct placement *p,
                                          directory_reserve_fn *cb, void *arg)
{
    struct directory_http *d = (struct directory_http *)base;
    struct directory_http_call call = { .op = DIRECTORY_OP_RESERVE,
                                        .reserve = cb,
                                        .arg = arg,
                                        .request = p->request,
                                        .chosen = { p->prefill, p->decode, p->tokens, { 0 } },
                                        .told_prefix = p->prefix &&
                                                       clock_ms() >= d->prefix_from_ms };
    struct buf body = { 0 };
    /* Do not let the request wait for a timeout. */
    if (d->remote.state == DIRECTORY_REMOTE_DOWN) return ERR_UNAVAILABLE;
    TRY(directory_remote_reserve(&d->remote, p->request, &call.id));
    begin_body(d, &body);
    write_placement(p, call.id, call.told_prefix, &body);
    enum status st = send_call(d, call, buf_str(&body));
    buf_release(&body);
    /* Not sent, so nothing was counted. */
    if (st != OK) directory_remote_on_reserved(&d->remote, p->request, call.id, ERR_BUSY, 0);
    return st;
}

static void directory_http_computed(struct directory *base, uint64_t request)
{
    struct directory_http *d = (struct directory_http *)base;
    directory_remote_computed(&d->remote, request);
    send_releases(d);
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
    struct directory_http *d = (struct directory_http *)base;
    struct directory_http_call call = {
        .op = DIRECTORY_OP_METER, .meter = cb, .arg = arg, .n_room = r->n_uses
    };
    struct buf body = { 0 };
    TRY(directory_remote_may_meter(&d->remote));
    call.room = directory_remote_meter_room(r);
    if (!call.room) return ERR_NOMEM;
    begin_body(d, &body);
    buf_add_c(&body, ",\"topic\":");
    json_add_string(&body, str_of(d->topic));
    buf_add_char(&body, ',');
    meter_report_write(r, &body);
    buf_add_char(&body, '}');
    enum status st = send_call(d, call, buf_str(&body));
    buf_release(&body);
    if (st != OK) mem_free(call.room);
    return st;
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
    .computed = directory_http_computed,
    .release = directory_http_release,
    .meter = directory_http_meter,
    .why_down = directory_http_why_down,
};
