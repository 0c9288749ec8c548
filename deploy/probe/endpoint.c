/* endpoint.c - see endpoint.h. */
#include "deploy/probe/endpoint.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kernels/dtype.h"
#include "shared/base/clock.h"
#include "shared/base/mailbox.h"
#include "shared/base/mem.h"
#include "shared/base/rng.h"

enum { PATTERN = 0x5a, EVENTS = 4096, STALL_MS = 15000 };

struct timed_event {
    struct kvt_event ev;
    uint64_t t_ns; /* time stamp from the transfer thread */
};

struct probe_endpoint {
    struct kv_layout layout;
    struct device *device;
    struct dev_mem mem;
    struct kvt *kvt;
    struct mailbox *events;
    int32_t *table; /* [n_blocks] of the pool, in order or shuffled */
    uint64_t next_id, peer;
    uint32_t n_expected_blocks;
    char host[PROBE_ADDRESS_MAX];
};

/* A divisor of n: `preferred` (a power of two) when it is one, else the largest up to `limit`. */
static uint32_t divisor(uint32_t n, uint32_t preferred, uint32_t limit)
{
    if (n % preferred == 0) return preferred;
    for (uint32_t d = limit; d > 1; d--)
        if (n % d == 0) return d;
    return 1;
}

enum status probe_layout(uint32_t piece_bytes, uint32_t n_layers, uint32_t n_blocks,
                         struct kv_layout *out, struct err *err)
{
    /* K and V have tokens * heads * head size elements of two bytes each. */
    uint32_t n = piece_bytes / 4, tokens = divisor(n, 64, 256), dim = divisor(n / tokens, 128, 256);
    if (n / tokens < 128 && (n / tokens) * tokens == n && n / tokens <= 256) dim = n / tokens;
    struct kv_layout l = {
        .model_fingerprint = 1,
        .dtype = DTYPE_BF16,
        .block_tokens = tokens,
        .n_layers = n_layers,
        .n_kv_heads = n / tokens / dim,
        .model_kv_heads = n / tokens / dim,
        .head_dim = dim,
        .tp_size = 1,
        .n_blocks = n_blocks,
    };
    if (kv_layout_piece_bytes(&l) != piece_bytes || kv_layout_check(&l, err) != OK)
        return err_set(err, ERR_INVALID,
                       "no KV layout has pieces of %" PRIu32
                       " bytes: give a multiple of 1024, such as 4k or 96k",
                       piece_bytes);
    *out = l;
    return OK;
}

static void on_event(void *arg, const struct kvt_event *ev)
{
    struct timed_event s = { *ev, clock_ns() };
    /* Far more places than there are events at once; a lost event ends as a timeout with a
     * sentence. */
    enum status st = mailbox_post(arg, &s);
    (void)st;
}

/* Shuffled differently on each side, so that pieces that are neighbours here are not there. */
static int32_t *make_table(uint32_t n, bool contiguous, uint64_t key)
{
    int32_t *t = MEM_ARRAY(int32_t, n);
    for (uint32_t i = 0; i < n; i++) t[i] = (int32_t)i;
    for (uint32_t i = n - 1; i > 0 && !contiguous; i--) {
        uint32_t j = (uint32_t)(rng_uniform(key, 0, i) * (i + 1));
        int32_t was = t[i];
        t[i] = t[j];
        t[j] = was;
    }
    return t;
}

