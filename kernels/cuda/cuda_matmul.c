/* cuda_matmul.c - the ops matmul and experts: prepares inputs as a GEMM kernel takes them, then
 * launches the GEMM, in the stream's order.
 *
 * Inputs are f32 as they are, or for the GEMM's kernel to round; or f32, bf16 or f16 prepared in
 * the context's buffer (gathered, normalised, rounded); or rows that the previous GEMM quantised
 * for this one; or e4m3 with scales if gemm.h says that the GPU multiplies those. Neighbouring jobs
 * that differ only in columns (the heads of MLA) become one grouped GEMM. Thread: engine. */
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemm/gemm_cublaslt.h"
#include "kernels/cuda/inputs/prepare_inputs.h"
#include "kernels/cuda/inputs/prepare_inputs_f8.h"
#include "kernels/cuda/moe/moe_route.h"
#include "shared/base/arith.h"

static enum gemm_weight_layout layout_of(const struct weight *w)
{
    return (enum gemm_weight_layout)w->layout;
}
static enum dtype x_type_of(const struct weight *w) { return gemm_x_type(layout_of(w)); }

/* Elements between rows prepared for a matrix; with 32 and 16 bits they fit the buffer that
 * kernels.h promises. */
static size_t prepared_stride(const struct weight *reader)
{
    return round_up(reader->n_in, x_type_of(reader) == DTYPE_F32 ? (size_t)MATMUL_PREQUANTIZED_ALIGN
                                                                 : (size_t)GEMM_STEP);
}

/* SwiGLU with results prepared for a matrix. */
static enum gemm_epilogue silu_epilogue_for(const struct weight *reader)
{
    return x_type_of(reader) == DTYPE_F32   ? GEMM_SILU
           : x_type_of(reader) == DTYPE_F16 ? GEMM_SILU_F16
                                            : GEMM_SILU_BF16;
}

static struct gemm gemm_of(const struct cuda_ctx *c, const struct weight *w)
{
    return (struct gemm){
        .layout = layout_of(w),
        .paired = w->paired,
        .n_out = w->n_out,
        .n_in = w->n_in,
        .w = w->data,
        .n_groups = 1,
        .scratch = c->products.ptr,
        .cublaslt = c->cublaslt,
        .workspace = c->workspace.ptr,
        .deterministic = c->base.options.deterministic,
    };
}

/* ---- inputs ---- */

enum cuda_input_type {
    INPUT_AS_IS,
    INPUT_IN_GEMM /* its kernel prepares them */,
    INPUT_F32,
    INPUT_BF16,
    INPUT_F16,
    INPUT_F8
};

/* How to prepare rows of inputs, and what c->inputs holds. */
struct cuda_input_spec {
    enum cuda_input_type as;
    const void *x;
    enum dtype from; /* of x: f32; bf16, as a GEMM left it for one that takes bf16 or e4m3, or as it
                      * came; e4m3, as it came */
    size_t scales_at; /* of e4m3: in a row, in bytes */
    size_t x_stride, n_rows, n;
    const int32_t *x_rows;
    const int32_t *n_real; /* in the GPU's memory: later rows are not read; NULL: all are */
    const float *norm;
    float eps;
};

static bool same_inputs(const struct cuda_input_spec *a, const struct cuda_input_spec *b)
{
    return a->as == b->as && a->x == b->x && a->x_stride == b->x_stride && a->n == b->n &&
           a->x_rows == b->x_rows && a->norm == b->norm && a->n_rows == b->n_rows &&
           a->n_real == b->n_real && a->from == b->from;
}

static size_t f8_bytes(size_t n_rows, size_t n)
{
    return n_rows * (round_up(n, PREPARE_INPUTS_F8_BLOCK) +
                     (n + PREPARE_INPUTS_F8_BLOCK - 1) / PREPARE_INPUTS_F8_BLOCK * sizeof(float));
}

static bool is_prepared(const struct cuda_input_spec *in)
{
    return in->as != INPUT_AS_IS && in->as != INPUT_IN_GEMM;
}

/* Lets the GEMM's kernel prepare its inputs. */
static void set_unprepared_inputs(const struct cuda_input_spec *in, struct gemm *g)
{
    g->x = in->x;
    g->x_stride = in->x_stride;
    g->x_rows = in->x_rows;
    g->x_f32 = true;
    g->norm = in->norm;
    g->norm_eps = in->eps;
}

