/* kv_lend.c - see kv_lend.h. */
#include "prefill/kv_lend.h"

#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/log.h"
#include "shared/cluster/answer.h"

enum kv_lend_state { LEND_HOLDING, LEND_SENDING, LEND_CLOSING };

struct kv_lend {
    uint64_t id;    /* in engine and kvtransfer */
    uint64_t fetch; /* of FETCH, which its answer names */
    uint64_t from;
    enum kv_lend_state state;
    bool is_held; /* LENT came: engine_release frees its blocks */
    uint32_t n_blocks;
    int32_t *blocks; /* [n_blocks] once they are held */
    struct prompt_parts parts;
    Baton__Fetch *asked; /* owned, until the followers are asked; NULL: then */
    struct arena arena;  /* the grants of this process */
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
    if (k->asked) baton__fetch__free_unpacked(k->asked, NULL);
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
    answer_send(l->ranks->cluster, to, FRAME_FETCH_REFUSED, fetch, 0, &m.base);
}

/* Gives the blocks back and forgets it, once neither engine nor any transfer uses it. */
static void drop_if_over(struct kv_lends *l, struct kv_lend *k)
{
    if (!k->is_held || k->parts.open || k->parts.opening) return;
    const enum status st = engine_release(l->engine, k->id);
    ASSERT(st == OK || st == ERR_CANCELED); /* CANCELED: the engine is shutting down */
    free_lend(l, k);
}

static void close_lend(struct kv_lends *l, struct kv_lend *k)
{
    if (k->state == LEND_CLOSING) return;
    k->state = LEND_CLOSING;
    k->parts.opening = 0; /* what is not open will not be */
    kv_sender_cancel(l->sender, &k->parts.sends);
    prompt_parts_tell(&k->parts, l->ranks, FRAME_KV_CANCEL);
    drop_if_over(l, k);
}

/* The peer need not wait for the rest of its parts. */
static void fail_lend(struct kv_lends *l, struct kv_lend *k, enum status st, const char *text)
{
    log_debug("kv not lent", "fetch=%016llx st=%s why=\"%s\"", (unsigned long long)k->fetch,
              status_name(st), text);
    refuse(l, k->from, k->fetch, 0, st, text);
    close_lend(l, k);
}

/* ---- FETCH ---- */

static struct prompt_parts_asked asked_of(const Baton__Fetch *m)
{
    return (struct prompt_parts_asked){
        .to = m->to, .n_to = m->n_to, .parts = m->parts, .n_parts = m->n_parts
    };
}

static enum status check(const struct kv_lends *l, const Baton__Fetch *m, const char **why)
{
    const struct kv_layout *mine = engine_kv_layout(l->engine);
    *why = "the request for blocks is malformed";
    if (!m || m->keys.len == 0 || m->keys.len % sizeof(struct hash128) ||
        m->keys.len / sizeof(struct hash128) > mine->n_blocks)
        return ERR_FORMAT;
    *why = "the peer's KV has another layout";
    if (m->layout != kv_layout_hash_of_model(mine)) return ERR_PEER_MISMATCH;
    *why = "this node has another number of ranks than the peer believes";
    if ((m->n_parts ? m->n_from : 1) != 1 + l->ranks->n_followers) return ERR_PEER_MISMATCH;
    *why = "a rank of this node was lost";
    if (l->broken) return ERR_PEER_LOST;
    *why = "this node sends no KV: no cache transfer protocol is enabled";
    if (!l->sender->kvt) return ERR_PEER_REFUSED;
    *why = "this node lends as many blocks as it can";
    return l->n_live >= KV_LENDS_MAX ? ERR_BUSY : OK;
}

static enum status take_parts(struct kv_lends *l, struct kv_lend *k, struct err *err)
{
    const struct prompt_parts_asked asked = asked_of(k->asked);
    if (asked.n_parts == 0) {
        prompt_parts_take_one(&k->parts, k->from, k->asked->kvt_grant, &k->arena);
        return OK;
    }
    TRY(prompt_parts_take(&k->parts, l->ranks, l->sender, &asked, &k->arena, err));
    return asked.to[0]->node == k->from
               ? OK
               : err_set(err, ERR_FORMAT, "the first rank is not the peer that asks");
}

