/* ep_ucx_rows.c - rows to experts and back over messages.
 *
 * ep_plan sorts this rank's rows by physical expert. Dispatch sends a rank each row that chose one
 * of its experts once, and an *order*: for each of its experts which of these rows, ascending. The
 * receiver's rows lie by sending rank in one matrix, own rows included, so that x_rows names them
 * where they came. Combine sends the results of each (expert, rank) in the order of its rows: they
 * come to lie as in the plan, and each is added by itself, in the order of choices.
 *
 * To a rank that reads this one's window neither rows nor results are sent. Its order names rows as
 * they lie there, and it finds results by the owner's origins. The messages of a phase say when
 * they are there; when they may be written again is said in ep_shm.c: phases are its meetings.
 * Thread: as ep_ucx.h. */
#include <string.h>

#include "kernels/backend.h"
#include "kernels/ep/ucx/ep_ucx.h"
#include "kernels/float_bits.h"

/* ---- plan ---- */

static void sort_rows(struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    const size_t n = u->base.n_rows * (size_t)c->n_used,
                 n_physical = (size_t)c->placement.n_physical;
    memset(u->begin, 0, (n_physical + 1) * sizeof *u->begin);
    for (size_t i = 0; i < n; i++) u->index[i] = u->begin[u->chosen[i] + 1]++;
    for (size_t x = 0; x < n_physical; x++) u->begin[x + 1] += u->begin[x];
    for (int32_t r = 0; r < c->size; r++) u->to_ranks[r] = (int32_t)ep_ucx_n_for(u, r);
}

/* Own order for a rank: the numbers of rows of its experts, then the rows. */
static int32_t *order_for(const struct ep_ucx *u, int32_t to)
{
    const int32_t first = ep_ucx_first(u, to);
    return u->order + first + u->begin[first];
}

/* Which rows go to each rank, and the order for it. The own rank's lie where they are. */
static void write_orders(struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    const size_t used = (size_t)c->n_used, max_rows = (size_t)c->max_rows;
    for (int32_t r = 0; r < c->size; r++) {
        const int32_t first = ep_ucx_first(u, r), n_local = ep_ucx_first(u, r + 1) - first;
        for (int32_t e = 0; e < n_local; e++)
            order_for(u, r)[e] = u->begin[first + e + 1] - u->begin[first + e];
        u->n_sent[r] = 0;
        u->last_sent[r] = -1;
    }
    for (size_t i = 0; i < u->base.n_rows * used; i++) {
        const int32_t row = (int32_t)(i / used), x = u->chosen[i], to = u->owner[x],
                      first = ep_ucx_first(u, to), n_local = ep_ucx_first(u, to + 1) - first;
        const bool is_there = to == c->rank || u->reads_mine[to];
        if (u->last_sent[to] != row && !is_there)
            u->sent[(size_t)to * max_rows + (size_t)u->n_sent[to]++] = u->last_sent[to] = row;
        order_for(u, to)[n_local + u->begin[x] - u->begin[first] + u->index[i]] =
            is_there ? row : u->n_sent[to] - 1;
    }
}

static bool next_plan(struct ep_ucx *u, int32_t to, size_t *cursor, struct ep_ucx_run *run)
{
    const size_t n_local = (size_t)(ep_ucx_first(u, to + 1) - ep_ucx_first(u, to));
    if (*cursor == 0)
        *run = (struct ep_ucx_run){ EP_UCX_PLAN, u->to_ranks,
                                    (size_t)u->base.config.size * sizeof(int32_t) };
    else if (*cursor == 1 && n_local)
        *run = (struct ep_ucx_run){ EP_UCX_PLAN, order_for(u, to), n_local * sizeof(int32_t) };
    else return false;
    ++*cursor;
    return true;
}

