/* cuda_graph.c - captures the launches of a step, or of a pass behind it, once as a CUDA graph, and
 * replays it with one call.
 *
 * A graph serves steps, or passes of a kind, of up to so many rows and rows of logits, of decode
 * rows alone or with prompts among them; a step takes the smallest graph that fits and is padded
 * with rows that have no effect. Kernels read what differs from step to step (ids, positions,
 * sequences, block tables, the number of real rows) from the uploaded buffer, whose parts lie at
 * the graph's addresses. All graphs are captured before the first request, so none waits for one
 * and no memory is needed later. Steps that fit none are launched op by op: long prompts, whose
 * kernels take longer than their launches, and contexts so long that attention needs several waves.
 * Source: CUDA Runtime API, stream capture and cudaGraphInstantiate. Life cycle: cuda_begin_capture
 * .. cuda_submit, then cuda_graph_for. Thread: engine. */
#include <assert.h>

#include "kernels/cuda/cuda_backend.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

/* Captured sizes: padding is less than a third of the rows, from 16 rows on less than a quarter. */
static const int32_t SIZES[] = { 1,  2,  4,  6,   8,   12,  16,  20,  24,  32,  40,  48,
                                 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512 };
/* Rows of logits of steps with prompts: how many rows are decode rows. */
static const int32_t LOGITS_SIZES[] = { 4, 32, 128, 512 };
enum {
    N_SIZES = sizeof SIZES / sizeof *SIZES,
    N_LOGITS_SIZES = sizeof LOGITS_SIZES / sizeof *LOGITS_SIZES,
    N_SHAPES = N_SIZES + N_SIZES * N_LOGITS_SIZES
};

static_assert((int)CUDA_GRAPH_ROWS_MAX == 512, "the last of SIZES");

/* ---- which there are ---- */

/* The i-th size of a list that ends with `most`; 0: there is none. */
static int32_t size_of(const int32_t *sizes, int32_t i, int32_t most)
{
    if (i > 0 && sizes[i - 1] >= most) return 0;
    return sizes[i] < most ? sizes[i] : most;
}

static int32_t less(uint32_t a, uint32_t b) { return (int32_t)(a < b ? a : b); }

/* The i-th candidate shape of each program, first those of decode rows alone; its n_rows or
 * n_logits is 0 if the limits make it useless. False: there is no i-th. */
static bool shape_of(const struct kernel_limits *l, int32_t i, struct cuda_captured_graph *out)
{
    *out = (struct cuda_captured_graph){ .program = (enum kernel_program)(i / N_SHAPES) };
    if (out->program >= KERNEL_PROGRAMS) return false;
    const int32_t most_rows = less(
        out->program == KERNEL_STEP ? l->max_graph_rows : l->max_pass_graph_rows, l->max_rows);
    i %= N_SHAPES;
    out->has_prefill = i >= N_SIZES;
    if (!out->has_prefill) {
        out->n_rows = out->n_logits = size_of(SIZES, i, less((uint32_t)most_rows, l->max_logits));
        return true;
    }
    if (out->program == KERNEL_CHAINED_PASS) return true; /* it has no prompts */
    i -= N_SIZES;
    out->n_rows = size_of(SIZES, i / N_LOGITS_SIZES, most_rows);
    out->n_logits = size_of(LOGITS_SIZES, i % N_LOGITS_SIZES,
                            less((uint32_t)out->n_rows, l->max_logits));
    return true;
}

static bool nth_wanted(const struct kernel_limits *l, int32_t i, struct cuda_captured_graph *out)
{
    for (int32_t at = 0; shape_of(l, at, out); at++)
        if (out->n_rows > 0 && out->n_logits > 0 && i-- == 0) return true;
    return false;
}

/* The model's shape, as attention is called with it. */
static struct attention attention_shape(const struct cuda_ctx *c)
{
    const struct kernel_limits *l = &c->limits;
    return (struct attention){ .kv = { .dtype = c->base.options.kv,
                                       .latent = l->latent,
                                       .n_heads = (int32_t)l->n_kv_heads,
                                       .head_dim = (int32_t)l->head_dim,
                                       .block_tokens = (int32_t)l->block_tokens, },
                               .n_heads = (int32_t)l->n_heads,
                               .v_dim = (int32_t)l->v_dim,
                               .exact = c->base.options.activations == ACTIVATIONS_F32, };
}

/* ---- capture ---- */

bool cuda_begin_capture(struct kernel_ctx *base, int32_t i, struct kernel_step *s)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    struct cuda_captured_graph r;
    if (!nth_wanted(&c->limits, i, &r) || device_fault(base->device, NULL) != OK) return false;
    if (!cuda_check(c->device, cudaStreamSynchronize(c->device->stream), "a step")) return false;
    if (c->n_graphs == c->max_graphs) {
        c->max_graphs = c->max_graphs ? 2 * c->max_graphs : 32;
        c->graphs = mem_realloc(c->graphs, (size_t)c->max_graphs, sizeof *c->graphs);
    }
    s->program = r.program;
    s->n_rows = r.n_rows;
    s->n_logits = r.n_logits;
    s->graph_launched = false;
    const struct attention shape = attention_shape(c);
    attention_capture_bounds(&shape, r.n_rows, r.n_rows, r.has_prefill ? r.n_rows : 0,
                             (int32_t)c->limits.max_len, &r.bounds);
    cuda_upload_step_capture(c, s, &r.bounds);
    s->n_real = &c->upload_step.real->n_rows;
    c->step = (struct cuda_step){ .program = r.program, .capturing = true };
    c->graphs[c->n_graphs] = r;
    /* Relaxed mode, because a kernel that has not run yet is loaded during capture. */
    return cuda_check(c->device,
                      cudaStreamBeginCapture(c->device->stream, cudaStreamCaptureModeRelaxed),
                      "capturing a step");
}

