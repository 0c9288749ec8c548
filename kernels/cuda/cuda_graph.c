/* cuda_graph.c - a step's launches recorded once as a CUDA graph and then put in the queue by one call.
 *
 * A recording serves steps of up to so many rows and rows of logits, of answers alone or with prompts among them; a step takes the smallest that
 * it fits and is filled up to it with rows that count for nothing. What differs from step to step - ids, positions, sequences, block tables, how
 * many rows there really are - kernels read from the staged piece, whose parts lie at the recording's places. All recordings are made before the
 * first request, so that none has to wait for one and no memory is needed later. Steps that fit none run as they are called: long prompts, whose
 * kernels take longer than launching them, and contexts so long that attention needs several waves.
 * Source: CUDA Runtime API, stream capture and cudaGraphInstantiate. Life cycle: cuda_record .. cuda_submit, then cuda_recording_for. */
#include "kernels/cuda/cuda_backend.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

/* Rows that steps are filled up to: less than a third of them for nothing, and a quarter from 16 rows on. */
static const int32_t LADDER[] = { 1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512 };
/* Rows of logits beside prompts: how many of a step's rows are answers. */
static const int32_t LOGITS_LADDER[] = { 4, 32, 128, 512 };
enum { N_LADDER = sizeof LADDER / sizeof *LADDER, N_LOGITS = sizeof LOGITS_LADDER / sizeof *LOGITS_LADDER };

/* ---- which there are --------------------------------------------------------------------------------------------- */

/* The i-th size of a ladder that ends with `most`; 0: there is none. */
static int32_t size_of(const int32_t *ladder, int32_t i, int32_t most)
{
    if (i > 0 && ladder[i - 1] >= most) return 0;
    return ladder[i] < most ? ladder[i] : most;
}

static int32_t less(uint32_t a, uint32_t b) { return (int32_t)(a < b ? a : b); }

/* The i-th of all that could be, answers alone first; its n_rows or n_logits is 0 where the limits leave no use for it. False: there is no i-th. */
static bool shape_of(const struct kernel_limits *l, int32_t i, struct cuda_recording *out)
{
    const int32_t most_rows = less(l->max_graph_rows, l->max_rows);
    *out = (struct cuda_recording){ .prompts = i >= N_LADDER };
    if (!out->prompts) {
        out->n_rows = out->n_logits = size_of(LADDER, i, less((uint32_t)most_rows, l->max_logits));
        return true;
    }
    i -= N_LADDER;
    if (i >= N_LADDER * N_LOGITS) return false;
    out->n_rows = size_of(LADDER, i / N_LOGITS, most_rows);
    out->n_logits = size_of(LOGITS_LADDER, i % N_LOGITS, less((uint32_t)out->n_rows, l->max_logits));
    return true;
}

static bool nth_wanted(const struct kernel_limits *l, int32_t i, struct cuda_recording *out)
{
    for (int32_t at = 0; shape_of(l, at, out); at++)
        if (out->n_rows > 0 && out->n_logits > 0 && i-- == 0) return true;
    return false;
}

/* The model's, as attention is called with it. */
static struct attention attention_shape(const struct cuda_ctx *c)
{
    const struct kernel_limits *l = &c->limits;
    return (struct attention){ .kv = { .dtype = c->base.kv, .latent = l->latent, .n_heads = (int32_t)l->n_kv_heads,
                                       .head_dim = (int32_t)l->head_dim, .block_tokens = (int32_t)l->block_tokens },
                               .n_heads = (int32_t)l->n_heads, .v_dim = (int32_t)l->v_dim, .exact = c->base.activations == ACTIVATIONS_F32 };
}

/* ---- recording --------------------------------------------------------------------------------------------------- */

bool cuda_record(struct kernel_ctx *base, int32_t i, struct kernel_step *s)
{
    struct cuda_ctx      *c = cuda_ctx_of(base);
    struct cuda_recording r;
    if (!nth_wanted(&c->limits, i, &r) || device_fault(base->device, NULL) != OK) return false;
    if (!cuda_check(c->device, cudaStreamSynchronize(c->device->stream), "a step")) return false;
    if (c->n_recordings == c->max_recordings) {
        c->max_recordings = c->max_recordings ? 2 * c->max_recordings : 32;
        c->recordings = mem_realloc(c->recordings, (size_t)c->max_recordings, sizeof *c->recordings);
    }
    s->n_rows = r.n_rows;
    s->n_logits = r.n_logits;
    s->graph_launched = false;
    const struct attention shape = attention_shape(c);
    attention_recorded_bounds(&shape, r.n_rows, r.n_rows, r.prompts ? r.n_rows : 0, (int32_t)c->limits.max_len, &r.bounds);
    cuda_upload_step_capture(c, s, &r.bounds);
    c->step = (struct cuda_step){ .records = true };
    c->recordings[c->n_recordings] = r;
    /* Relaxed: a kernel that no step has run yet is loaded while it is recorded. */
    return cuda_check(c->device, cudaStreamBeginCapture(c->device->stream, cudaStreamCaptureModeRelaxed), "recording a step");
}