/* All ranks decide alike, because they are told the same numbers. */
static enum status check_room(const struct ep_ucx *u, struct err *err)
{
    const struct ep_config *c = &u->base.config;
    const size_t room = ep_max_slots(c);
    for (int32_t to = 0; to < c->size; to++) {
        size_t many = 0;
        for (int32_t from = 0; from < c->size; from++)
            many += (size_t)(from == c->rank ? u->to_ranks : ep_ucx_plan(u, from))[to];
        if (many > room)
            return err_set(err, ERR_FULL,
                           "ep: rank %d would get %zu rows at once, it has room for %zu", to, many,
                           room);
    }
    return OK;
}

/* Whether a rank's plan is possible: its rows for this rank's experts are those for this rank. */
static bool is_possible(const struct ep_ucx *u, int32_t rank)
{
    const struct ep_config *c = &u->base.config;
    const int32_t *to_ranks = ep_ucx_plan(u, rank), *rows = to_ranks + c->size;
    const int64_t most = (int64_t)ep_pair_slots(c);
    int64_t all = 0, mine = 0;
    if (ep_ucx_in(u, rank)->total != u->plan_bytes) return false;
    for (int32_t r = 0; r < c->size; r++) {
        if (to_ranks[r] < 0 || to_ranks[r] > most) return false;
        all += to_ranks[r];
    }
    for (int32_t e = 0; e < u->base.n_local; e++) {
        if (rows[e] < 0 || rows[e] > most) return false;
        mine += rows[e];
    }
    return all <= most && mine == to_ranks[c->rank];
}

static enum status learn_counts(struct ep_ucx *u, struct ep_counts *out, struct err *err)
{
    const struct ep_config *c = &u->base.config;
    for (int32_t r = 0; r < c->size; r++)
        u->out[r].total = (size_t)(c->size + ep_ucx_first(u, r + 1) - ep_ucx_first(u, r)) *
                          sizeof(int32_t);
    ep_ucx_begin(u, next_plan);
    TRY(ep_ucx_wait(u, err));
    for (int32_t r = 0; r < c->size; r++)
        if (r != c->rank && !is_possible(u, r)) return ep_ucx_raise(u, EP_UCX_CORRUPT, r, err);
    TRY(check_room(u, err));
    *out = (struct ep_counts){ .n_own = ep_ucx_n_for(u, c->rank), .by_expert = u->by_expert };
    for (int32_t e = 0; e < u->base.n_local; e++) {
        u->by_expert[e] = order_for(u, c->rank)[e];
        for (int32_t r = 0; r < c->size; r++)
            if (r != c->rank) u->by_expert[e] += ep_ucx_plan(u, r)[c->size + e];
        out->n_slots += (size_t)u->by_expert[e];
    }
    return OK;
}

static enum status plan_rows(struct ep_ucx *u, const int32_t *experts, struct ep_counts *out,
                             struct err *err)
{
    const struct ep_config *c = &u->base.config;
    if (ep_choose_copies(&u->base, experts, u->chosen) >= 0)
        return ep_ucx_raise(u, EP_UCX_EXPERT, c->rank, err);
    sort_rows(u);
    write_orders(u);
    if (c->mode == EP_THROUGHPUT) return learn_counts(u, out, err);
    *out = (struct ep_counts){ .n_slots = ep_max_slots(c) };
    return OK;
}

enum status ep_ucx_plan_rows(struct ep *e, const int32_t *experts, struct ep_counts *out,
                             struct err *err)
{
    struct ep_ucx *u = ep_ucx_of(e);
    TRY(ep_ucx_enter(u, err));
    return ep_ucx_leave(u, plan_rows(u, experts, out, err));
}

/* ---- dispatch ---- */

static char *own_rows(const struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    return u->rows + (size_t)c->rank * u->window.rows_bytes;
}

struct ep_places ep_ucx_places(const struct ep *e)
{
    const struct ep_ucx *u = (const struct ep_ucx *)e;
    const struct ep_config *c = &e->config;
    const bool is_plain = c->send == DTYPE_F32 && u->row_bytes == (size_t)c->hidden * sizeof(float);
    if (c->placement.n_logical == 0) return (struct ep_places){ 0 };
    return (struct ep_places){ .rows = is_plain ? (float *)(void *)own_rows(u) : NULL,
                               .results = ep_ucx_own_results(u) };
}

