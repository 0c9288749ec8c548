/* ep_host_rows.h - loops over rows in host memory, for the backends of ep.h on CPUs: rows in their
 * transit format, and the sum of a row's results. Plain C is the definition; AVX2 and AVX-512 give
 * the same bits. Thread: any. */
#ifndef BATON_KERNELS_EP_EP_HOST_ROWS_H
#define BATON_KERNELS_EP_EP_HOST_ROWS_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/dtype.h"
#include "kernels/float_bits.h"

/* A result: one of the two, the other is NULL. */
struct ep_row_result {
    const float *f32;     /* [n] */
    const uint16_t *bf16; /* [n] */
};

/* The sum of one row: y[k] = (add ? y[k] : 0) + sum over j ascending of weights[j] * results[j][k],
 * fused multiply-adds. */
struct ep_row_sum {
    float *y;                            /* [n] */
    const struct ep_row_result *results; /* [n_used] */
    const float *weights;                /* [n_used] */
    size_t n, n_used;
    bool add, rounds; /* rounds: each f32 result is first rounded to bf16 */
};

/* Element k of result j, as it is added. */
static inline float ep_row_result(const struct ep_row_sum *s, size_t j, size_t k)
{
    const struct ep_row_result *r = &s->results[j];
    if (r->bf16) return float_from_bf16(r->bf16[k]);
    return s->rounds ? float_from_bf16(float_to_bf16(r->f32[k])) : r->f32[k];
}

static inline float ep_row_sum_of(const struct ep_row_sum *s, size_t k)
{
    float y = s->add ? s->y[k] : 0;
    for (size_t j = 0; j < s->n_used; j++) y = fmaf(s->weights[j], ep_row_result(s, j, k), y);
    return y;
}

struct ep_host_rows {
    void (*to_bf16)(void *to, const float *x, size_t n); /* to: aligned to nothing */
    void (*sum)(const struct ep_row_sum *s);
};

extern const struct ep_host_rows ep_host_rows_plain, ep_host_rows_avx2, ep_host_rows_avx512;
/* The fastest that this CPU supports. */
const struct ep_host_rows *ep_host_rows_choose(void);

/* Writes x [n] in the transit format of type `send`, scales at to + scales_at. The padding after
 * the elements is not written. */
void ep_host_rows_send(const struct ep_host_rows *r, enum dtype send, const float *x, size_t n,
                       unsigned char *to, size_t scales_at);

/* Writes bytes at .. at + n - 1 of x as it travels as bf16. */
void ep_host_rows_send_part(const struct ep_host_rows *r, const float *x, size_t at, size_t n,
                            unsigned char *to);

/* ep_host_rows_send backwards. */
void ep_host_rows_read(enum dtype send, const unsigned char *row, size_t scales_at, float *x,
                       size_t n);

#endif
