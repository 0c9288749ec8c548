/* cpu_backend.h - what the CPU backends share: how work is split over threads (cpu_matmul.c,
 * cpu_backend.c, cpu_attention.c), and the single-threaded microkernels that each instruction set
 * implements (struct cpu_microkernels).
 *
 * The split only decides which thread computes a value, never how: one call of one microkernel
 * computes it from its own row. All backends give the same bits, bf16 products apart, because the
 * order of every sum is defined; docs/kernels.md lists the orders. ref spells them out; avx2 holds
 * 16 lanes in two registers, avx512 in one.
 * Thread: engine, and the compute pool's. */
#ifndef BATON_KERNELS_CPU_CPU_BACKEND_H
#define BATON_KERNELS_CPU_CPU_BACKEND_H

#include "kernels/backend.h"
#include "kernels/cpu/matmul/act_quant.h"

enum {
    GEMV_PANELS = 4,   /* panels accumulated side by side, to hide the latency of a multiply-add */
    GEMV_ROWS = 2,     /* up to this number rows are computed one by one: a tile this low has too
                        * few accumulators, and the panels stay cached */
    GEMM_K = UNPACK_K, /* k's of a panel dequantised at a time: 16 KiB of f32, half an L1 cache */
    GEMM_ROWS = 96,    /* rows that share one dequantisation */
    GEMM_PANELS = 4,   /* panels computed while the rows' inputs are in the L2 cache */
    DOT_ROWS = 8,      /* up to this number gemv_int and gemv_bf16 compute all rows at once: a
                        * weight is unpacked once and stays in a register */
    SKINNY_ROWS_MAX = 16, /* of any backend's gemv_int */
    DOT_PANELS = 2,       /* panels that tile_int and tile_bf16 compute at once, sharing loaded
                        * inputs */
    LSE_CHUNK = 1024,     /* elements summed in f32 before the sum is continued in f64 */
    MATMUL_UNPACK_BYTES = GEMM_K * PANEL * 4, /* of scratch: for unpacked panels */
    MATMUL_SCRATCH_BYTES = MATMUL_UNPACK_BYTES + GEMM_ROWS * GEMM_PANELS * PANEL * 4
};
enum { CACHE_LINE = 64 }; /* software prefetch stride */
_Static_assert(DOT_PANELS * sizeof(struct unpacked_panel) <= MATMUL_UNPACK_BYTES &&
                   DOT_PANELS * F8_BLOCK * PANEL * 2 <= MATMUL_UNPACK_BYTES,
               "unpacked panels of either kind fit");

/* The keys or values of a tile: row j is at at[j] + offset bytes. */
struct kv_row_ptrs {
    const char *const *at; /* [ATTN_TILE] */
    size_t offset;
};

/* Matrix products with f32 and with integer accumulation. */
struct gemm_microkernels {
    /* ---- f32 accumulation: every layout (F32 arithmetic), and F32, F16 of FAST ---- */
    /* out[16 * n_panels] = the sums over all k of x for n_panels <= GEMV_PANELS panels from i_panel
     * on. */
    void (*gemv)(float *out, const float *x, const struct weight *w, size_t i_panel,
                 size_t n_panels);
    /* dst[n_k][16] = the panel's weights k_begin .. k_begin + n_k in f32; k_begin is a multiple of
     * GEMM_K. */
    void (*dequantize)(float *dst, const struct weight *w, size_t i_panel, size_t k_begin,
                       size_t n_k);
    /* Adds the next n_k k's to the accumulators acc[n_rows][16]: w [n_k][16], x [n_rows] with
     * stride x_stride. */
    void (*tile)(float *acc, const float *x, size_t x_stride, size_t n_rows, const float *w,
                 size_t n_k);

