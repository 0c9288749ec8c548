/* kvtransfer.h - moving KV blocks from one node's pool into another's.
 *
 * A `struct kvt` is one node's side: its pool's memory, its transfer thread, its connections. It
 * knows addresses and a KV layout, never models, requests or text. The control plane
 * (shared/cluster) carries the opaque byte strings below.
 *
 * Connecting (the sender pushes, so the sender connects):
 *     sender   kvt_hello     ─ bytes ─▶ receiver  kvt_answer   checks version, layout, dtype, rank; makes a one-time ticket
 *     sender   kvt_connect   ◀─ bytes ─           chooses the first allowed transport that reaches; presents the ticket
 *              CONNECTED or PEER_LOST
 * One transfer:
 *     receiver kvt_expect(id, blocks) → grant bytes (session, generation, blocks)      state OPEN
 *     sender   kvt_send_open(id, peer, grant)
 *              kvt_send_ready(id, layer, tokens ...) per finished layer and chunk      bytes move
 *              kvt_send_finish(id)                                                     completion
 *                                                                                      with
 *                                                                                      checksums
 *     receiver verifies every (layer, block): RECEIVED, or RECEIVE_FAILED state DONE / FAILED
 *     sender   SENT: the receiver has acknowledged; source blocks may be reused
 * Cancelling: kvt_expect_cancel → FENCED once no write of the peer can land in those blocks any
 * more (acknowledged by the writer, connection torn down and drained, or the writer's process has
 * ended). Until FENCED the blocks must not be reused.
 *
 * Invariants 1 Bytes land only inside the blocks of a live grant of the right generation; anything
 *  late or foreign lands nowhere. 2 RECEIVED is reported only after every valid byte of every block
 *  not skipped is in place and its checksum agreed. 3 Every accepted id ends in exactly one of
 *  RECEIVED / RECEIVE_FAILED and, after kvt_expect_cancel or RECEIVE_FAILED, one FENCED;
 *    every sent id in exactly one of SENT / SEND_FAILED.
 *  4 A protocol that options.protocols does not name is never used.
 *
 * Thread: all functions may be called from any thread and never block (they post to the transfer
 * thread); events are delivered by options.on_event on the transfer thread, which must only pass
 * them on. */
#ifndef BATON_KVTRANSFER_KVTRANSFER_H
#define BATON_KVTRANSFER_KVTRANSFER_H

#include "kernels/device.h"
#include "kvtransfer/tuning.h"
#include "shared/base/buf.h"
#include "shared/base/err.h"
#include "shared/base/metrics.h"
#include "shared/kv/kv_layout.h"

struct kvt;

enum kvt_event_kind {
    KVT_CONNECTED,      /* peer: ready to send to */
    KVT_PEER_LOST,      /* peer: connection ended; its sends have failed */
    KVT_RECEIVED,       /* id */
    KVT_RECEIVE_FAILED, /* id, status; cancelled implicitly: FENCED follows */
    KVT_FENCED,         /* id: blocks may be reused */
    KVT_SENT,           /* id */
    KVT_SEND_FAILED     /* id, status: source blocks are not read any more */
};

struct kvt_event {
    enum kvt_event_kind kind;
    uint64_t id;   /* of the transfer, as the caller named it */
    uint64_t peer; /* CONNECTED, PEER_LOST: handle from kvt_connect */
    enum status status;
    const char *transport; /* name of the row that carried it; static */
    uint64_t bytes;        /* RECEIVED, SENT: KV bytes moved */
    uint64_t ns;           /* RECEIVED: first byte (or grant) to verified; SENT: first
                            * push to acknowledged */
    uint64_t busy_ns;      /* SENT: of ns, while bytes were under way; the rest waited for
                            * compute or for the acknowledgement */
    uint64_t tail_ns;      /* SENT: kvt_send_finish to acknowledged: what did not overlap
                            * with compute */
    uint64_t link_speed;   /* CONNECTED, SENT, RECEIVED: bytes per second of the link; 0:
                            * not known */
    char text[160];        /* a sentence for failures */
};

struct kvt_options {
    struct kv_layout layout;
    const struct dev_mem *mem;  /* the pool, DEVICE_MEM_SHARED; borrowed until kvt_free */
    struct device *device;      /* the pool's; borrowed likewise. Needed when the pool is in
                                 * a card's memory */
    const char *protocols;      /* allowed, comma list: "ipc,tcp" ("mem" for tests); the
                                 * order does not matter */
    bool named;                 /* the operator listed them: one that this host lacks is a
                                 * warning */
    const char *listen_host;    /* for transports that listen */
    uint16_t port;              /* tcp listener; 0: any free one */
    const char *advertise_host; /* address peers should use; NULL: listen_host */
    bool checksum;              /* make and verify them; off on either side: neither side
                                 * makes any */
    uint32_t n_transfers;       /* most at once, each direction */
    uint32_t stall_ms;          /* a transfer that moves nothing for this long fails
                                 * (default 10,000 when 0) */
    uint32_t deadline_ms;       /* a transfer that is not over after this long fails
                                 * (default 600,000 when 0) */
    struct kvt_tuning tuning;   /* zeros: choose everything */
    struct metrics *metrics;
    void (*on_event)(void *arg, const struct kvt_event *ev);
    void *arg;
};

