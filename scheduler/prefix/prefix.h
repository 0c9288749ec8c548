/* prefix.h - what a placement asks the directory about the beginning of a prompt, and is told.
 *
 * Beside the nodes of a topic the directory has a table (prefix_table.h): for the keys of prompts'
 * beginnings (prefix_ladder.h) the nodes that were chosen for them last, their keepers, which
 * probably have them in their prefix cache. An entry node sends with a placement its choice by
 * load, what else may take the request at which cost (offers), and the keys. In one step the
 * directory looks which of the offered nodes are keepers, takes the choice or a keeper that costs
 * less (prefix_pick.h), counts the placement, and makes the nodes keepers. Soft state like all of
 * the directory: what is lost or wrong costs time, never an answer. Thread: any (plain data). */
#ifndef BATON_SCHEDULER_PREFIX_PREFIX_H
#define BATON_SCHEDULER_PREFIX_PREFIX_H

#include <stdbool.h>
#include <stdint.h>

enum {
    PREFIX_RUNGS_MAX = 32,
    PREFIX_OFFERS_MAX = 256, /* of a kind, in one placement */
    PREFIX_FOUND_MAX = 4,    /* keepers that a placement compares */
    PREFIX_DROPS_MAX = 8,    /* told with one placement */
    PREFIX_SLOTS = 1 << 16,  /* of the table of a topic */
    PREFIX_KEEPERS = 2,      /* the newest, of each kind */
    PREFIX_COST_MAX = (1 << 24) - 1
};
/* These are numbers in the script of the `redis` backend, too. Costs are whole numbers that all
 * backends compute alike: below 2^53 in all. */
#define PREFIX_TTL_S       1800        /* who was chosen longer ago is no keeper */
#define PREFIX_FRESH_S     300         /* who was chosen since then need not be noted again */
#define PREFIX_YOUNG_S     30          /* who was chosen since then may not have computed it yet */
#define PREFIX_REST_MAX    512         /* tokens that a decode node computes for a prefill node */
#define PREFIX_LOAD_MAX    67108863    /* tokens or sequences; more does not count, nor does ... */
#define PREFIX_WAIT_US_MAX 86400000000 /* ... a longer wait than a day */

/* The first `tokens` tokens of a prompt. */
struct prefix_rung {
    uint16_t slot; /* both from the key */
    uint32_t tag;
    uint32_t tokens;
};

/* A node that may take the request. One that computes costs nanoseconds of its time: per_load for
 * each token that waits there, those that the directory has counted and `load` beside them, and
 * per_token for each of the prompt that it does not have. What the directory has counted is partly
 * computed: it costs no more than the time until the node should be through with it, at per_load
 * for each token that was counted on it. One that decodes costs per_load for each of its sequences,
 * `load` or as many as are counted, and per_token for each token that it does not have. */
struct prefix_offer {
    uint64_t node;
    uint32_t load, per_load, per_token;
    bool alone;   /* of one that computes: it decodes, too, and no other node is needed */
    bool decodes; /* likewise: it is of role decode, so it becomes a keeper among those that decode,
                   * and there are two others that compute */
    bool forgets; /* it has no prefix cache with such blocks: it is no keeper */
};

/* "The node has dropped what it was chosen for until at_s": it had less of a prompt than it should
 * have had, and what was used before that is evicted before it. */
struct prefix_drop {
    uint64_t node;
    uint32_t at_s;
};

struct prefix_query {
    uint32_t n_tokens;               /* of the prompt: what costs per_token when nothing is kept */
    const struct prefix_rung *rungs; /* [n_rungs], shortest first */
    uint32_t n_rungs;
    /* The first is the entry node's choice. Any that computes may be paired with any that decodes;
     * without one that decodes all are `alone`. */
    const struct prefix_offer *compute, *decode; /* [n_compute], at least 1; [n_decode] */
    uint32_t n_compute, n_decode;
    const struct prefix_drop *drops; /* [n_drops] */
    uint32_t n_drops;
};

/* What a node should have in its cache. */
struct prefix_kept {
    uint32_t tokens; /* 0: nothing */
    uint32_t at_s;   /* since when, in the directory's time, for prefix_drop; 0: not long enough to
                      * conclude anything when it does not have them */
};

/* Of the nodes that were taken. */
struct prefix_expected {
    bool known; /* false: the directory has no table, and nothing below counts */
    struct prefix_kept compute, decode;
    /* A node that has more of the prompt than the one that computes it; 0: none. */
    uint64_t keeper;
    uint32_t keeper_tokens;
};

#endif
