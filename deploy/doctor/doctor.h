/* doctor.h - the checks of `baton doctor`: each looks at one thing on this host and adds lines to
 * the report.
 *
 * A line says what was checked, ok / warn / fail, what was found and how to fix it. fail: a node
 * with these options would not start or not serve; warn: it would work, but worse than it could.
 * The checks take the options of the node that is about to start, so `baton doctor` followed by the
 * words after `baton serve` answers "would this work?".
 * Thread: main; checks may block for seconds. */
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
    char fix[DOCTOR_TEXT_MAX]; /* "" when there is nothing to fix */
};

struct doctor {
    const struct config *c;
    struct kvt_tuning tuning; /* from the environment, by doctor_check_tuning */
    /* with --device cuda, from doctor_check_gpu: bytes of GPU memory for weights and KV cache, and
     * all free bytes */
    uint64_t gpu_room, gpu_free;
    /* bytes of the KV cache of a node on the CPU with these options, from doctor_check_model; 0:
     * not known */
    uint64_t kv_bytes;
    struct doctor_line lines[DOCTOR_LINES_MAX];
    size_t n;
    struct buf tables;  /* text printed after the lines; the owner releases both buffers */
    struct buf members; /* further members of the JSON object, each after a comma */
};

/* Adds a line and returns it, so that doctor_fix can follow. `what` is kept. */
struct doctor_line *doctor_add(struct doctor *d, const char *what, enum doctor_result result,
                               const char *fmt, ...) __attribute__((format(printf, 4, 5)));
void doctor_fix(struct doctor_line *line, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
size_t doctor_count(const struct doctor *d, enum doctor_result result);
void doctor_print_text(const struct doctor *d, bool color, struct buf *out);
void doctor_print_json(const struct doctor *d, struct buf *out);

/* How --cache-transfer-protocol treats a protocol. */
enum doctor_asked {
    DOCTOR_NOT_ALLOWED, /* the list, given or default, does not name it */
    DOCTOR_ALLOWED,     /* in the default list: used where it works */
    DOCTOR_ASKED,       /* in a given list that names others as well */
    DOCTOR_ASKED_ALONE  /* the only one given: a node cannot start without it */
};
enum doctor_asked doctor_asked_for(const struct config *c, const char *protocol);
/* The result to report when the hardware of such a protocol is missing. */
enum doctor_result doctor_missing(enum doctor_asked asked);
/* Adds the line for a protocol whose library was missing when this binary was built. */
void doctor_add_not_built(struct doctor *d, const char *what, const char *protocol);

void doctor_check_host(struct doctor *d);       /* all of the following, in the report's order */
void doctor_check_cpu(struct doctor *d);        /* features, kernel backend, CPUs against quota */
void doctor_check_gpu(struct doctor *d);        /* --device cuda and its memory; before the model */
void doctor_check_model(struct doctor *d);      /* only with --model; its KV cache */
void doctor_check_memory(struct doctor *d);     /* free, cgroup limit, lockable; after the model */
void doctor_check_tiers(struct doctor *d);      /* memories behind the KV cache; after the model */
void doctor_check_huge_pages(struct doctor *d); /* transparent (private, shared) and reserved */
void doctor_check_system(struct doctor *d);     /* open files, memfd, local sockets, pidfd, clock */
void doctor_check_tuning(struct doctor *d);     /* KVCACHE_*, BATON_* variables; before rdma, ucx */
void doctor_check_modules(struct doctor *d); /* RDMA kernel modules; only when RDMA was asked for */
void doctor_check_rdma(struct doctor *d);    /* devices and their ports; needs libibverbs */
void doctor_check_ucx(struct doctor *d);     /* UCX's transports and devices; needs UCX */
void doctor_check_transports(struct doctor *d); /* is one usable? after rdma and ucx */
void doctor_check_ports(struct doctor *d);      /* the options' ports: free, not given twice */
void doctor_check_cluster(struct doctor *d);    /* the secret and the directory server */
/* Is it one? For doctor_check_cluster; `option` names it. */
void doctor_check_directory_server(struct doctor *d, const char *option, const char *host,
                                   const char *port);
void doctor_check_redis(struct doctor *d);   /* only with --scheduler-name splitwise or global */
void doctor_check_model(struct doctor *d);   /* only with --model */
void doctor_check_group(struct doctor *d);   /* only with ranks that share experts */
void doctor_check_options(struct doctor *d); /* what only node_options refuses; last */
void doctor_check_peers(struct doctor *d);   /* only with --peers: measures every pair (mesh.h) */

/* Bytes that this process may still use: free memory, or less under a cgroup limit. *limit is the
 * cgroup's limit, 0 when there is none. */
uint64_t doctor_free_memory(uint64_t *limit);
/* Does the node compute on a GPU? */
bool doctor_on_gpu(const struct doctor *d);
/* Reads the first line of a file, without the line break; false (and "") when the file cannot be
 * read or is empty. */
bool doctor_read_line(const char *path, char *out, size_t cap);

/* ---- NUMA nodes ---- */

/* Is n in a list in the kernel's format, "0-15,32-47"? */
bool doctor_list_has(const char *list, long n);
/* May this process use a CPU, or memory, of that node? Also false when the kernel does not say. */
bool doctor_runs_on_node(int node);
bool doctor_memory_on_node(int node);
/* The node that holds every CPU of this process's affinity mask; -1: several, or unknown. */
int doctor_only_node(void);

/* ---- checks of one RDMA port; separate, so that tests can pass their own port ---- */

struct rdma_port;
/* Adds the lines "RDMA port", "RDMA MTU", "RDMA GID", "flow control" and "NUMA" for a port that a
 * node would use. */
void doctor_check_port(struct doctor *d, const struct rdma_port *p);
/* Lists the enabled priorities as "3" or "3,5". `folder` is a sysfs folder with one file per
 * priority, "0".."7", each holding 0 or 1. False when the folder does not exist. */
bool doctor_priorities_on(const char *folder, char out[24]);

#endif
