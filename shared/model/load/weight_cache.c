/* weight_cache.c - the file of the cache: lock, mapping and writing. Thread: loading. */
#include "shared/model/load/weight_cache.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kernels/host/pages.h"
#include "shared/base/buf.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/model/load/file_map.h"

enum {
    POLL_MS = 100,
    STALL_MS = 120000 /* without progress of the writer; syncing a large file takes long */,
    READ_AT_ONCE = 64
};

struct weight_cache {
    struct weight_cache_options o;
    struct buf path, tmp_path; /* the copy, and while it is written */
    int lock;                  /* -1: not held */
    int fd;                    /* of tmp_path; -1: not writing */
    struct file_map map;       /* READY */
    struct weight_cache_header head;
    struct weight_cache_entry *table; /* [n] */
    struct weight **put;              /* [n] MAKING: the weights that were put */
    size_t n_done;                    /* weights taken or put so far */
    bool refused;                     /* a copy exists but was refused */
    bool stopped;                     /* o.progress said so */
    ino_t seen_inode;                 /* inode of the copy that was checked last; 0: none */
    uint64_t t_open_ms;
};

static void warn(const struct weight_cache *p, const char *what, const char *why)
{
    log_warn("weight cache unavailable", "file=%s %s: %s; weights are packed at every start",
             p->path.data, what, why);
}

/* ---- hashes ---- */

struct hash_job {
    struct weight_cache_entry *table; /* of the first */
    const char *file;                 /* NULL: hash the weights in `put` */
    struct weight **put;
    _Atomic size_t n_wrong;
};

static void hash_one(void *arg, int index, int thread)
{
    struct hash_job *j = arg;
    struct weight_cache_entry *e = &j->table[index];
    (void)thread;
    if (!j->file) e->hash = hash_64(j->put[index]->data, e->bytes, 0);
    else if (e->hash != hash_64(j->file + e->at, e->bytes, 0)) atomic_fetch_add(&j->n_wrong, 1);
}

static bool go_on(struct weight_cache *p, double done)
{
    if (p->o.progress && !p->o.progress(p->o.progress_arg, done)) p->stopped = true;
    return !p->stopped;
}

/* Compares hashes. Reading every byte also brings the file into memory before the node is ready. */
static size_t count_wrong(struct weight_cache *p, const struct file_map *map)
{
    struct hash_job j = { .file = (const char *)map->data };
    for (size_t i = 0; i < p->o.n && atomic_load(&j.n_wrong) == 0; i += READ_AT_ONCE) {
        size_t n = p->o.n - i < READ_AT_ONCE ? p->o.n - i : READ_AT_ONCE;
        /* only read */
        j.table = (struct weight_cache_entry *)(uintptr_t)(map->data +
                                                           sizeof(struct weight_cache_header)) +
                  i;
        compute_pool_run(p->o.pool, (int)n, hash_one, &j);
        if (!go_on(p, (double)(j.table[n - 1].at + j.table[n - 1].bytes) / (double)map->bytes))
            return 0;
    }
    return atomic_load(&j.n_wrong);
}

/* ---- reading ---- */

/* ERR_NOT_FOUND: there is no file. */
static enum status map_copy(struct weight_cache *p, struct err *err)
{
    struct file_map map;
    TRY(file_map_open(p->path.data, &map, err));
    enum status st = weight_cache_check(map.data, map.bytes, &p->o.key, p->o.plan, p->o.n, err);
    size_t n_wrong = st == OK ? count_wrong(p, &map) : 0;
    if (p->stopped) st = ERR_CANCELED;
    else if (n_wrong)
        st = err_set(err, ERR_FORMAT, "%zu weights or more do not agree with their hashes",
                     n_wrong);
    if (st != OK) {
        file_map_close(&map);
        return st;
    }
    p->map = map;
    return OK;
}

static ino_t current_inode(const struct weight_cache *p)
{
    struct stat st;
    return stat(p->path.data, &st) == 0 ? st.st_ino : 0;
}