static bool gemm_prepares(const struct gemm *g, const struct cuda_input_spec *in)
{
    struct gemm call = *g;
    set_unprepared_inputs(in, &call);
    return gemm_takes_f32_x(&call);
}

/* Whether products take rows of e4m3 as they came: the kernel has 32 bits for where scales are. */
static bool takes_e4m3(const struct cuda_input_spec *in)
{
    return in->from == DTYPE_F8_E4M3 && in->n % PREPARE_INPUTS_F8_BLOCK == 0 &&
           in->n_rows * (in->x_stride / sizeof(float)) <= UINT32_MAX;
}

static enum cuda_input_type choose_input_type(const struct cuda_ctx *c, const struct gemm *g,
                                              const struct cuda_input_spec *in, bool ready)
{
    const bool is_e4m3 = in->from == DTYPE_F8_E4M3, is_f32 = in->from == DTYPE_F32;
    if (gemm_wants_f8_x(g)) {
        if (takes_e4m3(in)) return INPUT_AS_IS;
        if (!is_e4m3 && f8_bytes(in->n_rows, in->n) <= c->inputs.bytes) return INPUT_F8;
    }
    if (ready || (g->layout == GEMM_F32 && !in->norm && is_f32)) return INPUT_AS_IS;
    if (is_f32 && gemm_prepares(g, in)) return INPUT_IN_GEMM;
    return g->layout == GEMM_F32 ? INPUT_F32 : g->layout == GEMM_F16 ? INPUT_F16 : INPUT_BF16;
}

static float *f8_scales(const struct cuda_ctx *c, const struct cuda_input_spec *in)
{
    return (float *)((char *)c->inputs.ptr + in->n_rows * round_up(in->n, PREPARE_INPUTS_F8_BLOCK));
}

/* What an op left in c->inputs, as another begins. */
static struct cuda_input_spec take_rounded(struct cuda_ctx *c)
{
    const struct cuda_rounded_rows r = c->rounded;
    c->rounded = (struct cuda_rounded_rows){ 0 };
    return (struct cuda_input_spec){ .as = r.x ? INPUT_BF16 : INPUT_AS_IS,
                                     .x = r.x,
                                     .x_stride = r.n,
                                     .n_rows = r.n_rows,
                                     .n = r.n };
}

/* Prepares into c->inputs; the stream's order keeps a call's GEMMs from overwriting each
 * other's. */
static void run_prepare_inputs(struct cuda_ctx *c, const struct cuda_input_spec *in)
{
    const enum dtype type = in->as == INPUT_F32   ? DTYPE_F32
                            : in->as == INPUT_F16 ? DTYPE_F16
                                                  : DTYPE_BF16;
    const struct prepare_inputs plain = {
        .x = in->x,
        .from = in->from,
        .scales_at = in->scales_at,
        .x_stride = in->x_stride,
        .x_rows = in->x_rows,
        .n_real = in->n_real,
        .norm = in->norm,
        .eps = in->eps,
        .n_rows = in->n_rows,
        .n = in->n,
        .y = c->inputs.ptr,
        .type = type,
    };
    const struct prepare_inputs_f8 f8 = {
        .x = in->x,
        .bf16 = in->from == DTYPE_BF16,
        .x_stride = in->x_stride,
        .x_rows = in->x_rows,
        .n_real = in->n_real,
        .norm = in->norm,
        .eps = in->eps,
        .n_rows = in->n_rows,
        .n = in->n,
        .y = c->inputs.ptr,
        .scales = f8_scales(c, in),
    };
    (void)cuda_check(c->device,
                     in->as == INPUT_F8 ? prepare_inputs_f8_run(c->device->stream, &f8)
                                        : prepare_inputs_run(c->device->stream, &plain),
                     "rounding inputs");
}

