/* ffn_moe.c - a mixture of experts:
 *
 *     z = Wr h the router, in f32 e_1 .. e_k, w_1 .. w_k = route(z) struct route_args; the
 *     configuration has each family's values x += sum_j w_j Expert_{e_j}(h) + Shared(h) each a
 *     SwiGLU as in ffn_dense.c
 *
 * Long steps are routed in pieces, which bounds the buffers; weights are then read once per
 * piece. */
#include <stdio.h>

#include "shared/base/arith.h"
#include "shared/base/mem.h"
#include "shared/model/sublayers.h"

/* Rows of a step that are routed at a time: enough for over a hundred per expert in most models,
 * and as many as a [rows used, H] buffer of 256 MiB holds (DeepSeek-V3: 1170). */
enum { ROWS_MIN = 16, ROWS_MAX = 2048 };
static const size_t WORK_ELEMENTS = (size_t)64 << 20;

/* ---- bind ---- */

enum status moe_bind(struct binder *b, const char *layer, struct moe *e)
{
    const struct model_config *c = &b->m->config;
    const size_t hidden = c->hidden, n = c->moe.intermediate;
    char mlp[TENSOR_NAME_BYTES_MAX / 2], experts[TENSOR_NAME_BYTES_MAX / 2],
        shared[TENSOR_NAME_BYTES_MAX / 2];
    snprintf(mlp, sizeof mlp, "%smlp.", layer);
    snprintf(experts, sizeof experts, "%smlp.experts.", layer);
    snprintf(shared, sizeof shared, "%smlp.shared_experts.", layer);
    e->n_experts = c->moe.n_experts;
    if (!e->gate_up) e->gate_up = MEM_ARRAY(struct weight, e->n_experts);
    if (!e->down) e->down = MEM_ARRAY(struct weight, e->n_experts);

    const struct matrix_spec router = {
        .prefix = mlp, .leaf = "gate", .n_out = e->n_experts, .n_in = hidden
    };
    TRY(bind_matrix(b, &router, BIND_F32, &e->router));
    if (c->moe.selection_bias)
        TRY(bind_vector(b, mlp, "gate.e_score_correction_bias", e->n_experts, &e->selection_bias));
    for (uint32_t i = 0; i < e->n_experts; i++) {
        struct matrix_spec gate = {
            .prefix = experts,
            .leaf = "gate_proj",
            .whole = "gate_up_proj",
            .n_out = n,
            .n_in = hidden,
            .first = 0,
            .total = 2 * n,
            .i_expert = i,
            .n_experts = e->n_experts,
        };
        struct matrix_spec up = gate, down = gate;
        up.leaf = "up_proj";
        up.first = n;
        down.leaf = "down_proj";
        down.whole = NULL;
        down.n_out = hidden;
        down.n_in = n;
        TRY(bind_pair(b, &gate, &up, BIND_EXPERT, &e->gate_up[i]));
        TRY(bind_matrix(b, &down, BIND_EXPERT, &e->down[i]));
    }
    return c->moe.shared_intermediate ? ffn_bind(b, shared, c->moe.shared_intermediate, &e->shared)
                                      : OK;
}

static uint32_t rows_at_a_time(const struct model *m)
{
    const struct model_config *c = &m->config;
    size_t widest = c->moe.intermediate > c->hidden ? c->moe.intermediate : c->hidden,
           rows = WORK_ELEMENTS / (c->moe.n_used * widest);
    if (rows < ROWS_MIN) rows = ROWS_MIN;
    if (rows > ROWS_MAX) rows = ROWS_MAX;
    return rows < m->max_rows ? (uint32_t)rows : m->max_rows;
}

void moe_bind_work(struct binder *b, struct moe_work *w)
{
    const struct model_config *c = &b->m->config;
    const size_t rows = rows_at_a_time(b->m), experts = c->moe.n_experts, used = c->moe.n_used;
    w->max_rows = (uint32_t)rows;
    w->jobs = bind_host(b, experts + 1, sizeof *w->jobs);
    bind_ints(b, rows, used, &w->experts);
    bind_ints(b, rows, used, &w->rows);
    bind_ints(b, rows, used, &w->index);
    bind_ints(b, 1, experts + 1, &w->begin);
    bind_floats(b, rows, experts, &w->logits);
    bind_floats(b, rows, used, &w->weights);
    bind_floats(b, rows, c->hidden, &w->h);
    bind_floats(b, rows * used, round_up(c->moe.intermediate, MATMUL_PREQUANTIZED_ALIGN), &w->act);
    bind_floats(b, rows * used, c->hidden, &w->out);
    bind_floats(b, rows, round_up(c->moe.shared_intermediate, MATMUL_PREQUANTIZED_ALIGN),
                &w->shared_act);
    bind_reserve(b, rows * (used + 1), c->hidden);
}

void moe_release(struct kernel_ctx *k, struct moe *e)
{
    weight_release(k, &e->router);
    for (uint32_t i = 0; e->gate_up && i < e->n_experts; i++) weight_release(k, &e->gate_up[i]);
    for (uint32_t i = 0; e->down && i < e->n_experts; i++) weight_release(k, &e->down[i]);
    ffn_release(k, &e->shared);
    mem_free(e->gate_up);
    mem_free(e->down);
}

/* ---- forward ---- */

static void route(const struct decoder_step *s, const struct moe *e, const struct moe_work *w,
                  size_t rows)
{
    const struct moe_config *c = &s->m->config.moe;
    struct kernel_ctx *k = s->m->kernels;
    const struct matmul_args router = {
        .w = &e->router,
        .x = w->h,
        .x_stride = e->router.n_in,
        .n_rows = rows,
        .y = w->logits,
        .y_stride = c->n_experts,
    };
    k->ops->matmul(k, &router, 1); /* [rows, E] */
    struct route_args a = {
        .logits = w->logits,
        .bias = e->selection_bias,
        .n_rows = rows,
        .n_experts = (int32_t)c->n_experts,
        .n_used = (int32_t)c->n_used,
        .n_groups = (int32_t)c->n_groups,
        .topk_groups = (int32_t)c->topk_groups,
        .norm_min = c->norm_min,
        .scale = c->scale,
        .experts = w->experts,
        .weights = w->weights,
        .rows = w->rows,
        .index = w->index,
        .begin = w->begin,
    };
    a.score = c->score == ROUTE_SIGMOID ? ROUTE_SIGMOID : ROUTE_SOFTMAX;
    a.group_score = c->group_score == GROUP_TOP2_SUM ? GROUP_TOP2_SUM : GROUP_MAX;
    a.norm = c->norm == NORM_MAX ? NORM_MAX : c->norm == NORM_SUM ? NORM_SUM : NORM_NONE;
    k->ops->route(k, &a);
}

static void run_experts(const struct decoder_step *s, const struct moe *e, const struct moe_work *w,
                        float *x, size_t rows)
{
    struct experts_args a = {
        .gate_up = e->gate_up,
        .down = e->down,
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

void moe_forward(const struct decoder_step *s, const struct moe *e, const struct moe_work *w,
                 const float *norm)
{
    const size_t hidden = s->m->config.hidden;
    struct kernel_ctx *k = s->m->kernels;
    for (size_t at = 0, rows; at < s->n_rows; at += rows) {
        rows = s->n_rows - at < w->max_rows ? s->n_rows - at : w->max_rows;
        float *x = s->x + at * hidden;
        /* [rows, H] */
        k->ops->rms_norm(k, w->h, hidden, x, hidden, norm, rows, hidden, s->m->config.rms_eps);
        route(s, e, w, rows);
        run_experts(s, e, w, x, rows);
    }
}
