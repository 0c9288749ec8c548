/* cuda_ops.c - all ops of backend cuda except GEMMs: pass their arguments to kernels, in the
 * stream's order; and the backend's tables. Thread: engine. */
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/moe/moe_route.h"

void cuda_combine(struct kernel_ctx *base, const struct combine_args *a)
{
    struct cuda_ctx *c = cuda_begin_op(base);
    (void)cuda_check(c->device, elementwise_combine(c->device->stream, a), "combining experts");
}

/* ---- attention ---- */

static void cuda_rope(struct kernel_ctx *base, const struct rope_args *a)
{
    struct cuda_ctx *c = cuda_begin_op(base);
    (void)cuda_check(c->device, elementwise_rope(c->device->stream, a), "rotating");
}

static void cuda_kv_append(struct kernel_ctx *base, const struct kv_append_args *a)
{
    struct cuda_ctx *c = cuda_begin_op(base);
    (void)cuda_check(
        c->device,
        attention_kv_append(c->device->stream, &a->kv, a->on.uploaded, a->k, a->v, a->rope),
        "appending to the KV cache");
}

/* Grows attention's scratch. It has an upper bound, which many sequences with long contexts soon
 * reach. */
static bool attention_room(struct cuda_ctx *c, const struct attn_args *a)
{
    const struct cuda_attn_list *on = a->on.uploaded;
    const size_t need = sizeof(float) *
                        attention_scratch_floats((size_t)on->bounds.n_rows, (size_t)a->n_heads,
                                                 (size_t)a->v_dim, (size_t)on->bounds.n_keys_max);
    if (need <= c->attention.bytes) return true;
    device_wait(c->base.device);
    device_mem_free(c->base.device, &c->attention);
    if (device_mem_alloc(c->base.device, need, DEVICE_MEM_PRIVATE, &c->attention, NULL) != OK)
        return cuda_check(c->device, cudaErrorMemoryAllocation, "getting memory for attention");
    return cuda_check(c->device, attention_scratch_prepare(c->device->stream, c->attention.ptr),
                      "preparing memory for attention");
}

/* Leaves the results in bf16, too, which the product that follows takes: they need not be read
 * again for that. */
static void leave_bf16(struct cuda_ctx *c, const struct attn_list *on, struct attention *run)
{
    /* a captured step's rows are known when it runs */
    const bool has_all_rows = !c->step.capturing && on->n_seqs > 0 && on->seqs[0].q_begin == 0;
    const size_t n_rows = (size_t)run->on->bounds.n_rows,
                 n = (size_t)run->n_heads * (size_t)run->v_dim;
    if (run->exact || c->rounded_in_vain || !has_all_rows || n % GEMM_STEP != 0 ||
        n_rows * n * sizeof(uint16_t) > c->inputs.bytes || !attention_leaves_bf16(run))
        return;
    run->out_bf16 = c->inputs.ptr;
    c->rounded = (struct cuda_rounded_rows){ .x = run->out, .n_rows = n_rows, .n = n };
}

static void cuda_attention(struct kernel_ctx *base, const struct attn_args *a)
{
    struct cuda_ctx *c = cuda_begin_op(base);
    if (!attention_room(c, a)) return;
    const struct kv_append_args *append = a->append;
    const struct attention_append first = { .k = append ? append->k : NULL,
                                            .v = append ? append->v : NULL,
                                            .rope = append ? append->rope : NULL };
    struct attention run = {
        .kv = a->kv,
        .on = a->on.uploaded,
        .q = a->q,
        .out = a->out,
        .n_heads = a->n_heads,
        .v_dim = a->v_dim,
        .scale = a->scale,
        .exact = base->options.activations == ACTIVATIONS_F32,
        .scratch = c->attention.ptr,
        .append = append ? &first : NULL,
    };
    leave_bf16(c, &a->on, &run);
    (void)cuda_check(c->device, attention_run(c->device->stream, &run), "attention");
}

/* ---- rows ---- */

static void cuda_embed(struct kernel_ctx *base, float *x, const struct weight *w,
                       const int32_t *ids, size_t n_rows)
{
    struct cuda_ctx *c = cuda_begin_op(base);
    const struct embed_rows e = {
        .x = x,
        .layout = (enum gemm_weight_layout)w->layout,
        .w = w->data,
        .n_out = w->n_out,
        .n_in = w->n_in,
        .n_rows = n_rows,
        .ids = ids,
        .kept = c->sampling.kept.ptr,
    };
    (void)cuda_check(c->device, elementwise_embed(c->device->stream, &e), "embedding");
}

static void cuda_rms_norm(struct kernel_ctx *base, float *y, size_t y_stride, const float *x,
                          size_t x_stride, const float *weight, size_t n_rows, size_t n, float eps)
{
    struct cuda_ctx *c = cuda_begin_op(base);
    (void)cuda_check(c->device,
                     elementwise_rms_norm(c->device->stream, y, y_stride, x, x_stride, weight,
                                          n_rows, n, eps, NULL),
                     "a norm");
}

