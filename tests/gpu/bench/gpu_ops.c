/* gpu_ops.c - ops that count and time the calls that they forward. */
#include "tests/gpu/bench/gpu_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/mem.h"
#include "tests/gpu/bench/gpu_kernels.h"
#include "tests/gpu/bench/gpu_op_cost.h"

enum { ROUNDS_MAX = 16 };

enum mode { PASSING, COUNTING, TIMING, ENDS, FOLLOWING };

struct gpu_ops {
    struct kernel_ops ops; /* first, so that a context's ops lead to this struct */
    const struct kernel_ops *inner;
    struct step_ops step_ops;
    const struct step_ops *inner_steps;
    struct kernel_ctx *ctx;
    cudaStream_t stream;
    int64_t hold_cycles;
    enum mode mode;
    size_t i_call;        /* in the current step */
    size_t begin, window; /* that many calls from this one on */
    cudaEvent_t events[GPU_OPS_WINDOW_MAX + 1];
    struct gpu_op_call *calls;
    size_t n_calls, room;
    /* of each step while FOLLOWING */
    cudaEvent_t begins[GPU_OPS_STEPS_MAX], ends[GPU_OPS_STEPS_MAX];
    int i_step, n_steps;
    bool began; /* the step being submitted has begun */
};

static struct gpu_ops *gpu_ops_of(const struct kernel_ctx *c)
{
    return (struct gpu_ops *)(uintptr_t)c->ops;
}

static void record_event(struct gpu_ops *s, size_t i)
{
    gpu_cuda(cudaEventRecord(s->events[i], s->stream), "timing an op");
}

static struct gpu_op_call *new_call(struct gpu_ops *s)
{
    if (s->n_calls == s->room) {
        s->room = s->room ? s->room * 2 : 256;
        s->calls = mem_realloc(s->calls, s->room, sizeof *s->calls);
    }
    s->calls[s->n_calls] = (struct gpu_op_call){ .op = "" };
    return &s->calls[s->n_calls++];
}

/* Records the beginning of a step, if this is its first call. */
static void follow_begin(struct gpu_ops *s)
{
    if (s->mode != FOLLOWING || s->began || s->i_step >= s->n_steps) return;
    gpu_cuda(cudaEventRecord(s->begins[s->i_step], s->stream), "timing a step");
    s->began = true;
}

/* Called before each op. Returns what to fill in if the call is to be counted, else NULL. */
static struct gpu_op_call *before(struct gpu_ops *s)
{
    follow_begin(s);
    if (s->mode == COUNTING) return new_call(s);
    if (s->mode == ENDS && s->i_call == 0) record_event(s, 0);
    if (s->mode == TIMING && s->i_call == s->begin) {
        if (s->hold_cycles > 0)
            gpu_cuda(gpu_hold(s->stream, s->hold_cycles), "keeping the GPU busy");
        record_event(s, 0);
    }
    return NULL;
}

static void after(struct gpu_ops *s)
{
    if (s->mode == TIMING && s->i_call >= s->begin && s->i_call - s->begin < s->window)
        record_event(s, s->i_call - s->begin + 1);
    if (s->mode == ENDS && s->i_call + 1 == s->n_calls) record_event(s, 1);
    s->i_call++;
}

/* ---- ops ---- */

static void timed_embed(struct kernel_ctx *c, float *x, const struct weight *w, const int32_t *ids,
                        size_t n_rows)
{
    struct gpu_ops *s = gpu_ops_of(c);
    struct gpu_op_call *call = before(s);
    if (call) gpu_op_cost_rows("embed", n_rows, w->n_in, 0.5, 1, call); /* bf16 rows */
    s->inner->embed(c, x, w, ids, n_rows);
    after(s);
}

static void timed_matmul(struct kernel_ctx *c, const struct matmul_args *jobs, size_t n_jobs)
{
    struct gpu_ops *s = gpu_ops_of(c);
    struct gpu_op_call *call = before(s);
    if (call) gpu_op_cost_matmul(jobs, n_jobs, call);
    s->inner->matmul(c, jobs, n_jobs);
    after(s);
}

