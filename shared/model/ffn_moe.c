/* ffn_moe.c - a mixture of experts:
 *
 *     h                    = norm(x)
 *     z                    = Wr h                the router, in f32
 *     e_1 .. e_k, w_1 ..   = route(z)            struct route_args; each family has its values
 *     x                   += sum_j w_j Expert_{e_j}(h) + Shared(h)
 *
 * Every expert is a SwiGLU as in ffn_dense.c. A rank holds some of the routed experts, each of them
 * whole and in the model's store (expert_store.h), and all of the rest. Long steps are routed in
 * chunks of rows, which bounds the buffers; weights are then read once per chunk.
 * Thread: loading, then engine; moe_bind_expert: experts.h. */
#include <inttypes.h>
#include <stdio.h>

#include "shared/base/arith.h"
#include "shared/base/mem.h"
#include "shared/model/expert_store.h"
#include "shared/model/ffn_moe.h"

/* Rows of a step that are routed at a time: enough for over a hundred per expert in most models,
 * and as many as a [rows used, H] buffer of 256 MiB holds (DeepSeek-V3: 1170). On a GPU four times
 * as many, in 512 MiB: its tiles are 128 rows, and a chunk reads all experts' weights once. */
enum { ROWS_MIN = 16, ROWS_MAX = 2048, GPU_ROWS_MAX = 8192 };
static const size_t WORK_ELEMENTS = (size_t)64 << 20, GPU_WORK_ELEMENTS = (size_t)128 << 20;

/* ---- load ---- */

static struct ffn_layer *moe_create(const struct model *m, uint32_t i_layer)
{
    struct ffn_moe *e = MEM_NEW(struct ffn_moe);
    e->base.ops = &ffn_moe_ops;
    e->n_experts = m->config.moe.n_experts;
    e->i_sparse = model_n_sparse(&m->config, i_layer);
    return &e->base;
}

static struct ffn_work *moe_create_work(void)
{
    struct ffn_moe_work *w = MEM_NEW(struct ffn_moe_work);
    w->base.ops = &ffn_moe_ops;
    return &w->base;
}

static enum status bind_router(struct binder *b, const char *mlp, struct ffn_moe *e)
{
    const struct model_config *c = &b->m->config;
    const struct matrix_spec router = {
        .prefix = mlp, .leaf = "gate", .n_out = e->n_experts, .n_in = c->hidden
    };
    TRY(bind_matrix(b, &router, BIND_F32, &e->router));
    if (!c->moe.selection_bias) return OK;
    return bind_vector(b, mlp, "gate.e_score_correction_bias", e->n_experts, &e->selection_bias);
}

/* Binds expert i of the layer; x NULL: only makes it known. */
static enum status bind_expert(struct binder *b, const char *experts, uint32_t i, struct expert *x)
{
    static const struct share_part NONE = { 0, 0 };
    struct weight nowhere;
    const size_t hidden = b->m->config.hidden, n = b->m->config.moe.intermediate;
    const struct matrix_spec gate = {
        .prefix = experts,
        .leaf = "gate_proj",
        .whole = "gate_up_proj",
        .n_out = n,
        .n_in = hidden,
        .first = 0,
        .total = 2 * n,
        .i_expert = i,
        .n_experts = b->m->config.moe.n_experts,
        .part = x ? NULL : &NONE,
    };
    struct matrix_spec up = gate, down = gate;
    up.leaf = "up_proj";
    up.first = n;
    down.leaf = "down_proj";
    down.whole = NULL;
    down.n_out = hidden;
    down.n_in = n;
    TRY(bind_pair(b, &gate, &up, BIND_EXPERT, x ? &x->w.gate_up : &nowhere));
    if (x && !b->packing) x->plan.gate_up = b->last_plan;
    TRY(bind_matrix(b, &down, BIND_EXPERT, x ? &x->w.down : &nowhere));
    if (x && !b->packing) x->plan.down = b->last_plan;
    return OK;
}

enum status moe_bind_expert(struct binder *b, struct expert *x)
{
    char experts[TENSOR_NAME_BYTES_MAX / 2];
    snprintf(experts, sizeof experts, "model.layers.%" PRIu32 ".mlp.experts.", x->i_layer);
    b->is_expert = true;
    const enum status st = bind_expert(b, experts, x->i_expert, x);
    b->is_expert = false;
    return st;
}

