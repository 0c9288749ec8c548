/* ep.c - the table of expert-parallel backends, the argument checks that all of them share, and the
 * handshake of ranks.
 * Thread: as ep.h. */
#include "kernels/ep/ep.h"

#include <string.h>

#include "kernels/backend.h"
#include "kernels/ep/ep_backend.h"
#include "kernels/ep/ep_host_rows.h"
#include "shared/base/arith.h"
#include "shared/base/assert.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

static const struct ep_ops *const BACKENDS[] = {
    &ep_self_ops,      &ep_shm_ops,
#ifdef BATON_HAVE_UCX
    &ep_ucx_ops,
#endif
#ifdef BATON_HAVE_CUDA_KERNELS
    &ep_cuda_self_ops, &ep_peer_ops,
#endif
#ifdef BATON_HAVE_NCCL
    &ep_nccl_ops,
#endif
};

int ep_nccl_version(void)
{
#ifdef BATON_HAVE_NCCL
    return ep_nccl_find();
#else
    return -1;
#endif
}

#ifndef BATON_HAVE_CUDA_KERNELS
size_t ep_peer_bytes(const struct ep_config *c)
{
    (void)c;
    return 0;
}
#endif

/* ---- sizes ---- */

_Static_assert(sizeof(struct ep_hello) <= EP_WORDS_BYTES, "what exchange_words takes");

enum { PAD_ELEMENTS = 64, ROW_ALIGN = 128, RESULT_ALIGN = 16 };

/* Where the elements and scales of a row end. */
static size_t elements_end(const struct ep_config *c, size_t *scales_at)
{
    const size_t elements = round_up((size_t)c->hidden, PAD_ELEMENTS) * dtype_block_bytes(c->send);
    *scales_at = 0;
    if (c->send != DTYPE_F8_E4M3) return elements;
    *scales_at = elements;
    return elements + sizeof(float) * div_up((size_t)c->hidden, EP_SCALE_STEP);
}

struct ep_row_layout ep_row_layout_of(const struct ep_config *c)
{
    struct ep_row_layout f = {
        .back_bytes = round_up((size_t)c->hidden * dtype_block_bytes(c->back), RESULT_ALIGN),
    };
    f.tail_at = round_up(elements_end(c, &f.scales_at), 2 * sizeof(int32_t));
    f.row_bytes = round_up(f.tail_at + 2 * sizeof(int32_t), ROW_ALIGN);
    return f;
}

size_t ep_row_bytes(const struct ep_config *c, size_t *scales_at)
{
    return round_up(elements_end(c, scales_at), ROW_ALIGN);
}

size_t ep_pair_slots(const struct ep_config *c) { return (size_t)c->max_rows * (size_t)c->n_used; }

size_t ep_max_slots(const struct ep_config *c)
{
    const size_t all = ep_pair_slots(c) * (size_t)c->size;
    return c->mode == EP_THROUGHPUT && c->max_slots && c->max_slots < all ? c->max_slots : all;
}

/* ---- checks ---- */

static enum status check_experts(const struct ep_config *c, struct err *err)
{
    const struct ep_placement *p = &c->placement;
    if (p->n_logical == 0) return OK;
    TRY(ep_placement_check(p, c->size, err));
    if (c->max_rows < 1 || c->hidden < 1 || c->n_used < 1 || c->n_used > KERNEL_EXPERTS_USED_MAX ||
        c->n_used > p->n_logical)
        return err_set(err, ERR_INVALID, "ep: rows %d, hidden size %d, %d of %d experts used",
                       c->max_rows, c->hidden, c->n_used, p->n_logical);
    if (ep_pair_slots(c) > (size_t)INT32_MAX / (size_t)c->size)
        return err_set(err, ERR_INVALID, "ep: %d rows of %d ranks, %d times used, are too many",
                       c->max_rows, c->size, c->n_used);
    if (c->send != DTYPE_F32 && c->send != DTYPE_BF16 && c->send != DTYPE_F8_E4M3)
        return err_set(err, ERR_INVALID, "ep: rows do not travel as %s", dtype_name(c->send));
    if (c->back != DTYPE_F32 && c->back != DTYPE_BF16)
        return err_set(err, ERR_INVALID, "ep: results do not travel as %s", dtype_name(c->back));
    return OK;
}

