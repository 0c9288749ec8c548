/* ep_ucx.h - backend `ucx` of ep.h: ranks of several hosts on CPUs, by messages (shared/fabric);
 * rows and results of *near* ranks, those of this host, are read where they are (ep_ucx_window.c).
 *
 * Every call is one or more *phases*, in which each rank sends a stream of bytes to each other rank
 * (maybe empty) and waits for theirs. Phases are counted alike on all ranks. A rank that has ended
 * phase p has heard from all others in p, so they have begun it: messages that arrive are of the
 * running phase or the next. What two phases in a row may write has a place for each turn; rows and
 * results have one, because their phases are never neighbours (dispatch, combine).
 *
 * A message says which object it is for (a key that the ranks agreed on), its phase, its kind, and
 * which bytes of the sender's place it has. The receiver checks all of it and names the memory;
 * messages of other objects and of past phases are dropped.
 * Thread: engine; ep_ucx_abort any. */
#ifndef BATON_KERNELS_EP_EP_UCX_H
#define BATON_KERNELS_EP_EP_UCX_H

#include <stdatomic.h>

#include "kernels/ep/ep_backend.h"
#include "kernels/ep/ep_host_rows.h"
#include "kernels/host/run_delay.h"
#include "kernels/host/window.h"
#include "shared/fabric/ucx.h"

enum { EP_UCX_TURNS = 2 };

enum ep_ucx_kind {
    EP_UCX_HELLO,
    EP_UCX_PLAN,    /* rows for each rank, then for each of the receiver's experts */
    EP_UCX_ORDER,   /* rows for each of the receiver's experts, then which of ROWS they are */
    EP_UCX_ROWS,    /* each row that chose an expert of the receiver, once */
    EP_UCX_RESULTS, /* of each (expert, row), in the order of the receiver's plan */
    EP_UCX_PART,    /* of a collective */
    EP_UCX_FAULT    /* of no phase; `at` is the word */
};

struct ep_ucx_head {
    uint64_t key;
    uint32_t phase;
    uint16_t kind, rank;
    uint64_t at;    /* where in the place */
    uint64_t total; /* bytes of all messages of this phase from this rank to the receiver */
};

/* A word about a rank is enum ep_ucx_fault << 16 | rank + 1. */
enum ep_ucx_fault {
    EP_UCX_ABORTED = 1, /* ep_abort */
    EP_UCX_LEFT,        /* ep_free */
    EP_UCX_ENDED,       /* its connection ended */
    EP_UCX_SILENT,      /* no sign of life for timeout_ms */
    EP_UCX_EXPERT,      /* a row chose an expert that there is not */
    EP_UCX_CORRUPT      /* what it sent is impossible */
};

/* What came from a rank in a phase. */
struct ep_ucx_in {
    uint64_t got, total;
    bool here; /* something came */
    bool whole;
};

/* Bytes that lie together at the sender, those of results that travel as bf16 as f32. */
struct ep_ucx_run {
    enum ep_ucx_kind kind;
    const void *data;
    size_t n; /* as they travel */
};

/* What goes to a rank in the running phase. */
struct ep_ucx_out {
    uint64_t total, n, at; /* bytes; sent so far; those of the running kind */
    size_t cursor;         /* which run is next */
    struct ep_ucx_run run;
    size_t in_run; /* bytes of it that were sent */
    bool done;
};

/* Sizes in bytes, the same on all ranks; offsets in a window's tail, which follows the rows. */
struct ep_ucx_window {
    size_t rows_bytes, rows_stride; /* of a rank: bytes, and rows, from its first to the next's */
    size_t results, origins, sign, tail_bytes;
    int fd; /* until all have opened what they read; otherwise -1 */
};

/* What a rank tells the others of its window. */
struct ep_ucx_window_offer {
    uint64_t domain;
    struct window_offer window;
};

/* Whose windows a rank reads: a bit each. */
struct ep_ucx_readers {
    uint8_t bits[EP_RANKS_MAX / 8];
};

struct ep_ucx {
    struct ep base; /* first */
    struct fabric *fabric;
    uint64_t key, nonce;
    const struct ep_host_rows *rows_loop;

