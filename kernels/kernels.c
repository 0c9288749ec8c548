/* kernels.c - the rows of the kernel table in order of preference, and the context that binds one of them to a pool.
 *
 * Life cycle: kernel_ctx_create at start, kernel_ctx_free after the last model that uses it. Thread: engine. */
#include "kernels/kernels.h"

#include <string.h>

#include "kernels/cpu/cpu_row.h"
#include "shared/base/buf.h"
#include "shared/base/mem.h"

const struct kernel_ops *const KERNEL_ROWS[] = { &cpu_row_avx512.ops, &cpu_row_avx2.ops, &cpu_row_ref.ops, NULL };

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

enum status kernel_ctx_create(const char *isa, int n_threads, struct kernel_ctx **out, struct err *err)
{
    const struct kernel_ops *ops;
    struct compute_pool     *pool;
    TRY(choose_row(isa, &ops, err));
    TRY(compute_pool_create(n_threads, &pool, err));
    struct kernel_ctx *c = MEM_NEW(struct kernel_ctx);
    c->ops = ops;
    c->pool = pool;
    c->scratch_bytes_per_thread = SCRATCH_FLOATS * sizeof(float);
    c->scratch = mem_aligned(64, c->scratch_bytes_per_thread * (size_t)n_threads);
    *out = c;
    return OK;
}

void kernel_ctx_free(struct kernel_ctx *c)
{
    if (!c) return;
    compute_pool_free(c->pool);
    mem_free(c->scratch);
    mem_free(c);
}
