/* link.c - see link.h. */
#include "shared/cluster/link.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/address/host_port.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "shared/cluster/proto/node.pb-c.h"

void link_fail(struct link *l, const char *fmt, ...)
{
    va_list ap;
    if (l->dead) return;
    va_start(ap, fmt);
    vsnprintf(l->why, sizeof l->why, fmt, ap);
    va_end(ap);
    l->reason = fmt;
    l->dead = true;
    if (!uv_is_closing((uv_handle_t *)&l->tcp)) uv_read_stop((uv_stream_t *)&l->tcp);
    l->o->on_dead(l->o->arg, l);
}

/* ---- out ---- */

struct write_job {
    uv_write_t req;
    struct link *l;
    char bytes[];
};

static void on_written(uv_write_t *req, int st)
{
    struct write_job *job = (struct write_job *)req;
    if (st < 0 && st != UV_ECANCELED) link_fail(job->l, "write: %s", uv_strerror(st));
    mem_free(job);
}

enum status link_send(struct link *l, const struct frame_header *h, struct str body)
{
    uint8_t head[FRAME_HEADER_BYTES];
    uv_stream_t *stream = (uv_stream_t *)&l->tcp;
    size_t total = FRAME_HEADER_BYTES + body.n, done = 0;
    if (l->dead) return ERR_PEER_LOST;
    if (uv_stream_get_write_queue_size(stream) + total > l->o->queue_bytes) return ERR_FULL;
    frame_header_encode(h, head);
    if (uv_stream_get_write_queue_size(stream) == 0) {
        uv_buf_t bufs[2] = { uv_buf_init((char *)head, sizeof head),
                             uv_buf_init((char *)body.p, (unsigned)body.n) };
        int n = uv_try_write(stream, bufs, 2);
        if (n > 0) done = (size_t)n;
        if (done == total) return OK;
    }
    struct write_job *job = mem_calloc(1, sizeof *job + total - done);
    size_t at = 0;
    if (done < FRAME_HEADER_BYTES) {
        at = FRAME_HEADER_BYTES - done;
        memcpy(job->bytes, head + done, at);
    }
    size_t body_done = done > FRAME_HEADER_BYTES ? done - FRAME_HEADER_BYTES : 0;
    if (body.n > body_done) memcpy(job->bytes + at, body.p + body_done, body.n - body_done);
    job->l = l;
    uv_buf_t buf = uv_buf_init(job->bytes, (unsigned)(total - done));
    int st = uv_write(&job->req, stream, &buf, 1, on_written);
    if (st == 0) return OK;
    mem_free(job);
    link_fail(l, "write: %s", uv_strerror(st));
    return ERR_PEER_LOST;
}

static void send_proto(struct link *l, enum frame_type type, uint64_t incarnation,
                       const ProtobufCMessage *m)
{
    size_t n = protobuf_c_message_get_packed_size(m);
    struct buf body = { 0 };
    protobuf_c_message_pack(m, (uint8_t *)buf_reserve(&body, n));
    struct frame_header h = {
        .type = (uint16_t)type,
        .length = (uint32_t)n,
        .incarnation = incarnation,
    };
    if (link_send(l, &h, (struct str){ body.data, n }) != OK)
        link_fail(l, "the handshake could not be sent");
    buf_release(&body);
}

/* ---- handshake ---- */

static void make_mac(const struct link *l, const char *side, uint64_t dialer, uint64_t acceptor,
                     uint8_t mac[32])
{
    struct buf m = { 0 };
    buf_add_c(&m, side);
    buf_add(&m, l->nonce_dialer, LINK_NONCE);
    buf_add(&m, l->nonce_acceptor, LINK_NONCE);
    buf_add_u64le(&m, dialer);
    buf_add_u64le(&m, acceptor);
    hmac_sha256(l->o->secret.p, l->o->secret.n, m.data, m.len, mac);
    buf_release(&m);
}

static void send_hello(struct link *l)
{
    Baton__LinkHello m = BATON__LINK_HELLO__INIT;
    random_bytes(l->nonce_dialer, LINK_NONCE);
    m.protocol = FRAME_VERSION;
    m.node = l->o->self;
    m.want = l->node;
    m.nonce.data = l->nonce_dialer;
    m.nonce.len = LINK_NONCE;
    m.name = (char *)l->o->name;
    l->state = LINK_PROVING;
    send_proto(l, FRAME_LINK_HELLO, l->node, &m.base);
}

