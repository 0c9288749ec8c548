/* cluster.h - links to the other nodes: authenticated, versioned, bounded, watched.
 *
 * One TCP connection per pair and direction of first need, opened by cluster_send when there is
 * none. A node is known by its incarnation id (64 random bits made at every start), so nothing
 * meant for an earlier process at the same address reaches a later one. Both sides prove knowledge
 * of the cluster secret before anything else is read. Sending to oneself goes through the loop's
 * queue, in order, like any other message.
 *
 * A link is lost when its socket fails, when nothing was heard for lost_ms, or when the peer says
 * it has work but its progress counter has not moved for lost_ms. Loss is reported once per link
 * (on_lost); messages queued for it are dropped: the owners of requests decide what to do. A node
 * that frees what an entry held does it on on_lost.
 *
 * Threads: loop only. Life cycle: create, send/receive, free (closes links without reports). */
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
    const char *name;   /* of this node, for people */
    uint64_t node;      /* this process's incarnation id; not 0 */
    struct str secret;  /* empty: none (the caller then listens on loopback only) */
    uint32_t lost_ms;   /* default 2,500 when 0 */
    uint32_t forget_ms; /* an address learned this long ago and without a link is forgotten;
                         * default 60,000 when 0 */
    size_t queue_bytes; /* most bytes waiting for one peer; default 64 MiB when 0 */
    struct metrics *metrics;
    void (*on_message)(void *arg, const struct cluster_message *m);
    void (*on_lost)(void *arg, uint64_t node, const char *why);
    /* What PING says; may be NULL. */
    void (*progress)(void *arg, uint64_t *counter, bool *has_work);
    void *arg;
};

enum status cluster_create(const struct cluster_options *o, struct cluster **out,
                           struct err *err) MUST_CHECK;
void cluster_free(struct cluster *c);
uint16_t cluster_port(const struct cluster *c);

/* Where a node is reached; remembered until it is lost, or for forget_ms when there is no link.
 * Needed before the first send to it unless it has connected to us. */
void cluster_learn(struct cluster *c, uint64_t node, const char *host, uint16_t port);
bool cluster_knows(const struct cluster *c, uint64_t node);
/* Queue one message. ERR_PEER_LOST: unknown node, or its link just failed (on_lost follows or
 * came); ERR_FULL: queue_bytes. */
enum status cluster_send(struct cluster *c, uint64_t node, enum frame_type type, uint64_t request,
                         uint32_t attempt, struct str body) MUST_CHECK;
/* Cut the links to a node that cannot be given what it waits for (its queue is full): on_lost
 * follows on both sides, and what hangs on the missing message is done again. */
void cluster_disconnect(struct cluster *c, uint64_t node, const char *why);
/* Pack and send a protobuf-c message; frees nothing of it. */
struct ProtobufCMessage;
enum status cluster_send_proto(struct cluster *c, uint64_t node, enum frame_type type,
                               uint64_t request, uint32_t attempt,
                               const struct ProtobufCMessage *body) MUST_CHECK;

#endif
