/* kv_sender.c - see kv_sender.h. */
#include "prefill/kv_sender.h"

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"

void kv_sender_init(struct kv_sender *k) { kv_routes_init(&k->routes, k->kvt, k->cluster); }
void kv_sender_release(struct kv_sender *k) { kv_routes_release(&k->routes); }

void kv_sends_init(struct kv_sends *s, uint64_t id)
{
    *s = (struct kv_sends){ .id = id };
    list_init(&s->queue);
}

void kv_sends_add(struct kv_sends *s, uint32_t part, uint64_t process, ProtobufCBinaryData grant,
                  struct arena *arena)
{
    ASSERT(s->n < KV_PARTS_MAX);
    char *copy = arena_strndup(arena, (const char *)grant.data, grant.len);
    s->send[s->n++] = (struct kv_send){ part, process, { copy, grant.len } };
}

uint32_t kv_sends_all(const struct kv_sends *s)
{
    uint32_t bits = 0;
    for (uint32_t i = 0; i < s->n; i++) bits |= 1u << s->send[i].part;
    return bits;
}

enum status kv_sender_learn(struct kv_sender *k, const Baton__NodeAddress *a, struct err *err)
{
    if (a->port == 0 || a->port > UINT16_MAX)
        return err_set(err, ERR_FORMAT, "the decode node's port is %u, not 1 to 65535", a->port);
    cluster_learn(k->cluster, a->node, a->host, (uint16_t)a->port);
    return OK;
}

static void open_all(struct kv_sender *k, struct kv_sends *s)
{
    struct err err = { 0 };
    for (uint32_t i = 0; i < s->n; i++) {
        const struct kv_send *one = &s->send[i];
        const struct kv_route *route = kv_routes_find(&k->routes, one->process);
        enum status st = kvt_send_open_of(k->kvt, s->id + one->part, s->id, route->peer, one->grant,
                                          &err);
        if (st != OK) { /* a malformed grant is the decode node's fault, not the request's */
            if (status_class_of(st) == CLASS_REQUEST) st = ERR_PEER_MISMATCH;
            k->on_failed(k->arg, s, st, err.text);
            return;
        }
        s->open |= 1u << one->part;
    }
    k->on_open(k->arg, s);
}

static const char DOUBTED[] = "nothing comes back on the KV connection to the decode node";

bool kv_sender_start(struct kv_sender *k, struct kv_sends *s)
{
    struct kv_route *awaited = NULL;
    const uint64_t now = clock_ms();
    bool doubted = false;
    for (uint32_t i = 0; i < s->n; i++) { /* all begin to connect at once */
        struct kv_route *route = kv_routes_get(&k->routes, s->send[i].process);
        if (!route) {
            k->on_failed(k->arg, s, ERR_PEER_LOST,
                         "the decode node cannot be reached from the prefill node");
            return false;
        }
        if (route->state != KV_ROUTE_UP) awaited = route;
        /* One prompt finds out whether it comes up; a quiet one has transfers that do. */
        doubted |= kv_route_is_doubted(route, now) &&
                   (route->state == KV_ROUTE_UP || !list_empty(&route->waiting));
    }
    if (doubted) {
        k->on_failed(k->arg, s, ERR_BUSY, DOUBTED);
        return false;
    }
    if (!awaited) {
        open_all(k, s);
        return false;
    }
    list_push(&awaited->waiting, &s->queue);
    uint32_t n = 0;
    LIST_FOREACH (other, &awaited->waiting, struct kv_sends, queue)
        if (++n > KV_SENDER_FIRST) return false;
    return true;
}

void kv_sender_cancel(struct kv_sender *k, struct kv_sends *s)
{
    list_remove(&s->queue);
    if (s->open) kvt_send_cancel(k->kvt, s->id);
}

