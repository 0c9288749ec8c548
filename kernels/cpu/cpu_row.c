/* cpu_row.c - the slots of the cpu rows: how a call is split over the compute pool.
 *
 * Work items are made of whole rows, panels, or (sequence, kv head, queries); sizes of items depend on the number of
 * threads, results do not (cpu_row.h). Calls too small to be worth waking a thread run on the caller. Thread: engine. */
#include "kernels/cpu/cpu_row.h"

#include <math.h>
#include <string.h>

enum {
    ELEMENTS_PER_ITEM = 16384, /* of the element-wise kernels: some 5 us of work */
    ITEMS_PER_THREAD = 4       /* enough pieces that a thread which comes late costs little */
};

static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
static size_t div_up(size_t n, size_t by) { return (n + by - 1) / by; }

/* Units per item: at most `most`, fewer when there would not be enough items for all threads. */
static size_t item_size(const struct kernel_ctx *c, size_t n_units, size_t most)
{
    size_t even = n_units / (size_t)(compute_pool_threads(c->pool) * ITEMS_PER_THREAD);
    return even < 1 ? 1 : min_size(even, most);
}

/* ---- matmul ---- */

struct matmul_job {
    struct kernel_ctx       *c;
    const struct cpu_loops  *loops;
    const struct weight     *w;
    const float             *x, *bias;
    float                   *y;
    size_t                   y_stride, n_rows, n_chunks, panels_per_item;
};

/* One row of one panel, chain sums in `acc`, to y. */
static void store_panel(const struct matmul_job *job, size_t row, size_t i_panel, const float *acc)
{
    size_t       n = min_size(PANEL, job->w->n_out - i_panel * PANEL);
    float       *y = job->y + row * job->y_stride + i_panel * PANEL;
    const float *bias = job->bias ? job->bias + i_panel * PANEL : NULL;
    if (bias)
        for (size_t j = 0; j < n; j++) y[j] = acc[j] + bias[j];
    else
        memcpy(y, acc, n * sizeof *y);
}

static void matmul_few_rows(void *arg, int index, int thread)
{
    (void)thread;
    const struct matmul_job *job = arg;
    size_t i_panel = (size_t)index * job->panels_per_item;
    size_t n = min_size(job->panels_per_item, panel_count(job->w) - i_panel);
    float  acc[GEMV_PANELS * PANEL] __attribute__((aligned(64)));
    for (size_t i = 0; i < job->n_rows; i++) {
        job->loops->gemv(acc, job->x + i * job->w->n_in, job->w, i_panel, n);
        for (size_t p = 0; p < n; p++) store_panel(job, i, i_panel + p, acc + p * PANEL);
    }
}

static void matmul_rows(void *arg, int index, int thread)
{
    const struct matmul_job *job = arg;
    const struct weight     *w = job->w;
    size_t row0 = (size_t)index % job->n_chunks * GEMM_ROWS, n_rows = min_size(GEMM_ROWS, job->n_rows - row0);
    size_t i_panel = (size_t)index / job->n_chunks * job->panels_per_item;
    size_t n_panels = min_size(job->panels_per_item, panel_count(w) - i_panel);
    float *wide = cpu_scratch(job->c, thread), *acc = wide + GEMM_K * PANEL;
    size_t bytes_per_panel = panel_bytes(w->dtype, w->n_in);
    memset(acc, 0, n_panels * n_rows * PANEL * sizeof *acc);
    for (size_t k0 = 0; k0 < w->n_in; k0 += GEMM_K) {
        size_t n_k = min_size(GEMM_K, w->n_in - k0);
        for (size_t p = 0; p < n_panels; p++) {
            const float *panel = wide;
            if (w->dtype == DTYPE_F32)
                panel = (const float *)panel_at(w, i_panel + p, bytes_per_panel) + k0 * PANEL;
            else
                job->loops->widen(wide, w, i_panel + p, k0, n_k);
            job->loops->tile(acc + p * n_rows * PANEL, job->x + row0 * w->n_in + k0, w->n_in, n_rows, panel, n_k);
        }
    }
    for (size_t i = 0; i < n_rows; i++)
        for (size_t p = 0; p < n_panels; p++)
            store_panel(job, row0 + i, i_panel + p, acc + (p * n_rows + i) * PANEL);
}

void cpu_matmul(struct kernel_ctx *c, float *y, size_t y_stride, const float *x, size_t n_rows, const struct weight *w,
                const float *bias)
{
    if (n_rows == 0) return;
    bool   few = n_rows <= GEMV_ROWS;
    size_t n_panels = panel_count(w), n_chunks = div_up(n_rows, GEMM_ROWS);
    struct matmul_job job = { .c = c, .loops = cpu_loops_of(c), .w = w, .x = x, .bias = bias, .y = y, .y_stride = y_stride,
                              .n_rows = n_rows, .n_chunks = n_chunks };
    job.panels_per_item = item_size(c, n_panels * n_chunks, few ? GEMV_PANELS : GEMM_PANELS);
    size_t n_items = div_up(n_panels, job.panels_per_item) * n_chunks;
    compute_pool_run(c->pool, (int)n_items, few ? matmul_few_rows : matmul_rows, &job);
}

