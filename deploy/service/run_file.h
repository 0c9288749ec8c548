/* run_file.h - which service of start_server runs: a file in a folder of this user, locked as long
 * as any process of the service lives.
 *
 * The lock is of the open file, which the service inherits, and with it every process that it
 * starts; so nothing has to be deleted, and a number that the kernel gave to another process says
 * nothing. The folder is BATON_RUN_DIR, or /tmp/baton-UID; a user has one service in each.
 * Life cycle: open; lock, write, or read; close. Thread: main. */
#ifndef BATON_DEPLOY_SERVICE_RUN_FILE_H
#define BATON_DEPLOY_SERVICE_RUN_FILE_H

#include <limits.h>
#include <stdbool.h>
#include <sys/types.h>

#include "shared/base/err.h"

struct run_file {
    int fd; /* -1: not open */
    char path[PATH_MAX];
};

struct run_info {
    pid_t pid;
    unsigned long long start; /* of that process, in ticks since the host's: tells it from a later
                               * one of the same number */
    char log[PATH_MAX];       /* its folder */
};

/* ERR_CONFIG, ERR_IO: the folder is another user's, or cannot be made. */
enum status run_file_open(struct run_file *f, struct err *err) MUST_CHECK;
/* False: a service has it. */
bool run_file_lock(struct run_file *f);
/* Of who has the lock: what the file said was of a service that has ended. */
void run_file_clear(struct run_file *f);
/* The lock stays with a process that this one starts, which inherits `fd`. */
enum status run_file_write(struct run_file *f, const struct run_info *info,
                           struct err *err) MUST_CHECK;
/* False: it says nothing that can be read. */
bool run_file_read(const struct run_file *f, struct run_info *info);
void run_file_close(struct run_file *f);

/* When a process began; 0: there is none of this number, or it has ended and was not waited for. */
unsigned long long run_process_start(pid_t pid);
/* Is it still the process that was written? */
bool run_info_lives(const struct run_info *info);

#endif
