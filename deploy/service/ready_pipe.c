/* ready_pipe.c - see ready_pipe.h. */
#include "deploy/service/ready_pipe.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "shared/base/str.h"

struct ready_pipe ready_pipe_take(void)
{
    struct ready_pipe p = { .fd = -1 };
    const char *text = getenv(READY_PIPE_VARIABLE);
    int64_t fd;
    if (text && str_to_i64(str_of(text), &fd) == OK && fd > STDERR_FILENO && fd < INT32_MAX &&
        fcntl((int)fd, F_SETFD, FD_CLOEXEC) == 0)
        p.fd = (int)fd;
    unsetenv(READY_PIPE_VARIABLE);
    return p;
}

void ready_pipe_say(struct ready_pipe *p, enum ready_stage stage)
{
    const char byte = (char)stage;
    if (p->fd < 0) return;
    const bool is_told = write(p->fd, &byte, 1) == 1;
    if (is_told && stage != READY_SERVES) return;
    close(p->fd); /* all is told, or nobody waits any more */
    p->fd = -1;
}
