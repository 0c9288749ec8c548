/* place_node.h - what one node's record says about a request: may it be a candidate, how loaded is
 * it, does the request fit, with whom can it exchange KV. For the files of this folder only.
 * Thread: any (pure functions). */
#ifndef BATON_SCHEDULER_PLACE_PLACE_NODE_H
#define BATON_SCHEDULER_PLACE_PLACE_NODE_H

#include "scheduler/place/place.h"

/* Of its role or mixed, with the model, not draining, lost or to be avoided. */
bool place_is_candidate(const struct node_record *n, const struct place_request *r,
                        enum node_role role);
/* Is the node in no group, or in one that has all of its ranks? Other groups answer as well, but
 * fewer ranks do the work, and it stops for a moment when a lost one comes back. */
bool place_is_whole(const struct node_record *n);
bool place_are_of_one_group(const struct node_record *a, const struct node_record *b);
/* Sequences: the larger of what is placed on it and what it reports. */
uint64_t place_decode_load(const struct node_record *n);
/* Tokens of prompts that wait there, and what a node that computes prompts is kept from by the
 * sequences that run there: in a group all ranks wait for the one with most. */
uint64_t place_prefill_load(const struct node_record *n);
/* Blocks needed to start: those of the prompt, and of the first token if there is one. */
uint32_t place_first_blocks(const struct node_record *n, const struct place_request *r);
/* Could an empty decode node hold the request to the end of its answer? */
bool place_decode_fits(const struct node_record *n, const struct place_request *r);
/* Also of a mixed node that is to prefill: its engine has the same places and blocks for prompts
 * as for answers, and a prompt would wait there until an answer ends. */
bool place_has_capacity(const struct node_record *n, const struct place_request *r);
/* Whether all that a record says of KV exchange is the same. The host counts for nodes that reach
 * no other. */
bool place_is_same_kind(const struct node_record *a, const struct node_record *b);
/* place_exchange, and in an order in which two requests cannot wait for each other, and not
 * `apart`. */
bool place_can_exchange(const struct place_request *r, const struct node_record *prefill,
                        const struct node_record *decode);

#endif
