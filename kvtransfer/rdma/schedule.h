/* schedule.h - decisions that need no device: which ports make a rail, which queue pair gets a put,
 * when a broken rail is tried again. Thread: any (pure functions). */
#ifndef BATON_KVTRANSFER_RDMA_SCHEDULE_H
#define BATON_KVTRANSFER_RDMA_SCHEDULE_H

#include "kvtransfer/rdma/setup.h"

enum {
    RDMA_RETRY_FIRST_MS = 500, /* pause after a rail broke; it doubles ... */
    RDMA_RETRY_MAX_MS = 2000,  /* ... up to this: a try costs a pair of queue pairs and one round
                                * trip, and a link that came back at the peer's end (no port event
                                * here) must work again within 3 s */
    RDMA_RETRY_ALONE_MS = 100  /* pause while no rail is up and nothing moves */
};

struct rdma_pair {
    uint32_t mine, theirs; /* indices of ports */
};

/* Pairs ports: those on one subnet (longest common GID prefix, same link and GID type) first, equal
 * ones by index. Every port of the side with more ports gets a partner, so a partner may have
 * several. Returns the number of pairs, at most RDMA_RAILS_MAX; 0 if no two ports have the same
 * kind of link. `out` is in the order of `mine`. */
uint32_t rdma_schedule_pair(const struct rdma_port_addr *mine, uint32_t n_mine,
                            const struct rdma_port_addr *theirs, uint32_t n_theirs,
                            struct rdma_pair out[RDMA_RAILS_MAX]);

/* The load of a queue pair that can get a put. */
struct rdma_qp_load {
    uint64_t in_flight;   /* bytes put and not acknowledged */
    uint64_t bytes_per_s; /* of its link; 0 (not known) counts as 1 */
    bool usable;
};
/* The queue pair on which `bytes` more would complete first: the least (in_flight + bytes) / speed,
 * the first of equals. Returns n if none is usable. */
uint32_t rdma_schedule_pick(const struct rdma_qp_load *loads, uint32_t n, uint64_t bytes);

/* The pause before try number n_failed + 1. */
uint32_t rdma_schedule_backoff_ms(uint32_t n_failed, bool others_up);

/* The ack timeout of an exponent (IBA vol. 1, 9.7.6.1.3: 4.096 us * 2^n), rounded up to ms. */
uint32_t rdma_schedule_timeout_ms(uint32_t exponent);

#endif
