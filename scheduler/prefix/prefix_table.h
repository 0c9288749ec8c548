/* prefix_table.h - the table of a topic in plain structs: which nodes were chosen last for each
 * beginning of a prompt. The definition of what the directory's backends keep, and the state of
 * `local`.
 *
 * PREFIX_SLOTS slots, one for all keys with the same slot number: the newest key has it, so the
 * table never grows. A slot has the PREFIX_KEEPERS newest nodes that compute and as many that
 * decode, newest first; one that is the newest is noted again after PREFIX_FRESH_S, so that most
 * placements write little. Times are seconds of the caller, above 0, that do not go back; what is
 * PREFIX_TTL_S old is not there. Thread: its owner's. */
#ifndef BATON_SCHEDULER_PREFIX_PREFIX_TABLE_H
#define BATON_SCHEDULER_PREFIX_PREFIX_TABLE_H

#include <stddef.h>

#include "scheduler/prefix/prefix.h"

enum { PREFIX_KINDS = 2 }; /* of keepers: of nodes that compute, and of those that decode */

struct prefix_keeper {
    uint64_t node; /* 0: none */
    uint32_t at_s;
};

struct prefix_slot {
    uint32_t tag;
    struct prefix_keeper keepers[PREFIX_KINDS][PREFIX_KEEPERS];
};

struct prefix_table {
    uint32_t noted_s; /* the last time */
    struct prefix_slot slots[PREFIX_SLOTS];
};

/* NULL: no memory. Pages of slots that were never used take none. */
struct prefix_table *prefix_table_create(void);
void prefix_table_free(struct prefix_table *t);
/* The slot of a rung, if it has its key and somebody was noted for it in the last PREFIX_TTL_S;
 * else NULL. */
const struct prefix_slot *prefix_table_find(const struct prefix_table *t,
                                            const struct prefix_rung *r, uint32_t now_s);
/* Notes the nodes as the newest keepers of all rungs; node 0: none of that kind. */
void prefix_table_note(struct prefix_table *t, const struct prefix_rung *rungs, uint32_t n_rungs,
                       const uint64_t nodes[PREFIX_KINDS], uint32_t now_s);
/* Was a node noted in the last PREFIX_TTL_S? */
bool prefix_table_is_used(const struct prefix_table *t, uint32_t now_s);

#endif
