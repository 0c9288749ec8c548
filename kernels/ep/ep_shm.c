/* ep_shm.c - backend `shm`: life, and rows to experts and back. ep_shm.h describes the memory.
 *
 * Rows and results stay where they were computed. ep_plan writes a *plan*: this rank's rows sorted
 * by physical expert. After the meeting of ep_dispatch an owner reads the plans of all ranks for
 * its experts: its slots name rows in the windows of all ranks. It writes *origins*: the first slot
 * of each (expert, rank). After the meeting of ep_combine a rank finds each of its results by
 * expert, origin and index, in the window of the expert's owner.
 *
 * One place each is enough for rows, results and origins: who writes rows or a plan again has been
 * through the meeting of ep_combine, to which owners came after they had read them; who writes
 * results or origins again has been through the next ep_dispatch's, to which the others came after
 * they had read those. Only a throughput plan may be refused (ERR_FULL) and followed by another one
 * with no other meeting in between, so plans are written to two places in turn.
 * Thread: as ep_shm.h. */
#include "kernels/ep/ep_shm.h"

#include <string.h>

#include "kernels/backend.h"
#include "kernels/host/pages.h"
#include "shared/base/arith.h"
#include "shared/base/mem.h"

enum { ALIGN = 64, ROW_ALIGN = 128 };

/* ---- sizes ---- */

static size_t place(size_t *at, size_t bytes)
{
    const size_t here = *at;
    *at = round_up(here + bytes, ALIGN);
    return here;
}

static struct ep_shm_layout layout_of(const struct ep_config *c)
{
    struct ep_shm_layout l = { .row_bytes = ROW_ALIGN };
    size_t head = 0, body = 0;
    place(&head, sizeof(struct ep_shm_sign));
    l.small = place(&head, EP_SHM_TURNS * EP_SHM_SMALL);
    l.shared_bytes = round_up(c->collective_bytes, ALIGN);
    if (c->placement.n_logical > 0) {
        l.row_bytes = ep_row_bytes(c, &l.scales_at);
        place(&l.plan_bytes, sizeof(int32_t) * ((size_t)c->placement.n_physical + 1));
        l.order = place(&l.plan_bytes, sizeof(int32_t) * ep_pair_slots(c));
        l.origins = place(&head, sizeof(int32_t) * ep_most_local(&c->placement, c->size) *
                                     (size_t)c->size);
        l.plans = place(&head, EP_SHM_TURNS * l.plan_bytes);
        place(&body, (size_t)c->max_rows * l.row_bytes);
        l.results = place(&body, ep_max_slots(c) * (size_t)c->hidden * sizeof(float));
    }
    l.shared = place(&body, EP_SHM_TURNS * l.shared_bytes);
    l.head_bytes = pages_round(head);
    l.body_bytes = round_up(body ? body : 1, pages_common(l.row_bytes));
    return l;
}

static enum status check_sizes(const struct ep_shm *s, struct err *err)
{
    const struct ep_config *c = &s->base.config;
    const double of_one = (double)ep_max_slots(c) * c->hidden * sizeof(float) +
                          (double)c->collective_bytes * EP_SHM_TURNS;
    if (of_one * c->size > (double)(PTRDIFF_MAX / 256))
        return err_set(err, ERR_INVALID, "ep: %d windows of %.0f MiB are too much to share",
                       c->size, of_one / (1 << 20));
    if (s->at.body_bytes / s->at.row_bytes > (size_t)INT32_MAX / (size_t)c->size)
        return err_set(err, ERR_INVALID, "ep: windows of %zu rows of %d ranks are too many",
                       s->at.body_bytes / s->at.row_bytes, c->size);
    return OK;
}

/* ---- life ---- */

static void shm_release(struct ep_shm *s)
{
    ep_shm_close_windows(s);
    run_delay_release(&s->delay);
    mem_free(s->chosen);
    mem_free(s->index);
    mem_free(s->owner);
    mem_free(s->next);
    mem_free(s->by_expert);
    mem_free(s->begin);
    mem_free(s->x_rows);
    ep_release(&s->base);
    mem_free(s);
}