/* A card without room for recordings computes all the same. */
static void go_without(struct cuda_ctx *c)
{
    (void)cudaGetLastError(); /* too little memory is no fault of the card */
    log_warn("steps are not recorded", "why=\"no GPU memory left for %d recordings; a lower --gpu-memory-utilization leaves some\"", c->n_recordings + 1);
    cuda_recordings_release(c);
    c->limits.max_graph_rows = 0;
}

static void finish_recording(struct cuda_ctx *c)
{
    struct cuda_recording *r = &c->recordings[c->n_recordings];
    cudaGraph_t            graph = NULL;
    size_t                 n_graph_nodes = 0;
    if (!cuda_check(c->device, cudaStreamEndCapture(c->device->stream, &graph), "recording a step")) return;
    if (cuda_check(c->device, cudaGraphGetNodes(graph, NULL, &n_graph_nodes), "recording a step") && c->n_recordings == 0)
        c->base.n_graph_nodes = (uint32_t)n_graph_nodes;
    cudaError_t e = cudaGraphInstantiate(&r->exec, graph, 0);
    if (e == cudaSuccess) {
        c->n_recordings++; /* to be released from now on */
        e = cudaGraphUpload(r->exec, c->device->stream); /* what it needs on the card it takes now, not at its first launch */
    }
    (void)cuda_check(c->device, cudaGraphDestroy(graph), "recording a step");
    if (e == cudaErrorMemoryAllocation) go_without(c);
    else (void)cuda_check(c->device, e, "recording a step");
}

void cuda_recordings_release(struct cuda_ctx *c)
{
    for (int32_t i = 0; i < c->n_recordings; i++) (void)cuda_check(c->device, cudaGraphExecDestroy(c->recordings[i].exec), "ending a recording");
    mem_free(c->recordings);
    c->recordings = NULL;
    c->n_recordings = c->max_recordings = 0;
    c->base.n_graph_nodes = 0;
}

/* ---- choosing ---------------------------------------------------------------------------------------------------- */

static bool has_prompts(const struct cuda_ctx *c, const struct kernel_step *s)
{
    for (int32_t i = 0; i < s->n_lists; i++)
        if (c->upload_step.lists[i].bounds.n_prefill > 0) return true;
    return false;
}

static bool lists_fit(const struct cuda_ctx *c, const struct kernel_step *s, const struct cuda_recording *r)
{
    for (int32_t i = 0; i < s->n_lists; i++)
        if (!attention_recordable(&r->bounds, &c->upload_step.lists[i].bounds)) return false;
    return true;
}

const struct cuda_recording *cuda_recording_for(const struct cuda_ctx *c, const struct kernel_step *s)
{
    const struct cuda_recording *best = NULL;
    if (c->n_recordings == 0 || s->eager || s->n_lists != (int32_t)c->limits.n_lists) return NULL;
    const bool prompts = has_prompts(c, s);
    for (int32_t i = 0; i < c->n_recordings; i++) {
        const struct cuda_recording *r = &c->recordings[i];
        if (r->prompts != prompts || r->n_rows < s->n_rows || r->n_logits < s->n_logits) continue;
        if (!best || r->n_rows < best->n_rows || (r->n_rows == best->n_rows && r->n_logits < best->n_logits)) best = r;
    }
    return best && lists_fit(c, s, best) ? best : NULL;
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

void cuda_submit(struct kernel_ctx *base)
{
    struct cuda_ctx        *c = cuda_ctx_of(base);
    const struct cuda_step *s = &c->step;
    if (s->records) finish_recording(c);
    else if (s->recording && cuda_check(c->device, cudaGraphLaunch(s->recording->exec, c->device->stream), "a step")) base->n_graph_steps++;
}
