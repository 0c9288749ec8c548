/* disk_folder.c - see disk_folder.h. Thread: one at a time; disk_segment_release: any. */
#include "shared/kv/tier/disk/disk_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "shared/base/arith.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/kv/tier/block_copy.h"

enum {
    HEADERS_AT_ONCE = 512, /* on the stack */
    OPEN_LOCK_MS = 2000,   /* a process that was stopped may have the folder's lock */
    GROW_LOCK_MS = 500,
    LOCK_POLL_NS = 1000000
};
static const uint64_t NS_PER_S = 1000000000;

struct disk_folder {
    char *path;
    int dir_fd, lock_fd, node_fd;
    char node_name[64];
    uint64_t bytes;
    struct disk_superblock super; /* of segments that it makes; id 0 */
    struct list segments;         /* struct disk_segment: of this layout, own and others' */
    uint32_t n_own;
    struct disk_segment *scanned; /* where the scan goes on; NULL: it begins */
};

/* ---- segments ---- */

void disk_segment_use(struct disk_segment *s)
{
    atomic_fetch_add_explicit(&s->n_users, 1, memory_order_relaxed);
}

void disk_segment_release(struct disk_segment *s)
{
    /* Release what this user did, acquire what the others did: the last one closes. */
    if (!s || atomic_fetch_sub_explicit(&s->n_users, 1, memory_order_acq_rel) > 1) return;
    if (s->direct_fd != s->fd) close(s->direct_fd);
    close(s->fd);
    mem_free(s);
}

static enum status write_all(int fd, const void *p, size_t n, uint64_t at)
{
    const ssize_t rc = pwrite(fd, p, n, (off_t)at);
    if (rc >= 0 && (size_t)rc < n) errno = ENOSPC;
    return rc == (ssize_t)n ? OK : ERR_IO;
}

enum status disk_segment_clear(const struct disk_segment *s, uint32_t slot)
{
    const uint8_t nothing[DISK_HEADER_BYTES] = { 0 };
    return write_all(s->fd, nothing, sizeof nothing, disk_header_offset(slot));
}

enum status disk_segment_set(const struct disk_segment *s, uint32_t slot,
                             const struct disk_header *h)
{
    uint8_t bytes[DISK_HEADER_BYTES];
    disk_header_encode(h, bytes);
    return write_all(s->fd, bytes, sizeof bytes, disk_header_offset(slot));
}

enum status disk_segment_read_header(const struct disk_segment *s, uint32_t slot,
                                     struct disk_header *out)
{
    uint8_t bytes[DISK_HEADER_BYTES];
    if (pread(s->fd, bytes, sizeof bytes, (off_t)disk_header_offset(slot)) != sizeof bytes)
        return ERR_IO;
    return disk_header_decode(&s->super, (struct str){ (const char *)bytes, sizeof bytes }, out);
}

/* ---- files ---- */

static bool try_lock(int fd) { return flock(fd, LOCK_EX | LOCK_NB) == 0; }

/* The folder's lock, within `ms`. Whoever has it looks for a segment, which takes no time. */
static bool lock_folder(const struct disk_folder *f, uint32_t ms)
{
    for (const uint64_t end = clock_ms() + ms; !try_lock(f->lock_fd);) {
        const struct timespec pause = { 0, LOCK_POLL_NS };
        if ((errno != EWOULDBLOCK && errno != EINTR) || clock_ms() >= end) return false;
        nanosleep(&pause, NULL);
    }
    return true;
}

static void unlock_folder(const struct disk_folder *f) { (void)flock(f->lock_fd, LOCK_UN); }

/* Not every file system has O_DIRECT. */
static int open_direct(const struct disk_folder *f, const char *name, int fd)
{
    const int direct = openat(f->dir_fd, name, O_RDWR | O_DIRECT | O_CLOEXEC | O_NOFOLLOW);
    return direct >= 0 ? direct : fd;
}

static struct disk_segment *segment_of(struct disk_folder *f, const char *name, int fd,
                                       const struct disk_superblock *super)
{
    struct disk_segment *s = MEM_NEW(struct disk_segment);
    snprintf(s->name, sizeof s->name, "%s", name);
    s->super = *super;
    s->data_begin = disk_data_begin(super->n_slots);
    s->fd = fd;
    s->direct_fd = open_direct(f, name, fd);
    atomic_init(&s->n_users, 1); /* the folder's */
    list_push(&f->segments, &s->link);
    return s;
}

