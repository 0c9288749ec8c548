/* schedule.h - the decisions that need no device: which ports make a rail, which rail takes a put,
 * when a broken rail is tried again. Pure. Thread: any. */
#ifndef BATON_KVTRANSFER_RDMA_SCHEDULE_H
#define BATON_KVTRANSFER_RDMA_SCHEDULE_H

#include "kvtransfer/rdma/setup.h"

enum {
    RDMA_RETRY_FIRST_MS = 500, /* a rail that has just broken rests that long, then twice that,
                                * ... */
    RDMA_RETRY_MAX_MS = 2000,  /* ... up to this: a try is a pair of queue pairs and one round trip,
                                * and a link that came back far away (no port event here) must carry
                                * again within 3 s */
    RDMA_RETRY_ALONE_MS = 100  /* while no rail is up nothing moves, so there is nothing to spare */
};

struct rdma_pair {
    uint32_t mine, theirs; /* indices of ports */
};

/* Pair ports: those on one subnet (longest common GID prefix, same link and GID type) first, equals
 * by index; every port of the side that has more gets a partner, so a partner may have several.
 * Returns how many pairs, at most RDMA_RAILS_MAX; 0 when no two ports are of one kind of link. The
 * order of `out` is that of `mine`. */
uint32_t rdma_schedule_pair(const struct rdma_port_addr *mine, uint32_t n_mine,
                            const struct rdma_port_addr *theirs, uint32_t n_theirs,
                            struct rdma_pair out[RDMA_RAILS_MAX]);

/* A lane: something that takes puts. */
struct rdma_qp_load {
    uint64_t in_flight;   /* bytes put and not acknowledged */
    uint64_t bytes_per_s; /* of its link; 0 (not known) counts as 1 */
    bool usable;
};
/* The lane on which `bytes` more would be through first: least (in_flight + bytes) / speed; the
 * first of equals. n: none is usable. */
uint32_t rdma_schedule_pick(const struct rdma_qp_load *loads, uint32_t n, uint64_t bytes);

/* How long a rail rests before try number n_failed + 1. */
uint32_t rdma_schedule_backoff_ms(uint32_t n_failed, bool others_up);

/* Ack timeout of an exponent (IBA vol. 1, 9.7.6.1.3: 4.096 us * 2^n), rounded up to ms. */
uint32_t rdma_schedule_timeout_ms(uint32_t exponent);

#endif
