/* cpu_row.h - what the cpu rows of kernels.h share: how work is split (cpu_row.c, once for all), and the inner loops that
 * each instruction set writes for itself (struct cpu_loops, single threaded).
 *
 * The split only decides which thread computes a value, never how: every value is computed by one call of one loop from
 * its own row. That is how the rule of kernels.h holds for any number of rows and threads.
 *
 * All rows give the same bits, because the loops are defined down to the order of each sum:
 *   sum16      element i is added to partial sum i % 16, i ascending; then partial sums l and l+8 are added, then l and l+4,
 *              l and l+2, l and l+1. Where an element is a product, it is fused into the addition.
 *   exp        cpu/exp.h, one polynomial.
 * ref spells these out; avx2 holds the 16 partial sums in two registers, avx512 in one. */
#ifndef BATON_KERNELS_CPU_CPU_ROW_H
#define BATON_KERNELS_CPU_CPU_ROW_H

#include "kernels/cpu/panel.h"

enum {
    GEMV_PANELS = 4,   /* panels whose chains run side by side: hides the latency of a multiply-add */
    GEMV_ROWS = 2,     /* up to here rows go one by one: a tile this low has too few chains, and the panels stay cached */
    GEMM_K = 256,      /* k's of a panel widened at a time: 16 KiB of f32, half a first-level cache */
    GEMM_ROWS = 96,    /* rows that share one widening */
    GEMM_PANELS = 4,   /* panels computed while the rows' inputs are in the second-level cache */
    ATTN_ITEMS = 64,   /* (query row, head) pairs that share the keys and values of a tile */
    LSE_CHUNK = 1024,  /* elements summed in f32 before the sum is carried on in f64 */
    SCRATCH_FLOATS = GEMM_K * PANEL + GEMM_ROWS * GEMM_PANELS * PANEL
};

/* Softmax so far of one (query, head): the largest score and the sum of exp(score - max). */
struct attn_state {
    float max, sum;
};

struct attn_tile {
    const float *k, *v; /* [n_keys, head_dim] */
    size_t       n_keys, head_dim;
    float        scale;
};

struct cpu_loops {
    /* out[16 * n_panels] = chains over all k of x for n_panels <= GEMV_PANELS panels from i_panel on. */
    void (*gemv)(float *out, const float *x, const struct weight *w, size_t i_panel, size_t n_panels);
    /* dst[n_k][16] = the panel's weights k_begin .. k_begin+n_k as f32; k_begin is a multiple of 32. */
    void (*widen)(float *dst, const struct weight *w, size_t i_panel, size_t k_begin, size_t n_k);
    /* Carry on the chains acc[n_rows][16] over the n_k next k's: w [n_k][16], x [n_rows] with stride x_stride. */
    void (*tile)(float *acc, const float *x, size_t x_stride, size_t n_rows, const float *w, size_t n_k);
    void (*rms_norm)(float *y, const float *x, const float *weight, size_t n, float eps);
    void (*add)(float *x, const float *y, size_t n);
    void (*silu_mul)(float *out, const float *gate, const float *up, size_t n);
    /* One head; cs [rot_dim/2][2] is the table's row of its position. */
    void (*rope)(float *x, const float *cs, size_t rot_dim, bool interleaved);
    /* Add one tile to the running softmax: out [head_dim] holds the weighted sum of values so far. */
    void (*attend)(float *out, struct attn_state *s, const float *q, const struct attn_tile *t);
    void (*scale)(float *x, float factor, size_t n);
    float (*max)(const float *x, size_t n);
    /* sum16 of exp(x[i] - max). */
    float (*sum_exp)(const float *x, float max, size_t n);
};

struct cpu_row {
    struct kernel_ops ops; /* first: the context's ops pointer leads to the loops */
    struct cpu_loops  loops;
};

extern const struct cpu_row cpu_row_ref, cpu_row_avx2, cpu_row_avx512;

/* The slots every cpu row fills in the same way. */
void cpu_matmul(struct kernel_ctx *c, float *y, size_t y_stride, const float *x, size_t n_rows, const struct weight *w,
                const float *bias);
void cpu_rms_norm(struct kernel_ctx *c, float *y, const float *x, const float *weight, size_t n_rows, size_t n, float eps);
void cpu_add(struct kernel_ctx *c, float *x, const float *y, size_t n);
void cpu_silu_mul(struct kernel_ctx *c, float *out, const float *gate_up, size_t n_rows, size_t n);
void cpu_rope(struct kernel_ctx *c, float *x, size_t x_stride, size_t n_rows, size_t n_heads, size_t head_dim, size_t rot_dim,
              const float *cos_sin, const int32_t *pos, bool interleaved);
void cpu_kv_append(struct kernel_ctx *c, const struct kv_append_args *a);
void cpu_attention(struct kernel_ctx *c, const struct attn_args *a);
void cpu_log_sum_exp(struct kernel_ctx *c, float *lse, const float *x, size_t x_stride, size_t n_rows, size_t n);

#define CPU_ROW_OPS(name_, available_)                                                                    \
    { .name = (name_), .available = (available_), .weight_pack = panel_pack, .matmul = cpu_matmul,        \
      .rms_norm = cpu_rms_norm, .add = cpu_add, .silu_mul = cpu_silu_mul, .rope = cpu_rope,               \
      .kv_append = cpu_kv_append, .attention = cpu_attention, .log_sum_exp = cpu_log_sum_exp }

static inline const struct cpu_loops *cpu_loops_of(const struct kernel_ctx *c)
{
    return &((const struct cpu_row *)c->ops)->loops;
}

static inline float *cpu_scratch(const struct kernel_ctx *c, int thread)
{
    return (float *)((char *)c->scratch + (size_t)thread * c->scratch_bytes_per_thread);
}

#endif