static bool is_segment(const char *name)
{
    return str_starts(str_of(name), "segment-") && str_ends(str_of(name), ".kv");
}

static struct disk_segment *find(struct disk_folder *f, const char *name)
{
    LIST_FOREACH (s, &f->segments, struct disk_segment, link)
        if (strcmp(s->name, name) == 0) return s;
    return NULL;
}

/* ERR_FORMAT, ERR_PEER_MISMATCH: not for this process. */
static enum status read_superblock(int fd, struct disk_superblock *out)
{
    char bytes[DISK_SUPERBLOCK_BYTES];
    struct stat st;
    if (pread(fd, bytes, sizeof bytes, 0) != sizeof bytes) return ERR_FORMAT;
    TRY(disk_superblock_decode((struct str){ bytes, sizeof bytes }, out, NULL));
    /* Reading past a file that was cut would fail block by block. */
    if (fstat(fd, &st) != 0 || (uint64_t)st.st_size < disk_file_bytes(out)) return ERR_FORMAT;
    return OK;
}

static bool same_layout(const struct disk_folder *f, const struct disk_superblock *s)
{
    return kv_layout_hash(&f->super.layout) == kv_layout_hash(&s->layout) &&
           f->super.slot_bytes == s->slot_bytes;
}

/* What the folder's files are: a walk over their names. */
struct folder_walk {
    DIR *dir;
};

