/* rdma.h - RDMA WRITEs over reliable connections (libibverbs), and what its files share.
 *
 * One connection is a control connection (control.h: ticket, set-up, messages, word of the peer's
 * death) and rails: pairs of a local and a remote port, each with some queue pairs. A put goes to
 * one queue pair; its last work request is an RDMA WRITE WITH IMMEDIATE that carries the put's
 * number. Messages go over the control connection and say how many puts were made before them.
 *
 * Why a message is seen only after the puts before it have landed 1 The receiver hands a message on
 *  when the immediates of all earlier puts were polled (recv_window.h), so it is enough that the
 *  bytes of a put
 *    are visible to this CPU when its immediate's completion is.
 *  2 On one queue pair the responder executes requests in the order they were posted, and the
 *    receive that an RDMA WRITE with immediate consumes completes after the bytes of that write and
 *    of every earlier one (IBA vol. 1, 9.5 "Transaction ordering"; ibv_post_send(3)).
 *  3 The device writes that completion to host memory too. PCIe keeps posted writes in order unless
 *    they carry the relaxed-ordering bit (PCI Express base specification, "Transaction ordering").
 *    A region registered with IBV_ACCESS_RELAXED_ORDERING may set it on its data, not on
 *    completions, so a completion still comes after its data: Linux relies on it, its own users
 *    "read data only after observing the CQE" (include/rdma/ib_verbs.h). What it does give up, the
 *    order of two writes before their completions, nobody here looks at.
 *  4 Polling reads the completion before anything the device wrote earlier: every provider has a
 *    barrier for it (rdma-core, util/udma_barrier.h, udma_from_device_barrier).
 *  5 Different queue pairs are not ordered among each other: hence (1) counts every put by itself.
 *
 * A rail, sender                                              receiver
 *   DOWN ── its rest is over: OFFER ──▶ OFFERED                 DOWN ── OFFER: queue pairs ready, windows asked for ──▶ BINDING
 *   OFFERED ── ACCEPT: probe posted ──▶ PROBING                 BINDING ── all bound: ACCEPT ──▶ UP
 *   PROBING ── probe acknowledged ──▶ UP                        UP ── error, port lost, BROKEN ──▶ DRAINING
 *   UP ── error, port lost, no progress: BROKEN ──▶ FENCING     DRAINING ── flushed: FENCED ──▶ DOWN
 *   FENCING ── FENCED: puts that had not landed go elsewhere ──▶ DOWN
 *   OFFERED, PROBING ── REFUSE, error, too long ──▶ DOWN        BINDING ── error: REFUSE ──▶ DOWN
 * With BATON_RDMA_CM (cm.h) a receiver in BINDING answers INVITE first; the sender, still OFFERED,
 * has librdmacm connect each queue pair, and the receiver asks for a queue pair's window when it
 * has accepted it. ACCEPT and all of them connected, in either order: the probe.
 *
 * Invariants 1 A completion with an error status never counts as done: it ends its queue pair, and
 *  with it the rail. 2 A put is posted again only after the receiver has said that its half of the
 *  old rail is in the error state: nothing late can land. 3 PUT_DONE is told after the signalled
 *  completion of the put's last work request, or after its queue pair was destroyed. 4 Work
 *  requests posted and not known to be complete never exceed a queue pair's depth; puts in flight
 *  never exceed the receives posted for
 *    them (RDMA_WINDOW on each queue pair), so there is no receiver-not-ready.
 *  5 A peer's key is a type 2 memory window of one queue pair, or a region in a protection domain
 *  of that connection; it ends with the rail.
 * Thread: transfer. */
#ifndef BATON_KVTRANSFER_RDMA_RDMA_H
#define BATON_KVTRANSFER_RDMA_RDMA_H

#include <infiniband/verbs.h>

#include "kvtransfer/connect/control.h"
#include "kvtransfer/rdma/schedule.h"
#include "kvtransfer/transport.h"
#include "shared/base/list.h"

