/* gemm_cublaslt_load.h - finding cublasLt and its functions, without its types: for gemm_cublaslt.c and its test. Thread: loading thread. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_CUBLASLT_LOAD_H
#define BATON_KERNELS_CUDA_GEMM_GEMM_CUBLASLT_LOAD_H

#include <limits.h>

#include "shared/base/err.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GEMM_LIBRARY_CALLS(X)                                                                                                        \
    X(cublasLtCreate) X(cublasLtDestroy) X(cublasLtMatmul) X(cublasLtMatmulAlgoGetHeuristic) X(cublasLtMatmulDescCreate)              \
    X(cublasLtMatmulDescDestroy) X(cublasLtMatmulDescSetAttribute) X(cublasLtMatmulPreferenceCreate) X(cublasLtMatmulPreferenceDestroy) \
    X(cublasLtMatmulPreferenceSetAttribute) X(cublasLtMatrixLayoutCreate) X(cublasLtMatrixLayoutDestroy)

#define GEMM_LIBRARY_INDEX(name) GEMM_LIBRARY_##name,
enum { GEMM_LIBRARY_CALLS(GEMM_LIBRARY_INDEX) GEMM_LIBRARY_N_CALLS };

struct gemm_loaded {
    void *handle;
    char  path[PATH_MAX];
    void *calls[GEMM_LIBRARY_N_CALLS]; /* in the list's order, none NULL */
};

/* `named`: a file, a folder, "off", or NULL for the usual places. Fails as gemm_library_create; nothing stays loaded then. */
enum status gemm_library_load(const char *named, struct gemm_loaded *out, struct err *err) MUST_CHECK;
void        gemm_library_unload(struct gemm_loaded *l);

#ifdef __cplusplus
}
#endif
#endif
