/* bench_kernels.c - speed of GEMMs and attention next to this machine's limits in the same run.
 *
 *     bench_kernels [isa] [threads] [fast|f32] [part]     defaults: auto, all cores, fast, all parts
 *     parts: gemv, gemm, experts, attention, limits
 *
 * Each GEMM has two limits: reading its weights once from memory, and the peak of the instruction
 * that multiplies them (fused multiply-add in f32 and for types without products of their own). "of
 * limit" is the time of the slower limit over the time measured. Matrices of gemv do not fit in the
 * caches. */
#include <stdlib.h>
#include <unistd.h>

#include "kernels/cpu/weights/weight_layout.h"
#include "shared/base/mem.h"
#include "tests/perf/limits.h"

enum { BLOCK_TOKENS = 64, EXPERT_ROWS = 64 };

/* ---- matrices ---- */

struct kind {
    const char *name;
    enum dtype dtype;
    enum quantize quantize;
};

static const struct kind KINDS[] = {
    { "f32", DTYPE_F32, QUANTIZE_NONE },     { "f16", DTYPE_F16, QUANTIZE_NONE },
    { "bf16", DTYPE_BF16, QUANTIZE_NONE },   { "f8", DTYPE_F8_E4M3, QUANTIZE_NONE },
    { "q8_0", DTYPE_Q8_0, QUANTIZE_NONE },   { "q4_0", DTYPE_Q4_0, QUANTIZE_NONE },
    { "q4_1", DTYPE_Q4_1, QUANTIZE_NONE },   { "q5_1", DTYPE_Q5_1, QUANTIZE_NONE },
    { "q4_K", DTYPE_Q4_K, QUANTIZE_NONE },   { "q6_K", DTYPE_Q6_K, QUANTIZE_NONE },
    { "wint8", DTYPE_BF16, QUANTIZE_WINT8 }, { "wint4", DTYPE_BF16, QUANTIZE_WINT4 },
};

static void fill(float *x, size_t n)
{
    uint32_t s = 1;
    for (size_t i = 0; i < n; i++) {
        s = s * 1664525u + 1013904223u;
        x[i] = (float)(s >> 8) * 0x1p-24f - 0.5f;
    }
}

/* Small numbers in every format: bytes below 0x30 give f16 and bf16 values too small for the sum of
 * a row to overflow, and never a NaN. */
static struct weight make_weight(struct kernel_ctx *c, const struct kind *k, size_t n_out,
                                 size_t n_in)
{
    size_t bytes = n_out * dtype_row_bytes(k->dtype, n_in),
           blocks = (n_out / F8_BLOCK + 1) * (n_in / F8_BLOCK + 1);
    uint8_t *data = mem_calloc(bytes, 1);
    float *scales = MEM_ARRAY(float, blocks);
    struct weight_src src = { .dtype = k->dtype, .data = data, .n_out = n_out, .n_in = n_in };
    struct weight w;
    if (k->dtype == DTYPE_F32) fill((float *)data, n_out * n_in);
    else
        for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)((i * 2654435761u >> 13) % 0x30);
    for (size_t i = 0; i < blocks; i++) scales[i] = 0.01f;
    if (k->dtype == DTYPE_F8_E4M3) src.scales = scales;
    if (c->weight_ops->pack(
            c, &(struct weight_pack_args){ .parts = &src, .n_parts = 1, .quantize = k->quantize },
            &w, NULL) != OK) {
        fprintf(stderr, "bench_kernels: no memory for %s, %zu x %zu\n", k->name, n_out, n_in);
        exit(1);
    }
    mem_free(data);
    mem_free(scales);
    return w;
}

/* ---- GEMMs ---- */

/* Nanoseconds of the best of several runs of all jobs in one call. */
static double time_jobs(struct kernel_ctx *c, const struct matmul_args *jobs, size_t n)
{
    double best = 1e30;
    for (uint64_t end = clock_ns() + MEASURE_NS; best == 1e30 || clock_ns() < end;) {
        uint64_t t0 = clock_ns();
        c->ops->matmul(c, jobs, n);
        double ns = (double)(clock_ns() - t0);
        best = ns < best ? ns : best;
    }
    return best;
}

