/* ffn_moe_ep.c - a mixture of experts of which this rank holds some:
 *
 *     h, experts, weights   norm and router of this rank's rows
 *     ep_plan               which rows go where; no room: all ranks halve the piece alike
 *     ep_dispatch_begin     rows leave
 *       a = Shared(h)       while they travel: gate and up, and down if not below
 *     ep_dispatch_end       rows of all ranks for the experts of this one
 *     expert_slots
 *     ep_combine_begin      results leave; x += down(a) while they travel
 *     ep_combine_end        x += sum_j w_j result_j, in the order of choices
 *
 * All ranks go through the same pieces, also with fewer rows or none. A row's result depends on the
 * row alone and is added in the order of its choices, so x has the bits of a rank that has all
 * experts. Ranks of one tensor-parallel node have the same rows: each does a part of them, and x is
 * gathered at the end. Thread: engine. */
#include "shared/base/arith.h"
#include "shared/base/assert.h"
#include "shared/model/expert_store.h"
#include "shared/model/ffn_moe.h"

/* Where the piece's rows and their results are: in the ep object's memory if it has room. */
struct ep_buffers {
    float *h, *out;
};

static struct ep_buffers buffers_of(const struct decoder_step *s, const struct ffn_moe_work *w)
{
    const struct ep_places p = ep_places(s->m->ep);
    return (struct ep_buffers){ p.rows ? p.rows : w->h, p.results ? p.results : w->out };
}

/* The shared expert of a piece: x += down(silu(gate(h)) up(h)), h and x [rows, H]. */
struct shared_piece {
    const struct swiglu *f; /* NULL: there is nothing to compute */
    float *act;
    size_t rows;
    bool is_apart; /* down waits until results travel */
};

/* Few rows on a GPU: the products of experts come between the two, which takes the rounded rows of
 * `act` from the context, and more rows would then be rounded by a launch of their own, as long as
 * what their results travel. A step of a host has nobody who computes meanwhile. */
enum { APART_ROWS = 8 };
static struct shared_piece shared_of(const struct decoder_step *s, const struct ffn_moe *e,
                                     const struct ffn_moe_work *w, size_t rows)
{
    const bool has = s->m->config.moe.shared_intermediate > 0 && rows > 0;
    return (struct shared_piece){
        .f = has ? &e->shared : NULL,
        .act = w->shared_act,
        .rows = rows,
        .is_apart = !s->m->kernels->device->is_host && rows <= APART_ROWS,
    };
}

static void shared_down(struct kernel_ctx *k, const struct shared_piece *p, float *x)
{
    const struct matmul_args down = {
        .w = &p->f->down,
        .bias = p->f->down_bias,
        .x = p->act,
        .x_stride = p->f->down.n_in,
        .x_prequantized = !p->is_apart,
        .n_rows = p->rows,
        .y = x,
        .y_stride = p->f->down.n_out,
        .epilogue = MATMUL_ADD,
    };
    k->ops->matmul(k, &down, 1);
}

/* While rows travel. */
static void run_shared(struct kernel_ctx *k, const struct shared_piece *p, const float *h, float *x)
{
    if (!p->f) return;
    const struct matmul_args gate_up = {
        .w = &p->f->gate_up,
        .bias = p->f->gate_up_bias,
        .x = h,
        .x_stride = p->f->gate_up.n_in,
        .n_rows = p->rows,
        .y = p->act,
        .y_stride = p->f->down.n_in,
        .quantize_for = p->is_apart ? NULL : &p->f->down,
        .epilogue = MATMUL_SILU_MUL,
    };
    k->ops->matmul(k, &gate_up, 1);
    if (!p->is_apart) shared_down(k, p, x);
}

/* As many slots as a piece of the busiest rank's rows lets come: on a GPU the host does not learn
 * how many did. */
static size_t most_slots(const struct decoder_step *s, const struct ffn_moe_work *w)
{
    const size_t piece = min_size(w->max_rows, s->b->group_rows);
    return (size_t)s->m->ep->config.size * piece * s->m->config.moe.n_used;
}

/* The slots' rows as f32, if they travelled as another type to a CPU. */
static struct ep_batch as_f32(const struct decoder_step *s, const struct ffn_moe_work *w,
                              const struct ep_batch *in)
{
    const size_t hidden = s->m->config.hidden;
    struct ep_batch out = *in;
    if (!w->arrived) return out;
    for (size_t slot = 0; slot < in->n_slots; slot++) {
        ep_read_row(s->m->ep, in, slot, w->arrived + slot * hidden);
        w->arrived_rows[slot] = (int32_t)slot;
    }
    out.x = w->arrived;
    out.x_rows = w->arrived_rows;
    out.row_bytes = hidden * sizeof(float);
    return out;
}

