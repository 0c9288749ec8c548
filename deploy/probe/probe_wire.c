/* probe_wire.c - see probe_wire.h. Protobuf carries the fields; the decoders check the ranges
 * before other code sees a value. */
#include "deploy/probe/probe_wire.h"

#include <arpa/inet.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/mem.h"
#include "shared/cluster/proto/node.pb-c.h"

static const char *const STEPS[PROBE_STEP_END] = {
    [PROBE_WHO] = "who",
    [PROBE_OPEN] = "open",
    [PROBE_ANSWER] = "answer",
    [PROBE_CONNECT] = "connect",
    [PROBE_EXPECT] = "expect",
    [PROBE_SEND] = "send",
    [PROBE_TAKE] = "take",
    [PROBE_CLOSE] = "close",
    [PROBE_LISTEN] = "listen",
    [PROBE_STREAM] = "stream",
    [PROBE_DRAIN] = "drain",
    [PROBE_COPY] = "copy",
    [PROBE_TOOL_SERVE] = "tool_serve",
    [PROBE_TOOL_RUN] = "tool_run",
};

const char *probe_step_name(enum probe_step step)
{
    return step > 0 && step < PROBE_STEP_END ? STEPS[step] : "unknown";
}

/* ---- requests ---- */

void probe_request_encode(const struct probe_request *r, struct buf *out)
{
    Baton__Probe m = BATON__PROBE__INIT;
    m.step = (uint32_t)r->step;
    m.transport = (char *)r->transport;
    m.piece_bytes = r->piece_bytes;
    m.n_layers = r->n_layers;
    m.n_blocks = r->n_blocks;
    m.checksum = r->checksum;
    m.contiguous = r->contiguous;
    m.copiers = r->copiers;
    m.connections = r->connections;
    m.address = (char *)r->address;
    m.n_transfers = r->n_transfers;
    m.tool = (uint32_t)r->tool;
    m.port = r->port;
    m.n_bytes = r->n_bytes;
    m.data.data = (uint8_t *)r->data.data;
    m.data.len = r->data.len;
    size_t n = baton__probe__get_packed_size(&m);
    baton__probe__pack(&m, (uint8_t *)buf_reserve(out, n));
    out->len += n;
}

static enum status in_range(const char *what, uint64_t v, uint64_t min, uint64_t max,
                            struct err *err)
{
    if (v >= min && v <= max) return OK;
    return err_field(err, ERR_INVALID, what,
                     "%s is %" PRIu64 ", not between %" PRIu64 " and %" PRIu64, what, v, min, max);
}

/* Is it a name that the table of transports could hold? */
static enum status check_name(const char *s, struct err *err)
{
    size_t n = strlen(s);
    for (size_t i = 0; i < n; i++)
        if (!((s[i] >= 'a' && s[i] <= 'z') || (s[i] >= '0' && s[i] <= '9') || s[i] == '_'))
            return err_set(err, ERR_INVALID, "a transport's name has a character it cannot have");
    return in_range("the length of the transport's name", n, 0, PROBE_NAME_MAX - 1, err);
}

/* Is the address numeric? A probe server must not look up names for a client. */
static enum status check_address(const char *s, struct err *err)
{
    uint8_t bytes[16];
    if (!*s || inet_pton(AF_INET, s, bytes) == 1 || inet_pton(AF_INET6, s, bytes) == 1) return OK;
    return err_set(err, ERR_INVALID, "the address is not numeric");
}

static enum status check_open(const Baton__Probe *m, struct err *err)
{
    TRY(in_range("piece_bytes", m->piece_bytes, PROBE_PIECE_MIN, PROBE_PIECE_MAX, err));
    TRY(in_range("n_layers", m->n_layers, 1, PROBE_LAYERS_MAX, err));
    TRY(in_range("n_blocks", m->n_blocks, 1, PROBE_BLOCKS_MAX, err));
    /* Below 2^26 * 2^7 * 2^18: no overflow. */
    return in_range("bytes of the pool", (uint64_t)m->piece_bytes * m->n_layers * m->n_blocks, 1,
                    PROBE_POOL_MAX, err);
}

static enum status check_step(const Baton__Probe *m, struct err *err)
{
    switch ((enum probe_step)m->step) {
    case PROBE_OPEN: return check_open(m, err);
    case PROBE_EXPECT:
    case PROBE_SEND:
        TRY(in_range("n_blocks", m->n_blocks, 1, PROBE_BLOCKS_MAX, err));
        return in_range("n_transfers", m->n_transfers, 1, PROBE_TRANSFERS_MAX, err);
    case PROBE_TAKE: return in_range("n_transfers", m->n_transfers, 1, PROBE_TRANSFERS_MAX, err);
    case PROBE_TOOL_SERVE:
    case PROBE_TOOL_RUN:
        TRY(in_range("tool", m->tool, 1, PROBE_TOOL_END - 1, err));
        TRY(in_range("piece_bytes", m->piece_bytes, PROBE_PIECE_MIN, PROBE_PIECE_MAX, err));
        return in_range("n_bytes", m->n_bytes, 1, PROBE_STREAM_MAX, err);
    case PROBE_COPY:
    case PROBE_STREAM:
    case PROBE_DRAIN: return in_range("n_bytes", m->n_bytes, 1, PROBE_STREAM_MAX, err);
    case PROBE_WHO:
    case PROBE_ANSWER:
    case PROBE_CONNECT:
    case PROBE_CLOSE:
    case PROBE_LISTEN:
    case PROBE_STEP_END: break;
    }
    return OK;
}

