/* gpu_attention.c - attention alone, at the shapes of the measured models: of decode rows, compared
 * with reading keys and values once, and of a prompt, compared with a product of matrices.
 *
 * It goes through layers in turn, so that one layer's keys in a cache do not help the next layer.
 */
#include <stdio.h>

#include "shared/base/mem.h"
#include "tests/gpu/bench/gpu_kernels.h"
#include "tests/gpu/bench/gpu_ops.h"

enum { BLOCK_TOKENS = 64, LAYERS_MAX = 8, SEQS_MAX = 64, ROUNDS = 20 };

struct shape {
    const char *name;
    int32_t n_heads, n_kv_heads, head_dim, v_dim; /* n_kv_heads is 0 for MLA, and v_dim is then the
                                                   * latent's */
    int32_t n_seqs, context;
    double wanted;
    int32_t n_q; /* rows of each sequence, the last ones; 0: one, a decode row */
};

/* Source: the models' configurations. */
static const struct shape SHAPES[] = {
    { "Qwen3-30B-A3B", 32, 4, 128, 128, 1, 32768, 0.85, 0 },
    { "Qwen3-30B-A3B", 32, 4, 128, 128, 16, 32768, 0.85, 0 },
    { "ERNIE-4.5-21B-A3B", 20, 4, 128, 128, 1, 32768, 0.85, 0 },
    { "ERNIE-4.5-21B-A3B", 20, 4, 128, 128, 16, 32768, 0.85, 0 },
    { "Llama-3-8B", 32, 8, 128, 128, 1, 32768, 0.85, 0 },
    { "DeepSeek-V2-Lite", 16, 0, 576, 512, 1, 32768, 0, 0 },
    { "DeepSeek-V2-Lite", 16, 0, 576, 512, 16, 32768, 0, 0 },
    { "Qwen3-30B-A3B", 32, 4, 128, 128, 64, 1024, 0, 0 },
    { "Qwen3-30B-A3B", 32, 4, 128, 128, 1, 131072, 0, 0 },
    { "Qwen3-30B-A3B", 32, 4, 128, 128, 1, 8192, 0, 8192 },
    { "Qwen3-30B-A3B", 32, 4, 128, 128, 1, 8192, 0, 2048 },
    { "ERNIE-4.5-21B-A3B", 20, 4, 128, 128, 1, 8192, 0, 8192 },
    { "Llama-3-8B", 32, 8, 128, 128, 1, 8192, 0, 8192 },
};
/* So short that what counts is how soon a layer is done. All layers together fit into the L2 cache
 * of a large GPU. */
static const struct shape SHORT[] = {
    { "Qwen3-30B-A3B", 32, 4, 128, 128, 1, 1024, 0, 0 },
    { "ERNIE-4.5-21B-A3B", 20, 4, 128, 128, 1, 1024, 0, 0 },
    { "Qwen3-30B-A3B", 32, 4, 128, 128, 1, 8192, 0, 0 },
};
static const struct shape TINY[] = { { "small", 8, 2, 64, 64, 2, 130, 0, 0 },
                                     { "small, latent", 4, 0, 96, 64, 1, 70, 0, 0 },
                                     { "small", 8, 2, 64, 64, 1, 130, 0, 70 } };

struct rig {
    struct kernel_ctx *c;
    struct shape shape;
    struct dev_mem pool, q, out;
    size_t layer_bytes;
    uint32_t n_layers, layer;
    int32_t *table;
    struct attn_seq seqs[SEQS_MAX];
    int32_t *ids, *pos, logit_rows[1];
    struct attn_list list;
};

static int32_t rows_of_seq(const struct shape *s) { return s->n_q > 0 ? s->n_q : 1; }

