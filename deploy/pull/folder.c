/* folder.c - see folder.h. Thread: main. */
#include "deploy/pull/folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/model/load/file_map.h"

#define CONFIG "config.json"

enum { LOCK_TRIES = 1000 /* pulls that end between making their folder and opening its lock */ };

static enum status io(struct err *err, const char *path, const char *what)
{
    return err_set(err, ERR_IO, "%s cannot be %s: %s", path, what, strerror(errno));
}

/* ---- paths ---- */

void folder_path_of(const struct pull_folder *f, const char *name, struct buf *out)
{
    buf_clear(out);
    buf_printf(out, "%s/%s", f->path.data, name);
}

static void staged(const struct pull_folder *f, const char *name, const char *suffix,
                   struct buf *out)
{
    struct hash128 h = hash_128(name, strlen(name));
    buf_clear(out);
    buf_printf(out, "%s/%016" PRIx64 "%016" PRIx64 ".%s", f->staging.data, h.hi, h.lo, suffix);
}

void folder_part_of(const struct pull_folder *f, const char *name, struct buf *out)
{
    staged(f, name, "part", out);
}

void folder_journal_of(const struct pull_folder *f, const char *name, struct buf *out)
{
    staged(f, name, "journal", out);
}

static void own_path(const struct pull_folder *f, const char *name, struct buf *out)
{
    buf_clear(out);
    buf_printf(out, "%s/%s", f->staging.data, name);
}

/* Makes every folder of a path up to its last '/'. */
static enum status make_folders_of(const char *path, struct err *err)
{
    char *copy = mem_strdup(path);
    enum status st = OK;
    for (char *slash = strchr(copy + 1, '/'); slash && st == OK; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdir(copy, 0755) != 0 && errno != EEXIST && !file_is_folder(copy))
            st = io(err, copy, "made");
        *slash = '/';
    }
    mem_free(copy);
    return st;
}

/* ---- open and lock ---- */

enum status folder_open(const char *path, struct pull_folder *out, struct err *err)
{
    struct pull_folder f = { .lock_fd = -1 };
    struct str plain = str_of(path);
    while (plain.n > 1 && str_ends(plain, "/")) plain.n--;
    marker_init(&f.known);
    buf_add_str(&f.path, plain);
    buf_printf(&f.staging, "%s/%s", f.path.data, FOLDER_STAGING);
    buf_add_char(&f.staging, '/');
    f.is_new = !file_is_folder(f.path.data);
    enum status st = make_folders_of(f.staging.data, err);
    f.staging.data[--f.staging.len] = 0;
    if (st == OK) *out = f;
    else folder_close(&f);
    return st;
}

/* Has the lock's file been removed, or removed and made again, since it was opened? */
static bool is_orphan(int fd, const char *path)
{
    struct stat mine, there;
    return fstat(fd, &mine) != 0 || stat(path, &there) != 0 || mine.st_ino != there.st_ino ||
           mine.st_dev != there.st_dev;
}

static int pid_in(int fd)
{
    char text[16] = { 0 };
    ssize_t n = pread(fd, text, sizeof text - 1, 0);
    return n > 0 ? (int)strtol(text, NULL, 10) : 0;
}

static void write_pid(int fd)
{
    char text[16];
    int n = snprintf(text, sizeof text, "%d\n", getpid());
    if (ftruncate(fd, 0) != 0 || pwrite(fd, text, (size_t)n, 0) != n)
        log_debug("pull lock", "the process is not written into it: %s", strerror(errno));
}

/* Whoever ends a pull removes .baton-pull with the lock in it: others then lock a file that is no
 * longer there, and begin again. */
static enum status lock(struct pull_folder *f, const char *path, int *pid, struct err *err)
{
    for (int i = 0;; i++) {
        TRY(make_folders_of(path, err));
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
        if (fd < 0 && errno == ENOENT && i < LOCK_TRIES) continue; /* not a link to nothing */
        if (fd < 0) return io(err, path, "opened");
        if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
            const int why = errno;
            *pid = pid_in(fd);
            close(fd);
            errno = why;
            return why == EWOULDBLOCK ? ERR_BUSY : io(err, path, "locked");
        }
        if (!is_orphan(fd, path)) {
            write_pid(fd);
            f->lock_fd = fd;
            return OK;
        }
        close(fd);
    }
}

/* A damaged file of ours costs computing sums again, no more. */
static void read_known(struct pull_folder *f)
{
    struct buf path = { 0 };
    struct err err = { 0 };
    buf_printf(&path, "%s/%s", f->path.data, MARKER_NAME);
    if (marker_read(&f->known, path.data, &err) != OK) log_warn("pull marker", "%s", err.text);
    own_path(f, "checked.json", &path);
    if (marker_read(&f->known, path.data, &err) != OK) log_warn("pull marker", "%s", err.text);
    buf_release(&path);
}

