/* session.h - one transfer on each side: its states, and what moves it from one to the next. Every
 * transport shares this code.
 *
 * The sender pushes: it opens a granted session (OPEN), puts pieces, announces them with their
 * checksums (NOTE), and ends with FINISH. The receiver verifies every piece and answers DONE.
 * docs/kv-transfer.md, "States of a transfer", has the diagram and the invariants.
 *
 * Life cycle: kvt_core_init, sessions, kvt_core_release; one kvt_core per kvt.
 * Thread: transfer, except kvt_recv_claim and kvt_send_create (any). */
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
    /* Bytes of one put: enough to amortise its cost, and they stay in cache for the checksum. */
    KVT_PUT_BYTES = 1 << 20,
    /* The same between GPUs, where no CPU touches the bytes: 60 us within one GPU, more than the
     * host takes for a put; 300 us of NVLink, 2.5 ms of PCIe. The first put of a transfer is small,
     * so that the GPU begins while the host plans the second. */
    KVT_DEVICE_PUT_BYTES = 128 << 20,
    KVT_DEVICE_FIRST_PUT_BYTES = 32 << 20,
    /* Bytes of frames on their way into a pool in GPU memory: 32 of 1 MiB, 30 us of PCIe each. */
    KVT_RECV_STAGING_BYTES = 32 << 20,
    /* Bytes that a receiving GPU verifies at once, 7 us; fewer when FINISH has come. So the GPU is
     * not called for every layer of a short prompt. */
    KVT_CHECK_BYTES = 32 << 20,
    /* Puts of one session in flight: at least 32 MiB, more than any link holds (100 GB/s over
     * 200 us is 20 MB). */
    KVT_SEND_PUTS = 32,
    /* A sender waits so long for OPENED and DONE, or stall_ms if that is less. */
    KVT_ANSWER_MS = 5000,
    /* A transfer with bytes on their way fails when its connection has taken none of any transfer
     * for so long, or for stall_ms if that is less: the path is broken, whatever the links between
     * the nodes say. LIMIT: a path that needs longer for KVT_PUT_BYTES (3 Mbit/s) is called
     * broken. */
    KVT_MOVE_MS = 3000,
    /* KVT_PEER_QUIET after four times as long without a sign as this peer has needed lately, but
     * between these two, and a quarter of stall_ms at most. The longer one is a new peer's: so
     * slow is a receiver that is busy, or whose GPU is. It is also that of KVT_CAP_HEALS. The
     * shorter one keeps more prompts off a broken path. */
    KVT_QUIET_MAX_MS = 2000,
    KVT_QUIET_MIN_MS = 500,
    /* What a peer has needed is forgotten by an eighth in so long, with its next answer. */
    KVT_SLOW_FORGET_MS = 250,
    KVT_FENCED_RING = 4096, /* ids remembered, see kvt_core.fenced */
    /* An unanswered STOP is repeated after this time, then after twice as long, and so on. */
    KVT_STOP_AGAIN_MS = 1000,
    /* A wrong checksum counts if STOPPED has not explained it by then; STOPPED waits for the last
     * put. */
    KVT_DOUBT_MS = 3000,
    /* A writer that has not answered STOP by then loses its connection, if that is a fence. */
    KVT_FENCE_TEARDOWN_MS = 1000
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
     * it). CLAIMED → OPEN is a release store, so that the transfer thread's acquire load sees the
     * fields. Only the transfer thread makes the later changes. */
    _Atomic uint32_t state;
    uint32_t session; /* index of the slot */
    uint64_t id, generation;
    struct kvt_head_slice slice; /* of the pool: the granted heads */
    int32_t *blocks;
    uint32_t n_layers; /* expected: without the draft layer if the sender has none */
    uint32_t n_used, n_first, n_tokens; /* positions [n_first, n_used) are expected */
    uint32_t *arrived, *verified;       /* per layer: positions below are in place / verified */
    uint64_t n_left;                    /* pieces not verified yet, all layers */
    struct kvt_peer *peer;              /* BOUND, FENCING: the writer */
    struct list link;                   /* in peer->recvs */
    uint64_t bytes, t_begin_ns, t_moved_ms, t_fence_ms, deadline_ms;
    uint32_t n_stops;        /* FENCING: STOPs sent */
    uint64_t t_wrong_sum_ms; /* BOUND: time of the first wrong checksum; 0: none */
    uint32_t wrong_sum_layer, wrong_sum_block; /* its piece */
    bool moved; /* t_begin_ns is the time of the first byte, not the grant */
    bool sums;  /* every NOTE carries checksums, which are verified */
    /* GPU jobs: frames being copied into the pool, NOTEs being verified, with `check` */
    uint32_t n_stores, n_checks;
    struct kvt_gpu_job *check; /* collects NOTEs, has not begun; NULL: none */
    uint64_t check_bytes;      /* of its NOTEs */
    bool finishes;             /* FINISH came before they were done ... */
    uint64_t finish_bytes;     /* ... with this total */
};

