/* ep_nccl.c - expert parallelism over NCCL: rows and results travel by grouped sends, counts by an
 * all-gather; ep_kernels.h has the kernels before and after them.
 *
 * In throughput mode the host reads the counts of all ranks, and sends have exact sizes. In low
 * latency mode sends have the maximum size. all_reduce adds in the order of ranks, which NCCL's own
 * does not promise: every rank receives one part from all, adds it up and sends it to all. The
 * communicator is non-blocking: its progress is polled, here and in ep_wait, and it is aborted if
 * nothing arrives for timeout_ms. NCCL does not say which rank was missing. Source: NCCL's user
 * guide, "Fault Tolerance", "Point-to-point communication". LIMIT: in low latency mode each pair of
 * ranks exchanges max_rows * n_used rows, however few are filled. `peer` does not.
 * Thread: as ep.h says. */
#include <assert.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "kernels/ep/ep_cuda.h"
#include "kernels/ep/nccl_api.h"
#include "shared/base/arith.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

static_assert(sizeof(ncclUniqueId) <= EP_PAYLOAD_BYTES, "the id's room");

/* Rows in transit between this rank and another: the first, and their number. */
struct ep_nccl_span {
    size_t at, n;
};

struct ep_nccl {
    struct ep_cuda cuda; /* first */
    struct nccl_api nccl;
    ncclComm_t comm;    /* NULL before it is created and after it was aborted */
    struct err failure; /* why it was aborted; OK if it was not */
    struct dev_mem out; /* rows to send, then results to send back */
    int32_t *counts;    /* pinned, [size][n_physical] */
    struct ep_nccl_span to[EP_RANKS_MAX], from[EP_RANKS_MAX]; /* of the running plan */
    size_t n_slots;
};

static struct ep_nccl *nccl_of(struct ep *e) { return (struct ep_nccl *)e; }

/* ---- patience ---- */

enum { SPIN_NS = 1000000, SLEEP_US = 50 };

struct ep_nccl_deadline {
    uint64_t begin_ns, limit_ns;
};

static struct ep_nccl_deadline deadline_of(const struct ep_nccl *n)
{
    return (struct ep_nccl_deadline){ clock_ns(),
                                      (uint64_t)n->cuda.base.config.timeout_ms * 1000000 };
}

/* Pauses between two polls; returns false after the deadline. */
static bool poll_pause(const struct ep_nccl_deadline *p)
{
    const uint64_t waited = clock_ns() - p->begin_ns;
    if (waited > SPIN_NS) usleep(SLEEP_US);
    else sched_yield();
    return waited < p->limit_ns;
}

static enum status fail(struct ep_nccl *n, enum status code, const char *why, struct err *err)
{
    if (n->failure.code == OK) {
        err_set(&n->failure, code, "ep: NCCL, rank %d of %d: %s", n->cuda.base.config.rank,
                n->cuda.base.config.size, why);
        log_error("ranks lost each other", "why=%s", why);
        if (n->comm) (void)n->nccl.CommAbort(n->comm); /* ends its kernels too */
        n->comm = NULL;
    }
    if (err) *err = n->failure;
    return n->failure.code;
}

static enum status check_not_aborted(struct ep_nccl *n, struct err *err)
{
    return ep_is_aborted(&n->cuda.base) ? fail(n, ERR_CANCELED, "this rank was aborted", err) : OK;
}

static enum status fail_timeout(struct ep_nccl *n, struct err *err)
{
    char why[80];
    snprintf(why, sizeof why, "another rank gave no sign for %d ms",
             n->cuda.base.config.timeout_ms);
    return fail(n, ERR_PEER_LOST, why, err);
}

/* Reports an NCCL error. A peer's death shows as a system or remote error; all others are errors of
 * this rank. */
