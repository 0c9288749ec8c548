/* part.c - see part.h. */
#include "deploy/pull/fetch/part.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shared/base/assert.h"
#include "shared/base/json/json.h"
#include "shared/model/load/file_map.h"

enum { HASH_BLOCK = 1 << 20, JOURNAL_BYTES_MAX = 4 << 20, JOURNAL_VERSION = 1 };

static enum status io(const struct part *p, const char *what, struct err *err)
{
    const bool full = errno == ENOSPC || errno == EDQUOT || errno == EFBIG;
    return err_set(err, full ? ERR_FULL : ERR_IO, "%s cannot be %s: %s", p->path.data, what,
                   strerror(errno));
}

/* ---- chunks ---- */

static void set_chunks(struct part *p, uint64_t bytes)
{
    const uint64_t least = p->size / PART_CHUNKS_MAX + 1;
    if (p->whole) bytes = p->size;
    p->chunk_bytes = bytes < least ? least : bytes;
    p->n_chunks = p->size ? (uint32_t)((p->size - 1) / p->chunk_bytes + 1) : 0;
    mem_free(p->chunks);
    p->chunks = MEM_ARRAY(struct part_chunk, p->n_chunks);
    p->done = p->first_open = 0;
}

uint64_t part_chunk_begin(const struct part *p, uint32_t i) { return i * p->chunk_bytes; }

uint64_t part_chunk_length(const struct part *p, uint32_t i)
{
    const uint64_t left = p->size - part_chunk_begin(p, i);
    return left < p->chunk_bytes ? left : p->chunk_bytes;
}

bool part_chunk_is_done(const struct part *p, uint32_t i)
{
    return p->chunks[i].done == part_chunk_length(p, i);
}

uint64_t part_front(struct part *p)
{
    while (p->first_open < p->n_chunks && part_chunk_is_done(p, p->first_open)) p->first_open++;
    if (p->first_open == p->n_chunks) return p->size;
    return part_chunk_begin(p, p->first_open) + p->chunks[p->first_open].done;
}

/* ---- the journal ---- */

void part_journal(const struct part *p, struct buf *out)
{
    struct buf identity = { 0 };
    folder_identity(p->file, &identity);
    if (identity.len && !p->in_place) {
        buf_printf(out, "{\"version\":%d,\"identity\":", JOURNAL_VERSION);
        json_add_string(out, buf_str(&identity));
        buf_printf(out, ",\"size\":%" PRIu64 ",\"chunk\":%" PRIu64 ",\"done\":[", p->size,
                   p->chunk_bytes);
        for (uint32_t i = 0; i < p->n_chunks; i++)
            buf_printf(out, "%s%" PRIu64, i ? "," : "", p->chunks[i].done);
        buf_add_c(out, "]}\n");
    }
    buf_release(&identity);
}

/* Takes what the journal says of this content; false, and nothing done: it says nothing of it. */
static bool take_journal(struct part *p, const cJSON *o, uint64_t n_on_disk)
{
    struct buf identity = { 0 };
    struct err err;
    const char *theirs = "";
    const cJSON *done = json_member(o, "done"), *one;
    int64_t version = 0, size = -1, chunk = 0, n;
    const int64_t max = (int64_t)1 << 53;
    folder_identity(p->file, &identity);
    bool good = json_get_i64(o, "version", 0, max, &version, &err) == OK &&
                json_get_i64(o, "size", 0, max, &size, &err) == OK &&
                json_get_i64(o, "chunk", 1, max, &chunk, &err) == OK &&
                json_get_str(o, "identity", &theirs, &err) == OK && version == JOURNAL_VERSION &&
                (uint64_t)size == p->size && identity.len && strcmp(identity.data, theirs) == 0;
    buf_release(&identity);
    if (!good) return false;
    set_chunks(p, (uint64_t)chunk);
    if (p->chunk_bytes != (uint64_t)chunk || cJSON_GetArraySize(done) != (int)p->n_chunks)
        return false;
    uint32_t i = 0;
    cJSON_ArrayForEach (one, done) {
        n = cJSON_IsNumber(one) && one->valuedouble >= 0 && one->valuedouble < (double)max
                ? (int64_t)one->valuedouble
                : -1;
        if (n < 0 || (uint64_t)n > part_chunk_length(p, i) ||
            (n && part_chunk_begin(p, i) + (uint64_t)n > n_on_disk))
            return false;
        p->chunks[i++].done = (uint64_t)n;
        p->done += (uint64_t)n;
    }
    return true;
}

static void read_journal(struct part *p, uint64_t chunk_bytes)
{
    struct buf text = { 0 };
    struct err err;
    struct stat s;
    cJSON *o = NULL;
    bool good = lstat(p->path.data, &s) == 0 && S_ISREG(s.st_mode) &&
                file_read(p->journal.data, JOURNAL_BYTES_MAX, &text, &err) == OK &&
                json_parse(buf_str(&text), false, &o, &err) == OK &&
                take_journal(p, o, (uint64_t)s.st_size);
    if (!good) set_chunks(p, chunk_bytes);
    cJSON_Delete(o);
    buf_release(&text);
}

/* ---- life cycle ---- */

void part_begin(struct part *p, const struct pull_folder *folder, const struct pull_file *file,
                uint64_t chunk_bytes)
{
    ASSERT(file->size != FILE_SIZE_UNKNOWN);
    *p = (struct part){ .file = file, .fd = -1, .size = file->size };
    folder_part_of(folder, file->name, &p->path);
    folder_journal_of(folder, file->name, &p->journal);
    read_journal(p, chunk_bytes);
    p->settled_done = p->done;
}

