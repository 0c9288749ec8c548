/* token_batcher.c - see token_batcher.h. A frame that cannot be queued is dropped on purpose: its link is lost, or
 * cut here, and the entry node then runs the request again from the last token it has. */
#include "decode/token_batcher.h"

#include "shared/base/mem.h"

void emit_init(struct emit *e, struct cluster *cluster)
{
    *e = (struct emit){ .cluster = cluster };
}

void emit_release(struct emit *e)
{
    for (size_t i = 0; i < e->n; i++) buf_release(&e->targets[i].records);
    mem_free(e->targets);
    *e = (struct emit){ 0 };
}

static struct emit_target *find_target(struct emit *e, uint64_t node)
{
    for (size_t i = 0; i < e->n; i++)
        if (e->targets[i].node == node) return &e->targets[i];
    return NULL;
}

static struct emit_target *target_of(struct emit *e, uint64_t node)
{
    struct emit_target *t = find_target(e, node);
    if (t) return t;
    if (e->n == e->cap) {
        e->cap = e->cap ? 2 * e->cap : 8;
        e->targets = mem_realloc(e->targets, e->cap, sizeof *e->targets);
    }
    e->targets[e->n] = (struct emit_target){ .node = node };
    return &e->targets[e->n++];
}

static void send_records(struct emit *e, struct emit_target *t)
{
    if (t->records.len == 0) return;
    enum status st = cluster_send(e->cluster, t->node, FRAME_TOKENS, 0, 0, buf_str(&t->records));
    if (st == ERR_FULL) cluster_disconnect(e->cluster, t->node, "its queue of tokens is full");
    buf_clear(&t->records);
}

void emit_token(struct emit *e, uint64_t node, uint64_t request, uint32_t attempt, uint32_t index,
                const struct token_logprobs *lp)
{
    struct emit_target *t = target_of(e, node);
    token_record_add(&t->records, request, attempt, index, lp);
    if (t->records.len >= EMIT_FRAME_BYTES) send_records(e, t);
}

void emit_flush_node(struct emit *e, uint64_t node)
{
    struct emit_target *t = find_target(e, node);
    if (t) send_records(e, t);
}

void emit_flush(struct emit *e)
{
    for (size_t i = 0; i < e->n; i++) send_records(e, &e->targets[i]);
}

void emit_drop(struct emit *e, uint64_t node)
{
    struct emit_target *t = find_target(e, node);
    if (!t) return;
    buf_release(&t->records);
    *t = e->targets[--e->n];
}
