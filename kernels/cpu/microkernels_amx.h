/* microkernels_amx.h - the micro-kernels of backend amx that use tiles; see struct
 * cpu_microkernels.
 * Thread: engine, compute pool. */
#ifndef BATON_KERNELS_CPU_MICROKERNELS_AMX_H
#define BATON_KERNELS_CPU_MICROKERNELS_AMX_H

#include "kernels/cpu/cpu_backend.h"

enum { AMX_ROWS = 16 }; /* of a tile at most */

/* The operand of ldtilecfg: bytes per row and rows of each of the eight tiles. */
struct amx_tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct amx_tile_config) == 64, "the CPU's format");

/* A compiler barrier before tiles are loaded from memory that the same function wrote, because the
 * intrinsics do not declare that they read it. */
static inline void amx_written(const void *p) { __asm__ volatile("" : : "r"(p) : "memory"); }

void amx_tile_int(float *acc, const struct act_block *x, size_t x_stride, size_t n_rows,
                  const struct unpacked_panel *w, size_t n_panels, int layout, size_t n_k);
void amx_gemv_bf16(float *out, const uint16_t *x, size_t x_stride, size_t n_rows,
                   const struct weight *w, size_t i_panel, size_t n_panels);
void amx_tile_bf16(float *acc, const uint16_t *x, size_t x_stride, size_t n_rows, const uint32_t *w,
                   size_t w_stride, size_t n_panels, const float *scale, size_t n_k);

#endif
