/* transport.h - what a transport must do to carry KV bytes from a sender's pool to a receiver's.
 *
 * A transport moves bytes and small messages over connections and can fence a peer; it knows no
 * transfers. Grants, generations, checksums and deadlines belong to session.h and are the same for
 * all.
 *   one-sided           put() writes into the receiver's memory (mem, ipc, rdma, ucx); no thread of
 *                       the receiver sees the bytes
 *   receiver scatters   put() sends a stream (tcp); the receiving transport asks env->scatter where
 *                       the bytes go, and writes them itself
 * CONTRIBUTING.md says how to add one.
 * Thread: every op runs on the transfer thread except where it says otherwise; none blocks. */
#ifndef BATON_KVTRANSFER_TRANSPORT_H
#define BATON_KVTRANSFER_TRANSPORT_H

#include <sys/uio.h>

#include "kernels/copy_stream.h"
#include "kernels/device.h"
#include "kvtransfer/tuning.h"
#include "kvtransfer/wire.h"
#include "shared/base/buf.h"
#include "shared/base/err.h"
#include "shared/kv/kv_layout.h"

enum kvt_cap {
    KVT_CAP_SAME_PROCESS = 1,      /* reaches only within one process */
    KVT_CAP_SAME_HOST = 2,         /* reaches only within one host */
    KVT_CAP_RECEIVER_SCATTERS = 4, /* env->scatter is used: forgetting a session is its fence */
    /* Disconnecting takes the peer's access away (rdma: queue pair in error, key invalid). */
    KVT_CAP_FENCE_TEARDOWN = 8,
    KVT_CAP_DEVICE_MEM = 16, /* puts go from GPU memory to GPU memory, after their events */
    /* Peers write into GPU memory if `open` finds that they can; puts read staging memory. */
    KVT_CAP_GPUDIRECT = 32,
    /* A link that fails is noticed within KVT_QUIET_MAX_MS, and another one used in its place. */
    KVT_CAP_HEALS = 64
};

enum {
    KVT_IOV_MAX = 64,
    KVT_CONNECT_MS = 3000,
    KVT_QUEUE_BYTES = 64 * 1024,
    KVT_QUEUE_LIMIT = 1024 * 1024
};

/* Source offsets from here on are in staging memory (pieces converted to a peer's layout), those
 * below in the pool. */
#define KVT_STAGING (UINT64_C(1) << 62)

/* One contiguous copy: `local` is an offset in the sender's pool or staging memory, `remote` one in
 * the receiver's pool. */
struct kvt_copy {
    uint64_t local, remote, bytes;
};

/* Checksums of the pieces of a put, by their position in it. */
struct kvt_sums {
    uint64_t values[KVT_BATCH_PIECES];
    bool known[KVT_BATCH_PIECES];
};

/* Checksums that the GPU computes while it copies the pieces of a put from pool to pool. */
struct kvt_put_sums {
    /* In memory that the GPU reads. `to` and `tail.to` are offsets in the receiver's pool when the
     * put begins; the transport makes them addresses. */
    struct copy_stream_checksum_range *pieces;
    uint64_t *values; /* written before PUT_DONE */
    uint32_t n;
};

struct kvt_put {
    /* Kind DATA: session, generation, layer, first, n, bytes: enough for the receiver to scatter
     * it. */
    struct kvt_message head;
    const struct kvt_copy *copies; /* in the order of the bytes; the transport copies the array */
    uint32_t n_copies;             /* 1..env->max_copies; 0 with `on_device` */
    /* The bytes are complete after this event of the pool's device (device_record_event); 0: now */
    uint64_t event;
    uint64_t tag;
    /* NULL, or room for checksums, none of them known. A transport that reads the bytes itself may
     * store those of pieces that it has read when put() returns OK: hash_64 of the bytes with seed
     * 0. Others are left to the session layer. Each piece has piece_bytes bytes; the last may have
     * fewer. */
    struct kvt_sums *sums;
    uint64_t piece_bytes;
    /* Instead of `copies` (n > 0), with KVT_CAP_DEVICE_MEM; read and written until PUT_DONE or
     * DOWN. */
    struct kvt_put_sums on_device;
};

struct kvt_transport {
    const struct kvt_transport_ops *ops; /* first member of every transport's struct */
};

struct kvt_conn {
    struct kvt_transport *t; /* first member of every connection's struct */
    bool incoming;           /* the peer connected to us */
    void *peer;              /* the session layer's; NULL until it sets it */
};

enum kvt_transport_event_kind {
    KVT_UP, /* conn may be used; incoming ones appear here for the first time */
    /* The connection ended or never came up; `text` says why. The last event; then disconnect(). */
    KVT_DOWN,
    KVT_MESSAGE, /* message */
    KVT_PUT_DONE /* tag: the source is not read any more */
};

struct kvt_transport_event {
    enum kvt_transport_event_kind kind;
    struct kvt_conn *conn;
    uint64_t tag;
    struct kvt_message message;
    enum status status; /* DOWN */
    char text[120];
};

