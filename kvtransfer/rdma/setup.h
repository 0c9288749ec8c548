/* setup.h - the frames that two ends of transport rdma exchange over the control connection: fixed
 * little-endian structs, strictly decoded.
 *
 *   HELLO      both, first: ports, pool, limits
 *   OFFER      sender: queue pairs of one rail
 *   ACCEPT     receiver: its queue pairs and keys, or REFUSE: the reason
 *   INVITE     receiver, BATON_RDMA_CM: where to connect its queue pairs, and a token
 *   BROKEN     sender: this rail is broken, destroy its queue pairs
 *   FENCED     receiver: they are destroyed; which puts are complete
 *   RETRY      either: a port is back, offer rails again
 *   COMPLETED  receiver: number of complete puts
 *   MESSAGE    either: a message of wire.h after `after` puts
 *
 * A rail's epoch grows with every OFFER, so late frames are recognised. Decoding accepts exactly
 * what encoding produces. Thread: any (values). */
#ifndef BATON_KVTRANSFER_RDMA_SETUP_H
#define BATON_KVTRANSFER_RDMA_SETUP_H

#include "kvtransfer/rdma/device.h"
#include "kvtransfer/rdma/recv_window.h"

enum {
    RDMA_QPS_MAX = 16,
    RDMA_REASON_MAX = 100,
    RDMA_SETUP_VERSION = 1,
    RDMA_TOKEN_BYTES = 16,
    RDMA_CM_REQUEST_BYTES = 28
};

enum rdma_frame {
    RDMA_FRAME_HELLO = 1,
    RDMA_FRAME_OFFER,
    RDMA_FRAME_ACCEPT,
    RDMA_FRAME_REFUSE,
    RDMA_FRAME_BROKEN,
    RDMA_FRAME_FENCED,
    RDMA_FRAME_COMPLETED,
    RDMA_FRAME_RETRY,
    RDMA_FRAME_MESSAGE,
    RDMA_FRAME_INVITE,
    RDMA_FRAME_END
};

/* The address of a port's queue pairs. */
struct rdma_port_addr {
    uint8_t gid[16];
    uint16_t lid;
    uint8_t link;     /* enum rdma_link */
    uint8_t gid_type; /* enum rdma_gid_type */
    uint32_t mtu;     /* bytes the port carries now: 256, 512, 1024, 2048 or 4096 */
    uint64_t bytes_per_s;
};

struct rdma_hello {
    uint64_t pool_base, pool_bytes; /* receiver; unused for a sender */
    uint32_t mtu_asked;             /* the operator's; 0: the smaller of both */
    bool reads;                     /* the receiver allows reads (flush_read, verify_read) */
    bool cm;                        /* the connection manager connects its queue pairs */
    uint32_t n_ports;               /* 1..RDMA_RAILS_MAX */
    struct rdma_port_addr ports[RDMA_RAILS_MAX];
};

struct rdma_qp_info {
    uint32_t number, psn; /* 24 bits each */
    uint32_t key;         /* ACCEPT: this queue pair's key for writing; 0 in OFFER */
};

/* OFFER and ACCEPT: one side's half of a rail. */
struct rdma_rail_info {
    uint32_t rail, epoch;                /* < RDMA_RAILS_MAX, at least 1 */
    uint32_t sender_port, receiver_port; /* index into the HELLO of each */
    uint32_t mtu;                        /* OFFER: the sender's; ACCEPT: of both */
    bool reads;                          /* OFFER: the sender will read back */
    struct rdma_port_addr addr;          /* now: an address may have changed since HELLO */
    uint32_t n_qps;                      /* 1..RDMA_QPS_MAX */
    struct rdma_qp_info qps[RDMA_QPS_MAX];
};

/* REFUSE, BROKEN, FENCED. */
struct rdma_rail_status {
    uint32_t rail, epoch;
    bool final; /* REFUSE: do not try again; the reason is a sentence for the sender's log */
    char reason[RDMA_REASON_MAX + 1];    /* REFUSE: printable ASCII; "" otherwise */
    struct rdma_recv_window recv_window; /* FENCED */
};

/* INVITE: where a receiver waits for the queue pairs of a rail. */
struct rdma_invite {
    uint32_t rail, epoch;
    uint32_t mtu; /* of both; the connection manager may lower it */
    bool ipv6;
    uint8_t address[16]; /* IPv4: the first four bytes, the others 0 */
    uint16_t port;       /* not 0 */
    uint8_t token[RDMA_TOKEN_BYTES];
};

/* CALL: a sender's queue pair, to the receiver that invited it. */
struct rdma_cm_request {
    uint32_t rail, epoch, i_qp;
    uint8_t token[RDMA_TOKEN_BYTES];
};

void rdma_hello_encode(const struct rdma_hello *m, struct buf *out);
enum status rdma_hello_decode(struct str in, struct rdma_hello *out) MUST_CHECK;
void rdma_rail_info_encode(const struct rdma_rail_info *m, struct buf *out);
enum status rdma_rail_info_decode(struct str in, struct rdma_rail_info *out) MUST_CHECK;
void rdma_rail_status_encode(enum rdma_frame frame, const struct rdma_rail_status *m,
                             struct buf *out);
enum status rdma_rail_status_decode(enum rdma_frame frame, struct str in,
                                    struct rdma_rail_status *out) MUST_CHECK;
void rdma_invite_encode(const struct rdma_invite *m, struct buf *out);
enum status rdma_invite_decode(struct str in, struct rdma_invite *out) MUST_CHECK;
void rdma_cm_request_encode(const struct rdma_cm_request *m, uint8_t out[RDMA_CM_REQUEST_BYTES]);
/* The connection manager passes on more bytes than were sent: those after the first
 * RDMA_CM_REQUEST_BYTES are ignored. */
enum status rdma_cm_request_decode(struct str in, struct rdma_cm_request *out) MUST_CHECK;

#endif
