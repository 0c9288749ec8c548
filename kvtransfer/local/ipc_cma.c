/* ipc_cma.c - writes into another process's memory by process_vm_writev ("cross memory attach"),
 * for pools that are not shared memory.
 *
 * On every call the kernel checks the permissions of ptrace(2): the same user and, with Yama, a
 * ptrace_scope of 0; connecting tries them. The receiver names an address of its own address space,
 * so a wrong one hurts only itself. The fence is local.h's: no call is made after BYE, nor by a
 * process that has ended. LIMIT: a process is named by its number. If it ends and its number is
 * reused within the microseconds between the check of the pidfd and the call, the call writes to
 * the new process, if that is the same user's and has memory at the address.
 * Thread: transfer and copiers. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "kvtransfer/local/ipc.h"

enum { PIECES_MAX = 128 };

static bool has_ended(const struct local_conn *c)
{
    struct pollfd p = { .fd = c->pidfd, .events = POLLIN };
    return poll(&p, 1, 0) != 0;
}

/* Makes one call per PIECES_MAX pieces, so that scattered blocks cost one system call. The kernel
 * reads the bytes, so the checksums are left to the session layer. */
static bool move(struct local_conn *c, struct local_put *p, const struct copier_job *j)
{
    const struct kvt_copy *copies = p->copies + j->i_copy;
    uint64_t skip = j->skip, bytes = j->bytes;
    while (bytes) {
        struct iovec from[PIECES_MAX], to[PIECES_MAX];
        unsigned long n = 0;
        uint64_t all = 0, at_skip = skip;
        for (const struct kvt_copy *at = copies; n < PIECES_MAX && all < bytes;
             at++, n++, at_skip = 0) {
            uint64_t part = at->bytes - at_skip < bytes - all ? at->bytes - at_skip : bytes - all;
            from[n] = (struct iovec){ kvt_source(c->lt->env, at->local) + at_skip, part };
            to[n] = (struct iovec){ c->remote + at->remote + at_skip, part };
            all += part;
        }
        if (has_ended(c)) return false;
        ssize_t done = process_vm_writev(c->pid, from, n, to, n, 0);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return false;
        bytes -= (uint64_t)done;
        for (skip += (uint64_t)done; bytes && skip >= copies->bytes; copies++)
            skip -= copies->bytes;
    }
    return true;
}

static void detach(struct local_conn *c) { c->remote = NULL; }

static const struct local_copy_method CMA = {
    .name = "cma",
    .begin = local_begin_jobs,
    .move = move,
    .wait = local_wait_none,
    .detach = detach,
};

static int yama_scope(void)
{
    char text[8] = "";
    int fd = open("/proc/sys/kernel/yama/ptrace_scope", O_RDONLY | O_CLOEXEC), scope = 0;
    if (fd < 0) return 0;
    if (read(fd, text, sizeof text - 1) > 0) (void)sscanf(text, "%d", &scope);
    close(fd);
    return scope;
}

/* Tries the permission by reading one byte, which needs the same permission as writing. */
enum status ipc_cma_attach(struct local_conn *c, uint64_t value, char *text, size_t text_max)
{
    char first, last;
    struct iovec here[] = { { &first, 1 }, { &last, 1 } };
    struct iovec there[] = { { (char *)(uintptr_t)value, 1 },
                             { (char *)(uintptr_t)value + c->need_bytes - 1, 1 } };
    if (value == 0 || value > UINTPTR_MAX - c->need_bytes) {
        snprintf(text, text_max, "the receiver named no address of its memory");
        return ERR_FORMAT;
    }
    ssize_t n = process_vm_readv(c->pid, here, 2, there, 2, 0);
    if (n == 2) {
        c->method = &CMA;
        c->remote = (char *)(uintptr_t)value;
        c->remote_bytes = c->need_bytes;
        return OK;
    }
    if (n < 0 && errno == EPERM)
        snprintf(text, text_max,
                 "not allowed to write into the receiver's memory: same user and ptrace_scope 0 "
                 "needed, it is %d",
                 yama_scope());
    else
        snprintf(text, text_max, "the receiver's memory cannot be reached: %s",
                 n < 0 ? strerror(errno) : "it is smaller than its layout says");
    return ERR_UNSUPPORTED;
}