/* What the session layer gives a transport; borrowed until close. */
struct kvt_env {
    struct kv_layout layout;
    const struct dev_mem *mem;     /* the pool: read by puts, written by peers */
    struct device *device;         /* the GPU whose memory the pool is; NULL: host memory */
    const struct dev_mem *staging; /* read by puts only, never exposed to a peer; NULL: none */
    /* Staging in the device's memory, with the same offsets: transports with KVT_CAP_DEVICE_MEM put
     * from it. */
    const struct dev_mem *staging_device;
    struct kvt_tuning tuning;
    const char *listen_host, *advertise_host;
    uint16_t port; /* tcp */
    uint32_t max_copies;
    uint32_t max_peers; /* connections, both directions */
    void *arg;
    /* Takes a one-time ticket: OK, or ERR_UNAUTHORIZED (unknown, used, expired). */
    enum status (*admit)(void *arg, const uint8_t ticket[KVT_TICKET_BYTES]);
    /* Says where the bytes of DATA frame `head` go, from its byte `offset` on: fills at most `cap`
     * entries and returns how many. 0: nowhere (no live grant of that generation on this
     * connection); the transport reads the rest of the frame and drops it. */
    int (*scatter)(void *arg, struct kvt_conn *c, const struct kvt_message *head, uint64_t offset,
                   struct iovec *iov, int cap);
    /* The first `bytes` of the frame are in place now. */
    void (*scattered)(void *arg, struct kvt_conn *c, const struct kvt_message *head,
                      uint64_t bytes);
};

/* What the session layer guarantees: a put names only blocks of a grant that the receiver confirmed
 * on this connection; copies are within both pools; a source stays valid until PUT_DONE or DOWN.
 *
 * What a transport guarantees:
 *  1 An UP connection presented a ticket that env->admit accepted. Before that its peer can neither
 *    read nor write anything.
 *  2 The peer sees a message only after every earlier put on that connection is in its memory (a
 *    NOTE: its own put and those before), and messages in order, or not at all.
 *  3 After DOWN, and after a put's PUT_DONE, it reads nothing of that source any more.
 *  4 fence() returns OK only when no write of that peer can reach this process's pool any more. */
struct kvt_transport_ops {
    const char *name; /* as in options.protocols, logs, metrics */
    unsigned caps;
    uint32_t put_bytes; /* best size of a put without checksum and conversion; 0: KVT_PUT_BYTES */
    /* ERR_NODEV: this host has no such hardware; ERR_CONFIG: port taken, memory of the wrong kind.
     * At start, on the thread of kvt_create; may take seconds. */
    enum status (*open)(const struct kvt_env *env, struct kvt_transport **out, struct err *err);
    void (*close)(struct kvt_transport *t);    /* disconnects what is left */
    int (*wait_fd)(struct kvt_transport *t);   /* readable when poll has something to do */
    uint16_t (*port)(struct kvt_transport *t); /* 0: does not listen on one */
    /* Appends what a peer needs to reach this side (address, region, key), at most KVT_ADDRESS_MAX
     * bytes. Any thread: it is constant. */
    void (*export_address)(const struct kvt_transport *t, struct buf *out);
    bool (*can_reach)(struct kvt_transport *t, struct str address); /* malformed: false */
    /* Starts to connect; UP or DOWN follows if and only if this returns OK. No step (the control
     * connection, then at most two answers that the set-up waits for) takes longer than
     * KVT_CONNECT_MS; the end of a peer's process is noticed at once. ERR_PEER_LOST,
     * ERR_UNSUPPORTED, ERR_FULL, ERR_IO. */
    enum status (*connect)(struct kvt_transport *t, struct str address,
                           const struct kv_layout *theirs, const uint8_t ticket[KVT_TICKET_BYTES],
                           struct kvt_conn **out, struct err *err);
    /* OK: PUT_DONE(tag) or DOWN follows. ERR_BUSY: nothing was taken; try again after the next
     * poll. ERR_PEER_LOST: DOWN follows. */
    enum status (*put)(struct kvt_conn *c, const struct kvt_put *p);
    /* Stops reading the sources of this session's unfinished puts as soon as possible; their
     * PUT_DONE still follow. */
    void (*abandon)(struct kvt_conn *c, uint32_t session, uint64_t generation);
    /* OK, ERR_BUSY (NOTE only, as for put), ERR_PEER_LOST (DOWN follows). Control messages are
     * bounded by KVT_QUEUE_LIMIT. */
    enum status (*notify)(struct kvt_conn *c, const struct kvt_message *m);
    /* Makes what arrived visible to readers of a pool in GPU memory; host memory: OK at once. */
    enum status (*flush)(struct kvt_transport *t);
    /* Ends the peer's access; no event follows. OK: none of its writes can reach the pool any more.
     * ERR_BUSY: not proven yet, ask again. After the first call only fence and disconnect are
     * called for this connection. */
    enum status (*fence)(struct kvt_conn *c);
    size_t (*poll)(struct kvt_transport *t, struct kvt_transport_event *out, size_t cap);
    /* Bytes per second of this connection's links as the hardware states them; 0: unknown
     * (loopback, memory). */
    uint64_t (*link_speed)(const struct kvt_conn *c);
    /* Closes and frees the connection: sources are not read any more, no event follows, and the
     * peer is told. */
    void (*disconnect)(struct kvt_conn *c);
};

/* The address of a copy's source in this process. */
static inline char *kvt_source(const struct kvt_env *env, uint64_t local)
{
    return local < KVT_STAGING ? (char *)env->mem->ptr + local
                               : (char *)env->staging->ptr + (local - KVT_STAGING);
}

/* The transports of this build, best first, NULL-terminated. */
extern const struct kvt_transport_ops *const kvt_transports[];
/* The names of all transports between processes, best first, also of those that this build lacks;
 * NULL-terminated. KVT_TRANSPORT_NAMES is the same list for messages. */
#define KVT_TRANSPORT_NAMES "ipc, rdma, ucx, tcp"
extern const char *const kvt_transport_names[];
/* Whether kvt_transport_names has this name. */
bool kvt_transport_is_known(struct str name);
/* The KVT_CAP_* of a transport; 0 if this build lacks it. */
unsigned kvt_transport_caps(struct str name);
/* ERR_UNSUPPORTED names the protocol and the transports of this build. */
enum status kvt_transport_find(struct str name, const struct kvt_transport_ops **out,
                               struct err *err) MUST_CHECK;

#endif
