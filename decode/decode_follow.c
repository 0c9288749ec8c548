/* decode_follow.c - see decode_follow.h. */
#include "decode/decode_follow.h"

#include <stdio.h>

#include "decode/kv_answer.h"
#include "kvtransfer/event_wire.h"
#include "shared/base/list.h"
#include "shared/base/log.h"
#include "shared/base/map.h"
#include "shared/base/mem.h"
#include "shared/cluster/answer.h"
#include "shared/kv/kv_parts.h"

/* What this rank receives of one sequence of the leader. Thread: loop. Owner: decode_follower. */
struct decode_follow_seq {
    uint64_t id;
    uint32_t open; /* bit i: part i can still be written */
    struct list link;
};

struct decode_follower {
    struct decode_follow_options o;
    struct map by_id;
    struct list live;
    uint32_t n_live;
    bool leader_lost;
};

struct decode_follower *decode_follow_create(const struct decode_follow_options *o)
{
    struct decode_follower *f = MEM_NEW(struct decode_follower);
    f->o = *o;
    list_init(&f->live);
    return f;
}

void decode_follow_free(struct decode_follower *f)
{
    if (!f) return;
    LIST_FOREACH (seq, &f->live, struct decode_follow_seq, link) mem_free(seq);
    map_release(&f->by_id);
    mem_free(f);
}

uint32_t decode_follow_n_live(const struct decode_follower *f) { return f->n_live; }

static void drop(struct decode_follower *f, struct decode_follow_seq *seq)
{
    map_del(&f->by_id, map_key_u64(&seq->id));
    list_remove(&seq->link);
    f->n_live--;
    mem_free(seq);
}

static void tell(struct decode_follower *f, const struct kvt_event *ev)
{
    struct buf b = { 0 };
    kvt_event_encode(ev, &b);
    /* A lost event would keep the leader's blocks for ever: then rather lose the link. */
    if (!f->leader_lost && cluster_send(f->o.cluster, f->o.leader, FRAME_KV_EVENT,
                                        kv_part_owner(ev->id), 0, buf_str(&b)) == ERR_FULL)
        cluster_disconnect(f->o.cluster, f->o.leader, "its queue of events is full");
    buf_release(&b);
}

/* Nothing was granted, so nothing will be written: the part is over at once. */
static void tell_refused(struct decode_follower *f, uint64_t id, enum status st, const char *text)
{
    struct kvt_event ev = { .kind = KVT_RECEIVE_FAILED, .id = id, .status = st };
    snprintf(ev.text, sizeof ev.text, "%s", text);
    tell(f, &ev);
    tell(f, &(struct kvt_event){ .kind = KVT_FENCED, .id = id });
}

/* Appends this rank's grant of one part. */
static enum status expect(struct decode_follower *f, struct decode_follow_seq *seq,
                          const Baton__KvExpect *m, const Baton__KvHeads *heads, struct buf *grant)
{
    uint32_t bit = 1u << heads->part, first = f->o.layout.first_head;
    if (seq->open & bit || heads->first_head < first) return ERR_INVALID;
    TRY(kvt_expect_heads(f->o.kvt, seq->id + heads->part, heads->first_head - first, heads->n_heads,
                         m->blocks, (uint32_t)m->n_blocks, m->n_skip, m->n_tokens, grant));
    seq->open |= bit;
    return OK;
}

static bool is_well_formed(const Baton__KvExpect *m)
{
    if (!m || m->n_parts == 0 || m->n_parts > KV_PARTS_MAX || m->n_blocks > UINT32_MAX)
        return false;
    for (size_t i = 0; i < m->n_parts; i++)
        if (m->parts[i]->part >= KV_PARTS_MAX) return false;
    return true;
}

static void send_grants(struct decode_follower *f, uint64_t id, struct buf *grants, size_t n)
{
    Baton__KvGrants m = BATON__KV_GRANTS__INIT;
    ProtobufCBinaryData list[KV_PARTS_MAX];
    for (size_t i = 0; i < n; i++)
        list[i] = (ProtobufCBinaryData){ grants[i].len, (uint8_t *)grants[i].data };
    m.kvt_grants = list;
    m.n_kvt_grants = n;
    answer_send(f->o.cluster, f->o.leader, FRAME_KV_GRANTS, id, 0, &m.base);
}

