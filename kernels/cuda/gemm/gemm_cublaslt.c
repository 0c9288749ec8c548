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

static bool are_groups_aligned(const struct gemm *g)
{
    return g->n_groups == 1 ||
           (g->w_stride | g->x_group * 2 | g->y_group * sizeof(float)) % ALIGNED == 0;
}

bool gemm_cublaslt_fits(const struct gemm *g)
{
    return g->cublaslt && g->workspace && !g->deterministic && gemm_is_16(g->layout) &&
           (g->epilogue == GEMM_STORE || g->epilogue == GEMM_ADD) && !g->bias && !g->begin &&
           !g->x_rows && g->n_rows >= GEMM_CUBLASLT_ROWS && is_aligned(g->x, g->x_stride * 2) &&
           is_aligned(g->y, g->y_stride * sizeof(float)) && is_aligned(g->w, 0) &&
           are_groups_aligned(g);
}

/* Whether b, of the same rows, is a's next group. */
static bool is_next(const struct gemm *a, const struct gemm *b)
{
    return gemm_cublaslt_fits(b) && b->n_groups == 1 && b->layout == a->layout &&
           b->n_out == a->n_out && b->n_in == a->n_in && b->n_rows == a->n_rows && b->x == a->x &&
           b->x_stride == a->x_stride && b->y_stride == a->y_stride && b->epilogue == a->epilogue &&
           (const char *)b->w > (const char *)a->w && (float *)b->y > (float *)a->y;
}

int gemm_cublaslt_join(const struct gemm *g, int n, struct gemm *all)
{
    *all = *g;
    if (n < 2 || g->n_groups != 1 || !gemm_cublaslt_fits(g) || !is_next(g, g + 1)) return 1;
    const size_t w = (size_t)((const char *)g[1].w - (const char *)g[0].w),
                 y = (size_t)((float *)g[1].y - (float *)g[0].y);
    int joined = 1;
    while (joined < n && is_next(&g[joined - 1], &g[joined]) &&
           (const char *)g[joined].w == (const char *)g->w + (size_t)joined * w &&
           (float *)g[joined].y == (float *)g->y + (size_t)joined * y)
        joined++;
    all->n_groups = joined;
    all->w_stride = w, all->x_group = 0, all->y_group = y;
    if (gemm_cublaslt_fits(all)) return joined;
    *all = *g;
    return 1;
}

#ifdef BATON_HAVE_CUBLASLT
#include <cublasLt.h>
#include <math.h>

#include "shared/base/clock.h"

/* shapes: a model has some ten matrices, chunks of a prompt have any number of rows */
enum { N_SHAPES = 512, N_TUNED = 64 };

/* A shape, and what the library makes of it. */
struct gemm_cublaslt_shape {
    size_t n_out, n_in, n_rows, x_stride, y_stride;
    int32_t n_groups;
    size_t w_stride, x_group, y_group; /* 0 for one group */
    enum gemm_weight_layout layout;
    bool used, add;
    bool ran;  /* its kernels are loaded */
    bool none; /* there is no way */
    cublasLtMatrixLayout_t w, x, y;
    cublasLtMatmulAlgo_t algo;
};

/* Which algorithm was the fastest for a shape with this many rows or more, up to twice as many. */
struct gemm_cublaslt_tuned {
    struct gemm_cublaslt_shape of; /* n_rows: a power of two */
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
    cudaStream_t beside; /* for a shape that is new while a stream is captured; NULL: none was */
    struct gemm_cublaslt_shape shapes[N_SHAPES];
    struct gemm_cublaslt_tuned tuned[N_TUNED];
    int n_tuned;
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
    if (l->beside) (void)cudaStreamDestroy(l->beside);
    if (l->preference) l->call.cublasLtMatmulPreferenceDestroy(l->preference);
    if (l->product) l->call.cublasLtMatmulDescDestroy(l->product);
    if (l->handle) l->call.cublasLtDestroy(l->handle);
    gemm_cublaslt_unload(&l->loaded);
    mem_free(l);
}

const char *gemm_cublaslt_path(const struct gemm_cublaslt *l) { return l->loaded.path; }

/* ---- products ---- */

