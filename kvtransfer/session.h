/* session.h - one transfer on each side: its states, and what moves it from one to the next. The
 * same for every transport.
 *
 *   sender                                               receiver
 *   (kvt_send_open)                                      (kvt_expect)
 *      │ OPEN ────────────────────────────────────────▶     OPEN
 *   OPENING                                                 │ kvt_recv_open: generation agrees, nobody has it
 *      │ kvt_send_opened  ◀──────────────────── OPENED ──   │
 *   ACTIVE                                                BOUND to that connection
 *      │ kvt_send_pump: put, NOTE(checksums) ... ─────▶     │ kvt_recv_note: in order, verified piece by piece
 *      │ after kvt_send_finish, no put unfinished: FINISH ▶ │ kvt_recv_finish: nothing missing → RECEIVED, slot FREE
 *   FINISHING ◀──────────────────────────────── DONE ──
 *      │ kvt_send_done → SENT, freed
 *
 *   Any failure of the sender:   abandon puts; STOPPING until none is unfinished; STOPPED ──▶; SEND_FAILED, freed
 *   Any failure of the receiver: RECEIVE_FAILED; STOP ──▶; FENCING until one of these, then FENCED, slot FREE:
 *        nobody was bound | the transport places bytes itself | STOPPED or BYE came | the
 *        transport's fence() is OK
 *   A sender answers every STOP with STOPPED, also of sessions it does not know; a receiver repeats
 *   a STOP that is not answered.
 *
 * Invariants 1 A put leaves only after OPENED: the receiver knows every connection that may write
 *  into a grant, so a grant that is
 *    cancelled before OPEN needs no fence, and one that comes late is refused (generation).
 *  2 Pieces of a layer are announced and verified in order of position, each once; verified <=
 *  landed. 3 A slot is FREE again only when no write of its writer can land in its blocks. 4 SENT
 *  and SEND_FAILED come only when no put of the session is unfinished. 5 Generations are never
 *  repeated by one kvt and begin at a random number: those of an earlier process do not match. 6
 *  FINISH leaves only when no put of the session is unfinished, so that none of the bytes it
 *  vouches for can be abandoned behind it. 7 A sender that gives up leaves out what its puts had
 *  not copied yet, and the NOTE behind them may be read before its STOPPED: so a wrong
 *    checksum is a doubt first. FINISH, or KVT_DOUBT_MS, make it a failure; nothing is verified,
 *    and RECEIVED cannot come, from then on.
 *  8 A session has at most KVT_SEND_PUTS puts under way and a peer its share of the staging memory:
 *    whoever does not read holds up itself alone.
 *  9 Of a pool in a card's memory the card makes the checksums, the copies and the pieces of other
 *    layouts (gpu_jobs.h): a NOTE of the sender waits for its sums, the receiver's RECEIVED for its
 *    own; a row that moves the processor's memory puts from a stage that was fetched, and what it
 *    receives is on its way into the pool from a stage when its slot is FREE only once that copy is
 *    over. The order of puts, NOTEs and FINISH is the same.
 * Thread: transfer, except kvt_recv_claim (any). */
#ifndef BATON_KVTRANSFER_SESSION_H
#define BATON_KVTRANSFER_SESSION_H

#include <stdatomic.h>

#include "kvtransfer/gpu_jobs.h"
#include "kvtransfer/kvtransfer.h"
#include "kvtransfer/plan.h"
#include "kvtransfer/staging.h"
#include "kvtransfer/stats.h"
#include "kvtransfer/transport.h"
#include "shared/base/list.h"
#include "shared/base/map.h"

