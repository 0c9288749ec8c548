/* gpu_model.c - steps of a model on the GPU, without a server and a scheduler. Tables are of steps
 * that model_submit launches op by op; decode rates are of steps as the engine runs them
 * (gpu_async_steps.h).
 *
 * The KV pool is filled with random numbers, and sequences get contexts that were never computed,
 * because only time is measured. Every sequence has blocks of its own, scattered over the pool. A
 * scenario whose KV does not fit is not run, and a note says so. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/model/model.h"
#include "tests/gpu/bench/gpu_async_steps.h"
#include "tests/gpu/bench/gpu_kernels.h"
#include "tests/gpu/bench/gpu_ops.h"

enum { BLOCK_TOKENS = 64, BATCH_MAX = 256, STEPS_MAX = 64, SCENARIOS_MAX = 16, WARM_UP = 1 };
static const double SPARE = 0.06; /* of what is available: scratch that grows with the first step */

struct scenario {
    int32_t n_seqs, context; /* decode: the rows' position is context - 1; prefill: one sequence
                              * from nothing */
    bool prefill;
    double must; /* bytes that a step must read, once it is counted */
};

struct rig {
    const struct gpu_sizes *sizes;
    struct model_options o;
    const char *label;
    struct scenario scenarios[SCENARIOS_MAX];
    size_t n_scenarios;
    struct model *model;
    struct dev_mem kv;
    uint32_t n_blocks;
    int32_t *table; /* [n_blocks], shuffled: sequence i has the pieces from i *
                     * blocks of one context on */
    int32_t *ids, *pos;
    float *logits;
    struct attn_seq seqs[BATCH_MAX];
    int32_t logit_rows[BATCH_MAX];
    struct scenario now;
    int32_t begin; /* of the prompt piece that runs */
};

