/* server.c - see server.h; wire.h describes the bodies.
 *
 * Every request is answered inside its handler, since the state is in this process's memory. A body
 * is parsed only after its proof was checked. After stop the local directory is not touched any
 * more; calls that still come get 503 (http_stop.c). Thread: loop. */
#include "scheduler/directory/server.h"

#include <stdio.h>
#include <string.h>

#include "scheduler/directory/local.h"
#include "scheduler/directory/wire.h"
#include "shared/base/address/host_port.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/log/log_repeats.h"
#include "shared/base/mem.h"
#include "shared/net/http/http_server.h"

enum {
    TTL_MAX_MS = 24 * 3600 * 1000,
    STOP_GRACE_MS = 300 /* in which calls that are on their way get their 503 */
};

struct directory_server {
    struct directory *local; /* NULL: stopped */
    struct http_server *http;
    uint16_t port;
    struct buf secret;
    struct log_repeats refusals;
    void (*done)(void *arg);
    void *done_arg;
};

/* Writes one JSON object to `out` and returns OK, or fills in err. */
typedef enum status directory_server_fn(struct directory_server *s, const cJSON *body,
                                        struct buf *out, struct err *err);

static enum status need_id(const cJSON *o, const char *name, uint64_t *out, struct err *err)
{
    *out = 0;
    TRY(directory_get_id(o, name, out, err));
    return *out ? OK : err_field(err, ERR_INVALID, name, "%s is missing or 0", name);
}

static enum status get_u32(const cJSON *o, const char *name, uint32_t max, uint32_t *out,
                           struct err *err)
{
    int64_t v = 0;
    TRY(json_get_i64(o, name, 0, max, &v, err));
    *out = (uint32_t)v;
    return OK;
}

static enum status handle_publish(struct directory_server *s, const cJSON *body, struct buf *out,
                                  struct err *err)
{
    struct node_record r;
    uint64_t fence = 0;
    TRY(directory_get_id(body, "fence", &fence, err));
    TRY(node_record_from_json(json_member(body, "record"), &r, err));
    if (directory_local_publish(s->local, &r) != OK)
        return err_set(err, ERR_FULL, "the directory already lists %d nodes, its limit",
                       DIRECTORY_NODES_MAX);
    directory_local_raise_fence(s->local, fence);
    buf_add_c(out, "{}");
    return OK;
}

static enum status handle_leave(struct directory_server *s, const cJSON *body, struct buf *out,
                                struct err *err)
{
    uint64_t node;
    TRY(need_id(body, "node", &node, err));
    directory_local_leave(s->local, node);
    buf_add_c(out, "{}");
    return OK;
}

static enum status handle_snapshot(struct directory_server *s, const cJSON *body, struct buf *out,
                                   struct err *err)
{
    const char *topic = "";
    char topics[512];
    size_t n;
    TRY(json_get_str(body, "topic", &topic, err));
    struct node_record *nodes = directory_local_view(s->local, topic, &n, topics);
    buf_add_c(out, "{\"topics\":");
    json_add_string(out, str_of(topics));
    buf_add_c(out, ",\"nodes\":[");
    for (size_t i = 0; i < n; i++) {
        if (i) buf_add_char(out, ',');
        node_record_write(&nodes[i], out);
    }
    buf_add_c(out, "]}");
    mem_free(nodes);
    return OK;
}

static enum status handle_reserve(struct directory_server *s, const cJSON *body, struct buf *out,
                                  struct err *err)
{
    struct placement p = { 0 };
    uint64_t owner, fence = 0;
    TRY(need_id(body, "owner", &owner, err));
    TRY(need_id(body, "id", &p.request, err));
    TRY(need_id(body, "decode", &p.decode, err));
    TRY(directory_get_id(body, "prefill", &p.prefill, err));
    TRY(directory_get_id(body, "fence", &fence, err));
    TRY(get_u32(body, "tokens", UINT32_MAX, &p.tokens, err));
    TRY(get_u32(body, "blocks", UINT32_MAX, &p.blocks, err));
    TRY(get_u32(body, "ttl_ms", TTL_MAX_MS, &p.ttl_ms, err));
    directory_local_raise_fence(s->local, fence);
    fence = 0;
    enum status st = directory_local_reserve(s->local, &p, owner, &fence);
    if (st == ERR_FULL)
        return err_set(err, ERR_FULL, "the directory already counts as many placements as it can");
    buf_printf(out, "{\"status\":\"%s\",", st == OK ? "ok" : st == ERR_BUSY ? "busy" : "not_found");
    directory_add_id(out, "fence", fence);
    buf_add_char(out, '}');
    return OK;
}

static enum status handle_release(struct directory_server *s, const cJSON *body, struct buf *out,
                                  struct err *err)
{
    const cJSON *ids = json_member(body, "ids"), *one;
    uint64_t id;
    if (!cJSON_IsArray(ids) || cJSON_GetArraySize(ids) > DIRECTORY_RELEASE_MAX)
        return err_field(err, ERR_INVALID, "ids", "ids must be an array of at most %d ids",
                         DIRECTORY_RELEASE_MAX);
    cJSON_ArrayForEach (one, ids) {
        if (!cJSON_IsString(one) || directory_read_id(str_of(one->valuestring), &id) != OK)
            return err_field(err, ERR_INVALID, "ids", "every id must be 16 hexadecimal digits");
        directory_local_release(s->local, id);
    }
    buf_add_c(out, "{}");
    return OK;
}