static size_t padded(size_t n) { return (n + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP; }

static struct gemm_cublaslt_shape shape_of(const struct gemm *g)
{
    const bool groups = g->n_groups > 1;
    return (struct gemm_cublaslt_shape){
        .n_out = g->n_out,
        .n_in = g->n_in,
        .n_rows = g->n_rows,
        .x_stride = g->x_stride,
        .y_stride = g->y_stride,
        .n_groups = g->n_groups,
        .w_stride = groups ? g->w_stride : 0,
        .x_group = groups ? g->x_group : 0,
        .y_group = groups ? g->y_group : 0,
        .layout = g->layout,
        .used = true,
        .add = g->epilogue == GEMM_ADD,
    };
}

static bool equal_shapes(const struct gemm_cublaslt_shape *a, const struct gemm_cublaslt_shape *b)
{
    return a->used && b->used && a->n_out == b->n_out && a->n_in == b->n_in &&
           a->n_rows == b->n_rows && a->x_stride == b->x_stride && a->y_stride == b->y_stride &&
           a->n_groups == b->n_groups && a->w_stride == b->w_stride && a->x_group == b->x_group &&
           a->y_group == b->y_group && a->layout == b->layout && a->add == b->add;
}

/* A matrix of every group; `groups` elements to the next group's. */
static bool make_layout(const struct gemm_cublaslt *l, const struct gemm_cublaslt_shape *k,
                        cublasLtMatrixLayout_t *out, cudaDataType type, size_t rows, size_t columns,
                        size_t stride, size_t groups)
{
    const int32_t n = k->n_groups;
    const int64_t next = (int64_t)groups;
    if (l->call.cublasLtMatrixLayoutCreate(out, type, rows, columns, (int64_t)stride) !=
        CUBLAS_STATUS_SUCCESS)
        return false;
    if (n == 1) return true;
    return l->call.cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n,
                                                    sizeof n) == CUBLAS_STATUS_SUCCESS &&
           l->call.cublasLtMatrixLayoutSetAttribute(*out,
                                                    CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                    &next, sizeof next) == CUBLAS_STATUS_SUCCESS;
}

/* Fills the shape's matrix layouts, and found with its algorithms, the library's choice first;
 * returns how many. Rows are padded with zeros, so k is a multiple of GEMM_STEP. */
static int query_heuristic(struct gemm_cublaslt *l, struct gemm_cublaslt_shape *k, int wanted,
                           cublasLtMatmulHeuristicResult_t *found)
{
    const size_t n_in = padded(k->n_in);
    const cudaDataType type = k->layout == GEMM_F16 ? CUDA_R_16F : CUDA_R_16BF;
    int n = 0, n_usable = 0;
    if (!make_layout(l, k, &k->w, type, n_in, k->n_out, n_in, k->w_stride / 2) ||
        !make_layout(l, k, &k->x, type, n_in, k->n_rows, k->x_stride, k->x_group) ||
        !make_layout(l, k, &k->y, CUDA_R_32F, k->n_out, k->n_rows, k->y_stride, k->y_group) ||
        l->call.cublasLtMatmulAlgoGetHeuristic(l->handle, l->product, k->w, k->x, k->y, k->y,
                                               l->preference, wanted, found,
                                               &n) != CUBLAS_STATUS_SUCCESS)
        return 0;
    for (int i = 0; i < n; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS) found[n_usable++] = found[i];
    return n_usable;
}

static cublasStatus_t enqueue(const struct gemm_cublaslt *l, const struct gemm_cublaslt_shape *k,
                              const struct gemm *g, float factor, cudaStream_t stream)
{
    const float old = k->add ? 1 : 0;
    return l->call.cublasLtMatmul(l->handle, l->product, &factor, g->w, k->w, g->x, k->x, &old,
                                  g->y, k->y, g->y, k->y, &k->algo, g->workspace,
                                  GEMM_CUBLASLT_WORKSPACE, stream);
}

static bool is_capturing(cudaStream_t stream)
{
    enum cudaStreamCaptureStatus status;
    return cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
           status == cudaStreamCaptureStatusActive;
}

/* ---- the fastest algorithm ----
 *
 * Products of a prompt take their time in few shapes, and the library's first choice is not always
 * its fastest. So the first call of a shape with TUNED_ROWS or more times N_CANDIDATES of its
 * algorithms, which takes some milliseconds; later numbers of rows within a factor of two take the
 * winner if the library offers it for them, too. Results are multiplied by almost 0 meanwhile, so
 * that adding them to y changes nothing. */

enum { TUNED_ROWS = 1024, N_CANDIDATES = 8, N_TIMED = 3 };
static const float ALMOST_ZERO = 0x1p-120f, FASTER_BY = 0.97f;

struct stopwatch {
    cudaStream_t stream;
    cudaEvent_t begin, end;
};

/* The shortest time of some calls after a first one, in ms; INFINITY: it fails. */
static float time_of(const struct gemm_cublaslt *l, const struct gemm_cublaslt_shape *k,
                     const struct gemm *g, const struct stopwatch *w)
{
    float shortest = INFINITY, ms;
    for (int i = 0; i <= N_TIMED; i++) {
        if (cudaEventRecord(w->begin, w->stream) != cudaSuccess ||
            enqueue(l, k, g, ALMOST_ZERO, w->stream) != CUBLAS_STATUS_SUCCESS ||
            cudaEventRecord(w->end, w->stream) != cudaSuccess ||
            cudaEventSynchronize(w->end) != cudaSuccess ||
            cudaEventElapsedTime(&ms, w->begin, w->end) != cudaSuccess)
            return INFINITY;
        if (i > 0 && ms < shortest) shortest = ms;
    }
    return shortest;
}

/* Sets k's algorithm to the fastest of n; the library's choice wins unless another is clearly
 * faster. */