static void make_arrays(struct ep_shm *s)
{
    const struct ep_config *c = &s->base.config;
    const struct ep_placement *p = &c->placement;
    if (p->n_logical == 0) return;
    s->chosen = MEM_ARRAY(int32_t, ep_pair_slots(c));
    s->index = MEM_ARRAY(int32_t, ep_pair_slots(c));
    s->owner = MEM_ARRAY(int32_t, (size_t)p->n_physical);
    s->next = MEM_ARRAY(int32_t, (size_t)p->n_physical);
    s->by_expert = MEM_ARRAY(int32_t, (size_t)s->base.n_local + 1);
    s->begin = MEM_ARRAY(int32_t, (size_t)s->base.n_local + 1);
    s->x_rows = MEM_ARRAY(int32_t, ep_max_slots(c));
    for (int32_t r = 0; r < c->size; r++)
        for (int32_t x = p->first[r]; x < p->first[r + 1]; x++) s->owner[x] = r;
}

static enum status shm_create(const struct ep_config *c, struct ep **out, struct err *err)
{
    struct ep_shm *s = mem_aligned(_Alignof(struct ep_shm), sizeof *s);
    ep_init(&s->base, &ep_shm_ops, c);
    s->base.n_near = c->size - 1;
    s->rows = ep_host_rows_choose();
    s->at = layout_of(c);
    ep_shm_init_meetings(s);
    enum status st = check_sizes(s, err); /* the same on all ranks */
    if (st == OK) {
        make_arrays(s);
        st = ep_shm_open_windows(s, err);
    }
    if (st == OK) *out = &s->base;
    else shm_release(s);
    return st;
}

/* Not collective: memory that others have mapped stays until they let go. */
static void shm_free(struct ep *e)
{
    struct ep_shm *s = ep_shm_of(e);
    const enum status st = ep_shm_raise(s, EP_SHM_LEFT, e->config.rank, NULL);
    (void)st; /* for those that wait for this rank */
    shm_release(s);
}

/* ---- plan ---- */

static char *plan_of(const struct ep_shm *s, int32_t rank)
{
    return ep_shm_head(s, rank) + s->at.plans + s->n_plans % EP_SHM_TURNS * s->at.plan_bytes;
}
/* [n_physical + 1]: where each expert's rows begin in the order. */
static int32_t *plan_begin(const struct ep_shm *s, int32_t rank)
{
    return (int32_t *)(void *)plan_of(s, rank);
}
/* [n_rows n_used]: rows of the rank, sorted by physical expert, then row and choice. */
static int32_t *plan_order(const struct ep_shm *s, int32_t rank)
{
    return (int32_t *)(void *)(plan_of(s, rank) + s->at.order);
}

static void write_plan(struct ep_shm *s)
{
    const size_t used = (size_t)s->base.config.n_used, n = s->base.n_rows * used,
                 n_physical = (size_t)s->base.config.placement.n_physical;
    int32_t *begin = plan_begin(s, s->base.config.rank),
            *order = plan_order(s, s->base.config.rank);
    memset(s->next, 0, n_physical * sizeof *s->next);
    for (size_t i = 0; i < n; i++) s->index[i] = s->next[s->chosen[i]]++;
    begin[0] = 0;
    for (size_t x = 0; x < n_physical; x++) begin[x + 1] = begin[x] + s->next[x];
    for (size_t i = 0; i < n; i++) order[begin[s->chosen[i]] + s->index[i]] = (int32_t)(i / used);
}

/* All ranks decide alike, because they see the same plans. */
static enum status check_room(const struct ep_shm *s, struct err *err)
{
    const struct ep_config *c = &s->base.config;
    const int32_t *first = c->placement.first;
    const size_t room = ep_max_slots(c);
    for (int32_t to = 0; to < c->size && room < ep_pair_slots(c) * (size_t)c->size; to++) {
        size_t many = 0;
        for (int32_t from = 0; from < c->size; from++)
            many += (size_t)(plan_begin(s, from)[first[to + 1]] - plan_begin(s, from)[first[to]]);
        if (many > room)
            return err_set(err, ERR_FULL,
                           "ep: rank %d would get %zu rows at once, it has room for %zu", to, many,
                           room);
    }
    return OK;
}

static enum status learn_counts(struct ep_shm *s, struct ep_counts *out, struct err *err)
{
    const struct ep_config *c = &s->base.config;
    const int32_t first = c->placement.first[c->rank];
    TRY(ep_shm_meet(s, err));
    TRY(check_room(s, err));
    *out = (struct ep_counts){ .by_expert = s->by_expert };
    memset(s->by_expert, 0, (size_t)s->base.n_local * sizeof *s->by_expert);
    for (int32_t r = 0; r < c->size; r++) {
        const int32_t *begin = plan_begin(s, r) + first;
        for (int32_t e = 0; e < s->base.n_local; e++) s->by_expert[e] += begin[e + 1] - begin[e];
    }
    for (int32_t e = 0; e < s->base.n_local; e++) out->n_slots += (size_t)s->by_expert[e];
    const int32_t *own = plan_begin(s, c->rank) + first;
    out->n_own = (size_t)(own[s->base.n_local] - own[0]);
    return OK;
}

