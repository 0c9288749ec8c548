/* prefill_follow.h - the prefill worker of a rank above 0: sends this rank's parts of the KV for
 * the leader of its node, which has the prompts and lends blocks to peers. This rank's engine
 * announces a prompt's layers itself, with the leader's ids (prefill_on_kv_ready). Of blocks that
 * are lent KV_SEND says which they are: the leader's step has ended, so all ranks have them.
 *
 *   leader                         follower
 *   KV_SEND(parts, grants) ──────▶ connects, opens the transfers
 *                          ◀────── KV_OPENED; when all ranks have, the engines compute
 *   KV_FINISH              ──────▶ the prompt is computed: no layers will follow
 *   KV_SEND(.., blocks)    ──────▶ connects, opens the transfers, sends all layers of these blocks
 *   KV_CANCEL              ──────▶
 *                          ◀────── KV_EVENT: SENT or SEND_FAILED, exactly one of each part
 *
 * It follows one leader for its life; when that is lost all is cancelled, and nothing new is taken.
 * Thread: loop. */
#ifndef BATON_PREFILL_PREFILL_FOLLOW_H
#define BATON_PREFILL_PREFILL_FOLLOW_H

#include "kvtransfer/kvtransfer.h"
#include "shared/cluster/cluster.h"

struct prefill_follower;

struct prefill_follow_options {
    struct loop *loop; /* all borrowed until prefill_follow_free */
    struct kvt *kvt;
    struct kv_layout layout;
    struct cluster *cluster;
    uint64_t leader; /* process of the node's first rank */
};

struct prefill_follower *prefill_follow_create(const struct prefill_follow_options *o);
/* Stop kvtransfer first. */
void prefill_follow_free(struct prefill_follower *f);

/* Returns whether the message is of a kind, or of a prompt, that this worker handles. */
bool prefill_follow_on_message(struct prefill_follower *f, const struct cluster_message *m);
/* For events whose id lies in the leader's prefill_options.id_base + 2^56, and those of peers. */
void prefill_follow_on_kvt(struct prefill_follower *f, const struct kvt_event *ev);
void prefill_follow_on_lost(struct prefill_follower *f, uint64_t node);
/* Prompts and lends with a part that has not ended. */
uint32_t prefill_follow_n_live(const struct prefill_follower *f);

#endif
