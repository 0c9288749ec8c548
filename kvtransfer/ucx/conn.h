/* conn.h - one connection of transport ucx: its worker, its endpoint, puts in flight, and the
 * messages that wait for them.
 *
 *   outgoing  CONNECTING ─ control OPENED: RAIL ─▶ EXCHANGING ─ ADDRESS.., REGION ─▶ WIREUP
 *             WIREUP ─ marker 1 sent and flushed: READY ─▶ UP ─▶ DOWN
 *   incoming  ACCEPTED ─ RAIL: ADDRESS.., REGION; then READY and marker 1 ─▶ UP ─▶ DOWN
 *
 * The dialler chooses one rail (setup.h); the next connection avoids a rail that failed. Each step
 * may take KVT_CONNECT_MS. A connection ends if none of its puts progresses for UCX_STALL_MS, or if
 * a marker that messages wait for does not come for twice as long; its transfers fail and are made
 * again over the next one. It ends earlier if this side's port is down or UCX gives up (setup.c).
 * docs/kv-transfer.md says how markers order messages after puts, and what fences a peer.
 * Thread: transfer. */
#ifndef BATON_KVTRANSFER_UCX_CONN_H
#define BATON_KVTRANSFER_UCX_CONN_H

#include "kvtransfer/connect/control.h"
#include "kvtransfer/ucx/setup.h"
#include "shared/base/list.h"

enum {
    UCX_PUTS_MAX = 32,              /* per connection, what one session has at most */
    UCX_IN_FLIGHT_BYTES = 32 << 20, /* above this no put is accepted: an abandoned transfer waits
                                     * for these and one put */
    UCX_COPY_BYTES = 2 << 20, /* of one request: its end shows progress, even on a slow link */
    UCX_STALL_MS = 2000,
    UCX_PORT_DOWN_MS = 300, /* the same while this side's port is down; the queue pair's retries
                             * cover shorter breaks */
    UCX_HELD_MAX = 4096,    /* messages that wait for a marker; a sender has at most UCX_PUTS_MAX
                             * puts to wait for */
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
    uint32_t n_pending; /* its incomplete requests, including its flush */
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
    bool armed;                   /* the worker's descriptor reports work */
    struct control_conn *control; /* NULL when closed */
    struct ucx_rail *rail;        /* NULL until one is chosen */
    uint64_t deadline_ms, need_bytes;
    struct buf address; /* EXCHANGING: of the peer's worker, so far */
    ucp_worker_h worker;
    int event_fd; /* of the worker, which owns it; -1 */
    ucp_ep_h ep;
    ucp_rkey_h key;
    uint64_t remote_base;
    ucs_status_t failed; /* UCS_OK, or why the endpoint cannot be used any more */
    bool moved;          /* a request completed or a marker came since progress_ms was set */
    uint64_t progress_ms;
    /* sender */
    uint64_t n_put, n_flushed;         /* puts accepted; complete. Number 1 is the end of wiring */
    uint64_t in_flight;                /* bytes of those between them */
    struct ucx_put puts[UCX_PUTS_MAX]; /* number n at [n % UCX_PUTS_MAX] */
    uint64_t seq_sent, seq_buf;        /* last marker sent; the one being sent, stable until its
                                        * request is complete */
    bool seq_pending;
    /* receiver */
    uint64_t seq_received; /* highest marker that came */
    struct ucx_held *held; /* ring of UCX_HELD_MAX, allocated with the first */
    uint32_t held_head, n_held;
};

/* Creates a worker of c->rail with its descriptor and marker handler. ERR_IO.
 * LIMIT: UCX parses keys, addresses and packets of an admitted peer without checks of ours, and its
 * key also allows reading the pool: peers with a ticket are trusted not to attack.
 * LIMIT: on Soft-RoCE, whose queue pairs fail when a packet cannot be routed, a port that goes down
 * in the tenths of a second in which UCX wires up over its UD queue pair ends the process: UCX 1.13
 * takes that pair's flushed receives as fatal (uct_ud_verbs). No connection is begun over a port
 * that is down, and queue pairs of real NICs survive it. */
enum status ucx_conn_worker(struct ucx_conn *c, struct err *err) MUST_CHECK;

/* Sends this side's worker address and region. ERR_IO, ERR_PEER_LOST. */
enum status ucx_conn_send_address(struct ucx_conn *c, const struct dev_mem *pool,
                                  struct err *err) MUST_CHECK;
/* Creates the endpoint to the peer's address and begins to wire it up. ERR_FORMAT,
 * ERR_PEER_MISMATCH, ERR_IO. */
enum status ucx_conn_wireup(struct ucx_conn *c, const struct ucx_region *r,
                            struct err *err) MUST_CHECK;
/* Begins a put; the caller has checked for room and for UP. Failures are in c->failed. */
void ucx_conn_put(struct ucx_conn *c, const struct kvt_env *env, const struct kvt_put *p);
/* Progresses the worker, writes the tags of complete puts to `done` and sends a marker. Returns how
 * many tags. */
size_t ucx_conn_progress(struct ucx_conn *c, uint64_t done[UCX_PUTS_MAX]);
/* Whether puts and markers, or an incoming connection's messages, have waited for so long that the
 * connection must end. To be called every now and then. */
bool ucx_conn_is_stalled(struct ucx_conn *c, uint64_t now_ms);
/* Arms the descriptor. False: there is more work now. */
bool ucx_conn_arm(struct ucx_conn *c);
/* Closes the endpoint by force and destroys the worker: afterwards no source is read and the peer
 * cannot write. Not inside a callback. */
void ucx_conn_tear_down(struct ucx_conn *c);

#endif
