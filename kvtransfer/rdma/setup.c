/* setup.c - encoding and strict decoding of the frames of setup.h. Values in, values out, no
 * state. Thread: any. */
#include "kvtransfer/rdma/setup.h"

#include <assert.h>
#include <string.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "structs go over the wire as they lie in memory");

static const uint32_t HELLO_MAGIC = 0x41445248;      /* "HRDA" */
static const uint32_t CM_REQUEST_MAGIC = 0x43445248; /* "HRDC" */

struct rdma_wire_port_addr {
    uint8_t gid[16];
    uint16_t lid;
    uint8_t link, gid_type;
    uint32_t mtu;
    uint64_t bytes_per_s;
};
static_assert(sizeof(struct rdma_wire_port_addr) == 32, "wire size");

struct rdma_wire_hello { /* then n_ports places */
    uint32_t magic;
    uint16_t version;
    uint8_t n_ports, reads;
    uint64_t pool_base, pool_bytes;
    uint32_t mtu_asked;
    uint8_t cm, zero[3];
};
static_assert(sizeof(struct rdma_wire_hello) == 32, "wire size");

struct rdma_wire_qp {
    uint32_t number, psn, key;
};

struct rdma_wire_rail_info { /* then n_qps of rdma_wire_qp */
    uint8_t rail, sender_port, receiver_port, n_qps;
    uint32_t epoch, mtu;
    uint8_t reads, zero[3];
    struct rdma_wire_port_addr addr;
};
static_assert(sizeof(struct rdma_wire_rail_info) == 48, "wire size");

struct rdma_wire_rail_status { /* REFUSE: then the reason. FENCED: then rdma_wire_recv_window */
    uint8_t rail, final, zero[2];
    uint32_t epoch;
};
static_assert(sizeof(struct rdma_wire_rail_status) == 8, "wire size");

struct rdma_wire_recv_window {
    uint64_t completed, bits[RDMA_WINDOW / 64];
};

struct rdma_wire_invite {
    uint8_t rail, family; /* 4 or 6 */
    uint16_t port;
    uint32_t epoch, mtu, zero;
    uint8_t address[16], token[RDMA_TOKEN_BYTES];
};
static_assert(sizeof(struct rdma_wire_invite) == 48, "wire size");

struct rdma_wire_cm_request {
    uint32_t magic;
    uint8_t rail, i_qp, zero[2];
    uint32_t epoch;
    uint8_t token[RDMA_TOKEN_BYTES];
};
static_assert(sizeof(struct rdma_wire_cm_request) == RDMA_CM_REQUEST_BYTES, "wire size");

/* ---- places ---- */

static void port_addr_encode(const struct rdma_port_addr *p, struct rdma_wire_port_addr *w)
{
    *w = (struct rdma_wire_port_addr){
        .lid = p->lid,
        .link = p->link,
        .gid_type = p->gid_type,
        .mtu = p->mtu,
        .bytes_per_s = p->bytes_per_s,
    };
    memcpy(w->gid, p->gid, sizeof w->gid);
}

static bool port_addr_decode(const struct rdma_wire_port_addr *w, struct rdma_port_addr *p)
{
    if (w->link > RDMA_LINK_ETHERNET || w->gid_type > RDMA_GID_ROCE_V2 || !rdma_mtu_code(w->mtu))
        return false;
    *p = (struct rdma_port_addr){
        .lid = w->lid,
        .link = w->link,
        .gid_type = w->gid_type,
        .mtu = w->mtu,
        .bytes_per_s = w->bytes_per_s,
    };
    memcpy(p->gid, w->gid, sizeof p->gid);
    return true;
}

/* ---- HELLO ---- */

void rdma_hello_encode(const struct rdma_hello *m, struct buf *out)
{
    struct rdma_wire_hello w = {
        .magic = HELLO_MAGIC,
        .version = RDMA_SETUP_VERSION,
        .n_ports = (uint8_t)m->n_ports,
        .reads = m->reads,
        .pool_base = m->pool_base,
        .pool_bytes = m->pool_bytes,
        .mtu_asked = m->mtu_asked,
        .cm = m->cm,
    };
    buf_add(out, &w, sizeof w);
    for (uint32_t i = 0; i < m->n_ports; i++) {
        struct rdma_wire_port_addr p;
        port_addr_encode(&m->ports[i], &p);
        buf_add(out, &p, sizeof p);
    }
}

