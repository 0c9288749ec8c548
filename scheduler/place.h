/* place.h - which pair of nodes should serve a request: a pure function of the request and a view
 * of the nodes.
 *
 * Candidates of a stage are its own role and mixed nodes of the same topic and model that are not
 * draining, not suspected, not tried already. At most PLACE_SAMPLE of them are scored: all when
 * there are few, else a random sample plus the ones that a hash of the prompt's first block names.
 * Load is what is placed (counted when a request is placed, by every entry) or what the node
 * reports, whichever is more. Among candidates within a small distance of the least loaded, the one
 * the hash names wins (its prefix cache), else a random one, so that entries with the same view do
 * not herd. No decode node, but prefill nodes: nothing (the caller says which roles exist). No
 * prefill node: a decode node does both. Thread: any (pure). */
#ifndef BATON_SCHEDULER_PLACE_H
#define BATON_SCHEDULER_PLACE_H

#include "scheduler/directory/directory.h"
#include "shared/base/hash/hash.h"

enum { PLACE_SAMPLE = 16, PLACE_AVOID_MAX = 16 };

struct place_request {
    uint32_t n_tokens;          /* prompt tokens to compute */
    uint32_t n_total;           /* with the longest answer: what must fit */
    uint64_t model;             /* 0: any */
    struct hash128 first_block; /* names the preferred node; zero: no preference */
    const uint64_t *avoid;      /* [n_avoid] nodes suspected dead or already tried */
    size_t n_avoid;
    uint64_t random; /* fresh random bits */
};

struct place_result {
    const struct node_record *prefill; /* NULL: `decode` does all of it */
    const struct node_record *decode;
    uint32_t blocks; /* KV blocks of the prompt on the decode node */
};

/* ERR_UNAVAILABLE: no node that could ever do it is there; ERR_BUSY: there are, but all are full
 * now. */
enum status place_choose(const struct node_record *nodes, size_t n, const struct place_request *r,
                         struct place_result *out) MUST_CHECK;

#endif