static const struct {
    const char *path;
    directory_server_fn *fn;
} HANDLERS[] = {
    { DIRECTORY_PATH "publish", handle_publish },   { DIRECTORY_PATH "leave", handle_leave },
    { DIRECTORY_PATH "snapshot", handle_snapshot }, { DIRECTORY_PATH "reserve", handle_reserve },
    { DIRECTORY_PATH "release", handle_release },
};

static bool is_member(const struct directory_server *s, const struct http_exchange *x)
{
    char want[DIRECTORY_PROOF_MAX];
    struct str got = http_header(x, "Authorization");
    if (s->secret.len == 0) return true;
    directory_prove(buf_str(&s->secret), http_method(x), http_path(x), http_body(x), want);
    return got.n == strlen(want) && equal_constant_time(got.p, want, got.n);
}

static enum status handle_call(struct directory_server *s, directory_server_fn *fn, struct str text,
                               struct buf *out, struct err *err)
{
    cJSON *body = NULL;
    uint64_t owner = 0;
    TRY(json_parse(text, false, &body, err));
    enum status st = directory_get_id(body, "owner", &owner, err);
    if (st == OK) {
        directory_local_renew_owner(s->local, owner);
        st = fn(s, body, out, err);
    }
    cJSON_Delete(body);
    return st;
}

/* Says it once a minute for each host: each of them is to be corrected. */
static void log_refusal(struct directory_server *s, const char *peer, const char *why)
{
    char host[HOST_PORT_TEXT_MAX], text[HOST_PORT_TEXT_MAX + ERR_TEXT_MAX];
    uint32_t n_unlogged;
    snprintf(host, sizeof host, "%s", peer);
    char *colon = strrchr(host, ':');
    if (colon) *colon = 0; /* the client's port is another one each time */
    snprintf(text, sizeof text, "%s: %s", host, why);
    if (log_repeats_due(&s->refusals, text, clock_ms(), &n_unlogged))
        log_warn("directory call refused", "peer=%s why=\"%s\" repeats=%u", peer, why, n_unlogged);
}

static enum status handle_request(struct directory_server *s, const struct http_exchange *x,
                                  struct buf *out, struct err *err)
{
    if (!s->local)
        return err_set(err, ERR_UNAVAILABLE,
                       "this node is shutting down and no longer serves the directory");
    if (!is_member(s, x)) {
        log_refusal(s, http_peer(x), "it has another cluster secret (BATON_CLUSTER_SECRET)");
        return err_set(err, ERR_UNAUTHORIZED,
                       "the cluster secret does not match the one of this node");
    }
    if (strcmp(http_method(x), "POST") != 0)
        return err_set(err, ERR_NOT_FOUND, "only POST is answered here");
    for (size_t i = 0; i < COUNT_OF(HANDLERS); i++)
        if (str_eq_c(http_path(x), HANDLERS[i].path)) {
            enum status st = handle_call(s, HANDLERS[i].fn, http_body(x), out, err);
            if (st == ERR_INVALID) log_refusal(s, http_peer(x), err->text); /* an old version's */
            return st;
        }
    return err_set(err, ERR_NOT_FOUND,
                   "there is no such call; the paths are " DIRECTORY_PATH
                   "publish, leave, snapshot, reserve, release");
}

static void on_request(void *arg, struct http_exchange *x)
{
    struct buf out = { 0 };
    struct err err = { 0 };
    enum status st = handle_request(arg, x, &out, &err);
    if (st != OK) {
        buf_clear(&out);
        buf_add_c(&out, "{\"error\":");
        json_add_string(&out, str_of(err.text));
        buf_add_char(&out, '}');
    }
    http_reply(x, status_http(st), "application/json", NULL, buf_str(&out));
    buf_release(&out);
}

enum status directory_server_start(struct loop *loop, struct directory *local, const char *host,
                                   uint16_t port, struct str secret, struct directory_server **out,
                                   struct err *err)
{
    ASSERT(directory_is_local(local));
    struct directory_server *s = MEM_NEW(struct directory_server);
    struct http_server_options o = {
        .loop = loop,
        .host = host,
        .port = port,
        .option = "--engine-worker-queue-port",
        .limits = HTTP_LIMITS_DEFAULT,
        .handler = on_request,
        .arg = s,
    };
    o.limits.body_bytes = DIRECTORY_BODY_MAX;
    o.limits.write_queue_bytes = 2 * DIRECTORY_ANSWER_MAX;
    s->local = local;
    buf_add_str(&s->secret, secret);
    enum status st = http_server_start(&o, &s->http, err);
    if (st != OK) {
        buf_release(&s->secret);
        mem_free(s);
        return st;
    }
    s->port = http_server_port(s->http);
    *out = s;
    return OK;
}

uint16_t directory_server_port(const struct directory_server *s) { return s->port; }

static void on_stopped(void *arg)
{
    struct directory_server *s = arg;
    void (*done)(void *arg) = s->done;
    void *done_arg = s->done_arg;
    buf_release(&s->secret);
    mem_free(s);
    if (done) done(done_arg);
}

void directory_server_stop(struct directory_server *s, void (*done)(void *arg), void *arg)
{
    s->local = NULL;
    s->done = done;
    s->done_arg = arg;
    http_server_stop(s->http, STOP_GRACE_MS, on_stopped, s);
}
