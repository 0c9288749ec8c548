/* ep_shm_collect.c - sums and gathers of backend `shm`: each rank writes its part into its window,
 * all meet, and each reads the parts of all.
 *
 * Parts are written to two places in turn: who writes one again has been through the meeting in
 * between, to which the others came after they had read it. Small parts lie in the heads, which are
 * neighbours, so that a meeting with a few numbers touches few pages.
 * Thread: as ep_shm.h. */
#include <string.h>

#include "kernels/ep/ep_shm.h"
#include "kernels/float_bits.h"

/* A rank's part of `bytes` bytes of the running collective. */
static char *part_of(const struct ep_shm *s, int32_t rank, size_t bytes)
{
    const size_t turn = s->n_collectives % EP_SHM_TURNS;
    return bytes <= EP_SHM_SMALL ? ep_shm_head(s, rank) + s->at.small + turn * EP_SHM_SMALL
                                 : ep_shm_body(s, rank) + s->at.shared + turn * s->at.shared_bytes;
}

/* Begins a collective, and returns where this rank's part is to be written. */
static enum status begin(struct ep_shm *s, size_t bytes, char **mine, struct err *err)
{
    TRY(ep_shm_check(s, err));
    s->n_collectives++;
    *mine = part_of(s, s->base.config.rank, bytes);
    return OK;
}

enum status ep_shm_all_reduce(struct ep *e, void *x, size_t n, enum dtype dtype, struct err *err)
{
    struct ep_shm *s = ep_shm_of(e);
    const size_t bytes = n * dtype_block_bytes(dtype);
    char *mine;
    TRY(begin(s, bytes, &mine, err));
    memcpy(mine, x, bytes);
    TRY(ep_shm_meet(s, err));
    const void *parts[EP_RANKS_MAX];
    for (int32_t r = 0; r < e->config.size; r++) parts[r] = part_of(s, r, bytes);
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (int32_t r = 0; r < e->config.size; r++) {
            const float v = dtype == DTYPE_F32 ? ((const float *)parts[r])[i]
                                               : float_from_bf16(((const uint16_t *)parts[r])[i]);
            sum = r ? sum + v : v;
        }
        if (dtype == DTYPE_F32) ((float *)x)[i] = sum;
        else ((uint16_t *)x)[i] = float_to_bf16(sum);
    }
    return OK;
}

enum status ep_shm_all_gather(struct ep *e, void *all, const void *mine, size_t bytes,
                              struct err *err)
{
    struct ep_shm *s = ep_shm_of(e);
    char *part;
    TRY(begin(s, bytes, &part, err));
    memcpy(part, mine, bytes);
    TRY(ep_shm_meet(s, err));
    for (int32_t r = 0; r < e->config.size; r++)
        memcpy((char *)all + (size_t)r * bytes, part_of(s, r, bytes), bytes);
    return OK;
}

/* The ranges may be the same. */
static void copy_columns(float *to, size_t to_stride, const float *from, size_t from_stride,
                         size_t width, size_t n_rows)
{
    for (size_t i = 0; i < n_rows && (to != from || to_stride != from_stride); i++)
        memmove(to + i * to_stride, from + i * from_stride, width * sizeof *to);
}

enum status ep_shm_gather_columns(struct ep *e, const struct ep_columns *a, struct err *err)
{
    struct ep_shm *s = ep_shm_of(e);
    const int32_t me = e->config.rank;
    const size_t own = a->first[me + 1] - a->first[me];
    char *part;
    TRY(begin(s, a->n_rows * own * sizeof *a->y, &part, err));
    copy_columns((float *)(void *)part, own, a->mine, a->mine_stride, own, a->n_rows);
    copy_columns(a->y + a->first[me], a->y_stride, a->mine, a->mine_stride, own, a->n_rows);
    TRY(ep_shm_meet(s, err));
    for (int32_t r = 0; r < e->config.size; r++) {
        const size_t width = a->first[r + 1] - a->first[r];
        if (r == me) continue;
        copy_columns(a->y + a->first[r], a->y_stride,
                     (const float *)(void *)part_of(s, r, a->n_rows * width * sizeof *a->y), width,
                     width, a->n_rows);
    }
    return OK;
}
