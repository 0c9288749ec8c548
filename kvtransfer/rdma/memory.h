/* memory.h - devices in use, the registered pool, and the keys that let a peer write into it.
 *
 * Invariant: a peer's key is a type 2 memory window of one queue pair, or a region in a protection
 * domain of that connection; it ends with the rail.
 * Thread: open and close: the creator's; the others: transfer. */
#ifndef BATON_KVTRANSFER_RDMA_MEMORY_H
#define BATON_KVTRANSFER_RDMA_MEMORY_H

#include <infiniband/verbs.h>

#include "kvtransfer/rdma/device.h"
#include "shared/base/err.h"

struct rdma_transport;
struct rdma_rail;
struct rdma_qp;

/* A device in use: one context, shared by its ports. */
struct rdma_device {
    struct rdma_transport *t;
    const struct rdma_port *port; /* any of its ports: limits are the device's */
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    struct ibv_mr *pool, *staging, *scratch; /* staging may be NULL; scratch only for reads */
    struct ibv_comp_channel *channel;
    bool uses_mw, dead; /* dead: the kernel has removed it */
    bool on_demand;     /* on-demand paging instead of locked memory; windows cannot be bound to
                         * such memory (mlx5) */
};

/* A port in use. */
struct rdma_local_port {
    struct rdma_device *device;
    struct rdma_port *port; /* in t->ports */
    bool active;
};

/* Opens the devices of t->ports and registers the pool (and staging) with each, once. ERR_CONFIG:
 * the locked-memory limit is too low; ERR_NODEV. */
enum status rdma_memory_open(struct rdma_transport *t, struct err *err) MUST_CHECK;
void rdma_memory_close(struct rdma_transport *t);
/* The protection domain for the queue pairs of a rail: the device's, or (receiver, region keys) a
 * separate one of the rail, with its region. */
enum status rdma_memory_domain(struct rdma_rail *r, bool reads, struct ibv_pd **out) MUST_CHECK;
/* Receiver: creates the key of q. ERR_BUSY with windows: the completion of the bind (wr_id kind
 * BIND) follows. Otherwise OK at once. */
enum status rdma_memory_grant(struct rdma_qp *q, bool reads) MUST_CHECK;
void rdma_memory_revoke(struct rdma_qp *q);       /* its queue pair is in error */
void rdma_memory_deregister(struct rdma_rail *r); /* after all of them are */
/* The local key of the pool or staging memory that holds offset `local`. */
uint32_t rdma_memory_key(const struct rdma_device *d, uint64_t local);

#endif
