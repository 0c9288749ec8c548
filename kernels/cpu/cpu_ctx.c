/* cpu_ctx.c - the context of the CPU backends, and the ops tables that they share.
 *
 * Ops compute where the host writes and have finished when they return, so a step needs no upload,
 * no submission and no graph. Life cycle: cpu_ctx_create .. cpu_ctx_free.
 * Thread: loading thread; engine afterwards. */
#include "kernels/cpu/attention/attention.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/weights/weight_layout.h"
#include "kernels/host/pages.h"
#include "shared/base/arith.h"
#include "shared/base/assert.h"
#include "shared/base/mem.h"

/* ---- context ---- */

/* Scratch of one thread, enough for every op. */
static size_t scratch_bytes(void)
{
    size_t matmul = MATMUL_SCRATCH_BYTES, attention = attention_scratch_bytes();
    return round_up(matmul > attention ? matmul : attention, CACHE_LINE);
}

/* Pages that no call is large enough for stay untouched. */
static void *map_pages(size_t bytes) { return pages_map(pages_round(bytes)); }

enum status cpu_ctx_create(const struct kernel_backend *backend, const struct kernel_options *o,
                           struct kernel_ctx **out, struct err *err)
{
    struct compute_pool *pool;
    TRY(compute_pool_create(o->n_threads, &pool, err));
    struct cpu_ctx *c = MEM_NEW(struct cpu_ctx);
    kernel_ctx_init(&c->base, backend, o);
    c->base.pool = pool;
    c->scratch_bytes_per_thread = scratch_bytes();
    c->scratch = map_pages(c->scratch_bytes_per_thread * (size_t)o->n_threads);
    c->attn = map_pages(attention_workspace_bytes(o->n_threads));
    enum status st = device_open("cpu", &c->base.device, err);
    if (st == OK && (!c->scratch || !c->attn || cpu_ctx_reserve(&c->base, 0, 0) != OK))
        st = err_set(err, ERR_NOMEM, "no memory for the tables of the kernels");
    if (st == OK) *out = &c->base;
    else cpu_ctx_free(&c->base);
    return st;
}

void cpu_ctx_free(struct kernel_ctx *base)
{
    struct cpu_ctx *c = cpu_ctx_of(base);
    const int n_threads = compute_pool_threads(base->pool);
    pages_unmap(c->scratch, pages_round(c->scratch_bytes_per_thread * (size_t)n_threads));
    pages_unmap(c->attn, pages_round(attention_workspace_bytes(n_threads)));
    compute_pool_free(base->pool);
    pages_unmap(c->acts, c->acts_bytes);
    device_close(base->device);
    mem_free(c);
}

enum status cpu_ctx_reserve(struct kernel_ctx *base, size_t n_rows, size_t n_in)
{
    struct cpu_ctx *c = cpu_ctx_of(base);
    size_t bytes = matmul_acts_bytes(n_rows, n_in);
    if (bytes <= c->acts_bytes) return OK;
    bytes = pages_round(bytes);
    void *acts = bytes ? pages_map(bytes) : NULL; /* untouched as long as no step is that large */
    if (!acts) return ERR_NOMEM;
    pages_unmap(c->acts, c->acts_bytes);
    c->acts = acts;
    c->acts_bytes = bytes;
    return OK;
}

/* ---- weights ---- */

/* Weights are in place when they are packed. */
static enum status finish(struct kernel_ctx *c, struct weight_times *out, struct err *err)
{
    (void)c, (void)err;
    *out = (struct weight_times){ 0 };
    return OK;
}

/* Side by side, so that huge pages fit. Each weight then owns its pages and releases them itself,
 * as when a mapped copy takes their place; the arena only has what no weight took. */
static enum status arena_create(struct kernel_ctx *c, size_t bytes, struct weight_arena *out,
                                struct err *err)
{
    (void)c, (void)err;
    *out = (struct weight_arena){ .at = bytes ? pages_map(pages_round(bytes)) : NULL };
    out->left = out->at ? bytes : 0;
    return OK;
}

static void arena_free(struct kernel_ctx *c, struct weight_arena *a)
{
    (void)c;
    pages_unmap(a->at, a->left);
    *a = (struct weight_arena){ 0 };
}

const struct weight_ops cpu_weight_ops = {
    .plan = weight_layout_plan,
    .pack = weight_layout_pack,
    .finish = finish,
    .release = weight_layout_release,
    .arena_create = arena_create,
    .arena_free = arena_free,
};

/* ---- steps ---- */

static enum status prepare(struct kernel_ctx *c, const struct kernel_limits *l, struct err *err)
{
    (void)c, (void)l, (void)err;
    return OK;
}

static void upload(struct kernel_ctx *c, struct kernel_step *s) { (void)c, (void)s; }

static bool begin_capture(struct kernel_ctx *c, int32_t i, struct kernel_step *s)
{
    (void)c, (void)i, (void)s;
    return false;
}

static void drop_graphs(struct kernel_ctx *c, uint32_t max_rows, uint32_t max_pass_rows)
{
    (void)c, (void)max_rows, (void)max_pass_rows;
}

static void submit(struct kernel_ctx *c) { (void)c; }

/* upload never sets `sampled`: these four are not called. */
static void sample(struct kernel_ctx *c, const float *logits, size_t n_vocab)
{
    (void)c, (void)logits, (void)n_vocab;
    assert_fail("CPU backends sample on the host", __FILE__, __LINE__, __func__);
}

static bool is_sampled(struct kernel_ctx *c, int parity)
{
    (void)c, (void)parity;
    assert_fail("CPU backends sample on the host", __FILE__, __LINE__, __func__);
}

static void fetch(struct kernel_ctx *c, int parity, struct token_logprobs *out, size_t n)
{
    (void)c, (void)parity, (void)out, (void)n;
    assert_fail("CPU backends sample on the host", __FILE__, __LINE__, __func__);
}

static const int32_t *fetch_passes(struct kernel_ctx *c, int parity)
{
    (void)c, (void)parity;
    assert_fail("CPU backends sample on the host", __FILE__, __LINE__, __func__);
}

const struct step_ops cpu_step_ops = {
    .prepare = prepare,
    .upload = upload,
    .begin_capture = begin_capture,
    .drop_graphs = drop_graphs,
    .submit = submit,
    .sample = sample,
    .is_sampled = is_sampled,
    .fetch = fetch,
    .fetch_passes = fetch_passes,
};

/* ---- arithmetic ---- */

const struct kernel_ops cpu_ops = {
    .embed = cpu_embed,
    .matmul = cpu_matmul,
    .rms_norm = cpu_rms_norm,
    .add = cpu_add,
    .copy_rows = cpu_copy_rows,
    .rope = cpu_rope,
    .kv_append = cpu_kv_append,
    .attention = cpu_attention,
    .route = cpu_route,
    .router = cpu_router,
    .combine = cpu_combine,
    .experts = cpu_experts,
    .expert_slots = cpu_expert_slots,
};
