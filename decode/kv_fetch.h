/* kv_fetch.h - brings KV blocks of a prompt from the memory of a peer that is said to have them.
 *
 *   engine: FETCH(keys, blocks) ─▶ GRANTING ─ grants of all ranks ─▶ ASKED
 *   ASKED ─ every part of every rank received, verified ─▶ engine_fetched(all of them)
 *    │ └─ the peer has fewer ─▶ CLOSING ─ all open parts fenced ─▶ GRANTING for those, once
 *    └ failed, refused, late, not needed any more, a rank lost (from GRANTING, too)
 *                            ─▶ CLOSING ─ all open parts fenced ─▶ engine_fetched(none)
 *
 * The peer holds its blocks and writes them into those that were granted, as a prefill node does
 * (prefill/kv_lend.h): each of its ranks what it holds of each of ours, in parts (decode_parts.h).
 * Each block is verified before it counts, and the blocks go back only when no write can reach them
 * on any rank. Whatever the peer does, the engine is answered; when the fence does not come, since
 * the peer is stopped, its sequence goes on with other blocks meanwhile.
 * Thread: loop. Owner: decode_worker. */
#ifndef BATON_DECODE_KV_FETCH_H
#define BATON_DECODE_KV_FETCH_H

#include "decode/decode_parts.h"
#include "shared/base/list.h"
#include "shared/base/map.h"
#include "shared/base/metrics.h"
#include "shared/engine/engine.h"

struct kv_fetches {
    const struct decode_ranks *ranks; /* the worker's; without kvt nothing is fetched */
    bool broken;                      /* nor after a follower was lost */
    struct engine *engine;
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
void kv_fetches_on_refused(struct kv_fetches *f, const struct cluster_message *m);
/* A follower's KV_GRANTS. */
void kv_fetches_on_grants(struct kv_fetches *f, const struct cluster_message *m);
/* The parts of the fetch with this id; NULL: there is none. */
const struct decode_parts *kv_fetches_parts(const struct kv_fetches *f, uint64_t id);
/* Of this rank, and of a follower whose part it is. */
void kv_fetches_on_kvt(struct kv_fetches *f, const struct kvt_event *ev);
/* Of a peer or of a follower. */
void kv_fetches_on_lost(struct kv_fetches *f, uint64_t node);
/* Ends those that are late. Called twice a second. */
void kv_fetches_sweep(struct kv_fetches *f, uint64_t now_ms);

#endif
