/* cpu_matmul.c - the matmul slot of the cpu rows: which arithmetic a product takes, and how a call is split over the compute pool.
 *
 * A call runs in two steps. First the inputs that are not used as they are (rounded to int8 or bf16, or gathered by x_rows) are
 * written to ctx->acts, each distinct input once. Then the work items of all jobs run as one list: an item is a range of panels of
 * one job and at most GEMM_ROWS of its rows. Few rows go through gemv, which reads the packed weights directly; many rows share a
 * widening of GEMM_K k's that stays in the first-level cache. Both carry the same chains.
 * Thread: engine, pool. */
#include <string.h>

#include "kernels/cpu/cpu_row.h"
#include "kernels/cpu/sizes.h"
#include "shared/base/assert.h"

enum {
    JOBS_PER_RUN = 1024,
    ITEMS_PER_THREAD = 16,      /* enough pieces that a thread which comes late costs little */
    STREAMS_PER_THREAD = 2,     /* the same for products that read memory: each piece is one stream, whose beginning is slow */
    GEMM_STEP = 24,             /* rows of a chunk are a multiple: whole tiles of every row of the table */
    ROWS_AHEAD = 12,            /* of y whose lines are asked for: as many as fit the ways of a cache when rows are a power of two apart */
    PREPARE_ELEMENTS = 4096     /* of input per work item of the first step: some microsecond of work */
};

enum arithmetic { BY_F32, BY_INT, BY_BF16 };

struct job {
    const struct matmul_args *a;
    enum arithmetic           by;
    const void               *x;          /* prepared rows: f32, act_block or bf16 */
    size_t                    x_stride;   /* in those elements */
    size_t                    n_panels, panels_per_item, n_chunks, rows_per_chunk;
    size_t                    item_end;   /* items of this job and all before it */
};

/* One input to prepare: rows of `a`, written to `to`. */
struct input {
    const struct matmul_args *a;
    enum arithmetic           by;
    void                     *to;
    size_t                    row_end; /* rows of this input and all before it */
};

struct run {
    struct kernel_ctx      *c;
    const struct cpu_loops *loops;
    struct job             *jobs;
    struct input           *inputs;
    size_t                  n_jobs, n_inputs, n_items, rows_per_item;
};

struct tables {
    struct job   jobs[JOBS_PER_RUN];
    struct input inputs[JOBS_PER_RUN];
};

size_t matmul_acts_bytes(size_t n_rows, size_t n_in)
{
    /* f32 rows that are gathered are the largest kind; every input starts on a cache line */
    return round_up(sizeof(struct tables), 64) + n_rows * round_up(n_in, FORM_BLOCK) * sizeof(float) + 64 * (size_t)JOBS_PER_RUN;
}

/* ---- step 1: inputs ---------------------------------------------------------------------------------------------- */

static enum arithmetic arithmetic_of(const struct kernel_ctx *c, const struct weight *w)
{
    if (c->activations == ACTIVATIONS_F32) return BY_F32;
    if (form_info(w->form)->integer) return BY_INT;
    bool bf16 = w->form == FORM_BF16 || w->form == FORM_F8;
    return bf16 && cpu_loops_of(c)->tile_bf16 ? BY_BF16 : BY_F32;
}

static size_t input_stride(enum arithmetic by, size_t n_in)
{
    return by == BY_INT ? act_blocks(n_in) : by == BY_BF16 ? act_bf16_stride(n_in) : n_in;
}

static size_t input_row_bytes(enum arithmetic by, size_t n_in)
{
    static const size_t element[] = { [BY_F32] = sizeof(float), [BY_INT] = sizeof(struct act_block), [BY_BF16] = sizeof(uint16_t) };
    return input_stride(by, n_in) * element[by];
}

