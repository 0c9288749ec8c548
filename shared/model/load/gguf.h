/* gguf.h - reader of GGUF files (versions 2 and 3, little endian): metadata and tensors.
 *
 * The file is untrusted: every length, count, nesting depth, type, shape and offset is checked when
 * it is opened, so the accessors below cannot leave the mapping. Strings and tensor data are
 * borrowed from it until gguf_close.
 *
 * Thread: open on any; read-only afterwards. */
#ifndef BATON_MODEL_LOAD_GGUF_H
#define BATON_MODEL_LOAD_GGUF_H

#include "kernels/dtype.h"
#include "shared/base/map.h"
#include "shared/model/load/file_map.h"

enum { GGUF_DIMS_MAX = 4 };

enum gguf_type {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64,
    GGUF_TYPE_COUNT
};

/* One metadata pair. For a scalar or string n is 1; for an array n counts elements of type
 * `elem`. */
struct gguf_kv {
    struct str key;
    enum gguf_type type, elem;
    uint64_t n;
    const uint8_t *value; /* first byte of the value; for arrays of the first element */
};

struct gguf_tensor {
    struct str name;
    uint32_t n_dims;
    uint64_t ne[GGUF_DIMS_MAX]; /* ne[0] is contiguous (inputs of a matrix); unused: 1 */
    const char *type_name;      /* "Q4_K" */
    int dtype;                  /* enum dtype; -1: not supported */
    const uint8_t *data;
    size_t bytes;
};

struct gguf {
    struct gguf_kv *kvs;
    size_t n_kvs;
    struct gguf_tensor *tensors;
    size_t n_tensors;
    struct map kv_by_key; /* private, as all below */
    struct file_map file;
    /* The other files of a model in several; `tensors` includes theirs. */
    struct gguf **others;
    size_t n_others;
};

/* Opens a file and, if it is the first of several (gguf_split.h), the others. */
enum status gguf_open(const char *path, struct gguf **out, struct err *err) MUST_CHECK;
/* Opens this file only. */
enum status gguf_open_alone(const char *path, struct gguf **out, struct err *err) MUST_CHECK;
/* Parses `bytes`, which are borrowed until gguf_close. */
enum status gguf_parse(struct str bytes, struct gguf **out, struct err *err) MUST_CHECK;
void gguf_close(struct gguf *g);

const struct gguf_kv *gguf_find(const struct gguf *g, const char *key); /* NULL when absent */

/* Typed values. An absent key leaves *out alone (OK). Another type, or a value outside [min, max],
 * is ERR_INVALID and names the key. Integers may be stored in any integer type, floats in either
 * float type or as integers. */
enum status gguf_get_u64(const struct gguf *g, const char *key, uint64_t min, uint64_t max,
                         uint64_t *out, struct err *err) MUST_CHECK;
enum status gguf_get_f64(const struct gguf *g, const char *key, double min, double max, double *out,
                         struct err *err) MUST_CHECK;
enum status gguf_get_bool(const struct gguf *g, const char *key, bool *out,
                          struct err *err) MUST_CHECK;
enum status gguf_get_str(const struct gguf *g, const char *key, struct str *out,
                         struct err *err) MUST_CHECK;
/* Arrays: *out is allocated (mem_free), *n its length; NULL and 0 when the key is absent. Strings
 * are borrowed. */
enum status gguf_get_strs(const struct gguf *g, const char *key, struct str **out, size_t *n,
                          struct err *err) MUST_CHECK;
enum status gguf_get_i32s(const struct gguf *g, const char *key, int32_t **out, size_t *n,
                          struct err *err) MUST_CHECK;

#endif
