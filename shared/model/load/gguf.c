/* gguf.c - the GGUF parser. A cursor walks the mapped bytes; nothing is read before its length is
 * checked.
 *
 * Layout: "GGUF", u32 version, u64 n_tensors, u64 n_kv, pairs, tensor infos, padding to
 * general.alignment, data. Thread: loading. */
#include "shared/model/load/gguf.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/mem.h"
#include "shared/model/load/gguf_split.h"

enum {
    KV_MAX = 1 << 16,
    TENSORS_MAX = 1 << 20,
    KEY_MAX = 1 << 16,          /* the format's limit */
    TENSOR_NAME_MAX = 256,      /* ggml allows 64 */
    STRING_BYTES_MAX = 1 << 24, /* chat templates and licences are far smaller */
    ARRAY_DEPTH_MAX = 4,
    ALIGNMENT_DEFAULT = 32,
    ALIGNMENT_MAX = 1 << 20,
    KV_BYTES_MIN = 8 + 4 + 1, /* smallest possible pair and tensor info: bound counts by the
                               * bytes there are */
    TENSOR_BYTES_MIN = 8 + 4 + 8 + 4 + 8
};

/* Sizes are from ggml's published block layouts. dtype -1: the reader accepts the type, the kernels
 * do not support it. */
static const struct {
    uint32_t id, block, bytes;
    int dtype;
    const char *name;
} TENSOR_TYPES[] = {
    { 0, 1, 4, DTYPE_F32, "F32" },
    { 1, 1, 2, DTYPE_F16, "F16" },
    { 2, 32, 18, DTYPE_Q4_0, "Q4_0" },
    { 3, 32, 20, DTYPE_Q4_1, "Q4_1" },
    { 6, 32, 22, DTYPE_Q5_0, "Q5_0" },
    { 7, 32, 24, DTYPE_Q5_1, "Q5_1" },
    { 8, 32, 34, DTYPE_Q8_0, "Q8_0" },
    { 9, 32, 36, -1, "Q8_1" },
    { 10, 256, 84, DTYPE_Q2_K, "Q2_K" },
    { 11, 256, 110, DTYPE_Q3_K, "Q3_K" },
    { 12, 256, 144, DTYPE_Q4_K, "Q4_K" },
    { 13, 256, 176, DTYPE_Q5_K, "Q5_K" },
    { 14, 256, 210, DTYPE_Q6_K, "Q6_K" },
    { 15, 256, 292, -1, "Q8_K" },
    { 16, 256, 66, -1, "IQ2_XXS" },
    { 17, 256, 74, -1, "IQ2_XS" },
    { 18, 256, 98, -1, "IQ3_XXS" },
    { 19, 256, 50, -1, "IQ1_S" },
    { 20, 32, 18, DTYPE_IQ4_NL, "IQ4_NL" },
    { 21, 256, 110, -1, "IQ3_S" },
    { 22, 256, 82, -1, "IQ2_S" },
    { 23, 256, 136, DTYPE_IQ4_XS, "IQ4_XS" },
    { 24, 1, 1, -1, "I8" },
    { 25, 1, 2, -1, "I16" },
    { 26, 1, 4, -1, "I32" },
    { 27, 1, 8, -1, "I64" },
    { 28, 1, 8, -1, "F64" },
    { 29, 256, 56, -1, "IQ1_M" },
    { 30, 1, 2, DTYPE_BF16, "BF16" },
    { 34, 256, 54, -1, "TQ1_0" },
    { 35, 256, 66, -1, "TQ2_0" },
    { 39, 32, 17, -1, "MXFP4" },
};

static const uint8_t TYPE_BYTES[GGUF_TYPE_COUNT] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
static const char *const TYPE_NAMES[GGUF_TYPE_COUNT] = { "u8",  "i8",  "u16",  "i16",    "u32",
                                                         "i32", "f32", "bool", "string", "array",
                                                         "u64", "i64", "f64" };

