/* conn.h - one connection of the ucx row: its worker, its endpoint, the puts under way, the
 * messages that wait for them.
 *
 *   outgoing  CONNECTING ── control OPENED: RAIL ──▶ EXCHANGING ── ADDRESS.., REGION ──▶ WIREUP ── mark 1 sent and flushed: READY ──▶ UP ──▶ DOWN
 *   incoming  ACCEPTED ── RAIL came: ADDRESS.., REGION ── READY and mark 1 came ──▶ UP ──▶ DOWN
 *
 * One rail (setup.h), chosen by the dialler; one that fails is avoided by the next connection. The
 * dialler makes its worker while the other side makes its own. Each of the steps may take
 * KVT_CONNECT_MS. A connection whose puts all rest for UCX_STALL_MS, or which is told of puts whose
 * mark does not come for twice as long, ends: transfers fail and are made again over the next one.
 * Earlier, when this side's port is down, or when UCX itself gives up: where its transport counts
 * retries (setup.c).
 *
 * Ordering (transport.h guarantee 2). A put is ucp_put_nbx per copy and one ucp_ep_flush_nbx behind
 * them. When the flush is complete the copies "are completed both at the origin and at the target"
 * (ucp.h, ucp_ep_flush_nbx), their sources are not read any more (PUT_DONE), and a mark, the number
 * of that put, leaves as an active message on the same endpoint. The receiver hands a message out
 * when the mark it names (`after` of its frame) has come. Why its CPU then sees the bytes:
 *   rc, dc   the mark is a SEND behind the RDMA WRITEs on one queue pair; InfiniBand Architecture
 *            Specification Vol. 1, 9.5 (o9-20): the contents of an RDMA WRITE may be relied on once
 *            a subsequent SEND has completed at the responder. Should UCX carry active messages
 *            over another device than puts, the acknowledged writes and UCX's promise above remain.
 *   ud, tcp  puts are written by the receiving worker itself, in ucp_worker_progress, on the thread
 *            that then hands out the message.
 * PCIe relaxed ordering is off (setup.c), so that nothing passes between NIC and memory either. A
 * card's memory lies behind another path than the mark: before it is read the row asks the card to
 * let it be seen (ucx.c, ucx_flush).
 *
 * Fence: a worker belongs to one connection. Destroying it destroys its queue pairs and sockets; a
 * packet for a queue pair that does not exist is dropped by the NIC (ibid. 10.2.4.4, 9.6), and
 * software-placed puts need a worker that makes progress. The key of the pool is shared by all
 * connections; without a queue pair it opens nothing. LIMIT: UCX parses keys, addresses and packets
 * of an admitted peer without checks of ours, and its key also allows reading the pool: peers that
 * hold a ticket are trusted not to attack. LIMIT: on Soft-RoCE, whose queue pairs fail when a
 * packet cannot be routed, a port that goes down in the tenths of a second in which UCX wires up
 * over its UD queue pair ends the process: UCX 1.13 takes that pair's flushed receives for fatal
 * (uct_ud_verbs). No connection is begun over a port that is down; the queue pairs of cards survive
 * it. Thread: transfer. */
#ifndef BATON_KVTRANSFER_UCX_CONN_H
#define BATON_KVTRANSFER_UCX_CONN_H

#include "kvtransfer/connect/control.h"
#include "kvtransfer/ucx/setup.h"
#include "shared/base/list.h"

enum {
    UCX_PUTS_MAX = 32,              /* per connection, what one session has at most */
    UCX_IN_FLIGHT_BYTES = 32 << 20, /* from which on no put is taken: an abandoned transfer waits
                                     * for these and one put */
    UCX_COPY_BYTES = 2 << 20, /* of one request: its end shows that the connection moves, on a slow
                               * link too */
    UCX_STALL_MS = 2000,
    UCX_PORT_DOWN_MS = 300, /* the same while this side's port is down; shorter breaks are for the
                             * queue pair's retries */
    UCX_HELD_MAX = 4096,    /* messages that wait for a mark; a sender has at most UCX_PUTS_MAX puts
                             * to wait for */
    UCX_AM_PUT_SEQ = 0,     /* of the active message */
    UCX_PROGRESS_CALLS = 64 /* progress calls per connection and poll, so that connections
                             * share the thread */
};

