/* cuda_upload_step.c - packs a step's rows and sequences into one piece of pinned memory and
 * uploads it in one copy:
 *
 *   count of rows | ids | positions | of a pass: where its rows come from | rows of logits |
 *   sampling requests | per list: counts, sequences, rows | block tables of all lists, then
 *   moves, then sampling's edits and masks
 *
 * The numbers of rows, logits and lists, which a graph fixes, determine where all but the last part
 * lie: a graph's launches hold addresses that are the same in every step it serves. The host writes
 * to a ring, so that a step and the passes behind it are written while earlier copies wait for the
 * GPU; the GPU has one buffer, because its work runs in order. Rows that move (kernel_move) are
 * moved there, before the step computes. cuda_prepare allocates for the largest step; without it
 * (tests) buffers grow and nothing can be captured. Thread: engine. */
#include "kernels/cuda/cuda_backend.h"

#include <string.h>

#include "kernels/cuda/inputs/move_rows.h"
#include "shared/base/arith.h"
#include "shared/base/assert.h"
#include "shared/base/mem.h"

enum { ALIGN = 64, MIN_BYTES = 1 << 20 };

/* ---- room ---- */

static size_t padded(size_t n, size_t size) { return round_up(n * size, ALIGN); }

static size_t list_bytes(size_t n_seqs, size_t n_rows)
{
    return padded(1, sizeof(struct cuda_attn_counts)) +
           padded(n_seqs, sizeof(struct cuda_attn_seq)) +
           padded(n_rows, sizeof(struct cuda_attn_row));
}

static size_t rows_bytes(size_t n_rows, size_t n_logits)
{
    return padded(1, sizeof(struct cuda_step_rows)) + 3 * padded(n_rows, sizeof(int32_t)) +
           padded(n_logits, sizeof(int32_t)) + padded(n_logits, sizeof(struct sample_row_params));
}

/* Bytes of the largest step. A row is in at most two lists, the step's and one other; a sequence
 * that lists split is in one more per split, with its table. In a graph each list has room for all
 * rows. */
size_t cuda_step_upload_bytes(const struct cuda_ctx *c)
{
    const struct kernel_limits *l = &c->limits;
    const size_t lists = l->max_lists, times = lists > 1 ? 2 : 1, rows = times * l->max_rows;
    const size_t tables = (times * l->max_seqs + lists) * (l->max_len / l->block_tokens + 1);
    const size_t in_graph = min_size(l->max_rows, CUDA_GRAPH_ROWS_MAX),
                 of_lists = max_size(list_bytes(rows + lists, rows) + lists * list_bytes(1, 1),
                                     l->n_lists * list_bytes(in_graph, in_graph));
    return rows_bytes(l->max_rows, l->max_logits) + of_lists + padded(tables, sizeof(int32_t)) +
           padded(l->max_seqs, sizeof(struct kernel_move)) + c->sampling.room;
}

bool cuda_step_upload_init(struct cuda_ctx *c)
{
    for (int i = 0; i < CUDA_UPLOADS_MAX; i++)
        if (!cuda_check(
                c->device,
                cudaEventCreateWithFlags(&c->upload_step.written[i].copied, cudaEventDisableTiming),
                "making an event"))
            return false;
    return true;
}

void cuda_step_upload_release(struct cuda_ctx *c)
{
    struct cuda_step_upload *st = &c->upload_step;
    for (int i = 0; i < CUDA_UPLOADS_MAX; i++)
        if (st->written[i].copied)
            (void)cuda_check(c->device, cudaEventDestroy(st->written[i].copied), "ending an event");
    if (st->ring) (void)cuda_check(c->device, cudaFreeHost(st->ring), "freeing pinned memory");
    device_mem_free(c->base.device, &st->device_mem);
    mem_free(st->lists);
    mem_free(st->host_lists);
    *st = (struct cuda_step_upload){ 0 };
}

