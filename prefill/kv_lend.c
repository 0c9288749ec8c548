/* kv_lend.c - see kv_lend.h. */
#include "prefill/kv_lend.h"

#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/log.h"
#include "shared/cluster/answer.h"

enum kv_lend_state { LEND_HOLDING, LEND_CONNECTING, LEND_SENDING, LEND_CLOSING };

struct kv_lend {
    uint64_t id;    /* in engine and kvtransfer */
    uint64_t fetch; /* of FETCH, which its answer names */
    uint64_t from;
    enum kv_lend_state state;
    bool is_held; /* LENT came: engine_release frees its blocks */
    uint32_t n_blocks;
    int32_t *blocks; /* [n_blocks] once they are held */
    struct kv_sends sends;
    struct arena arena; /* the grant */
    struct list link;
};

void kv_lends_init(struct kv_lends *l, struct metrics *m)
{
    list_init(&l->live);
    l->lent = metrics_counter(m, "baton_kv_lent_blocks_total", "",
                              "KV blocks that were written into a peer's pool because it asked for "
                              "them.");
    l->refused = metrics_counter(m, "baton_kv_lend_refused_total", "",
                                 "Requests of peers for KV blocks that were not here, or could not "
                                 "be sent.");
}

static void free_lend(struct kv_lends *l, struct kv_lend *k)
{
    map_del(&l->by_id, map_key_u64(&k->id));
    list_remove(&k->link);
    l->n_live--;
    arena_release(&k->arena);
    mem_free(k->blocks);
    mem_free(k);
}

void kv_lends_release(struct kv_lends *l)
{
    LIST_FOREACH (k, &l->live, struct kv_lend, link) free_lend(l, k);
    map_release(&l->by_id);
}

static void refuse(struct kv_lends *l, uint64_t to, uint64_t fetch, uint32_t n_has, enum status st,
                   const char *text)
{
    Baton__FetchRefused m = BATON__FETCH_REFUSED__INIT;
    m.n_has = n_has;
    m.status = st;
    m.text = (char *)(uintptr_t)text;
    counter_add(l->refused, 1);
    answer_send(l->cluster, to, FRAME_FETCH_REFUSED, fetch, 0, &m.base);
}

/* Gives the blocks back and forgets it, once neither engine nor transfer uses it. */
static void drop_if_over(struct kv_lends *l, struct kv_lend *k)
{
    if (!k->is_held || k->sends.open) return;
    const enum status st = engine_release(l->engine, k->id);
    ASSERT(st == OK || st == ERR_CANCELED); /* CANCELED: the engine is shutting down */
    free_lend(l, k);
}

static void close_lend(struct kv_lends *l, struct kv_lend *k)
{
    if (k->state == LEND_CLOSING) return;
    k->state = LEND_CLOSING;
    kv_sender_cancel(l->sender, &k->sends);
    drop_if_over(l, k);
}

/* ---- FETCH ---- */

static enum status check(const struct kv_lends *l, const Baton__Fetch *m, const char **why)
{
    const struct kv_layout *mine = engine_kv_layout(l->engine);
    *why = "the request for blocks is malformed";
    if (!m || m->keys.len == 0 || m->keys.len % sizeof(struct hash128) ||
        m->keys.len / sizeof(struct hash128) > mine->n_blocks)
        return ERR_FORMAT;
    *why = "the peer's KV has another layout";
    if (m->layout != kv_layout_hash(mine) || mine->tp_size > 1) return ERR_PEER_MISMATCH;
    *why = "this node sends no KV: no cache transfer protocol is enabled";
    if (!l->kvt) return ERR_PEER_REFUSED;
    *why = "this node lends as many blocks as it can";
    return l->n_live >= KV_LENDS_MAX ? ERR_BUSY : OK;
}

