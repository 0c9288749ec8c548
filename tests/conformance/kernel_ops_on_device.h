/* kernel_ops_on_device.h - calls kernel_ops with arguments in host memory, whatever device the
 * context computes on.
 *
 * For a device with its own memory, every array is copied there before the call, in allocations of
 * exactly the size that the call may touch, and the outputs are copied back after it, with the gaps
 * between their rows. On the CPU the op is called directly. */
#ifndef BATON_TESTS_CONFORMANCE_KERNEL_OPS_ON_DEVICE_H
#define BATON_TESTS_CONFORMANCE_KERNEL_OPS_ON_DEVICE_H

#include "tests/conformance/kernel_fixture.h"

enum { MIRRORS_MAX = 512 };

struct mirror {
    const void *host;
    size_t bytes;
    bool out;
    struct dev_mem mem;
};

struct mirrors {
    struct kernel_ctx *c;
    size_t n;
    struct mirror at[MIRRORS_MAX];
};

/* Adds an array of the call. The same array added twice counts once, with the larger size. */
static inline void note(struct mirrors *m, const void *host, size_t bytes, bool out)
{
    if (!host || bytes == 0 || m->c->device->is_host) return;
    for (size_t i = 0; i < m->n; i++) {
        if (m->at[i].host != host) continue;
        if (bytes > m->at[i].bytes) m->at[i].bytes = bytes;
        m->at[i].out |= out;
        return;
    }
    CHECK(m->n < MIRRORS_MAX);
    m->at[m->n++] = (struct mirror){ .host = host, .bytes = bytes, .out = out };
}

static inline void send(struct mirrors *m)
{
    for (size_t i = 0; i < m->n; i++) {
        CHECK_OK(device_mem_alloc(m->c->device, m->at[i].bytes, DEVICE_MEM_PRIVATE, &m->at[i].mem,
                                  NULL));
        device_upload(m->c->device, m->at[i].mem.ptr, m->at[i].host, m->at[i].bytes);
    }
}

static inline void *there(const struct mirrors *m, const void *host)
{
    for (size_t i = 0; i < m->n; i++)
        if (m->at[i].host == host) return m->at[i].mem.ptr;
    return (void *)host;
}

