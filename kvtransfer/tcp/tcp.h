/* tcp.h - what the files of transport tcp share: a peer's connection and its sockets.
 *
 * A connection (`struct tcp_conn`, what sessions see) has 1 to TCP_LINKS_MAX sockets (`struct
 * tcp_link`). The WELCOME on the first says how many; every other socket presents a ticket derived
 * from the first one's. The connection is UP when all links are.
 *
 *   outgoing  CONNECTING ── ticket ──▶ WAITING ── WELCOME(n) ──▶ UP; the first makes n - 1 more
 *   incoming  HANDSHAKE ── ticket good: WELCOME(n) ──▶ UP
 *
 * Thread: transfer. */
#ifndef BATON_KVTRANSFER_TCP_TCP_H
#define BATON_KVTRANSFER_TCP_TCP_H

#include "kvtransfer/transport.h"
#include "shared/base/address/unproven.h"
#include "shared/base/list.h"

enum {
    TCP_LINKS_MAX = 16,
    TCP_STRIPE_MIN = 32 * 1024, /* bytes of a slice, worth a segmentation offload */
    TCP_PUTS_MAX = 4,           /* per connection: one being sent, one queued, others being noted */
    TCP_BYTES_PER_POLL = 4 << 20, /* per link and poll, so that connections share the thread */
    /* Sink for bytes of dead sessions; abandoned puts send zeros from a second one. */
    TCP_DISCARD_BYTES = 64 * 1024,
    TCP_IOV_MAX = 256,
    /* Bytes read together with the end of a payload: usually its NOTE and the next header. */
    TCP_AHEAD_BYTES = 2 * KVT_MESSAGE_MAX,
    TCP_ZEROCOPY_MIN = 32 * 1024,
    /* Calls of one link that the kernel has not completed; beyond it bytes are copied. A power of
     * two. */
    TCP_ZEROCOPY_CALLS = 1024
};

enum tcp_link_state { TCP_CONNECTING, TCP_WAITING, TCP_HANDSHAKE, TCP_LINK_UP };
enum tcp_conn_state { TCP_ASSEMBLING, TCP_IS_UP, TCP_IS_DOWN };

struct tcp_link {
    struct tcp_transport *tt;
    struct tcp_conn *conn;       /* NULL: accepted, its ticket not read yet */
    struct unproven_place place; /* among tt->strangers while conn is NULL */
    enum tcp_link_state state;
    uint32_t index, events; /* events: what epoll watches for */
    int fd;
    uint64_t deadline_ms;
    /* out */
    struct buf queue;    /* small bytes; payloads are gaps in it */
    uint64_t queue_base; /* stream position of queue.data[0], payloads not counted */
    size_t queue_sent;
    uint64_t put_seq;          /* first put whose slice of this link is not sent completely */
    uint32_t zc_sent, zc_done; /* MSG_ZEROCOPY calls made; completed without a gap */
    /* a bit per call from zc_done on: completed before an earlier one */
    uint64_t zc_early[TCP_ZEROCOPY_CALLS / 64];
    bool zerocopy;
    /* in */
    uint8_t in[TCP_AHEAD_BYTES];
    size_t in_at, in_have; /* bytes [in_at, in_have) are not parsed yet */
    uint64_t slice_left;   /* of conn->frame */
};

/* A link's slice of a put. */
struct tcp_slice {
    uint64_t at, left; /* position in the link's queue; bytes not sent */
    uint64_t copy_sent;
    uint32_t i_copy;   /* first copy not sent completely; copy_sent bytes of it are sent */
    uint32_t zc_until; /* zc_done that must be reached */
};

struct tcp_put {
    uint64_t tag, generation;
    uint32_t session, n_copies, n_slices;
    bool abandoned;
    struct kvt_copy *copies; /* env->max_copies */
    struct tcp_slice slices[TCP_LINKS_MAX];
};

struct tcp_conn {
    struct kvt_conn base;
    struct tcp_transport *tt;
    struct list link;
    enum tcp_conn_state state;
    struct tcp_link *links[TCP_LINKS_MAX];
    uint32_t n_links, n_links_up; /* n_links: agreed; 1 until WELCOME */
    uint64_t deadline_ms;
    bool detached, same_host;
    bool must_reap; /* ended before it was announced: poll frees it */
    uint8_t ticket[KVT_TICKET_BYTES];
    struct buf address; /* outgoing: of the receiver */
    uint64_t link_speed;
    /* out */
    struct tcp_put puts[TCP_PUTS_MAX];
    uint64_t n_put, n_completed; /* puts accepted; puts complete */
    /* in */
    bool in_frame, dropping, backlog; /* backlog: bytes were read that no event will report */
    struct kvt_message frame;
    uint32_t slices_left;
};