static void begin(struct kv_lends *l, const struct cluster_message *m, const Baton__Fetch *body)
{
    struct kv_lend *k = MEM_NEW(struct kv_lend);
    const uint32_t n = (uint32_t)(body->keys.len / sizeof(struct hash128));
    struct hash128 *keys = mem_dup(body->keys.data, body->keys.len); /* aligned */
    k->id = l->id_base + kv_parts_id(++*l->next_id);
    k->fetch = m->request;
    k->from = m->from;
    k->n_blocks = n;
    arena_init(&k->arena);
    kv_sends_init(&k->sends, k->id);
    kv_sends_add(&k->sends, 0, m->from, body->kvt_grant, &k->arena);
    map_put(&l->by_id, map_key_u64(&k->id), k);
    list_push(&l->live, &k->link);
    l->n_live++;
    const enum status st = engine_lend(l->engine, k->id, keys, n);
    mem_free(keys);
    if (st == OK) return;
    refuse(l, k->from, k->fetch, 0, st, "the engine does not take the request for blocks");
    free_lend(l, k);
}

void kv_lends_on_message(struct kv_lends *l, const struct cluster_message *m)
{
    const char *why;
    Baton__Fetch *body = baton__fetch__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    const enum status st = check(l, body, &why);
    if (st == OK) begin(l, m, body);
    else refuse(l, m->from, m->request, 0, st, why);
    if (body) baton__fetch__free_unpacked(body, NULL);
}

/* ---- holding ---- */

void kv_lends_on_engine(struct kv_lends *l, const struct engine_event *ev)
{
    struct kv_lend *k = map_get(&l->by_id, map_key_u64(&ev->id));
    if (!k) return;
    k->is_held = true;
    if (k->state == LEND_CLOSING) {
        drop_if_over(l, k);
        return;
    }
    if (ev->status != OK || ev->n_blocks < k->n_blocks) {
        refuse(l, k->from, k->fetch, ev->n_blocks, ERR_NOT_FOUND,
               "some of the blocks are not here");
        close_lend(l, k);
        return;
    }
    k->blocks = mem_dup(ev->blocks, ev->n_blocks * sizeof *ev->blocks);
    k->state = LEND_CONNECTING;
    (void)kv_sender_start(l->sender, &k->sends);
}

/* ---- sending ---- */

static struct kv_lend *of_sends(struct kv_lends *l, const struct kv_sends *s)
{
    return map_get(&l->by_id, map_key_u64(&s->id));
}

/* All layers are there: they are announced at once. */
bool kv_lends_on_open(struct kv_lends *l, struct kv_sends *s)
{
    struct kv_lend *k = of_sends(l, s);
    if (!k) return false;
    const struct kv_layout *layout = engine_kv_layout(l->engine);
    const uint32_t n_tokens = k->n_blocks * layout->block_tokens;
    enum status st = OK;
    k->state = LEND_SENDING;
    for (uint32_t layer = 0; layer < layout->n_layers && st == OK; layer++)
        st = kvt_send_ready(l->kvt, k->id, layer, 0, n_tokens, k->blocks);
    kvt_send_finish(l->kvt, k->id); /* short, if a layer was not taken: it fails then */
    return true;
}

bool kv_lends_on_failed(struct kv_lends *l, struct kv_sends *s, const char *text)
{
    struct kv_lend *k = of_sends(l, s);
    if (!k) return false;
    refuse(l, k->from, k->fetch, 0, ERR_PEER_LOST, text);
    close_lend(l, k);
    return true;
}

bool kv_lends_on_kvt(struct kv_lends *l, const struct kvt_event *ev)
{
    const uint64_t id = kv_part_owner(ev->id);
    struct kv_lend *k = map_get(&l->by_id, map_key_u64(&id));
    if (!k || (ev->kind != KVT_SENT && ev->kind != KVT_SEND_FAILED)) return k != NULL;
    k->sends.open = 0;
    if (ev->kind == KVT_SENT) counter_add(l->lent, k->n_blocks);
    else
        log_debug("kv not lent", "fetch=%016llx why=\"%s\"", (unsigned long long)k->fetch,
                  ev->text);
    drop_if_over(l, k);
    return true;
}

void kv_lends_on_lost(struct kv_lends *l, uint64_t node)
{
    LIST_FOREACH (k, &l->live, struct kv_lend, link)
        if (k->from == node) close_lend(l, k);
}
