/* ep_cuda.c - what the GPU backends share: the window, scratch memory, the arguments of kernels,
 * and faults. Thread: as ep.h says. */
#include "kernels/ep/ep_cuda.h"

#include <string.h>

#include "shared/base/arith.h"
#include "shared/base/mem.h"

enum { ALIGN = 256 };

/* ---- memory ---- */

static size_t place(size_t *at, size_t bytes)
{
    const size_t here = *at;
    *at = round_up(here + bytes, ALIGN);
    return here;
}

/* Returns the offsets of a window's parts, in bytes. `rows` and `back` are numbers of rows and
 * results; `shared` is bytes. */
static struct ep_layout layout_of(const struct ep_config *c, size_t rows, size_t back,
                                  size_t shared)
{
    const size_t size = (size_t)c->size;
    size_t at = 0;
    struct ep_layout l = { .shared_bytes = round_up(c->collective_bytes, 16) };
    l.fault = place(&at, EP_FLAG_BYTES);
    l.flags = place(&at, EP_FLAGS * size * EP_FLAG_BYTES);
    if (c->placement.n_logical > 0) {
        const struct ep_row_layout f = ep_row_layout_of(c);
        l.row_bytes = f.row_bytes;
        l.scales_at = f.scales_at;
        l.tail_at = f.tail_at;
        l.back_bytes = f.back_bytes;
        l.pair_slots = ep_pair_slots(c);
        l.counts = place(&at, sizeof(int32_t) * size * (size_t)c->placement.n_physical);
        l.rows = place(&at, rows * f.row_bytes);
        l.back = place(&at, back * f.back_bytes);
    }
    l.shared = place(&at, shared);
    l.bytes = at;
    return l;
}

struct ep_cuda_piece {
    const int32_t *from; /* initial values; NULL: none */
    size_t n;
    const int32_t **to;
};

enum { PIECES = 13 };

/* Of cuda->work: arrays of int32 one after the other. Returns their bytes. */
static size_t list_pieces(struct ep_cuda *cuda, const int32_t *owner, struct ep_cuda_piece *out)
{
    const struct ep_config *c = &cuda->base.config;
    const struct ep_placement *p = &c->placement;
    struct ep_call *call = &cuda->call;
    const size_t n = ep_pair_slots(c), size = (size_t)c->size, n_logical = (size_t)p->n_logical,
                 n_physical = (size_t)p->n_physical, n_maps = n_logical ? (size_t)p->n_maps : 0;
    const struct ep_cuda_piece pieces[PIECES] = {
        { p->first, size + 1, &call->first },
        { cuda->base.copies, n_maps * (n_logical + 1), &call->copies },
        { cuda->base.physical, n_maps * n_physical, &call->physical },
        { owner, n_physical, &call->owner },
        { p->logical, n_maps * n_physical, &call->logical },
        { NULL, EP_FLAGS + 1, (const int32_t **)&call->epochs },
        { NULL, n, (const int32_t **)&call->chosen },
        { NULL, n, (const int32_t **)&call->rows },
        { NULL, n, (const int32_t **)&call->index },
        { NULL, n, (const int32_t **)&call->back_at },
        { NULL, n_physical + 1, (const int32_t **)&call->begin },
        { NULL, (size_t)cuda->base.n_local + 1, (const int32_t **)&call->recv_begin },
        { NULL, n_logical ? ep_max_slots(c) : 0, (const int32_t **)&call->x_rows },
    };
    size_t bytes = 0;
    for (size_t i = 0; i < PIECES; i++) place(&bytes, pieces[i].n * sizeof(int32_t));
    memcpy(out, pieces, sizeof pieces);
    return bytes;
}

static enum status make_work(struct ep_cuda *cuda, const int32_t *owner, struct err *err)
{
    const struct ep_config *c = &cuda->base.config;
    struct ep_cuda_piece pieces[PIECES];
    size_t bytes = list_pieces(cuda, owner, pieces);
    TRY(device_mem_alloc(c->device, bytes, DEVICE_MEM_PRIVATE, &cuda->work, err));
    bytes = 0;
    for (size_t i = 0; i < PIECES; i++) {
        int32_t *at = (int32_t *)(void *)((char *)cuda->work.ptr +
                                          place(&bytes, pieces[i].n * sizeof(int32_t)));
        *pieces[i].to = at;
        if (pieces[i].from)
            device_upload(c->device, at, pieces[i].from, pieces[i].n * sizeof(int32_t));
    }
    cuda->call.done = cuda->call.epochs + EP_FLAGS;
    return OK;
}

