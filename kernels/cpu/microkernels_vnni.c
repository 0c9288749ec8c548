/* microkernels_vnni.c - backends avx512-vnni, for CPUs with AVX-512 that multiply bytes, and
 * avx512-bf16, for those that also multiply bf16. They are two because their results differ: bf16
 * GEMMs are not f32 ones. All other micro-kernels are avx512's. Thread: engine, compute pool. */
#include "kernels/cpu/microkernels_vnni.h"

#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/microkernels_avx512.h"

static const struct gemm_microkernels vnni_gemm = { AVX512_GEMM_MICROKERNELS,
                                                    .gemv_int_rows = DOT_ROWS,
                                                    .gemv_int = vnni_gemv_int,
                                                    .tile_int = vnni_tile_int };

static const struct bf16_microkernels vnni_bf16 = {
    .round_bf16 = bf16_round,
    .gemv_bf16 = bf16_gemv,
    .upconvert_bf16 = bf16_upconvert,
    .tile_bf16 = bf16_tile,
    BF16_SCORE_MICROKERNELS,
};

const struct cpu_backend cpu_backend_avx512_vnni = {
    .base = CPU_BACKEND("avx512-vnni", cpu_supports_vnni),
    .microkernels = { &vnni_gemm, &avx512_elementwise, &avx512_attention, .bf16 = NULL },
};

const struct cpu_backend cpu_backend_avx512_bf16 = {
    .base = CPU_BACKEND("avx512-bf16", cpu_supports_bf16),
    .microkernels = { &vnni_gemm, &avx512_elementwise, &avx512_attention, &vnni_bf16 },
};