void kv_sender_write(struct kv_sender *k, const struct kv_layout *l, uint64_t id,
                     const int32_t *blocks, uint32_t n)
{
    enum status st = OK;
    for (uint32_t layer = 0; layer < l->n_layers && st == OK; layer++)
        st = kvt_send_ready(k->kvt, id, layer, 0, n * l->block_tokens, blocks);
    kvt_send_finish(k->kvt, id); /* short, if a layer was not taken: it fails then */
}

/* ---- routes ---- */

static void fail_route(struct kv_sender *k, struct kv_route *route, enum status st,
                       const char *text)
{
    while (!list_empty(&route->waiting)) {
        struct kv_sends *s = LIST_FIRST(&route->waiting, struct kv_sends, queue);
        list_remove(&s->queue);
        k->on_failed(k->arg, s, st, text);
    }
    kv_routes_drop(&k->routes, route);
}

void kv_sender_on_answer(struct kv_sender *k, const struct cluster_message *m)
{
    struct kv_route *route = kv_routes_find(&k->routes, m->from);
    struct err err = { 0 };
    if (!route) return;
    enum status st = kv_routes_on_answer(&k->routes, route, m, &err);
    if (st == OK) return;
    if (status_class_of(st) == CLASS_REQUEST) st = ERR_PEER_MISMATCH; /* nor a malformed answer */
    log_warn("no kv route", "peer=%s st=%s why=\"%s\"", m->from_name, status_name(st), err.text);
    fail_route(k, route, st, err.text);
}

static void on_up(struct kv_sender *k, uint64_t peer)
{
    struct kv_route *route = kv_routes_find_peer(&k->routes, peer);
    if (!route) return;
    kv_routes_on_up(&k->routes, route);
    while (!list_empty(&route->waiting)) {
        struct kv_sends *s = LIST_FIRST(&route->waiting, struct kv_sends, queue);
        list_remove(&s->queue);
        (void)kv_sender_start(k, s); /* another connection may be missing still */
    }
}

/* The transfers that wait there will find out; no other prompt needs to. */
static void on_quiet(struct kv_route *route, bool quiet)
{
    if (!route) return;
    route->quiet = quiet;
    log_info("kv route", "process=%016llx quiet=%d", (unsigned long long)route->process, quiet);
}

bool kv_sender_on_kvt(struct kv_sender *k, const struct kvt_event *ev)
{
    if (!kvt_event_is_of_peer(ev->kind)) return false;
    if (ev->kind == KVT_CONNECTED) on_up(k, ev->peer);
    struct kv_route *route = kv_routes_find_peer(&k->routes, ev->peer);
    if (ev->kind == KVT_PEER_LOST && route)
        fail_route(k, route, ev->status,
                   ev->text[0] ? ev->text : "the KV connection to the decode node was lost");
    else if (ev->kind == KVT_PEER_QUIET || ev->kind == KVT_PEER_HEARD)
        on_quiet(route, ev->kind == KVT_PEER_QUIET);
    return true;
}

void kv_sender_on_lost(struct kv_sender *k, uint64_t process)
{
    struct kv_route *route = kv_routes_find(&k->routes, process);
    if (route) fail_route(k, route, ERR_PEER_LOST, "the decode node is gone");
}

/* All but the oldest of those that wait. */
static void send_back(struct kv_sender *k, struct kv_route *route)
{
    bool is_oldest = true;
    LIST_FOREACH (s, &route->waiting, struct kv_sends, queue) {
        if (!is_oldest) {
            list_remove(&s->queue);
            k->on_failed(k->arg, s, ERR_BUSY, DOUBTED);
        }
        is_oldest = false;
    }
}

void kv_sender_sweep(struct kv_sender *k, uint64_t now_ms)
{
    LIST_FOREACH (route, &k->routes.all, struct kv_route, link) {
        if (route->state != KV_ROUTE_UP && now_ms > route->since_ms + KV_ROUTE_CONNECT_MS)
            fail_route(k, route, ERR_PEER_REFUSED,
                       "no KV connection to the decode node within 5 s");
        else if (kv_route_is_doubted(route, now_ms)) send_back(k, route);
    }
}
