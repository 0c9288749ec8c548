/* gemm_cublaslt.c - GEMM by cublasLt: its objects, and the algorithm per shape.
 *
 * The library is column-major. y by rows [n_rows][n_out] is D by columns [n_out, n_rows]; W by rows
 * is A transposed, x by rows is B: D = A^T B, or A^T B + D. Only in builds with cublasLt.h
 * (BATON_HAVE_CUBLASLT); otherwise creation says so. Thread: engine. */
#include "kernels/cuda/gemm/gemm_cublaslt.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemm/gemm_cublaslt_load.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum { ALIGNED = 16 }; /* bytes, what pointers and rows have to be for the library */

static bool is_aligned(const void *p, size_t row_bytes)
{
    return ((uintptr_t)p | row_bytes) % ALIGNED == 0;
}

bool gemm_cublaslt_fits(const struct gemm *g)
{
    return g->cublaslt && g->workspace && !g->deterministic && gemm_is_16(g->layout) &&
           (g->epilogue == GEMM_STORE || g->epilogue == GEMM_ADD) && !g->bias && !g->begin &&
           g->n_groups == 1 && !g->x_rows && g->n_rows >= GEMM_CUBLASLT_ROWS &&
           is_aligned(g->x, g->x_stride * 2) && is_aligned(g->y, g->y_stride * sizeof(float)) &&
           is_aligned(g->w, 0);
}

#ifdef BATON_HAVE_CUBLASLT
#include <cublasLt.h>

/* shapes: a model has some ten matrices, chunks of a prompt have any number of rows */
enum { N_SHAPES = 512 };

/* A shape, and what the library makes of it. */
struct gemm_cublaslt_shape {
    size_t n_out, n_in, n_rows, x_stride, y_stride;
    enum gemm_weight_layout layout;
    bool used, add, none; /* none: there is no way */
    cublasLtMatrixLayout_t w, x, y;
    cublasLtMatmulAlgo_t algo;
};

#define CALL_TYPE(name) __typeof__(name) *name;
struct gemm_cublaslt {
    struct {
        GEMM_CUBLASLT_CALLS(CALL_TYPE)
    } call;
    struct gemm_cublaslt_loaded loaded;
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t product;
    cublasLtMatmulPreference_t preference;
    struct gemm_cublaslt_shape shapes[N_SHAPES];
};

/* ---- life cycle ---- */

static bool set_preference(const struct gemm_cublaslt *l, cublasLtMatmulPreferenceAttributes_t what,
                           const void *value, size_t bytes)
{
    return l->call.cublasLtMatmulPreferenceSetAttribute(l->preference, what, value, bytes) ==
           CUBLAS_STATUS_SUCCESS;
}

