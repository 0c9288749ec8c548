/* dummy_weights.h - elements of weights that no file holds (--load-format dummy): a fixed function
 * of the tensor's seed and of the element's place in it.
 *
 * Four bytes of a mixed counter (the finaliser of splitmix64: Steele, Lea, Flood, 2014) added up:
 * nearly normal around 0 with a deviation of DUMMY_WEIGHTS_STDDEV units, never more than 510 of
 * them. Integers, one product and one rounding to bf16, so CPU and GPU compute the same
 * bits. Thread: any, host and device. */
#ifndef BATON_KERNELS_DUMMY_WEIGHTS_H
#define BATON_KERNELS_DUMMY_WEIGHTS_H

#include <stdint.h>
#include <string.h>

/* Raised when the elements change, because nodes with other elements would not agree. */
enum { DUMMY_WEIGHTS_VERSION = 1 };

static const float DUMMY_WEIGHTS_STDDEV = 147.8f; /* sqrt(4 (256^2 - 1) / 12) */

#ifdef __CUDACC__
#define DUMMY_WEIGHTS_FUNCTION static __host__ __device__ __forceinline__
#else
#define DUMMY_WEIGHTS_FUNCTION static inline
#endif

struct dummy_weights {
    uint64_t seed, at; /* of the tensor; place of the first element that is meant */
    float unit;        /* factor of the sum; 0: not a dummy */
};

/* The element at a place, as the bits of a bf16. */
DUMMY_WEIGHTS_FUNCTION uint16_t dummy_weight_bf16(const struct dummy_weights *m, uint64_t place)
{
    uint64_t x = m->seed + (m->at + place) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    const uint32_t four = (uint32_t)(x >> 32);
    const int32_t sum =
        (int32_t)((four & 0xff) + (four >> 8 & 0xff) + (four >> 16 & 0xff) + (four >> 24)) - 510;
    const float element = (float)sum * m->unit;
    uint32_t bits;
    memcpy(&bits, &element, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif
