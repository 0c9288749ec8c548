/* tier_ranks.h - the tiers of a node of several ranks, as the engine of its first rank uses them.
 *
 * That rank's store (kv_store.h) decides for all. Each of its tiers is wrapped: the other ranks
 * (tier_follow.h) are told by commands what is done to it, do it with their bytes, and answer.
 *   put    ─▶ own tier, PUT to all ─▶ all have answered ─▶ PUT
 *   get    ─▶ own tier, GET to all ─▶ all have answered ─▶ GET: n_good is the least of all ranks
 *   cancel ─▶ CANCEL to all, own tier ─▶ returns when all have answered the GET
 *   drop, an eviction of the own tier ─▶ DROP to all, so that their sets follow
 * Invariants, beside those of kv_tier.h:
 *   1. `has` finds no block that is still being put on any rank, and none before all have looked
 *      through what they kept before. Others may forget on their own: a get fails there.
 *   2. What fails to be put, or is missing or changed in a get, on one rank is dropped on all.
 *   3. cancel waits for silent_ms at most. Who has not answered by then is lost with its node.
 * Thread: engine, but for tier_ranks_answer and tier_ranks_abort. */
#ifndef BATON_KV_TIER_RANKS_TIER_RANKS_H
#define BATON_KV_TIER_RANKS_TIER_RANKS_H

#include "shared/kv/tier/ranks/tier_command.h"

enum {
    TIER_RANKS_SILENT_MS = 2000, /* less than a rank that hangs is looked for (group.h) */
    TIER_RANKS_OFF_MS = 5000,    /* for which an error of one rank's tier switches it off on all */
    TIER_RANKS_MAX = 32
};

struct tier_ranks;

struct tier_ranks_options {
    uint32_t n_followers; /* 1 .. TIER_RANKS_MAX - 1 */
    /* To every follower, in the order of the calls. Must return at once; copies what it keeps. */
    void (*send)(void *arg, const struct tier_command *c);
    /* A follower does not answer: the node has to end, and takes no step any more, so that its
     * writes harm nobody. Once. */
    void (*on_silent)(void *arg);
    void *arg;
    uint32_t silent_ms; /* for tests; 0: TIER_RANKS_SILENT_MS */
};

struct tier_ranks *tier_ranks_create(const struct tier_ranks_options *o);
/* After its tiers. */
void tier_ranks_free(struct tier_ranks *r);
/* Takes a tier, one of each kind, and returns what stands for it. `wake` as in kv_tier_options. */
struct kv_tier *tier_ranks_wrap(struct tier_ranks *r, struct kv_tier *own, void (*wake)(void *arg),
                                void *arg);
/* kv_tier_options.forgot of the tiers that are to be wrapped, with the tier_ranks. */
void tier_ranks_forgot(void *ranks, enum kv_tier_kind kind, const struct hash128 *key);
/* Follower 0 .. n_followers - 1 has answered. Answers that nobody waits for do nothing. ERR_FULL:
 * more than could have been asked for. Any thread. */
enum status tier_ranks_answer(struct tier_ranks *r, uint32_t follower,
                              const struct tier_answer *a) MUST_CHECK;
/* The node ends: nobody is waited for any more. Any thread. */
void tier_ranks_abort(struct tier_ranks *r);

#endif
