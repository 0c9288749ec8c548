/* file_map.c - mmap and whole-file reads for model files.
 *
 * Thread: any. */
#include "shared/model/load/file_map.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static enum status open_regular(const char *path, int *fd, size_t *bytes, uint64_t *changed_ns,
                                struct err *err)
{
    int f = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe must not block us */
    if (f < 0)
        return err_set(err, errno == ENOENT ? ERR_NOT_FOUND : ERR_IO, "cannot open %s: %s", path,
                       strerror(errno));
    struct stat st;
    if (fstat(f, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(f);
        return err_set(err, ERR_IO, "%s is not a regular file", path);
    }
    *fd = f;
    *bytes = (size_t)st.st_size;
    *changed_ns = (uint64_t)st.st_mtim.tv_sec * 1000000000 + (uint64_t)st.st_mtim.tv_nsec;
    return OK;
}

enum status file_map_open(const char *path, struct file_map *out, struct err *err)
{
    int fd;
    size_t bytes;
    uint64_t changed_ns;
    TRY(open_regular(path, &fd, &bytes, &changed_ns, err));
    void *p = bytes ? mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0) : NULL;
    int why = errno;
    close(fd);
    if (p == MAP_FAILED)
        return err_set(err, ERR_NOMEM, "cannot map %s (%zu bytes): %s", path, bytes, strerror(why));
    *out = (struct file_map){ .data = p, .bytes = bytes, .changed_ns = changed_ns };
    return OK;
}

void file_map_close(struct file_map *m)
{
    if (m->data) munmap((void *)(uintptr_t)m->data, m->bytes);
    *m = (struct file_map){ 0 };
}

void file_map_unload(const struct file_map *m)
{
    if (m->data) (void)madvise((void *)(uintptr_t)m->data, m->bytes, MADV_DONTNEED);
}

enum status file_read(const char *path, size_t limit, struct buf *out, struct err *err)
{
    int fd;
    size_t bytes;
    uint64_t changed_ns;
    TRY(open_regular(path, &fd, &bytes, &changed_ns, err));
    if (bytes > limit) {
        close(fd);
        return err_set(err, ERR_TOO_LONG, "%s has %zu bytes, more than the limit of %zu", path,
                       bytes, limit);
    }
    char *to = buf_reserve(out, bytes);
    size_t got = 0;
    while (got < bytes) {
        ssize_t n = read(fd, to + got, bytes - got);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        got += (size_t)n;
    }
    close(fd);
    if (got < bytes)
        return err_set(err, ERR_IO, "%s: only %zu of %zu bytes could be read", path, got, bytes);
    out->len += bytes;
    out->data[out->len] = 0;
    return OK;
}

bool file_is_folder(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

bool file_is_regular(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}
