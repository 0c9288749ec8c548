/* gpu_limits.c - the limits of the GPU: reading memory, copying it, products by cuBLAS, launches.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_backend.h"
#include "shared/base/clock.h"
#include "tests/gpu/bench/gpu.h"
#include "tests/gpu/bench/gpu_kernels.h"

enum { ROUNDS_MAX = 32, LAUNCHES = 1000, LAUNCHES_TINY = 10 };

struct gpu_sizes gpu_sizes(bool tiny)
{
    if (tiny)
        return (struct gpu_sizes){
            .tiny = true, .read_bytes = (size_t)1 << 20, .rounds = 2, .product = 64
        };
    return (struct gpu_sizes){ .read_bytes = (size_t)8 << 30,
                               .rounds = 10,
                               .product = 8192,
                               .hold_cycles = 4000000,
                               /* some 2 ms */ };
}

/* ---- saying ---- */

void gpu_need(bool ok, const char *what, const char *why)
{
    if (ok) return;
    fprintf(stderr, "bench_gpu: %s%s%s\n", what, why ? ": " : "", why ? why : "");
    exit(1);
}

void gpu_cuda(cudaError_t e, const char *what)
{
    gpu_need(e == cudaSuccess, what, cudaGetErrorString(e));
}

/* Prints a JSON string. */
static void put_string(const char *s)
{
    putchar('"');
    for (; *s; s++) {
        if (*s == '"' || *s == '\\') putchar('\\');
        putchar((unsigned char)*s < ' ' ? ' ' : *s);
    }
    putchar('"');
}

static void print_text(const char *kind, const char *name, const char *member, const char *format,
                       va_list args)
{
    char text[512];
    vsnprintf(text, sizeof text, format, args);
    printf("{\"kind\":\"%s\",", kind);
    if (name) printf("\"name\":"), put_string(name), putchar(',');
    printf("\"%s\":", member);
    put_string(text);
    printf("}\n");
    fflush(stdout);
}

void gpu_fact(const char *name, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print_text("fact", name, "value", format, args);
    va_end(args);
}

void gpu_note(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print_text("note", NULL, "text", format, args);
    va_end(args);
}

void gpu_print_figure(const struct gpu_figure *f)
{
    printf("{\"kind\":\"figure\",\"name\":");
    put_string(f->name);
    printf(",\"value\":%.6g,\"unit\":", f->value);
    put_string(f->unit);
    if (f->limit > 0) {
        printf(",\"limit\":%.6g,\"limit_is\":", f->limit);
        put_string(f->limit_is);
        printf(",\"ratio\":%.4f", f->value / f->limit);
        if (f->wanted > 0)
            printf(",\"wanted\":%.4g,\"wanted_is\":\"%s\"", f->wanted,
                   f->less_is_better ? "at most" : "at least");
    }
    printf("}\n");
    fflush(stdout);
}

double gpu_product_limit(const struct gpu_limits *l, const char **what)
{
    *what = l->bf16 > 0 ? "cuBLAS bf16, measured in this run"
                        : "bf16 by the data sheet: there is no cuBLAS here";
    return l->bf16 > 0 ? l->bf16 : l->bf16_nominal;
}

/* ---- measuring ---- */

void gpu_timer_init(struct gpu_timer *t)
{
    gpu_cuda(cudaEventCreate(&t->begin), "making an event");
    gpu_cuda(cudaEventCreate(&t->end), "making an event");
}

void gpu_timer_release(struct gpu_timer *t)
{
    gpu_cuda(cudaEventDestroy(t->begin), "dropping an event");
    gpu_cuda(cudaEventDestroy(t->end), "dropping an event");
}

double gpu_timer_s(const struct gpu_timer *t)
{
    float ms = 0;
    gpu_cuda(cudaEventSynchronize(t->end), "waiting for what was timed");
    gpu_cuda(cudaEventElapsedTime(&ms, t->begin, t->end), "reading a time");
    return (double)ms * 1e-3;
}

