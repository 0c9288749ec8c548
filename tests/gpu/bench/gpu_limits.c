/* gpu_limits.c - what the card can do at most: reading memory, copying it, products by cuBLAS, launches. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_backend.h"
#include "shared/base/clock.h"
#include "tests/gpu/bench/gpu.h"
#include "tests/gpu/bench/gpu_kernels.h"

enum { ROUNDS_MAX = 32, LAUNCHES = 1000, LAUNCHES_TINY = 10 };

struct card_sizes card_sizes(bool tiny)
{
    if (tiny) return (struct card_sizes){ .tiny = true, .read_bytes = (size_t)1 << 20, .rounds = 2, .product = 64 };
    return (struct card_sizes){ .read_bytes = (size_t)8 << 30, .rounds = 10, .product = 8192, .hold_cycles = 4000000 /* some 2 ms */ };
}

/* ---- saying ------------------------------------------------------------------------------------------------------ */

void card_need(bool ok, const char *what, const char *why)
{
    if (ok) return;
    fprintf(stderr, "bench_card: %s%s%s\n", what, why ? ": " : "", why ? why : "");
    exit(1);
}

void card_cuda(cudaError_t e, const char *what) { card_need(e == cudaSuccess, what, cudaGetErrorString(e)); }

/* A string of JSON. */
static void put_string(const char *s)
{
    putchar('"');
    for (; *s; s++) {
        if (*s == '"' || *s == '\\') putchar('\\');
        putchar((unsigned char)*s < ' ' ? ' ' : *s);
    }
    putchar('"');
}

static void say_text(const char *kind, const char *name, const char *member, const char *format, va_list args)
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

void card_fact(const char *name, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say_text("fact", name, "value", format, args);
    va_end(args);
}

void card_note(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say_text("note", NULL, "text", format, args);
    va_end(args);
}

void card_say(const struct card_figure *f)
{
    printf("{\"kind\":\"figure\",\"name\":");
    put_string(f->name);
    printf(",\"value\":%.6g,\"unit\":", f->value);
    put_string(f->unit);
    if (f->limit > 0) {
        printf(",\"limit\":%.6g,\"limit_is\":", f->limit);
        put_string(f->limit_is);
        printf(",\"ratio\":%.4f", f->value / f->limit);
        if (f->wanted > 0) printf(",\"wanted\":%.4g,\"wanted_is\":\"%s\"", f->wanted, f->less_is_better ? "at most" : "at least");
    }
    printf("}\n");
    fflush(stdout);
}

double card_product_limit(const struct card_limits *l, const char **what)
{
    *what = l->bf16 > 0 ? "cuBLAS bf16, measured in this run" : "bf16 by the data sheet: there is no cuBLAS here";
    return l->bf16 > 0 ? l->bf16 : l->bf16_nominal;
}

/* ---- measuring --------------------------------------------------------------------------------------------------- */

void card_timer_init(struct card_timer *t)
{
    card_cuda(cudaEventCreate(&t->begin), "making an event");
    card_cuda(cudaEventCreate(&t->end), "making an event");
}

void card_timer_release(struct card_timer *t)
{
    card_cuda(cudaEventDestroy(t->begin), "dropping an event");
    card_cuda(cudaEventDestroy(t->end), "dropping an event");
}

double card_timer_s(const struct card_timer *t)
{
    float ms = 0;
    card_cuda(cudaEventSynchronize(t->end), "waiting for what was timed");
    card_cuda(cudaEventElapsedTime(&ms, t->begin, t->end), "reading a time");
    return (double)ms * 1e-3;
}

static int compare(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }

double card_median(double *v, size_t n)
{
    qsort(v, n, sizeof *v, compare);
    return v[n / 2];
}

cudaStream_t card_stream(struct kernel_ctx *c) { return cuda_ctx_of(c)->device->stream; }

/* ---- memory ------------------------------------------------------------------------------------------------------ */

struct memory {
    cudaStream_t        stream;
    void               *all;
    unsigned long long *sink;
    size_t              bytes;
};

