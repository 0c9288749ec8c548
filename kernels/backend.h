/* backend.h - the backends that compute (the CPU's instruction sets, CUDA) and their contexts.
 *
 * A backend is one entry of KERNEL_BACKENDS: a name and its ops tables
 *   weights.h  packing weights      step.h  submission of a step      kernels.h  the arithmetic
 * A context is one backend at work on one device. Everything that ops read and write is in that
 * device's memory: activations, weights, norms, biases, the RoPE table, the KV pool. CPU backends
 * compute in place; CUDA's ops enqueue work on the device's stream, and device_download waits.
 * Life cycle: kernel_ctx_create at start, kernel_ctx_free after the last model that uses it.
 * Thread: loading thread, then engine. */
#ifndef BATON_KERNELS_BACKEND_H
#define BATON_KERNELS_BACKEND_H

#include "kernels/device.h"
#include "kernels/dtype.h"
#include "kernels/host/compute_pool.h"
#include "kernels/kernels.h"
#include "kernels/step.h"
#include "kernels/weights.h"

struct kernel_options {
    const char *backend; /* "auto": the first CPU backend that this machine has; or a name */
    enum activations activations;
    int n_threads;              /* of the compute pool */
    enum dtype kv;              /* element type of KV pools, as kernel_kv_check allows */
    bool deterministic;         /* a row's bits depend neither on the other rows nor on their
                                 * number, where that costs speed too; always so on the CPU */
    size_t sampling_edit_bytes; /* of penalties and masks per step that the device samples with; a
                                 * step with more is sampled by the host. 0: by the limits */
};

struct kernel_backend {
    const char *name;           /* "ref", "avx2", "avx512", ..: --cpu-isa, logs, peers' hello */
    const char *weight_layouts; /* backends with equal ones pack a source to the same bytes */
    bool absorbed_only;         /* MLA's prompt tokens take the absorbed path too: attention is
                                 * never called with k_up and v_up */
    const struct kernel_ops *ops;
    const struct weight_ops *weight_ops;
    const struct step_ops *step_ops;
    bool (*available)(void); /* does this machine have what the backend needs? */
    enum status (*create)(const struct kernel_backend *b, const struct kernel_options *o,
                          struct kernel_ctx **out, struct err *err);
    void (*free)(struct kernel_ctx *c);
    enum status (*reserve)(struct kernel_ctx *c, size_t n_rows, size_t n_in);
};

struct kernel_ctx {
    const struct kernel_backend *backend;
    const struct kernel_ops *ops; /* the backend's three tables */
    const struct weight_ops *weight_ops;
    const struct step_ops *step_ops;
    struct kernel_options options;
    struct device *device;     /* where its memory is; owned */
    struct compute_pool *pool; /* of the host: packing, sampling, all ops of CPU backends */
    struct kernel_ctx *host;   /* a CPU context with the same pool; NULL: this is one */
    uint32_t n_graph_nodes;    /* of the smallest captured graph; 0: none was captured */
    uint64_t n_graph_steps[KERNEL_PROGRAMS]; /* that a graph computed; engine thread */
};

#ifdef __cplusplus
extern "C" {
#endif

/* In order of preference, NULL-terminated. "auto" never takes CUDA. */
extern const struct kernel_backend *const KERNEL_BACKENDS[];

/* The usual options: KV pools in the type that suits the arithmetic, nothing else asked for. */
struct kernel_options kernel_options_default(const char *backend, enum activations a,
                                             int n_threads);
/* ERR_INVALID or ERR_UNSUPPORTED with a sentence that lists what this machine has. */
enum status kernel_ctx_create(struct kernel_options o, struct kernel_ctx **out,
                              struct err *err) MUST_CHECK;
/* For backends: the members of a new context that follow from its backend and options. */
void kernel_ctx_init(struct kernel_ctx *c, const struct kernel_backend *b,
                     const struct kernel_options *o);
void kernel_ctx_free(struct kernel_ctx *c);
/* Room for the inputs of one matmul call: n_rows rows of at most n_in elements, summed over its
 * jobs. Only grows. Loading thread, no op running. ERR_NOMEM. */
enum status kernel_ctx_reserve(struct kernel_ctx *c, size_t n_rows, size_t n_in) MUST_CHECK;
/* The CPU context for what lies in host memory, such as downloaded logits: c itself, or its own. */
struct kernel_ctx *kernel_host(struct kernel_ctx *c);
/* Does a row's result depend on that row alone? */
bool kernel_is_deterministic(const struct kernel_ctx *c);
/* Do attention's results for prompt tokens and for generated ones (attn_seq.is_decode) round
 * differently? */
bool kernel_has_two_attention_paths(const struct kernel_ctx *c, bool latent);
/* The element type of KV pools that suits an arithmetic: f32, or bf16 of FAST. */
enum dtype kernel_kv_default(enum activations a);
/* May a KV pool of heads, or of latents, have type t? Latents only the type that suits the
 * arithmetic. ERR_UNSUPPORTED with a sentence. */
enum status kernel_kv_check(enum activations a, enum dtype t, bool latent,
                            struct err *err) MUST_CHECK;
/* Features of this CPU that matter here, separated by spaces, for `baton version`. */
void kernel_cpu_features(char *out, size_t cap);

#ifdef __cplusplus
}
#endif

#endif