static void timed_rms_norm(struct kernel_ctx *c, float *y, size_t y_stride, const float *x,
                           size_t x_stride, const float *weight, size_t n_rows, size_t n, float eps)
{
    struct gpu_ops *s = gpu_ops_of(c);
    struct gpu_op_call *call = before(s);
    if (call) gpu_op_cost_rows("rms_norm", n_rows, n, 1, 1, call);
    s->inner->rms_norm(c, y, y_stride, x, x_stride, weight, n_rows, n, eps);
    after(s);
}

static void timed_add(struct kernel_ctx *c, float *x, const float *y, size_t n)
{
    struct gpu_ops *s = gpu_ops_of(c);
    struct gpu_op_call *call = before(s);
    if (call) gpu_op_cost_rows("add", 1, n, 2, 1, call);
    s->inner->add(c, x, y, n);
    after(s);
}

static void timed_copy_rows(struct kernel_ctx *c, float *to, size_t to_stride, const float *from,
                            size_t from_stride, const int32_t *rows, size_t n_rows, size_t n)
{
    struct gpu_ops *s = gpu_ops_of(c);
    struct gpu_op_call *call = before(s);
    if (call) gpu_op_cost_rows("copy_rows", n_rows, n, 1, 1, call);
    s->inner->copy_rows(c, to, to_stride, from, from_stride, rows, n_rows, n);
    after(s);
}

static void timed_rope(struct kernel_ctx *c, const struct rope_args *a)
{
    struct gpu_ops *s = gpu_ops_of(c);
    struct gpu_op_call *call = before(s);
    if (call) gpu_op_cost_rope(a, call);
    s->inner->rope(c, a);
    after(s);
}

static void timed_kv_append(struct kernel_ctx *c, const struct kv_append_args *a)
{
    struct gpu_ops *s = gpu_ops_of(c);
    struct gpu_op_call *call = before(s);
    if (call) gpu_op_cost_append(a, call);
    s->inner->kv_append(c, a);
    after(s);
}

static void timed_attention(struct kernel_ctx *c, const struct attn_args *a)
{
    struct gpu_ops *s = gpu_ops_of(c);
    struct gpu_op_call *call = before(s);
    if (call) gpu_op_cost_attention(a, call);
    s->inner->attention(c, a);
    after(s);
}

static void timed_route(struct kernel_ctx *c, const struct route_args *a)
{
    struct gpu_ops *s = gpu_ops_of(c);
    struct gpu_op_call *call = before(s);
    if (call) gpu_op_cost_rows("route", a->n_rows, (size_t)a->n_experts, 1, 0, call);
    s->inner->route(c, a);
    after(s);
}

static void timed_router(struct kernel_ctx *c, const struct router_args *a)
{
    struct gpu_ops *s = gpu_ops_of(c);
    struct gpu_op_call *call = before(s);
    const struct matmul_args product = router_matmul(a);
    if (call) {
        gpu_op_cost_matmul(&product, 1, call);
        call->op = "router";
    }
    s->inner->router(c, a);
    after(s);
}

static void timed_combine(struct kernel_ctx *c, const struct combine_args *a)
{
    struct gpu_ops *s = gpu_ops_of(c);
    struct gpu_op_call *call = before(s);
    if (call)
        gpu_op_cost_rows("combine", a->n_rows, a->n, (double)a->n_used + (a->add ? 1 : 0), 1, call);
    s->inner->combine(c, a);
    after(s);
}

static void timed_experts(struct kernel_ctx *c, const struct experts_args *a)
{
    struct gpu_ops *s = gpu_ops_of(c);
    struct gpu_op_call *call = before(s);
    if (call) gpu_op_cost_experts(c, a, call);
    s->inner->experts(c, a);
    after(s);
}

static void timed_submit(struct kernel_ctx *c)
{
    struct gpu_ops *s = gpu_ops_of(c);
    follow_begin(s);
    s->inner_steps->submit(c);
}

