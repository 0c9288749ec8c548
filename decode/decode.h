/* decode.h - the decode worker: KV that arrives from a prefill node, plus its first token, become a
 * stream of tokens.
 *
 * Life cycle of a generation (decode/decode_seq.h), keyed by (request id, attempt):
 *
 *   RESERVE ─▶ RESERVING ─ blocks ─▶ GRANTED ─ KV verified and first token here ─▶ RUNNING ─ last token ─▶ gone
 *   RUN ─────────────────────────────────────────────────────────────────────────▶ RUNNING
 *   CANCEL, loss of the entry node, failed transfer, at any point ─▶ CLOSING ─ engine let go, writes fenced ─▶ gone
 *
 * It owns no request: what the client asked for is the entry node's affair. Everything an entry
 * holds here is freed when its link is lost. Thread: loop; engine and transfer events are brought
 * to the loop by the node before they get here. */
#ifndef BATON_DECODE_DECODE_H
#define BATON_DECODE_DECODE_H

#include "kvtransfer/kvtransfer.h"
#include "shared/cluster/cluster.h"
#include "shared/engine/engine.h"

struct decode_worker;

struct decode_options {
    struct engine *engine; /* all borrowed until decode_free */
    struct kvt *kvt;       /* NULL: nothing can be received, RESERVE is refused */
    struct cluster *cluster;
    struct metrics *metrics;
    uint32_t max_decode_seqs; /* more are refused as busy */
    uint64_t id_base;         /* engine and kvtransfer ids are id_base + a counter */
};

struct decode_worker *decode_create(const struct decode_options *o);
/* Drops every generation without messages; the engine and kvtransfer are stopped first. */
void decode_free(struct decode_worker *w);

/* True when the message is of a kind this worker handles. */
bool decode_on_message(struct decode_worker *w, const struct cluster_message *m);
/* Events whose id lies in [id_base, id_base + 2^56); `blocks` of RESERVED must be a copy that lives
 * during the call. */
void decode_on_engine(struct decode_worker *w, const struct engine_event *ev);
void decode_on_kvt(struct decode_worker *w, const struct kvt_event *ev);
void decode_on_lost(struct decode_worker *w, uint64_t node);
/* Send the tokens gathered since the last flush: one TOKENS frame per entry node. Called after each
 * batch of engine events. */
void decode_flush(struct decode_worker *w);
uint32_t decode_n_live(const struct decode_worker *w);

#endif
