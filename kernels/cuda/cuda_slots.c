/* cuda_slots.c - the slots of the cuda row: their arguments to kernels, in the stream's order. */
#include "kernels/cpu/sizes.h"
#include "kernels/cuda/cuda_row.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/inputs.h"
#include "kernels/cuda/rows.h"

/* ---- products ---------------------------------------------------------------------------------------------------- */

static enum gemm_form form_of(const struct weight *w) { return (enum gemm_form)w->form; }

/* Elements between ready rows of n; both kinds fit in the room that kernels.h promises. */
static size_t ready_stride(enum gemm_form reader, size_t n) { return reader == GEMM_F32 ? round_up(n, MATMUL_READY_STEP) : round_up(n, GEMM_STEP); }

static bool same_inputs(const struct matmul_args *a, const struct matmul_args *b)
{
    return a->x == b->x && a->x_stride == b->x_stride && a->w->n_in == b->w->n_in && a->x_rows == b->x_rows && a->norm == b->norm &&
           a->n_rows == b->n_rows && (form_of(a->w) == GEMM_F32) == (form_of(b->w) == GEMM_F32) && !a->x_ready && !b->x_ready;
}

/* Rows as the product takes them into c->inputs; the stream's order keeps a call's jobs from overwriting each other's. */
static void make_ready(struct cuda_ctx *c, const struct matmul_args *a)
{
    const struct inputs in = { .x = a->x, .x_stride = a->x_stride, .x_rows = a->x_rows, .norm = a->norm, .eps = a->norm_eps, .n_rows = a->n_rows,
                               .n = a->w->n_in, .y = c->inputs.ptr, .f32 = form_of(a->w) == GEMM_F32 };
    (void)cuda_check(c->device, inputs_run(c->device->stream, &in), "rounding inputs");
}

/* As they are: f32 rows that nothing has to be done to. */
static bool needs_nothing(const struct matmul_args *a) { return form_of(a->w) == GEMM_F32 && !a->norm; }

static void take_inputs(const struct cuda_ctx *c, const struct matmul_args *a, struct gemm *g)
{
    g->x = c->inputs.ptr;
    g->x_stride = round_up(a->w->n_in, GEMM_STEP);
    if (a->x_ready) {
        g->x = a->x;
        g->x_stride = ready_stride(form_of(a->w), a->w->n_in);
    } else if (needs_nothing(a)) {
        g->x = a->x;
        g->x_stride = a->x_stride;
        g->x_rows = a->x_rows;
    }
}

static void take_outputs(const struct matmul_args *a, struct gemm *g)
{
    g->y = a->y;
    g->y_stride = a->y_stride;
    g->then = a->then == MATMUL_ADD ? GEMM_ADD : a->then == MATMUL_SILU_MUL ? GEMM_SILU : GEMM_STORE;
    if (!a->y_for) return;
    g->y_stride = ready_stride(form_of(a->y_for), a->y_for->n_in);
    if (form_of(a->y_for) != GEMM_F32) g->then = GEMM_SILU_BF16;
}

static struct gemm gemm_of(const struct cuda_ctx *c, const struct weight *w)
{
    return (struct gemm){ .form = form_of(w), .paired = w->paired, .n_out = w->n_out, .n_in = w->n_in, .w = w->data, .n_groups = 1,
                          .fixed = c->base.deterministic };
}

static void cuda_matmul(struct kernel_ctx *base, const struct matmul_args *jobs, size_t n_jobs)
{
    struct cuda_ctx          *c = cuda_ctx_of(base);
    const struct matmul_args *ready = NULL; /* whose inputs are in c->inputs */
    for (size_t i = 0; i < n_jobs; i++) {
        const struct matmul_args *a = &jobs[i];
        if (a->n_rows == 0) continue;
        if (!a->x_ready && !needs_nothing(a) && !(ready && same_inputs(a, ready))) {
            make_ready(c, a);
            ready = a;
        }
        struct gemm g = gemm_of(c, a->w);
        g.n_rows = a->n_rows;
        g.bias = a->bias;
        take_inputs(c, a, &g);
        take_outputs(a, &g);
        (void)cuda_check(c->device, gemm_run(c->device->stream, &g), "a product");
    }
}

/* ---- experts ----------------------------------------------------------------------------------------------------- */

