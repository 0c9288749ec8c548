/* gemm.cu - GEMM on the GPU: sizes of the layouts, and which kernel a call takes. Thread: engine.
 */
#include "kernels/cuda/gemm/gemm_cublaslt.h"
#include "kernels/cuda/gemm/gemm_split_k.cuh"
#include "shared/base/arith.h"

enum { MATRIX_STEP = 256 }; /* what sizes and places of parts are multiples of */

size_t gemm_row_bytes(enum gemm_weight_layout layout, size_t n_in)
{
    static const unsigned char bits[GEMM_WEIGHT_LAYOUTS] = { 32, 16, 16, 8, 4, 8 };
    return round_up(n_in, GEMM_STEP) * bits[layout] / 8;
}

size_t gemm_scales_at(enum gemm_weight_layout layout, size_t n_out, size_t n_in)
{
    return round_up(n_out * gemm_row_bytes(layout, n_in), MATRIX_STEP);
}

static size_t n_scales(enum gemm_weight_layout layout, bool paired, size_t n_out, size_t n_in)
{
    if (layout == GEMM_W8 || layout == GEMM_W4) return n_out;
    if (layout != GEMM_F8) return 0;
    const size_t n_blocks = paired ? 2 * blocks_for(n_out / 2, GEMM_F8_BLOCK)
                                   : blocks_for(n_out, GEMM_F8_BLOCK);
    return n_blocks * blocks_for(n_in, GEMM_F8_BLOCK);
}

size_t gemm_matrix_bytes(enum gemm_weight_layout layout, bool paired, size_t n_out, size_t n_in)
{
    return gemm_scales_at(layout, n_out, n_in) +
           round_up(n_scales(layout, paired, n_out, n_in) * sizeof(float), MATRIX_STEP);
}

size_t gemm_scratch_bytes(void)
{
    return SPLIT_K_COUNTER_BYTES + sizeof(float) * (size_t)SPLIT_K_SCRATCH_FLOATS;
}

static gemm_call call_of(const struct gemm *g)
{
    gemm_call c = {};
    c.w = (const unsigned char *)g->w, c.w_stride = g->w_stride;
    c.row_bytes = gemm_row_bytes(g->layout, g->n_in);
    c.scales_at = gemm_scales_at(g->layout, g->n_out, g->n_in);
    c.begin = g->begin, c.n_groups = g->n_groups;
    if (!g->begin) c.x_group = g->x_group, c.y_group = g->y_group;
    c.n_rows = (int32_t)g->n_rows, c.rows_above = 0, c.rows_at_most = INT32_MAX;
    c.n_out = (int32_t)g->n_out, c.n_in = (int32_t)g->n_in;
    c.n_in_padded = (int32_t)round_up(g->n_in, GEMM_STEP);
    c.n_columns = gemm_outputs_16(g->epilogue) ? (int32_t)(2 * round_up(g->n_out / 2, GEMM_STEP))
                                               : c.n_out;
    c.x = g->x, c.x_stride = g->x_stride, c.x_rows = g->x_rows, c.x_scales = g->x_scales;
    c.x_scales_stride = (int32_t)(g->x_scales_stride ? g->x_scales_stride
                                                     : blocks_for(g->n_in, GEMM_F8_BLOCK));
    c.x_f32 = g->x_f32, c.norm = g->norm, c.eps = g->norm_eps;
    c.n_x_rows = g->n_x_rows <= INT32_MAX ? (int32_t)g->n_x_rows : 0;
    c.begin_is_read = g->begin_is_read;
    c.bias = g->bias;
    c.y = g->y, c.y_stride = g->y_stride;
    c.epilogue = g->epilogue, c.paired = g->paired;
    c.scratch = g->deterministic ? NULL : (unsigned char *)g->scratch, c.n_splits = 1;
    return c;
}

/* Many rows, not `deterministic`. */
static cudaError_t run_large(cudaStream_t stream, enum gemm_weight_layout layout,
                             const gemm_call *c)
{
    return gemm_sm90_supports(layout, c) ? gemm_sm90(stream, layout, c)
                                         : gemm_tiles(stream, layout, c);
}

/* How many rows a group has is known on the device alone. If most groups have too many for the
 * skinny kernel, the large one takes all of them: thousands of the other's blocks would find
 * nothing to do. Otherwise both are launched, and each leaves the other's groups alone. */
static cudaError_t run_groups(cudaStream_t stream, enum gemm_weight_layout layout, gemm_call c)
{
    if (gemm_experts_supports(layout, &c)) return gemm_experts(stream, layout, &c);
    if (c.n_rows / c.n_groups >= GEMM_SKINNY_ROWS) return run_large(stream, layout, &c);
    c.rows_at_most = GEMM_SKINNY_ROWS;
    const cudaError_t e = gemm_skinny(stream, layout, &c);
    if (e != cudaSuccess) return e;
    c.rows_above = GEMM_SKINNY_ROWS, c.rows_at_most = INT32_MAX;
    return run_large(stream, layout, &c);
}

static bool is_valid(const struct gemm *g)
{
    if (gemm_is_silu(g->epilogue) && !g->paired) return false;
    return (unsigned)g->layout < GEMM_WEIGHT_LAYOUTS && g->n_rows <= INT32_MAX &&
           g->n_out <= INT32_MAX && g->n_in <= INT32_MAX && g->n_groups >= 1;
}

/* Not where groups have all rows: their scales would be of all groups' elements. */
static bool takes_f8_x(const struct gemm *g)
{
    return g->layout == GEMM_F8 && !g->deterministic && (g->begin || g->n_groups == 1) &&
           gemm_sm90_available();
}