struct cursor {
    const uint8_t *start, *p, *end;
    struct err *err;
};

static size_t left(const struct cursor *c) { return (size_t)(c->end - c->p); }
static size_t at(const struct cursor *c) { return (size_t)(c->p - c->start); }

static uint64_t load_le(const uint8_t *p, size_t n)
{
    uint64_t v = 0;
    for (size_t i = 0; i < n; i++) v |= (uint64_t)p[i] << (8 * i);
    return v;
}

static enum status cut_short(struct cursor *c, const char *what)
{
    err_set(c->err, ERR_FORMAT, "the file ends at byte %zu inside %s", (size_t)(c->end - c->start),
            what);
    return ERR_FORMAT; /* a constant: the compiler sees that OK means outputs are set */
}

static enum status take_uint(struct cursor *c, size_t n, const char *what, uint64_t *out)
{
    if (left(c) < n) return cut_short(c, what);
    *out = load_le(c->p, n);
    c->p += n;
    return OK;
}

static enum status take_u32(struct cursor *c, const char *what, uint32_t *out)
{
    uint64_t v;
    TRY(take_uint(c, 4, what, &v));
    *out = (uint32_t)v;
    return OK;
}

static enum status take_string(struct cursor *c, size_t max, const char *what, struct str *out)
{
    uint64_t n;
    TRY(take_uint(c, 8, what, &n));
    if (n > max)
        return err_set(c->err, ERR_FORMAT,
                       "%s at byte %zu is %" PRIu64 " bytes long, over the limit of %zu", what,
                       at(c), n, max);
    if (n > left(c)) return cut_short(c, what);
    *out = (struct str){ (const char *)c->p, (size_t)n };
    c->p += n;
    return OK;
}

/* ---- metadata ---- */

static enum status take_type(struct cursor *c, struct str key, enum gguf_type *out)
{
    uint32_t t;
    TRY(take_u32(c, "a metadata type", &t));
    if (t >= GGUF_TYPE_COUNT)
        return err_set(c->err, ERR_FORMAT,
                       "metadata %.*s: type %" PRIu32 " at byte %zu does not exist",
                       (int)(key.n < 64 ? key.n : 64), key.p, t, at(c) - 4);
    *out = (enum gguf_type)t;
    return OK;
}

static enum status skip_scalars(struct cursor *c, enum gguf_type type, uint64_t n)
{
    if (type == GGUF_STRING) {
        for (uint64_t i = 0; i < n; i++) {
            struct str s;
            TRY(take_string(c, STRING_BYTES_MAX, "a metadata string", &s));
        }
        return OK;
    }
    if (n > left(c) / TYPE_BYTES[type]) return cut_short(c, "a metadata array");
    if (type == GGUF_BOOL)
        for (uint64_t i = 0; i < n; i++)
            if (c->p[i] > 1)
                return err_set(c->err, ERR_FORMAT, "a bool at byte %zu is %u", at(c) + (size_t)i,
                               c->p[i]);
    c->p += (size_t)n * TYPE_BYTES[type];
    return OK;
}

/* Skips an array whose header (elem, n) has been read. Nested arrays are walked with a stack of
 * counts. */
static enum status skip_array(struct cursor *c, struct str key, enum gguf_type elem, uint64_t n)
{
    uint64_t todo[ARRAY_DEPTH_MAX];
    size_t depth = 0;
    if (elem != GGUF_ARRAY) return skip_scalars(c, elem, n);
    todo[depth++] = n;
    while (depth > 0) {
        if (todo[depth - 1] == 0) {
            depth--;
            continue;
        }
        todo[depth - 1]--;
        enum gguf_type inner;
        uint64_t m;
        TRY(take_type(c, key, &inner));
        TRY(take_uint(c, 8, "a metadata array", &m));
        if (inner != GGUF_ARRAY) {
            TRY(skip_scalars(c, inner, m));
            continue;
        }
        if (depth == ARRAY_DEPTH_MAX)
            return err_set(c->err, ERR_FORMAT, "metadata %.*s: arrays nested over %d deep",
                           (int)(key.n < 64 ? key.n : 64), key.p, ARRAY_DEPTH_MAX);
        todo[depth++] = m;
    }
    return OK;
}