/* ---- kernels over rows ---- */

struct rows_job {
    const struct cpu_loops *loops;
    float                  *out;
    const float            *x, *y;
    const int32_t          *pos;
    size_t                  n_rows, rows_per_item, n, x_stride, n_heads, head_dim, rot_dim;
    float                   eps;
    bool                    interleaved;
};

/* Run fn on items of job->rows_per_item rows, `elements` floats each. */
static void run_rows(struct kernel_ctx *c, struct rows_job *job, size_t elements, void (*fn)(void *, int, int))
{
    job->loops = cpu_loops_of(c);
    job->rows_per_item = elements >= ELEMENTS_PER_ITEM ? 1 : ELEMENTS_PER_ITEM / (elements ? elements : 1);
    compute_pool_run(c->pool, (int)div_up(job->n_rows, job->rows_per_item), fn, job);
}

static void rows_of_item(const struct rows_job *job, int index, size_t *begin, size_t *end)
{
    *begin = (size_t)index * job->rows_per_item;
    *end = min_size(*begin + job->rows_per_item, job->n_rows);
}

static void rms_norm_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct rows_job *job = arg;
    size_t begin, end;
    rows_of_item(job, index, &begin, &end);
    for (size_t i = begin; i < end; i++)
        job->loops->rms_norm(job->out + i * job->n, job->x + i * job->n, job->y, job->n, job->eps);
}

void cpu_rms_norm(struct kernel_ctx *c, float *y, const float *x, const float *weight, size_t n_rows, size_t n, float eps)
{
    struct rows_job job = { .out = y, .x = x, .y = weight, .n_rows = n_rows, .n = n, .eps = eps };
    run_rows(c, &job, n, rms_norm_item);
}

static void add_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct rows_job *job = arg;
    size_t begin, end;
    rows_of_item(job, index, &begin, &end);
    job->loops->add(job->out + begin, job->y + begin, end - begin);
}

void cpu_add(struct kernel_ctx *c, float *x, const float *y, size_t n)
{
    struct rows_job job = { .out = x, .y = y, .n_rows = n }; /* a row is one element */
    run_rows(c, &job, 1, add_item);
}

static void silu_mul_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct rows_job *job = arg;
    size_t begin, end;
    rows_of_item(job, index, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const float *gate = job->x + i * 2 * job->n;
        job->loops->silu_mul(job->out + i * job->n, gate, gate + job->n, job->n);
    }
}

void cpu_silu_mul(struct kernel_ctx *c, float *out, const float *gate_up, size_t n_rows, size_t n)
{
    struct rows_job job = { .out = out, .x = gate_up, .n_rows = n_rows, .n = n };
    run_rows(c, &job, 4 * n, silu_mul_item); /* an exponential costs several plain elements */
}

static void rope_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct rows_job *job = arg;
    size_t begin, end;
    rows_of_item(job, index, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const float *cs = job->x + (size_t)job->pos[i] * job->rot_dim;
        for (size_t h = 0; h < job->n_heads; h++)
            job->loops->rope(job->out + i * job->x_stride + h * job->head_dim, cs, job->rot_dim, job->interleaved);
    }
}

void cpu_rope(struct kernel_ctx *c, float *x, size_t x_stride, size_t n_rows, size_t n_heads, size_t head_dim, size_t rot_dim,
              const float *cos_sin, const int32_t *pos, bool interleaved)
{
    struct rows_job job = { .out = x, .x = cos_sin, .pos = pos, .n_rows = n_rows, .x_stride = x_stride, .n_heads = n_heads,
                            .head_dim = head_dim, .rot_dim = rot_dim, .interleaved = interleaved };
    run_rows(c, &job, n_heads * rot_dim, rope_item);
}

static void log_sum_exp_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct rows_job *job = arg;
    size_t begin, end;
    rows_of_item(job, index, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const float *x = job->x + i * job->x_stride;
        float        max = job->loops->max(x, job->n);
        double       sum = 0;
        if (max == -INFINITY) { /* exp(x - max) would be NaN; log of 0 is what it means */
            job->out[i] = max;
            continue;
        }
        for (size_t j = 0; j < job->n; j += LSE_CHUNK)
            sum += (double)job->loops->sum_exp(x + j, max, min_size(LSE_CHUNK, job->n - j));
        job->out[i] = (float)((double)max + log(sum));
    }
}

void cpu_log_sum_exp(struct kernel_ctx *c, float *lse, const float *x, size_t x_stride, size_t n_rows, size_t n)
{
    struct rows_job job = { .out = lse, .x = x, .n_rows = n_rows, .n = n, .x_stride = x_stride };
    run_rows(c, &job, 4 * n, log_sum_exp_item);
}
