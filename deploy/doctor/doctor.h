/* doctor.h - the checks of `baton doctor`: each looks at one thing of this host and adds one line to the report.
 *
 * A line is what was checked, ok / warn / fail, what was found, and how to mend it. fail: a node with these options would not
 * start or not serve; warn: it would, but worse than it could. Checks take the options of the node that is about to be started,
 * so `baton doctor` followed by the words after `baton serve` is the question "would this work?".
 * Thread: main; checks may block for seconds. */
#ifndef BATON_DEPLOY_DOCTOR_DOCTOR_H
#define BATON_DEPLOY_DOCTOR_DOCTOR_H

#include "shared/base/config.h"

enum { DOCTOR_LINES_MAX = 128, DOCTOR_TEXT_MAX = 640 };

enum doctor_result { DOCTOR_OK, DOCTOR_WARN, DOCTOR_FAIL };

struct doctor_line {
    const char        *what; /* a literal */
    enum doctor_result result;
    char               text[DOCTOR_TEXT_MAX];
    char               fix[DOCTOR_TEXT_MAX]; /* "" when there is nothing to mend */
};

struct doctor {
    const struct config *c;
    struct doctor_line   lines[DOCTOR_LINES_MAX];
    size_t               n;
};

/* Add a line; returns it so that doctor_fix can follow. `what` is kept. */
struct doctor_line *doctor_add(struct doctor *d, const char *what, enum doctor_result result, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
void   doctor_fix(struct doctor_line *line, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
size_t doctor_count(const struct doctor *d, enum doctor_result result);
void   doctor_print_text(const struct doctor *d, bool color, struct buf *out);
void   doctor_print_json(const struct doctor *d, struct buf *out);

void doctor_check_cpu(struct doctor *d);     /* features, kernel row, CPUs against quota */
void doctor_check_memory(struct doctor *d);  /* free memory, cgroup limit, locked memory */
void doctor_check_system(struct doctor *d);  /* open files, memfd, local sockets, pidfd, clock */
void doctor_check_ports(struct doctor *d);   /* ports of the options: free, not given twice */
void doctor_check_cluster(struct doctor *d); /* the secret, the holder of the cluster view */
void doctor_check_redis(struct doctor *d);   /* only with --scheduler-name splitwise or global */
void doctor_check_model(struct doctor *d);   /* only with --model */

/* Bytes this process may still use: free memory, or less where a cgroup says so. *limit is the cgroup's limit, 0 when none. */
uint64_t doctor_free_memory(uint64_t *limit);

#endif
