/* decoder.c - a step of the decoder: embedding, layers, head.
 *
 * Thread: engine. */
#include "shared/model/decoder.h"

#include <time.h>

#include "shared/base/arith.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/model/decoder_state.h"

/* ---- step ---- */

/* A rank without rows only takes part in what sparse layers exchange. */
void decoder_layer_forward(const struct decoder_step *s, struct decoder *d, uint32_t i)
{
    const struct decoder_layer *l = &d->layers[i];
    if (s->n_rows == 0 && !model_layer_is_sparse(&s->m->config, i)) return;
    if (s->n_rows > 0)
        l->attention->ops->forward(s, l->attention, d->attention_work, l->attn_norm, i);
    l->ffn->ops->forward(s, l->ffn, l->ffn_work, l->ffn_norm);
}

/* Computes logits of the rows that want them: of a prompt chunk that is at most its last row. */
void decoder_head_forward(const struct decoder_step *s, const struct decoder *d,
                          const struct kernel_step *step, const struct weight *w, const float *norm,
                          float *logits)
{
    const struct model_config *c = &s->m->config;
    struct kernel_ctx *k = s->m->kernels;
    const struct share_cut *cut = &d->head_cut;
    const struct matmul_args head = {
        .w = w,
        .x = s->x,
        .x_stride = c->hidden,
        .x_rows = step->logit_rows,
        .norm = norm,
        .norm_eps = c->rms_eps,
        .n_rows = (size_t)step->n_logits,
        .y = logits + cut->mine.first,
        .y_stride = c->n_vocab,
    };
    if (cut->mine.n > 0 && decoder_goes_on(s)) k->ops->matmul(k, &head, 1); /* [n_logits, V] */
    decoder_gather(s, logits, c->n_vocab, head.y, c->n_vocab, head.n_rows, cut);
}

struct decoder_step decoder_step_of(struct model *m, const struct model_batch *b,
                                    const struct kernel_step *step, float *x)
{
    const struct decoder *d = m->decoder;
    return (struct decoder_step){
        .m = m,
        .b = b,
        .pos = step->pos,
        .all = d->lists[0],
        .cos_sin = d->cos_sin,
        .x = x,
        .n_rows = (size_t)step->n_rows,
        .n_real = step->n_real,
        .exchange_fault = &m->exchange_fault,
        .gather_fault = &m->gather_fault,
    };
}

/* Calls all ops of an uploaded step. */
static void compute(struct model *m, const struct model_batch *b, const struct kernel_step *step)
{
    struct decoder *d = m->decoder;
    struct kernel_ctx *k = m->kernels;
    const struct decoder_step s = decoder_step_of(m, b, step, d->x);
    /* [R, H] */
    if (s.n_rows > 0) k->ops->embed(k, d->x, &d->embed, step->ids, s.n_rows);
    for (uint32_t i = 0; i < m->config.n_layers; i++) decoder_layer_forward(&s, d, i);
    if (step->n_logits > 0)
        decoder_head_forward(&s, d, step, d->head.data ? &d->head : &d->embed, d->final_norm,
                             d->logits ? d->logits : b->logits);
}

/* Waits for the step: once it returns, its KV blocks may be published, sent or freed. */
static void wait_for_logits(const struct model *m, const struct model_batch *b)
{
    struct device *device = m->kernels->device;
    const float *logits = m->decoder->logits;
    if (logits && b->logits && b->n_logits > 0)
        device_download(device, b->logits, logits,
                        (size_t)b->n_logits * m->config.n_vocab * sizeof *logits);
    else device_wait(device);
}

/* On a GPU, waits for the step's exchanges before its results are used: on the CPU each call has
 * said how it ended. */
static void end_exchanges(struct model *m)
{
    struct err *fault = &m->exchange_fault, *gather = &m->gather_fault;
    if (m->kernels->device->is_host) return;
    if (m->gather.ep && gather->code == OK) gather->code = ep_wait(m->gather.ep, gather);
    if (m->ep && fault->code == OK) fault->code = ep_wait(m->ep, fault);
}

/* Does the device go on to the next step by itself? Then decoder_fetch finds out how the exchanges
 * of this one ended. */
static bool runs_ahead(const struct model *m, const struct kernel_step *step)
{
    return step->sampled && (!m->ep || ep_is_capturable(m->ep)) &&
           (!m->gather.ep || ep_is_capturable(m->gather.ep));
}