static int32_t *owners(const struct ep_config *c)
{
    int32_t *owner = MEM_ARRAY(int32_t, (size_t)c->placement.n_physical + 1);
    for (int32_t r = 0; c->placement.n_logical > 0 && r < c->size; r++)
        for (int32_t x = c->placement.first[r]; x < c->placement.first[r + 1]; x++) owner[x] = r;
    return owner;
}

static enum status make_pinned_words(struct ep_cuda *cuda, struct err *err)
{
    void *host = NULL, *device = NULL;
    cudaError_t e = cudaHostAlloc(&host, 2 * sizeof *cuda->fault, cudaHostAllocMapped);
    if (e == cudaSuccess) {
        cuda->fault = host;
        cuda->fault[0] = cuda->fault[1] = 0;
        e = cudaHostGetDevicePointer(&device, host, 0);
    }
    cuda->call.host_fault = device;
    cuda->call.host_abort = cuda->call.host_fault + 1;
    return e == cudaSuccess
               ? OK
               : err_set(err, ERR_NOMEM, "ep: no pinned memory: %s", cudaGetErrorString(e));
}

static void fill_call(struct ep_cuda *cuda, bool packed)
{
    const struct ep_config *c = &cuda->base.config;
    struct ep_call *call = &cuda->call;
    call->rank = c->rank;
    call->size = c->size;
    call->n_used = c->n_used;
    call->hidden = c->hidden;
    call->n_logical = c->placement.n_logical;
    call->n_physical = c->placement.n_physical;
    call->first_local = c->placement.n_logical ? c->placement.first[c->rank] : 0;
    call->n_local = cuda->base.n_local;
    call->send = c->send;
    call->back = c->back;
    call->packed = packed;
    call->n_load = (unsigned long long *)c->load;
    call->timeout_ns = (unsigned long long)c->timeout_ms * 1000000;
}

static size_t columns_bytes(const struct ep_config *c)
{
    return ((size_t)c->size + 1) * round_up(c->collective_bytes, ALIGN);
}

static enum status make_columns(struct ep_cuda *cuda, struct err *err)
{
    const size_t bytes = columns_bytes(&cuda->base.config);
    if (bytes == 0 || cuda->call.direct) return OK;
    return device_mem_alloc(cuda->base.config.device, bytes, DEVICE_MEM_PRIVATE, &cuda->columns,
                            err);
}

size_t ep_peer_bytes(const struct ep_config *c)
{
    struct ep_cuda cuda = { .base = { .config = *c, .n_local = c->placement.n_physical } };
    struct ep_cuda_piece pieces[PIECES];
    const size_t size = (size_t)c->size, pairs = ep_pair_slots(c);
    const struct ep_layout window = layout_of(c, pairs * size, pairs,
                                              2 * size * round_up(c->collective_bytes, 16));
    return window.bytes + list_pieces(&cuda, NULL, pieces);
}

enum { SORT_SHARED_MAX = 96 * 1024 }; /* available to a block on every GPU from sm_80 on */

enum status ep_cuda_init(struct ep_cuda *cuda, const struct ep_ops *ops, const struct ep_config *c,
                         bool packed, struct err *err)
{
    ep_init(&cuda->base, ops, c);
    cuda->device = cuda_device_of(c->device);
    if (3 * sizeof(int) * ((size_t)c->size * (size_t)cuda->base.n_local + 1) > SORT_SHARED_MAX)
        return err_set(err, ERR_UNSUPPORTED, "ep: %d experts of one of %d ranks are too many",
                       cuda->base.n_local, c->size);
    fill_call(cuda, packed);
    cuda->host_counts = MEM_ARRAY(int32_t, 2 * (size_t)c->placement.n_physical + 1);
    const size_t size = (size_t)c->size, pairs = ep_pair_slots(c),
                 of_one = round_up(c->collective_bytes, 16);
    cuda->call.at = layout_of(
        c, packed ? ep_max_slots(c) : pairs * size, cuda->back_slots ? cuda->back_slots : pairs,
        cuda->call.direct ? 2 * size * of_one : of_one + size * sizeof(float));
    TRY(device_mem_alloc(c->device, cuda->call.at.bytes, DEVICE_MEM_SHARED, &cuda->window, err));
    cuda->call.own = cuda->window.ptr;
    int32_t *owner = owners(c);
    enum status st = make_work(cuda, owner, err);
    mem_free(owner);
    if (st == OK) st = make_pinned_words(cuda, err);
    if (st == OK) st = make_columns(cuda, err);
    return st == OK ? device_fault(c->device, err) : st;
}

