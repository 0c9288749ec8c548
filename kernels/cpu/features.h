/* features.h - what this CPU and its operating system can do, asked of the hardware each time. Thread: any. */
#ifndef BATON_KERNELS_CPU_FEATURES_H
#define BATON_KERNELS_CPU_FEATURES_H

#include <stdbool.h>

struct cpu_features {
    bool avx2, fma, f16c;                         /* usable: the system also saves the ymm registers */
    bool avx512f, avx512bw, avx512vl, avx512dq;   /* usable: the system also saves zmm and mask registers */
    bool avx512_vnni, avx512_bf16, amx_bf16;      /* named on the start page; no row needs them yet */
};

void cpu_features_read(struct cpu_features *out);
/* What the rows of kernels.h need. */
bool cpu_has_avx2_row(void);
bool cpu_has_avx512_row(void);

#endif
