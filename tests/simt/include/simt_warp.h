/* simt_warp.h - device code's barriers, shuffles and votes. Part of cuda_runtime.h; empty for C. */
#ifndef BATON_TESTS_SIMT_SIMT_WARP_H
#define BATON_TESTS_SIMT_SIMT_WARP_H

#ifdef __cplusplus
#include <string.h>

/* simt_block.cc and simt_warp.cc implement these for the functions below. */
enum simt_barrier { SIMT_BARRIER, SIMT_BARRIER_COUNT, SIMT_BARRIER_AND, SIMT_BARRIER_OR };
enum simt_shuffle { SIMT_SHUFFLE_INDEX, SIMT_SHUFFLE_UP, SIMT_SHUFFLE_DOWN, SIMT_SHUFFLE_XOR };
enum simt_vote { SIMT_SYNC, SIMT_BALLOT, SIMT_MATCH_ANY, SIMT_MATCH_ALL };
enum simt_reduce {
    SIMT_REDUCE_ADD,
    SIMT_REDUCE_MIN,
    SIMT_REDUCE_MAX,
    SIMT_REDUCE_MIN_SIGNED,
    SIMT_REDUCE_MAX_SIGNED,
    SIMT_REDUCE_AND,
    SIMT_REDUCE_OR,
    SIMT_REDUCE_XOR
};
int simt_syncthreads(simt_barrier kind, int predicate);
unsigned long long simt_shuffle_bits(simt_shuffle how, unsigned mask, unsigned long long bits,
                                     int lane, int width);
unsigned simt_vote_bits(simt_vote how, unsigned mask, unsigned long long bits);
unsigned simt_reduce_bits(simt_reduce how, unsigned mask, unsigned bits);
unsigned simt_active_lane(void);
void simt_yield(void);
[[noreturn]] void simt_trap(void);
long long simt_clock(void);

static inline void __syncthreads(void) { simt_syncthreads(SIMT_BARRIER, 0); }
static inline int __syncthreads_count(int p) { return simt_syncthreads(SIMT_BARRIER_COUNT, p); }
static inline int __syncthreads_and(int p) { return simt_syncthreads(SIMT_BARRIER_AND, p); }
static inline int __syncthreads_or(int p) { return simt_syncthreads(SIMT_BARRIER_OR, p); }
static inline void __syncwarp(unsigned mask = 0xffffffffu) { simt_vote_bits(SIMT_SYNC, mask, 0); }

template <class T>
static inline T simt_shuffled(simt_shuffle how, unsigned mask, T value, int lane, int width)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = simt_shuffle_bits(how, mask, bits, lane, width);
    memcpy(&value, &bits, sizeof value);
    return value;
}
template <class T> static inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32)
{
    return simt_shuffled(SIMT_SHUFFLE_INDEX, mask, v, lane, width);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned d, int width = 32)
{
    return simt_shuffled(SIMT_SHUFFLE_UP, mask, v, (int)d, width);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned d, int width = 32)
{
    return simt_shuffled(SIMT_SHUFFLE_DOWN, mask, v, (int)d, width);
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32)
{
    return simt_shuffled(SIMT_SHUFFLE_XOR, mask, v, lanes, width);
}

static inline unsigned __ballot_sync(unsigned mask, int p)
{
    return simt_vote_bits(SIMT_BALLOT, mask, p != 0);
}
static inline int __any_sync(unsigned mask, int p)
{
    return simt_vote_bits(SIMT_BALLOT, mask, p != 0) != 0;
}
static inline int __all_sync(unsigned mask, int p)
{
    return simt_vote_bits(SIMT_BALLOT, mask, p != 0) == mask;
}
/* The calling lane alone, which CUDA allows: code must not rely on more. */
static inline unsigned __activemask(void) { return simt_active_lane(); }
template <class T> static inline unsigned __match_any_sync(unsigned mask, T value)
{
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    return simt_vote_bits(SIMT_MATCH_ANY, mask, bits);
}
template <class T> static inline unsigned __match_all_sync(unsigned mask, T value, int *all)
{
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    unsigned same = simt_vote_bits(SIMT_MATCH_ALL, mask, bits);
    *all = same != 0;
    return same;
}
static inline unsigned __reduce_add_sync(unsigned m, unsigned v)
{
    return simt_reduce_bits(SIMT_REDUCE_ADD, m, v);
}
static inline int __reduce_add_sync(unsigned m, int v)
{
    return (int)simt_reduce_bits(SIMT_REDUCE_ADD, m, (unsigned)v);
}
static inline unsigned __reduce_min_sync(unsigned m, unsigned v)
{
    return simt_reduce_bits(SIMT_REDUCE_MIN, m, v);
}
static inline int __reduce_min_sync(unsigned m, int v)
{
    return (int)simt_reduce_bits(SIMT_REDUCE_MIN_SIGNED, m, (unsigned)v);
}
static inline unsigned __reduce_max_sync(unsigned m, unsigned v)
{
    return simt_reduce_bits(SIMT_REDUCE_MAX, m, v);
}
static inline int __reduce_max_sync(unsigned m, int v)
{
    return (int)simt_reduce_bits(SIMT_REDUCE_MAX_SIGNED, m, (unsigned)v);
}
static inline unsigned __reduce_and_sync(unsigned m, unsigned v)
{
    return simt_reduce_bits(SIMT_REDUCE_AND, m, v);
}
static inline unsigned __reduce_or_sync(unsigned m, unsigned v)
{
    return simt_reduce_bits(SIMT_REDUCE_OR, m, v);
}
static inline unsigned __reduce_xor_sync(unsigned m, unsigned v)
{
    return simt_reduce_bits(SIMT_REDUCE_XOR, m, v);
}

static inline void __nanosleep(unsigned) { simt_yield(); }
static inline void __trap(void) { simt_trap(); }
static inline long long clock64(void) { return simt_clock(); }
static inline unsigned long long __globaltimer(void) { return (unsigned long long)simt_clock(); }
#endif
#endif
