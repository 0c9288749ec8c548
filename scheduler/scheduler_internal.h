/* scheduler_internal.h - struct scheduler, for scheduler.c and its tests.
 * Thread: loop. */
#ifndef BATON_SCHEDULER_SCHEDULER_INTERNAL_H
#define BATON_SCHEDULER_SCHEDULER_INTERNAL_H

#include "scheduler/request.h"
#include "scheduler/scheduler.h"

struct scheduler {
    struct scheduler_options o;
    struct entry entry;
    bool draining;
    bool enters;         /* while draining: it takes new requests for other nodes to compute */
    uint64_t t_drain_ns; /* clock_ns when it began to drain */
    /* When other nodes that decode were seen last, or could have been; 0: there are none. */
    uint64_t t_others_ms;
    uint64_t difference; /* between nodes, that was logged last: a hash; 0: there is none */
    struct loop_timer *tick, *renew;
    struct loop_timer *wake; /* a tick in the next turn of the loop; NULL: none is due */
    struct loop_timer
        *line; /* a tick when a node will need the next of the line; NULL: none is due */
};

#endif
