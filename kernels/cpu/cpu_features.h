/* cpu_features.h - what this CPU and its operating system can do, asked of the hardware each time.
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
    bool amx_tile, amx_int8, amx_bf16; /* usable: the system also saves the tiles of
                                        * those who ask for them */
};

void cpu_features_read(struct cpu_features *out);
/* What the rows of kernels.h need. */
bool cpu_supports_avx2(void);
bool cpu_supports_avx512(void);
bool cpu_supports_vnni(void);
bool cpu_supports_bf16(void);
/* Asks the system for tiles, which it grants to the whole process. */
bool cpu_supports_amx(void);

#endif