    /* ---- integer accumulation: integer layouts of FAST ---- */
    /* Quantises one row to act_blocks(n) blocks. */
    void (*quantize)(struct act_block *out, const float *x, size_t n);
    /* Rows that gemv_int takes: with more, tile_int is sooner. At most SKINNY_ROWS_MAX. */
    size_t gemv_int_rows;
    /* out[n_rows][16 * n_panels] = the sums over all k, with the channel's scale, for n_rows <=
     * gemv_int_rows rows of x (x_stride blocks apart). */
    void (*gemv_int)(float *out, const struct act_block *x, size_t x_stride, size_t n_rows,
                     const struct weight *w, size_t i_panel, size_t n_panels);
    void (*unpack_int)(struct unpacked_panel *dst, const struct weight *w, size_t i_panel,
                       size_t k_begin, size_t n_k);
    /* Adds n_k k's (a multiple of 32) of w[n_panels], n_panels <= DOT_PANELS, of `layout` to the
     * accumulators acc[n_panels][n_rows][16]; rows of x are x_stride blocks apart. */
    void (*tile_int)(float *acc, const struct act_block *x, size_t x_stride, size_t n_rows,
                     const struct unpacked_panel *w, size_t n_panels, int layout, size_t n_k);
};

struct elementwise_microkernels {
    /* The two halves of rms_norm: 1 / sqrt(sum16 of x[i]^2 / n + eps), and y[i] = weight[i] *
     * (x[i] * factor), where y may be x. */
    float (*rms_factor)(const float *x, size_t n, float eps);
    void (*rms_apply)(float *y, const float *x, const float *weight, float factor, size_t n);
    void (*add)(float *x, const float *y, size_t n);
    /* out may be gate */
    void (*silu_mul)(float *out, const float *gate, const float *up, size_t n);
    /* Rotates one head; cs [rot_dim/2][2] is the table's row for its position. */
    void (*rope)(float *x, const float *cs, size_t rot_dim, bool interleaved);
    /* y = fmaf(factor, x, y) */
    void (*axpy)(float *y, const float *x, float factor, size_t n);
    void (*scale)(float *x, float factor, size_t n);
    float (*max)(const float *x, size_t n);
    /* sum16 of exp(x[i] - max). */
    float (*sum_exp)(const float *x, float max, size_t n);
    /* p[i] by the formula of host_exp_terms */
    void (*exp_terms)(float *p, const float *x, size_t n, float max, float by);
};

/* attention_tile_loop.c calls these tile by tile; attention.h declares the functions. */
struct attention_microkernels {
    /* dst [ATTN_TILE/16][dim][16] f32: panels whose lanes are keys. Lanes from n_keys on are zero;
     * panels beyond the last key are not written. */
    void (*load_keys)(float *dst, const struct kv_row_ptrs *rows, enum dtype t, size_t n_keys,
                      size_t dim);
    /* dst [ceil(dim/16)][ATTN_TILE][16] f32: panels of n_keys rows whose lanes are elements; lanes
     * from dim on are zero. */
    void (*load_values)(float *dst, const struct kv_row_ptrs *rows, enum dtype t, size_t n_keys,
                        size_t dim);
    /* Adds n_k k's in ascending order: acc[i][16p + l] = fmaf(w[p][k][l], x[i][k],
     * acc[i][16p + l]), beginning with acc[i] * rescale[i], or with +0 if rescale is NULL. Panel p
     * of w is at w + p * w_stride, rows of acc and x are acc_stride and x_stride floats apart. */
    void (*fma_tile)(float *acc, size_t acc_stride, const float *x, size_t x_stride, size_t n_rows,
                     const float *w, size_t w_stride, size_t n_panels, size_t n_k,
                     const float *rescale);
    /* For each row of scores s [ATTN_TILE], of which n_keys (at least 1) are seen: max = the larger
     * of the old max and the largest s * scale, p = exp(fmaf(s, scale, -max)) in place, rescale =
     * exp(old max - max), sum = sum * rescale + sum16 of p. Scores that are not seen become
     * undefined; scale is above 0. */
    void (*online_softmax)(float *scores, size_t n_rows, size_t n_keys, float scale, float *max,
                           float *sum, float *rescale);
    /* The same sums as load_keys and fma_tile, and load_values and fma_tile, for at most
     * ATTN_SKINNY_PAIRS rows, directly from the KV cache, which is read only once and so not worth
     * rearranging. scores [n_rows][ATTN_TILE]; o [n_rows][ceil(dim/16) * 16]. Meanwhile the n_keys
     * rows at `prefetch`, which are needed next, are prefetched. */
    void (*scores_skinny)(float *scores, const float *q, size_t q_stride, size_t n_rows,
                          const struct kv_row_ptrs *keys, const struct kv_row_ptrs *prefetch,
                          enum dtype t, size_t n_keys, size_t dim);
    void (*accumulate_v_skinny)(float *o, size_t o_stride, const float *p, size_t n_rows,
                                const struct kv_row_ptrs *values,
                                const struct kv_row_ptrs *prefetch, enum dtype t, size_t n_keys,
                                size_t dim, const float *rescale);
};

