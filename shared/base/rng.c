/* rng.c - Philox4x32 with 10 rounds, from "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon et
 * al., SC'11). Thread: any. */
#include "shared/base/rng.h"

/* The paper's multipliers and Weyl increments (section 4.4). */
#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
#define PHILOX_W0 0x9E3779B9u
#define PHILOX_W1 0xBB67AE85u

enum { PHILOX_ROUNDS = 10 };

void rng_philox(uint64_t key, uint64_t counter_hi, uint64_t counter_lo, uint32_t out[4])
{
    uint32_t c0 = (uint32_t)counter_lo, c1 = (uint32_t)(counter_lo >> 32);
    uint32_t c2 = (uint32_t)counter_hi, c3 = (uint32_t)(counter_hi >> 32);
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        uint64_t p0 = (uint64_t)PHILOX_M0 * c0, p1 = (uint64_t)PHILOX_M1 * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

double rng_uniform(uint64_t key, uint64_t counter_hi, uint64_t counter_lo)
{
    uint32_t w[4];
    rng_philox(key, counter_hi, counter_lo, w);
    uint64_t bits = ((uint64_t)w[1] << 32 | w[0]) >> 11;
    return (double)bits * 0x1p-53;
}