static enum status fail_nccl(struct ep_nccl *n, ncclResult_t r, struct err *err)
{
    const bool is_peer = r == ncclRemoteError || r == ncclSystemError;
    return fail(n, is_peer ? ERR_PEER_LOST : ERR_NODEV, n->nccl.GetErrorString(r), err);
}

/* Takes the result of an NCCL call and waits until the communicator is ready for the next call. */
static enum status wait_ready(struct ep_nccl *n, ncclResult_t r, struct err *err)
{
    const struct ep_nccl_deadline p = deadline_of(n);
    while (r == ncclInProgress) {
        TRY(check_not_aborted(n, err));
        if (!poll_pause(&p)) return fail_timeout(n, err);
        const ncclResult_t asked = n->nccl.CommGetAsyncError(n->comm, &r);
        if (asked != ncclSuccess) r = asked;
    }
    return r == ncclSuccess ? OK : fail_nccl(n, r, err);
}

static enum status check_healthy(struct ep_nccl *n, struct err *err)
{
    if (n->failure.code != OK && err) *err = n->failure;
    TRY(n->failure.code);
    return ep_cuda_fault(&n->cuda, err);
}

static enum status nccl_wait(struct ep *e, struct err *err)
{
    struct ep_nccl *n = nccl_of(e);
    const struct ep_nccl_deadline p = deadline_of(n);
    cudaError_t c;
    TRY(check_healthy(n, err));
    while ((c = cudaStreamQuery(n->cuda.device->stream)) == cudaErrorNotReady) {
        ncclResult_t r = ncclSuccess;
        (void)cudaGetLastError(); /* cudaErrorNotReady is no error */
        TRY(check_not_aborted(n, err));
        if (n->nccl.CommGetAsyncError(n->comm, &r) == ncclSuccess && r != ncclSuccess &&
            r != ncclInProgress)
            return fail_nccl(n, r, err);
        if (!poll_pause(&p)) return fail_timeout(n, err);
    }
    TRY(ep_cuda_check(&n->cuda, c, "expert parallelism", err));
    TRY(device_fault(e->config.device, err));
    return check_healthy(n, err);
}

/* ---- life ---- */

static enum status make_memory(struct ep_nccl *n, const struct ep_config *c, struct err *err)
{
    const bool packed = c->mode == EP_THROUGHPUT;
    const size_t pairs = ep_pair_slots(c), size = (size_t)c->size;
    n->cuda.back_slots = packed ? pairs : pairs * size;
    TRY(ep_cuda_init(&n->cuda, &ep_nccl_ops, c, packed, err));
    n->cuda.call.window[0] = n->cuda.call.own;
    if (c->placement.n_logical == 0) return OK;
    const struct ep_layout *l = &n->cuda.call.at;
    const size_t rows = (packed ? pairs : pairs * size) * l->row_bytes,
                 back = ep_max_slots(c) * l->back_bytes;
    const cudaError_t e = cudaHostAlloc((void **)&n->counts,
                                        sizeof *n->counts * size * (size_t)c->placement.n_physical,
                                        cudaHostAllocDefault);
    if (e != cudaSuccess)
        return err_set(err, ERR_NOMEM, "ep: no pinned memory: %s", cudaGetErrorString(e));
    TRY(device_mem_alloc(c->device, rows + back, DEVICE_MEM_PRIVATE, &n->out, err));
    n->cuda.call.out_rows = n->out.ptr;
    n->cuda.call.out_back = n->cuda.call.out_rows + rows;
    return OK;
}

static enum status connect_ranks(struct ep_nccl *n, enum status st, struct ep_hello *hellos,
                                 struct err *err)
{
    const struct ep_config *c = &n->cuda.base.config;
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    memset(&id, 0, sizeof id);
    if (st == OK && c->rank == 0 && n->nccl.GetUniqueId(&id) != ncclSuccess)
        st = err_set(err, ERR_NODEV, "ep: NCCL makes no id");
    TRY(ep_handshake(&n->cuda.base, st, &id, sizeof id, hellos, err));
    memcpy(&id, hellos[0].payload, sizeof id);
    config.blocking = 0;
    st = wait_ready(n, n->nccl.CommInitRankConfig(&n->comm, c->size, id, c->rank, &config), err);
    return ep_handshake(&n->cuda.base, st, NULL, 0, hellos, err);
}

