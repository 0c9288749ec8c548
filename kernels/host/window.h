/* window.h - a *window*: memory of one process that others of its host map to read. Only its owner
 * can write it, so one that died or is late touches nobody's memory, and pages stay until the last
 * that has mapped them lets go.
 *
 * The owner makes a memfd, maps and seals it. It offers process and descriptor; others open
 * /proc/<pid>/fd/<fd>, which the kernel allows to processes of the same user. A descriptor is
 * accepted if it has the size that was offered and is sealed against shrinking (an access beyond
 * its end would be SIGBUS here). Readers look for the owner's `nonce` in it before they believe it:
 * so neither a process number that was given anew nor another pid namespace passes wrong memory.
 * Memory is taken from the system when it is first touched. Life cycle: make, map, seal, offer;
 * others open; close the descriptors, unmap. Thread: any, one at a time for a window. */
#ifndef BATON_KERNELS_HOST_WINDOW_H
#define BATON_KERNELS_HOST_WINDOW_H

#include <stddef.h>

#include "kernels/host/host_id.h"

/* What an owner tells the others: plain bytes. */
struct window_offer {
    struct host_id host;
    uint64_t nonce, bytes;
    int32_t pid, fd;
};

/* A memfd of zeroed memory, whole pages. The caller closes it, also on failure. ERR_NOMEM. */
enum status window_make(const char *name, size_t bytes, int *fd, struct err *err) MUST_CHECK;
/* Against any change of size, and what more F_SEAL_... say. ERR_UNSUPPORTED. */
enum status window_seal(int fd, int seals, struct err *err) MUST_CHECK;
/* Maps `bytes` of it from `from` on to `at`, in a range of the caller's. ERR_NOMEM. */
enum status window_map(char *at, size_t bytes, int protection, int fd, size_t from,
                       struct err *err) MUST_CHECK;
/* Addresses for windows to be mapped to; munmap. ERR_NOMEM. */
enum status window_reserve(size_t bytes, char **out, struct err *err) MUST_CHECK;

/* Opens descriptor `theirs` of process o->pid, which must have `bytes` bytes; the caller closes it.
 * `what` is whose it is. ERR_PEER_LOST: there is no such process or descriptor; ERR_UNSUPPORTED:
 * another host, or another user's; ERR_PEER_MISMATCH: it is refused. */
enum status window_open(const char *what, const struct window_offer *o, int32_t theirs,
                        size_t bytes, int flags, int *fd, struct err *err) MUST_CHECK;

#endif