static inline void fetch(struct mirrors *m)
{
    struct err err;
    for (size_t i = 0; i < m->n; i++) {
        if (m->at[i].out)
            device_download(m->c->device, (void *)m->at[i].host, m->at[i].mem.ptr, m->at[i].bytes);
        device_mem_free(m->c->device, &m->at[i].mem);
    }
    if (device_fault(m->c->device, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
}

/* Bytes of n_rows rows of n elements, `stride` elements apart. */
static inline size_t span(size_t n_rows, size_t stride, size_t n, size_t size)
{
    return n_rows ? ((n_rows - 1) * stride + n) * size : 0;
}
static inline size_t floats(size_t n) { return n * sizeof(float); }

static inline void on_rms_norm(struct kernel_ctx *c, float *y, size_t y_stride, const float *x,
                               size_t x_stride, const float *w, size_t n_rows, size_t n, float eps)
{
    struct mirrors m = { .c = c };
    note(&m, x, span(n_rows, x_stride, n, sizeof *x), false);
    note(&m, w, floats(n), false);
    note(&m, y, span(n_rows, y_stride, n, sizeof *y), true);
    send(&m);
    c->ops->rms_norm(c, there(&m, y), y_stride, there(&m, x), x_stride, there(&m, w), n_rows, n,
                     eps);
    fetch(&m);
}

static inline void on_add(struct kernel_ctx *c, float *x, const float *y, size_t n)
{
    struct mirrors m = { .c = c };
    note(&m, x, floats(n), true);
    note(&m, y, floats(n), false);
    send(&m);
    c->ops->add(c, there(&m, x), there(&m, y), n);
    fetch(&m);
}

static inline void on_copy_rows(struct kernel_ctx *c, float *to, size_t to_stride,
                                const float *from, size_t from_stride, size_t n_from,
                                const int32_t *rows, size_t n_rows, size_t n)
{
    struct mirrors m = { .c = c };
    note(&m, to, span(n_rows, to_stride, n, sizeof *to), true);
    note(&m, from, span(n_from, from_stride, n, sizeof *from), false);
    note(&m, rows, n_rows * sizeof *rows, false);
    send(&m);
    c->ops->copy_rows(c, there(&m, to), to_stride, there(&m, from), from_stride, there(&m, rows),
                      n_rows, n);
    fetch(&m);
}

/* The table has n_pos positions. */
static inline void note_rope(struct mirrors *m, const struct rope_args *a, size_t n_pos)
{
    for (size_t i = 0; i < a->n_heads; i++) {
        const struct rope_heads *h = &a->heads[i];
        note(m, h->x, span(a->n_rows, h->x_stride, h->n_heads * h->head_dim, sizeof *h->x), true);
        note(m, h->norm, floats(h->head_dim), false);
    }
    note(m, a->cos_sin, floats(n_pos * a->rot_dim), false);
    note(m, a->pos, a->n_rows * sizeof *a->pos, false);
}

static inline struct rope_args rope_there(const struct mirrors *m, struct rope_args a)
{
    for (size_t i = 0; i < a.n_heads; i++)
        a.heads[i].x = there(m, a.heads[i].x), a.heads[i].norm = there(m, a.heads[i].norm);
    a.cos_sin = there(m, a.cos_sin);
    a.pos = there(m, a.pos);
    return a;
}

static inline void on_rope(struct kernel_ctx *c, const struct rope_args *a, size_t n_pos)
{
    struct mirrors m = { .c = c };
    note_rope(&m, a, n_pos);
    send(&m);
    const struct rope_args on = rope_there(&m, *a);
    c->ops->rope(c, &on);
    fetch(&m);
}

/* A step of append and attention (NULL: none), with append->rope, whose heads are the queries and k.
 * together: attention appends. */
static inline void on_append_rotated(struct kernel_ctx *c, const struct kv_append_args *append,
                                     const struct attn_args *attend, bool together, size_t n_pos,
                                     void *pool, size_t pool_bytes)
{
    struct mirrors m = { .c = c };
    struct attn_list list = append->on;
    struct kernel_step step = {
        .lists = &list,
        .n_lists = 1,
        .block_tokens = append->kv.block_tokens,
    };
    const size_t rows = append->rope->n_rows, dim = (size_t)append->kv.head_dim;
    note(&m, pool, pool_bytes, true);
    note(&m, append->v, floats(rows * (size_t)append->kv.n_heads * dim), false);
    note_rope(&m, append->rope, n_pos);
    if (attend) note(&m, attend->out, floats(rows * (size_t)attend->n_heads * dim), true);
    send(&m);
    c->step_ops->upload(c, &step);
    const struct rope_args rope = rope_there(&m, *append->rope);
    struct kv_append_args a = *append;
    a.k = rope.heads[1].x;
    a.v = there(&m, a.v);
    a.kv.data = there(&m, pool);
    a.on = list;
    a.rope = &rope;
    if (!together) c->ops->kv_append(c, &a);
    if (attend) {
        struct attn_args t = *attend;
        t.q = rope.heads[0].x;
        t.out = there(&m, t.out);
        t.kv = a.kv;
        t.on = list;
        t.append = together ? &a : NULL;
        c->ops->attention(c, &t);
    }
    fetch(&m);
}

/* a.rows has n_source rows. */
static inline void on_combine(struct kernel_ctx *c, struct combine_args a, size_t n_source)
{
    struct mirrors m = { .c = c };
    note(&m, a.y, floats(a.n_rows * a.n), true);
    note(&m, a.rows, floats(n_source * a.n), false);
    note(&m, a.index, a.n_rows * a.n_used * sizeof *a.index, false);
    note(&m, a.weights, floats(a.n_rows * a.n_used), false);
    send(&m);
    a.y = there(&m, a.y);
    a.rows = there(&m, a.rows);
    a.index = there(&m, a.index);
    a.weights = there(&m, a.weights);
    c->ops->combine(c, &a);
    fetch(&m);
}

static inline void note_route(struct mirrors *m, const struct route_args *a)
{
    const size_t used = a->n_rows * (size_t)a->n_used;
    note(m, a->logits, floats(a->n_rows * (size_t)a->n_experts), false);
    note(m, a->bias, floats((size_t)a->n_experts), false);
    note(m, a->experts, used * sizeof *a->experts, true);
    note(m, a->weights, floats(used), true);
    note(m, a->rows, used * sizeof *a->rows, true);
    note(m, a->index, used * sizeof *a->index, true);
    note(m, a->begin, ((size_t)a->n_experts + 1) * sizeof *a->begin, true);
}

static inline struct route_args route_there(const struct mirrors *m, struct route_args a)
{
    a.rows = there(m, a.rows);
    a.index = there(m, a.index);
    a.begin = there(m, a.begin);
    a.logits = there(m, a.logits);
    a.bias = there(m, a.bias);
    a.experts = there(m, a.experts);
    a.weights = there(m, a.weights);
    return a;
}

static inline void on_route(struct kernel_ctx *c, struct route_args a)
{
    struct mirrors m = { .c = c };
    note_route(&m, &a);
    send(&m);
    a = route_there(&m, a);
    c->ops->route(c, &a);
    fetch(&m);
}

static inline void on_router(struct kernel_ctx *c, struct router_args a)
{
    struct mirrors m = { .c = c };
    note_route(&m, &a.route);
    note(&m, a.route.logits, floats(a.route.n_rows * (size_t)a.route.n_experts), !a.route.rows);
    note(&m, a.x, floats(a.route.n_rows * a.w->n_in), false);
    note(&m, a.norm, floats(a.w->n_in), false);
    note(&m, a.h, floats(a.route.n_rows * a.w->n_in), true);
    send(&m);
    a.route = route_there(&m, a.route);
    a.x = there(&m, a.x), a.norm = there(&m, a.norm), a.h = there(&m, a.h);
    c->ops->router(c, &a);
    fetch(&m);
}

static inline void on_embed(struct kernel_ctx *c, float *x, const struct weight *w,
                            const int32_t *ids, size_t n_rows)
{
    struct mirrors m = { .c = c };
    note(&m, x, floats(n_rows * w->n_in), true);
    note(&m, ids, n_rows * sizeof *ids, false);
    send(&m);
    c->ops->embed(c, there(&m, x), w, there(&m, ids), n_rows);
    fetch(&m);
}

/* ---- products ---- */

static inline size_t prequantized_floats(size_t n_rows, size_t n)
{
    return n_rows * ((n + MATMUL_PREQUANTIZED_ALIGN - 1) / MATMUL_PREQUANTIZED_ALIGN *
                     MATMUL_PREQUANTIZED_ALIGN);
}

static inline void note_job(struct mirrors *m, const struct matmul_args *a)
{
    const size_t n_out = a->epilogue == MATMUL_SILU_MUL ? a->w->n_out / 2 : a->w->n_out;
    size_t x_rows = a->n_rows;
    for (size_t i = 0; a->x_rows && i < a->n_rows; i++)
        if ((size_t)a->x_rows[i] >= x_rows) x_rows = (size_t)a->x_rows[i] + 1;
    note(m, a->x,
         a->x_prequantized ? floats(prequantized_floats(x_rows, a->w->n_in))
                           : span(x_rows, a->x_stride, a->w->n_in, sizeof *a->x),
         false);
    note(m, a->x_rows, a->n_rows * sizeof *a->x_rows, false);
    note(m, a->bias, floats(a->w->n_out), false);
    note(m, a->norm, floats(a->w->n_in), false);
    note(m, a->y,
         a->quantize_for ? floats(prequantized_floats(a->n_rows, n_out))
                         : span(a->n_rows, a->y_stride, n_out, sizeof *a->y),
         true);
}

static inline void on_matmul(struct kernel_ctx *c, const struct matmul_args *jobs, size_t n_jobs)
{
    struct mirrors m = { .c = c };
    struct matmul_args *moved = mem_dup(jobs, (n_jobs ? n_jobs : 1) * sizeof *jobs);
    for (size_t i = 0; i < n_jobs; i++) note_job(&m, &jobs[i]);
    send(&m);
    for (size_t i = 0; i < n_jobs; i++) {
        moved[i].x = there(&m, jobs[i].x);
        moved[i].x_rows = there(&m, jobs[i].x_rows);
        moved[i].bias = there(&m, jobs[i].bias);
        moved[i].norm = there(&m, jobs[i].norm);
        moved[i].y = there(&m, jobs[i].y);
    }
    c->ops->matmul(c, moved, n_jobs);
    fetch(&m);
    mem_free(moved);
}

/* Allocates the scratch arrays of the call. */
static inline void on_experts(struct kernel_ctx *c, struct experts_args a)
{
    struct mirrors m = { .c = c };
    const size_t used = a.n_rows * (size_t)a.n_used, hidden = a.gate_up[0].n_in,
                 inner = a.down[0].n_in, one = used ? used : 1;
    a.rows = MEM_ARRAY(int32_t, one);
    a.index = MEM_ARRAY(int32_t, one);
    a.begin = MEM_ARRAY(int32_t, (size_t)a.n_experts + 1);
    a.act = MEM_ARRAY(float, prequantized_floats(one, inner));
    a.out = MEM_ARRAY(float, one *hidden);
    a.shared.act = a.shared.gate_up
                       ? MEM_ARRAY(float, prequantized_floats(a.n_rows, a.shared.down->n_in))
                       : NULL;
    a.jobs = MEM_ARRAY(struct matmul_args, (size_t)a.n_experts + 1);
    struct experts_args on = a;
    const struct {
        const void *host, **to;
        size_t bytes;
        bool out;
    } arrays[] = {
        { a.h, (const void **)&on.h, floats(a.n_rows * hidden), false },
        { a.experts, (const void **)&on.experts, used * sizeof(int32_t), false },
        { a.weights, (const void **)&on.weights, floats(used), false },
        { a.x, (const void **)&on.x, floats(a.n_rows * hidden), true },
        { a.rows, (const void **)&on.rows, one * sizeof(int32_t), false },
        { a.index, (const void **)&on.index, one * sizeof(int32_t), false },
        { a.begin, (const void **)&on.begin, ((size_t)a.n_experts + 1) * sizeof(int32_t), false },
        { a.act, (const void **)&on.act, floats(prequantized_floats(one, inner)), false },
        { a.out, (const void **)&on.out, floats(one * hidden), false },
        { a.shared.act, (const void **)&on.shared.act,
          a.shared.act ? floats(prequantized_floats(a.n_rows, a.shared.down->n_in)) : 0, false },
        { a.shared.gate_up_bias, (const void **)&on.shared.gate_up_bias,
          a.shared.gate_up ? floats(a.shared.gate_up->n_out) : 0, false },
        { a.shared.down_bias, (const void **)&on.shared.down_bias, floats(hidden), false },
    };
    for (size_t i = 0; i < COUNT_OF(arrays); i++)
        note(&m, arrays[i].host, arrays[i].bytes, arrays[i].out);
    send(&m);
    for (size_t i = 0; i < COUNT_OF(arrays); i++) *arrays[i].to = there(&m, arrays[i].host);
    c->ops->experts(c, &on);
    fetch(&m);
    mem_free(a.rows), mem_free(a.index), mem_free(a.begin), mem_free(a.act), mem_free(a.out),
        mem_free(a.shared.act), mem_free(a.jobs);
}

/* `rows`, `begin` and `out` are the caller's; act and jobs are made here. */
static inline void on_expert_slots(struct kernel_ctx *c, struct expert_slots_args a)
{
    struct mirrors m = { .c = c };
    const size_t hidden = a.gate_up[0].n_in, n = a.n_slots ? a.n_slots : 1;
    a.act = MEM_ARRAY(float, prequantized_floats(n, a.down[0].n_in));
    a.jobs = MEM_ARRAY(struct matmul_args, (size_t)a.n_experts);
    struct expert_slots_args on = a;
    const struct {
        const void *host, **to;
        size_t bytes;
        bool out;
    } arrays[] = {
        { a.x, (const void **)&on.x, a.x ? floats(a.n_x_rows * a.x_stride) : 0, false },
        { a.narrow.at, (const void **)&on.narrow.at,
          a.narrow.at ? a.n_x_rows * a.x_stride * dtype_block_bytes(a.narrow.type) : 0, false },
        { a.rows, (const void **)&on.rows, n * sizeof(int32_t), false },
        { a.begin, (const void **)&on.begin, ((size_t)a.n_experts + 1) * sizeof(int32_t), false },
        { a.act, (const void **)&on.act, floats(prequantized_floats(n, a.down[0].n_in)), false },
        { a.out, (const void **)&on.out, floats(n * hidden), true },
    };
    for (size_t i = 0; i < COUNT_OF(arrays); i++)
        note(&m, arrays[i].host, arrays[i].bytes, arrays[i].out);
    send(&m);
    for (size_t i = 0; i < COUNT_OF(arrays); i++) *arrays[i].to = there(&m, arrays[i].host);
    c->ops->expert_slots(c, &on);
    fetch(&m);
    mem_free(a.act), mem_free(a.jobs);
}

/* ---- attention ---- */

/* One step: kv_append, then attention, both with the pool `pool` of pool_bytes. If append or the
 * attention arguments are NULL, only the other one runs. */
static inline void on_attention(struct kernel_ctx *c, struct kv_append_args *append,
                                struct attn_args *attend, void *pool, size_t pool_bytes)
{
    struct mirrors m = { .c = c };
    struct attn_list list = append ? append->on : attend->on;
    int32_t n_rows = 0;
    for (int32_t i = 0; i < list.n_seqs; i++) n_rows += list.seqs[i].n_q;
    const size_t rows = (size_t)n_rows;
    note(&m, pool, pool_bytes, true);
    if (append) {
        note(&m, append->k, floats(rows * (size_t)append->kv.n_heads * (size_t)append->kv.head_dim),
             false);
        note(&m, append->v, floats(rows * (size_t)append->kv.n_heads * (size_t)append->kv.head_dim),
             false);
    }
    if (attend) {
        const size_t q_dim = (size_t)(attend->k_up
                                          ? attend->k_up[0].n_out + (size_t)attend->kv.head_dim -
                                                attend->k_up[0].n_in
                                          : (size_t)attend->kv.head_dim);
        note(&m, attend->q, floats(rows * (size_t)attend->n_heads * q_dim), false);
        note(&m, attend->out, floats(rows * (size_t)attend->n_heads * (size_t)attend->v_dim), true);
    }
    send(&m);
    struct kernel_step step = {
        .lists = &list,
        .n_lists = 1,
        .block_tokens = append ? append->kv.block_tokens : attend->kv.block_tokens,
    };
    c->step_ops->upload(c, &step);
    if (append) {
        struct kv_append_args a = *append;
        a.k = there(&m, a.k);
        a.v = there(&m, a.v);
        a.kv.data = there(&m, pool);
        a.on = list;
        c->ops->kv_append(c, &a);
    }
    if (attend) {
        struct attn_args a = *attend;
        a.q = there(&m, a.q);
        a.out = there(&m, a.out);
        a.kv.data = there(&m, pool);
        a.on = list;
        c->ops->attention(c, &a);
    }
    fetch(&m);
}

/* ---- comparison ---- */

/* A CPU backend must give the bits of ref. A GPU sums in another order: its result must be within
 * `bound`, relative to ref or to `scale`. */
static inline void check_against_ref(const struct kernel_ctx *c, const float *got,
                                     const float *want, size_t n, double bound, const char *what,
                                     size_t a, size_t b)
{
    if (c->device->is_host) {
        check_bits(got, want, n, what, a, b);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const double x = (double)got[i], y = (double)want[i];
        if (isnan(x) && isnan(y)) continue;
        if (!(x == y) && !(fabs(x - y) <= bound * (1 + fabs(y))))
            test_fail(__FILE__, __LINE__, "%s (%zu, %zu): element %zu is %.9g, not %.9g", what, a,
                      b, i, x, y);
    }
}

#endif
