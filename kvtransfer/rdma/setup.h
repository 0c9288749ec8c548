/* setup.h - what two rdma rows say to each other over the control connection, byte by byte: fixed
 * little-endian frames, strictly decoded.
 *
 *   HELLO    both, first: ports, pool, limits                    MESSAGE  a message of wire.h; the frame's `after` says what it waits for
 *   OFFER    sender: queue pairs of one rail                     COMPLETED   receiver: how many puts have landed (gives room for more)
 *   ACCEPT   receiver: its queue pairs and keys                  BROKEN   sender: this rail is dead here; end it on your side too
 *   REFUSE   receiver: why not                                   FENCED   receiver: it is dead here too; what had landed until then
 *   RETRY    either: a port came back, try broken rails now
 *   INVITE   receiver, with BATON_RDMA_CM: where to connect the queue pairs of an OFFER to, and the
 *            token to show there. ACCEPT follows when they are connected and have their keys
 *
 * A CALL is no frame: it is the private data of a connection manager's request, one per queue pair.
 *
 * A rail is named by its number and an epoch that grows with every OFFER of it, so that late frames
 * about earlier queue pairs are known. Invariant: decoding touches no byte outside its input and
 * accepts exactly what encoding produces; every value is in the range its comment names. Thread:
 * any (values). */
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

/* Where a queue pair is spoken to. */
struct rdma_port_addr {
    uint8_t gid[16];
    uint16_t lid;
    uint8_t link;     /* enum rdma_link */
    uint8_t gid_type; /* enum rdma_gid_type */
    uint32_t mtu;     /* bytes the port carries now: 256, 512, 1024, 2048 or 4096 */
    uint64_t bytes_per_s;
};

struct rdma_hello {
    uint64_t pool_base, pool_bytes; /* receiver; of the sender nobody reads them */
    uint32_t mtu_asked;             /* by tuning; 0: the smaller of both */
    bool reads;                     /* the receiver lets its peer read (flush_read,
                                     * verify_read) */
    bool cm;                        /* its queue pairs are connected by the connection
                                     * manager */
    uint32_t n_ports;               /* 1..RDMA_RAILS_MAX */
    struct rdma_port_addr ports[RDMA_RAILS_MAX];
};

struct rdma_qp_info {
    uint32_t number, psn; /* 24 bits each */
    uint32_t key;         /* ACCEPT: the right to write, of this queue pair; 0 in OFFER */
};

/* OFFER and ACCEPT: one side's half of a rail. */
struct rdma_rail_info {
    uint32_t rail, epoch;                /* < RDMA_RAILS_MAX, at least 1 */
    uint32_t sender_port, receiver_port; /* index into the HELLO of each */
    uint32_t mtu;                        /* OFFER: what the sender can; ACCEPT: what both
                                          * use */
    bool reads;                          /* OFFER: the sender wants to read back */
    struct rdma_port_addr addr;          /* now: an address may have changed since HELLO */
    uint32_t n_qps;                      /* 1..RDMA_QPS_MAX */
    struct rdma_qp_info qps[RDMA_QPS_MAX];
};

/* REFUSE, BROKEN, FENCED. */
struct rdma_rail_status {
    uint32_t rail, epoch;
    bool final; /* REFUSE: no use in trying again; the reason is a sentence for the
                 * sender's log */
    char reason[RDMA_REASON_MAX + 1];    /* REFUSE: printable ASCII; "" otherwise */
    struct rdma_recv_window recv_window; /* FENCED */
};

/* A receiver waits for the queue pairs of a rail. */
struct rdma_invite {
    uint32_t rail, epoch;
    uint32_t mtu; /* what both use; less where the connection manager says so */
    bool ipv6;
    uint8_t address[16]; /* IPv4: the first four bytes, the others 0 */
    uint16_t port;       /* not 0 */
    uint8_t token[RDMA_TOKEN_BYTES];
};

/* A sender's queue pair, to the receiver that invited it. */
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
/* The connection manager hands on more bytes than were sent: those after the first
 * RDMA_CM_REQUEST_BYTES are not looked at. */
enum status rdma_cm_request_decode(struct str in, struct rdma_cm_request *out) MUST_CHECK;

#endif
