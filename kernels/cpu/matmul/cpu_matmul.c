/* cpu_matmul.c - the op matmul of the CPU backends: how a call is split over the compute pool, and
 * which micro-kernels compute it.
 *
 * A call has two steps. First inputs are prepared (matmul_inputs.c). Then the work items of all
 * jobs run as one list: an item is a range of panels of one job and at most GEMM_ROWS of its rows;
 * on NUMA hosts the list is ordered by node, so that each node reads the panels that it wrote. Few
 * rows use gemv, which reads the packed weights directly; many rows share the dequantisation of
 * GEMM_K k, which stays in the L1 cache. Both accumulate in the same order; matmul_epilogue.c
 * stores the sums.
 * Thread: engine, compute pool. */
#include <string.h>

#include "kernels/cpu/matmul/matmul_job.h"
#include "shared/base/arith.h"
#include "shared/base/assert.h"

enum {
    ITEMS_PER_THREAD = 16,  /* enough items that a thread which starts late costs little */
    STREAMS_PER_THREAD = 2, /* the same for memory-bound products: each item is one stream, whose
                             * beginning is slow */
    GEMM_STEP = 24          /* rows of a chunk are a multiple: whole tiles on every backend */
};

_Static_assert(GEMV_PANELS % PREQUANTIZED_PANELS == 0 && GEMM_PANELS % PREQUANTIZED_PANELS == 0,
               "whole blocks of rounded rows");
_Static_assert((int)MATMUL_PREQUANTIZED_ALIGN == (int)BLOCK_K &&
                   sizeof(struct act_block) <= BLOCK_K * sizeof(float),
               "prequantised rows fit where f32 ones do");

/* ---- products ---- */

/* Returns how many panels of a skinny product are computed together. What gemv_int does once per
 * call to take several rows, such as arranging inputs, serves as many as there is room for. */
static size_t panels_per_call(const struct matmul_job *j)
{
    if (j->arithmetic != MATMUL_INT || j->a->n_rows == 1) return GEMV_PANELS;
    return SKINNY_ROWS_MAX / j->a->n_rows * GEMV_PANELS;
}

/* The microkernels for quantised and bf16 inputs take all rows at once. */
static void run_skinny(const struct matmul_run *r, const struct matmul_job *j, size_t panel0,
                       size_t n_panels)
{
    const struct weight *w = j->a->w;
    const size_t most = panels_per_call(j);
    float acc[SKINNY_ROWS_MAX * GEMV_PANELS * PANEL] __attribute__((aligned(64)));
    for (size_t p = panel0; p < panel0 + n_panels; p += most) {
        struct matmul_block b = {
            .job = j,
            .n_rows = j->a->n_rows,
            .panel0 = p,
            .n_panels = min_size(most, panel0 + n_panels - p),
            .acc = acc,
            .panel_step = PANEL,
        };
        b.row_step = b.n_panels * PANEL;
        if (j->arithmetic == MATMUL_INT)
            r->kernels->gemm->gemv_int(acc, j->x, j->x_stride, b.n_rows, w, p, b.n_panels);
        else if (j->arithmetic == MATMUL_BF16)
            r->kernels->bf16->gemv_bf16(acc, j->x, j->x_stride, b.n_rows, w, p, b.n_panels);
        else
            for (size_t i = 0; i < b.n_rows; i++)
                r->kernels->gemm->gemv(block_acc(&b, i, 0), (const float *)j->x + i * j->x_stride,
                                       w, p, b.n_panels);
        matmul_apply_epilogue(r->kernels, &b);
    }
}

static void gemm_f32(const struct matmul_run *r, const struct matmul_block *b, float *unpacked)
{
    const struct matmul_job *j = b->job;
    const struct weight *w = j->a->w;
    size_t panel_bytes = weight_layout_panel_bytes(w->layout, w->n_in);
    for (size_t k0 = 0; k0 < w->n_in; k0 += GEMM_K) {
        size_t n_k = min_size(GEMM_K, w->n_in - k0);
        for (size_t p = 0; p < b->n_panels; p++) {
            const float *panel = unpacked;
            if (w->layout == LAYOUT_F32)
                panel = (const float *)panel_at(w, b->panel0 + p, panel_bytes) + k0 * PANEL;
            else r->kernels->gemm->dequantize(unpacked, w, b->panel0 + p, k0, n_k);
            r->kernels->gemm->tile(block_acc(b, 0, p),
                                   (const float *)j->x + b->row0 * j->x_stride + k0, j->x_stride,
                                   b->n_rows, panel, n_k);
        }
    }
}

