/* token_batcher.c - see token_batcher.h. A frame that cannot be queued is dropped: its link is
 * lost, or cut here, and the entry node tries the request again from the last token it has. */
#include "decode/token_batcher.h"

#include "shared/base/mem.h"

void token_batcher_init(struct token_batcher *e, struct cluster *cluster)
{
    *e = (struct token_batcher){ .cluster = cluster };
}

void token_batcher_release(struct token_batcher *e)
{
    for (size_t i = 0; i < e->n; i++) buf_release(&e->batches[i].records);
    mem_free(e->batches);
    *e = (struct token_batcher){ 0 };
}

static struct token_batch *find_batch(struct token_batcher *e, uint64_t node)
{
    for (size_t i = 0; i < e->n; i++)
        if (e->batches[i].node == node) return &e->batches[i];
    return NULL;
}

static struct token_batch *batch_of(struct token_batcher *e, uint64_t node)
{
    struct token_batch *t = find_batch(e, node);
    if (t) return t;
    if (e->n == e->cap) {
        e->cap = e->cap ? 2 * e->cap : 8;
        e->batches = mem_realloc(e->batches, e->cap, sizeof *e->batches);
    }
    e->batches[e->n] = (struct token_batch){ .node = node };
    return &e->batches[e->n++];
}

static void send_records(struct token_batcher *e, struct token_batch *t)
{
    if (t->records.len == 0) return;
    enum status st = cluster_send(e->cluster, t->node, FRAME_TOKENS, 0, 0, buf_str(&t->records));
    if (st == ERR_FULL) cluster_disconnect(e->cluster, t->node, "its queue of tokens is full");
    buf_clear(&t->records);
}

void token_batcher_add(struct token_batcher *e, uint64_t node, uint64_t request, uint32_t attempt,
                       uint32_t index, const struct token_logprobs *lp)
{
    struct token_batch *t = batch_of(e, node);
    token_record_add(&t->records, request, attempt, index, lp);
    if (t->records.len >= TOKEN_BATCH_BYTES) send_records(e, t);
}

void token_batcher_flush_node(struct token_batcher *e, uint64_t node)
{
    struct token_batch *t = find_batch(e, node);
    if (t) send_records(e, t);
}

void token_batcher_flush(struct token_batcher *e)
{
    for (size_t i = 0; i < e->n; i++) send_records(e, &e->batches[i]);
}

void token_batcher_drop_node(struct token_batcher *e, uint64_t node)
{
    struct token_batch *t = find_batch(e, node);
    if (!t) return;
    buf_release(&t->records);
    *t = e->batches[--e->n];
}
