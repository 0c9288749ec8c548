/* fake_cublaslt.c - a cublasLt for tests: computes products of bf16 and of f16 by plain loops in
 * host memory, as its descriptors say.
 *
 * In a build without cublasLt.h its functions exist and do nothing, which is enough to test how the
 * library is found. FAKE_LACKS_MATMUL makes a library without cublasLtMatmul. Thread: the test's.
 */
#ifdef BATON_HAVE_CUBLASLT
#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>

/* calls of the heuristic, of the product; fake_refuse 1: no algorithm, 2: the product fails */
int fake_n_asked, fake_n_run, fake_refuse;
/* how many algorithms there are, which of them does not call fake_slow, and which was the last */
int fake_n_algorithms = 1, fake_fastest, fake_algorithm;
void (*fake_slow)(cudaStream_t stream);
cudaStream_t fake_stream; /* of the last product */

enum { FAKE_ALGORITHM = 70 }; /* the number of the first */

struct cublasLtContext {
    int unused;
};
static struct cublasLtContext the_handle;

struct layout {
    cudaDataType type;
    uint64_t rows, cols;
    int64_t ld;
    int32_t n_groups; /* a batch's count */
    int64_t group;    /* elements to the next one */
};

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    *handle = &the_handle;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    return handle == &the_handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

/* The only state of a product's descriptor is whether A is transposed. */
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    *desc = calloc(1, sizeof(cublasOperation_t));
    return compute == CUBLAS_COMPUTE_32F && scale == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS
                                                                : CUBLAS_STATUS_NOT_SUPPORTED;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
    free(desc);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t what,
                                              const void *value, size_t n)
{
    if (what != CUBLASLT_MATMUL_DESC_TRANSA || n != sizeof(cublasOperation_t))
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(desc, value, n);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    *preference = calloc(1, 1);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    free(preference);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t what,
                                                    const void *value, size_t n)
{
    (void)preference, (void)value;
    return n == (what == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8 : 4)
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld)
{
    struct layout *l = calloc(1, sizeof *l);
    *l = (struct layout){ type, rows, cols, ld, 1, 0 };
    *layout = (cublasLtMatrixLayout_t)l;
    return ld >= (int64_t)rows ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    free(layout);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t what,
                                                const void *value, size_t n)
{
    struct layout *l = (struct layout *)layout;
    if (what == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT && n == sizeof l->n_groups)
        memcpy(&l->n_groups, value, n);
    else if (what == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET && n == sizeof l->group)
        memcpy(&l->group, value, n);
    else return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

static int agree(cublasLtMatmulDesc_t desc, const struct layout *a, const struct layout *b,
                 const struct layout *d)
{
    return *(const cublasOperation_t *)desc == CUBLAS_OP_T && a->rows == b->rows &&
           d->rows == a->cols && d->cols == b->cols && a->n_groups == d->n_groups &&
           b->n_groups == d->n_groups && (a->type == CUDA_R_16BF || a->type == CUDA_R_16F) &&
           b->type == a->type && d->type == CUDA_R_32F;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t found[], int *n)
{
    fake_n_asked++;
    *n = 0;
    if (handle != &the_handle || !preference || wanted < 1 || c != d)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!agree(desc, (struct layout *)a, (struct layout *)b, (struct layout *)d))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (fake_refuse == 1) return CUBLAS_STATUS_NOT_SUPPORTED;
    *n = fake_n_algorithms < wanted ? fake_n_algorithms : wanted;
    memset(found, 0, (size_t)*n * sizeof *found);
    for (int i = 0; i < *n; i++) found[i].algo.data[0] = (uint64_t)i + FAKE_ALGORITHM;
    return CUBLAS_STATUS_SUCCESS;
}

/* For finite numbers only: the bits of an f16, shifted into an f32, are 2^112 times too small. */
static float wide(cudaDataType type, uint16_t bits)
{
    const uint32_t f16 = (uint32_t)(bits & 0x8000) << 16 | (uint32_t)(bits & 0x7fff) << 13,
                   all = type == CUDA_R_16F ? f16 : (uint32_t)bits << 16;
    float x;
    memcpy(&x, &all, sizeof x);
    return type == CUDA_R_16F ? x * 0x1p112f : x;
}

/* One of a batch. */
static void multiply(float alpha, const uint16_t *a, const struct layout *la, const uint16_t *b,
                     const struct layout *lb, float beta, float *d, const struct layout *ld)
{
    for (uint64_t j = 0; j < ld->cols; j++)
        for (uint64_t i = 0; i < ld->rows; i++) {
            float *y = d + j * (uint64_t)ld->ld + i, sum = 0;
            for (uint64_t k = 0; k < la->rows; k++)
                sum += wide(la->type, a[i * (uint64_t)la->ld + k]) *
                       wide(lb->type, b[j * (uint64_t)lb->ld + k]);
            *y = alpha * sum + (beta == 0 ? 0 : beta * *y);
        }
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t a, const void *B,
                              cublasLtMatrixLayout_t b, const void *beta, const void *C,
                              cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t n_workspace,
                              cudaStream_t stream)
{
    const struct layout *la = (struct layout *)a, *lb = (struct layout *)b,
                        *ld = (struct layout *)d;
    fake_stream = stream;
    if (handle != &the_handle || C != D || c != d || !workspace || n_workspace == 0 ||
        !agree(desc, la, lb, ld))
        return CUBLAS_STATUS_INVALID_VALUE;
    fake_algorithm = (int)(algo->data[0] - FAKE_ALGORITHM);
    if (fake_refuse == 2 || fake_algorithm < 0 || fake_algorithm >= fake_n_algorithms)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (fake_slow && fake_algorithm != fake_fastest) fake_slow(stream);
    fake_n_run++;
    for (int32_t i = 0; i < ld->n_groups; i++)
        multiply(*(const float *)alpha, (const uint16_t *)A + i * la->group, la,
                 (const uint16_t *)B + i * lb->group, lb, *(const float *)beta,
                 (float *)D + i * ld->group, ld);
    return CUBLAS_STATUS_SUCCESS;
}

#else
#define NOTHING(name)                                                                              \
    int name(void);                                                                                \
    int name(void) { return 0; }
NOTHING(cublasLtCreate)
NOTHING(cublasLtDestroy)
#ifndef FAKE_LACKS_MATMUL
NOTHING(cublasLtMatmul)
#endif
NOTHING(cublasLtMatmulAlgoGetHeuristic)
NOTHING(cublasLtMatmulDescCreate)
NOTHING(cublasLtMatmulDescDestroy)
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatmulPreferenceCreate)
NOTHING(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatrixLayoutCreate)
NOTHING(cublasLtMatrixLayoutDestroy)
NOTHING(cublasLtMatrixLayoutSetAttribute)
#endif
