/* expert_cache.c - see expert_cache.h. */
#include "shared/model/load/expert_cache.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kernels/host/pages.h"
#include "shared/base/assert.h"
#include "shared/base/buf.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum {
    POLL_MS = 5,
    PATIENCE_MS = 1000 /* for one expert that another process packs */,
    OPENINGS = 8 /* tries, while others make or replace the file */
};

static const char MAGIC[8] = "batonpx";

_Static_assert(sizeof(struct expert_cache_header) == 48 && sizeof(struct expert_cache_entry) == 88,
               "no holes that a hash would cover");

struct expert_cache {
    struct expert_cache_options o;
    struct buf path;
    int fd;
    bool can_write;
    struct expert_cache_header *head; /* mapped, with the table behind it */
    struct expert_cache_entry *table;
    uint64_t *refused; /* [n] checks of entries that were refused */
    uint32_t n_refused;
    int64_t claimed; /* -1: none */
};

static void warn(const struct expert_cache *c, const char *what, const char *why)
{
    log_warn("expert cache unavailable", "file=%s %s: %s; experts are packed at every start",
             c->path.data, what, why);
}

static size_t table_bytes(uint32_t n)
{
    return pages_round(sizeof(struct expert_cache_header) + n * sizeof(struct expert_cache_entry));
}

/* ---- entries ---- */

static uint64_t check_of(const struct expert_cache_entry *e, uint32_t i)
{
    const uint64_t h = hash_64(e, offsetof(struct expert_cache_entry, check), i + (uint64_t)1);
    return h ? h : 1;
}

static bool fits(const struct expert_cache_shape *s, const struct weight *plan)
{
    return s->n_out == plan->n_out && s->n_in == plan->n_in && s->bytes == plan->bytes &&
           s->layout == plan->layout && s->paired == plan->paired;
}

static struct expert_cache_shape shape_of(const struct weight *w)
{
    return (struct expert_cache_shape){ .n_out = w->n_out,
                                        .n_in = w->n_in,
                                        .bytes = w->bytes,
                                        .layout = w->layout,
                                        .paired = w->paired };
}

static size_t bytes_of(const struct expert_cache_entry *e)
{
    return e->gate_up.bytes + e->down.bytes;
}

static uint64_t hash_of(const struct expert_weights *w)
{
    return hash_64(w->down.data, w->down.bytes, hash_64(w->gate_up.data, w->gate_up.bytes, 0));
}

/* Copies entry i; false: there is none, or a part of one. */
static bool read_entry(const struct expert_cache *c, uint32_t i, struct expert_cache_entry *out)
{
    const uint64_t check = __atomic_load_n(&c->table[i].check, __ATOMIC_ACQUIRE);
    if (check == 0) return false;
    memcpy(out, &c->table[i], sizeof *out);
    return out->check == check && check == check_of(out, i);
}

/* Its check comes last. */
static void write_entry(struct expert_cache *c, uint32_t i, struct expert_cache_entry *e)
{
    e->check = check_of(e, i);
    __atomic_store_n(&c->table[i].check, 0, __ATOMIC_RELEASE);
    memcpy(&c->table[i], e, offsetof(struct expert_cache_entry, check));
    __atomic_store_n(&c->table[i].check, e->check, __ATOMIC_RELEASE);
}

/* ---- mapping ---- */

static bool map_entry(const struct expert_cache *c, const struct expert_cache_entry *e,
                      const struct expert_weights *plan, struct expert_weights *out)
{
    struct stat st;
    if (fstat(c->fd, &st) != 0 || e->at > (uint64_t)st.st_size ||
        bytes_of(e) > (uint64_t)st.st_size - e->at)
        return false;
    char *p = mmap(NULL, bytes_of(e), PROT_READ, MAP_SHARED, c->fd, (off_t)e->at);
    if (p == MAP_FAILED) return false;
    *out = *plan;
    out->gate_up.data = p;
    out->down.data = p + e->gate_up.bytes;
    return true;
}

bool expert_cache_map(struct expert_cache *c, uint32_t i, const struct expert_weights *plan,
                      struct expert_weights *out)
{
    struct expert_cache_entry e;
    struct expert_weights w;
    ASSERT(i < c->o.n);
    if (!read_entry(c, i, &e) || e.check == c->refused[i]) return false;
    if (fits(&e.gate_up, &plan->gate_up) && fits(&e.down, &plan->down) &&
        map_entry(c, &e, plan, &w)) {
        if (hash_of(&w) == e.hash) {
            *out = w;
            return true;
        }
        pages_unmap(w.gate_up.data, bytes_of(&e));
    }
    c->refused[i] = e.check;
    if (__atomic_fetch_add(&c->n_refused, 1, __ATOMIC_RELAXED) == 0)
        log_warn("cached expert refused",
                 "file=%s entry=%" PRIu32 " its bytes or their shapes are wrong: it is packed "
                 "again, as all others of this kind",
                 c->path.data, i);
    return false;
}

