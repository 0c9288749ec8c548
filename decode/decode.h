/* decode.h - the decode worker: turns the KV and the first token from a prefill node into a stream
 * of tokens.
 *
 * Life cycle of a sequence (decode_seq.h), keyed by entry node, request id and attempt:
 *
 *   RESERVE ─▶ RESERVING ─ blocks ─▶ GRANTING ─ grants of all ranks ─▶ GRANTED
 *           ─ KV verified on all ranks, first token ─▶ RUNNING ─ last token ─▶ gone
 *   RUN ──────────────────────────────────────────────▶ RUNNING
 *   CANCEL, entry node lost, transfer failed ─▶ CLOSING ─ engine done, writes fenced ─▶ gone
 *   RUNNING with a resume key, entry node lost ─▶ PARKED ─ ATTACH ─▶ RUNNING for another entry node
 *                                                        └ time over ─▶ CLOSING
 *
 * Requests belong to entry nodes: when the link to one is lost, what it has here is freed, but for
 * what its clients may come back for (decode_parking.h).
 * Thread: loop; the node posts engine and transfer events to the loop before they get here. */
#ifndef BATON_DECODE_DECODE_H
#define BATON_DECODE_DECODE_H

#include "kvtransfer/kvtransfer.h"
#include "shared/cluster/group.h"
#include "shared/engine/engine.h"

/* A sequence whose KV has come fails when its first token does not within this time: the prefill
 * node sent it before. After it the engine owes the next tokens, and its progress is watched. */
enum { DECODE_FIRST_TOKEN_MS = 3000 };

struct decode_worker;

struct decode_options {
    struct loop *loop; /* all borrowed until decode_free */
    struct engine *engine;
    struct kvt *kvt; /* NULL: RESERVE is refused */
    struct cluster *cluster;
    struct metrics *metrics;
    uint32_t max_decode_seqs;  /* more are refused as busy */
    uint32_t resume_window_ms; /* how long a sequence is parked; 0: none ever is */
    /* Ids of sequences are id_base + multiples of KV_PARTS_MAX; kvtransfer's are those plus the
     * number of the part. */
    uint64_t id_base;
    /* The node's ranks [n_ranks], and where their peers reach them; the first is this process, the
     * others follow it (decode_follow.h). The cluster knows where they are. Copied. */
    const struct group_member *ranks;
    uint32_t n_ranks;
};

struct decode_worker *decode_create(const struct decode_options *o);
/* Drops every sequence without messages. Stop the engine and kvtransfer first. */
void decode_free(struct decode_worker *w);

/* The number of the node's role (node.proto): a RESERVE for another one is given back. While the
 * role settles every RESERVE is: the node has credits of a role before (docs/recovery.md says why).
 * Sequences that are here go on. */
void decode_set_role(struct decode_worker *w, uint32_t role, bool settles);
/* Sequences of a role before whose KV has not come: they hold blocks for prefill nodes. */
uint32_t decode_n_old_grants(const struct decode_worker *w);
/* The node shuts down: gives new sequences back to their entry nodes at once, which place them
 * elsewhere; or takes them again. Those of the entry node `stays`, which knows no other node, stay
 * here; 0: there is none. */
void decode_set_leaving(struct decode_worker *w, bool leaves, uint64_t stays);
/* It shuts down: gives all sequences that it has back as well. */
void decode_hand_back(struct decode_worker *w);
/* Returns whether the message is of a kind that this worker handles. */
bool decode_on_message(struct decode_worker *w, const struct cluster_message *m);
/* For events whose id lies in [id_base, id_base + 2^56), and FETCH and FETCH_OFF of any. `blocks`
 * of RESERVED must stay valid during the call. */
void decode_on_engine(struct decode_worker *w, const struct engine_event *ev);
void decode_on_kvt(struct decode_worker *w, const struct kvt_event *ev);
void decode_on_lost(struct decode_worker *w, uint64_t node);
/* Sends the tokens collected since the last flush, one TOKENS frame per entry node. Call it after
 * each batch of engine events. */
void decode_flush(struct decode_worker *w);
uint32_t decode_n_live(const struct decode_worker *w);
/* Of those, the ones that no entry node waits for. */
uint32_t decode_n_parked(const struct decode_worker *w);

#endif
