/* local.c - the `local` backend: the definition of what a directory does, in plain structs on one
 * thread.
 *
 * Nodes, reservations and owners (entry nodes in other processes) expire by this process's
 * monotonic clock. Every operation first removes what has expired. Load is kept per node id, apart
 * from the record: a node whose lease lapsed for a moment comes back with the load that is still
 * placed on it. Bounds: DIRECTORY_NODES_MAX nodes and owners, RESERVATIONS_MAX reservations. Its
 * ops are in local_backend.c. Thread: loop. */
#include "scheduler/directory/local.h"

#include <stdio.h>
#include <string.h>

#include "scheduler/directory/local_state.h"
#include "scheduler/directory/meter_book.h"
#include "scheduler/directory/wire.h"
#include "scheduler/prefix/prefix_pick.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum { RESERVATIONS_MAX = 1 << 18, OWN_PROCESS = 0 };

struct directory_local_node {
    struct list link; /* by_lease, in order of the end */
    struct node_record record;
    struct buf identity; /* the record's */
    uint64_t end_ms;
    uint32_t dropped_s; /* prefix_drop */
};

/* The load that reservations count on one node; exists while there are any. */
struct directory_local_load {
    uint64_t node, tokens;
    uint64_t free_us; /* when its tokens should be computed */
    uint32_t seqs, blocks, n_refs;
};

struct directory_local_owner {
    struct list link; /* owners_by_lease */
    uint64_t id, end_ms;
    struct list owned;
};

struct directory_local_reservation {
    struct list link;  /* by_end */
    struct list owned; /* directory_local_owner.owned; unlinked for this process's own */
    uint64_t id, end_ms;
    uint32_t tokens, blocks;
    struct directory_local_load *prefill, *decode;
};

static uint64_t now_us(void) { return clock_ms() * 1000; }

static struct directory_local *self_of(struct directory *d)
{
    ASSERT(directory_is_local(d));
    return (struct directory_local *)d;
}

/* ---- load ---- */

static struct directory_local_load *load_ref(struct directory_local *d, uint64_t node)
{
    struct directory_local_load *l = map_get(&d->loads, map_key_u64(&node));
    if (!l) {
        l = MEM_NEW(struct directory_local_load);
        l->node = node;
        map_put(&d->loads, map_key_u64(&node), l);
    }
    l->n_refs++;
    return l;
}

static void load_unref(struct directory_local *d, struct directory_local_load *l)
{
    if (--l->n_refs > 0) return;
    map_del(&d->loads, map_key_u64(&l->node));
    mem_free(l);
}

static void reservation_drop(struct directory_local *d, struct directory_local_reservation *r)
{
    r->prefill->tokens -= r->tokens;
    r->decode->seqs--;
    r->decode->blocks -= r->blocks;
    load_unref(d, r->prefill);
    load_unref(d, r->decode);
    list_remove(&r->link);
    list_remove(&r->owned);
    map_del(&d->reservations, map_key_u64(&r->id));
    if (d->m_reservations) gauge_set(d->m_reservations, (double)d->reservations.len);
    mem_free(r);
}

/* ---- leases ---- */

static void node_drop(struct directory_local *d, struct directory_local_node *n)
{
    list_remove(&n->link);
    map_del(&d->nodes, map_key_u64(&n->record.node));
    buf_release(&n->identity);
    mem_free(n);
}

static void owner_drop(struct directory_local *d, struct directory_local_owner *o)
{
    while (!list_empty(&o->owned))
        reservation_drop(d, LIST_FIRST(&o->owned, struct directory_local_reservation, owned));
    list_remove(&o->link);
    map_del(&d->owners, map_key_u64(&o->id));
    mem_free(o);
}

/* Removes what has expired. The lists are in order of the end, so this looks at one element more
 * than it removes. */
static void sweep(struct directory_local *d)
{
    uint64_t now = clock_ms();
    LIST_FOREACH (n, &d->by_lease, struct directory_local_node, link) {
        if (n->end_ms > now) break;
        log_info("node lease ended", "node=%s topic=%s role=%s", n->record.name, n->record.topic,
                 node_role_name(n->record.role));
        node_drop(d, n);
    }
    while (!list_empty(&d->owners_by_lease)) {
        struct directory_local_owner *o = LIST_FIRST(&d->owners_by_lease,
                                                     struct directory_local_owner, link);
        if (o->end_ms > now) break;
        owner_drop(d, o);
    }
    while (!list_empty(&d->by_end)) {
        struct directory_local_reservation *r = LIST_FIRST(
            &d->by_end, struct directory_local_reservation, link);
        if (r->end_ms > now) break;
        reservation_drop(d, r);
    }
    if (d->m_nodes) gauge_set(d->m_nodes, (double)d->nodes.len);
    if (d->m_reservations) gauge_set(d->m_reservations, (double)d->reservations.len);
}

