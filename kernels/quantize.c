/* quantize.c - the rounding of --quantization, one channel or block at a time. Thread: any. */
#include "kernels/quantize.h"

#include <math.h>
#include <string.h>

#include "kernels/quantize_kernels.h"

static const char *const NAMES[] = { [QUANTIZE_NONE] = "none",
                                     [QUANTIZE_WINT8] = "wint8",
                                     [QUANTIZE_WINT4] = "wint4",
                                     [QUANTIZE_BLOCK_FP8] = "block_wise_fp8" };

const char *quantize_name(enum quantize q) { return NAMES[q]; }

static const struct quantize_kernels KERNELS = QUANTIZE_KERNELS;

static const struct quantize_kernels *kernels(void)
{
    return __builtin_cpu_supports("avx2") ? &quantize_kernels_avx2 : &KERNELS;
}

float quantize_channel(const float *w, size_t n, int limit, int8_t *q)
{
    float bound = (float)limit, a = float_of_bits((uint32_t)kernels()->absmax_bits(w, n, 0));
    if (a == 0 || !isfinite(a)) {
        memset(q, 0, n);
        return a == 0 ? 0 : NAN;
    }
    kernels()->channel(w, n, a, bound, q);
    return float_from_bf16(float_to_bf16(a / bound));
}

float quantize_f8_block(const float *w, size_t w_stride, size_t n_rows, size_t n_cols, uint8_t *q,
                        size_t q_stride)
{
    int32_t largest = 0;
    for (size_t i = 0; i < n_rows; i++)
        largest = kernels()->absmax_bits(w + i * w_stride, n_cols, largest);
    float a = float_of_bits((uint32_t)largest);
    a = a < 1e-4f ? 1e-4f : a; /* a NaN is no less than anything: it stays */
    float factor = 448.0f / a;
    for (size_t i = 0; i < n_rows; i++)
        kernels()->f8(w + i * w_stride, n_cols, factor, q + i * q_stride);
    return a / 448.0f;
}

enum status quantize_from_name(const char *name, enum quantize *out, struct err *err)
{
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (strcmp(name, NAMES[i]) == 0 || (i == QUANTIZE_NONE && !*name)) {
            *out = (enum quantize)i;
            return OK;
        }
    return err_field(
        err, ERR_INVALID, "quantization",
        "there is no quantization \"%s\"; wint8, wint4 and block_wise_fp8 are known, and none",
        name);
}