    /* windows (ep_ucx_window.c) */
    struct ep_ucx_window window;
    char *rows;       /* [size, rows_stride]: own rows as they travel, near ranks', and those that
                       * came */
    char **tails;     /* [size]; NULL: a far rank's */
    bool *reads_mine; /* [size] */
    bool is_read;     /* by some rank */

    /* memory, mapped as one (ep_ucx.c) */
    char *memory;
    size_t memory_bytes;
    size_t row_bytes, scales_at, back_bytes, plan_bytes, order_bytes, part_bytes;
    char *results; /* [max_rows n_used] that came, in the order of the plan */
    char *plans;   /* [EP_UCX_TURNS, size] */
    char *orders;  /* [size] */
    char *parts;   /* [EP_UCX_TURNS, size] of a collective */

    /* phases (ep_ucx_phase.c) */
    uint32_t phase;                     /* the running or last one */
    struct ep_ucx_in *in[EP_UCX_TURNS]; /* [size], by the phase's turn */
    int32_t n_whole[EP_UCX_TURNS];      /* ranks of which all has come */
    struct ep_ucx_out *out;             /* [size] */
    uint64_t n_messages;                /* that came */
    uint32_t fault, heard;              /* words: reported by this rank; heard of */
    bool is_settled;                    /* nothing is sent from callers' memory since the fault */
    bool *told, *gone;                  /* [size]: told of the fault; nothing more comes from it */
    atomic_int busy;                    /* a thread uses the fabric */
    int wake_fd;                        /* ep_abort writes it */
    bool may_spin;
    uint64_t busy_until_ns; /* clock_ns; until then nobody spins */
    struct run_delay delay;
    int32_t wait_ms; /* a phase's deadline */
    /* The next run for a rank from the cursor on, which moves; false: there is none. */
    bool (*next)(struct ep_ucx *u, int32_t to, size_t *cursor, struct ep_ucx_run *run);

    /* the running call (ep_ucx_rows.c, ep_ucx_collect.c) */
    int32_t *chosen, *index; /* [max_rows n_used]: physical expert of a (row, choice), and which of
                              * this rank's rows for it */
    int32_t *begin;          /* [n_physical + 1]: the plan, rows sorted by physical expert */
    int32_t *owner;          /* [n_physical] */
    int32_t *to_ranks;       /* [size]: rows for each */
    int32_t *order;          /* orders for all ranks, one after the other */
    int32_t *sent, *n_sent;  /* [size, max_rows]: rows that go to a rank; [size] */
    int32_t *last_sent;      /* [size]: scratch */
    int32_t *origin;         /* [n_local, size]: first slot; in the own window */
    size_t *cursors;         /* [size]: scratch */
    int32_t *by_expert, *slot_begin, *x_rows;
    const float *out_rows; /* of ep_combine */
    const void *part;      /* of a collective */
    size_t n_part;
};

static inline struct ep_ucx *ep_ucx_of(struct ep *e) { return (struct ep_ucx *)e; }

static inline int32_t ep_ucx_first(const struct ep_ucx *u, int32_t rank)
{
    return u->base.config.placement.first[rank];
}
/* Own rows for the experts of a rank. */
static inline size_t ep_ucx_n_for(const struct ep_ucx *u, int32_t rank)
{
    return (size_t)(u->begin[ep_ucx_first(u, rank + 1)] - u->begin[ep_ucx_first(u, rank)]);
}
static inline int32_t *ep_ucx_plan(const struct ep_ucx *u, int32_t rank)
{
    const size_t turn = u->phase % EP_UCX_TURNS, size = (size_t)u->base.config.size;
    return (int32_t *)(void *)(u->plans + (turn * size + (size_t)rank) * u->plan_bytes);
}
static inline int32_t *ep_ucx_order(const struct ep_ucx *u, int32_t rank)
{
    return (int32_t *)(void *)(u->orders + (size_t)rank * u->order_bytes);
}
static inline char *ep_ucx_part(const struct ep_ucx *u, int32_t rank)
{
    const size_t turn = u->phase % EP_UCX_TURNS, size = (size_t)u->base.config.size;
    return u->parts + (turn * size + (size_t)rank) * u->part_bytes;
}
static inline const struct ep_ucx_in *ep_ucx_in(const struct ep_ucx *u, int32_t rank)
{
    return &u->in[u->phase % EP_UCX_TURNS][rank];
}

