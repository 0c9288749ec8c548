/* safetensors.c - header parser of one file, and the index of a sharded folder. Thread: loading. */
#include "shared/model/load/safetensors.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/json/json.h"

#define HEADER_MAX ((uint64_t)100000000)  /* the format's limit */
#define EXACT_MAX  ((double)(1ull << 53)) /* JSON numbers are doubles: exact up to this */

enum { TENSOR_NAME_MAX = 1024, INDEX_MAX = 64 << 20, SHARDS_MAX = 4096 };

/* Bits per element; sub-byte and complex types are sized so that files holding them can be opened.
 * Older Paddle exports call the bits of bf16 "U16". */
static const struct {
    const char *name;
    uint32_t bits;
    int dtype;
} TYPES[] = {
    { "BF16", 16, DTYPE_BF16 },
    { "F16", 16, DTYPE_F16 },
    { "F32", 32, DTYPE_F32 },
    { "BOOL", 8, -1 },
    { "U8", 8, -1 },
    { "I8", 8, -1 },
    { "F8_E4M3", 8, DTYPE_F8_E4M3 },
    { "F8_E5M2", 8, -1 },
    { "F8_E8M0", 8, -1 },
    { "F8_E4M3FNUZ", 8, -1 },
    { "F8_E5M2FNUZ", 8, -1 },
    { "F4", 4, -1 },
    { "F6_E2M3", 6, -1 },
    { "F6_E3M2", 6, -1 },
    { "I16", 16, -1 },
    { "U16", 16, DTYPE_BF16 },
    { "I32", 32, -1 },
    { "U32", 32, -1 },
    { "I64", 64, -1 },
    { "U64", 64, -1 },
    { "F64", 64, -1 },
    { "C64", 64, -1 },
};

static enum status fault(struct err *err, const char *name, const char *what)
{
    return err_field(err, ERR_FORMAT, name, "tensor %s: %s", name, what);
}

static bool whole_number(const cJSON *v, uint64_t *out)
{
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= 0) || v->valuedouble > EXACT_MAX) return false;
    *out = (uint64_t)v->valuedouble;
    return (double)*out == v->valuedouble;
}

static enum status read_shape(const cJSON *o, struct safetensors_tensor *t, uint64_t *n_elements,
                              struct err *err)
{
    const cJSON *shape = json_member(o, "shape"), *dim;
    if (!cJSON_IsArray(shape)) return fault(err, t->name, "\"shape\" is not an array");
    *n_elements = 1;
    cJSON_ArrayForEach (dim, shape) {
        if (t->n_dims == SAFETENSORS_DIMS_MAX)
            return fault(err, t->name, "it has more than 8 dimensions");
        uint64_t n;
        if (!whole_number(dim, &n))
            return fault(err, t->name, "\"shape\" holds something that is not a size");
        if (__builtin_mul_overflow(*n_elements, n, n_elements))
            return fault(err, t->name, "the shape is larger than any memory");
        t->shape[t->n_dims++] = n;
    }
    return OK;
}

/* Reads one entry of the header. data_offsets is [begin, end) within the buffer `data` of
 * `bytes`. */
static enum status read_tensor(struct arena *a, const cJSON *o, const uint8_t *data, size_t bytes,
                               struct safetensors_tensor *t, struct err *err)
{
    size_t name_len = strlen(o->string);
    if (name_len == 0 || name_len > TENSOR_NAME_MAX)
        return err_set(err, ERR_FORMAT, "a tensor name is empty or over %d bytes long",
                       TENSOR_NAME_MAX);
    t->name = arena_strndup(a, o->string, name_len);
    if (!cJSON_IsObject(o)) return fault(err, t->name, "its entry is not an object");
    const cJSON *type = json_member(o, "dtype");
    size_t i = 0;
    if (!cJSON_IsString(type)) return fault(err, t->name, "\"dtype\" is not a string");
    while (i < COUNT_OF(TYPES) && strcmp(TYPES[i].name, type->valuestring) != 0) i++;
    if (i == COUNT_OF(TYPES)) return fault(err, t->name, "its dtype does not exist");
    t->type_name = TYPES[i].name;
    t->dtype = TYPES[i].dtype;

    uint64_t n = 0, bits, begin, end;
    TRY(read_shape(o, t, &n, err));
    const cJSON *range = json_member(o, "data_offsets");
    if (!cJSON_IsArray(range) || cJSON_GetArraySize(range) != 2 ||
        !whole_number(cJSON_GetArrayItem(range, 0), &begin) ||
        !whole_number(cJSON_GetArrayItem(range, 1), &end))
        return fault(err, t->name, "\"data_offsets\" is not a pair of positions");
    if (begin > end || end > bytes)
        return fault(err, t->name,
                     "its data lies beyond the end of the file (an incomplete download?)");
    if (__builtin_mul_overflow(n, (uint64_t)TYPES[i].bits, &bits) || bits % 8 != 0 ||
        end - begin != bits / 8)
        return fault(err, t->name, "the length of its data does not fit its shape and dtype");
    t->data = data + begin;
    t->bytes = (size_t)(end - begin);
    return OK;
}

