/* run_file.c - see run_file.h. */
#include "deploy/service/run_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { TEXT_MAX = PATH_MAX + 128, TRIES = 10, PAUSE_MS = 20 };

static void folder_of(char out[PATH_MAX])
{
    const char *given = getenv("BATON_RUN_DIR");
    if (given && *given) snprintf(out, PATH_MAX, "%s", given);
    else snprintf(out, PATH_MAX, "/tmp/baton-%u", (unsigned)getuid());
}

/* In a folder that everybody may write to, one of this name may be somebody else's. */
static enum status make_folder(const char *folder, struct err *err)
{
    struct stat st;
    if (mkdir(folder, 0700) != 0 && errno != EEXIST)
        return err_set(err, ERR_IO,
                       "the folder %.200s cannot be made: %s; name another one by BATON_RUN_DIR",
                       folder, strerror(errno));
    if (lstat(folder, &st) == 0 && S_ISDIR(st.st_mode) && st.st_uid == getuid() &&
        (st.st_mode & (S_IWGRP | S_IWOTH)) == 0)
        return OK;
    return err_set(err, ERR_CONFIG,
                   "%.200s is not a folder that only this user can write to; name another one by "
                   "BATON_RUN_DIR",
                   folder);
}

enum status run_file_open(struct run_file *f, struct err *err)
{
    char folder[PATH_MAX];
    folder_of(folder);
    f->fd = -1;
    TRY(make_folder(folder, err));
    if ((size_t)snprintf(f->path, sizeof f->path, "%s/start_server", folder) >= sizeof f->path)
        return err_set(err, ERR_CONFIG, "BATON_RUN_DIR is longer than a path can be");
    f->fd = open(f->path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (f->fd >= 0) return OK;
    return err_set(err, ERR_IO, "%.200s cannot be opened: %s", f->path, strerror(errno));
}

/* Who only looks has the lock for a moment. */
bool run_file_lock(struct run_file *f)
{
    const struct timespec pause = { 0, PAUSE_MS * 1000000L };
    for (int i = 0; i < TRIES; i++) {
        if (flock(f->fd, LOCK_EX | LOCK_NB) == 0) return true;
        nanosleep(&pause, NULL);
    }
    return false;
}

void run_file_clear(struct run_file *f)
{
    const int status = ftruncate(f->fd, 0);
    (void)status; /* run_file_write says it */
}

enum status run_file_write(struct run_file *f, const struct run_info *info, struct err *err)
{
    char text[TEXT_MAX];
    const int n = snprintf(text, sizeof text, "%lld %llu\n%s\n", (long long)info->pid, info->start,
                           info->log);
    if (n > 0 && (size_t)n < sizeof text && ftruncate(f->fd, 0) == 0 &&
        pwrite(f->fd, text, (size_t)n, 0) == n)
        return OK;
    return err_set(err, ERR_IO, "%.200s cannot be written: %s", f->path, strerror(errno));
}

bool run_file_read(const struct run_file *f, struct run_info *info)
{
    char text[TEXT_MAX];
    long long pid;
    int used = 0;
    const ssize_t n = pread(f->fd, text, sizeof text - 1, 0);
    if (n <= 0) return false;
    text[n] = 0;
    if (sscanf(text, "%lld %llu\n%n", &pid, &info->start, &used) != 2 || pid < 2 || pid > INT_MAX)
        return false;
    info->pid = (pid_t)pid;
    snprintf(info->log, sizeof info->log, "%.*s", (int)strcspn(text + used, "\n"), text + used);
    return true;
}

void run_file_close(struct run_file *f)
{
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
}

/* Field 22 of the line, behind a name in parentheses that may have any characters. */
unsigned long long run_process_start(pid_t pid)
{
    char path[64], line[1024];
    unsigned long long start = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "re");
    const size_t n = f ? fread(line, 1, sizeof line - 1, f) : 0;
    if (f) fclose(f);
    line[n] = 0;
    char *at = strrchr(line, ')');
    if (!at || at[1] != ' ' || at[2] == 'Z') return 0;
    for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
    if (at) start = strtoull(at + 1, NULL, 10);
    return start;
}

bool run_info_lives(const struct run_info *info)
{
    return info->start && run_process_start(info->pid) == info->start;
}
