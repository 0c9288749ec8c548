/* rdma.h - transport rdma: RDMA WRITEs over reliable connections (libibverbs), and what it keeps
 * for all connections.
 *
 *     conn.h      one connection: control connection, rails, puts, messages that wait for puts
 *     rail.h      a pair of ports with some queue pairs, and its states
 *     qp.h        queue pairs           memory.h    devices, the registered pool, keys
 *     puts.h      work requests         cm.h        the connection manager (BATON_RDMA_CM)
 *
 * A put goes to one queue pair; its last work request is an RDMA WRITE WITH IMMEDIATE that carries
 * the put's number. Messages go over the control connection and say how many puts were made before
 * them.
 * Thread: transfer. */
#ifndef BATON_KVTRANSFER_RDMA_RDMA_H
#define BATON_KVTRANSFER_RDMA_RDMA_H

#include "kvtransfer/rdma/memory.h"
#include "kvtransfer/rdma/puts.h"
#include "kvtransfer/rdma/qp.h"
#include "kvtransfer/transport.h"

struct rdma_cm;

enum { RDMA_TICK_MS = 20 };

/* Events that poll has not reported yet. */
struct rdma_event_queue {
    struct kvt_transport_event *v; /* ring; grows */
    size_t cap, head, n;
    struct kvt_transport_event discarded;
};

struct rdma_transport {
    struct kvt_transport base;
    const struct kvt_env *env;
    struct control_hub *hub;
    struct rdma_cm *cm; /* NULL: control connections carry the attributes of queue pairs */
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

/* events.c: handles the device's asynchronous events and completion events; rails with completions
 * go to t->ready. */
void rdma_events_process(struct rdma_device *d);
/* Breaks the rails of a device that the kernel has removed. */
void rdma_events_device_lost(struct rdma_device *d);

#endif