static void time_all(const struct gemm_cublaslt *l, struct gemm_cublaslt_shape *k,
                     const struct gemm *g, const cublasLtMatmulHeuristicResult_t *found, int n,
                     const struct stopwatch *w)
{
    const uint64_t begin = clock_ns();
    float first = INFINITY, best = INFINITY;
    int winner = 0;
    for (int i = 0; i < n; i++) {
        k->algo = found[i].algo;
        const float ms = time_of(l, k, g, w);
        if (i == 0) first = best = ms;
        else if (ms < FASTER_BY * first && ms < best) best = ms, winner = i;
    }
    k->algo = found[winner].algo;
    log_info("cublasLt product timed",
             "n_out=%zu n_in=%zu n_rows=%zu groups=%d add=%d algorithms=%d fastest=%d us=%.1f "
             "first_us=%.1f took_ms=%.1f",
             k->n_out, k->n_in, k->n_rows, (int)k->n_groups, (int)k->add, n, winner,
             (double)best * 1e3, (double)first * 1e3, (double)(clock_ns() - begin) * 1e-6);
}

static void tune(struct gemm_cublaslt *l, struct gemm_cublaslt_shape *k, const struct gemm *g,
                 const cublasLtMatmulHeuristicResult_t *found, int n, cudaStream_t stream)
{
    struct gemm_cublaslt_shape of = *k;
    struct stopwatch w = { .stream = stream };
    size_t rows = TUNED_ROWS;
    while (rows <= k->n_rows / 2) rows *= 2;
    of.n_rows = rows, of.x_stride = of.y_stride = of.y_group = 0;
    of.w = of.x = of.y = NULL;
    for (int i = 0; i < l->n_tuned; i++) {
        if (!equal_shapes(&of, &l->tuned[i].of)) continue;
        for (int j = 0; j < n; j++)
            if (memcmp(&found[j].algo, &l->tuned[i].algo, sizeof found[j].algo) == 0)
                k->algo = found[j].algo;
        return;
    }
    if (n < 2 || l->n_tuned == N_TUNED || is_capturing(stream)) return;
    if (cudaEventCreate(&w.begin) == cudaSuccess && cudaEventCreate(&w.end) == cudaSuccess) {
        time_all(l, k, g, found, n, &w);
        l->tuned[l->n_tuned++] = (struct gemm_cublaslt_tuned){ of, k->algo };
    }
    if (w.begin) (void)cudaEventDestroy(w.begin);
    if (w.end) (void)cudaEventDestroy(w.end);
}

static void choose_algorithm(struct gemm_cublaslt *l, struct gemm_cublaslt_shape *k,
                             const struct gemm *g, cudaStream_t stream)
{
    cublasLtMatmulHeuristicResult_t found[N_CANDIDATES];
    const bool tuned = k->n_rows >= TUNED_ROWS;
    const int n = query_heuristic(l, k, tuned ? N_CANDIDATES : 1, found);
    k->none = n == 0;
    if (k->none) return;
    k->algo = found[0].algo;
    if (tuned) tune(l, k, g, found, n, stream);
}

static struct gemm_cublaslt_shape *find_shape(struct gemm_cublaslt *l, const struct gemm *g,
                                              cudaStream_t stream)
{
    const struct gemm_cublaslt_shape wanted = shape_of(g);
    const size_t parts[] = { wanted.n_out,    wanted.n_in,           wanted.n_rows,
                             wanted.x_stride, wanted.y_stride,       (size_t)wanted.n_groups,
                             wanted.x_group,  (size_t)wanted.layout, (size_t)wanted.add };
    size_t hash = 0;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        hash = (hash ^ parts[i]) * 0x9e3779b97f4a7c15u;
    struct gemm_cublaslt_shape *k = &l->shapes[(hash >> 32) % N_SHAPES];
    if (equal_shapes(k, &wanted)) return k;
    evict(l, k);
    *k = wanted;
    choose_algorithm(l, k, g, stream);
    return k;
}

/* Loads the kernels of a shape by a call on a stream of its own, so that one that is captured
 * contains launches alone. Nothing else runs on the GPU then, and what is in y has no meaning. */
static cublasStatus_t run_beside(struct gemm_cublaslt *l, const struct gemm_cublaslt_shape *k,
                                 const struct gemm *g)
{
    if (!l->beside && cudaStreamCreateWithFlags(&l->beside, cudaStreamNonBlocking) != cudaSuccess)
        return CUBLAS_STATUS_ALLOC_FAILED;
    const cublasStatus_t st = enqueue(l, k, g, 1, l->beside);
    if (st != CUBLAS_STATUS_SUCCESS) return st;
    return cudaStreamSynchronize(l->beside) == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                           : CUBLAS_STATUS_EXECUTION_FAILED;
}

bool gemm_cublaslt_run(cudaStream_t stream, const struct gemm *g)
{
    struct gemm_cublaslt *l = g->cublaslt;
    struct gemm_cublaslt_shape *k = find_shape(l, g, stream);
    cublasStatus_t st = CUBLAS_STATUS_SUCCESS;
    if (k->none) return false;
    if (!k->ran && is_capturing(stream)) st = run_beside(l, k, g);
    if (st == CUBLAS_STATUS_SUCCESS) st = enqueue(l, k, g, 1, stream);
    k->ran = st == CUBLAS_STATUS_SUCCESS;
    if (k->ran) return true;
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
