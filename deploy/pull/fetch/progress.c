/* progress.c - see progress.h. Thread: main. */
#include "deploy/pull/fetch/progress.h"

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "shared/base/clock.h"
#include "shared/base/log.h"

enum { TERMINAL_EVERY_MS = 250, LOG_EVERY_MS = 10000, SAMPLE_EVERY_MS = 500 };

void progress_init(struct progress *p, bool quiet)
{
    *p = (struct progress){ .quiet = quiet, .terminal = isatty(STDERR_FILENO) == 1 };
    p->shown_ms = clock_ms();
}

const char *progress_size(uint64_t bytes, char out[PROGRESS_SIZE_TEXT])
{
    static const char *const UNITS[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB" };
    double v = (double)bytes;
    size_t i = 0;
    for (; v >= 1000 && i + 1 < sizeof UNITS / sizeof *UNITS; i++) v /= 1024;
    snprintf(out, PROGRESS_SIZE_TEXT,
             v < 10 && i    ? "%.2f %s"
             : v < 100 && i ? "%.1f %s"
                            : "%.0f %s",
             v, UNITS[i]);
    return out;
}

/* Bytes per second over the samples; 0: not known. */
static uint64_t rate(struct progress *p, uint64_t now_ms, uint64_t done)
{
    const size_t last = p->n_samples ? (p->n_samples - 1) % PROGRESS_SAMPLES : 0;
    if (!p->n_samples || now_ms - p->samples[last].ms >= SAMPLE_EVERY_MS) {
        p->samples[p->n_samples % PROGRESS_SAMPLES].ms = now_ms;
        p->samples[p->n_samples++ % PROGRESS_SAMPLES].bytes = done;
    }
    const size_t first = p->n_samples > PROGRESS_SAMPLES ? p->n_samples % PROGRESS_SAMPLES : 0;
    const uint64_t ms = now_ms - p->samples[first].ms, from = p->samples[first].bytes;
    return ms && done > from ? (done - from) * 1000 / ms : 0;
}

static void show_terminal(struct progress *p, uint64_t done, uint64_t checked, uint64_t per_s,
                          const char *name)
{
    char have[PROGRESS_SIZE_TEXT], all[PROGRESS_SIZE_TEXT], speed[PROGRESS_SIZE_TEXT];
    const uint64_t left_s = per_s ? (p->total - done) / per_s : 0;
    fprintf(stderr, "\r  %s of %s (%" PRIu64 " %%)", progress_size(done, have),
            progress_size(p->total, all), p->total ? done * 100 / p->total : 100);
    if (done < p->total && per_s)
        fprintf(stderr, ", %s/s, %" PRIu64 ":%02" PRIu64 " left", progress_size(per_s, speed),
                left_s / 60, left_s % 60);
    else if (done == p->total && checked < p->total)
        fprintf(stderr, ", checking: %" PRIu64 " %%", checked * 100 / p->total);
    fprintf(stderr, "  %.40s\033[K", name);
    fflush(stderr);
    p->line_is_open = true;
}

void progress_show(struct progress *p, uint64_t done, uint64_t checked, const char *name)
{
    const uint64_t now_ms = clock_ms(), per_s = rate(p, now_ms, done);
    char have[PROGRESS_SIZE_TEXT], all[PROGRESS_SIZE_TEXT], speed[PROGRESS_SIZE_TEXT];
    if (p->quiet || done > p->total ||
        now_ms - p->shown_ms < (p->terminal ? TERMINAL_EVERY_MS : LOG_EVERY_MS))
        return;
    p->shown_ms = now_ms;
    if (p->terminal) show_terminal(p, done, checked, per_s, name);
    else
        log_info("pulling",
                 "have=\"%s\" of=\"%s\" per_s=\"%s\" checked_percent=%" PRIu64 " file=%s",
                 progress_size(done, have), progress_size(p->total, all),
                 progress_size(per_s, speed), p->total ? checked * 100 / p->total : 100, name);
}

void progress_end_line(struct progress *p)
{
    if (p->line_is_open) fputs("\r\033[K", stderr);
    p->line_is_open = false;
}
