/* window.c - window.h over memfd and /proc. */
#include "kernels/host/window.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum status window_make(const char *name, size_t bytes, int *fd, struct err *err)
{
    *fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd >= 0 && ftruncate(*fd, (off_t)bytes) == 0) return OK;
    return err_set(err, ERR_NOMEM, "no %zu KiB of memory to share: %s", bytes >> 10,
                   strerror(errno));
}

enum status window_seal(int fd, int seals, struct err *err)
{
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | seals | F_SEAL_SEAL) == 0) return OK;
    return err_set(err, ERR_UNSUPPORTED, "shared memory cannot be sealed: %s", strerror(errno));
}

enum status window_map(char *at, size_t bytes, int protection, int fd, size_t from, struct err *err)
{
    void *p = mmap(at, bytes, protection, MAP_SHARED | MAP_FIXED, fd, (off_t)from);
    if (p != MAP_FAILED) return OK;
    return err_set(err, ERR_NOMEM, "%zu KiB of shared memory cannot be mapped: %s", bytes >> 10,
                   strerror(errno));
}

enum status window_reserve(size_t bytes, char **out, struct err *err)
{
    void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return err_set(err, ERR_NOMEM, "no addresses for %zu MiB of windows: %s", bytes >> 20,
                       strerror(errno));
    *out = p;
    return OK;
}

/* Why a descriptor is refused, or NULL. */
static const char *refuse_reason(int fd, size_t bytes)
{
    struct stat st;
    if (fstat(fd, &st) != 0 || st.st_size < 0 || (size_t)st.st_size != bytes)
        return "it has another size";
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK)) return "it is not sealed against shrinking";
    return NULL;
}

enum status window_open(const char *what, const struct window_offer *o, int32_t theirs,
                        size_t bytes, int flags, int *fd, struct err *err)
{
    char path[48];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", o->pid, theirs);
    *fd = open(path, flags | O_CLOEXEC | O_NONBLOCK); /* whatever it is: a FIFO would block */
    if (*fd < 0)
        return err_set(err, errno == ENOENT ? ERR_PEER_LOST : ERR_UNSUPPORTED,
                       "the memory of %s cannot be opened (%s); processes that share memory run "
                       "as one user",
                       what, strerror(errno));
    const char *reason = refuse_reason(*fd, bytes);
    if (!reason) return OK;
    close(*fd);
    return err_set(err, ERR_PEER_MISMATCH, "the memory of %s is refused: %s", what, reason);
}