enum {
    RDMA_SGE_MAX = 8,           /* pieces of one work request; more make every entry of the send
                                 * queue larger */
    RDMA_SEND_WRS = 1024,       /* depth of a send queue: four puts of KVT_BATCH_PIECES copies that
                                 * do not join */
    RDMA_CHAIN_MAX = 64,        /* work requests per doorbell, */
    RDMA_CHAIN_BYTES = 2 << 20, /* and bytes, at which it ends: the end of each chain shows that the
                                 * queue pair moves, on a slow link too */
    RDMA_INLINE_BYTES = 64,     /* writes up to this are copied into the work request: one read of
                                 * host memory less */
    RDMA_QP_IN_FLIGHT_BYTES = 16 << 20, /* in flight per queue pair, from which on it takes no put:
                                         * what 3 GB/s times 5 ms needs. Not a put more than fits:
                                         * large ones would wait for ever behind small ones. An
                                         * abandoned transfer waits for this and one put */
    RDMA_REPORT_EVERY = RDMA_WINDOW / 8,
    RDMA_QPS_DEFAULT = 2,
    RDMA_TIMEOUT_DEFAULT = 14, /* 67 ms */
    RDMA_RETRIES_DEFAULT = 7,
    RDMA_SETUP_MS = 1500, /* OFFER to probe acknowledged */
    RDMA_STALL_MS = 2000, /* a queue pair whose oldest put is not acknowledged for this long is
                           * broken, whatever the device thinks */
    RDMA_ALONE_MS = 3000, /* a connection without any rail lives this long */
    RDMA_DRAIN_MS = 1000,
    RDMA_DISCONNECT_MS = 100, /* BATON_RDMA_CM: a peer that leaves hangs up first, and then ends
                               * its control connection: that is no broken rail */
    RDMA_TICK_MS = 20,
    RDMA_HELD_BYTES = 4 << 20 /* messages that wait for puts; a peer that sends more is dropped */
};

/* What the operator set, or what this row chooses. */
static inline uint8_t rdma_timeout(const struct kvt_rdma_tuning *t)
{
    return t->timeout ? t->timeout : RDMA_TIMEOUT_DEFAULT;
}
static inline uint8_t rdma_retries(const struct kvt_rdma_tuning *t)
{
    return t->retries ? t->retries : RDMA_RETRIES_DEFAULT;
}

struct rdma_cm;
struct rdma_cm_id;

/* A device in use: one context, shared by its ports. */
struct rdma_device {
    struct rdma_transport *t;
    const struct rdma_port *port; /* any of its ports: limits are the device's */
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    struct ibv_mr *pool, *staging, *scratch; /* staging NULL when there is none; scratch
                                              * only for reads */
    struct ibv_comp_channel *channel;
    bool windows, dead; /* dead: the kernel has taken it away */
    bool on_demand;     /* memory is paged in as the device touches it, not
                         * locked; windows cannot be bound to it (mlx5) */
};

/* A port in use. */
struct rdma_local_port {
    struct rdma_device *device;
    struct rdma_port *port; /* in t->ports */
    bool active;
};

enum rdma_put_state { RDMA_PUT_FREE, RDMA_PUT_UNASSIGNED, RDMA_PUT_ON_QP, RDMA_PUT_ACKED };

/* Only verify_read goes through all three; otherwise the immediate is posted in WRITE. */
enum rdma_phase { RDMA_PHASE_WRITE, RDMA_PHASE_READ, RDMA_PHASE_NOTIFY };

struct rdma_put {
    enum rdma_put_state state;
    struct list link; /* qp->puts or conn->homeless, in order of number */
    uint64_t number, tag, generation, bytes;
    uint32_t session, n_copies, cap_copies;
    uint32_t i_copy;        /* first copy not posted completely ... */
    uint64_t copy_at;       /* ... and how much of it is */
    bool posted, abandoned; /* posted: all of it, its immediate too */
    bool waits;             /* verify_read: for the completion of what is posted */
    enum rdma_phase phase;
    uint64_t read_at;        /* READ: bytes of the scratch that are spoken for */
    struct kvt_copy *copies; /* kept by the slot */
    uint32_t rail, epoch;    /* that carried it last */
};

