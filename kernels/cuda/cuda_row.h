/* cuda_row.h - the row of kernels.h that computes on a card, and its context.
 *
 *   cuda_ctx.c     the context: device, a processor's context beside it, memory to work in
 *   cuda_stage.c   a step's rows and sequences on their way to the card
 *   cuda_pack.c    checkpoint matrices to the forms of gemm.h
 *   cuda_slots.c   every other slot: arguments to kernels
 *   gemm.h, attention.h, rows.h, inputs.h   kernels
 *
 * Slots put work on the device's stream and return. What fails is kept by the device (device_fault); after that work comes to nothing.
 * Life cycle: kernel_ctx_create("cuda"), kernel_ctx_free. Thread: loading thread, then engine. */
#ifndef BATON_KERNELS_CUDA_CUDA_ROW_H
#define BATON_KERNELS_CUDA_CUDA_ROW_H

#include "kernels/cuda/attention.h"
#include "kernels/cuda/device_cuda.h"
#include "kernels/kernels.h"

/* What a step's rows are, in pinned memory and, at the same offsets, on the card. */
struct cuda_staging {
    char             *host;
    struct dev_mem    card;
    size_t            bytes, used;
    cudaEvent_t       copied;  /* the last copy is over: `host` may be written again */
    struct cuda_list *lists;   /* [max_lists] */
    int32_t           max_lists;
};

struct cuda_ctx {
    struct kernel_ctx   base; /* first */
    struct cuda_device *device;
    struct cuda_staging staging;
    struct dev_mem      inputs;    /* of the running matmul call: rows made ready */
    struct dev_mem      attention; /* attention_scratch_floats */
};

extern const struct kernel_ops cuda_row;

static inline struct cuda_ctx *cuda_ctx_of(struct kernel_ctx *c) { return (struct cuda_ctx *)c; }

/* cuda_ctx.c */
enum status cuda_ctx_create(const struct kernel_ops *row, enum activations activations, int n_threads, struct kernel_ctx **out, struct err *err);
void        cuda_ctx_free(struct kernel_ctx *c);
enum status cuda_ctx_reserve(struct kernel_ctx *c, size_t n_rows, size_t n_in);

/* cuda_stage.c */
void cuda_stage(struct kernel_ctx *c, struct kernel_step *s);
void cuda_staging_release(struct cuda_ctx *c);

/* cuda_pack.c */
enum status cuda_weight_plan(const struct kernel_ctx *c, const struct weight_pack_args *a, struct weight *out, struct err *err);
enum status cuda_weight_pack(struct kernel_ctx *c, const struct weight_pack_args *a, struct weight *out, struct err *err);
void        cuda_weight_release(struct kernel_ctx *c, struct weight *w);

#endif
