/* cublasLt.h - cublasLt's interface as gemm_cublaslt.c uses it, for tests on machines without
 * NVIDIA's header of the same name.
 *
 * Names and signatures are cublasLt's (versions 12 and 13), numbers and the contents of types are
 * not: the only library that is ever called through this is tests/cuda/fake_cublaslt.c. Thread: any.
 */
#ifndef BATON_TESTS_SIMT_CUBLASLT_H
#define BATON_TESTS_SIMT_CUBLASLT_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

typedef enum { /* (CUDA's) */
               CUBLAS_STATUS_SUCCESS,
               CUBLAS_STATUS_ALLOC_FAILED,
               CUBLAS_STATUS_INVALID_VALUE,
               CUBLAS_STATUS_EXECUTION_FAILED,
               CUBLAS_STATUS_NOT_SUPPORTED
} cublasStatus_t;
typedef enum { CUBLAS_OP_N, CUBLAS_OP_T } cublasOperation_t;       /* (CUDA's) */
typedef enum { CUBLAS_COMPUTE_32F } cublasComputeType_t;           /* (CUDA's) */
typedef enum { CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF } cudaDataType; /* (CUDA's) */
typedef cudaDataType cudaDataType_t;
typedef enum { CUBLASLT_MATMUL_DESC_TRANSA } cublasLtMatmulDescAttributes_t; /* (CUDA's) */
typedef enum {                                                               /* (CUDA's) */
               CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
               CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET
} cublasLtMatrixLayoutAttribute_t;
typedef enum { /* (CUDA's) */
               CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
} cublasLtMatmulPreferenceAttributes_t;

typedef struct cublasLtContext *cublasLtHandle_t;                    /* (CUDA's) */
typedef struct cublasLtMatmulDesc *cublasLtMatmulDesc_t;             /* (CUDA's) */
typedef struct cublasLtMatmulPreference *cublasLtMatmulPreference_t; /* (CUDA's) */
typedef struct cublasLtMatrixLayout *cublasLtMatrixLayout_t;         /* (CUDA's) */
typedef struct {                                                     /* (CUDA's) */
    uint64_t data[8];
} cublasLtMatmulAlgo_t;
typedef struct { /* (CUDA's) */
    cublasLtMatmulAlgo_t algo;
    cublasStatus_t state;
} cublasLtMatmulHeuristicResult_t;

#ifdef __cplusplus
extern "C" {
#endif

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle);
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle);
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType scale);
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc);
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t what,
                                              const void *value, size_t n);
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference);
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference);
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t what,
                                                    const void *value, size_t n);
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t stride);
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout);
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t what,
                                                const void *value, size_t n);
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t found[], int *n);
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t n_workspace, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