static void run_slots(const struct decoder_step *s, const struct ffn_moe *e,
                      const struct ffn_moe_work *w, const struct ep_batch *arrived, float *out)
{
    const struct ep_batch rows = as_f32(s, w, arrived), *in = &rows;
    const struct moe_slots experts = moe_slots_of(s, e);
    const enum dtype type = w->arrived ? DTYPE_F32 : s->m->ep->config.send;
    const bool is_f32 = type == DTYPE_F32;
    const struct expert_slots_args a = {
        .gate_up = experts.gate_up,
        .down = experts.down,
        .n_experts = experts.n,
        .n_slots = min_size(in->n_slots, most_slots(s, w)),
        .x = is_f32 ? in->x : NULL,
        .narrow = { is_f32 ? NULL : in->x, type, in->scales_at },
        .x_stride = in->row_bytes / dtype_block_bytes(type),
        .n_x_rows = in->n_slots,
        .rows = in->x_rows,
        .begin = in->begin,
        .out = out,
        .act = w->act,
        .jobs = s->m->experts->jobs,
    };
    ASSERT(in->n_slots <= w->max_slots);
    s->m->kernels->ops->expert_slots(s->m->kernels, &a);
}

/* Where the layer's experts are, if they are not in the same places in all sparse layers. */
static int32_t map_of(const struct ep *ep, const struct ffn_moe *e)
{
    return ep->config.placement.n_maps > 1 ? (int32_t)e->i_sparse : 0;
}

/* One piece: rows of this rank, from row `first` of the step on. ERR_FULL: on all ranks, and x is
 * as it was. */
static enum status run_piece(const struct decoder_step *s, const struct ffn_moe *e,
                             const struct ffn_moe_work *w, const float *norm, size_t first,
                             size_t rows, struct err *err)
{
    float *x = s->x + first * s->m->config.hidden;
    const size_t hidden = s->m->config.hidden;
    const struct ep_buffers b = buffers_of(s, w);
    struct kernel_ctx *k = s->m->kernels;
    struct ep *ep = s->m->ep;
    struct ep_counts counts;
    struct ep_batch in;
    if (rows > 0) moe_route_rows(s, e, w, &(struct moe_rows){ x, norm, b.h, rows }, false);
    const struct ep_rows plan = {
        .map = map_of(ep, e),
        .experts = w->experts,
        .n = rows,
        .n_real = s->n_real,
        .first_row = (int32_t)first,
        .chosen = expert_rows_chosen_at(s->m->expert_rows, e->i_sparse),
    };
    TRY(ep_plan(ep, &plan, &counts, err));
    if (k->device->is_host)
        expert_rows_add(s->m->expert_rows, e->i_sparse, w->experts, rows * s->m->config.moe.n_used,
                        ep, &counts);
    const struct shared_piece shared = shared_of(s, e, w, rows);
    TRY(ep_dispatch_begin(ep, b.h, hidden, err));
    run_shared(k, &shared, b.h, x);
    TRY(ep_dispatch_end(ep, &in, err));
    run_slots(s, e, w, &in, b.out);
    const struct ep_combine_args sum = { .out = b.out, .weights = w->weights, .y = x, .add = true };
    TRY(ep_combine_begin(ep, &sum, err));
    if (shared.f && shared.is_apart) shared_down(k, &shared, x);
    return ep_combine_end(ep, err);
}

/* Gathers the rows that the ranks of this node have done. */
static void gather_rows(const struct decoder_step *s, struct share_part mine)
{
    const size_t hidden = s->m->config.hidden;
    const struct share_cut rows = { share_times(mine, hidden), s->n_rows * hidden, hidden };
    if (s->n_rows > 0) decoder_gather(s, s->x, rows.n, s->x + rows.mine.first, rows.n, 1, &rows);
}

void moe_forward_ep(const struct decoder_step *s, const struct ffn_moe *e,
                    const struct ffn_moe_work *w, const float *norm)
{
    const struct share_part mine = model_routed_rows(s->m, s->n_rows);
    const size_t most = s->b->group_rows;
    struct err *fault = s->exchange_fault;
    size_t piece = w->max_rows;
    for (size_t at = 0; at < most && decoder_goes_on(s);) {
        const size_t n = min_size(piece, most - at), end = min_size(at + n, mine.n),
                     rows = end > at ? end - at : 0;
        const enum status st = run_piece(s, e, w, norm, mine.first + at, rows, fault);
        if (st == ERR_FULL && n > 1) {
            fault->code = OK;
            piece = div_up(n, 2);
            continue;
        }
        fault->code = st;
        at += n;
    }
    gather_rows(s, mine);
}
