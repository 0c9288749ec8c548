/* marker.c - see marker.h. Thread: main. */
#include "deploy/pull/marker.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shared/base/json/json.h"
#include "shared/model/load/file_map.h"

enum { MARKER_BYTES_MAX = 16 << 20, MARKER_VERSION = 1 };

void marker_init(struct marker *m)
{
    *m = (struct marker){ .source = "", .commit = "" };
    arena_init(&m->arena);
}

void marker_release(struct marker *m)
{
    map_release(&m->files);
    arena_release(&m->arena);
    marker_init(m);
}

static const char *copy(struct marker *m, const char *s)
{
    return arena_strndup(&m->arena, s, strlen(s));
}

const struct marker_file *marker_find(const struct marker *m, const char *name)
{
    return map_get(&m->files, str_of(name));
}

void marker_put(struct marker *m, const struct marker_file *f)
{
    struct marker_file *to = ARENA_NEW(&m->arena, struct marker_file);
    *to = *f;
    to->name = copy(m, f->name);
    to->identity = copy(m, f->identity);
    map_put(&m->files, str_of(to->name), to);
}

void marker_set_source(struct marker *m, const char *source, const char *commit)
{
    m->source = copy(m, source);
    m->commit = copy(m, commit);
}

/* ---- read ---- */

static enum status read_file(const cJSON *o, struct marker *m, struct err *err)
{
    struct marker_file f = { .name = "", .identity = "" };
    const char *sha256 = "", *changed = "";
    int64_t size = 0;
    TRY(json_get_str(o, "name", &f.name, err));
    TRY(json_get_str(o, "identity", &f.identity, err));
    TRY(json_get_str(o, "sha256", &sha256, err));
    TRY(json_get_str(o, "changed_ns", &changed, err));
    TRY(json_get_i64(o, "size", 0, (int64_t)1 << 53, &size, err));
    if (!file_name_is_safe(str_of(f.name)) || str_to_i64(str_of(changed), &f.changed_ns) != OK)
        return err_set(err, ERR_FORMAT, "an entry of \"files\" is none");
    f.size = (uint64_t)size;
    sum_read(str_of(sha256), SUM_SHA256, &f.sha256);
    marker_put(m, &f);
    return OK;
}

static enum status read_members(const cJSON *o, struct marker *m, struct err *err)
{
    const cJSON *files = json_member(o, "files"), *one;
    const char *source = "", *commit = "";
    int64_t version = 0;
    TRY(json_get_i64(o, "baton-pull", 0, INT32_MAX, &version, err));
    if (version != MARKER_VERSION || !cJSON_IsArray(files))
        return err_set(err, ERR_FORMAT, "it is not of this version of baton pull");
    TRY(json_get_str(o, "source", &source, err));
    TRY(json_get_str(o, "commit", &commit, err));
    cJSON_ArrayForEach (one, files) TRY(read_file(one, m, err));
    marker_set_source(m, source, commit);
    return OK;
}

enum status marker_read(struct marker *m, const char *path, struct err *err)
{
    struct buf text = { 0 };
    cJSON *o = NULL;
    enum status st = file_read(path, MARKER_BYTES_MAX, &text, err);
    if (st == OK) st = json_parse(buf_str(&text), false, &o, err);
    if (st == OK) st = read_members(o, m, err);
    cJSON_Delete(o);
    buf_release(&text);
    if (st == ERR_NOT_FOUND) return OK;
    if (st != OK) err_prefix(err, "%s: ", path);
    return st;
}

/* ---- write ---- */

static void add_member(struct buf *b, const char *name, const char *value)
{
    buf_printf(b, "\"%s\":", name);
    json_add_string(b, str_of(value));
}

static void add_file(struct buf *b, const struct marker_file *f)
{
    struct buf sum = { 0 };
    sum_add(&f->sha256, &sum);
    buf_add_char(b, '{');
    add_member(b, "name", f->name);
    buf_printf(b, ",\"size\":%" PRIu64 ",\"changed_ns\":\"%" PRId64 "\",", f->size, f->changed_ns);
    add_member(b, "sha256", sum.len ? strchr(sum.data, ':') + 1 : "");
    buf_add_char(b, ',');
    add_member(b, "identity", f->identity);
    buf_add_char(b, '}');
    buf_release(&sum);
}

static int by_name(const void *a, const void *b)
{
    const struct marker_file *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

static void add_files(struct buf *b, const struct marker *m)
{
    const struct marker_file **sorted = MEM_ARRAY(const struct marker_file *, m->files.len);
    size_t pos = 0, n = 0;
    struct str name;
    void *value;
    while (map_next(&m->files, &pos, &name, &value)) sorted[n++] = value;
    if (n) qsort(sorted, n, sizeof *sorted, by_name);
    for (size_t i = 0; i < n; i++) {
        buf_add_c(b, i ? ",\n  " : "\n  ");
        add_file(b, sorted[i]);
    }
    mem_free(sorted);
}

enum status marker_write(const struct marker *m, const char *path, struct err *err)
{
    struct buf b = { 0 };
    buf_printf(&b, "{\"baton-pull\":%d,", MARKER_VERSION);
    add_member(&b, "source", m->source);
    buf_add_char(&b, ',');
    add_member(&b, "commit", m->commit);
    buf_add_c(&b, ",\"files\":[");
    add_files(&b, m);
    buf_add_c(&b, "\n]}\n");
    enum status st = marker_write_file(path, buf_str(&b), err);
    buf_release(&b);
    return st;
}

/* ---- files ---- */

void marker_sync_folder_of(const char *path)
{
    struct buf folder = { 0 };
    const char *slash = strrchr(path, '/');
    buf_add(&folder, path, slash ? (size_t)(slash - path) : 0);
    int fd = open(folder.len ? folder.data : slash ? "/" : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        (void)fsync(fd); /* some file systems have none for folders */
        close(fd);
    }
    buf_release(&folder);
}

static bool write_all(int fd, struct str bytes)
{
    while (bytes.n) {
        ssize_t n = write(fd, bytes.p, bytes.n);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        bytes = str_sub(bytes, (size_t)n, SIZE_MAX);
    }
    return true;
}

enum status marker_write_file(const char *path, struct str bytes, struct err *err)
{
    struct buf temporary = { 0 };
    buf_printf(&temporary, "%s.new", path);
    int fd = open(temporary.data, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    bool good = fd >= 0 && write_all(fd, bytes) && fdatasync(fd) == 0;
    int why = errno;
    if (fd >= 0 && close(fd) != 0 && good) {
        good = false;
        why = errno;
    }
    if (good && rename(temporary.data, path) != 0) {
        good = false;
        why = errno;
    }
    if (!good && fd >= 0) unlink(temporary.data);
    buf_release(&temporary);
    if (good) marker_sync_folder_of(path);
    return good ? OK : err_set(err, ERR_IO, "%s cannot be written: %s", path, strerror(why));
}
