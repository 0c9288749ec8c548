/* cpu_features.h - what this CPU and its operating system support, asked from the hardware each
 * time.
 * Thread: any. */
#ifndef BATON_KERNELS_CPU_CPU_FEATURES_H
#define BATON_KERNELS_CPU_CPU_FEATURES_H

#include <stdbool.h>

struct cpu_features {
    bool avx2, fma, f16c;                       /* usable: the system also saves the ymm
                                                 * registers */
    bool avx512f, avx512bw, avx512vl, avx512dq; /* usable: the system also saves zmm and mask
                                                 * registers */
    bool avx512_vnni, avx512_bf16;
    bool amx_tile, amx_int8, amx_bf16; /* usable: the system also saves tiles on request */
};

void cpu_features_read(struct cpu_features *out);
/* Requirements of the backends. */
bool cpu_supports_avx2(void);
bool cpu_supports_avx512(void);
bool cpu_supports_vnni(void);
bool cpu_supports_bf16(void);
/* Requests tiles from the system, which enables them for the whole process. */
bool cpu_supports_amx(void);

#endif
