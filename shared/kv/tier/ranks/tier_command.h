/* tier_command.h - what the first rank of a node tells the tiers of the others, and their answers.
 *
 * A block has the same number and key on all ranks; each holds its own part of the bytes. Commands
 * of one leader reach a follower in order. LOOK, PUT and GET are answered once each, in any order;
 * CANCEL makes its GET's answer come at once, and DROP has none.
 * Thread: any (values). */
#ifndef BATON_KV_TIER_RANKS_TIER_COMMAND_H
#define BATON_KV_TIER_RANKS_TIER_COMMAND_H

#include "shared/kv/tier/kv_tier.h"

enum tier_command_kind {
    TIER_LOOK,   /* answered when the tier knows what it kept before this process began */
    TIER_PUT,    /* answered when the block's bytes are not needed any more */
    TIER_GET,    /* answered when nobody writes to the destination blocks any more */
    TIER_CANCEL, /* the GET with this id ends */
    TIER_DROP,
    TIER_COMMANDS
};

struct tier_command {
    enum tier_command_kind kind;
    enum kv_tier_kind tier;
    uint64_t id;          /* LOOK, PUT, GET: used once */
    struct tier_block of; /* PUT; DROP: its key alone */
    int32_t block;        /* PUT: of the pool; -1: from the follower's own host tier */
    uint32_t n;           /* GET: [n] keys, and destinations in the pool */
    const struct hash128 *keys;
    const int32_t *blocks;
};

struct tier_answer {
    enum kv_tier_kind tier;
    uint64_t id;
    enum status status; /* GET: why fewer than n blocks are good. ERR_NOT_FOUND: this rank does not
                         * have the one after them; ERR_CANCELED: it was cancelled */
    uint32_t n_good;    /* GET */
};

#endif
