/* log.c - one line, one write(2): time, level, name, event, key=value.
 *
 *     2026-01-31T12:00:00.123Z warn prefill-0 kvt peer lost request=00000000000000a7 peer=10.0.0.2
 *
 * Rate limit: at most RATE_PER_S warnings or errors of one event per second; the next line written
 * later reports how many were suppressed.
 * A line that the file does not take (a full disk) is lost there and counted: stderr says so when
 * it begins and when the cause changes, and the file itself as soon as it takes lines again.
 * This file holds the log's global state behind one lock, except the level, which is read before
 * the lock, and what SIGHUP sets.
 * Thread: any. */
#include "shared/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "shared/base/clock.h"

enum {
    LINE_MAX_BYTES = 4096,
    NAME_MAX_BYTES = 64,
    EVENT_MAX_BYTES = 64,
    RATE_PER_S = 20,
    RATE_SLOTS = 64,
    ROTATED_SUFFIX_MAX = 12 /* ".1" to ".4294967295" */
};

/* Lines of one event in the current second. When more than RATE_SLOTS events repeat within a
 * second, the newcomers share a slot and its limit, so that the log stays bounded. */
struct log_rate {
    char event[EVENT_MAX_BYTES];
    uint64_t second;
    uint32_t n_written, n_dropped;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char node_name[NAME_MAX_BYTES] = "-";
static struct log_rate rates[RATE_SLOTS];
static uint32_t n_dropped_all;    /* suppressed in all slots, not yet reported */
static atomic_int level_now = -1; /* -1: BATON_LOG_LEVEL not read yet */
static char file_path[PATH_MAX - ROTATED_SUFFIX_MAX]; /* of the file; "": none */
static atomic_int file_fd = -1;
static uint64_t file_bytes, file_bytes_max; /* written, and when it is rotated; 0: never */
static unsigned n_old_files;
static bool console = true; /* lines also go to standard error */
static struct {
    uint64_t n; /* lines since the file was last written; 0: none */
    int error;  /* why the last one was lost: errno */
    bool torn;  /* the file ends with a part of a line */
} lost;
static atomic_bool reopen; /* SIGHUP came */

static const char *const level_names[] = { "error", "warn", "info", "debug" };

static int level_from_env(void)
{
    const char *text = getenv("BATON_LOG_LEVEL");
    for (int i = LOG_ERROR; text && i <= LOG_DEBUG; i++)
        if (strcasecmp(text, level_names[i]) == 0) return i;
    return LOG_INFO;
}

enum log_level log_level(void)
{
    int level = atomic_load_explicit(&level_now, memory_order_relaxed);
    if (level < 0) {
        int unset = -1;
        level = level_from_env();
        /* If log_set_level ran on another thread meanwhile, its value stays. */
        if (!atomic_compare_exchange_strong(&level_now, &unset, level)) level = unset;
    }
    return (enum log_level)level;
}

void log_set_level(enum log_level level)
{
    atomic_store_explicit(&level_now, (int)level, memory_order_relaxed);
}

void log_set_name(const char *name)
{
    pthread_mutex_lock(&lock);
    snprintf(node_name, sizeof node_name, "%s", name && *name ? name : "-");
    pthread_mutex_unlock(&lock);
}

/* mkdir -p. */
static enum status make_dirs(const char *dir)
{
    char path[PATH_MAX];
    size_t n = strlen(dir);
    if (n == 0 || n >= sizeof path) return ERR_IO;
    memcpy(path, dir, n + 1);
    for (size_t i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i] != 0) continue;
        char kept = path[i];
        path[i] = 0;
        if (mkdir(path, 0777) != 0 && errno != EEXIST) return ERR_IO;
        path[i] = kept;
    }
    return OK;
}

/* Returns 0 or an errno; *written counts what was taken. Short writes happen only on full pipes and
 * disks. */
static int write_whole(int fd, const char *p, size_t n, size_t *written)
{
    *written = 0;
    while (*written < n) {
        ssize_t w = write(fd, p + *written, n - *written);
        if (w < 0 && errno == EINTR) continue;
        if (w <= 0) return w < 0 ? errno : EIO;
        *written += (size_t)w;
    }
    return 0;
}

/* A standard error that cannot be written cannot be reported. */
static void write_stderr(const char *p, size_t n)
{
    size_t written;
    (void)write_whole(STDERR_FILENO, p, n, &written);
}

/* ---- the file ---- */

