/* copy_stream_cpu.c - a copy stream of the CPU: every operation has completed when its call
 * returns.
 * Thread: one per copy stream, any. */
#include "kernels/copy_stream.h"

#include <string.h>

#include "kernels/backend.h"
#include "kernels/cpu/device_cpu.h"
#include "kernels/kv_rows.h"
#include "shared/base/assert.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

static void close_stream(struct copy_stream *s) { mem_free(s); }

static enum status wait_event(struct copy_stream *s, uint64_t event)
{
    (void)s, (void)event; /* work of the CPU has completed */
    return OK;
}

static enum status copy(struct copy_stream *s, const struct copy_stream_strided *c)
{
    (void)s;
    for (uint32_t i = 0; i < c->n; i++)
        memcpy((char *)c->to + i * c->to_stride, (const char *)c->from + i * c->from_stride,
               c->bytes);
    return OK;
}

static enum status gather(struct copy_stream *s, const struct copy_stream_pair *pairs, uint32_t n)
{
    (void)s;
    for (uint32_t i = 0; i < n; i++)
        if (pairs[i].bytes > 0) memcpy(pairs[i].to, pairs[i].from, pairs[i].bytes);
    return OK;
}

/* Row `row` of places that lie so: its values, and its scale where the type has one. */
static char *values_of(const void *values, enum dtype t, uint32_t width, size_t row)
{
    return (char *)(uintptr_t)values + row * kv_rows_bytes(t, width);
}
static char *scale_of(const void *scales, enum dtype t, size_t row)
{
    return kv_rows_scaled(t) ? (char *)(uintptr_t)scales + row * sizeof(float) : NULL;
}

static void convert_row(const struct copy_stream_conversion *c, const struct copy_stream_kv_rows *r,
                        size_t from_row, size_t to_row)
{
    const char *from = values_of(r->from, c->from, c->width, from_row),
               *from_scale = scale_of(r->from_scales, c->from, from_row);
    char *to = values_of(r->to, c->to, c->width, to_row),
         *to_scale = scale_of(r->to_scales, c->to, to_row);
    float x[KERNEL_LATENT_MAX];
    if (c->from == c->to) {
        memcpy(to, from, kv_rows_bytes(c->to, c->width));
        if (to_scale) memcpy(to_scale, from_scale, sizeof(float));
        return;
    }
    kv_row_load(c->from, from, from_scale, x, c->width);
    kv_row_store(c->to, x, to, to_scale, c->width);
}

static enum status convert(struct copy_stream *s, const struct copy_stream_conversion *c)
{
    (void)s;
    ASSERT(c->width <= KERNEL_LATENT_MAX);
    for (uint32_t i = 0; i < c->n; i++) {
        const struct copy_stream_kv_rows *r = &c->rows[i];
        for (uint32_t g = 0; g < r->n_groups; g++)
            for (uint32_t k = 0; k < r->n; k++)
                convert_row(c, r, (size_t)g * r->from_stride + k, (size_t)g * r->to_stride + k);
    }
    return OK;
}

static char *add_runs(char *to, const void *at, uint64_t stride, uint32_t run_bytes, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++, to += run_bytes)
        memcpy(to, (const char *)at + i * stride, run_bytes);
    return to;
}

static uint64_t checksum_of(const struct copy_stream_checksum_range *p)
{
    if (p->n_runs == 1 && p->tail.n_runs == 0) return hash_64(p->at, p->run_bytes, 0);
    size_t n = (size_t)p->run_bytes * p->n_runs + (size_t)p->tail.run_bytes * p->tail.n_runs;
    char *all = mem_calloc(n, 1);
    add_runs(add_runs(all, p->at, p->stride, p->run_bytes, p->n_runs), p->tail.at, p->tail.stride,
             p->tail.run_bytes, p->tail.n_runs);
    uint64_t sum = hash_64(all, n, 0);
    mem_free(all);
    return sum;
}

static void copy_runs(void *to, const void *at, uint64_t stride, uint32_t run_bytes, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        memcpy((char *)to + i * stride, (const char *)at + i * stride, run_bytes);
}

static void copy_range(const struct copy_stream_checksum_range *p)
{
    if (!p->to) return;
    copy_runs(p->to, p->at, p->stride, p->run_bytes, p->n_runs);
    copy_runs(p->tail.to, p->tail.at, p->tail.stride, p->tail.run_bytes, p->tail.n_runs);
}

static enum status checksum(struct copy_stream *s, const struct copy_stream_checksum_range *pieces,
                            uint32_t n, uint64_t *out)
{
    (void)s;
    for (uint32_t i = 0; i < n; i++) {
        out[i] = checksum_of(&pieces[i]);
        copy_range(&pieces[i]);
    }
    return OK;
}

static enum status launch_host_fn(struct copy_stream *s, void (*fn)(void *arg), void *arg)
{
    (void)s;
    fn(arg);
    return OK;
}

static enum status synchronize(struct copy_stream *s)
{
    (void)s;
    return OK;
}

static const struct copy_stream_ops COPY_STREAM_CPU_OPS = {
    .close = close_stream,
    .wait_event = wait_event,
    .copy = copy,
    .gather = gather,
    .convert = convert,
    .checksum = checksum,
    .launch_host_fn = launch_host_fn,
    .synchronize = synchronize,
};

enum status copy_stream_cpu_open(struct device *d, struct copy_stream **out, struct err *err)
{
    (void)d;
    struct copy_stream *s = mem_try_calloc(1, sizeof *s);
    if (!s) return err_set(err, ERR_NOMEM, "no memory for a copy stream");
    s->ops = &COPY_STREAM_CPU_OPS;
    *out = s;
    return OK;
}
