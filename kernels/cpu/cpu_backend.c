/* cpu_backend.c - the ops of the CPU backends that work row by row: how a call is split over the
 * compute pool.
 *
 * Work items are whole rows; calls too small to be worth waking a thread run on the caller.
 * Thread: engine, compute pool. */
#include "kernels/cpu/cpu_backend.h"
#include "shared/base/arith.h"

#include <math.h>
#include <string.h>

enum { ELEMENTS_PER_ITEM = 16384 }; /* some 5 us of work */

struct cpu_rows_job {
    const struct elementwise_microkernels *kernels;
    float *out;
    const float *x, *y;
    const int32_t *pos;
    const int32_t *rows; /* of x; NULL: 0, 1, 2 .. */
    size_t n_rows, rows_per_item, n, x_stride, y_stride, n_heads, head_dim, rot_dim;
    float eps;
    bool interleaved;
};

/* Runs the job on items of job->rows_per_item rows, `elements` floats each. */
static void run_rows(struct kernel_ctx *c, struct cpu_rows_job *job, size_t elements,
                     void (*fn)(void *, int, int))
{
    job->kernels = cpu_microkernels_of(c)->elementwise;
    job->rows_per_item = elements >= ELEMENTS_PER_ITEM
                             ? 1
                             : ELEMENTS_PER_ITEM / (elements ? elements : 1);
    compute_pool_run(c->pool, (int)div_up(job->n_rows, job->rows_per_item), fn, job);
}

static void rows_of_item(const struct cpu_rows_job *job, int index, size_t *begin, size_t *end)
{
    *begin = (size_t)index * job->rows_per_item;
    *end = min_size(*begin + job->rows_per_item, job->n_rows);
}

/* ---- rows ---- */

struct embed_job {
    const struct weight *w;
    const int32_t *ids;
    float *x;
};

static void embed_item(void *arg, int row, int thread)
{
    const struct embed_job *job = arg;
    (void)thread;
    weight_layout_dequantize_row(job->w, (size_t)job->ids[row],
                                 job->x + (size_t)row * job->w->n_in);
}

void cpu_embed(struct kernel_ctx *c, float *x, const struct weight *w, const int32_t *ids,
               size_t n_rows)
{
    compute_pool_run(c->pool, (int)n_rows, embed_item,
                     &(struct embed_job){ .w = w, .ids = ids, .x = x });
}

static void rms_norm_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct cpu_rows_job *job = arg;
    size_t begin, end;
    rows_of_item(job, index, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const float *x = job->x + i * job->x_stride;
        job->kernels->rms_apply(job->out + i * job->y_stride, x, job->y,
                                job->kernels->rms_factor(x, job->n, job->eps), job->n);
    }
}

void cpu_rms_norm(struct kernel_ctx *c, float *y, size_t y_stride, const float *x, size_t x_stride,
                  const float *weight, size_t n_rows, size_t n, float eps)
{
    struct cpu_rows_job job = {
        .out = y,
        .y_stride = y_stride,
        .x = x,
        .x_stride = x_stride,
        .y = weight,
        .n_rows = n_rows,
        .n = n,
        .eps = eps,
    };
    run_rows(c, &job, n, rms_norm_item);
}

static void add_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct cpu_rows_job *job = arg;
    size_t begin, end;
    rows_of_item(job, index, &begin, &end);
    job->kernels->add(job->out + begin, job->y + begin, end - begin);
}

void cpu_add(struct kernel_ctx *c, float *x, const float *y, size_t n)
{
    struct cpu_rows_job job = { .out = x, .y = y, .n_rows = n }; /* a row is one element */
    run_rows(c, &job, 1, add_item);
}

static void copy_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct cpu_rows_job *job = arg;
    size_t begin, end;
    rows_of_item(job, index, &begin, &end);
    for (size_t i = begin; i < end; i++)
        memcpy(job->out + i * job->y_stride,
               job->x + (job->rows ? (size_t)job->rows[i] : i) * job->x_stride,
               job->n * sizeof *job->out);
}

