/* gemm_cublaslt.h - dense GEMMs of bf16 and f16 with more than a few rows by NVIDIA's cublasLt, if
 * the host has it.
 *
 * The library is loaded on demand, never linked: BATON_CUBLASLT names its file, a folder with it (a
 * Python package's lib), or is `off`; otherwise libcublasLt.so.13 and .12 from the dynamic loader's
 * path (LD_LIBRARY_PATH), then from /usr/local/cuda. The algorithm of a shape is queried once and
 * kept in a table of fixed size; of shapes of 1,024 rows and more several are timed at their first
 * call, unless it is captured. A call may be captured: a shape that is new then runs once on a
 * stream of the library's own before it. The accumulation order depends on n_rows, so
 * `deterministic` calls never use it. Life cycle: gemm_cublaslt_create, struct gemm's `cublaslt` in
 * calls of one stream at a time, gemm_cublaslt_free. Thread: loading, then engine. A call allocates
 * only for a new shape. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_CUBLASLT_H
#define BATON_KERNELS_CUDA_GEMM_GEMM_CUBLASLT_H

#include <cuda_runtime_api.h>
#include <stdbool.h>

#include "shared/base/err.h"

#ifdef __cplusplus
extern "C" {
#endif

struct gemm;
struct gemm_cublaslt;

/* and more: the own kernels for fewer (GEMM_SKINNY_ROWS) need no inputs in memory and no launch to
 * join the parts of a split k */
enum { GEMM_CUBLASLT_ROWS = 17 };
/* bytes of device memory, aligned to 256, that the caller gives: struct gemm's `workspace` */
enum { GEMM_CUBLASLT_WORKSPACE = 32 << 20 };

/* Loads it for the current device. ERR_NOT_FOUND: there is none; ERR_UNSUPPORTED: switched off, not
 * built in, or a file that is another library; ERR_NODEV: it finds no GPU. The sentence says
 * which, for the caller's line in the log: without it the own kernels do all products. */
enum status gemm_cublaslt_create(struct gemm_cublaslt **out, struct err *err) MUST_CHECK;
void gemm_cublaslt_free(struct gemm_cublaslt *l);
/* The file that was loaded. */
const char *gemm_cublaslt_path(const struct gemm_cublaslt *l);

/* Whether a call is one that the library may do. */
bool gemm_cublaslt_fits(const struct gemm *g);
/* How many of n GEMMs from the first on are one call, `all`: equal shapes of the same x, whose
 * matrices and results lie at equal distances (k and v). At least 1. */
int gemm_cublaslt_join(const struct gemm *g, int n, struct gemm *all);
/* Puts it on the stream. False: the library has no way for this shape, nothing was done. */
bool gemm_cublaslt_run(cudaStream_t stream, const struct gemm *g) MUST_CHECK;

#ifdef __cplusplus
}
#endif
#endif