static enum status take_kv(struct cursor *c, struct gguf_kv *kv)
{
    TRY(take_string(c, KEY_MAX, "a metadata key", &kv->key));
    if (kv->key.n == 0)
        return err_set(c->err, ERR_FORMAT, "an empty metadata key at byte %zu", at(c));
    TRY(take_type(c, kv->key, &kv->type));
    kv->elem = kv->type;
    kv->n = 1;
    if (kv->type != GGUF_ARRAY) {
        kv->value = c->p;
        return skip_scalars(c, kv->type, 1);
    }
    TRY(take_type(c, kv->key, &kv->elem));
    TRY(take_uint(c, 8, "a metadata array", &kv->n));
    kv->value = c->p;
    return skip_array(c, kv->key, kv->elem, kv->n);
}

static enum status take_kvs(struct cursor *c, struct gguf *g, uint64_t n)
{
    if (n > KV_MAX || n > left(c) / KV_BYTES_MIN)
        return err_set(c->err, ERR_FORMAT,
                       "%" PRIu64 " metadata pairs are more than the file can hold", n);
    g->kvs = MEM_ARRAY(struct gguf_kv, (size_t)n);
    for (; g->n_kvs < n; g->n_kvs++) {
        struct gguf_kv *kv = &g->kvs[g->n_kvs];
        TRY(take_kv(c, kv));
        if (map_put(&g->kv_by_key, kv->key, kv))
            return err_set(c->err, ERR_FORMAT, "metadata %.*s appears twice", STR_ARG(kv->key));
    }
    return OK;
}

/* ---- tensors ---- */

static enum status tensor_fault(struct cursor *c, const struct gguf_tensor *t, const char *what)
{
    char name[TENSOR_NAME_MAX + 1];
    memcpy(name, t->name.p, t->name.n);
    name[t->name.n] = 0;
    return err_field(c->err, ERR_FORMAT, name, "tensor %s: %s", name, what);
}

static enum status size_tensor(struct cursor *c, struct gguf_tensor *t, uint32_t type_id)
{
    size_t i = 0;
    while (i < COUNT_OF(TENSOR_TYPES) && TENSOR_TYPES[i].id != type_id) i++;
    if (i == COUNT_OF(TENSOR_TYPES)) {
        char what[64];
        snprintf(what, sizeof what, "ggml type %" PRIu32 " is not known here", type_id);
        return tensor_fault(c, t, what);
    }
    t->type_name = TENSOR_TYPES[i].name;
    t->dtype = TENSOR_TYPES[i].dtype;
    if (t->ne[0] % TENSOR_TYPES[i].block != 0)
        return tensor_fault(c, t, "a row is not a whole number of blocks of its type");
    size_t bytes = (size_t)(t->ne[0] / TENSOR_TYPES[i].block);
    bool over = __builtin_mul_overflow(bytes, (size_t)TENSOR_TYPES[i].bytes, &bytes);
    for (uint32_t d = 1; d < GGUF_DIMS_MAX; d++)
        over |= __builtin_mul_overflow(bytes, (size_t)t->ne[d], &bytes);
    if (over) return tensor_fault(c, t, "the shape is larger than any memory");
    t->bytes = bytes;
    return OK;
}

/* Keeps `offset` in t->data for now: the start of the data section is known only after the last
 * info. */
