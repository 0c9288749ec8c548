/* redis_reserve.c - placements, to a script of Redis and back. Thread: loop. */
#include "scheduler/directory/redis/redis_reserve.h"

#include <string.h>

#include "scheduler/directory/redis/redis_state.h"
#include "scheduler/directory/redis/scripts.h"
#include "shared/base/mem.h"

/* ---- the query in binary ---- */

static void add_be(struct buf *b, uint64_t v, int bytes)
{
    for (int i = bytes - 1; i >= 0; i--) buf_add_char(b, (char)(v >> (8 * i)));
}

static void add_terms(struct buf *b, const struct prefix_query *q)
{
    add_be(b, q->ns, 4);
    add_be(b, q->blocks, 4);
    add_be(b, q->compute, 8);
    add_be(b, q->decode ? q->decode : q->compute, 8);
}

static void add_rung(struct redis_query *out, const struct prefix_rung *r)
{
    char *slot = out->slots[out->n_slots++];
    add_be(&out->bytes, r->tag, 4);
    add_be(&out->bytes, r->tokens, 4);
    slot[0] = (char)(r->slot >> 8);
    slot[1] = (char)r->slot;
}

static void add_use(struct buf *b, const struct prefix_use *u)
{
    add_be(b, u->kind, 8);
    add_be(b, u->flags, 1);
}

static void add_drop(struct buf *b, const struct prefix_drop *d)
{
    add_be(b, d->node, 8);
    add_be(b, d->at_s, 4);
}

void redis_query_write(const struct prefix_query *q, struct redis_query *out)
{
    static const struct prefix_query none;
    struct buf *b = &out->bytes;
    size_t ends[REDIS_QUERY_LISTS];
    *out = (struct redis_query){ 0 };
    const struct prefix_query *of = q ? q : &none;
    for (uint32_t i = 0; i < of->n_rungs; i++) add_rung(out, &of->rungs[i]);
    ends[0] = b->len;
    if (q) add_terms(b, q);
    ends[1] = b->len;
    for (uint32_t i = 0; i < of->n_uses; i++) add_use(b, &of->uses[i]);
    ends[2] = b->len;
    for (uint32_t i = 0; i < of->n_avoid; i++) add_be(b, of->avoid[i], 8);
    ends[3] = b->len;
    for (uint32_t i = 0; i < of->n_drops; i++) add_drop(b, &of->drops[i]);
    ends[4] = b->len;
    for (size_t i = 0, from = 0; i < REDIS_QUERY_LISTS; from = ends[i++])
        out->lists[i] = (struct str){ b->len ? b->data + from : "", ends[i] - from };
}

void redis_bid_write(const struct node_record *r, struct buf *out)
{
    const struct prefix_bid c = node_record_bid(r);
    add_be(out, c.kind, 8);
    add_be(out, c.ns, 4);
    add_be(out, c.seqs, 4);
    add_be(out, c.waiting, 4);
    add_be(out, c.grouped, 1);
    add_be(out, r->max_seqs, 4);
    add_be(out, r->n_blocks, 4);
}

/* ---- the call ---- */

enum { IDS = 3, NUMBERS = 4, ARGS_MAX = IDS + NUMBERS + REDIS_QUERY_LISTS + PREFIX_RUNGS_MAX };

struct arguments {
    char ids[IDS][DIRECTORY_REDIS_ID_TEXT], numbers[NUMBERS][DIRECTORY_REDIS_NUMBER_TEXT];
    struct redis_query query;
    const char *list[ARGS_MAX];
    size_t lengths[ARGS_MAX];
    int n;
};

static void add(struct arguments *a, const char *p, size_t n)
{
    a->list[a->n] = p;
    a->lengths[a->n++] = n;
}

/* In the order of scripts.h. */
static void write_arguments(struct arguments *a, const struct directory_redis *d,
                            const struct placement *p, uint64_t id)
{
    const uint64_t numbers[NUMBERS] = { p->tokens, p->blocks, p->ttl_ms, d->remote.fence };
    directory_redis_id_text(a->ids[0], id);
    directory_redis_id_text(a->ids[1], p->prefill ? p->prefill : p->decode);
    directory_redis_id_text(a->ids[2], p->decode);
    a->n = 0;
    for (size_t i = 0; i < IDS; i++) add(a, a->ids[i], strlen(a->ids[i]));
    for (size_t i = 0; i < NUMBERS; i++) {
        directory_redis_number_text(a->numbers[i], numbers[i]);
        add(a, a->numbers[i], strlen(a->numbers[i]));
    }
    redis_query_write(p->prefix, &a->query);
    for (size_t i = 0; i < REDIS_QUERY_LISTS; i++) add(a, a->query.lists[i].p, a->query.lists[i].n);
    for (uint32_t i = 0; i < a->query.n_slots; i++) add(a, a->query.slots[i], 2);
}

enum status directory_redis_reserve(struct directory *base, const struct placement *p,
                                    directory_reserve_fn *cb, void *arg)
{
    struct directory_redis *d = (struct directory_redis *)base;
    struct directory_redis_call call = { .op = DIRECTORY_OP_RESERVE,
                                         .reserve = cb,
                                         .arg = arg,
                                         .request = p->request,
                                         .chosen = { p->prefill, p->decode, p->tokens, { 0 } } };
    struct arguments a;
    if (!redis_is_up(d->redis)) return ERR_UNAVAILABLE;
    TRY(directory_remote_reserve(&d->remote, p->request, &call.id));
    write_arguments(&a, d, p, call.id);
    const struct directory_redis_args args = { a.n, a.list, a.lengths };
    enum status st = directory_redis_call_binary(d, call, DIRECTORY_SCRIPT_RESERVE, d->topic, NULL,
                                                 &args);
    buf_release(&a.query.bytes);
    /* Not sent, so nothing was counted. */
    if (st != OK) directory_remote_on_reserved(&d->remote, p->request, call.id, ERR_BUSY, 0);
    return st;
}

/* The fence as text, with a query what was placed behind it; "busy" or "gone". */
enum status directory_redis_read_placed(const struct directory_redis_call *c, enum status st,
                                        const redisReply *reply, struct directory_placed *out)
{
    int64_t v = 0;
    if (st != OK) return ERR_UNAVAILABLE;
    if (reply->type != REDIS_REPLY_STRING) return ERR_UNAVAILABLE;
    struct str text = { reply->str, (size_t)reply->len }, fence;
    struct prefix_placed on = c->chosen;
    if (str_eq_c(text, "busy")) return ERR_BUSY;
    if (str_eq_c(text, "gone")) return ERR_NOT_FOUND;
    if (!str_split(&text, ' ', &fence) || str_to_i64(fence, &v) != OK || v <= 0)
        return ERR_UNAVAILABLE;
    if (text.p && prefix_placed_read(text, &on) != OK) return ERR_UNAVAILABLE;
    *out = (struct directory_placed){ (uint64_t)v, on };
    return OK;
}
