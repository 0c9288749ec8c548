/* gpu_jobs.c - a table of jobs for one copy stream; see gpu_jobs.h. */
#include "kvtransfer/gpu_jobs.h"

#include <string.h>

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
    PIECES_BYTES = KVT_PUT_PIECES * sizeof(struct copy_stream_checksum_range),
    SUMS_BYTES = KVT_PUT_PIECES * sizeof(uint64_t)
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
        k->n_notes = k->n_pieces = 0;
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

/* ---- pieces ---- */

/* Where the bytes of a piece are, and where a put copies them in the receiver's pool. */
struct piece_places {
    struct kvt_strides from[2], to[2];
    uint32_t n; /* 2: the second part are scales */
};

/* Parts of one side as the other side has them: values and scales may be adjacent on one alone. */
static void split_like(struct kvt_strides v[2], const struct kvt_strides other[2])
{
    v[1] = (struct kvt_strides){
        .at = v[0].at + other[0].segment_bytes,
        .segment_bytes = other[1].segment_bytes,
        .stride = other[1].stride,
        .n_segments = 1,
    };
    v[0].segment_bytes = other[0].segment_bytes;
}

static struct piece_places places_of(const struct kvt_head_slice *from, int32_t from_block,
                                     const struct kvt_head_slice *to, int32_t to_block,
                                     uint32_t layer, uint32_t n_valid)
{
    struct piece_places p = { 0 };
    p.n = kvt_plan_strides(from, layer, from_block, n_valid, p.from);
    if (!to) return p;
    const uint32_t n = kvt_plan_strides(to, layer, to_block, n_valid, p.to);
    if (n < p.n) split_like(p.to, p.from);
    if (n > p.n) split_like(p.from, p.to);
    if (n > p.n) p.n = n;
    return p;
}

/* `to` as kvt_put_sums has it: an offset. */
static void *to_offset(uint64_t at) { return (void *)(uintptr_t)at; }

static struct copy_stream_checksum_range range_of(const char *pool, const struct piece_places *p)
{
    const struct kvt_strides *s = p->from;
    struct copy_stream_checksum_range r = {
        .at = pool + s->at,
        .to = to_offset(p->to[0].at),
        .stride = s->stride,
        .run_bytes = (uint32_t)s->segment_bytes,
        .n_runs = s->n_segments,
    };
    if (p->n > 1)
        r.tail = (struct copy_stream_checksum_tail){
            .at = pool + s[1].at,
            .to = to_offset(p->to[1].at),
            .stride = s[1].stride,
            .run_bytes = (uint32_t)s[1].segment_bytes,
            .n_runs = s[1].n_segments,
        };
    return r;
}

/* A range of block 0, moved to other blocks: what is costly is computed once for full pieces. */
static struct copy_stream_checksum_range moved(const struct copy_stream_checksum_range *first,
                                               uint64_t from, uint64_t to)
{
    struct copy_stream_checksum_range r = *first;
    r.at = (const char *)r.at + from;
    r.to = to_offset((uintptr_t)r.to + to);
    if (r.tail.n_runs == 0) return r;
    r.tail.at = (const char *)r.tail.at + from;
    r.tail.to = to_offset((uintptr_t)r.tail.to + to);
    return r;
}

/* Writes the pieces of one layer. `to` NULL: they are not copied. */
static void plan_layer(const char *pool, const struct kvt_gpu_job_params *t, uint32_t layer,
                       const struct kvt_head_slice *to, const int32_t *to_blocks,
                       struct copy_stream_checksum_range *out)
{
    const struct kvt_head_slice *v = t->slice;
    const uint32_t full = v->layout->block_tokens;
    const struct piece_places first = places_of(v, 0, to, 0, layer, full);
    const struct copy_stream_checksum_range at_0 = range_of(pool, &first);
    const uint64_t from_bytes = kv_layout_piece_bytes(v->layout),
                   to_bytes = to ? kv_layout_piece_bytes(to->layout) : 0;
    for (uint32_t i = 0; i < t->range.n; i++) {
        const uint32_t i_block = t->range.first + i,
                       n_valid = kvt_plan_tokens(v->layout, t->n_tokens, i_block);
        const int32_t from_block = t->blocks[i_block], to_block = to ? to_blocks[i_block] : 0;
        if (n_valid == full) {
            out[i] = moved(&at_0, (uint64_t)from_block * from_bytes, (uint64_t)to_block * to_bytes);
            continue;
        }
        const struct piece_places p = places_of(v, from_block, to, to_block, layer, n_valid);
        out[i] = range_of(pool, &p);
    }
}

