/* pressure.h - a node has taken the KV blocks of a sequence for an older one: will its answer go on
 * sooner there, where it waits for blocks and is computed again, or on other nodes?
 *
 * Its node tells how long it will take there (Preempted, node.proto); its entry node knows where
 * there is room, and decides. Until then the sequence waits on its node, where it may start again
 * at any time. Thread: any (pure). */
#ifndef BATON_SCHEDULER_PRESSURE_PRESSURE_H
#define BATON_SCHEDULER_PRESSURE_PRESSURE_H

#include <stdbool.h>
#include <stdint.h>

enum {
    /* A request that was handed back so often stays where it is: room that others see at the same
     * time must not send it around. */
    PRESSURE_HAND_BACKS_MAX = 2,
    /* Placing it again: the pause (REQUEST_PAUSE_BUSY_MS), and what credit and grant take. */
    PRESSURE_PLACE_US = 60000
};

struct pressure {
    uint64_t here_us;      /* until it has its blocks and tokens again, or less; 0: not known */
    bool has_room;         /* other nodes have */
    uint64_t there_tokens; /* that wait where it would be computed, and its own */
    uint64_t there_tokens_per_s; /* of that node; 0: it has not measured */
    uint32_t n_handed_back;      /* how often it was */
};

enum pressure_action { PRESSURE_RECOMPUTE, PRESSURE_HAND_BACK, PRESSURE_N };

/* What is not known counts for staying: moving costs other nodes work. */
enum pressure_action pressure_choose(const struct pressure *p);
const char *pressure_action_name(enum pressure_action a); /* "hand_back": a label of metrics */

#endif
