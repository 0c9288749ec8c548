/* backend.c - the registry of backends, and the calls that serve every backend alike.
 *
 * Thread: as in backend.h. */
#include "kernels/backend.h"

#include <string.h>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/kv_rows.h"
#ifdef BATON_HAVE_CUDA_KERNELS
#include "kernels/cuda/cuda_backend.h"
#endif
#include "shared/base/buf.h"

const struct kernel_backend *const KERNEL_BACKENDS[] = {
    &cpu_backend_amx.base,
    &cpu_backend_avx512_bf16.base,
    &cpu_backend_avx512_vnni.base,
    &cpu_backend_avx512.base,
    &cpu_backend_avx2.base,
    &cpu_backend_ref.base,
#ifdef BATON_HAVE_CUDA_KERNELS
    &cuda_backend, /* after ref, which is always available: "auto" stops before it */
#endif
    NULL,
};

static enum status choose_backend(const char *name, const struct kernel_backend **out,
                                  struct err *err)
{
    bool any = strcmp(name, "auto") == 0, known = any;
    struct buf list = { 0 };
    for (const struct kernel_backend *const *backend = KERNEL_BACKENDS; *backend; backend++) {
        bool named = strcmp(name, (*backend)->name) == 0;
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
              known ? "this CPU cannot run instruction set" : "there is no instruction set", name,
              list.data);
    buf_release(&list);
    return st;
}

struct kernel_options kernel_options_default(const char *backend, enum activations a, int n_threads)
{
    return (struct kernel_options){
        .backend = backend,
        .activations = a,
        .n_threads = n_threads,
        .kv = kernel_kv_default(a),
    };
}

enum status kernel_ctx_create(struct kernel_options o, struct kernel_ctx **out, struct err *err)
{
    const struct kernel_backend *backend;
    TRY(choose_backend(o.backend, &backend, err));
    return backend->create(backend, &o, out, err);
}

void kernel_ctx_init(struct kernel_ctx *c, const struct kernel_backend *b,
                     const struct kernel_options *o)
{
    c->backend = b;
    c->ops = b->ops;
    c->weight_ops = b->weight_ops;
    c->step_ops = b->step_ops;
    c->options = *o;
    c->options.backend = b->name;
}

void kernel_ctx_free(struct kernel_ctx *c)
{
    if (c) c->backend->free(c);
}

enum status kernel_ctx_reserve(struct kernel_ctx *c, size_t n_rows, size_t n_in)
{
    return c->backend->reserve(c, n_rows, n_in);
}

struct kernel_ctx *kernel_host(struct kernel_ctx *c) { return c->host ? c->host : c; }

void *weight_arena_take(struct weight_arena *a, size_t bytes)
{
    if (!a || !a->at || a->left < bytes) return NULL;
    char *at = a->at;
    a->at += bytes;
    a->left -= bytes;
    return at;
}

void weight_release(struct kernel_ctx *c, struct weight *w)
{
    if (!w || !w->data) return;
    if (!w->borrowed) c->weight_ops->release(c, w);
    *w = (struct weight){ 0 };
}

bool kernel_is_deterministic(const struct kernel_ctx *c)
{
    return c->device->is_host || c->options.deterministic;
}

/* The CPU computes MLA by two paths. A GPU has two kernels for any attention, and may round
 * differently in them. */
bool kernel_has_two_attention_paths(const struct kernel_ctx *c, bool latent)
{
    return c->device->is_host ? latent : c->options.activations == ACTIVATIONS_FAST;
}

enum dtype kernel_kv_default(enum activations a)
{
    return a == ACTIVATIONS_F32 ? DTYPE_F32 : DTYPE_BF16;
}

#define KV_OPTION "kv-cache-dtype"

enum status kernel_kv_check(enum activations a, enum dtype t, bool latent, struct err *err)
{
    const enum dtype suits = kernel_kv_default(a);
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