static void on_hello(struct link *l, struct str body)
{
    Baton__LinkHello *m = baton__link_hello__unpack(NULL, body.n, (const uint8_t *)body.p);
    uint8_t mac[32];
    if (!m || m->nonce.len != LINK_NONCE || m->node == 0) {
        link_fail(l, "malformed hello");
    } else if (m->want && m->want != l->o->self) {
        link_fail(l, "the peer wants an earlier process at this address");
    } else {
        Baton__LinkProof proof = BATON__LINK_PROOF__INIT;
        l->node = m->node;
        snprintf(l->name, sizeof l->name, "%s", m->name);
        memcpy(l->nonce_dialer, m->nonce.data, LINK_NONCE);
        random_bytes(l->nonce_acceptor, LINK_NONCE);
        make_mac(l, "acceptor", l->node, l->o->self, mac);
        proof.node = l->o->self;
        proof.name = (char *)l->o->name;
        proof.nonce.data = l->nonce_acceptor;
        proof.nonce.len = LINK_NONCE;
        proof.mac.data = mac;
        proof.mac.len = sizeof mac;
        l->state = LINK_PROVING;
        send_proto(l, FRAME_LINK_PROOF, l->node, &proof.base);
    }
    if (m) baton__link_hello__free_unpacked(m, NULL);
}

static void come_up(struct link *l)
{
    l->state = LINK_UP;
    unproven_leave(&l->place);
    l->t_progress_ms = clock_ms();
    l->o->on_up(l->o->arg, l);
}

/* The dialer checks the acceptor's proof, then gives its own. */
static void on_acceptor_proof(struct link *l, const Baton__LinkProof *m)
{
    uint8_t mac[32];
    if (m->nonce.len != LINK_NONCE || (l->node && m->node != l->node)) {
        link_fail(l, "another process answers at this address");
        return;
    }
    if (m->node == l->o->self) { /* by cluster_meet: it needs no link to talk to itself */
        link_fail(l, "this process itself answers at this address");
        return;
    }
    l->node = m->node;
    snprintf(l->name, sizeof l->name, "%s", m->name);
    memcpy(l->nonce_acceptor, m->nonce.data, LINK_NONCE);
    make_mac(l, "acceptor", l->o->self, l->node, mac);
    if (!equal_constant_time(mac, m->mac.data, sizeof mac)) {
        link_fail(l, "the peer has another cluster secret (BATON_CLUSTER_SECRET)");
        return;
    }
    l->proved = true;
    Baton__LinkProof mine = BATON__LINK_PROOF__INIT;
    make_mac(l, "dialer", l->o->self, l->node, mac);
    mine.node = l->o->self;
    mine.mac.data = mac;
    mine.mac.len = sizeof mac;
    send_proto(l, FRAME_LINK_PROOF, l->node, &mine.base);
}

static void on_dialer_proof(struct link *l, const Baton__LinkProof *m)
{
    uint8_t mac[32];
    make_mac(l, "dialer", l->node, l->o->self, mac);
    if (!equal_constant_time(mac, m->mac.data, sizeof mac)) {
        link_fail(l, "the peer has another cluster secret (BATON_CLUSTER_SECRET)");
        return;
    }
    l->proved = true;
    struct frame_header h = { .type = FRAME_LINK_READY, .incarnation = l->node };
    if (link_send(l, &h, (struct str){ 0 }) == OK) come_up(l);
}

static void on_proof(struct link *l, struct str body)
{
    Baton__LinkProof *m = baton__link_proof__unpack(NULL, body.n, (const uint8_t *)body.p);
    if (!m || m->mac.len != 32) link_fail(l, "malformed proof");
    else if (l->dialed) on_acceptor_proof(l, m);
    else on_dialer_proof(l, m);
    if (m) baton__link_proof__free_unpacked(m, NULL);
}

/* ---- in ---- */

static void on_ping(struct link *l, struct str body)
{
    Baton__Ping *m = baton__ping__unpack(NULL, body.n, (const uint8_t *)body.p);
    if (!m) {
        link_fail(l, "malformed ping");
        return;
    }
    const uint64_t now = clock_ms(), still = m->has_work ? m->still_ms : 0;
    const bool moves = m->progress != l->progress || !m->has_work;
    /* An older peer does not say for how long it was still; and what was before this link is no
     * reason to end it. */
    if ((moves || still) && still < now - l->t_progress_ms) l->t_progress_ms = now - still;
    l->progress = m->progress;
    l->has_work = m->has_work;
    l->leaves = m->leaves;
    baton__ping__free_unpacked(m, NULL);
}

static void on_frame(struct link *l, const struct frame_header *h, struct str body)
{
    bool for_me = h->incarnation == l->o->self ||
                  (h->type == FRAME_LINK_HELLO && h->incarnation == 0);
    if (!for_me) link_fail(l, "a message for an earlier process at this address");
    else if (h->type == FRAME_LINK_HELLO && l->state == LINK_HELLO) on_hello(l, body);
    else if (h->type == FRAME_LINK_PROOF && l->state == LINK_PROVING && !l->proved)
        on_proof(l, body);
    else if (h->type == FRAME_LINK_READY && l->state == LINK_PROVING && l->dialed && l->proved)
        come_up(l);
    else if (l->state != LINK_UP || h->type < FRAME_PING)
        link_fail(l, "unexpected %s message", frame_type_name(h->type));
    else if (h->type == FRAME_PING) on_ping(l, body);
    else l->o->on_frame(l->o->arg, l, h, body);
}

