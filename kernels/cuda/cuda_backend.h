/* cuda_backend.h - the CUDA backend of kernels/backend.h and its context.
 *
 *   cuda_ctx.c          the context: device, a CPU context for the host's part, workspaces
 *   cuda_upload_step.c  uploads a step's rows and sequences
 *   cuda_graph.c        captures and replays CUDA graphs of steps
 *   cuda_sampling.c     samples on the device: requests and results
 *   cuda_weight_pack.c  packs checkpoint matrices into the layouts of gemm.h; weight_upload.c
 *   cuda_matmul.c       matmul and experts; cuda_ops.c all other ops and the tables
 *   gemm.h, attention.h, elementwise.h, moe_route.h, prepare_inputs.h, move_rows.h, sample.h,
 *     fill_dummy.h: the kernels
 *
 * Ops enqueue work on the device's stream and return. The device keeps the first error
 * (device_fault); later work does nothing. Thread: loading thread, then engine. */
#ifndef BATON_KERNELS_CUDA_CUDA_BACKEND_H
#define BATON_KERNELS_CUDA_CUDA_BACKEND_H

#include "kernels/backend.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/device_cuda.h"
#include "kernels/cuda/sampling/sample.h"
#include "kernels/cuda/weight_upload.h"

/* bytes of edits per row of logits: about 1,000 penalised tokens, on the average of a step */
enum { CUDA_EDITS_PER_LOGITS = 16 << 10 };

/* Real rows of the step. A replayed CUDA graph pads the step to the captured size. */
struct cuda_step_rows {
    int32_t n_rows;
};

/* Parts of a step in pinned memory, to be written. */
struct cuda_step_host {
    struct cuda_step_rows *real;
    int32_t *ids, *pos, *from_rows, *logit_rows;
    struct sample_row_params *row_params;
    char *variable; /* tables, moves, then sampling's edits and masks */
};
struct cuda_list_host {
    struct cuda_attn_counts *counts;
    struct cuda_attn_seq *seqs;
    struct cuda_attn_row *rows;
};

enum { CUDA_GRAPH_ROWS_MAX = 512 };

/* Steps and passes that the host writes before the GPU has copied the first of them, at most. */
enum { CUDA_UPLOADS_MAX = 32 };

/* What was written to the ring, until its copy has completed. */
struct cuda_written_step {
    size_t begin, end;
    cudaEvent_t copied;
};

struct cuda_step_upload {
    char *ring; /* pinned, twice `bytes` */
    struct cuda_written_step written[CUDA_UPLOADS_MAX];
    uint32_t first_written, n_written; /* in the order of their copies */
    size_t ring_at;                    /* of what is written next */
    char *host;                        /* this step's, in the ring */
    struct dev_mem device_mem;
    size_t bytes, used;
    struct cuda_attn_list *lists;      /* [max_lists] */
    struct cuda_list_host *host_lists; /* [max_lists] */
    int32_t max_lists;
    /* Device pointers: */
    const struct cuda_step_rows *real;
    const int32_t *ids, *pos, *from_rows, *logit_rows;
    const struct sample_row_params *row_params;
    const char *variable;
    const struct kernel_move *moves;
};

/* A graph serves steps of up to n_rows and n_logits, with or without rows of prompts. */
struct cuda_captured_graph {
    enum kernel_program program;
    int32_t n_rows, n_logits;
    bool has_prefill;
    struct cuda_attn_counts bounds; /* of its lists */
    cudaGraphExec_t exec;
};

/* The step between upload and submit. */
struct cuda_step {
    enum kernel_program program;
    int32_t n_logits;           /* real ones */
    int parity;                 /* of its results */
    int32_t first_kept, n_kept; /* of a pass's tokens */
    bool capturing;
    const struct cuda_captured_graph *graph; /* computes it; NULL: its ops are called */
};

struct cuda_sampling {
    struct dev_mem results, kept, scratch; /* [max_logits]; [n_kept] ids; the kernels' scratch */
    struct dev_mem accepted;               /* [2 max_logits] of kernel_move */
    struct token_logprobs *fetched[2];     /* [max_logits], pinned, alternating */
    int32_t *passes_fetched[2];            /* [n_kept], pinned, likewise: a copy of `kept` where
                                            * passes have written */
    cudaEvent_t ready[2], passes_ready[2]; /* these are complete */
    size_t n_rows, n_vocab, n_kept;        /* for which all this was allocated */
    size_t room;                           /* bytes of a step's edits and masks; with more the
                                              * host samples */
    struct sample_encoder *encoder;
    unsigned work; /* of the step: enum sample_work */
};

/* Rows of f32 that an op has also left in `inputs`, in bf16 as prepare_inputs makes them, for the
 * op that follows. x NULL: none. */
struct cuda_rounded_rows {
    const float *x; /* rows of n */
    size_t n_rows, n;
};