static enum status shm_plan(struct ep *e, const int32_t *experts, struct ep_counts *out,
                            struct err *err)
{
    struct ep_shm *s = ep_shm_of(e);
    TRY(ep_shm_check(s, err));
    if (ep_choose_copies(e, experts, s->chosen) >= 0)
        return ep_shm_raise(s, EP_SHM_EXPERT, e->config.rank, err);
    s->n_plans++;
    write_plan(s);
    if (e->config.mode == EP_THROUGHPUT) return learn_counts(s, out, err);
    *out = (struct ep_counts){ .n_slots = ep_max_slots(&e->config) };
    return OK;
}

/* ---- dispatch ---- */

static float *results_of(const struct ep_shm *s, int32_t rank)
{
    return (float *)(void *)(ep_shm_body(s, rank) + s->at.results);
}
/* [n_local, size] of the rank's experts. */
static int32_t *origins_of(const struct ep_shm *s, int32_t rank)
{
    return (int32_t *)(void *)(ep_shm_head(s, rank) + s->at.origins);
}

static struct ep_places shm_places(const struct ep *e)
{
    const struct ep_shm *s = (const struct ep_shm *)e;
    const struct ep_config *c = &e->config;
    if (c->placement.n_logical == 0) return (struct ep_places){ 0 };
    const bool is_plain = c->send == DTYPE_F32 &&
                          s->at.row_bytes == (size_t)c->hidden * sizeof(float);
    return (struct ep_places){
        .rows = is_plain ? (float *)(void *)ep_shm_body(s, c->rank) : NULL,
        .results = results_of(s, c->rank),
    };
}

static enum status shm_dispatch_begin(struct ep *e, const float *x, size_t x_stride,
                                      struct err *err)
{
    struct ep_shm *s = ep_shm_of(e);
    const struct ep_config *c = &e->config;
    unsigned char *rows = (unsigned char *)ep_shm_body(s, c->rank);
    TRY(ep_shm_check(s, err));
    const bool is_there = x == shm_places(e).rows && x_stride == (size_t)c->hidden;
    for (size_t i = 0; i < e->n_rows && !is_there; i++)
        ep_host_rows_send(s->rows, c->send, x + i * x_stride, (size_t)c->hidden,
                          rows + i * s->at.row_bytes, s->at.scales_at);
    ep_shm_arrive(s);
    return OK;
}

/* Appends the slots of one rank's rows for one of this rank's experts, x. */
static enum status index_rows(struct ep_shm *s, int32_t rank, int32_t x, size_t *slot,
                              struct err *err)
{
    const struct ep_config *c = &s->base.config;
    const int32_t *begin = plan_begin(s, rank) + x, *order = plan_order(s, rank);
    const int32_t base = (int32_t)((size_t)rank * (s->at.body_bytes / s->at.row_bytes));
    if (begin[0] < 0 || begin[1] < begin[0] || (size_t)begin[1] > ep_pair_slots(c) ||
        *slot + (size_t)(begin[1] - begin[0]) > ep_max_slots(c))
        return ep_shm_raise(s, EP_SHM_CORRUPT, rank, err);
    for (int32_t i = begin[0]; i < begin[1]; i++) {
        if (order[i] < 0 || order[i] >= c->max_rows)
            return ep_shm_raise(s, EP_SHM_CORRUPT, rank, err);
        s->x_rows[(*slot)++] = base + order[i];
    }
    return OK;
}

static enum status index_all(struct ep_shm *s, struct err *err)
{
    const struct ep_config *c = &s->base.config;
    int32_t *origins = origins_of(s, c->rank);
    size_t slot = 0;
    for (int32_t e = 0; e < s->base.n_local; e++) {
        s->begin[e] = (int32_t)slot;
        for (int32_t r = 0; r < c->size; r++) {
            origins[e * c->size + r] = (int32_t)slot;
            TRY(index_rows(s, r, c->placement.first[c->rank] + e, &slot, err));
        }
    }
    s->begin[s->base.n_local] = (int32_t)slot;
    return OK;
}