/* Handshake messages are small: a peer without a proof cannot make us buffer more. */
static size_t body_limit(const struct link *l)
{
    return l->state == LINK_UP ? FRAME_BODY_MAX : 4096;
}

static void parse(struct link *l)
{
    size_t at = 0;
    while (!l->dead && l->in.len - at >= FRAME_HEADER_BYTES) {
        struct frame_header h;
        struct err err = { 0 };
        if (frame_header_decode((const uint8_t *)l->in.data + at, &h, &err) != OK) {
            link_fail(l, "%s", err.text);
            return;
        }
        if (h.length > body_limit(l)) {
            link_fail(l, "a %s message of %u bytes before the handshake is over",
                      frame_type_name(h.type), h.length);
            return;
        }
        if (l->in.len - at - FRAME_HEADER_BYTES < h.length) {
            buf_reserve(&l->in, FRAME_HEADER_BYTES + h.length);
            break;
        }
        on_frame(l, &h, (struct str){ l->in.data + at + FRAME_HEADER_BYTES, h.length });
        at += FRAME_HEADER_BYTES + h.length;
    }
    if (!l->dead) buf_consume(&l->in, at);
}

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *out)
{
    struct link *l = handle->data;
    (void)suggested;
    *out = uv_buf_init(buf_reserve(&l->in, 64 << 10), 64 << 10);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
    struct link *l = stream->data;
    (void)buf;
    if (n < 0) {
        l->has_ended = n == UV_EOF;
        if (l->leaves) link_fail(l, "its process has ended in order");
        else if (n == UV_EOF) link_fail(l, "the peer closed the connection");
        else link_fail(l, "read: %s", uv_strerror((int)n));
        return;
    }
    l->in.len += (size_t)n;
    if (l->in.data) l->in.data[l->in.len] = 0;
    l->t_heard_ms = clock_ms();
    parse(l);
}

/* ---- life ---- */

static struct link *make_link(const struct link_options *o, bool dialed)
{
    struct link *l = MEM_NEW(struct link);
    l->o = o;
    l->dialed = dialed;
    l->state = dialed ? LINK_CONNECTING : LINK_HELLO;
    l->t_start_ms = l->t_heard_ms = l->t_progress_ms = clock_ms();
    list_init(&l->link);
    uv_tcp_init(loop_uv(o->loop), &l->tcp);
    l->tcp.data = l;
    return l;
}

static void start_reading(struct link *l)
{
    uv_tcp_nodelay(&l->tcp, 1);
    int st = uv_read_start((uv_stream_t *)&l->tcp, on_alloc, on_read);
    if (st < 0) link_fail(l, "read: %s", uv_strerror(st));
}

static void on_connected(uv_connect_t *req, int st)
{
    struct link *l = req->data;
    if (l->closing || l->dead) return;
    if (st < 0) {
        link_fail(l, "connect: %s", uv_strerror(st));
        return;
    }
    start_reading(l);
    if (!l->dead) send_hello(l);
}

struct link *link_dial(const struct link_options *o, uint64_t node, const char *address,
                       uint16_t port)
{
    struct link *l = make_link(o, true);
    struct sockaddr_storage sa;
    l->node = node;
    host_port_text(address, port, l->address);
    l->connect.data = l;
    int st = uv_ip4_addr(address, port, (struct sockaddr_in *)&sa);
    if (st < 0) st = uv_ip6_addr(address, port, (struct sockaddr_in6 *)&sa);
    if (st == 0)
        st = uv_tcp_connect(&l->connect, &l->tcp, (const struct sockaddr *)&sa, on_connected);
    if (st < 0) link_fail(l, "connect to %s:%u: %s", address, port, uv_strerror(st));
    return l;
}

struct link *link_accept(const struct link_options *o, uv_stream_t *listener)
{
    struct link *l = make_link(o, false);
    struct sockaddr_storage sa = { .ss_family = AF_UNSPEC };
    int n = sizeof sa, st = uv_accept(listener, (uv_stream_t *)&l->tcp);
    if (st < 0) {
        link_fail(l, "accept: %s", uv_strerror(st));
        return l;
    }
    if (uv_tcp_getpeername(&l->tcp, (struct sockaddr *)&sa, &n) == 0)
        uv_ip_name((const struct sockaddr *)&sa, l->address, sizeof l->address);
    snprintf(l->name, sizeof l->name, "%.63s", l->address);
    l->source = unproven_source((const struct sockaddr *)&sa);
    start_reading(l);
    return l;
}

static void on_closed(uv_handle_t *handle)
{
    struct link *l = handle->data;
    buf_release(&l->in);
    mem_free(l);
}

void link_close(struct link *l)
{
    if (l->closing) return;
    l->closing = l->dead = true;
    unproven_leave(&l->place);
    list_remove(&l->link);
    uv_close((uv_handle_t *)&l->tcp, on_closed);
}