static double time_product(struct kernel_ctx *c, const struct weight *w, size_t n_rows)
{
    float *x = MEM_ARRAY(float, n_rows * w->n_in), *y = MEM_ARRAY(float, n_rows * w->n_out);
    fill(x, n_rows * w->n_in);
    if (kernel_ctx_reserve(c, n_rows, w->n_in) != OK) exit(1);
    double ns = time_jobs(
        c,
        &(struct matmul_args){
            .w = w, .x = x, .x_stride = w->n_in, .n_rows = n_rows, .y = y, .y_stride = w->n_out },
        1);
    mem_free(x);
    mem_free(y);
    return ns;
}

static double peak_of(const struct kernel_ctx *c, const struct weight *w, const struct limits *l)
{
    if (c->options.activations == ACTIVATIONS_F32) return l->f32;
    if (weight_layout_info(w->layout)->integer) return l->i8;
    return (w->layout == LAYOUT_BF16 || w->layout == LAYOUT_F8) && l->bf16 > 0 ? l->bf16 : l->f32;
}

static void print_product(const struct kernel_ctx *c, const char *name, const struct weight *w,
                          size_t n_rows, double ns, const struct limits *l)
{
    double operations = 2.0 * (double)(w->n_out * w->n_in * n_rows), bytes = (double)w->bytes,
           at_peak = 1e-9, at_read = bytes / l->gbytes;
    if (peak_of(c, w, l) > 0) at_peak = operations / peak_of(c, w, l);
    printf("%-6s %6zu x %-5zu rows %4zu %10.1f us %8.1f Gop/s (%.2f of peak) %6.1f GB/s (%.2f of "
           "read)  %.2f of limit\n",
           name, w->n_out, w->n_in, n_rows, ns / 1e3, operations / ns, at_peak / ns, bytes / ns,
           at_read / ns, (at_peak > at_read ? at_peak : at_read) / ns);
}

static void bench_product(struct kernel_ctx *c, const struct kind *k, size_t n_out, size_t n_in,
                          const size_t *rows, size_t n, const struct limits *l)
{
    struct weight w = make_weight(c, k, n_out, n_in);
    for (size_t i = 0; i < n; i++)
        print_product(c, k->name, &w, rows[i], time_product(c, &w, rows[i]), l);
    weight_release(c, &w);
}

static void bench_gemv(struct kernel_ctx *c, const struct limits *l)
{
    static const size_t rows[] = { 1, 2, 4, 8 };
    enum { N_IN = 2048 };
    for (size_t k = 0; k < COUNT_OF(KINDS); k++) {
        size_t panel = weight_layout_panel_bytes(
            weight_layout_of(KINDS[k].dtype, KINDS[k].quantize), N_IN);
        bench_product(c, &KINDS[k], ((size_t)160 << 20) / panel * PANEL, N_IN, rows, COUNT_OF(rows),
                      l);
    }
    printf("shapes of a 135M model (weights in the cache)\n");
    static const size_t shapes[][2] = { { 960, 576 }, { 3072, 576 }, { 576, 1536 }, { 576, 576 } };
    for (size_t i = 0; i < COUNT_OF(shapes); i++)
        bench_product(c, &KINDS[6], shapes[i][0], shapes[i][1], rows, COUNT_OF(rows), l);
}

static void bench_gemm(struct kernel_ctx *c, const struct limits *l)
{
    static const size_t rows[] = { 16, 64, 512 }, shapes[][2] = {
        { 960, 576 }, { 3072, 576 }, { 576, 1536 }, { 4096, 4096 }
    };
    for (size_t k = 0; k < COUNT_OF(KINDS); k++)
        bench_product(c, &KINDS[k], 4096, 1536, rows, COUNT_OF(rows), l);
    for (size_t i = 0; i < COUNT_OF(shapes); i++)
        bench_product(c, &KINDS[6], shapes[i][0], shapes[i][1], rows, COUNT_OF(rows), l);
}