/* Lets the GEMM read the prepared inputs. */
static void set_inputs(const struct cuda_ctx *c, const struct cuda_input_spec *in, struct gemm *g)
{
    if (in->as == INPUT_IN_GEMM) {
        set_unprepared_inputs(in, g);
        return;
    }
    g->x = in->as == INPUT_AS_IS ? in->x : c->inputs.ptr;
    g->x_stride = in->as == INPUT_AS_IS
                      ? in->x_stride
                      : round_up(in->n, in->as == INPUT_F8 ? PREPARE_INPUTS_F8_BLOCK : GEMM_STEP);
    g->x_rows = in->as == INPUT_AS_IS ? in->x_rows : NULL;
    g->x_scales = in->as == INPUT_F8 ? f8_scales(c, in) : NULL;
    if (in->as != INPUT_AS_IS || in->from != DTYPE_F8_E4M3) return;
    g->x_scales = (const float *)(const void *)((const char *)in->x + in->scales_at);
    g->x_scales_stride = in->x_stride / sizeof(float); /* elements of a row are bytes */
}

/* ---- matmul ---- */

static void set_outputs(const struct matmul_args *a, struct gemm *g)
{
    g->bias = a->bias;
    g->y = a->y;
    g->y_stride = a->y_stride;
    g->epilogue = a->epilogue == MATMUL_ADD        ? GEMM_ADD
                  : a->epilogue == MATMUL_SILU_MUL ? GEMM_SILU
                                                   : GEMM_STORE;
    if (!a->quantize_for) return;
    g->y_stride = prepared_stride(a->quantize_for);
    g->epilogue = silu_epilogue_for(a->quantize_for);
}

static ptrdiff_t between(const void *a, const void *b) { return (const char *)b - (const char *)a; }

/* Whether b is the same GEMM as a with other columns. */
static bool is_next_group(const struct matmul_args *a, const struct matmul_args *b)
{
    const struct weight *v = a->w, *w = b->w;
    return v->layout == w->layout && v->n_out == w->n_out && v->n_in == w->n_in &&
           v->paired == w->paired && a->x_stride == b->x_stride && a->y_stride == b->y_stride &&
           a->n_rows == b->n_rows && a->epilogue == MATMUL_STORE && b->epilogue == MATMUL_STORE &&
           !a->bias && !b->bias && !a->x_rows && !b->x_rows && !a->norm && !b->norm &&
           !a->x_prequantized && !b->x_prequantized && between(v->data, w->data) > 0 &&
           between(a->x, b->x) > 0 && between(a->y, b->y) > 0;
}

/* How many jobs from the first on make one grouped GEMM: all distances are equal. Rounded inputs of
 * a group are read up to a multiple of GEMM_STEP, which must be its own. */
static size_t n_groups_of(const struct matmul_args *jobs, size_t n_jobs)
{
    size_t n = 1;
    const bool f32 = layout_of(jobs[0].w) == GEMM_F32;
    if (n_jobs < 2 || !is_next_group(&jobs[0], &jobs[1]) ||
        (!f32 && jobs[0].w->n_in % GEMM_STEP != 0))
        return 1;
    const ptrdiff_t w = between(jobs[0].w->data, jobs[1].w->data),
                    x = between(jobs[0].x, jobs[1].x), y = between(jobs[0].y, jobs[1].y);
    if (!f32 && x % (8 * (ptrdiff_t)sizeof(float)) != 0) return 1;
    while (n < n_jobs && is_next_group(&jobs[n - 1], &jobs[n]) &&
           between(jobs[n - 1].w->data, jobs[n].w->data) == w &&
           between(jobs[n - 1].x, jobs[n].x) == x && between(jobs[n - 1].y, jobs[n].y) == y)
        n++;
    return n;
}

/* Joins n jobs into one. */
static void join_groups(const struct matmul_args *jobs, size_t n, struct gemm *g,
                        struct cuda_input_spec *in)
{
    if (n < 2) return;
    g->n_groups = (int32_t)n;
    g->w_stride = (size_t)between(jobs[0].w->data, jobs[1].w->data);
    g->x_group = (size_t)(jobs[1].x - jobs[0].x);
    g->y_group = (size_t)(jobs[1].y - jobs[0].y);
    in->n += (n - 1) * g->x_group; /* rows with the columns of all groups */
}

/* GEMMs that one launch computes. */
struct cuda_fused_gemms {
    struct gemm g[GEMM_FUSED_MAX];
    int n;
};

static void flush_fused(struct cuda_ctx *c, struct cuda_fused_gemms *b)
{
    if (b->n > 0)
        (void)cuda_check(c->device, gemm_run_fused(c->device->stream, b->g, b->n), "a product");
    b->n = 0;
}