struct rdma_qp {
    struct rdma_rail *rail;
    struct ibv_qp *qp; /* NULL: none */
    struct ibv_mw *window;
    struct rdma_cm_id *id; /* BATON_RDMA_CM: what connected it; NULL: nothing did */
    uint32_t peer;         /* number of its other half */
    uint32_t psn, key;     /* key: sender: the peer's; receiver: the one it gave */
    uint64_t base;         /* sender: address of the receiver's pool */
    struct list puts;      /* assigned and not acknowledged, oldest first */
    struct rdma_put *next; /* of them, the first not posted completely; NULL: none */
    uint64_t in_flight;
    uint32_t n_wrs;    /* of the send queue, not known to be complete */
    uint32_t n_recvs;  /* receives posted */
    uint64_t moved_ms; /* last progress while there was something to do */
    bool connected;    /* ready to receive and to send */
    bool ready;        /* probe acknowledged; window bound */
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
    uint32_t index, epoch, my_port, their_port;
    enum rdma_rail_state state;
    struct ibv_cq *cq; /* of all its queue pairs, so that completions die with them */
    struct ibv_pd *pd; /* of region keys; NULL otherwise */
    struct ibv_mr *region;
    struct list link; /* t->ready while completions may wait */
    struct rdma_qp qps[RDMA_QPS_MAX];
    uint32_t n_qps, n_failed, mtu, send_wrs, max_inline, max_sge;
    bool reads;                      /* receiver: the sender may read */
    bool accepted;                   /* sender: ACCEPT came, of this epoch */
    uint8_t token[RDMA_TOKEN_BYTES]; /* receiver, BATON_RDMA_CM: who shows it may
                                      * connect, while BINDING */
    uint64_t deadline_ms;            /* OFFERED, PROBING, BINDING, DRAINING; DOWN of a sender: when
                                      * to try again */
    uint64_t disconnected_ms;        /* UP: the connection manager says that the peer has
                                      * disconnected; 0: it has not */
    uint64_t bytes_per_s;
    uint8_t gid[16]; /* it speaks from */
    uint16_t lid;
    char why[RDMA_REASON_MAX + 1]; /* it is not up */
};

enum rdma_conn_state { RDMA_CONN_OPENING, RDMA_CONN_UP, RDMA_CONN_DOWN };

struct rdma_conn {
    struct kvt_conn base;
    struct rdma_transport *t;
    struct list link;
    struct control_conn *control; /* NULL after it was lost */
    enum rdma_conn_state state;
    bool handshaken, detached; /* handshaken: HELLO came; detached: no incidents any more */
    bool unfenced;             /* a queue pair could neither be put into error nor
                                * destroyed: nobody knows what it still writes */
    bool failed;               /* to be ended by the next poll, for: */
    enum status status;
    char text[120];
    uint64_t opened_ms, last_up_ms; /* last_up: a rail was up */
    uint64_t need_bytes;            /* outgoing: what the receiver's pool must have */
    struct rdma_hello theirs;
    struct rdma_rail rails[RDMA_RAILS_MAX];
    uint32_t n_rails;
    /* sender */
    struct rdma_put puts[RDMA_WINDOW]; /* by number modulo */
    uint64_t issued, acked, reported;  /* numbers: next; all below are acknowledged;
                                        * the receiver has said landed */
    struct list unassigned;
    /* receiver */
    struct rdma_recv_window recv_window;
    uint64_t last_reported; /* recv_window.completed as last reported */
    struct buf held;        /* messages that wait: u64 after, u32 length, bytes */
    size_t held_at;
};

/* What poll has found and the session layer has not taken yet. */
struct rdma_event_queue {
    struct kvt_transport_event *v; /* ring; grows */
    size_t cap, head, n;
    struct kvt_transport_event discarded;
};

