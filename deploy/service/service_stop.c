/* service_stop.c - the other half of service_start.h: ends a service.
 *
 *     SIGTERM ──▶ its processes end by themselves ──▶ the lock is free
 *         └ timeout_s later ─▶ SIGINT: at once ── 5 s ─▶ SIGKILL
 *
 * The lock says when all processes have ended, those that the first one started included. */
#include <signal.h>
#include <stdio.h>
#include <time.h>

#include "deploy/service/service_start.h"
#include "shared/base/clock.h"

enum { TRIES = 20, LOOK_MS = 100, HURRY_MS = 5000, REST_MS = 10000 };

static const char WHO[] = "stop_server";

/* Returns whether all has ended by then. */
static bool ends_by(struct run_file *file, uint64_t end_ms)
{
    const struct timespec pause = { 0, LOOK_MS * 1000000L };
    do {
        if (run_file_lock(file)) return true;
        nanosleep(&pause, NULL);
    } while (clock_ms() < end_ms);
    return false;
}

/* The number may have become another process's between two looks only if this one has ended. */
static void send(const struct run_info *info, int signum)
{
    if (run_info_lives(info)) (void)kill(info->pid, signum);
}

static bool stop(struct run_file *file, const struct run_info *info, unsigned timeout_s)
{
    send(info, SIGTERM);
    if (ends_by(file, clock_ms() + (uint64_t)timeout_s * 1000)) return true;
    fprintf(stderr, "%s: requests still run after %u s: they end now\n", WHO, timeout_s);
    send(info, SIGINT);
    if (ends_by(file, clock_ms() + HURRY_MS)) return true;
    send(info, SIGKILL);
    return ends_by(file, clock_ms() + REST_MS);
}

/* One that is being started writes it in a moment. */
static bool read_info(const struct run_file *file, struct run_info *info)
{
    const struct timespec pause = { 0, LOOK_MS * 1000000L };
    for (int i = 0; i < TRIES; i++) {
        if (run_file_read(file, info)) return true;
        nanosleep(&pause, NULL);
    }
    return false;
}

int service_stop(struct run_file *file, unsigned timeout_s)
{
    struct run_info info;
    const uint64_t t0_ms = clock_ms();
    if (!read_info(file, &info)) {
        fprintf(stderr, "%s: a service runs, but %s does not say which process it is\n", WHO,
                file->path);
        return 1;
    }
    fprintf(stderr, "%s: process %d finishes the requests that run, at most %u s\n", WHO,
            (int)info.pid, timeout_s);
    if (!stop(file, &info, timeout_s)) {
        fprintf(stderr, "%s: processes of the service %d do not end\n", WHO, (int)info.pid);
        return 1;
    }
    fprintf(stderr, "%s: ended after %.1f s\n", WHO, (double)(clock_ms() - t0_ms) * 1e-3);
    return 0;
}