static enum status take_tensor(struct cursor *c, struct gguf_tensor *t, uint64_t *offset)
{
    uint32_t type_id;
    TRY(take_string(c, TENSOR_NAME_MAX, "a tensor name", &t->name));
    if (t->name.n == 0 || memchr(t->name.p, 0, t->name.n))
        return err_set(c->err, ERR_FORMAT,
                       "a tensor name before byte %zu is empty or holds a zero byte", at(c));
    TRY(take_u32(c, "a tensor's number of dimensions", &t->n_dims));
    if (t->n_dims < 1 || t->n_dims > GGUF_DIMS_MAX)
        return tensor_fault(c, t, "it has no or more than 4 dimensions");
    for (uint32_t d = 0; d < GGUF_DIMS_MAX; d++) t->ne[d] = 1;
    for (uint32_t d = 0; d < t->n_dims; d++) {
        TRY(take_uint(c, 8, "a tensor's shape", &t->ne[d]));
        if (t->ne[d] == 0) return tensor_fault(c, t, "a dimension is 0");
    }
    TRY(take_u32(c, "a tensor's type", &type_id));
    TRY(take_uint(c, 8, "a tensor's offset", offset));
    return size_tensor(c, t, type_id);
}

static int by_address(const void *a, const void *b)
{
    const struct gguf_tensor *const *x = a, *const *y = b;
    return ((*x)->data > (*y)->data) - ((*x)->data < (*y)->data);
}

static enum status check_overlap(struct cursor *c, const struct gguf *g)
{
    const struct gguf_tensor **sorted = MEM_ARRAY(const struct gguf_tensor *, g->n_tensors);
    for (size_t i = 0; i < g->n_tensors; i++) sorted[i] = &g->tensors[i];
    qsort(sorted, g->n_tensors, sizeof *sorted, by_address);
    enum status st = OK;
    for (size_t i = 1; i < g->n_tensors && st == OK; i++)
        if (sorted[i - 1]->data + sorted[i - 1]->bytes > sorted[i]->data)
            st = tensor_fault(c, sorted[i], "its data overlaps that of another tensor");
    mem_free(sorted);
    return st;
}

static enum status place_tensors(struct cursor *c, struct gguf *g, const uint64_t *offsets)
{
    uint64_t align = ALIGNMENT_DEFAULT;
    TRY(gguf_get_u64(g, "general.alignment", 1, ALIGNMENT_MAX, &align, c->err));
    if ((align & (align - 1)) != 0)
        return err_set(c->err, ERR_FORMAT, "general.alignment %" PRIu64 " is not a power of two",
                       align);
    size_t total = (size_t)(c->end - c->start);
    size_t data = (at(c) + (size_t)align - 1) & ~((size_t)align - 1);
    if (g->n_tensors > 0 && data > total) return cut_short(c, "the padding before the tensor data");
    for (size_t i = 0; i < g->n_tensors; i++) {
        struct gguf_tensor *t = &g->tensors[i];
        if (offsets[i] % align != 0)
            return tensor_fault(c, t, "its offset is not a multiple of the alignment");
        if (offsets[i] > total - data || t->bytes > total - data - (size_t)offsets[i])
            return tensor_fault(
                c, t, "its data lies beyond the end of the file (an incomplete download?)");
        t->data = c->start + data + offsets[i];
    }
    return check_overlap(c, g);
}

static enum status take_tensors(struct cursor *c, struct gguf *g, uint64_t n)
{
    if (n > TENSORS_MAX || n > left(c) / TENSOR_BYTES_MIN)
        return err_set(c->err, ERR_FORMAT, "%" PRIu64 " tensors are more than the file can hold",
                       n);
    g->tensors = MEM_ARRAY(struct gguf_tensor, (size_t)n);
    uint64_t *offsets = MEM_ARRAY(uint64_t, (size_t)n);
    struct map names = { 0 };
    enum status st = OK;
    for (; g->n_tensors < n && st == OK; g->n_tensors++) {
        struct gguf_tensor *t = &g->tensors[g->n_tensors];
        st = take_tensor(c, t, &offsets[g->n_tensors]);
        if (st == OK && map_put(&names, t->name, t))
            st = tensor_fault(c, t, "the name appears twice");
    }
    if (st == OK) st = place_tensors(c, g, offsets);
    map_release(&names);
    mem_free(offsets);
    return st;
}