struct rdma_transport {
    struct kvt_transport base;
    const struct kvt_env *env;
    struct control_hub *hub;
    struct rdma_cm *cm; /* NULL: queue pairs are connected with what control connections
                         * carry */
    int epoll_fd;
    struct rdma_devices ports;
    struct rdma_device devices[RDMA_RAILS_MAX];
    struct rdma_local_port local_ports[RDMA_RAILS_MAX]; /* one per port */
    uint32_t n_devices;
    struct list conns, ready;
    uint32_t n_conns;
    uint64_t ticked_ms;
    struct rdma_event_queue event_queue;
    char *scratch; /* flush_read: a few bytes; verify_read: a put's */
    size_t scratch_bytes;
    struct ibv_send_wr wrs[RDMA_CHAIN_MAX + 2];
    struct ibv_sge sges[(RDMA_CHAIN_MAX + 2) * RDMA_SGE_MAX];
    struct ibv_recv_wr recvs[RDMA_WINDOW];
};

/* ---- memory.c: devices, regions, windows ---- */

/* Open the devices of t->ports and register the pool (and staging) with each, once. ERR_CONFIG:
 * locked memory too small; ERR_NODEV. */
enum status rdma_memory_open(struct rdma_transport *t, struct err *err) MUST_CHECK;
void rdma_memory_close(struct rdma_transport *t);
/* The protection domain for the queue pairs of a rail: the device's, or (receiver, region keys) one
 * of the rail's own, with its region. */
enum status rdma_memory_domain(struct rdma_rail *r, bool reads, struct ibv_pd **out) MUST_CHECK;
/* Receiver: give q its key. With windows ERR_BUSY: the completion of the bind (wr_id kind BIND)
 * tells. Otherwise OK at once. */
enum status rdma_memory_grant(struct rdma_qp *q, bool reads) MUST_CHECK;
void rdma_memory_revoke(struct rdma_qp *q);       /* its queue pair is in error */
void rdma_memory_deregister(struct rdma_rail *r); /* after all of them are */
/* Key for the device to read [p, p + n) of this process. */
uint32_t rdma_memory_key(const struct rdma_device *d, uint64_t local);

/* ---- queue.c: queue pairs ---- */

/* Completion queue and n queue pairs in INIT; the receives of a receiver are posted. On failure
 * nothing is left; r->why says why. */
enum status rdma_queue_create(struct rdma_rail *r, uint32_t n, bool reads) MUST_CHECK;
/* To ready-to-receive and ready-to-send, towards the peer's half. */
enum status rdma_queue_connect(struct rdma_rail *r, const struct rdma_rail_info *theirs) MUST_CHECK;
/* One transition with the connection manager's attributes, in which what the operator set holds.
 * r->mtu is what it came to. */
enum status rdma_queue_transit(struct rdma_qp *q, struct ibv_qp_attr *a, int mask) MUST_CHECK;
void rdma_queue_error(struct rdma_rail *r);   /* nothing lands and nothing is read of new
                                               * requests; what is posted is flushed */
void rdma_queue_destroy(struct rdma_rail *r); /* nothing lands and nothing is read any
                                               * more */
enum status rdma_queue_receives(struct rdma_qp *q, uint32_t n) MUST_CHECK;
struct rdma_local_port *rdma_rail_local_port(const struct rdma_rail *r);
/* How the port is spoken to now: its GID may have changed. */
enum status rdma_queue_port_addr(struct rdma_conn *c, uint32_t port, struct rdma_port_addr *out,
                                 uint8_t *gid_index, struct err *err) MUST_CHECK;
/* The same for r, which speaks from there now; r->why. */
enum status rdma_queue_update_addr(struct rdma_rail *r, struct rdma_port_addr *out,
                                   uint8_t *gid_index) MUST_CHECK;

/* ---- rail.c: the states above ---- */

void rdma_rail_offer(struct rdma_rail *r);
void rdma_rail_on_offer(struct rdma_conn *c, const struct rdma_rail_info *m);
void rdma_rail_on_accept(struct rdma_rail *r, const struct rdma_rail_info *m);
void rdma_rail_on_invite(struct rdma_rail *r, const struct rdma_invite *m);
/* The connection manager has connected q. */
void rdma_rail_connected(struct rdma_qp *q);
/* It says that the peer has disconnected one of r's queue pairs. */
void rdma_rail_disconnected(struct rdma_rail *r);
void rdma_rail_on_status(struct rdma_rail *r, enum rdma_frame frame,
                         const struct rdma_rail_status *m);
