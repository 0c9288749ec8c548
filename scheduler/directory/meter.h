/* meter.h - what the tenants of a topic use, counted over all of its entry nodes.
 *
 * An entry node tells the directory what its tenants have used since it told it last, and gets the
 * sums over all entry nodes back (directory_meter). It asks as soon as there is something to tell,
 * one report at a time, so that what it knows is one round trip old: an entry that admits by these
 * sums lets through at most what arrives everywhere in that time. A report is named by its entry and
 * a number that grows; one that arrives twice counts once. An entry not heard of for METER_LEASE_MS
 * has nothing running. The state is soft: a directory that lost it begins at zero.
 *
 * `served` makes fairness one number: what a tenant got, divided by its weight (virtual token
 * counters, VTC: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A tenant
 * that had nothing waiting or running anywhere and comes back is lifted to the least of those that
 * have, so that nobody saves up. Thread: loop. */
#ifndef BATON_SCHEDULER_DIRECTORY_METER_H
#define BATON_SCHEDULER_DIRECTORY_METER_H

#include <stdint.h>

enum {
    METER_TENANTS_MAX = 256, /* of a report and of a topic: keys of --api-keys-file */
    METER_WINDOW_MS = 60000, /* rates are of the last minute, by slots of METER_SLOT_MS */
    METER_SLOT_MS = 1000,
    METER_LEASE_MS = 2400,
};

/* One tenant at one entry node. */
struct meter_use {
    uint64_t tenant;   /* a hash of its name, never 0 */
    uint32_t requests; /* admitted since the last report that was answered */
    uint64_t tokens;   /* prompt and output, since then */
    uint64_t cost; /* what they cost, divided by its weight, since then (admit.h has the unit) */
    uint32_t n_running, n_waiting; /* now; they replace those of the last report */
};

struct meter_report {
    uint64_t entry;               /* incarnation id of the entry node */
    uint64_t number;              /* from 1; the same until it is answered */
    const struct meter_use *uses; /* [n_uses], borrowed during the call */
    uint32_t n_uses;
};

/* One tenant over all entry nodes. */
struct meter_sum {
    uint64_t tenant;
    uint32_t requests; /* of the last minute */
    uint64_t tokens;   /* of the last minute */
    uint64_t served;   /* the sum of its costs, and what it was lifted by */
    uint32_t n_running, n_waiting;
};

struct meter_sums {
    const struct meter_sum *sums; /* [n_sums] those of the report, in its order; valid during the
                                   * callback */
    uint32_t n_sums;
    uint32_t n_entries; /* entry nodes heard of within METER_LEASE_MS, this one included */
    uint64_t least;     /* the least `served` of the topic's tenants that have something waiting or
                         * running; 0: none has */
};

#endif