enum status probe_endpoint_open(const struct probe_request *r, const char *host,
                                const struct kvt_tuning *tuning, struct probe_endpoint **out,
                                struct err *err)
{
    struct kv_layout layout;
    TRY(probe_layout(r->piece_bytes, r->n_layers, r->n_blocks, &layout, err));
    struct probe_endpoint *e = MEM_NEW(struct probe_endpoint);
    e->layout = layout;
    e->mem.fd = -1;
    snprintf(e->host, sizeof e->host, "%s", host);
    e->events = mailbox_create(sizeof(struct timed_event), EVENTS, NULL, NULL);
    e->table = make_table(layout.n_blocks, r->contiguous, clock_ns());
    struct kvt_options o = {
        .layout = layout,
        .mem = &e->mem,
        .protocols = r->transport,
        .listen_host = e->host,
        .advertise_host = e->host,
        .checksum = r->checksum,
        .n_transfers = PROBE_TRANSFERS_MAX,
        .stall_ms = STALL_MS,
        .tuning = *tuning,
        .on_event = on_event,
        .arg = e->events,
    };
    if (r->copiers) o.tuning.copiers = r->copiers;
    if (r->connections) o.tuning.tcp_connections = r->connections;
    enum status st = device_open("cpu", &e->device, err);
    if (st == OK)
        st = device_mem_alloc(e->device, kv_layout_pool_bytes(&layout), DEVICE_MEM_SHARED, &e->mem,
                              err);
    if (st == OK) {
        memset(e->mem.ptr, 0, e->mem.bytes); /* touch all pages: page faults must not be measured */
        st = kvt_create(&o, &e->kvt, err);
    }
    if (st == OK) *out = e;
    else probe_endpoint_close(e);
    return st;
}

void probe_endpoint_close(struct probe_endpoint *e)
{
    if (!e) return;
    kvt_free(e->kvt);
    if (e->mem.ptr) device_mem_free(e->device, &e->mem);
    if (e->device) device_close(e->device);
    mailbox_free(e->events);
    mem_free(e->table);
    mem_free(e);
}

uint64_t probe_endpoint_bytes(const struct probe_endpoint *e, uint32_t n_blocks)
{
    return (uint64_t)kv_layout_block_bytes(&e->layout) * n_blocks;
}

/* Waits for the next relevant event until `deadline_ms`. */
static enum status next_event(struct probe_endpoint *e, uint64_t deadline_ms, struct timed_event *s,
                              const char *what, struct err *err)
{
    for (;;) {
        while (mailbox_take(e->events, s)) {
            if (s->ev.kind == KVT_FENCED) continue;
            if (s->ev.kind == KVT_PEER_LOST || s->ev.kind == KVT_SEND_FAILED ||
                s->ev.kind == KVT_RECEIVE_FAILED)
                return err_set(err, s->ev.status == OK ? ERR_PEER_LOST : s->ev.status, "%s",
                               s->ev.text[0] ? s->ev.text : status_text(s->ev.status));
            return OK;
        }
        uint64_t now = clock_ms();
        if (now >= deadline_ms || !mailbox_wait(e->events, (int)(deadline_ms - now)))
            return err_set(err, ERR_TIMEOUT, "%s: nothing happened in time", what);
    }
}

/* ---- connecting ---- */

void probe_endpoint_hello(const struct probe_endpoint *e, struct buf *out)
{
    kvt_hello(e->kvt, out);
}

enum status probe_endpoint_answer(struct probe_endpoint *e, struct str hello, struct buf *out,
                                  struct err *err)
{
    return kvt_answer(e->kvt, hello, out, err);
}

enum status probe_endpoint_connect(struct probe_endpoint *e, struct str answer,
                                   const char **transport, uint64_t *link_speed, struct err *err)
{
    struct timed_event s;
    if (e->peer) return err_set(err, ERR_INVALID, "this end is connected already");
    TRY(kvt_connect(e->kvt, answer, &e->peer, err));
    TRY(next_event(e, clock_ms() + PROBE_CONNECT_MS, &s, "connecting", err));
    if (s.ev.kind != KVT_CONNECTED)
        return err_set(err, ERR_INTERNAL, "an unexpected event while connecting");
    *transport = s.ev.transport;
    *link_speed = s.ev.link_speed;
    memset(e->mem.ptr, PATTERN, e->mem.bytes); /* the data of a sender */
    return OK;
}

/* ---- receiving ---- */

static enum status check_blocks(const struct probe_endpoint *e, uint32_t n_blocks, struct err *err)
{
    if (n_blocks >= 1 && n_blocks <= e->layout.n_blocks) return OK;
    return err_set(err, ERR_INVALID, "a transfer of %" PRIu32 " blocks: this pool has %" PRIu32,
                   n_blocks, e->layout.n_blocks);
}

