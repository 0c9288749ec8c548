/* gemm.h - GEMM on the GPU: y = W x for one matrix or a group of them (experts), in every weight
 * layout. docs/kernels.md, "GEMM on GPUs", has the layouts and the accumulation orders.
 *
 * A row of y depends only on its row of x, never on what the other rows hold. With `begin` each
 * group has its own rows (experts); without it every matrix multiplies all rows, each group from
 * and to its own columns (the heads of MLA: x + g * x_group, y + g * y_group). Rows of 16-bit x are
 * read up to a multiple of GEMM_STEP; if a group's elements end before that, zeros must follow, or
 * a NaN of the next group's would become this one's. f16 ends at 65504: prepare_inputs.h says what
 * larger numbers become, and GEMM_SILU_F16 does the same.
 * Thread: engine. Calls enqueue work on the stream; they neither wait nor allocate. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_H
#define BATON_KERNELS_CUDA_GEMM_GEMM_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { GEMM_STEP = 64 }; /* rows of W and of 16-bit x are padded to a multiple */

enum gemm_weight_layout {
    GEMM_F32,
    GEMM_BF16,
    GEMM_F16,
    GEMM_W8,
    GEMM_W4,
    GEMM_F8,
    GEMM_WEIGHT_LAYOUTS
};

enum gemm_epilogue {
    GEMM_STORE,      /* y  = W x + bias */
    GEMM_ADD,        /* y += W x + bias */
    GEMM_STORE_BF16, /* y = W x + bias in bf16; only of calls that gemm_uses_sm90 */
    GEMM_SILU,       /* of a paired matrix: y[i] = silu(gate) * up, n_out / 2 of them, f32 */
    GEMM_SILU_BF16, /* the same in bf16, rows padded with zeros to a multiple of GEMM_STEP: input of
                     * the next GEMM */
    GEMM_SILU_F16   /* the same in f16 */
};
static inline bool gemm_outputs_16(enum gemm_epilogue epilogue)
{
    return epilogue == GEMM_SILU_BF16 || epilogue == GEMM_SILU_F16;
}
static inline bool gemm_is_silu(enum gemm_epilogue epilogue)
{
    return epilogue == GEMM_SILU || gemm_outputs_16(epilogue);
}

/* Whether elements have 16 bits, which are multiplied as they are. */
static inline bool gemm_is_16(enum gemm_weight_layout layout)
{
    return layout == GEMM_BF16 || layout == GEMM_F16;
}
/* The type of x for a layout, without x_scales. */
static inline enum dtype gemm_x_type(enum gemm_weight_layout layout)
{
    return layout == GEMM_F32 ? DTYPE_F32 : layout == GEMM_F16 ? DTYPE_F16 : DTYPE_BF16;
}

struct gemm_cublaslt;

/* All pointers except the library's are device memory. */
struct gemm {
    enum gemm_weight_layout layout;
    bool paired;
    size_t n_out, n_in;
    const void *w;         /* the matrix of group 0 */
    size_t w_stride;       /* bytes to the next group's */
    int32_t n_groups;      /* 1 at least */
    const int32_t *begin;  /* [n_groups + 1]: group g has rows begin[g] .. begin[g + 1] of x
                            * and y; NULL: every group has all n_rows */
    size_t n_rows;         /* of y; with `begin` an upper bound of begin[n_groups] -
                            * begin[0] */
    size_t x_group;        /* without `begin`: elements of x from a group's first row to the
                            * next group's; of 16 bits a multiple of 8 */
    size_t y_group;        /* likewise elements of y */
    const void *x;         /* of type gemm_x_type */
    size_t x_stride;       /* elements between rows: of 16 bits a multiple of GEMM_STEP, x
                            * aligned to 16 bytes */
    const int32_t *x_rows; /* [n_rows]: which row of x; NULL: the same as in y */
    /* Only F8: x is e4m3, its rows padded with zeros to a multiple of 128 elements, x_stride a
     * multiple of 128; [rows of x][ceil(n_in / 128)] scales, one per 128 elements. NULL: x is bf16.
     * gemm_wants_f8_x says which calls may have it: any number of rows on such a GPU, not
     * `deterministic`, and not groups without `begin`; others fail. */
    const float *x_scales;
    size_t x_scales_stride; /* floats between the scales of two rows; 0: they lie one row after
                             * another */
    /* x is f32, whatever the layout: the kernel rounds it as prepare_inputs does, after `norm` if
     * that is not NULL. Rows without padding. gemm_takes_f32_x says which calls may have it; others
     * fail. */
    bool x_f32;
    const float *norm; /* [n_in] */
    float norm_eps;
    size_t n_x_rows;    /* with `begin`: rows of x; 0: not known, which excludes some kernels */
    bool begin_is_read; /* `begin` may be read before the kernel launched before has ended: an
                         * earlier one wrote it */
    const float *bias;  /* [n_out] or NULL; of a paired matrix gate's, then up's */
    void *y;            /* f32; ready: bf16 or f16 */
    size_t y_stride;    /* elements between rows */
    enum gemm_epilogue epilogue;    /* without SILU, y of a paired matrix interleaves gate and
                                     * up */
    void *scratch;                  /* gemm_scratch_bytes, zeroed once; for calls on one stream.
                                     * NULL: narrow matrices are read far slower */
    struct gemm_cublaslt *cublaslt; /* gemm_cublaslt.h: for dense GEMMs that are not
                                     * deterministic; NULL: our own kernels compute them */
    void *workspace;    /* GEMM_CUBLASLT_WORKSPACE bytes for the library; for calls on one
                         * stream */
    bool deterministic; /* one accumulation order whatever n_rows is (--deterministic) */
};

