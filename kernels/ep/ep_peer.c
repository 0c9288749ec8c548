/* ep_peer.c - expert parallelism on GPUs of one host: each rank opens the others' windows by CUDA
 * IPC, and kernels do the rest (ep_kernels.h). It is also the backend `self` of one rank on a GPU,
 * which is its own peer.
 *
 * Source: CUDA Runtime API, interprocess communication (cudaIpcGetMemHandle, cudaIpcOpenMemHandle).
 * LIMIT: what happens to memory that a dead process had exported depends on the driver. If it stays
 * until the others close it, they run into their deadline; if not, their next write faults. Both
 * are errors of ep_wait; which one occurs has not been observed on a GPU. Thread: as ep.h says. */
#include <assert.h>
#include <string.h>
#include <time.h>

#include "kernels/ep/ep_cuda.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum { PAUSE_NS = 20000 }; /* between two looks at a stream */

static_assert(sizeof(cudaIpcMemHandle_t) <= EP_PAYLOAD_BYTES, "the handle's room");

/* ---- life ---- */

static void close_peer_windows(struct ep_cuda *cuda)
{
    for (int r = 0; r < cuda->base.config.size; r++) {
        if (r != cuda->base.config.rank && cuda->call.window[r])
            (void)cudaIpcCloseMemHandle(cuda->call.window[r]);
        cuda->call.window[r] = NULL;
    }
}

static enum status open_peer_windows(struct ep_cuda *cuda, const struct ep_hello *hellos,
                                     struct err *err)
{
    const struct ep_config *c = &cuda->base.config;
    for (int r = 0; r < c->size; r++) {
        cudaIpcMemHandle_t handle;
        void *p = NULL;
        if (r == c->rank) continue;
        memcpy(&handle, hellos[r].payload, sizeof handle);
        const cudaError_t e = cudaIpcOpenMemHandle(&p, handle, cudaIpcMemLazyEnablePeerAccess);
        if (e != cudaSuccess) {
            (void)cudaGetLastError(); /* clears the error, which later calls would return */
            return err_set(err, ERR_UNSUPPORTED,
                           "ep: the GPU memory of rank %d cannot be opened: %s", r,
                           cudaGetErrorString(e));
        }
        cuda->call.window[r] = p;
    }
    return OK;
}

/* Runs two handshakes: the first exchanges handles, the second confirms that all ranks could open
 * them. */
static enum status exchange_handles(struct ep_cuda *cuda, enum status st, struct ep_hello *hellos,
                                    struct err *err)
{
    const bool made = st == OK;
    cudaIpcMemHandle_t handle;
    memset(&handle, 0, sizeof handle);
    if (made) {
        const cudaError_t e = cudaIpcGetMemHandle(&handle, cuda->window.ptr);
        if (e != cudaSuccess)
            st = err_set(err, ERR_NODEV, "ep: the GPU's memory cannot be shared: %s",
                         cudaGetErrorString(e));
    }
    TRY(ep_handshake(&cuda->base, st, &handle, sizeof handle, hellos, err));
    return ep_handshake(&cuda->base, open_peer_windows(cuda, hellos, err), NULL, 0, hellos, err);
}

static enum status begin(struct ep_cuda *cuda, const struct ep_ops *ops, const struct ep_config *c,
                         struct err *err)
{
    cuda->call.direct = true;
    const enum status st = ep_cuda_init(cuda, ops, c, false, err);
    cuda->call.window[c->rank] = cuda->call.own;
    return st;
}

static enum status peer_create(const struct ep_config *c, struct ep **out, struct err *err)
{
    struct ep_hello hellos[EP_PEERS_MAX];
    if (c->size > EP_PEERS_MAX)
        return err_set(err, ERR_UNSUPPORTED, "ep: the peer backend has at most %d ranks, not %d",
                       EP_PEERS_MAX, c->size);
    if (c->mode != EP_LOW_LATENCY)
        return err_set(err, ERR_UNSUPPORTED,
                       "ep: the peer backend has no throughput mode; nccl has");
    struct ep_cuda *cuda = MEM_NEW(struct ep_cuda);
    enum status st = begin(cuda, &ep_peer_ops, c, err);
    if (c->size > 1) st = exchange_handles(cuda, st, hellos, err);
    if (st == OK) *out = &cuda->base;
    if (st != OK) {
        close_peer_windows(cuda);
        ep_cuda_release(cuda);
    }
    return st;
}

