/* service_start.h - starts a service in the background, and stops it: the work of start_server and
 * stop_server (deploy/cli).
 *
 *     start ─▶ `baton serve` in a session of its own ─▶ it is ready, or listens ─▶ the caller goes
 *     stop  ─▶ SIGTERM ─▶ running requests end ─▶ its processes end ─▶ the caller goes
 *
 * What the service prints goes to console.log in its log folder. A start that fails prints the end
 * of that. Ctrl-C ends a start, and the service with it.
 * Thread: main. */
#ifndef BATON_DEPLOY_SERVICE_SERVICE_START_H
#define BATON_DEPLOY_SERVICE_SERVICE_START_H

#include "deploy/service/run_file.h"

struct service_start {
    struct run_file *file; /* locked */
    const char *log_dir;   /* made if it is not there */
    char **words;          /* [n_words], options of `serve` */
    int n_words;
    bool until_ready; /* else until it listens: it may wait for other hosts */
};

/* Returns once the service is there, as start_server's exit status: 0, 1 when it ended, 130 after a
 * signal. */
int service_start(const struct service_start *s);

/* Ends the service of a file that run_file_lock could not have, within timeout_s; what is left then
 * is ended at once. Returns the exit status. */
int service_stop(struct run_file *file, unsigned timeout_s);

#endif
