/* kv_rows.c - rows of KV from f32 and back; the loops are kv_rows_kernels.h's. See kv_rows.h. */
#include "kernels/kv_rows.h"

#include <math.h>
#include <string.h>

#include "kernels/kv_rows_kernels.h"
#include "shared/base/assert.h"

static const struct kv_row_kernels KERNELS = KV_ROW_KERNELS;

static const struct kv_row_kernels *kernels(void)
{
    return __builtin_cpu_supports("avx2") ? &kv_row_kernels_avx2 : &KERNELS;
}

bool kv_rows_known(enum dtype t)
{
    return t == DTYPE_F32 || t == DTYPE_F16 || t == DTYPE_BF16 || kv_rows_scaled(t);
}

bool kv_rows_scaled(enum dtype t) { return t == DTYPE_I8 || t == DTYPE_F8_E4M3; }

static const struct {
    const char *name;
    enum dtype dtype;
} NAMES[] = {
    { "bfloat16", DTYPE_BF16 },   { "bf16", DTYPE_BF16 },    { "float16", DTYPE_F16 },
    { "f16", DTYPE_F16 },         { "fp16", DTYPE_F16 },     { "half", DTYPE_F16 },
    { "float32", DTYPE_F32 },     { "f32", DTYPE_F32 },      { "fp32", DTYPE_F32 },
    { "int8", DTYPE_I8 },         { "fp8", DTYPE_F8_E4M3 },  { "fp8_e4m3", DTYPE_F8_E4M3 },
    { "f8_e4m3", DTYPE_F8_E4M3 }, { "e4m3", DTYPE_F8_E4M3 }, { "float8_e4m3fn", DTYPE_F8_E4M3 },
};

enum status kv_rows_from_name(const char *name, enum dtype *out, struct err *err)
{
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (strcmp(name, NAMES[i].name) == 0) {
            *out = NAMES[i].dtype;
            return OK;
        }
    return err_field(err, ERR_INVALID, "kv-cache-dtype",
                     "a KV cache cannot be held as \"%s\"; it can as bfloat16, float16, int8, fp8 "
                     "(which is fp8_e4m3), and float32 with --activations f32",
                     name);
}

const char *kv_rows_name(enum dtype t)
{
    if (t == DTYPE_I8) return "int8";
    return (unsigned)t < DTYPE_COUNT ? dtype_name(t) : "unknown";
}

size_t kv_rows_bytes(enum dtype t, size_t n) { return t == DTYPE_I8 ? n : dtype_row_bytes(t, n); }

/* max|x| / largest; NaN where an element is not finite. */
static float scale_of(const float *x, size_t n, float largest)
{
    float max = float_of_bits((uint32_t)kernels()->absmax_bits(x, n));
    return isfinite(max) ? max / largest : NAN;
}

static void store_scaled(enum dtype t, const float *x, uint8_t *q, void *scale, size_t n)
{
    const float s = scale_of(x, n, t == DTYPE_I8 ? KV_I8_MAX : KV_E4M3_MAX);
    memcpy(scale, &s, sizeof s);
    if (!(s > 0)) memset(q, 0, n); /* all zero, too small for a scale, or not finite */
    else if (t == DTYPE_I8) kernels()->to_i8(x, s, q, n);
    else kernels()->to_e4m3(x, s, q, n);
}

void kv_row_store(enum dtype t, const float *x, void *values, void *scale, size_t n)
{
    char *to = values;
    ASSERT(kv_rows_known(t));
    if (kv_rows_scaled(t)) store_scaled(t, x, values, scale, n);
    else if (t == DTYPE_F32) memcpy(to, x, n * sizeof *x);
    else if (t == DTYPE_BF16)
        for (size_t i = 0; i < n; i++) {
            uint16_t h = float_to_bf16(x[i]);
            memcpy(to + 2 * i, &h, sizeof h);
        }
    else
        for (size_t i = 0; i < n; i++) {
            uint16_t h = dtype_f32_to_f16(x[i]);
            memcpy(to + 2 * i, &h, sizeof h);
        }
}

/* Of two NaNs, an element's and the scale's, CPUs choose one or the other. */
static void load_nan(float scale, float *x, size_t n)
{
    const float quiet = float_of_bits(bits_of_float(scale) | 0x400000);
    for (size_t i = 0; i < n; i++) memcpy(&x[i], &quiet, sizeof quiet);
}

void kv_row_load(enum dtype t, const void *values, const void *scale, float *x, size_t n)
{
    float s = 1;
    if (t == DTYPE_F16) kernels()->from_f16(values, x, n);
    else if (!kv_rows_scaled(t)) dtype_to_f32(t, values, x, n);
    else {
        memcpy(&s, scale, sizeof s);
        if (isnan(s)) load_nan(s, x, n);
        else if (t == DTYPE_I8) kernels()->from_i8(values, s, x, n);
        else kernels()->from_e4m3(values, s, x, n);
    }
}