/* Replaces the buffers after the copies that read them are complete. */
static bool replace_buffers(struct cuda_ctx *c, size_t bytes)
{
    struct cuda_step_upload *st = &c->upload_step;
    struct err err;
    void *ring = NULL;
    st->bytes = st->ring_at = st->n_written = 0;
    device_mem_free(c->base.device, &st->device_mem);
    if (st->ring && !cuda_check(c->device, cudaFreeHost(st->ring), "freeing pinned memory"))
        return false;
    st->ring = NULL;
    if (!cuda_check(c->device, cudaMallocHost(&ring, 2 * bytes), "getting pinned memory"))
        return false;
    st->ring = ring;
    if (device_mem_alloc(c->base.device, bytes, DEVICE_MEM_PRIVATE, &st->device_mem, &err) != OK)
        return cuda_check(c->device, cudaErrorMemoryAllocation, "getting memory for a step's rows");
    st->bytes = bytes;
    return true;
}

/* False: the GPU failed, or has no memory, which counts as a failure. */
bool cuda_step_upload_grow(struct cuda_ctx *c, size_t bytes)
{
    if (bytes <= c->upload_step.bytes) return true;
    ASSERT(c->n_graphs == 0); /* they hold addresses; cuda_prepare's buffers suffice for all
                               * steps */
    if (c->limits.max_rows == 0) bytes = bytes < MIN_BYTES ? MIN_BYTES : bytes + bytes / 2;
    return cuda_check(c->device, cudaStreamSynchronize(c->device->stream), "a step") &&
           replace_buffers(c, bytes);
}

/* ---- the ring ---- */

static bool is_free(const struct cuda_step_upload *st, size_t begin, size_t end)
{
    for (uint32_t i = 0; i < st->n_written; i++) {
        const struct cuda_written_step *w =
            &st->written[(st->first_written + i) % CUDA_UPLOADS_MAX];
        if (w->begin < end && begin < w->end) return false;
    }
    return true;
}

/* Finds room for at most `bytes` of a step, and waits until copies from there have completed. */
static bool begin_writing(struct cuda_ctx *c, size_t bytes)
{
    struct cuda_step_upload *st = &c->upload_step;
    ASSERT(bytes <= st->bytes);
    if (st->ring_at + bytes > 2 * st->bytes) st->ring_at = 0;
    while (st->n_written == CUDA_UPLOADS_MAX || !is_free(st, st->ring_at, st->ring_at + bytes)) {
        const struct cuda_written_step *oldest = &st->written[st->first_written];
        if (!cuda_check(c->device, cudaEventSynchronize(oldest->copied), "a step")) return false;
        st->first_written = (st->first_written + 1) % CUDA_UPLOADS_MAX;
        st->n_written--;
    }
    st->host = st->ring + st->ring_at;
    return true;
}

/* ---- places ---- */

/* Allocates n elements on both sides; *device gets the GPU's address. */
static void *put(struct cuda_step_upload *st, size_t n, size_t size, const void **device)
{
    void *host = st->host + st->used;
    *device = (const char *)st->device_mem.ptr + st->used;
    st->used += padded(n, size);
    ASSERT(st->used <= st->bytes);
    return host;
}

static void reserve_lists(struct cuda_step_upload *st, int32_t n)
{
    if (n <= st->max_lists) return;
    st->lists = mem_realloc(st->lists, (size_t)n, sizeof *st->lists);
    st->host_lists = mem_realloc(st->host_lists, (size_t)n, sizeof *st->host_lists);
    st->max_lists = n;
}

/* Assigns an address to every part, without writing it. n_seqs and n_rows of lists: `most`, or each
 * list's own. */
