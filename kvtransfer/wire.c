/* wire.c - encoding and strict decoding of everything two kvt exchange; see wire.h. Values in,
 * values out, no state. */
#include "kvtransfer/wire.h"

#include <assert.h>
#include <string.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "structs go over the wire as they lie in memory");

static const uint32_t HELLO_MAGIC = 0x4b565448;    /* "HTVK" */
static const uint32_t ANSWER_MAGIC = 0x4b565441;   /* "ATVK" */
static const uint32_t GRANT_MAGIC = 0x4b565447;    /* "GTVK" */
static const uint32_t PREAMBLE_MAGIC = 0x4b565450; /* "PTVK" */
enum { FLAG_CHECKSUM = 1, FLAG_LOSSY = 2, FLAGS = FLAG_CHECKSUM | FLAG_LOSSY };

struct kvt_wire_hello {
    uint32_t magic;
    uint16_t version, flags;
    uint8_t node[16];
    uint8_t layout[KV_LAYOUT_WIRE_BYTES];
};
static_assert(sizeof(struct kvt_wire_hello) == 80, "wire size");

struct kvt_wire_answer {
    uint32_t magic;
    uint16_t version;
    uint8_t n_transports, flags;
    uint8_t ticket[KVT_TICKET_BYTES];
    uint8_t layout[KV_LAYOUT_WIRE_BYTES];
    uint8_t node[16];
};
static_assert(sizeof(struct kvt_wire_answer) == 96, "wire size");

struct kvt_wire_transport { /* then name, then address */
    uint8_t name_len, zero;
    uint16_t address_len;
};
static_assert(sizeof(struct kvt_wire_transport) == 4, "wire size");

struct kvt_wire_grant { /* then n_blocks int32 */
    uint32_t magic;
    uint16_t version, zero;
    uint64_t generation;
    uint32_t session, n_blocks, n_skip, n_tokens;
    uint32_t first_head, n_heads, block_tokens, zero_too;
};
static_assert(sizeof(struct kvt_wire_grant) == 48, "wire size");

struct kvt_wire_preamble {
    uint32_t magic;
    uint16_t version, kind;
    uint8_t ticket[KVT_TICKET_BYTES];
    uint64_t value;
};
static_assert(sizeof(struct kvt_wire_preamble) == KVT_PREAMBLE_BYTES, "wire size");

struct kvt_wire_message { /* then n checksums of a NOTE */
    uint8_t kind, status; /* status: its number without the sign */
    uint16_t n;
    uint32_t session;
    uint64_t generation, bytes;
    uint16_t layer, more_layers;
    uint32_t first;
};
static_assert(sizeof(struct kvt_wire_message) == KVT_MESSAGE_BYTES, "wire size");

static uint8_t flags_of(bool checksum, bool lossy)
{
    return (uint8_t)((checksum ? FLAG_CHECKSUM : 0) | (lossy ? FLAG_LOSSY : 0));
}

static enum status bad_version(struct err *err, const char *what, uint32_t version)
{
    return err_set(
        err, ERR_PEER_MISMATCH,
        "the %s speaks KV transfer version %u, this node version %d: run the same release on both",
        what, version, KVT_VERSION);
}

/* Takes a message that begins with magic and version. The version is looked at before the length,
 * so that an earlier release is refused by name. */
static enum status take(struct str *in, void *out, size_t n, uint32_t magic, const char *what,
                        const char *peer, struct err *err)
{
    struct {
        uint32_t magic;
        uint16_t version;
    } begin = { 0 };
    const size_t n_begin = sizeof begin.magic + sizeof begin.version;
    if (in->n >= n_begin) memcpy(&begin, in->p, n_begin);
    if (in->n < n_begin || begin.magic != magic) return err_set(err, ERR_FORMAT, "not a %s", what);
    if (begin.version != KVT_VERSION) return bad_version(err, peer, begin.version);
    if (!str_take(in, out, n)) return err_set(err, ERR_FORMAT, "a %s is cut short", what);
    return OK;
}