/* ERR_UNSUPPORTED: a protocol is not built in or does not exist, by name; ERR_CONFIG: port
 * taken. */
enum status kvt_create(const struct kvt_options *o, struct kvt **out, struct err *err) MUST_CHECK;
/* Ends all transfers without events, closes connections, joins the thread. Nothing remains in the
 * file system. */
void kvt_free(struct kvt *k);
/* Of the tcp listener; without that row the first that listens; 0: none does. */
uint16_t kvt_port(const struct kvt *k);
/* Append the protocols that were allowed and work on this host: "ipc,rdma". */
void kvt_available(const struct kvt *k, struct buf *out);

/* Opaque byte strings; appended to `out`. Peers may differ in block size, element type and
 * tensor-parallel size: the sender converts, and what both ranks hold of the heads can be granted.
 * kvt_answer and kvt_connect refuse what does not fit with one sentence: ERR_PEER_MISMATCH (another
 * release, another model, no head in common, values that would be narrowed without tuning.lossy on
 * either side, an answer made for another asker), ERR_UNSUPPORTED (no transport in common; a piece
 * too large to convert), ERR_FORMAT, ERR_FULL. */
void kvt_hello(const struct kvt *k, struct buf *out);
enum status kvt_answer(struct kvt *k, struct str hello, struct buf *out,
                       struct err *err) MUST_CHECK;
enum status kvt_connect(struct kvt *k, struct str answer, uint64_t *peer,
                        struct err *err) MUST_CHECK;
void kvt_disconnect(struct kvt *k, uint64_t peer);

/* Receiver. blocks[n_blocks] hold tokens 0..n_tokens of the prompt in order; the first n_skip are
 * already valid and are not written. The grant is appended to `out`. ERR_FULL: too many transfers.
 * n_skip == n_blocks is legal: nothing moves, only the proof. */
enum status kvt_expect(struct kvt *k, uint64_t id, const int32_t *blocks, uint32_t n_blocks,
                       uint32_t n_skip, uint32_t n_tokens, struct buf *out) MUST_CHECK;
/* As kvt_expect for a part of the heads, [first_head, first_head + n_heads) of this pool's: the
 * grant of one sender of several, when peers differ in tensor-parallel size. Every part is a
 * transfer of its own with an id of its own; together they cover all heads. A sender that does not
 * hold the granted heads refuses the grant (ERR_PEER_MISMATCH); kvt_common_heads says which ones a
 * sender holds. */
enum status kvt_expect_heads(struct kvt *k, uint64_t id, uint32_t first_head, uint32_t n_heads,
                             const int32_t *blocks, uint32_t n_blocks, uint32_t n_skip,
                             uint32_t n_tokens, struct buf *out) MUST_CHECK;
void kvt_expect_cancel(struct kvt *k, uint64_t id);
/* Heads of this pool, numbered as kvt_expect_heads takes them, that the sender of `hello` holds as
 * well. ERR_FORMAT, ERR_PEER_MISMATCH. */
enum status kvt_common_heads(const struct kvt *k, struct str hello, uint32_t *first_head,
                             uint32_t *n_heads, struct err *err) MUST_CHECK;

/* Sender. */
enum status kvt_send_open(struct kvt *k, uint64_t id, uint64_t peer, struct str grant,
                          struct err *err) MUST_CHECK;
/* Tokens [begin, end) of `layer` are in the caller's pool, in blocks[0 .. (end-1)/block_tokens]
 * (the sequence's table from its first token; copied as far as needed). The blocks stay valid until
 * SENT / SEND_FAILED. Ranges of one layer come in order. */
enum status kvt_send_ready(struct kvt *k, uint64_t id, uint32_t layer, uint32_t begin, uint32_t end,
                           const int32_t *blocks) MUST_CHECK;
/* As kvt_send_ready, of tokens that are there when options.device has come to `event`
 * (device_record_event; 0: they are there). Later ranges of a layer have later marks. */
enum status kvt_send_ready_after(struct kvt *k, uint64_t id, uint32_t layer, uint32_t begin,
                                 uint32_t end, const int32_t *blocks, uint64_t event) MUST_CHECK;
void kvt_send_finish(struct kvt *k, uint64_t id);
void kvt_send_cancel(struct kvt *k, uint64_t id); /* SEND_FAILED(ERR_CANCELED) follows unless
                                                   * it ended already */

/* Name of the transport a peer is connected by, or NULL. */
const char *kvt_peer_transport(struct kvt *k, uint64_t peer);

#endif
