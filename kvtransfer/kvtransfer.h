/* kvtransfer.h - moves KV blocks from one node's pool into another's.
 *
 * A `struct kvt` is one node's side: the memory of its pool, its transfer thread and its
 * connections. It knows addresses and a KV layout, never models, requests or text. The control
 * plane (shared/cluster) carries its opaque byte strings: hello, answer, grant.
 *
 * Thread: every function may be called from any thread and never blocks (it posts to the transfer
 * thread). options.on_event runs on the transfer thread and must only pass the event on. */
#ifndef BATON_KVTRANSFER_KVTRANSFER_H
#define BATON_KVTRANSFER_KVTRANSFER_H

#include "kernels/device.h"
#include "kvtransfer/tuning.h"
#include "shared/base/buf.h"
#include "shared/base/err.h"
#include "shared/base/metrics.h"
#include "shared/kv/kv_layout.h"

/* Connecting (the sender pushes, so the sender connects):
 *     sender   kvt_hello    ─ bytes ─▶ receiver kvt_answer: checks version, layout, dtype, rank;
 *                                      makes a one-time ticket
 *     sender   kvt_connect  ◀─ bytes ─ picks the first allowed transport that reaches, presents the
 *                                      ticket: CONNECTED or PEER_LOST
 * One transfer:
 *     receiver kvt_expect(id, blocks) → grant bytes (session, generation, blocks)
 *     sender   kvt_send_open(id, peer, grant)
 *              kvt_send_ready(id, layer, tokens ...) per finished layer and chunk: bytes move
 *              kvt_send_finish(id): completion, with checksums
 *     receiver verifies every (layer, block): RECEIVED or RECEIVE_FAILED
 *     sender   SENT: the receiver has acknowledged; source blocks may be reused
 * Cancelling: kvt_expect_cancel → FENCED once no write of the peer can reach those blocks any more
 * (the writer acknowledged, its connection is torn down and drained, or its process has ended).
 * Blocks must not be reused before FENCED. */
struct kvt;

enum kvt_event_kind {
    KVT_CONNECTED,      /* peer: ready to send to */
    KVT_PEER_LOST,      /* peer: connection ended; its sends have failed */
    KVT_RECEIVED,       /* id */
    KVT_RECEIVE_FAILED, /* id, status; cancelled implicitly: FENCED follows */
    KVT_FENCED,         /* id: blocks may be reused */
    KVT_SENT,           /* id */
    KVT_SEND_FAILED,    /* id, status: source blocks are not read any more */
    KVT_PEER_QUIET,     /* peer: its connection stands, but nothing that is awaited of it has come
                         * for longer than it usually takes. A hint: the limits of sends end them,
                         * and it */
    KVT_PEER_HEARD      /* peer: something came, or nothing is awaited any more */
};

struct kvt_event {
    enum kvt_event_kind kind;
    uint64_t id;   /* of the transfer, as the caller named it */
    uint64_t peer; /* of events of a peer: handle from kvt_connect */
    enum status status;
    const char *transport; /* name of the transport that carried it; static */
    uint64_t bytes;        /* RECEIVED, SENT: KV bytes moved */
    /* RECEIVED: first byte (or grant) to verified; SENT: first push to acknowledged. */
    uint64_t ns;
    /* SENT: the part of ns while bytes were in flight; the other part waited for compute or for the
     * acknowledgement. */
    uint64_t busy_ns;
    uint64_t tail_ns;    /* SENT: kvt_send_finish to acknowledged, not overlapped with compute */
    uint64_t link_speed; /* CONNECTED, SENT, RECEIVED: bytes per second; 0: not known */
    char text[160];      /* a sentence for failures */
};

/* Is it an event of a peer? Of a transfer otherwise. */
static inline bool kvt_event_is_of_peer(enum kvt_event_kind kind)
{
    return kind == KVT_CONNECTED || kind == KVT_PEER_LOST || kind == KVT_PEER_QUIET ||
           kind == KVT_PEER_HEARD;
}

struct kvt_options {
    struct kv_layout layout;
    const struct dev_mem *mem;  /* the pool, DEVICE_MEM_SHARED; borrowed until kvt_free */
    struct device *device;      /* the pool's; borrowed likewise. Needed for a pool in GPU memory */
    const char *protocols;      /* allowed, comma list: "ipc,tcp" ("mem" for tests), in any order */
    bool named;                 /* the operator listed them: warn about one that this host lacks */
    const char *listen_host;    /* for transports that listen */
    uint16_t port;              /* tcp listener; 0: any free one */
    const char *advertise_host; /* address peers should use; NULL: listen_host */
    bool checksum;              /* compute and verify them; off on either side turns them off */
    uint32_t n_transfers;       /* most at once, each direction */
    uint32_t stall_ms;          /* a transfer that moves nothing for so long fails; 0: 10,000 */
    uint32_t deadline_ms;       /* a transfer that takes longer fails; 0: 600,000 */
    struct kvt_tuning tuning;   /* zeros: choose everything */
    struct metrics *metrics;
    void (*on_event)(void *arg, const struct kvt_event *ev);
    void *arg;
};