static void once_read(const struct memory *m) { card_cuda(card_read(m->stream, m->all, m->bytes, m->sink), "reading"); }

/* One half to the other. */
static void once_copied(const struct memory *m)
{
    card_cuda(cudaMemcpyAsync((char *)m->all + m->bytes / 2, m->all, m->bytes / 2, cudaMemcpyDeviceToDevice, m->stream), "copying");
}

/* Seconds: the least of the rounds, as a limit is. */
static double best_s(const struct memory *m, int rounds, void (*once)(const struct memory *))
{
    struct card_timer t;
    double            best = 0;
    card_timer_init(&t);
    once(m);
    for (int i = 0; i < rounds; i++) {
        card_cuda(cudaEventRecord(t.begin, m->stream), "timing");
        once(m);
        card_cuda(cudaEventRecord(t.end, m->stream), "timing");
        const double s = card_timer_s(&t);
        if (i == 0 || s < best) best = s;
    }
    card_timer_release(&t);
    return best > 0 ? best : 1e-9;
}

static void measure_memory(const struct card_sizes *s, struct card_limits *out)
{
    struct memory m = { .bytes = s->read_bytes };
    size_t        available = 0, total = 0;
    card_cuda(cudaMemGetInfo(&available, &total), "asking for memory");
    while (m.bytes > available / 2) m.bytes /= 2;
    card_cuda(cudaStreamCreateWithFlags(&m.stream, cudaStreamNonBlocking), "making a stream");
    card_cuda(cudaMalloc(&m.all, m.bytes), "getting memory to read");
    card_cuda(cudaMalloc((void **)&m.sink, sizeof *m.sink), "getting memory");
    card_cuda(card_fill_bf16(m.stream, m.all, m.bytes / 2, 1), "filling memory");
    out->read = (double)m.bytes / best_s(&m, s->rounds, once_read);
    out->copied = (double)(m.bytes / 2) / best_s(&m, s->rounds, once_copied);
    card_cuda(cudaFree(m.sink), "freeing memory");
    card_cuda(cudaFree(m.all), "freeing memory");
    card_cuda(cudaStreamDestroy(m.stream), "dropping a stream");
}

/* ---- what the card is -------------------------------------------------------------------------------------------- */

static int attribute(enum cudaDeviceAttr a)
{
    int v = 0;
    card_cuda(cudaDeviceGetAttribute(&v, a, 0), "asking what the card is");
    return v;
}

/* Dense bf16 by the data sheets of the cards that this is run on. Source: NVIDIA H100 and A100 data sheets; an H200 has an H100's processors. */
static double nominal_bf16(int major, int minor)
{
    return major == 9 && minor == 0 ? 989e12 : major == 8 && minor == 0 ? 312e12 : 0;
}

void card_limits_measure(const struct card_sizes *s, bool say, struct card_limits *out)
{
    char by[512] = "";
    *out = (struct card_limits){ .bf16_nominal = nominal_bf16(attribute(cudaDevAttrComputeCapabilityMajor), attribute(cudaDevAttrComputeCapabilityMinor)) };
    measure_memory(s, out);
    out->bf16 = card_blas_bf16(s, by, sizeof by);
    if (!say) return;
    card_fact("cuBLAS", "%s", by);
    card_say(&(struct card_figure){ .name = "memory read by a kernel", .value = out->read * 1e-9, .unit = "GB/s" });
    card_say(&(struct card_figure){ .name = "cudaMemcpy device to device, bytes copied", .value = out->copied * 1e-9, .unit = "GB/s",
                                    .limit = out->read * 0.5e-9, .limit_is = "half of reading: it reads and writes" });
    if (out->bf16 > 0)
        card_say(&(struct card_figure){ .name = "cuBLAS bf16, random numbers", .value = out->bf16 * 1e-12, .unit = "TFLOP/s",
                                        .limit = out->bf16_nominal * 1e-12, .limit_is = "the data sheet" });
}

