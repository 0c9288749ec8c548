/* prefix_pick.h - which nodes a placement takes: the definition, which the script of
 * the `redis` backend repeats.
 *
 * The table is looked through from the longest rung down, to the first that has keepers which may
 * be taken and have not dropped it. The entry node's choice and these are compared: the cheapest is
 * taken, of equals the choice, then the newest. When it has no place where it would be alone or
 * decode, the choice is taken. A decode node computes for a prefill node's sake at most
 * PREFIX_REST_MAX tokens, with at most PREFIX_ALONE_SEQS sequences. Thread: its owner's. */
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
    uint32_t dropped_s;    /* prefix_drop; 0: nothing */
    struct prefix_bid bid; /* all 0: it has none */
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
    uint64_t compute, decode;    /* decode 0: `compute` is alone */
    uint64_t keep[PREFIX_KINDS]; /* those that become keepers, of each kind; 0: none */
    uint32_t n_compute;          /* tokens that are left to compute, ... */
    uint64_t busy_us;            /* ... and when the node should be through with them (wait_us) */
    struct prefix_expected expected;
};

/* ERR_BUSY: no place, or the choice is gone and no keeper is taken. */
enum status prefix_pick(const struct prefix_lookup *l, struct prefix_picked *out) MUST_CHECK;

#endif
