/* meter.h - what the tenants of a topic use, counted over all of its entry nodes.
 *
 * An entry node tells the directory what its tenants have used since it told it last, and gets the
 * sums over all entry nodes back (directory_meter). It asks as soon as there is something to tell,
 * one report at a time, so that what it knows is one round trip old: an entry that admits by these
 * sums lets through at most what arrives everywhere in that time. The state is soft: a directory
 * that lost it begins at zero.
 *
 * `served` makes fairness one number: what a tenant got, divided by its weight (virtual token
 * counters, VTC: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Only the
 * differences mean something: after 2^52 all are lowered alike. Thread: loop. */
#ifndef BATON_SCHEDULER_DIRECTORY_METER_H
#define BATON_SCHEDULER_DIRECTORY_METER_H

#include <stdint.h>

/* The rules:
 * 1. A report is named by its entry and a number that grows. One that arrives twice counts once, so
 *    it is told again as it was, but for what runs and waits now; one that comes after a later one
 *    of its entry counts nothing. All are answered.
 * 2. What runs and waits in a report replaces that of the entry's report before: a tenant that is
 *    left out has nothing there. An entry not heard of for METER_LEASE_MS has nothing at all.
 * 3. What was used counts for METER_WINDOW_MS, and up to METER_SLOT_MS longer.
 * 4. A tenant that has nothing running or waiting anywhere and uses something (comes back) is first
 *    lifted to `least`, so that nobody saves up. While none has, that is the most that any had.
 * 5. A topic counts METER_TENANTS_MAX tenants. The place of one that has used nothing for a minute
 *    is given to another when it is needed; when there is none, the report is refused whole. */
enum {
    METER_TENANTS_MAX = 256, /* of a report and of a topic: keys of --api-keys-file */
    METER_ENTRIES_MAX = 4096,
    METER_WINDOW_MS = 60000, /* rates are of the last minute, by slots of METER_SLOT_MS */
    METER_SLOT_MS = 1000,
    METER_LEASE_MS = 2400,
    METER_FORGET_MS = 600000, /* after which the number of an entry not heard of is not known */
};

/* More tokens or cost in one use, or requests or tokens in one slot, count as this: 61 such slots
 * stay below 2^53, as every number between processes does. */
#define METER_QUANTITY_MAX (UINT64_C(1) << 46)
#define METER_NUMBER_END   (UINT64_C(1) << 53)

/* Why a report is refused, in sentences for people. printf: the limit. */
#define METER_TENANTS_FULL                                                                         \
    "a tenant is new, and the topic counts %d already, its limit; give all of its entry nodes "    \
    "the same --api-keys-file, with fewer keys"
#define METER_ENTRIES_FULL "the topic hears %d entry nodes already, its limit"

/* One tenant at one entry node; each is in a report once. */
struct meter_use {
    uint64_t tenant;   /* a hash of its name, never 0 */
    uint32_t requests; /* admitted since the last report that was answered */
    uint64_t tokens;   /* prompt and output, since then */
    uint64_t cost;     /* what they cost, divided by its weight, in a unit that all entries use */
    uint32_t n_running, n_waiting; /* now; they replace those of the last report */
};

struct meter_report {
    uint64_t entry;  /* incarnation id of the entry node, never 0 */
    uint64_t number; /* from 1, below METER_NUMBER_END; the same until it is answered */
    const struct meter_use *uses; /* [n_uses], borrowed during the call */
    uint32_t n_uses;              /* at most METER_TENANTS_MAX */
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
                                   * callback. One that was never counted has zeros */
    uint32_t n_sums;
    uint32_t n_entries; /* entry nodes heard of within METER_LEASE_MS, this one included */
    uint64_t least;     /* the least `served` of the topic's tenants that have something waiting or
                         * running; 0: none has */
};

#endif