static enum status check(const struct ep_config *c, struct err *err)
{
    if (c->size < 1 || c->size > EP_RANKS_MAX || c->rank < 0 || c->rank >= c->size)
        return err_set(err, ERR_INVALID, "ep: rank %d of %d (at most %d)", c->rank, c->size,
                       EP_RANKS_MAX);
    if (!c->exchange && c->size > 1)
        return err_set(err, ERR_INVALID, "ep: %d ranks have no way to meet", c->size);
    if (c->words && (c->words->config.size != c->size || c->device->is_host ||
                     c->words->config.collective_bytes < EP_WORDS_BYTES))
        return err_set(err, ERR_INVALID, "ep: words of %d ranks for %d", c->words->config.size,
                       c->size);
    if (c->timeout_ms < 1)
        return err_set(err, ERR_INVALID, "ep: a deadline of %d ms", c->timeout_ms);
    return check_experts(c, err);
}

static const struct ep_ops *find(const char *name, const struct device *d)
{
    for (size_t i = 0; i < COUNT_OF(BACKENDS); i++)
        if (strcmp(BACKENDS[i]->name, name) == 0 && BACKENDS[i]->on_host == d->is_host)
            return BACKENDS[i];
    return NULL;
}

/* ---- base ---- */

void ep_init(struct ep *e, const struct ep_ops *ops, const struct ep_config *c)
{
    const int32_t *first = c->placement.first;
    e->ops = ops;
    e->config = *c;
    if (c->placement.n_logical == 0) return;
    ep_placement_own(e);
    e->n_local = first[c->rank + 1] - first[c->rank];
}

void ep_release(struct ep *e)
{
    if (e->config.placement.n_logical > 0) ep_placement_release(e);
}

/* ---- meeting ---- */

static uint64_t config_hash_of(const struct ep_config *c)
{
    const struct ep_placement *p = &c->placement;
    const uint64_t numbers[] = { (uint64_t)c->size,
                                 c->mode,
                                 (uint64_t)c->max_rows,
                                 (uint64_t)c->hidden,
                                 (uint64_t)c->n_used,
                                 (uint64_t)p->n_logical,
                                 (uint64_t)p->n_physical,
                                 c->send,
                                 c->back,
                                 c->max_slots,
                                 c->collective_bytes,
                                 (uint64_t)c->timeout_ms };
    uint64_t h = hash_64(numbers, sizeof numbers, hash_64(c->backend, strlen(c->backend), 0));
    if (p->n_logical == 0) return h;
    h = hash_64(&p->n_maps, sizeof p->n_maps, h);
    h = hash_64(p->first, sizeof *p->first * ((size_t)c->size + 1), h);
    return hash_64(p->logical, sizeof *p->logical * (size_t)p->n_maps * (size_t)p->n_physical, h);
}

enum status ep_handshake(struct ep *e, enum status mine, const void *payload, size_t bytes,
                         struct ep_hello *hellos, struct err *err)
{
    const struct ep_config *c = &e->config;
    struct ep_hello hello = { .status = mine, .rank = c->rank, .config_hash = config_hash_of(c) };
    ASSERT(bytes <= sizeof hello.payload);
    if (payload) memcpy(hello.payload, payload, bytes);
    struct err met_err = { 0 };
    enum status met = c->exchange(c->exchange_arg, &hello, sizeof hello, hellos, &met_err);
    if (mine != OK) return mine;
    if (met != OK) return err_set(err, met, "ep: the ranks did not meet: %s", met_err.text);
    for (int32_t r = 0; r < c->size; r++) {
        if (hellos[r].rank != r)
            return err_set(err, ERR_PEER_MISMATCH,
                           "ep: the rank at place %d says that it is rank %d", r, hellos[r].rank);
        if (hellos[r].config_hash != hello.config_hash)
            return err_set(err, ERR_PEER_MISMATCH,
                           "ep: rank %d has other sizes, rows of another type, or another "
                           "placement of experts",
                           r);
        if (hellos[r].status != OK)
            return err_set(err, ERR_PEER_REFUSED, "ep: rank %d failed: %s", r,
                           status_text((enum status)hellos[r].status));
    }
    return OK;
}

/* ---- what backends without the feature have ---- */

struct ep_places ep_no_places(const struct ep *e)
{
    (void)e;
    return (struct ep_places){ 0 };
}

enum status ep_return_nothing(struct ep *e, const struct ep_combine_args *a, struct err *err)
{
    (void)e, (void)a, (void)err;
    return OK;
}