static void prepare_rows(void *arg, int index, int thread)
{
    (void)thread;
    const struct run *r = arg;
    size_t row = (size_t)index * r->rows_per_item, i = 0;
    size_t end = min_size(row + r->rows_per_item, r->inputs[r->n_inputs - 1].row_end);
    while (r->inputs[i].row_end <= row) i++;
    for (; row < end; row++) {
        if (r->inputs[i].row_end <= row) i++;
        const struct input *in = &r->inputs[i];
        size_t       n_in = in->a->w->n_in, local = row - (i ? r->inputs[i - 1].row_end : 0);
        size_t       source = in->a->x_rows ? (size_t)in->a->x_rows[local] : local;
        const float *x = in->a->x + source * in->a->x_stride;
        char        *to = (char *)in->to + local * input_row_bytes(in->by, n_in);
        if (in->by == BY_INT) r->loops->quantize((struct act_block *)to, x, n_in);
        else if (in->by == BY_BF16) r->loops->round_bf16((uint16_t *)to, x, n_in);
        else memcpy(to, x, n_in * sizeof *x);
    }
}

/* Jobs of one input often follow each other (the parts of a stacked matrix, shared experts), so only the last one is compared. */
static bool same_input(const struct matmul_args *a, const struct matmul_args *b)
{
    return a->x == b->x && a->x_stride == b->x_stride && a->w->n_in == b->w->n_in && a->n_rows == b->n_rows && a->x_rows == b->x_rows;
}

static void plan_inputs(struct run *r)
{
    struct kernel_ctx *c = r->c;
    char  *at = (char *)c->acts + round_up(sizeof(struct tables), 64), *end = (char *)c->acts + c->acts_bytes;
    size_t rows = 0, elements = 0;
    for (size_t i = 0; i < r->n_jobs; i++) {
        struct job   *j = &r->jobs[i];
        struct input *last = r->n_inputs ? &r->inputs[r->n_inputs - 1] : NULL;
        j->x_stride = input_stride(j->by, j->a->w->n_in);
        if (j->by == BY_F32 && !j->a->x_rows) {
            j->x = j->a->x;
            j->x_stride = j->a->x_stride;
        } else if (last && last->by == j->by && same_input(last->a, j->a)) {
            j->x = last->to;
        } else {
            rows += j->a->n_rows;
            elements += j->a->n_rows * j->a->w->n_in;
            r->inputs[r->n_inputs++] = (struct input){ .a = j->a, .by = j->by, .to = at, .row_end = rows };
            j->x = at;
            at += round_up(j->a->n_rows * input_row_bytes(j->by, j->a->w->n_in), 64);
        }
    }
    ASSERT(at <= end); /* kernel_ctx_reserve */
    if (rows == 0) return;
    size_t per_row = elements / rows + 1;
    r->rows_per_item = per_row >= PREPARE_ELEMENTS ? 1 : PREPARE_ELEMENTS / per_row;
    compute_pool_run(c->pool, (int)div_up(rows, r->rows_per_item), prepare_rows, r);
}

/* ---- step 2: products -------------------------------------------------------------------------------------------- */

/* A block of results: chain sums of one job, rows from row0, panels from panel0. */
struct block {
    const struct job *job;
    size_t            row0, n_rows, panel0, n_panels;
    float            *acc;
    size_t            row_step, panel_step; /* floats in acc from one row, one panel to the next */
};

static float *sums(const struct block *b, size_t row, size_t p) { return b->acc + row * b->row_step + p * b->panel_step; }

static void finish_pair(const struct cpu_loops *loops, const struct block *b, size_t row, size_t p)
{
    const struct matmul_args *a = b->job->a;
    float *gate = sums(b, row, p), *up = sums(b, row, p + 1);
    size_t half = a->w->n_out / 2, at = (b->panel0 + p) / 2 * PANEL, n = min_size(PANEL, half - at);
    for (size_t j = 0; a->bias && j < n; j++) {
        gate[j] += a->bias[at + j];
        up[j] += a->bias[half + at + j];
    }
    loops->silu_mul(gate, gate, up, PANEL);
    memcpy(a->y + (b->row0 + row) * a->y_stride + at, gate, n * sizeof *gate);
}

