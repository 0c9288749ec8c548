/* gpu_op_cost.c - bytes and operations of ops. Only products are counted as operations: all else is
 * bound by memory. */
#include "tests/gpu/bench/gpu_op_cost.h"

#include <stdio.h>
#include <string.h>

#include "kernels/cuda/gemm/gemm.h"
#include "shared/base/mem.h"

static const char *layout_name(const struct weight *w)
{
    static const char *const names[GEMM_WEIGHT_LAYOUTS] = {
        "f32", "bf16", "f16", "w8", "w4", "f8"
    };
    return w->layout >= 0 && w->layout < GEMM_WEIGHT_LAYOUTS ? names[w->layout] : "?";
}

static double product_flops(const struct weight *w, size_t n_rows)
{
    return 2.0 * (double)w->n_out * (double)w->n_in * (double)n_rows;
}

static double input_bytes(const struct matmul_args *a)
{
    return (double)a->n_rows * (double)a->w->n_in * (a->x_prequantized ? 2 : 4);
}

static double output_bytes(const struct matmul_args *a)
{
    const double n = (double)a->n_rows * (double)a->w->n_out;
    if (a->epilogue == MATMUL_SILU_MUL) return n / 2 * (a->quantize_for ? 2 : 4);
    return n * (a->epilogue == MATMUL_ADD ? 8 : 4);
}

void gpu_op_cost_matmul(const struct matmul_args *jobs, size_t n_jobs, struct gpu_op_call *to)
{
    size_t at = 0;
    to->op = "matmul";
    for (size_t i = 0; i < n_jobs; i++) {
        const struct matmul_args *a = &jobs[i];
        if (a->n_rows == 0) continue;
        to->must += (double)a->w->bytes;
        to->bytes += (double)a->w->bytes + output_bytes(a) +
                     (i == 0 || a->x != jobs[i - 1].x ? input_bytes(a) : 0);
        to->flops += product_flops(a->w, a->n_rows);
        if (at < sizeof to->what)
            at += (size_t)snprintf(to->what + at, sizeof to->what - at, "%s%zu x %zu",
                                   at ? " + " : "", a->w->n_out, a->w->n_in);
    }
    if (n_jobs > 0 && at < sizeof to->what)
        snprintf(to->what + at, sizeof to->what - at, ", %s, %zu rows", layout_name(jobs[0].w),
                 jobs[0].n_rows);
}

void gpu_op_cost_experts(struct kernel_ctx *c, const struct experts_args *a, struct gpu_op_call *to)
{
    const size_t n = a->n_rows * (size_t)a->n_used, hidden = a->gate_up[0].n_in;
    bool used[KERNEL_EXPERTS_MAX] = { false };
    int32_t n_distinct = 0;
    int32_t *ids = MEM_ARRAY(int32_t, n + 1);
    device_download(c->device, ids, a->experts, n * sizeof *ids);
    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= a->n_experts || used[ids[i]]) continue;
        used[ids[i]] = true;
        n_distinct++;
    }
    mem_free(ids);
    to->op = "experts";
    to->must = (double)n_distinct * (double)(a->gate_up[0].bytes + a->down[0].bytes);
    to->flops = product_flops(&a->gate_up[0], n) + product_flops(&a->down[0], n);
    if (a->shared.gate_up) {
        to->must += (double)(a->shared.gate_up->bytes + a->shared.down->bytes);
        to->flops += product_flops(a->shared.gate_up, a->n_rows) +
                     product_flops(a->shared.down, a->n_rows);
    }
    /* h is read, x is read and written; intermediate results need not be in memory */
    to->bytes = to->must + (double)a->n_rows * (double)hidden * 12;
    snprintf(to->what, sizeof to->what, "%d of %d used, %zu x %zu and back, %s, %zu rows of %d%s",
             n_distinct, a->n_experts, a->gate_up[0].n_out, hidden, layout_name(&a->gate_up[0]),
             a->n_rows, a->n_used, a->shared.gate_up ? ", shared" : "");
}

/* Bytes of one position in one layer. */
static double token_bytes(const struct kv_layer *kv)
{
    return (double)kv->head_dim * (kv->dtype == DTYPE_F32 ? 4 : 2) *
           (kv->latent ? 1 : 2 * kv->n_heads);
}

void gpu_op_cost_rope(const struct rope_args *a, struct gpu_op_call *to)
{
    size_t n = 0;
    for (size_t i = 0; i < a->n_heads; i++)
        n += a->heads[i].n_heads * (a->heads[i].norm ? a->heads[i].head_dim : a->rot_dim);
    gpu_op_cost_rows("rope", a->n_rows, n, 1, 1, to);
}

void gpu_op_cost_append(const struct kv_append_args *a, struct gpu_op_call *to)
{
    double rows = 0;
    for (int32_t i = 0; i < a->on.n_seqs; i++) rows += a->on.seqs[i].n_q;
    to->op = "kv_append";
    to->bytes = rows * (token_bytes(&a->kv) +
                        (double)a->kv.head_dim * 4 * (a->kv.latent ? 1 : 2 * a->kv.n_heads));
    if (a->rope) {
        struct gpu_op_call rope;
        gpu_op_cost_rope(a->rope, &rope);
        to->op = "rope, kv_append";
        to->bytes += rope.bytes;
    }
    snprintf(to->what, sizeof to->what, "%d heads of %d, %.0f rows", a->kv.n_heads, a->kv.head_dim,
             rows);
}

void gpu_op_cost_attention(const struct attn_args *a, struct gpu_op_call *to)
{
    double keys = 0, pairs = 0, rows = 0;
    int32_t longest = 0;
    for (int32_t i = 0; i < a->on.n_seqs; i++) {
        const struct attn_seq *s = &a->on.seqs[i];
        const double n = s->n_q;
        if (s->n_q == 0) continue;
        keys += (double)s->pos_begin + n;
        pairs += n * s->pos_begin + n * (n + 1) / 2;
        rows += n;
        if (s->pos_begin + s->n_q > longest) longest = s->pos_begin + s->n_q;
    }
    to->op = "attention";
    to->must = keys * token_bytes(&a->kv);
    to->bytes = to->must + rows * a->n_heads * (a->kv.head_dim + a->v_dim) * 4;
    if (a->append) {
        struct gpu_op_call append;
        gpu_op_cost_append(a->append, &append);
        to->bytes += append.bytes;
    }
    to->flops = pairs * a->n_heads * (a->kv.head_dim + a->v_dim) * 2;
    snprintf(to->what, sizeof to->what, "%d heads on %d of %d%s, %.0f rows, %d sequences, %d keys",
             a->n_heads, a->kv.n_heads, a->kv.head_dim, a->kv.latent ? " (latent)" : "", rows,
             a->on.n_seqs, longest);
}

void gpu_op_cost_rows(const char *op, size_t n_rows, size_t n, double reads, double writes,
                      struct gpu_op_call *to)
{
    to->op = op;
    to->bytes = (double)n_rows * (double)n * 4 * (reads + writes);
    snprintf(to->what, sizeof to->what, "%zu x %zu", n_rows, n);
}