static bool next_rows(struct ep_ucx *u, int32_t to, size_t *cursor, struct ep_ucx_run *run)
{
    const size_t n_local = (size_t)(ep_ucx_first(u, to + 1) - ep_ucx_first(u, to)),
                 n_sent = (size_t)u->n_sent[to];
    const int32_t *sent = u->sent + (size_t)to * (size_t)u->base.config.max_rows;
    if (*cursor == 0 && n_local) {
        *cursor = 1;
        *run = (struct ep_ucx_run){ EP_UCX_ORDER, order_for(u, to),
                                    (n_local + ep_ucx_n_for(u, to)) * sizeof(int32_t) };
        return true;
    }
    const size_t i = *cursor ? *cursor - 1 : 0;
    size_t n = 1;
    if (i >= n_sent) return false;
    while (i + n < n_sent && sent[i + n] == sent[i] + (int32_t)n) n++;
    *cursor = i + n + 1;
    *run = (struct ep_ucx_run){ EP_UCX_ROWS, own_rows(u) + (size_t)sent[i] * u->row_bytes,
                                n * u->row_bytes };
    return true;
}

static void send_rows(struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    for (int32_t r = 0; r < c->size; r++) {
        const size_t n_local = (size_t)(ep_ucx_first(u, r + 1) - ep_ucx_first(u, r));
        u->out[r].total = n_local ? (n_local + ep_ucx_n_for(u, r)) * sizeof(int32_t) +
                                        (size_t)u->n_sent[r] * u->row_bytes
                                  : 0;
    }
    ep_ucx_begin(u, next_rows);
}

enum status ep_ucx_dispatch_begin(struct ep *e, const float *x, size_t x_stride, struct err *err)
{
    struct ep_ucx *u = ep_ucx_of(e);
    const size_t hidden = (size_t)e->config.hidden;
    unsigned char *rows = (unsigned char *)own_rows(u);
    TRY(ep_ucx_enter(u, err));
    const bool is_there = x == ep_ucx_places(e).rows && x_stride == hidden;
    for (size_t i = 0; i < e->n_rows && !is_there; i++)
        ep_host_rows_send(u->rows_loop, e->config.send, x + i * x_stride, hidden,
                          rows + i * u->row_bytes, u->scales_at);
    send_rows(u);
    return ep_ucx_leave(u, OK);
}

/* The order of a rank's rows for this rank. */
static const int32_t *order_of(const struct ep_ucx *u, int32_t rank)
{
    return rank == u->base.config.rank ? order_for(u, rank) : ep_ucx_order(u, rank);
}

/* Whether what a rank sent is an order and the rows that it names. Sets the number of its slots. */
static bool is_order(const struct ep_ucx *u, int32_t rank, size_t *n_slots)
{
    const struct ep_config *c = &u->base.config;
    const size_t n_local = (size_t)u->base.n_local, most = ep_pair_slots(c),
                 total = ep_ucx_in(u, rank)->total;
    const int32_t *order = ep_ucx_order(u, rank);
    size_t n = 0;
    *n_slots = 0;
    if (n_local == 0) return total == 0;
    for (size_t e = 0; e < n_local; e++) {
        if (order[e] < 0 || (size_t)order[e] > most) return false;
        n += (size_t)order[e];
    }
    const size_t bytes = (n_local + n) * sizeof(int32_t);
    if (n > most || total < bytes || (total - bytes) % u->row_bytes) return false;
    if (u->tails[rank] && total != bytes) return false;
    const size_t n_rows = u->tails[rank] ? (size_t)c->max_rows : (total - bytes) / u->row_bytes;
    for (size_t i = 0; i < n; i++)
        if (order[n_local + i] < 0 || (size_t)order[n_local + i] >= n_rows) return false;
    *n_slots = n;
    return n_rows <= (size_t)c->max_rows;
}

