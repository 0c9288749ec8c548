/* handler.c - see handler.h; wire.h describes the bodies.
 *
 * Every request is answered inside its handler, since the state is in this process's memory. A body
 * is parsed only after its proof was checked. After close the local directory is not touched any
 * more; calls that still come get 503. Thread: loop. */
#include "scheduler/directory/handler.h"

#include <stdio.h>
#include <string.h>

#include "scheduler/directory/local.h"
#include "scheduler/directory/meter_wire.h"
#include "scheduler/directory/wire.h"
#include "shared/base/address/host_port.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/log/log_repeats.h"
#include "shared/base/mem.h"

enum {
    TTL_MAX_MS = 24 * 3600 * 1000,
    STRANGER_MS = 5000 /* a node that is not let in comes again sooner */
};

struct directory_handler {
    struct directory *local; /* NULL: closed */
    struct buf secret;
    struct log_repeats refusals;
    uint64_t t_stranger_ms; /* the last caller that was not let in came then; 0: none did */
    char stranger[ERR_TEXT_MAX];
};

/* Writes one JSON object to `out` and returns OK, or fills in err. */
typedef enum status directory_handler_fn(struct directory_handler *h, const cJSON *body,
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

static enum status handle_publish(struct directory_handler *h, const cJSON *body, struct buf *out,
                                  struct err *err)
{
    struct node_record r;
    uint64_t fence = 0;
    TRY(directory_get_id(body, "fence", &fence, err));
    TRY(node_record_from_json(json_member(body, "record"), &r, err));
    if (directory_local_publish(h->local, &r) != OK)
        return err_set(err, ERR_FULL, "the directory already lists %d nodes, its limit",
                       DIRECTORY_NODES_MAX);
    directory_local_raise_fence(h->local, fence);
    buf_add_c(out, "{}");
    return OK;
}

static enum status handle_leave(struct directory_handler *h, const cJSON *body, struct buf *out,
                                struct err *err)
{
    uint64_t node;
    TRY(need_id(body, "node", &node, err));
    directory_local_leave(h->local, node);
    buf_add_c(out, "{}");
    return OK;
}

static enum status handle_snapshot(struct directory_handler *h, const cJSON *body, struct buf *out,
                                   struct err *err)
{
    const char *topic = "";
    char topics[512];
    size_t n;
    TRY(json_get_str(body, "topic", &topic, err));
    struct node_record *nodes = directory_local_view(h->local, topic, &n, topics);
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

static enum status get_list(const cJSON *o, const char *name, struct str *out, struct err *err)
{
    const char *text = "";
    TRY(json_get_str(o, name, &text, err));
    *out = str_of(text);
    return OK;
}

/* Reads what a placement tells of its prompt's prefix; p->prefix stays NULL when it tells nothing.
 * Entry nodes of earlier versions tell it in a member `prefix`, with all nodes that could take the
 * request: that is not read, and their choice stays. */
static enum status get_prefix(const cJSON *body, struct placement *p,
                              struct prefix_query_room *room, struct prefix_query *q,
                              struct err *err)
{
    const cJSON *o = json_member(body, "by_prefix");
    struct prefix_query_text t;
    if (!o) return OK;
    if (!cJSON_IsObject(o))
        return err_field(err, ERR_INVALID, "by_prefix", "by_prefix must be a JSON object");
    *q = (struct prefix_query){ .n_tokens = p->tokens,
                                .compute = p->prefill ? p->prefill : p->decode,
                                .decode = p->prefill ? p->decode : 0 };
    TRY(get_u32(o, "ns", UINT32_MAX, &q->ns, err));
    TRY(get_u32(o, "blocks", UINT32_MAX, &q->blocks, err));
    TRY(get_list(o, "rungs", &t.rungs, err));
    TRY(get_list(o, "uses", &t.uses, err));
    TRY(get_list(o, "avoid", &t.avoid, err));
    TRY(get_list(o, "drops", &t.drops, err));
    TRY(prefix_query_read(&t, room, q, err));
    p->prefix = q;
    return OK;
}

/* The nodes are told only to those who asked for others, as earlier versions did not. */
static void write_placed(const struct directory_placed *placed, struct buf *out)
{
    directory_add_id(out, "fence", placed->fence);
    if (!placed->on.expected.known) return;
    buf_add_c(out, ",\"placed\":\"");
    prefix_placed_write(&placed->on, out);
    buf_add_char(out, '"');
}

static enum status handle_reserve(struct directory_handler *h, const cJSON *body, struct buf *out,
                                  struct err *err)
{
    struct placement p = { 0 };
    struct prefix_query_room room;
    struct prefix_query q;
    struct directory_placed placed = { 0 };
    uint64_t owner, fence = 0;
    TRY(need_id(body, "owner", &owner, err));
    TRY(need_id(body, "id", &p.request, err));
    TRY(need_id(body, "decode", &p.decode, err));
    TRY(directory_get_id(body, "prefill", &p.prefill, err));
    TRY(directory_get_id(body, "fence", &fence, err));
    TRY(get_u32(body, "tokens", UINT32_MAX, &p.tokens, err));
    TRY(get_u32(body, "blocks", UINT32_MAX, &p.blocks, err));
    TRY(get_u32(body, "ttl_ms", TTL_MAX_MS, &p.ttl_ms, err));
    TRY(get_prefix(body, &p, &room, &q, err));
    directory_local_raise_fence(h->local, fence);
    enum status st = directory_local_reserve(h->local, &p, owner, &placed);
    if (st == ERR_FULL)
        return err_set(err, ERR_FULL, "the directory already counts as many placements as it can");
    buf_printf(out, "{\"status\":\"%s\",", st == OK ? "ok" : st == ERR_BUSY ? "busy" : "not_found");
    write_placed(&placed, out);
    buf_add_char(out, '}');
    return OK;
}

static enum status for_each_id(struct directory_handler *h, const cJSON *ids, const char *name,
                               void (*fn)(struct directory *d, uint64_t id), struct err *err)
{
    const cJSON *one;
    uint64_t id;
    if (!cJSON_IsArray(ids) || cJSON_GetArraySize(ids) > DIRECTORY_RELEASE_MAX)
        return err_field(err, ERR_INVALID, name, "%s must be an array of at most %d ids", name,
                         DIRECTORY_RELEASE_MAX);
    cJSON_ArrayForEach (one, ids) {
        if (!cJSON_IsString(one) || directory_read_id(str_of(one->valuestring), &id) != OK)
            return err_field(err, ERR_INVALID, name, "every id must be 16 hexadecimal digits");
        fn(h->local, id);
    }
    return OK;
}

static enum status handle_release(struct directory_handler *h, const cJSON *body, struct buf *out,
                                  struct err *err)
{
    const cJSON *computed = json_member(body, "computed");
    if (computed) TRY(for_each_id(h, computed, "computed", directory_local_computed, err));
    TRY(for_each_id(h, json_member(body, "ids"), "ids", directory_local_release, err));
    buf_add_c(out, "{}");
    return OK;
}

static enum status handle_meter(struct directory_handler *h, const cJSON *body, struct buf *out,
                                struct err *err)
{
    struct meter_use uses[METER_TENANTS_MAX];
    struct meter_sum sums[METER_TENANTS_MAX];
    struct meter_report r;
    struct meter_sums s;
    const char *topic = NULL;
    TRY(json_get_str(body, "topic", &topic, err));
    if (!directory_topic_is_valid(topic))
        return err_field(err, ERR_INVALID, "topic",
                         "topic must be 1 to %d printable characters without blanks and braces",
                         NODE_NAME_MAX - 1);
    TRY(meter_report_read(body, uses, &r, err));
    TRY(directory_local_meter(h->local, topic, &r, sums, &s, err));
    buf_add_char(out, '{');
    meter_sums_write(&s, out);
    buf_add_char(out, '}');
    return OK;
}

static const struct {
    const char *path;
    directory_handler_fn *fn;
} HANDLERS[] = {
    { DIRECTORY_PATH "publish", handle_publish },   { DIRECTORY_PATH "leave", handle_leave },
    { DIRECTORY_PATH "snapshot", handle_snapshot }, { DIRECTORY_PATH "reserve", handle_reserve },
    { DIRECTORY_PATH "release", handle_release },   { DIRECTORY_PATH "meter", handle_meter },
};

static bool is_of_this_host(const struct http_exchange *x)
{
    static const char *const OF_PROXIES[] = { "forwarded", "x-forwarded-for", "via" };
    char host[HOST_TEXT_MAX];
    uint16_t port;
    for (size_t i = 0; i < COUNT_OF(OF_PROXIES); i++)
        if (http_header(x, OF_PROXIES[i]).p) return false;
    if (!host_port_parse(http_peer(x), host, &port)) return false;
    return host_is_loopback(str_starts(str_of(host), "::ffff:") ? host + strlen("::ffff:") : host);
}

enum status directory_check_caller(struct str secret, const struct http_exchange *x,
                                   struct err *err)
{
    char want[DIRECTORY_PROOF_MAX];
    struct str got = http_header(x, "Authorization");
    if (!secret.n) {
        if (is_of_this_host(x)) return OK;
        return err_set(err, ERR_UNAUTHORIZED,
                       "this node has no cluster secret (BATON_CLUSTER_SECRET), so only nodes of "
                       "its host may call it; give all nodes the same one");
    }
    if (!str_starts(got, "Baton "))
        return err_set(err, ERR_UNAUTHORIZED,
                       "this node has a cluster secret, and the call proves none: give it the same "
                       "in BATON_CLUSTER_SECRET or --cluster-secret-file");
    directory_prove(secret, http_method(x), http_path(x), http_body(x), want);
    if (got.n == strlen(want) && equal_constant_time(got.p, want, got.n)) return OK;
    return err_set(err, ERR_UNAUTHORIZED, "the cluster secret does not match the one of this node");
}

static enum status handle_call(struct directory_handler *h, directory_handler_fn *fn,
                               struct str text, struct buf *out, struct err *err)
{
    cJSON *body = NULL;
    uint64_t owner = 0;
    TRY(json_parse(text, false, &body, err));
    enum status st = directory_get_id(body, "owner", &owner, err);
    if (st == OK) {
        directory_local_renew_owner(h->local, owner);
        st = fn(h, body, out, err);
    }
    cJSON_Delete(body);
    return st;
}

/* The client's port is another one each time. */
static void host_of(const char *peer, char host[HOST_PORT_TEXT_MAX])
{
    snprintf(host, HOST_PORT_TEXT_MAX, "%s", peer);
    char *colon = strrchr(host, ':');
    if (colon) *colon = 0;
}

/* Says it once a minute for each host: each of them is to be corrected. */
static void log_refusal(struct directory_handler *h, const char *peer, const char *why)
{
    char host[HOST_PORT_TEXT_MAX], text[HOST_PORT_TEXT_MAX + ERR_TEXT_MAX];
    uint32_t n_unlogged;
    host_of(peer, host);
    snprintf(text, sizeof text, "%s: %s", host, why);
    if (log_repeats_due(&h->refusals, text, clock_ms(), &n_unlogged))
        log_warn("directory call refused", "peer=%s why=\"%s\" repeats=%u", peer, why, n_unlogged);
}

static directory_handler_fn *find_handler(struct str path)
{
    for (size_t i = 0; i < COUNT_OF(HANDLERS); i++)
        if (str_eq_c(path, HANDLERS[i].path)) return HANDLERS[i].fn;
    return NULL;
}

static void note_stranger(struct directory_handler *h, const struct http_exchange *x)
{
    const bool proves = str_starts(http_header(x, "Authorization"), "Baton ");
    const char *why = !h->secret.len
                          ? "there is no cluster secret here, so only nodes of this host, without "
                            "a proxy, are let in"
                      : proves ? "it has another cluster secret"
                               : "it has no cluster secret";
    char host[HOST_PORT_TEXT_MAX];
    host_of(http_peer(x), host);
    h->t_stranger_ms = clock_ms();
    snprintf(h->stranger, sizeof h->stranger,
             "a node on host %s that wants to register is not let in: %s; give all nodes and their "
             "router the same BATON_CLUSTER_SECRET or --cluster-secret-file",
             host, why);
    log_refusal(h, http_peer(x), h->stranger);
}

const char *directory_handler_stranger(const struct directory_handler *h)
{
    const bool is_recent = h->t_stranger_ms && clock_ms() - h->t_stranger_ms < STRANGER_MS;
    return is_recent ? h->stranger : NULL;
}

static enum status handle_request(struct directory_handler *h, const struct http_exchange *x,
                                  struct buf *out, struct err *err)
{
    if (!h->local)
        return err_set(err, ERR_UNAVAILABLE,
                       "this node is shutting down and no longer serves the directory");
    directory_handler_fn *fn = find_handler(http_path(x));
    if (directory_check_caller(buf_str(&h->secret), x, err) != OK) {
        if (fn) note_stranger(h, x);
        else log_refusal(h, http_peer(x), err->text); /* that is no node */
        return err->code;
    }
    if (strcmp(http_method(x), "POST") != 0)
        return err_set(err, ERR_NOT_FOUND, "only POST is answered here");
    if (!fn)
        return err_set(err, ERR_NOT_FOUND,
                       "there is no such call; the paths are " DIRECTORY_PATH
                       "publish, leave, snapshot, reserve, release, meter");
    const enum status st = handle_call(h, fn, http_body(x), out, err);
    if (st == ERR_INVALID) log_refusal(h, http_peer(x), err->text); /* an old version's */
    return st;
}

void directory_handler_serve(struct directory_handler *h, struct http_exchange *x)
{
    struct buf out = { 0 };
    struct err err = { 0 };
    enum status st = handle_request(h, x, &out, &err);
    if (st == OK) http_reply(x, 200, "application/json", NULL, buf_str(&out));
    else http_reply_error(x, status_http(st), NULL, "error", err.text);
    buf_release(&out);
}

struct directory_handler *directory_handler_create(struct directory *local, struct str secret)
{
    ASSERT(directory_is_local(local));
    struct directory_handler *h = MEM_NEW(struct directory_handler);
    h->local = local;
    buf_add_str(&h->secret, secret);
    return h;
}

void directory_handler_close(struct directory_handler *h) { h->local = NULL; }

void directory_handler_free(struct directory_handler *h)
{
    if (!h) return;
    buf_release(&h->secret);
    mem_free(h);
}
