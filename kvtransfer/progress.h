/* progress.h - the transfer thread of a kvt: one loop over its mailbox, its transports, its
 * sessions and their deadlines.
 *
 *   caller ──mailbox──▶ commands ─┐
 *   transports ──poll──▶ events ───├─▶ sessions (session.h) ─▶ puts, messages, events
 *   clock ──every 50 ms──▶ ticks ──┘
 *
 * Connections: kvt_connect creates a peer with a route: the allowed transports that the receiver
 * offers, in our order. If one fails before UP the next is tried, then comes PEER_LOST. An incoming
 * connection becomes a peer at UP. A lost incoming peer stays until its transport's fence() is OK
 * or none of its sessions needs a fence.
 * Thread: transfer; start and stop: the creator's. */
#ifndef BATON_KVTRANSFER_PROGRESS_H
#define BATON_KVTRANSFER_PROGRESS_H

#include <pthread.h>

#include "kvtransfer/connect/tickets.h"
#include "kvtransfer/session.h"
#include "shared/base/mailbox.h"

enum {
    /* Connections of one node, both directions; a handle is serial * KVT_PEERS_MAX + index. */
    KVT_PEERS_MAX = 1024,
    KVT_COMMANDS_SOFT = 16384, /* beyond this new work is refused */
    /* Ends and cancels are accepted up to here; beyond it they go to kvt.overflow. */
    KVT_COMMANDS_HARD = 20480,
    KVT_TRANSPORT_EVENTS = 32
};

struct kvt_open_transport {
    const struct kvt_transport_ops *ops;
    struct kvt_transport *t;
    struct buf address; /* exported once; constant */
};

struct kvt_route {
    struct kvt_open_transport *transports[KVT_TRANSPORTS_MAX]; /* in order of preference */
    struct buf addresses[KVT_TRANSPORTS_MAX];
    uint32_t n, next;
    uint8_t ticket[KVT_TICKET_BYTES];
    char why[160]; /* of the last failure */
    enum status status;
};

enum kvt_command_kind {
    KVT_DO_CONNECT,
    KVT_DO_DISCONNECT,
    KVT_DO_EXPECT_CANCEL,
    KVT_DO_OPEN,
    KVT_DO_READY,
    KVT_DO_FINISH,
    KVT_DO_SEND_CANCEL
};

struct kvt_command {
    enum kvt_command_kind kind;
    uint64_t id;      /* of the transfer or peer */
    uint64_t stamp;   /* FINISH: clock_ns of the call */
    bool awaits_rest; /* FINISH: kvt_send_finish_when_complete */
    void *p;          /* CONNECT: struct kvt_peer; OPEN: kvt_send; READY: kvt_ready. Owned. */
};

/* An end or cancel that found the mailbox full. */
struct kvt_overflow {
    struct kvt_overflow *next;
    struct kvt_command cmd;
};

struct kvt_ready {
    uint64_t id;
    uint32_t layer, begin, end;
    uint64_t event;
    int32_t blocks[];
};

struct kvt {
    struct kvt_core core;
    struct kvt_env env;
    char *listen_host, *advertise_host;
    struct kvt_open_transport transports[KVT_TRANSPORTS_MAX];
    uint32_t n_transports;
    uint8_t node[16];
    struct kvt_tickets tickets;
    _Atomic uint64_t handles[KVT_PEERS_MAX]; /* of outgoing peers; 0: free */
    _Atomic uint64_t next_handle;
    struct mailbox *mailbox;
    /* Newest first; pushed by any thread, taken as a whole by the transfer thread. */
    _Atomic(struct kvt_overflow *) overflow;
    int wake_fd, epoll_fd;
    _Atomic bool stopping;
    bool started;
    pthread_t thread;
    /* transfer thread */
    struct list peers;
    struct kvt_transport_event transport_events[KVT_TRANSPORT_EVENTS];
    uint64_t ticked_ms;
    /* Taken from `overflow`, oldest first; they run after n_before commands of the mailbox. */
    struct kvt_overflow *overflow_due;
    size_t n_before;
};

enum status kvt_progress_start(struct kvt *k, struct err *err) MUST_CHECK;
void kvt_progress_stop(struct kvt *k); /* joins; frees the remaining peers and commands */
/* Wakes the transfer thread. Any thread. */
void kvt_progress_wake(void *kvt);
/* The callbacks of kvt_env; `arg` is the kvt. */
enum status kvt_progress_admit(void *arg, const uint8_t ticket[KVT_TICKET_BYTES]);
int kvt_progress_scatter(void *arg, struct kvt_conn *c, const struct kvt_message *head,
                         uint64_t offset, struct iovec *iov, int cap);
void kvt_progress_scattered(void *arg, struct kvt_conn *c, const struct kvt_message *head,
                            uint64_t bytes);
void kvt_route_free(struct kvt_route *r);

#endif