static void gemm_int(const struct matmul_run *r, const struct matmul_block *b,
                     struct unpacked_panel *unpacked)
{
    const struct matmul_job *j = b->job;
    const struct weight *w = j->a->w;
    const size_t n_in = round_up(w->n_in, BLOCK_K);
    for (size_t k0 = 0; k0 < n_in; k0 += UNPACK_K) {
        size_t n_k = min_size(UNPACK_K, n_in - k0);
        const struct act_block *x = (const struct act_block *)j->x + b->row0 * j->x_stride +
                                    k0 / BLOCK_K;
        for (size_t p = 0; p < b->n_panels; p += DOT_PANELS) {
            size_t n = min_size(DOT_PANELS, b->n_panels - p);
            for (size_t i = 0; i < n; i++)
                r->kernels->gemm->unpack_int(&unpacked[i], w, b->panel0 + p + i, k0, n_k);
            r->kernels->gemm->tile_int(block_acc(b, 0, p), x, j->x_stride, b->n_rows, unpacked, n,
                                       w->layout, n_k);
        }
    }
    for (size_t p = 0; p < b->n_panels && LAYOUTS[w->layout].group == 0; p++) {
        const float *scale = weight_layout_channel_scale(w, b->panel0 + p);
        float *acc = block_acc(b, 0, p);
        for (size_t i = 0; i < b->n_rows * PANEL; i++) acc[i] *= scale[i % PANEL];
    }
}

/* BF16 panels are read in place, for all k at once. */
static void gemm_bf16(const struct matmul_run *r, const struct matmul_block *b)
{
    const struct matmul_job *j = b->job;
    const struct weight *w = j->a->w;
    size_t panel_bytes = weight_layout_panel_bytes(w->layout, w->n_in);
    for (size_t k0 = 0; k0 < w->n_in; k0 += GEMM_K)
        for (size_t p = 0; p < b->n_panels; p += DOT_PANELS)
            r->kernels->bf16->tile_bf16(
                block_acc(b, 0, p), (const uint16_t *)j->x + b->row0 * j->x_stride + k0,
                j->x_stride, b->n_rows,
                (const uint32_t *)panel_at(w, b->panel0 + p, panel_bytes) + k0 / 2 * PANEL,
                panel_bytes / sizeof(uint32_t), min_size(DOT_PANELS, b->n_panels - p), NULL,
                min_size(GEMM_K, w->n_in - k0));
}

static void gemm_f8(const struct matmul_run *r, const struct matmul_block *b, uint32_t *pairs)
{
    const struct matmul_job *j = b->job;
    const struct weight *w = j->a->w;
    for (size_t k0 = 0; k0 < w->n_in; k0 += F8_BLOCK) {
        size_t n_k = min_size(F8_BLOCK, w->n_in - k0), stride = F8_BLOCK / 2 * PANEL;
        for (size_t p = 0; p < b->n_panels; p += DOT_PANELS) {
            size_t n = min_size(DOT_PANELS, b->n_panels - p);
            float scale[DOT_PANELS];
            for (size_t i = 0; i < n; i++)
                r->kernels->bf16->upconvert_bf16(pairs + i * stride, &scale[i], w,
                                                 b->panel0 + p + i, k0, n_k);
            r->kernels->bf16->tile_bf16(block_acc(b, 0, p),
                                        (const uint16_t *)j->x + b->row0 * j->x_stride + k0,
                                        j->x_stride, b->n_rows, pairs, stride, n, scale, n_k);
        }
    }
}

static void run_gemm(const struct matmul_run *r, const struct matmul_job *j, size_t row0,
                     size_t n_rows, size_t panel0, size_t n_panels, int thread)
{
    char *scratch = cpu_scratch(r->c, thread);
    float *acc = (float *)(scratch + MATMUL_UNPACK_BYTES);
    for (size_t p = panel0; p < panel0 + n_panels; p += GEMM_PANELS) {
        struct matmul_block b = {
            .job = j,
            .row0 = row0,
            .n_rows = n_rows,
            .panel0 = p,
            .n_panels = min_size(GEMM_PANELS, panel0 + n_panels - p),
            .acc = acc,
            .row_step = PANEL,
            .panel_step = n_rows * PANEL,
        };
        memset(acc, 0, b.n_panels * n_rows * PANEL * sizeof *acc);
        if (j->arithmetic == MATMUL_INT) gemm_int(r, &b, (struct unpacked_panel *)scratch);
        else if (j->arithmetic == MATMUL_F32) gemm_f32(r, &b, (float *)scratch);
        else if (j->a->w->layout == LAYOUT_F8) gemm_f8(r, &b, (uint32_t *)scratch);
        else gemm_bf16(r, &b);
        matmul_apply_epilogue(r->kernels, &b);
    }
}

static bool is_skinny(const struct matmul_run *r, const struct matmul_job *j)
{
    const size_t most = j->arithmetic == MATMUL_F32   ? GEMV_ROWS
                        : j->arithmetic == MATMUL_INT ? r->kernels->gemm->gemv_int_rows
                                                      : DOT_ROWS;
    return j->a->n_rows <= most;
}

/* Returns the first range that ends after the item. */
static size_t find_range(const struct matmul_run *r, size_t index)
{
    size_t low = 0, high = r->n_groups * r->n_jobs;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (r->range_end[mid] <= index) low = mid + 1;
        else high = mid;
    }
    return low;
}

/* Returns how many items of a job come before a group's share of it. Panels are divided among
 * groups exactly as weight_layout_pack divided them when it wrote them. */
static size_t items_before(const struct matmul_run *r, const struct matmul_job *j, size_t group)
{
    return (size_t)compute_pool_share(r->c->pool, (int)div_up(j->n_panels, j->panels_per_item),
                                      (int)group) *
           j->n_chunks;
}