static void add_fused(struct cuda_ctx *c, struct cuda_fused_gemms *b, const struct gemm *g)
{
    const struct gemm *first = &b->g[0];
    const bool same = b->n > 0 && g->layout == first->layout && g->x == first->x &&
                      g->x_stride == first->x_stride && g->x_rows == first->x_rows &&
                      g->x_scales == first->x_scales && g->x_f32 == first->x_f32 &&
                      g->norm == first->norm && g->norm_eps == first->norm_eps &&
                      g->n_rows == first->n_rows && g->n_in == first->n_in && g->n_groups == 1 &&
                      first->n_groups == 1;
    if (!same || b->n == GEMM_FUSED_MAX) flush_fused(c, b);
    b->g[b->n++] = *g;
}

/* prepared: what c->inputs holds. */
static void run_jobs(struct cuda_ctx *c, const struct matmul_args *jobs, size_t n_jobs,
                     struct cuda_input_spec *prepared)
{
    struct cuda_fused_gemms products = { .n = 0 };
    for (size_t i = 0, n; i < n_jobs; i += n) {
        const struct matmul_args *a = &jobs[i];
        struct cuda_input_spec in = {
            .x = a->x,
            .x_stride = a->x_stride,
            .n_rows = a->n_rows,
            .n = a->w->n_in,
            .x_rows = a->x_rows,
            .norm = a->norm,
            .eps = a->norm_eps,
        };
        struct gemm g = gemm_of(c, a->w);
        n = n_groups_of(a, n_jobs - i);
        if (a->n_rows == 0) continue;
        g.n_rows = a->n_rows;
        if (a->x_prequantized)
            in.from = x_type_of(a->w) == DTYPE_BF16 ? DTYPE_BF16 : DTYPE_F32,
            in.x_stride = prepared_stride(a->w);
        join_groups(a, n, &g, &in);
        set_outputs(a, &g);
        in.as = choose_input_type(c, &g, &in, a->x_prequantized);
        if (is_prepared(&in) && !same_inputs(&in, prepared)) {
            flush_fused(c, &products);
            run_prepare_inputs(c, &in);
            *prepared = in;
        }
        set_inputs(c, &in, &g);
        add_fused(c, &products, &g);
    }
    flush_fused(c, &products);
}

void cuda_matmul(struct kernel_ctx *base, const struct matmul_args *jobs, size_t n_jobs)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    const bool is_rounded = n_jobs > 0 && c->rounded.x && c->rounded.x == jobs[0].x;
    struct cuda_input_spec prepared = take_rounded(c);
    run_jobs(c, jobs, n_jobs, &prepared);
    if (is_rounded) c->rounded_in_vain = prepared.as != INPUT_BF16;
}

/* ---- experts ---- */

/* Experts that share inputs: neighbours whose matrices have the same layouts, usually all. n is 0
 * past the last. */
struct cuda_expert_range {
    int32_t first, n;
};

static struct cuda_expert_range expert_range_from(const struct expert_slots_args *a, int32_t first)
{
    struct cuda_expert_range s = { first, first < a->n_experts };
    const struct weight *gate_up = a->gate_up + first, *down = a->down + first;
    while (s.n > 0 && first + s.n < a->n_experts && gate_up[s.n].layout == gate_up->layout &&
           down[s.n].layout == down->layout)
        s.n++;
    return s;
}

/* Whether the matrices are at equal distances, as after packing. */
static bool have_stride(const struct weight *w, int32_t n, size_t *stride)
{
    const char *first = w[0].data;
    *stride = n > 1 ? (size_t)((const char *)w[1].data - first) : 0;
    bool even = true;
    for (int32_t i = 1; i < n; i++)
        even = even && (const char *)w[i].data == first + (size_t)i * *stride;
    return even;
}

/* Runs g for n groups: one call if the matrices have a stride; otherwise one each. */
static void run_group(struct cuda_ctx *c, const struct weight *w, int32_t n, struct gemm g,
                      const char *what)
{
    if (have_stride(w, n, &g.w_stride)) {
        (void)cuda_check(c->device, gemm_run(c->device->stream, &g), what);
        return;
    }
    const int32_t *begin = g.begin;
    g.n_groups = 1;
    for (int32_t i = 0; i < n; i++) {
        g.w = w[i].data;
        g.begin = begin + i;
        (void)cuda_check(c->device, gemm_run(c->device->stream, &g), what);
    }
}

