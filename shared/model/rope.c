/* rope.c - RoPE's frequencies and the table of cos and sin. Thread: loading. */
#include "shared/model/rope.h"

#include <math.h>

#include "shared/base/mem.h"

uint32_t rope_dim(const struct model_config *c)
{
    return model_is_latent(c) ? c->mla.rope : c->head_dim;
}

static double scale_llama3(const struct model_config *c, double inv)
{
    double wavelength = 2.0 * M_PI / inv, original = c->rope.original_max;
    if (wavelength < original / c->rope.high_freq_factor) return inv;
    if (wavelength > original / c->rope.low_freq_factor) return inv / c->rope.factor;
    double s = (original / wavelength - c->rope.low_freq_factor) /
               (c->rope.high_freq_factor - c->rope.low_freq_factor);
    return (1.0 - s) * inv / c->rope.factor + s * inv;
}

/* The index of the frequency that turns `beta` times in the original context. */
static double yarn_index(const struct model_config *c, double beta)
{
    return (double)rope_dim(c) * log(c->rope.original_max / (beta * 2.0 * M_PI)) /
           (2.0 * log(c->rope_theta));
}

static double scale_yarn(const struct model_config *c, double inv, uint32_t i)
{
    double low = yarn_index(c, c->rope.beta_fast), high = yarn_index(c, c->rope.beta_slow);
    if (!c->rope.no_truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, (double)rope_dim(c) - 1);
    if (low == high) high += 0.001; /* avoids a division by zero */
    double ramp = fmin(fmax(((double)i - low) / (high - low), 0), 1);
    return inv * (1 - ramp) + inv / c->rope.factor * ramp;
}

void rope_inv_freq(const struct model_config *c, const float *factors, double *out)
{
    const uint32_t dim = rope_dim(c);
    for (uint32_t i = 0; i < dim / 2; i++) {
        double inv = pow(c->rope_theta, -2.0 * (double)i / (double)dim);
        if (c->rope.kind == ROPE_LINEAR) inv /= c->rope.factor;
        if (c->rope.kind == ROPE_LLAMA3) inv = scale_llama3(c, inv);
        if (c->rope.kind == ROPE_YARN) inv = scale_yarn(c, inv, i);
        out[i] = factors ? inv / (double)factors[i] : inv;
    }
}

double rope_mscale(double factor, double m) { return factor <= 1 ? 1 : 0.1 * m * log(factor) + 1; }

size_t rope_table_bytes(const struct model_config *c, uint32_t n_positions)
{
    return (size_t)n_positions * (rope_dim(c) / 2) * 2 * sizeof(float);
}

struct rope_table_job {
    const double *inv;
    size_t half;
    double factor;
    float *table;
};

static void fill_position(void *arg, int pos, int thread)
{
    const struct rope_table_job *a = arg;
    float *to = a->table + (size_t)pos * a->half * 2;
    (void)thread;
    for (size_t i = 0; i < a->half; i++) {
        double angle = (double)pos * a->inv[i];
        *to++ = (float)(cos(angle) * a->factor);
        *to++ = (float)(sin(angle) * a->factor);
    }
}

void rope_table(const struct model_config *c, const float *factors, uint32_t n_positions,
                struct compute_pool *pool, float *to)
{
    double *inv = MEM_ARRAY(double, rope_dim(c) / 2);
    struct rope_table_job a = {
        .inv = inv,
        .half = rope_dim(c) / 2,
        .factor = c->rope.cos_sin_factor > 0 ? c->rope.cos_sin_factor : 1,
        .table = to,
    };
    rope_inv_freq(c, factors, inv);
    compute_pool_run(pool, (int)n_positions, fill_position, &a);
    mem_free(inv);
}