static void timed_sample(struct kernel_ctx *c, const float *logits, size_t n_vocab)
{
    struct gpu_ops *s = gpu_ops_of(c);
    s->inner_steps->sample(c, logits, n_vocab);
    if (!s->began) return;
    gpu_cuda(cudaEventRecord(s->ends[s->i_step++], s->stream), "timing a step");
    s->began = false;
}

/* ---- life ---- */

struct gpu_ops *gpu_ops_put(struct kernel_ctx *c, const struct gpu_sizes *sizes)
{
    struct gpu_ops *s = MEM_NEW(struct gpu_ops);
    s->inner = c->ops;
    s->ctx = c;
    s->stream = gpu_stream(c);
    s->hold_cycles = sizes->hold_cycles;
    s->ops = *c->ops; /* the ops that are not replaced stay */
    s->ops.embed = timed_embed, s->ops.matmul = timed_matmul, s->ops.rms_norm = timed_rms_norm,
    s->ops.add = timed_add, s->ops.copy_rows = timed_copy_rows;
    s->ops.rope = timed_rope, s->ops.kv_append = timed_kv_append,
    s->ops.attention = timed_attention, s->ops.route = timed_route, s->ops.router = timed_router;
    s->ops.combine = timed_combine, s->ops.experts = timed_experts;
    s->inner_steps = c->step_ops;
    s->step_ops = *c->step_ops;
    s->step_ops.submit = timed_submit, s->step_ops.sample = timed_sample;
    for (size_t i = 0; i < GPU_OPS_WINDOW_MAX + 1; i++)
        gpu_cuda(cudaEventCreate(&s->events[i]), "making an event");
    for (size_t i = 0; i < GPU_OPS_STEPS_MAX; i++) {
        gpu_cuda(cudaEventCreate(&s->begins[i]), "making an event");
        gpu_cuda(cudaEventCreate(&s->ends[i]), "making an event");
    }
    c->ops = &s->ops;
    c->step_ops = &s->step_ops;
    return s;
}

void gpu_ops_remove(struct gpu_ops *s)
{
    s->ctx->ops = s->inner;
    s->ctx->step_ops = s->inner_steps;
    for (size_t i = 0; i < GPU_OPS_WINDOW_MAX + 1; i++)
        gpu_cuda(cudaEventDestroy(s->events[i]), "dropping an event");
    for (size_t i = 0; i < GPU_OPS_STEPS_MAX; i++) {
        gpu_cuda(cudaEventDestroy(s->begins[i]), "dropping an event");
        gpu_cuda(cudaEventDestroy(s->ends[i]), "dropping an event");
    }
    mem_free(s->calls);
    mem_free(s);
}

/* ---- measuring ---- */

static void run_as(struct gpu_ops *s, enum mode mode, void (*run)(void *arg), void *arg)
{
    s->mode = mode;
    s->i_call = 0;
    run(arg);
    s->mode = PASSING;
    gpu_need(s->i_call == s->n_calls, "a step called other ops than when it was counted", NULL);
}

static double event_to_event_s(const struct gpu_ops *s, size_t from, size_t to)
{
    return gpu_timer_s(&(struct gpu_timer){ .begin = s->events[from], .end = s->events[to] });
}

void gpu_ops_measure(struct gpu_ops *s, int rounds, size_t window, void (*run)(void *arg),
                     void *arg)
{
    double(*us)[ROUNDS_MAX] = mem_calloc(window, sizeof *us);
    gpu_need(window >= 1 && window <= GPU_OPS_WINDOW_MAX, "a window of ops is too large", NULL);
    s->window = window;
    if (rounds > ROUNDS_MAX) rounds = ROUNDS_MAX;
    s->n_calls = 0;
    run_as(s, COUNTING, run, arg);
    for (s->begin = 0; s->begin < s->n_calls; s->begin += window) {
        const size_t n = s->n_calls - s->begin < window ? s->n_calls - s->begin : window;
        for (int i = 0; i < rounds; i++) {
            run_as(s, TIMING, run, arg);
            for (size_t k = 0; k < n; k++) us[k][i] = event_to_event_s(s, k, k + 1) * 1e6;
        }
        for (size_t k = 0; k < n; k++)
            s->calls[s->begin + k].us = gpu_median(us[k], (size_t)rounds);
    }
    mem_free(us);
}

