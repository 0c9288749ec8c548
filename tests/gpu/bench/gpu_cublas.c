/* gpu_cublas.c - the rate of cuBLAS for a large bf16 product, which is the limit that products are
 * compared with.
 *
 * The library is too large to be carried along: it is loaded if the machine has it. BATON_CUBLAS
 * names the file; otherwise the dynamic loader searches (LD_LIBRARY_PATH among others). The few
 * declarations needed are here because the headers may be missing where this is built. Source:
 * cuBLAS API reference, cublasGemmEx. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/bench/gpu.h"
#include "tests/gpu/bench/gpu_kernels.h"

enum { OP_N = 0, OP_T = 1, R_16BF = 14, COMPUTE_32F = 68, ALGO_DEFAULT = -1, SUCCESS = 0 };

struct blas {
    void *library;
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*set_stream)(void *handle, cudaStream_t stream);
    int (*gemm)(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha,
                const void *a, int type_a, int lda, const void *b, int type_b, int ldb,
                const void *beta, void *c, int type_c, int ldc, int compute, int algo);
};

/* Loads cublasLt from the same folder, where the loader would not look for it. */
static void load_lt(const char *blas)
{
    const char *name = strstr(blas, "libcublas.so"),
               *rest = name ? name + strlen("libcublas.so") : NULL;
    char path[4096];
    if (!name) return;
    snprintf(path, sizeof path, "%.*slibcublasLt.so%s", (int)(name - blas), blas, rest);
    (void)dlopen(path, RTLD_NOW | RTLD_GLOBAL); /* if it is missing, loading cuBLAS reports it */
}

static bool load(struct blas *b, char *by, size_t by_bytes)
{
    const char *named = getenv("BATON_CUBLAS");
    const char *names[] = { named && *named ? named : "libcublas.so.13", "libcublas.so.12",
                            "libcublas.so" };
    *b = (struct blas){ 0 };
    for (size_t i = 0; i < sizeof names / sizeof *names && !b->library; i++) {
        load_lt(names[i]);
        b->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (b->library) snprintf(by, by_bytes, "%s", names[i]);
        else if (i == 0) snprintf(by, by_bytes, "none: %s", dlerror());
    }
    if (!b->library) return false;
    void *all[] = { dlsym(b->library, "cublasCreate_v2"), dlsym(b->library, "cublasDestroy_v2"),
                    dlsym(b->library, "cublasSetStream_v2"), dlsym(b->library, "cublasGemmEx") };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        gpu_need(all[i] != NULL, by, "lacks a function of cuBLAS");
    memcpy(&b->create, &all[0], sizeof all[0]);
    memcpy(&b->destroy, &all[1], sizeof all[1]);
    memcpy(&b->set_stream, &all[2], sizeof all[2]);
    memcpy(&b->gemm, &all[3], sizeof all[3]);
    return true;
}

/* c = a b for n x n matrices, with the rows of the weights contiguous, as in a model. */
static void product(const struct blas *b, void *handle, int n, void *const m[3])
{
    const float one = 1, zero = 0;
    const int e = b->gemm(handle, OP_T, OP_N, n, n, n, &one, m[0], R_16BF, n, m[1], R_16BF, n,
                          &zero, m[2], R_16BF, n, COMPUTE_32F, ALGO_DEFAULT);
    gpu_need(e == SUCCESS, "cublasGemmEx failed", NULL);
}

/* The median of the rounds, because the GPU's clock falls under such a load, and a limit must hold
 * for longer than a moment. */
static double rate(const struct blas *b, const struct gpu_sizes *s, void *handle,
                   cudaStream_t stream)
{
    const size_t n = s->product;
    void *m[3];
    double seconds[64];
    struct gpu_timer t;
    gpu_timer_init(&t);
    for (uint32_t i = 0; i < 3; i++) {
        gpu_cuda(cudaMalloc(&m[i], n * n * 2), "getting memory");
        gpu_cuda(gpu_fill_bf16(stream, m[i], n * n, i), "filling memory");
    }
    for (int i = 0; i < 3; i++) product(b, handle, (int)n, m);
    for (int i = 0; i < s->rounds * 2; i++) {
        gpu_cuda(cudaEventRecord(t.begin, stream), "timing");
        product(b, handle, (int)n, m);
        gpu_cuda(cudaEventRecord(t.end, stream), "timing");
        seconds[i] = gpu_timer_s(&t);
    }
    for (int i = 0; i < 3; i++) gpu_cuda(cudaFree(m[i]), "freeing memory");
    gpu_timer_release(&t);
    return 2.0 * (double)n * (double)n * (double)n / gpu_median(seconds, (size_t)s->rounds * 2);
}

double gpu_cublas_bf16(const struct gpu_sizes *s, char *by, size_t by_bytes)
{
    struct blas b;
    void *handle;
    cudaStream_t stream;
    if (s->tiny) { /* the emulated GPU's memory is unknown to a real library */
        snprintf(by, by_bytes, "not asked");
        return 0;
    }
    if (!load(&b, by, by_bytes)) return 0;
    if (b.create(&handle) != SUCCESS) {
        gpu_note("cublasCreate of %s failed: products are held against the data sheet", by);
        return 0;
    }
    gpu_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
    gpu_need(b.set_stream(handle, stream) == SUCCESS, by, "cublasSetStream failed");
    const double got = rate(&b, s, handle, stream);
    gpu_need(b.destroy(handle) == SUCCESS, by, "cublasDestroy failed");
    gpu_cuda(cudaStreamDestroy(stream), "dropping a stream");
    return got; /* the library's device memory is freed, but it stays loaded, because CUDA does not
                 * promise to survive unloading it */
}