/* ---- hello ---- */

void kvt_hello_encode(const struct kvt_hello_msg *m, struct buf *out)
{
    struct kvt_wire_hello w = {
        .magic = HELLO_MAGIC,
        .version = KVT_VERSION,
        .flags = flags_of(m->checksum, m->lossy),
    };
    memcpy(w.node, m->node, sizeof w.node);
    struct buf layout = { 0 };
    kv_layout_encode(&m->layout, &layout);
    memcpy(w.layout, layout.data, sizeof w.layout);
    buf_release(&layout);
    buf_add(out, &w, sizeof w);
}

enum status kvt_hello_decode(struct str in, struct kvt_hello_msg *out, struct err *err)
{
    struct kvt_wire_hello w;
    TRY(take(&in, &w, sizeof w, HELLO_MAGIC, "KV transfer hello", "sender", err));
    if ((w.flags & ~FLAGS) || in.n) return err_set(err, ERR_FORMAT, "malformed KV transfer hello");
    struct kvt_hello_msg m = { .checksum = w.flags & FLAG_CHECKSUM, .lossy = w.flags & FLAG_LOSSY };
    memcpy(m.node, w.node, sizeof m.node);
    TRY(kv_layout_decode((struct str){ (const char *)w.layout, sizeof w.layout }, &m.layout, err));
    *out = m;
    return OK;
}

/* ---- answer ---- */

void kvt_answer_encode(const struct kvt_answer_msg *m, struct buf *out)
{
    struct kvt_wire_answer w = {
        .magic = ANSWER_MAGIC,
        .version = KVT_VERSION,
        .n_transports = (uint8_t)m->n_transports,
        .flags = flags_of(m->checksum, m->lossy),
    };
    memcpy(w.ticket, m->ticket, sizeof w.ticket);
    memcpy(w.node, m->node, sizeof w.node);
    struct buf layout = { 0 };
    kv_layout_encode(&m->layout, &layout);
    memcpy(w.layout, layout.data, sizeof w.layout);
    buf_release(&layout);
    buf_add(out, &w, sizeof w);
    for (uint32_t i = 0; i < m->n_transports; i++) {
        struct kvt_wire_transport r = {
            .name_len = (uint8_t)strlen(m->transports[i].name),
            .address_len = (uint16_t)m->transports[i].address.n,
        };
        buf_add(out, &r, sizeof r);
        buf_add(out, m->transports[i].name, r.name_len);
        buf_add(out, m->transports[i].address.p, r.address_len);
    }
}

static bool decode_transport(struct str *in, struct kvt_answer_transport *out)
{
    struct kvt_wire_transport r;
    if (!str_take(in, &r, sizeof r) || r.zero || r.name_len == 0 || r.name_len > KVT_NAME_MAX ||
        r.address_len > KVT_ADDRESS_MAX)
        return false;
    memset(out->name, 0, sizeof out->name);
    if (!str_take(in, out->name, r.name_len) || strlen(out->name) != r.name_len) return false;
    if (in->n < r.address_len) return false;
    out->address = (struct str){ in->p, r.address_len };
    in->p += r.address_len;
    in->n -= r.address_len;
    return true;
}

enum status kvt_answer_decode(struct str in, struct kvt_answer_msg *out, struct err *err)
{
    struct kvt_wire_answer w;
    TRY(take(&in, &w, sizeof w, ANSWER_MAGIC, "KV transfer answer", "receiver", err));
    struct kvt_answer_msg m = {
        .checksum = w.flags & FLAG_CHECKSUM,
        .lossy = w.flags & FLAG_LOSSY,
        .n_transports = w.n_transports,
    };
    if ((w.flags & ~FLAGS) || m.n_transports == 0 || m.n_transports > KVT_TRANSPORTS_MAX)
        return err_set(err, ERR_FORMAT, "malformed KV transfer answer");
    memcpy(m.ticket, w.ticket, sizeof m.ticket);
    memcpy(m.node, w.node, sizeof m.node);
    TRY(kv_layout_decode((struct str){ (const char *)w.layout, sizeof w.layout }, &m.layout, err));
    for (uint32_t i = 0; i < m.n_transports; i++)
        if (!decode_transport(&in, &m.transports[i]))
            return err_set(err, ERR_FORMAT, "malformed transport %u in a KV transfer answer", i);
    if (in.n)
        return err_set(err, ERR_FORMAT, "%zu bytes too many after a KV transfer answer", in.n);
    *out = m;
    return OK;
}

