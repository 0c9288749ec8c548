/* fma_ref.h - compiles a loop of the reference twice: for every CPU, where fmaf is a call, and with
 * the instruction that computes it, if the CPU has it. Both give the same bits, because fmaf has
 * one result; tests compute most of their expected values this way. Thread: any. */
#ifndef BATON_KERNELS_CPU_FMA_REF_H
#define BATON_KERNELS_CPU_FMA_REF_H

#define FMA_LOOP static inline __attribute__((always_inline))

/* Defines CALLED(params), which runs LOOP(args), an FMA_LOOP. */
#ifdef __x86_64__
#define WITH_FMA(storage, called, loop, params, args)                                              \
    static __attribute__((target("avx2,fma"))) void called##_fma params { loop args; }             \
    storage void called params                                                                     \
    {                                                                                              \
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) called##_fma args;    \
        else loop args;                                                                            \
    }
#else
#define WITH_FMA(storage, called, loop, params, args)                                              \
    storage void called params { loop args; }
#endif

#endif