/* Something of the rail is broken: the transition of its state for that. */
void rdma_rail_break(struct rdma_rail *r, const char *why);
/* Take what completions there are; true when any. */
bool rdma_rail_poll(struct rdma_rail *r);
void rdma_rail_tick(struct rdma_rail *r, uint64_t now_ms);
bool rdma_rail_is_up(const struct rdma_conn *c); /* any */

/* ---- events.c ---- */

/* Take what the device has to say: completion queues go to t->ready. */
void rdma_events_process(struct rdma_device *d);
/* The kernel has closed its descriptors: the device is gone, its rails are broken. */
void rdma_events_device_lost(struct rdma_device *d);

/* ---- puts.c: posting and completing ---- */

enum rdma_wr_kind { RDMA_WR_PUT, RDMA_WR_PROBE, RDMA_WR_BIND, RDMA_WR_RECV };
/* wr_id: kind, work requests up to this signalled one, slot of the put, was it the last of the
 * put. */
static inline uint64_t rdma_wr_id(enum rdma_wr_kind kind, uint32_t n_wrs, uint32_t slot, bool last)
{
    return (uint64_t)kind << 56 | (uint64_t)last << 48 | (uint64_t)n_wrs << 16 | slot;
}

/* The `put` slot. */
enum status rdma_puts_add(struct rdma_conn *c, const struct kvt_put *p);
void rdma_puts_abandon(struct rdma_conn *c, uint32_t session, uint64_t generation);
/* A signalled completion of q's puts came. */
void rdma_puts_completed(struct rdma_qp *q, uint64_t wr_id);
/* The rail was fenced; its queue pairs are gone: what has landed is done, the rest waits for
 * another rail. ERR_FORMAT: a put that was acknowledged never landed there. */
enum status rdma_puts_requeue(struct rdma_rail *r,
                              const struct rdma_recv_window *window) MUST_CHECK;
/* Give homeless puts to the rails that are up, and post what fits. */
void rdma_puts_pump(struct rdma_conn *c);
void rdma_puts_release(struct rdma_conn *c);

/* ---- conn.c: a connection's frames, messages and end ---- */

struct rdma_conn *rdma_conn_new(struct rdma_transport *t, struct control_conn *control,
                                bool incoming);
void rdma_conn_free(struct rdma_conn *c);
/* A place in the ring of incidents; of a connection that is silent, one that nobody reads. Valid
 * until the next. */
struct kvt_transport_event *rdma_conn_add_event(struct rdma_conn *c,
                                                enum kvt_transport_event_kind kind);
/* control_handler; `transport` is the struct rdma_transport. */
void rdma_conn_on_control(void *transport, const struct control_event *ev);
/* body NULL: none */
void rdma_conn_send(struct rdma_conn *c, enum rdma_frame frame, const struct buf *body);
enum status rdma_conn_notify(struct rdma_conn *c, const struct kvt_message *m);
void rdma_conn_up(struct rdma_conn *c); /* a rail is */
/* It cannot go on: remembered, and ended by the next poll, so that whoever is in the middle of it
 * can finish. The first reason stays. */
void rdma_conn_fail(struct rdma_conn *c, enum status st, const char *text);
/* Destroy its rails at once, so that nothing is read or written any more, and tell DOWN. One that
 * was never announced is freed. */
void rdma_conn_end(struct rdma_conn *c, enum status st, const char *text);
void rdma_conn_completed(struct rdma_conn *c, uint32_t immediate);
/* Receiver, after completions were taken: hand on what waited for them, and report when enough has
 * landed. */
void rdma_conn_report(struct rdma_conn *c);
/* Hand on held messages whose puts have landed (receiver) or are acknowledged (sender). */
void rdma_conn_release_held(struct rdma_conn *c);
void rdma_conn_tick(struct rdma_conn *c, uint64_t now_ms);

#endif
