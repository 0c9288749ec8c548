/* gemm_cublaslt_load.h - finding cublasLt and its functions, without its types: for gemm_cublaslt.c
 * and its test. Thread: loading thread. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_CUBLASLT_LOAD_H
#define BATON_KERNELS_CUDA_GEMM_GEMM_CUBLASLT_LOAD_H

#include <limits.h>

#include "shared/base/err.h"

#ifdef __cplusplus
extern "C" {
#endif

/* clang-format off */
#define GEMM_CUBLASLT_CALLS(X) \
    X(cublasLtCreate) \
    X(cublasLtDestroy) \
    X(cublasLtMatmul) \
    X(cublasLtMatmulAlgoGetHeuristic) \
    X(cublasLtMatmulDescCreate) \
    X(cublasLtMatmulDescDestroy) \
    X(cublasLtMatmulDescSetAttribute) \
    X(cublasLtMatmulPreferenceCreate) \
    X(cublasLtMatmulPreferenceDestroy) \
    X(cublasLtMatmulPreferenceSetAttribute) \
    X(cublasLtMatrixLayoutCreate) \
    X(cublasLtMatrixLayoutDestroy) \
    X(cublasLtMatrixLayoutSetAttribute)
/* clang-format on */

#define GEMM_CUBLASLT_INDEX(name) GEMM_CUBLASLT_##name,
enum { GEMM_CUBLASLT_CALLS(GEMM_CUBLASLT_INDEX) GEMM_CUBLASLT_N_CALLS };

struct gemm_cublaslt_loaded {
    void *handle;
    char path[PATH_MAX];
    void *calls[GEMM_CUBLASLT_N_CALLS]; /* in the list's order, none NULL */
};

/* `named`: a file, a folder, "off", or NULL for the usual places. Fails as gemm_cublaslt_create;
 * nothing stays loaded then. */
enum status gemm_cublaslt_load(const char *named, struct gemm_cublaslt_loaded *out,
                               struct err *err) MUST_CHECK;
void gemm_cublaslt_unload(struct gemm_cublaslt_loaded *l);

#ifdef __cplusplus
}
#endif
#endif