/* n is PANEL, a constant, for all panels but a matrix's last. */
static inline __attribute__((always_inline)) void finish_lanes(float *y, const float *acc, const float *bias, enum matmul_then then, const size_t n)
{
    if (then == MATMUL_ADD)
        for (size_t j = 0; j < n; j++) y[j] += bias ? acc[j] + bias[j] : acc[j];
    else if (bias)
        for (size_t j = 0; j < n; j++) y[j] = acc[j] + bias[j];
    else
        memcpy(y, acc, n * sizeof *y);
}

static void finish_panel(const struct block *b, size_t row, size_t p)
{
    const struct matmul_args *a = b->job->a;
    const float *acc = sums(b, row, p);
    size_t at = (b->panel0 + p) * PANEL, n = min_size(PANEL, a->w->n_out - at);
    float *y = a->y + (b->row0 + row) * a->y_stride + at;
    const float *bias = a->bias ? a->bias + at : NULL;
    if (n == PANEL) finish_lanes(y, acc, bias, a->then, PANEL);
    else finish_lanes(y, acc, bias, a->then, n);
}

/* Asks for the lines of y that a row ends in: rows lie far apart, and no processor guesses which come next. */
static void expect_row(const struct block *b, size_t row)
{
    const struct matmul_args *a = b->job->a;
    size_t per_panel = a->then == MATMUL_SILU_MUL ? PANEL / 2 : PANEL;
    const float *y = a->y + (b->row0 + row) * a->y_stride + b->panel0 * per_panel;
    for (size_t p = 0; p < b->n_panels; p++) __builtin_prefetch(y + p * per_panel, 1);
}

static void finish(const struct cpu_loops *loops, const struct block *b)
{
    bool pairs = b->job->a->then == MATMUL_SILU_MUL;
    for (size_t i = 0; i < b->n_rows; i++) {
        if (i + ROWS_AHEAD < b->n_rows) expect_row(b, i + ROWS_AHEAD);
        for (size_t p = 0; p < b->n_panels; p += pairs ? 2 : 1) {
            if (pairs) finish_pair(loops, b, i, p);
            else finish_panel(b, i, p);
        }
    }
}

/* The loops of rounded inputs take all rows at once. */
static void few_rows(const struct run *r, const struct job *j, size_t panel0, size_t n_panels)
{
    const struct weight *w = j->a->w;
    float acc[DOT_ROWS * GEMV_PANELS * PANEL] __attribute__((aligned(64)));
    for (size_t p = panel0; p < panel0 + n_panels; p += GEMV_PANELS) {
        struct block b = { .job = j, .n_rows = j->a->n_rows, .panel0 = p, .n_panels = min_size(GEMV_PANELS, panel0 + n_panels - p), .acc = acc,
                           .panel_step = PANEL };
        b.row_step = b.n_panels * PANEL;
        if (j->by == BY_INT) r->loops->gemv_int(acc, j->x, j->x_stride, b.n_rows, w, p, b.n_panels);
        else if (j->by == BY_BF16) r->loops->gemv_bf16(acc, j->x, j->x_stride, b.n_rows, w, p, b.n_panels);
        else
            for (size_t i = 0; i < b.n_rows; i++) r->loops->gemv(sums(&b, i, 0), (const float *)j->x + i * j->x_stride, w, p, b.n_panels);
        finish(r->loops, &b);
    }
}

static void block_f32(const struct run *r, const struct block *b, float *wide)
{
    const struct job    *j = b->job;
    const struct weight *w = j->a->w;
    size_t panel_bytes = form_panel_bytes(w->form, w->n_in);
    for (size_t k0 = 0; k0 < w->n_in; k0 += GEMM_K) {
        size_t n_k = min_size(GEMM_K, w->n_in - k0);
        for (size_t p = 0; p < b->n_panels; p++) {
            const float *panel = wide;
            if (w->form == FORM_F32) panel = (const float *)panel_at(w, b->panel0 + p, panel_bytes) + k0 * PANEL;
            else r->loops->widen(wide, w, b->panel0 + p, k0, n_k);
            r->loops->tile(sums(b, 0, p), (const float *)j->x + b->row0 * j->x_stride + k0, j->x_stride, b->n_rows, panel, n_k);
        }
    }
}