static void lay_out(struct cuda_step_upload *st, const struct kernel_step *s, size_t most,
                    struct cuda_step_host *to)
{
    reserve_lists(st, s->n_lists);
    st->used = 0;
    to->real = put(st, 1, sizeof *to->real, (const void **)&st->real);
    to->ids = put(st, (size_t)s->n_rows, sizeof *to->ids, (const void **)&st->ids);
    to->pos = put(st, (size_t)s->n_rows, sizeof *to->pos, (const void **)&st->pos);
    to->from_rows = put(st, s->program == KERNEL_STEP ? 0 : (size_t)s->n_rows,
                        sizeof *to->from_rows, (const void **)&st->from_rows);
    to->logit_rows = put(st, (size_t)s->n_logits, sizeof *to->logit_rows,
                         (const void **)&st->logit_rows);
    to->row_params = put(st, (size_t)s->n_logits, sizeof *to->row_params,
                         (const void **)&st->row_params);
    for (int32_t i = 0; i < s->n_lists; i++) {
        struct cuda_attn_list *l = &st->lists[i];
        struct cuda_list_host *p = &st->host_lists[i];
        size_t n_seqs = most, n_rows = most;
        if (most == 0) {
            n_seqs = (size_t)s->lists[i].n_seqs;
            for (int32_t q = 0; q < s->lists[i].n_seqs; q++)
                n_rows += (size_t)s->lists[i].seqs[q].n_q;
        }
        p->counts = put(st, 1, sizeof *p->counts, (const void **)&l->counts);
        p->seqs = put(st, n_seqs, sizeof *p->seqs, (const void **)&l->seqs);
        p->rows = put(st, n_rows, sizeof *p->rows, (const void **)&l->rows);
    }
    to->variable = put(st, 0, 1, (const void **)&st->variable);
    for (int32_t i = 0; i < s->n_lists; i++) st->lists[i].tables = (const int32_t *)st->variable;
}

static void point_at_device(const struct cuda_step_upload *st, struct kernel_step *s)
{
    s->ids = st->ids;
    s->pos = st->pos;
    s->from_rows = st->from_rows;
    s->logit_rows = st->logit_rows;
    for (int32_t i = 0; i < s->n_lists; i++) s->lists[i].uploaded = &st->lists[i];
}

/* ---- writing ---- */

static size_t table_length(const struct attn_seq *s, int32_t block_tokens)
{
    const int32_t end = s->pos_begin + s->n_most + s->n_q;
    return s->n_q > 0 ? (size_t)((end + block_tokens - 1) / block_tokens) : 0;
}

static size_t tables_length(const struct kernel_step *s)
{
    size_t n = 0;
    for (int32_t i = 0; i < s->n_lists; i++)
        for (int32_t q = 0; q < s->lists[i].n_seqs; q++)
            n += table_length(&s->lists[i].seqs[q], s->block_tokens);
    return n;
}

/* As lay_out places them; the remaining bytes are for sampling. */
static size_t step_bytes(const struct kernel_step *s, size_t most)
{
    size_t n = rows_bytes((size_t)s->n_rows, (size_t)s->n_logits) +
               padded(tables_length(s), sizeof(int32_t)) +
               padded((size_t)s->n_moves, sizeof *s->moves);
    for (int32_t i = 0; i < s->n_lists; i++) {
        size_t n_rows = most;
        for (int32_t q = 0; q < s->lists[i].n_seqs && most == 0; q++)
            n_rows += (size_t)s->lists[i].seqs[q].n_q;
        n += list_bytes(most ? most : (size_t)s->lists[i].n_seqs, n_rows);
    }
    return n;
}

/* Passes take the likeliest tokens: no edits. */
static size_t edits_room(const struct cuda_ctx *c, const struct kernel_step *s)
{
    return s->program == KERNEL_STEP && s->sample_requests ? c->sampling.room : 0;
}

/* Copies n, then zeros up to n_all; 0 is an existing row. */
static void copy_padded(int32_t *to, const int32_t *from, size_t n, size_t n_all)
{
    if (n > 0) memcpy(to, from, n * sizeof *to);
    if (n_all > n) memset(to + n, 0, (n_all - n) * sizeof *to);
}

/* Writes a list; its tables begin at *table, which moves past them. */
static void put_list(const struct attn_list *l, int32_t block_tokens,
                     const struct cuda_list_host *to, int32_t *tables, int32_t *table)
{
    for (int32_t i = 0; i < l->n_seqs; i++) {
        const struct attn_seq *s = &l->seqs[i];
        const size_t n = table_length(s, block_tokens);
        to->seqs[i] = (struct cuda_attn_seq){
            .q_begin = s->q_begin, .n_q = s->n_q, .pos_begin = s->pos_begin, .table = *table
        };
        if (n > 0) memcpy(tables + *table, s->block_table, n * sizeof *tables);
        *table += (int32_t)n;
    }
}