/* Appends pieces to those of the job. */
static void plan_pieces(struct kvt_gpu_job *k, const struct kvt_gpu_job_params *t,
                        const struct kvt_head_slice *to, const int32_t *to_blocks)
{
    for (uint32_t i = 0; i <= t->more_layers; i++, k->n_pieces += t->range.n) {
        ASSERT(t->range.n <= KVT_PUT_PIECES - k->n_pieces);
        plan_layer(k->jobs->o.pool, t, t->range.layer + i, to, to_blocks, k->pieces + k->n_pieces);
    }
}

struct kvt_put_sums kvt_gpu_job_plan_put(struct kvt_gpu_job *k, const struct kvt_gpu_job_params *t,
                                         const struct kvt_head_slice *to, const int32_t *to_blocks)
{
    ASSERT(k->acquired && to->n_heads == t->slice->n_heads);
    plan_pieces(k, t, to, to_blocks);
    return (struct kvt_put_sums){ .pieces = k->pieces, .values = k->sums, .n = k->n_pieces };
}

bool kvt_gpu_job_add_note(struct kvt_gpu_job *k, const struct kvt_gpu_job_params *t,
                          const uint64_t *expected)
{
    const struct kvt_note_range note = { t->range.layer, t->more_layers, t->range.first,
                                         t->range.n };
    const uint32_t n = kvt_note_pieces(&note);
    ASSERT(n <= KVT_PUT_PIECES);
    if (k->n_notes == KVT_GPU_NOTES_MAX || n > KVT_PUT_PIECES - k->n_pieces) return false;
    k->notes[k->n_notes++] = note;
    if (!expected) return true;
    memcpy(k->expected + k->n_pieces, expected, n * sizeof *expected);
    plan_pieces(k, t, NULL, NULL);
    return true;
}

/* ---- work on the job's stream ---- */

/* Begins checksums of the pieces that were converted, one after the other in the stage. */
static enum status begin_converted_checksums(struct kvt_gpu_job *k,
                                             const struct kvt_gpu_job_params *t)
{
    const struct kvt_gpu_jobs *w = k->jobs;
    const struct kvt_head_slice *v = t->convert_to;
    const char *made = kvt_staging_device_at(w->o.staging, k->stage);
    for (uint32_t i = 0; i < t->range.n; i++) {
        const uint64_t bytes = kvt_head_slice_bytes(
            v, kvt_plan_tokens(v->layout, t->n_tokens, t->range.first + i));
        k->pieces[i] = (struct copy_stream_checksum_range){ .at = made,
                                                            .run_bytes = (uint32_t)bytes,
                                                            .n_runs = 1 };
        made += bytes;
    }
    return copy_stream_checksum(w->stream, k->pieces, t->range.n, k->sums);
}

/* Begins checksums of the pool's pieces, or of the converted ones. */
static enum status begin_checksums(struct kvt_gpu_job *k, const struct kvt_gpu_job_params *t)
{
    if (t->convert_to) return begin_converted_checksums(k, t);
    plan_pieces(k, t, NULL, NULL);
    return copy_stream_checksum(k->jobs->stream, k->pieces, k->n_pieces, k->sums);
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
    ASSERT(k->acquired && !k->released);
    ASSERT(t->range.n <= KVT_BATCH_PIECES || t->copy == KVT_GPU_COPY_NONE);
    ASSERT(!t->convert_to || (k->stage.n && t->copy != KVT_GPU_COPY_H2D));
    list_push(&w->running, &k->link);
    enum status st = copy_stream_wait_event(w->stream, t->event);
    if (st == OK && t->convert_to) st = begin_convert(k, t);
    if (st == OK && t->copy != KVT_GPU_COPY_NONE)
        st = t->convert_to ? begin_d2h(k, t) : begin_copies(k, t);
    if (st == OK && t->sums) st = begin_checksums(k, t);
    return st == OK ? copy_stream_launch_host_fn(w->stream, on_job_done, k) : st;
}

enum status kvt_gpu_job_begin_check(struct kvt_gpu_job *k)
{
    struct copy_stream *stream = k->jobs->stream;
    ASSERT(k->acquired && !k->released && k->n_notes > 0);
    list_push(&k->jobs->running, &k->link);
    if (k->n_pieces > 0) TRY(copy_stream_checksum(stream, k->pieces, k->n_pieces, k->sums));
    return copy_stream_launch_host_fn(stream, on_job_done, k);
}

void kvt_gpu_job_attach(struct kvt_gpu_job *k) { list_push(&k->jobs->running, &k->link); }

void kvt_gpu_job_end_put(struct kvt_gpu_job *k)
{
    atomic_store_explicit(&k->done, true, memory_order_release);
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