/* ERR_UNSUPPORTED: a protocol is not built in or does not exist, by name; ERR_CONFIG: port
 * taken. */
enum status kvt_create(const struct kvt_options *o, struct kvt **out, struct err *err) MUST_CHECK;
/* Ends all transfers without events, closes connections, joins the thread. Leaves no files. */
void kvt_free(struct kvt *k);
/* Port of the tcp listener; without tcp, of the first transport that listens; 0: none does. */
uint16_t kvt_port(const struct kvt *k);
/* Appends the protocols that are allowed and work on this host: "ipc,rdma". */
void kvt_available(const struct kvt *k, struct buf *out);
/* Which peers can be reached: appends the transports that work between hosts, "rdma,tcp", and
 * returns a number that is equal on processes which the others (ipc) connect, 0 without such. */
uint64_t kvt_reach(const struct kvt *k, struct buf *between_hosts);

/* Opaque byte strings, appended to `out`. Peers may differ in block size, element type and
 * tensor-parallel size: the sender converts, and heads that both ranks hold can be granted.
 * kvt_answer and kvt_connect refuse a peer with one sentence: ERR_PEER_MISMATCH (another release,
 * another model, no common head, values that would lose precision without tuning.lossy on either
 * side, an answer for another hello), ERR_UNSUPPORTED (no common transport; a piece too large to
 * convert), ERR_FORMAT, ERR_FULL. */
void kvt_hello(const struct kvt *k, struct buf *out);
enum status kvt_answer(struct kvt *k, struct str hello, struct buf *out,
                       struct err *err) MUST_CHECK;
enum status kvt_connect(struct kvt *k, struct str answer, uint64_t *peer,
                        struct err *err) MUST_CHECK;
void kvt_disconnect(struct kvt *k, uint64_t peer);

/* Receiver. blocks[n_blocks] will hold tokens [0, n_tokens) of the prompt in order; the first
 * n_skip are already valid and are not written. Appends the grant to `out`. ERR_FULL: too many
 * transfers. n_skip == n_blocks is legal: no KV moves, only the proof. */
enum status kvt_expect(struct kvt *k, uint64_t id, const int32_t *blocks, uint32_t n_blocks,
                       uint32_t n_skip, uint32_t n_tokens, struct buf *out) MUST_CHECK;
/* As kvt_expect for heads [first_head, first_head + n_heads) of this pool: the grant for one of
 * several senders, if peers differ in tensor-parallel size. Each part is a separate transfer with
 * its own id; together they cover all heads. A sender without the granted heads refuses the grant
 * (ERR_PEER_MISMATCH). */
enum status kvt_expect_heads(struct kvt *k, uint64_t id, uint32_t first_head, uint32_t n_heads,
                             const int32_t *blocks, uint32_t n_blocks, uint32_t n_skip,
                             uint32_t n_tokens, struct buf *out) MUST_CHECK;
void kvt_expect_cancel(struct kvt *k, uint64_t id);

/* Sender. */
enum status kvt_send_open(struct kvt *k, uint64_t id, uint64_t peer, struct str grant,
                          struct err *err) MUST_CHECK;
/* As kvt_send_open for one of several transfers of the same tokens, to receivers that hold other
 * heads: each has its own id and end. kvt_send_ready, kvt_send_finish and kvt_send_cancel name `of`
 * and are for all of them. */
enum status kvt_send_open_of(struct kvt *k, uint64_t id, uint64_t of, uint64_t peer,
                             struct str grant, struct err *err) MUST_CHECK;
/* Tokens [begin, end) of `layer` are in the caller's pool, in blocks[0 .. (end-1)/block_tokens]
 * (the sequence's table from its first token; copied as far as needed). The caller keeps the blocks
 * until SENT / SEND_FAILED, and passes the ranges of a layer in order. */
enum status kvt_send_ready(struct kvt *k, uint64_t id, uint32_t layer, uint32_t begin, uint32_t end,
                           const int32_t *blocks) MUST_CHECK;
/* As kvt_send_ready for tokens that are complete after `event` of options.device
 * (device_record_event; 0: they are complete now). Later ranges of a layer have later events. */
enum status kvt_send_ready_after(struct kvt *k, uint64_t id, uint32_t layer, uint32_t begin,
                                 uint32_t end, const int32_t *blocks, uint64_t event) MUST_CHECK;
void kvt_send_finish(struct kvt *k, uint64_t id);
/* As kvt_send_finish while another thread may still be announcing the last tokens: the transfer
 * ends once they are there, or fails when none comes for stall_ms. */
void kvt_send_finish_when_complete(struct kvt *k, uint64_t id);
/* SEND_FAILED(ERR_CANCELED) follows unless the transfer has ended. */
void kvt_send_cancel(struct kvt *k, uint64_t id);

#endif