enum status rdma_hello_decode(struct str in, struct rdma_hello *out)
{
    struct rdma_wire_hello w;
    struct rdma_hello m = { 0 };
    if (!str_take(&in, &w, sizeof w) || w.magic != HELLO_MAGIC) return ERR_FORMAT;
    if (w.version != RDMA_SETUP_VERSION) return ERR_PEER_MISMATCH;
    if (w.zero[0] || w.zero[1] || w.zero[2] || w.cm > 1 || w.reads > 1 || w.n_ports < 1 ||
        w.n_ports > RDMA_RAILS_MAX)
        return ERR_FORMAT;
    if (w.mtu_asked && !rdma_mtu_code(w.mtu_asked)) return ERR_FORMAT;
    if (w.pool_bytes > UINT64_MAX - w.pool_base) return ERR_FORMAT;
    m = (struct rdma_hello){
        .pool_base = w.pool_base,
        .pool_bytes = w.pool_bytes,
        .mtu_asked = w.mtu_asked,
        .reads = w.reads,
        .cm = w.cm,
        .n_ports = w.n_ports,
    };
    for (uint32_t i = 0; i < m.n_ports; i++) {
        struct rdma_wire_port_addr p;
        if (!str_take(&in, &p, sizeof p) || !port_addr_decode(&p, &m.ports[i])) return ERR_FORMAT;
    }
    if (in.n) return ERR_FORMAT;
    *out = m;
    return OK;
}

/* ---- OFFER, ACCEPT ---- */

void rdma_rail_info_encode(const struct rdma_rail_info *m, struct buf *out)
{
    struct rdma_wire_rail_info w = {
        .rail = (uint8_t)m->rail,
        .sender_port = (uint8_t)m->sender_port,
        .receiver_port = (uint8_t)m->receiver_port,
        .n_qps = (uint8_t)m->n_qps,
        .epoch = m->epoch,
        .mtu = m->mtu,
        .reads = m->reads,
    };
    port_addr_encode(&m->addr, &w.addr);
    buf_add(out, &w, sizeof w);
    for (uint32_t i = 0; i < m->n_qps; i++) {
        struct rdma_wire_qp q = { m->qps[i].number, m->qps[i].psn, m->qps[i].key };
        buf_add(out, &q, sizeof q);
    }
}

enum status rdma_rail_info_decode(struct str in, struct rdma_rail_info *out)
{
    struct rdma_wire_rail_info w;
    if (!str_take(&in, &w, sizeof w) || w.rail >= RDMA_RAILS_MAX ||
        w.sender_port >= RDMA_RAILS_MAX || w.receiver_port >= RDMA_RAILS_MAX)
        return ERR_FORMAT;
    if (w.n_qps < 1 || w.n_qps > RDMA_QPS_MAX || w.epoch == 0 || !rdma_mtu_code(w.mtu) ||
        w.reads > 1)
        return ERR_FORMAT;
    if (w.zero[0] || w.zero[1] || w.zero[2]) return ERR_FORMAT;
    struct rdma_rail_info m = {
        .rail = w.rail,
        .sender_port = w.sender_port,
        .receiver_port = w.receiver_port,
        .n_qps = w.n_qps,
        .epoch = w.epoch,
        .mtu = w.mtu,
        .reads = w.reads,
    };
    if (!port_addr_decode(&w.addr, &m.addr)) return ERR_FORMAT;
    for (uint32_t i = 0; i < m.n_qps; i++) {
        struct rdma_wire_qp q;
        if (!str_take(&in, &q, sizeof q) || q.number >> 24 || q.psn >> 24) return ERR_FORMAT;
        m.qps[i] = (struct rdma_qp_info){ q.number, q.psn, q.key };
    }
    if (in.n) return ERR_FORMAT;
    *out = m;
    return OK;
}

/* ---- REFUSE, BROKEN, FENCED ---- */

void rdma_rail_status_encode(enum rdma_frame frame, const struct rdma_rail_status *m,
                             struct buf *out)
{
    struct rdma_wire_rail_status w = {
        .rail = (uint8_t)m->rail,
        .final = m->final,
        .epoch = m->epoch,
    };
    buf_add(out, &w, sizeof w);
    if (frame == RDMA_FRAME_REFUSE) buf_add_c(out, m->reason);
    if (frame != RDMA_FRAME_FENCED) return;
    struct rdma_wire_recv_window l = { .completed = m->recv_window.completed };
    memcpy(l.bits, m->recv_window.bits, sizeof l.bits);
    buf_add(out, &l, sizeof l);
}

