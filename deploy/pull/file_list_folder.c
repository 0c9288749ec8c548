/* file_list_folder.c - the files of a folder of this host. Thread: any. */
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "deploy/pull/marker.h"

enum { DEPTH_MAX = 4 };

struct walk {
    const char *folder;
    struct file_list *list;
    struct marker marker; /* of an earlier pull into it */
};

/* The sum of an earlier pull where the file is as it was then; else its time stands for it. */
static enum status add(struct walk *w, const char *name, const struct stat *s, struct err *err)
{
    const struct marker_file *k = marker_find(&w->marker, name);
    const int64_t changed_ns = (int64_t)s->st_mtim.tv_sec * 1000000000 + s->st_mtim.tv_nsec;
    char version[VERSION_MAX];
    struct pull_file f = { .name = name, .size = (uint64_t)s->st_size, .version = version };
    snprintf(version, sizeof version, "%" PRId64, changed_ns);
    if (k && k->size == f.size && k->changed_ns == changed_ns) f.sum = k->sha256;
    return file_list_add(w->list, &f, err);
}

static enum status walk(struct walk *w, const char *below, unsigned depth, struct err *err)
{
    struct buf path = { 0 }, name = { 0 };
    struct stat s;
    enum status st = OK;
    buf_printf(&path, "%s/%s", w->folder, below);
    DIR *d = opendir(path.data);
    if (!d) st = err_set(err, ERR_IO, "%s cannot be read: %s", path.data, strerror(errno));
    for (struct dirent *e; d && st == OK && (e = readdir(d)) != NULL;) {
        if (e->d_name[0] == '.') continue;
        buf_clear(&path);
        buf_clear(&name);
        buf_printf(&name, "%s%s", below, e->d_name);
        buf_printf(&path, "%s/%s", w->folder, name.data);
        if (stat(path.data, &s) != 0) continue; /* a link to nothing */
        if (S_ISREG(s.st_mode)) st = add(w, name.data, &s, err);
        else if (S_ISDIR(s.st_mode) && depth < DEPTH_MAX) {
            buf_add_char(&name, '/');
            st = walk(w, name.data, depth + 1, err);
        }
    }
    if (d) closedir(d);
    buf_release(&path);
    buf_release(&name);
    return st;
}

enum status file_list_read_folder(const char *folder, struct file_list *out, struct err *err)
{
    struct file_list l = { 0 };
    struct walk w = { .folder = folder, .list = &l };
    struct buf marker = { 0 };
    struct err ignored; /* what it would have said is computed instead */
    marker_init(&w.marker);
    buf_printf(&marker, "%s/%s", folder, MARKER_NAME);
    if (marker_read(&w.marker, marker.data, &ignored) != OK) marker_release(&w.marker);
    enum status st = walk(&w, "", 0, err);
    if (st == OK) st = file_list_finish(&l, err);
    marker_release(&w.marker);
    buf_release(&marker);
    if (st != OK) file_list_release(&l);
    else *out = l;
    return st;
}