/* ---- claims ---- */

static int lock_entry(const struct expert_cache *c, uint32_t i, short type)
{
    struct flock l = {
        .l_type = type,
        .l_whence = SEEK_SET,
        .l_start = (off_t)(sizeof *c->head + i * sizeof *c->table),
        .l_len = sizeof *c->table,
    };
    return fcntl(c->fd, F_OFD_SETLK, &l);
}

/* True with the lock, and false without for now. */
static bool try_lock(struct expert_cache *c, uint32_t i)
{
    if (lock_entry(c, i, F_WRLCK) == 0) {
        c->claimed = i;
        return true;
    }
    if (errno == EAGAIN || errno == EACCES || errno == EINTR) return false;
    warn(c, "locking", strerror(errno));
    c->can_write = false;
    return false;
}

bool expert_cache_claim(struct expert_cache *c, uint32_t i, const struct expert_weights *plan,
                        struct expert_weights *out, bool (*go_on)(void *arg), void *arg)
{
    const uint64_t t0_ms = clock_ms();
    ASSERT(c->claimed < 0);
    while (!expert_cache_map(c, i, plan, out)) {
        if (!c->can_write) return false;
        if (try_lock(c, i)) {
            /* it may have come before we had the lock */
            if (!expert_cache_map(c, i, plan, out)) return false;
            expert_cache_unclaim(c);
            return true;
        }
        if ((go_on && !go_on(arg)) || clock_ms() - t0_ms > PATIENCE_MS) return false;
        nanosleep(&(struct timespec){ .tv_nsec = POLL_MS * 1000000L }, NULL);
    }
    return true;
}

void expert_cache_unclaim(struct expert_cache *c)
{
    if (c->claimed >= 0) (void)lock_entry(c, (uint32_t)c->claimed, F_UNLCK); /* or at the close */
    c->claimed = -1;
}

