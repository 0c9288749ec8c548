/* kv_lend.h - writes KV blocks that this node has into a peer's pool, for a prompt of the peer's.
 *
 *   FETCH ─▶ HOLDING (the engine holds the blocks, from pool and tiers) ─▶ SENDING
 *         ─ all parts of all ranks acknowledged ─▶ gone
 *         └ one failed, the peer or a rank was lost ─▶ CLOSING ─ no part is read any more ─▶ gone
 *   fewer blocks than named, another layout, too many at once ─▶ FETCH_REFUSED, gone
 *
 * The transfers are a prefill node's, with the same connections, fences and checksums, and parts of
 * all ranks (prompt_parts.h); a block has the same number on each. They are held until no rank
 * reads them any more. Thread: loop. Owner: prefill_worker. */
#ifndef BATON_PREFILL_KV_LEND_H
#define BATON_PREFILL_KV_LEND_H

#include "prefill/prompt_parts.h"
#include "shared/base/metrics.h"
#include "shared/engine/engine.h"

enum { KV_LENDS_MAX = 64 };

struct kv_lends {
    struct engine *engine;
    const struct prefill_ranks *ranks; /* the worker's */
    bool broken;                       /* a follower was lost: all are refused */
    struct kv_sender *sender;          /* without kvt all are refused */
    uint64_t id_base, *next_id;        /* the worker's */
    struct map by_id;
    struct list live;
    uint32_t n_live;
    struct counter *lent, *refused;
};

void kv_lends_init(struct kv_lends *l, struct metrics *m);
void kv_lends_release(struct kv_lends *l);
/* FETCH. */
void kv_lends_on_message(struct kv_lends *l, const struct cluster_message *m);
/* LENT. */
void kv_lends_on_engine(struct kv_lends *l, const struct engine_event *ev);
/* The sender's answers, and the transfer's: false if they are about a prompt. */
bool kv_lends_on_open(struct kv_lends *l, struct kv_sends *s);
bool kv_lends_on_failed(struct kv_lends *l, struct kv_sends *s, const char *text);
bool kv_lends_on_kvt(struct kv_lends *l, const struct kvt_event *ev);
/* The parts of the lend with this id; NULL: there is none. */
const struct prompt_parts *kv_lends_parts(const struct kv_lends *l, uint64_t id);
/* A peer, or a follower. */
void kv_lends_on_lost(struct kv_lends *l, uint64_t node);

#endif