static void nccl_release(struct ep_nccl *n)
{
    device_mem_free(n->cuda.base.config.device, &n->out);
    if (n->counts) (void)cudaFreeHost(n->counts);
    ep_cuda_release(&n->cuda);
}

static enum status nccl_create(const struct ep_config *c, struct ep **out, struct err *err)
{
    struct nccl_api api;
    if (!c->exchange)
        return err_set(err, ERR_INVALID,
                       "ep: the nccl backend needs an exchange, also for one rank");
    TRY(nccl_load(&api, err));
    struct ep_nccl *n = MEM_NEW(struct ep_nccl);
    struct ep_hello *hellos = MEM_ARRAY(struct ep_hello, (size_t)c->size);
    n->nccl = api;
    const enum status st = connect_ranks(n, make_memory(n, c, err), hellos, err);
    mem_free(hellos);
    if (st == OK) *out = &n->cuda.base;
    if (st != OK) {
        if (n->comm) (void)n->nccl.CommAbort(n->comm);
        nccl_release(n);
    }
    return st;
}

static void nccl_free(struct ep *e)
{
    struct ep_nccl *n = nccl_of(e);
    struct err err = { 0 };
    if (nccl_wait(e, &err) == OK && wait_ready(n, n->nccl.CommFinalize(n->comm), &err) == OK &&
        n->nccl.CommDestroy(n->comm) == ncclSuccess)
        n->comm = NULL;
    else if (err.code != OK) log_warn("ranks did not part together", "why=%s", err.text);
    if (n->comm) (void)n->nccl.CommAbort(n->comm);
    device_wait(e->config.device);
    nccl_release(n);
}

/* ---- exchanges ---- */

/* Within a group, a non-blocking communicator may return ncclInProgress from every call. */
static bool is_good(ncclResult_t r) { return r == ncclSuccess || r == ncclInProgress; }

/* Sends one range of rows to each rank and receives one from each; empty ranges are skipped on both
 * sides. */
static enum status exchange(struct ep_nccl *n, const unsigned char *from,
                            const struct ep_nccl_span *out, unsigned char *to,
                            const struct ep_nccl_span *in, size_t unit, struct err *err)
{
    const cudaStream_t stream = n->cuda.device->stream;
    ncclResult_t r = n->nccl.GroupStart();
    for (int i = 0; i < n->cuda.base.config.size && is_good(r); i++) {
        if (out[i].n)
            r = n->nccl.Send(from + out[i].at * unit, out[i].n * unit, ncclInt8, i, n->comm,
                             stream);
        if (in[i].n && is_good(r))
            r = n->nccl.Recv(to + in[i].at * unit, in[i].n * unit, ncclInt8, i, n->comm, stream);
    }
    const ncclResult_t ended = n->nccl.GroupEnd();
    return wait_ready(n, is_good(r) ? ended : r, err);
}

static enum status gather_counts(struct ep_nccl *n, struct err *err)
{
    const struct ep_call *c = &n->cuda.call;
    int32_t *counts = (int32_t *)(void *)(c->own + c->at.counts);
    TRY(ep_cuda_check(&n->cuda, ep_run_counts(n->cuda.device->stream, c),
                      "counting rows of experts", err));
    return wait_ready(n,
                      n->nccl.AllGather(counts + (size_t)c->rank * (size_t)c->n_physical, counts,
                                        (size_t)c->n_physical, ncclInt32, n->comm,
                                        n->cuda.device->stream),
                      err);
}

