/* cuda_ctx.c - the context of a GPU: its device, a CPU context for what the host computes, and
 * workspaces. Thread: loading, then engine. */
#include "kernels/cuda/cuda_backend.h"

#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemm/gemm_cublaslt.h"
#include "kernels/cuda/moe/moe_route.h"
#include "shared/base/arith.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum status cuda_ctx_create(const struct kernel_backend *backend, const struct kernel_options *o,
                            struct kernel_ctx **out, struct err *err)
{
    struct kernel_ctx *host;
    TRY(kernel_ctx_create(kernel_options_default("auto", o->activations, o->n_threads), &host,
                          err));
    struct cuda_ctx *c = MEM_NEW(struct cuda_ctx);
    kernel_ctx_init(&c->base, backend, o);
    c->base.host = host;
    c->base.pool = host->pool;
    enum status st = device_open("cuda", &c->base.device, err);
    if (st == OK) c->device = cuda_device_of(c->base.device);
    if (st == OK && !cuda_step_upload_init(c)) st = device_fault(c->base.device, err);
    if (st == OK)
        st = device_mem_alloc(c->base.device, gemm_scratch_bytes(), DEVICE_MEM_PRIVATE,
                              &c->products, err);
    if (st == OK)
        st = device_mem_alloc(c->base.device, MOE_ROUTER_SCRATCH, DEVICE_MEM_PRIVATE, &c->router,
                              err);
    if (st == OK) *out = &c->base;
    else cuda_ctx_free(&c->base);
    return st;
}

void cuda_ctx_free(struct kernel_ctx *base)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    if (base->device) {
        device_wait(base->device);
        cuda_graphs_release(c);
        cuda_sampling_release(c);
        cuda_step_upload_release(c);
        weight_upload_release(c);
        device_mem_free(base->device, &c->inputs);
        device_mem_free(base->device, &c->products);
        device_mem_free(base->device, &c->router);
        device_mem_free(base->device, &c->workspace);
        gemm_cublaslt_free(c->cublaslt);
        device_mem_free(base->device, &c->attention);
        device_close(base->device);
    }
    kernel_ctx_free(base->host);
    mem_free(c);
}

enum status cuda_ctx_reserve(struct kernel_ctx *base, size_t n_rows, size_t n_in)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    const size_t bytes = n_rows * round_up(n_in, GEMM_STEP) * sizeof(float);
    struct dev_mem more;
    if (bytes <= c->inputs.bytes) return OK;
    TRY(device_mem_alloc(base->device, bytes, DEVICE_MEM_PRIVATE, &more, NULL));
    cuda_graphs_release(c); /* they hold the address; the graphs are of another model's engine */
    device_mem_free(base->device, &c->inputs);
    c->inputs = more;
    c->rounded = (struct cuda_rounded_rows){ 0 };
    return OK;
}

static enum status prepare_attention(struct cuda_ctx *c, struct err *err)
{
    const struct kernel_limits *l = &c->limits;
    const size_t bytes = sizeof(float) *
                         attention_scratch_floats(l->max_rows, l->n_heads, l->v_dim, l->max_len);
    if (bytes <= c->attention.bytes) return OK;
    device_mem_free(c->base.device, &c->attention);
    TRY(device_mem_alloc(c->base.device, bytes, DEVICE_MEM_PRIVATE, &c->attention, err));
    if (!cuda_check(c->device, attention_scratch_prepare(c->device->stream, c->attention.ptr),
                    "preparing memory for attention"))
        return device_fault(c->base.device, err);
    return OK;
}

/* cublasLt: not if deterministic, because its order depends on n_rows; only for bf16. */
static enum status prepare_cublaslt(struct cuda_ctx *c, struct err *err)
{
    struct err why;
    if (c->cublaslt_tried || c->base.options.deterministic ||
        c->base.options.activations == ACTIVATIONS_F32)
        return OK;
    c->cublaslt_tried = true;
    if (gemm_cublaslt_create(&c->cublaslt, &why) != OK) {
        log_info("cublasLt is not used", "why=\"%s\"", why.text);
        return OK;
    }
    log_info("cublasLt for dense products", "file=%s", gemm_cublaslt_path(c->cublaslt));
    return device_mem_alloc(c->base.device, GEMM_CUBLASLT_WORKSPACE, DEVICE_MEM_PRIVATE,
                            &c->workspace, err);
}

/* Called before the KV pool is sized and again when it exists; the second call reuses the
 * allocations of the first. */
enum status cuda_prepare(struct kernel_ctx *base, const struct kernel_limits *l, struct err *err)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    device_wait(base->device);
    cuda_graphs_release(c); /* they hold addresses of what is reallocated here */
    c->limits = *l;
    TRY(prepare_attention(c, err));
    /* queries the GPU now, because that is not allowed during capture */
    (void)gemm_wants_f8_x(&(struct gemm){ .layout = GEMM_F8 });
    TRY(cuda_sampling_prepare(c, err));
    TRY(prepare_cublaslt(c, err));
    if (!cuda_step_upload_grow(c, cuda_step_upload_bytes(c)))
        return device_fault(base->device, err);
    return device_fault(base->device, err);
}