/* ---- grant ---- */

void kvt_grant_encode(const struct kvt_grant_msg *m, const int32_t *blocks, struct buf *out)
{
    struct kvt_wire_grant w = {
        .magic = GRANT_MAGIC,
        .version = KVT_VERSION,
        .generation = m->generation,
        .session = m->session,
        .n_blocks = m->n_blocks,
        .n_skip = m->n_skip,
        .n_tokens = m->n_tokens,
        .first_head = m->first_head,
        .n_heads = m->n_heads,
        .block_tokens = m->block_tokens,
    };
    buf_add(out, &w, sizeof w);
    if (m->n_blocks) buf_add(out, blocks, sizeof *blocks * m->n_blocks);
}

enum status kvt_grant_decode(struct str in, struct kvt_grant_msg *out, struct err *err)
{
    struct kvt_wire_grant w;
    TRY(take(&in, &w, sizeof w, GRANT_MAGIC, "KV grant", "receiver", err));
    if (w.zero || w.zero_too || w.n_blocks > KVT_GRANT_BLOCKS_MAX || w.n_skip > w.n_blocks ||
        w.n_heads == 0 || w.block_tokens == 0 || w.block_tokens > KVT_BLOCK_TOKENS_MAX)
        return err_set(err, ERR_FORMAT, "malformed KV grant");
    if (in.n != sizeof(int32_t) * w.n_blocks)
        return err_set(err, ERR_FORMAT, "a KV grant of %u blocks has %zu bytes of block numbers",
                       w.n_blocks, in.n);
    *out = (struct kvt_grant_msg){
        .session = w.session,
        .generation = w.generation,
        .n_blocks = w.n_blocks,
        .n_skip = w.n_skip,
        .n_tokens = w.n_tokens,
        .first_head = w.first_head,
        .n_heads = w.n_heads,
        .block_tokens = w.block_tokens,
        .blocks = (const uint8_t *)in.p,
    };
    return OK;
}

int32_t kvt_grant_block(const struct kvt_grant_msg *m, uint32_t i)
{
    int32_t block;
    memcpy(&block, m->blocks + sizeof block * i, sizeof block); /* the input need not be aligned */
    return block;
}

/* ---- preamble ---- */

void kvt_preamble_encode(const struct kvt_preamble *m, uint8_t out[KVT_PREAMBLE_BYTES])
{
    struct kvt_wire_preamble w = {
        .magic = PREAMBLE_MAGIC,
        .version = KVT_VERSION,
        .kind = (uint16_t)m->kind,
        .value = m->value,
    };
    memcpy(w.ticket, m->ticket, sizeof w.ticket);
    memcpy(out, &w, sizeof w);
}

enum status kvt_preamble_decode(const void *in, size_t n, struct kvt_preamble *out)
{
    static const uint8_t no_ticket[KVT_TICKET_BYTES];
    struct kvt_wire_preamble w;
    struct str s = { in, n };
    if (n != sizeof w || !str_take(&s, &w, sizeof w) || w.magic != PREAMBLE_MAGIC ||
        w.version != KVT_VERSION)
        return ERR_FORMAT;
    if (w.kind < KVT_PREAMBLE_TICKET || w.kind > KVT_PREAMBLE_REFUSED) return ERR_FORMAT;
    if (w.kind != KVT_PREAMBLE_TICKET && memcmp(w.ticket, no_ticket, sizeof no_ticket) != 0)
        return ERR_FORMAT;
    if (w.kind != KVT_PREAMBLE_WELCOME && w.value) return ERR_FORMAT;
    out->kind = (enum kvt_preamble_kind)w.kind;
    memcpy(out->ticket, w.ticket, sizeof out->ticket);
    out->value = w.value;
    return OK;
}

