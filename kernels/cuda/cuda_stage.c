/* cuda_stage.c - what a step's rows are, packed into one piece of pinned memory and sent in one copy: ids, positions, rows whose logits are
 * wanted, and of every list its sequences, rows and block tables.
 *
 * The piece is written again only when its last copy is over. It grows when a step needs more than any before; that is rare after the first. */
#include <string.h>

#include "kernels/cpu/sizes.h"
#include "kernels/cuda/cuda_row.h"
#include "shared/base/mem.h"

enum { ALIGN = 64, LEAST_BYTES = 1 << 20 };

/* ---- room -------------------------------------------------------------------------------------------------------- */

static size_t table_length(const struct attn_seq *s, int32_t block_tokens)
{
    return s->n_q > 0 ? (size_t)((s->pos_begin + s->n_q + block_tokens - 1) / block_tokens) : 0;
}

static size_t padded(size_t n, size_t size) { return round_up(n * size, ALIGN); }

static size_t list_bytes(const struct attn_list *l, int32_t block_tokens)
{
    size_t n_rows = 0, n_blocks = 0;
    for (int32_t i = 0; i < l->n_seqs; i++) {
        n_rows += (size_t)l->seqs[i].n_q;
        n_blocks += table_length(&l->seqs[i], block_tokens);
    }
    return padded(1, sizeof(struct cuda_counts)) + padded((size_t)l->n_seqs, sizeof(struct cuda_seq)) + padded(n_rows, sizeof(struct cuda_row)) +
           padded(n_blocks, sizeof(int32_t));
}

static size_t step_bytes(const struct kernel_step *s)
{
    size_t n = 2 * padded((size_t)s->n_rows, sizeof(int32_t)) + padded((size_t)s->n_logits, sizeof(int32_t));
    for (int32_t i = 0; i < s->n_lists; i++) n += list_bytes(&s->lists[i], s->block_tokens);
    return n;
}

void cuda_staging_release(struct cuda_ctx *c)
{
    struct cuda_staging *st = &c->staging;
    if (st->copied) (void)cuda_check(c->device, cudaEventDestroy(st->copied), "ending an event");
    if (st->host) (void)cuda_check(c->device, cudaFreeHost(st->host), "freeing pinned memory");
    device_mem_free(c->base.device, &st->card);
    mem_free(st->lists);
    *st = (struct cuda_staging){ 0 };
}

/* False: the card failed, or has no memory for it, which then counts as a failure. */
static bool grow(struct cuda_ctx *c, size_t bytes)
{
    struct cuda_staging *st = &c->staging;
    struct err           err;
    if (bytes <= st->bytes) return true;
    bytes = bytes < LEAST_BYTES ? LEAST_BYTES : bytes + bytes / 2;
    if (!cuda_check(c->device, cudaStreamSynchronize(c->device->stream), "a step")) return false;
    if (st->host && !cuda_check(c->device, cudaFreeHost(st->host), "freeing pinned memory")) return false;
    st->host = NULL;
    st->bytes = 0;
    device_mem_free(c->base.device, &st->card);
    void *host = NULL;
    if (!cuda_check(c->device, cudaMallocHost(&host, bytes), "getting pinned memory")) return false;
    st->host = host;
    if (device_mem_alloc(c->base.device, bytes, DEVICE_MEM_PRIVATE, &st->card, &err) != OK)
        return cuda_check(c->device, cudaErrorMemoryAllocation, "getting memory for a step's rows");
    st->bytes = bytes;
    return true;
}

/* ---- writing ----------------------------------------------------------------------------------------------------- */

/* The next n elements on both sides; *card gets the card's address. */
static void *put(struct cuda_staging *st, size_t n, size_t size, const void **card)
{
    void *host = st->host + st->used;
    *card = (const char *)st->card.ptr + st->used;
    st->used += padded(n, size);
    return host;
}

static const int32_t *put_ints(struct cuda_staging *st, const int32_t *from, size_t n)
{
    const void *card;
    void       *to = put(st, n, sizeof *from, &card);
    if (n > 0) memcpy(to, from, n * sizeof *from);
    return card;
}

static void put_list(struct cuda_staging *st, const struct attn_list *l, int32_t block_tokens, struct cuda_list *to)
{
    const void *counts_at, *seqs_at, *rows_at, *tables_at;
    size_t      n_rows = 0, n_blocks = 0;
    for (int32_t i = 0; i < l->n_seqs; i++) {
        n_rows += (size_t)l->seqs[i].n_q;
        n_blocks += table_length(&l->seqs[i], block_tokens);
    }
    struct cuda_counts *counts = put(st, 1, sizeof *counts, &counts_at);
    struct cuda_seq *seqs = put(st, (size_t)l->n_seqs, sizeof *seqs, &seqs_at);
    struct cuda_row *rows = put(st, n_rows, sizeof *rows, &rows_at);
    int32_t         *tables = put(st, n_blocks, sizeof *tables, &tables_at), table = 0;
    for (int32_t i = 0; i < l->n_seqs; i++) {
        const struct attn_seq *s = &l->seqs[i];
        const size_t           n = table_length(s, block_tokens);
        seqs[i] = (struct cuda_seq){ .q_begin = s->q_begin, .n_q = s->n_q, .pos_begin = s->pos_begin, .table = table };
        if (n > 0) memcpy(tables + table, s->block_table, n * sizeof *tables);
        table += (int32_t)n;
    }
    attention_list_rows(counts, l->seqs, l->n_seqs, rows);
    *to = (struct cuda_list){ .bounds = *counts, .counts = counts_at, .seqs = seqs_at, .rows = rows_at, .tables = tables_at };
}

void cuda_stage(struct kernel_ctx *base, struct kernel_step *s)
{
    struct cuda_ctx     *c = cuda_ctx_of(base);
    struct cuda_staging *st = &c->staging;
    if (!cuda_check(c->device, cudaEventSynchronize(st->copied), "a step") || !grow(c, step_bytes(s))) return;
    if (s->n_lists > st->max_lists) {
        st->lists = mem_realloc(st->lists, (size_t)s->n_lists, sizeof *st->lists);
        st->max_lists = s->n_lists;
    }
    st->used = 0;
    s->ids = put_ints(st, s->ids, (size_t)s->n_rows);
    s->pos = put_ints(st, s->pos, (size_t)s->n_rows);
    s->logit_rows = put_ints(st, s->logit_rows, (size_t)s->n_logits);
    for (int32_t i = 0; i < s->n_lists; i++) {
        put_list(st, &s->lists[i], s->block_tokens, &st->lists[i]);
        s->lists[i].staged = &st->lists[i];
    }
    if (cuda_check(c->device, cudaMemcpyAsync(st->card.ptr, st->host, st->used, cudaMemcpyHostToDevice, c->device->stream), "sending a step's rows"))
        (void)cuda_check(c->device, cudaEventRecord(st->copied, c->device->stream), "sending a step's rows");
}
