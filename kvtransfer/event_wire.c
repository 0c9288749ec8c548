/* event_wire.c - see event_wire.h. Values in, values out, no state. */
#include "kvtransfer/event_wire.h"

#include <assert.h>
#include <string.h>

#include "kvtransfer/transport.h"
#include "kvtransfer/wire.h"

static const uint32_t EVENT_MAGIC = 0x4b565445; /* "ETVK" */

struct kvt_wire_event { /* then name, then text */
    uint32_t magic;
    uint16_t version;
    uint8_t kind, status; /* status: its number without the sign */
    uint64_t id, bytes, ns, busy_ns, tail_ns, link_speed;
    uint8_t name_len, text_len;
    uint8_t zero[6];
};
static_assert(sizeof(struct kvt_wire_event) == 64, "wire size");

void kvt_event_encode(const struct kvt_event *ev, struct buf *out)
{
    size_t name_len = ev->transport ? strlen(ev->transport) : 0;
    struct kvt_wire_event w = {
        .magic = EVENT_MAGIC,
        .version = KVT_VERSION,
        .kind = (uint8_t)ev->kind,
        .status = (uint8_t)-ev->status,
        .id = ev->id,
        .bytes = ev->bytes,
        .ns = ev->ns,
        .busy_ns = ev->busy_ns,
        .tail_ns = ev->tail_ns,
        .link_speed = ev->link_speed,
        .name_len = (uint8_t)name_len,
        .text_len = (uint8_t)strnlen(ev->text, sizeof ev->text - 1),
    };
    buf_add(out, &w, sizeof w);
    buf_add(out, ev->transport, w.name_len);
    buf_add(out, ev->text, w.text_len);
}

static const char *static_name(const char *name)
{
    for (size_t i = 0; kvt_transports[i]; i++)
        if (strcmp(kvt_transports[i]->name, name) == 0) return kvt_transports[i]->name;
    return "";
}

enum status kvt_event_decode(struct str in, struct kvt_event *out)
{
    static const uint8_t zero[6];
    struct kvt_wire_event w;
    char name[KVT_NAME_MAX + 1] = { 0 };
    if (!str_take(&in, &w, sizeof w) || w.magic != EVENT_MAGIC) return ERR_FORMAT;
    if (w.version != KVT_VERSION) return ERR_PEER_MISMATCH;
    if (w.kind < KVT_RECEIVED || w.kind > KVT_SEND_FAILED || memcmp(w.zero, zero, sizeof zero) != 0)
        return ERR_FORMAT;
    struct kvt_event ev = {
        .kind = (enum kvt_event_kind)w.kind,
        .id = w.id,
        .status = (enum status) - w.status,
        .bytes = w.bytes,
        .ns = w.ns,
        .busy_ns = w.busy_ns,
        .tail_ns = w.tail_ns,
        .link_speed = w.link_speed,
    };
    if (ev.status < ERR_INTERNAL || w.name_len > KVT_NAME_MAX || w.text_len >= sizeof ev.text)
        return ERR_FORMAT;
    if (in.n != (size_t)w.name_len + w.text_len || !str_take(&in, name, w.name_len) ||
        !str_take(&in, ev.text, w.text_len))
        return ERR_FORMAT;
    if (strlen(name) != w.name_len || strlen(ev.text) != w.text_len) return ERR_FORMAT;
    ev.transport = static_name(name);
    *out = ev;
    return OK;
}