enum {
    KVT_PUT_BYTES = 1 << 20, /* of one put: large enough to forget per-put costs, small enough
                              * to stay in cache for its checksum */
    KVT_DEVICE_PUT_BYTES = 8 << 20, /* of one between cards, whose bytes no processor touches: some
                                     * 20 us of NVLink, 150 us of PCIe */
    KVT_RECV_STAGING_BYTES = 32 << 20, /* of frames on their way into a pool in a card's memory: 32
                                        * of 1 MiB, 30 us of PCIe each */
    KVT_SEND_PUTS = 32,          /* of one session without PUT_DONE: 32 MiB or more, more than any
                                  * link holds (100 GB/s over 200 us is 20 MB) */
    KVT_ANSWER_MS = 5000,        /* OPEN and FINISH are round trips: a sender waits so long for
                                  * OPENED and DONE, or stall_ms when that is less */
    KVT_FENCED_RING = 4096,      /* ids remembered, see kvt_core.fenced */
    KVT_STOP_AGAIN_MS = 1000,    /* a STOP without answer is repeated after so long, then after
                                  * twice as long, and so on */
    KVT_DOUBT_MS = 3000,         /* a wrong checksum counts when nothing else has explained it by
                                  * then: STOPPED waits for the last put */
    KVT_FENCE_TEARDOWN_MS = 1000 /* a writer that has not answered STOP by then loses its
                                  * connection, where that is a fence */
};

enum kvt_recv_state {
    KVT_RECV_FREE,
    KVT_RECV_CLAIMED,
    KVT_RECV_OPEN,
    KVT_RECV_BOUND,
    KVT_RECV_FENCING
};

struct kvt_recv {
    /* FREE → CLAIMED by compare-and-swap on any thread (acquire: the slot's last user is done with
     * it); CLAIMED → OPEN is a release store, so that the transfer thread's acquire load sees the
     * fields; everything after is the transfer thread's alone. */
    _Atomic uint32_t state;
    uint32_t session; /* index of the slot */
    uint64_t id, generation;
    struct kvt_head_slice slice; /* of the pool: the heads that were granted */
    int32_t *blocks;
    uint32_t n_used, n_first, n_tokens; /* positions [n_first, n_used) are to come */
    uint32_t *arrived, *verified;       /* per layer: positions below are in place /
                                         * agreed */
    uint64_t n_left;                    /* pieces not verified yet, all layers */
    struct kvt_peer *peer;              /* BOUND, FENCING: the writer */
    struct list link;                   /* in peer->recvs */
    uint64_t bytes, t_begin_ns, t_moved_ms, t_fence_ms, deadline_ms;
    uint32_t n_stops;                  /* FENCING: STOP was said so often */
    uint64_t t_doubt_ms;               /* BOUND: when the first wrong checksum was seen; 0:
                                        * none was */
    uint32_t doubt_layer, doubt_block; /* where */
    bool moved;                        /* t_begin_ns is that of the first byte, not of the grant */
    bool sums;                         /* every NOTE carries checksums, and they are verified */
    uint32_t n_stores, n_checks;       /* works under way: frames on their way into the pool,
                                        * NOTEs being verified */
    bool finishes;                     /* FINISH came before they were over ... */
    uint64_t finish_bytes;             /* ... and said this */
};

enum kvt_send_state { KVT_SEND_OPENING, KVT_SEND_ACTIVE, KVT_SEND_FINISHING, KVT_SEND_STOPPING };

/* A put under way, or made and not taken yet. */
struct kvt_batch {
    struct kvt_block_range range;
    struct kvt_stage stage;  /* where its bytes were made; n == 0: they lie in the pool */
    struct kvt_gpu_job *job; /* that fetches them from a card, or makes their checksums there;
                              * NULL: none */
};

