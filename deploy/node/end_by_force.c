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

static void *wait_and_end(void *arg)
{
    struct end_by_force_timer t = *(struct end_by_force_timer *)arg;
    struct timespec left = { t.ms / 1000, (long)(t.ms % 1000) * 1000000 };
    mem_free(arg);
    while (nanosleep(&left, &left) != 0) {}
    log_warn("node ends without freeing everything", "after_ms=%u", t.ms);
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
