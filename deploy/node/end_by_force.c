/* end_by_force.c - see end_by_force.h. The timer has a thread of its own, since any other may be
 * the one that hangs. */
#include "deploy/node/end_by_force.h"

#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"

struct end_by_force_timer {
    uint32_t ms;
    int exit_status;
};

/* A log line may hang as well as the thread that this is about: behind its lock, or at a pipe that
 * nobody reads. So it has a thread, and little time. */
static void *write_line(void *arg)
{
    log_warn("node ends without freeing everything", "after_ms=%u", *(const uint32_t *)arg);
    return NULL;
}

static void say_so(uint32_t ms)
{
    static uint32_t after_ms;
    const struct timespec little = { 0, 20 * 1000000 };
    pthread_t thread;
    after_ms = ms;
    if (thread_start(&thread, write_line, &after_ms) != OK) return;
    pthread_detach(thread);
    nanosleep(&little, NULL);
}

static void *wait_and_end(void *arg)
{
    struct end_by_force_timer t = *(struct end_by_force_timer *)arg;
    struct timespec left = { t.ms / 1000, (long)(t.ms % 1000) * 1000000 };
    mem_free(arg);
    while (nanosleep(&left, &left) != 0) {}
    say_so(t.ms);
    _exit(t.exit_status);
}

void end_by_force_after(uint32_t ms, int exit_status)
{
    static atomic_flag called = ATOMIC_FLAG_INIT;
    pthread_t thread;
    if (atomic_flag_test_and_set(&called)) return;
    struct end_by_force_timer *t = MEM_NEW(struct end_by_force_timer);
    *t = (struct end_by_force_timer){ .ms = ms, .exit_status = exit_status };
    if (thread_start(&thread, wait_and_end, t) == OK) pthread_detach(thread);
    else mem_free(t);
}