/* Opens the file, or keeps the one that is open. Lock held. */
static enum status open_file(void)
{
    struct stat st;
    int fd = open(file_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) return ERR_IO;
    file_bytes = fstat(fd, &st) == 0 ? (uint64_t)st.st_size : 0;
    if (file_fd >= 0) close(file_fd);
    file_fd = fd;
    lost.torn = false;
    return OK;
}

enum status log_set_file(const struct log_file_options *o)
{
    TRY(make_dirs(o->dir));
    pthread_mutex_lock(&lock);
    bool fits = (size_t)snprintf(file_path, sizeof file_path, "%s/%s", o->dir, o->name) <
                sizeof file_path;
    file_bytes_max = o->max_bytes;
    n_old_files = o->n_old;
    enum status st = fits ? open_file() : ERR_IO;
    pthread_mutex_unlock(&lock);
    return st;
}

void log_set_console(bool on)
{
    pthread_mutex_lock(&lock);
    console = on;
    pthread_mutex_unlock(&lock);
}

void log_reopen(void) { atomic_store_explicit(&reopen, true, memory_order_relaxed); }

static void on_hangup(int signum)
{
    (void)signum;
    log_reopen();
}

void log_reopen_on_hangup(void)
{
    struct sigaction a = { .sa_handler = on_hangup, .sa_flags = SA_RESTART };
    sigaction(SIGHUP, &a, NULL);
}

/* NAME.1 becomes NAME.2 and so on, NAME becomes NAME.1. Lock held. */
static void rotate(void)
{
    char from[PATH_MAX], to[PATH_MAX];
    for (unsigned i = n_old_files; i > 0; i--) {
        snprintf(to, sizeof to, "%s.%u", file_path, i);
        if (i > 1) snprintf(from, sizeof from, "%s.%u", file_path, i - 1);
        else snprintf(from, sizeof from, "%s", file_path);
        (void)rename(from, to); /* one that does not exist yet */
    }
    if (n_old_files == 0) (void)unlink(file_path);
    if (open_file() != OK) file_bytes = 0; /* goes on in the old one */
}

/* Writes "time level name event " into line[cap] and returns the length. Lock held. */
static size_t line_head(char *line, size_t cap, enum log_level level, const char *event)
{
    struct timespec now;
    struct tm utc;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    size_t n = strftime(line, cap, "%Y-%m-%dT%H:%M:%S", &utc);
    int m = snprintf(line + n, cap - n, ".%03dZ %s %s %.*s ", (int)(now.tv_nsec / 1000000),
                     level_names[level], node_name, EVENT_MAX_BYTES, event);
    return m > 0 ? n + (size_t)m : n;
}

/* Appends to the file; returns 0 or an errno. Lock held. */
static int append(const char *p, size_t n)
{
    size_t written;
    int error = write_whole(file_fd, p, n, &written);
    file_bytes += written;
    if (written > 0) lost.torn = error != 0;
    return error;
}

/* Lock held. */
static void count_lost(int error)
{
    char line[PATH_MAX + 512];
    bool is_new = lost.n == 0 || error != lost.error;
    lost.n++;
    lost.error = error;
    if (!is_new) return;
    size_t n = line_head(line, sizeof line, LOG_ERROR, "log file not written");
    int m = snprintf(line + n, sizeof line - n,
                     "file=%s why=\"%s\" lost=%llu lines go to standard error alone, and are "
                     "counted, until it can be written again\n",
                     file_path, strerror(error), (unsigned long long)lost.n);
    if (m > 0) write_stderr(line, n + (size_t)m < sizeof line ? n + (size_t)m : sizeof line - 1);
}

/* Says in the file how many lines it lacks; returns 0 or an errno. Lock held. */
static int report_lost(void)
{
    char line[512] = "\n";
    size_t begin = 1, n = 1 + line_head(line + 1, sizeof line - 1, LOG_WARN, "log lines lost");
    int m = snprintf(line + n, sizeof line - n, "n=%llu why=\"%llu lines were lost: %s\"\n",
                     (unsigned long long)lost.n, (unsigned long long)lost.n, strerror(lost.error));
    if (m > 0) n += (size_t)m < sizeof line - n ? (size_t)m : sizeof line - n - 1;
    if (lost.torn) begin = 0; /* the part of a line gets its end */
    int error = append(line + begin, n - begin);
    if (error != 0) return error;
    lost.n = 0;
    write_stderr(line + 1, n - 1);
    return 0;
}