static void expect_all(struct decode_follower *f, uint64_t id, const Baton__KvExpect *m)
{
    struct buf grants[KV_PARTS_MAX] = { { 0 } };
    struct decode_follow_seq *seq = MEM_NEW(struct decode_follow_seq);
    enum status st = OK;
    seq->id = id;
    for (size_t i = 0; i < m->n_parts && st == OK; i++)
        st = expect(f, seq, m, m->parts[i], &grants[i]);
    list_push(&f->live, &seq->link);
    map_put(&f->by_id, map_key_u64(&seq->id), seq);
    f->n_live++;
    if (st == OK) {
        send_grants(f, id, grants, m->n_parts);
    } else {
        log_warn("kv parts refused", "sequence=%016llx st=%s", (unsigned long long)id,
                 status_name(st));
        for (size_t i = 0; i < m->n_parts; i++) {
            uint32_t part = m->parts[i]->part;
            if (seq->open & 1u << part) kvt_expect_cancel(f->o.kvt, id + part);
            tell_refused(f, id + part, st, "too many KV transfers at once");
        }
        drop(f, seq); /* nobody has the grants; FENCED of those that were made finds no record */
    }
    for (size_t i = 0; i < m->n_parts; i++) buf_release(&grants[i]);
}

static void on_expect(struct decode_follower *f, const struct cluster_message *m)
{
    Baton__KvExpect *body = baton__kv_expect__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    if (m->from != f->o.leader || f->leader_lost || map_get(&f->by_id, map_key_u64(&m->request)))
        log_warn("kv parts not taken", "from=%s sequence=%016llx", m->from_name,
                 (unsigned long long)m->request);
    else if (!is_well_formed(body))
        cluster_disconnect(f->o.cluster, m->from, "it asks for malformed KV parts");
    else expect_all(f, m->request, body);
    if (body) baton__kv_expect__free_unpacked(body, NULL);
}

static void cancel(struct decode_follower *f, const struct decode_follow_seq *seq)
{
    for (uint32_t i = 0; i < KV_PARTS_MAX; i++)
        if (seq->open & 1u << i) kvt_expect_cancel(f->o.kvt, seq->id + i);
}

static bool on_cancel(struct decode_follower *f, const struct cluster_message *m)
{
    struct decode_follow_seq *seq = map_get(&f->by_id, map_key_u64(&m->request));
    if (!seq) return false; /* all was received, or it is a prompt */
    if (m->from == f->o.leader) cancel(f, seq);
    return true;
}

bool decode_follow_on_message(struct decode_follower *f, const struct cluster_message *m)
{
    switch (m->type) {
    case FRAME_KVT_HELLO: kv_answer_send(f->o.cluster, f->o.kvt, m); return true;
    case FRAME_KV_EXPECT: on_expect(f, m); return true;
    case FRAME_KV_CANCEL: return on_cancel(f, m);
    default: return false;
    }
}

void decode_follow_on_kvt(struct decode_follower *f, const struct kvt_event *ev)
{
    uint64_t id = kv_part_owner(ev->id);
    uint32_t bit = 1u << kv_part_index(ev->id);
    struct decode_follow_seq *seq = map_get(&f->by_id, map_key_u64(&id));
    if (!seq || !(seq->open & bit)) return;
    if (ev->kind == KVT_RECEIVED || ev->kind == KVT_FENCED) seq->open &= ~bit;
    tell(f, ev);
    if (!seq->open) drop(f, seq);
}

void decode_follow_on_lost(struct decode_follower *f, uint64_t node)
{
    if (node != f->o.leader) return;
    f->leader_lost = true;
    LIST_FOREACH (seq, &f->live, struct decode_follow_seq, link) cancel(f, seq);
}
