/* kv_fetch.h - brings KV blocks of a prompt from the memory of a peer that is said to have them.
 *
 *   engine: FETCH(keys, blocks) ─▶ ASKED ── received, verified ──▶ engine_fetched(all of them)
 *                                    │ the peer has fewer ─▶ CLOSING ─ fenced ─▶ ASKED for those, once
 *                                    └ failed, refused, late, not needed any more ─▶ CLOSING
 *                                                       ─ fenced ─▶ engine_fetched(none)
 *
 * The peer holds its blocks and writes them into those that were granted, as a prefill node does
 * (prefill/kv_lend.h); each is verified before it counts, and the blocks go back only when no write
 * can reach them. Whatever the peer does, the engine is answered.
 * Thread: loop. Owner: decode_worker. */
#ifndef BATON_DECODE_KV_FETCH_H
#define BATON_DECODE_KV_FETCH_H

#include "kvtransfer/kvtransfer.h"
#include "shared/base/list.h"
#include "shared/base/map.h"
#include "shared/base/metrics.h"
#include "shared/cluster/cluster.h"
#include "shared/engine/engine.h"

struct kv_fetches {
    struct kvt *kvt; /* NULL: nothing is fetched */
    struct engine *engine;
    struct cluster *cluster;
    uint64_t id_base, *next_id; /* of the worker: its ids are of transfers too */
    struct map by_id;           /* transfer's id → struct kv_fetch */
    struct list live;
    uint32_t n_live;
    struct counter *fetched, *bytes, *failed;
};

void kv_fetches_init(struct kv_fetches *f, struct metrics *m);
/* Without messages. Stop the engine and kvtransfer first. */
void kv_fetches_release(struct kv_fetches *f);
/* FETCH, FETCH_OFF. */
void kv_fetches_on_engine(struct kv_fetches *f, const struct engine_event *ev);
/* FETCH_REFUSED. */
void kv_fetches_on_message(struct kv_fetches *f, const struct cluster_message *m);
void kv_fetches_on_kvt(struct kv_fetches *f, const struct kvt_event *ev);
void kv_fetches_on_lost(struct kv_fetches *f, uint64_t node);
/* Ends those that are late. */
void kv_fetches_sweep(struct kv_fetches *f, uint64_t now_ms);

#endif