enum ucx_state { UCX_CONNECTING, UCX_EXCHANGING, UCX_WIREUP, UCX_ACCEPTED, UCX_UP, UCX_DOWN };
/* RAIL has the number as four bytes, little-endian; READY has nothing. */
enum ucx_frame {
    UCX_FRAME_ADDRESS = 1,
    UCX_FRAME_REGION,
    UCX_FRAME_READY,
    UCX_FRAME_MESSAGE,
    UCX_FRAME_RAIL
};

struct ucx_put {
    struct ucx_conn *c;
    uint64_t tag, bytes;
    uint32_t n_pending; /* requests of it that are not complete, its flush among them */
};

struct ucx_held {
    uint64_t after;
    struct kvt_message message;
};

struct ucx_conn {
    struct kvt_conn base;
    struct ucx_transport *t;
    struct list link;
    enum ucx_state state;
    bool detached;                /* the session layer knows that it ended */
    bool ready;                   /* ACCEPTED: READY came */
    bool armed;                   /* the worker's descriptor tells when there is something to
                                   * do */
    struct control_conn *control; /* NULL when closed */
    struct ucx_rail *rail;        /* NULL until one is chosen */
    uint64_t deadline_ms, need_bytes;
    struct buf address; /* EXCHANGING: of the peer's worker, so far */
    ucp_worker_h worker;
    int event_fd; /* of the worker, which owns it; -1 */
    ucp_ep_h ep;
    ucp_rkey_h key;
    uint64_t remote_base;
    ucs_status_t failed; /* UCS_OK, or why the endpoint is of no use any more */
    bool moved;          /* a request was completed, or a mark came, since
                          * progress_ms was set last */
    uint64_t progress_ms;
    /* sender */
    uint64_t n_put, n_flushed;         /* puts taken; puts landed. Number 1 is no put but the
                                        * end of wiring */
    uint64_t in_flight;                /* bytes of those between them */
    struct ucx_put puts[UCX_PUTS_MAX]; /* number n at [n % UCX_PUTS_MAX] */
    uint64_t seq_sent, seq_buf;        /* last one sent; the one being sent, stable until its
                                        * request is complete */
    bool seq_pending;
    /* receiver */
    uint64_t seq_received; /* highest mark that came */
    struct ucx_held *held; /* ring of UCX_HELD_MAX, allocated with the first */
    uint32_t held_head, n_held;
};

/* A worker of c->rail with its descriptor and mark handler. ERR_IO. */
enum status ucx_conn_worker(struct ucx_conn *c, struct err *err) MUST_CHECK;
/* Send this side's worker address and region. ERR_IO, ERR_PEER_LOST. */
enum status ucx_conn_send_address(struct ucx_conn *c, const struct dev_mem *pool,
                                  struct err *err) MUST_CHECK;
/* Make the endpoint to the address learned and begin wiring. ERR_FORMAT, ERR_PEER_MISMATCH,
 * ERR_IO. */
enum status ucx_conn_wireup(struct ucx_conn *c, const struct ucx_region *r,
                            struct err *err) MUST_CHECK;
/* Begin a put; the caller has checked for room and for UP. Failures show in c->failed. */
void ucx_conn_put(struct ucx_conn *c, const struct kvt_env *env, const struct kvt_put *p);
/* Progress; then puts that have landed are counted, their tags written to `done`, and a mark goes
 * out. Returns how many tags. */
size_t ucx_conn_progress(struct ucx_conn *c, uint64_t done[UCX_PUTS_MAX]);
/* To be asked every now and then: has UCX left puts and marks, or an incoming connection's
 * messages, waiting for so long that it is of no use? */
bool ucx_conn_is_stalled(struct ucx_conn *c, uint64_t now_ms);
/* Make the descriptor tell; false: there is more to do now. */
bool ucx_conn_arm(struct ucx_conn *c);
/* Close the endpoint by force and destroy the worker: afterwards no source is read and no write of
 * the peer lands. Not inside a callback. */
void ucx_conn_tear_down(struct ucx_conn *c);

#endif
