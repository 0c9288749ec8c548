/* ep_ucx_collect.c - sums and gathers of backend `ucx`: each rank sends its part to all others.
 * Thread: as ep_ucx.h. */
#include <string.h>

#include "kernels/ep/ucx/ep_ucx.h"
#include "kernels/float_bits.h"

static bool next_part(struct ep_ucx *u, int32_t to, size_t *cursor, struct ep_ucx_run *run)
{
    (void)to;
    if (*cursor || u->n_part == 0) return false;
    *cursor = 1;
    *run = (struct ep_ucx_run){ EP_UCX_PART, u->part, u->n_part };
    return true;
}

/* Sends this rank's part, and waits for those of all others: as many bytes, or their columns'. */
static enum status share(struct ep_ucx *u, const struct ep_columns *columns, struct err *err)
{
    const struct ep_config *c = &u->base.config;
    for (int32_t r = 0; r < c->size; r++) u->out[r].total = u->n_part;
    ep_ucx_begin(u, next_part);
    TRY(ep_ucx_wait(u, err));
    for (int32_t r = 0; r < c->size; r++) {
        const size_t want = columns
                                ? columns->n_rows * (columns->first[r + 1] - columns->first[r]) *
                                      sizeof *columns->y
                                : u->n_part;
        if (r != c->rank && ep_ucx_in(u, r)->total != want)
            return ep_ucx_raise(u, EP_UCX_CORRUPT, r, err);
    }
    return OK;
}

static void sum(const struct ep_ucx *u, void *x, size_t n, enum dtype dtype)
{
    const struct ep_config *c = &u->base.config;
    const void *parts[EP_RANKS_MAX];
    for (int32_t r = 0; r < c->size; r++) parts[r] = r == c->rank ? x : ep_ucx_part(u, r);
    for (size_t i = 0; i < n; i++) {
        float all = 0;
        for (int32_t r = 0; r < c->size; r++) {
            const float v = dtype == DTYPE_F32 ? ((const float *)parts[r])[i]
                                               : float_from_bf16(((const uint16_t *)parts[r])[i]);
            all = r ? all + v : v;
        }
        if (dtype == DTYPE_F32) ((float *)x)[i] = all;
        else ((uint16_t *)x)[i] = float_to_bf16(all);
    }
}

enum status ep_ucx_all_reduce(struct ep *e, void *x, size_t n, enum dtype dtype, struct err *err)
{
    struct ep_ucx *u = ep_ucx_of(e);
    TRY(ep_ucx_enter(u, err));
    u->part = x;
    u->n_part = n * dtype_block_bytes(dtype);
    const enum status st = share(u, NULL, err);
    if (st == OK) sum(u, x, n, dtype);
    return ep_ucx_leave(u, st);
}

enum status ep_ucx_all_gather(struct ep *e, void *all, const void *mine, size_t bytes,
                              struct err *err)
{
    struct ep_ucx *u = ep_ucx_of(e);
    TRY(ep_ucx_enter(u, err));
    u->part = mine;
    u->n_part = bytes;
    const enum status st = share(u, NULL, err);
    for (int32_t r = 0; r < e->config.size && st == OK; r++)
        memmove((char *)all + (size_t)r * bytes,
                r == e->config.rank ? mine : (const void *)ep_ucx_part(u, r), bytes);
    return ep_ucx_leave(u, st);
}

/* The ranges may be the same. */
static void copy_columns(float *to, size_t to_stride, const float *from, size_t from_stride,
                         size_t width, size_t n_rows)
{
    for (size_t i = 0; i < n_rows && (to != from || to_stride != from_stride); i++)
        memmove(to + i * to_stride, from + i * from_stride, width * sizeof *to);
}

/* Own columns are sent from this rank's own part, which no message is written to. */
static enum status gather_columns(struct ep_ucx *u, const struct ep_columns *a, struct err *err)
{
    const struct ep_config *c = &u->base.config;
    const size_t own = a->first[c->rank + 1] - a->first[c->rank];
    float *part = (float *)(void *)ep_ucx_part(u, c->rank);
    copy_columns(part, own, a->mine, a->mine_stride, own, a->n_rows);
    copy_columns(a->y + a->first[c->rank], a->y_stride, a->mine, a->mine_stride, own, a->n_rows);
    u->part = part;
    u->n_part = a->n_rows * own * sizeof *a->y;
    TRY(share(u, a, err));
    for (int32_t r = 0; r < c->size; r++) {
        const size_t width = a->first[r + 1] - a->first[r];
        if (r != c->rank)
            copy_columns(a->y + a->first[r], a->y_stride,
                         (const float *)(const void *)ep_ucx_part(u, r), width, width, a->n_rows);
    }
    return OK;
}

enum status ep_ucx_gather_columns(struct ep *e, const struct ep_columns *a, struct err *err)
{
    struct ep_ucx *u = ep_ucx_of(e);
    TRY(ep_ucx_enter(u, err));
    return ep_ucx_leave(u, gather_columns(u, a, err));
}
