/* kernels.c - the rows of the kernel table in order of preference, and the context that binds one of them to a pool.
 *
 * Life cycle: kernel_ctx_create at start, kernel_ctx_free after the last model that uses it. Thread: engine. */
#include "kernels/kernels.h"

#include <string.h>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/cpu_row.h"
#include "kernels/cpu/pages.h"
#include "shared/base/buf.h"
#include "shared/base/mem.h"

const struct kernel_ops *const KERNEL_ROWS[] = { &cpu_row_amx.ops,    &cpu_row_avx512_bf16.ops, &cpu_row_avx512_vnni.ops, &cpu_row_avx512.ops,
                                                 &cpu_row_avx2.ops, &cpu_row_ref.ops,         NULL };

/* What a thread's scratch must hold for any slot. */
static size_t scratch_bytes(void)
{
    size_t matmul = MATMUL_SCRATCH_BYTES, attention = attention_scratch_bytes();
    return ((matmul > attention ? matmul : attention) + 63) & ~(size_t)63;
}

/* Pages that no call is large enough for stay untouched. */
static void *map_pages(size_t bytes) { return pages_map(pages_round(bytes)); }

static enum status choose_row(const char *isa, const struct kernel_ops **out, struct err *err)
{
    bool       any = strcmp(isa, "auto") == 0, known = any;
    struct buf list = { 0 };
    for (const struct kernel_ops *const *row = KERNEL_ROWS; *row; row++) {
        bool named = strcmp(isa, (*row)->name) == 0;
        known = known || named;
        if (!(*row)->available()) continue;
        if (any || named) {
            *out = *row;
            buf_release(&list);
            return OK;
        }
        buf_printf(&list, "%s%s", list.len ? ", " : "", (*row)->name);
    }
    enum status st = known ? ERR_UNSUPPORTED : ERR_INVALID;
    err_field(err, st, "cpu-isa", "%s \"%s\"; this CPU has: %s",
              known ? "this CPU cannot run instruction set" : "there is no instruction set", isa, list.data);
    buf_release(&list);
    return st;
}

enum status kernel_ctx_create(const char *isa, enum activations activations, int n_threads, struct kernel_ctx **out, struct err *err)
{
    const struct kernel_ops *ops;
    struct compute_pool     *pool;
    TRY(choose_row(isa, &ops, err));
    TRY(compute_pool_create(n_threads, &pool, err));
    struct kernel_ctx *c = MEM_NEW(struct kernel_ctx);
    c->ops = ops;
    c->pool = pool;
    c->activations = activations;
    c->scratch_bytes_per_thread = scratch_bytes();
    c->scratch = map_pages(c->scratch_bytes_per_thread * (size_t)n_threads);
    c->attn = map_pages(attention_shared_bytes(n_threads));
    if (!c->scratch || !c->attn || kernel_ctx_reserve(c, 0, 0) != OK) {
        kernel_ctx_free(c);
        return err_set(err, ERR_NOMEM, "no memory for the tables of the kernels");
    }
    *out = c;
    return OK;
}

void kernel_ctx_free(struct kernel_ctx *c)
{
    if (!c) return;
    pages_unmap(c->scratch, pages_round(c->scratch_bytes_per_thread * (size_t)compute_pool_threads(c->pool)));
    pages_unmap(c->attn, pages_round(attention_shared_bytes(compute_pool_threads(c->pool))));
    compute_pool_free(c->pool);
    pages_unmap(c->acts, c->acts_bytes);
    mem_free(c);
}

enum status kernel_ctx_reserve(struct kernel_ctx *c, size_t n_rows, size_t n_in)
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

enum dtype kernel_kv_dtype(const struct kernel_ctx *c) { return c->activations == ACTIVATIONS_F32 ? DTYPE_F32 : DTYPE_BF16; }
