/* run_delay.c - reads the calling thread's schedstat. Thread: as run_delay.h says. */
#include "kernels/host/run_delay.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

enum {
    WINDOW_NS = 20000000, /* a thread that could run waited a fifth of this for a CPU: ... */
    LONG_PART = 5         /* ... that is long */
};

/* The calling thread's time on run queues so far: the second number of schedstat
 * (Documentation/scheduler/sched-stats). Short interruptions, as by the node's own loop, hardly
 * count there, however many. 0: unknown. */
static uint64_t time_on_run_queues(struct run_delay *own)
{
    char text[96];
    if (own->fd == 0) own->fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    ssize_t n = own->fd > 0 ? pread(own->fd, text, sizeof text - 1, 0) : 0;
    if (n <= 0) return 0;
    text[n] = 0;
    uint64_t delay;
    return sscanf(text, "%*u %" SCNu64, &delay) == 1 ? delay : 0;
}

bool run_delay_is_long(struct run_delay *own, uint64_t now)
{
    if (now - own->t_window_ns < WINDOW_NS) return false;
    const uint64_t delay = time_on_run_queues(own);
    /* A longer window says nothing: the thread may have slept most of it. */
    const bool is_long = now - own->t_window_ns < 2 * (uint64_t)WINDOW_NS &&
                         delay >= own->before_ns + WINDOW_NS / LONG_PART;
    own->t_window_ns = now;
    own->before_ns = delay;
    return is_long;
}

void run_delay_release(struct run_delay *own)
{
    if (own->fd > 0) close(own->fd);
    own->fd = -1;
}