/* Continues without graphs if the GPU has no memory for them. */
static void disable_graphs(struct cuda_ctx *c)
{
    (void)cudaGetLastError(); /* too little memory is not a fault of the GPU */
    log_warn(
        "steps are not captured as CUDA graphs",
        "why=\"no GPU memory left for %d graphs; a lower --gpu-memory-utilization leaves some\"",
        c->n_graphs + 1);
    cuda_graphs_release(c);
    c->limits.max_graph_rows = c->limits.max_pass_graph_rows = 0;
}

static void end_capture(struct cuda_ctx *c)
{
    struct cuda_captured_graph *r = &c->graphs[c->n_graphs];
    cudaGraph_t graph = NULL;
    size_t n_graph_nodes = 0;
    if (!cuda_check(c->device, cudaStreamEndCapture(c->device->stream, &graph), "capturing a step"))
        return;
    if (cuda_check(c->device, cudaGraphGetNodes(graph, NULL, &n_graph_nodes), "capturing a step") &&
        c->n_graphs == 0)
        c->base.n_graph_nodes = (uint32_t)n_graph_nodes;
    cudaError_t e = cudaGraphInstantiate(&r->exec, graph, 0);
    if (e == cudaSuccess) {
        c->n_graphs++;                                   /* from now on it must be released */
        e = cudaGraphUpload(r->exec, c->device->stream); /* allocates on the GPU now */
    }
    (void)cuda_check(c->device, cudaGraphDestroy(graph), "capturing a step");
    if (e == cudaErrorMemoryAllocation) disable_graphs(c);
    else (void)cuda_check(c->device, e, "capturing a step");
}

void cuda_drop_graphs(struct kernel_ctx *base, uint32_t max_rows, uint32_t max_pass_rows)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    device_wait(base->device);
    cuda_graphs_release(c);
    c->limits.max_graph_rows = max_rows;
    c->limits.max_pass_graph_rows = max_pass_rows;
}

void cuda_graphs_release(struct cuda_ctx *c)
{
    for (int32_t i = 0; i < c->n_graphs; i++)
        (void)cuda_check(c->device, cudaGraphExecDestroy(c->graphs[i].exec),
                         "ending a captured graph");
    mem_free(c->graphs);
    c->graphs = NULL;
    c->n_graphs = c->max_graphs = 0;
    c->base.n_graph_nodes = 0;
}

/* ---- choosing ---- */

/* Or sequences that compute several generated tokens again, which launches for decode rows alone
 * are not made for. */
static bool step_has_prefill(const struct cuda_ctx *c, const struct kernel_step *s)
{
    for (int32_t i = 0; i < s->n_lists; i++) {
        const struct cuda_attn_counts *n = &c->upload_step.lists[i].bounds;
        if (n->n_prefill > 0 || (n->n_rows_seq > 1 && !c->limits.latent)) return true;
    }
    return false;
}

static bool lists_fit(const struct cuda_ctx *c, const struct kernel_step *s,
                      const struct cuda_captured_graph *r)
{
    for (int32_t i = 0; i < s->n_lists; i++)
        if (!attention_fits_capture(&r->bounds, &c->upload_step.lists[i].bounds)) return false;
    return true;
}

static bool may_serve(const struct cuda_captured_graph *r, const struct kernel_step *s,
                      bool has_prefill)
{
    const int32_t least = s->n_rows > s->least_rows ? s->n_rows : s->least_rows;
    return r->program == s->program && r->n_rows >= least && r->n_logits >= s->n_logits &&
           (r->has_prefill == has_prefill || (r->has_prefill && least > s->n_rows));
}

/* One of decode rows alone is preferred: where only other ranks have prompts, there may be none of
 * enough rows. */
static bool is_smaller(const struct cuda_captured_graph *a, const struct cuda_captured_graph *b)
{
    if (a->has_prefill != b->has_prefill) return b->has_prefill;
    return a->n_rows != b->n_rows ? a->n_rows < b->n_rows : a->n_logits < b->n_logits;
}

const struct cuda_captured_graph *cuda_graph_for(const struct cuda_ctx *c,
                                                 const struct kernel_step *s)
{
    const struct cuda_captured_graph *best = NULL;
    if (c->n_graphs == 0 || s->eager || s->n_lists != (int32_t)c->limits.n_lists) return NULL;
    const bool has_prefill = step_has_prefill(c, s);
    for (int32_t i = 0; i < c->n_graphs; i++) {
        const struct cuda_captured_graph *r = &c->graphs[i];
        if (!may_serve(r, s, has_prefill)) continue;
        if (!best || is_smaller(r, best)) best = r;
    }
    return best && lists_fit(c, s, best) ? best : NULL;
}

/* ---- running ---- */

void cuda_submit(struct kernel_ctx *base)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    const struct cuda_step *s = &c->step;
    if (s->capturing) end_capture(c);
    else if (s->graph &&
             cuda_check(c->device, cudaGraphLaunch(s->graph->exec, c->device->stream), "a step"))
        base->n_graph_steps[s->program]++;
}