enum status rdma_rail_status_decode(enum rdma_frame frame, struct str in,
                                    struct rdma_rail_status *out)
{
    struct rdma_wire_rail_status w;
    if (!str_take(&in, &w, sizeof w) || w.rail >= RDMA_RAILS_MAX || w.epoch == 0 || w.zero[0] ||
        w.zero[1])
        return ERR_FORMAT;
    if (w.final > (frame == RDMA_FRAME_REFUSE)) return ERR_FORMAT;
    struct rdma_rail_status m = { .rail = w.rail, .epoch = w.epoch, .final = w.final };
    if (frame == RDMA_FRAME_REFUSE) {
        if (in.n > RDMA_REASON_MAX) return ERR_FORMAT;
        for (size_t i = 0; i < in.n; i++)
            if (in.p[i] < ' ' || in.p[i] > '~') return ERR_FORMAT; /* it goes into a log */
        memcpy(m.reason, in.p, in.n);
        in.n = 0;
    } else if (frame == RDMA_FRAME_FENCED) {
        struct rdma_wire_recv_window l;
        if (!str_take(&in, &l, sizeof l)) return ERR_FORMAT;
        m.recv_window.completed = l.completed;
        memcpy(m.recv_window.bits, l.bits, sizeof l.bits);
        if (!rdma_recv_window_is_valid(&m.recv_window)) return ERR_FORMAT;
    }
    if (in.n) return ERR_FORMAT;
    *out = m;
    return OK;
}

/* ---- INVITE, CALL ---- */

void rdma_invite_encode(const struct rdma_invite *m, struct buf *out)
{
    struct rdma_wire_invite w = {
        .rail = (uint8_t)m->rail,
        .family = m->ipv6 ? 6 : 4,
        .port = m->port,
        .epoch = m->epoch,
        .mtu = m->mtu,
    };
    memcpy(w.address, m->address, sizeof w.address);
    memcpy(w.token, m->token, sizeof w.token);
    buf_add(out, &w, sizeof w);
}

enum status rdma_invite_decode(struct str in, struct rdma_invite *out)
{
    static const uint8_t none[12];
    struct rdma_wire_invite w;
    if (!str_take(&in, &w, sizeof w) || in.n || w.rail >= RDMA_RAILS_MAX || w.epoch == 0 ||
        w.zero || w.port == 0 || !rdma_mtu_code(w.mtu))
        return ERR_FORMAT;
    if ((w.family != 4 && w.family != 6) ||
        (w.family == 4 && memcmp(w.address + 4, none, sizeof none) != 0))
        return ERR_FORMAT;
    *out = (struct rdma_invite){
        .rail = w.rail, .epoch = w.epoch, .mtu = w.mtu, .ipv6 = w.family == 6, .port = w.port
    };
    memcpy(out->address, w.address, sizeof out->address);
    memcpy(out->token, w.token, sizeof out->token);
    return OK;
}

void rdma_cm_request_encode(const struct rdma_cm_request *m, uint8_t out[RDMA_CM_REQUEST_BYTES])
{
    struct rdma_wire_cm_request w = {
        .magic = CM_REQUEST_MAGIC,
        .rail = (uint8_t)m->rail,
        .i_qp = (uint8_t)m->i_qp,
        .epoch = m->epoch,
    };
    memcpy(w.token, m->token, sizeof w.token);
    memcpy(out, &w, sizeof w);
}

enum status rdma_cm_request_decode(struct str in, struct rdma_cm_request *out)
{
    struct rdma_wire_cm_request w;
    if (!str_take(&in, &w, sizeof w) || w.magic != CM_REQUEST_MAGIC || w.rail >= RDMA_RAILS_MAX ||
        w.i_qp >= RDMA_QPS_MAX || w.epoch == 0)
        return ERR_FORMAT;
    if (w.zero[0] || w.zero[1]) return ERR_FORMAT;
    *out = (struct rdma_cm_request){ .rail = w.rail, .epoch = w.epoch, .i_qp = w.i_qp };
    memcpy(out->token, w.token, sizeof out->token);
    return OK;
}