enum status ep_found_nothing(struct ep *e, struct err *err)
{
    (void)e, (void)err;
    return OK;
}

void ep_abort_nothing(struct ep *e) { (void)e; }

/* ---- calls ---- */

enum status ep_create(const struct ep_config *c, struct ep **out, struct err *err)
{
    const struct ep_ops *ops = find(c->backend, c->device);
    if (!ops)
        return err_set(err, ERR_UNSUPPORTED, "ep: this build has no backend \"%s\" for the %s",
                       c->backend, c->device->is_host ? "CPU" : "GPU");
    TRY(check(c, err));
    return ops->create(c, out, err);
}

static enum status exchange_words(void *arg, const void *mine, size_t bytes, void *all,
                                  struct err *err)
{
    return ep_all_gather(arg, all, mine, bytes, err);
}

/* How long a rank that leaves a group of GPUs waits for the others to leave it, too. */
enum { PART_MS = 3000 };

/* The ranks of an object on a GPU part through its words: who made it may exchange something else
 * by now. */
void ep_free(struct ep *e)
{
    if (!e) return;
    struct ep *words = e->config.words;
    if (words) {
        words->config.timeout_ms = min_i32(words->config.timeout_ms, PART_MS);
        e->config.exchange = exchange_words;
        e->config.exchange_arg = words;
    }
    e->ops->free(e);
    ep_free(words);
}

void ep_abort(struct ep *e)
{
    __atomic_store_n(&e->aborted, 1, __ATOMIC_SEQ_CST);
    e->ops->abort(e);
    if (e->config.words) ep_abort(e->config.words);
}

void ep_discard(struct ep *e)
{
    if (e) ep_abort(e);
    ep_free(e);
}

bool ep_is_aborted(const struct ep *e) { return __atomic_load_n(&e->aborted, __ATOMIC_SEQ_CST); }

/* The status of a call that ended with st. */
static enum status ended(const struct ep *e, enum status st, struct err *err)
{
    if (st == OK || !ep_is_aborted(e)) return st;
    return err_set(err, ERR_CANCELED, "ep: rank %d of %d was aborted here", e->config.rank,
                   e->config.size);
}

/* Every call but ep_free begins with it. */
static enum status check_going_on(const struct ep *e, struct err *err)
{
    return ep_is_aborted(e) ? ended(e, ERR_CANCELED, err) : OK;
}

static enum status check_rows(const struct ep *e, const struct ep_rows *rows, struct err *err)
{
    const struct ep_config *c = &e->config;
    ASSERT(ep_is_capturable(e) || (!rows->n_real && !rows->chosen));
    if (rows->n > (size_t)c->max_rows)
        return err_set(err, ERR_TOO_LONG, "ep: %zu rows at once, there is room for %d", rows->n,
                       c->max_rows);
    if (rows->map < 0 || rows->map >= c->placement.n_maps)
        return err_set(err, ERR_INVALID, "ep: map %d, there are 0 to %d", rows->map,
                       c->placement.n_maps - 1);
    return OK;
}

enum status ep_plan(struct ep *e, const struct ep_rows *rows, struct ep_counts *out,
                    struct err *err)
{
    struct ep_counts counts = { 0 };
    TRY(check_going_on(e, err));
    ASSERT(e->state == EP_IDLE && e->config.placement.n_logical > 0);
    TRY(check_rows(e, rows, err));
    e->n_rows = rows->n;
    e->map = rows->map;
    e->n_real = rows->n_real;
    e->first_row = rows->first_row;
    e->chosen = rows->chosen;
    TRY(ended(e, e->ops->plan(e, rows->experts, &counts, err), err));
    if (out) *out = counts;
    e->state = EP_PLANNED;
    return OK;
}

enum status ep_dispatch_begin(struct ep *e, const float *x, size_t x_stride, struct err *err)
{
    TRY(check_going_on(e, err));
    ASSERT(e->state == EP_PLANNED);
    TRY(ended(e, e->ops->dispatch_begin(e, x, x_stride, err), err));
    e->state = EP_BEGUN;
    return OK;
}

enum status ep_dispatch_end(struct ep *e, struct ep_batch *out, struct err *err)
{
    TRY(check_going_on(e, err));
    ASSERT(e->state == EP_BEGUN);
    TRY(ended(e, e->ops->dispatch_end(e, out, err), err));
    e->state = EP_DISPATCHED;
    return OK;
}

