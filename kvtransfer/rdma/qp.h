/* qp.h - queue pairs: created, connected, moved to the error state, destroyed.
 *
 * Invariant: posted work requests that are not known to be complete never exceed a queue pair's
 * depth; puts in flight never exceed the receives posted for them (RDMA_WINDOW on each queue pair),
 * so there is no receiver-not-ready. Thread: transfer. */
#ifndef BATON_KVTRANSFER_RDMA_QP_H
#define BATON_KVTRANSFER_RDMA_QP_H

#include <infiniband/verbs.h>

#include "kvtransfer/rdma/setup.h"
#include "kvtransfer/tuning.h"
#include "shared/base/list.h"

struct control_conn;
struct rdma_transport;
struct rdma_local_port;
struct rdma_put;
struct rdma_rail;
struct rdma_cm_id;

enum {
    RDMA_SGE_MAX = 8,     /* pieces of one work request; more enlarge every entry of the send
                           * queue */
    RDMA_SEND_WRS = 1024, /* depth of a send queue: four puts of KVT_BATCH_PIECES separate copies */
    RDMA_INLINE_BYTES = 64, /* writes up to this are copied into the work request, which saves the
                             * NIC a read of host memory */
    RDMA_QP_IN_FLIGHT_BYTES = 16 << 20, /* per queue pair; above this it accepts no put: 3 GB/s
                                         * times 5 ms. The limit is not "as many puts as fit",
                                         * because large ones would wait for ever behind small ones.
                                         * An abandoned transfer waits for this and one put */
    RDMA_QPS_DEFAULT = 2,
    RDMA_TIMEOUT_DEFAULT = 14, /* 67 ms */
    RDMA_RETRIES_DEFAULT = 7
};

/* The operator's settings, or the defaults. */
static inline uint8_t rdma_timeout(const struct kvt_rdma_tuning *t)
{
    return t->timeout ? t->timeout : RDMA_TIMEOUT_DEFAULT;
}
static inline uint8_t rdma_retries(const struct kvt_rdma_tuning *t)
{
    return t->retries ? t->retries : RDMA_RETRIES_DEFAULT;
}

struct rdma_qp {
    struct rdma_rail *rail;
    struct ibv_qp *qp; /* NULL: none */
    struct ibv_mw *mw;
    struct rdma_cm_id *id; /* BATON_RDMA_CM: connected it; NULL: none */
    uint32_t peer;         /* number of the peer's queue pair */
    uint32_t psn, key;     /* key: sender: the peer's; receiver: the granted one */
    uint64_t base;         /* sender: address of the receiver's pool */
    struct list puts;      /* assigned and not acknowledged, oldest first */
    struct rdma_put *next; /* the first of them not posted completely; NULL: none */
    uint64_t in_flight;
    uint32_t n_wrs;            /* of the send queue, not known to be complete */
    uint32_t n_recvs;          /* receives posted */
    uint64_t last_progress_ms; /* last progress while there was work */
    bool rts;                  /* in the state ready-to-send */
    bool usable; /* sender: the probe is acknowledged; receiver: the memory window is bound */
};

/* Creates the completion queue and n queue pairs in INIT; posts a receiver's receives. On failure
 * nothing is left and r->why has the reason. */
enum status rdma_qp_create(struct rdma_rail *r, uint32_t n, bool reads) MUST_CHECK;
/* Moves them to ready-to-receive and ready-to-send, towards the peer's queue pairs. */
enum status rdma_qp_connect(struct rdma_rail *r, const struct rdma_rail_info *theirs) MUST_CHECK;
/* Makes one transition with the connection manager's attributes, in which the operator's settings
 * take precedence. Sets r->mtu. */
enum status rdma_qp_modify(struct rdma_qp *q, struct ibv_qp_attr *a, int mask) MUST_CHECK;
/* Moves them to the error state: new requests are neither executed nor answered; posted ones are
 * flushed. */
void rdma_qp_error(struct rdma_rail *r);
/* Destroys them: nothing is written or read any more. */
void rdma_qp_destroy(struct rdma_rail *r);
enum status rdma_qp_post_recvs(struct rdma_qp *q, uint32_t n) MUST_CHECK;
struct rdma_local_port *rdma_rail_local_port(const struct rdma_rail *r);
/* The current address of the port, whose GID may have changed. */
enum status rdma_qp_port_addr(struct rdma_transport *t, const struct control_conn *control,
                              uint32_t port, struct rdma_port_addr *out, uint8_t *gid_index,
                              struct err *err) MUST_CHECK;

#endif
