/* doctor.h - the checks of `baton doctor`: each looks at one thing of this host and adds one line
 * to the report.
 *
 * A line is what was checked, ok / warn / fail, what was found, and how to mend it. fail: a node
 * with these options would not start or not serve; warn: it would, but worse than it could. Checks
 * take the options of the node that is about to be started, so `baton doctor` followed by the words
 * after `baton serve` is the question "would this work?". Thread: main; checks may block for
 * seconds. */
#ifndef BATON_DEPLOY_DOCTOR_DOCTOR_H
#define BATON_DEPLOY_DOCTOR_DOCTOR_H

#include "deploy/options/config.h"
#include "kvtransfer/tuning.h"

enum { DOCTOR_LINES_MAX = 256, DOCTOR_TEXT_MAX = 640 };

enum doctor_result { DOCTOR_OK, DOCTOR_WARN, DOCTOR_FAIL };

struct doctor_line {
    const char *what; /* a literal */
    enum doctor_result result;
    char text[DOCTOR_TEXT_MAX];
    char fix[DOCTOR_TEXT_MAX]; /* "" when there is nothing to mend */
};

struct doctor {
    const struct config *c;
    struct kvt_tuning tuning;    /* of the environment; doctor_check_tuning fills it */
    uint64_t gpu_room, gpu_free; /* bytes of the card, with --device cuda: for weights
                                  * and KV cache, and all that are free;
                                  * doctor_check_gpu fills them */
    struct doctor_line lines[DOCTOR_LINES_MAX];
    size_t n;
    struct buf tables;  /* text printed after the lines; released by the owner, as the
                         * next */
    struct buf members; /* further members of the JSON object, each after a comma */
};

/* Add a line; returns it so that doctor_fix can follow. `what` is kept. */
struct doctor_line *doctor_add(struct doctor *d, const char *what, enum doctor_result result,
                               const char *fmt, ...) __attribute__((format(printf, 4, 5)));
void doctor_fix(struct doctor_line *line, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
size_t doctor_count(const struct doctor *d, enum doctor_result result);
void doctor_print_text(const struct doctor *d, bool color, struct buf *out);
void doctor_print_json(const struct doctor *d, struct buf *out);

/* How a protocol stands in --cache-transfer-protocol. */
enum doctor_asked {
    DOCTOR_NOT_ALLOWED, /* a list was given, or the default one, that does not name it */
    DOCTOR_ALLOWED,     /* by the default list: used where it works */
    DOCTOR_ASKED,       /* by a list that names others as well */
    DOCTOR_ASKED_ALONE  /* a node cannot start without it */
};
enum doctor_asked doctor_asked_for(const struct config *c, const char *protocol);
/* What it means that such a protocol's hardware is missing. */
enum doctor_result doctor_missing(enum doctor_asked asked);
/* The line for a protocol whose library was not there when this binary was built. */
void doctor_add_not_built(struct doctor *d, const char *what, const char *protocol);

void doctor_check_host(struct doctor *d);       /* all of the following, in the report's order */
void doctor_check_cpu(struct doctor *d);        /* features, kernel row, CPUs against quota */
void doctor_check_gpu(struct doctor *d);        /* the card of --device cuda and its memory; before
                                                 * the model, whose KV cache lies there */
void doctor_check_memory(struct doctor *d);     /* free memory, cgroup limit, locked memory against
                                                 * the KV cache */
void doctor_check_huge_pages(struct doctor *d); /* transparent ones, for private and for shared
                                                 * memory; reserved ones */
void doctor_check_system(struct doctor *d);     /* open files, memfd, local sockets, pidfd, clock */
void doctor_check_tuning(struct doctor *d);     /* KVCACHE_* and BATON_* variables; before rdma and
                                                 * ucx, which use them */
void doctor_check_modules(struct doctor *d);    /* kernel modules of rdma; only when it was asked
                                                 * for */
void doctor_check_rdma(struct doctor *d);       /* devices, links, MTU, GID, flow control, NUMA.
                                                 * Needs libibverbs (checks.c) */
void doctor_check_ucx(struct doctor *d);        /* UCX's transports and devices. Needs UCX
                                                 * (checks.c) */
void doctor_check_transports(struct doctor *d); /* is one of the allowed protocols there?
                                                 * After rdma and ucx */
void doctor_check_ports(struct doctor *d);      /* ports of the options: free, not given twice */
void doctor_check_cluster(struct doctor *d);    /* the secret, the holder of the cluster view */
void doctor_check_redis(struct doctor *d);      /* only with --scheduler-name splitwise or global */
void doctor_check_model(struct doctor *d);      /* only with --model */
void doctor_check_options(struct doctor *d);    /* what only a node's own reading of the options
                                                 * refuses; last */
void doctor_check_peers(struct doctor *d);      /* only with --peers: agents on other hosts, every
                                                 * pair connected and measured (mesh.h) */

/* Bytes this process may still use: free memory, or less where a cgroup says so. *limit is the
 * cgroup's limit, 0 when none. */
uint64_t doctor_free_memory(uint64_t *limit);
/* Does the node compute on a card? */
bool doctor_on_gpu(const struct doctor *d);
/* Bytes of the KV cache that a node with these options takes, as node_options reckons it without
 * the model. */
uint64_t doctor_kv_bytes(const struct config *c);
/* The first line of a file, without its end; false (and "") when it cannot be read or is empty. */
bool doctor_read_line(const char *path, char *out, size_t cap);

/* ---- NUMA nodes ---- */

/* Is n in a list of the kernel's form, "0-15,32-47"? */
bool doctor_list_has(const char *list, long n);
/* May this process use a CPU, or memory, of that node? false, too, when the kernel does not say. */
bool doctor_runs_on_node(int node);
bool doctor_memory_on_node(int node);
/* The node that has every CPU this process may use; -1: several, or not known. */
int doctor_only_node(void);

/* ---- one port's checks, apart from how the port was found, so that tests can hand in their own
 * ---- */

struct rdma_port;
/* "RDMA port", "RDMA MTU", "RDMA GID", "flow control", "NUMA": what there is to say about a port
 * that a node would use. */
void doctor_check_port(struct doctor *d, const struct rdma_port *p);
/* Priorities that a sysfs folder of one file per priority ("0".."7", each 0 or 1) switches on, as
 * "3" or "3,5"; false: not there. */
bool doctor_priorities_on(const char *folder, char out[24]);

#endif
