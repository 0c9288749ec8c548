/* weights_matrix.c - one matrix or vector out of the tensor that holds it, with its shape and type
 * checked. Thread: loading. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "shared/model/load/weights.h"

/* ---- places ---- */

/* The places of struct matrix_spec, in the order of search. */
enum { OWN, PART, OWN_OF_STACK, PART_OF_STACK, N_PLACES };

/* Writes the name of the tensor at this place; false when the matrix cannot be there. */
static bool place_name(const struct matrix_spec *spec, int place, char out[TENSOR_NAME_BYTES_MAX])
{
    const char *leaf = place == OWN || place == OWN_OF_STACK ? spec->leaf : spec->whole;
    if (!leaf || (place >= OWN_OF_STACK && spec->n_experts == 0)) return false;
    if (place >= OWN_OF_STACK) snprintf(out, TENSOR_NAME_BYTES_MAX, "%s%s", spec->prefix, leaf);
    else if (spec->n_experts > 0)
        snprintf(out, TENSOR_NAME_BYTES_MAX, "%s%" PRIu32 ".%s.weight", spec->prefix,
                 spec->i_expert, leaf);
    else snprintf(out, TENSOR_NAME_BYTES_MAX, "%s%s.weight", spec->prefix, leaf);
    return true;
}

static int find_place(const struct weights *w, const struct matrix_spec *spec,
                      char name[TENSOR_NAME_BYTES_MAX])
{
    for (int place = 0; place < N_PLACES; place++)
        if (place_name(spec, place, name) && weights_find(w, name)) return place;
    return -1;
}

bool weights_has_matrix(const struct weights *w, const struct matrix_spec *spec)
{
    char name[TENSOR_NAME_BYTES_MAX];
    return find_place(w, spec, name) >= 0;
}

int weights_matrix_dtype(const struct weights *w, const struct matrix_spec *spec)
{
    char name[TENSOR_NAME_BYTES_MAX];
    if (w->dummy) return DTYPE_BF16;
    return find_place(w, spec, name) < 0 ? -1 : weights_find(w, name)->dtype;
}

/* ---- faults ---- */

/* Names the missing matrix as files of this kind usually do. */
static enum status missing(const struct weights *w, const struct matrix_spec *spec, struct err *err)
{
    char name[TENSOR_NAME_BYTES_MAX], in_file[TENSOR_NAME_BYTES_MAX] = "";
    int usual = w->names.kind == TENSOR_NAMES_PADDLE && spec->whole     ? PART
                : w->names.kind == TENSOR_NAMES_GGUF && spec->n_experts ? OWN_OF_STACK
                                                                        : OWN;
    if (place_name(spec, usual, name)) tensor_names_in_file(&w->names, name, in_file);
    if (!in_file[0]) snprintf(in_file, sizeof in_file, "%s", name);
    return err_field(err, ERR_NOT_FOUND, in_file, "tensor %s is missing", in_file);
}

static void shape_text(const uint64_t *shape, uint32_t n_dims, char *out, size_t cap)
{
    size_t at = 0;
    for (uint32_t d = 0; d < n_dims && at < cap; d++)
        at += (size_t)snprintf(out + at, cap - at, "%s%" PRIu64, d ? ", " : "", shape[d]);
}

static enum status check_type(const struct weights_tensor *t, struct err *err)
{
    struct buf known = { 0 };
    struct buf name = { 0 };
    if (t->dtype >= 0) return OK;
    for (int i = 0; i < DTYPE_COUNT; i++)
        buf_printf(&known, "%s%s", i ? ", " : "", dtype_name((enum dtype)i));
    buf_add_str(&name, t->name);
    enum status st = err_field(err, ERR_UNSUPPORTED, name.data,
                               "tensor %s is of type %s, which is not supported (these are: %s)",
                               name.data, t->type_name, known.data);
    buf_release(&known);
    buf_release(&name);
    return st;
}