void part_begin_in_place(struct part *p, const struct pull_folder *folder,
                         const struct pull_file *file)
{
    *p = (struct part){ .file = file, .fd = -1, .size = file->size, .in_place = true };
    folder_path_of(folder, file->name, &p->path);
    set_chunks(p, p->size);
    for (uint32_t i = 0; i < p->n_chunks; i++) p->chunks[i].done = part_chunk_length(p, i);
    p->done = p->size;
}

static void forget_sums(struct part *p)
{
    digest_free(p->sha256);
    digest_free(p->git);
    p->sha256 = p->git = NULL;
    p->n_hashed = p->n_checked = 0;
}

static void begin_sums(struct part *p)
{
    char head[32];
    forget_sums(p);
    p->sha256 = digest_create(DIGEST_SHA256);
    if (p->file->sum.kind != SUM_GIT) return;
    p->git = digest_create(DIGEST_SHA1);
    const int n = snprintf(head, sizeof head, "blob %" PRIu64, p->size);
    digest_add(p->git, head, (size_t)n + 1); /* with its 0 byte */
}

enum status part_open(struct part *p, struct err *err)
{
    const int flags = p->in_place ? O_RDONLY : O_RDWR | O_CREAT | O_NOFOLLOW;
    /* A link that was to be put in place (pull_files.c) leads to the source's own file. */
    if (!p->in_place && p->done == 0 && unlink(p->path.data) != 0 && errno != ENOENT)
        return io(p, "begun again", err);
    p->fd = open(p->path.data, flags | O_CLOEXEC, 0644);
    if (p->fd < 0) return io(p, "opened", err);
    begin_sums(p);
    return OK;
}

void part_close(struct part *p)
{
    if (p->fd >= 0) close(p->fd);
    p->fd = -1;
    forget_sums(p);
    mem_free(p->chunks);
    mem_free(p->direct);
    buf_release(&p->path);
    buf_release(&p->journal);
    p->chunks = NULL;
    p->direct = NULL;
}

enum status part_restart(struct part *p, bool whole, struct err *err)
{
    ASSERT(!p->hashing && !p->settling && !p->in_place);
    const uint64_t chunk = p->chunk_bytes;
    p->whole |= whole;
    if (unlink(p->journal.data) != 0 && errno != ENOENT) return io(p, "begun again", err);
    if (ftruncate(p->fd, 0) != 0) return io(p, "emptied", err);
    set_chunks(p, chunk);
    p->settled_done = 0;
    begin_sums(p);
    return OK;
}

/* ---- bytes ---- */

enum status part_write(struct part *p, uint32_t i, const char *bytes, size_t n, struct err *err)
{
    struct part_chunk *c = &p->chunks[i];
    ASSERT(n <= part_chunk_length(p, i) - c->done);
    while (n) {
        const off_t at = (off_t)(part_chunk_begin(p, i) + c->done);
        ssize_t written = pwrite(p->fd, bytes, n, at);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return io(p, "written", err);
        bytes += written;
        n -= (size_t)written;
        c->done += (uint64_t)written;
        p->done += (uint64_t)written;
    }
    return OK;
}

enum status part_hash(struct part *p, uint64_t to, const atomic_bool *stop, struct err *err)
{
    enum status st = OK;
    char *block = mem_calloc(1, HASH_BLOCK);
    while (p->n_hashed < to && st == OK) {
        const uint64_t left = to - p->n_hashed;
        ssize_t n = pread(p->fd, block, left < HASH_BLOCK ? (size_t)left : HASH_BLOCK,
                          (off_t)p->n_hashed);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) st = io(p, "read", err);
        else if (n == 0) st = err_set(err, ERR_IO, "%s was made shorter", p->path.data);
        else if (atomic_load_explicit(stop, memory_order_relaxed)) st = ERR_CANCELED;
        if (st != OK) break;
        digest_add(p->sha256, block, (size_t)n);
        if (p->git) digest_add(p->git, block, (size_t)n);
        p->n_hashed += (uint64_t)n;
    }
    mem_free(block);
    return st;
}

enum status part_settle(struct part *p, struct str journal, struct err *err)
{
    if (fdatasync(p->fd) != 0) return io(p, "written to the disk", err);
    return journal.n ? marker_write_file(p->journal.data, journal, err) : OK;
}

enum status part_check(struct part *p, struct err *err)
{
    struct sum git = { .kind = SUM_GIT };
    struct buf is = { 0 }, said = { 0 };
    ASSERT(p->n_hashed == p->size && !p->hashing);
    p->sum.kind = SUM_SHA256;
    digest_end(p->sha256, p->sum.bytes);
    if (p->git) digest_end(p->git, git.bytes);
    forget_sums(p);
    const struct sum *mine = p->file->sum.kind == SUM_GIT ? &git : &p->sum;
    if (p->file->sum.kind == SUM_NONE || sum_eq(mine, &p->file->sum)) return OK;
    sum_add(mine, &is);
    sum_add(&p->file->sum, &said);
    enum status st = err_set(err, ERR_CHECKSUM,
                             "%.200s came with the sum %s, but the source says %s", p->file->name,
                             is.data, said.data);
    buf_release(&is);
    buf_release(&said);
    return st;
}
