/* gpu_jobs.c - a table of works before one lane; see gpu_jobs.h. */
#include "kvtransfer/gpu_jobs.h"

#include "shared/base/assert.h"
#include "shared/base/mem.h"

struct kvt_works {
    struct kvt_works_options o;
    struct copy_stream *lane;
    struct dev_mem memory; /* pieces and sums of all works */
    struct kvt_work works[KVT_WORKS_MAX];
    struct list begun;
    struct kvt_copy *copies;
    uint32_t held;
};

enum {
    PIECES_BYTES = KVT_BATCH_PIECES * sizeof(struct copy_stream_checksum_range),
    SUMS_BYTES = KVT_BATCH_PIECES * sizeof(uint64_t)
};

enum status kvt_works_create(const struct kvt_works_options *o, struct kvt_works **out,
                             struct err *err)
{
    struct kvt_works *w = MEM_NEW(struct kvt_works);
    w->o = *o;
    w->memory.fd = -1;
    list_init(&w->begun);
    w->copies = MEM_ARRAY(struct kvt_copy, o->max_copies);
    enum status st = device_mem_alloc(o->device,
                                      (size_t)KVT_WORKS_MAX * (PIECES_BYTES + SUMS_BYTES),
                                      DEVICE_MEM_HOST, &w->memory, err);
    if (st == OK) st = device_copy_stream(o->device, &w->lane, err);
    if (st != OK) {
        kvt_works_free(w);
        return st;
    }
    char *at = w->memory.ptr;
    for (uint32_t i = 0; i < KVT_WORKS_MAX; i++, at += PIECES_BYTES + SUMS_BYTES) {
        struct kvt_work *k = &w->works[i];
        k->works = w;
        k->pieces = (struct copy_stream_checksum_range *)(void *)at;
        k->sums = (uint64_t *)(void *)(at + PIECES_BYTES);
        list_init(&k->link);
    }
    *out = w;
    return OK;
}

void kvt_works_free(struct kvt_works *w)
{
    if (!w) return;
    copy_stream_close(w->lane);
    device_mem_free(w->o.device, &w->memory);
    mem_free(w->copies);
    mem_free(w);
}

struct kvt_work *kvt_works_take(struct kvt_works *w)
{
    for (uint32_t i = 0; i < KVT_WORKS_MAX; i++) {
        struct kvt_work *k = &w->works[i];
        if (k->taken) continue;
        k->taken = true;
        k->given = false;
        k->stage.n = 0;
        /* nobody else knows it yet */
        atomic_store_explicit(&k->landed, false, memory_order_relaxed);
        return k;
    }
    return NULL;
}

static void on_landed(void *arg)
{
    struct kvt_work *k = arg;
    const struct kvt_works_options *o = &k->works->o; /* constant; *k may be taken again once it has
                                                       * landed */
    atomic_store_explicit(&k->landed, true, memory_order_release);
    o->notice(o->arg);
}

static struct copy_stream_checksum_range piece_at(const char *pool, const struct kvt_strides *s,
                                                  uint32_t n)
{
    struct copy_stream_checksum_range p = {
        .at = pool + s->at,
        .stride = s->stride,
        .run_bytes = (uint32_t)s->run_bytes,
        .n_runs = s->n_runs,
    };
    if (n > 1)
        p.tail = (struct copy_stream_checksum_tail){
            .at = pool + s[1].at,
            .stride = s[1].stride,
            .run_bytes = (uint32_t)s[1].run_bytes,
            .n_runs = s[1].n_runs,
        };
    return p;
}

/* Of the pool's pieces, or of those that were made. */
static enum status begin_sums(struct kvt_work *k, const struct kvt_task *t)
{
    const struct kvt_works *w = k->works;
    const struct kvt_view *v = t->as ? t->as : t->view;
    const char *made = t->as ? kvt_staging_card_at(w->o.staging, k->stage) : NULL;
    for (uint32_t i = 0; i < t->span.n; i++) {
        uint32_t position = t->span.first + i,
                 n_valid = kvt_plan_tokens(v->layout, t->n_tokens, position);
        struct kvt_strides s[2] = { { .run_bytes = kvt_view_bytes(v, n_valid), .n_runs = 1 } };
        uint32_t n = made ? 1 : kvt_plan_strides(v, t->span.layer, t->blocks[position], n_valid, s);
        k->pieces[i] = piece_at(made ? made : w->o.pool, s, n);
        if (made) made += s->run_bytes;
    }
    return copy_stream_checksum(w->lane, k->pieces, t->span.n, k->sums);
}

/* Rows on their way to a lane, so many at once. */
struct made_rows {
    struct copy_stream_conversion c;
    struct copy_stream_kv_rows rows[64];
};

static enum status flush_rows(struct copy_stream *lane, struct made_rows *m)
{
    enum status st = m->c.n ? copy_stream_convert(lane, &m->c) : OK;
    m->c.n = 0;
    return st;
}