static enum status self_create(const struct ep_config *c, struct ep **out, struct err *err)
{
    if (c->size != 1)
        return err_set(err, ERR_UNSUPPORTED, "ep: the self backend has one rank, not %d", c->size);
    struct ep_cuda *cuda = MEM_NEW(struct ep_cuda);
    const enum status st = begin(cuda, &ep_cuda_self_ops, c, err);
    if (st == OK) *out = &cuda->base;
    else ep_cuda_release(cuda);
    return st;
}

/* ---- calls ---- */

/* Reads the counts of a single rank, which receives what it sends; by_expert is stored after
 * begin. */
static enum status learn_counts(struct ep_cuda *cuda, struct ep_counts *out)
{
    const struct ep_config *c = &cuda->base.config;
    int32_t *begin = cuda->host_counts + c->placement.n_physical;
    device_download(c->device, begin, cuda->call.begin,
                    sizeof *begin * ((size_t)c->placement.n_physical + 1));
    for (int32_t x = 0; x < c->placement.n_physical; x++)
        cuda->host_counts[x] = begin[x + 1] - begin[x];
    *out = (struct ep_counts){
        .n_slots = cuda->base.n_rows * (size_t)c->n_used,
        .n_own = cuda->base.n_rows * (size_t)c->n_used,
        .by_expert = cuda->host_counts,
    };
    return OK;
}

static enum status peer_plan(struct ep *e, const int32_t *experts, struct ep_counts *out,
                             struct err *err)
{
    struct ep_cuda *cuda = ep_cuda_of(e);
    TRY(ep_cuda_fault(cuda, err));
    cuda->call.experts = experts;
    cuda->call.n_rows = (int32_t)e->n_rows;
    cuda->call.map = e->map;
    cuda->call.n_real = e->n_real;
    cuda->call.first_row = e->first_row;
    cuda->call.n_chosen = (unsigned long long *)e->chosen;
    TRY(ep_cuda_check(cuda, ep_run_sort(cuda->device->stream, &cuda->call),
                      "sorting rows by expert", err));
    *out = (struct ep_counts){ .n_slots = ep_max_slots(&e->config) };
    return e->config.mode == EP_THROUGHPUT ? learn_counts(cuda, out) : OK;
}

static enum status peer_dispatch_begin(struct ep *e, const float *x, size_t x_stride,
                                       struct err *err)
{
    struct ep_cuda *cuda = ep_cuda_of(e);
    return ep_cuda_check(cuda, ep_run_send(cuda->device->stream, &cuda->call, x, x_stride),
                         "sending rows to experts", err);
}

static enum status peer_dispatch_end(struct ep *e, struct ep_batch *out, struct err *err)
{
    struct ep_cuda *cuda = ep_cuda_of(e);
    TRY(ep_cuda_check(cuda, ep_run_index(cuda->device->stream, &cuda->call), "waiting for rows",
                      err));
    *out = ep_cuda_batch(cuda, e->config.mode == EP_THROUGHPUT
                                   ? e->n_rows * (size_t)e->config.n_used
                                   : ep_max_slots(&e->config));
    return OK;
}

static enum status peer_combine_begin(struct ep *e, const struct ep_combine_args *a,
                                      struct err *err)
{
    struct ep_cuda *cuda = ep_cuda_of(e);
    return ep_cuda_check(
        cuda, ep_run_return(cuda->device->stream, &cuda->call, a->out, ep_max_slots(&e->config)),
        "returning results", err);
}

static enum status peer_combine_end(struct ep *e, const struct ep_combine_args *a, struct err *err)
{
    struct ep_cuda *cuda = ep_cuda_of(e);
    return ep_cuda_check(cuda, ep_run_sum(cuda->device->stream, &cuda->call, a),
                         "adding results up", err);
}