static void say_facts(void)
{
    int    runtime = 0, driver = 0;
    size_t available = 0, total = 0;
    card_cuda(cudaRuntimeGetVersion(&runtime), "asking for versions");
    card_cuda(cudaDriverGetVersion(&driver), "asking for versions");
    card_cuda(cudaMemGetInfo(&available, &total), "asking for memory");
    card_fact("compute capability", "%d.%d", attribute(cudaDevAttrComputeCapabilityMajor), attribute(cudaDevAttrComputeCapabilityMinor));
    card_fact("multiprocessors", "%d", attribute(cudaDevAttrMultiProcessorCount));
    card_fact("L2 cache", "%d MiB", attribute(cudaDevAttrL2CacheSize) >> 20);
    card_fact("shared memory per block, opt-in", "%d bytes", attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
    card_fact("CUDA", "runtime %d, driver %d", runtime, driver);
    card_fact("memory", "%zu MiB, %zu MiB free", total >> 20, available >> 20);
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

static void queue(cudaStream_t stream, int n)
{
    for (int i = 0; i < n; i++) card_cuda(card_nothing(stream), "a launch");
}

/* The host's time per launch, the card's from one empty kernel to the next, and both of a graph of as many. */
static void say_launches(const struct card_sizes *s)
{
    const int         n = s->tiny ? LAUNCHES_TINY : LAUNCHES;
    double            host[ROUNDS_MAX], card[ROUNDS_MAX], graph_host[ROUNDS_MAX], graph_card[ROUNDS_MAX];
    struct card_timer t;
    cudaStream_t      stream;
    cudaGraph_t       graph;
    cudaGraphExec_t   exec;
    card_timer_init(&t);
    card_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
    card_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "recording a graph");
    queue(stream, n);
    card_cuda(cudaStreamEndCapture(stream, &graph), "recording a graph");
    card_cuda(cudaGraphInstantiate(&exec, graph, 0), "making a graph");
    for (int i = 0; i < s->rounds; i++) {
        queue(stream, n);
        card_cuda(cudaStreamSynchronize(stream), "waiting");
        card_cuda(cudaEventRecord(t.begin, stream), "timing");
        uint64_t begin = clock_ns();
        queue(stream, n);
        host[i] = (double)(clock_ns() - begin) * 1e-3 / n;
        card_cuda(cudaEventRecord(t.end, stream), "timing");
        card[i] = card_timer_s(&t) * 1e6 / n;
        card_cuda(cudaEventRecord(t.begin, stream), "timing");
        begin = clock_ns();
        card_cuda(cudaGraphLaunch(exec, stream), "launching a graph");
        graph_host[i] = (double)(clock_ns() - begin) * 1e-3;
        card_cuda(cudaEventRecord(t.end, stream), "timing");
        graph_card[i] = card_timer_s(&t) * 1e6 / n;
    }
    const size_t rounds = (size_t)s->rounds;
    card_say(&(struct card_figure){ .name = "launch, time of the host", .value = card_median(host, rounds), .unit = "us" });
    card_say(&(struct card_figure){ .name = "launch, from one empty kernel to the next", .value = card_median(card, rounds), .unit = "us" });
    char         name[96];
    snprintf(name, sizeof name, "launch of a graph of %d empty kernels, time of the host", n);
    card_say(&(struct card_figure){ .name = name, .value = card_median(graph_host, rounds), .unit = "us" });
    card_say(&(struct card_figure){ .name = "in a graph, from one empty kernel to the next", .value = card_median(graph_card, rounds), .unit = "us" });
    card_cuda(cudaGraphExecDestroy(exec), "dropping a graph");
    card_cuda(cudaGraphDestroy(graph), "dropping a graph");
    card_cuda(cudaStreamDestroy(stream), "dropping a stream");
    card_timer_release(&t);
}

int card_limits_main(const struct card_sizes *s)
{
    struct card_limits l;
    say_facts();
    card_limits_measure(s, true, &l);
    say_launches(s);
    return 0;
}
