/* hash_avx512.c - XXH3 with AVX-512: the same values, several times as fast on long inputs. The
 * only file compiled with the AVX-512 flags; hash.c calls it only where the CPU has them.
 * Thread: any. */
#include "shared/base/hash/hash_isa.h"

#if HASH_ISA
#define XXH_INLINE_ALL
#define XXH_VECTOR 3 /* XXH_AVX512 */
#include <xxhash.h>

uint64_t hash_64_avx512(const void *p, size_t n, uint64_t seed)
{
    return XXH3_64bits_withSeed(p, n, seed);
}
#endif