static enum status check_orders(struct ep_ucx *u, struct err *err)
{
    const struct ep_config *c = &u->base.config;
    size_t all = ep_ucx_n_for(u, c->rank);
    for (int32_t r = 0; r < c->size; r++) {
        size_t n = 0;
        if (r != c->rank && (!is_order(u, r, &n) || (all += n) > ep_max_slots(c)))
            return ep_ucx_raise(u, EP_UCX_CORRUPT, r, err);
    }
    return OK;
}

static void index_slots(struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    size_t slot = 0;
    for (int32_t r = 0; r < c->size; r++) u->cursors[r] = (size_t)u->base.n_local;
    for (int32_t e = 0; e < u->base.n_local; e++) {
        u->slot_begin[e] = (int32_t)slot;
        for (int32_t r = 0; r < c->size; r++) {
            const int32_t *order = order_of(u, r);
            u->origin[e * c->size + r] = (int32_t)slot;
            for (int32_t i = 0; i < order[e]; i++)
                u->x_rows[slot++] = r * (int32_t)u->window.rows_stride + order[u->cursors[r]++];
        }
    }
    u->slot_begin[u->base.n_local] = (int32_t)slot;
}

/* Rows and results that near ranks read in place; those that travel are counted as they go. */
static void count_near(struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    const uint64_t result = (uint64_t)c->hidden * sizeof(float);
    for (int32_t r = 0; r < c->size; r++) {
        uint64_t theirs = 0, mine = ep_ucx_n_for(u, r);
        if (r == c->rank) continue;
        for (int32_t e = 0; e < u->base.n_local; e++) theirs += (uint64_t)order_of(u, r)[e];
        if (u->reads_mine[r]) u->base.traffic.sent += mine * u->row_bytes + theirs * result;
        if (u->tails[r]) u->base.traffic.received += theirs * u->row_bytes + mine * result;
    }
}

static enum status end_dispatch(struct ep_ucx *u, struct ep_batch *out, struct err *err)
{
    const struct ep_config *c = &u->base.config;
    TRY(ep_ucx_wait(u, err));
    TRY(check_orders(u, err));
    index_slots(u);
    count_near(u);
    *out = (struct ep_batch){
        .n_slots = c->mode == EP_LOW_LATENCY ? ep_max_slots(c)
                                             : (size_t)u->slot_begin[u->base.n_local],
        .n_local = u->base.n_local,
        .begin = u->slot_begin,
        .x_rows = u->x_rows,
        .x = u->rows,
        .row_bytes = u->row_bytes,
        .scales_at = u->scales_at,
    };
    return OK;
}

enum status ep_ucx_dispatch_end(struct ep *e, struct ep_batch *out, struct err *err)
{
    struct ep_ucx *u = ep_ucx_of(e);
    ep_ucx_resume(u);
    return ep_ucx_leave(u, end_dispatch(u, out, err));
}

/* ---- combine ---- */

static bool next_results(struct ep_ucx *u, int32_t to, size_t *cursor, struct ep_ucx_run *run)
{
    const int32_t size = u->base.config.size, *n = order_of(u, to);
    size_t e = *cursor;
    while (e < (size_t)u->base.n_local && n[e] == 0) e++;
    *cursor = e + 1;
    if (e >= (size_t)u->base.n_local) return false;
    const int32_t slot = u->origin[e * (size_t)size + (size_t)to];
    *run = (struct ep_ucx_run){ EP_UCX_RESULTS,
                                u->out_rows + (size_t)slot * (size_t)u->base.config.hidden,
                                (size_t)n[e] * u->back_bytes };
    return true;
}

static void send_results(struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    for (int32_t r = 0; r < c->size; r++) {
        u->out[r].total = 0;
        for (int32_t e = 0; e < u->base.n_local && !u->reads_mine[r]; e++)
            u->out[r].total += (size_t)order_of(u, r)[e] * u->back_bytes;
    }
    ep_ucx_begin(u, next_results);
}

