/* gpu_gemm.c - GEMM alone, with many rows, at the shapes of the measured models: experts and dense
 * matrices of a prompt, on every kind of tile of compute capability 9.0 and as gemm_run chooses;
 * and dense matrices of 17 to 128 rows, which are bound by reading weights.
 *
 * Experts have unequal numbers of rows, as a router leaves them, and rows are gathered. Dense
 * matrices are several copies in turn, because one would stay in the L2 cache. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemm/gemm_cublaslt.h"
#include "kernels/cuda/inputs/prepare_inputs_f8.h"
#include "tests/gpu/bench/gpu.h"
#include "tests/gpu/bench/gpu_kernels.h"

enum { COPIES = 4, ROUNDS = 7, PATTERN = 1 << 22, BY_RUN = -1, BY_CUBLASLT = -2 };

struct gemm_case {
    const char *name;
    int32_t n_groups; /* 0: dense */
    size_t n_rows, n_x_rows, n_out, n_in;
    bool paired, add;
};

/* Source: the models' configurations; 8,192 and 2,048 tokens. */
static const struct gemm_case CASES[] = {
    { "Qwen3 experts, gate and up", 128, 65536, 8192, 1536, 2048, true, false },
    { "Qwen3 experts, down", 128, 65536, 65536, 2048, 768, false, false },
    { "Qwen3 experts, gate and up", 128, 16384, 2048, 1536, 2048, true, false },
    { "Qwen3 experts, down", 128, 16384, 16384, 2048, 768, false, false },
    { "ERNIE experts, gate and up", 64, 49152, 8192, 3072, 2560, true, false },
    { "ERNIE experts, down", 64, 49152, 49152, 2560, 1536, false, false },
    { "ERNIE shared expert, gate and up", 0, 8192, 8192, 6144, 2560, true, false },
    { "DeepSeek-V2-Lite experts, gate and up", 64, 49152, 8192, 2816, 2048, true, false },
    { "DeepSeek-V2-Lite experts, down", 64, 49152, 49152, 2048, 1408, false, false },
    { "Llama-3-8B, gate and up", 0, 8192, 8192, 28672, 4096, true, false },
    { "Qwen3 q", 0, 8192, 8192, 4096, 2048, false, false },
    { "Qwen3 o", 0, 8192, 8192, 2048, 4096, false, true },
};
static const struct gemm_case TINY[] = {
    { "small experts", 3, 500, 200, 320, 256, true, false },
    { "small", 0, 300, 300, 384, 256, false, false },
    { "small", 0, 300, 300, 512, 256, false, true },
};
static const struct gemm_case BATCHES[] = {
    { "Qwen3 q", 0, 0, 0, 4096, 2048, false, false },
    { "Qwen3 o", 0, 0, 0, 2048, 4096, false, false },
};
static const size_t BATCH_ROWS[] = { 17, 32, 64, 128 };

struct gemm_way {
    const char *name;
    enum gemm_weight_layout layout;
    int tile;
};
static const struct gemm_way WAYS[] = {
    { "bf16, 128 by 128", GEMM_BF16, GEMM_SM90_NARROW },
    { "bf16, 128 by 256", GEMM_BF16, GEMM_SM90_WIDE },
    { "bf16, 128 by 256 in pairs", GEMM_BF16, GEMM_SM90_WIDE_MULTICAST },
    { "bf16, as chosen", GEMM_BF16, BY_RUN },
    { "bf16, cublasLt", GEMM_BF16, BY_CUBLASLT },
    { "fp8, 128 by 128", GEMM_F8, GEMM_SM90_NARROW },
    { "fp8, 256 by 128", GEMM_F8, GEMM_SM90_TALL },
    { "fp8, 128 by 128 in pairs", GEMM_F8, GEMM_SM90_NARROW_MULTICAST },
    { "fp8, 256 by 128 in pairs", GEMM_F8, GEMM_SM90_TALL_MULTICAST },
    { "fp8, as chosen", GEMM_F8, BY_RUN },
    { "wint8, as chosen", GEMM_W8, BY_RUN },
    { "wint4, as chosen", GEMM_W4, BY_RUN },
};

