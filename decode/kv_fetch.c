/* kv_fetch.c - see kv_fetch.h. */
#include "decode/kv_fetch.h"

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/cluster/proto/node.pb-c.h"
#include "shared/kv/kv_parts.h"

enum kv_fetch_state { FETCH_ASKED, FETCH_CLOSING };

struct kv_fetch {
    uint64_t id;  /* of the transfer, and of FETCH */
    uint64_t seq; /* the engine's */
    uint64_t peer;
    enum kv_fetch_state state;
    struct hash128 *keys; /* [n_blocks] */
    int32_t *blocks;
    uint32_t n_blocks, n_asked;
    uint32_t n_has;      /* CLOSING: that the peer said to have; asked for once more. 0: none */
    bool is_again;       /* it was */
    uint64_t t_asked_ms; /* the first time */
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

static void close_fetch(struct kv_fetches *f, struct kv_fetch *k)
{
    if (k->state == FETCH_CLOSING) return;
    k->state = FETCH_CLOSING;
    kvt_expect_cancel(f->kvt, k->id);
}

/* ---- asking ---- */

static enum status send_fetch(struct kv_fetches *f, const struct kv_fetch *k,
                              const struct buf *grant)
{
    Baton__Fetch m = BATON__FETCH__INIT;
    m.keys.data = (uint8_t *)k->keys;
    m.keys.len = k->n_asked * sizeof *k->keys;
    m.kvt_grant.data = (uint8_t *)grant->data;
    m.kvt_grant.len = grant->len;
    m.layout = kv_layout_hash(engine_kv_layout(f->engine));
    return cluster_send_proto(f->cluster, k->peer, FRAME_FETCH, k->id, 0, &m.base);
}

/* Grants the first n blocks and asks the peer to write them. Ends the record when it cannot. */
static void ask(struct kv_fetches *f, struct kv_fetch *k, uint32_t n)
{
    struct buf grant = { 0 };
    const uint32_t n_tokens = n * engine_kv_layout(f->engine)->block_tokens;
    k->id = f->id_base + kv_parts_id(++*f->next_id);
    k->state = FETCH_ASKED;
    k->n_asked = n;
    map_put(&f->by_id, map_key_u64(&k->id), k);
    if (kvt_expect(f->kvt, k->id, k->blocks, n, 0, n_tokens, &grant) != OK) end(f, k, 0);
    else if (send_fetch(f, k, &grant) != OK) close_fetch(f, k);
    buf_release(&grant);
}

static void begin(struct kv_fetches *f, const struct engine_event *ev)
{
    if (!f->kvt) { /* no transport: nobody can write */
        const enum status st = engine_fetched(f->engine, ev->id, 0);
        ASSERT(st == OK || st == ERR_CANCELED);
        return;
    }
    struct kv_fetch *k = MEM_NEW(struct kv_fetch);
    k->seq = ev->id;
    k->peer = ev->peer;
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
    LIST_FOREACH (k, &f->live, struct kv_fetch, link) {
        if (k->seq != ev->id) continue;
        k->is_again = true; /* nor is it asked for again */
        k->n_has = 0;
        close_fetch(f, k);
    }
}

/* ---- answers ---- */

void kv_fetches_on_message(struct kv_fetches *f, const struct cluster_message *m)
{
    struct kv_fetch *k = map_get(&f->by_id, map_key_u64(&m->request));
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

/* No write can reach the blocks any more. */
static void on_fenced(struct kv_fetches *f, struct kv_fetch *k)
{
    const uint32_t n = k->n_has;
    if (n == 0) {
        end(f, k, 0);
        return;
    }
    map_del(&f->by_id, map_key_u64(&k->id));
    k->is_again = true;
    k->n_has = 0;
    ask(f, k, n);
}

void kv_fetches_on_kvt(struct kv_fetches *f, const struct kvt_event *ev)
{
    struct kv_fetch *k = map_get(&f->by_id, map_key_u64(&ev->id));
    if (!k) return;
    switch (ev->kind) {
    case KVT_RECEIVED:
        counter_add(f->bytes, ev->bytes);
        end(f, k, k->n_asked);
        break;
    case KVT_RECEIVE_FAILED: /* FENCED follows, as after a cancel */
        log_debug("kv fetch failed", "sequence=%016llx why=\"%s\"", (unsigned long long)k->seq,
                  ev->text);
        k->state = FETCH_CLOSING;
        break;
    case KVT_FENCED: on_fenced(f, k); break;
    default: break;
    }
}

void kv_fetches_on_lost(struct kv_fetches *f, uint64_t node)
{
    LIST_FOREACH (k, &f->live, struct kv_fetch, link) {
        if (k->peer != node) continue;
        k->n_has = 0;
        close_fetch(f, k);
    }
}

void kv_fetches_sweep(struct kv_fetches *f, uint64_t now_ms)
{
    LIST_FOREACH (k, &f->live, struct kv_fetch, link)
        if (now_ms > k->t_asked_ms + k->patience_ms) {
            k->n_has = 0;
            close_fetch(f, k);
        }
}