enum status folder_lock(struct pull_folder *f, int *pid, struct err *err)
{
    struct buf path = { 0 };
    *pid = 0;
    own_path(f, "lock", &path);
    enum status st = lock(f, path.data, pid, err);
    buf_release(&path);
    if (st == OK) read_known(f);
    return st;
}

/* The lock's file goes unless something is beside it, for the next pull. */
static void leave_staging(struct pull_folder *f)
{
    struct buf path = { 0 };
    size_t n = 0;
    DIR *d = opendir(f->staging.data);
    for (struct dirent *e; d && (e = readdir(d)) != NULL;) n += e->d_name[0] != '.';
    if (d) closedir(d);
    own_path(f, "lock", &path);
    if (n == 1) unlink(path.data); /* others see that it is gone and begin again */
    if (n <= 1) rmdir(f->staging.data);
    if (f->is_new) rmdir(f->path.data); /* which it may only if it is empty */
    buf_release(&path);
}

void folder_close(struct pull_folder *f)
{
    if (f->lock_fd >= 0) {
        leave_staging(f);
        close(f->lock_fd);
    }
    marker_release(&f->known);
    buf_release(&f->path);
    buf_release(&f->staging);
    f->lock_fd = -1;
}

uint64_t folder_free_bytes(const struct pull_folder *f)
{
    struct statvfs v;
    if (statvfs(f->path.data, &v) != 0) return UINT64_MAX;
    return (uint64_t)v.f_bavail * (uint64_t)v.f_frsize;
}

/* ---- what is there ---- */

void folder_identity(const struct pull_file *file, struct buf *out)
{
    if (file->sum.kind != SUM_NONE) sum_add(&file->sum, out);
    else if (file->version[0]) buf_printf(out, "version:%s", file->version);
}

static int64_t changed_ns(const struct stat *s)
{
    return (int64_t)s->st_mtim.tv_sec * 1000000000 + s->st_mtim.tv_nsec;
}

/* Is the file at `path` the one that is known by this name? */
static bool is_known(const struct marker_file *k, const char *path)
{
    struct stat s;
    return stat(path, &s) == 0 && S_ISREG(s.st_mode) && (uint64_t)s.st_size == k->size &&
           changed_ns(&s) == k->changed_ns;
}

enum folder_place folder_find(const struct pull_folder *f, const struct pull_file *file)
{
    struct buf path = { 0 }, part = { 0 }, identity = { 0 };
    struct stat s;
    enum folder_place place = FOLDER_ABSENT;
    const struct marker_file *k = marker_find(&f->known, file->name);
    folder_path_of(f, file->name, &path);
    folder_part_of(f, file->name, &part);
    folder_identity(file, &identity);
    bool wanted = k && identity.len && strcmp(k->identity, identity.data) == 0 &&
                  (file->size == FILE_SIZE_UNKNOWN || file->size == k->size);
    if (wanted && is_known(k, path.data)) place = FOLDER_AT_PLACE;
    else if (wanted && is_known(k, part.data)) place = FOLDER_STAGED;
    else if (lstat(path.data, &s) == 0 && !(k && is_known(k, path.data))) place = FOLDER_UNKNOWN;
    buf_release(&path);
    buf_release(&part);
    buf_release(&identity);
    return place;
}

enum status folder_add_checked(struct pull_folder *f, const struct pull_file *file,
                               const char *path, const struct sum *sha256, struct err *err)
{
    struct buf identity = { 0 }, checked = { 0 };
    struct stat s;
    if (stat(path, &s) != 0) return io(err, path, "read");
    folder_identity(file, &identity);
    struct marker_file k = { .name = file->name,
                             .identity = identity.len ? identity.data : "",
                             .size = (uint64_t)s.st_size,
                             .changed_ns = changed_ns(&s),
                             .sha256 = *sha256 };
    marker_put(&f->known, &k);
    own_path(f, "checked.json", &checked);
    enum status st = marker_write(&f->known, checked.data, err);
    buf_release(&identity);
    buf_release(&checked);
    return st;
}

/* ---- the end ---- */

static enum status move(const char *from, const char *to, struct err *err)
{
    TRY(make_folders_of(to, err));
    if (rename(from, to) != 0) return io(err, to, "put in its place");
    marker_sync_folder_of(to);
    return OK;
}

/* Is there something to move? */
static bool has_staged(const struct pull_folder *f, const struct file_list *list)
{
    for (size_t i = 0; i < list->n; i++)
        if (list->files[i].chosen && folder_find(f, &list->files[i]) == FOLDER_STAGED) return true;
    return false;
}

/* Takes config.json from its place, so that nothing loads the folder while files change. One that
 * stays waits where a part of it would. */