enum kvt_send_state { KVT_SEND_OPENING, KVT_SEND_ACTIVE, KVT_SEND_FINISHING, KVT_SEND_STOPPING };

/* A put in flight, or prepared and not accepted yet. */
struct kvt_batch {
    struct kvt_block_range range;
    uint32_t more_layers;    /* the same positions of as many layers after range.layer */
    struct kvt_stage stage;  /* its converted or copied bytes; n == 0: they are in the pool */
    struct kvt_gpu_job *job; /* copies them from the GPU or has their checksums; NULL: none */
    /* Of a put from pool to pool with checksums: what its GPU reads and writes until PUT_DONE. */
    struct kvt_put_sums on_device;
};

/* A put whose NOTE was not sent yet. */
struct kvt_due_note {
    struct kvt_note_range range;
    struct kvt_gpu_job *job; /* has or computes the checksums; NULL: kvt_send.note has them */
};

struct kvt_send {
    enum kvt_send_state state;
    uint64_t id, of, peer_handle; /* of: as kvt_send_open_of names it; id if it is alone */
    struct kvt_send *next_of;     /* another one of the same `of`, or NULL */
    uint64_t serial; /* of this session in this kvt; a put's tag is serial * KVT_SEND_PUTS + i */
    struct kvt_peer *peer;
    struct list link; /* in peer->sends */
    uint32_t session;
    uint64_t generation;
    /* Of the grant: heads of the model, the receiver's block size. */
    uint32_t first_head, n_heads, block_tokens;
    struct kvt_head_slice src, dst;     /* of both pools, from kvt_send_begin on */
    uint32_t n_layers;                  /* that both pools have, likewise */
    bool direct;                        /* bytes go from pool to pool without conversion */
    uint32_t n_used, n_first, n_tokens; /* positions in the receiver's blocks */
    uint32_t n_src;                     /* own blocks that hold n_tokens */
    int32_t *dst_blocks, *src_blocks;   /* n_used and n_src of them */
    uint32_t *tokens, *cursor;          /* per layer: tokens ready, next position to put */
    uint64_t *events;                   /* per layer: of the ready tokens */
    uint32_t *queue;                    /* layers with something to put, FIFO */
    uint8_t *queued;                    /* per layer */
    uint32_t q_head, q_len;
    uint64_t n_left; /* pieces not put yet, all layers */
    struct kvt_batch puts[KVT_SEND_PUTS];
    uint32_t unfinished;       /* bit i: puts[i] has no PUT_DONE yet */
    struct kvt_batch prepared; /* not accepted by the transport yet; range.n == 0: none */
    struct kvt_due_note notes[KVT_SEND_PUTS]; /* ring, in the order of the puts */
    uint32_t first_note, n_notes;
    bool finish, sums;       /* sums: NOTEs carry checksums */
    bool awaits_rest;        /* with `finish`: tokens may still be announced */
    bool device_failed;      /* the pool's device: the next pump ends the session */
    struct kvt_message note; /* the next one, with the checksums that the CPU computed */
    uint64_t bytes, t_first_ns, t_finish_ns, t_moved_ms, deadline_ms;
    uint64_t t_busy_ns, busy_ns; /* since when a put is in flight; the sum of earlier such times */
    enum status status;          /* STOPPING: why */
    char text[160];
};

/* A connection as sessions see it. */
struct kvt_peer {
    struct list link;
    struct kvt_conn *conn;               /* NULL between two attempts to connect */
    const struct kvt_transport_ops *ops; /* of conn; kept when conn is gone */
    uint64_t handle;                     /* of kvt_connect; 0: incoming */
    struct kv_layout layout;             /* theirs; outgoing only */
    bool checksum;                       /* outgoing: both sides want checksums */
    uint32_t staging_chunks;             /* outgoing: chunks of staging memory that its puts hold */
    uint32_t recv_chunks;                /* incoming: chunks of recv_staging that its frame holds */
    /* Incoming: stage of the frame being read; n == 0: none, or it goes into the pool. */
    struct kvt_stage frame;
    bool up, lost;       /* lost: DOWN was seen */
    bool must_close;     /* disconnect it: it answers nothing, or breaks the protocol */
    uint64_t t_moved_ms; /* outgoing: when a put of any session was over */
    uint64_t t_heard_ms; /* outgoing: that, or when a message came */
    uint32_t slow_ms;    /* outgoing: as long as an answer of it or a put has taken lately ... */
    uint64_t t_slow_ms;  /* ... and when it was last made less */
    bool quiet;          /* outgoing: KVT_PEER_QUIET was told */
    struct list sends, recvs;
    struct kvt_route *route; /* progress.c: what is left to try while connecting */
};

