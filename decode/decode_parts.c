/* decode_parts.c - see decode_parts.h. */
#include "decode/decode_parts.h"

#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/log.h"

void decode_parts_init(struct decode_parts *p)
{
    *p = (struct decode_parts){ 0 };
    arena_init(&p->arena);
}

void decode_parts_release(struct decode_parts *p) { arena_release(&p->arena); }

uint32_t decode_ranks_find(const struct decode_ranks *ranks, uint64_t process)
{
    for (uint32_t rank = 1; rank < ranks->n; rank++)
        if (ranks->all[rank].node == process) return rank;
    return 0;
}

uint32_t decode_parts_of_rank(const struct decode_parts *p, uint32_t rank)
{
    uint32_t bits = 0;
    for (uint32_t i = 0; i < p->plan.n; i++)
        if (p->plan.part[i].receiver == rank) bits |= 1u << i;
    return bits;
}

/* ---- grants ---- */

static enum status make_plan(struct decode_parts *p, const struct decode_ranks *ranks,
                             uint64_t spread, uint32_t n_senders, struct err *err)
{
    struct kv_layout from[KV_RANKS_MAX], to[KV_RANKS_MAX];
    const uint32_t n = ranks->n;
    for (uint32_t r = 0; r < n_senders && r < KV_RANKS_MAX; r++)
        from[r] = kv_layout_of_rank(&ranks->layout, r, n_senders);
    for (uint32_t r = 0; r < n; r++) to[r] = kv_layout_of_rank(&ranks->layout, r, n);
    return kv_parts_plan(from, n_senders, to, n, spread, &p->plan, err);
}

static void keep_grant(struct decode_parts *p, uint32_t part, struct str grant)
{
    p->grants[part] = (struct str){ arena_strndup(&p->arena, grant.p, grant.n), grant.n };
}

static enum status expect_own(struct decode_parts *p, const struct decode_ranks *ranks, uint64_t id,
                              const struct decode_room *room, struct err *err)
{
    const struct kv_layout *l = &ranks->layout;
    for (uint32_t i = 0; i < p->plan.n; i++) {
        const struct kv_part *part = &p->plan.part[i];
        struct buf grant = { 0 };
        if (part->receiver != 0) continue;
        enum status st = kvt_expect_heads(ranks->kvt, id + i, part->first_head - l->first_head,
                                          part->n_heads, room->blocks, room->n_blocks, room->n_skip,
                                          room->n_tokens, &grant);
        if (st == OK) {
            p->open |= 1u << i;
            keep_grant(p, i, buf_str(&grant));
        }
        buf_release(&grant);
        if (st != OK) return err_set(err, st, "too many KV transfers at once");
    }
    return OK;
}

static enum status ask_follower(struct decode_parts *p, const struct decode_ranks *ranks,
                                uint32_t rank, uint64_t id, const struct decode_room *room,
                                struct err *err)
{
    Baton__KvHeads heads[KV_PARTS_MAX], *list[KV_PARTS_MAX];
    Baton__KvExpect m = BATON__KV_EXPECT__INIT;
    for (uint32_t i = 0; i < p->plan.n; i++) {
        const struct kv_part *part = &p->plan.part[i];
        if (part->receiver != rank) continue;
        Baton__KvHeads *h = list[m.n_parts] = &heads[m.n_parts];
        baton__kv_heads__init(h);
        h->part = i;
        h->first_head = part->first_head;
        h->n_heads = part->n_heads;
        m.n_parts++;
    }
    if (m.n_parts == 0) return OK;
    m.parts = list;
    m.n_blocks = room->n_blocks;
    m.blocks = (int32_t *)(uintptr_t)room->blocks; /* only read */
    m.n_skip = room->n_skip;
    m.n_tokens = room->n_tokens;
    if (cluster_send_proto(ranks->cluster, ranks->all[rank].node, FRAME_KV_EXPECT, id, 0,
                           &m.base) != OK)
        return err_set(err, ERR_PEER_LOST, "rank %u of this node cannot be reached", rank);
    p->open |= decode_parts_of_rank(p, rank);
    return OK;
}

