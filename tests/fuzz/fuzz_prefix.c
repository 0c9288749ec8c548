/* fuzz_prefix.c - the lists of a query and a placement as text (scheduler/prefix/prefix_text.h):
 * from any bytes to a query, and from a query that was read through the choice of nodes and back to
 * the same text. The first byte says which part is read. */
#include <stdlib.h>
#include <string.h>

#include "scheduler/prefix/prefix_pick.h"
#include "scheduler/prefix/prefix_text.h"

static void must(bool is_true)
{
    if (!is_true) abort();
}

/* Nodes with even ids live. A node's kind is its number modulo 8. */
static void look(void *arg, uint64_t node, struct prefix_node *out)
{
    (void)arg;
    *out = (struct prefix_node){ .lives = node % 2 == 0,
                                 .tokens = node >> 3,
                                 .seqs = (uint32_t)node % 7,
                                 .max_seqs = 5,
                                 .n_blocks = 100,
                                 .dropped_s = (uint32_t)node % 3,
                                 .bid = { .kind = node % 8,
                                          .ns = (uint32_t)(node >> 8),
                                          .seqs = (uint32_t)(node >> 16),
                                          .waiting = (uint32_t)(node >> 24),
                                          .grouped = node >> 63 } };
}

static void pick(const struct prefix_query *q)
{
    static struct prefix_table *t;
    static uint32_t now_s = 1;
    struct prefix_picked p;
    if (!t) t = prefix_table_create();
    const struct prefix_lookup l = {
        .query = q, .table = t, .now_s = ++now_s, .blocks = 10, .look = look
    };
    if (prefix_pick(&l, &p) != OK) return;
    must(p.n_compute <= q->n_tokens);
    must(p.compute && p.compute != p.decode);
    must(p.expected.compute.tokens + p.n_compute == q->n_tokens);
    prefix_table_note(t, q->rungs, q->n_rungs, p.keep, now_s);
}

static bool is_same(struct str a, struct str b) { return str_eq(a, b); }

/* The choice is of nodes that are named like kinds, so that keepers come to be. */
static void read_query(struct str text)
{
    struct prefix_query_room room;
    struct prefix_query_text t, again;
    struct prefix_query q = { .n_tokens = 5000, .ns = 100, .blocks = 50 };
    struct buf written = { 0 };
    struct err err;
    if (!str_split(&text, ' ', &t.rungs) || !str_split(&text, ' ', &t.uses)) return;
    if (!str_split(&text, ' ', &t.avoid)) return;
    t.drops = text.p ? text : STR("");
    if (prefix_query_read(&t, &room, &q, &err) != OK) return;
    prefix_query_write(&q, &written, &again);
    must(is_same(t.rungs, again.rungs) && is_same(t.uses, again.uses));
    must(is_same(t.avoid, again.avoid) && is_same(t.drops, again.drops));
    buf_release(&written);
    q.compute = q.n_uses ? q.uses[0].kind : 2;
    q.decode = q.n_uses > 1 ? q.uses[1].kind : 0;
    pick(&q);
}

/* Numbers may be written with zeros before them: the value comes back, not the text. */
static void read_placed(struct str text)
{
    struct prefix_placed p, again;
    struct buf written = { 0 };
    if (prefix_placed_read(text, &p) != OK) return;
    prefix_placed_write(&p, &written);
    must(prefix_placed_read(buf_str(&written), &again) == OK);
    must(p.prefill == again.prefill && p.decode == again.decode && p.tokens == again.tokens);
    must(memcmp(&p.expected.compute, &again.expected.compute, sizeof p.expected.compute) == 0);
    must(memcmp(&p.expected.decode, &again.expected.decode, sizeof p.expected.decode) == 0);
    buf_release(&written);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) return 0;
    const struct str text = { (const char *)data + 1, size - 1 };
    if (data[0] == 'q') read_query(text);
    else read_placed(text);
    return 0;
}
