/* bench_gpu.c - what the kernels reach on a GPU, beside the limits of that GPU, measured in the
 * same run.
 *
 *     bench_gpu [--tiny] limits            the properties and limits of the GPU
 *     bench_gpu [--tiny] model FOLDER ...  steps of a model: tokens per second, a table of its ops
 *                                          (gpu_model.c has the options)
 *     bench_gpu [--tiny] attention         decode attention alone
 *     bench_gpu [--tiny] gemm              GEMM alone, with many rows
 *     bench_gpu [--tiny] push [checksum]   KV from one process to another over CUDA IPC, beside
 *                                          cudaMemcpy
 *     bench_gpu hold                       keeps a context on the GPU until standard input ends, so
 *                                          that the driver does not start it anew for each program
 *
 * Prints one line of JSON per result (gpu.h). With --tiny the sizes are such that an emulated GPU
 * finishes in seconds; the figures then mean nothing. */
#include <stdio.h>
#include <string.h>

#include "shared/base/log.h"
#include "tests/gpu/bench/gpu.h"

static int usage(void)
{
    fprintf(stderr, "usage: bench_gpu [--tiny] limits|attention|gemm|push|hold\n       bench_gpu "
                    "[--tiny] push checksum\n"
                    "       bench_gpu [--tiny] model FOLDER [option...]\n");
    return 2;
}

/* With memory of its own, because a context without any may be made later than one thinks. */
static int hold(void)
{
    void *p;
    gpu_cuda(cudaMalloc(&p, (size_t)1 << 20), "getting memory");
    puts("held");
    fflush(stdout);
    while (getchar() != EOF) continue;
    gpu_cuda(cudaFree(p), "freeing memory");
    return 0;
}

int main(int argc, char **argv)
{
    const bool tiny = argc > 1 && strcmp(argv[1], "--tiny") == 0;
    const struct gpu_sizes sizes = gpu_sizes(tiny);
    argc -= tiny ? 2 : 1;
    argv += tiny ? 2 : 1;
    if (argc < 1) return usage();
    log_set_level(LOG_WARN);
    if (strcmp(argv[0], "model") == 0) return gpu_model_main(&sizes, argc - 1, argv + 1);
    const bool checksum = argc == 2 && strcmp(argv[0], "push") == 0 &&
                          strcmp(argv[1], "checksum") == 0;
    if (argc > 1 && !checksum) return usage();
    if (strcmp(argv[0], "hold") == 0) return hold();
    if (strcmp(argv[0], "limits") == 0) return gpu_limits_main(&sizes);
    if (strcmp(argv[0], "attention") == 0) return gpu_attention_main(&sizes);
    if (strcmp(argv[0], "gemm") == 0) return gpu_gemm_main(&sizes);
    if (strcmp(argv[0], "push") == 0) return gpu_kv_push_main(&sizes, checksum);
    return usage();
}