/* Returns how many rows rank `from` sends to rank `to`. */
static size_t rows_between(const struct ep_nccl *n, int from, int to)
{
    const struct ep_placement *p = &n->cuda.base.config.placement;
    size_t many = 0;
    for (int32_t x = p->first[to]; x < p->first[to + 1]; x++)
        many += (size_t)n->counts[(size_t)from * (size_t)p->n_physical + (size_t)x];
    return many;
}

/* Checks that the received rows fit. All ranks decide alike, because they see the same counts. */
static enum status check_room(const struct ep_nccl *n, struct err *err)
{
    const struct ep_config *c = &n->cuda.base.config;
    for (int to = 0; to < c->size; to++) {
        size_t many = 0;
        for (int from = 0; from < c->size; from++) many += rows_between(n, from, to);
        if (many > ep_max_slots(c))
            return err_set(err, ERR_FULL,
                           "ep: rank %d would get %zu rows at once, it has room for %zu", to, many,
                           ep_max_slots(c));
    }
    return OK;
}

static enum status learn_counts(struct ep_nccl *n, struct ep_counts *out, struct err *err)
{
    const struct ep_config *c = &n->cuda.base.config;
    const struct ep_call *call = &n->cuda.call;
    const size_t all = (size_t)c->size * (size_t)c->placement.n_physical;
    TRY(ep_cuda_check(&n->cuda,
                      cudaMemcpyAsync(n->counts, call->own + call->at.counts,
                                      all * sizeof *n->counts, cudaMemcpyDeviceToHost,
                                      n->cuda.device->stream),
                      "fetching counts", err));
    TRY(nccl_wait(&n->cuda.base, err));
    TRY(check_room(n, err));
    size_t to = 0, from = 0;
    for (int r = 0; r < c->size; r++) {
        n->to[r] = (struct ep_nccl_span){ to, rows_between(n, c->rank, r) };
        n->from[r] = (struct ep_nccl_span){ from, rows_between(n, r, c->rank) };
        to += n->to[r].n;
        from += n->from[r].n;
    }
    for (int32_t x = 0; x < n->cuda.base.n_local; x++) {
        n->cuda.host_counts[x] = 0;
        for (int r = 0; r < c->size; r++)
            n->cuda.host_counts[x] += n->counts[(size_t)r * (size_t)c->placement.n_physical +
                                                (size_t)(call->first_local + x)];
    }
    n->n_slots = from;
    *out = (struct ep_counts){ .n_slots = from,
                               .n_own = n->to[c->rank].n,
                               .by_expert = n->cuda.host_counts };
    return OK;
}

/* ---- calls ---- */

static enum status nccl_plan(struct ep *e, const int32_t *experts, struct ep_counts *out,
                             struct err *err)
{
    struct ep_nccl *n = nccl_of(e);
    const size_t pairs = ep_pair_slots(&e->config);
    TRY(check_healthy(n, err));
    n->cuda.call.experts = experts;
    n->cuda.call.n_rows = (int32_t)e->n_rows;
    n->cuda.call.map = e->map;
    TRY(ep_cuda_check(&n->cuda, ep_run_sort(n->cuda.device->stream, &n->cuda.call),
                      "sorting rows by expert", err));
    TRY(gather_counts(n, err));
    if (e->config.mode == EP_THROUGHPUT) return learn_counts(n, out, err);
    for (size_t r = 0; r < (size_t)e->config.size; r++)
        n->to[r] = n->from[r] = (struct ep_nccl_span){ r * pairs, pairs };
    *out = (struct ep_counts){ .n_slots = n->n_slots = ep_max_slots(&e->config) };
    return OK;
}

static enum status nccl_dispatch_begin(struct ep *e, const float *x, size_t x_stride,
                                       struct err *err)
{
    struct ep_nccl *n = nccl_of(e);
    const struct ep_call *c = &n->cuda.call;
    TRY(check_healthy(n, err));
    TRY(ep_cuda_check(&n->cuda, ep_run_send(n->cuda.device->stream, c, x, x_stride),
                      "packing rows for experts", err));
    return exchange(n, c->out_rows, n->to, c->own + c->at.rows, n->from, c->at.row_bytes, err);
}

