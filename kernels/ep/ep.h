/* ep.h - expert parallelism: dispatch of rows to the ranks that own their experts, combine of the
 * results, and sums and gathers over ranks. docs/kernels.md, "Expert parallelism", has the design,
 * docs/parallelism.md the steps.
 *
 * Backends are `self` (one rank, the definition), `shm` (CPUs of one host), `ucx` (CPUs of
 * several, memory is shared inside each), `peer` (GPUs of one host by CUDA IPC), `nccl`. y is the
 * same bit for bit for any number of ranks, placement of experts and backend. Faults: a rank
 * without a sign of life for timeout_ms is an error on all others, never a hang: of the call that
 * waits for it on the CPU, of ep_wait on a GPU. Then only ep_free may be called. Results after a
 * fault are garbage: call ep_wait before they leave the GPU. Life cycle: ep_create; ep_plan,
 * ep_dispatch, ep_combine in this order on all ranks; ep_free.
 * Thread: loading, then engine; ep_abort any. On a GPU calls enqueue work on the device's stream
 * and return, except where they say otherwise; on the CPU they return when their work is done. */
#ifndef BATON_KERNELS_EP_EP_H
#define BATON_KERNELS_EP_EP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/device.h"
#include "kernels/dtype.h"

enum {
    EP_RANKS_MAX = 256,
    EP_PEERS_MAX = 8 /* ranks of `peer`: GPUs of one host */,
    EP_MAPS_MAX = 1024,
    EP_SCALE_STEP = 128,  /* elements that share a scale */
    EP_WORDS_BYTES = 256, /* the least collective_bytes of ep_config.words */
    EP_PROGRESS_MS = 100
};

enum ep_mode { EP_THROUGHPUT, EP_LOW_LATENCY };

/* Gives `bytes` bytes of every rank to every rank: all [size][bytes] by rank. Blocks; a rank that
 * is missing at the callback's own deadline is an error. Only ep_create and ep_free call it. */
typedef enum status (*ep_exchange_fn)(void *arg, const void *mine, size_t bytes, void *all,
                                      struct err *err);

/* Placement of experts. Routers choose logical ones; a logical expert has one physical expert or
 * several with equal weights, its copies, which take its rows in turn: of its copies ascending,
 * number (row + rank) % number of copies. A map says which logical expert each physical one is. */
struct ep_placement {
    int32_t n_logical, n_physical;
    const int32_t *first;   /* [size + 1]: rank r owns physical experts first[r] .. first[r + 1] -
                             * 1, maybe none */
    int32_t n_maps;         /* 0 or 1: one for all calls; more: each call says which */
    const int32_t *logical; /* [n_maps, n_physical], with every logical expert at least once in
                             * each map; NULL: physical e is e, and n_physical == n_logical */
};

/* The sizes, types, mode, timeout_ms, backend and placement are the same on all ranks: ep_create
 * compares them. The rest is each rank's own. Arrays are copied. */