struct rig {
    const struct gpu_sizes *sizes;
    struct gpu_limits limits;
    cudaStream_t stream;
    struct gpu_timer timer;
    unsigned char *w, *x, *y, *pattern;
    void *scratch, *workspace;
    struct gemm_cublaslt *cublaslt; /* or NULL */
    size_t w_bytes, x_bytes, y_bytes;
    int32_t *begin, *x_rows;
};

static void *take(size_t bytes)
{
    void *p;
    gpu_cuda(cudaMalloc(&p, bytes), "getting memory");
    return p;
}

static size_t matrix_bytes(const struct gemm_case *s, enum gemm_weight_layout layout)
{
    return gemm_matrix_bytes(layout, s->paired, s->n_out, s->n_in);
}
static size_t n_matrices(const struct gemm_case *s)
{
    return s->n_groups ? (size_t)s->n_groups : COPIES;
}

/* Bytes that are numbers in every 8- and 4-bit layout. */
static void fill_bytes(struct rig *r, unsigned char *to, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += PATTERN)
        gpu_cuda(cudaMemcpy(to + at, at ? to : r->pattern,
                            bytes - at < PATTERN ? bytes - at : PATTERN,
                            at ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice),
                 "filling memory");
}

static void fill_weights(struct rig *r, const struct gemm_case *s, enum gemm_weight_layout layout)
{
    const size_t bytes = matrix_bytes(s, layout), at = gemm_scales_at(layout, s->n_out, s->n_in);
    if (layout == GEMM_BF16)
        gpu_cuda(gpu_fill_bf16(r->stream, r->w, n_matrices(s) * bytes / 2, 1), "filling memory");
    else fill_bytes(r, r->w, n_matrices(s) * bytes);
    for (size_t i = 0; i < n_matrices(s) && at < bytes; i++)
        gpu_cuda(gpu_fill_f32(r->stream, (float *)(r->w + i * bytes + at), (bytes - at) / 4, 3),
                 "filling memory");
}

/* Groups of unequal sizes; rows of x in another order. */
static void put_rows(struct rig *r, const struct gemm_case *s)
{
    const size_t n = s->n_groups ? (size_t)s->n_groups : 1, mean = s->n_rows / n;
    int32_t *begin = calloc(n + 1, sizeof *begin), *rows = calloc(s->n_rows, sizeof *rows);
    gpu_need(begin && rows, "no memory", NULL);
    for (size_t i = 1; i <= n; i++)
        begin[i] = (int32_t)(i * mean + (i < n ? i * 37 % 41 * mean / 160 : 0));
    begin[n] = (int32_t)s->n_rows;
    for (size_t i = 0; i < s->n_rows; i++) rows[i] = (int32_t)(i * 7919 % s->n_x_rows);
    gpu_cuda(cudaMemcpy(r->begin, begin, (n + 1) * sizeof *begin, cudaMemcpyHostToDevice), "rows");
    gpu_cuda(cudaMemcpy(r->x_rows, rows, s->n_rows * sizeof *rows, cudaMemcpyHostToDevice), "rows");
    free(begin);
    free(rows);
}

static size_t step_of(size_t n, size_t step) { return (n + step - 1) / step * step; }

