/* microkernels_amx.c - backend amx: tiles for many rows of integers and for all bf16 GEMMs; the
 * others are avx512-vnni's. Thread: engine, compute pool. */
#include "kernels/cpu/microkernels_amx.h"

#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/microkernels_avx512.h"
#include "kernels/cpu/microkernels_vnni.h"

static const struct gemm_microkernels amx_gemm = { AVX512_GEMM_MICROKERNELS,
                                                   .gemv_int_rows = DOT_ROWS,
                                                   .gemv_int = vnni_gemv_int,
                                                   .tile_int = amx_tile_int };

static const struct bf16_microkernels amx_bf16 = {
    .round_bf16 = bf16_round,
    .gemv_bf16 = amx_gemv_bf16,
    .upconvert_bf16 = bf16_upconvert,
    .tile_bf16 = amx_tile_bf16,
    BF16_SCORE_MICROKERNELS,
};

const struct cpu_backend cpu_backend_amx = {
    .base = CPU_BACKEND("amx", cpu_supports_amx),
    .microkernels = { &amx_gemm, &avx512_elementwise, &avx512_attention, &amx_bf16 },
};