static void run_item(void *arg, int index, int thread)
{
    const struct matmul_run *r = arg;
    size_t range = find_range(r, (size_t)index), group = range / r->n_jobs;
    const struct matmul_job *j = &r->jobs[range % r->n_jobs];
    size_t local = (size_t)index - (range ? r->range_end[range - 1] : 0) +
                   items_before(r, j, group);
    size_t row0 = local % j->n_chunks * j->rows_per_chunk,
           n_rows = min_size(j->rows_per_chunk, j->a->n_rows - row0);
    size_t panel0 = local / j->n_chunks * j->panels_per_item,
           n_panels = min_size(j->panels_per_item, j->n_panels - panel0);
    if (is_skinny(r, j)) run_skinny(r, j, panel0, n_panels);
    else run_gemm(r, j, row0, n_rows, panel0, n_panels, thread);
}

/* Returns how many rows an item of a job computes together. */
static size_t choose_rows_per_chunk(const struct matmul_run *r, const struct matmul_job *j)
{
    if (is_skinny(r, j)) return j->a->n_rows;
    size_t n_chunks = div_up(j->a->n_rows, GEMM_ROWS);
    return min_size(round_up(div_up(j->a->n_rows, n_chunks), GEMM_STEP), GEMM_ROWS);
}

/* Granularity of a work item in panels: what the microkernel takes, at least one gate/up pair, or
 * one block of quantised output. */
static size_t panels_per_step(const struct matmul_run *r, const struct matmul_job *j)
{
    if (!is_skinny(r, j)) return GEMM_PANELS;
    return j->arithmetic == MATMUL_F32 || j->y_arithmetic != MATMUL_F32 ? GEMV_PANELS : 2;
}

/* Chooses the panels per item, so that all jobs together give each thread about ITEMS_PER_THREAD or
 * STREAMS_PER_THREAD items. */
static void plan_items(struct matmul_run *r)
{
    size_t units = 0, n_threads = (size_t)compute_pool_threads(r->c->pool);
    for (size_t i = 0; i < r->n_jobs; i++) units += r->jobs[i].n_panels * r->jobs[i].a->n_rows;
    for (size_t i = 0; i < r->n_jobs; i++) {
        struct matmul_job *j = &r->jobs[i];
        size_t parts = n_threads * (is_skinny(r, j) ? STREAMS_PER_THREAD : ITEMS_PER_THREAD);
        j->rows_per_chunk = choose_rows_per_chunk(r, j);
        j->n_chunks = div_up(j->a->n_rows, j->rows_per_chunk);
        j->panels_per_item = round_up(div_up(units, parts * j->rows_per_chunk),
                                      panels_per_step(r, j));
        if (j->panels_per_item > j->n_panels) j->panels_per_item = j->n_panels;
    }
    for (size_t g = 0; g < r->n_groups; g++)
        for (size_t i = 0; i < r->n_jobs; i++) {
            r->n_items += items_before(r, &r->jobs[i], g + 1) - items_before(r, &r->jobs[i], g);
            r->range_end[g * r->n_jobs + i] = r->n_items;
        }
}

static struct matmul_job make_job(const struct kernel_ctx *c, const struct matmul_args *a)
{
    struct matmul_job j = {
        .a = a,
        .arithmetic = matmul_arithmetic_of(c, a->w),
        .n_panels = panel_count(a->w),
        .y_row_bytes = a->y_stride * sizeof(float),
    };
    ASSERT(a->epilogue != MATMUL_SILU_MUL || a->w->paired);
    if (!a->quantize_for) return j;
    ASSERT(a->epilogue == MATMUL_SILU_MUL && a->quantize_for->n_in == a->w->n_out / 2);
    j.y_arithmetic = matmul_arithmetic_of(c, a->quantize_for);
    j.y_row_bytes = matmul_row_bytes(j.y_arithmetic, a->quantize_for->n_in);
    return j;
}

static void run_jobs(struct kernel_ctx *c, const struct matmul_args *args, size_t n)
{
    struct matmul_tables *t = cpu_ctx_of(c)->acts;
    struct matmul_run r = {
        .c = c,
        .kernels = cpu_microkernels_of(c),
        .jobs = t->jobs,
        .inputs = t->inputs,
        .range_end = t->range_end,
        .n_groups = (size_t)compute_pool_groups(c->pool),
    };
    for (size_t i = 0; i < n; i++) {
        const struct matmul_args *a = &args[i];
        if (a->n_rows == 0) continue;
        r.jobs[r.n_jobs++] = make_job(c, a);
    }
    if (r.n_jobs == 0) return;
    matmul_prepare_inputs(&r);
    plan_items(&r);
    compute_pool_run(c->pool, (int)r.n_items, run_item, &r);
}

void cpu_matmul(struct kernel_ctx *c, const struct matmul_args *jobs, size_t n_jobs)
{
    for (size_t i = 0; i < n_jobs; i += JOBS_PER_RUN)
        run_jobs(c, jobs + i, min_size(JOBS_PER_RUN, n_jobs - i));
}