static enum status nccl_dispatch_end(struct ep *e, struct ep_batch *out, struct err *err)
{
    struct ep_nccl *n = nccl_of(e);
    const struct ep_call *c = &n->cuda.call;
    TRY(check_healthy(n, err));
    TRY(ep_cuda_check(&n->cuda, ep_run_index(n->cuda.device->stream, c), "sorting rows that came",
                      err));
    *out = ep_cuda_batch(&n->cuda, n->n_slots);
    return OK;
}

static enum status nccl_combine(struct ep *e, const struct ep_combine_args *a, struct err *err)
{
    struct ep_nccl *n = nccl_of(e);
    const struct ep_call *c = &n->cuda.call;
    TRY(check_healthy(n, err));
    TRY(ep_cuda_check(&n->cuda, ep_run_return(n->cuda.device->stream, c, a->out, n->n_slots),
                      "packing results", err));
    TRY(exchange(n, c->out_back, n->from, c->own + c->at.back, n->to, c->at.back_bytes, err));
    return ep_cuda_check(&n->cuda, ep_run_sum(n->cuda.device->stream, c, a), "adding results up",
                         err);
}

static enum status nccl_all_reduce(struct ep *e, void *x, size_t n_x, enum dtype dtype,
                                   struct err *err)
{
    struct ep_nccl *n = nccl_of(e);
    const struct ep_call *c = &n->cuda.call;
    const size_t size = (size_t)e->config.size, rank = (size_t)e->config.rank,
                 unit = dtype_block_bytes(dtype), part = div_up(n_x, size);
    unsigned char *parts = c->own + c->at.shared;
    struct ep_nccl_span mine[EP_RANKS_MAX], all[EP_RANKS_MAX], gathered[EP_RANKS_MAX];
    TRY(check_healthy(n, err));
    for (size_t r = 0; r < size; r++)
        all[r] = (struct ep_nccl_span){ min_size(r * part, n_x),
                                        min_size(part, n_x - min_size(r * part, n_x)) };
    for (size_t r = 0; r < size; r++) {
        mine[r] = all[rank];
        gathered[r] = (struct ep_nccl_span){ r * part, all[rank].n };
    }
    TRY(exchange(n, x, all, parts, gathered, unit, err));
    unsigned char *own = (unsigned char *)x + all[rank].at * unit;
    TRY(ep_cuda_check(
        &n->cuda,
        ep_run_add_parts(n->cuda.device->stream, c, parts, part * unit, own, all[rank].n, dtype),
        "a sum over ranks", err));
    mine[rank].n = all[rank].n = 0; /* this rank's own part is already in place */
    return exchange(n, x, mine, x, all, unit, err);
}

static enum status nccl_found(struct ep *e, struct err *err)
{
    return check_healthy(nccl_of(e), err);
}

static enum status nccl_all_gather(struct ep *e, void *all, const void *mine, size_t bytes,
                                   struct err *err)
{
    struct ep_nccl *n = nccl_of(e);
    TRY(check_healthy(n, err));
    return wait_ready(
        n, n->nccl.AllGather(mine, all, bytes, ncclInt8, n->comm, n->cuda.device->stream), err);
}

const struct ep_ops ep_nccl_ops = {
    .name = "nccl",
    .create = nccl_create,
    .free = nccl_free,
    .plan = nccl_plan,
    .dispatch_begin = nccl_dispatch_begin,
    .dispatch_end = nccl_dispatch_end,
    .combine_begin = ep_return_nothing,
    .combine_end = nccl_combine,
    .all_reduce = nccl_all_reduce,
    .all_gather = nccl_all_gather,
    .gather_columns = ep_cuda_gather_columns,
    .wait = nccl_wait,
    .found = nccl_found,
    .abort = ep_abort_nothing,
    .places = ep_no_places,
};
