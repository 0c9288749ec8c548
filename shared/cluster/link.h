/* link.h - one TCP connection to another node: handshake, frames, liveness.
 *
 *   dialing side                                accepting side
 *   CONNECTING ─ connected ─▶ LINK_HELLO ──▶    HELLO: checks protocol and incarnation
 *   PROVING  ◀── LINK_PROOF (nonce, mac)        PROVING
 *            checks mac, LINK_PROOF (mac) ──▶   checks mac
 *   UP       ◀── LINK_READY                     UP
 *
 * mac = HMAC-SHA256(secret, side || dialer's nonce || acceptor's nonce || dialer's id || acceptor's
 * id): it is valid for these two processes and this connection only. Nothing but the handshake is
 * parsed before UP, and an accepted link leaves its `place` (unproven.h) when it comes UP. A failed
 * link is marked dead at once; its owner closes it in the next turn of the loop, so that callers
 * deep in a callback never see freed memory. Thread: loop. Owner: struct cluster. */
#ifndef BATON_CLUSTER_LINK_H
#define BATON_CLUSTER_LINK_H

#include "shared/base/address/host_port.h"
#include "shared/base/address/unproven.h"
#include "shared/base/list.h"
#include "shared/cluster/frame.h"
#include "shared/net/loop.h"

/* The name that `baton doctor` and `baton bench` give themselves: they come, ask and go. */
#define LINK_PROBE_NAME "doctor"

enum link_state { LINK_CONNECTING, LINK_HELLO, LINK_PROVING, LINK_UP };
enum {
    LINK_NONCE = 16,
    LINK_NAME_MAX = 64,
    LINK_CONNECT_MS = 1000, /* the peer's kernel answers, however busy the peer is */
    LINK_HANDSHAKE_MS = 3000
};

struct link;

/* This node's side of all links, borrowed while links live. */
struct link_options {
    struct loop *loop;
    uint64_t self;
    const char *name;
    struct str secret;
    size_t queue_bytes;
    void (*on_up)(void *arg, struct link *l);
    void (*on_frame)(void *arg, struct link *l, const struct frame_header *h, struct str body);
    /* The link just died; close it soon. Called once. */
    void (*on_dead)(void *arg, struct link *l);
    void *arg;
};

struct link {
    const struct link_options *o;
    uv_tcp_t tcp;
    uv_connect_t connect;
    enum link_state state;
    bool dialed, dead, closing;
    bool has_ended;           /* the peer closed it */
    bool meets;               /* dialed by cluster_meet: whoever answers is right */
    uint32_t purpose;         /* of that */
    bool proved;              /* the peer's mac was right */
    uint64_t node;            /* the peer's incarnation; while dialing the wanted one */
    char name[LINK_NAME_MAX]; /* as the peer calls itself; before that the address it came from */
    /* The peer's: dialed with the port; else without, which is another one each time. */
    char address[HOST_PORT_TEXT_MAX];
    uint64_t source;             /* of an accepted link's address (unproven.h) */
    struct unproven_place place; /* the owner's, among those that are not UP */
    uint8_t nonce_dialer[LINK_NONCE], nonce_acceptor[LINK_NONCE];
    struct buf in; /* bytes of an incomplete frame */
    uint64_t t_start_ms, t_heard_ms;
    uint64_t progress;      /* of the peer's engine, from PING */
    uint64_t t_progress_ms; /* when it moved, or had no work */
    bool has_work;
    bool leaves;        /* the peer has said that its process ends */
    char why[160];      /* reason of death */
    const char *reason; /* its part that no peer can choose */
    struct list link;   /* cluster.links */
};

/* Starts to connect; on_dead reports failures. */
struct link *link_dial(const struct link_options *o, uint64_t node, const char *address,
                       uint16_t port);
struct link *link_accept(const struct link_options *o, uv_stream_t *listener);
/* Queues one frame. ERR_FULL: queue_bytes are waiting; ERR_PEER_LOST: the link is dead. */
enum status link_send(struct link *l, const struct frame_header *h, struct str body) MUST_CHECK;
/* fmt is kept. */
void link_fail(struct link *l, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Closes and frees the link; no callback comes after this. */
void link_close(struct link *l);

#endif
