/* conn.h - one connection: its control connection, its rails, its puts, and the messages that wait
 * for puts. A message is passed on only when all earlier puts are complete; docs/kv-transfer.md
 * says why their bytes are visible then. Thread: transfer. */
#ifndef BATON_KVTRANSFER_RDMA_CONN_H
#define BATON_KVTRANSFER_RDMA_CONN_H

#include "kvtransfer/connect/control.h"
#include "kvtransfer/rdma/puts.h"
#include "kvtransfer/rdma/rail.h"
#include "kvtransfer/rdma/schedule.h"
#include "kvtransfer/transport.h"

struct rdma_transport;

enum {
    RDMA_REPORT_EVERY = RDMA_WINDOW / 8,
    RDMA_NO_RAIL_MS = 3000,   /* a connection without any rail lives this long */
    RDMA_HELD_BYTES = 4 << 20 /* messages that wait for puts; a peer that sends more is dropped */
};

enum rdma_conn_state { RDMA_CONN_OPENING, RDMA_CONN_UP, RDMA_CONN_DOWN };

struct rdma_conn {
    struct kvt_conn base;
    struct rdma_transport *t;
    struct list link;
    struct control_conn *control; /* NULL after it was lost */
    enum rdma_conn_state state;
    bool handshaken, detached; /* handshaken: HELLO came; detached: no events any more */
    bool failed;               /* the next poll ends it, because of: */
    enum status status;
    char text[120];
    uint64_t opened_ms, last_up_ms; /* of the connection, and when a rail was up last */
    uint64_t need_bytes;            /* outgoing: least size of the receiver's pool */
    struct rdma_hello theirs;
    struct rdma_rail rails[RDMA_RAILS_MAX];
    uint32_t n_rails;
    /* sender */
    struct rdma_put puts[RDMA_WINDOW];   /* by number modulo */
    uint64_t issued, finished, reported; /* numbers: next; all below are finished; the receiver
                                        * has reported complete */
    struct list unassigned;
    /* receiver */
    struct rdma_recv_window recv_window;
    uint64_t last_reported; /* recv_window.completed as last reported */
    struct buf held;        /* messages that wait: u64 after, u32 length, bytes */
    size_t held_at;
};

struct rdma_conn *rdma_conn_new(struct rdma_transport *t, struct control_conn *control,
                                bool incoming);
void rdma_conn_free(struct rdma_conn *c);
/* A slot in the ring of events; for a detached connection one that nobody reads. Valid until the
 * next call. */
struct kvt_transport_event *rdma_conn_add_event(struct rdma_conn *c,
                                                enum kvt_transport_event_kind kind);
/* A control_handler; `transport` is the struct rdma_transport. */
void rdma_conn_on_control(void *transport, const struct control_event *ev);
/* body NULL: none */
void rdma_conn_send(struct rdma_conn *c, enum rdma_frame frame, const struct buf *body);
enum status rdma_conn_notify(struct rdma_conn *c, const struct kvt_message *m);
void rdma_conn_up(struct rdma_conn *c); /* a rail is up */
/* Marks the connection as failed; the next poll ends it, so that callers in the middle of it can
 * finish. The first reason is kept. */
void rdma_conn_fail(struct rdma_conn *c, enum status st, const char *text);
/* Destroys its rails at once, so that nothing is read or written any more, and reports DOWN. Frees
 * a connection that was never announced. */
void rdma_conn_end(struct rdma_conn *c, enum status st, const char *text);
/* A queue pair of c may still write, see struct rdma_rail. */
bool rdma_conn_unfenced(const struct rdma_conn *c);
void rdma_conn_completed(struct rdma_conn *c, uint32_t immediate);
/* Receiver, after completions: passes on messages that waited for them, and reports to the sender
 * when enough puts are complete. */
void rdma_conn_report(struct rdma_conn *c);
/* Passes on held messages whose puts are complete (receiver) or acknowledged (sender). */
void rdma_conn_release_held(struct rdma_conn *c);
void rdma_conn_tick(struct rdma_conn *c, uint64_t now_ms);

#endif