static enum status peer_all_reduce(struct ep *e, void *x, size_t n, enum dtype dtype,
                                   struct err *err)
{
    struct ep_cuda *cuda = ep_cuda_of(e);
    if (e->config.size == 1) return OK;
    TRY(ep_cuda_fault(cuda, err));
    return ep_cuda_check(cuda, ep_run_all_reduce(cuda->device->stream, &cuda->call, x, n, dtype),
                         "a sum over ranks", err);
}

static enum status peer_all_gather(struct ep *e, void *all, const void *mine, size_t bytes,
                                   struct err *err)
{
    struct ep_cuda *cuda = ep_cuda_of(e);
    TRY(ep_cuda_fault(cuda, err));
    return ep_cuda_check(cuda,
                         ep_run_all_gather(cuda->device->stream, &cuda->call, all, mine, bytes),
                         "gathering from ranks", err);
}

static enum status peer_gather_columns(struct ep *e, const struct ep_columns *a, struct err *err)
{
    struct ep_cuda *cuda = ep_cuda_of(e);
    TRY(ep_cuda_fault(cuda, err));
    return ep_cuda_check(cuda, ep_run_gather_columns(cuda->device->stream, &cuda->call, a),
                         "gathering columns", err);
}

/* Looks from time to time, so that the host counts as alive meanwhile. LIMIT: a GPU that hangs by
 * itself looks like one that waits for other ranks, until their deadline. */
static void watch_stream(const struct ep *e)
{
    const struct timespec pause = { .tv_nsec = PAUSE_NS };
    const cudaStream_t stream = ep_cuda_of((struct ep *)e)->device->stream;
    for (uint64_t told_ms = clock_ms();
         e->config.progress && cudaStreamQuery(stream) == cudaErrorNotReady;) {
        nanosleep(&pause, NULL);
        if (clock_ms() < told_ms + EP_PROGRESS_MS) continue;
        told_ms = clock_ms();
        __atomic_fetch_add(e->config.progress, 1, __ATOMIC_RELAXED);
    }
}

static enum status peer_found(struct ep *e, struct err *err)
{
    TRY(device_fault(e->config.device, err));
    return ep_cuda_fault(ep_cuda_of(e), err);
}

static enum status peer_wait(struct ep *e, struct err *err)
{
    watch_stream(e);
    device_wait(e->config.device);
    return peer_found(e, err);
}

/* All ranks close the others' windows before any rank frees its own; after a fault nobody waits. */
static void peer_free(struct ep *e)
{
    struct ep_cuda *cuda = ep_cuda_of(e);
    const bool one = e->config.size == 1;
    struct ep_hello hellos[EP_PEERS_MAX];
    struct err err = { 0 };
    const enum status st = peer_wait(e, &err);
    close_peer_windows(cuda);
    if (!one && st == OK && !ep_is_aborted(e) && ep_handshake(e, OK, NULL, 0, hellos, &err) != OK)
        log_warn("ranks did not part together", "why=%s", err.text);
    ep_cuda_release(cuda);
}

const struct ep_ops ep_peer_ops = {
    .name = "peer",
    .is_capturable = true,
    .create = peer_create,
    .free = peer_free,
    .plan = peer_plan,
    .dispatch_begin = peer_dispatch_begin,
    .dispatch_end = peer_dispatch_end,
    .combine_begin = peer_combine_begin,
    .combine_end = peer_combine_end,
    .all_reduce = peer_all_reduce,
    .all_gather = peer_all_gather,
    .gather_columns = peer_gather_columns,
    .wait = peer_wait,
    .found = peer_found,
    .abort = ep_cuda_abort,
    .places = ep_no_places,
};

const struct ep_ops ep_cuda_self_ops = {
    .name = "self",
    .is_capturable = true,
    .create = self_create,
    .free = peer_free,
    .plan = peer_plan,
    .dispatch_begin = peer_dispatch_begin,
    .dispatch_end = peer_dispatch_end,
    .combine_begin = peer_combine_begin,
    .combine_end = peer_combine_end,
    .all_reduce = peer_all_reduce,
    .all_gather = peer_all_gather,
    .gather_columns = peer_gather_columns,
    .wait = peer_wait,
    .found = peer_found,
    .abort = ep_cuda_abort,
    .places = ep_no_places,
};
