/* gemm.h - products on the card: y = W x for one matrix or a group of them (experts), in every
 * layout that weights lie in there.
 *
 * W is [n_out][n_in] by rows, each row filled up with zeros to a multiple of GEMM_STEP elements,
 * then the layout's scales. A paired matrix has gate and up in turn: row 2i is gate's row i, row 2i
 * + 1 up's. What a stored element means:
 *   F32   itself
 *   BF16  itself
 *   F16   itself
 *   W8    int8 * scale[row]                                     scale [n_out] f32, one a row as they lie
 *   W4    (nibble - 8) * scale[row]; element k of a row is in the low (k even) or high (k odd) half
 *         of byte k / 2
 *   F8    e4m3 * scale[block of the row][k / 128]               scale [blocks][ceil(n_in / 128)] f32, blocks of 128 rows; a paired matrix
 *                                                               has gate's blocks, then up's
 * F32 takes x in f32, F16 in f16; all others take x in bf16, the weight in bf16 (W8, W4 and F8: the
 * stored number, which bf16 holds exactly; the scale multiplies sums). All add up in f32. f16 ends
 * at 65504: prepare_inputs.h says what larger numbers become, GEMM_SILU_F16 makes the same of them.
 * A row of y depends on its row of x alone, never on what the other rows hold. There are several
 * ways of adding up, each with an order of its own: one for few rows of a group, which reads W as
 * fast as memory goes, one on tiles for many, and where the call has what they need
 *   `scratch`   both in slices of k, for up to 64 rows of narrow matrices; how many slices depends
 *               on the matrix alone
 *   `cublaslt`   cublasLt's, for large dense products, which depends on n_rows.
 * The number of the group's rows decides, unless `deterministic`: then all calls go by tiles in one
 * order, and a row of y has the same bits however many rows it comes with. F32 always has: k is
 * shared by lanes in a way that depends on n_out and n_in alone (gemm_f32.cu), not in one chain as
 * on the processor, so that the bits are not the processor's. Groups are of two kinds: with `begin`
 * each has rows of its own (experts), without it all rows go by every matrix, each group's from and
 * to columns of its own (the heads of MLA: x + g * x_group, y + g * y_group). Rows of x in 16 bits
 * are read up to a multiple of GEMM_STEP: where a group's elements end before that, zeros have to
 * follow, or a NaN of the next group's would be this one's too. A card of compute capability 9.0
 * has kernels of its own for many rows, which `deterministic` calls do not take either: for BF16
 * and F16, and one for F8 that takes x in e4m3 as well (x_scales; prepare_inputs_f8.h makes it).
 * There a sum is taken over the 128 k that share scales in the tensor cores' own way, and added in
 * f32 times both scales. Calls put work on the stream and return; they do not wait and do not
 * allocate. Thread: engine. */
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

enum { GEMM_STEP = 64 }; /* elements that rows of W and of x in 16 bits are filled up to */

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
    GEMM_STORE,     /* y  = W x + bias */
    GEMM_ADD,       /* y += W x + bias */
    GEMM_SILU,      /* of a paired matrix: y[i] = silu(gate) * up, n_out / 2 of them, f32 */
    GEMM_SILU_BF16, /* the same in bf16, rows filled up with zeros to a multiple of GEMM_STEP: ready
                     * for a product */
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

/* Are elements of 16 bits, which are multiplied as they are? */
static inline bool gemm_is_16(enum gemm_weight_layout layout)
{
    return layout == GEMM_BF16 || layout == GEMM_F16;
}
/* What a layout takes x in, but for x_scales. */
static inline enum dtype gemm_x_type(enum gemm_weight_layout layout)
{
    return layout == GEMM_F32 ? DTYPE_F32 : layout == GEMM_F16 ? DTYPE_F16 : DTYPE_BF16;
}

struct gemm_cublaslt;

/* All pointers but the library's are to device memory. */
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
    const void *x;         /* of gemm_x_type */
    size_t x_stride;       /* elements between rows: of 16 bits a multiple of GEMM_STEP, x
                            * aligned to 16 bytes */
    const int32_t *x_rows; /* [n_rows]: which row of x; NULL: the same as of y */
    /* F8 alone: x is e4m3, its rows filled up with zeros to a multiple of 128 elements, x_stride a
     * multiple of 128; [rows of x][ceil(n_in / 128)]: what the elements of each 128 are multiplied
     * by. NULL: x is bf16. gemm_wants_f8_x says which calls may have it: a call of any number of
     * rows on such a card, not `deterministic`, and not of groups without `begin`; others fail. */
    const float *x_scales;
    const float *bias;           /* [n_out] or NULL; of a paired matrix gate's, then up's */
    void *y;                     /* f32; ready: bf16 or f16 */
    size_t y_stride;             /* elements between rows */
    enum gemm_epilogue epilogue; /* y of a paired matrix that is not of SILU: its rows as
                                  * they lie, gate and up in turn */
    void *scratch;               /* gemm_scratch_bytes, zeroed once; of calls on one stream. NULL:
                                  * narrow matrices are read far slower */
    struct gemm_cublaslt *cublaslt; /* gemm_cublaslt.h: for large dense products that are not fixed;
                                     * NULL: the own kernels do them */
    void *workspace;    /* GEMM_CUBLASLT_WORKSPACE bytes, for the library; of calls on one
                         * stream */
    bool deterministic; /* one way of adding up whatever n_rows is: for
                         * --deterministic */
};

/* Bytes of a matrix in a layout, a multiple of 256. */
size_t gemm_matrix_bytes(enum gemm_weight_layout layout, bool paired, size_t n_out, size_t n_in);
/* Where its scales begin. */
size_t gemm_scales_at(enum gemm_weight_layout layout, size_t n_out, size_t n_in);
/* Bytes of one row of W. */
size_t gemm_row_bytes(enum gemm_weight_layout layout, size_t n_in);
/* Bytes of struct gemm's scratch, whatever the products. Its owner zeroes it once; calls leave it
 * as they need it. */
size_t gemm_scratch_bytes(void);
/* Of a call with everything filled in but x, x_stride and x_scales: is it worth making x e4m3?
 * Depends on the card, layout and shapes alone. */
bool gemm_wants_f8_x(const struct gemm *g);
/* Does gemm_run take a kernel of compute capability 9.0 for groups with more than a few rows? What
 * the library may do, it tries first. */
bool gemm_uses_sm90(const struct gemm *g);
/* For tests and measurements: that kernel for all rows of a call, however many, on tiles `columns`
 * wide: 128 or, without x_scales, 256. cudaErrorInvalidValue where gemm_run never takes it. */
cudaError_t gemm_run_sm90(cudaStream_t stream, const struct gemm *g, int columns);
cudaError_t gemm_run(cudaStream_t stream, const struct gemm *g);
/* n products of the same rows: x, x_stride, x_rows, x_scales, n_rows, n_in and layout are those of
 * the first, and none has groups. The bits of gemm_run, by one launch where the rows are few: one
 * of a step's many small ones costs as much as reading a MiB and more. */
enum { GEMM_FUSED_MAX = 3 /* q, k, v */ };
cudaError_t gemm_run_fused(cudaStream_t stream, const struct gemm *g, int n);

#ifdef __cplusplus
}
#endif
#endif