/* Lock held. */
static void write_file(const char *line, size_t n)
{
    if (file_fd < 0) return;
    /* When it cannot be opened again, lines go on into the old one. */
    if (atomic_exchange_explicit(&reopen, false, memory_order_relaxed)) (void)open_file();
    if (file_bytes_max && file_bytes + n > file_bytes_max && file_bytes > 0) rotate();
    int error = lost.n > 0 ? report_lost() : 0;
    if (error == 0) error = append(line, n);
    if (error != 0) count_lost(error);
}

/* Replaces control characters by blanks and ends the line, which has room for n + 1 bytes; returns
 * its length. */
static size_t line_end(char *line, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)line[i] < ' ' || line[i] == 0x7f) line[i] = ' ';
    while (n > 0 && line[n - 1] == ' ') n--;
    line[n++] = '\n';
    return n;
}

/* `line` has room for n + 1 bytes. Lock held. */
static void line_write(char *line, size_t n)
{
    n = line_end(line, n);
    if (console) write_stderr(line, n);
    write_file(line, n);
    if (!console && (file_fd < 0 || lost.n > 0)) write_stderr(line, n);
}

static void report_dropped(struct log_rate *r)
{
    char line[512];
    size_t n = line_head(line, sizeof line - 1, LOG_WARN, "log lines held back");
    int m = snprintf(line + n, sizeof line - 1 - n, "event=\"%s\" n=%u", r->event, r->n_dropped);
    if (m > 0) line_write(line, n + (size_t)m);
    n_dropped_all -= r->n_dropped;
    r->n_dropped = 0;
}

/* Reports what was suppressed in past seconds. Lock held. */
static void report_past(uint64_t second)
{
    for (size_t i = 0; n_dropped_all > 0 && i < RATE_SLOTS; i++)
        if (rates[i].n_dropped && rates[i].second != second) report_dropped(&rates[i]);
}

/* Finds the slot of an event: its own, else one of a past second, else a shared one. Lock held. */
static struct log_rate *rate_slot(const char *event, uint64_t second)
{
    struct log_rate *idle = NULL;
    for (size_t i = 0; i < RATE_SLOTS; i++) {
        if (strncmp(rates[i].event, event, sizeof rates[i].event - 1) == 0) return &rates[i];
        if (!idle && rates[i].second != second) idle = &rates[i];
    }
    if (!idle) return &rates[0];
    snprintf(idle->event, sizeof idle->event, "%s", event);
    return idle;
}

/* Lock held. Call after report_past: slots of past seconds then hold no unreported count. */
static bool rate_allows(const char *event, uint64_t second)
{
    struct log_rate *r = rate_slot(event, second);
    if (r->second != second) {
        r->second = second;
        r->n_written = 0;
    }
    if (r->n_written < RATE_PER_S) {
        r->n_written++;
        return true;
    }
    r->n_dropped++;
    n_dropped_all++;
    return false;
}

void log_line(enum log_level level, const char *event, const char *fmt, ...)
{
    if (level > log_level()) return;
    int saved_errno = errno; /* callers log first and read errno afterwards */
    char line[LINE_MAX_BYTES];
    uint64_t second = clock_ms() / 1000;
    pthread_mutex_lock(&lock);
    report_past(second);
    if (level > LOG_WARN || rate_allows(event, second)) {
        va_list ap;
        va_start(ap, fmt);
        size_t n = line_head(line, sizeof line - 1, level, event), room = sizeof line - 1 - n;
        int m = vsnprintf(line + n, room, fmt, ap);
        va_end(ap);
        if (m > 0) n += (size_t)m < room ? (size_t)m : room - 1;
        line_write(line, n);
    }
    pthread_mutex_unlock(&lock);
    errno = saved_errno;
}

void log_fatal(const char *who, const char *sentence)
{
    char line[LINE_MAX_BYTES];
    pthread_mutex_lock(&lock);
    int n = snprintf(line, sizeof line - 1, "%s: %s", who, sentence);
    size_t len = n < 0 ? 0 : (size_t)n < sizeof line - 1 ? (size_t)n : sizeof line - 2;
    line[len++] = '\n';
    write_stderr(line, len);
    len = line_head(line, sizeof line - 1, LOG_ERROR, "process ends");
    n = snprintf(line + len, sizeof line - 1 - len, "why=\"%s\"", sentence);
    if (n > 0) len += (size_t)n < sizeof line - 1 - len ? (size_t)n : sizeof line - 2 - len;
    write_file(line, line_end(line, len));
    pthread_mutex_unlock(&lock);
}

void log_last_words(const char *sentence, size_t n)
{
    size_t written;
    write_stderr(sentence, n);
    if (file_fd >= 0) (void)write_whole(file_fd, sentence, n, &written);
}