struct tcp_done {
    struct kvt_conn *conn;
    uint64_t tag;
};

struct tcp_transport {
    struct kvt_transport base;
    const struct kvt_env *env;
    int epoll_fd, listen_fd;
    uint16_t port;
    struct buf address;
    struct list conns;
    struct unproven strangers; /* accepted links whose ticket was not read yet */
    uint32_t n_conns, n_backlog, n_to_reap;
    uint64_t checked_ms, accept_again_ms; /* accept_again_ms: 0, or when to watch the listener */
    struct tcp_done *done;
    uint32_t n_done, n_unfinished; /* together at most TCP_PUTS_MAX per connection */
    uint8_t *discard_buf, *zeros;
};

struct tcp_events {
    struct kvt_transport_event *v;
    size_t n, cap;
};

/* Messages and DATA headers travel only on the first link. The payload of a DATA with at least
 * TCP_STRIPE_MIN bytes per link is cut into n equal slices, one per link, which carry no headers; a
 * smaller one stays whole on the first link. The receiver reads slices only of the DATA whose
 * header it has read last, and reads nothing after it on the first link until all slices are in
 * place. So puts complete in the order they were made, and a message is seen after every earlier
 * put, however the sockets race.
 *
 * Invariants
 *  1 The loss of one link is the loss of the connection.
 *  2 A source is read until the kernel has accepted its put's slices; with MSG_ZEROCOPY until the
 *    kernel has released them.
 *  3 This process's own transfer thread writes the pool on behalf of a peer: to stop reading is the
 *    fence. */

/* tcp.c */
struct kvt_transport_event *tcp_add_event(struct tcp_events *evs,
                                          enum kvt_transport_event_kind kind, struct tcp_conn *c);
/* Ends the connection; nothing of it is read or written afterwards. */
void tcp_go_down(struct tcp_events *evs, struct tcp_conn *c, enum status st, const char *text);
void tcp_watch(struct tcp_link *l, uint32_t events);
/* Counts a link that is UP; the connection is UP when all are. */
void tcp_link_is_up(struct tcp_events *evs, struct tcp_link *l);
/* Makes links 1 to n - 1, after the first link's WELCOME named n. */
enum status tcp_make_links(struct tcp_conn *c, uint32_t n, struct err *err) MUST_CHECK;
/* The connection that an accepted link's ticket opens or joins, or NULL. */
struct tcp_conn *tcp_admit(struct tcp_link *l, const uint8_t ticket[KVT_TICKET_BYTES]);
void tcp_link_free(struct tcp_link *l);

/* tcp_out.c */
void tcp_queue_preamble(struct tcp_link *l, const struct kvt_preamble *p);
/* Sends as much as the socket accepts. ERR_PEER_LOST: reading will say why. */
enum status tcp_write_out(struct tcp_link *l);
/* Reads the socket's error queue: buffers that the kernel has released. */
void tcp_read_zerocopy_completions(struct tcp_link *l);
/* Handles one completion, of the MSG_ZEROCOPY calls first..last. */
void tcp_zerocopy_completed(struct tcp_link *l, uint32_t first, uint32_t last);
enum status tcp_put(struct kvt_conn *c, const struct kvt_put *p);
void tcp_abandon(struct kvt_conn *c, uint32_t session, uint64_t generation);
enum status tcp_notify(struct kvt_conn *c, const struct kvt_message *m);

/* tcp_in.c */
/* Reads and handles input; frees a link that ends without a connection. */
void tcp_read_in(struct tcp_events *evs, struct tcp_link *l);
/* Offset of slice i of n of `bytes`; i == n: the end. */
static inline uint64_t tcp_slice_begin(uint64_t bytes, uint32_t n, uint32_t i)
{
    return bytes / n * i + (i < bytes % n ? i : bytes % n);
}
static inline uint32_t tcp_n_slices(uint64_t bytes, uint32_t n_links)
{
    return bytes >= (uint64_t)TCP_STRIPE_MIN * n_links ? n_links : 1;
}

#endif