bool decoder_end(struct model *m, const struct model_batch *b, const struct kernel_step *step)
{
    struct kernel_ctx *k = m->kernels;
    if (!runs_ahead(m, step)) end_exchanges(m);
    if (m->exchange_fault.code != OK || m->gather_fault.code != OK) return false;
    if (step->sampled) k->step_ops->sample(k, m->decoder->logits, m->config.n_vocab);
    else wait_for_logits(m, b);
    return step->sampled;
}

/* Of a captured step, so that a rank of a node routes as many rows as the busiest may have. */
static int32_t least_rows(const struct model *m, const struct model_batch *b)
{
    return b->group_rows ? (int32_t)((b->group_rows - 1) * m->share.tp_size + 1) : 0;
}

struct kernel_step decoder_begin(struct model *m, const struct model_batch *b)
{
    struct decoder *d = m->decoder;
    struct kernel_step step = {
        .n_rows = b->n_rows,
        .n_logits = b->n_logits,
        .ids = b->ids,
        .pos = b->pos,
        .logit_rows = b->logit_rows,
        .lists = d->lists,
        .n_lists = 1,
        .block_tokens = (int32_t)b->block_tokens,
        .sample_requests = b->sample_requests,
        .parity = b->parity,
        .moves = b->moves,
        .n_moves = b->n_moves,
        .least_rows = least_rows(m, b),
        .eager = b->eager,
    };
    m->exchange_fault.code = m->gather_fault.code = OK;
    d->lists[0] = (struct attn_list){ .seqs = b->seqs, .n_seqs = b->n_seqs };
    step.n_lists += d->attention_work->ops->lists(m, b, d->attention_work, d->lists + 1);
    return step;
}

bool decoder_forward(struct model *m, const struct model_batch *b)
{
    struct kernel_ctx *k = m->kernels;
    struct kernel_step step = decoder_begin(m, b);
    k->step_ops->upload(k, &step);
    m->n_step_rows = (uint32_t)step.n_rows;
    if (device_fault(k->device, NULL) != OK) return false; /* nothing was submitted */
    if (!step.graph_launched) compute(m, b, &step);
    k->step_ops->submit(k);
    return decoder_end(m, b, &step);
}

enum { LOOK_NS = 20000 }; /* between two looks at a step */

/* Waits until the device has come to the end of a step, which may be waiting for other ranks
 * meanwhile: who waits is not stuck. LIMIT: a GPU that hangs by itself looks like one that waits
 * for other ranks, until their deadline. */
static void await_step(const struct model *m, int parity)
{
    const struct timespec pause = { .tv_nsec = LOOK_NS };
    uint64_t *progress = (m->gather.ep ? m->gather.ep : m->ep)->config.progress;
    for (uint64_t told_ms = clock_ms(); !m->kernels->step_ops->is_sampled(m->kernels, parity);) {
        nanosleep(&pause, NULL);
        if (clock_ms() < told_ms + EP_PROGRESS_MS) continue;
        told_ms = clock_ms();
        if (progress) __atomic_fetch_add(progress, 1, __ATOMIC_RELAXED);
    }
}

static bool exchanges_by_itself(const struct model *m) { return m->ep && ep_is_capturable(m->ep); }

static void find_faults(struct model *m)
{
    struct err *fault = &m->exchange_fault, *gather = &m->gather_fault;
    if (exchanges_by_itself(m)) fault->code = ep_found(m->ep, fault);
    if (m->gather.ep) gather->code = ep_found(m->gather.ep, gather);
}

void decoder_fetch(struct model *m, int parity, struct token_logprobs *out, uint32_t n)
{
    if (exchanges_by_itself(m) || m->gather.ep) await_step(m, parity);
    m->kernels->step_ops->fetch(m->kernels, parity, out, n);
    find_faults(m);
}

const int32_t *decoder_fetch_drafts(struct model *m, int parity)
{
    if (exchanges_by_itself(m) || m->gather.ep) await_step(m, parity);
    const int32_t *kept = m->kernels->step_ops->fetch_passes(m->kernels, parity);
    find_faults(m);
    return kept;
}

/* ---- before the first step ---- */