static bool list_moves(const struct attn_list *l)
{
    for (int32_t i = 0; i < l->n_seqs; i++)
        if (l->seqs[i].move) return true;
    return false;
}

/* What attention_move_rows wants of the rows of a list. */
static void put_moves(const struct attn_list *l, const struct cuda_list_host *to, int32_t n_rows)
{
    if (!list_moves(l)) return;
    for (int32_t i = 0; i < n_rows; i++) to->rows[i].n_old = (int32_t)l->seqs[to->rows[i].seq].move;
}

/* The rows' own copies of where their sequences' tables are. */
static void place_tables(const struct cuda_list_host *to, int32_t n_rows)
{
    for (int32_t i = 0; i < n_rows; i++) to->rows[i].table = to->seqs[to->rows[i].seq].table;
}

static bool copy_to_device(struct cuda_ctx *c)
{
    struct cuda_step_upload *st = &c->upload_step;
    struct cuda_written_step *w =
        &st->written[(st->first_written + st->n_written) % CUDA_UPLOADS_MAX];
    w->begin = st->ring_at;
    w->end = st->ring_at = st->ring_at + padded(st->used, 1);
    st->n_written++;
    return cuda_check(c->device,
                      cudaMemcpyAsync(st->device_mem.ptr, st->host, st->used,
                                      cudaMemcpyHostToDevice, c->device->stream),
                      "uploading a step's rows") &&
           cuda_check(c->device, cudaEventRecord(w->copied, c->device->stream),
                      "uploading a step's rows");
}

/* Whether decode rows have large segments: pools of latents, where prompts run as decode rows, and
 * steps of so many rows that these fill the GPU. What --deterministic promises needs segments that
 * depend on positions alone. */
enum { MANY_ROWS = 32 };
static bool has_large_segments(const struct cuda_ctx *c, const struct kernel_step *s)
{
    return c->limits.latent || (s->n_rows >= MANY_ROWS && !c->base.options.deterministic);
}

/* Counts rows and sequences of the lists, which determine the graph, into the lists' bounds. */
static void count_lists(struct cuda_step_upload *st, const struct kernel_step *s, bool is_large)
{
    reserve_lists(st, s->n_lists);
    for (int32_t i = 0; i < s->n_lists; i++)
        attention_list_rows(&st->lists[i].bounds, s->lists[i].seqs, s->lists[i].n_seqs,
                            s->block_tokens, is_large, NULL);
}

/* True: the sampling requests are part of it. */
static bool write_step(struct cuda_ctx *c, const struct kernel_step *s,
                       const struct kernel_step *padded_step, const struct cuda_captured_graph *r)
{
    struct cuda_step_upload *st = &c->upload_step;
    struct cuda_step_host to;
    int32_t table = 0;
    lay_out(st, padded_step, r ? (size_t)r->n_rows : 0, &to);
    *to.real = (struct cuda_step_rows){ .n_rows = s->n_rows };
    copy_padded(to.ids, s->ids, (size_t)s->n_rows, (size_t)padded_step->n_rows);
    copy_padded(to.pos, s->pos, (size_t)s->n_rows, (size_t)padded_step->n_rows);
    if (s->program != KERNEL_STEP)
        copy_padded(to.from_rows, s->from_rows, (size_t)s->n_rows, (size_t)padded_step->n_rows);
    copy_padded(to.logit_rows, s->logit_rows, (size_t)s->n_logits, (size_t)padded_step->n_logits);
    for (int32_t i = 0; i < s->n_lists; i++) {
        put_list(&s->lists[i], s->block_tokens, &st->host_lists[i], (int32_t *)(void *)to.variable,
                 &table);
        attention_list_rows(&st->lists[i].bounds, s->lists[i].seqs, s->lists[i].n_seqs,
                            s->block_tokens, has_large_segments(c, s), st->host_lists[i].rows);
        *st->host_lists[i].counts = st->lists[i].bounds;
        place_tables(&st->host_lists[i], st->lists[i].bounds.n_rows);
        put_moves(&s->lists[i], &st->host_lists[i], st->lists[i].bounds.n_rows);
    }
    st->used += padded((size_t)table, sizeof(int32_t));
    struct kernel_move *moves = put(st, (size_t)s->n_moves, sizeof *moves,
                                    (const void **)&st->moves);
    if (s->n_moves > 0) memcpy(moves, s->moves, (size_t)s->n_moves * sizeof *moves);
    return cuda_sampling_write(c, s->sample_requests, s->n_logits, edits_room(c, s), &to);
}

