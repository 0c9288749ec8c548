/* backend.c - the rows of the kernel table in order of preference, and the calls that go through it
 * whatever the backend.
 *
 * Life cycle: kernel_ctx_create at start, kernel_ctx_free after the last model that uses it.
 * Thread: engine. */
#include "kernels/kernels.h"

#include <string.h>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/kv_rows.h"
#ifdef BATON_HAVE_CUDA_KERNELS
#include "kernels/cuda/cuda_backend.h"
#endif
#include "shared/base/buf.h"

const struct kernel_ops *const KERNEL_BACKENDS[] = {
    &cpu_backend_amx.ops, &cpu_backend_avx512_bf16.ops, &cpu_backend_avx512_vnni.ops,
    &cpu_backend_avx512.ops, &cpu_backend_avx2.ops, &cpu_backend_ref.ops,
#ifdef BATON_HAVE_CUDA_KERNELS
    /* behind ref, which is always available: never
                                                  * what "auto" takes */
    &cuda_backend,
#endif
    NULL
};

static enum status choose_backend(const char *isa, const struct kernel_ops **out, struct err *err)
{
    bool any = strcmp(isa, "auto") == 0, known = any;
    struct buf list = { 0 };
    for (const struct kernel_ops *const *backend = KERNEL_BACKENDS; *backend; backend++) {
        bool named = strcmp(isa, (*backend)->name) == 0;
        known = known || named;
        if (!(*backend)->available()) continue;
        if (any || named) {
            *out = *backend;
            buf_release(&list);
            return OK;
        }
        buf_printf(&list, "%s%s", list.len ? ", " : "", (*backend)->name);
    }
    enum status st = known ? ERR_UNSUPPORTED : ERR_INVALID;
    err_field(err, st, "cpu-isa", "%s \"%s\"; this CPU has: %s",
              known ? "this CPU cannot run instruction set" : "there is no instruction set", isa,
              list.data);
    buf_release(&list);
    return st;
}

enum status kernel_ctx_create(const char *isa, enum activations activations, int n_threads,
                              struct kernel_ctx **out, struct err *err)
{
    const struct kernel_ops *backend;
    TRY(choose_backend(isa, &backend, err));
    return backend->create(backend, activations, n_threads, out, err);
}

void kernel_ctx_free(struct kernel_ctx *c)
{
    if (c) c->ops->free(c);
}

enum status kernel_ctx_reserve(struct kernel_ctx *c, size_t n_rows, size_t n_in)
{
    return c->ops->reserve(c, n_rows, n_in);
}

struct kernel_ctx *kernel_host(struct kernel_ctx *c) { return c->host ? c->host : c; }

void weight_release(struct kernel_ctx *c, struct weight *w)
{
    if (!w || !w->data) return;
    if (!w->borrowed) c->ops->weight_release(c, w);
    *w = (struct weight){ 0 };
}

bool kernel_is_deterministic(const struct kernel_ctx *c)
{
    return c->device->is_host || c->deterministic;
}

/* The processor has two forms of latent attention; a card has two kernels of any, where it may
 * round. */
bool kernel_has_two_attention_paths(const struct kernel_ctx *c, bool latent)
{
    return c->device->is_host ? latent : c->activations == ACTIVATIONS_FAST;
}

enum dtype kernel_kv_default(enum activations a)
{
    return a == ACTIVATIONS_F32 ? DTYPE_F32 : DTYPE_BF16;
}

#define KV_OPTION "kv-cache-dtype"

enum status kernel_kv_check(const struct kernel_ctx *c, enum dtype t, bool latent, struct err *err)
{
    const enum dtype suits = kernel_kv_default(c->activations);
    if (t == suits) return OK;
    if (!kv_rows_known(t))
        return err_field(
            err, ERR_UNSUPPORTED, KV_OPTION,
            "a KV cache cannot be of element type %s; it can be bf16, f16, int8 or f8_e4m3",
            kv_rows_name(t));
    if (latent)
        return err_field(err, ERR_UNSUPPORTED, KV_OPTION,
                         "this model's KV cache holds latents (MLA), which can only be held as %s, "
                         "not as %s: leave --kv-cache-dtype at auto",
                         kv_rows_name(suits), kv_rows_name(t));
    if (t == DTYPE_F32)
        return err_field(err, ERR_UNSUPPORTED, KV_OPTION,
                         "a KV cache in f32 goes with exact arithmetic: give --activations f32 "
                         "too, or another --kv-cache-dtype");
    return OK;
}