/* Rows that are read in place count as if they had come. */
static void count_traffic(struct ep_shm *s)
{
    const struct ep_config *c = &s->base.config;
    const int32_t *own = plan_begin(s, c->rank) + c->placement.first[c->rank];
    const uint64_t n_own = (uint64_t)(own[s->base.n_local] - own[0]),
                   in = (uint64_t)s->begin[s->base.n_local] - n_own,
                   out = s->base.n_rows * (uint64_t)c->n_used - n_own,
                   result = (uint64_t)c->hidden * sizeof(float);
    s->base.traffic.sent += out * s->at.row_bytes + in * result;
    s->base.traffic.received += in * s->at.row_bytes + out * result;
}

static enum status shm_dispatch_end(struct ep *e, struct ep_batch *out, struct err *err)
{
    struct ep_shm *s = ep_shm_of(e);
    TRY(ep_shm_wait(s, err));
    TRY(index_all(s, err));
    count_traffic(s);
    *out = (struct ep_batch){
        .n_slots = e->config.mode == EP_LOW_LATENCY ? ep_max_slots(&e->config)
                                                    : (size_t)s->begin[e->n_local],
        .n_local = e->n_local,
        .begin = s->begin,
        .x_rows = s->x_rows,
        .x = s->bodies,
        .row_bytes = s->at.row_bytes,
        .scales_at = s->at.scales_at,
    };
    return OK;
}

/* ---- combine ---- */

/* Where the result of (row, choice) i lies, or NULL. */
static const float *result_of(const struct ep_shm *s, size_t i)
{
    const struct ep_config *c = &s->base.config;
    const int32_t x = s->chosen[i], owner = s->owner[x],
                  origin = origins_of(s,
                                      owner)[(x - c->placement.first[owner]) * c->size + c->rank];
    const size_t slot = (size_t)origin + (size_t)s->index[i];
    if (origin < 0 || slot >= ep_max_slots(c)) return NULL;
    return results_of(s, owner) + slot * (size_t)c->hidden;
}

static enum status sum_rows(struct ep_shm *s, const struct ep_combine_args *a, struct err *err)
{
    const struct ep_config *c = &s->base.config;
    const size_t used = (size_t)c->n_used, hidden = (size_t)c->hidden;
    struct ep_row_result results[KERNEL_EXPERTS_USED_MAX] = { 0 };
    for (size_t i = 0; i < s->base.n_rows; i++) {
        for (size_t j = 0; j < used; j++) {
            results[j].f32 = result_of(s, i * used + j);
            if (!results[j].f32)
                return ep_shm_raise(s, EP_SHM_CORRUPT, s->owner[s->chosen[i * used + j]], err);
        }
        s->rows->sum(&(struct ep_row_sum){ .y = a->y + i * hidden,
                                           .results = results,
                                           .weights = a->weights + i * used,
                                           .n = hidden,
                                           .n_used = used,
                                           .add = a->add,
                                           .rounds = c->back == DTYPE_BF16 });
    }
    return OK;
}

static enum status shm_combine(struct ep *e, const struct ep_combine_args *a, struct err *err)
{
    struct ep_shm *s = ep_shm_of(e);
    float *results = results_of(s, e->config.rank);
    TRY(ep_shm_check(s, err));
    if (a->out != results && s->begin[e->n_local] > 0)
        memcpy(results, a->out,
               (size_t)s->begin[e->n_local] * (size_t)e->config.hidden * sizeof *results);
    TRY(ep_shm_meet(s, err));
    return sum_rows(s, a, err);
}

/* All work is complete when a call returns. */
static enum status shm_wait(struct ep *e, struct err *err)
{
    return ep_shm_fault_of(ep_shm_of(e), err);
}

const struct ep_ops ep_shm_ops = {
    .name = "shm",
    .on_host = true,
    .create = shm_create,
    .free = shm_free,
    .plan = shm_plan,
    .dispatch_begin = shm_dispatch_begin,
    .dispatch_end = shm_dispatch_end,
    .combine_begin = ep_return_nothing,
    .combine_end = shm_combine,
    .all_reduce = ep_shm_all_reduce,
    .all_gather = ep_shm_all_gather,
    .gather_columns = ep_shm_gather_columns,
    .wait = shm_wait,
    .found = ep_found_nothing,
    .abort = ep_shm_abort,
    .places = shm_places,
};
