/* ffn_dense.c - the dense feed-forward block: x += Wdown (silu(Wgate h) * Wup h), h = norm(x). Shared
 * experts are one, too. */
#include "shared/base/arith.h"
#include "shared/model/sublayers.h"

enum status ffn_bind(struct binder *b, const char *prefix, size_t n, struct ffn *f)
{
    const size_t hidden = b->m->config.hidden;
    const struct matrix_spec gate = {
        .prefix = prefix,
        .leaf = "gate_proj",
        .whole = "gate_up_proj",
        .n_out = n,
        .n_in = hidden,
        .first = 0,
        .total = 2 * n,
    };
    const struct matrix_spec up = {
        .prefix = prefix,
        .leaf = "up_proj",
        .whole = "gate_up_proj",
        .n_out = n,
        .n_in = hidden,
        .first = n,
        .total = 2 * n,
    };
    const struct matrix_spec down = {
        .prefix = prefix, .leaf = "down_proj", .n_out = hidden, .n_in = n
    };
    TRY(bind_pair(b, &gate, &up, BIND_QUANTIZED, &f->gate_up));
    TRY(bind_matrix(b, &down, BIND_QUANTIZED, &f->down));
    if (!b->m->config.mlp_bias) return OK;
    TRY(bind_vector_pair(b, prefix, "gate_proj.bias", "up_proj.bias", n, &f->gate_up_bias));
    return bind_vector(b, prefix, "down_proj.bias", hidden, &f->down_bias);
}

void ffn_bind_work(struct binder *b, struct ffn_work *w)
{
    const struct model_config *c = &b->m->config;
    bind_floats(b, b->m->max_rows, round_up(c->intermediate, MATMUL_PREQUANTIZED_ALIGN), &w->act);
    bind_reserve(b, b->m->max_rows, c->hidden);
}

void ffn_release(struct kernel_ctx *k, struct ffn *f)
{
    weight_release(k, &f->gate_up);
    weight_release(k, &f->down);
}

void ffn_forward(const struct decoder_step *s, const struct ffn *f, const struct ffn_work *w,
                 const float *norm)
{
    struct kernel_ctx *k = s->m->kernels;
    const size_t rows = s->n_rows, hidden = s->m->config.hidden;
    const struct matmul_args gate_up = {
        .w = &f->gate_up,
        .bias = f->gate_up_bias,
        .x = s->x,
        .x_stride = hidden,
        .norm = norm,
        .norm_eps = s->m->config.rms_eps,
        .n_rows = rows,
        .y = w->act,
        .quantize_for = &f->down,
        .epilogue = MATMUL_SILU_MUL,
    };
    const struct matmul_args down = {
        .w = &f->down,
        .bias = f->down_bias,
        .x = w->act,
        .x_prequantized = true,
        .n_rows = rows,
        .y = s->x,
        .y_stride = hidden,
        .epilogue = MATMUL_ADD,
    };
    k->ops->matmul(k, &gate_up, 1); /* [R, I] */
    k->ops->matmul(k, &down, 1);    /* [R, H] */
}
