/* layers.c - linear layers and rotary angles. */
#include "shared/model/layers.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/mem.h"

/* ---- linear ------------------------------------------------------------------------------------------------------ */

/* Stack the sources' rows in a temporary buffer and pack them as one matrix. */
static enum status pack_stacked(struct kernel_ctx *k, const struct weight_src *src, size_t n, struct weight *out)
{
    if (n == 1) return k->ops->weight_pack(k, &src[0], out);
    size_t row = dtype_row_bytes(src[0].dtype, src[0].n_in), rows = 0;
    for (size_t i = 0; i < n; i++) rows += src[i].n_out;
    uint8_t *stacked = mem_try_calloc(rows, row), *to = stacked;
    if (!stacked) return ERR_NOMEM;
    for (size_t i = 0; i < n; to += src[i].n_out * row, i++) memcpy(to, src[i].data, src[i].n_out * row);
    struct weight_src all = { .dtype = src[0].dtype, .data = stacked, .n_out = rows, .n_in = src[0].n_in };
    enum status       st = k->ops->weight_pack(k, &all, out);
    mem_free(stacked);
    return st;
}

static enum status load_bias(struct linear *l, struct weights *w, const char *prefix, const struct linear_spec *spec, struct err *err)
{
    char   name[256];
    size_t at = 0;
    for (size_t i = 0; i < spec->n_names; at += spec->n_outs[i], i++) {
        snprintf(name, sizeof name, "%s%s.bias", prefix, spec->names[i]);
        if (spec->bias == BIAS_IF_PRESENT && !weights_has(w, name)) continue;
        float *part;
        TRY(weights_vector(w, name, spec->n_outs[i], &part, err));
        if (!l->bias) l->bias = mem_aligned(64, l->n_out * sizeof *l->bias); /* zeros where a part has none */
        memcpy(l->bias + at, part, spec->n_outs[i] * sizeof *part);
        mem_free(part);
    }
    return OK;
}

static enum status load_parts(struct linear *l, struct weights *w, struct kernel_ctx *k, const char *prefix, const struct linear_spec *spec,
                              struct err *err)
{
    struct weight_src src[LINEAR_PARTS_MAX];
    char              name[256];
    bool              one_type = true;
    for (size_t i = 0; i < spec->n_names; i++) {
        snprintf(name, sizeof name, "%s%s.weight", prefix, spec->names[i]);
        TRY(weights_matrix(w, name, spec->n_outs[i], spec->n_in, &src[i], err));
        one_type = one_type && src[i].dtype == src[0].dtype;
        l->n_out += spec->n_outs[i];
    }
    size_t n = one_type ? 1 : spec->n_names, per_part = one_type ? spec->n_names : 1;
    for (size_t i = 0; i < n; i++) {
        enum status st = pack_stacked(k, &src[i], per_part, &l->parts[i]);
        if (st != OK) return err_field(err, st, name, "no memory to pack %s (%zu x %zu)", name, l->n_out, spec->n_in);
        l->n_parts++;
    }
    return spec->bias == BIAS_NONE ? OK : load_bias(l, w, prefix, spec, err);
}

enum status linear_load(struct linear *l, struct weights *w, struct kernel_ctx *k, const char *prefix, const struct linear_spec *spec,
                        struct err *err)
{
    *l = (struct linear){ .n_in = spec->n_in };
    enum status st = load_parts(l, w, k, prefix, spec, err);
    if (st != OK) linear_release(l);
    return st;
}

void linear_release(struct linear *l)
{
    for (size_t i = 0; i < l->n_parts; i++) weight_release(&l->parts[i]);
    mem_free(l->bias);
    *l = (struct linear){ 0 };
}

size_t linear_bytes(const struct linear *l)
{
    size_t bytes = l->bias ? l->n_out * sizeof *l->bias : 0;
    for (size_t i = 0; i < l->n_parts; i++) bytes += l->parts[i].bytes;
    return bytes;
}

void linear_forward(struct kernel_ctx *k, const struct linear *l, float *y, size_t y_stride, const float *x, size_t n_rows)
{
    size_t at = 0;
    for (size_t i = 0; i < l->n_parts; at += l->parts[i].n_out, i++)
        k->ops->matmul(k, y + at, y_stride, x, n_rows, &l->parts[i], l->bias ? l->bias + at : NULL);
}

/* ---- rotary angles ----------------------------------------------------------------------------------------------- */

/* llama3: long wavelengths are divided by the factor, short ones kept, those between blended. */
static double scale_llama3(const struct model_config *c, double inv)
{
    double wavelength = 2.0 * M_PI / inv, original = c->rope.original_max;
    if (wavelength < original / c->rope.high_freq_factor) return inv;
    if (wavelength > original / c->rope.low_freq_factor) return inv / c->rope.factor;
    double s = (original / wavelength - c->rope.low_freq_factor) / (c->rope.high_freq_factor - c->rope.low_freq_factor);
    return (1.0 - s) * inv / c->rope.factor + s * inv;
}

void rope_inv_freq(const struct model_config *c, const float *factors, double *out)
{
    for (uint32_t i = 0; i < c->head_dim / 2; i++) {
        double inv = pow(c->rope_theta, -2.0 * (double)i / (double)c->head_dim);
        if (c->rope.kind == ROPE_LINEAR) inv /= c->rope.factor;
        if (c->rope.kind == ROPE_LLAMA3) inv = scale_llama3(c, inv);
        out[i] = factors ? inv / (double)factors[i] : inv;
    }
}

float *rope_table(const struct model_config *c, const float *factors, uint32_t n_positions)
{
    size_t  half = c->head_dim / 2;
    double *inv = MEM_ARRAY(double, half);
    float  *table = mem_aligned(64, (size_t)n_positions * half * 2 * sizeof *table), *to = table;
    rope_inv_freq(c, factors, inv);
    for (uint32_t pos = 0; pos < n_positions; pos++)
        for (size_t i = 0; i < half; i++) {
            double angle = (double)pos * inv[i];
            *to++ = (float)cos(angle);
            *to++ = (float)sin(angle);
        }
    mem_free(inv);
    return table;
}