static int by_position(const void *a, const void *b)
{
    const struct safetensors_tensor *const *x = a, *const *y = b;
    if ((*x)->data != (*y)->data) return (*x)->data < (*y)->data ? -1 : 1;
    return ((*x)->bytes > (*y)->bytes) - ((*x)->bytes < (*y)->bytes); /* empty tensors first */
}

static enum status check_tiling(const struct safetensors *s, const uint8_t *data, size_t bytes,
                                struct err *err)
{
    const struct safetensors_tensor **sorted = MEM_ARRAY(const struct safetensors_tensor *,
                                                         s->n_tensors);
    for (size_t i = 0; i < s->n_tensors; i++) sorted[i] = &s->tensors[i];
    if (s->n_tensors > 0) qsort(sorted, s->n_tensors, sizeof *sorted, by_position);
    size_t at = 0;
    enum status st = OK;
    for (size_t i = 0; i < s->n_tensors && st == OK; i++) {
        size_t begin = (size_t)(sorted[i]->data - data);
        if (begin != at)
            st = fault(err, sorted[i]->name,
                       begin < at ? "its data overlaps that of another tensor"
                                  : "there is a hole before its data");
        at = begin + sorted[i]->bytes;
    }
    mem_free(sorted);
    if (st == OK && at != bytes)
        st = err_set(err, ERR_FORMAT, "the tensors end %zu bytes before the end of the file",
                     bytes - at);
    return st;
}

static enum status check_metadata(const cJSON *o, struct err *err)
{
    const cJSON *v;
    if (!cJSON_IsObject(o)) return err_set(err, ERR_FORMAT, "\"__metadata__\" is not an object");
    cJSON_ArrayForEach (v, o)
        if (!cJSON_IsString(v))
            return err_set(err, ERR_FORMAT,
                           "\"__metadata__\" holds something that is not a string");
    return OK;
}

static enum status read_header(const cJSON *header, const uint8_t *data, size_t bytes,
                               struct safetensors *s, struct err *err)
{
    size_t n = 0;
    const cJSON *o;
    cJSON_ArrayForEach (o, header) n++;
    s->tensors = ARENA_ARRAY(&s->arena, struct safetensors_tensor, n);
    cJSON_ArrayForEach (o, header) {
        if (strcmp(o->string, "__metadata__") == 0) {
            TRY(check_metadata(o, err));
            continue;
        }
        struct safetensors_tensor *t = &s->tensors[s->n_tensors];
        TRY(read_tensor(&s->arena, o, data, bytes, t, err));
        s->n_tensors++;
        if (map_put(&s->by_name, str_of(t->name), t))
            return fault(err, t->name, "the name appears twice");
    }
    return check_tiling(s, data, bytes, err);
}

static enum status parse(struct str in, struct safetensors *s, struct err *err)
{
    const uint8_t *p = (const uint8_t *)in.p;
    uint64_t n = 0;
    if (in.n < 9)
        return err_set(err, ERR_FORMAT, "this is not a safetensors file: it has %zu bytes", in.n);
    for (unsigned i = 0; i < 8; i++) n |= (uint64_t)p[i] << (8 * i);
    if (n > HEADER_MAX)
        return err_set(
            err, ERR_FORMAT,
            "this is not a safetensors file: a header of %" PRIu64 " bytes is over the limit", n);
    if (n > in.n - 8) return err_set(err, ERR_FORMAT, "the file ends inside its header");
    if (n == 0 || p[8] != '{')
        return err_set(err, ERR_FORMAT,
                       "this is not a safetensors file: the header is not a JSON object");
    cJSON *header;
    TRY(json_parse((struct str){ in.p + 8, (size_t)n }, true, &header, err));
    enum status st = cJSON_IsObject(header)
                         ? read_header(header, p + 8 + n, in.n - 8 - (size_t)n, s, err)
                         : err_set(err, ERR_FORMAT, "the header is not a JSON object");
    cJSON_Delete(header);
    return st;
}

enum status safetensors_parse(struct str bytes, struct safetensors **out, struct err *err)
{
    struct safetensors *s = MEM_NEW(struct safetensors);
    arena_init(&s->arena);
    enum status st = parse(bytes, s, err);
    if (st != OK) {
        safetensors_close(s);
        return st;
    }
    *out = s;
    return OK;
}

