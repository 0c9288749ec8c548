/* host_id.c - host_id.h: the kernel's boot id, and the pid namespace's inode. */
#include "kernels/host/host_id.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shared/base/hash/hash.h"

enum status host_id_read(struct host_id *out, struct err *err)
{
    char boot[40] = "";
    struct stat st;
    const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? -1 : read(fd, boot, sizeof boot);
    if (fd >= 0) close(fd);
    if (n <= 0 || stat("/proc/self/ns/pid", &st) != 0)
        return err_set(err, ERR_UNSUPPORTED, "/proc does not tell this host from others: %s",
                       strerror(errno));
    *out = (struct host_id){ hash_64(boot, (size_t)n, 0), st.st_ino };
    return OK;
}

struct host_id host_id_or_alone(void)
{
    struct host_id id;
    if (host_id_read(&id, NULL) != OK) random_bytes(&id, sizeof id);
    return id;
}

bool host_id_same(const struct host_id *a, const struct host_id *b)
{
    return a->boot == b->boot && a->pid_namespace == b->pid_namespace;
}

/* The kernel asks for the same right here as for the process's descriptors. */
bool host_sees_process(const struct host_id *mine, int32_t pid)
{
    char path[32];
    struct stat st;
    snprintf(path, sizeof path, "/proc/%d/ns/pid", pid);
    return stat(path, &st) == 0 && st.st_ino == mine->pid_namespace;
}
