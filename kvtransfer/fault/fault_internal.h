/* fault_internal.h - internals of the wrapper, shared by its files: fault.c (open, forward),
 * fault_inject.c (decide), fault_out.c (outgoing puts and messages), fault_in.c (incoming events).
 * Meaning: fault.h.
 *
 *   session layer ── put, notify ──▶ inject ──▶ inner transport, or c->out (waiting) ──▶ inner
 *   inner transport ── poll ──▶ inject ──▶ c->in (waiting or due) ──▶ session layer
 *
 * Every put of the inner transport has a slot, whose number is the inner tag; the slot knows the
 * session's tag, or that nobody waits for it. The inner transport may read the pool and `memory`:
 * an image of the outer staging memory, then one window per slot with a few damaged or late bytes.
 * Thread: transfer; open and close: as the inner transport's. */
#ifndef BATON_KVTRANSFER_FAULT_FAULT_INTERNAL_H
#define BATON_KVTRANSFER_FAULT_FAULT_INTERNAL_H

#include "kvtransfer/fault/fault.h"
#include "shared/base/list.h"

enum { FAULT_SLOTS = 512, FAULT_WINDOW = FAULT_LATE_BYTES };

struct fault_slot {
    struct fault_conn *c; /* NULL: free */
    uint64_t tag, due_ms;
    bool unreported; /* a repeated put, unknown to the session layer */
    bool completed;  /* PUT_DONE is due at due_ms */
};

/* A waiting item: an outgoing put or message, an incoming message, or the end of the connection. */
struct fault_held {
    struct list link;
    uint64_t due_ms;
    enum { HELD_MESSAGE, HELD_PUT, HELD_DOWN } what;
    bool overtaken; /* waits until the next item has overtaken it */
    struct kvt_message message;
    struct kvt_transport_event down;
    struct kvt_put put; /* copies follow this struct */
    uint32_t slot;
};

struct fault_conn {
    struct kvt_conn base;
    struct fault_transport *transport;
    struct kvt_conn *inner;
    struct list link, out, in;
    struct list late; /* puts to be repeated, by time */
    uint32_t n_out, n_in;
    bool inner_down;   /* the inner transport reported DOWN */
    bool force_down;   /* `disconnect`: DOWN is due */
    bool detached;     /* DOWN was reported or fence called: no event follows */
    uint64_t fence_ms; /* fence answers ERR_BUSY until then */
};

struct fault_transport {
    struct kvt_transport base;
    struct kvt_transport_ops ops; /* the wrapper's, with the inner name and capabilities */
    const struct kvt_transport_ops *inner_ops;
    struct kvt_transport *inner;
    const struct kvt_env *outer;
    struct kvt_env env; /* the inner transport's */
    struct dev_mem memory;
    struct kvt_fault_plan plan;
    uint64_t random;
    uint32_t passed[FAULT_STEPS];
    bool fired[FAULT_TRIGGERS_MAX];
    struct counter *injected[FAULT_KINDS];
    struct list conns;
    struct fault_slot slots[FAULT_SLOTS];
    struct kvt_copy *copies; /* of the put being made */
    int epoll_fd, timer_fd;
};

struct fault_action {
    enum kvt_fault_kind kind; /* or FAULT_NOTHING */
    uint32_t ms;
};

static inline bool fault_scatters(const struct fault_transport *r)
{
    return r->ops.caps & KVT_CAP_RECEIVER_SCATTERS;
}

/* The fault of an item that passes `step`; `leaves`: an outgoing put or message of this process, to
 * which probabilities apply. Signals and pauses happen inside; the caller injects and counts the
 * other faults. */
struct fault_action fault_inject(struct fault_transport *r, enum kvt_fault_step step, bool leaves);
void fault_count(struct fault_transport *r, enum kvt_fault_kind kind);
uint64_t fault_random(struct fault_transport *r);
enum kvt_fault_step fault_step_of(enum kvt_message_kind kind);
/* Damages a message (STALE, FLIP); other kinds do not change it. */
void fault_damage_message(struct fault_transport *r, struct kvt_message *m,
                          enum kvt_fault_kind kind);

/* Ends a slot: PUT_DONE is reported at due_ms. */
void fault_end_slot(struct fault_slot *s, uint64_t due_ms);
void fault_free_slots(struct fault_conn *c);
/* Appends an item to a list, with a copy of its put's copies. */
struct fault_held *fault_hold(struct list *l, struct fault_held what, uint64_t due_ms);
void fault_free_held(struct fault_held *h);
void fault_free_list(struct list *l);
/* Wakes the transfer thread when the next waiting item is due. */
void fault_arm(struct fault_transport *r);
/* Sends waiting outgoing items that are due, in order. */
void fault_flush_out(struct fault_conn *c, uint64_t now);
/* Marks the connection as DOWN; returns ERR_PEER_LOST. */
enum status fault_force_down(struct fault_conn *c);
/* The wrapper's ops (transport.h). */
enum status fault_put(struct kvt_conn *base, const struct kvt_put *p);
enum status fault_notify(struct kvt_conn *base, const struct kvt_message *m);
size_t fault_poll(struct kvt_transport *t, struct kvt_transport_event *v, size_t cap);

struct fault_conn *fault_new_conn(struct fault_transport *r, struct kvt_conn *inner);
void fault_free_conn(struct fault_conn *c);

#endif
