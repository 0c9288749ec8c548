/* tier_message.c - see tier_message.h. */
#include "deploy/tiers/tier_message.h"

#include "shared/base/mem.h"
#include "shared/cluster/proto/node.pb-c.h"

enum { KEY_BYTES = sizeof(struct hash128) };

static void pack(const ProtobufCMessage *m, struct buf *out)
{
    const size_t n = protobuf_c_message_get_packed_size(m);
    out->len += protobuf_c_message_pack(m, (uint8_t *)buf_reserve(out, n));
}

/* Keys of the message: those of a GET, or a block's and its parent's. */
void tier_message_write(const struct tier_command *c, struct buf *out)
{
    Baton__KvTier m = BATON__KV_TIER__INIT;
    const struct hash128 of[2] = { c->of.key, c->of.parent };
    const bool gets = c->kind == TIER_GET, puts = c->kind == TIER_PUT;
    const size_t n_keys = gets ? c->n : puts ? 2 : c->kind == TIER_DROP;
    m.what = (uint32_t)c->kind;
    m.tier = (uint32_t)c->tier;
    m.keys = (ProtobufCBinaryData){ n_keys * KEY_BYTES, (uint8_t *)(gets ? c->keys : of) };
    m.depth = puts ? c->of.depth : 0;
    m.blocks = (int32_t *)(gets ? c->blocks : &c->block);
    m.n_blocks = gets ? c->n : puts && c->block >= 0;
    pack(&m.base, out);
}

void tier_message_write_answer(const struct tier_answer *a, struct buf *out)
{
    Baton__KvTierDone m = BATON__KV_TIER_DONE__INIT;
    m.tier = (uint32_t)a->tier;
    m.status = a->status;
    m.n_good = a->n_good;
    pack(&m.base, out);
}

static bool is_well_formed(const Baton__KvTier *m)
{
    const size_t n_keys = m->keys.len / KEY_BYTES;
    if (m->what >= TIER_COMMANDS || m->tier >= KV_TIER_KINDS || m->keys.len % KEY_BYTES)
        return false;
    for (size_t i = 0; i < m->n_blocks; i++)
        if (m->blocks[i] < 0) return false;
    switch (m->what) {
    case TIER_PUT: return n_keys == 2 && m->n_blocks <= 1;
    case TIER_GET: return n_keys > 0 && n_keys == m->n_blocks;
    case TIER_DROP: return n_keys == 1 && m->n_blocks == 0;
    default: return n_keys == 0 && m->n_blocks == 0;
    }
}

static void read_command(uint64_t id, const Baton__KvTier *m, struct tier_message *out)
{
    *out = (struct tier_message){ .c = { .kind = (enum tier_command_kind)m->what,
                                         .tier = (enum kv_tier_kind)m->tier,
                                         .id = id,
                                         .of.depth = m->depth,
                                         .block = m->n_blocks ? m->blocks[0] : -1 } };
    out->keys = m->keys.len ? mem_dup(m->keys.data, m->keys.len) : NULL; /* aligned */
    if (m->what == TIER_PUT || m->what == TIER_DROP) out->c.of.key = out->keys[0];
    if (m->what == TIER_PUT) out->c.of.parent = out->keys[1];
    if (m->what != TIER_GET) return;
    out->blocks = mem_dup(m->blocks, m->n_blocks * sizeof *m->blocks);
    out->c.n = (uint32_t)m->n_blocks;
    out->c.keys = out->keys;
    out->c.blocks = out->blocks;
}

bool tier_message_read(uint64_t id, struct str body, struct tier_message *out)
{
    Baton__KvTier *m = baton__kv_tier__unpack(NULL, body.n, (const uint8_t *)body.p);
    const bool is_good = m && is_well_formed(m);
    if (is_good) read_command(id, m, out);
    if (m) baton__kv_tier__free_unpacked(m, NULL);
    return is_good;
}

void tier_message_release(struct tier_message *m)
{
    mem_free(m->keys);
    mem_free(m->blocks);
}

bool tier_message_read_answer(uint64_t id, struct str body, struct tier_answer *out)
{
    Baton__KvTierDone *m = baton__kv_tier_done__unpack(NULL, body.n, (const uint8_t *)body.p);
    const bool is_good = m && m->tier < KV_TIER_KINDS;
    if (is_good)
        *out = (struct tier_answer){ .tier = (enum kv_tier_kind)m->tier,
                                     .id = id,
                                     .status = (enum status)m->status,
                                     .n_good = m->n_good };
    if (m) baton__kv_tier_done__free_unpacked(m, NULL);
    return is_good;
}