/* One call where the matrices lie at equal distances, as they do when they are packed one after the other; otherwise one each. */
static void run_group(struct cuda_ctx *c, const struct weight *w, int32_t n, struct gemm g, const char *what)
{
    const char *first = w[0].data;
    g.w_stride = n > 1 ? (size_t)((const char *)w[1].data - first) : 0;
    bool even = true;
    for (int32_t i = 1; i < n; i++) even = even && (const char *)w[i].data == first + (size_t)i * g.w_stride && w[i].form == w[0].form;
    if (even) {
        g.n_groups = n;
        (void)cuda_check(c->device, gemm_run(c->device->stream, &g), what);
        return;
    }
    const int32_t *begin = g.begin;
    for (int32_t i = 0; i < n; i++) {
        g.form = form_of(&w[i]);
        g.w = w[i].data;
        g.begin = begin + i;
        (void)cuda_check(c->device, gemm_run(c->device->stream, &g), what);
    }
}

static void run_shared(struct kernel_ctx *base, const struct experts_args *a)
{
    const struct shared_expert *s = &a->shared;
    const size_t                hidden = s->gate_up->n_in;
    const struct matmul_args gate_up = { .w = s->gate_up, .bias = s->gate_up_bias, .x = a->h, .x_stride = hidden, .n_rows = a->n_rows, .y = s->act,
                                         .y_for = s->down, .then = MATMUL_SILU_MUL };
    const struct matmul_args down = { .w = s->down, .bias = s->down_bias, .x = s->act, .x_ready = true, .n_rows = a->n_rows, .y = a->x,
                                      .y_stride = hidden, .then = MATMUL_ADD };
    cuda_matmul(base, &gate_up, 1);
    cuda_matmul(base, &down, 1);
}

static void cuda_combine(struct kernel_ctx *base, const struct combine_args *a)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    (void)cuda_check(c->device, rows_combine(c->device->stream, a), "combining experts");
}

/* Rows that a recorded step is filled up with ask for no experts: reading their weights would be for nothing. */
static const int32_t *live_rows(const struct cuda_ctx *c) { return c->step.records ? &c->staging.live->n_rows : NULL; }

/* LIMIT: experts of different forms would need inputs of both kinds; a checkpoint has none. */
static void cuda_experts(struct kernel_ctx *base, const struct experts_args *a)
{
    struct cuda_ctx   *c = cuda_ctx_of(base);
    const size_t       n_slots = a->n_rows * (size_t)a->n_used, hidden = a->gate_up[0].n_in;
    if (a->n_rows == 0) return;
    if (a->shared.gate_up) run_shared(base, a);
    (void)cuda_check(c->device, rows_sort(c->device->stream, a, live_rows(c)), "sorting rows by expert");

    const struct matmul_args rows = { .w = &a->gate_up[0], .x = a->h, .x_stride = hidden, .n_rows = a->n_rows };
    struct gemm gate_up = gemm_of(c, &a->gate_up[0]), down = gemm_of(c, &a->down[0]);
    if (!needs_nothing(&rows)) make_ready(c, &rows);
    take_inputs(c, &rows, &gate_up);
    gate_up.x_rows = a->rows;
    gate_up.begin = down.begin = a->begin;
    gate_up.n_rows = down.n_rows = n_slots;
    gate_up.y = a->act;
    gate_up.y_stride = ready_stride(down.form, down.n_in);
    gate_up.then = down.form == GEMM_F32 ? GEMM_SILU : GEMM_SILU_BF16;
    run_group(c, a->gate_up, a->n_experts, gate_up, "gate and up of experts");  /* [rows used, I] */
    down.x = a->act;
    down.x_stride = gate_up.y_stride;
    down.y = a->out;
    down.y_stride = hidden;
    run_group(c, a->down, a->n_experts, down, "down of experts");               /* [rows used, H] */

    const struct combine_args all = { .y = a->x, .rows = a->out, .index = a->index, .weights = a->weights, .n_rows = a->n_rows,
                                      .n_used = (size_t)a->n_used, .n = hidden, .add = true };
    cuda_combine(base, &all);                                                    /* [rows, H] */
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

static void cuda_kv_append(struct kernel_ctx *base, const struct kv_append_args *a)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    (void)cuda_check(c->device, attention_append(c->device->stream, &a->kv, a->on.staged, a->k, a->v), "appending to the KV cache");
}