enum status ep_dispatch(struct ep *e, const float *x, size_t x_stride, struct ep_batch *out,
                        struct err *err)
{
    TRY(ep_dispatch_begin(e, x, x_stride, err));
    return ep_dispatch_end(e, out, err);
}

void ep_read_row(const struct ep *e, const struct ep_batch *b, size_t slot, float *x)
{
    const unsigned char *row = (const unsigned char *)b->x + (size_t)b->x_rows[slot] * b->row_bytes;
    ASSERT(e->ops->on_host);
    ep_host_rows_read(e->config.send, row, b->scales_at, x, (size_t)e->config.hidden);
}

enum status ep_combine_begin(struct ep *e, const struct ep_combine_args *a, struct err *err)
{
    TRY(check_going_on(e, err));
    ASSERT(e->state == EP_DISPATCHED);
    e->combine = *a;
    TRY(ended(e, e->ops->combine_begin(e, &e->combine, err), err));
    e->state = EP_RETURNED;
    return OK;
}

enum status ep_combine_end(struct ep *e, struct err *err)
{
    TRY(check_going_on(e, err));
    ASSERT(e->state == EP_RETURNED);
    TRY(ended(e, e->ops->combine_end(e, &e->combine, err), err));
    e->state = EP_IDLE;
    return OK;
}

enum status ep_combine(struct ep *e, const struct ep_combine_args *a, struct err *err)
{
    TRY(ep_combine_begin(e, a, err));
    return ep_combine_end(e, err);
}

static enum status check_collective(const struct ep *e, size_t bytes, struct err *err)
{
    if (bytes <= e->config.collective_bytes) return OK;
    return err_set(err, ERR_TOO_LONG, "ep: %zu bytes of every rank at once, there is room for %zu",
                   bytes, e->config.collective_bytes);
}

enum status ep_all_reduce(struct ep *e, void *x, size_t n, enum dtype dtype, struct err *err)
{
    TRY(check_going_on(e, err));
    if (dtype != DTYPE_F32 && dtype != DTYPE_BF16)
        return err_set(err, ERR_UNSUPPORTED, "ep: sums of %s", dtype_name(dtype));
    TRY(check_collective(e, n * dtype_block_bytes(dtype), err));
    return n ? ended(e, e->ops->all_reduce(e, x, n, dtype, err), err) : OK;
}

enum status ep_all_gather(struct ep *e, void *all, const void *mine, size_t bytes, struct err *err)
{
    TRY(check_going_on(e, err));
    TRY(check_collective(e, bytes, err));
    return bytes ? ended(e, e->ops->all_gather(e, all, mine, bytes, err), err) : OK;
}

enum status ep_gather_columns(struct ep *e, float *y, size_t y_stride, const float *mine,
                              size_t mine_stride, size_t n_rows, const size_t *first,
                              struct err *err)
{
    const struct ep_columns a = { y, mine, y_stride, mine_stride, n_rows, first };
    TRY(check_going_on(e, err));
    for (int32_t r = 0; r < e->config.size; r++) { /* of all ranks, so that all refuse alike */
        if (first[r + 1] < first[r])
            return err_set(err, ERR_INVALID,
                           "ep: the columns of rank %d end (%zu) before they begin (%zu)", r,
                           first[r + 1], first[r]);
        TRY(check_collective(e, n_rows * (first[r + 1] - first[r]) * sizeof *y, err));
    }
    if (n_rows == 0 || first[0] == first[e->config.size]) return OK;
    return ended(e, e->ops->gather_columns(e, &a, err), err);
}

struct ep *ep_of_hosts(struct ep *e)
{
    struct ep *words = e->config.words ? e->config.words : e;
    ASSERT(words->ops->on_host);
    return words;
}

enum status ep_gather_words(struct ep *e, void *all, const void *mine, size_t bytes,
                            struct err *err)
{
    return ep_all_gather(ep_of_hosts(e), all, mine, bytes, err);
}

struct ep_places ep_places(const struct ep *e) { return e->ops->places(e); }

enum status ep_wait(struct ep *e, struct err *err)
{
    TRY(check_going_on(e, err));
    return ended(e, e->ops->wait(e, err), err);
}

bool ep_is_capturable(const struct ep *e) { return e->ops->is_capturable; }

enum status ep_found(struct ep *e, struct err *err)
{
    TRY(check_going_on(e, err));
    return ended(e, e->ops->found(e, err), err);
}
