/* gpu_jobs.c - a table of jobs for one copy stream; see gpu_jobs.h. */
#include "kvtransfer/gpu_jobs.h"

#include "shared/base/assert.h"
#include "shared/base/mem.h"

struct kvt_gpu_jobs {
    struct kvt_gpu_jobs_options o;
    struct copy_stream *stream;
    struct dev_mem memory; /* pieces and sums of all jobs */
    struct kvt_gpu_job jobs[KVT_GPU_JOBS_MAX];
    struct list running;
    struct kvt_copy *copies;
    uint32_t held;
};

enum {
    PIECES_BYTES = KVT_BATCH_PIECES * sizeof(struct copy_stream_checksum_range),
    SUMS_BYTES = KVT_BATCH_PIECES * sizeof(uint64_t)
};

enum status kvt_gpu_jobs_create(const struct kvt_gpu_jobs_options *o, struct kvt_gpu_jobs **out,
                                struct err *err)
{
    struct kvt_gpu_jobs *w = MEM_NEW(struct kvt_gpu_jobs);
    w->o = *o;
    w->memory.fd = -1;
    list_init(&w->running);
    w->copies = MEM_ARRAY(struct kvt_copy, o->max_copies);
    enum status st = device_mem_alloc(o->device,
                                      (size_t)KVT_GPU_JOBS_MAX * (PIECES_BYTES + SUMS_BYTES),
                                      DEVICE_MEM_HOST, &w->memory, err);
    if (st == OK) st = device_copy_stream(o->device, &w->stream, err);
    if (st != OK) {
        kvt_gpu_jobs_free(w);
        return st;
    }
    char *at = w->memory.ptr;
    for (uint32_t i = 0; i < KVT_GPU_JOBS_MAX; i++, at += PIECES_BYTES + SUMS_BYTES) {
        struct kvt_gpu_job *k = &w->jobs[i];
        k->jobs = w;
        k->pieces = (struct copy_stream_checksum_range *)(void *)at;
        k->sums = (uint64_t *)(void *)(at + PIECES_BYTES);
        list_init(&k->link);
    }
    *out = w;
    return OK;
}

void kvt_gpu_jobs_free(struct kvt_gpu_jobs *w)
{
    if (!w) return;
    copy_stream_close(w->stream);
    device_mem_free(w->o.device, &w->memory);
    mem_free(w->copies);
    mem_free(w);
}

struct kvt_gpu_job *kvt_gpu_jobs_acquire(struct kvt_gpu_jobs *w)
{
    for (uint32_t i = 0; i < KVT_GPU_JOBS_MAX; i++) {
        struct kvt_gpu_job *k = &w->jobs[i];
        if (k->acquired) continue;
        k->acquired = true;
        k->released = false;
        k->stage.n = 0;
        /* nobody else knows it yet */
        atomic_store_explicit(&k->done, false, memory_order_relaxed);
        return k;
    }
    return NULL;
}

static void on_job_done(void *arg)
{
    struct kvt_gpu_job *k = arg;
    const struct kvt_gpu_jobs_options *o = &k->jobs->o; /* constant; *k may be reused once done */
    atomic_store_explicit(&k->done, true, memory_order_release);
    o->on_done(o->arg);
}

static struct copy_stream_checksum_range piece_at(const char *pool, const struct kvt_strides *s,
                                                  uint32_t n)
{
    struct copy_stream_checksum_range p = {
        .at = pool + s->at,
        .stride = s->stride,
        .run_bytes = (uint32_t)s->segment_bytes,
        .n_runs = s->n_segments,
    };
    if (n > 1)
        p.tail = (struct copy_stream_checksum_tail){
            .at = pool + s[1].at,
            .stride = s[1].stride,
            .run_bytes = (uint32_t)s[1].segment_bytes,
            .n_runs = s[1].n_segments,
        };
    return p;
}

/* Begins checksums of the pool's pieces, or of the converted ones. */
static enum status begin_checksums(struct kvt_gpu_job *k, const struct kvt_gpu_job_params *t)
{
    const struct kvt_gpu_jobs *w = k->jobs;
    const struct kvt_head_slice *v = t->convert_to ? t->convert_to : t->slice;
    const char *made = t->convert_to ? kvt_staging_device_at(w->o.staging, k->stage) : NULL;
    for (uint32_t i = 0; i < t->range.n; i++) {
        uint32_t i_block = t->range.first + i,
                 n_valid = kvt_plan_tokens(v->layout, t->n_tokens, i_block);
        struct kvt_strides s[2] = { {
            .segment_bytes = kvt_head_slice_bytes(v, n_valid),
            .n_segments = 1,
        } };
        uint32_t n = made ? 1 : kvt_plan_strides(v, t->range.layer, t->blocks[i_block], n_valid, s);
        k->pieces[i] = piece_at(made ? made : w->o.pool, s, n);
        if (made) made += s->segment_bytes;
    }
    return copy_stream_checksum(w->stream, k->pieces, t->range.n, k->sums);
}

/* Rows collected for one call of the copy stream. */
struct kv_row_batch {
    struct copy_stream_conversion c;
    struct copy_stream_kv_rows rows[64];
};