const struct gpu_op_call *gpu_ops_calls(const struct gpu_ops *s, size_t *n)
{
    *n = s->n_calls;
    return s->calls;
}

double gpu_ops_busy(struct gpu_ops *s, void (*run)(void *arg), void *arg)
{
    run_as(s, ENDS, run, arg);
    return event_to_event_s(s, 0, 1);
}

void gpu_ops_follow(struct gpu_ops *s, int n_steps)
{
    s->mode = FOLLOWING;
    s->i_step = 0;
    s->n_steps = n_steps < GPU_OPS_STEPS_MAX ? n_steps : GPU_OPS_STEPS_MAX;
    s->began = false;
}

void gpu_ops_followed(struct gpu_ops *s, double *busy, double *gap)
{
    double b[GPU_OPS_STEPS_MAX], g[GPU_OPS_STEPS_MAX];
    s->mode = PASSING;
    gpu_need(s->i_step == s->n_steps && s->n_steps >= 2,
             "steps that follow each other were not all marked", NULL);
    for (int i = 0; i < s->n_steps; i++) {
        b[i] = gpu_timer_s(&(struct gpu_timer){ .begin = s->begins[i], .end = s->ends[i] });
        if (i > 0)
            g[i - 1] = gpu_timer_s(
                &(struct gpu_timer){ .begin = s->ends[i - 1], .end = s->begins[i] });
    }
    *busy = gpu_median(b, (size_t)s->n_steps);
    *gap = gpu_median(g, (size_t)s->n_steps - 1);
}

/* ---- the table ---- */

struct op_total {
    struct gpu_op_call sum;
    size_t n;
};

static int longer(const void *a, const void *b)
{
    const double x = ((const struct op_total *)a)->sum.us, y = ((const struct op_total *)b)->sum.us;
    return (y > x) - (y < x);
}

/* Layers use different numbers of experts; the table then shows the shape of the first. */
static bool same_kind(const struct gpu_op_call *a, const struct gpu_op_call *b)
{
    return strcmp(a->op, b->op) == 0 &&
           (strcmp(a->op, "experts") == 0 || strcmp(a->what, b->what) == 0);
}

static void print_op_total(const char *of, const struct op_total *r, const struct gpu_limits *l,
                           double product)
{
    const double by_memory = r->sum.bytes / l->read,
                 by_products = product > 0 ? r->sum.flops / product : 0;
    const double least = by_memory > by_products ? by_memory : by_products;
    printf("{\"kind\":\"op\",\"of\":\"%s\",\"op\":\"%s\",\"what\":\"%s\",\"calls\":%zu,\"us\":%"
           ".3f,\"bytes\":%.0f,\"flops\":%.0f,\"limit\":\"%s\","
           "\"of_limit\":%.4f}\n",
           of, r->sum.op, r->sum.what, r->n, r->sum.us, r->sum.bytes, r->sum.flops,
           by_memory > by_products ? "memory" : "products",
           r->sum.us > 0 ? least * 1e6 / r->sum.us : 0);
}

void gpu_ops_print(const struct gpu_ops *s, const char *of, const struct gpu_limits *l)
{
    struct op_total *rows = MEM_ARRAY(struct op_total, s->n_calls + 1);
    size_t n = 0, k;
    const char *what;
    const double product = gpu_product_limit(l, &what);
    for (size_t i = 0; i < s->n_calls; i++) {
        for (k = 0; k < n && !same_kind(&rows[k].sum, &s->calls[i]); k++) {}
        if (k == n) rows[n++].sum = s->calls[i];
        else {
            rows[k].sum.us += s->calls[i].us;
            rows[k].sum.bytes += s->calls[i].bytes;
            rows[k].sum.flops += s->calls[i].flops;
        }
        rows[k].n++;
    }
    qsort(rows, n, sizeof *rows, longer);
    for (k = 0; k < n; k++) print_op_total(of, &rows[k], l, product);
    fflush(stdout);
    mem_free(rows);
}
