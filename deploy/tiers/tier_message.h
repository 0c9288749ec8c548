/* tier_message.h - commands to the KV tiers of a node's other ranks, and their answers, as messages
 * (KvTier, KvTierDone of shared/cluster/proto/node.proto). Thread: any (pure functions). */
#ifndef BATON_DEPLOY_TIERS_TIER_MESSAGE_H
#define BATON_DEPLOY_TIERS_TIER_MESSAGE_H

#include "shared/base/buf.h"
#include "shared/kv/tier/ranks/tier_command.h"

/* Append the body; a frame's request id is the command's. */
void tier_message_write(const struct tier_command *c, struct buf *out);
void tier_message_write_answer(const struct tier_answer *a, struct buf *out);

/* A command that was read; keys and blocks are its own until it is released. */
struct tier_message {
    struct tier_command c;
    struct hash128 *keys;
    int32_t *blocks;
};

/* False: malformed, and nothing is to be released. Whether the blocks exist is for the receiver. */
bool tier_message_read(uint64_t id, struct str body, struct tier_message *out);
void tier_message_release(struct tier_message *m);
bool tier_message_read_answer(uint64_t id, struct str body, struct tier_answer *out);

#endif
