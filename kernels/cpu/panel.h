/* panel.h - the packed form of a matrix: panels of 16 outputs, so that vector lanes run over outputs.
 *
 * Panel i holds outputs 16i .. 16i+15 (those past n_out are zero) for all k, and lies at data + i * panel_bytes:
 *   F32    [n_in][16] f32
 *   BF16   [ceil(n_in/2)][16] u32: k even in the low half, k odd in the high half
 *   Q8_0   [n_in/32] struct panel_q8_0
 *   Q4_1   [n_in/32] struct panel_q4_1
 * A lane then adds up one output alone, k ascending: the chain of kernels.h needs no reduction across lanes, and all
 * instruction sets share one packed form and one result. The weight of a quantised element is d*q, or fmaf(d, q, m):
 * an f32, before it enters the chain. Thread: any (read only once packed). */
#ifndef BATON_KERNELS_CPU_PANEL_H
#define BATON_KERNELS_CPU_PANEL_H

#include "kernels/kernels.h"

enum { PANEL = 16 };

struct panel_q8_0 {
    uint16_t d[PANEL]; /* f16 */
    int8_t   q[DTYPE_BLOCK][PANEL];
};

struct panel_q4_1 {
    uint16_t d[PANEL], m[PANEL]; /* f16 */
    uint32_t q[4][PANEL];        /* nibble i of q[w][j]: k = 8w + i of output j */
};

static inline size_t panel_count(const struct weight *w) { return (w->n_out + PANEL - 1) / PANEL; }

size_t panel_bytes(enum dtype t, size_t n_in);
/* One element as f32: the definition of what a packed matrix holds. */
float  panel_weight(const struct weight *w, size_t i_panel, size_t k, size_t lane);
/* The weight_pack slot of every cpu row. */
enum status panel_pack(struct kernel_ctx *c, const struct weight_src *src, struct weight *out);

static inline const void *panel_at(const struct weight *w, size_t i_panel, size_t bytes_per_panel)
{
    return (const char *)w->data + i_panel * bytes_per_panel;
}

#endif