static enum status check_request(const Baton__Probe *m, struct err *err)
{
    TRY(in_range("step", m->step, 1, PROBE_STEP_END - 1, err));
    TRY(check_name(m->transport, err));
    TRY(check_address(m->address, err));
    TRY(in_range("copiers", m->copiers, 0, PROBE_THREADS_MAX, err));
    TRY(in_range("connections", m->connections, 0, PROBE_THREADS_MAX, err));
    TRY(in_range("port", m->port, 0, UINT16_MAX, err));
    return check_step(m, err);
}

enum status probe_request_decode(struct str in, struct probe_request *out, struct err *err)
{
    Baton__Probe *m = baton__probe__unpack(NULL, in.n, (const uint8_t *)in.p);
    *out = (struct probe_request){ 0 };
    if (!m) return err_set(err, ERR_FORMAT, "a malformed probe request");
    enum status st = check_request(m, err);
    if (st == OK) {
        *out = (struct probe_request){
            .step = (enum probe_step)m->step,
            .piece_bytes = m->piece_bytes,
            .n_layers = m->n_layers,
            .n_blocks = m->n_blocks,
            .checksum = m->checksum,
            .contiguous = m->contiguous,
            .copiers = m->copiers,
            .connections = m->connections,
            .n_transfers = m->n_transfers,
            .tool = (enum probe_tool)m->tool,
            .port = (uint16_t)m->port,
            .n_bytes = m->n_bytes,
        };
        snprintf(out->transport, sizeof out->transport, "%s", m->transport);
        snprintf(out->address, sizeof out->address, "%s", m->address);
        buf_add(&out->data, m->data.data, m->data.len);
    }
    baton__probe__free_unpacked(m, NULL);
    return st;
}

void probe_request_release(struct probe_request *r) { buf_release(&r->data); }

/* ---- replies ---- */

void probe_reply_encode(const struct probe_reply *r, struct buf *out)
{
    Baton__ProbeReply m = BATON__PROBE_REPLY__INIT;
    m.status = r->status;
    m.text = (char *)r->text;
    m.data.data = (uint8_t *)r->data.data;
    m.data.len = r->data.len;
    m.ns = (uint64_t *)r->ns;
    m.n_ns = r->n_ns;
    m.cpu_ns = r->cpu_ns;
    m.n_bytes = r->n_bytes;
    m.transport = (char *)r->transport;
    m.link_speed = r->link_speed;
    m.port = r->port;
    m.host = (char *)r->host;
    m.boot_id = (char *)r->boot_id;
    m.version = (char *)r->version;
    size_t n = baton__probe_reply__get_packed_size(&m);
    baton__probe_reply__pack(&m, (uint8_t *)buf_reserve(out, n));
    out->len += n;
}

/* Keeps only printable ASCII: texts of a peer are shown on a terminal. */
static void take_text(char *out, size_t cap, const char *s)
{
    size_t n = 0;
    for (; s[n] && n + 1 < cap; n++) out[n] = s[n] >= ' ' && s[n] <= '~' ? s[n] : '?';
    out[n] = 0;
}

enum status probe_reply_decode(struct str in, struct probe_reply *out, struct err *err)
{
    Baton__ProbeReply *m = baton__probe_reply__unpack(NULL, in.n, (const uint8_t *)in.p);
    memset(out, 0, sizeof *out);
    if (!m) return err_set(err, ERR_FORMAT, "a malformed probe reply");
    enum status st = in_range("port", m->port, 0, UINT16_MAX, err);
    if (st == OK) st = in_range("n_ns", m->n_ns, 0, PROBE_TRANSFERS_MAX, err);
    if (st == OK && (m->status > 0 || m->status < ERR_INTERNAL))
        st = err_set(err, ERR_FORMAT, "a probe reply with the unknown status %d", m->status);
    if (st == OK) {
        out->status = (enum status)m->status;
        out->n_ns = (uint32_t)m->n_ns;
        if (m->n_ns) memcpy(out->ns, m->ns, m->n_ns * sizeof *m->ns);
        out->cpu_ns = m->cpu_ns;
        out->n_bytes = m->n_bytes;
        out->link_speed = m->link_speed;
        out->port = (uint16_t)m->port;
        take_text(out->text, sizeof out->text, m->text);
        take_text(out->transport, sizeof out->transport, m->transport);
        take_text(out->host, sizeof out->host, m->host);
        take_text(out->boot_id, sizeof out->boot_id, m->boot_id);
        take_text(out->version, sizeof out->version, m->version);
        buf_add(&out->data, m->data.data, m->data.len);
    }
    baton__probe_reply__free_unpacked(m, NULL);
    return st;
}

void probe_refusal_encode(const char *node, const char *role, struct buf *out)
{
    struct probe_reply *r = MEM_NEW(struct probe_reply);
    r->status = ERR_PEER_REFUSED;
    snprintf(r->text, sizeof r->text,
             "the running %s node %s, which does not measure while it serves", role, node);
    probe_reply_encode(r, out);
    mem_free(r);
}

void probe_reply_release(struct probe_reply *r) { buf_release(&r->data); }
