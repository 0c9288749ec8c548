/* form_plan.c - what a matrix will be once packed, and the sources that cannot be: shapes alone, no element is looked at. Thread: any. */
#include <limits.h>

#include "kernels/cpu/form.h"
#include "kernels/cpu/pages.h"

/* A source by itself. */
static enum status check_source(const struct weight_src *s, struct err *err)
{
    if ((unsigned)s->dtype >= DTYPE_COUNT) return err_set(err, ERR_UNSUPPORTED, "elements of type %d are not known", (int)s->dtype);
    const size_t block = dtype_block(s->dtype);
    const char  *type = dtype_name(s->dtype);
    if (s->transposed && block != 1) return err_set(err, ERR_UNSUPPORTED, "a transposed matrix of type %s is not supported", type);
    if (s->n_out == 0 || s->n_in == 0) return err_set(err, ERR_INVALID, "a matrix of %zu x %zu elements has nothing to pack", s->n_out, s->n_in);
    if (s->n_in % block != 0) return err_set(err, ERR_INVALID, "rows of %zu elements are no whole blocks of %zu, as type %s has them", s->n_in, block, type);
    if (s->n_out > INT32_MAX || s->n_in > INT32_MAX)
        return err_set(err, ERR_TOO_LONG, "a matrix of %zu x %zu elements is over the limit of %d rows and columns", s->n_out, s->n_in, INT32_MAX);
    const size_t across = s->transposed ? s->n_out : s->n_in;
    if (s->row_bytes && s->row_bytes < dtype_row_bytes(s->dtype, across))
        return err_set(err, ERR_INVALID, "rows of %zu elements of type %s do not fit in %zu bytes", across, type, s->row_bytes);
    if (s->scales && s->dtype != DTYPE_F8_E4M3) return err_set(err, ERR_INVALID, "type %s takes no scales from outside", type);
    return OK;
}

static enum status check_part(const struct weight_pack_args *a, size_t i, struct err *err)
{
    const struct weight_src *s = &a->parts[i], *first = &a->parts[0];
    TRY(check_source(s, err));
    if (s->n_in != first->n_in || s->dtype != first->dtype || s->transposed != first->transposed)
        return err_set(err, ERR_INVALID, "part %zu (%s, %zu columns%s) is unlike the first (%s, %zu columns%s)", i, dtype_name(s->dtype), s->n_in,
                       s->transposed ? ", transposed" : "", dtype_name(first->dtype), first->n_in, first->transposed ? ", transposed" : "");
    if (a->join == JOIN_STACKED) {
        if (i + 1 == a->n_parts || s->n_out % PANEL == 0) return OK;
        return err_set(err, ERR_INVALID, "another part cannot follow %zu rows, which are no multiple of %d", s->n_out, PANEL);
    }
    if (a->n_parts != 2) return err_set(err, ERR_INVALID, "a pair was asked for of %zu parts", a->n_parts);
    return s->n_out == first->n_out ? OK : err_set(err, ERR_INVALID, "%zu and %zu rows do not make a pair", first->n_out, s->n_out);
}

enum status weight_plan(const struct weight_pack_args *a, struct weight *out, struct err *err)
{
    if (a->n_parts == 0 || (unsigned)a->quantize > QUANTIZE_BLOCK_FP8)
        return err_set(err, ERR_INVALID, "%zu parts with quantization %d cannot be packed", a->n_parts, (int)a->quantize);
    struct weight w = { .paired = a->join == JOIN_PAIRED, .n_in = a->parts[0].n_in };
    for (size_t i = 0; i < a->n_parts; i++) {
        TRY(check_part(a, i, err));
        w.n_out += a->parts[i].n_out;
    }
    if (w.n_out > INT32_MAX) return err_set(err, ERR_TOO_LONG, "parts of %zu rows together are over the limit of %d", w.n_out, INT32_MAX);
    w.form = form_of(a->parts[0].dtype, a->quantize);
    if (!__builtin_mul_overflow(panel_count(&w), form_panel_bytes(w.form, w.n_in), &w.bytes)) w.bytes = pages_round(w.bytes);
    else w.bytes = 0;
    if (w.bytes == 0) return err_set(err, ERR_TOO_LONG, "a matrix of %zu x %zu elements has more bytes than there are addresses", w.n_out, w.n_in);
    *out = w;
    return OK;
}
