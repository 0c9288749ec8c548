/* decode_follow.h - the decode worker of a rank above 0: receives this rank's parts of the KV for
 * the leader of its node, which has the sequences, the blocks' counters and the requests.
 *
 *   leader                              follower
 *   KV_EXPECT(parts, blocks)  ────────▶ kvt_expect_heads for each part
 *                             ◀──────── KV_GRANTS
 *   KV_CANCEL                 ────────▶ kvt_expect_cancel for each part that is open
 *                             ◀──────── KV_EVENT: RECEIVED, RECEIVE_FAILED, FENCED of each part
 *
 * Every part that was asked for ends with RECEIVED or FENCED. It follows one leader for its life;
 * when that is lost all is cancelled, and nothing new is taken.
 * Thread: loop; the node posts transfer events to the loop before they get here. */
#ifndef BATON_DECODE_DECODE_FOLLOW_H
#define BATON_DECODE_DECODE_FOLLOW_H

#include "kvtransfer/kvtransfer.h"
#include "shared/cluster/cluster.h"

struct decode_follower;

struct decode_follow_options {
    struct kvt *kvt; /* all borrowed until decode_follow_free */
    struct kv_layout layout;
    struct cluster *cluster;
    uint64_t leader; /* process of the node's first rank */
};

struct decode_follower *decode_follow_create(const struct decode_follow_options *o);
/* Stop kvtransfer first. */
void decode_follow_free(struct decode_follower *f);

/* Returns whether the message is of a kind, or of a sequence, that this worker handles. */
bool decode_follow_on_message(struct decode_follower *f, const struct cluster_message *m);
/* For events whose id lies in the leader's decode_options.id_base + 2^56. */
void decode_follow_on_kvt(struct decode_follower *f, const struct kvt_event *ev);
void decode_follow_on_lost(struct decode_follower *f, uint64_t node);
/* Sequences with an open part. */
uint32_t decode_follow_n_live(const struct decode_follower *f);

#endif