/* A call; copy: which of a dense matrix. */
static struct gemm gemm_of(const struct rig *r, const struct gemm_case *s,
                           enum gemm_weight_layout layout, size_t copy)
{
    const size_t bytes = matrix_bytes(s, layout);
    const bool f8 = layout == GEMM_F8;
    return (struct gemm){
        .layout = layout,
        .paired = s->paired,
        .n_out = s->n_out,
        .n_in = s->n_in,
        .w = r->w + (s->n_groups ? 0 : copy % COPIES * bytes),
        .w_stride = s->n_groups ? bytes : 0,
        .n_groups = s->n_groups ? s->n_groups : 1,
        .begin = s->n_groups ? r->begin : NULL,
        .n_rows = s->n_rows,
        .x = r->x,
        .x_stride = step_of(s->n_in, f8 ? PREPARE_INPUTS_F8_BLOCK : GEMM_STEP),
        .x_rows = s->n_x_rows < s->n_rows ? r->x_rows : NULL,
        .x_scales = f8 ? (const float *)(r->x + r->x_bytes / 2) : NULL,
        .y = r->y,
        .y_stride = s->paired ? step_of(s->n_out / 2, GEMM_STEP) : s->n_out,
        .epilogue = s->paired     ? GEMM_SILU_BF16
                    : s->n_groups ? GEMM_STORE_BF16 /* as down of a prompt */
                    : s->add      ? GEMM_ADD
                                  : GEMM_STORE,
        .scratch = r->scratch,
    };
}

/* Seconds of a call, the median; 0: this GPU has no such kernel. */
static double seconds_of(struct rig *r, const struct gemm_case *s, enum gemm_weight_layout layout,
                         int tile)
{
    double v[ROUNDS];
    gpu_cuda(cudaDeviceSynchronize(), "filling memory"); /* by other streams */
    for (size_t i = 0; i < ROUNDS + 2; i++) {
        struct gemm g = gemm_of(r, s, layout, i);
        if (tile == BY_CUBLASLT) g.cublaslt = r->cublaslt, g.workspace = r->workspace;
        if (tile == BY_CUBLASLT && !gemm_cublaslt_fits(&g)) return 0;
        gpu_cuda(cudaEventRecord(r->timer.begin, r->stream), "timing");
        const cudaError_t e = tile < 0 ? gemm_run(r->stream, &g)
                                       : gemm_run_sm90(r->stream, &g, (enum gemm_sm90_tile)tile);
        if (e == cudaErrorInvalidValue || e == cudaErrorNotSupported) return 0;
        gpu_cuda(e, "a product");
        gpu_cuda(cudaEventRecord(r->timer.end, r->stream), "timing");
        const double t = gpu_timer_s(&r->timer);
        if (i >= 2) v[i - 2] = t;
    }
    return gpu_median(v, ROUNDS);
}

static void measure_case(struct rig *r, const struct gemm_case *s)
{
    enum gemm_weight_layout filled = GEMM_F32;
    put_rows(r, s);
    for (size_t i = 0; i < sizeof WAYS / sizeof *WAYS; i++) {
        const struct gemm_way *way = &WAYS[i];
        char name[160];
        if (way->layout != filled) fill_weights(r, s, way->layout);
        if (way->layout == GEMM_F8) fill_bytes(r, r->x, s->n_x_rows * step_of(s->n_in, 128));
        else if (filled == GEMM_F32 || filled == GEMM_F8)
            gpu_cuda(gpu_fill_bf16(r->stream, r->x, r->x_bytes / 4, 2), "filling memory");
        filled = way->layout;
        const double seconds = seconds_of(r, s, way->layout, way->tile);
        if (!(seconds > 0)) continue;
        snprintf(name, sizeof name, "%s, %zu rows, %s", s->name, s->n_rows, way->name);
        struct gpu_figure f = { .name = name, .unit = "TFLOP/s" };
        f.value = 2e-12 * (double)s->n_rows * (double)s->n_out * (double)s->n_in / seconds;
        f.limit = gpu_product_limit(&r->limits, &f.limit_is) * 1e-12;
        gpu_print_figure(&f);
    }
}