/* What sessions share: one per kvt. */
struct kvt_core {
    struct kv_layout layout;
    char *pool;
    bool checksum;
    bool lossy;                                 /* a peer may hold less precise values */
    struct kvt_gpu_jobs *send_jobs, *recv_jobs; /* of a pool in GPU memory; NULL: in host memory */
    /* With `recv_jobs`: receives frames of transports that scatter; NULL: there is none. */
    struct kvt_staging *recv_staging;
    struct kvt_staging *staging; /* NULL: cannot serve peers of another layout (some tests) */
    uint32_t stall_ms, n_transfers, n_slots;
    uint64_t deadline_ms;   /* longest life of a transfer */
    struct kvt_recv *slots; /* n_slots: twice n_transfers, because some may be quarantined */
    _Atomic uint64_t next_generation, next_serial;
    _Atomic uint32_t n_recvs, n_sends; /* live; relaxed: limits, not order */
    struct map sends;                  /* kvt_send.of → the first struct kvt_send of it */
    /* Ring of ids that had FENCED, so that a late cancel gives no second one. */
    uint64_t *fenced;
    size_t n_fenced;
    struct kvt_copy *copies;
    struct kvt_sums *put_sums; /* of the put being made */
    void *scratch;
    struct kvt_stats *stats;
    void (*on_event)(void *arg, const struct kvt_event *ev);
    void *arg;
};

void kvt_core_init(struct kvt_core *c, const struct kvt_options *o);
void kvt_core_release(struct kvt_core *c);
void kvt_core_event(struct kvt_core *c, struct kvt_event ev);
void kvt_peer_init(struct kvt_peer *p);
/* Sends a message to the peer. A connection that cannot take it is marked for close. */
void kvt_peer_send(struct kvt_peer *p, enum kvt_message_kind kind, uint32_t session,
                   uint64_t generation, uint64_t bytes, enum status st);

/* What a receiver expects: tokens [0, n_tokens) of its heads [first_head, first_head + n_heads) in
 * these blocks (kvtransfer.h, kvt_expect_heads). */
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
/* Collects completed receive jobs: verifies their NOTEs, releases their stages. */
void kvt_recv_collect(struct kvt_core *c);

/* Tokens [begin, end) of a layer, complete after `event` of the pool's device. */
struct kvt_token_range {
    uint32_t layer, begin, end;
    uint64_t event;
};

/* Sender. create runs on any thread. ERR_FULL, ERR_NOMEM, ERR_FORMAT (grant). */
enum status kvt_send_create(struct kvt_core *c, uint64_t id, uint64_t of, uint64_t peer,
                            struct str grant, struct kvt_send **out, struct err *err) MUST_CHECK;
void kvt_send_free(struct kvt_core *c, struct kvt_send *s);
/* Takes ownership of s. `p` is NULL if there is no such connection. */
void kvt_send_begin(struct kvt_core *c, struct kvt_send *s, struct kvt_peer *p);
/* add, end and cancel are for all sends of `of`. end: with `awaits_rest` once all tokens were
 * added, else they were. */
void kvt_send_add(struct kvt_core *c, uint64_t of, const struct kvt_token_range *range,
                  const int32_t *blocks);
void kvt_send_end(struct kvt_core *c, uint64_t of, uint64_t now_ns, bool awaits_rest);
void kvt_send_cancel_of(struct kvt_core *c, uint64_t of);
void kvt_send_fail(struct kvt_core *c, struct kvt_send *s, enum status st, const char *text);
/* OPENED, DONE, STOP. */
void kvt_send_message(struct kvt_core *c, struct kvt_peer *p, const struct kvt_message *m);
void kvt_send_put_done(struct kvt_core *c, struct kvt_peer *p, uint64_t tag);
/* Ends all sends of a connection that is lost or about to close. */
void kvt_send_peer_lost(struct kvt_core *c, struct kvt_peer *p, enum status st, const char *text);
/* Puts at most one batch of each session of `p`; true if more can be put at once. */
bool kvt_send_pump(struct kvt_core *c, struct kvt_peer *p);
void kvt_send_tick(struct kvt_core *c, struct kvt_peer *p, uint64_t now_ms);
/* This process was stopped until now: its peers' answers are still unread. */
void kvt_send_wait_again(struct kvt_peer *p, uint64_t now_ms);

#endif
