/* hash_isa.h - XXH3 per instruction set, for hash.c and its test only. All variants give the same
 * value for the same input.
 *
 * Both sides of a transfer checksum every KV byte; at the compiler's baseline (SSE2) that costs as
 * much as the copy itself.
 * Thread: any. */
#ifndef BATON_BASE_HASH_HASH_ISA_H
#define BATON_BASE_HASH_HASH_ISA_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#define HASH_ISA 1
/* Call only where __builtin_cpu_supports names the instruction set. */
uint64_t hash_64_avx2(const void *p, size_t n, uint64_t seed);
uint64_t hash_64_avx512(const void *p, size_t n, uint64_t seed);
void hash_64_each_avx2(const void *const *inputs, size_t n_inputs, size_t n, uint64_t *out);
void hash_64_each_avx512(const void *const *inputs, size_t n_inputs, size_t n, uint64_t *out);
#else
#define HASH_ISA 0
#endif

#endif