void directory_local_renew_owner(struct directory *base, uint64_t owner)
{
    struct directory_local *d = self_of(base);
    if (owner == OWN_PROCESS) return;
    struct directory_local_owner *o = map_get(&d->owners, map_key_u64(&owner));
    if (!o) {
        if (d->owners.len >= DIRECTORY_NODES_MAX) return; /* its reservations are refused */
        o = MEM_NEW(struct directory_local_owner);
        o->id = owner;
        list_init(&o->link);
        list_init(&o->owned);
        map_put(&d->owners, map_key_u64(&owner), o);
    }
    o->end_ms = clock_ms() + d->o.lease_ms;
    list_remove(&o->link);
    list_push(&d->owners_by_lease, &o->link);
}

/* ---- operations ---- */

enum status directory_local_publish(struct directory *base, const struct node_record *r)
{
    struct directory_local *d = self_of(base);
    sweep(d);
    struct directory_local_node *n = map_get(&d->nodes, map_key_u64(&r->node));
    if (!n) {
        if (d->nodes.len >= DIRECTORY_NODES_MAX) {
            log_warn("directory full", "node=%s limit=%d", r->name, DIRECTORY_NODES_MAX);
            return ERR_FULL;
        }
        n = MEM_NEW(struct directory_local_node);
        list_init(&n->link);
        map_put(&d->nodes, map_key_u64(&r->node), n);
        log_info("node announced", "node=%s topic=%s role=%s", r->name, r->topic,
                 node_role_name(r->role));
    }
    buf_clear(&n->identity);
    buf_add_str(&n->identity, r->identity);
    n->record = *r;
    n->record.identity = buf_str(&n->identity);
    n->end_ms = clock_ms() + d->o.lease_ms;
    list_remove(&n->link);
    list_push(&d->by_lease, &n->link);
    return OK;
}

void directory_local_leave(struct directory *base, uint64_t node)
{
    struct directory_local *d = self_of(base);
    struct directory_local_node *n = map_get(&d->nodes, map_key_u64(&node));
    if (n) node_drop(d, n);
}

void directory_local_raise_fence(struct directory *base, uint64_t seen)
{
    struct directory_local *d = self_of(base);
    /* A number that nobody can have been given is ignored. */
    if (seen > d->fence && seen < UINT64_MAX / 2) d->fence = seen;
}

/* Requests live about equally long, so the place is near the end of the list. */
static void link_by_end(struct directory_local *d, struct directory_local_reservation *r)
{
    struct list *at = d->by_end.prev;
    while (at != &d->by_end &&
           LIST_ENTRY(at, struct directory_local_reservation, link)->end_ms > r->end_ms)
        at = at->prev;
    list_insert_after(at, &r->link);
}

static void reservation_add(struct directory_local *d, const struct placement *p,
                            const struct prefix_placed *on, uint64_t busy_us,
                            struct directory_local_owner *o)
{
    struct directory_local_reservation *r = MEM_NEW(struct directory_local_reservation);
    r->id = p->request;
    r->end_ms = clock_ms() + p->ttl_ms;
    r->tokens = on->tokens;
    r->blocks = p->blocks;
    r->prefill = load_ref(d, on->prefill ? on->prefill : on->decode);
    r->decode = load_ref(d, on->decode);
    r->prefill->tokens += on->tokens;
    if (p->prefix) r->prefill->free_us = now_us() + busy_us;
    r->decode->seqs++;
    r->decode->blocks += p->blocks;
    link_by_end(d, r);
    list_init(&r->owned);
    if (o) list_push(&o->owned, &r->owned);
    map_put(&d->reservations, map_key_u64(&r->id), r);
}

/* ---- prefixes ---- */

static void look_at(void *arg, uint64_t node, struct prefix_node *out)
{
    const struct directory_local *d = arg;
    const struct directory_local_node *n = map_get(&d->nodes, map_key_u64(&node));
    const struct directory_local_load *l = n ? map_get(&d->loads, map_key_u64(&node)) : NULL;
    *out = (struct prefix_node){ .lives = n != NULL };
    if (n) {
        out->max_seqs = n->record.max_seqs;
        out->n_blocks = n->record.n_blocks;
        out->dropped_s = n->dropped_s;
        out->bid = node_record_bid(&n->record);
    }
    if (l) {
        out->tokens = l->tokens;
        out->wait_us = l->free_us > now_us() ? l->free_us - now_us() : 0;
        out->seqs = l->seqs;
        out->blocks = l->blocks;
    }
}

