/* place_nodes.h - the nodes that tests of placement choose from, and random bits of their requests.
 * Thread: test. */
#ifndef BATON_TESTS_UNIT_SCHEDULER_PLACE_NODES_H
#define BATON_TESTS_UNIT_SCHEDULER_PLACE_NODES_H

#include "scheduler/place/place.h"
#include "shared/base/rng.h"

enum { BLOCK = 64 };

/* With nothing to do. */
static inline struct node_record node(uint64_t id, enum node_role role)
{
    return (struct node_record){
        .node = id,
        .role = role,
        .model = 7,
        .max_seqs = 8,
        .n_blocks = 100,
        .block_tokens = BLOCK,
        .max_model_len = 4096,
    };
}

static inline uint64_t random_bits(uint64_t i)
{
    uint32_t r[4];
    rng_philox(1, 0, i, r);
    return (uint64_t)r[0] << 32 | r[1];
}

#endif