static bool make_objects(struct gemm_cublaslt *l)
{
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const uint64_t workspace = GEMM_CUBLASLT_WORKSPACE;
    const uint32_t aligned = ALIGNED;
    return l->call.cublasLtMatmulDescCreate(&l->product, CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
               CUBLAS_STATUS_SUCCESS &&
           l->call.cublasLtMatmulDescSetAttribute(l->product, CUBLASLT_MATMUL_DESC_TRANSA,
                                                  &transposed,
                                                  sizeof transposed) == CUBLAS_STATUS_SUCCESS &&
           l->call.cublasLtMatmulPreferenceCreate(&l->preference) == CUBLAS_STATUS_SUCCESS &&
           set_preference(l, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                          sizeof workspace) &&
           set_preference(l, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &aligned,
                          sizeof aligned) &&
           set_preference(l, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &aligned,
                          sizeof aligned) &&
           set_preference(l, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &aligned,
                          sizeof aligned) &&
           set_preference(l, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &aligned, sizeof aligned);
}

static enum status start(struct gemm_cublaslt *l, struct err *err)
{
    const cublasStatus_t st = l->call.cublasLtCreate(&l->handle);
    if (st != CUBLAS_STATUS_SUCCESS)
        return err_set(err, ERR_NODEV, "%s cannot start on this GPU (status %d)", l->loaded.path,
                       (int)st);
    if (!make_objects(l))
        return err_set(err, ERR_UNSUPPORTED, "%s does not take a product of 16 bits",
                       l->loaded.path);
    return OK;
}

enum status gemm_cublaslt_create(struct gemm_cublaslt **out, struct err *err)
{
    struct gemm_cublaslt *l = MEM_NEW(struct gemm_cublaslt);
    enum status st = gemm_cublaslt_load(getenv("BATON_CUBLASLT"), &l->loaded, err);
    if (st == OK) {
        static_assert(sizeof l->call == sizeof l->loaded.calls,
                      "a function is where its name is in the list");
        memcpy(&l->call, l->loaded.calls, sizeof l->call);
        st = start(l, err);
    }
    if (st == OK) *out = l;
    else gemm_cublaslt_free(l);
    return st;
}

static void evict(struct gemm_cublaslt *l, struct gemm_cublaslt_shape *k)
{
    if (k->w) l->call.cublasLtMatrixLayoutDestroy(k->w);
    if (k->x) l->call.cublasLtMatrixLayoutDestroy(k->x);
    if (k->y) l->call.cublasLtMatrixLayoutDestroy(k->y);
    *k = (struct gemm_cublaslt_shape){ .used = false };
}

void gemm_cublaslt_free(struct gemm_cublaslt *l)
{
    if (!l) return;
    for (size_t i = 0; i < N_SHAPES; i++) evict(l, &l->shapes[i]);
    if (l->preference) l->call.cublasLtMatmulPreferenceDestroy(l->preference);
    if (l->product) l->call.cublasLtMatmulDescDestroy(l->product);
    if (l->handle) l->call.cublasLtDestroy(l->handle);
    gemm_cublaslt_unload(&l->loaded);
    mem_free(l);
}

const char *gemm_cublaslt_path(const struct gemm_cublaslt *l) { return l->loaded.path; }

/* ---- products ---- */

static size_t padded(size_t n) { return (n + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP; }

static bool matches(const struct gemm_cublaslt_shape *k, const struct gemm *g)
{
    return k->used && k->n_out == g->n_out && k->n_in == g->n_in && k->n_rows == g->n_rows &&
           k->x_stride == g->x_stride && k->y_stride == g->y_stride && k->layout == g->layout &&
           k->add == (g->epilogue == GEMM_ADD);
}

/* Fills the shape's matrix layouts and its algorithm. Rows are padded with zeros, so k is a
 * multiple of GEMM_STEP. */
static bool query_heuristic(struct gemm_cublaslt *l, struct gemm_cublaslt_shape *k)
{
    cublasLtMatmulHeuristicResult_t found;
    const size_t n_in = padded(k->n_in);
    const cudaDataType type = k->layout == GEMM_F16 ? CUDA_R_16F : CUDA_R_16BF;
    int n = 0;
    if (l->call.cublasLtMatrixLayoutCreate(&k->w, type, n_in, k->n_out, (int64_t)n_in) !=
            CUBLAS_STATUS_SUCCESS ||
        l->call.cublasLtMatrixLayoutCreate(&k->x, type, n_in, k->n_rows, (int64_t)k->x_stride) !=
            CUBLAS_STATUS_SUCCESS ||
        l->call.cublasLtMatrixLayoutCreate(&k->y, CUDA_R_32F, k->n_out, k->n_rows,
                                           (int64_t)k->y_stride) != CUBLAS_STATUS_SUCCESS)
        return false;
    if (l->call.cublasLtMatmulAlgoGetHeuristic(l->handle, l->product, k->w, k->x, k->y, k->y,
                                               l->preference, 1, &found,
                                               &n) != CUBLAS_STATUS_SUCCESS ||
        n != 1 || found.state != CUBLAS_STATUS_SUCCESS)
        return false;
    k->algo = found.algo;
    return true;
}

static struct gemm_cublaslt_shape *find_shape(struct gemm_cublaslt *l, const struct gemm *g)
{
    const size_t parts[] = { g->n_out,    g->n_in,           g->n_rows,          g->x_stride,
                             g->y_stride, (size_t)g->layout, (size_t)g->epilogue };
    size_t hash = 0;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        hash = (hash ^ parts[i]) * 0x9e3779b97f4a7c15u;
    struct gemm_cublaslt_shape *k = &l->shapes[(hash >> 32) % N_SHAPES];
    if (matches(k, g)) return k;
    evict(l, k);
    *k = (struct gemm_cublaslt_shape){
        .n_out = g->n_out,
        .n_in = g->n_in,
        .n_rows = g->n_rows,
        .x_stride = g->x_stride,
        .y_stride = g->y_stride,
        .layout = g->layout,
        .used = true,
        .add = g->epilogue == GEMM_ADD,
    };
    k->none = !query_heuristic(l, k);
    return k;
}

bool gemm_cublaslt_run(cudaStream_t stream, const struct gemm *g)
{
    struct gemm_cublaslt *l = g->cublaslt;
    struct gemm_cublaslt_shape *k = find_shape(l, g);
    const float one = 1, old = k->add ? 1 : 0;
    if (k->none) return false;
    const cublasStatus_t st = l->call.cublasLtMatmul(l->handle, l->product, &one, g->w, k->w, g->x,
                                                     k->x, &old, g->y, k->y, g->y, k->y, &k->algo,
                                                     g->workspace, GEMM_CUBLASLT_WORKSPACE, stream);
    if (st == CUBLAS_STATUS_SUCCESS) return true;
    k->none = true;
    log_warn("cublasLt refused a product, the own kernel does it",
             "n_out=%zu n_in=%zu n_rows=%zu status=%d", g->n_out, g->n_in, g->n_rows, (int)st);
    return false;
}

#else
/* Without cublasLt.h there is never an object. */
enum status gemm_cublaslt_create(struct gemm_cublaslt **out, struct err *err)
{
    (void)out;
    return err_set(err, ERR_UNSUPPORTED,
                   "this build has no cublasLt: cublasLt.h was not there when it was made");
}

void gemm_cublaslt_free(struct gemm_cublaslt *l) { (void)l; }
const char *gemm_cublaslt_path(const struct gemm_cublaslt *l)
{
    (void)l;
    return "";
}

bool gemm_cublaslt_run(cudaStream_t stream, const struct gemm *g)
{
    (void)stream, (void)g;
    return false;
}
#endif
