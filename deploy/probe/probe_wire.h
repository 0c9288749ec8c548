/* probe_wire.h - the protocol of `baton doctor --peers` and `baton bench kv`: requests to a probe
 * server and its replies.
 *
 * Requests and replies are the bodies of FRAME_PROBE and FRAME_PROBE_REPLY on an authenticated link
 * (shared/cluster/link.h); a reply carries the request number of its frame.
 * Invariants: a decoded request is within the ranges below, and nothing uses it before the decode.
 * Thread: any (values). */
#ifndef BATON_DEPLOY_PROBE_PROBE_WIRE_H
#define BATON_DEPLOY_PROBE_PROBE_WIRE_H

#include <netinet/in.h>

#include "shared/base/buf.h"
#include "shared/base/err.h"

/* One test transfer from server S to server R:
 *
 *   both OPEN     a pool and a kvt that allows one transport; reply: the hello in data
 *   R    ANSWER   data: S's hello; reply: the answer in data
 *   S    CONNECT  data: R's answer; reply: transport, link_speed
 *   R    EXPECT   n_transfers, n_blocks each; reply: grants in data, each after its length (u32 le)
 *   S    SEND     as EXPECT, data: the grants; reply: cpu_ns, n_bytes, and the ns of each transfer
 *                 from open to acknowledgement
 *   R    TAKE     n_transfers; reply: cpu_ns since EXPECT
 *   both CLOSE
 *
 * A plain stream: R LISTEN (reply: port, ticket in data); S STREAM to address:port with that ticket
 * while R does DRAIN (reply: ns).
 * A tool's limit: R TOOL_SERVE (reply: port); S TOOL_RUN against address:port (reply: the rate in
 * n_bytes or latencies in ns, and text). */
enum probe_step {
    PROBE_WHO = 1,
    PROBE_OPEN,
    PROBE_ANSWER,
    PROBE_CONNECT,
    PROBE_EXPECT,
    PROBE_SEND,
    PROBE_TAKE,
    PROBE_CLOSE,
    PROBE_LISTEN,
    PROBE_STREAM,
    PROBE_DRAIN,
    PROBE_COPY,
    PROBE_TOOL_SERVE,
    PROBE_TOOL_RUN,
    PROBE_STEP_END
};

/* The only programs that a probe server runs, with arguments made from checked numbers. */
enum probe_tool {
    PROBE_IPERF3 = 1,
    PROBE_IB_WRITE_BW,
    PROBE_IB_WRITE_LAT,
    PROBE_UCX_PUT_BW,
    PROBE_UCX_PUT_LAT,
    PROBE_TOOL_END
};

enum {
    PROBE_NAME_MAX = 16,
    PROBE_ADDRESS_MAX = INET6_ADDRSTRLEN,
    PROBE_PIECE_MIN = 1024,
    PROBE_PIECE_MAX = 64 << 20,
    PROBE_LAYERS_MAX = 128,
    PROBE_BLOCKS_MAX = 1 << 18,
    PROBE_TRANSFERS_MAX = 256,
    PROBE_THREADS_MAX = 16,
    PROBE_TEXT_MAX = 400
};
#define PROBE_POOL_MAX   (UINT64_C(1) << 30)  /* bytes of one pool */
#define PROBE_STREAM_MAX (UINT64_C(16) << 30) /* bytes of one stream, copy or tool run */

struct probe_request {
    enum probe_step step;
    char transport[PROBE_NAME_MAX];
    /* OPEN, LISTEN: own address, to listen on and to tell the peer; STREAM, TOOL_RUN: the peer's.
     * Numeric, "" allowed */
    char address[PROBE_ADDRESS_MAX];
    uint32_t piece_bytes;        /* OPEN, COPY, TOOL_*: PROBE_PIECE_MIN..MAX */
    uint32_t n_layers, n_blocks; /* OPEN: of the pool; EXPECT, SEND: per transfer */
    bool checksum, contiguous;
    uint32_t copiers, connections; /* 0..PROBE_THREADS_MAX; 0: choose */
    uint32_t n_transfers;          /* EXPECT, SEND, TAKE: 1..PROBE_TRANSFERS_MAX */
    enum probe_tool tool;
    uint16_t port;
    uint64_t n_bytes; /* COPY, STREAM, DRAIN, TOOL_*: 1..PROBE_STREAM_MAX */
    struct buf data;  /* owned */
};

struct probe_reply {
    enum status status;
    char text[PROBE_TEXT_MAX];
    struct buf data; /* owned */
    uint64_t ns[PROBE_TRANSFERS_MAX];
    uint32_t n_ns;
    uint64_t cpu_ns, n_bytes, link_speed;
    uint16_t port;
    char transport[PROBE_NAME_MAX];
    char host[64], boot_id[40], version[32];
};

const char *probe_step_name(enum probe_step step);

void probe_request_encode(const struct probe_request *r, struct buf *out);
/* ERR_FORMAT: not a request; ERR_INVALID: a value outside its range, which the sentence names. *out
 * is empty on failure; otherwise probe_request_release frees it. */
enum status probe_request_decode(struct str in, struct probe_request *out,
                                 struct err *err) MUST_CHECK;
void probe_request_release(struct probe_request *r);

void probe_reply_encode(const struct probe_reply *r, struct buf *out);
enum status probe_reply_decode(struct str in, struct probe_reply *out, struct err *err) MUST_CHECK;
void probe_reply_release(struct probe_reply *r);
/* Encodes the reply of a running node, which does not measure: ERR_PEER_REFUSED with a sentence
 * that names the node. */
void probe_refusal_encode(const char *node, const char *role, struct buf *out);

#endif