static enum status withdraw(struct pull_folder *f, const struct file_list *list, struct err *err)
{
    struct buf marker = { 0 }, config = { 0 }, part = { 0 };
    const struct pull_file *file = file_list_find(list, CONFIG);
    enum status st = OK;
    buf_printf(&marker, "%s/%s", f->path.data, MARKER_NAME);
    folder_path_of(f, CONFIG, &config);
    folder_part_of(f, CONFIG, &part);
    if (unlink(marker.data) != 0 && errno != ENOENT) st = io(err, marker.data, "removed");
    if (st == OK && file && file->chosen && folder_find(f, file) == FOLDER_AT_PLACE &&
        rename(config.data, part.data) != 0)
        st = io(err, config.data, "moved");
    else if (st == OK && file && file->chosen && folder_find(f, file) == FOLDER_STAGED &&
             unlink(config.data) != 0 && errno != ENOENT)
        st = io(err, config.data, "removed");
    marker_sync_folder_of(marker.data);
    buf_release(&marker);
    buf_release(&config);
    buf_release(&part);
    return st;
}

static enum status place(struct pull_folder *f, const struct pull_file *file, struct err *err)
{
    struct buf from = { 0 }, to = { 0 };
    enum status st = OK;
    folder_part_of(f, file->name, &from);
    folder_path_of(f, file->name, &to);
    if (file->chosen && folder_find(f, file) == FOLDER_STAGED) st = move(from.data, to.data, err);
    buf_release(&from);
    buf_release(&to);
    return st;
}

/* Does the list have the file as it is known? What it has otherwise belongs to another revision. */
static bool is_current(const struct file_list *list, const struct marker_file *k)
{
    const struct pull_file *file = file_list_find(list, k->name);
    struct buf identity = { 0 };
    if (!file) return false;
    folder_identity(file, &identity);
    bool equal = identity.len && strcmp(identity.data, k->identity) == 0;
    buf_release(&identity);
    return equal;
}

/* Files of an earlier pull of the same source that its present revision has no more. */
static void remove_outdated(struct pull_folder *f, const struct file_list *list, const char *source)
{
    struct buf path = { 0 };
    struct str name;
    void *value;
    size_t pos = 0;
    const bool same = strcmp(f->known.source, source) == 0;
    while (same && map_next(&f->known.files, &pos, &name, &value)) {
        const struct marker_file *k = value;
        const struct pull_file *file = file_list_find(list, k->name);
        if ((file && file->chosen) || is_current(list, k)) continue;
        folder_path_of(f, k->name, &path);
        if (is_known(k, path.data) && unlink(path.data) == 0)
            log_info("pull removes", "file=%s the source does not have it any more", path.data);
        map_del(&f->known.files, name);
    }
    buf_release(&path);
}

/* All but the lock, which goes with folder_close. */
static void empty_staging(struct pull_folder *f)
{
    struct buf path = { 0 };
    DIR *d = opendir(f->staging.data);
    for (struct dirent *e; d && (e = readdir(d)) != NULL;) {
        if (strcmp(e->d_name, "lock") == 0 || e->d_name[0] == '.') continue;
        own_path(f, e->d_name, &path);
        unlink(path.data);
    }
    if (d) closedir(d);
    buf_release(&path);
}

/* The marker lists what is at its place, and nothing that somebody has removed meanwhile. */
static enum status write_marker(struct pull_folder *f, const struct file_list *list,
                                const char *source, struct err *err)
{
    struct buf path = { 0 };
    struct str name;
    void *value;
    size_t pos = 0;
    while (map_next(&f->known.files, &pos, &name, &value)) {
        const struct marker_file *k = value;
        folder_path_of(f, k->name, &path);
        if (!is_known(k, path.data)) map_del(&f->known.files, name);
    }
    marker_set_source(&f->known, source, list->commit);
    buf_clear(&path);
    buf_printf(&path, "%s/%s", f->path.data, MARKER_NAME);
    enum status st = marker_write(&f->known, path.data, err);
    buf_release(&path);
    return st;
}

static enum status place_all(struct pull_folder *f, const struct file_list *list, struct err *err)
{
    const struct pull_file *config = file_list_find(list, CONFIG);
    struct buf checked = { 0 };
    own_path(f, "checked.json", &checked);
    enum status st = marker_write(&f->known, checked.data, err);
    buf_release(&checked);
    if (st == OK) st = withdraw(f, list, err);
    for (size_t i = 0; i < list->n && st == OK; i++)
        if (&list->files[i] != config) st = place(f, &list->files[i], err);
    return st;
}

enum status folder_publish(struct pull_folder *f, const struct file_list *list, const char *source,
                           struct err *err)
{
    const struct pull_file *config = file_list_find(list, CONFIG);
    if (has_staged(f, list)) TRY(place_all(f, list, err));
    remove_outdated(f, list, source);
    if (config) TRY(place(f, config, err));
    TRY(write_marker(f, list, source, err));
    empty_staging(f);
    return OK;
}