/* ---- windows: of an object with experts ---- */

/* Sets u->window from the sizes of rows. */
void ep_ucx_lay_out_window(struct ep_ucx *u);
/* Makes the own window. On failure ep_ucx_close_windows frees what there is. */
enum status ep_ucx_open_window(struct ep_ucx *u, struct err *err) MUST_CHECK;
struct ep_ucx_window_offer ep_ucx_offer_window(const struct ep_ucx *u);
/* Maps the windows of near ranks, and memory for the rows of the others. offers [size]. */
enum status ep_ucx_open_others(struct ep_ucx *u, const struct ep_ucx_window_offer *offers,
                               struct ep_ucx_readers *out, struct err *err) MUST_CHECK;
/* What another rank has said that it reads. */
void ep_ucx_note_reader(struct ep_ucx *u, int32_t rank, const struct ep_ucx_readers *theirs);
/* All have opened what they read. */
void ep_ucx_close_fd(struct ep_ucx *u);
void ep_ucx_close_windows(struct ep_ucx *u);

static inline float *ep_ucx_own_results(const struct ep_ucx *u)
{
    return (float *)(void *)(u->tails[u->base.config.rank] + u->window.results);
}

/* ---- phases ---- */

/* The callbacks of the object's fabric. */
struct fabric_events ep_ucx_events(struct ep_ucx *u);
void ep_ucx_init_phases(struct ep_ucx *u);
/* A call of the object begins: no other thread uses the fabric until ep_ucx_leave. Takes what has
 * come. The fault that this rank has reported or heard of. */
enum status ep_ucx_enter(struct ep_ucx *u, struct err *err) MUST_CHECK;
/* The same without looking for faults: for the second half of a phase. */
void ep_ucx_resume(struct ep_ucx *u);
/* Returns st. */
enum status ep_ucx_leave(struct ep_ucx *u, enum status st);
/* Begins a phase; out[].total says how much goes to each rank, `next` what. Does not wait. */
void ep_ucx_begin(struct ep_ucx *u,
                  bool (*next)(struct ep_ucx *, int32_t, size_t *, struct ep_ucx_run *));
/* Waits until all has come and what was sent may be written again. ERR_PEER_LOST, ERR_INVALID,
 * ERR_INTERNAL with the rank; ERR_CANCELED: ep_abort. */
enum status ep_ucx_wait(struct ep_ucx *u, struct err *err) MUST_CHECK;
/* Reports a fault to all ranks, unless this rank has reported one before, and returns its fault. */
enum status ep_ucx_raise(struct ep_ucx *u, enum ep_ucx_fault fault, int32_t rank,
                         struct err *err) MUST_CHECK;
enum status ep_ucx_fault_of(const struct ep_ucx *u, struct err *err) MUST_CHECK;
void ep_ucx_abort(struct ep *e);

/* ---- of struct ep_ops ---- */

enum status ep_ucx_plan_rows(struct ep *e, const int32_t *experts, struct ep_counts *out,
                             struct err *err) MUST_CHECK;
enum status ep_ucx_dispatch_begin(struct ep *e, const float *x, size_t x_stride,
                                  struct err *err) MUST_CHECK;
enum status ep_ucx_dispatch_end(struct ep *e, struct ep_batch *out, struct err *err) MUST_CHECK;
enum status ep_ucx_combine(struct ep *e, const struct ep_combine_args *a,
                           struct err *err) MUST_CHECK;
struct ep_places ep_ucx_places(const struct ep *e);
enum status ep_ucx_all_reduce(struct ep *e, void *x, size_t n, enum dtype dtype,
                              struct err *err) MUST_CHECK;
enum status ep_ucx_all_gather(struct ep *e, void *all, const void *mine, size_t bytes,
                              struct err *err) MUST_CHECK;
enum status ep_ucx_gather_columns(struct ep *e, const struct ep_columns *a,
                                  struct err *err) MUST_CHECK;

#endif
