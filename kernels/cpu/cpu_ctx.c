/* cpu_ctx.c - the context of the processor's rows: threads, and memory for what the slots work in.
 *
 * Life cycle: cpu_ctx_create at start, cpu_ctx_free after the last model that uses it. Thread:
 * loading; engine afterwards. */
#include "kernels/cpu/attention/attention.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/host/pages.h"
#include "shared/base/arith.h"
#include "shared/base/mem.h"

/* What a thread's scratch must hold for any slot. */
static size_t scratch_bytes(void)
{
    size_t matmul = MATMUL_SCRATCH_BYTES, attention = attention_scratch_bytes();
    return round_up(matmul > attention ? matmul : attention, CACHE_LINE);
}

/* Pages that no call is large enough for stay untouched. */
static void *map_pages(size_t bytes) { return pages_map(pages_round(bytes)); }

enum status cpu_ctx_create(const struct kernel_ops *backend, enum activations activations,
                           int n_threads, struct kernel_ctx **out, struct err *err)
{
    struct compute_pool *pool;
    TRY(compute_pool_create(n_threads, &pool, err));
    struct kernel_ctx *c = MEM_NEW(struct kernel_ctx);
    c->ops = backend;
    c->pool = pool;
    c->activations = activations;
    c->kv = kernel_kv_default(activations);
    c->scratch_bytes_per_thread = scratch_bytes();
    c->scratch = map_pages(c->scratch_bytes_per_thread * (size_t)n_threads);
    c->attn = map_pages(attention_workspace_bytes(n_threads));
    enum status st = device_open("cpu", &c->device, err);
    if (st == OK && (!c->scratch || !c->attn || cpu_ctx_reserve(c, 0, 0) != OK))
        st = err_set(err, ERR_NOMEM, "no memory for the tables of the kernels");
    if (st == OK) *out = c;
    else cpu_ctx_free(c);
    return st;
}

void cpu_ctx_free(struct kernel_ctx *c)
{
    pages_unmap(c->scratch,
                pages_round(c->scratch_bytes_per_thread * (size_t)compute_pool_threads(c->pool)));
    pages_unmap(c->attn, pages_round(attention_workspace_bytes(compute_pool_threads(c->pool))));
    compute_pool_free(c->pool);
    pages_unmap(c->acts, c->acts_bytes);
    device_close(c->device);
    mem_free(c);
}

enum status cpu_ctx_reserve(struct kernel_ctx *c, size_t n_rows, size_t n_in)
{
    size_t bytes = matmul_acts_bytes(n_rows, n_in);
    if (bytes <= c->acts_bytes) return OK;
    bytes = pages_round(bytes);
    void *acts = bytes ? pages_map(bytes) : NULL; /* untouched as long as no step is that large */
    if (!acts) return ERR_NOMEM;
    pages_unmap(c->acts, c->acts_bytes);
    c->acts = acts;
    c->acts_bytes = bytes;
    return OK;
}

/* Weights are where they belong when they are packed. */
enum status cpu_weights_finish(struct kernel_ctx *c, struct weight_times *out, struct err *err)
{
    (void)c, (void)err;
    *out = (struct weight_times){ 0 };
    return OK;
}
