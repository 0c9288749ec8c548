/* ep_shm.h - backend `shm` of ep.h: ranks of one host on CPUs, with memory that they share.
 *
 * A *window* is one rank's memory (a memfd): its owner writes it, the others have mapped it to be
 * read. So a rank that died or is late can write nobody's memory, and nothing has to be fenced when
 * an object is freed: pages stay until the last rank that has mapped them lets go. A window has two
 * parts, and the same parts of all ranks are neighbours in this process, by rank:
 *
 *   heads    [size] sign, small parts of collectives, origins, plans
 *   bodies   [size] rows, results, large parts of collectives
 *
 * A body is a whole number of rows, so that all bodies are one matrix and x_rows of an ep_batch
 * names rows of every rank. All waiting is a *meeting* of all ranks (ep_shm_meet.c).
 * Thread: engine; ep_shm_abort any. */
#ifndef BATON_KERNELS_EP_EP_SHM_H
#define BATON_KERNELS_EP_EP_SHM_H

#include <stdatomic.h>

#include "kernels/ep/ep_backend.h"
#include "kernels/ep/ep_host_rows.h"
#include "kernels/host/run_delay.h"

enum {
    EP_SHM_SMALL = 512, /* bytes of a part of a collective that lies in the head */
    EP_SHM_TURNS = 2    /* parts of collectives and plans are written to two places in turn */
};

/* Sizes and offsets in bytes, the same on all ranks. */
struct ep_shm_layout {
    size_t head_bytes, body_bytes;        /* whole pages; a body is whole rows too */
    size_t small, origins, plans;         /* in a head */
    size_t plan_bytes, order;             /* of a plan; `order` in a plan */
    size_t results, shared, shared_bytes; /* in a body, which begins with rows; of one turn */
    size_t row_bytes, scales_at;
};

/* At the beginning of a head. Written by its rank, `fault` also by other threads of it. */
struct ep_shm_sign {
    _Alignas(64) _Atomic uint32_t arrived; /* how many meetings the rank has come to */
    _Atomic uint32_t fault;  /* 0, or enum ep_shm_fault << 16 | rank + 1 that it is about */
    _Atomic uint32_t asleep; /* 1: the rank waits on the bell */
    int32_t rank;
    uint64_t nonce;
};

/* A page of rank 0, the only memory that all ranks write: it wakes and hints, and nothing is
 * believed that stands in it. */
struct ep_shm_bell {
    _Atomic uint32_t rung;     /* ranks sleep on it */
    _Atomic uint32_t n_faults; /* not 0: it is worth looking for them */
};

enum ep_shm_fault {
    EP_SHM_ABORTED = 1, /* ep_abort */
    EP_SHM_LEFT,        /* ep_free */
    EP_SHM_ENDED,       /* the process has ended */
    EP_SHM_SILENT,      /* no sign of life for timeout_ms */
    EP_SHM_EXPERT,      /* a row chose an expert that there is not */
    EP_SHM_CORRUPT      /* what the rank wrote is impossible */
};

struct ep_shm {
    struct ep base; /* first */
    struct ep_shm_layout at;
    const struct ep_host_rows *rows;

    /* the windows (ep_shm_window.c) */
    char *heads, *bodies; /* of rank 0; one reserved range */
    struct ep_shm_bell *bell;
    int window_fd, bell_fd; /* while the ranks open each other's; otherwise -1 */
    uint64_t nonce;         /* of the own window */
    int *pidfds;            /* [size]; -1: this rank, or not opened */

    /* meetings (ep_shm_meet.c) */
    uint32_t n_meetings; /* that this rank has come to */
    int32_t n_seen;      /* ranks 0 .. n_seen - 1 have come to the last one */
    bool may_spin;
    uint64_t busy_until_ns; /* clock_ns; until then nobody spins */
    struct run_delay delay;

    /* the running call */
    uint32_t n_plans, n_collectives;
    int32_t *chosen, *index; /* [max_rows n_used]: physical expert of a (row, choice), and which of
                              * this rank's rows for that expert it is */
    int32_t *owner, *next;   /* [n_physical]: rank of an expert; scratch */
    int32_t *by_expert;      /* [n_local] */
    int32_t *begin, *x_rows; /* of struct ep_batch */
};

static inline struct ep_shm *ep_shm_of(struct ep *e) { return (struct ep_shm *)e; }

static inline char *ep_shm_head(const struct ep_shm *s, int32_t rank)
{
    return s->heads + (size_t)rank * s->at.head_bytes;
}
static inline char *ep_shm_body(const struct ep_shm *s, int32_t rank)
{
    return s->bodies + (size_t)rank * s->at.body_bytes;
}
static inline struct ep_shm_sign *ep_shm_sign(const struct ep_shm *s, int32_t rank)
{
    return (struct ep_shm_sign *)(void *)ep_shm_head(s, rank);
}

/* ---- windows ---- */

/* Makes this rank's window, meets the others and maps theirs. On failure ep_shm_close_windows frees
 * what there is. Returns on all ranks alike. */
enum status ep_shm_open_windows(struct ep_shm *s, struct err *err) MUST_CHECK;
void ep_shm_close_windows(struct ep_shm *s);

/* ---- meetings ---- */

/* Comes to the next meeting: what this rank wrote before is what the others read after it. Does not
 * wait. */
void ep_shm_arrive(struct ep_shm *s);
/* Waits until all ranks have come to the meeting that this rank came to last. ERR_PEER_LOST,
 * ERR_INVALID, ERR_INTERNAL with the rank; ERR_CANCELED: ep_abort. */
enum status ep_shm_wait(struct ep_shm *s, struct err *err) MUST_CHECK;
/* Both. */
enum status ep_shm_meet(struct ep_shm *s, struct err *err) MUST_CHECK;
/* The fault that this rank has reported or seen, or another's that is there to be seen. Calls begin
 * with it. */
enum status ep_shm_check(struct ep_shm *s, struct err *err) MUST_CHECK;
/* The fault that this rank has reported or seen. */
enum status ep_shm_fault_of(const struct ep_shm *s, struct err *err) MUST_CHECK;
/* Reports a fault to all ranks, unless this rank has reported one before, and returns its fault.
 * Any thread. */
enum status ep_shm_raise(struct ep_shm *s, enum ep_shm_fault fault, int32_t rank,
                         struct err *err) MUST_CHECK;
void ep_shm_abort(struct ep *e);
void ep_shm_init_meetings(struct ep_shm *s);

/* ---- collectives: of struct ep_ops ---- */

enum status ep_shm_all_reduce(struct ep *e, void *x, size_t n, enum dtype dtype,
                              struct err *err) MUST_CHECK;
enum status ep_shm_all_gather(struct ep *e, void *all, const void *mine, size_t bytes,
                              struct err *err) MUST_CHECK;
enum status ep_shm_gather_columns(struct ep *e, const struct ep_columns *a,
                                  struct err *err) MUST_CHECK;

#endif
