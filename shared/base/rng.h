/* rng.h - counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11).
 *
 * There is no state: a number is a function of (key, counter). So a request's draws depend only on
 * its seed and the index of the token, never on the batch or the node that computed it.
 * Thread: any. */
#ifndef BATON_BASE_RNG_H
#define BATON_BASE_RNG_H

#include <stdint.h>

/* Four 32-bit numbers for (key, counter). */
void rng_philox(uint64_t key, uint64_t counter_hi, uint64_t counter_lo, uint32_t out[4]);
/* Uniform in [0, 1) with 53 bits. */
double rng_uniform(uint64_t key, uint64_t counter_hi, uint64_t counter_lo);

#endif
