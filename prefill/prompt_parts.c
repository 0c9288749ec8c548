/* prompt_parts.c - see prompt_parts.h. */
#include "prefill/prompt_parts.h"

uint32_t prefill_ranks_find(const struct prefill_ranks *ranks, uint64_t process)
{
    for (uint32_t i = 0; i < ranks->n_followers; i++)
        if (ranks->followers[i] == process) return i + 1;
    return 0;
}

void prompt_parts_init(struct prompt_parts *p, uint64_t id)
{
    *p = (struct prompt_parts){ .id = id };
    kv_sends_init(&p->sends, id);
}

uint32_t prompt_parts_of_rank(const struct prompt_parts *p, uint32_t rank)
{
    uint32_t bits = 0;
    for (uint32_t i = 0; i < p->n; i++)
        if (p->from[i] == rank) bits |= 1u << i;
    return bits;
}

enum status prompt_parts_take(struct prompt_parts *p, const struct prefill_ranks *ranks,
                              struct kv_sender *sender, const struct prompt_parts_asked *a,
                              struct arena *arena, struct err *err)
{
    if (a->n_to == 0 || a->n_to > KV_RANKS_MAX || a->n_parts == 0 || a->n_parts > KV_PARTS_MAX)
        return err_set(err, ERR_PEER_MISMATCH, /* the grant's fault, not the request's */
                       "the prompt's KV goes to %zu ranks in %zu parts, not 1 to %d and 1 to %d",
                       a->n_to, a->n_parts, KV_RANKS_MAX, KV_PARTS_MAX);
    for (size_t i = 0; i < a->n_to; i++) TRY(kv_sender_learn(sender, a->to[i], err));
    for (uint32_t i = 0; i < a->n_parts; i++) {
        const Baton__KvPart *part = a->parts[i];
        if (part->from > ranks->n_followers || part->to >= a->n_to || part->kvt_grant.len == 0)
            return err_set(err, ERR_PEER_MISMATCH,
                           "a KV part goes from rank %u to rank %u, of %u and %zu", part->from,
                           part->to, ranks->n_followers + 1, a->n_to);
        p->from[i] = (uint8_t)part->from;
        if (part->from == 0)
            kv_sends_add(&p->sends, i, a->to[part->to]->node, part->kvt_grant, arena);
    }
    p->n = (uint32_t)a->n_parts;
    p->opening = p->sends.n ? 1 : 0;
    return OK;
}

void prompt_parts_take_one(struct prompt_parts *p, uint64_t process, ProtobufCBinaryData grant,
                           struct arena *arena)
{
    kv_sends_add(&p->sends, 0, process, grant, arena);
    p->from[0] = 0;
    p->n = p->opening = 1;
}

static enum status ask_one(struct prompt_parts *p, const struct prefill_ranks *ranks, uint32_t rank,
                           const struct prompt_parts_asked *a)
{
    uint32_t parts[KV_PARTS_MAX];
    Baton__NodeAddress *to[KV_PARTS_MAX];
    ProtobufCBinaryData grants[KV_PARTS_MAX];
    Baton__KvSend ask = BATON__KV_SEND__INIT;
    for (uint32_t i = 0; i < p->n; i++) {
        if (p->from[i] != rank) continue;
        parts[ask.n_parts] = i;
        to[ask.n_parts] = a->to[a->parts[i]->to];
        grants[ask.n_parts++] = a->parts[i]->kvt_grant;
    }
    if (ask.n_parts == 0) return OK;
    ask.parts = parts;
    ask.to = to;
    ask.kvt_grants = grants;
    ask.n_to = ask.n_kvt_grants = ask.n_parts;
    ask.blocks = (int32_t *)(uintptr_t)a->blocks; /* only read */
    ask.n_blocks = a->n_blocks;
    TRY(cluster_send_proto(ranks->cluster, ranks->followers[rank - 1], FRAME_KV_SEND, p->id, 0,
                           &ask.base));
    p->open |= prompt_parts_of_rank(p, rank);
    if (a->n_blocks == 0) p->opening |= 1u << rank;
    return OK;
}

enum status prompt_parts_ask(struct prompt_parts *p, const struct prefill_ranks *ranks,
                             const struct prompt_parts_asked *a)
{
    for (uint32_t rank = 1; rank <= ranks->n_followers; rank++) TRY(ask_one(p, ranks, rank, a));
    return OK;
}

void prompt_parts_tell(const struct prompt_parts *p, const struct prefill_ranks *ranks,
                       enum frame_type type)
{
    for (uint32_t rank = 1; rank <= ranks->n_followers; rank++) {
        if (!(p->open & prompt_parts_of_rank(p, rank))) continue;
        uint64_t process = ranks->followers[rank - 1];
        /* One that cannot take it loses its link: else its parts would never end. */
        if (cluster_send(ranks->cluster, process, type, p->id, 0, (struct str){ 0 }) == ERR_FULL)
            cluster_disconnect(ranks->cluster, process, "its queue of commands is full");
    }
}

bool prompt_parts_go_to(const struct prompt_parts *p, uint64_t process)
{
    for (uint32_t i = 0; i < p->sends.n; i++)
        if (p->sends.send[i].process == process) return true;
    return false;
}

void prompt_parts_opened(struct prompt_parts *p)
{
    p->open |= p->sends.open;
    p->opening &= ~1u;
}

bool prompt_parts_end(struct prompt_parts *p, const struct kvt_event *ev)
{
    uint32_t bit = 1u << kv_part_index(ev->id);
    if (!(p->open & bit)) return false;
    p->open &= ~bit;
    if (ev->kind != KVT_SENT) return true;
    p->bytes += ev->bytes;
    if (ev->ns >= p->slowest.ns) p->slowest = *ev;
    return true;
}

bool prompt_parts_on_lost(struct prompt_parts *p, uint32_t rank)
{
    const uint32_t bits = p->open & prompt_parts_of_rank(p, rank);
    p->open &= ~bits;
    return bits != 0;
}