static int32_t blocks_of(const struct scenario *s)
{
    return (s->context + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
}

/* ---- a step ---- */

static int32_t id_at(const struct rig *r, int32_t seq, int32_t pos)
{
    return (int32_t)(((int64_t)pos * 7919 + (int64_t)seq * 131) % (r->model->config.n_vocab - 8)) +
           4;
}

/* One decode step, or one piece of a prompt. */
static struct model_batch next_step(struct rig *r)
{
    const struct scenario s = r->now;
    const int32_t left = s.context - r->begin, most = (int32_t)r->o.max_rows;
    const int32_t n = s.prefill ? (left < most ? left : most) : 1,
                  from = s.prefill ? r->begin : s.context - 1;
    int32_t row = 0;
    for (int32_t i = 0; i < s.n_seqs; i++) {
        r->seqs[i] = (struct attn_seq){
            .q_begin = row,
            .n_q = n,
            .pos_begin = from,
            .block_table = r->table + (size_t)i * (size_t)blocks_of(&s),
            .is_decode = !s.prefill,
        };
        for (int32_t k = 0; k < n; k++, row++) {
            r->ids[row] = id_at(r, i, from + k);
            r->pos[row] = from + k;
        }
        r->logit_rows[i] = row - 1;
    }
    return (struct model_batch){
        .n_rows = row,
        .ids = r->ids,
        .pos = r->pos,
        .seqs = r->seqs,
        .n_seqs = s.n_seqs,
        .logit_rows = r->logit_rows,
        .n_logits = s.n_seqs,
        .logits = r->logits,
        .kv = r->kv.ptr,
        .n_blocks = r->n_blocks,
        .block_tokens = BLOCK_TOKENS,
    };
}

/* All of it, logits fetched. */
static void run_step(void *arg)
{
    struct rig *r = arg;
    const struct model_batch b = next_step(r);
    struct err err;
    (void)model_submit(r->model, &b);
    gpu_need(device_fault(r->model->kernels->device, &err) == OK, err.text, NULL);
}

/* ---- figures ---- */

struct totals {
    double must, bytes, flops, us;
};

static struct totals totals_of(const struct gpu_ops *s)
{
    struct totals t = { 0 };
    size_t n;
    const struct gpu_op_call *calls = gpu_ops_calls(s, &n);
    for (size_t i = 0; i < n; i++)
        t.must += calls[i].must, t.bytes += calls[i].bytes, t.flops += calls[i].flops,
            t.us += calls[i].us;
    return t;
}

/* Seconds of a step in the same runs: on the host until the logits are fetched, and on the GPU
 * alone. */
struct step_time {
    double wall, busy;
};

static struct step_time time_step(struct rig *r, struct gpu_ops *ops, int rounds)
{
    double wall[STEPS_MAX], busy[STEPS_MAX];
    for (int i = r->sizes->tiny ? 0 : -WARM_UP; i < rounds; i++) {
        const int k = i < 0 ? 0 : i;
        const uint64_t begin = clock_ns();
        busy[k] = gpu_ops_busy(ops, run_step, r);
        wall[k] = (double)(clock_ns() - begin) * 1e-9;
    }
    return (struct step_time){
        .wall = gpu_median(wall, (size_t)rounds),
        .busy = gpu_median(busy, (size_t)rounds),
    };
}

static void print_figure(const struct rig *r, const char *what, struct gpu_figure f)
{
    char name[256];
    const struct scenario *s = &r->now;
    if (s->prefill)
        snprintf(name, sizeof name, "%s, prefill of %d tokens: %s", r->label, s->context, what);
    else
        snprintf(name, sizeof name, "%s, decode of %d at %d: %s", r->label, s->n_seqs, s->context,
                 what);
    f.name = name;
    gpu_print_figure(&f);
}

/* Steps launched op by op whose logits are fetched, for comparison with captured ones. */
static void print_eager(const struct rig *r, struct step_time s)
{
    print_figure(r, "a step launched one by one, its logits fetched",
                 (struct gpu_figure){ .value = s.wall * 1e6, .unit = "us" });
    print_figure(r, "a step launched one by one, of the GPU",
                 (struct gpu_figure){ .value = s.busy * 1e6, .unit = "us" });
}

static void print_decode(const struct rig *r, const struct gpu_limits *l,
                         const struct gpu_async_steps *s)
{
    const double n = r->now.n_seqs, must_s = r->now.must / l->read;
    const bool one = r->now.n_seqs == 1;
    print_figure(r, "tokens per second",
                 (struct gpu_figure){
                     .value = n / s->wall,
                     .unit = "tokens/s",
                     .limit = n / must_s,
                     .limit_is = "reading weights and KV once",
                     .wanted = one ? 0.70 : 0,
                 });
    print_figure(r, "the GPU's part of a step",
                 (struct gpu_figure){
                     .value = s->busy * 1e6,
                     .unit = "us",
                     .limit = must_s * 1e6,
                     .limit_is = "reading weights and KV once",
                     .less_is_better = true,
                 });
    print_figure(r, "gap between two steps",
                 (struct gpu_figure){
                     .value = s->gap * 1e6,
                     .unit = "us",
                     .limit = 20,
                     .limit_is = "the goal",
                     .less_is_better = true,
                     .wanted = one ? 1 : 0,
                 });
    print_figure(r, "must be read",
                 (struct gpu_figure){ .value = r->now.must * 1e-9, .unit = "GB" });
}

static void print_prefill(const struct rig *r, const struct totals *t, const struct gpu_limits *l,
                          struct step_time s)
{
    const char *what;
    const double product = gpu_product_limit(l, &what);
    const double n = r->now.context < (int32_t)r->o.max_rows ? r->now.context
                                                             : (int32_t)r->o.max_rows;
    print_figure(r, "tokens per second",
                 (struct gpu_figure){
                     .value = n / s.wall,
                     .unit = "tokens/s",
                     .limit = n * product / t->flops,
                     .limit_is = what,
                 });
    print_figure(r, "rate of products",
                 (struct gpu_figure){
                     .value = t->flops / s.wall * 1e-12,
                     .unit = "TFLOP/s",
                     .limit = product * 1e-12,
                     .limit_is = what,
                     .wanted = 0.60,
                 });
    print_figure(r, "the GPU's part",
                 (struct gpu_figure){
                     .value = s.busy * 1e6,
                     .unit = "us",
                     .limit = s.wall * 1e6,
                     .limit_is = "the step as the host sees it",
                 });
}

static void print_all_pieces(struct rig *r)
{
    const uint64_t begin = clock_ns();
    for (r->begin = 0; r->begin < r->now.context; r->begin += (int32_t)r->o.max_rows) run_step(r);
    r->begin = 0;
    print_figure(r, "all its pieces",
                 (struct gpu_figure){ .value = (double)(clock_ns() - begin) * 1e-9, .unit = "s" });
}

/* Of a long prompt the first chunk is measured, as long as a step may be. The table comes first,
 * because the figures are compared with what it counts. */
static void measure(struct rig *r, const struct gpu_limits *l)
{
    char of[192];
    const int rounds = r->sizes->tiny ? 1 : 3, steps = r->sizes->tiny ? 1 : r->now.prefill ? 3 : 8;
    struct gpu_ops *ops = gpu_ops_put(r->model->kernels, r->sizes);
    if (r->now.prefill)
        snprintf(of, sizeof of, "%s, prefill of %d tokens", r->label, r->now.context);
    else snprintf(of, sizeof of, "%s, decode of %d at %d", r->label, r->now.n_seqs, r->now.context);
    gpu_ops_measure(ops, rounds, r->now.prefill ? GPU_OPS_WINDOW_MAX : GPU_OPS_WINDOW, run_step, r);
    gpu_ops_print(ops, of, l);
    const struct totals t = totals_of(ops);
    const struct step_time s = time_step(r, ops, steps);
    gpu_ops_remove(ops);
    if (r->now.prefill) print_prefill(r, &t, l, s);
    else print_eager(r, s);
    r->now.must = t.must;
    if (r->now.prefill && r->now.context > (int32_t)r->o.max_rows) print_all_pieces(r);
}

/* Measures steps as the engine runs them. */
static void measure_ahead(struct rig *r, const struct gpu_limits *l)
{
    struct gpu_async_steps a;
    struct model_batch b = next_step(r);
    struct gpu_ops *ops = gpu_ops_put(r->model->kernels, r->sizes);
    if (gpu_async_steps_run(ops, r->model, &b, r->sizes->tiny ? 3 : STEPS_MAX, &a))
        print_decode(r, l, &a);
    else gpu_note("%s: the GPU does not choose tokens: steps ahead were not measured", r->label);
    gpu_ops_remove(ops);
}

static bool fits(const struct rig *r, const struct scenario *s)
{
    return (size_t)s->n_seqs * (size_t)blocks_of(s) <= r->n_blocks;
}

/* Tables come before any graph is captured, because a graph's replay calls no ops. */
static void measure_all(struct rig *r, const struct gpu_limits *l)
{
    const struct model_prepare_args steps = {
        .max_seqs = BATCH_MAX,
        .block_tokens = BLOCK_TOKENS,
        .n_blocks = r->n_blocks,
        .kv = r->kv.ptr,
        .capture_graphs = true,
    };
    struct err err;
    for (size_t i = 0; i < r->n_scenarios; i++) {
        r->now = r->scenarios[i];
        if (fits(r, &r->now)) measure(r, l);
        else
            gpu_note("%s: %d sequences of %d tokens were not run: their KV does not fit", r->label,
                     r->now.n_seqs, r->now.context);
        r->scenarios[i].must = r->now.must;
    }
    gpu_need(model_prepare(r->model, &steps, &err) == OK, "capturing steps", err.text);
    for (size_t i = 0; i < r->n_scenarios; i++) {
        r->now = r->scenarios[i];
        if (!r->now.prefill && fits(r, &r->now)) measure_ahead(r, l);
    }
}

/* ---- life ---- */

/* As many blocks as the largest scenario that fits needs. */
static void make_pool(struct rig *r)
{
    struct kv_layout l;
    struct device *d = r->model->kernels->device;
    struct err err;
    model_kv_layout(r->model, BLOCK_TOKENS, 1, &l);
    const size_t most = (size_t)((double)device_available(d) * (1 - SPARE)) /
                        kv_layout_block_bytes(&l);
    for (size_t i = 0; i < r->n_scenarios; i++) {
        const size_t n = (size_t)r->scenarios[i].n_seqs * (size_t)blocks_of(&r->scenarios[i]);
        if (n <= most && n > r->n_blocks) r->n_blocks = (uint32_t)n;
    }
    gpu_need(r->n_blocks > 0, r->label, "no scenario's KV fits into the GPU's memory");
    model_kv_layout(r->model, BLOCK_TOKENS, r->n_blocks, &l);
    gpu_need(device_mem_alloc(d, kv_layout_pool_bytes(&l), DEVICE_MEM_PRIVATE, &r->kv, &err) == OK,
             "the KV pool", err.text);
    if (l.dtype == DTYPE_F32)
        gpu_cuda(
            gpu_fill_f32(gpu_stream(r->model->kernels), r->kv.ptr, kv_layout_pool_bytes(&l) / 4, 3),
            "filling the KV pool");
    else
        gpu_cuda(gpu_fill_bf16(gpu_stream(r->model->kernels), r->kv.ptr,
                               kv_layout_pool_bytes(&l) / 2, 3),
                 "filling the KV pool");
    r->table = MEM_ARRAY(int32_t, r->n_blocks);
    uint32_t seed = 1;
    for (uint32_t i = 0; i < r->n_blocks; i++) {
        seed = seed * 1664525u + 1013904223u;
        const uint32_t k = (uint32_t)((uint64_t)seed * (i + 1) >> 32);
        r->table[i] = r->table[k];
        r->table[k] = (int32_t)i;
    }
}

static void open_rig(struct rig *r)
{
    struct err err;
    const uint64_t begin = clock_ns();
    gpu_need(
        kernel_ctx_create(kernel_options_default("cuda", ACTIVATIONS_FAST, r->sizes->tiny ? 1 : 8),
                          &r->o.kernels, &err) == OK,
        "the GPU", err.text);
    gpu_need(model_load(&r->o, &r->model, &err) == OK, r->o.path, err.text);
    const double s = (double)(clock_ns() - begin) * 1e-9;
    printf(
        "{\"kind\":\"fact\",\"name\":\"%s, weights\",\"value\":\"%.2f GiB%s, loaded in %.1f s\"}\n",
        r->label, (double)r->model->weight_bytes / (1 << 30), r->o.dummy ? " dummy" : "", s);
    fflush(stdout);
    /* allocated before the pool, which takes the rest */
    const struct model_prepare_args steps = { .max_seqs = BATCH_MAX, .block_tokens = BLOCK_TOKENS };
    gpu_need(model_prepare(r->model, &steps, &err) == OK, "room for steps", err.text);
    make_pool(r);
    r->ids = MEM_ARRAY(int32_t, r->o.max_rows);
    r->pos = MEM_ARRAY(int32_t, r->o.max_rows);
    r->logits = MEM_ARRAY(float, (size_t)BATCH_MAX * r->model->config.n_vocab);
}

static void close_rig(struct rig *r)
{
    device_mem_free(r->model->kernels->device, &r->kv);
    model_free(r->model);
    kernel_ctx_free(r->o.kernels);
    mem_free(r->table), mem_free(r->ids), mem_free(r->pos), mem_free(r->logits);
}

/* Checks that running everything again allocates nothing. */
static void print_memory(struct rig *r)
{
    struct device *d = r->model->kernels->device;
    const size_t before = device_available(d);
    for (size_t i = 0; i < r->n_scenarios; i++) {
        r->now = r->scenarios[i];
        if (fits(r, &r->now)) run_step(r);
    }
    const size_t now = device_available(d);
    char name[192];
    snprintf(name, sizeof name, "%s: memory taken by steps after the first of their kind",
             r->label);
    gpu_print_figure(&(struct gpu_figure){
        .name = name,
        .value = before > now ? (double)(before - now) : 0,
        .unit = "bytes",
        .limit = 2 << 20,
        .limit_is = "the least that the driver hands out",
        .less_is_better = true,
        .wanted = 0.5,
    });
}

/* ---- arguments ---- */

static void add_scenario(struct rig *r, struct scenario s)
{
    gpu_need(r->n_scenarios < SCENARIOS_MAX && s.n_seqs >= 1 && s.n_seqs <= BATCH_MAX &&
                 s.context >= 1,
             "a scenario is out of range", NULL);
    r->scenarios[r->n_scenarios++] = s;
}

/* "1x1024,8x32768" or, of prompts, "8192,131072". */
static void read_scenarios(struct rig *r, const char *text, bool prefill)
{
    while (*text) {
        struct scenario s = { .n_seqs = 1, .prefill = prefill };
        char *end;
        if (!prefill) {
            s.n_seqs = (int32_t)strtol(text, &end, 10);
            gpu_need(*end == 'x', "a decode scenario is BATCHxCONTEXT", NULL);
            text = end + 1;
        }
        s.context = (int32_t)strtol(text, &end, 10);
        gpu_need(end > text && (*end == ',' || *end == 0), "scenarios are separated by commas",
                 NULL);
        text = *end ? end + 1 : end;
        add_scenario(r, s);
    }
}

static enum quantize quantize_of(const char *name)
{
    /* in the order of enum quantize */
    static const char *const names[] = { "none", "wint8", "wint4", "block_wise_fp8" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) return (enum quantize)i;
    gpu_need(false, "--quantization is none, wint8, wint4 or block_wise_fp8, not", name);
    return QUANTIZE_NONE;
}

static void read_arguments(struct rig *r, int argc, char **argv)
{
    gpu_need(argc >= 1,
             "usage: bench_gpu model FOLDER [--load-format auto|dummy] [--quantization Q] [--label "
             "NAME] [--decode 1x1024,..] [--prefill 8192,..]"
             " [--rows N]",
             NULL);
    r->o = (struct model_options){
        .path = argv[0],
        .max_rows = r->sizes->tiny ? 64 : 8192,
        .max_logits = BATCH_MAX,
    };
    r->label = argv[0];
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--load-format") == 0) r->o.dummy = strcmp(argv[i + 1], "dummy") == 0;
        else if (strcmp(argv[i], "--quantization") == 0) r->o.quantize = quantize_of(argv[i + 1]);
        else if (strcmp(argv[i], "--label") == 0) r->label = argv[i + 1];
        else if (strcmp(argv[i], "--decode") == 0) read_scenarios(r, argv[i + 1], false);
        else if (strcmp(argv[i], "--prefill") == 0) read_scenarios(r, argv[i + 1], true);
        else if (strcmp(argv[i], "--rows") == 0) r->o.max_rows = (uint32_t)atoi(argv[i + 1]);
        else gpu_need(false, "there is no option", argv[i]);
    }
    gpu_need(argc % 2 == 1, "an option lacks its value", NULL);
    gpu_need(r->n_scenarios > 0, "nothing to measure: --decode or --prefill", NULL);
    for (size_t i = 0; i < r->n_scenarios; i++)
        if ((uint32_t)r->scenarios[i].context > r->o.max_model_len)
            r->o.max_model_len = (uint32_t)r->scenarios[i].context;
}

int gpu_model_main(const struct gpu_sizes *sizes, int argc, char **argv)
{
    static struct rig r;
    struct gpu_limits limits;
    r.sizes = sizes;
    read_arguments(&r, argc, argv);
    gpu_limits_measure(sizes, false, &limits);
    open_rig(&r);
    measure_all(&r, &limits);
    print_memory(&r);
    close_rig(&r);
    return 0;
}