/* ---- the file ---- */

static enum status parse(struct cursor *c, struct gguf *g)
{
    uint32_t version;
    uint64_t n_tensors, n_kvs;
    if (left(c) < 4 || memcmp(c->p, "GGUF", 4) != 0)
        return err_set(c->err, ERR_FORMAT,
                       "this is not a GGUF file; of a model in several files give the folder");
    c->p += 4;
    TRY(take_u32(c, "the header", &version));
    if (version != 0 && (version & 0xffff) == 0)
        return err_set(c->err, ERR_UNSUPPORTED,
                       "the GGUF file is big endian; convert it to little endian");
    if (version != 2 && version != 3)
        return err_set(c->err, ERR_UNSUPPORTED,
                       "GGUF version %" PRIu32 " is not supported (2 and 3 are)", version);
    TRY(take_uint(c, 8, "the header", &n_tensors));
    TRY(take_uint(c, 8, "the header", &n_kvs));
    TRY(take_kvs(c, g, n_kvs));
    return take_tensors(c, g, n_tensors);
}

enum status gguf_parse(struct str bytes, struct gguf **out, struct err *err)
{
    struct gguf *g = MEM_NEW(struct gguf);
    const uint8_t *p = (const uint8_t *)(bytes.n ? bytes.p : "");
    struct cursor c = { .start = p, .p = p, .end = p + bytes.n, .err = err };
    enum status st = parse(&c, g);
    if (st != OK) {
        gguf_close(g);
        return st;
    }
    *out = g;
    return OK;
}

enum status gguf_open_alone(const char *path, struct gguf **out, struct err *err)
{
    struct file_map file;
    TRY(file_map_open(path, &file, err));
    enum status st = gguf_parse((struct str){ (const char *)file.data, file.bytes }, out, err);
    if (st != OK) {
        file_map_close(&file);
        return err_prefix(err, "%s: ", path);
    }
    (*out)->file = file;
    return OK;
}

enum status gguf_open(const char *path, struct gguf **out, struct err *err)
{
    struct gguf *g;
    TRY(gguf_open_alone(path, &g, err));
    enum status st = gguf_split_join(g, path, err);
    if (st != OK) gguf_close(g);
    else *out = g;
    return st;
}

void gguf_close(struct gguf *g)
{
    if (!g) return;
    for (size_t i = 0; i < g->n_others; i++) gguf_close(g->others[i]);
    mem_free(g->others);
    map_release(&g->kv_by_key);
    mem_free(g->kvs);
    mem_free(g->tensors);
    file_map_close(&g->file);
    mem_free(g);
}

/* ---- typed values ---- */

const struct gguf_kv *gguf_find(const struct gguf *g, const char *key)
{
    return map_get(&g->kv_by_key, str_of(key));
}

static enum status wrong_type(const struct gguf_kv *kv, const char *key, const char *want,
                              struct err *err)
{
    return err_field(err, ERR_INVALID, key, "metadata %s is of type %s, not %s", key,
                     TYPE_NAMES[kv->type], want);
}

/* Loads an integer of any type; false for other types. *neg: the value is negative (*out is then in
 * two's complement). */
static bool load_integer(enum gguf_type type, const uint8_t *p, uint64_t *out, bool *neg)
{
    switch (type) {
    case GGUF_U8:
    case GGUF_U16:
    case GGUF_U32:
    case GGUF_U64:
        *out = load_le(p, TYPE_BYTES[type]);
        *neg = false;
        return true;
    case GGUF_I8:
    case GGUF_I16:
    case GGUF_I32:
    case GGUF_I64: {
        unsigned shift = 64 - 8 * (unsigned)TYPE_BYTES[type];
        int64_t v = (int64_t)(load_le(p, TYPE_BYTES[type]) << shift) >> shift;
        *out = (uint64_t)v;
        *neg = v < 0;
        return true;
    }
    default: return false;
    }
}

