/* prefix.h - what a placement asks the directory about the beginning of a prompt, and is told.
 *
 * Beside the nodes of a topic the directory has a table (prefix_table.h): for the keys of prompts'
 * beginnings (prefix_ladder.h) the nodes that were chosen for them last, their keepers, which
 * probably have them in their prefix cache. An entry node sends with a placement its choice by
 * load, the keys, and of which kinds other nodes may take the request instead. Each node says with
 * its record of which kind it is and what it costs (prefix_bid). In one step the directory looks
 * which keepers may, takes the choice or a keeper that costs less (prefix_pick.h), counts the
 * placement, and makes the nodes keepers: what that takes does not grow with the number of nodes.
 * Soft state like all of the directory: what is lost or wrong costs time, never an answer. Thread:
 * any (plain data). */
#ifndef BATON_SCHEDULER_PREFIX_PREFIX_H
#define BATON_SCHEDULER_PREFIX_PREFIX_H

#include <stdbool.h>
#include <stdint.h>

enum {
    PREFIX_RUNGS_MAX = 32,
    PREFIX_USES_MAX = 8,    /* in one placement */
    PREFIX_AVOID_MAX = 32,  /* likewise */
    PREFIX_FOUND_MAX = 4,   /* keepers that a placement compares */
    PREFIX_DROPS_MAX = 8,   /* told with one placement */
    PREFIX_SLOTS = 1 << 16, /* of the table of a topic */
    PREFIX_KEEPERS = 2,     /* the newest, of each kind */
    PREFIX_COST_MAX = (1 << 24) - 1
};
/* These are numbers in the script of the `redis` backend, too. Costs are whole numbers that all
 * backends compute alike: below 2^53 in all. */
#define PREFIX_TTL_S       1800        /* who was chosen longer ago is no keeper */
#define PREFIX_FRESH_S     300         /* who was chosen since then need not be noted again */
#define PREFIX_YOUNG_S     30          /* who was chosen since then may not have computed it yet */
#define PREFIX_REST_MAX    512         /* tokens that a decode node computes for a prefill node */
#define PREFIX_ALONE_SEQS  15          /* with more it is hardly ever the one that computes it */
#define PREFIX_SEQ_TOKENS  32          /* that a sequence weighs where prompts are computed, ... */
#define PREFIX_SEQ_KV      1024        /* ... and, in quarters of a token's KV, where it decodes */
#define PREFIX_LOAD_MAX    67108863    /* tokens or sequences; more does not count, nor does ... */
#define PREFIX_WAIT_US_MAX 86400000000 /* ... a longer wait than a day */

/* The first `tokens` tokens of a prompt. */
struct prefix_rung {
    uint16_t slot; /* both from the key */
    uint32_t tag;
    uint32_t tokens;
};

/* What a node says of itself with each renewal. Whoever computes a prompt costs nanoseconds of its
 * time: `ns` for each token that waits there, those that the directory has counted, or `waiting`
 * when it has counted none, and PREFIX_SEQ_TOKENS for each sequence that runs there, which is a row
 * of each step until it ends; and a fifth more for each of the prompt's that it does not have,
 * since what is kept is seen a sixth too short in the mean. A decode node that computes stops the
 * sequences that run there, so all that counts once more for each of them. What the directory has
 * counted is partly computed: it costs no more than the time until the node should be through with
 * it. Whoever takes KV and decodes costs PREFIX_SEQ_KV for each sequence and 4 for each token that
 * it does not have. Among the ranks of a group, which all wait for the fullest, a token that is
 * kept is worth a quarter. */
struct prefix_bid {
    uint64_t kind;    /* of what it can do (node_record_kind); 0: it is no keeper */
    uint32_t ns;      /* for a token of a prompt; 0: not measured yet */
    uint32_t seqs;    /* that run there, beside prompts; the directory's count if that is more */
    uint32_t waiting; /* tokens */
    bool grouped;
};

/* What nodes of a kind may do, a sum; those of a kind that is not named do nothing. */
enum prefix_use_flag {
    PREFIX_COMPUTES = 1, /* compute the prompt, ... */
    PREFIX_ALONE = 2,    /* ... and decode, too: no other node is needed */
    PREFIX_TAKES = 4,    /* take KV and decode */
    /* They are of role decode, keepers among those that decode, and where the choice is of two
     * nodes they compute short rests only, since the sequences that run there wait. */
    PREFIX_DECODE = 8,
    PREFIX_FLAGS = 15
};

struct prefix_use {
    uint64_t kind; /* not 0 */
    uint8_t flags;
};

/* "The node has dropped what it was chosen for until at_s": it had less of a prompt than it should
 * have had, and what was used before that is evicted before it. */
struct prefix_drop {
    uint64_t node;
    uint32_t at_s;
};

struct prefix_query {
    uint32_t n_tokens;               /* of the prompt */
    const struct prefix_rung *rungs; /* [n_rungs], shortest first */
    uint32_t n_rungs;
    uint64_t compute, decode;      /* the entry node's choice; decode 0: `compute` does both */
    const struct prefix_use *uses; /* [n_uses], which the choice's own kinds are of if it keeps */
    uint32_t n_uses;
    const uint64_t *avoid; /* [n_avoid] nodes that are not to be taken instead */
    uint32_t n_avoid;
    uint32_t ns;                     /* of a node that has not measured it */
    uint32_t blocks;                 /* a pool with fewer is too small for the whole answer */
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
