/* rail.h - a rail: a local and a remote RDMA port with queue pairs between them, and its states.
 * Thread: transfer.
 *
 *   sender    DOWN ─ the pause is over: OFFER ─▶ OFFERED ─ ACCEPT: probe posted ─▶ PROBING
 *             PROBING ─ probe acknowledged ─▶ UP ─ error, port lost, no progress: BROKEN ─▶ FENCING
 *             FENCING ─ FENCED: puts that did not complete are posted again ─▶ DOWN
 *             OFFERED, PROBING ─ REFUSE, error, too long ─▶ DOWN
 *   receiver  DOWN ─ OFFER: queue pairs ready, MWs requested ─▶ BINDING ─ all bound: ACCEPT ─▶ UP
 *             UP ─ error, port lost, BROKEN ─▶ DRAINING ─ flushed: FENCED ─▶ DOWN
 *             BINDING ─ error: REFUSE ─▶ DOWN
 * With BATON_RDMA_CM (cm.h) a receiver in BINDING first answers INVITE. The sender, still OFFERED,
 * has librdmacm connect each queue pair; the receiver requests its memory window (MW) when it has
 * accepted it. */
#ifndef BATON_KVTRANSFER_RDMA_RAIL_H
#define BATON_KVTRANSFER_RDMA_RAIL_H

#include "kvtransfer/rdma/qp.h"

struct rdma_conn;

enum {
    RDMA_SETUP_MS = 1500, /* OFFER to probe acknowledged */
    RDMA_STALL_MS = 2000, /* a queue pair whose oldest put is not acknowledged for so long is
                           * broken, whatever the device reports */
    RDMA_DRAIN_MS = 1000,
    RDMA_DISCONNECT_MS = 100 /* BATON_RDMA_CM: a peer that leaves disconnects before it ends its
                              * control connection; that is not a broken rail */
};

enum rdma_rail_state {
    RDMA_RAIL_DOWN,
    RDMA_RAIL_OFFERED,
    RDMA_RAIL_PROBING,
    RDMA_RAIL_BINDING,
    RDMA_RAIL_UP,
    RDMA_RAIL_FENCING,
    RDMA_RAIL_DRAINING
};

struct rdma_rail {
    struct rdma_conn *conn;
    struct rdma_transport *t;
    uint32_t index, epoch, my_port, their_port;
    enum rdma_rail_state state;
    struct ibv_cq *cq; /* of all its queue pairs, so that completions die with them */
    struct ibv_pd *pd; /* of region keys; NULL otherwise */
    struct ibv_mr *region;
    struct list link; /* t->ready while completions may wait */
    struct rdma_qp qps[RDMA_QPS_MAX];
    uint32_t n_qps, n_failed, mtu, send_wrs, max_inline, max_sge;
    bool incoming;                   /* the receiver's half */
    bool unfenced;                   /* a queue pair could neither be moved to the error state nor
                                      * destroyed: it may still write */
    bool reads;                      /* receiver: the sender may read */
    bool accepted;                   /* sender: ACCEPT came, of this epoch */
    uint8_t token[RDMA_TOKEN_BYTES]; /* receiver, BATON_RDMA_CM, BINDING: needed to connect */
    uint64_t deadline_ms;            /* OFFERED, PROBING, BINDING, DRAINING; DOWN of a sender: when
                                      * to try again */
    uint64_t disconnected_ms;        /* UP: when the connection manager reported that the peer has
                                      * disconnected; 0: it has not */
    uint64_t bytes_per_s;
    uint8_t gid[16]; /* its own */
    uint16_t lid;
    char why[RDMA_REASON_MAX + 1]; /* the reason that it is not up */
};

void rdma_rail_on_offer(struct rdma_conn *c, const struct rdma_rail_info *m);
void rdma_rail_on_accept(struct rdma_rail *r, const struct rdma_rail_info *m);
void rdma_rail_on_invite(struct rdma_rail *r, const struct rdma_invite *m);
/* Called when the connection manager has connected q. */
void rdma_rail_connected(struct rdma_qp *q);
/* Called when it reports that the peer has disconnected one of r's queue pairs. */
void rdma_rail_disconnected(struct rdma_rail *r);
void rdma_rail_on_status(struct rdma_rail *r, enum rdma_frame frame,
                         const struct rdma_rail_status *m);
/* Looks up the current address of r's port (rdma_qp_port_addr); r uses it from now on. On
 * failure r->why has the reason. */
enum status rdma_rail_update_addr(struct rdma_rail *r, struct rdma_port_addr *out,
                                  uint8_t *gid_index) MUST_CHECK;
/* Moves all queue pairs of r to the error state. If r was UP, a sender sends BROKEN and a receiver
 * begins to drain. */
void rdma_rail_break(struct rdma_rail *r, const char *why);
/* Polls and handles completions; true if there were any. */
bool rdma_rail_poll(struct rdma_rail *r);
void rdma_rail_tick(struct rdma_rail *r, uint64_t now_ms);
/* Whether at least one rail of c is up. */
bool rdma_any_rail_is_up(const struct rdma_conn *c);

#endif
