/* tier_rate.h - how fast a tier brings blocks back, as measured: seconds for a get, and for each of
 * its blocks.
 *
 * Both are taken from the gets that ended, the newer ones counting more. Until there are some, and
 * slowly again while none ends, they are what the tier's kind is expected to do: a disk that was
 * slow once would otherwise never be tried again. Thread: engine. */
#ifndef BATON_KV_TIER_TIER_RATE_H
#define BATON_KV_TIER_TIER_RATE_H

#include <stdint.h>

struct tier_rate {
    double first_s, block_s;                   /* now */
    double expected_first_s, expected_block_s; /* without measurements */
    uint64_t t_ns;                             /* of the last measurement, or of what was given back
                                                * to the expectation since; 0: none */
    uint32_t n_waiting;                        /* blocks of gets that run or wait */
};

/* bytes_per_s: what is expected of it. */
void tier_rate_init(struct tier_rate *r, double first_s, double bytes_per_s, uint64_t block_bytes);
/* A get of n blocks begins; it has ended, after `seconds` of work on it (0: it was cancelled). */
void tier_rate_begin(struct tier_rate *r, uint32_t n);
void tier_rate_end(struct tier_rate *r, uint32_t n, double seconds, uint64_t now_ns);
/* A get was given up, since it took far too long. */
void tier_rate_late(struct tier_rate *r, uint64_t now_ns);
/* Until a get of n blocks that begins now would end. */
double tier_rate_seconds(struct tier_rate *r, uint32_t n, uint64_t now_ns);

#endif
