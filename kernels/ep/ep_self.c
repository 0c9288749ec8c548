/* ep_self.c - expert parallelism of one rank on the host, in plain C: the reference that all
 * backends are compared with. Thread: as ep.h says. */
#include <string.h>

#include "kernels/backend.h"
#include "kernels/ep/ep_backend.h"
#include "kernels/ep/ep_host_rows.h"
#include "shared/base/mem.h"

struct ep_self {
    struct ep base; /* first */
    struct ep_row_layout layout;
    int32_t *chosen, *index; /* [max_rows n_used]: the physical expert of a (row, choice),
                              * and its slot */
    int32_t *begin;          /* [n_physical + 1] */
    int32_t *counts, *x_rows;
    unsigned char *x; /* [max_rows n_used] rows as they travel */
};

static struct ep_self *self_of(struct ep *e) { return (struct ep_self *)e; }

static void self_free(struct ep *e)
{
    struct ep_self *s = self_of(e);
    mem_free(s->chosen);
    mem_free(s->index);
    mem_free(s->begin);
    mem_free(s->counts);
    mem_free(s->x_rows);
    mem_free(s->x);
    ep_release(e);
    mem_free(s);
}

static enum status self_create(const struct ep_config *c, struct ep **out, struct err *err)
{
    if (c->size != 1)
        return err_set(err, ERR_UNSUPPORTED, "ep: the self backend has one rank, not %d", c->size);
    const size_t n = ep_pair_slots(c), n_physical = (size_t)c->placement.n_physical;
    struct ep_self *s = MEM_NEW(struct ep_self);
    ep_init(&s->base, &ep_self_ops, c);
    *out = &s->base;
    if (c->placement.n_logical == 0) return OK;
    s->layout = ep_row_layout_of(c);
    s->chosen = MEM_ARRAY(int32_t, n);
    s->index = MEM_ARRAY(int32_t, n);
    s->x_rows = MEM_ARRAY(int32_t, n);
    s->begin = MEM_ARRAY(int32_t, n_physical + 1);
    s->counts = MEM_ARRAY(int32_t, n_physical);
    s->x = mem_aligned(128, n * s->layout.row_bytes);
    return OK;
}

static enum status self_plan(struct ep *e, const int32_t *experts, struct ep_counts *out,
                             struct err *err)
{
    struct ep_self *s = self_of(e);
    const struct ep_placement *p = &e->config.placement;
    const size_t used = (size_t)e->config.n_used, n = e->n_rows * used;
    memset(s->counts, 0, sizeof *s->counts * (size_t)p->n_physical);
    const int64_t wrong = ep_choose_copies(e, experts, s->chosen);
    if (wrong >= 0)
        return err_set(err, ERR_INVALID, "ep: a row chose expert %d of %d", experts[wrong],
                       p->n_logical);
    for (size_t i = 0; i < n; i++) s->counts[s->chosen[i]]++;
    s->begin[0] = 0;
    for (int32_t x = 0; x < p->n_physical; x++) s->begin[x + 1] = s->begin[x] + s->counts[x];
    for (int32_t x = 0; x < p->n_physical; x++) {
        int32_t slot = s->begin[x];
        for (size_t i = 0; i < n; i++)
            if (s->chosen[i] == x) s->index[i] = slot++;
    }
    *out = (struct ep_counts){ .n_slots = n, .n_own = n, .by_expert = s->counts };
    if (e->config.mode == EP_LOW_LATENCY)
        *out = (struct ep_counts){ .n_slots = ep_max_slots(&e->config) };
    return OK;
}

static enum status self_dispatch_begin(struct ep *e, const float *x, size_t x_stride,
                                       struct err *err)
{
    struct ep_self *s = self_of(e);
    const size_t used = (size_t)e->config.n_used, n = e->n_rows * used;
    (void)err;
    for (size_t i = 0; i < n; i++) {
        unsigned char *to = s->x + (size_t)s->index[i] * s->layout.row_bytes;
        const int32_t tail[2] = { 0, (int32_t)i };
        ep_host_rows_send(&ep_host_rows_plain, e->config.send, x + i / used * x_stride,
                          (size_t)e->config.hidden, to, s->layout.scales_at);
        memcpy(to + s->layout.tail_at, tail, sizeof tail);
        s->x_rows[i] = (int32_t)i;
    }
    return OK;
}

static enum status self_dispatch_end(struct ep *e, struct ep_batch *out, struct err *err)
{
    struct ep_self *s = self_of(e);
    const size_t n = e->n_rows * (size_t)e->config.n_used;
    (void)err;
    *out = (struct ep_batch){
        .n_slots = e->config.mode == EP_LOW_LATENCY ? ep_max_slots(&e->config) : n,
        .n_local = e->n_local,
        .begin = s->begin,
        .x_rows = s->x_rows,
        .x = s->x,
        .row_bytes = s->layout.row_bytes,
        .scales_at = s->layout.scales_at,
    };
    return OK;
}

static enum status self_combine(struct ep *e, const struct ep_combine_args *a, struct err *err)
{
    struct ep_self *s = self_of(e);
    const size_t used = (size_t)e->config.n_used, hidden = (size_t)e->config.hidden;
    struct ep_row_result results[KERNEL_EXPERTS_USED_MAX] = { 0 };
    (void)err;
    for (size_t i = 0; i < e->n_rows; i++) {
        for (size_t j = 0; j < used; j++)
            results[j].f32 = a->out + (size_t)s->index[i * used + j] * hidden;
        ep_host_rows_plain.sum(&(struct ep_row_sum){ .y = a->y + i * hidden,
                                                     .results = results,
                                                     .weights = a->weights + i * used,
                                                     .n = hidden,
                                                     .n_used = used,
                                                     .add = a->add,
                                                     .rounds = e->config.back == DTYPE_BF16 });
    }
    return OK;
}

/* The sum over one rank is its own part. */
static enum status self_all_reduce(struct ep *e, void *x, size_t n, enum dtype dtype,
                                   struct err *err)
{
    (void)e, (void)x, (void)n, (void)dtype, (void)err;
    return OK;
}

static enum status self_all_gather(struct ep *e, void *all, const void *mine, size_t bytes,
                                   struct err *err)
{
    (void)e, (void)err;
    memmove(all, mine, bytes);
    return OK;
}

static enum status self_gather_columns(struct ep *e, const struct ep_columns *a, struct err *err)
{
    const size_t width = a->first[1] - a->first[0];
    (void)e, (void)err;
    for (size_t i = 0; i < a->n_rows; i++)
        memmove(a->y + i * a->y_stride + a->first[0], a->mine + i * a->mine_stride,
                width * sizeof *a->y);
    return OK;
}

static enum status self_wait(struct ep *e, struct err *err)
{
    (void)e, (void)err;
    return OK;
}

const struct ep_ops ep_self_ops = {
    .name = "self",
    .on_host = true,
    .create = self_create,
    .free = self_free,
    .plan = self_plan,
    .dispatch_begin = self_dispatch_begin,
    .dispatch_end = self_dispatch_end,
    .combine_begin = ep_return_nothing,
    .combine_end = self_combine,
    .all_reduce = self_all_reduce,
    .all_gather = self_all_gather,
    .gather_columns = self_gather_columns,
    .wait = self_wait,
    .found = ep_found_nothing,
    .abort = ep_abort_nothing,
    .places = ep_no_places,
};