static enum status safetensors_open(const char *path, struct safetensors **out, struct err *err)
{
    struct file_map file;
    TRY(file_map_open(path, &file, err));
    enum status st = safetensors_parse((struct str){ (const char *)file.data, file.bytes }, out,
                                       err);
    if (st != OK) {
        file_map_close(&file);
        return err_prefix(err, "%s: ", path);
    }
    (*out)->file = file;
    return OK;
}

void safetensors_close(struct safetensors *s)
{
    if (!s) return;
    map_release(&s->by_name);
    arena_release(&s->arena);
    file_map_close(&s->file);
    mem_free(s);
}

/* ---- folders ---- */

/* Opens the file `name` of the folder unless it is open. Refuses a name with a path in it, which
 * could leave the folder. */
static enum status open_shard(const char *folder, const char *name, struct safetensors_set *set,
                              struct map *open_files, struct safetensors **out, struct err *err)
{
    *out = map_get(open_files, str_of(name));
    if (*out) return OK;
    if (name[0] == 0 || name[0] == '.' || strchr(name, '/'))
        return err_set(err, ERR_FORMAT, "\"%s\" is not the name of a file in the model's folder",
                       name);
    if (set->n_files == SHARDS_MAX)
        return err_set(err, ERR_FORMAT, "more than %d files are named", SHARDS_MAX);
    struct buf path = { 0 };
    buf_printf(&path, "%s/%s", folder, name);
    enum status st = safetensors_open(path.data, out, err);
    buf_release(&path);
    if (st != OK) return st;
    set->files = mem_realloc(set->files, set->n_files + 1, sizeof *set->files);
    set->files[set->n_files++] = *out;
    map_put(open_files, str_of(name), *out);
    return OK;
}

static enum status open_indexed(const char *folder, const cJSON *index, struct safetensors_set *set,
                                struct map *open_files, struct err *err)
{
    const cJSON *names = json_member(index, "weight_map"), *v;
    size_t n = 0;
    if (!cJSON_IsObject(names)) return err_set(err, ERR_FORMAT, "\"weight_map\" is not an object");
    cJSON_ArrayForEach (v, names) n++;
    set->tensors = MEM_ARRAY(const struct safetensors_tensor *, n);
    cJSON_ArrayForEach (v, names) {
        struct safetensors *file;
        if (!cJSON_IsString(v)) return fault(err, v->string, "\"weight_map\" names no file for it");
        TRY(open_shard(folder, v->valuestring, set, open_files, &file, err));
        const struct safetensors_tensor *t = map_get(&file->by_name, str_of(v->string));
        if (!t)
            return err_field(err, ERR_FORMAT, v->string,
                             "tensor %s is not in %s, which the index names", v->string,
                             v->valuestring);
        set->tensors[set->n_tensors++] = t;
    }
    return OK;
}

static enum status open_single(const char *folder, struct safetensors_set *set,
                               struct map *open_files, struct err *err)
{
    struct safetensors *file;
    enum status st = open_shard(folder, "model.safetensors", set, open_files, &file, err);
    if (st == ERR_NOT_FOUND)
        return err_set(err, st,
                       "%s holds no weights: neither model.safetensors nor "
                       "model.safetensors.index.json is there, and no .gguf file",
                       folder);
    TRY(st);
    set->tensors = MEM_ARRAY(const struct safetensors_tensor *, file->n_tensors);
    for (; set->n_tensors < file->n_tensors; set->n_tensors++)
        set->tensors[set->n_tensors] = &file->tensors[set->n_tensors];
    return OK;
}

enum status safetensors_set_open(const char *folder, struct safetensors_set *out, struct err *err)
{
    struct safetensors_set set = { 0 };
    struct map open_files = { 0 };
    struct buf path = { 0 };
    cJSON *index = NULL;
    enum status st;
    buf_printf(&path, "%s/model.safetensors.index.json", folder);
    if (file_is_regular(path.data)) {
        struct buf text = { 0 };
        st = file_read(path.data, INDEX_MAX, &text, err);
        if (st == OK) st = json_parse(buf_str(&text), true, &index, err);
        if (st == OK) st = open_indexed(folder, index, &set, &open_files, err);
        if (st != OK) err_prefix(err, "%s: ", path.data);
        buf_release(&text);
    } else {
        st = open_single(folder, &set, &open_files, err);
    }
    cJSON_Delete(index);
    buf_release(&path);
    map_release(&open_files);
    if (st != OK) safetensors_set_close(&set);
    else *out = set;
    return st;
}

void safetensors_set_close(struct safetensors_set *s)
{
    for (size_t i = 0; i < s->n_files; i++) safetensors_close(s->files[i]);
    mem_free(s->files);
    mem_free(s->tensors);
    *s = (struct safetensors_set){ 0 };
}
