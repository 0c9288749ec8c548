/* kv_route.h - data connections to processes of decode nodes, one each, opened when first needed.
 *
 *   NONE ─ KVT_HELLO sent over the cluster link ─▶ ASKING ─ KVT_ANSWER ─▶ CONNECTING ─ KVT_CONNECTED ─▶ UP
 * A refusal or loss drops the route; the next prompt makes a new one. Prompts wait in `waiting`; a
 * route that is not UP soon, or on which nothing comes back (KVT_PEER_QUIET), is doubted, and gets
 * no other prompts for now (kv_sender.h).
 * Thread: loop. Owner: kv_sender. */
#ifndef BATON_PREFILL_KV_ROUTE_H
#define BATON_PREFILL_KV_ROUTE_H

#include "kvtransfer/kvtransfer.h"
#include "shared/base/list.h"
#include "shared/base/map.h"
#include "shared/cluster/cluster.h"

enum kv_route_state { KV_ROUTE_ASKING, KV_ROUTE_CONNECTING, KV_ROUTE_UP };

struct kv_route {
    uint64_t process;
    enum kv_route_state state;
    uint64_t peer; /* kvtransfer's handle once CONNECTING */
    uint64_t since_ms;
    bool failed;         /* until it is UP: the last one to this process failed or was lost */
    bool quiet;          /* UP: KVT_PEER_QUIET */
    struct list waiting; /* kv_sends.queue */
    struct list link;    /* routes.all */
};

enum {
    /* From the hello until it is doubted: registering memory and making queue pairs take their
     * time, but after a failure the others need not wait for that. */
    KV_ROUTE_DOUBT_MS = 1000,
    KV_ROUTE_DOUBT_AGAIN_MS = 100,
    KV_ROUTE_CONNECT_MS = 5000, /* from the hello to UP */
    KV_ROUTES_FAILED = 64
};

struct kv_routes {
    struct kvt *kvt;         /* borrowed */
    struct cluster *cluster; /* borrowed */
    struct list all;
    /* Ring: the processes to which a route failed last, and that have none that is UP. */
    uint64_t failed[KV_ROUTES_FAILED];
    uint32_t n_failed; /* ever added */
};

void kv_routes_init(struct kv_routes *r, struct kvt *kvt, struct cluster *cluster);
void kv_routes_release(struct kv_routes *r);
struct kv_route *kv_routes_find(struct kv_routes *r, uint64_t process);
struct kv_route *kv_routes_find_peer(struct kv_routes *r, uint64_t peer);
bool kv_route_is_doubted(const struct kv_route *route, uint64_t now_ms);
/* Returns the route to `process`, started if there is none; NULL when the hello could not be
 * sent. */
struct kv_route *kv_routes_get(struct kv_routes *r, uint64_t process);
/* The decode node answered: connects, or tells why not in err. */
enum status kv_routes_on_answer(struct kv_routes *r, struct kv_route *route,
                                const struct cluster_message *m, struct err *err) MUST_CHECK;
/* This process was stopped for `ms`: what the decode nodes sent meanwhile is still unread. */
void kv_routes_wait_longer(struct kv_routes *r, uint64_t ms, uint64_t now);
void kv_routes_on_up(struct kv_routes *r, struct kv_route *route);
/* It failed or was lost: disconnects and frees it. Its waiting list must be empty. */
void kv_routes_drop(struct kv_routes *r, struct kv_route *route);

#endif