static void block_int(const struct run *r, const struct block *b, struct wide_int *wide)
{
    const struct job    *j = b->job;
    const struct weight *w = j->a->w;
    const size_t         n_in = round_up(w->n_in, FORM_BLOCK);
    for (size_t k0 = 0; k0 < n_in; k0 += WIDE_K) {
        size_t n_k = min_size(WIDE_K, n_in - k0);
        const struct act_block *x = (const struct act_block *)j->x + b->row0 * j->x_stride + k0 / FORM_BLOCK;
        for (size_t p = 0; p < b->n_panels; p += DOT_PANELS) {
            size_t n = min_size(DOT_PANELS, b->n_panels - p);
            for (size_t i = 0; i < n; i++) r->loops->widen_int(&wide[i], w, b->panel0 + p + i, k0, n_k);
            r->loops->tile_int(sums(b, 0, p), x, j->x_stride, b->n_rows, wide, n, w->form, n_k);
        }
    }
    for (size_t p = 0; p < b->n_panels && FORMS[w->form].group == 0; p++) {
        const float *scale = form_scale(w, b->panel0 + p);
        float       *acc = sums(b, 0, p);
        for (size_t i = 0; i < b->n_rows * PANEL; i++) acc[i] *= scale[i % PANEL];
    }
}

/* BF16 panels are read where they lie, all k's in one go. */
static void block_bf16(const struct run *r, const struct block *b)
{
    const struct job    *j = b->job;
    const struct weight *w = j->a->w;
    size_t panel_bytes = form_panel_bytes(w->form, w->n_in);
    for (size_t k0 = 0; k0 < w->n_in; k0 += GEMM_K)
        for (size_t p = 0; p < b->n_panels; p += DOT_PANELS)
            r->loops->tile_bf16(sums(b, 0, p), (const uint16_t *)j->x + b->row0 * j->x_stride + k0, j->x_stride, b->n_rows,
                                (const uint32_t *)panel_at(w, b->panel0 + p, panel_bytes) + k0 / 2 * PANEL, panel_bytes / sizeof(uint32_t),
                                min_size(DOT_PANELS, b->n_panels - p), NULL, min_size(GEMM_K, w->n_in - k0));
}

static void block_f8(const struct run *r, const struct block *b, uint32_t *pairs)
{
    const struct job    *j = b->job;
    const struct weight *w = j->a->w;
    for (size_t k0 = 0; k0 < w->n_in; k0 += F8_BLOCK) {
        size_t n_k = min_size(F8_BLOCK, w->n_in - k0), stride = F8_BLOCK / 2 * PANEL;
        for (size_t p = 0; p < b->n_panels; p += DOT_PANELS) {
            size_t n = min_size(DOT_PANELS, b->n_panels - p);
            float  scale[DOT_PANELS];
            for (size_t i = 0; i < n; i++) r->loops->widen_bf16(pairs + i * stride, &scale[i], w, b->panel0 + p + i, k0, n_k);
            r->loops->tile_bf16(sums(b, 0, p), (const uint16_t *)j->x + b->row0 * j->x_stride + k0, j->x_stride, b->n_rows, pairs, stride, n, scale, n_k);
        }
    }
}

static void many_rows(const struct run *r, const struct job *j, size_t row0, size_t n_rows, size_t panel0, size_t n_panels, int thread)
{
    char  *scratch = cpu_scratch(r->c, thread);
    float *acc = (float *)(scratch + MATMUL_WIDE_BYTES);
    for (size_t p = panel0; p < panel0 + n_panels; p += GEMM_PANELS) {
        struct block b = { .job = j, .row0 = row0, .n_rows = n_rows, .panel0 = p, .n_panels = min_size(GEMM_PANELS, panel0 + n_panels - p), .acc = acc,
                           .row_step = PANEL, .panel_step = n_rows * PANEL };
        memset(acc, 0, b.n_panels * n_rows * PANEL * sizeof *acc);
        if (j->by == BY_INT) block_int(r, &b, (struct wide_int *)scratch);
        else if (j->by == BY_F32) block_f32(r, &b, (float *)scratch);
        else if (j->a->w->form == FORM_F8) block_f8(r, &b, (uint32_t *)scratch);
        else block_bf16(r, &b);
        finish(r->loops, &b);
    }
}

