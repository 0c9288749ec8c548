/* kv_lend.h - writes KV blocks that this node has into a peer's pool, for a prompt of the peer's.
 *
 *   FETCH ─▶ HOLDING (the engine holds the blocks, from pool and tiers) ─▶ CONNECTING ─▶ SENDING
 *         ─ acknowledged, or failed ─▶ gone
 *   fewer blocks than named, another layout, too many at once ─▶ FETCH_REFUSED, gone
 *
 * The transfer is a prefill node's, with the same connections, fences and checksums; the blocks are
 * held until it does not read them any more. Thread: loop. Owner: prefill_worker. */
#ifndef BATON_PREFILL_KV_LEND_H
#define BATON_PREFILL_KV_LEND_H

#include "prefill/kv_sender.h"
#include "shared/base/metrics.h"
#include "shared/engine/engine.h"

enum { KV_LENDS_MAX = 64 };

struct kv_lends {
    struct kvt *kvt; /* NULL: all are refused */
    struct engine *engine;
    struct cluster *cluster;
    struct kv_sender *sender;
    uint64_t id_base, *next_id; /* the worker's */
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
void kv_lends_on_lost(struct kv_lends *l, uint64_t node);

#endif