static enum status wrong_shape(const struct weights_tensor *t, const uint64_t *shape,
                               uint32_t n_dims, struct err *err)
{
    char name[ERR_FIELD_MAX], expected[128] = "", have[128] = "";
    snprintf(name, sizeof name, "%.*s", STR_ARG(str_sub(t->name, 0, ERR_FIELD_MAX)));
    shape_text(shape, n_dims, expected, sizeof expected);
    shape_text(t->shape, t->n_dims, have, sizeof have);
    return err_field(err, ERR_FORMAT, name,
                     "tensor %.*s has shape [%s], the configuration asks for [%s]",
                     STR_ARG(str_sub(t->name, 0, TENSOR_NAME_BYTES_MAX)), have, expected);
}

/* The part of a matrix in the tensor that has it: outputs [first, first + n) of `rows`, of matrix i
 * if the tensor is a stack. */
struct matrix_in_tensor {
    const struct weights_tensor *t;
    size_t rows, first, n, i;
    bool stacked, transposed;
};

/* ---- f8 scales ---- */

static size_t blocks(size_t n) { return (n + F8_BLOCK - 1) / F8_BLOCK; }

/* No block of rows, and so no scale, is shared with another matrix or another part. */
static enum status check_blocks(const struct matrix_in_tensor *p, const struct matrix_spec *spec,
                                const char *in_file, struct err *err)
{
    const struct share_part part = matrix_part(spec);
    const size_t end = part.first + part.n;
    if ((p->first - part.first) % F8_BLOCK != 0)
        return err_field(err, ERR_UNSUPPORTED, in_file,
                         "tensor %s: a matrix begins in the middle of a block of 128 rows, which "
                         "is not supported",
                         in_file);
    if (share_part_is_aligned(part, spec->n_out, F8_BLOCK)) return OK;
    return err_field(err, ERR_UNSUPPORTED, in_file,
                     "tensor %s: a rank's heads, rows %zu to %zu, begin or end in the middle of a "
                     "block of 128 rows that share a scale, which is not supported; lower "
                     "--tensor-parallel-size",
                     in_file, part.first, end);
}

/* Takes the scales of the part's outputs from "<name>_scale_inv", which has one value per 128 x 128
 * block. */
static enum status take_scales(struct weights *w, const char *name, const struct matrix_spec *spec,
                               const struct matrix_in_tensor *p, float **out, struct err *err)
{
    char scale_name[TENSOR_NAME_BYTES_MAX + 16], in_file[TENSOR_NAME_BYTES_MAX];
    const size_t across = blocks(spec->n_in), down = blocks(p->rows);
    const uint64_t shape[3] = { spec->n_experts, down, across };
    snprintf(scale_name, sizeof scale_name, "%s_scale_inv", name);
    const struct weights_tensor *t = weights_take(w, scale_name);
    tensor_names_in_file(&w->names, scale_name, in_file);
    if (!t)
        return err_field(err, ERR_NOT_FOUND, in_file,
                         "tensor %s is missing: the scales of an f8 matrix", in_file);
    const uint64_t *expected_shape = p->stacked ? shape : shape + 1;
    const uint32_t n_dims = p->stacked ? 3 : 2;
    if (t->n_dims != n_dims || memcmp(t->shape, expected_shape, n_dims * sizeof *shape) != 0)
        return wrong_shape(t, expected_shape, n_dims, err);
    TRY(check_type(t, err));
    if (dtype_block((enum dtype)t->dtype) != 1)
        return err_field(err, ERR_UNSUPPORTED, in_file, "tensor %s is of type %s, scales are not",
                         in_file, t->type_name);
    TRY(check_blocks(p, spec, in_file, err));
    const size_t n = blocks(p->n) * across, begin = (p->i * down + p->first / F8_BLOCK) * across;
    *out = MEM_ARRAY(float, n);
    dtype_to_f32((enum dtype)t->dtype, t->data + dtype_row_bytes((enum dtype)t->dtype, begin), *out,
                 n);
    return OK;
}

/* ---- taking ---- */