/* Products of bf16 pairs, for FAST activations: weights of layouts BF16 and F8, and attention's
 * scores if the cache is bf16. */
struct bf16_microkernels {
    /* Rounds one row, padded with zeros to act_bf16_stride(n). */
    void (*round_bf16)(uint16_t *out, const float *x, size_t n);
    /* Like gemv_int, with x_stride in elements. */
    void (*gemv_bf16)(float *out, const uint16_t *x, size_t x_stride, size_t n_rows,
                      const struct weight *w, size_t i_panel, size_t n_panels);
    /* For F8 only (a BF16 panel has the pairs that tile_bf16 reads): dst [n_k / 2][16] pairs; the
     * sum of these k's is to be multiplied by *scale. n_k <= 128, rounded up to 4 in dst; k_begin
     * is a multiple of 128. */
    void (*upconvert_bf16)(uint32_t *dst, float *scale, const struct weight *w, size_t i_panel,
                           size_t k_begin, size_t n_k);
    /* acc[n_panels][n_rows][16]; the pairs of panel p are at w + p * w_stride. With scale NULL
     * (BF16) n_k k's are added to acc (an odd last one is paired with zero). Otherwise (F8) acc =
     * acc + scale[p] * (the sum of the n_k k's from 0), with one fused multiply-add. */
    void (*tile_bf16)(float *acc, const uint16_t *x, size_t x_stride, size_t n_rows,
                      const uint32_t *w, size_t w_stride, size_t n_panels, const float *scale,
                      size_t n_k);

    /* ---- attention's scores, with keys from the cache ---- */
    /* dst [ATTN_TILE/16][ceil(dim/2)][16] pairs of neighbouring elements, an odd last one paired
     * with zero: panels whose lanes are keys. Lanes from n_keys on are undefined; panels beyond the
     * last key are not written. */
    void (*load_keys_bf16)(uint32_t *dst, const struct kv_row_ptrs *rows, size_t n_keys,
                           size_t dim);
    /* scores [n_rows][ATTN_TILE] = the sums from +0 over the pairs of dim elements, in ascending
     * order; q was rounded by round_bf16, rows q_stride elements apart; n_panels <=
     * ATTN_TILE/16. */
    void (*scores_bf16)(float *scores, const uint16_t *q, size_t q_stride, size_t n_rows,
                        const uint32_t *keys, size_t n_panels, size_t dim);
    /* The same sums for at most ATTN_SKINNY_PAIRS rows, otherwise like scores_skinny. */
    void (*scores_skinny_bf16)(float *scores, const uint16_t *q, size_t q_stride, size_t n_rows,
                               const struct kv_row_ptrs *keys, const struct kv_row_ptrs *prefetch,
                               size_t n_keys, size_t dim);
};

/* The microkernels of one backend. No table has a NULL entry. */
struct cpu_microkernels {
    const struct gemm_microkernels *gemm;
    const struct elementwise_microkernels *elementwise;
    const struct attention_microkernels *attention;
    const struct bf16_microkernels *bf16; /* NULL if the CPU lacks the instructions */
};

