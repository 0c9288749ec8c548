/* weights.h - weights of a model: from a checkpoint's matrices to what a backend multiplies by.
 *
 * A backend packs each matrix once, into a layout of its own (enum weight_layout of
 * kernels/cpu/weights/weight_layout.h, enum gemm_weight_layout of kernels/cuda/gemm/gemm.h).
 *   weight_ops.plan   says what packing will make, without reading the data
 *   weight_ops.pack   copies, reorders and, when asked to, quantises
 *   weight_ops.finish waits until every packed weight is in the device's memory
 * Thread: the loading thread; packing fans out over ctx->pool. */
#ifndef BATON_KERNELS_WEIGHTS_H
#define BATON_KERNELS_WEIGHTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/device.h"
#include "kernels/dtype.h"
#include "kernels/dummy_weights.h"

struct kernel_ctx;

enum { F8_BLOCK = 128 }; /* rows and columns that share a scale of F8_E4M3 weights */

/* What becomes of a bf16, f16 or f32 matrix while it is packed: FastDeploy's --quantization.
 * kernels/quantize.h has the rules. */
enum quantize { QUANTIZE_NONE, QUANTIZE_WINT8, QUANTIZE_WINT4, QUANTIZE_BLOCK_FP8 };

/* A matrix as a checkpoint stores it, mapped from the file: [n_out, n_in] with n_in contiguous, or
 * transposed (scalar types only): [n_in, n_out] with n_out contiguous. The data may be
 * unaligned. */
struct weight_src {
    enum dtype dtype;
    const void *data;
    size_t n_out, n_in;
    size_t row_bytes; /* from one stored row to the next; 0: rows are contiguous */
    bool transposed;
    const float *scales; /* F8_E4M3: [ceil(n_out / 128)][ceil(n_in / 128)], factors; else NULL */
    /* A unit above 0 means that there is no data: elements (BF16 or F32) are computed from their
     * place among the stored ones (dummy weights). */
    struct dummy_weights dummy;
};

/* A packed matrix. Owned by whoever called pack; freed with weight_release. */
struct weight {
    int layout;    /* the backend's own enum */
    bool paired;   /* gate and up of SwiGLU: two matrices of n_out / 2 rows, alternating by panel */
    bool borrowed; /* data belongs to another allocation: an arena, or a mapped file */
    size_t n_out, n_in;
    void *data; /* in the device's memory */
    size_t bytes;
};

enum weight_join {
    JOIN_STACKED, /* outputs of the parts side by side, in order */
    JOIN_PAIRED   /* two parts of equal shape, for MATMUL_SILU_MUL */
};

/* Device memory for all weights of a model, allocated at once. `pack` takes from it in order. */
struct weight_arena {
    char *at;           /* next free byte; NULL: empty */
    size_t left;        /* free bytes */
    struct dev_mem mem; /* the allocation on a GPU; on the CPU each weight owns its pages */
};

struct weight_pack_args {
    const struct weight_src *parts; /* of equal n_in and dtype; when stacked, each n_out but the
                                     * last is a multiple of 16 */
    size_t n_parts;
    enum weight_join join;
    enum quantize quantize;
    struct weight_arena *arena; /* NULL, or too little left: the weight gets memory of its own */
};

/* Of the time that packing a model's weights took. */
struct weight_times {
    uint64_t copy_wait_ns; /* waiting for copies to the device */
};

struct weight_ops {
    /* A dry run of pack: layout, shape and size (a multiple of the allocation granularity) without
     * reading the data; out->data stays NULL. Explains which parts cannot be packed. */
    enum status (*plan)(const struct kernel_ctx *c, const struct weight_pack_args *a,
                        struct weight *out, struct err *err);
    /* Packs the parts. `err` (may be NULL) says what is wrong with them, or how much memory was
     * missing. Copies to a device may still be in flight on return. */
    enum status (*pack)(struct kernel_ctx *c, const struct weight_pack_args *a, struct weight *out,
                        struct err *err);
    /* Waits for all copies and frees what only packing needs. A failed copy is reported here at
     * the latest. */
    enum status (*finish)(struct kernel_ctx *c, struct weight_times *out, struct err *err);
    void (*release)(struct kernel_ctx *c, struct weight *w);
    /* Memory for `bytes` of weights. An arena without memory (at NULL) is no error on the CPU,
     * where each weight then gets its own pages, side by side or not. ERR_NOMEM on a GPU. */
    enum status (*arena_create)(struct kernel_ctx *c, size_t bytes, struct weight_arena *out,
                                struct err *err);
    /* Frees the arena, after all weights in it were released; an empty one too. */
    void (*arena_free)(struct kernel_ctx *c, struct weight_arena *a);
};

#ifdef __cplusplus
extern "C" {
#endif

/* The next `bytes` of the arena, or NULL: a is NULL or has too little left. For backends. */
void *weight_arena_take(struct weight_arena *a, size_t bytes);
/* Frees what pack made, unless it is borrowed; clears *w. Calling it twice is harmless. */
void weight_release(struct kernel_ctx *c, struct weight *w);

#ifdef __cplusplus
}
#endif

#endif