void cpu_copy_rows(struct kernel_ctx *c, float *to, size_t to_stride, const float *from,
                   size_t from_stride, const int32_t *rows, size_t n_rows, size_t n)
{
    struct cpu_rows_job job = {
        .out = to,
        .y_stride = to_stride,
        .x = from,
        .x_stride = from_stride,
        .rows = rows,
        .n_rows = n_rows,
        .n = n,
    };
    run_rows(c, &job, n, copy_item);
}

static void rope_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct cpu_rows_job *job = arg;
    size_t begin, end;
    rows_of_item(job, index, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const float *cs = job->x + (size_t)job->pos[i] * job->rot_dim;
        float *x = job->out + i * job->x_stride;
        for (size_t h = 0; h < job->n_heads; h++, x += job->head_dim) {
            if (job->y)
                job->kernels->rms_apply(x, x, job->y,
                                        job->kernels->rms_factor(x, job->head_dim, job->eps),
                                        job->head_dim);
            job->kernels->rope(x, cs, job->rot_dim, job->interleaved);
        }
    }
}

void cpu_rope(struct kernel_ctx *c, const struct rope_args *a)
{
    for (size_t i = 0; i < a->n_heads; i++) {
        const struct rope_heads *h = &a->heads[i];
        struct cpu_rows_job job = {
            .out = h->x,
            .x = a->cos_sin,
            .y = h->norm,
            .pos = a->pos,
            .n_rows = a->n_rows,
            .x_stride = h->x_stride,
            .n_heads = h->n_heads,
            .head_dim = h->head_dim,
            .rot_dim = a->rot_dim,
            .interleaved = a->interleaved,
            .eps = a->norm_eps,
        };
        run_rows(c, &job, h->n_heads * (h->norm ? h->head_dim + a->rot_dim : a->rot_dim),
                 rope_item);
    }
}

static void log_sum_exp_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct cpu_rows_job *job = arg;
    size_t begin, end;
    rows_of_item(job, index, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const float *x = job->x + i * job->x_stride;
        float max = job->kernels->max(x, job->n);
        double sum = 0;
        if (max == -INFINITY) { /* exp(x - max) would be NaN; the result is log of 0 */
            job->out[i] = max;
            continue;
        }
        for (size_t j = 0; j < job->n; j += LSE_CHUNK)
            sum += (double)job->kernels->sum_exp(x + j, max, min_size(LSE_CHUNK, job->n - j));
        job->out[i] = (float)((double)max + log(sum));
    }
}

void host_log_sum_exp(struct kernel_ctx *c, float *lse, const float *x, size_t x_stride,
                      size_t n_rows, size_t n)
{
    struct cpu_rows_job job = {
        .out = lse, .x = x, .n_rows = n_rows, .n = n, .x_stride = x_stride
    };
    run_rows(c, &job, 4 * n, log_sum_exp_item);
}

/* ---- combine ---- */

struct combine_job {
    const struct elementwise_microkernels *kernels;
    const struct combine_args *a;
    size_t rows_per_item;
};

static void combine_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct combine_job *job = arg;
    const struct combine_args *a = job->a;
    size_t begin = (size_t)index * job->rows_per_item,
           end = min_size(begin + job->rows_per_item, a->n_rows);
    for (size_t i = begin; i < end; i++) {
        float *y = a->y + i * a->n;
        if (!a->add) memset(y, 0, a->n * sizeof *y);
        for (size_t j = 0; j < a->n_used; j++)
            job->kernels->axpy(y, a->rows + (size_t)a->index[i * a->n_used + j] * a->n,
                               a->weights[i * a->n_used + j], a->n);
    }
}

void cpu_combine(struct kernel_ctx *c, const struct combine_args *a)
{
    size_t elements = a->n * a->n_used + 1;
    struct combine_job job = {
        .kernels = cpu_microkernels_of(c)->elementwise,
        .a = a,
        .rows_per_item = elements >= ELEMENTS_PER_ITEM ? 1 : ELEMENTS_PER_ITEM / elements,
    };
    compute_pool_run(c->pool, (int)div_up(a->n_rows, job.rows_per_item), combine_item, &job);
}
