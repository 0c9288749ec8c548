/* prefix_pick.h - which of the offered nodes a placement takes: the definition, which the script of
 * the `redis` backend repeats.
 *
 * The table is looked through from the longest rung down, to the first that has keepers which are
 * offered and have not dropped it. The entry node's choice and these are compared: the cheapest is
 * taken, of equals the choice, then the newest. When it turns out to be gone, or to have no place
 * where it would be alone or decode, the choice is taken. A decode node computes for a prefill
 * node's sake at most PREFIX_REST_MAX tokens, since those that run there wait. Thread: its
 * owner's. */
#ifndef BATON_SCHEDULER_PREFIX_PREFIX_PICK_H
#define BATON_SCHEDULER_PREFIX_PREFIX_PICK_H

#include "scheduler/prefix/prefix_table.h"
#include "shared/base/status.h"

/* What the directory knows of a node. */
struct prefix_node {
    bool lives;
    uint64_t wait_us; /* until it should have computed what is placed on it */
    uint64_t tokens;  /* that are placed on it, likewise seqs and blocks */
    uint32_t seqs, blocks, max_seqs, n_blocks;
    uint32_t dropped_s; /* prefix_drop; 0: nothing */
};

typedef void prefix_look_fn(void *arg, uint64_t node, struct prefix_node *out);

struct prefix_lookup {
    const struct prefix_query *query;
    const struct prefix_table *table;
    uint32_t now_s;
    uint32_t blocks; /* that the request needs where it decodes */
    prefix_look_fn *look;
    void *arg;
};

struct prefix_picked {
    const struct prefix_offer *compute, *decode; /* of the query; decode NULL: `compute` is alone */
    uint32_t n_compute;                          /* tokens that are left to compute, ... */
    uint64_t busy_us; /* ... and when the node should be through with them (wait_us) */
    struct prefix_expected expected;
};

/* ERR_BUSY: no place, or the choice is gone and no keeper is taken. */
enum status prefix_pick(const struct prefix_lookup *l, struct prefix_picked *out) MUST_CHECK;
/* Makes the nodes that were taken keepers of the prompt's rungs. */
void prefix_note_picked(struct prefix_table *t, const struct prefix_query *q,
                        const struct prefix_picked *p, uint32_t now_s);

#endif