static enum status moe_bind(struct binder *b, const char *layer, struct ffn_layer *base)
{
    struct ffn_moe *e = (struct ffn_moe *)base;
    const size_t shared_intermediate = b->m->config.moe.shared_intermediate;
    char mlp[TENSOR_NAME_BYTES_MAX / 2], experts[TENSOR_NAME_BYTES_MAX / 2],
        shared[TENSOR_NAME_BYTES_MAX / 2];
    snprintf(mlp, sizeof mlp, "%smlp.", layer);
    snprintf(experts, sizeof experts, "%smlp.experts.", layer);
    snprintf(shared, sizeof shared, "%smlp.shared_experts.", layer);
    TRY(bind_router(b, mlp, e));
    for (uint32_t i = 0; i < e->n_experts; i++) TRY(bind_expert(b, experts, i, NULL));
    if (!shared_intermediate) return OK;
    const struct model_share whole = model_share_whole(&b->m->config);
    return swiglu_bind(b, shared, shared_intermediate, &whole, &e->shared);
}

static size_t moe_rows_at_once(const struct model *m)
{
    const struct model_config *c = &m->config;
    /* a GPU that exchanges rows has room for those of all ranks, so its chunks are the smaller */
    const bool large = !m->kernels->device->is_host && m->share.ep_size < 2;
    const size_t rows_max = large ? GPU_ROWS_MAX : ROWS_MAX;
    size_t widest = c->moe.intermediate > c->hidden ? c->moe.intermediate : c->hidden,
           rows = (large ? GPU_WORK_ELEMENTS : WORK_ELEMENTS) / (c->moe.n_used * widest);
    if (rows < ROWS_MIN) rows = ROWS_MIN;
    if (rows > rows_max) rows = rows_max;
    return rows < m->max_rows ? rows : m->max_rows;
}

/* Slots of `rows` rows of every rank: of one rank's own, all. With others, on the CPU: twice what a
 * rank gets when rows choose evenly, and room for a row of every rank in any case, so that pieces
 * which find no room can be halved until they do. On a GPU, where nobody waits for counts: all that
 * could come. */
static size_t moe_slots_at_once(const struct model *m, size_t rows)
{
    const size_t used = m->config.moe.n_used, size = m->share.ep_size;
    if (size < 2) return rows * used;
    const size_t most = size * rows * used;
    if (!m->kernels->device->is_host) return most;
    return min_size(most, max_size(2 * rows * used, size * used));
}

void model_ep_needs(const struct model *m, struct ep_config *c)
{
    const size_t rows = moe_rows_at_once(m);
    c->max_rows = (int32_t)rows;
    c->mode = m->kernels->device->is_host ? EP_THROUGHPUT : EP_LOW_LATENCY;
    c->hidden = (int32_t)m->config.hidden;
    c->n_used = (int32_t)m->config.moe.n_used;
    c->max_slots = moe_slots_at_once(m, rows);
    c->send = m->share.ep_rows;
    c->back = c->send == DTYPE_F32 ? DTYPE_F32 : DTYPE_BF16;
    c->placement.n_logical = (int32_t)m->config.moe.n_experts;
    c->load = m->expert_rows ? expert_rows_load_at(m->expert_rows) : NULL;
}

static void moe_bind_work(struct binder *b, struct ffn_work *base)
{
    struct ffn_moe_work *w = (struct ffn_moe_work *)base;
    const struct model_config *c = &b->m->config;
    const size_t rows = moe_rows_at_once(b->m), experts = c->moe.n_experts, used = c->moe.n_used;
    w->max_rows = (uint32_t)rows;
    w->max_slots = moe_slots_at_once(b->m, rows);
    w->jobs = bind_host(b, experts + 1, sizeof *w->jobs);
    bind_ints(b, rows, used, &w->experts);
    bind_ints(b, rows, used, &w->rows);
    bind_ints(b, rows, used, &w->index);
    bind_ints(b, 1, experts + 1, &w->begin);
    bind_floats(b, rows, experts, &w->logits);
    bind_floats(b, rows, used, &w->weights);
    bind_floats(b, rows, c->hidden, &w->h);
    bind_floats(b, w->max_slots, round_up(c->moe.intermediate, MATMUL_PREQUANTIZED_ALIGN), &w->act);
    bind_floats(b, w->max_slots, c->hidden, &w->out);
    bind_floats(b, rows, round_up(c->moe.shared_intermediate, MATMUL_PREQUANTIZED_ALIGN),
                &w->shared_act);
    /* a GPU's products read them as they come */
    if (model_rows_are_narrow(b->m) && b->m->kernels->device->is_host) {
        bind_floats(b, w->max_slots, c->hidden, &w->arrived);
        bind_ints(b, 1, w->max_slots, &w->arrived_rows);
    }
    bind_reserve(b, rows + w->max_slots, c->hidden);
}

