/* simt_atomics.h - device code's atomics, fences, and loads and stores with a cache hint. Part of
 * cuda_runtime.h; empty for C. */
#ifndef BATON_TESTS_SIMT_SIMT_ATOMICS_H
#define BATON_TESTS_SIMT_SIMT_ATOMICS_H

#ifdef __cplusplus
#include <string.h>

#include <type_traits>

#define SIMT_ATOMIC_INTEGERS(T)                                                                    \
    static inline T atomicAdd(T *p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }    \
    static inline T atomicExch(T *p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL); }  \
    static inline T atomicAnd(T *p, T v) { return __atomic_fetch_and(p, v, __ATOMIC_ACQ_REL); }    \
    static inline T atomicOr(T *p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_ACQ_REL); }      \
    static inline T atomicXor(T *p, T v) { return __atomic_fetch_xor(p, v, __ATOMIC_ACQ_REL); }    \
    static inline T atomicCAS(T *p, T expected, T v)                                               \
    {                                                                                              \
        __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);   \
        return expected;                                                                           \
    }                                                                                              \
    static inline T atomicMax(T *p, T v)                                                           \
    {                                                                                              \
        T was = __atomic_load_n(p, __ATOMIC_ACQUIRE);                                              \
        while (was < v && !__atomic_compare_exchange_n(p, &was, v, false, __ATOMIC_ACQ_REL,        \
                                                       __ATOMIC_ACQUIRE)) {}                       \
        return was;                                                                                \
    }                                                                                              \
    static inline T atomicMin(T *p, T v)                                                           \
    {                                                                                              \
        T was = __atomic_load_n(p, __ATOMIC_ACQUIRE);                                              \
        while (v < was && !__atomic_compare_exchange_n(p, &was, v, false, __ATOMIC_ACQ_REL,        \
                                                       __ATOMIC_ACQUIRE)) {}                       \
        return was;                                                                                \
    }
SIMT_ATOMIC_INTEGERS(int)
SIMT_ATOMIC_INTEGERS(unsigned)
SIMT_ATOMIC_INTEGERS(unsigned long long)
#undef SIMT_ATOMIC_INTEGERS
static inline int atomicSub(int *p, int v) { return atomicAdd(p, (int)(0u - (unsigned)v)); }
static inline unsigned atomicSub(unsigned *p, unsigned v) { return atomicAdd(p, 0u - v); }
/* wraps to 0 after `last` */
static inline unsigned atomicInc(unsigned *p, unsigned last)
{
    unsigned was = __atomic_load_n(p, __ATOMIC_ACQUIRE);
    while (!__atomic_compare_exchange_n(p, &was, was >= last ? 0 : was + 1, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE)) {}
    return was;
}

template <class T> static inline T simt_atomic_add_float(T *p, T v)
{
    T was, sum;
    __atomic_load(p, &was, __ATOMIC_ACQUIRE);
    do sum = was + v;
    while (!__atomic_compare_exchange(p, &was, &sum, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    return was;
}
static inline float atomicAdd(float *p, float v) { return simt_atomic_add_float(p, v); }
static inline double atomicAdd(double *p, double v) { return simt_atomic_add_float(p, v); }
static inline float atomicExch(float *p, float v)
{
    float was;
    __atomic_exchange(p, &v, &was, __ATOMIC_ACQ_REL);
    return was;
}

static inline void __threadfence(void) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block(void) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_system(void) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

/* The stored type comes from the pointer alone, as with CUDA's overloads. */
template <class T> struct simt_same {
    typedef T type;
};
#define SIMT_LOAD(name)                                                                            \
    template <class T> static inline T name(const T *p) { return *p; }
#define SIMT_STORE(name)                                                                           \
    template <class T> static inline void name(T *p, typename simt_same<T>::type v) { *p = v; }
SIMT_LOAD(__ldg)
SIMT_LOAD(__ldca)
/* Read past L1: before griddepcontrol.wait it may be a guess (simt_overlap.h). */
extern bool simt_is_early;
void simt_load_guess(void *to, const void *from, size_t bytes);
template <class T> static inline T __ldcg(const T *p)
{
    T v;
    if (!simt_is_early) return *p;
    simt_load_guess(&v, p, sizeof v);
    return v;
}
SIMT_LOAD(__ldcs)
SIMT_LOAD(__ldlu)
SIMT_LOAD(__ldcv)
SIMT_STORE(__stwb)
SIMT_STORE(__stcg)
SIMT_STORE(__stcs)
SIMT_STORE(__stwt)
#undef SIMT_LOAD
#undef SIMT_STORE
#endif
#endif