/* Longer steps compute for longer than their kernels take to launch; and so, behind a step, do
 * passes of one layer behind longer ones. */
enum { GRAPH_ROWS_MAX = 512, PASS_GRAPH_ROWS_MAX = 128 };

/* Rows of the largest captured step: every kind computes it in one piece. */
static uint32_t graph_rows_max(const struct model *m)
{
    const struct decoder *d = m->decoder;
    size_t n = d->attention_work->ops->rows_at_once(m);
    for (int i = 0; i < FFN_KINDS; i++) {
        const struct ffn_work *w = d->ffn_works[i];
        const size_t rows = w ? w->ops->rows_at_once(m) : n;
        if (rows < n) n = rows;
    }
    return n < GRAPH_ROWS_MAX ? (uint32_t)n : GRAPH_ROWS_MAX;
}

static bool capture_graph(struct model *m, int32_t i)
{
    struct decoder *d = m->decoder;
    struct attention_work *work = d->attention_work;
    struct kernel_ctx *k = m->kernels;
    struct model_batch b = {
        .kv = d->prepared.kv,
        .n_blocks = d->prepared.n_blocks,
        .block_tokens = d->prepared.block_tokens,
    };
    struct kernel_step s = {
        .lists = d->lists,
        .n_lists = 1,
        .block_tokens = (int32_t)b.block_tokens,
    };
    d->lists[0] = (struct attn_list){ .n_seqs = 1 };
    s.n_lists += work->ops->capture_lists(work, d->lists + 1);
    if (!k->step_ops->begin_capture(k, i, &s)) return false;
    b.group_rows = (uint32_t)model_routed_rows_max(m, (size_t)s.n_rows);
    work->ops->capture_rows(work, (size_t)s.n_rows);
    if (s.program == KERNEL_STEP) compute(m, &b, &s);
    else decoder_draft_capture(m, &b, &s);
    k->step_ops->submit(k);
    return m->exchange_fault.code == OK && m->gather_fault.code == OK;
}

/* Can steps be captured as they are computed now? */
static bool is_capturable(const struct model *m)
{
    const bool shares_experts = m->share.ep_size > 1 && m->config.moe.n_experts > 0;
    if (m->decoder->max_graph_rows == 0) return false;
    if (m->share.tp_size > 1 && !(m->gather.ep && ep_is_capturable(m->gather.ep))) return false;
    return m->ep ? ep_is_capturable(m->ep) : !shares_experts;
}

/* Which may take long: who captures is not stuck. */
static void capture_graphs(struct model *m)
{
    const struct ep *ep = m->ep ? m->ep : m->gather.ep;
    int32_t n = 0;
    m->exchange_fault.code = m->gather_fault.code = OK;
    for (; capture_graph(m, n); n++)
        if (ep && ep->config.progress) __atomic_fetch_add(ep->config.progress, 1, __ATOMIC_RELAXED);
    m->n_captured = m->kernels->n_graph_nodes > 0 ? (uint32_t)n : 0; /* none: no room */
}

/* Returns how many rows captured passes have at most, of captured steps of up to max_rows. LIMIT:
 * ranks launch their passes kernel by kernel. */
static uint32_t pass_graph_rows(const struct model *m, uint32_t max_rows)
{
    if (m->ep || m->share.tp_size > 1) return 0;
    const uint32_t most = m->max_draft_rows < PASS_GRAPH_ROWS_MAX ? m->max_draft_rows
                                                                  : PASS_GRAPH_ROWS_MAX;
    return max_rows < most ? max_rows : most;
}

static void drop_graphs(struct model *m, uint32_t max_rows)
{
    m->kernels->step_ops->drop_graphs(m->kernels, max_rows, pass_graph_rows(m, max_rows));
    m->n_captured = 0;
}

void decoder_capture_again(struct model *m)
{
    const struct decoder *d = m->decoder;
    const uint64_t t0_ms = clock_ms();
    if (d->max_graph_rows == 0) return; /* nothing was ever captured */
    drop_graphs(m, is_capturable(m) ? d->max_graph_rows : 0);
    if (!is_capturable(m)) return;
    capture_graphs(m);
    if (m->exchange_fault.code != OK || m->gather_fault.code != OK)
        drop_graphs(m, 0); /* the next step finds the fault, too */
    else if (m->n_captured > 0)
        log_info("steps captured", "graphs=%u launches=%u after_ms=%llu", m->n_captured,
                 m->kernels->n_graph_nodes, (unsigned long long)(clock_ms() - t0_ms));
}