static void moe_release(struct kernel_ctx *k, struct ffn_layer *base)
{
    struct ffn_moe *e = (struct ffn_moe *)base;
    weight_release(k, &e->router);
    swiglu_release(k, &e->shared);
    mem_free(e);
}

static void moe_release_work(struct ffn_work *w) { mem_free(w); }

/* ---- step ---- */

struct moe_slots moe_slots_of(const struct decoder_step *s, const struct ffn_moe *e)
{
    const struct model_experts *x = s->m->experts;
    const size_t at = e->i_sparse * (size_t)x->n_local;
    return (struct moe_slots){ x->gate_up + at, x->down + at, x->n_local };
}

void moe_route_rows(const struct decoder_step *s, const struct ffn_moe *e,
                    const struct ffn_moe_work *w, const struct moe_rows *r, bool sorted)
{
    const struct moe_config *c = &s->m->config.moe;
    struct router_args a = {
        .w = &e->router,
        .x = r->x,
        .norm = r->norm,
        .eps = s->m->config.rms_eps,
        .h = r->h,
        .route = {
            .logits = w->logits, /* [rows, E] */
            .bias = e->selection_bias,
            .n_rows = r->n,
            .n_experts = (int32_t)c->n_experts,
            .n_used = (int32_t)c->n_used,
            .n_groups = (int32_t)c->n_groups,
            .topk_groups = (int32_t)c->topk_groups,
            .norm_min = c->norm_min,
            .scale = c->scale,
            .experts = w->experts,
            .weights = w->weights,
            .rows = sorted ? w->rows : NULL,
            .index = sorted ? w->index : NULL,
            .begin = sorted ? w->begin : NULL,
        },
    };
    a.route.score = c->score == ROUTE_SIGMOID ? ROUTE_SIGMOID : ROUTE_SOFTMAX;
    a.route.group_score = c->group_score == GROUP_TOP2_SUM ? GROUP_TOP2_SUM : GROUP_MAX;
    a.route.norm = c->norm == NORM_MAX ? NORM_MAX : c->norm == NORM_SUM ? NORM_SUM : NORM_NONE;
    s->m->kernels->ops->router(s->m->kernels, &a);
}

static void run_experts(const struct decoder_step *s, const struct ffn_moe *e,
                        const struct ffn_moe_work *w, float *x, size_t rows)
{
    const struct moe_slots experts = moe_slots_of(s, e);
    struct experts_args a = {
        .gate_up = experts.gate_up,
        .down = experts.down,
        .n_experts = (int32_t)e->n_experts,
        .n_used = (int32_t)s->m->config.moe.n_used,
        .n_rows = rows,
        .h = w->h,
        .experts = w->experts,
        .weights = w->weights,
        .x = x,
        .rows = w->rows,
        .index = w->index,
        .begin = w->begin,
        .sorted = true,
        .act = w->act,
        .out = w->out,
        .jobs = w->jobs,
    };
    if (s->m->config.moe.shared_intermediate > 0)
        a.shared = (struct shared_expert){
            .gate_up = &e->shared.gate_up,
            .down = &e->shared.down,
            .gate_up_bias = e->shared.gate_up_bias,
            .down_bias = e->shared.down_bias,
            .act = w->shared_act,
        };
    s->m->kernels->ops->experts(s->m->kernels, &a); /* [rows, H] */
}

static void moe_forward(const struct decoder_step *s, const struct ffn_layer *base,
                        const struct ffn_work *base_work, const float *norm)
{
    const struct ffn_moe *e = (const struct ffn_moe *)base;
    const struct ffn_moe_work *w = (const struct ffn_moe_work *)base_work;
    const size_t hidden = s->m->config.hidden;
    if (s->m->ep) {
        moe_forward_ep(s, e, w, norm);
        return;
    }
    for (size_t at = 0, rows; at < s->n_rows; at += rows) {
        rows = s->n_rows - at < w->max_rows ? s->n_rows - at : w->max_rows;
        float *x = s->x + at * hidden;
        moe_route_rows(s, e, w, &(struct moe_rows){ x, norm, w->h, rows }, true); /* h [rows, H] */
        run_experts(s, e, w, x, rows);
    }
}

const struct ffn_ops ffn_moe_ops = {
    .create = moe_create,
    .create_work = moe_create_work,
    .bind = moe_bind,
    .bind_work = moe_bind_work,
    .release = moe_release,
    .release_work = moe_release_work,
    .rows_at_once = moe_rows_at_once,
    .forward = moe_forward,
};