/* Bytes of a matrix in a layout, a multiple of 256. */
size_t gemm_matrix_bytes(enum gemm_weight_layout layout, bool paired, size_t n_out, size_t n_in);
/* Offset of its scales in bytes. */
size_t gemm_scales_at(enum gemm_weight_layout layout, size_t n_out, size_t n_in);
/* Bytes of one row of W. */
size_t gemm_row_bytes(enum gemm_weight_layout layout, size_t n_in);
/* Bytes of struct gemm's scratch, for any call. Its owner zeroes it once; calls leave it as they
 * need it. */
size_t gemm_scratch_bytes(void);
/* Whether x should be quantised to e4m3, for a call with everything set except x, x_stride and
 * x_scales. Depends only on the GPU, layout and shapes. */
bool gemm_wants_f8_x(const struct gemm *g);
/* Whether x may be f32, for a call with everything set: few rows of a matrix in another layout,
 * where a launch that rounds them would cost more than that each block does it. */
bool gemm_takes_f32_x(const struct gemm *g);
/* Whether gemm_run takes a kernel of compute capability 9.0. */
bool gemm_uses_sm90(const struct gemm *g);
/* For tests: whether its tiles share W where they can. */
bool gemm_sm90_shares(void);
enum gemm_sm90_tile {
    GEMM_SM90_NARROW, /* 128 rows by 128 columns */
    GEMM_SM90_WIDE,   /* 128 by 256; not with x_scales */
    GEMM_SM90_TALL,   /* 256 by 128; only with x_scales */
    /* the same with `begin`, where two row tiles of a group share what they load of W; not with
     * layouts whose numbers are converted on their way */
    GEMM_SM90_NARROW_MULTICAST, /* only with x_scales */
    GEMM_SM90_WIDE_MULTICAST,
    GEMM_SM90_TALL_MULTICAST
};
/* For tests and measurements: runs that kernel for all rows of a call on tiles of one kind.
 * cudaErrorInvalidValue if gemm_run never takes it, cudaErrorNotSupported if the driver
 * knows no tensor maps, for tiles that share W. */
cudaError_t gemm_run_sm90(cudaStream_t stream, const struct gemm *g, enum gemm_sm90_tile tile);
cudaError_t gemm_run(cudaStream_t stream, const struct gemm *g);
/* Fused: n GEMMs of the same rows. x and what describes it, n_rows, n_in and layout are the first
 * one's, and none has groups. The bits are gemm_run's, with one launch if there are few rows,
 * because a launch costs as much as reading a MiB or more. */
enum { GEMM_FUSED_MAX = 3 /* q, k, v */ };
cudaError_t gemm_run_fused(cudaStream_t stream, const struct gemm *g, int n);

/* Experts' results added up instead of stored: y[i] = (add ? y[i] : 0) + sum over j ascending of
 * weights[i][j] * (W x)[index[i][j]], accumulated by fused multiply-adds. */
struct gemm_choices {
    const int32_t *index; /* [n_rows][n_used] */
    const float *weights; /* [n_rows][n_used] */
    int32_t n_rows, n_used;
    float *y;
    size_t y_stride;
    bool add;
};
/* Whether one launch computes both, for a call with `begin` and everything set but y: few rows. */
bool gemm_can_combine(const struct gemm *g, const struct gemm_choices *to);
cudaError_t gemm_run_combined(cudaStream_t stream, const struct gemm *g,
                              const struct gemm_choices *to);

#ifdef __cplusplus
}
#endif
#endif
