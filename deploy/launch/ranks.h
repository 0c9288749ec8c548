/* ranks.h - which ranks of a group a process is, or starts: a function of the options alone.
 *
 *     --data-parallel-size 8, hosts A and B with 4 each
 *       A: --data-parallel-size-local 4                                  ranks 0 .. 3
 *       B: --data-parallel-size-local 4 --data-parallel-start-rank 4     ranks 4 .. 7
 *
 * A process that is told its rank is that one (an external load balancer has the ports); `serve`
 * without a rank is the parent of those of its host, as `launch` is of its nodes. Names are those
 * of vLLM; FastDeploy's are aliases. Hosts that are listed (--ips) divide the ranks evenly.
 * Thread: main, at start. */
#ifndef BATON_DEPLOY_LAUNCH_RANKS_H
#define BATON_DEPLOY_LAUNCH_RANKS_H

#include "deploy/options/config.h"
#include "shared/base/address/host_port.h"

enum ranks_kind {
    RANKS_NONE,  /* computes alone */
    RANKS_ONE,   /* is one rank */
    RANKS_PARENT /* starts the ranks of this host */
};

struct ranks {
    enum ranks_kind kind;
    uint32_t size;            /* of the group, on all hosts; 0 with RANKS_NONE */
    uint32_t first, n_local;  /* the ranks of this host */
    uint32_t rank;            /* RANKS_ONE: this one */
    char host[HOST_TEXT_MAX]; /* where rank 0 listens */
    uint16_t port;            /* and with which port; 0: the parent chooses one */
    bool headless;            /* RANKS_PARENT: without a port of the API */
};

/* n_nodes: how many nodes `launch` starts; 0: for `serve`. ERR_CONFIG names the option that
 * contradicts another one. */
enum status ranks_read(const struct config *c, size_t n_nodes, struct ranks *out,
                       struct err *err) MUST_CHECK;
/* Which entry of lists of ports is this process's. */
uint32_t ranks_local_id(const struct config *c);
/* How many ranks share this host's CPUs and memory, as far as this process was told. */
uint32_t ranks_on_host(const struct config *c);
/* Are there ranks on other hosts? */
static inline bool ranks_elsewhere(const struct ranks *r) { return r->n_local < r->size; }
/* The port at which ranks of several hosts find the cluster view when nothing else names it: the
 * one after that of rank 0, on its host. */
static inline uint16_t ranks_view_port(const struct ranks *r) { return (uint16_t)(r->port + 1); }
/* Appends the line of the start page about them; nothing with RANKS_NONE. */
void ranks_print(const struct ranks *r, struct buf *out);
/* The address of --ips that is of this host; NULL: there is no list of several, or none is.
 * *index: its place. */
const char *ranks_own_ip(const struct config *c, size_t *index);

#endif