enum status decoder_prepare(struct model *m, const struct model_prepare_args *s, struct err *err)
{
    struct kernel_ctx *k = m->kernels;
    struct decoder *d = m->decoder;
    struct kernel_limits l = {
        .max_rows = m->max_rows,
        .max_logits = m->max_logits,
        .max_len = m->max_len,
        .n_vocab = m->config.n_vocab,
        .block_tokens = s->block_tokens,
        .max_seqs = s->max_seqs,
        .n_heads = (uint32_t)share_heads(&m->share, m->config.n_heads).n,
    };
    d->prepared = *s;
    d->max_graph_rows = s->capture_graphs ? graph_rows_max(m) : 0;
    l.n_passes = decoder_n_passes(m);
    l.max_graph_rows = is_capturable(m) ? d->max_graph_rows : 0;
    l.max_pass_graph_rows = pass_graph_rows(m, l.max_graph_rows);
    d->attention_work->ops->limits(m, &l);
    TRY(k->step_ops->prepare(k, &l, err));
    if (l.max_graph_rows > 0) capture_graphs(m);
    return device_fault(k->device, err);
}

/* ---- for the halves of a layer ---- */

struct kv_layer decoder_kv_layer(const struct decoder_step *s, uint32_t i_layer)
{
    struct kv_layout l;
    model_kv_layout(s->m, s->b->block_tokens, s->b->n_blocks, &l);
    return (struct kv_layer){
        .data = (char *)s->b->kv + kv_layout_offset(&l, i_layer, 0),
        .dtype = (enum dtype)l.dtype,
        .latent = l.latent != 0,
        .n_heads = (int32_t)l.n_kv_heads,
        .head_dim = (int32_t)l.head_dim,
        .block_tokens = (int32_t)l.block_tokens,
    };
}

void decoder_kv_written(const struct decoder_step *s, uint32_t i_layer)
{
    if (device_fault(s->m->kernels->device, NULL) != OK || !decoder_goes_on(s)) return;
    if (s->b->on_layer) s->b->on_layer(s->b->on_layer_arg, i_layer);
}

void decoder_gather(const struct decoder_step *s, float *y, size_t y_stride, const float *mine,
                    size_t mine_stride, size_t n_rows, const struct share_cut *cut)
{
    const struct model_gather *g = &s->m->gather;
    struct err *fault = s->gather_fault;
    size_t first[SHARE_RANKS_MAX + 1];
    if (!decoder_is_cut(s) || fault->code != OK) return;
    share_cut_places(&s->m->share, cut, first);
    fault->code = g->columns(g->arg, y, y_stride, mine, mine_stride, n_rows, first, fault);
}

void decoder_add_product(const struct decoder_step *s, struct matmul_args product,
                         const struct share_cut *cut)
{
    const size_t hidden = s->m->config.hidden;
    product.n_rows = s->n_rows;
    product.y = s->x + cut->mine.first;
    product.y_stride = hidden;
    product.epilogue = MATMUL_ADD;
    if (cut->mine.n > 0 && decoder_goes_on(s))
        s->m->kernels->ops->matmul(s->m->kernels, &product, 1); /* [R, H] */
    decoder_gather(s, s->x, hidden, product.y, hidden, s->n_rows, cut);
}

/* At most as many outputs as a rank can have of n: of units of 128, the larger ones. */
static size_t most_outputs(const struct model *m, size_t n)
{
    const size_t unit = 128;
    return min_size(n, div_up(div_up(n, unit), m->share.tp_size) * unit);
}

size_t model_gather_bytes(const struct model *m)
{
    const struct model_config *c = &m->config;
    const size_t heads = share_heads(&m->share, c->n_heads).n,
                 outputs = max_size(most_outputs(m, c->hidden), most_outputs(m, c->intermediate)),
                 wide = max_size(outputs, heads * (model_is_latent(c) ? c->mla.v : c->head_dim)),
                 rows = model_routed_rows_max(m, m->max_rows) * c->hidden,
                 logits = m->max_logits * most_outputs(m, c->n_vocab);
    return max_size(max_size(m->max_rows * wide, rows), logits) * sizeof(float);
}
