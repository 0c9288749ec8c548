/* group_wire.c - messages of a group: packed, sent, unpacked into rosters. Thread: loop. */
#include <stdio.h>
#include <string.h>

#include "shared/base/mem.h"
#include "shared/cluster/group_internal.h"

void group_send(struct group *g, uint64_t node, enum frame_type type, enum group_way way,
                const ProtobufCMessage *body)
{
    if (node == 0) return;
    if (cluster_send_proto(g->o.cluster, node, type, (uint64_t)way, (uint32_t)g->o.kind, body) ==
        ERR_FULL)
        cluster_disconnect(g->o.cluster, node, "it does not take the messages of its group");
}

const ProtobufCMessageDescriptor *group_body_of(enum frame_type type)
{
    switch (type) {
    case FRAME_GROUP_HELLO: return &baton__group_hello__descriptor;
    case FRAME_GROUP_REFUSED: return &baton__group_refused__descriptor;
    case FRAME_GROUP_LEAD: return &baton__group_lead__descriptor;
    case FRAME_GROUP_PROPOSE: return &baton__group_propose__descriptor;
    case FRAME_GROUP_BLOB: return &baton__group_blob__descriptor;
    case FRAME_GROUP_LOST: return &baton__group_lost__descriptor;
    case FRAME_GROUP_BELL: return &baton__group_bell__descriptor;
    case FRAME_GROUP_LOAD: return &baton__group_load__descriptor;
    default: return NULL;
    }
}

/* ---- members ---- */

void group_member_pack(Baton__GroupMember *to, const struct group_member *m)
{
    baton__group_member__init(to);
    to->rank = m->rank;
    to->node = m->node;
    to->host = (char *)m->host; /* is only read */
    to->port = m->port;
}

bool group_member_unpack(struct group_member *to, const Baton__GroupMember *m, uint32_t size)
{
    if (!m || m->rank >= size || m->node == 0 || m->port > UINT16_MAX) return false;
    *to = (struct group_member){ .rank = m->rank, .node = m->node, .port = (uint16_t)m->port };
    const int n = snprintf(to->host, sizeof to->host, "%s", m->host);
    return n >= 0 && (size_t)n < sizeof to->host;
}

/* ---- rosters ---- */

void group_roster_clear(struct group_roster *r)
{
    mem_free(r->members);
    buf_release(&r->placement);
    *r = (struct group_roster){ 0 };
}

void group_roster_move(struct group_roster *to, struct group_roster *from)
{
    group_roster_clear(to);
    *to = *from;
    *from = (struct group_roster){ 0 };
}

void group_roster_copy(struct group_roster *to, const struct group_roster *from)
{
    group_roster_clear(to);
    to->epoch = from->epoch;
    to->reason = from->reason;
    to->n_failures = from->n_failures;
    to->n = from->n;
    to->members = MEM_ARRAY(struct group_member, from->n ? from->n : 1);
    if (from->n) memcpy(to->members, from->members, from->n * sizeof *from->members);
    buf_add_str(&to->placement, buf_str(&from->placement));
}

int32_t group_roster_find(const struct group_roster *r, uint32_t rank)
{
    for (uint32_t i = 0; i < r->n; i++)
        if (r->members[i].rank == rank) return (int32_t)i;
    return -1;
}

bool group_roster_has_node(const struct group_roster *r, uint64_t node)
{
    for (uint32_t i = 0; i < r->n; i++)
        if (r->members[i].node == node) return true;
    return false;
}

bool group_roster_unpack(struct group_roster *to, const Baton__GroupPropose *m, uint32_t size)
{
    group_roster_clear(to);
    if (m->n_members > size) return false;
    to->members = MEM_ARRAY(struct group_member, m->n_members ? m->n_members : 1);
    for (size_t i = 0; i < m->n_members; i++) {
        if (!group_member_unpack(&to->members[i], m->members[i], size)) return false;
        if (i > 0 && to->members[i].rank <= to->members[i - 1].rank) return false;
    }
    to->epoch = m->epoch;
    to->reason = m->reason < GROUP_REASONS ? (enum group_reason)m->reason : GROUP_START;
    to->n = (uint32_t)m->n_members;
    to->n_failures = m->n_failures;
    buf_add(&to->placement, m->placement.data, m->placement.len);
    return true;
}

void group_roster_send(struct group *g, const struct group_roster *r, uint64_t node)
{
    Baton__GroupPropose m = BATON__GROUP_PROPOSE__INIT;
    Baton__GroupMember members[GROUP_RANKS_MAX], *list[GROUP_RANKS_MAX];
    for (uint32_t i = 0; i < r->n; i++) {
        group_member_pack(&members[i], &r->members[i]);
        list[i] = &members[i];
    }
    m.epoch = r->epoch;
    m.reason = r->reason;
    m.n_failures = r->n_failures;
    m.n_members = r->n;
    m.members = list;
    m.placement = (ProtobufCBinaryData){ r->placement.len, (uint8_t *)r->placement.data };
    group_send(g, node, FRAME_GROUP_PROPOSE, FROM_LEADER, &m.base);
}