static enum status flush_rows(struct copy_stream *stream, struct kv_row_batch *m)
{
    enum status st = m->c.n ? copy_stream_convert(stream, &m->c) : OK;
    m->c.n = 0;
    return st;
}

/* Begins to convert the pieces of the range to t->convert_to, one after the other, in the device
 * half of the stage. */
static enum status begin_convert(struct kvt_gpu_job *k, const struct kvt_gpu_job_params *t)
{
    const struct kvt_gpu_jobs *w = k->jobs;
    const struct kv_layout *from = t->slice->layout, *to = t->convert_to->layout;
    char *out = kvt_staging_device_at(w->o.staging, k->stage);
    struct kv_row_batch m = { .c = { .from = (enum dtype)from->dtype,
                                  .to = (enum dtype)to->dtype,
                                  .width = from->head_dim,
                                  .rows = m.rows, }, };
    for (uint32_t i = t->range.first; i < t->range.first + t->range.n; i++) {
        uint32_t n_valid = kvt_plan_tokens(to, t->n_tokens, i);
        for (uint32_t done = 0; done < n_valid;) {
            struct kvt_rows r = kvt_plan_rows(t->slice, t->blocks, t->convert_to, t->n_tokens,
                                              t->range.layer, i, done);
            if (m.c.n == COUNT_OF(m.rows)) TRY(flush_rows(w->stream, &m));
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
        out += kvt_head_slice_bytes(t->convert_to, n_valid);
    }
    return flush_rows(w->stream, &m);
}

/* Begins to copy converted pieces to the host half of the stage. */
static enum status begin_d2h(struct kvt_gpu_job *k, const struct kvt_gpu_job_params *t)
{
    const struct kvt_staging *s = k->jobs->o.staging;
    return copy_stream_copy(k->jobs->stream,
                            &(struct copy_stream_strided){
                                .to = kvt_staging_at(s, k->stage),
                                .from = kvt_staging_device_at(s, k->stage),
                                .bytes = kvt_plan_range_bytes(t->convert_to, t->n_tokens, t->range),
                                .n = 1,
                            });
}

static enum status begin_copies(struct kvt_gpu_job *k, const struct kvt_gpu_job_params *t)
{
    const struct kvt_gpu_jobs *w = k->jobs;
    char *stage = kvt_staging_at(w->o.staging, k->stage);
    uint32_t n = kvt_plan_copies_from(0, t->slice, t->blocks, t->n_tokens, t->range, w->copies);
    enum status st = OK;
    for (uint32_t i = 0; i < n && st == OK; i++) {
        char *here = stage + w->copies[i].local, *there = w->o.pool + w->copies[i].remote;
        bool fetch = t->copy == KVT_GPU_COPY_D2H;
        st = copy_stream_copy(w->stream, &(struct copy_stream_strided){
                                             .to = fetch ? here : there,
                                             .from = fetch ? there : here,
                                             .bytes = w->copies[i].bytes,
                                             .n = 1,
                                         });
    }
    return st;
}

enum status kvt_gpu_job_begin(struct kvt_gpu_job *k, const struct kvt_gpu_job_params *t)
{
    struct kvt_gpu_jobs *w = k->jobs;
    ASSERT(k->acquired && !k->released && t->range.n <= KVT_BATCH_PIECES);
    ASSERT(!t->convert_to || (k->stage.n && t->copy != KVT_GPU_COPY_H2D));
    list_push(&w->running, &k->link);
    enum status st = copy_stream_wait_event(w->stream, t->event);
    if (st == OK && t->convert_to) st = begin_convert(k, t);
    if (st == OK && t->copy != KVT_GPU_COPY_NONE)
        st = t->convert_to ? begin_d2h(k, t) : begin_copies(k, t);
    if (st == OK && t->sums) st = begin_checksums(k, t);
    return st == OK ? copy_stream_launch_host_fn(w->stream, on_job_done, k) : st;
}

bool kvt_gpu_job_is_done(const struct kvt_gpu_job *k)
{
    return atomic_load_explicit(&k->done, memory_order_acquire);
}

static void free_job(struct kvt_gpu_job *k)
{
    struct kvt_gpu_jobs *w = k->jobs;
    list_remove(&k->link);
    kvt_staging_release(w->o.staging, &w->held, &k->stage);
    k->acquired = false;
}

void kvt_gpu_job_release(struct kvt_gpu_job *k)
{
    if (!k) return;
    k->released = true;
    if (list_empty(&k->link) || kvt_gpu_job_is_done(k)) free_job(k); /* never begun, or done */
}

void kvt_gpu_jobs_collect(struct kvt_gpu_jobs *w)
{
    if (!w) return;
    LIST_FOREACH (k, &w->running, struct kvt_gpu_job, link)
        if (k->released && kvt_gpu_job_is_done(k)) free_job(k);
}

struct kvt_gpu_job *kvt_gpu_jobs_oldest(struct kvt_gpu_jobs *w)
{
    LIST_FOREACH (k, &w->running, struct kvt_gpu_job, link)
        if (!k->released) return k;
    return NULL;
}

enum status kvt_gpu_jobs_synchronize(struct kvt_gpu_jobs *w)
{
    return copy_stream_synchronize(w->stream);
}

uint32_t *kvt_gpu_jobs_held(struct kvt_gpu_jobs *w) { return &w->held; }
