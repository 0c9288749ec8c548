/* layers.c - linear layers and rotary angles. */
#include "shared/model/layers.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/mem.h"

/* ---- linear ------------------------------------------------------------------------------------------------------ */

/* Matrices of different types that must be packed as one: as f32. */
static enum status to_f32(struct weight_src *src, size_t n, float **all)
{
    size_t elements = 0;
    for (size_t i = 0; i < n; i++) elements += src[i].n_out * src[i].n_in;
    float *at = *all = mem_try_calloc(elements, sizeof *at);
    if (!at) return ERR_NOMEM;
    for (size_t i = 0; i < n; at += src[i].n_out * src[i].n_in, i++) {
        dtype_to_f32(src[i].dtype, src[i].data, at, src[i].n_out * src[i].n_in);
        src[i] = (struct weight_src){ .dtype = DTYPE_F32, .data = at, .n_out = src[i].n_out, .n_in = src[i].n_in };
    }
    return OK;
}

/* As few matrices as possible: one, when the types are equal and the parts begin at whole panels. */
static enum status pack_parts(struct linear *l, struct kernel_ctx *k, struct weight_src *src, size_t n, bool paired)
{
    float *wide = NULL;
    bool   together = true;
    for (size_t i = 0; i < n; i++) together = together && src[i].dtype == src[0].dtype && (paired || i + 1 == n || src[i].n_out % 16 == 0);
    enum status st = paired && !together ? to_f32(src, n, &wide) : OK;
    size_t step = paired || together ? n : 1;
    for (size_t i = 0; i < n && st == OK; i += step) {
        struct weight_pack_args a = { .parts = &src[i], .n_parts = step, .join = paired ? JOIN_PAIRED : JOIN_STACKED };
        st = k->ops->weight_pack(k, &a, &l->parts[l->n_parts]);
        if (st == OK) l->n_parts++;
    }
    mem_free(wide);
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
    for (size_t i = 0; i < spec->n_names; i++) {
        snprintf(name, sizeof name, "%s%s.weight", prefix, spec->names[i]);
        TRY(weights_matrix(w, name, spec->n_outs[i], spec->n_in, &src[i], err));
        l->n_out += spec->n_outs[i];
    }
    enum status st = pack_parts(l, k, src, spec->n_names, spec->paired);
    if (st != OK) return err_field(err, st, name, "no memory to pack %s (%zu x %zu)", name, l->n_out, spec->n_in);
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

size_t linear_jobs(const struct linear *l, struct matmul_args *jobs, float *y, size_t y_stride, const float *x, size_t n_rows,
                   enum matmul_then then)
{
    size_t at = 0;
    for (size_t i = 0; i < l->n_parts; at += l->parts[i].n_out, i++)
        jobs[i] = (struct matmul_args){ .w = &l->parts[i], .bias = l->bias ? l->bias + at : NULL, .x = x, .x_stride = l->n_in, .n_rows = n_rows,
                                        .y = y + at, .y_stride = y_stride, .then = then };
    return l->n_parts;
}

void linear_forward(struct kernel_ctx *k, const struct linear *l, float *y, size_t y_stride, const float *x, size_t n_rows,
                    enum matmul_then then)
{
    struct matmul_args jobs[LINEAR_PARTS_MAX];
    k->ops->matmul(k, jobs, linear_jobs(l, jobs, y, y_stride, x, n_rows, then));
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
