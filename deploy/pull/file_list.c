/* file_list.c - lists of files, and the checks that every one of them passes. Thread: any. */
#include "deploy/pull/file_list.h"

#include <stdlib.h>
#include <string.h>

#include "shared/base/json/json_packed.h"

enum { COMPONENT_MAX = 255, LIST_VALUES_MAX = 2 << 20, SHOWN_MAX = 80 };

/* What this program itself puts into the folder (folder.h). */
static const char OWN_PREFIX[] = ".baton-pull";

/* ---- names and sums ---- */

bool file_name_is_safe(struct str name)
{
    struct str rest = name, part;
    if (name.n == 0 || name.n > FILE_NAME_MAX) return false;
    for (size_t i = 0; i < name.n; i++)
        if ((unsigned char)name.p[i] < ' ' || name.p[i] == 0x7f || name.p[i] == '\\') return false;
    while (str_split(&rest, '/', &part))
        if (part.n == 0 || part.n > COMPONENT_MAX || str_eq_c(part, ".") || str_eq_c(part, ".."))
            return false;
    return !str_starts(name, OWN_PREFIX);
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

static size_t sum_length(enum sum_kind kind)
{
    return kind == SUM_SHA256 ? 32 : kind == SUM_GIT ? 20 : 0;
}

void sum_read(struct str hex, enum sum_kind kind, struct sum *out)
{
    struct sum s = { .kind = kind };
    *out = (struct sum){ 0 };
    if (kind == SUM_NONE || hex.n != 2 * sum_length(kind)) return;
    for (size_t i = 0; i < hex.n; i++) {
        int digit = hex_digit(hex.p[i]);
        if (digit < 0) return;
        s.bytes[i / 2] = (uint8_t)(s.bytes[i / 2] << 4 | digit);
    }
    *out = s;
}

bool sum_eq(const struct sum *a, const struct sum *b)
{
    return a->kind == b->kind && memcmp(a->bytes, b->bytes, sum_length(a->kind)) == 0;
}

void sum_add(const struct sum *s, struct buf *out)
{
    if (s->kind == SUM_NONE) return;
    buf_add_c(out, s->kind == SUM_SHA256 ? "sha256:" : "git:");
    for (size_t i = 0; i < sum_length(s->kind); i++) buf_printf(out, "%02x", s->bytes[i]);
}

/* ---- the list ---- */

/* A stranger's name as a sentence may show it. */
static void add_shown(struct buf *out, const char *name)
{
    for (size_t i = 0; name[i] && i < SHOWN_MAX; i++)
        buf_add_char(out, (unsigned char)name[i] < ' ' || name[i] == 0x7f ? '?' : name[i]);
}

static enum status refuse_name(const char *name, const char *why, struct err *err)
{
    struct buf shown = { 0 };
    add_shown(&shown, name);
    enum status st = err_set(err, ERR_FORMAT, "the source lists a file \"%s\", %s",
                             shown.len ? shown.data : "", why);
    buf_release(&shown);
    return st;
}

static const char *copy(struct file_list *l, const char *s)
{
    return s ? arena_strndup(&l->arena, s, strlen(s)) : NULL;
}

enum status file_list_add(struct file_list *l, const struct pull_file *f, struct err *err)
{
    if (!file_name_is_safe(str_of(f->name)))
        return refuse_name(f->name, "which could be made outside the model's folder: refused", err);
    if (l->n == LIST_FILES_MAX)
        return err_set(err, ERR_TOO_LONG, "the source lists more than %d files: that is no model",
                       LIST_FILES_MAX);
    if (l->n == l->cap) {
        l->cap = l->cap ? 2 * l->cap : 64;
        l->files = mem_realloc(l->files, l->cap, sizeof *l->files);
    }
    struct pull_file *to = &l->files[l->n++];
    *to = *f;
    to->name = copy(l, f->name);
    to->url = copy(l, f->url);
    to->version = f->version ? copy(l, f->version) : "";
    to->tag = copy(l, f->tag);
    to->modified = copy(l, f->modified);
    return OK;
}

static int by_name(const void *a, const void *b)
{
    const struct pull_file *x = a, *y = b;
    return strcmp(x->name, y->name);
}

/* Sorted, "a/b" need not follow "a" at once ("a-b" lies between), so folders are looked up. */
static enum status check_folders_of(const struct file_list *l, const char *name, struct err *err)
{
    char folder[FILE_NAME_MAX + 1];
    for (const char *slash = strchr(name, '/'); slash; slash = strchr(slash + 1, '/')) {
        memcpy(folder, name, (size_t)(slash - name));
        folder[slash - name] = 0;
        if (file_list_find(l, folder))
            return refuse_name(folder, "and another one inside it: refused", err);
    }
    return OK;
}

enum status file_list_finish(struct file_list *l, struct err *err)
{
    if (l->n) qsort(l->files, l->n, sizeof *l->files, by_name);
    for (size_t i = 1; i < l->n; i++)
        if (strcmp(l->files[i - 1].name, l->files[i].name) == 0)
            return refuse_name(l->files[i].name, "twice: refused", err);
    for (size_t i = 0; i < l->n; i++) TRY(check_folders_of(l, l->files[i].name, err));
    return OK;
}

struct pull_file *file_list_find(const struct file_list *l, const char *name)
{
    struct pull_file key = { .name = name };
    return l->n ? bsearch(&key, l->files, l->n, sizeof *l->files, by_name) : NULL;
}

void file_list_release(struct file_list *l)
{
    arena_release(&l->arena);
    mem_free(l->files);
    *l = (struct file_list){ 0 };
}

/* ---- what hubs answer ---- */

/* A tree of cJSON takes 64 bytes for each value, however few bytes of text that has. */
enum status file_list_parse_json(struct str json, cJSON **out, struct err *err)
{
    struct buf text = { 0 };
    struct json_packed packed = { 0 };
    const struct json_limits limits = { .n_values = LIST_VALUES_MAX };
    buf_add_str(&text, json);
    enum status st = json_parse_packed(&text, &limits, out, &packed, err);
    json_packed_release(&packed);
    buf_release(&text);
    return st;
}

static enum status read_text(const cJSON *o, const char *name, const char **out, struct err *err)
{
    *out = "";
    return json_get_str(o, name, out, err);
}

static enum status read_size(const cJSON *o, const char *name, uint64_t *out, struct err *err)
{
    int64_t size = -1;
    TRY(json_get_i64(o, name, 0, (int64_t)1 << 53, &size, err));
    if (size >= 0) *out = (uint64_t)size;
    return OK;
}

/* A sibling: {"rfilename", "size", "blobId", "lfs": {"sha256" or "oid", "size"}}. Size and sums are
 * there when they were asked for; blobId of an LFS file is its pointer's. */
static enum status read_sibling(const cJSON *o, struct pull_file *f, struct err *err)
{
    const cJSON *lfs = json_member(o, "lfs");
    const char *sha256, *oid, *blob;
    TRY(read_text(o, "rfilename", &f->name, err));
    TRY(read_size(o, "size", &f->size, err));
    TRY(read_text(o, "blobId", &blob, err));
    if (!cJSON_IsObject(lfs)) {
        sum_read(str_of(blob), SUM_GIT, &f->sum);
        return OK;
    }
    TRY(read_size(lfs, "size", &f->size, err));
    TRY(read_text(lfs, "sha256", &sha256, err));
    TRY(read_text(lfs, "oid", &oid, err));
    sum_read(str_of(*sha256 ? sha256 : oid), SUM_SHA256, &f->sum);
    return OK;
}

/* A commit goes into addresses and lines of the log. */
static enum status take_commit(const char *commit, struct file_list *l, struct err *err)
{
    const size_t n = strlen(commit);
    for (size_t i = 0; i < n; i++)
        if (hex_digit(commit[i]) < 0) return err_set(err, ERR_FORMAT, "\"sha\" is no commit");
    if (n >= sizeof l->commit) return err_set(err, ERR_FORMAT, "\"sha\" is no commit");
    memcpy(l->commit, commit, n + 1);
    return OK;
}

static enum status read_siblings(const cJSON *o, struct file_list *l, struct err *err)
{
    const cJSON *files = json_member(o, "siblings"), *one;
    const char *commit;
    if (!cJSON_IsArray(files))
        return err_set(err, ERR_FORMAT,
                       "the answer has no \"siblings\": the endpoint is not a Hugging Face hub");
    TRY(read_text(o, "sha", &commit, err));
    TRY(take_commit(commit, l, err));
    cJSON_ArrayForEach (one, files) {
        struct pull_file f = { .size = FILE_SIZE_UNKNOWN };
        TRY(read_sibling(one, &f, err));
        TRY(file_list_add(l, &f, err));
    }
    return file_list_finish(l, err);
}

/* {"Path", "Type": "blob" or "tree", "Size", "Sha256"}. Its Revision is the last change of the
 * file, under which it cannot be had. */
static enum status read_modelscope_files(const cJSON *o, struct file_list *l, struct err *err)
{
    const cJSON *files = json_member(json_member(o, "Data"), "Files"), *one;
    if (!cJSON_IsArray(files))
        return err_set(err, ERR_FORMAT,
                       "the answer has no \"Data\".\"Files\": the endpoint is not ModelScope");
    cJSON_ArrayForEach (one, files) {
        struct pull_file f = { .size = FILE_SIZE_UNKNOWN };
        const char *type, *sha256;
        TRY(read_text(one, "Type", &type, err));
        if (strcmp(type, "tree") == 0) continue;
        TRY(read_text(one, "Path", &f.name, err));
        TRY(read_size(one, "Size", &f.size, err));
        TRY(read_text(one, "Sha256", &sha256, err));
        TRY(read_text(one, "Revision", &f.version, err));
        sum_read(str_of(sha256), SUM_SHA256, &f.sum);
        TRY(file_list_add(l, &f, err));
    }
    return file_list_finish(l, err);
}

static enum status read_with(struct str json, struct file_list *out,
                             enum status (*read)(const cJSON *, struct file_list *, struct err *),
                             struct err *err)
{
    struct file_list l = { 0 };
    cJSON *o = NULL;
    if (json.n > LIST_BYTES_MAX)
        return err_set(err, ERR_TOO_LONG, "the list of files has %zu bytes: over %d", json.n,
                       LIST_BYTES_MAX);
    if (file_list_parse_json(json, &o, err) != OK)
        return err_prefix(err, "the list of files is not what a hub sends: ");
    enum status st = read(o, &l, err);
    cJSON_Delete(o);
    if (st != OK) file_list_release(&l);
    else *out = l;
    return st;
}

enum status file_list_read_hugging_face(struct str json, struct file_list *out, struct err *err)
{
    return read_with(json, out, read_siblings, err);
}

enum status file_list_read_modelscope(struct str json, struct file_list *out, struct err *err)
{
    return read_with(json, out, read_modelscope_files, err);
}