static bool has_place(struct directory_local *d, uint64_t decode, uint32_t blocks)
{
    struct prefix_node n;
    look_at(d, decode, &n);
    return n.seqs < n.max_seqs && (uint64_t)n.blocks + blocks <= n.n_blocks;
}

/* That of a topic which nobody uses any more gives its place to another. */
static void prefix_tables_drop_unused(struct directory_local *d, uint32_t now_s)
{
    size_t pos = 0;
    struct str key;
    void *one;
    while (map_next(&d->prefix_tables, &pos, &key, &one)) {
        if (prefix_table_is_used(one, now_s)) continue;
        map_del(&d->prefix_tables, key);
        prefix_table_free(one);
    }
}

/* NULL: the topic has none, since others use as many as there may be, or for want of memory. */
static struct prefix_table *prefix_table_of(struct directory_local *d, const char *topic,
                                            uint32_t now_s)
{
    struct prefix_table *t = map_get(&d->prefix_tables, str_of(topic));
    if (t) return t;
    if (d->prefix_tables.len >= DIRECTORY_TOPICS_MAX) prefix_tables_drop_unused(d, now_s);
    if (d->prefix_tables.len >= DIRECTORY_TOPICS_MAX) return NULL;
    t = prefix_table_create();
    if (t) map_put(&d->prefix_tables, str_of(topic), t);
    return t;
}

static void note_drops(struct directory_local *d, const struct prefix_query *q)
{
    for (uint32_t i = 0; i < q->n_drops; i++) {
        struct directory_local_node *n = map_get(&d->nodes, map_key_u64(&q->drops[i].node));
        if (n && n->dropped_s < q->drops[i].at_s) n->dropped_s = q->drops[i].at_s;
    }
}

/* Chooses by the prompt's prefix, if the topic has a table. */
static enum status pick_by_prefix(struct directory_local *d, const struct placement *p,
                                  const char *topic, struct prefix_placed *on, uint64_t *busy_us)
{
    const uint32_t now_s = (uint32_t)(clock_ms() / 1000) + 1;
    struct prefix_table *t = prefix_table_of(d, topic, now_s);
    struct prefix_picked picked;
    if (!t) return has_place(d, p->decode, p->blocks) ? OK : ERR_BUSY;
    const struct prefix_lookup l = { .query = p->prefix,
                                     .table = t,
                                     .now_s = now_s,
                                     .blocks = p->blocks,
                                     .look = look_at,
                                     .arg = d };
    note_drops(d, p->prefix);
    TRY(prefix_pick(&l, &picked));
    if (picked.keep[0] || picked.keep[1])
        prefix_table_note(t, p->prefix->rungs, p->prefix->n_rungs, picked.keep, now_s);
    *on = (struct prefix_placed){ .prefill = picked.decode ? picked.compute : 0,
                                  .decode = picked.decode ? picked.decode : picked.compute,
                                  .tokens = picked.n_compute,
                                  .expected = picked.expected };
    *busy_us = picked.busy_us;
    return OK;
}

/* ---- reservations ---- */

enum status directory_local_reserve(struct directory *base, const struct placement *p,
                                    uint64_t owner, struct directory_placed *placed)
{
    struct directory_local *d = self_of(base);
    sweep(d);
    struct directory_local_reservation *earlier = map_get(&d->reservations,
                                                          map_key_u64(&p->request));
    if (earlier) reservation_drop(d, earlier);
    struct directory_local_node *decode = map_get(&d->nodes, map_key_u64(&p->decode));
    const bool has_prefill = !p->prefill || map_get(&d->nodes, map_key_u64(&p->prefill));
    if (!decode || (!has_prefill && !p->prefix)) return ERR_NOT_FOUND;
    struct directory_local_owner *o = map_get(&d->owners, map_key_u64(&owner));
    struct prefix_placed on = { p->prefill, p->decode, p->tokens, { 0 } };
    uint64_t busy_us = 0;
    if (!p->prefix && !has_place(d, p->decode, p->blocks)) return ERR_BUSY;
    if (d->reservations.len >= RESERVATIONS_MAX || (owner != OWN_PROCESS && !o)) return ERR_FULL;
    const enum status st = p->prefix ? pick_by_prefix(d, p, decode->record.topic, &on, &busy_us)
                                     : OK;
    if (!has_prefill && (st != OK || !on.expected.known)) return ERR_NOT_FOUND;
    TRY(st);
    reservation_add(d, p, &on, busy_us, o);
    *placed = (struct directory_placed){ ++d->fence, on };
    return OK;
}