struct ep_config {
    const char *backend;   /* "self", "shm", "ucx", "peer", "nccl" */
    struct device *device; /* kept; all pointers of calls are its memory */
    int32_t rank, size;
    uint64_t domain; /* `ucx`: ranks with other numbers share no memory, even on one host */
    enum ep_mode mode;
    int32_t max_rows, hidden, n_used; /* rows of one rank in one call */
    struct ep_placement placement;    /* n_logical 0: no experts, only sums */
    enum dtype send;                  /* rows: DTYPE_F32, DTYPE_BF16 or DTYPE_F8_E4M3 */
    enum dtype back;                  /* results: DTYPE_F32 or DTYPE_BF16 */
    size_t max_slots;                 /* throughput: rows that a rank can receive in one call; 0:
                                       * all that the others could send */
    size_t collective_bytes;          /* of one rank in one all_reduce, all_gather or
                                       * gather_columns */
    int32_t timeout_ms;               /* how far ranks may drift apart: more than one step's
                                       * longest work */
    int32_t connect_ms;               /* `ucx`: how long a rank may give no sign while all connect;
                                       * 0: 10,000 */
    ep_exchange_fn exchange;          /* may be NULL for `self` */
    void *exchange_arg;
    /* `ucx`: asked now and then while ep_create waits for other ranks; false: it ends with
     * ERR_CANCELED. NULL: nobody is. */
    bool (*is_wanted)(void *arg);
    void *is_wanted_arg;
    /* While a call waits for others on the CPU, or ep_wait does, it counts up every
     * EP_PROGRESS_MS, by __atomic builtins: who waits is not stuck. NULL: nobody looks. */
    uint64_t *progress;
    /* On a GPU: an object of the same ranks on their CPUs, for ep_gather_words, through which they
     * also part. The new object owns it: it is aborted and freed with it. NULL: none */
    struct ep *words;
    /* On a GPU, in its memory, which outlives the object: calls add up [n_logical] the rows that
     * this rank's experts computed, by logical expert, and then, behind them, how many of those
     * were rows of this rank. NULL: nobody looks. */
    uint64_t *load;
};

/* The rows of an ep_plan. */
struct ep_rows {
    int32_t map;            /* the same on all ranks, 0 where there is one */
    const int32_t *experts; /* [n, n_used], each 0 .. n_logical - 1 */
    size_t n;               /* at most max_rows, may be 0 */
    /* Of backends whose calls a CUDA graph can have (ep_is_capturable), in the GPU's memory: */
    const int32_t *n_real; /* how many rows are real when the call runs: the others are padding,
                            * which goes nowhere, and whose y stays as it is. NULL: all */
    int32_t first_row;     /* of these rows among those that *n_real counts */
    uint64_t *chosen;      /* [n_logical], to which the rows that chose each expert are added. NULL:
                            * nobody looks */
};

/* The counts of ep_plan, valid until the next call. */
struct ep_counts {
    size_t n_slots;           /* rows that will arrive: exactly, or in low latency mode at most */
    size_t n_own;             /* of them those of this rank; 0 in low latency mode */
    const int32_t *by_expert; /* [n_local], host memory: rows of each local expert; NULL in low
                               * latency mode */
};

/* Received rows, in device memory and valid until ep_combine. Slot s is row x_rows[s] of x. */
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

/* Where operands are read in place, so that calls copy less; NULL: the backend has no such place.
 * Both are the object's memory. */
struct ep_places {
    float *rows;    /* [max_rows, hidden]. An x of ep_dispatch that begins here with x_stride
                     * == hidden is not copied. May be written again once the ep_combine that used
                     * it has returned. */
    float *results; /* [as many as n_slots can be, hidden]. An `out` of ep_combine that begins here
                     * is read in place by the other ranks. May be written again once a later
                     * ep_dispatch_end, or a throughput ep_plan, has returned: then every rank has
                     * left that ep_combine. */
};

struct ep;

/* The arguments of ep_gather_columns. */
struct ep_columns {
    float *y;
    const float *mine;
    size_t y_stride, mine_stride, n_rows;
    const size_t *first; /* [size + 1] */
};

