/* cluster.h - authenticated, versioned links to the other nodes.
 *
 * cluster_send opens a TCP connection to a node when there is none. A node is identified by its
 * incarnation id (64 random bits made at every start), so that no message for an earlier process
 * reaches a later one at the same address. Both sides prove that they know the cluster secret
 * before anything else is read. Messages to oneself are queued in order, like any others.
 *
 * A link is lost when its socket fails, when nothing was heard for lost_ms, or when the peer
 * has work and says that it has made no progress for lost_ms. on_lost reports a lost peer
 * once; messages queued for it are dropped, and nodes free what the peer held on them.
 *
 * Life cycle: create, send and receive, free (closes links without reports). Thread: loop. */
#ifndef BATON_CLUSTER_CLUSTER_H
#define BATON_CLUSTER_CLUSTER_H

#include "shared/base/metrics.h"
#include "shared/cluster/frame.h"
#include "shared/net/loop.h"

struct cluster;

struct cluster_message {
    uint64_t from; /* incarnation id of the sender */
    const char *from_name;
    enum frame_type type;
    uint64_t request;
    uint32_t attempt;
    struct str body; /* valid during the call */
};

struct cluster_options {
    struct loop *loop;
    const char *listen_host;
    uint16_t port;      /* 0: any free one */
    const char *name;   /* of this node, for logs */
    uint64_t node;      /* this process's incarnation id; not 0 */
    struct str secret;  /* empty: none (the caller then listens on loopback only) */
    uint32_t lost_ms;   /* default 2,500 when 0 */
    uint32_t forget_ms; /* addresses without a link are forgotten after this; 60,000 when 0 */
    size_t queue_bytes; /* most bytes waiting for one peer; default 64 MiB when 0 */
    struct metrics *metrics;
    void (*on_message)(void *arg, const struct cluster_message *m);
    void (*on_lost)(void *arg, uint64_t node, const char *why);
    /* A link of cluster_meet is up: this node answers there. May be NULL. */
    void (*on_met)(void *arg, uint32_t purpose, uint64_t node);
    /* Fills in a PING; may be NULL. */
    void (*progress)(void *arg, uint64_t *counter, bool *has_work);
    void *arg;
};

enum status cluster_create(const struct cluster_options *o, struct cluster **out,
                           struct err *err) MUST_CHECK;
void cluster_free(struct cluster *c);
uint16_t cluster_port(const struct cluster *c);

/* Stores where a node is reached, until the node is lost, or for forget_ms without a link. Needed
 * before the first send to a node that has not connected to us. */
void cluster_learn(struct cluster *c, uint64_t node, const char *host, uint16_t port);
bool cluster_knows(const struct cluster *c, uint64_t node);
/* Starts to connect to a node whose address is known, unless that was done; on_lost reports a
 * failure. */
void cluster_dial(struct cluster *c, uint64_t node);
/* Connects to whatever node listens at this address (a number): on_met tells which it is. A failure
 * is logged only. `purpose` is handed to on_met. False: another connection of this purpose is still
 * being made, this one was not begun; one that is not answered for 500 ms gives way to it. */
bool cluster_meet(struct cluster *c, uint32_t purpose, const char *host, uint16_t port);
bool cluster_is_linked(const struct cluster *c, uint64_t node); /* true for this node itself */
/* Queues one message. ERR_PEER_LOST: unknown node, or its link just failed (on_lost follows or
 * came); ERR_FULL: queue_bytes are waiting. */
enum status cluster_send(struct cluster *c, uint64_t node, enum frame_type type, uint64_t request,
                         uint32_t attempt, struct str body) MUST_CHECK;
/* Cuts the links to a node that waits for a message its full queue could not take: on_lost follows
 * on both sides, and the requests concerned are tried again. */
void cluster_disconnect(struct cluster *c, uint64_t node, const char *why);
/* Packs and sends a protobuf-c message, which stays the caller's. */
struct ProtobufCMessage;
enum status cluster_send_proto(struct cluster *c, uint64_t node, enum frame_type type,
                               uint64_t request, uint32_t attempt,
                               const struct ProtobufCMessage *body) MUST_CHECK;

#endif
