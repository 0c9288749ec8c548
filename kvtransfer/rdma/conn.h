/* conn.h - one connection: its control connection, its rails, its puts, and the messages that wait
 * for puts. Thread: transfer. */
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

/* Why a message is seen only after all earlier puts are complete:
 *  1 The receiver passes a message on when it has polled the immediates of all earlier puts
 *    (recv_window.h). So the bytes of a put must be visible to this CPU when the completion of its
 *    immediate is.
 *  2 On one queue pair the responder executes requests in the order they were posted, and the
 *    receive that an RDMA WRITE with immediate consumes completes after the bytes of that write and
 *    of every earlier one (IBA vol. 1, 9.5 "Transaction ordering"; ibv_post_send(3)).
 *  3 The device writes that completion to host memory too. PCIe keeps posted writes in order unless
 *    they carry the relaxed-ordering bit (PCI Express base specification, "Transaction ordering").
 *    With IBV_ACCESS_RELAXED_ORDERING a device may set it on data, not on completions, so a
 *    completion still comes after its data: Linux relies on it, its own users "read data only after
 *    observing the CQE" (include/rdma/ib_verbs.h). Two writes before their completions may change
 *    order, which nothing here observes.
 *  4 Polling reads the completion before anything that the device wrote earlier: every provider has
 *    a barrier for it (rdma-core, util/udma_barrier.h, udma_from_device_barrier).
 *  5 Different queue pairs are not ordered, hence (1) counts every put separately. */

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
    uint64_t opened_ms, last_up_ms; /* last_up: a rail was up */
    uint64_t need_bytes;            /* outgoing: least size of the receiver's pool */
    struct rdma_hello theirs;
    struct rdma_rail rails[RDMA_RAILS_MAX];
    uint32_t n_rails;
    /* sender */
    struct rdma_put puts[RDMA_WINDOW]; /* by number modulo */
    uint64_t issued, acked, reported;  /* numbers: next; all below are acknowledged; the receiver
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
