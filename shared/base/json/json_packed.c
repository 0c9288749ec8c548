/* json_packed.c - see json_packed.h: packs while json_check.c reads the text, and finds the arrays
 * in the tree afterwards. Thread: the caller's. */
#include "shared/base/json/json_packed.h"

#include <string.h>

#include "shared/base/json/json_check.h"
#include "shared/base/mem.h"

struct json_packer {
    const struct json_limits *limits;
    struct json_packed *out;
    struct err *err;
    size_t n_values;      /* that are in the tree */
    unsigned seen;        /* a bit for each of packed_names that had its member */
    int name;             /* in packed_names, of the member being read; -1: another one */
    bool is_list;         /* that member is an array */
    uint32_t n_children;  /* of that array, so far */
    size_t depth;         /* of the array being packed; 0: none */
    char *begin;          /* its first byte behind the bracket */
    struct json_ints now; /* it; n counts those kept */
    size_t n_all, cap;    /* integers met, room in now.v */
};

/* ---- integers ---- */

/* Returns whether `text` is an integer of 32 bits, without fraction and exponent. */
static bool is_int32(struct str text, int32_t *out)
{
    int64_t v = 0;
    bool minus = text.n && text.p[0] == '-';
    if (text.n == 0 || text.n > 11) return false;
    for (size_t i = minus; i < text.n; i++) {
        if (text.p[i] < '0' || text.p[i] > '9') return false;
        v = v * 10 + (text.p[i] - '0');
    }
    if (minus) v = -v;
    *out = (int32_t)v;
    return text.n > minus && v >= INT32_MIN && v <= INT32_MAX;
}

static void begin_array(struct json_packer *p, size_t depth, const char *bracket)
{
    p->depth = depth;
    p->begin = (char *)bracket + 1;
    p->now = (struct json_ints){ .name = (uint32_t)p->name,
                                 .child = p->n_children,
                                 .is_child = depth > 1 };
    p->n_all = p->cap = 0;
}

/* Keeps one more integer. With keep_last there is room for twice n_ints, and the older half goes
 * when it is full. */
static enum status add_int(struct json_packer *p, int32_t v)
{
    size_t max = p->limits->n_ints;
    p->n_all++;
    if (p->n_all > max && !p->limits->keep_last)
        return err_field(p->err, ERR_TOO_LONG, p->limits->packed_names[p->name],
                         "%s has more than %zu integers", p->limits->packed_names[p->name], max);
    if (p->now.n == 2 * max) {
        memmove(p->now.v, p->now.v + max, max * sizeof *p->now.v);
        p->now.n = max;
    }
    if (p->now.n == p->cap) {
        p->cap = p->cap ? 2 * p->cap : 4;
        p->now.v = mem_realloc(p->now.v, p->cap, sizeof *p->now.v);
    }
    p->now.v[p->now.n++] = v;
    return OK;
}

static enum status count_values(struct json_packer *p, size_t n)
{
    p->n_values += n;
    if (p->n_values <= p->limits->n_values) return OK;
    return err_set(p->err, ERR_INVALID,
                   "the request has more than %zu JSON values beside its token ids",
                   p->limits->n_values);
}

/* Something else than an integer is in the array: its elements go into the tree. */
static enum status give_up(struct json_packer *p)
{
    mem_free(p->now.v);
    p->now.v = NULL;
    p->depth = 0;
    return count_values(p, p->n_all);
}

/* ---- events ---- */

static void on_name(void *arg, size_t depth, struct str name)
{
    struct json_packer *p = arg;
    if (depth != 1) return;
    p->name = -1;
    for (int i = 0; i < JSON_PACKED_NAMES_MAX && p->limits->packed_names[i]; i++) {
        if (p->seen >> i & 1 || !str_eq_c(name, p->limits->packed_names[i])) continue;
        p->seen |= 1u << i;
        p->name = i;
    }
}

static enum status on_value(void *arg, size_t depth, struct str text)
{
    struct json_packer *p = arg;
    bool array = text.p[0] == '[', child = depth == 2 && p->name >= 0 && p->is_list;
    int32_t v;
    if (p->depth && is_int32(text, &v)) {
        p->n_children += child;
        return add_int(p, v);
    }
    if (p->depth) TRY(give_up(p));
    TRY(count_values(p, 1));
    if (depth == 1) {
        p->is_list = array;
        p->n_children = 0;
    }
    if (array && p->name >= 0 && (depth == 1 || child)) begin_array(p, depth, text.p);
    p->n_children += child;
    return OK;
}