/* True when there is a valid copy; it is mapped then. */
static bool try_copy(struct weight_cache *p)
{
    struct err err = { 0 };
    p->seen_inode = current_inode(p);
    enum status st = map_copy(p, &err);
    p->refused = st != OK && st != ERR_NOT_FOUND && st != ERR_CANCELED;
    if (p->refused) log_warn("weight cache refused", "file=%s %s", p->path.data, err.text);
    if (st == OK)
        log_info("weight cache mapped", "file=%s mib=%zu after_ms=%" PRIu64, p->path.data,
                 p->map.bytes >> 20, clock_ms() - p->t_open_ms);
    return st == OK;
}

/* ---- writing ---- */

static void stop_writing(struct weight_cache *p)
{
    if (p->fd < 0) return;
    close(p->fd);
    p->fd = -1;
    unlink(p->tmp_path.data);
}

static bool write_all(struct weight_cache *p, const void *data, size_t n, uint64_t at)
{
    for (size_t done = 0; done < n;) {
        ssize_t got = pwrite(p->fd, (const char *)data + done, n - done, (off_t)(at + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            warn(p, "writing", strerror(got < 0 ? errno : ENOSPC));
            stop_writing(p);
            return false;
        }
        done += (size_t)got;
    }
    return true;
}

/* Allocates the whole file first, where the file system can, so that a full disk is known at
 * once. */
static bool begin_writing(struct weight_cache *p)
{
    weight_cache_lay_out(&p->head, p->table, &p->o.key, p->o.plan, p->o.n);
    p->fd = open(p->tmp_path.data, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (p->fd < 0) {
        warn(p, p->tmp_path.data, strerror(errno));
        return false;
    }
    if (fallocate(p->fd, 0, 0, (off_t)p->head.bytes) == 0 ||
        (errno != ENOSPC && errno != EFBIG && errno != EDQUOT))
        return true;
    warn(p, "its size", strerror(errno));
    stop_writing(p);
    return false;
}

static bool sync_folder(const struct weight_cache *p)
{
    int fd = open(p->o.folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool ok = fd >= 0 && fsync(fd) == 0;
    if (fd >= 0) close(fd);
    return ok;
}

/* ---- the lock ---- */

/* Time of the last write to the file that another process writes. Its size tells nothing, as it may
 * be allocated at once. */
static uint64_t last_write(const struct weight_cache *p)
{
    struct stat st;
    return stat(p->tmp_path.data, &st) == 0
               ? (uint64_t)st.st_mtim.tv_sec * 1000000000 + (uint64_t)st.st_mtim.tv_nsec
               : 0;
}

/* True with the lock. False when a copy appeared, which is mapped then, or, after a warning, when
 * the lock cannot be had. A file with the final name is complete, so waiting processes check it
 * without the lock and do not wait for each other. */
static bool lock_or_wait(struct weight_cache *p)
{
    uint64_t t_written_ms = clock_ms(), written = last_write(p);
    bool logged = false;
    while (flock(p->lock, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EINTR) continue;
        if (errno != EWOULDBLOCK) {
            warn(p, "locking", strerror(errno));
            return false;
        }
        if (!logged)
            log_info("waiting for weight cache", "file=%s another process is packing them",
                     p->path.data);
        logged = true;
        nanosleep(&(struct timespec){ .tv_nsec = POLL_MS * 1000000L }, NULL);
        if (!go_on(p, 0) || (current_inode(p) != p->seen_inode && try_copy(p))) return false;
        if (last_write(p) != written) t_written_ms = clock_ms(), written = last_write(p);
        if (clock_ms() - t_written_ms < STALL_MS) continue;
        warn(p, "waiting", "the process that is writing it makes no progress");
        return false;
    }
    return (p->refused && !logged) ||
           !try_copy(p); /* one may have been finished before we took the lock */
}

/* ---- life cycle ---- */

static void name_files(struct weight_cache *p, struct buf *lock)
{
    struct buf name = { 0 };
    for (const char *c = p->o.name; *c; c++)
        buf_add_char(&name, isalnum((unsigned char)*c) || strchr("._-", *c) ? *c : '_');
    buf_printf(&p->path, "%s/%s-%016" PRIx64 ".packed", p->o.folder, name.data ? name.data : "",
               p->o.key.weights);
    buf_printf(&p->tmp_path, "%s.new", p->path.data);
    buf_printf(lock, "%s.lock", p->path.data);
    buf_release(&name);
}

struct weight_cache *weight_cache_open(const struct weight_cache_options *o)
{
    struct weight_cache *p = MEM_NEW(struct weight_cache);
    struct buf lock = { 0 };
    p->o = *o;
    p->lock = p->fd = -1;
    p->t_open_ms = clock_ms();
    p->table = MEM_ARRAY(struct weight_cache_entry, o->n);
    p->put = MEM_ARRAY(struct weight *, o->n);
    name_files(p, &lock);
    bool usable = try_copy(p);
    if (!usable && !p->stopped) {
        (void)mkdir(o->folder, 0755); /* an error shows when the lock file is opened */
        p->lock = open(lock.data, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
        if (p->lock < 0) warn(p, lock.data, strerror(errno));
        else usable = lock_or_wait(p) ? begin_writing(p) : p->map.data != NULL;
    }
    buf_release(&lock);
    if (usable) return p;
    weight_cache_close(p);
    return NULL;
}

bool weight_cache_is_ready(const struct weight_cache *p) { return p->map.data != NULL; }

static struct weight weight_at(const struct weight_cache *p, size_t i)
{
    const struct weight_cache_entry *e =
        (const struct weight_cache_entry *)(p->map.data + sizeof(struct weight_cache_header)) + i;
    struct weight w = p->o.plan[i];
    w.data = (void *)(uintptr_t)(p->map.data + e->at); /* packed weights are read-only */
    return w;
}

void weight_cache_take(struct weight_cache *p, struct weight *out)
{
    *out = weight_at(p, p->n_done++);
}

void weight_cache_put(struct weight_cache *p, struct weight *w)
{
    size_t i = p->n_done++;
    p->put[i] = w;
    if (p->fd >= 0) (void)write_all(p, w->data, p->table[i].bytes, p->table[i].at);
}

/* Syncs, then renames: a file with the final name is complete even after a power failure. */
static bool install_file(struct weight_cache *p)
{
    struct hash_job j = { .table = p->table, .put = p->put };
    compute_pool_run(p->o.pool, (int)p->o.n, hash_one, &j);
    weight_cache_seal(&p->head, p->table);
    if (!write_all(p, p->table, p->o.n * sizeof *p->table, sizeof p->head) ||
        !write_all(p, &p->head, sizeof p->head, 0))
        return false;
    if (fsync(p->fd) != 0 || rename(p->tmp_path.data, p->path.data) != 0 || !sync_folder(p)) {
        warn(p, "finishing", strerror(errno));
        stop_writing(p);
        return false;
    }
    close(p->fd);
    p->fd = -1;
    log_info("weight cache written", "file=%s mib=%" PRIu64 " after_ms=%" PRIu64, p->path.data,
             p->head.bytes >> 20, clock_ms() - p->t_open_ms);
    return true;
}

void weight_cache_finish(struct weight_cache *p)
{
    p->o.progress = NULL; /* packing has reported its end */
    if (weight_cache_is_ready(p) || p->fd < 0 || !install_file(p) || !try_copy(p)) return;
    for (size_t i = 0; i < p->o.n; i++) {
        pages_unmap(p->put[i]->data, p->put[i]->bytes);
        *p->put[i] = weight_at(p, i);
    }
}

void weight_cache_close(struct weight_cache *p)
{
    if (!p) return;
    stop_writing(p);
    if (p->lock >= 0) close(p->lock);
    if (p->map.data) { /* the header, and weights that nobody took */
        for (size_t i = p->n_done; i < p->o.n; i++)
            pages_unmap(weight_at(p, i).data, p->o.plan[i].bytes);
        pages_unmap((void *)(uintptr_t)p->map.data,
                    pages_round(sizeof p->head + p->o.n * sizeof *p->table));
    }
    buf_release(&p->path);
    buf_release(&p->tmp_path);
    mem_free(p->table);
    mem_free(p->put);
    mem_free(p);
}
