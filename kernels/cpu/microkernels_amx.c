/* microkernels_amx.c - backend amx: tiles for many rows of integers and for all bf16 GEMMs; the
 * others are avx512-vnni's. Thread: engine, compute pool. */
#include "kernels/cpu/microkernels_amx.h"

#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/microkernels_avx512.h"
#include "kernels/cpu/microkernels_vnni.h"

const struct cpu_backend cpu_backend_amx = {
    .base = CPU_BACKEND("amx", cpu_supports_amx),
    .microkernels = { AVX512_MICROKERNELS, .gemv_int = vnni_gemv_int, .tile_int = amx_tile_int,
                      .round_bf16 = bf16_round, .gemv_bf16 = amx_gemv_bf16,
                      .upconvert_bf16 = bf16_upconvert, .tile_bf16 = amx_tile_bf16,
                      BF16_SCORE_MICROKERNELS },
};