static bool is_alone(const struct attn_list *l)
{
    for (int32_t i = 0; i < l->n_seqs; i++)
        if (l->seqs[i].n_q > 1 || (l->seqs[i].n_q == 1 && !l->seqs[i].is_decode)) return false;
    return true;
}

/* `s` is still the host's step. */
static bool move_uploaded(struct cuda_ctx *c, const struct kernel_step *s)
{
    struct cuda_step_upload *st = &c->upload_step;
    const struct move_rows_call rows = {
        .moves = st->moves,
        .n_moves = s->n_moves,
        .n_logits = s->n_logits,
        .accepted = c->sampling.accepted.ptr,
        .ids = (int32_t *)st->ids,
        .pos = (int32_t *)st->pos,
        .from_rows = (int32_t *)st->from_rows,
        .logit_rows = (int32_t *)st->logit_rows,
        .row_params = s->sampled ? (struct sample_row_params *)st->row_params : NULL,
    };
    if (s->n_moves == 0) return true;
    ASSERT(rows.accepted);
    if (!cuda_check(c->device, move_rows(c->device->stream, &rows), "a step's rows")) return false;
    for (int32_t i = 0; i < s->n_lists; i++) {
        const struct cuda_attn_list *l = &st->lists[i];
        const struct attention_move_call list = {
            .rows = (struct cuda_attn_row *)l->rows,
            .counts = (struct cuda_attn_counts *)l->counts,
            .n_rows = l->bounds.n_rows,
            .n_decode = l->bounds.n_decode,
            .moves = st->moves,
            .accepted = c->sampling.accepted.ptr,
            .is_large = has_large_segments(c, s),
            .is_alone = is_alone(&s->lists[i]),
        };
        if (list_moves(&s->lists[i]) &&
            !cuda_check(c->device, attention_move_rows(c->device->stream, &list), "a step's rows"))
            return false;
    }
    return true;
}

void cuda_upload_step(struct kernel_ctx *base, struct kernel_step *s)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    struct cuda_step_upload *st = &c->upload_step;
    struct kernel_step padded_step = *s;
    s->graph_launched = false;
    c->step = (struct cuda_step){
        .program = s->program,
        .n_logits = s->n_logits,
        .parity = s->parity,
        .first_kept = s->first_kept,
        .n_kept = s->n_kept,
    };
    count_lists(st, s, has_large_segments(c, s));
    const struct cuda_captured_graph *r = cuda_graph_for(c, s);
    if (r) {
        padded_step.n_rows = r->n_rows;
        padded_step.n_logits = r->n_logits;
    }
    const size_t bytes = step_bytes(&padded_step, r ? (size_t)r->n_rows : 0) + edits_room(c, s);
    if (!cuda_step_upload_grow(c, bytes) || !begin_writing(c, bytes)) return;
    s->sampled = write_step(c, s, &padded_step, r);
    if (!copy_to_device(c) || !move_uploaded(c, s)) return;
    point_at_device(st, s);
    s->n_rows = padded_step.n_rows;
    s->n_logits = padded_step.n_logits;
    s->graph_launched = r != NULL;
    c->step.graph = r;
}

/* Sets the addresses of a captured step's parts. Uploads nothing, because its launches do not
 * run. */
void cuda_upload_step_capture(struct cuda_ctx *c, struct kernel_step *s,
                              const struct cuda_attn_counts *bounds)
{
    struct cuda_step_host unused;
    lay_out(&c->upload_step, s, (size_t)s->n_rows, &unused);
    for (int32_t i = 0; i < s->n_lists; i++) c->upload_step.lists[i].bounds = *bounds;
    point_at_device(&c->upload_step, s);
}
