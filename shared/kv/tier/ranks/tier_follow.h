/* tier_follow.h - the tiers of a rank above 0 of a node: they do what the first rank's tiers do
 * (tier_ranks.h), with this rank's part of each block.
 *
 *   command ─▶ WAITS ─▶ RUNS ─▶ answer
 *
 * A put waits while its tier is busy, a get while its tier still stores a block of it, for
 * TIER_FOLLOW_PATIENCE_MS at most. They run on a thread of their own, since the engine's sits in
 * the exchange that brings the next step. Its copies are ordered with steps by the leader: that
 * holds the blocks until they are answered, and plans no step that reads them before. A step that
 * is over there has written and read its KV here, too: each layer ends with an exchange.
 *
 * Life cycle: create with the engine's pool, command, free before the pool.
 * Thread: its own; commands come from any, answers go out on its own. */
#ifndef BATON_KV_TIER_RANKS_TIER_FOLLOW_H
#define BATON_KV_TIER_RANKS_TIER_FOLLOW_H

#include "shared/kv/tier/disk/tier_disk.h"
#include "shared/kv/tier/ranks/tier_command.h"

enum { TIER_FOLLOW_PATIENCE_MS = 2000 };

struct tier_follower;

struct tier_follow_options {
    struct kv_layout layout; /* of the pool */
    struct device *device;   /* all borrowed until tier_follow_free */
    void *pool;
    enum dtype slot_dtype;
    uint64_t host_bytes;           /* 0: no host tier */
    struct tier_disk_options disk; /* folder NULL: no disk tier. The path is copied */
    /* Each LOOK, PUT and GET is answered once, unless the follower is freed before. */
    void (*answer)(void *arg, const struct tier_answer *a);
    void *arg;
    struct kv_tier *(*wrap)(void *arg, struct kv_tier *t); /* for tests, as in kv_store_options */
    void *wrap_arg;
};

/* ERR_CONFIG, ERR_NOMEM: a tier cannot be made. */
enum status tier_follow_create(const struct tier_follow_options *o, struct tier_follower **out,
                               struct err *err) MUST_CHECK;
/* Ends its thread and its tiers. */
void tier_follow_free(struct tier_follower *f);
/* Takes a command of the leader's, and copies what it needs. ERR_INVALID: it makes no sense, of
 * blocks that the pool does not have for example. ERR_FULL: more than a leader has at a time. Any
 * thread. */
enum status tier_follow_command(struct tier_follower *f, const struct tier_command *c) MUST_CHECK;

#endif
