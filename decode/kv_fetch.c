/* kv_fetch.c - see kv_fetch.h. */
#include "decode/kv_fetch.h"

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/cluster/proto/node.pb-c.h"
#include "shared/kv/kv_parts.h"

enum {
    HANGS_MS = 1000 /* a fence that is not there after so long may not come soon */
};

enum kv_fetch_state { FETCH_GRANTING, FETCH_ASKED, FETCH_CLOSING };

struct kv_fetch {
    uint64_t id;  /* of the transfers, and of FETCH */
    uint64_t seq; /* the engine's */
    uint64_t peer;
    uint32_t n_peer_ranks;
    struct decode_parts parts;
    enum kv_fetch_state state;
    struct hash128 *keys; /* [n_blocks] */
    int32_t *blocks;
    uint32_t n_blocks, n_asked;
    uint32_t n_has;      /* CLOSING: that the peer said to have; asked for once more. 0: none */
    bool is_again;       /* it was */
    uint64_t t_asked_ms; /* the first time */
    uint64_t t_closed_ms;
    uint32_t patience_ms;
    struct list link;
};

void kv_fetches_init(struct kv_fetches *f, struct metrics *m)
{
    list_init(&f->live);
    f->fetched = metrics_counter(m, "baton_kv_fetched_blocks_total", "",
                                 "KV blocks of prompts that came from a peer's memory.");
    f->bytes = metrics_counter(m, "baton_kv_fetched_bytes_total", "", "Their bytes.");
    f->failed = metrics_counter(m, "baton_kv_fetch_failed_total", "",
                                "Fetches from a peer that brought nothing; the blocks were "
                                "computed.");
}

static void free_fetch(struct kv_fetches *f, struct kv_fetch *k)
{
    map_del(&f->by_id, map_key_u64(&k->id));
    list_remove(&k->link);
    f->n_live--;
    decode_parts_release(&k->parts);
    mem_free(k->keys);
    mem_free(k->blocks);
    mem_free(k);
}

void kv_fetches_release(struct kv_fetches *f)
{
    LIST_FOREACH (k, &f->live, struct kv_fetch, link) free_fetch(f, k);
    map_release(&f->by_id);
}

/* Answers the engine. */
static void end(struct kv_fetches *f, struct kv_fetch *k, uint32_t n_good)
{
    const enum status st = engine_fetched(f->engine, k->seq, n_good);
    ASSERT(st == OK || st == ERR_CANCELED); /* CANCELED: the engine is shutting down */
    if (n_good) counter_add(f->fetched, n_good);
    else counter_add(f->failed, 1);
    log_debug("kv fetched", "sequence=%016llx blocks=%u of=%u after_ms=%llu",
              (unsigned long long)k->seq, n_good, k->n_blocks,
              (unsigned long long)(clock_ms() - k->t_asked_ms));
    free_fetch(f, k);
}

static void ask(struct kv_fetches *f, struct kv_fetch *k, uint32_t n);

/* No write can reach the blocks any more on any rank. */
static void on_fenced(struct kv_fetches *f, struct kv_fetch *k)
{
    const uint32_t n = k->n_has;
    if (n == 0 || f->broken) {
        end(f, k, 0);
        return;
    }
    map_del(&f->by_id, map_key_u64(&k->id));
    decode_parts_release(&k->parts);
    k->is_again = true;
    k->n_has = 0;
    ask(f, k, n);
}

static void close_fetch(struct kv_fetches *f, struct kv_fetch *k)
{
    if (k->state == FETCH_CLOSING) return;
    k->state = FETCH_CLOSING;
    k->t_closed_ms = clock_ms();
    if (k->parts.open) decode_parts_cancel(&k->parts, f->ranks, k->id);
    else on_fenced(f, k);
}

/* Nothing is asked for again. */
static void give_up(struct kv_fetches *f, struct kv_fetch *k)
{
    k->n_has = 0;
    close_fetch(f, k);
}

/* ---- asking ---- */

/* A node of one rank is asked by one as releases did that knew no others. */
static bool is_plain(const struct kv_fetches *f, const struct kv_fetch *k)
{
    return f->ranks->n == 1 && k->n_peer_ranks == 1;
}

