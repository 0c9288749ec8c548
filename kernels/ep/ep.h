/* ep.h - experts and sums over several ranks: one ops table (rows: self, peer, nccl; rows over
 * shared memory and UCX may follow).
 *
 * A rank owns some of a layer's experts and has rows of its own. Rows go to the ranks that own the
 * experts chosen for them (dispatch), the owners compute, results come back and are added up with
 * their weights (combine):
 *
 *     ep_plan       who gets how much        experts [n_rows, n_used] of this rank's rows
 *     ep_dispatch   rows go out              x [n_rows, hidden]; what arrived is grouped by local expert: struct ep_batch
 *     ..            the caller computes every slot of the batch
 *     ep_combine    results come back        y[i] = (add ? y[i] : 0) + sum over j ascending of weights[i][j] * result[i][j], fused multiply-adds
 *
 * always in this order, on all ranks, ranks without rows included: every rank waits for every
 * other. Between them all_reduce and all_gather may be called, at the same places on all ranks.
 *
 *   row    where             modes                        how
 *   self   any memory        both                         one rank. On the host plain C, which is the definition; on a card one rank of `peer`
 *   peer   cards of a host   low latency                  kernels write into the others' memory (CUDA IPC), tell by flags, wait for flags with a
 *                                                         deadline; the host does nothing, and
 *                                                         calls may be recorded in a CUDA graph
 *   nccl   cards             throughput and low latency   NCCL, loaded when the row is opened
 *
 * Throughput: the host learns how much arrives (ep_plan waits for the card). Low latency: room is
 * fixed, nothing is read back. The room is max_rows * n_used for every pair of ranks, in which a
 * sender's rows lie sorted by expert: any choice fits, and it takes less than a fixed room for
 * every pair of rank and expert does as soon as a rank has more than n_used experts.
 *
 * Equal bits: slots are sorted by expert, then sending rank, row and choice. A result depends on
 * its row alone (the rule of kernels.h) and sums run over choices, or ranks, ascending. So y is the
 * same bit for bit at any number of ranks, for any placement of experts and any row. Rows travel as
 * f32, bf16 (to nearest even: what products take anyway) or e4m3 with a scale for every 128
 * elements (s = max|x| / 448, 1 where that is 0; q = e4m3(x / s)); results as f32 or bf16.
 *
 * Faults: a rank that gives no sign for timeout_ms is an error of ep_wait on all others, never a
 * hang, and the object is good for nothing after it but ep_free. What was computed after the fault
 * is garbage: call ep_wait before results leave the card.
 *
 * Calls put work on the device's stream and return, but where said. Life cycle: ep_create, calls,
 * ep_free. Thread: loading thread, then engine. */
#ifndef BATON_KERNELS_EP_EP_H
#define BATON_KERNELS_EP_EP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/device.h"
#include "kernels/dtype.h"

enum {
    EP_RANKS_MAX = 256,
    EP_PEERS_MAX = 8 /* ranks of `peer`: cards of one host */,
    EP_SCALE_STEP = 128 /* elements that share a scale */
};

enum ep_mode { EP_THROUGHPUT, EP_LOW_LATENCY };

/* Gives `bytes` bytes of every rank to every rank: all [size][bytes] by rank. Blocks; a rank that
 * does not come within the callback's own deadline is an error. Only ep_create and ep_free call
 * it. */
typedef enum status (*ep_exchange_fn)(void *arg, const void *mine, size_t bytes, void *all,
                                      struct err *err);

/* Where experts are. Routers choose logical ones; a logical expert has one physical expert or
 * several of equal weights, which take its rows in turn: physical[copies[e] + (row + rank) % number
 * of copies]. */
struct ep_placement {
    int32_t n_logical, n_physical;
    const int32_t *first;    /* [size + 1]: rank r owns first[r] .. first[r + 1] - 1 of the physical
                              * ones; none is allowed */
    const int32_t *copies;   /* [n_logical + 1]: expert e's are physical[copies[e]] ..
                              * physical[copies[e + 1] - 1]; NULL: expert e is physical e */
    const int32_t *physical; /* [copies[n_logical]] */
};

/* The same on all ranks but for rank, device and exchange_arg: ep_create compares. Arrays are
 * copied. */
struct ep_config {
    const char *backend;   /* "self", "peer", "nccl" */
    struct device *device; /* kept; all pointers of calls are to its memory */
    int32_t rank, size;
    enum ep_mode mode;
    int32_t max_rows, hidden, n_used; /* rows of one rank in one call */
    struct ep_placement placement;    /* n_logical 0: no experts, sums alone */
    enum dtype send;                  /* rows: DTYPE_F32, DTYPE_BF16 or DTYPE_F8_E4M3 */
    enum dtype back;                  /* results: DTYPE_F32 or DTYPE_BF16 */
    size_t max_slots;                 /* throughput: rows that a rank can take in one call; 0:
                                       * all that the others could send */
    size_t collective_bytes;          /* of one rank in one all_reduce or all_gather */
    int32_t timeout_ms;               /* how far ranks may drift apart: one step's longest work,
                                       * and more */
    ep_exchange_fn exchange;          /* may be NULL for `self` */
    void *exchange_arg;
};