static enum status check_matrix(const struct matrix_in_tensor *p, const struct matrix_spec *spec,
                                const char *name, struct err *err)
{
    const struct weights_tensor *t = p->t;
    const uint64_t shape[3] = { spec->n_experts, p->transposed ? spec->n_in : p->rows,
                                p->transposed ? p->rows : spec->n_in };
    const uint64_t *expected_shape = p->stacked ? shape : shape + 1;
    const uint32_t n_dims = p->stacked ? 3 : 2;
    if (t->n_dims != n_dims || memcmp(t->shape, expected_shape, n_dims * sizeof *shape) != 0)
        return wrong_shape(t, expected_shape, n_dims, err);
    TRY(check_type(t, err));
    const enum dtype type = (enum dtype)t->dtype;
    if (p->transposed && (dtype_block(type) != 1 || type == DTYPE_F8_E4M3))
        return err_field(err, ERR_UNSUPPORTED, name,
                         "tensor %s: a transposed matrix of type %s is not supported", name,
                         t->type_name);
    return OK;
}

static enum status take_matrix(struct weights *w, const struct matrix_spec *spec, const char *name,
                               int place, struct weight_src *out, struct err *err)
{
    const bool among_others = place == PART || place == PART_OF_STACK,
               stacked = place >= OWN_OF_STACK;
    const struct share_part part = matrix_part(spec);
    const struct matrix_in_tensor p = {
        .t = weights_take(w, name),
        .rows = among_others ? spec->total : spec->n_out,
        .first = (among_others ? spec->first : 0) + part.first,
        .n = part.n,
        .i = stacked ? spec->i_expert : 0,
        .stacked = stacked,
        .transposed = w->names.kind == TENSOR_NAMES_PADDLE && !spec->is_table,
    };
    TRY(check_matrix(&p, spec, name, err));
    const enum dtype type = (enum dtype)p.t->dtype;
    float *scales = NULL;
    if (type == DTYPE_F8_E4M3) TRY(take_scales(w, name, spec, &p, &scales, err));
    const size_t row_bytes = dtype_row_bytes(type, p.transposed ? p.rows : spec->n_in);
    const size_t skipped = p.transposed ? dtype_row_bytes(type, p.first) : p.first * row_bytes;
    *out = (struct weight_src){
        .dtype = type,
        .data = p.t->data + p.i * p.rows * dtype_row_bytes(type, spec->n_in) + skipped,
        .n_out = p.n,
        .n_in = spec->n_in,
        .row_bytes = row_bytes,
        .transposed = p.transposed,
        .scales = scales,
    };
    return OK;
}

enum status weights_matrix(struct weights *w, const struct matrix_spec *spec,
                           struct weight_src *out, struct err *err)
{
    char name[TENSOR_NAME_BYTES_MAX];
    if (w->dummy) {
        weights_dummy_matrix(w, spec, out);
        return OK;
    }
    const int place = find_place(w, spec, name);
    return place < 0 ? missing(w, spec, err) : take_matrix(w, spec, name, place, out, err);
}

/* Some files have a leading dimension of 1. */
static bool is_vector(const struct weights_tensor *t, size_t n)
{
    for (uint32_t d = 0; d + 1 < t->n_dims; d++)
        if (t->shape[d] != 1) return false;
    return t->n_dims > 0 && t->shape[t->n_dims - 1] == n;
}

enum status weights_vector(struct weights *w, const char *name, size_t n, float **out,
                           struct err *err)
{
    char in_file[TENSOR_NAME_BYTES_MAX];
    if (w->dummy) {
        weights_dummy_vector(name, n, out);
        return OK;
    }
    const struct weights_tensor *t = weights_take(w, name);
    tensor_names_in_file(&w->names, name, in_file);
    if (!t) return err_field(err, ERR_NOT_FOUND, in_file, "tensor %s is missing", in_file);
    if (!is_vector(t, n)) return wrong_shape(t, (uint64_t[]){ n }, 1, err);
    TRY(check_type(t, err));
    if (dtype_block((enum dtype)t->dtype) != 1 || t->dtype == DTYPE_F8_E4M3)
        return err_field(err, ERR_UNSUPPORTED, in_file,
                         "tensor %s is a vector of type %s, which is not supported", in_file,
                         t->type_name);
    float *v = mem_aligned(64, n * sizeof *v);
    dtype_to_f32((enum dtype)t->dtype, t->data, v, n);
    *out = v;
    return OK;
}