static void write_parts(const struct kv_fetches *f, struct kv_fetch *k, Baton__Fetch *m)
{
    const struct decode_ranks *ranks = f->ranks;
    m->n_parts = k->parts.plan.n;
    m->parts = decode_parts_write(&k->parts);
    m->n_from = k->n_peer_ranks;
    m->n_to = ranks->n;
    m->to = ARENA_ARRAY(&k->parts.arena, Baton__NodeAddress *, ranks->n);
    for (uint32_t rank = 0; rank < ranks->n; rank++) {
        const struct group_member *of = &ranks->all[rank];
        Baton__NodeAddress *a = m->to[rank] = ARENA_NEW(&k->parts.arena, Baton__NodeAddress);
        baton__node_address__init(a);
        a->node = of->node;
        a->host = (char *)(uintptr_t)of->host; /* only read */
        a->port = of->port;
    }
}

static enum status send_fetch(const struct kv_fetches *f, struct kv_fetch *k)
{
    Baton__Fetch m = BATON__FETCH__INIT;
    m.keys.data = (uint8_t *)k->keys;
    m.keys.len = k->n_asked * sizeof *k->keys;
    m.layout = kv_layout_hash_of_model(&f->ranks->layout);
    if (is_plain(f, k)) {
        m.kvt_grant.data = (uint8_t *)(uintptr_t)k->parts.grants[0].p;
        m.kvt_grant.len = k->parts.grants[0].n;
    } else {
        write_parts(f, k, &m);
    }
    return cluster_send_proto(f->ranks->cluster, k->peer, FRAME_FETCH, k->id, 0, &m.base);
}

/* Asks the peer once the grants of all ranks are here. May end the record. */
static void ask_if_granted(struct kv_fetches *f, struct kv_fetch *k)
{
    if (!decode_parts_are_granted(&k->parts)) return;
    k->state = FETCH_ASKED;
    const enum status st = send_fetch(f, k);
    arena_release(&k->parts.arena);
    if (st != OK) close_fetch(f, k);
}

/* Grants the first n blocks, so that the peer can write them. May end the record. */
static void ask(struct kv_fetches *f, struct kv_fetch *k, uint32_t n)
{
    struct err err = { 0 };
    const uint64_t serial = ++*f->next_id;
    const struct decode_room room = { .blocks = k->blocks,
                                      .n_blocks = n,
                                      .n_tokens = n * f->ranks->layout.block_tokens };
    k->id = f->id_base + kv_parts_id(serial);
    k->state = FETCH_GRANTING;
    k->n_asked = n;
    decode_parts_init(&k->parts);
    map_put(&f->by_id, map_key_u64(&k->id), k);
    if (decode_parts_expect(&k->parts, f->ranks, k->id, serial, k->n_peer_ranks, &room, &err) ==
        OK) {
        ask_if_granted(f, k);
        return;
    }
    log_debug("kv not fetched", "sequence=%016llx why=\"%s\"", (unsigned long long)k->seq,
              err.text);
    close_fetch(f, k);
}

static void begin(struct kv_fetches *f, const struct engine_event *ev)
{
    if (!f->ranks->kvt || f->broken) { /* nobody can write to all ranks */
        const enum status st = engine_fetched(f->engine, ev->id, 0);
        ASSERT(st == OK || st == ERR_CANCELED);
        return;
    }
    struct kv_fetch *k = MEM_NEW(struct kv_fetch);
    k->seq = ev->id;
    k->peer = ev->peer;
    k->n_peer_ranks = ev->n_peer_ranks;
    k->n_blocks = ev->n_blocks;
    k->keys = mem_dup(ev->keys, ev->n_blocks * sizeof *ev->keys);
    k->blocks = mem_dup(ev->blocks, ev->n_blocks * sizeof *ev->blocks);
    k->t_asked_ms = clock_ms();
    k->patience_ms = ev->patience_ms;
    list_push(&f->live, &k->link);
    f->n_live++;
    ask(f, k, k->n_blocks);
}

void kv_fetches_on_engine(struct kv_fetches *f, const struct engine_event *ev)
{
    if (ev->kind == ENGINE_FETCH) {
        begin(f, ev);
        return;
    }
    LIST_FOREACH (k, &f->live, struct kv_fetch, link)
        if (k->seq == ev->id) give_up(f, k);
}

/* ---- answers ---- */