static void run_shared_gate_up(struct cuda_ctx *c, const struct experts_args *a,
                               struct cuda_input_spec *prepared)
{
    const struct shared_expert *s = &a->shared;
    if (!s->gate_up) return;
    const struct matmul_args gate_up = {
        .w = s->gate_up,
        .bias = s->gate_up_bias,
        .x = a->h,
        .x_stride = s->gate_up->n_in,
        .n_rows = a->n_rows,
        .y = s->act,
        .quantize_for = s->down,
        .epilogue = MATMUL_SILU_MUL,
    };
    run_jobs(c, &gate_up, 1, prepared);
}

static void run_shared_down(struct cuda_ctx *c, const struct experts_args *a,
                            struct cuda_input_spec *prepared)
{
    const struct shared_expert *s = &a->shared;
    if (!s->gate_up) return;
    const struct matmul_args down = {
        .w = s->down,
        .bias = s->down_bias,
        .x = s->act,
        .x_prequantized = true,
        .n_rows = a->n_rows,
        .y = a->x,
        .y_stride = s->down->n_out,
        .epilogue = MATMUL_ADD,
    };
    run_jobs(c, &down, 1, prepared);
}

/* Rows of other ranks lie anywhere in a large buffer (ep.h), and each is one slot's: they are
 * prepared slot by slot, as many as came. Rows that several slots read are prepared once. */
static void prepare_by_slot(const struct expert_slots_args *a, struct cuda_input_spec *in)
{
    if (a->n_x_rows < a->n_slots || !is_prepared(in)) return;
    in->x_rows = a->rows;
    in->n_rows = a->n_slots;
    in->n_real = a->begin + a->n_experts;
}

/* begin_is_read: a kernel ran since a->begin was written. */
static void run_gate_up(struct cuda_ctx *c, const struct expert_slots_args *a,
                        const struct cuda_expert_range *of, struct cuda_input_spec *prepared,
                        bool begin_is_read)
{
    const struct weight *w = &a->gate_up[of->first], *down = &a->down[of->first];
    struct cuda_input_spec in = {
        .x = a->narrow.at ? a->narrow.at : a->x,
        .from = a->narrow.at ? a->narrow.type : DTYPE_F32,
        .scales_at = a->narrow.scales_at,
        .x_stride = a->x_stride,
        .n_rows = a->n_x_rows,
        .n = w->n_in,
    };
    struct gemm g = gemm_of(c, w);
    g.begin = a->begin + of->first;
    g.n_groups = of->n;
    g.n_rows = a->n_slots;
    g.n_x_rows = a->n_x_rows;
    g.begin_is_read = begin_is_read;
    g.y = a->act;
    g.y_stride = prepared_stride(down);
    g.epilogue = silu_epilogue_for(down);
    in.as = choose_input_type(c, &g, &in, in.from == DTYPE_BF16 && x_type_of(w) == DTYPE_BF16);
    prepare_by_slot(a, &in);
    if (is_prepared(&in) && !same_inputs(&in, prepared)) {
        run_prepare_inputs(c, &in);
        *prepared = in;
    }
    set_inputs(c, &in, &g);
    if (!in.n_real) g.x_rows = a->rows;
    else g.n_x_rows = a->n_slots;
    run_group(c, w, of->n, g, "gate and up of experts"); /* [slots, I] */
}

/* Down of all experts and the sums of each row's, if one launch can do both. */
static bool run_down_combined(struct cuda_ctx *c, const struct gemm *g,
                              const struct combine_args *to)
{
    const struct gemm_choices choices = {
        .index = to->index,
        .weights = to->weights,
        .n_rows = (int32_t)to->n_rows,
        .n_used = (int32_t)to->n_used,
        .y = to->y,
        .y_stride = to->n,
        .add = to->add,
    };
    if (to->n_rows > INT32_MAX || !gemm_can_combine(g, &choices)) return false;
    (void)cuda_check(c->device, gemm_run_combined(c->device->stream, g, &choices),
                     "down of experts and their sums");
    return true;
}