static bool write_all(struct expert_cache *c, const void *data, size_t n, uint64_t at)
{
    for (size_t done = 0; done < n;) {
        const ssize_t got = pwrite(c->fd, (const char *)data + done, n - done, (off_t)(at + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            warn(c, "writing", strerror(got < 0 ? errno : ENOSPC));
            c->can_write = false;
            return false;
        }
        done += (size_t)got;
    }
    return true;
}

/* Writes the weights and then the entry. */
static bool add(struct expert_cache *c, uint32_t i, const struct expert_weights *w,
                struct expert_cache_entry *e)
{
    *e = (struct expert_cache_entry){ .gate_up = shape_of(&w->gate_up),
                                      .down = shape_of(&w->down),
                                      .hash = hash_of(w) };
    e->at = __atomic_fetch_add(&c->head->end, bytes_of(e), __ATOMIC_RELAXED);
    if (!write_all(c, w->gate_up.data, e->gate_up.bytes, e->at) ||
        !write_all(c, w->down.data, e->down.bytes, e->at + e->gate_up.bytes))
        return false;
    write_entry(c, i, e);
    return true;
}

bool expert_cache_put(struct expert_cache *c, struct expert_weights *w)
{
    struct expert_cache_entry e;
    struct expert_weights mapped;
    if (c->claimed < 0) return false;
    const bool added = add(c, (uint32_t)c->claimed, w, &e) && map_entry(c, &e, w, &mapped);
    expert_cache_unclaim(c);
    if (!added) return false;
    pages_unmap(w->gate_up.data, w->gate_up.bytes);
    pages_unmap(w->down.data, w->down.bytes);
    *w = mapped;
    return true;
}

/* ---- the file ---- */

static struct expert_cache_header header_of(const struct expert_cache *c)
{
    struct expert_cache_header h = {
        .version = WEIGHT_CACHE_VERSION, .n = c->o.n, .key = c->o.key, .end = table_bytes(c->o.n)
    };
    memcpy(h.magic, MAGIC, sizeof MAGIC);
    h.hash = hash_64(&h, offsetof(struct expert_cache_header, hash), 0);
    return h;
}

/* After a power failure `end` may be older than entries. */
static void raise_end(struct expert_cache *c)
{
    uint64_t end = table_bytes(c->o.n), have = __atomic_load_n(&c->head->end, __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < c->o.n; i++) {
        struct expert_cache_entry e;
        if (read_entry(c, i, &e) && e.at + bytes_of(&e) > end) end = e.at + bytes_of(&e);
    }
    while (have < end && !__atomic_compare_exchange_n(&c->head->end, &have, end, false,
                                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}

/* Maps the table of the open file. ERR_STALE: it is of other weights or another version. */
static enum status map_table(struct expert_cache *c, struct err *err)
{
    const struct expert_cache_header want = header_of(c);
    const size_t bytes = table_bytes(c->o.n);
    struct expert_cache_header have;
    struct stat st;
    if (fstat(c->fd, &st) != 0 || (uint64_t)st.st_size < bytes ||
        pread(c->fd, &have, sizeof have, 0) != sizeof have)
        return err_set(err, ERR_FORMAT, "it is not whole");
    if (memcmp(&have, &want, offsetof(struct expert_cache_header, end)) != 0 ||
        have.end % pages_round(1) != 0)
        return err_set(err, ERR_STALE,
                       "it has other weights or another version, or the model's files have changed "
                       "since it was made");
    void *p = mmap(NULL, bytes, c->can_write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED,
                   c->fd, 0);
    if (p == MAP_FAILED) return err_set(err, ERR_NOMEM, "mapping: %s", strerror(errno));
    c->head = p;
    c->table = (struct expert_cache_entry *)(c->head + 1);
    if (c->can_write) raise_end(c);
    return OK;
}

/* Makes an empty file under another name; `replace`: instead of the one that is there. */
static bool make_file(struct expert_cache *c, bool replace)
{
    const struct expert_cache_header head = header_of(c);
    struct buf tmp = { 0 };
    uint32_t number; /* containers that share a folder have the same process numbers */
    random_bytes(&number, sizeof number);
    buf_printf(&tmp, "%s.%ld-%08" PRIx32 ".new", c->path.data, (long)getpid(), number);
    void *zeros = mem_calloc(1, table_bytes(c->o.n));
    memcpy(zeros, &head, sizeof head);
    c->fd = open(tmp.data, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (c->fd < 0) warn(c, tmp.data, strerror(errno));
    bool ok = c->fd >= 0 && write_all(c, zeros, table_bytes(c->o.n), 0);
    if (ok && (replace ? rename(tmp.data, c->path.data) : link(tmp.data, c->path.data)) != 0 &&
        (replace || errno != EEXIST)) {
        warn(c, "making it", strerror(errno));
        ok = false;
    }
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    (void)unlink(tmp.data);
    mem_free(zeros);
    buf_release(&tmp);
    return ok;
}

/* Opens the file, if there is one. */
static bool open_file(struct expert_cache *c)
{
    c->fd = open(c->path.data, O_RDWR | O_CLOEXEC);
    c->can_write = c->fd >= 0;
    if (c->fd < 0 && (errno == EACCES || errno == EROFS))
        c->fd = open(c->path.data, O_RDONLY | O_CLOEXEC);
    return c->fd >= 0;
}

/* Waits a while for the lock on the open file's header, which ends with the descriptor. */
static void lock_header(const struct expert_cache *c)
{
    struct flock l = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = sizeof *c->head };
    for (int ms = 0; ms < PATIENCE_MS && fcntl(c->fd, F_OFD_SETLK, &l) != 0; ms += POLL_MS)
        nanosleep(&(struct timespec){ .tv_nsec = POLL_MS * 1000000L }, NULL);
}

/* Replaces the open file, which is refused, unless another process has done so: it fills its file
 * already. */
static bool replace_file(struct expert_cache *c)
{
    const int old = c->fd;
    struct stat opened, there;
    bool ok = true;
    if (c->can_write) lock_header(c);
    if (fstat(old, &opened) != 0 || stat(c->path.data, &there) != 0 ||
        (opened.st_dev == there.st_dev && opened.st_ino == there.st_ino))
        ok = make_file(c, true);
    close(old);
    return ok;
}

static bool open_or_make(struct expert_cache *c)
{
    for (int i = 0; i < OPENINGS; i++) {
        struct err err;
        if (!open_file(c)) {
            if (errno != ENOENT && errno != ENOTDIR) {
                warn(c, "opening", strerror(errno));
                return false;
            }
            if (!make_file(c, false)) return false;
            continue;
        }
        if (map_table(c, &err) == OK) return true;
        log_warn("expert cache refused", "file=%s %s", c->path.data, err.text);
        if (!replace_file(c)) return false;
    }
    warn(c, "opening", "others replace it again and again");
    return false;
}

static void name_file(struct expert_cache *c)
{
    buf_printf(&c->path, "%s/", c->o.folder);
    for (const char *p = c->o.name; *p; p++)
        buf_add_char(&c->path, isalnum((unsigned char)*p) || strchr("._-", *p) ? *p : '_');
    buf_printf(&c->path, "-%016" PRIx64 ".experts", c->o.key.weights);
}

struct expert_cache *expert_cache_open(const struct expert_cache_options *o)
{
    struct expert_cache *c = MEM_NEW(struct expert_cache);
    c->o = *o;
    c->fd = -1;
    c->claimed = -1;
    c->refused = MEM_ARRAY(uint64_t, o->n);
    name_file(c);
    (void)mkdir(o->folder, 0755); /* an error shows when the file is opened */
    if (open_or_make(c)) return c;
    expert_cache_close(c);
    return NULL;
}

void expert_cache_close(struct expert_cache *c)
{
    if (!c) return;
    if (c->head) munmap(c->head, table_bytes(c->o.n));
    if (c->fd >= 0) close(c->fd);
    mem_free(c->refused);
    buf_release(&c->path);
    mem_free(c);
}
