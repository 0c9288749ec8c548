/* puts.h - puts: assigned to queue pairs, posted as work requests, completed, and moved to another
 * rail if theirs breaks.
 *
 * Invariants:
 *  1 A completion with an error status never counts as done: it ends its queue pair and the rail.
 *  2 A put is posted again only after the receiver has said that its queue pairs of the old rail
 *    are destroyed, so the old write cannot arrive late.
 *  3 PUT_DONE is reported after the signalled completion of the put's last work request, or after
 *    its queue pair was destroyed.
 * Thread: transfer. */
#ifndef BATON_KVTRANSFER_RDMA_PUTS_H
#define BATON_KVTRANSFER_RDMA_PUTS_H

#include "kvtransfer/rdma/recv_window.h"
#include "kvtransfer/transport.h"
#include "shared/base/list.h"

struct rdma_conn;
struct rdma_qp;
struct rdma_rail;

enum {
    RDMA_CHAIN_MAX = 64,       /* work requests per doorbell, */
    RDMA_CHAIN_BYTES = 2 << 20 /* and bytes, at which it ends: the completion of each list of work
                                * requests shows progress, even on a slow link */
};

enum rdma_put_state { RDMA_PUT_FREE, RDMA_PUT_UNASSIGNED, RDMA_PUT_ON_QP, RDMA_PUT_FINISHED };

/* verify_read uses all three; otherwise the immediate is posted in WRITE. */
enum rdma_phase { RDMA_PHASE_WRITE, RDMA_PHASE_READ, RDMA_PHASE_NOTIFY };

struct rdma_put {
    enum rdma_put_state state;
    struct list link; /* qp->puts or conn->unassigned, in order of number */
    uint64_t number, tag, generation, bytes;
    uint32_t session, n_copies, cap_copies;
    uint32_t i_copy;        /* first copy not posted completely ... */
    uint64_t copy_at;       /* ... and how much of it is */
    bool posted, abandoned; /* posted: completely, with its immediate */
    bool waits;             /* verify_read: for the completion of posted requests */
    enum rdma_phase phase;
    uint64_t read_at;        /* READ: bytes of the scratch memory in use */
    struct kvt_copy *copies; /* kept by the slot */
    uint32_t rail, epoch;    /* that carried it last */
};

enum rdma_wr_kind { RDMA_WR_PUT, RDMA_WR_PROBE, RDMA_WR_BIND, RDMA_WR_RECV };
/* A wr_id: its kind, the number of work requests up to this signalled one, the put's slot, and
 * whether it was the last of the put. */
static inline uint64_t rdma_wr_id(enum rdma_wr_kind kind, uint32_t n_wrs, uint32_t slot, bool last)
{
    return (uint64_t)kind << 56 | (uint64_t)last << 48 | (uint64_t)n_wrs << 16 | slot;
}

/* The op `put` (transport.h). */
enum status rdma_puts_add(struct rdma_conn *c, const struct kvt_put *p);
void rdma_puts_abandon(struct rdma_conn *c, uint32_t session, uint64_t generation);
/* Handles a signalled completion of q's puts. */
void rdma_puts_completed(struct rdma_qp *q, uint64_t wr_id);
/* After the rail was fenced and its queue pairs destroyed: ends puts that are complete; the others
 * wait for another rail. ERR_IO: an acknowledged put never arrived there. */
enum status rdma_puts_requeue(struct rdma_rail *r,
                              const struct rdma_recv_window *window) MUST_CHECK;
/* Assigns waiting puts to the rails that are up, and posts what fits. */
void rdma_puts_pump(struct rdma_conn *c);
void rdma_puts_release(struct rdma_conn *c);

#endif