/* A near rank's result of (row, choice) i, where it lies there; NULL: nowhere. */
static const float *near_result(const struct ep_ucx *u, int32_t rank, size_t i)
{
    const struct ep_config *c = &u->base.config;
    const struct ep_ucx_window *w = &u->window;
    const int32_t at = (u->chosen[i] - ep_ucx_first(u, rank)) * c->size + c->rank,
                  origin = ((const int32_t *)(const void *)(u->tails[rank] + w->origins))[at];
    const size_t slot = (size_t)origin + (size_t)u->index[i];
    if (origin < 0 || slot >= ep_max_slots(c)) return NULL;
    return (const float *)(const void *)(u->tails[rank] + w->results) + slot * (size_t)c->hidden;
}

/* The result of (row, choice) i. False: a near rank's is nowhere. */
static bool find_result(const struct ep_ucx *u, size_t i, struct ep_row_result *out)
{
    const struct ep_config *c = &u->base.config;
    const int32_t x = u->chosen[i], owner = u->owner[x];
    *out = (struct ep_row_result){ 0 };
    if (owner == c->rank) {
        const int32_t first = ep_ucx_first(u, c->rank),
                      slot = u->origin[(x - first) * c->size + c->rank] + u->index[i];
        out->f32 = u->out_rows + (size_t)slot * (size_t)c->hidden;
    } else if (u->tails[owner]) {
        out->f32 = near_result(u, owner, i);
    } else {
        const void *at = u->results + (size_t)(u->begin[x] + u->index[i]) * u->back_bytes;
        if (c->back == DTYPE_BF16) out->bf16 = at;
        else out->f32 = at;
    }
    return out->f32 || out->bf16;
}

static enum status sum_rows(struct ep_ucx *u, const struct ep_combine_args *a, struct err *err)
{
    const struct ep_config *c = &u->base.config;
    const size_t used = (size_t)c->n_used, hidden = (size_t)c->hidden;
    struct ep_row_result results[KERNEL_EXPERTS_USED_MAX];
    for (size_t i = 0; i < u->base.n_rows; i++) {
        for (size_t j = 0; j < used; j++)
            if (!find_result(u, i * used + j, &results[j]))
                return ep_ucx_raise(u, EP_UCX_CORRUPT, u->owner[u->chosen[i * used + j]], err);
        u->rows_loop->sum(&(struct ep_row_sum){ .y = a->y + i * hidden,
                                                .results = results,
                                                .weights = a->weights + i * used,
                                                .n = hidden,
                                                .n_used = used,
                                                .add = a->add,
                                                .rounds = c->back == DTYPE_BF16 });
    }
    return OK;
}

/* Near ranks read results in the own window. */
static void leave_results(struct ep_ucx *u, const float *out)
{
    float *results = ep_ucx_own_results(u);
    const size_t n = (size_t)u->slot_begin[u->base.n_local];
    if (u->is_read && out != results && n)
        memcpy(results, out, n * (size_t)u->base.config.hidden * sizeof *results);
    u->out_rows = out;
}

static enum status combine(struct ep_ucx *u, const struct ep_combine_args *a, struct err *err)
{
    const struct ep_config *c = &u->base.config;
    leave_results(u, a->out);
    send_results(u);
    TRY(ep_ucx_wait(u, err));
    for (int32_t r = 0; r < c->size; r++) {
        const size_t n = u->tails[r] ? 0 : ep_ucx_n_for(u, r);
        if (r != c->rank && ep_ucx_in(u, r)->total != n * u->back_bytes)
            return ep_ucx_raise(u, EP_UCX_CORRUPT, r, err);
    }
    return sum_rows(u, a, err);
}

enum status ep_ucx_combine(struct ep *e, const struct ep_combine_args *a, struct err *err)
{
    struct ep_ucx *u = ep_ucx_of(e);
    TRY(ep_ucx_enter(u, err));
    return ep_ucx_leave(u, combine(u, a, err));
}
