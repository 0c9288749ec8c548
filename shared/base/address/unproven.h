/* unproven.h - the places of accepted connections that have not proven a secret or shown a ticket
 * yet.
 *
 * Anybody can connect to a port and say nothing. Such connections have a bounded number of places,
 * and those of one source a part of them. When no place is free, a newcomer takes that of the
 * connection that has waited longest: of its own source if that has its part, otherwise of the
 * source that has most. A peer proves itself within two round trips, so it gets in at once, however
 * many strangers wait. Thread: the owner's. */
#ifndef BATON_BASE_ADDRESS_UNPROVEN_H
#define BATON_BASE_ADDRESS_UNPROVEN_H

#include <stdint.h>

#include "shared/base/list.h"

enum { UNPROVEN_MAX = 512 };

/* One place; a member of the connection that has it. Zeroed: none. */
struct unproven_place {
    struct list link;
    struct unproven *of; /* NULL: has no place */
    uint64_t source;
};

struct unproven {
    struct list places; /* the oldest first */
    uint32_t n, n_max, n_max_per_source;
};

/* n_max: 1 to UNPROVEN_MAX; a larger number counts as UNPROVEN_MAX. A source has at most half of
 * the places. */
void unproven_init(struct unproven *u, uint32_t n_max);
/* Gives `newcomer` a place. Returns the place that was taken away for it, whose connection the
 * caller must end; NULL: one was free. */
struct unproven_place *unproven_enter(struct unproven *u, struct unproven_place *newcomer,
                                      uint64_t source);
/* The connection has proven itself or has ended. Harmless when it has no place. */
void unproven_leave(struct unproven_place *p);

struct sockaddr;
/* Returns the source of an address: all ports of an IPv4 address, or of the 2^64 addresses that an
 * IPv6 host can give itself. IPv4 addresses written as IPv6 ones count as what they are. */
uint64_t unproven_source(const struct sockaddr *address);

#endif