struct cpu_backend {
    struct kernel_backend base; /* first: a context's backend leads to the microkernels */
    struct cpu_microkernels microkernels;
};

extern const struct cpu_backend cpu_backend_ref, cpu_backend_avx2, cpu_backend_avx512,
    cpu_backend_avx512_vnni, cpu_backend_avx512_bf16, cpu_backend_amx;

/* A CPU backend's context, with memory that its ops work in. */
struct cpu_ctx {
    struct kernel_ctx base; /* first */
    void *scratch;          /* cpu_scratch(): scratch_bytes_per_thread for each thread */
    size_t scratch_bytes_per_thread;
    void *acts; /* the running matmul: its tables and the inputs that it quantised */
    size_t acts_bytes;
    void *attn; /* attention_workspace_bytes(): attention's work table; touched as needed */
};

static inline struct cpu_ctx *cpu_ctx_of(struct kernel_ctx *c) { return (struct cpu_ctx *)c; }

/* What all CPU backends have in common: cpu_ctx.c. */
extern const struct kernel_ops cpu_ops;
extern const struct weight_ops cpu_weight_ops;
extern const struct step_ops cpu_step_ops;
enum status cpu_ctx_create(const struct kernel_backend *backend, const struct kernel_options *o,
                           struct kernel_ctx **out, struct err *err);
void cpu_ctx_free(struct kernel_ctx *c);
enum status cpu_ctx_reserve(struct kernel_ctx *c, size_t n_rows, size_t n_in);

void cpu_embed(struct kernel_ctx *c, float *x, const struct weight *w, const int32_t *ids,
               size_t n_rows);
void cpu_matmul(struct kernel_ctx *c, const struct matmul_args *jobs, size_t n_jobs);
void cpu_rms_norm(struct kernel_ctx *c, float *y, size_t y_stride, const float *x, size_t x_stride,
                  const float *weight, size_t n_rows, size_t n, float eps);
void cpu_add(struct kernel_ctx *c, float *x, const float *y, size_t n);
void cpu_copy_rows(struct kernel_ctx *c, float *to, size_t to_stride, const float *from,
                   size_t from_stride, const int32_t *rows, size_t n_rows, size_t n);
void cpu_rope(struct kernel_ctx *c, const struct rope_args *a);
void cpu_kv_append(struct kernel_ctx *c, const struct kv_append_args *a);
void cpu_attention(struct kernel_ctx *c, const struct attn_args *a);
void cpu_route(struct kernel_ctx *c, const struct route_args *a);
void cpu_router(struct kernel_ctx *c, const struct router_args *a);
void cpu_combine(struct kernel_ctx *c, const struct combine_args *a);
void cpu_experts(struct kernel_ctx *c, const struct experts_args *a);
void cpu_expert_slots(struct kernel_ctx *c, const struct expert_slots_args *a);
/* Bytes of cpu_ctx.acts for inputs of n_rows rows of n_in elements in all. */
size_t matmul_acts_bytes(size_t n_rows, size_t n_in);

#define CPU_BACKEND(name_, available_)                                                             \
    {                                                                                              \
        .name = (name_), .weight_layouts = "panels of 16", .available = (available_),              \
        .ops = &cpu_ops, .weight_ops = &cpu_weight_ops, .step_ops = &cpu_step_ops,                 \
        .create = cpu_ctx_create, .free = cpu_ctx_free, .reserve = cpu_ctx_reserve                 \
    }

static inline const struct cpu_microkernels *cpu_microkernels_of(const struct kernel_ctx *c)
{
    return &((const struct cpu_backend *)c->backend)->microkernels;
}

static inline bool cpu_has_bf16_products(const struct kernel_ctx *c)
{
    return cpu_microkernels_of(c)->bf16 != NULL;
}

static inline void *cpu_scratch(struct kernel_ctx *c, int thread)
{
    const struct cpu_ctx *cpu = cpu_ctx_of(c);
    return (char *)cpu->scratch + (size_t)thread * cpu->scratch_bytes_per_thread;
}

#endif