enum status probe_endpoint_expect(struct probe_endpoint *e, uint32_t n, uint32_t n_blocks,
                                  struct buf *grants, struct err *err)
{
    struct buf one = { 0 };
    TRY(check_blocks(e, n_blocks, err));
    e->n_expected_blocks = n_blocks;
    for (uint32_t i = 0; i < n; i++) {
        buf_clear(&one);
        enum status st = kvt_expect(e->kvt, ++e->next_id, e->table, n_blocks, 0,
                                    n_blocks * e->layout.block_tokens, &one);
        if (st != OK) {
            buf_release(&one);
            return err_set(err, st,
                           "the receiver could not make grant %" PRIu32 " of %" PRIu32 ": %s",
                           i + 1, n, status_text(st));
        }
        buf_add_u32le(grants, (uint32_t)one.len);
        buf_add(grants, one.data, one.len);
    }
    buf_release(&one);
    return OK;
}

/* Checks both edges of every piece, in memory that was zero before. */
static enum status check_pieces(const struct probe_endpoint *e, struct err *err)
{
    const unsigned char *pool = e->mem.ptr;
    size_t piece = kv_layout_piece_bytes(&e->layout);
    for (uint32_t layer = 0; layer < e->layout.n_layers; layer++)
        for (uint32_t i = 0; i < e->n_expected_blocks; i++) {
            const unsigned char *p = pool +
                                     kv_layout_offset(&e->layout, layer, (uint32_t)e->table[i]);
            if (p[0] != PATTERN || p[piece - 1] != PATTERN)
                return err_set(err, ERR_CHECKSUM,
                               "a transfer was reported complete, but block %d of layer %" PRIu32
                               " does not hold what was sent",
                               e->table[i], layer);
        }
    return OK;
}

enum status probe_endpoint_take(struct probe_endpoint *e, uint32_t n, struct err *err)
{
    uint64_t deadline = clock_ms() + PROBE_WAIT_MS;
    struct timed_event s;
    for (uint32_t got = 0; got < n;) {
        TRY(next_event(e, deadline, &s, "waiting for the blocks", err));
        got += s.ev.kind == KVT_RECEIVED;
    }
    return check_pieces(e, err);
}

/* ---- sending ---- */

static enum status send_one(struct probe_endpoint *e, uint32_t n_blocks, struct str grant,
                            uint64_t deadline, uint64_t *ns, struct err *err)
{
    struct timed_event s;
    uint64_t id = ++e->next_id, t = clock_ns();
    TRY(kvt_send_open(e->kvt, id, e->peer, grant, err));
    for (uint32_t layer = 0; layer < e->layout.n_layers; layer++) {
        enum status st = kvt_send_ready(e->kvt, id, layer, 0, n_blocks * e->layout.block_tokens,
                                        e->table);
        if (st != OK)
            return err_set(err, st, "layer %" PRIu32 " could not be handed over: %s", layer,
                           status_text(st));
    }
    kvt_send_finish(e->kvt, id);
    do TRY(next_event(e, deadline, &s, "sending the blocks", err));
    while (s.ev.kind != KVT_SENT || s.ev.id != id);
    *ns = s.t_ns - t;
    return OK;
}

static bool take_grant(struct str *rest, struct str *grant)
{
    if (rest->n < 4) return false;
    const unsigned char *p = (const unsigned char *)rest->p;
    size_t n = (size_t)p[0] | (size_t)p[1] << 8 | (size_t)p[2] << 16 | (size_t)p[3] << 24;
    if (n > rest->n - 4) return false;
    *grant = (struct str){ rest->p + 4, n };
    *rest = (struct str){ rest->p + 4 + n, rest->n - 4 - n };
    return true;
}

enum status probe_endpoint_send(struct probe_endpoint *e, uint32_t n, uint32_t n_blocks,
                                struct str grants, uint64_t *ns, struct err *err)
{
    uint64_t deadline = clock_ms() + PROBE_WAIT_MS;
    struct str grant;
    if (!e->peer) return err_set(err, ERR_INVALID, "this end is not connected");
    TRY(check_blocks(e, n_blocks, err));
    for (uint32_t i = 0; i < n; i++) {
        if (!take_grant(&grants, &grant))
            return err_set(err, ERR_FORMAT, "grant %" PRIu32 " of %" PRIu32 " is cut off", i + 1,
                           n);
        TRY(send_one(e, n_blocks, grant, deadline, &ns[i], err));
    }
    return OK;
}
