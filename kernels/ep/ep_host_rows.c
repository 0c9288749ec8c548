/* ep_host_rows.c - the definition of rows in transit and of sums, in plain C, and the choice of an
 * implementation. Thread: any. */
#include "kernels/ep/ep_host_rows.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu_features.h"
#include "kernels/ep/ep.h"
#include "kernels/float_bits.h"

static void to_bf16(void *to, const float *x, size_t n)
{
    char *out = to;
    for (size_t k = 0; k < n; k++) {
        const uint16_t half = float_to_bf16(x[k]);
        memcpy(out + k * sizeof half, &half, sizeof half);
    }
}

static void sum(const struct ep_row_sum *s)
{
    for (size_t k = 0; k < s->n; k++) s->y[k] = ep_row_sum_of(s, k);
}

const struct ep_host_rows ep_host_rows_plain = { .to_bf16 = to_bf16, .sum = sum };

const struct ep_host_rows *ep_host_rows_choose(void)
{
    if (cpu_supports_avx512()) return &ep_host_rows_avx512;
    return cpu_supports_avx2() ? &ep_host_rows_avx2 : &ep_host_rows_plain;
}

static void send_f8(const float *x, size_t n, unsigned char *to, size_t scales_at)
{
    float *scales = (float *)(void *)(to + scales_at);
    for (size_t g = 0; g < n; g += EP_SCALE_STEP) {
        const size_t end = g + EP_SCALE_STEP < n ? g + EP_SCALE_STEP : n;
        float top = 0;
        for (size_t k = g; k < end; k++) top = fmaxf(top, fabsf(x[k]));
        const float scale = top > 0 ? top / 448.0f : 1.0f;
        scales[g / EP_SCALE_STEP] = scale;
        for (size_t k = g; k < end; k++) to[k] = float_to_f8(x[k] / scale);
    }
}

void ep_host_rows_send(const struct ep_host_rows *r, enum dtype send, const float *x, size_t n,
                       unsigned char *to, size_t scales_at)
{
    if (send == DTYPE_F32) memcpy(to, x, n * sizeof *x);
    else if (send == DTYPE_BF16) r->to_bf16(to, x, n);
    else send_f8(x, n, to, scales_at);
}

void ep_host_rows_send_part(const struct ep_host_rows *r, const float *x, size_t at, size_t n,
                            unsigned char *to)
{
    unsigned char half[2];
    x += at / 2;
    if (at % 2 && n) {
        ep_host_rows_plain.to_bf16(half, x++, 1);
        *to++ = half[1];
        n--;
    }
    r->to_bf16(to, x, n / 2);
    if (n % 2 == 0) return;
    ep_host_rows_plain.to_bf16(half, x + n / 2, 1);
    to[n - 1] = half[0];
}

static void read_f8(const unsigned char *row, const float *scales, float *x, size_t n)
{
    for (size_t k = 0; k < n; k++) x[k] = float_from_f8(row[k]) * scales[k / EP_SCALE_STEP];
}

void ep_host_rows_read(enum dtype send, const unsigned char *row, size_t scales_at, float *x,
                       size_t n)
{
    const uint16_t *half = (const uint16_t *)(const void *)row;
    if (send == DTYPE_F32) memcpy(x, row, n * sizeof *x);
    else if (send == DTYPE_F8_E4M3)
        read_f8(row, (const float *)(const void *)(row + scales_at), x, n);
    else
        for (size_t k = 0; k < n; k++) x[k] = float_from_bf16(half[k]);
}
