/* loops_vnni.h - the integer loops of the avx512-vnni row; see struct cpu_loops. */
#ifndef BATON_KERNELS_CPU_LOOPS_VNNI_H
#define BATON_KERNELS_CPU_LOOPS_VNNI_H

#include "kernels/cpu/cpu_row.h"

void vnni_gemv_int(float *out, const struct act_block *x, size_t x_stride, size_t n_rows, const struct weight *w, size_t i_panel, size_t n_panels);
void vnni_tile_int(float *acc, const struct act_block *x, size_t x_stride, size_t n_rows, const struct wide_int *w, size_t n_panels,
                   const struct form_info *f, size_t n_k);

#endif
