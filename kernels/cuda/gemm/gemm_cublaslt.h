/* gemm_cublaslt.h - large dense GEMMs of bf16 and f16 by NVIDIA's cublasLt, if the host has it.
 *
 * The library is loaded on demand, never linked: BATON_CUBLASLT names its file, a folder with it (a
 * Python package's lib), or is `off`; otherwise libcublasLt.so.13 and .12 from the dynamic loader's
 * path (LD_LIBRARY_PATH), then from /usr/local/cuda. The algorithm of a shape is queried once and
 * kept in a table of fixed size. Its accumulation order depends on n_rows, so `deterministic` calls
 * never use it. Life cycle: gemm_cublaslt_create, struct gemm's `cublaslt` in calls of one stream
 * at a time, gemm_cublaslt_free. Thread: loading, then engine. A call allocates only for a new
 * shape. */
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

/* and more: fewer are bound by memory, which the own kernels read as fast */
enum { GEMM_CUBLASLT_ROWS = 128 };
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
/* Puts it on the stream. False: the library has no way for this shape, nothing was done. */
bool gemm_cublaslt_run(cudaStream_t stream, const struct gemm *g) MUST_CHECK;

#ifdef __cplusplus
}
#endif
#endif