/* ---- message ---- */

size_t kvt_message_tail(const struct kvt_message *m)
{
    return m->kind == KVT_MSG_NOTE ? m->bytes : 0;
}

size_t kvt_message_encode(const struct kvt_message *m, uint8_t out[KVT_MESSAGE_MAX])
{
    struct kvt_wire_message w = {
        .kind = (uint8_t)m->kind,
        .status = (uint8_t)-m->status,
        .n = (uint16_t)m->n,
        .session = m->session,
        .generation = m->generation,
        .bytes = m->bytes,
        .layer = (uint16_t)m->layer,
        .more_layers = (uint16_t)m->more_layers,
        .first = m->first,
    };
    memcpy(out, &w, sizeof w);
    memcpy(out + sizeof w, m->sums, kvt_message_tail(m));
    return sizeof w + kvt_message_tail(m);
}

/* Whether the fields that this kind does not use are zero, and the others in range. */
static bool fields_fit(const struct kvt_wire_message *w)
{
    bool pieces = w->kind == KVT_MSG_DATA || w->kind == KVT_MSG_NOTE;
    const uint32_t in_all = w->n * (w->more_layers + UINT32_C(1));
    bool bytes = w->kind == KVT_MSG_DATA || w->kind == KVT_MSG_FINISH ||
                 (w->kind == KVT_MSG_OPEN && w->bytes <= (KVT_OPEN_SUMS | KVT_OPEN_NO_DRAFT)) ||
                 (w->kind == KVT_MSG_NOTE && w->bytes == sizeof(uint64_t) * in_all);
    bool status = w->kind == KVT_MSG_STOP || w->kind == KVT_MSG_STOPPED;
    const uint32_t most = w->kind == KVT_MSG_NOTE ? KVT_PUT_PIECES : KVT_BATCH_PIECES;
    if (pieces ? (w->n == 0 || w->n > most || in_all > most) : (w->n || w->layer || w->first))
        return false;
    if (w->more_layers && w->kind != KVT_MSG_NOTE) return false;
    if (!bytes && w->bytes) return false;
    if (w->kind == KVT_MSG_DATA && w->bytes == 0) return false;
    if (!status && w->status) return false;
    return w->kind != KVT_MSG_BYE || (w->session == 0 && w->generation == 0);
}

enum status kvt_message_decode_head(const void *in, struct kvt_message *out)
{
    struct kvt_wire_message w;
    memcpy(&w, in, sizeof w);
    if (w.kind < KVT_MSG_OPEN || w.kind >= KVT_MSG_KIND_END || !fields_fit(&w)) return ERR_FORMAT;
    if (w.status > -ERR_INTERNAL) return ERR_FORMAT;
    out->kind = (enum kvt_message_kind)w.kind;
    out->status = (enum status) - (int)w.status;
    out->session = w.session;
    out->generation = w.generation;
    out->layer = w.layer;
    out->more_layers = w.more_layers;
    out->first = w.first;
    out->n = w.n;
    out->bytes = w.bytes;
    return OK;
}

enum status kvt_message_decode(const void *in, size_t n, struct kvt_message *out)
{
    if (n < KVT_MESSAGE_BYTES) return ERR_FORMAT;
    struct kvt_message m;
    TRY(kvt_message_decode_head(in, &m));
    if (n != KVT_MESSAGE_BYTES + kvt_message_tail(&m)) return ERR_FORMAT;
    memcpy(m.sums, (const uint8_t *)in + KVT_MESSAGE_BYTES, kvt_message_tail(&m));
    *out = m;
    return OK;
}