/* The same by two launches, of many rows: the results between them in bf16, which halves the bytes
 * of what is most of the second one's time. Their rounding is that of the inputs of down. */
static bool run_down_and_combine(struct cuda_ctx *c, const struct weight *w, struct gemm g,
                                 const struct combine_args *to)
{
    g.epilogue = GEMM_STORE_BF16;
    struct gemm one = g; /* of run_group, where the matrices are not at equal distances */
    one.n_groups = 1;
    if (to->n % 4 != 0 || !gemm_uses_sm90(&g) || !gemm_uses_sm90(&one)) return false;
    run_group(c, w, g.n_groups, g, "down of experts");
    (void)cuda_check(c->device, elementwise_combine_bf16(c->device->stream, to),
                     "combining experts");
    return true;
}

/* all: sums that the slots of all experts are for, or NULL. Returns whether they are done. */
static bool run_down(struct cuda_ctx *c, const struct expert_slots_args *a,
                     const struct cuda_expert_range *of, struct cuda_input_spec *prepared,
                     const struct combine_args *all)
{
    const struct weight *w = &a->down[of->first];
    struct cuda_input_spec in = {
        .x = a->act,
        .from = x_type_of(w) == DTYPE_BF16 ? DTYPE_BF16 : DTYPE_F32,
        .x_stride = prepared_stride(w),
        .n_rows = a->n_slots,
        .n_real = a->begin + a->n_experts,
        .n = w->n_in,
    };
    struct gemm g = gemm_of(c, w);
    g.begin = a->begin + of->first;
    g.n_groups = of->n;
    g.n_rows = g.n_x_rows = a->n_slots;
    g.begin_is_read = true; /* by the kernels of gate and up, which waited for it */
    g.y = a->out;
    g.y_stride = w->n_out;
    in.as = choose_input_type(c, &g, &in, true);
    if (is_prepared(&in)) {
        run_prepare_inputs(c, &in);
        *prepared = in;
    }
    set_inputs(c, &in, &g);
    if (all && of->n == a->n_experts &&
        ((have_stride(w, of->n, &g.w_stride) && run_down_combined(c, &g, all)) ||
         run_down_and_combine(c, w, g, all)))
        return true;
    run_group(c, w, of->n, g, "down of experts"); /* [slots, H] */
    return false;
}

/* Gate and up of the shared expert and of the others take the same inputs, which the inputs of down
 * may overwrite. */
void cuda_experts(struct kernel_ctx *base, const struct experts_args *a)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    const struct expert_slots_args slots = expert_slots_of(a);
    struct cuda_input_spec prepared = take_rounded(c);
    if (a->n_rows == 0) return;
    if (!a->sorted)
        (void)cuda_check(c->device, moe_sort_rows(c->device->stream, a, cuda_n_real_rows(c)),
                         "sorting rows by expert");
    const struct combine_args all = {
        .y = a->x,
        .rows = a->out,
        .index = a->index,
        .weights = a->weights,
        .n_rows = a->n_rows,
        .n_used = (size_t)a->n_used,
        .n = a->down[0].n_out,
        .add = true,
    };
    bool combined = false;
    run_shared_gate_up(c, a, &prepared);
    /* ranges may use the same buffer one after the other */
    for (struct cuda_expert_range of = expert_range_from(&slots, 0); of.n > 0;
         of = expert_range_from(&slots, of.first + of.n)) {
        run_gate_up(c, &slots, &of, &prepared, a->shared.gate_up || of.first > 0);
        c->rounds_for_experts = prepared.as == INPUT_BF16;
        if (of.first == 0) run_shared_down(c, a, &prepared);
        combined = run_down(c, &slots, &of, &prepared, &all);
    }
    if (!combined) cuda_combine(base, &all); /* [rows, H] */
}

void cuda_expert_slots(struct kernel_ctx *base, const struct expert_slots_args *a)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    struct cuda_input_spec prepared = take_rounded(c);
    if (a->n_slots == 0) return;
    for (struct cuda_expert_range of = expert_range_from(a, 0); of.n > 0;
         of = expert_range_from(a, of.first + of.n)) {
        run_gate_up(c, a, &of, &prepared, of.first > 0);
        (void)run_down(c, a, &of, &prepared, NULL);
    }
}