static int32_t blocks_of(const struct shape *s)
{
    return (s->context + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
}

static void attend(struct rig *r)
{
    const struct shape *s = &r->shape;
    const struct attn_args a = {
        .q = r->q.ptr,
        .out = r->out.ptr,
        .on = r->list,
        .n_heads = s->n_heads,
        .v_dim = s->v_dim,
        .scale = 0.05f,
        .kv = { .data = (char *)r->pool.ptr + r->layer * r->layer_bytes,
                .dtype = DTYPE_BF16,
                .latent = s->n_kv_heads == 0,
                .n_heads = s->n_kv_heads ? s->n_kv_heads : 1,
                .head_dim = s->head_dim,
                .block_tokens = BLOCK_TOKENS, },
    };
    r->layer = (r->layer + 1) % r->n_layers;
    r->c->ops->attention(r->c, &a);
}

static void attend_all_layers(void *arg)
{
    struct rig *r = arg;
    for (uint32_t i = 0; i < r->n_layers; i++) attend(r);
}

static void take(struct rig *r, size_t bytes, struct dev_mem *out, uint32_t seed, bool f32)
{
    struct err err;
    cudaStream_t stream = gpu_stream(r->c);
    gpu_need(device_mem_alloc(r->c->device, bytes, DEVICE_MEM_PRIVATE, out, &err) == OK,
             "memory for attention", err.text);
    gpu_cuda(f32 ? gpu_fill_f32(stream, out->ptr, bytes / 4, seed)
                 : gpu_fill_bf16(stream, out->ptr, bytes / 2, seed),
             "filling memory");
}

static void open_rig(struct rig *r, const struct shape *s, const struct gpu_sizes *sizes)
{
    const int32_t n_q = rows_of_seq(s);
    const size_t n = (size_t)s->n_seqs, n_blocks = n * (size_t)blocks_of(s),
                 n_rows = n * (size_t)n_q;
    *r = (struct rig){ .c = r->c, .shape = *s, .n_layers = sizes->tiny ? 2 : LAYERS_MAX };
    r->layer_bytes = n_blocks * BLOCK_TOKENS * (size_t)s->head_dim * 2 *
                     (s->n_kv_heads ? 2 * (size_t)s->n_kv_heads : 1);
    take(r, r->layer_bytes * r->n_layers, &r->pool, 1, false);
    take(r, n_rows * (size_t)s->n_heads * (size_t)s->head_dim * 4, &r->q, 2, true);
    take(r, n_rows * (size_t)s->n_heads * (size_t)s->v_dim * 4, &r->out, 3, true);
    r->table = MEM_ARRAY(int32_t, n_blocks);
    /* 7919 is a prime that divides none of these numbers */
    for (size_t i = 0; i < n_blocks; i++) r->table[i] = (int32_t)(i * 7919 % n_blocks);
    for (size_t i = 0; i < n; i++) {
        r->seqs[i] = (struct attn_seq){
            .q_begin = (int32_t)i * n_q,
            .n_q = n_q,
            .pos_begin = s->context - n_q,
            .block_table = r->table + i * (size_t)blocks_of(s),
            .is_decode = s->n_q == 0,
        };
    }
    r->ids = MEM_ARRAY(int32_t, n_rows);
    r->pos = MEM_ARRAY(int32_t, n_rows);
    for (size_t i = 0; i < n_rows; i++) r->pos[i] = s->context - n_q + (int32_t)(i % (size_t)n_q);
    r->list = (struct attn_list){ .seqs = r->seqs, .n_seqs = s->n_seqs };
    struct kernel_step step = {
        .n_rows = (int32_t)n_rows,
        .n_logits = 0,
        .n_lists = 1,
        .ids = r->ids,
        .pos = r->pos,
        .logit_rows = r->logit_rows,
        .lists = &r->list,
        .block_tokens = BLOCK_TOKENS,
    };
    r->c->step_ops->upload(r->c, &step);
}

static void close_rig(struct rig *r)
{
    device_wait(r->c->device);
    struct dev_mem *all[] = { &r->pool, &r->q, &r->out };
    for (size_t i = 0; i < 3; i++) device_mem_free(r->c->device, all[i]);
    mem_free(r->table);
    mem_free(r->ids);
    mem_free(r->pos);
}

static void measure(struct rig *r, const struct gpu_sizes *sizes, const struct gpu_limits *l)
{
    char name[128];
    double us[LAYERS_MAX];
    size_t n;
    struct err err;
    struct gpu_ops *ops = gpu_ops_put(r->c, sizes);
    attend_all_layers(r); /* the first call allocates scratch */
    gpu_ops_measure(ops, sizes->tiny ? 1 : ROUNDS, GPU_OPS_WINDOW, attend_all_layers, r);
    const struct gpu_op_call *calls = gpu_ops_calls(ops, &n);
    for (size_t i = 0; i < n; i++) us[i] = calls[i].us;
    const double must = calls[0].must, flops = calls[0].flops, middle = gpu_median(us, n);
    gpu_ops_remove(ops);
    gpu_need(device_fault(r->c->device, &err) == OK, err.text, NULL);
    snprintf(name, sizeof name, "%s attention, %s, %d at %d", r->shape.n_q ? "prefill" : "decode",
             r->shape.name, r->shape.n_q ? r->shape.n_q : r->shape.n_seqs, r->shape.context);
    struct gpu_figure f = {
        .name = name,
        .value = must / middle * 1e-3,
        .unit = "GB/s",
        .limit = l->read * 1e-9,
        .limit_is = "memory read by a kernel",
        .wanted = r->shape.wanted,
    };
    if (r->shape.n_q) {
        f.value = flops / middle * 1e-6, f.unit = "TFLOP/s";
        f.limit = gpu_product_limit(l, &f.limit_is) * 1e-12;
    }
    gpu_print_figure(&f);
}

/* Microseconds per layer of a graph with all layers, as steps run them: launches overlap, which an
 * event after each of them prevents. */
static double graph_us(struct rig *r, const struct gpu_sizes *sizes)
{
    const size_t n = sizes->tiny ? 1 : ROUNDS;
    cudaStream_t stream = gpu_stream(r->c);
    double us[ROUNDS];
    struct gpu_timer t;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    device_wait(r->c->device);
    gpu_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capturing attention");
    attend_all_layers(r);
    gpu_cuda(cudaStreamEndCapture(stream, &graph), "capturing attention");
    gpu_cuda(cudaGraphInstantiate(&exec, graph, 0), "making a graph");
    gpu_cuda(cudaGraphLaunch(exec, stream), "launching a graph");
    gpu_timer_init(&t);
    for (size_t i = 0; i < n; i++) {
        if (sizes->hold_cycles > 0)
            gpu_cuda(gpu_hold(stream, sizes->hold_cycles), "keeping the GPU busy");
        gpu_cuda(cudaEventRecord(t.begin, stream), "timing");
        gpu_cuda(cudaGraphLaunch(exec, stream), "launching a graph");
        gpu_cuda(cudaEventRecord(t.end, stream), "timing");
        us[i] = gpu_timer_s(&t) * 1e6 / r->n_layers;
    }
    gpu_timer_release(&t);
    gpu_cuda(cudaGraphExecDestroy(exec), "dropping a graph");
    gpu_cuda(cudaGraphDestroy(graph), "dropping a graph");
    return gpu_median(us, n);
}

static void measure_graph(struct rig *r, const struct gpu_sizes *sizes, const struct gpu_limits *l,
                          bool is_short)
{
    const struct shape *s = &r->shape;
    const double must = (double)s->n_seqs * s->context * s->head_dim * 2 *
                        (s->n_kv_heads ? 2 * s->n_kv_heads : 1);
    char name[160];
    if (!r->seqs[0].is_decode) return;
    attend_all_layers(r);
    const double us = graph_us(r, sizes), limit_us = must / l->read * 1e6;
    snprintf(name, sizeof name, "decode attention, %s, %d at %d, a layer of a graph", s->name,
             s->n_seqs, s->context);
    gpu_print_figure(&(struct gpu_figure){
        .name = name,
        .value = is_short ? us : must / us * 1e-3,
        .unit = is_short ? "us" : "GB/s",
        .limit = is_short ? limit_us : l->read * 1e-9,
        .limit_is = is_short ? "keys and values read by a kernel" : "memory read by a kernel",
        .wanted = is_short ? 0 : s->wanted,
    });
}

int gpu_attention_main(const struct gpu_sizes *sizes)
{
    static struct rig r;
    struct gpu_limits limits;
    struct err err;
    const struct shape *shapes = sizes->tiny ? TINY : SHAPES;
    const size_t n = sizes->tiny ? sizeof TINY / sizeof *TINY : sizeof SHAPES / sizeof *SHAPES;
    gpu_limits_measure(sizes, false, &limits);
    gpu_need(kernel_ctx_create(kernel_options_default("cuda", ACTIVATIONS_FAST, 1), &r.c, &err) ==
                 OK,
             "the GPU", err.text);
    for (size_t i = 0; i < n; i++) {
        open_rig(&r, &shapes[i], sizes);
        measure(&r, sizes, &limits);
        measure_graph(&r, sizes, &limits, false);
        close_rig(&r);
    }
    for (size_t i = 0; i < (sizes->tiny ? 0 : sizeof SHORT / sizeof *SHORT); i++) {
        open_rig(&r, &SHORT[i], sizes);
        measure_graph(&r, sizes, &limits, true);
        close_rig(&r);
    }
    kernel_ctx_free(r.c);
    return 0;
}
