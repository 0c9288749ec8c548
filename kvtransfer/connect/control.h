/* control.h - the TCP connection next to a peer's queue pairs: tickets, set-up, messages, and
 * notice of the peer's death. Used by rdma and ucx.
 *
 * A hub listens on one port and owns all connections of one transport. After the ticket preambles
 * of wire.h a connection carries frames: a header of 16 bytes and a body of at most
 * CONTROL_BODY_MAX bytes, whose content belongs to the transport.
 *
 *   outgoing  CONNECTING ── ticket ──▶ WAITING ── WELCOME ──▶ OPEN ──▶ LOST
 *   incoming  HANDSHAKE ── ticket admitted: WELCOME ──▶ OPEN ──▶ LOST
 *
 * Thread: transfer (control_open: the creator's, it may resolve names); nothing blocks. Call
 * control_poll about every 50 ms for its deadlines, even if control_wait_fd is not readable. */
#ifndef BATON_KVTRANSFER_CONNECT_CONTROL_H
#define BATON_KVTRANSFER_CONNECT_CONTROL_H

#include "kvtransfer/transport.h"

enum { CONTROL_HEAD_BYTES = 16, CONTROL_BODY_MAX = 4096, CONTROL_IN_BYTES = 16 * 1024 };

/* Invariants
 *  1 CONTROL_OPENED comes only after env->admit accepted the ticket (incoming) or WELCOME arrived
 *    (outgoing), within KVT_CONNECT_MS.
 *  2 Frames arrive whole, in order, exactly once, or the connection is LOST.
 *  3 A peer is LOST as soon as its kernel reports the end of its process, and within 3 s if its
 *    host is gone (keepalive, user timeout).
 *  4 A connection that was never announced causes no event: wrong tickets end silently. A full
 *    descriptor table (EMFILE) pauses accepting for a moment.
 *  5 Memory is bounded: KVT_QUEUE_LIMIT and one frame out, CONTROL_IN_BYTES in, per connection;
 *    env->max_peers connections, and incoming ones without an admitted ticket in places of their
 *    own (unproven.h): strangers keep no peer out.
 *  6 A connection reports LOST at most once and nothing after it; after control_close it reports
 *    nothing. */

/* One frame on the wire, little-endian: magic u16, kind u8, zero u8, length u32 (of the body),
 * after u64, body. */
struct control_frame {
    uint8_t kind;
    uint64_t after;
    struct str body; /* borrowed from the input */
};

/* Decodes the first frame of in[n], which may be any bytes. OK: *used is its size; ERR_BUSY: a
 * valid but incomplete frame; ERR_FORMAT: not a frame. */
enum status control_frame_decode(const void *in, size_t n, struct control_frame *out,
                                 size_t *used) MUST_CHECK;
/* Appends a frame; n <= CONTROL_BODY_MAX. */
void control_frame_encode(struct buf *out, uint8_t kind, uint64_t after, const void *body,
                          size_t n);

struct control_hub;

struct control_conn {
    struct control_hub *hub;
    bool incoming;
    void *owner; /* the transport's; NULL until it sets it */
};

enum control_event_kind {
    CONTROL_OPENED, /* both directions may send; incoming ones appear here for the first time */
    CONTROL_FRAME,
    CONTROL_LOST /* never came up, ended, or broke the format; status and text say why.
                  * control_close frees it */
};

struct control_event {
    enum control_event_kind kind;
    struct control_conn *conn;
    uint8_t frame;   /* FRAME: kind, the transport's */
    uint64_t after;  /* FRAME: the transport's */
    struct str body; /* FRAME: valid during the call */
    enum status status;
    char text[120];
};

/* Called from control_poll. It may call every function except control_poll and control_hub_free,
 * also for this connection. */
typedef void control_handler(void *arg, const struct control_event *ev);

/* `transport` names the transport in sentences; it, `env` and `ifname` are borrowed until
 * control_hub_free. `port` 0: any. With `ifname` connections leave from that interface's address,
 * which is also listened on if env->listen_host is a wildcard (kvt_listener); NULL or "": none.
 * ERR_CONFIG: port taken, no such address or interface. */
enum status control_open(const struct kvt_env *env, const char *transport, uint16_t port,
                         const char *ifname, struct control_hub **out, struct err *err) MUST_CHECK;
void control_hub_free(struct control_hub *h); /* closes all connections, without events */
int control_wait_fd(const struct control_hub *h);
uint16_t control_port(const struct control_hub *h);
/* "address port", numeric, as peers should use it (address.h). */
struct str control_address(const struct control_hub *h);
bool control_can_reach(struct str address);
/* OPENED or LOST follows exactly when OK. ERR_FORMAT (address), ERR_FULL (env->max_peers),
 * ERR_PEER_LOST. */
enum status control_connect(struct control_hub *h, struct str address,
                            const uint8_t ticket[KVT_TICKET_BYTES], void *owner,
                            struct control_conn **out, struct err *err) MUST_CHECK;
/* Queues a frame; copies `body`. ERR_FULL: KVT_QUEUE_LIMIT bytes are waiting, nothing was queued.
 * ERR_INVALID: n > CONTROL_BODY_MAX. ERR_PEER_LOST: not OPEN; LOST was or will be reported, unless
 * the connection is still being set up. */
enum status control_send(struct control_conn *c, uint8_t frame, uint64_t after, const void *body,
                         size_t n) MUST_CHECK;
size_t control_queued(const struct control_conn *c); /* bytes not taken by the kernel yet */
void control_poll(struct control_hub *h, control_handler *on_event, void *arg);
/* Closes the connection; no event follows and `c` is invalid. Queued frames still go out if the
 * peer reads them within a second. */
void control_close(struct control_conn *c);
/* Local and remote address of the connection, for choosing a device and a GID. */
struct sockaddr_storage;
void control_addresses(const struct control_conn *c, struct sockaddr_storage *local,
                       struct sockaddr_storage *remote);

#endif
