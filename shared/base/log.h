/* log.h - log lines for people and machines: a lower-case event, then key=value.
 *
 *     log_warn("kvt peer lost", "request=%016llx peer=%s after_ms=%d", id, peer, ms);
 *
 * Lines about a request have its number in the cluster, request=<16 hex digits>, on every node that
 * works on it; those of its entry node also have what the client calls it, api_request=<its
 * x-request-id>. sequence=<16 hex digits> is its number in one node's engine and KV transfer.
 *
 * Levels: error, an operator must act; warn, degraded; info, per node event; debug, per request.
 * The code that detects an error logs it, once. Lines go to stderr, one write each, and start with
 * the time (RFC 3339). BATON_LOG_LEVEL or log_set_level sets the level. With --log-dir
 * (log_set_file) lines also go to a file, which is rotated when it is full; when that cannot be
 * written, stderr says so, and the file how many lines it lacks.
 * Thread: any. */
#ifndef BATON_BASE_LOG_H
#define BATON_BASE_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shared/base/status.h"

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

void log_set_level(enum log_level level);
enum log_level log_level(void);
/* Sets the name that starts each line, e.g. "prefill-0"; copied. */
void log_set_name(const char *name);
struct log_file_options {
    const char *dir, *name; /* DIR/NAME; the folder and its parents are made */
    uint64_t max_bytes;     /* a fuller file becomes NAME.1, that one NAME.2, ...; 0: never */
    unsigned n_old;         /* how many of these are kept */
};
/* Also append to a file. ERR_IO. */
enum status log_set_file(const struct log_file_options *o) MUST_CHECK;
/* Off: lines go to the file alone, as long as it can be written; what a process says at its end
 * (log_fatal, log_last_words) goes to stderr all the same. */
void log_set_console(bool on);
/* From now on SIGHUP lets the file be opened again, for a logrotate that has renamed it. */
void log_reopen_on_hangup(void);
/* The same, for who handles SIGHUP itself: the file is opened again before the next line. */
void log_reopen(void);
/* Says why this process ends: "WHO: SENTENCE" on stderr, as commands report errors, and a line of
 * level error in the file. */
void log_fatal(const char *who, const char *sentence);
/* Writes a sentence, with its line break, to stderr and the file as it is. Takes no lock and no
 * memory: for a process that aborts. */
void log_last_words(const char *sentence, size_t n);
void log_line(enum log_level level, const char *event, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

#define log_error(event, ...) log_line(LOG_ERROR, event, __VA_ARGS__)
#define log_warn(event, ...)  log_line(LOG_WARN, event, __VA_ARGS__)
#define log_info(event, ...)  log_line(LOG_INFO, event, __VA_ARGS__)
#define log_debug(event, ...)                                                                      \
    do {                                                                                           \
        if (log_level() >= LOG_DEBUG) log_line(LOG_DEBUG, event, __VA_ARGS__);                     \
    } while (0)

#endif
