/* place.h - chooses the pair of nodes that serves a request: a pure function of the request and the
 * nodes.
 *
 * Candidates of a stage are the nodes of its role and mixed nodes that have the model, are not
 * draining and not to be avoided. At most PLACE_SAMPLE of them are scored: all when there are few,
 * else a random sample plus the one preferred by a hash of the prompt's first block. The load of a
 * node is the larger of what is placed on it (the directory's sum over all entry nodes, view.h) and
 * what it reports.
 * A prefill node is a candidate only when some decode node can take its KV, and then one of those
 * is chosen: two nodes that have no KV transport in common, whose KV has types that do not fit, or
 * that failed to exchange KV (`apart`) never meet.
 * A node whose group has lost ranks, or has not met them yet, is passed over while a node of a
 * whole group, or of none, has room (decode) or is not busy for two steps (prefill); when there is
 * no other it is as good as any. Among the ranks of one group load is levelled more closely than
 * among others, since a step takes all of them as long as the fullest.
 * Among candidates whose load is close to the least, the preferred one wins (its prefix cache may
 * have the prompt); without a preference a random one, so that entry nodes with the same view do
 * not all choose the same. Without a prefill node a decode node does both; without a decode node
 * nothing is chosen. Thread: any. */
#ifndef BATON_SCHEDULER_PLACE_H
#define BATON_SCHEDULER_PLACE_H

#include "scheduler/directory/directory.h"
#include "shared/base/hash/hash.h"

enum { PLACE_SAMPLE = 16 };

struct place_pair {
    uint64_t prefill, decode;
};

struct place_request {
    uint32_t n_tokens;          /* prompt tokens to compute */
    uint32_t n_total;           /* prompt and longest output: what must fit */
    uint64_t model;             /* 0: any */
    struct hash128 first_block; /* gives the preferred node; zero: no preference */
    const uint64_t *avoid;      /* [n_avoid] nodes suspected dead or already tried */
    size_t n_avoid;
    const struct place_pair *apart; /* [n_apart] */
    size_t n_apart;
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
/* ERR_UNAVAILABLE: no node could ever serve the request; ERR_BUSY: all that could are full. */
enum status place_choose(const struct node_record *nodes, size_t n, const struct place_request *r,
                         struct place_result *out) MUST_CHECK;

#endif
