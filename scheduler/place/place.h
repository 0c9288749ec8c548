/* place.h - chooses the pair of nodes that serves a request: a pure function of the request and the
 * nodes.
 *
 * Candidates of a stage are the nodes of its role and mixed nodes that have the model, are not
 * draining, lost or to be avoided; PLACE_SAMPLE of them are scored when there are more. A prefill
 * node is one only when some decode node can take its KV: they have a KV transport in common, types
 * that fit, and did not fail to exchange KV (`apart`). The load of a node is the larger of what is
 * placed on it (the directory's sum over all entry nodes, view.h) and what it reports. Among those
 * close to the least a random one wins. Which nodes have the prompt in their prefix cache only the
 * directory knows: it is told which others could take the request (place_uses), and chooses by
 * both (prefix.h). Nodes whose group lacks ranks are passed over while
 * others have room (decode) or few prompts that wait (prefill). Among the ranks of one group load
 * is levelled more closely, since a step takes all of them as long as the fullest. Without a
 * prefill node a decode node does both; without a decode node nothing is chosen. A request that is
 * not to be split goes to any node with room, chosen like a prefill node. Thread: any. */
#ifndef BATON_SCHEDULER_PLACE_PLACE_H
#define BATON_SCHEDULER_PLACE_PLACE_H

#include "scheduler/directory/directory.h"

enum { PLACE_SAMPLE = 16 };

struct place_pair {
    uint64_t prefill, decode;
};

struct place_request {
    uint32_t n_tokens;     /* prompt tokens to compute */
    uint32_t n_total;      /* prompt and longest output: what must fit */
    uint64_t model;        /* 0: any */
    const uint64_t *avoid; /* [n_avoid] nodes that failed, here or elsewhere */
    size_t n_avoid;
    const struct place_pair *apart; /* [n_apart] */
    size_t n_apart;
    bool needs_all; /* only decode nodes that report free blocks for the longest output have room */
    const uint64_t *filled; /* [n_filled] nodes that have prompts enough for now (fill.h) */
    size_t n_filled;
    uint64_t saved;  /* a node without room, since one that waits longer needs it; 0: none */
    bool unsplit;    /* one node does all of it, whatever its role */
    bool is_again;   /* an attempt before may have left its nodes as keepers of what they never got:
                      * no decode node computes it instead of another */
    uint64_t random; /* fresh random bits */
};

struct place_result {
    const struct node_record *prefill; /* NULL: `decode` does both */
    const struct node_record *decode;
    uint32_t blocks; /* KV blocks of the prompt on the decode node */
};

/* Can the prefill node's KV go into the decode node's pool, by what their records say? */
enum place_exchange { EXCHANGE_OK, EXCHANGE_NO_TRANSPORT, EXCHANGE_TYPES_DIFFER };
enum place_exchange place_exchange(const struct node_record *prefill,
                                   const struct node_record *decode);
/* ERR_UNAVAILABLE: no node could ever serve the request; ERR_BUSY: all that could are full, or
 * those that would compute its prompt are filled. */
enum status place_choose(const struct node_record *nodes, size_t n, const struct place_request *r,
                         struct place_result *out) MUST_CHECK;
/* What the directory may take instead of a choice, as the query of a placement says it
 * (prefix.h). */
struct place_uses {
    struct prefix_use uses[PREFIX_USES_MAX];
    uint32_t n_uses; /* 0: nobody keeps prefixes */
    uint64_t avoid[PREFIX_AVOID_MAX];
    uint32_t n_avoid;
    uint32_t ns, blocks;
    uint32_t block_tokens; /* of whoever keeps prefixes */
};

/* Nodes that have prefix caches with blocks of the same size and could stand in for one of the
 * choice: of its kind, in all that their records say of the model, of lengths and of KV exchange,
 * and not to be avoided, lost or apart. Those that are filled may: waiting there can be sooner. */
void place_uses(const struct node_record *nodes, size_t n, const struct place_request *r,
                const struct place_result *chosen, struct place_uses *out);
/* The node with the most free blocks of those that could decode the request; 0: there is none. */
uint64_t place_roomiest(const struct node_record *nodes, size_t n, const struct place_request *r);

#endif