static int compare(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

double gpu_median(double *v, size_t n)
{
    qsort(v, n, sizeof *v, compare);
    return v[n / 2];
}

cudaStream_t gpu_stream(struct kernel_ctx *c) { return cuda_ctx_of(c)->device->stream; }

/* ---- memory ---- */

struct memory {
    cudaStream_t stream;
    void *all;
    unsigned long long *sink;
    size_t bytes;
};

static void once_read(const struct memory *m)
{
    gpu_cuda(gpu_read(m->stream, m->all, m->bytes, m->sink), "reading");
}

/* Copies one half to the other. */
static void once_copied(const struct memory *m)
{
    gpu_cuda(cudaMemcpyAsync((char *)m->all + m->bytes / 2, m->all, m->bytes / 2,
                             cudaMemcpyDeviceToDevice, m->stream),
             "copying");
}

/* The shortest of the rounds in seconds, as a limit should be. */
static double best_s(const struct memory *m, int rounds, void (*once)(const struct memory *))
{
    struct gpu_timer t;
    double best = 0;
    gpu_timer_init(&t);
    once(m);
    for (int i = 0; i < rounds; i++) {
        gpu_cuda(cudaEventRecord(t.begin, m->stream), "timing");
        once(m);
        gpu_cuda(cudaEventRecord(t.end, m->stream), "timing");
        const double s = gpu_timer_s(&t);
        if (i == 0 || s < best) best = s;
    }
    gpu_timer_release(&t);
    return best > 0 ? best : 1e-9;
}

static void measure_memory(const struct gpu_sizes *s, struct gpu_limits *out)
{
    struct memory m = { .bytes = s->read_bytes };
    size_t available = 0, total = 0;
    gpu_cuda(cudaMemGetInfo(&available, &total), "asking for memory");
    while (m.bytes > available / 2) m.bytes /= 2;
    gpu_cuda(cudaStreamCreateWithFlags(&m.stream, cudaStreamNonBlocking), "making a stream");
    gpu_cuda(cudaMalloc(&m.all, m.bytes), "getting memory to read");
    gpu_cuda(cudaMalloc((void **)&m.sink, sizeof *m.sink), "getting memory");
    gpu_cuda(gpu_fill_bf16(m.stream, m.all, m.bytes / 2, 1), "filling memory");
    out->read = (double)m.bytes / best_s(&m, s->rounds, once_read);
    out->copied = (double)(m.bytes / 2) / best_s(&m, s->rounds, once_copied);
    gpu_cuda(cudaFree(m.sink), "freeing memory");
    gpu_cuda(cudaFree(m.all), "freeing memory");
    gpu_cuda(cudaStreamDestroy(m.stream), "dropping a stream");
}

/* ---- properties ---- */

static int attribute(enum cudaDeviceAttr a)
{
    int v = 0;
    gpu_cuda(cudaDeviceGetAttribute(&v, a, 0), "asking what the GPU is");
    return v;
}

/* Dense bf16 operations per second by the data sheets. Source: NVIDIA H100 and A100 data sheets; an
 * H200 has the same SMs as an H100. */
static double nominal_bf16(int major, int minor)
{
    return major == 9 && minor == 0 ? 989e12 : major == 8 && minor == 0 ? 312e12 : 0;
}

void gpu_limits_measure(const struct gpu_sizes *s, bool print, struct gpu_limits *out)
{
    char by[512] = "";
    *out = (struct gpu_limits){
        .bf16_nominal = nominal_bf16(attribute(cudaDevAttrComputeCapabilityMajor),
                                     attribute(cudaDevAttrComputeCapabilityMinor)),
    };
    measure_memory(s, out);
    out->bf16 = gpu_cublas_bf16(s, by, sizeof by);
    if (!print) return;
    gpu_fact("cuBLAS", "%s", by);
    gpu_print_figure(&(struct gpu_figure){
        .name = "memory read by a kernel", .value = out->read * 1e-9, .unit = "GB/s" });
    gpu_print_figure(&(struct gpu_figure){
        .name = "cudaMemcpy device to device, bytes copied",
        .value = out->copied * 1e-9,
        .unit = "GB/s",
        .limit = out->read * 0.5e-9,
        .limit_is = "half of reading: it reads and writes",
    });
    if (out->bf16 > 0)
        gpu_print_figure(&(struct gpu_figure){
            .name = "cuBLAS bf16, random numbers",
            .value = out->bf16 * 1e-12,
            .unit = "TFLOP/s",
            .limit = out->bf16_nominal * 1e-12,
            .limit_is = "the data sheet",
        });
}

static void print_facts(void)
{
    int runtime = 0, driver = 0;
    size_t available = 0, total = 0;
    gpu_cuda(cudaRuntimeGetVersion(&runtime), "asking for versions");
    gpu_cuda(cudaDriverGetVersion(&driver), "asking for versions");
    gpu_cuda(cudaMemGetInfo(&available, &total), "asking for memory");
    gpu_fact("compute capability", "%d.%d", attribute(cudaDevAttrComputeCapabilityMajor),
             attribute(cudaDevAttrComputeCapabilityMinor));
    gpu_fact("multiprocessors", "%d", attribute(cudaDevAttrMultiProcessorCount));
    gpu_fact("L2 cache", "%d MiB", attribute(cudaDevAttrL2CacheSize) >> 20);
    gpu_fact("shared memory per block, opt-in", "%d bytes",
             attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
    gpu_fact("CUDA", "runtime %d, driver %d", runtime, driver);
    gpu_fact("memory", "%zu MiB, %zu MiB free", total >> 20, available >> 20);
}

/* ---- launches ---- */

static void queue(cudaStream_t stream, int n)
{
    for (int i = 0; i < n; i++) gpu_cuda(gpu_nothing(stream), "a launch");
}

/* Prints the host's time per launch, the GPU's from one empty kernel to the next, and both for a
 * graph of as many. */
static void print_launches(const struct gpu_sizes *s)
{
    const int n = s->tiny ? LAUNCHES_TINY : LAUNCHES;
    double host[ROUNDS_MAX], gpu[ROUNDS_MAX], graph_host[ROUNDS_MAX], graph_gpu[ROUNDS_MAX];
    struct gpu_timer t;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    gpu_timer_init(&t);
    gpu_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
    gpu_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capturing a graph");
    queue(stream, n);
    gpu_cuda(cudaStreamEndCapture(stream, &graph), "capturing a graph");
    gpu_cuda(cudaGraphInstantiate(&exec, graph, 0), "making a graph");
    for (int i = 0; i < s->rounds; i++) {
        queue(stream, n);
        gpu_cuda(cudaStreamSynchronize(stream), "waiting");
        gpu_cuda(cudaEventRecord(t.begin, stream), "timing");
        uint64_t begin = clock_ns();
        queue(stream, n);
        host[i] = (double)(clock_ns() - begin) * 1e-3 / n;
        gpu_cuda(cudaEventRecord(t.end, stream), "timing");
        gpu[i] = gpu_timer_s(&t) * 1e6 / n;
        gpu_cuda(cudaEventRecord(t.begin, stream), "timing");
        begin = clock_ns();
        gpu_cuda(cudaGraphLaunch(exec, stream), "launching a graph");
        graph_host[i] = (double)(clock_ns() - begin) * 1e-3;
        gpu_cuda(cudaEventRecord(t.end, stream), "timing");
        graph_gpu[i] = gpu_timer_s(&t) * 1e6 / n;
    }
    const size_t rounds = (size_t)s->rounds;
    gpu_print_figure(&(struct gpu_figure){
        .name = "launch, time of the host", .value = gpu_median(host, rounds), .unit = "us" });
    gpu_print_figure(&(struct gpu_figure){
        .name = "launch, from one empty kernel to the next",
        .value = gpu_median(gpu, rounds),
        .unit = "us",
    });
    char name[96];
    snprintf(name, sizeof name, "launch of a graph of %d empty kernels, time of the host", n);
    gpu_print_figure(&(struct gpu_figure){
        .name = name, .value = gpu_median(graph_host, rounds), .unit = "us" });
    gpu_print_figure(&(struct gpu_figure){
        .name = "in a graph, from one empty kernel to the next",
        .value = gpu_median(graph_gpu, rounds),
        .unit = "us",
    });
    gpu_cuda(cudaGraphExecDestroy(exec), "dropping a graph");
    gpu_cuda(cudaGraphDestroy(graph), "dropping a graph");
    gpu_cuda(cudaStreamDestroy(stream), "dropping a stream");
    gpu_timer_release(&t);
}

int gpu_limits_main(const struct gpu_sizes *s)
{
    struct gpu_limits l;
    print_facts();
    gpu_limits_measure(s, true, &l);
    print_launches(s);
    return 0;
}