static bool by_gemv(const struct job *j) { return j->a->n_rows <= (size_t)(j->by == BY_F32 ? GEMV_ROWS : DOT_ROWS); }

static void run_item(void *arg, int index, int thread)
{
    const struct run *r = arg;
    size_t low = 0, high = r->n_jobs; /* the first job whose items end after index */
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (r->jobs[mid].item_end <= (size_t)index) low = mid + 1;
        else high = mid;
    }
    const struct job *j = &r->jobs[low];
    size_t local = (size_t)index - (low ? r->jobs[low - 1].item_end : 0);
    size_t row0 = local % j->n_chunks * j->rows_per_chunk, n_rows = min_size(j->rows_per_chunk, j->a->n_rows - row0);
    size_t panel0 = local / j->n_chunks * j->panels_per_item, n_panels = min_size(j->panels_per_item, j->n_panels - panel0);
    if (by_gemv(j)) few_rows(r, j, panel0, n_panels);
    else many_rows(r, j, row0, n_rows, panel0, n_panels, thread);
}

/* Rows that an item of a job takes together. */
static size_t rows_together(const struct job *j)
{
    if (by_gemv(j)) return j->a->n_rows;
    size_t n_chunks = div_up(j->a->n_rows, GEMM_ROWS);
    return min_size(round_up(div_up(j->a->n_rows, n_chunks), GEMM_STEP), GEMM_ROWS);
}

/* Panels that the loops take at once, or a pair, whose halves belong together. */
static size_t panels_together(const struct job *j)
{
    if (!by_gemv(j)) return GEMM_PANELS;
    return j->by == BY_F32 ? GEMV_PANELS : 2;
}

/* Panels per item: about ITEMS_PER_THREAD or STREAMS_PER_THREAD items for each thread over all jobs. */
static void plan_items(struct run *r)
{
    size_t units = 0, n_threads = (size_t)compute_pool_threads(r->c->pool);
    for (size_t i = 0; i < r->n_jobs; i++) units += r->jobs[i].n_panels * r->jobs[i].a->n_rows;
    for (size_t i = 0; i < r->n_jobs; i++) {
        struct job *j = &r->jobs[i];
        size_t      parts = n_threads * (by_gemv(j) ? STREAMS_PER_THREAD : ITEMS_PER_THREAD);
        j->rows_per_chunk = rows_together(j);
        j->n_chunks = div_up(j->a->n_rows, j->rows_per_chunk);
        j->panels_per_item = round_up(div_up(units, parts * j->rows_per_chunk), panels_together(j));
        if (j->panels_per_item > j->n_panels) j->panels_per_item = j->n_panels;
        r->n_items += div_up(j->n_panels, j->panels_per_item) * j->n_chunks;
        j->item_end = r->n_items;
    }
}

static void run_jobs(struct kernel_ctx *c, const struct matmul_args *args, size_t n)
{
    struct tables *t = c->acts;
    struct run     r = { .c = c, .loops = cpu_loops_of(c), .jobs = t->jobs, .inputs = t->inputs };
    for (size_t i = 0; i < n; i++) {
        const struct matmul_args *a = &args[i];
        if (a->n_rows == 0) continue;
        ASSERT(a->then != MATMUL_SILU_MUL || a->w->paired);
        r.jobs[r.n_jobs++] = (struct job){ .a = a, .by = arithmetic_of(c, a->w), .n_panels = panel_count(a->w) };
    }
    if (r.n_jobs == 0) return;
    plan_inputs(&r);
    plan_items(&r);
    compute_pool_run(c->pool, (int)r.n_items, run_item, &r);
}

void cpu_matmul(struct kernel_ctx *c, const struct matmul_args *jobs, size_t n_jobs)
{
    for (size_t i = 0; i < n_jobs; i += JOBS_PER_RUN) run_jobs(c, jobs + i, min_size(JOBS_PER_RUN, n_jobs - i));
}