struct cuda_ctx {
    struct kernel_ctx base; /* first */
    struct cuda_device *device;
    struct kernel_limits limits; /* of cuda_prepare; all 0 without it */
    struct cuda_step_upload upload_step;
    struct weight_upload upload; /* while weights are packed */
    struct cuda_step step;
    struct cuda_sampling sampling;
    struct cuda_captured_graph *graphs;
    int32_t n_graphs, max_graphs;
    struct dev_mem inputs; /* of the running matmul call: prepared rows */
    struct cuda_rounded_rows rounded;
    bool rounded_in_vain;               /* the product after attention took e4m3 */
    bool rounds_for_experts;            /* experts took their last inputs from there */
    struct dev_mem products, workspace; /* scratch of GEMMs, and the library's */
    struct gemm_cublaslt *cublaslt;     /* NULL: none, or not used */
    bool cublaslt_tried;
    struct dev_mem router;    /* MOE_ROUTER_SCRATCH */
    struct dev_mem attention; /* attention_scratch_floats */
};

extern const struct kernel_backend cuda_backend;

static inline struct cuda_ctx *cuda_ctx_of(struct kernel_ctx *c) { return (struct cuda_ctx *)c; }

/* For ops that may change rows of f32. */
static inline struct cuda_ctx *cuda_begin_op(struct kernel_ctx *c)
{
    cuda_ctx_of(c)->rounded = (struct cuda_rounded_rows){ 0 };
    return cuda_ctx_of(c);
}

/* Where kernels of a captured step find its real rows: padding rows choose no experts, whose
 * weights would be read for nothing. NULL: all rows are real. */
static inline const int32_t *cuda_n_real_rows(const struct cuda_ctx *c)
{
    return c->step.capturing ? &c->upload_step.real->n_rows : NULL;
}

/* cuda_ctx.c */
enum status cuda_ctx_create(const struct kernel_backend *backend, const struct kernel_options *o,
                            struct kernel_ctx **out, struct err *err);
void cuda_ctx_free(struct kernel_ctx *c);
enum status cuda_ctx_reserve(struct kernel_ctx *c, size_t n_rows, size_t n_in);

enum status cuda_prepare(struct kernel_ctx *c, const struct kernel_limits *l, struct err *err);

/* cuda_upload_step.c */
void cuda_upload_step(struct kernel_ctx *c, struct kernel_step *s);
void cuda_upload_step_capture(struct cuda_ctx *c, struct kernel_step *s,
                              const struct cuda_attn_counts *bounds);
bool cuda_step_upload_init(struct cuda_ctx *c);
size_t cuda_step_upload_bytes(const struct cuda_ctx *c);
bool cuda_step_upload_grow(struct cuda_ctx *c, size_t bytes);
void cuda_step_upload_release(struct cuda_ctx *c);

/* cuda_graph.c */
bool cuda_begin_capture(struct kernel_ctx *c, int32_t i, struct kernel_step *s);
/* The graph for this uploaded step, whose lists are counted; NULL: none fits. */
const struct cuda_captured_graph *cuda_graph_for(const struct cuda_ctx *c,
                                                 const struct kernel_step *s);
void cuda_submit(struct kernel_ctx *c);
void cuda_drop_graphs(struct kernel_ctx *c, uint32_t max_rows, uint32_t max_pass_rows);
void cuda_graphs_release(struct cuda_ctx *c);

/* cuda_sampling.c */
enum status cuda_sampling_prepare(struct cuda_ctx *c, struct err *err);
void cuda_sampling_release(struct cuda_ctx *c);
/* Writes the sampling requests of n rows after the block tables. False: the host must sample,
 * because there are more bytes of edits and masks than `room`,
 * or `wants` is NULL. */
bool cuda_sampling_write(struct cuda_ctx *c, const struct sample_request *wants, int32_t n,
                         size_t room, const struct cuda_step_host *to);
void cuda_sample(struct kernel_ctx *c, const float *logits, size_t n_vocab);
bool cuda_is_sampled(struct kernel_ctx *c, int parity);
void cuda_fetch(struct kernel_ctx *c, int parity, struct token_logprobs *out, size_t n);
const int32_t *cuda_fetch_passes(struct kernel_ctx *c, int parity);

/* cuda_matmul.c */
void cuda_matmul(struct kernel_ctx *c, const struct matmul_args *jobs, size_t n_jobs);
void cuda_experts(struct kernel_ctx *c, const struct experts_args *a);
void cuda_expert_slots(struct kernel_ctx *c, const struct expert_slots_args *a);
/* cuda_ops.c */
void cuda_combine(struct kernel_ctx *c, const struct combine_args *a);

/* cuda_weight_pack.c */
enum status cuda_weight_plan(const struct kernel_ctx *c, const struct weight_pack_args *a,
                             struct weight *out, struct err *err);
enum status cuda_weight_pack(struct kernel_ctx *c, const struct weight_pack_args *a,
                             struct weight *out, struct err *err);
void cuda_weight_release(struct kernel_ctx *c, struct weight *w);
enum status cuda_weight_arena_create(struct kernel_ctx *c, size_t bytes, struct weight_arena *out,
                                     struct err *err);
void cuda_weight_arena_free(struct kernel_ctx *c, struct weight_arena *a);

#endif
