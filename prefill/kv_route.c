/* kv_route.c - see kv_route.h. */
#include "prefill/kv_route.h"

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/cluster/proto/node.pb-c.h"

void kv_routes_init(struct kv_routes *r, struct kvt *kvt, struct cluster *cluster)
{
    *r = (struct kv_routes){ .kvt = kvt, .cluster = cluster };
    list_init(&r->all);
}

void kv_routes_release(struct kv_routes *r)
{
    LIST_FOREACH (route, &r->all, struct kv_route, link) mem_free(route);
    list_init(&r->all);
}

struct kv_route *kv_routes_find(struct kv_routes *r, uint64_t process)
{
    LIST_FOREACH (route, &r->all, struct kv_route, link)
        if (route->process == process) return route;
    return NULL;
}

struct kv_route *kv_routes_find_peer(struct kv_routes *r, uint64_t peer)
{
    LIST_FOREACH (route, &r->all, struct kv_route, link)
        if (route->state != KV_ROUTE_ASKING && route->peer == peer) return route;
    return NULL;
}

bool kv_route_is_doubted(const struct kv_route *route, uint64_t now_ms)
{
    if (route->state == KV_ROUTE_UP) return route->quiet;
    return now_ms > route->since_ms + (route->failed ? KV_ROUTE_DOUBT_AGAIN_MS : KV_ROUTE_DOUBT_MS);
}

/* Its place in the ring, or NULL. */
static uint64_t *find_failed(struct kv_routes *r, uint64_t process)
{
    for (size_t i = 0; i < KV_ROUTES_FAILED; i++)
        if (r->failed[i] == process) return &r->failed[i];
    return NULL;
}

struct kv_route *kv_routes_get(struct kv_routes *r, uint64_t process)
{
    struct kv_route *route = kv_routes_find(r, process);
    if (route) return route;
    struct buf hello = { 0 };
    Baton__KvtHello m = BATON__KVT_HELLO__INIT;
    kvt_hello(r->kvt, &hello);
    m.hello.data = (uint8_t *)hello.data;
    m.hello.len = hello.len;
    enum status st = cluster_send_proto(r->cluster, process, FRAME_KVT_HELLO, 0, 0, &m.base);
    buf_release(&hello);
    if (st != OK) return NULL;
    route = MEM_NEW(struct kv_route);
    route->process = process;
    route->state = KV_ROUTE_ASKING;
    route->since_ms = clock_ms();
    route->failed = find_failed(r, process) != NULL;
    list_init(&route->waiting);
    list_push(&r->all, &route->link);
    return route;
}

enum status kv_routes_on_answer(struct kv_routes *r, struct kv_route *route,
                                const struct cluster_message *m, struct err *err)
{
    Baton__KvtAnswer *a = baton__kvt_answer__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    if (!a) return err_set(err, ERR_FORMAT, "the decode node's transfer answer is malformed");
    enum status st = OK;
    if (a->status != OK) { /* what passes by itself must not keep the two nodes apart */
        bool busy = status_class_of((enum status)a->status) == CLASS_BUSY;
        st = err_set(err, busy ? (enum status)a->status : ERR_PEER_MISMATCH,
                     "the decode node refused the KV connection: %s", a->text);
    } else if (route->state == KV_ROUTE_ASKING) {
        st = kvt_connect(r->kvt, (struct str){ (const char *)a->answer.data, a->answer.len },
                         &route->peer, err);
        if (st == OK) route->state = KV_ROUTE_CONNECTING;
        /* Two nodes that do not match are not the request's fault: another pair may serve it. */
        else if (status_class_of(st) == CLASS_REQUEST) st = err->code = ERR_PEER_MISMATCH;
    }
    baton__kvt_answer__free_unpacked(a, NULL);
    return st;
}

void kv_routes_wait_longer(struct kv_routes *r, uint64_t ms, uint64_t now)
{
    LIST_FOREACH (route, &r->all, struct kv_route, link)
        route->since_ms = now - route->since_ms > ms ? route->since_ms + ms : now;
}

void kv_routes_on_up(struct kv_routes *r, struct kv_route *route)
{
    uint64_t *failed = find_failed(r, route->process);
    if (failed) *failed = 0;
    route->state = KV_ROUTE_UP;
}

void kv_routes_drop(struct kv_routes *r, struct kv_route *route)
{
    ASSERT(list_empty(&route->waiting));
    if (!find_failed(r, route->process))
        r->failed[r->n_failed++ % KV_ROUTES_FAILED] = route->process;
    if (route->state != KV_ROUTE_ASKING) kvt_disconnect(r->kvt, route->peer);
    list_remove(&route->link);
    mem_free(route);
}