static void on_close(void *arg, size_t depth, const char *end)
{
    struct json_packer *p = arg;
    struct json_packed *out = p->out;
    if (!p->depth || depth != p->depth) return;
    p->depth = 0;
    if (p->n_all == 0) return;
    size_t extra = p->now.n > p->limits->n_ints ? p->now.n - p->limits->n_ints : 0;
    p->now.n -= extra;
    memmove(p->now.v, p->now.v + extra, p->now.n * sizeof *p->now.v);
    memset(p->begin, ' ', (size_t)(end - p->begin));
    if (out->n_arrays == out->cap) {
        out->cap = out->cap ? 2 * out->cap : 4;
        out->arrays = mem_realloc(out->arrays, out->cap, sizeof *out->arrays);
    }
    out->arrays[out->n_arrays++] = p->now;
    p->now.v = NULL;
}

/* ---- the tree ---- */

/* Finds the empty arrays that the packed ones left. Those of one member are in order, and the
 * document is searched once for a member: a stranger chooses how many of each there are. */
static void find_arrays(const cJSON *doc, const struct json_limits *limits,
                        struct json_packed *packed)
{
    const cJSON *child = NULL;
    uint32_t n = 0;
    for (size_t i = 0; i < packed->n_arrays; i++) {
        struct json_ints *a = &packed->arrays[i];
        bool same = a->is_child && i > 0 && packed->arrays[i - 1].is_child &&
                    packed->arrays[i - 1].name == a->name;
        if (!same) {
            const cJSON *list = cJSON_GetObjectItemCaseSensitive(doc,
                                                                 limits->packed_names[a->name]);
            if (!a->is_child) {
                a->array = list;
                continue;
            }
            child = list ? list->child : NULL;
            n = 0;
        }
        for (; child && n < a->child; n++) child = child->next;
        a->array = child;
    }
}

enum status json_parse_packed(struct buf *text, const struct json_limits *limits, cJSON **out,
                              struct json_packed *packed, struct err *err)
{
    struct json_packer p = { .limits = limits, .out = packed, .err = err, .name = -1 };
    const struct json_events events = {
        .name = on_name, .value = on_value, .close = on_close, .arg = &p
    };
    enum status st = json_check(buf_str(text), false, &events, err);
    mem_free(p.now.v);
    if (st != OK) return st;
    cJSON *doc = cJSON_ParseWithLength(text->data, text->len);
    if (!doc)
        return err_set(err, ERR_NOMEM, "not enough memory for a JSON document of %zu bytes",
                       text->len);
    find_arrays(doc, limits, packed);
    *out = doc;
    return OK;
}

/* An array that was packed is empty in the tree; no other one is looked for. */
static struct json_ints *find(const struct json_packed *p, const cJSON *array)
{
    if (!array || array->child) return NULL;
    for (size_t k = 0; k < p->n_arrays; k++) {
        struct json_ints *a = &p->arrays[(p->next + k) % p->n_arrays];
        if (a->array == array && a->v) return a;
    }
    return NULL;
}

bool json_packed_has(const struct json_packed *p, const cJSON *array)
{
    return find(p, array) != NULL;
}

bool json_packed_take(struct json_packed *p, const cJSON *array, int32_t **v, size_t *n)
{
    struct json_ints *a = find(p, array);
    if (!a) return false;
    *v = a->v;
    *n = a->n;
    a->v = NULL;
    p->next = (size_t)(a - p->arrays) + 1;
    return true;
}

void json_packed_release(struct json_packed *p)
{
    for (size_t i = 0; i < p->n_arrays; i++) mem_free(p->arrays[i].v);
    mem_free(p->arrays);
    *p = (struct json_packed){ 0 };
}

enum status json_parse_bounded(struct str text, size_t n_values, cJSON **out, struct err *err)
{
    const struct json_limits limits = { .n_values = n_values };
    struct json_packed packed = { 0 };
    struct buf copy = { 0 };
    buf_add_str(&copy, text);
    enum status st = json_parse_packed(&copy, &limits, out, &packed, err);
    json_packed_release(&packed);
    buf_release(&copy);
    if (st != ERR_INVALID) return st;
    return err_set(err, st, "it has more than %zu JSON values", n_values);
}