struct kvt_send {
    enum kvt_send_state state;
    uint64_t id, peer_handle;
    uint64_t serial; /* of this session in this kvt; a put's tag is serial *
                      * KVT_SEND_PUTS + its place in `puts` */
    struct kvt_peer *peer;
    struct list link; /* in peer->sends */
    uint32_t session;
    uint64_t generation;
    uint32_t first_head, n_heads, block_tokens; /* as granted: heads of the model, the
                                                 * receiver's block size */
    struct kvt_head_slice src, dst;             /* of both pools, from kvt_send_begin on */
    bool direct;                                /* bytes go from pool to pool, nothing is
                                                 * converted */
    uint32_t n_used, n_first, n_tokens;         /* positions: the receiver's blocks */
    uint32_t n_src;                             /* own blocks that hold n_tokens */
    int32_t *dst_blocks, *src_blocks;           /* n_used and n_src of them */
    uint32_t *tokens, *cursor;                  /* per layer: tokens ready, next position to put */
    uint64_t *events;                           /* per layer: of the tokens that are ready */
    uint32_t *queue;                            /* layers with something to put, in order of
                                                 * arrival */
    uint8_t *queued;                            /* per layer */
    uint32_t q_head, q_len;
    uint64_t n_left; /* pieces not put yet, all layers */
    struct kvt_batch puts[KVT_SEND_PUTS];
    uint32_t unfinished;           /* bit i: puts[i] has no PUT_DONE yet */
    struct kvt_batch prepared;     /* converted, fetched or begun, and not taken by
                                    * the row yet; prepared.range.n == 0: none */
    struct kvt_gpu_job *note_job;  /* makes the checksums of `note`; NULL: they are in
                                    * it */
    bool finish, note_waits, sums; /* sums: NOTEs carry checksums */
    bool device_failed;            /* that holds the pool: the next pump ends the
                                    * session */
    struct kvt_message note;       /* to be sent when note_waits */
    uint64_t bytes, t_first_ns, t_finish_ns, t_moved_ms, deadline_ms;
    uint64_t t_busy_ns, busy_ns; /* since when a put is unfinished; the sum of such
                                  * times that are over */
    enum status status;          /* STOPPING: why */
    char text[160];
};

/* A connection as sessions see it. */
struct kvt_peer {
    struct list link;
    struct kvt_conn *conn;               /* NULL between two attempts to connect */
    const struct kvt_transport_ops *ops; /* of conn; stays when conn is gone */
    uint64_t handle;                     /* of kvt_connect; 0: incoming */
    struct kv_layout layout;             /* theirs; outgoing only */
    bool checksum;                       /* outgoing: both sides want checksums */
    uint32_t staging_chunks;             /* outgoing: chunks of staging memory its puts
                                          * hold */
    uint32_t recv_chunks;                /* incoming: chunks of the inbox its frame holds */
    struct kvt_stage frame; /* incoming: where the frame that is being read lands; n == 0: in
                             * the pool, or there is none */
    bool up, lost;          /* lost: DOWN was seen */
    bool must_close;        /* to be disconnected (does not answer STOP, breaks the
                             * protocol) */
    struct list sends, recvs;
    struct kvt_route *route; /* progress.c: what is left to try while connecting */
};

/* What sessions share: one per kvt. */
struct kvt_core {
    struct kv_layout layout;
    char *pool;
    bool checksum;
    bool lossy;                                 /* a peer may hold less precise values */
    struct kvt_gpu_jobs *send_jobs, *recv_jobs; /* of a pool in a card's memory; NULL: the processor
                                                 * reads the pool */
    struct kvt_staging *recv_staging;           /* with `recv_jobs`: where frames of rows that
                                                 * place bytes land first; NULL: there is no such
                                                 * row */
    struct kvt_staging *staging; /* NULL: peers of another layout cannot be served (tests of
                                  * sessions alone) */
    uint32_t stall_ms, n_transfers, n_slots;
    uint64_t deadline_ms;   /* longest life of a transfer */
    struct kvt_recv *slots; /* n_slots: twice n_transfers, so that quarantined ones do
                             * not stop new transfers */
    _Atomic uint64_t next_generation, next_serial;
    _Atomic uint32_t n_recvs, n_sends; /* live; relaxed: limits, not order */
    struct map sends;                  /* id → struct kvt_send */
    uint64_t *fenced;                  /* ring of ids that had FENCED, so that a late cancel gives
                                        * no second one */
    size_t n_fenced;
    struct kvt_copy *copies;
    void *scratch;
    struct kvt_stats *stats;
    void (*on_event)(void *arg, const struct kvt_event *ev);
    void *arg;
};