static void measure_batch(struct rig *r, const struct gemm_case *s)
{
    char name[160];
    fill_weights(r, s, GEMM_BF16);
    const double seconds = seconds_of(r, s, GEMM_BF16, BY_RUN);
    snprintf(name, sizeof name, "%s, %zu rows, bf16", s->name, s->n_rows);
    gpu_print_figure(&(struct gpu_figure){
        .name = name,
        .value = 1e-9 * (double)matrix_bytes(s, GEMM_BF16) / seconds,
        .unit = "GB/s of weights",
        .limit = r->limits.read * 1e-9,
        .limit_is = "memory read by a kernel",
    });
}

/* Memory for the largest case. */
static void open_rig(struct rig *r, const struct gemm_case *cases, size_t n)
{
    size_t n_rows = 0, n_groups = 0;
    for (size_t i = 0; i < n; i++) {
        const struct gemm_case *s = &cases[i];
        const size_t w = n_matrices(s) * matrix_bytes(s, GEMM_BF16),
                     x = s->n_x_rows * step_of(s->n_in, 128) * 4,
                     y = s->n_rows * step_of(s->n_out, 128) * 4;
        r->w_bytes = w > r->w_bytes ? w : r->w_bytes;
        r->x_bytes = x > r->x_bytes ? x : r->x_bytes;
        r->y_bytes = y > r->y_bytes ? y : r->y_bytes;
        n_rows = s->n_rows > n_rows ? s->n_rows : n_rows;
        n_groups = n_matrices(s) > n_groups ? n_matrices(s) : n_groups;
    }
    r->w = take(r->w_bytes), r->x = take(r->x_bytes), r->y = take(r->y_bytes);
    r->scratch = take(gemm_scratch_bytes());
    gpu_cuda(cudaMemset(r->scratch, 0, gemm_scratch_bytes()), "clearing memory");
    r->begin = take((n_groups + 1) * sizeof *r->begin);
    r->x_rows = take(n_rows * sizeof *r->x_rows);
    r->pattern = malloc(PATTERN);
    gpu_need(r->pattern != NULL, "no memory", NULL);
    uint32_t state = 1;
    for (size_t i = 0; i < PATTERN; i++) {
        state = state * 1664525u + 1013904223u;
        const unsigned char v = (unsigned char)(state >> 24);
        r->pattern[i] = (v & 127) == 127 ? v ^ 1 : v; /* the NaNs of e4m3 */
    }
    gpu_cuda(gpu_fill_f32(r->stream, (float *)(void *)r->x, r->x_bytes / 4, 5), "filling memory");
}

static void open_cublaslt(struct rig *r)
{
    struct err err;
    if (gemm_cublaslt_create(&r->cublaslt, &err) != OK) {
        gpu_note("no cublasLt: %s", err.text);
        r->cublaslt = NULL;
    }
    r->workspace = take(GEMM_CUBLASLT_WORKSPACE);
}

int gpu_gemm_main(const struct gpu_sizes *sizes)
{
    struct rig r = { .sizes = sizes };
    const struct gemm_case *cases = sizes->tiny ? TINY : CASES;
    const size_t n = sizes->tiny ? sizeof TINY / sizeof *TINY : sizeof CASES / sizeof *CASES;
    gpu_limits_measure(sizes, false, &r.limits);
    gpu_cuda(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking), "making a stream");
    gpu_timer_init(&r.timer);
    open_rig(&r, cases, n);
    open_cublaslt(&r);
    for (size_t i = 0; i < n; i++) measure_case(&r, &cases[i]);
    for (size_t i = 0; i < sizeof BATCHES / sizeof *BATCHES && !sizes->tiny; i++)
        for (size_t j = 0; j < sizeof BATCH_ROWS / sizeof *BATCH_ROWS; j++) {
            struct gemm_case s = BATCHES[i]; /* by the own kernels */
            s.n_rows = s.n_x_rows = BATCH_ROWS[j];
            measure_batch(&r, &s);
        }
    gemm_cublaslt_free(r.cublaslt);
    gpu_timer_release(&r.timer);
    free(r.pattern);
    gpu_cuda(cudaStreamDestroy(r.stream), "dropping a stream");
    return 0; /* the memory goes with the process */
}