/* EXPERT_ROWS rows for each of n_experts, gathered round robin, in one call; next to one matrix
 * that multiplies all rows. */
static void bench_experts(struct kernel_ctx *c, const struct kind *k, size_t n_experts,
                          const struct limits *l)
{
    enum { N_OUT = 1536, N_IN = 1024 };
    size_t n_rows = n_experts * EXPERT_ROWS;
    struct weight *w = MEM_ARRAY(struct weight, n_experts);
    struct matmul_args *jobs = MEM_ARRAY(struct matmul_args, n_experts);
    int32_t *rows = MEM_ARRAY(int32_t, n_rows);
    float *x = MEM_ARRAY(float, n_rows *N_IN), *y = MEM_ARRAY(float, n_rows *N_OUT);
    fill(x, n_rows * N_IN);
    if (kernel_ctx_reserve(c, n_rows, N_IN) != OK) exit(1);
    for (size_t e = 0; e < n_experts; e++) {
        w[e] = make_weight(c, k, N_OUT, N_IN);
        for (size_t i = 0; i < EXPERT_ROWS; i++)
            rows[e * EXPERT_ROWS + i] = (int32_t)(i * n_experts + e);
        jobs[e] = (struct matmul_args){
            .w = &w[e],
            .x = x,
            .x_stride = N_IN,
            .x_rows = rows + e * EXPERT_ROWS,
            .n_rows = EXPERT_ROWS,
            .y = y + e * EXPERT_ROWS * N_OUT,
            .y_stride = N_OUT,
        };
    }
    struct matmul_args dense = {
        .w = &w[0], .x = x, .x_stride = N_IN, .n_rows = n_rows, .y = y, .y_stride = N_OUT
    };
    double one = time_jobs(c, &dense, 1), all = time_jobs(c, jobs, n_experts);
    double operations = 2.0 * N_OUT * N_IN * (double)n_rows;
    printf("%-6s %3zu experts of %d x %d, %d rows each  %8.1f Gop/s (%.2f of peak); one matrix, "
           "%zu rows %8.1f Gop/s; experts / one %.2f\n",
           k->name, n_experts, N_OUT, N_IN, EXPERT_ROWS, operations / all,
           operations / all / peak_of(c, &w[0], l), n_rows, operations / one, one / all);
    for (size_t e = 0; e < n_experts; e++) weight_release(c, &w[e]);
    mem_free(w), mem_free(jobs), mem_free(rows), mem_free(x), mem_free(y);
}

/* ---- attention ---- */