void directory_local_computed(struct directory *base, uint64_t id)
{
    struct directory_local *d = self_of(base);
    struct directory_local_reservation *r = map_get(&d->reservations, map_key_u64(&id));
    if (!r) return;
    r->prefill->tokens -= r->tokens;
    r->tokens = 0;
}

void directory_local_release(struct directory *base, uint64_t id)
{
    struct directory_local *d = self_of(base);
    struct directory_local_reservation *r = map_get(&d->reservations, map_key_u64(&id));
    if (r) reservation_drop(d, r);
}

/* A topic that nobody reports to any more gives its place to another. */
static void meter_books_drop_over(struct directory_local *d)
{
    size_t pos = 0;
    struct str key;
    void *one;
    while (map_next(&d->meter_books, &pos, &key, &one)) {
        if (!meter_book_is_over(one, clock_ms())) continue;
        map_del(&d->meter_books, key);
        meter_book_free(one);
    }
}

enum status directory_local_meter(struct directory *base, const char *topic,
                                  const struct meter_report *r, struct meter_sum *sums,
                                  struct meter_sums *out, struct err *err)
{
    struct directory_local *d = self_of(base);
    struct meter_book *b = map_get(&d->meter_books, str_of(topic));
    if (!b) {
        if (d->meter_books.len >= DIRECTORY_TOPICS_MAX) meter_books_drop_over(d);
        if (d->meter_books.len >= DIRECTORY_TOPICS_MAX)
            return err_set(err, ERR_FULL,
                           "the directory already counts the tenants of %d topics, its limit",
                           DIRECTORY_TOPICS_MAX);
        b = meter_book_create();
        map_put(&d->meter_books, str_of(topic), b);
    }
    return meter_book_report(b, r, clock_ms(), sums, out, err);
}

/* The answer has its own copies of the identities, behind the records: whoever reads it may publish
 * meanwhile. */
static struct node_record *make_answer(const struct directory_local *d, char **room)
{
    size_t n_text = 0;
    LIST_FOREACH (node, &d->by_lease, struct directory_local_node, link)
        n_text += node->identity.len;
    struct node_record *out = mem_calloc(1, d->nodes.len * sizeof *out + n_text);
    *room = (char *)(out + d->nodes.len);
    return out;
}

struct node_record *directory_local_view(struct directory *base, const char *topic, size_t *n,
                                         char topics[512])
{
    struct directory_local *d = self_of(base);
    struct directory_topic seen[DIRECTORY_TOPICS_MAX];
    size_t n_seen = 0, at = 0;
    char *room;
    sweep(d);
    struct node_record *out = make_answer(d, &room);
    LIST_FOREACH (node, &d->by_lease, struct directory_local_node, link) {
        directory_topics_add(seen, &n_seen, node->record.topic, node->record.role, 1);
        if (strcmp(node->record.topic, topic) != 0) continue;
        const struct directory_local_load *l = map_get(&d->loads, map_key_u64(&node->record.node));
        out[at] = node->record;
        if (node->identity.len) memcpy(room, node->identity.data, node->identity.len);
        out[at].identity.p = room;
        room += node->identity.len;
        out[at].placed_tokens = l ? l->tokens : 0;
        out[at].placed_seqs = l ? l->seqs : 0;
        out[at].placed_blocks = l ? l->blocks : 0;
        at++;
    }
    directory_topics_write(seen, n_seen, topics, 512);
    *n = at;
    return out;
}

void directory_local_drop_all(struct directory_local *d)
{
    size_t pos = 0;
    struct str key;
    void *one;
    while (map_next(&d->meter_books, &pos, &key, &one)) meter_book_free(one);
    map_release(&d->meter_books);
    pos = 0;
    while (map_next(&d->prefix_tables, &pos, &key, &one)) prefix_table_free(one);
    map_release(&d->prefix_tables);
    LIST_FOREACH (o, &d->owners_by_lease, struct directory_local_owner, link) owner_drop(d, o);
    LIST_FOREACH (r, &d->by_end, struct directory_local_reservation, link) reservation_drop(d, r);
    LIST_FOREACH (n, &d->by_lease, struct directory_local_node, link) node_drop(d, n);
    map_release(&d->nodes);
    map_release(&d->loads);
    map_release(&d->reservations);
    map_release(&d->owners);
}
