/* gguf_split.c - joins the files of a split model. The keys are those of llama.cpp's splitter:
 * split.no, split.count, split.tensors.count. Thread: loading. */
#include "shared/model/load/gguf_split.h"

#include <ctype.h>
#include <inttypes.h>
#include <string.h>

#include "shared/base/buf.h"
#include "shared/base/mem.h"

enum { FILES_MAX = 65535, DIGITS = 5 };

static const char FIRST[] = "-00001-of-", SUFFIX[] = ".gguf";

uint32_t gguf_split_count(struct str path)
{
    const size_t first = sizeof FIRST - 1, suffix = sizeof SUFFIX - 1,
                 tail = first + DIGITS + suffix;
    uint32_t n = 0;
    if (path.n < tail || !str_ends(path, SUFFIX) ||
        memcmp(path.p + path.n - tail, FIRST, first) != 0)
        return 0;
    for (const char *p = path.p + path.n - suffix - DIGITS; p < path.p + path.n - suffix; p++) {
        if (!isdigit((unsigned char)*p)) return 0;
        n = n * 10 + (uint32_t)(*p - '0');
    }
    return n;
}

/* Name of file i (from 0) of `count`; the first is at `path`. */
static void name_of(const char *path, uint32_t i, uint32_t count, struct buf *out)
{
    size_t stem = strlen(path) - (sizeof FIRST - 1) - DIGITS - (sizeof SUFFIX - 1);
    buf_clear(out);
    buf_printf(out, "%.*s-%0*" PRIu32 "-of-%0*" PRIu32 "%s", (int)stem, path, DIGITS, i + 1, DIGITS,
               count, SUFFIX);
}

static enum status check_place(const struct gguf *g, uint32_t i, uint32_t count, struct err *err)
{
    uint64_t no = UINT64_MAX, n = 0;
    TRY(gguf_get_u64(g, "split.no", 0, FILES_MAX, &no, err));
    TRY(gguf_get_u64(g, "split.count", 0, FILES_MAX, &n, err));
    if (no == i && n == count) return OK;
    return err_field(err, ERR_FORMAT, "split.no",
                     "it does not say that it is file %" PRIu32 " of %" PRIu32 " of a model", i + 1,
                     count);
}

static void add_tensors(struct gguf *to, struct gguf *from)
{
    to->others = mem_realloc(to->others, to->n_others + 1, sizeof *to->others);
    to->others[to->n_others++] = from;
    if (from->n_tensors == 0) return;
    to->tensors = mem_realloc(to->tensors, to->n_tensors + from->n_tensors, sizeof *to->tensors);
    memcpy(to->tensors + to->n_tensors, from->tensors, from->n_tensors * sizeof *from->tensors);
    to->n_tensors += from->n_tensors;
}

static enum status check_tensors(const struct gguf *g, struct err *err)
{
    uint64_t n = g->n_tensors;
    struct map names = { 0 };
    enum status st = gguf_get_u64(g, "split.tensors.count", 0, UINT64_MAX, &n, err);
    if (st == OK && n != g->n_tensors)
        st = err_field(err, ERR_FORMAT, "split.tensors.count",
                       "the files hold %zu tensors, split.tensors.count says %" PRIu64,
                       g->n_tensors, n);
    for (size_t i = 0; i < g->n_tensors && st == OK; i++)
        if (map_put(&names, g->tensors[i].name, &g->tensors[i]))
            st = err_set(err, ERR_FORMAT, "tensor %.*s is in two files",
                         STR_ARG(str_sub(g->tensors[i].name, 0, 128)));
    map_release(&names);
    return st;
}

enum status gguf_split_join(struct gguf *first, const char *path, struct err *err)
{
    uint64_t count = 0, no = 0;
    struct buf name = { 0 };
    enum status st = OK;
    TRY(gguf_get_u64(first, "split.count", 0, FILES_MAX, &count, err));
    TRY(gguf_get_u64(first, "split.no", 0, FILES_MAX, &no, err));
    if (count <= 1) return OK;
    if (no != 0)
        return err_field(err, ERR_CONFIG, "model",
                         "%s is file %" PRIu64 " of %" PRIu64 " of a model: name the first", path,
                         no + 1, count);
    if (gguf_split_count(str_of(path)) != count)
        return err_field(err, ERR_CONFIG, "model",
                         "%s is the first of %" PRIu64
                         " files of a model, and its name does not end with %s%05" PRIu64 "%s: "
                         "the others cannot be found",
                         path, count, FIRST, count, SUFFIX);
    for (uint32_t i = 1; i < count && st == OK; i++) {
        struct gguf *next = NULL;
        name_of(path, i, (uint32_t)count, &name);
        st = gguf_open_alone(name.data, &next, err);
        if (st != OK) break;
        add_tensors(first, next);
        st = check_place(next, i, (uint32_t)count, err);
        if (st != OK) err_prefix(err, "%s: ", name.data);
    }
    buf_release(&name);
    return st == OK ? check_tensors(first, err) : st;
}