struct ep_ops {
    const char *name;
    bool on_host;       /* works on host memory; otherwise on a GPU's */
    bool is_capturable; /* a CUDA graph can have its calls, which end by themselves when a rank is
                         * lost */
    /* c has been checked */
    enum status (*create)(const struct ep_config *c, struct ep **out, struct err *err);
    void (*free)(struct ep *e);
    /* e->n_rows of them, placed by e->map */
    enum status (*plan)(struct ep *e, const int32_t *experts, struct ep_counts *out,
                        struct err *err);
    enum status (*dispatch_begin)(struct ep *e, const float *x, size_t x_stride, struct err *err);
    enum status (*dispatch_end)(struct ep *e, struct ep_batch *out, struct err *err);
    enum status (*combine_begin)(struct ep *e, const struct ep_combine_args *a, struct err *err);
    enum status (*combine_end)(struct ep *e, const struct ep_combine_args *a, struct err *err);
    enum status (*all_reduce)(struct ep *e, void *x, size_t n, enum dtype dtype, struct err *err);
    enum status (*all_gather)(struct ep *e, void *all, const void *mine, size_t bytes,
                              struct err *err);
    /* the sizes have been checked, and there is something to gather */
    enum status (*gather_columns)(struct ep *e, const struct ep_columns *a, struct err *err);
    enum status (*wait)(struct ep *e, struct err *err);
    enum status (*found)(struct ep *e, struct err *err);
    /* any thread; e->aborted is set */
    void (*abort)(struct ep *e);
    struct ep_places (*places)(const struct ep *e);
};

/* What a rank has done since its object was made, for metrics; backends that do not count leave
 * zeros. LIMIT: GPUs' do not; their rows are ep_config.load's. */
struct ep_traffic {
    uint64_t waited_ns;      /* for other ranks to come, and for what they sent */
    uint64_t sent, received; /* bytes of other ranks' memory or messages; in shared memory what the
                              * others read here, and what this rank read there */
};

enum ep_state { EP_IDLE, EP_PLANNED, EP_BEGUN, EP_DISPATCHED, EP_RETURNED };

struct ep {
    const struct ep_ops *ops;
    struct ep_config config;    /* arrays are the object's own; with experts there is at least one
                                 * map, and `logical` is not NULL */
    int32_t *copies, *physical; /* [n_maps, n_logical + 1], [n_maps, n_physical]: in a map, expert
                                 * e's copies are physical[copies[e]] .. physical[copies[e + 1] -
                                 * 1], ascending */
    int32_t n_local;            /* experts of this rank */
    int32_t n_near;             /* other ranks whose rows and results are read where they are */
    int32_t map;                /* of the running plan, as the next four */
    size_t n_rows;
    const int32_t *n_real;
    int32_t first_row;
    uint64_t *chosen;
    enum ep_state state;
    struct ep_combine_args combine; /* between its halves */
    struct ep_traffic traffic;      /* read by the thread that makes the calls */
    int aborted; /* written by ep_abort on any thread: only by __atomic builtins, as C++ reads this
                  * header too */
};

/* Collective. ERR_UNSUPPORTED: no such backend in this build, or it does not support the
 * configuration. ERR_INVALID: impossible sizes. ERR_PEER_MISMATCH: another rank has another
 * configuration. ERR_PEER_REFUSED: another rank failed. ERR_PEER_LOST, ERR_NOMEM, ERR_NODEV. */
enum status ep_create(const struct ep_config *c, struct ep **out, struct err *err) MUST_CHECK;
/* Collective unless a fault was reported: memory is freed when no rank writes to it any more. NULL
 * is accepted. */
void ep_free(struct ep *e);
/* ep_abort, then ep_free: gives up an object without the other ranks. NULL is accepted. */
void ep_discard(struct ep *e);
/* out may be NULL. Throughput: waits, and returns ERR_FULL on all ranks if one of them would
 * receive more than max_slots; then nothing was begun. */
enum status ep_plan(struct ep *e, const struct ep_rows *rows, struct ep_counts *out,
                    struct err *err) MUST_CHECK;
/* x [n_rows, hidden], x_stride floats apart. */
enum status ep_dispatch(struct ep *e, const float *x, size_t x_stride, struct ep_batch *out,
                        struct err *err) MUST_CHECK;
/* ep_dispatch in two halves: between them the caller may compute (the shared expert) while rows
 * travel. x stays as it is until ep_dispatch_end has returned. */
enum status ep_dispatch_begin(struct ep *e, const float *x, size_t x_stride,
                              struct err *err) MUST_CHECK;