void ep_cuda_release(struct ep_cuda *cuda)
{
    struct device *d = cuda->base.config.device;
    device_mem_free(d, &cuda->window);
    device_mem_free(d, &cuda->work);
    device_mem_free(d, &cuda->columns);
    if (cuda->fault) (void)cudaFreeHost(cuda->fault);
    ep_release(&cuda->base);
    mem_free(cuda->host_counts);
    mem_free(cuda);
}

/* ---- calls ---- */

enum status ep_cuda_check(struct ep_cuda *cuda, cudaError_t e, const char *what, struct err *err)
{
    return cuda_check(cuda->device, e, what) ? OK : device_fault(cuda->base.config.device, err);
}

enum status ep_cuda_fault(const struct ep_cuda *cuda, struct err *err)
{
    const struct ep_config *c = &cuda->base.config;
    const unsigned word = *(const volatile unsigned *)cuda->fault;
    const int rank = (int)(word & 0xffff) - 1;
    if (word == 0) return OK;
    if (word >> 16 == EP_FAULT_EXPERT)
        return err_set(err, ERR_INVALID, "ep: a row of rank %d chose an expert that there is not",
                       rank);
    if (word >> 16 == EP_FAULT_ABORTED)
        return err_set(err, ERR_PEER_LOST, "ep: rank %d of %d was aborted", rank, c->size);
    return err_set(err, ERR_PEER_LOST, "ep: rank %d of %d gave no sign for %d ms", rank, c->size,
                   c->timeout_ms);
}

struct ep_batch ep_cuda_batch(const struct ep_cuda *cuda, size_t n_slots)
{
    const struct ep_call *c = &cuda->call;
    return (struct ep_batch){
        .n_slots = n_slots,
        .n_local = c->n_local,
        .begin = c->recv_begin,
        .x_rows = c->x_rows,
        .x = c->own + c->at.rows,
        .row_bytes = c->at.row_bytes,
        .scales_at = c->at.scales_at,
    };
}

void ep_cuda_abort(struct ep *e)
{
    __atomic_store_n(&ep_cuda_of(e)->fault[1], 1, __ATOMIC_SEQ_CST);
}

static enum status copy_columns(struct ep_cuda *cuda, float *to, size_t to_stride,
                                const float *from, size_t from_stride, size_t width, size_t n_rows,
                                struct err *err)
{
    const size_t unit = sizeof *to;
    if (width == 0) return OK;
    return ep_cuda_check(cuda,
                         cudaMemcpy2DAsync(to, to_stride * unit, from, from_stride * unit,
                                           width * unit, n_rows, cudaMemcpyDeviceToDevice,
                                           cuda->device->stream),
                         "gathering columns", err);
}

/* Parts are packed, gathered with the size of the widest, and spread. */
enum status ep_cuda_gather_columns(struct ep *e, const struct ep_columns *a, struct err *err)
{
    struct ep_cuda *cuda = ep_cuda_of(e);
    const struct ep_config *c = &e->config;
    float *mine = cuda->columns.ptr,
          *all = mine + round_up(c->collective_bytes, ALIGN) / sizeof *mine;
    size_t widest = 0;
    const size_t own = a->first[c->rank + 1] - a->first[c->rank];
    for (int32_t r = 0; r < c->size; r++)
        if (a->first[r + 1] - a->first[r] > widest) widest = a->first[r + 1] - a->first[r];
    TRY(copy_columns(cuda, mine, own, a->mine, a->mine_stride, own, a->n_rows, err));
    TRY(e->ops->all_gather(e, all, mine, a->n_rows * widest * sizeof *mine, err));
    for (int32_t r = 0; r < c->size; r++) {
        const size_t width = a->first[r + 1] - a->first[r];
        TRY(copy_columns(cuda, a->y + a->first[r], a->y_stride,
                         all + (size_t)r * a->n_rows * widest, width, width, a->n_rows, err));
    }
    return OK;
}
