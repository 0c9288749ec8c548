/* open_files.c - see open_files.h. */
#include "shared/net/open_files.h"

#include <sys/resource.h>

#include "shared/base/assert.h"

enum { BESIDE_CLIENTS = 256 };

static struct rlimit limits(void)
{
    struct rlimit r;
    ASSERT(getrlimit(RLIMIT_NOFILE, &r) == 0); /* it fails for bad arguments alone */
    return r;
}

uint64_t open_files_raise(void)
{
    const struct rlimit was = limits(), all = { was.rlim_max, was.rlim_max };
    return setrlimit(RLIMIT_NOFILE, &all) == 0 ? all.rlim_cur : was.rlim_cur;
}

uint64_t open_files_limit(void) { return limits().rlim_max; }

uint64_t open_files_wanted(uint64_t n_connections) { return n_connections + BESIDE_CLIENTS; }