enum status decode_parts_expect(struct decode_parts *p, const struct decode_ranks *ranks,
                                uint64_t id, uint64_t spread, uint32_t n_senders,
                                const struct decode_room *room, struct err *err)
{
    TRY(make_plan(p, ranks, spread, n_senders, err));
    TRY(expect_own(p, ranks, id, room, err));
    for (uint32_t rank = 1; rank < ranks->n; rank++)
        TRY(ask_follower(p, ranks, rank, id, room, err));
    return OK;
}

enum status decode_parts_take_grants(struct decode_parts *p, const struct decode_ranks *ranks,
                                     const struct cluster_message *m)
{
    uint32_t rank = decode_ranks_find(ranks, m->from), n = 0;
    uint32_t bits = rank ? decode_parts_of_rank(p, rank) : 0;
    Baton__KvGrants *g = baton__kv_grants__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    bool right = g && bits && g->n_kvt_grants == (size_t)__builtin_popcount(bits);
    for (uint32_t i = 0; right && i < p->plan.n; i++) {
        if (!(bits & 1u << i)) continue;
        const ProtobufCBinaryData *one = &g->kvt_grants[n++];
        right = one->len > 0 && !p->grants[i].n;
        if (right) keep_grant(p, i, (struct str){ (const char *)one->data, one->len });
    }
    if (g) baton__kv_grants__free_unpacked(g, NULL);
    return right ? OK : ERR_FORMAT;
}

bool decode_parts_are_granted(const struct decode_parts *p)
{
    for (uint32_t i = 0; i < p->plan.n; i++)
        if (!p->grants[i].n) return false;
    return true;
}

Baton__KvPart **decode_parts_write(struct decode_parts *p)
{
    Baton__KvPart **parts = ARENA_ARRAY(&p->arena, Baton__KvPart *, p->plan.n);
    for (uint32_t i = 0; i < p->plan.n; i++) {
        Baton__KvPart *part = parts[i] = ARENA_NEW(&p->arena, Baton__KvPart);
        baton__kv_part__init(part);
        part->from = p->plan.part[i].sender;
        part->to = p->plan.part[i].receiver;
        part->kvt_grant.data = (uint8_t *)p->grants[i].p;
        part->kvt_grant.len = p->grants[i].n;
    }
    return parts;
}

/* ---- ends ---- */

void decode_parts_cancel(struct decode_parts *p, const struct decode_ranks *ranks, uint64_t id)
{
    Baton__KvCancel m = BATON__KV_CANCEL__INIT;
    for (uint32_t i = 0; i < p->plan.n; i++)
        if (p->open & 1u << i && p->plan.part[i].receiver == 0)
            kvt_expect_cancel(ranks->kvt, id + i);
    for (uint32_t rank = 1; rank < ranks->n; rank++) {
        if (!(p->open & decode_parts_of_rank(p, rank))) continue;
        uint64_t process = ranks->all[rank].node;
        /* It must not be lost: the blocks would stay in quarantine for good. */
        if (cluster_send_proto(ranks->cluster, process, FRAME_KV_CANCEL, id, 0, &m.base) ==
            ERR_FULL)
            cluster_disconnect(ranks->cluster, process, "its queue of cancels is full");
    }
}

bool decode_parts_on_kvt(struct decode_parts *p, const struct kvt_event *ev)
{
    uint32_t bit = 1u << kv_part_index(ev->id);
    if (!(p->open & bit)) return false;
    if (ev->kind == KVT_RECEIVE_FAILED) return true; /* FENCED follows */
    p->open &= ~bit;
    if (ev->kind != KVT_RECEIVED) return true;
    p->received |= bit;
    p->bytes += ev->bytes;
    if (!p->transport || ev->ns >= p->ns) {
        p->ns = ev->ns;
        p->link_speed = ev->link_speed;
        p->transport = ev->transport;
    }
    return true;
}

bool decode_parts_on_lost(struct decode_parts *p, uint32_t rank)
{
    const uint32_t bits = p->open & decode_parts_of_rank(p, rank);
    p->open &= ~bits;
    return bits != 0;
}

bool decode_parts_are_received(const struct decode_parts *p)
{
    return p->plan.n && (uint32_t)__builtin_popcount(p->received) == p->plan.n;
}