void kvt_core_init(struct kvt_core *c, const struct kvt_options *o);
void kvt_core_release(struct kvt_core *c);
void kvt_core_event(struct kvt_core *c, struct kvt_event ev);
void kvt_peer_init(struct kvt_peer *p);
/* A message to the peer; a connection that cannot take it is condemned. */
void kvt_peer_send(struct kvt_peer *p, enum kvt_message_kind kind, uint32_t session,
                   uint64_t generation, uint64_t bytes, enum status st);

/* What a receiver promises: where tokens [0, n_tokens) of its heads [first_head, first_head +
 * n_heads) go (kvtransfer.h, kvt_expect_heads). */
struct kvt_expectation {
    uint64_t id;
    uint32_t first_head, n_heads; /* of this pool's own */
    const int32_t *blocks;
    uint32_t n_blocks, n_skip, n_tokens;
};

/* Receiver. claim: ERR_FULL, ERR_INVALID; the grant is complete when it returns. */
enum status kvt_recv_claim(struct kvt_core *c, const struct kvt_expectation *e,
                           struct buf *grant) MUST_CHECK;
void kvt_recv_cancel(struct kvt_core *c, uint64_t id);
/* OPEN, NOTE, FINISH, STOPPED, BYE. */
void kvt_recv_message(struct kvt_core *c, struct kvt_peer *p, const struct kvt_message *m);
int kvt_recv_scatter(struct kvt_core *c, struct kvt_peer *p, const struct kvt_message *head,
                     uint64_t offset, struct iovec *iov, int cap);
void kvt_recv_scattered(struct kvt_core *c, struct kvt_peer *p, const struct kvt_message *head,
                        uint64_t bytes);
void kvt_recv_peer_lost(struct kvt_core *c, struct kvt_peer *p, enum status st, const char *text);
void kvt_recv_peer_fenced(struct kvt_core *c, struct kvt_peer *p);
void kvt_recv_tick(struct kvt_core *c, uint64_t now_ms);
/* Works of what arrives have landed: NOTEs are verified, stages come back. */
void kvt_recv_collect(struct kvt_core *c);
/* The frame that a connection was reading is over or will not be: its stage comes back. */
void kvt_recv_drop_frame(struct kvt_core *c, struct kvt_peer *p);

/* Tokens [begin, end) of a layer, there when the pool's device has come to `event`. */
struct kvt_token_range {
    uint32_t layer, begin, end;
    uint64_t event;
};

/* Sender. create: any thread; takes nothing; ERR_FULL, ERR_NOMEM, ERR_FORMAT (grant). */
enum status kvt_send_create(struct kvt_core *c, uint64_t id, uint64_t peer, struct str grant,
                            struct kvt_send **out, struct err *err) MUST_CHECK;
void kvt_send_free(struct kvt_core *c, struct kvt_send *s);
/* Takes s. `p` is NULL when there is no such connection. */
void kvt_send_begin(struct kvt_core *c, struct kvt_send *s, struct kvt_peer *p);
void kvt_send_add(struct kvt_core *c, uint64_t id, const struct kvt_token_range *range,
                  const int32_t *blocks);
void kvt_send_end(struct kvt_core *c, uint64_t id, uint64_t now_ns);
void kvt_send_fail(struct kvt_core *c, struct kvt_send *s, enum status st, const char *text);
/* OPENED, DONE, STOP. */
void kvt_send_message(struct kvt_core *c, struct kvt_peer *p, const struct kvt_message *m);
void kvt_send_put_done(struct kvt_core *c, struct kvt_peer *p, uint64_t tag);
/* The connection is gone or about to go: its sends end now. */
void kvt_send_peer_lost(struct kvt_core *c, struct kvt_peer *p, enum status st, const char *text);
/* Put at most one batch of each session of `p`; true when more can go at once. */
bool kvt_send_pump(struct kvt_core *c, struct kvt_peer *p);
void kvt_send_tick(struct kvt_core *c, struct kvt_peer *p, uint64_t now_ms);

#endif
