/* hash_avx512.c - XXH3 with AVX-512: the same values, several times as fast on long inputs. The
 * only file compiled with the AVX-512 flags; hash.c calls it only where the CPU has them.
 * Thread: any. */
#include "shared/base/hash/hash_isa.h"

#if HASH_ISA
#define XXH_VECTOR 3 /* XXH_AVX512 */
#include "shared/base/hash/hash_steps.h"

uint64_t hash_64_avx512(const void *p, size_t n, uint64_t seed)
{
    return XXH3_64bits_withSeed(p, n, seed);
}

void hash_64_each_avx512(const void *const *inputs, size_t n_inputs, size_t n, uint64_t *out)
{
    hash_each(inputs, n_inputs, n, out);
}
#endif