static void cuda_add(struct kernel_ctx *base, float *x, const float *y, size_t n)
{
    struct cuda_ctx *c = cuda_begin_op(base);
    (void)cuda_check(c->device, elementwise_add(c->device->stream, x, y, n), "an addition");
}

static void cuda_copy_rows(struct kernel_ctx *base, float *to, size_t to_stride, const float *from,
                           size_t from_stride, const int32_t *rows, size_t n_rows, size_t n)
{
    struct cuda_ctx *c = cuda_begin_op(base);
    (void)cuda_check(
        c->device,
        elementwise_copy_rows(c->device->stream, to, to_stride, from, from_stride, rows, n_rows, n),
        "copying rows");
}

static void cuda_route(struct kernel_ctx *base, const struct route_args *a)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    (void)cuda_check(c->device, moe_route(c->device->stream, a, cuda_n_real_rows(c)), "routing");
}

/* Other bits than those of a few rows. */
static bool logits_on_tensor_cores(const struct kernel_ctx *c, const struct router_args *a)
{
    return !c->options.deterministic && c->options.activations != ACTIVATIONS_F32 &&
           moe_logits_fits(a);
}

/* Normalises many rows. Experts take them in bf16: if those of the layer before did, they are left
 * so, too. */
static struct cuda_rounded_rows norm_for_experts(struct cuda_ctx *c, const struct router_args *a)
{
    const size_t n_rows = a->route.n_rows, n = a->w->n_in;
    uint16_t *rounded = c->rounds_for_experts && n % GEMM_STEP == 0 &&
                                n_rows * n * sizeof *rounded <= c->inputs.bytes
                            ? c->inputs.ptr
                            : NULL;
    (void)cuda_check(c->device,
                     elementwise_rms_norm(c->device->stream, a->h, n, a->x, n, a->norm, n_rows, n,
                                          a->eps, &rounded),
                     "a norm");
    return (struct cuda_rounded_rows){ .x = rounded ? a->h : NULL, .n_rows = n_rows, .n = n };
}

static void cuda_router(struct kernel_ctx *base, const struct router_args *a)
{
    struct cuda_ctx *c = cuda_begin_op(base);
    const struct matmul_args logits = router_matmul(a);
    if (moe_router_fits(a)) {
        (void)cuda_check(c->device,
                         moe_router(c->device->stream, a, cuda_n_real_rows(c), c->router.ptr),
                         "routing");
        return;
    }
    const struct cuda_rounded_rows rounded = norm_for_experts(c, a);
    if (logits_on_tensor_cores(base, a)) /* [rows, E] */
        (void)cuda_check(c->device, moe_logits(c->device->stream, a), "a router's product");
    else cuda_matmul(base, &logits, 1);
    cuda_route(base, &a->route);
    c->rounded = rounded;
}

static bool has_device(void) { return cuda_device_count() > 0; }

static const struct kernel_ops CUDA_OPS = {
    .embed = cuda_embed,
    .matmul = cuda_matmul,
    .rms_norm = cuda_rms_norm,
    .add = cuda_add,
    .copy_rows = cuda_copy_rows,
    .rope = cuda_rope,
    .kv_append = cuda_kv_append,
    .attention = cuda_attention,
    .route = cuda_route,
    .router = cuda_router,
    .combine = cuda_combine,
    .experts = cuda_experts,
    .expert_slots = cuda_expert_slots,
};

static const struct weight_ops CUDA_WEIGHT_OPS = {
    .plan = cuda_weight_plan,
    .pack = cuda_weight_pack,
    .finish = weight_upload_finish,
    .release = cuda_weight_release,
    .arena_create = cuda_weight_arena_create,
    .arena_free = cuda_weight_arena_free,
};

static const struct step_ops CUDA_STEP_OPS = {
    .prepare = cuda_prepare,
    .upload = cuda_upload_step,
    .begin_capture = cuda_begin_capture,
    .drop_graphs = cuda_drop_graphs,
    .submit = cuda_submit,
    .sample = cuda_sample,
    .is_sampled = cuda_is_sampled,
    .fetch = cuda_fetch,
    .fetch_passes = cuda_fetch_passes,
};

const struct kernel_backend cuda_backend = {
    .name = "cuda",
    .weight_layouts = "cuda rows",
    .absorbed_only = true,
    .ops = &CUDA_OPS,
    .weight_ops = &CUDA_WEIGHT_OPS,
    .step_ops = &CUDA_STEP_OPS,
    .available = has_device,
    .create = cuda_ctx_create,
    .free = cuda_ctx_free,
    .reserve = cuda_ctx_reserve,
};