static void bench_attention(struct kernel_ctx *c, int n_q, int n_keys, int n_seqs,
                            const struct limits *l)
{
    enum { HEADS = 9, KV_HEADS = 3, DIM = 64 };
    enum dtype t = c->options.kv;
    int32_t blocks = (n_keys + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    size_t kv_bytes = (size_t)blocks * (size_t)n_seqs * KV_HEADS * 2 * BLOCK_TOKENS * DIM *
                      (t == DTYPE_F32 ? 4 : 2);
    size_t q_floats = (size_t)n_q * (size_t)n_seqs * HEADS * DIM;
    uint8_t *kv = mem_calloc(kv_bytes, 1);
    float *q = MEM_ARRAY(float, q_floats), *out = MEM_ARRAY(float, q_floats);
    int32_t *table = MEM_ARRAY(int32_t, (size_t)(blocks * n_seqs));
    struct attn_seq *seqs = MEM_ARRAY(struct attn_seq, (size_t)n_seqs);
    for (int32_t i = 0; i < blocks * n_seqs; i++) table[i] = i;
    for (int32_t s = 0; s < n_seqs; s++)
        seqs[s] = (struct attn_seq){
            .q_begin = s * n_q,
            .n_q = n_q,
            .pos_begin = n_keys - n_q,
            .block_table = table + s * blocks,
        };
    /* small f32 or bf16, as in make_weight */
    for (size_t i = 0; i < kv_bytes; i++) kv[i] = (uint8_t)((i * 2654435761u >> 13) % 0x3f);
    fill(q, q_floats);
    struct attn_args a = { .q = q,
                           .out = out,
                           .on = { seqs, n_seqs },
                           .n_heads = HEADS,
                           .v_dim = DIM,
                           .scale = 0.125f,
                           .kv = { .data = kv,
                                   .dtype = t,
                                   .n_heads = KV_HEADS,
                                   .head_dim = DIM,
                                   .block_tokens = BLOCK_TOKENS, }, };
    double best = 1e30;
    for (uint64_t end = clock_ns() + MEASURE_NS; best == 1e30 || clock_ns() < end;) {
        uint64_t t0 = clock_ns();
        c->ops->attention(c, &a);
        double ns = (double)(clock_ns() - t0);
        best = ns < best ? ns : best;
    }
    double keys = (double)n_q * (n_keys - n_q) + (double)n_q * (n_q + 1) / 2,
           operations = 4.0 * keys * n_seqs * HEADS * DIM;
    printf("attention q %4d keys %5d seqs %3d %10.1f us %8.1f Gop/s (%.2f of f32 peak) %6.1f GB/s "
           "(%.2f of read)\n",
           n_q, n_keys, n_seqs, best / 1e3, operations / best,
           l->f32 > 0 ? operations / best / l->f32 : 0, (double)kv_bytes / best,
           (double)kv_bytes / best / l->gbytes);
    mem_free(kv), mem_free(q), mem_free(out), mem_free(table), mem_free(seqs);
}

static void bench_experts_all(struct kernel_ctx *c, const struct limits *l)
{
    static const size_t kinds[] = { 2, 3, 4, 6 };
    for (size_t i = 0; i < COUNT_OF(kinds); i++) {
        bench_experts(c, &KINDS[kinds[i]], 8, l);
        bench_experts(c, &KINDS[kinds[i]], 64, l);
    }
}

static void bench_attention_all(struct kernel_ctx *c, const struct limits *l)
{
    bench_attention(c, 1, 2000, 1, l);
    bench_attention(c, 1, 2000, 32, l);
    bench_attention(c, 512, 512, 1, l);
    bench_attention(c, 512, 4096, 1, l);
    bench_attention(c, 4096, 4096, 1, l);
}

int main(int argc, char **argv)
{
    struct kernel_ctx *c;
    struct err err;
    int n_threads = argc > 2 ? atoi(argv[2]) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    bool f32 = argc > 3 && strcmp(argv[3], "f32") == 0;
    const char *part = argc > 4 ? argv[4] : "";
    if (kernel_ctx_create(kernel_options_default(argc > 1 ? argv[1] : "auto",
                                                 f32 ? ACTIVATIONS_F32 : ACTIVATIONS_FAST,
                                                 n_threads),
                          &c, &err) != OK) {
        fprintf(stderr, "bench_kernels: %s\n", err.text);
        return 1;
    }
    struct limits l = limits_measure(c);
    printf(
        "backend %s, %d threads, %s; limits: %.0f Gop/s fused multiply-add, %.0f %s, %.0f %s, %.1f "
        "GB/s memory read\n",
        c->backend->name, n_threads, f32 ? "f32" : "fast", l.f32, l.i8, l.i8_by, l.bf16, l.bf16_by,
        l.gbytes);
    static const struct {
        const char *name;
        void (*run)(struct kernel_ctx *, const struct limits *);
    } parts[] = { { "gemv", bench_gemv },
                  { "gemm", bench_gemm },
                  { "experts", bench_experts_all },
                  { "attention", bench_attention_all } };
    for (size_t i = 0; i < COUNT_OF(parts); i++)
        if (!*part || strcmp(part, parts[i].name) == 0) parts[i].run(c, &l);
    kernel_ctx_free(c);
    return 0;
}