/* The pieces of the span as t->as holds them, one behind the other, on the card's side of the
 * stage. */
static enum status begin_making(struct kvt_work *k, const struct kvt_task *t)
{
    const struct kvt_works *w = k->works;
    const struct kv_layout *from = t->view->layout, *to = t->as->layout;
    char *out = kvt_staging_card_at(w->o.staging, k->stage);
    struct made_rows m = { .c = { .from = (enum dtype)from->dtype,
                                  .to = (enum dtype)to->dtype,
                                  .width = from->head_dim,
                                  .rows = m.rows, }, };
    for (uint32_t i = t->span.first; i < t->span.first + t->span.n; i++) {
        uint32_t n_valid = kvt_plan_tokens(to, t->n_tokens, i);
        for (uint32_t done = 0; done < n_valid;) {
            struct kvt_rows r = kvt_plan_rows(t->view, t->blocks, t->as, t->n_tokens, t->span.layer,
                                              i, done);
            if (m.c.n == COUNT_OF(m.rows)) TRY(flush_rows(w->lane, &m));
            m.rows[m.c.n++] = (struct copy_stream_kv_rows){
                .to = out + r.to,
                .to_scales = out + r.to_scales,
                .from = w->o.pool + r.from,
                .from_scales = w->o.pool + r.from_scales,
                .n = r.n,
                .n_groups = r.n_groups,
                .to_stride = r.to_stride,
                .from_stride = r.from_stride,
            };
            done += r.n;
        }
        out += kvt_view_bytes(t->as, n_valid);
    }
    return flush_rows(w->lane, &m);
}

/* What was made, to the processor's side. */
static enum status begin_bringing(struct kvt_work *k, const struct kvt_task *t)
{
    const struct kvt_staging *s = k->works->o.staging;
    return copy_stream_copy(k->works->lane,
                            &(struct copy_stream_strided){
                                .to = kvt_staging_at(s, k->stage),
                                .from = kvt_staging_card_at(s, k->stage),
                                .bytes = kvt_plan_span_bytes(t->as, t->n_tokens, t->span),
                                .n = 1,
                            });
}

static enum status begin_copies(struct kvt_work *k, const struct kvt_task *t)
{
    const struct kvt_works *w = k->works;
    char *stage = kvt_staging_at(w->o.staging, k->stage);
    uint32_t n = kvt_plan_copies_from(0, t->view, t->blocks, t->n_tokens, t->span, w->copies);
    enum status st = OK;
    for (uint32_t i = 0; i < n && st == OK; i++) {
        char *here = stage + w->copies[i].local, *there = w->o.pool + w->copies[i].remote;
        bool fetch = t->move == KVT_TASK_FETCH;
        st = copy_stream_copy(w->lane, &(struct copy_stream_strided){
                                           .to = fetch ? here : there,
                                           .from = fetch ? there : here,
                                           .bytes = w->copies[i].bytes,
                                           .n = 1,
                                       });
    }
    return st;
}

enum status kvt_work_begin(struct kvt_work *k, const struct kvt_task *t)
{
    struct kvt_works *w = k->works;
    ASSERT(k->taken && !k->given && t->span.n <= KVT_BATCH_PIECES);
    ASSERT(!t->as || (k->stage.n && t->move != KVT_TASK_STORE));
    list_push(&w->begun, &k->link);
    enum status st = copy_stream_wait_event(w->lane, t->mark);
    if (st == OK && t->as) st = begin_making(k, t);
    if (st == OK && t->move != KVT_TASK_STAYS)
        st = t->as ? begin_bringing(k, t) : begin_copies(k, t);
    if (st == OK && t->sums) st = begin_sums(k, t);
    return st == OK ? copy_stream_launch_host_fn(w->lane, on_landed, k) : st;
}

bool kvt_work_landed(const struct kvt_work *k)
{
    return atomic_load_explicit(&k->landed, memory_order_acquire);
}

static void free_work(struct kvt_work *k)
{
    struct kvt_works *w = k->works;
    list_remove(&k->link);
    kvt_staging_give(w->o.staging, &w->held, &k->stage);
    k->taken = false;
}

void kvt_work_give(struct kvt_work *k)
{
    if (!k) return;
    k->given = true;
    if (list_empty(&k->link) || kvt_work_landed(k)) free_work(k); /* never begun, or over */
}

void kvt_works_collect(struct kvt_works *w)
{
    if (!w) return;
    LIST_FOREACH(k, &w->begun, struct kvt_work, link)
    if (k->given && kvt_work_landed(k)) free_work(k);
}

struct kvt_work *kvt_works_oldest(struct kvt_works *w)
{
    LIST_FOREACH(k, &w->begun, struct kvt_work, link)
    if (!k->given) return k;
    return NULL;
}

enum status kvt_works_settle(struct kvt_works *w) { return copy_stream_synchronize(w->lane); }

uint32_t *kvt_works_held(struct kvt_works *w) { return &w->held; }