enum status ep_dispatch_end(struct ep *e, struct ep_batch *out, struct err *err) MUST_CHECK;
/* x [hidden]: the row of a slot of the last ep_dispatch as f32, of host memory. */
void ep_read_row(const struct ep *e, const struct ep_batch *b, size_t slot, float *x);
enum status ep_combine(struct ep *e, const struct ep_combine_args *a, struct err *err) MUST_CHECK;
/* ep_combine in two halves: between them the caller may compute what the results are added to (y)
 * while they travel, and makes no other call of the object. *a is copied; what it names stays,
 * but for y, until ep_combine_end has returned. `shm`, `ucx` and `nccl` do all of it at the end. */
enum status ep_combine_begin(struct ep *e, const struct ep_combine_args *a,
                             struct err *err) MUST_CHECK;
enum status ep_combine_end(struct ep *e, struct err *err) MUST_CHECK;
/* x[i] = sum over ranks ascending of their x[i]; DTYPE_F32, or DTYPE_BF16, which is added in f32
 * and rounded once. */
enum status ep_all_reduce(struct ep *e, void *x, size_t n, enum dtype dtype,
                          struct err *err) MUST_CHECK;
/* all [size][bytes] by rank. */
enum status ep_all_gather(struct ep *e, void *all, const void *mine, size_t bytes,
                          struct err *err) MUST_CHECK;
/* Gathers a matrix that is cut by columns. y [n_rows, first[size]] f32, y_stride floats apart:
 * columns first[r] .. first[r + 1] - 1 are rank r's `mine` [n_rows, first[r + 1] - first[r]],
 * mine_stride floats apart. A rank may have no columns. n_rows and first are the same on all ranks;
 * n_rows * columns * 4 bytes of one rank are at most collective_bytes. `mine` may lie inside y at
 * its own columns. */
enum status ep_gather_columns(struct ep *e, float *y, size_t y_stride, const float *mine,
                              size_t mine_stride, size_t n_rows, const size_t *first,
                              struct err *err) MUST_CHECK;
/* The object through which the ranks exchange what is in their hosts' memory: ep_config.words where
 * e's is a GPU's. */
struct ep *ep_of_hosts(struct ep *e);
/* ep_all_gather of it. */
enum status ep_gather_words(struct ep *e, void *all, const void *mine, size_t bytes,
                            struct err *err) MUST_CHECK;
#ifndef __cplusplus /* there a function's name would hide the struct's */
/* Where x and results may lie so that they are read in place. */
struct ep_places ep_places(const struct ep *e);
#endif
/* Waits until all work is complete or a rank is lost: ERR_PEER_LOST with its number if that is
 * known, or the GPU's fault. */
enum status ep_wait(struct ep *e, struct err *err) MUST_CHECK;
/* Can its calls be part of a CUDA graph, which is replayed as if they were made again? Ranks may
 * differ in which of their calls are. Their kernels end by themselves when a rank is lost. */
bool ep_is_capturable(const struct ep *e);
/* Without waiting: the fault that ep_wait would report, if it is known so far. Once work of a
 * capturable object is complete, all that may have spoiled it is known. */
enum status ep_found(struct ep *e, struct err *err) MUST_CHECK;
/* Ends the calls of this object: a call that waits, and every later one but ep_free, returns
 * ERR_CANCELED on this rank, and ERR_PEER_LOST naming this rank on the others, at once and not
 * after timeout_ms. Any thread; may be called more than once, not during or after ep_free. LIMIT:
 * through `nccl` the others find out by their deadline, and through `peer` too unless this rank's
 * GPU was waiting for them. */
void ep_abort(struct ep *e);

/* The memory of its GPU that an object of `peer` takes, for a placement of so many experts and
 * maps. c: all but backend, device and what is said of meeting. 0: a build without the backend. */
size_t ep_peer_bytes(const struct ep_config *c);

/* NCCL's version in its own notation (22809); 0: the build has the backend, the host has no
 * library; -1: the build has no such backend. */
int ep_nccl_version(void);

#endif