/* What ep_plan learnt, good until the next. */
struct ep_counts {
    size_t n_slots;           /* rows that will arrive: exactly, or in low latency mode at most */
    const int32_t *by_expert; /* [n_local], the host's: rows of each local expert; NULL in low
                               * latency mode */
};

/* What arrived, in the device's memory and good until the next dispatch. Slot s is row x_rows[s] of
 * x. */
struct ep_batch {
    size_t n_slots; /* as ep_counts */
    int32_t n_local;
    const int32_t *begin;  /* [n_local + 1]: slots of each local expert */
    const int32_t *x_rows; /* [n_slots] */
    const void *x;         /* rows row_bytes apart, a multiple of 128: `hidden` elements of
                            * config.send, zeros up to a multiple of 64 */
    size_t row_bytes;
    size_t scales_at; /* bytes from a row's beginning to its f32 scales; 0: none */
};

struct ep_combine_args {
    const float *out;     /* [n_slots, hidden]: the slots' results */
    const float *weights; /* [n_rows, n_used] */
    float *y;             /* [n_rows, hidden] */
    bool add;
};

struct ep;

struct ep_ops {
    const char *name;
    bool on_host; /* works on the host's memory; otherwise on a card's */
    /* c has been checked */
    enum status (*create)(const struct ep_config *c, struct ep **out, struct err *err);
    void (*free)(struct ep *e);
    /* e->n_rows of them */
    enum status (*plan)(struct ep *e, const int32_t *experts, struct ep_counts *out,
                        struct err *err);
    enum status (*dispatch)(struct ep *e, const float *x, size_t x_stride, struct ep_batch *out,
                            struct err *err);
    enum status (*combine)(struct ep *e, const struct ep_combine_args *a, struct err *err);
    enum status (*all_reduce)(struct ep *e, void *x, size_t n, enum dtype dtype, struct err *err);
    enum status (*all_gather)(struct ep *e, void *all, const void *mine, size_t bytes,
                              struct err *err);
    enum status (*wait)(struct ep *e, struct err *err);
};

enum ep_state { EP_IDLE, EP_PLANNED, EP_DISPATCHED };

struct ep {
    const struct ep_ops *ops;
    struct ep_config config; /* arrays are the object's own; copies and physical are always
                              * there */
    int32_t n_local;         /* experts of this rank */
    size_t n_rows;           /* of the running plan */
    enum ep_state state;
};

/* ERR_UNSUPPORTED: no such row in this build, or it cannot do what the configuration says.
 * ERR_INVALID: sizes that cannot be. ERR_PEER_MISMATCH: another rank has another configuration.
 * ERR_PEER_REFUSED: another rank failed. ERR_PEER_LOST, ERR_NOMEM, ERR_NODEV. Collective. */
enum status ep_create(const struct ep_config *c, struct ep **out, struct err *err) MUST_CHECK;
/* Collective where no fault was told: memory goes when nobody writes to it any more. NULL is
 * accepted. */
void ep_free(struct ep *e);
/* experts [n_rows, n_used], each 0 .. n_logical - 1; n_rows at most max_rows, 0 allowed. out may be
 * NULL. Throughput: waits, and gives ERR_FULL on all ranks alike when one of them would get more
 * than max_slots; then nothing was begun. */
enum status ep_plan(struct ep *e, const int32_t *experts, size_t n_rows, struct ep_counts *out,
                    struct err *err) MUST_CHECK;
/* x [n_rows, hidden], x_stride floats apart. */
enum status ep_dispatch(struct ep *e, const float *x, size_t x_stride, struct ep_batch *out,
                        struct err *err) MUST_CHECK;
enum status ep_combine(struct ep *e, const struct ep_combine_args *a, struct err *err) MUST_CHECK;
/* x[i] = sum over ranks ascending of their x[i]; DTYPE_F32, or DTYPE_BF16, which is added in f32
 * and rounded once. */
enum status ep_all_reduce(struct ep *e, void *x, size_t n, enum dtype dtype,
                          struct err *err) MUST_CHECK;
/* all [size][bytes] by rank. */
enum status ep_all_gather(struct ep *e, void *all, const void *mine, size_t bytes,
                          struct err *err) MUST_CHECK;
/* Waits until all work is over or a rank is lost: ERR_PEER_LOST with its number where that is
 * known, or the card's fault. */
enum status ep_wait(struct ep *e, struct err *err) MUST_CHECK;

/* NCCL's version as it writes it (22809), 0 where the build has the row and this host no library,
 * -1 where the build has no such row. */
int ep_nccl_version(void);

#endif