static struct kv_fetch *find(const struct kv_fetches *f, uint64_t id)
{
    return map_get(&f->by_id, map_key_u64(&id));
}

const struct decode_parts *kv_fetches_parts(const struct kv_fetches *f, uint64_t id)
{
    const struct kv_fetch *k = find(f, id);
    return k ? &k->parts : NULL;
}

void kv_fetches_on_grants(struct kv_fetches *f, const struct cluster_message *m)
{
    struct kv_fetch *k = find(f, m->request);
    if (!k || k->state != FETCH_GRANTING) return;
    if (decode_parts_take_grants(&k->parts, f->ranks, m) == OK) {
        ask_if_granted(f, k);
        return;
    }
    log_warn("kv not fetched", "sequence=%016llx why=\"%s sent other grants than asked\"",
             (unsigned long long)k->seq, m->from_name);
    close_fetch(f, k);
}

void kv_fetches_on_refused(struct kv_fetches *f, const struct cluster_message *m)
{
    struct kv_fetch *k = find(f, m->request);
    if (!k || k->peer != m->from || k->state != FETCH_ASKED) return;
    Baton__FetchRefused *r = baton__fetch_refused__unpack(NULL, m->body.n,
                                                          (const uint8_t *)m->body.p);
    if (r && !k->is_again && r->n_has < k->n_asked) k->n_has = r->n_has;
    log_debug("kv fetch refused", "sequence=%016llx peer=%s has=%u of=%u why=\"%s\"",
              (unsigned long long)k->seq, m->from_name, r ? r->n_has : 0, k->n_asked,
              r ? r->text : "");
    if (r) baton__fetch_refused__free_unpacked(r, NULL);
    close_fetch(f, k);
}

/* A part has ended, one way or the other. */
static void end_if_over(struct kv_fetches *f, struct kv_fetch *k)
{
    if (decode_parts_are_received(&k->parts)) {
        counter_add(f->bytes, k->parts.bytes);
        end(f, k, k->n_asked);
    } else if (k->state == FETCH_CLOSING && !k->parts.open) {
        on_fenced(f, k);
    }
}

void kv_fetches_on_kvt(struct kv_fetches *f, const struct kvt_event *ev)
{
    struct kv_fetch *k = find(f, kv_part_owner(ev->id));
    if (!k || !decode_parts_on_kvt(&k->parts, ev)) return;
    if (ev->kind != KVT_RECEIVE_FAILED) {
        end_if_over(f, k);
    } else if (k->state != FETCH_CLOSING) { /* else it is the answer to a cancel */
        log_debug("kv fetch failed", "sequence=%016llx why=\"%s\"", (unsigned long long)k->seq,
                  ev->text);
        give_up(f, k);
    }
}

static void on_follower_lost(struct kv_fetches *f, uint32_t rank)
{
    f->broken = true;
    LIST_FOREACH (k, &f->live, struct kv_fetch, link) {
        if (!decode_parts_on_lost(&k->parts, rank)) continue;
        if (k->state != FETCH_CLOSING) give_up(f, k);
        else end_if_over(f, k);
    }
}

void kv_fetches_on_lost(struct kv_fetches *f, uint64_t node)
{
    const uint32_t rank = decode_ranks_find(f->ranks, node);
    if (rank) on_follower_lost(f, rank);
    LIST_FOREACH (k, &f->live, struct kv_fetch, link)
        if (k->peer == node) give_up(f, k);
}

/* Some part can still be written. */
static void go_on_without(struct kv_fetches *f, struct kv_fetch *k)
{
    k->n_has = 0;
    if (engine_fetch_hangs(f->engine, k->seq) != OK) /* told again in the next sweep */
        log_debug("the engine is not told of a fetch that hangs", "sequence=%016llx",
                  (unsigned long long)k->seq);
}

void kv_fetches_sweep(struct kv_fetches *f, uint64_t now_ms)
{
    LIST_FOREACH (k, &f->live, struct kv_fetch, link) {
        const bool is_closing = k->state == FETCH_CLOSING;
        if (is_closing && now_ms > k->t_closed_ms + HANGS_MS) go_on_without(f, k);
        else if (!is_closing && now_ms > k->t_asked_ms + k->patience_ms) give_up(f, k);
    }
}
