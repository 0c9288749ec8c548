/* host_id.h - which host a process runs on: whether two processes can share memory and see each
 * other's process numbers. Thread: any. */
#ifndef BATON_KERNELS_HOST_HOST_ID_H
#define BATON_KERNELS_HOST_HOST_ID_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/err.h"
#include "shared/base/status.h"

struct host_id {
    uint64_t boot;          /* a hash of the kernel's boot id: the machine since it was started */
    uint64_t pid_namespace; /* in which process numbers mean something */
};

/* ERR_UNSUPPORTED: /proc does not tell. */
enum status host_id_read(struct host_id *out, struct err *err) MUST_CHECK;
/* The same, or where /proc does not tell a host on which no other process is. */
struct host_id host_id_or_alone(void);
/* Whether processes there can open each other's /proc/<pid>, if they run as one user. */
bool host_id_same(const struct host_id *a, const struct host_id *b);
/* Whether this process can open /proc/<pid> of one that is on the same host as this one, `mine`: it
 * may be another user's, or /proc may hide it or be that of other processes. */
bool host_sees_process(const struct host_id *mine, int32_t pid);

#endif
