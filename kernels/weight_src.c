/* weight_src.c - checks sources, computes elements of dummy ones, and converts rows to f32.
 * Thread: any. */
#include "kernels/weight_src.h"

#include <limits.h>

#include "kernels/float_bits.h"

/* ---- checks ---- */

/* A source by itself. */
static enum status check_source(const struct weight_src *s, struct err *err)
{
    if ((unsigned)s->dtype >= DTYPE_COUNT)
        return err_set(err, ERR_UNSUPPORTED, "elements of type %d are not known", (int)s->dtype);
    const size_t block = dtype_block(s->dtype);
    const char *type = dtype_name(s->dtype);
    if (s->transposed && block != 1)
        return err_set(err, ERR_UNSUPPORTED, "a transposed matrix of type %s is not supported",
                       type);
    if (s->n_out == 0 || s->n_in == 0)
        return err_set(err, ERR_INVALID, "a matrix of %zu x %zu elements has nothing to pack",
                       s->n_out, s->n_in);
    if (s->n_in % block != 0)
        return err_set(err, ERR_INVALID,
                       "rows of %zu elements are not a multiple of %zu, the block size of type %s",
                       s->n_in, block, type);
    if (s->n_out > INT32_MAX || s->n_in > INT32_MAX)
        return err_set(err, ERR_TOO_LONG,
                       "a matrix of %zu x %zu elements is over the limit of %d rows and columns",
                       s->n_out, s->n_in, INT32_MAX);
    const size_t across = s->transposed ? s->n_out : s->n_in;
    if (s->row_bytes && s->row_bytes < dtype_row_bytes(s->dtype, across))
        return err_set(err, ERR_INVALID, "rows of %zu elements of type %s do not fit in %zu bytes",
                       across, type, s->row_bytes);
    if (weight_src_is_dummy(s) && s->dtype != DTYPE_BF16 && s->dtype != DTYPE_F32)
        return err_set(err, ERR_UNSUPPORTED,
                       "elements of type %s cannot be dummy weights, bf16 and f32 can", type);
    if (s->scales && s->dtype != DTYPE_F8_E4M3)
        return err_set(err, ERR_INVALID, "type %s takes no scales from outside", type);
    return OK;
}

static enum status check_part(const struct weight_pack_args *a, size_t i, struct err *err)
{
    const struct weight_src *s = &a->parts[i], *first = &a->parts[0];
    TRY(check_source(s, err));
    if (s->n_in != first->n_in || s->dtype != first->dtype || s->transposed != first->transposed)
        return err_set(err, ERR_INVALID,
                       "part %zu (%s, %zu columns%s) is unlike the first (%s, %zu columns%s)", i,
                       dtype_name(s->dtype), s->n_in, s->transposed ? ", transposed" : "",
                       dtype_name(first->dtype), first->n_in,
                       first->transposed ? ", transposed" : "");
    if (a->join == JOIN_STACKED) {
        if (i + 1 == a->n_parts || s->n_out % WEIGHT_PART_ALIGN == 0) return OK;
        return err_set(err, ERR_INVALID,
                       "another part cannot follow %zu rows, which are no multiple of %d", s->n_out,
                       WEIGHT_PART_ALIGN);
    }
    if (a->n_parts != 2)
        return err_set(err, ERR_INVALID, "a pair was asked for of %zu parts", a->n_parts);
    return s->n_out == first->n_out
               ? OK
               : err_set(err, ERR_INVALID, "%zu and %zu rows do not make a pair", first->n_out,
                         s->n_out);
}

enum status weight_src_check(const struct weight_pack_args *a, struct weight *out, struct err *err)
{
    if (a->n_parts == 0 || (unsigned)a->quantize > QUANTIZE_BLOCK_FP8)
        return err_set(err, ERR_INVALID, "%zu parts with quantization %d cannot be packed",
                       a->n_parts, (int)a->quantize);
    struct weight w = { .paired = a->join == JOIN_PAIRED, .n_in = a->parts[0].n_in };
    for (size_t i = 0; i < a->n_parts; i++) {
        TRY(check_part(a, i, err));
        w.n_out += a->parts[i].n_out;
    }
    if (w.n_out > INT32_MAX)
        return err_set(err, ERR_TOO_LONG, "parts of %zu rows together are over the limit of %d",
                       w.n_out, INT32_MAX);
    *out = w;
    return OK;
}

/* ---- dummy elements ---- */

void weight_src_strides(const struct weight_src *s, size_t *row_stride, size_t *k_stride)
{
    const size_t stored = s->row_bytes    ? s->row_bytes / dtype_block_bytes(s->dtype)
                          : s->transposed ? s->n_out
                                          : s->n_in;
    *row_stride = s->transposed ? 1 : stored;
    *k_stride = s->transposed ? stored : 1;
}

void weight_src_dummy_row(const struct weight_src *s, size_t row, size_t k0, size_t n, void *to)
{
    size_t row_stride, k_stride;
    weight_src_strides(s, &row_stride, &k_stride);
    for (size_t i = 0; i < n; i++) {
        const uint16_t bits = dummy_weight_bf16(&s->dummy, row * row_stride + (k0 + i) * k_stride);
        if (s->dtype == DTYPE_BF16) ((uint16_t *)to)[i] = bits;
        else ((float *)to)[i] = float_from_bf16(bits);
    }
}

static void dummy_f32(const struct weight_src *s, size_t row0, size_t n_rows, float *to)
{
    struct weight_src as_f32 = *s;
    /* the same places */
    if (s->row_bytes) as_f32.row_bytes = s->row_bytes / dtype_block_bytes(s->dtype) * sizeof *to;
    as_f32.dtype = DTYPE_F32;
    for (size_t i = 0; i < n_rows; i++)
        weight_src_dummy_row(&as_f32, row0 + i, 0, s->n_in, to + i * s->n_in);
}

/* ---- rows ---- */

/* Stored rows hold one k of all outputs. */
static void rows_f32_transposed(const struct weight_src *s, size_t row0, size_t n_rows, float *to)
{
    const size_t size = dtype_block_bytes(s->dtype),
                 stride = s->row_bytes ? s->row_bytes : s->n_out * size;
    float column[WEIGHT_BLOCK_ROWS];
    for (size_t k = 0; k < s->n_in; k++) {
        dtype_to_f32(s->dtype, (const char *)s->data + k * stride + row0 * size, column, n_rows);
        for (size_t i = 0; i < n_rows; i++) to[i * s->n_in + k] = column[i];
    }
}

void weight_src_rows_f32(const struct weight_src *s, size_t row0, size_t n_rows, float *to)
{
    const size_t n_in = s->n_in,
                 stride = s->row_bytes ? s->row_bytes : dtype_row_bytes(s->dtype, n_in);
    if (weight_src_is_dummy(s)) {
        dummy_f32(s, row0, n_rows, to);
        return;
    }
    if (s->transposed) rows_f32_transposed(s, row0, n_rows, to);
    else
        for (size_t i = 0; i < n_rows; i++)
            dtype_to_f32(s->dtype, (const char *)s->data + (row0 + i) * stride, to + i * n_in,
                         n_in);
    if (!s->scales) return;
    const float *scales = s->scales + row0 / F8_BLOCK * ((n_in + F8_BLOCK - 1) / F8_BLOCK);
    for (size_t i = 0; i < n_rows; i++)
        for (size_t k = 0; k < n_in; k++) to[i * n_in + k] *= scales[k / F8_BLOCK];
}