static bool uses_sm90(const struct gemm *g, const float *x_scales)
{
    gemm_call c = call_of(g);
    c.x_scales = x_scales;
    return !g->deterministic && g->n_rows > GEMM_SKINNY_ROWS && gemm_sm90_supports(g->layout, &c);
}

bool gemm_uses_sm90(const struct gemm *g)
{
    return !gemm_cublaslt_fits(g) && uses_sm90(g, g->x_scales);
}

bool gemm_wants_f8_x(const struct gemm *g)
{
    static const float any = 0;
    return takes_f8_x(g) && uses_sm90(g, &any);
}

cudaError_t gemm_run_sm90(cudaStream_t stream, const struct gemm *g, enum gemm_sm90_tile tile)
{
    if (g->n_rows == 0 || g->n_out == 0) return cudaSuccess;
    const bool is_f8 = g->x_scales && takes_f8_x(g),
               is_other = g->layout != GEMM_F8 && g->layout != GEMM_F32 && !g->x_scales &&
                          !g->deterministic && gemm_sm90_available();
    const gemm_call c = call_of(g);
    if (!is_valid(g) || (!is_f8 && !is_other) || !gemm_sm90_has_tile(g->layout, &c, tile))
        return cudaErrorInvalidValue;
    if (is_f8) return gemm_sm90_f8(stream, &c, tile);
    return gemm_is_16(g->layout) ? gemm_sm90_16(stream, g->layout, &c, tile)
                                 : gemm_sm90_upconvert(stream, g->layout, &c, tile);
}

static bool takes_decode(const struct gemm *g, const gemm_call *c)
{
    return !g->deterministic && g->n_rows > 0 && !gemm_cublaslt_fits(g) &&
           gemm_decode_supports(g->layout, c);
}

bool gemm_takes_f32_x(const struct gemm *g)
{
    gemm_call c = call_of(g);
    c.x_f32 = true;
    return is_valid(g) && takes_decode(g, &c);
}

static bool can_fuse(const struct gemm *g, const struct gemm *first)
{
    return is_valid(g) && g->epilogue != GEMM_STORE_BF16 && g->layout == first->layout &&
           g->layout != GEMM_F32 && !g->deterministic && !g->begin && g->n_groups == 1 &&
           !g->x_scales && g->n_out > 0 && g->n_in == first->n_in && g->x == first->x &&
           g->n_rows == first->n_rows && g->x_f32 == first->x_f32 && g->norm == first->norm &&
           g->n_rows <= GEMM_SKINNY_ROWS &&
           round_up(g->n_in, GEMM_STEP) % GEMM_SKINNY_K_STEP == 0 && !gemm_cublaslt_fits(g);
}

/* In one launch each, or those that the library computes together. */
static cudaError_t run_one_by_one(cudaStream_t stream, const struct gemm *g, int n)
{
    cudaError_t e = cudaSuccess;
    struct gemm next;
    for (int i = 0; i < n && e == cudaSuccess;) {
        i += gemm_cublaslt_join(g + i, n - i, &next);
        e = gemm_run(stream, &next);
    }
    return e;
}

cudaError_t gemm_run_fused(cudaStream_t stream, const struct gemm *g, int n)
{
    gemm_call calls[GEMM_FUSED_MAX];
    bool fused = n > 1 && n <= GEMM_FUSED_MAX && g->n_rows > 0, decode = true;
    for (int i = 0; fused && i < n; i++) fused = can_fuse(&g[i], g);
    if (!fused) return run_one_by_one(stream, g, n);
    for (int i = 0; i < n; i++) {
        calls[i] = call_of(&g[i]), calls[i].fused_index = i;
        decode = decode && takes_decode(&g[i], &calls[i]);
    }
    if (decode) return gemm_decode(stream, g->layout, calls, n);
    return g->x_f32 ? cudaErrorInvalidValue : gemm_skinny_fused(stream, g->layout, calls, n);
}

cudaError_t gemm_run(cudaStream_t stream, const struct gemm *g)
{
    if (g->n_rows == 0 || g->n_out == 0) return cudaSuccess;
    if (!is_valid(g) || (g->epilogue == GEMM_STORE_BF16 && !gemm_uses_sm90(g)))
        return cudaErrorInvalidValue;
    if (gemm_cublaslt_fits(g) && gemm_cublaslt_run(stream, g)) return cudaSuccess;
    const gemm_call c = call_of(g);
    if (takes_decode(g, &c)) return gemm_decode(stream, g->layout, &c, 1);
    if (g->x_f32 && g->layout != GEMM_F32) return cudaErrorInvalidValue;
    if (g->x_scales)
        return takes_f8_x(g) ? gemm_sm90_f8(stream, &c, gemm_sm90_choose(g->layout, &c))
                             : cudaErrorInvalidValue;
    if (g->layout == GEMM_F32) return gemm_f32(stream, &c);
    if (g->deterministic) return gemm_tiles(stream, g->layout, &c);
    if (g->n_rows <= GEMM_SKINNY_ROWS) return gemm_skinny(stream, g->layout, &c);
    return g->begin ? run_groups(stream, g->layout, c) : run_large(stream, g->layout, &c);
}

bool gemm_can_combine(const struct gemm *g, const struct gemm_choices *to)
{
    if (!is_valid(g) || g->deterministic || g->n_rows == 0 || g->n_out == 0) return false;
    const gemm_call c = call_of(g);
    return gemm_combine_supports(g->layout, &c, to);
}

cudaError_t gemm_run_combined(cudaStream_t stream, const struct gemm *g,
                              const struct gemm_choices *to)
{
    if (!gemm_can_combine(g, to)) return cudaErrorInvalidValue;
    const gemm_call c = call_of(g);
    return gemm_combine(stream, g->layout, &c, to);
}