/* What attention keeps between its two passes; it has a bound, which long contexts of many sequences soon reach. */
static bool attention_room(struct cuda_ctx *c, const struct attn_args *a)
{
    const struct cuda_list *on = a->on.staged;
    const size_t            need = sizeof(float) * attention_scratch_floats((size_t)on->bounds.n_rows, (size_t)a->n_heads, (size_t)a->v_dim, (size_t)on->bounds.n_keys_max);
    if (need <= c->attention.bytes) return true;
    device_wait(c->base.device);
    device_mem_free(c->base.device, &c->attention);
    return device_mem_alloc(c->base.device, need, DEVICE_MEM_PRIVATE, &c->attention, NULL) == OK ||
           cuda_check(c->device, cudaErrorMemoryAllocation, "getting memory for attention");
}

static void cuda_attention(struct kernel_ctx *base, const struct attn_args *a)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    if (!attention_room(c, a)) return;
    const struct attention run = { .kv = a->kv, .on = a->on.staged, .q = a->q, .out = a->out, .n_heads = a->n_heads, .v_dim = a->v_dim,
                                   .scale = a->scale, .exact = base->activations == ACTIVATIONS_F32, .scratch = c->attention.ptr };
    (void)cuda_check(c->device, attention_run(c->device->stream, &run), "attention");
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

static void cuda_embed(struct kernel_ctx *base, float *x, const struct weight *w, const int32_t *ids, size_t n_rows)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    const struct embed_rows e = { .x = x, .form = form_of(w), .w = w->data, .n_out = w->n_out, .n_in = w->n_in, .n_rows = n_rows, .ids = ids,
                                  .chosen = c->sampling.chosen.ptr };
    (void)cuda_check(c->device, rows_embed(c->device->stream, &e), "embedding");
}

static void cuda_rms_norm(struct kernel_ctx *base, float *y, size_t y_stride, const float *x, size_t x_stride, const float *weight, size_t n_rows,
                          size_t n, float eps)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    (void)cuda_check(c->device, rows_norm(c->device->stream, y, y_stride, x, x_stride, weight, n_rows, n, eps), "a norm");
}

static void cuda_add(struct kernel_ctx *base, float *x, const float *y, size_t n)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    (void)cuda_check(c->device, rows_add(c->device->stream, x, y, n), "an addition");
}

static void cuda_copy_rows(struct kernel_ctx *base, float *to, size_t to_stride, const float *from, size_t from_stride, size_t n_rows, size_t n)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    (void)cuda_check(c->device, rows_copy(c->device->stream, to, to_stride, from, from_stride, n_rows, n), "copying rows");
}

static void cuda_rope(struct kernel_ctx *base, float *x, size_t x_stride, size_t n_rows, size_t n_heads, size_t head_dim, size_t rot_dim,
                      const float *cos_sin, const int32_t *pos, bool interleaved)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    const struct rope_rows r = { .x = x, .x_stride = x_stride, .n_rows = n_rows, .n_heads = n_heads, .head_dim = head_dim, .rot_dim = rot_dim,
                                 .cos_sin = cos_sin, .pos = pos, .interleaved = interleaved };
    (void)cuda_check(c->device, rows_rope(c->device->stream, &r), "rotating");
}

static void cuda_route(struct kernel_ctx *base, const struct route_args *a)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    (void)cuda_check(c->device, rows_route(c->device->stream, a), "routing");
}

static bool has_card(void) { return cuda_device_count() > 0; }

const struct kernel_ops cuda_row = {
    .name = "cuda", .forms = "cuda rows", .absorbed_only = true, .available = has_card, .create = cuda_ctx_create, .free = cuda_ctx_free,
    .reserve = cuda_ctx_reserve, .weight_plan = cuda_weight_plan, .weight_pack = cuda_weight_pack, .weight_release = cuda_weight_release,
    .stage = cuda_stage, .prepare = cuda_prepare, .record = cuda_record, .commit = cuda_commit, .sample = cuda_sample,
    .fetch = cuda_fetch, .embed = cuda_embed, .matmul = cuda_matmul, .rms_norm = cuda_rms_norm, .add = cuda_add, .copy_rows = cuda_copy_rows,
    .rope = cuda_rope, .kv_append = cuda_kv_append, .attention = cuda_attention, .route = cuda_route, .combine = cuda_combine,
    .experts = cuda_experts,
};