static bool walk_begin(const struct disk_folder *f, struct folder_walk *w)
{
    const int fd = openat(f->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    w->dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (!w->dir && fd >= 0) close(fd);
    return w->dir != NULL;
}

static const char *walk_next(struct folder_walk *w)
{
    const struct dirent *e = readdir(w->dir);
    return e ? e->d_name : NULL;
}

/* ---- opening ---- */

static enum status cannot_at(const char *path, const char *what, int code, struct err *err)
{
    return err_field(err, ERR_CONFIG, "kv-cache-dir", "--kv-cache-dir %.200s: %s: %s", path, what,
                     strerror(code));
}

static enum status cannot(const struct disk_folder *f, const char *what, int code, struct err *err)
{
    return cannot_at(f->path, what, code, err);
}

/* Cuts the last part off: "/a/b" becomes "/a", "/a" becomes "/", "a" becomes ".". */
static void cut_last(char *path)
{
    char *slash = strrchr(path, '/');
    if (!slash) memcpy(path, ".", 2);
    else if (slash == path) path[1] = 0;
    else *slash = 0;
}

enum status disk_folder_check(const char *path, struct err *err)
{
    char at[4096];
    struct stat st;
    if (!*path)
        return err_field(err, ERR_CONFIG, "kv-cache-dir",
                         "--kv-cache-dir is empty; give a folder on a local disk");
    if ((size_t)snprintf(at, sizeof at, "%s", path) >= sizeof at)
        return cannot_at(path, "cannot be made", ENAMETOOLONG, err);
    while (stat(at, &st) != 0) {
        if (errno != ENOENT || strcmp(at, ".") == 0)
            return cannot_at(path, "cannot be made", errno, err);
        cut_last(at);
    }
    const char *what = strcmp(at, path) == 0 ? "cannot be used" : "cannot be made";
    if (!S_ISDIR(st.st_mode)) return cannot_at(path, what, ENOTDIR, err);
    return access(at, R_OK | W_OK | X_OK) == 0 ? OK : cannot_at(path, what, errno, err);
}

static enum status make_folder(const struct disk_folder *f, struct err *err)
{
    char path[4096];
    if ((size_t)snprintf(path, sizeof path, "%s", f->path) >= sizeof path)
        return cannot(f, "cannot be made", ENAMETOOLONG, err);
    /* The folders above it as well. What is in them is nobody else's business. */
    for (char *p = path + 1; *p; p++) {
        if (*p != '/') continue;
        *p = 0;
        (void)mkdir(path, 0700);
        *p = '/';
    }
    if (mkdir(path, 0700) != 0 && errno != EEXIST) return cannot(f, "cannot be made", errno, err);
    return OK;
}

static int open_own(const struct disk_folder *f, const char *name)
{
    return openat(f->dir_fd, name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
}

static enum status open_files(struct disk_folder *f, struct err *err)
{
    uint64_t id;
    random_bytes(&id, sizeof id);
    TRY(make_folder(f, err));
    f->dir_fd = open(f->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (f->dir_fd < 0) return cannot(f, "cannot be opened", errno, err);
    snprintf(f->node_name, sizeof f->node_name, "node-%016" PRIx64, id);
    f->lock_fd = open_own(f, "lock");
    if (f->lock_fd < 0) return cannot(f, "cannot be written to", errno, err);
    /* Others take a file that is not locked for one of a process that has ended. */
    if (!lock_folder(f, OPEN_LOCK_MS))
        return cannot(f, "cannot be locked (has another process been stopped?)", errno, err);
    f->node_fd = open_own(f, f->node_name);
    const bool is_locked = f->node_fd >= 0 && try_lock(f->node_fd);
    const int code = errno;
    unlock_folder(f);
    return is_locked ? OK : cannot(f, "cannot be written to", code, err);
}

static enum status choose_size(struct disk_folder *f, struct err *err)
{
    const uint64_t slot = f->super.slot_bytes, head = disk_data_begin(1);
    if (f->bytes < slot + head)
        return err_field(err, ERR_CONFIG, "kv-cache-disk",
                         "--kv-cache-disk: %" PRIu64 " bytes hold no KV block, which takes %" PRIu64
                         ": give more",
                         f->bytes, slot + head);
    f->super.n_slots = disk_segment_slots(f->bytes, slot);
    return OK;
}

enum status disk_folder_open(const struct disk_folder_options *o, struct disk_folder **out,
                             struct err *err)
{
    struct disk_folder *f = MEM_NEW(struct disk_folder);
    *f = (struct disk_folder){ .dir_fd = -1, .lock_fd = -1, .node_fd = -1, .bytes = o->bytes };
    f->path = mem_strdup(o->path);
    f->super.layout = o->slot;
    f->super.slot_bytes = kv_slot_bytes(&o->slot);
    list_init(&f->segments);
    enum status st = choose_size(f, err);
    if (st == OK) st = open_files(f, err);
    if (st != OK) {
        disk_folder_close(f);
        return st;
    }
    *out = f;
    return OK;
}

void disk_folder_close(struct disk_folder *f)
{
    if (!f) return;
    LIST_FOREACH (s, &f->segments, struct disk_segment, link) {
        list_remove(&s->link);
        disk_segment_release(s);
    }
    if (f->node_fd >= 0) {
        (void)unlinkat(f->dir_fd, f->node_name, 0);
        close(f->node_fd);
    }
    if (f->lock_fd >= 0) close(f->lock_fd);
    if (f->dir_fd >= 0) close(f->dir_fd);
    mem_free(f->path);
    mem_free(f);
}

/* ---- listings ---- */

static uint64_t changed_at(int fd)
{
    struct stat st;
    if (fstat(fd, &st) != 0) return 0;
    return (uint64_t)st.st_mtim.tv_sec * NS_PER_S + (uint64_t)st.st_mtim.tv_nsec;
}

static uint64_t wall_ns(void) { return (uint64_t)clock_unix_s() * NS_PER_S; }

/* Reads the headers from slot `first` on into the listing. False: they cannot be read. */
static bool list_some(struct disk_segment *s, uint32_t first, uint32_t n, struct disk_listing *out)
{
    char bytes[HEADERS_AT_ONCE * DISK_HEADER_BYTES];
    const size_t want = (size_t)n * DISK_HEADER_BYTES;
    if (pread(s->fd, bytes, want, (off_t)disk_header_offset(first)) != (ssize_t)want) return false;
    for (uint32_t i = 0; i < n; i++) {
        struct disk_listed *l = &out->slots[out->n];
        const struct str one = { bytes + (size_t)i * DISK_HEADER_BYTES, DISK_HEADER_BYTES };
        if (disk_header_decode(&s->super, one, &l->header) != OK) continue;
        l->slot = first + i;
        out->n++;
    }
    return true;
}

static struct disk_listing *list_slots(struct disk_segment *s)
{
    const uint32_t n = s->super.n_slots;
    struct disk_listing *out = mem_calloc(1, sizeof *out + n * sizeof *out->slots);
    disk_segment_use(s);
    out->segment = s;
    s->changed = changed_at(s->fd); /* before: what is written meanwhile is listed again */
    if (s->changed + NS_PER_S > wall_ns()) s->changed = 0; /* the clock of files is coarse */
    for (uint32_t first = 0; first < n; first += HEADERS_AT_ONCE)
        if (!list_some(s, first, (uint32_t)min_size(n - first, HEADERS_AT_ONCE), out)) break;
    return out;
}

static struct disk_listing *list_gone(struct disk_segment *s)
{
    struct disk_listing *out = MEM_NEW(struct disk_listing);
    disk_segment_use(s);
    out->segment = s;
    out->is_gone = true;
    return out;
}

/* ---- a segment to write to ---- */

static enum status refused(const struct disk_folder *f, const char *what, struct err *err)
{
    return err_set(err, ERR_IO, "%s: %s: %s", f->path, what, strerror(errno));
}

/* Where a file system cannot, the file has holes, and a full disk is noticed by a write. */
static enum status reserve(const struct disk_folder *f, int fd, uint64_t bytes, struct err *err)
{
    if (fallocate(fd, 0, 0, (off_t)bytes) == 0) return OK;
    if (errno != EOPNOTSUPP) return refused(f, "no room for another segment", err);
    return ftruncate(fd, (off_t)bytes) == 0 ? OK : refused(f, "no room for another segment", err);
}

static enum status make_segment(struct disk_folder *f, struct disk_segment **out, struct err *err)
{
    struct disk_superblock super = f->super;
    uint8_t bytes[DISK_SUPERBLOCK_BYTES];
    char name[64], new_name[64];
    random_bytes(&super.id, sizeof super.id);
    snprintf(name, sizeof name, "segment-%016" PRIx64 ".kv", super.id);
    snprintf(new_name, sizeof new_name, "new-%016" PRIx64, super.id);
    const int fd = open_own(f, new_name);
    if (fd < 0) return refused(f, "a segment cannot be made", err);
    disk_superblock_encode(&super, bytes);
    enum status st = try_lock(fd) ? OK : refused(f, "a segment cannot be locked", err);
    if (st == OK) st = reserve(f, fd, disk_file_bytes(&super), err);
    if (st == OK && write_all(fd, bytes, sizeof bytes, 0) != OK)
        st = refused(f, "a segment cannot be written", err);
    if (st == OK && renameat(f->dir_fd, new_name, f->dir_fd, name) != 0)
        st = refused(f, "a segment cannot be named", err);
    if (st != OK) {
        (void)unlinkat(f->dir_fd, new_name, 0);
        close(fd);
        return st;
    }
    *out = segment_of(f, name, fd, &super);
    return OK;
}

struct folder_use {
    uint64_t bytes;
    uint32_t n_segments, n_nodes;
};

/* Files of a process that has ended, if their locks are free. */
static void remove_if_dead(const struct disk_folder *f, const char *name)
{
    const int fd = openat(f->dir_fd, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return;
    if (try_lock(fd)) (void)unlinkat(f->dir_fd, name, 0);
    close(fd);
}

/* Under the folder's lock. */
static struct folder_use measure(const struct disk_folder *f)
{
    struct folder_use u = { 0 };
    struct folder_walk w;
    struct stat st;
    if (!walk_begin(f, &w)) return u;
    for (const char *name; (name = walk_next(&w));) {
        const bool is_node = str_starts(str_of(name), "node-"),
                   is_new = str_starts(str_of(name), "new-");
        if (is_node || is_new) remove_if_dead(f, name);
        if (fstatat(f->dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0) continue;
        u.n_nodes += is_node;
        if (is_new || is_segment(name)) u.bytes += (uint64_t)st.st_size;
        u.n_segments += is_segment(name);
    }
    closedir(w.dir);
    return u;
}

/* A segment that nobody writes to: taken over, or removed if it is of another layout or there are
 * too many. */
static enum status take_over_one(struct disk_folder *f, const char *name, struct disk_segment **out,
                                 bool is_too_full, bool *removed)
{
    struct disk_superblock super;
    struct disk_segment *known = find(f, name);
    if (known && known->is_own) return ERR_NOT_FOUND;
    const int fd = openat(f->dir_fd, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return ERR_NOT_FOUND;
    const bool is_free = try_lock(fd),
               fits = read_superblock(fd, &super) == OK && same_layout(f, &super);
    if (is_free && fits && !is_too_full) {
        *out = segment_of(f, name, fd, &super);
        return OK;
    }
    if (is_free) {
        log_info("kv segment removed", "folder=%s file=%s why=\"%s\"", f->path, name,
                 fits ? "there is less room than before" : "of another model, type or version");
        *removed = unlinkat(f->dir_fd, name, 0) == 0;
    }
    close(fd);
    return ERR_NOT_FOUND;
}

static enum status take_over(struct disk_folder *f, bool is_too_full, struct disk_segment **out,
                             bool *removed)
{
    struct folder_walk w;
    enum status st = ERR_NOT_FOUND;
    if (!walk_begin(f, &w)) return ERR_NOT_FOUND;
    for (const char *name; st != OK && !*removed && (name = walk_next(&w));)
        if (is_segment(name)) st = take_over_one(f, name, out, is_too_full, removed);
    closedir(w.dir);
    return st;
}

/* One that was read only until now is the same file as the one that is written to from now on. */
static void forget_reading(struct disk_folder *f, const struct disk_segment *own)
{
    LIST_FOREACH (s, &f->segments, struct disk_segment, link) {
        if (s == own || strcmp(s->name, own->name) != 0) continue;
        if (f->scanned == s) f->scanned = NULL;
        list_remove(&s->link);
        disk_segment_release(s);
    }
}

static enum status grow_locked(struct disk_folder *f, struct disk_segment **out, struct err *err)
{
    for (;;) {
        bool removed = false;
        const uint64_t bytes = measure(f).bytes;
        if (bytes + disk_file_bytes(&f->super) <= f->bytes) return make_segment(f, out, err);
        /* More than there may be: the room was larger once. */
        if (take_over(f, bytes > f->bytes, out, &removed) == OK) return OK;
        if (!removed)
            return err_set(err, ERR_FULL, "all %" PRIu64 " bytes of %s are in use", f->bytes,
                           f->path);
    }
}

enum status disk_folder_grow(struct disk_folder *f, struct disk_listing **out, struct err *err)
{
    struct disk_segment *s;
    if (!lock_folder(f, GROW_LOCK_MS)) return refused(f, "cannot be locked", err);
    const enum status st = grow_locked(f, &s, err);
    unlock_folder(f);
    if (st != OK) return st;
    forget_reading(f, s);
    s->is_own = true;
    f->n_own++;
    *out = list_slots(s);
    return OK;
}

bool disk_folder_has_too_many(struct disk_folder *f)
{
    if (f->n_own < 2 || !lock_folder(f, 0)) return false;
    const struct folder_use u = measure(f);
    unlock_folder(f);
    const bool has_room = u.bytes + disk_file_bytes(&f->super) <= f->bytes;
    return !has_room && u.n_nodes > 1 && f->n_own > div_up(u.n_segments, u.n_nodes);
}

void disk_folder_give_up(struct disk_folder *f, struct disk_segment *s)
{
    ASSERT(s->is_own);
    s->is_own = false;
    s->changed = 0;
    f->n_own--;
    (void)flock(s->fd, LOCK_UN);
}

/* ---- what others write ---- */

/* Opens the segments of this layout that are new here. */
static void find_new(struct disk_folder *f)
{
    struct folder_walk w;
    struct disk_superblock super;
    if (!walk_begin(f, &w)) return;
    for (const char *name; (name = walk_next(&w));) {
        if (!is_segment(name) || find(f, name)) continue;
        const int fd = openat(f->dir_fd, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
        if (fd < 0) continue;
        if (read_superblock(fd, &super) == OK && same_layout(f, &super))
            (void)segment_of(f, name, fd, &super);
        else close(fd);
    }
    closedir(w.dir);
}

static struct disk_segment *segment_after(struct disk_folder *f, const struct disk_segment *s)
{
    const struct list *next = s ? s->link.next : f->segments.next;
    return next == &f->segments ? NULL : LIST_ENTRY(next, struct disk_segment, link);
}

static bool is_there(const struct disk_folder *f, const struct disk_segment *s)
{
    struct stat st;
    return fstatat(f->dir_fd, s->name, &st, AT_SYMLINK_NOFOLLOW) == 0;
}

struct disk_listing *disk_folder_scan(struct disk_folder *f)
{
    if (!f->scanned) find_new(f);
    for (struct disk_segment *s; (s = segment_after(f, f->scanned)); f->scanned = s) {
        if (!is_there(f, s)) {
            struct disk_listing *gone = list_gone(s);
            f->n_own -= s->is_own;
            list_remove(&s->link);
            disk_segment_release(s);
            return gone;
        }
        if (s->is_own) continue;
        if (s->changed && changed_at(s->fd) == s->changed) continue;
        f->scanned = s;
        return list_slots(s);
    }
    f->scanned = NULL;
    return NULL;
}
