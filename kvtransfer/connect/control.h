/* control.h - the TCP connection beside the queue pairs of a peer: tickets, set-up, messages, and
 * word of its death. Used by rdma and ucx.
 *
 * A hub listens on one port and keeps all connections of one row. What crosses one connection,
 * after the ticket preambles of wire.h, is frames: a fixed head of 16 bytes (magic, kind, length,
 * `after`) and a body of at most CONTROL_BODY_MAX bytes, the row's own.
 *
 *   outgoing  CONNECTING ── ticket ──▶ WAITING ── WELCOME ──▶ OPEN ──▶ LOST
 *   incoming  HANDSHAKE ── ticket admitted: WELCOME ──▶ OPEN ──▶ LOST
 *
 * Invariants 1 No CONTROL_OPENED before env->admit took the ticket (incoming) or WELCOME came
 *  (outgoing), within KVT_CONNECT_MS. 2 Frames arrive whole, in order, exactly once, or the
 *  connection is LOST. 3 A peer whose process ended is LOST as soon as its kernel says so; one
 *  whose host is gone within 3 s (keepalive, user timeout). 4 A connection that was never announced
 *  is never mentioned: wrong tickets end silently here. A full descriptor table (EMFILE) pauses
 *    accepting for a moment instead of spinning.
 *  5 Memory is bounded: KVT_QUEUE_LIMIT and one frame out, CONTROL_IN_BYTES in, per connection;
 *  env->max_peers connections. 6 A connection says LOST at most once and nothing after it; after
 *  control_close it says nothing.
 * Thread: transfer (control_open: the creator's, it may resolve names); nothing blocks. Deadlines
 * need control_poll to be called every 50 ms or so whether or not control_wait_fd is readable. */
#ifndef BATON_KVTRANSFER_CONNECT_CONTROL_H
#define BATON_KVTRANSFER_CONNECT_CONTROL_H

#include "kvtransfer/transport.h"

enum { CONTROL_HEAD_BYTES = 16, CONTROL_BODY_MAX = 4096, CONTROL_IN_BYTES = 16 * 1024 };

/* One frame as it lies on the wire, little-endian: magic u16, kind u8, zero u8, length u32 (of the
 * body), after u64, body. */
struct control_frame {
    uint8_t kind;
    uint64_t after;
    struct str body; /* borrowed from the input */
};

/* The first frame of in[n], any bytes: OK, *used tells its size; ERR_BUSY: so far a frame, not
 * whole yet; ERR_FORMAT: not a frame. */
enum status control_frame_decode(const void *in, size_t n, struct control_frame *out,
                                 size_t *used) MUST_CHECK;
/* Append one; n <= CONTROL_BODY_MAX. */
void control_frame_encode(struct buf *out, uint8_t kind, uint64_t after, const void *body,
                          size_t n);

struct control_hub;

struct control_conn {
    struct control_hub *hub;
    bool incoming;
    void *owner; /* the row's; NULL until it sets it */
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
    uint8_t frame;   /* FRAME: the row's kind */
    uint64_t after;  /* FRAME: the row's */
    struct str body; /* FRAME: valid during the call */
    enum status status;
    char text[120];
};

/* Called from control_poll; may call everything but control_poll and control_hub_free, of this
 * connection too. */
typedef void control_handler(void *arg, const struct control_event *ev);

/* `row` names the transport in sentences; it, `env` and `ifname` are borrowed until
 * control_hub_free. `port` 0: any. `ifname`: leave from that interface's address, and listen on it
 * where env->listen_host is every address (kvt_listener); NULL or "": no. ERR_CONFIG: port taken,
 * no such address or interface. */
enum status control_open(const struct kvt_env *env, const char *transport, uint16_t port,
                         const char *ifname, struct control_hub **out, struct err *err) MUST_CHECK;
void control_hub_free(struct control_hub *h); /* closes what is left, without events */
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
/* Queue a frame; `body` is copied. ERR_FULL: KVT_QUEUE_LIMIT bytes are waiting, nothing was taken.
 * ERR_INVALID: n > CONTROL_BODY_MAX. ERR_PEER_LOST: not OPEN; LOST was or will be said, unless the
 * connection is still being set up. */
enum status control_send(struct control_conn *c, uint8_t frame, uint64_t after, const void *body,
                         size_t n) MUST_CHECK;
size_t control_queued(const struct control_conn *c); /* bytes not taken by the kernel yet */
void control_poll(struct control_hub *h, control_handler *on_event, void *arg);
/* What is queued still goes out if the peer takes it within a second; then the descriptor goes. No
 * event follows; `c` is gone. */
void control_close(struct control_conn *c);
/* Local and remote address of the connection, for choosing a device and a GID. */
struct sockaddr_storage;
void control_addresses(const struct control_conn *c, struct sockaddr_storage *local,
                       struct sockaddr_storage *remote);

#endif