enum status gguf_get_u64(const struct gguf *g, const char *key, uint64_t min, uint64_t max,
                         uint64_t *out, struct err *err)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    uint64_t v;
    bool neg;
    if (!kv) return OK;
    if (!load_integer(kv->type, kv->value, &v, &neg))
        return wrong_type(kv, key, "a whole number", err);
    if (neg)
        return err_field(err, ERR_INVALID, key, "metadata %s is negative (%" PRId64 ")", key,
                         (int64_t)v);
    if (v < min || v > max)
        return err_field(err, ERR_INVALID, key,
                         "metadata %s is %" PRIu64 ", not between %" PRIu64 " and %" PRIu64, key, v,
                         min, max);
    *out = v;
    return OK;
}

enum status gguf_get_f64(const struct gguf *g, const char *key, double min, double max, double *out,
                         struct err *err)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return OK;
    double v;
    uint64_t whole;
    bool neg;
    if (kv->type == GGUF_F32) {
        uint32_t bits = (uint32_t)load_le(kv->value, 4);
        float f;
        memcpy(&f, &bits, 4);
        v = (double)f;
    } else if (kv->type == GGUF_F64) {
        uint64_t bits = load_le(kv->value, 8);
        memcpy(&v, &bits, 8);
    } else if (load_integer(kv->type, kv->value, &whole, &neg)) {
        v = neg ? (double)(int64_t)whole : (double)whole;
    } else {
        return wrong_type(kv, key, "a number", err);
    }
    if (!(v >= min && v <= max))
        return err_field(err, ERR_INVALID, key, "metadata %s is %g, not between %g and %g", key, v,
                         min, max);
    *out = v;
    return OK;
}

enum status gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct err *err)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return OK;
    if (kv->type != GGUF_BOOL) return wrong_type(kv, key, "bool", err);
    *out = kv->value[0] != 0;
    return OK;
}

enum status gguf_get_str(const struct gguf *g, const char *key, struct str *out, struct err *err)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return OK;
    if (kv->type != GGUF_STRING) return wrong_type(kv, key, "string", err);
    *out = (struct str){ (const char *)kv->value + 8, (size_t)load_le(kv->value, 8) };
    return OK;
}

enum status gguf_get_strs(const struct gguf *g, const char *key, struct str **out, size_t *n,
                          struct err *err)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    *out = NULL;
    *n = 0;
    if (!kv) return OK;
    if (kv->type != GGUF_ARRAY || kv->elem != GGUF_STRING)
        return wrong_type(kv, key, "an array of strings", err);
    *out = MEM_ARRAY(struct str, (size_t)kv->n);
    *n = (size_t)kv->n;
    const uint8_t *p = kv->value;
    for (size_t i = 0; i < *n; i++) {
        (*out)[i] = (struct str){ (const char *)p + 8, (size_t)load_le(p, 8) };
        p += 8 + (*out)[i].n;
    }
    return OK;
}

enum status gguf_get_i32s(const struct gguf *g, const char *key, int32_t **out, size_t *n,
                          struct err *err)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    *out = NULL;
    *n = 0;
    if (!kv) return OK;
    uint64_t v = 0;
    bool neg;
    if (kv->type != GGUF_ARRAY || kv->elem == GGUF_STRING || kv->elem == GGUF_ARRAY)
        return wrong_type(kv, key, "an array of whole numbers", err);
    int32_t *a = MEM_ARRAY(int32_t, (size_t)kv->n);
    for (size_t i = 0; i < kv->n; i++) {
        if (!load_integer(kv->elem, kv->value + i * TYPE_BYTES[kv->elem], &v, &neg) ||
            (int64_t)v != (int32_t)(int64_t)v) {
            mem_free(a);
            return err_field(err, ERR_INVALID, key, "metadata %s[%zu] is not a 32 bit whole number",
                             key, i);
        }
        a[i] = (int32_t)(int64_t)v;
    }
    *out = a;
    *n = (size_t)kv->n;
    return OK;
}