/* Takes `body`. */
static void begin(struct kv_lends *l, const struct cluster_message *m, Baton__Fetch *body)
{
    struct kv_lend *k = MEM_NEW(struct kv_lend);
    const uint32_t n = (uint32_t)(body->keys.len / sizeof(struct hash128));
    struct hash128 *keys = mem_dup(body->keys.data, body->keys.len); /* aligned */
    struct err err = { 0 };
    k->id = l->id_base + kv_parts_id(++*l->next_id);
    k->fetch = m->request;
    k->from = m->from;
    k->n_blocks = n;
    k->asked = body;
    arena_init(&k->arena);
    prompt_parts_init(&k->parts, k->id);
    map_put(&l->by_id, map_key_u64(&k->id), k);
    list_push(&l->live, &k->link);
    l->n_live++;
    enum status st = take_parts(l, k, &err);
    if (st == OK) {
        st = engine_lend(l->engine, k->id, keys, n);
        if (st != OK) err_set(&err, st, "the engine does not take the request for blocks");
    }
    mem_free(keys);
    if (st == OK) return;
    refuse(l, k->from, k->fetch, 0, st, err.text);
    free_lend(l, k);
}

void kv_lends_on_message(struct kv_lends *l, const struct cluster_message *m)
{
    const char *why;
    Baton__Fetch *body = baton__fetch__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    const enum status st = check(l, body, &why);
    if (st == OK) {
        begin(l, m, body);
        return;
    }
    refuse(l, m->from, m->request, 0, st, why);
    if (body) baton__fetch__free_unpacked(body, NULL);
}

/* ---- holding ---- */

/* The transfers of this process wait for their connections; every follower opens its own. */
static void send_parts(struct kv_lends *l, struct kv_lend *k)
{
    struct prompt_parts_asked asked = asked_of(k->asked);
    asked.blocks = k->blocks;
    asked.n_blocks = k->n_blocks;
    k->state = LEND_SENDING;
    const enum status st = prompt_parts_ask(&k->parts, l->ranks, &asked);
    baton__fetch__free_unpacked(k->asked, NULL);
    k->asked = NULL;
    if (st != OK) fail_lend(l, k, ERR_PEER_LOST, "a rank of this node cannot be reached");
    else if (k->parts.sends.n) (void)kv_sender_start(l->sender, &k->parts.sends);
}

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
    send_parts(l, k);
}

/* ---- sending ---- */

static struct kv_lend *of_sends(const struct kv_lends *l, const struct kv_sends *s)
{
    return map_get(&l->by_id, map_key_u64(&s->id));
}

const struct prompt_parts *kv_lends_parts(const struct kv_lends *l, uint64_t id)
{
    const struct kv_lend *k = map_get(&l->by_id, map_key_u64(&id));
    return k ? &k->parts : NULL;
}

/* All layers are there: they are announced at once. */
bool kv_lends_on_open(struct kv_lends *l, struct kv_sends *s)
{
    struct kv_lend *k = of_sends(l, s);
    if (!k) return false;
    prompt_parts_opened(&k->parts);
    kv_sender_write(l->sender, engine_kv_layout(l->engine), k->id, k->blocks, k->n_blocks);
    return true;
}

bool kv_lends_on_failed(struct kv_lends *l, struct kv_sends *s, const char *text)
{
    struct kv_lend *k = of_sends(l, s);
    if (!k) return false;
    prompt_parts_opened(&k->parts);
    fail_lend(l, k, ERR_PEER_LOST, text);
    return true;
}

bool kv_lends_on_kvt(struct kv_lends *l, const struct kvt_event *ev)
{
    const uint64_t id = kv_part_owner(ev->id);
    struct kv_lend *k = map_get(&l->by_id, map_key_u64(&id));
    if (!k || (ev->kind != KVT_SENT && ev->kind != KVT_SEND_FAILED)) return k != NULL;
    if (!prompt_parts_end(&k->parts, ev)) return true;
    if (ev->kind == KVT_SEND_FAILED && k->state != LEND_CLOSING) {
        if (ev->status == ERR_CANCELED) close_lend(l, k); /* the peer needs it no more */
        else fail_lend(l, k, ev->status, ev->text);
        return true;
    }
    if (k->state != LEND_CLOSING && !k->parts.open && !k->parts.opening)
        counter_add(l->lent, k->n_blocks);
    drop_if_over(l, k);
    return true;
}

static void on_follower_lost(struct kv_lends *l, uint32_t rank)
{
    l->broken = true;
    LIST_FOREACH (k, &l->live, struct kv_lend, link) {
        if (!prompt_parts_on_lost(&k->parts, rank)) continue;
        if (k->state == LEND_CLOSING) drop_if_over(l, k);
        else fail_lend(l, k, ERR_PEER_LOST, "a rank of this node was lost");
    }
}

void kv_lends_on_lost(struct kv_lends *l, uint64_t node)
{
    const uint32_t rank = prefill_ranks_find(l->ranks, node);
    if (rank) on_follower_lost(l, rank);
    LIST_FOREACH (k, &l->live, struct kv_lend, link)
        if (k->from == node || prompt_parts_go_to(&k->parts, node)) close_lend(l, k);
}
