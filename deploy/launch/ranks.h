/* ranks.h - which ranks a process is, or starts: a function of the options alone.
 *
 *     --data-parallel-size 8, hosts A and B with 4 each
 *       A: --data-parallel-size-local 4                                  ranks 0 .. 3
 *       B: --data-parallel-size-local 4 --data-parallel-start-rank 4     ranks 4 .. 7
 *
 * With --tensor-parallel-size each of these is a node of as many processes, on one host.
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

/* Numbers of data-parallel ranks: with tensor parallelism, of nodes. */
struct ranks {
    enum ranks_kind kind;
    bool experts;             /* they share the experts; else each node is on its own */
    uint32_t size;            /* on all hosts; 0 with RANKS_NONE */
    uint32_t first, n_local;  /* those of this host, as far as it is known: n_local 0, it is not */
    uint32_t rank, n_started; /* this one, or those that it starts, from `rank` on */
    uint32_t local;           /* the number of `rank` on its host, for lists of ports */
    char host[HOST_TEXT_MAX]; /* where rank 0 listens */
    uint16_t port;            /* and with which port; 0: the parent chooses one */
    bool headless;            /* RANKS_PARENT: without a port of the API */
    struct {
        uint32_t size, rank;      /* processes of a node, each with a part of every matrix; size 1:
                                   * one with the whole. rank: RANKS_ONE, which this is */
        char host[HOST_TEXT_MAX]; /* RANKS_ONE: where the first of its node listens */
        uint16_t port;
    } tp;
};

/* n_nodes: how many nodes `launch` starts; 0: for `serve`. ERR_CONFIG names the option that
 * contradicts another one. */
enum status ranks_read(const struct config *c, size_t n_nodes, struct ranks *out,
                       struct err *err) MUST_CHECK;
/* Which entry of lists of ports is this node's. */
uint32_t ranks_local_id(const struct config *c);
/* And which of --rdma-comm-ports is this process's: each of a node has one. */
uint32_t ranks_local_process(const struct config *c);
/* How many ranks share this host's CPUs and memory, as far as this process was told. */
uint32_t ranks_on_host(const struct config *c);
/* Are there ranks on other hosts? */
static inline bool ranks_elsewhere(const struct ranks *r) { return r->n_started < r->size; }
/* How many processes it starts. */
static inline uint32_t ranks_n_processes(const struct ranks *r)
{
    return r->n_started * r->tp.size;
}
/* The port at which ranks of several hosts find the cluster view when nothing else names it: the
 * one after that of rank 0, on its host. */
static inline uint16_t ranks_view_port(const struct ranks *r) { return (uint16_t)(r->port + 1); }
/* Appends the line of the start page about them; nothing with RANKS_NONE. */
void ranks_print(const struct ranks *r, struct buf *out);
/* Which of how many hosts this is. */
struct ranks_hosts {
    uint32_t n, index;
};
/* By --ips, --nnodes and --node-rank. ERR_CONFIG names the one at fault. */
enum status ranks_read_hosts(const struct config *c, struct ranks_hosts *out,
                             struct err *err) MUST_CHECK;
/* The address of --ips that is of this host; NULL: there is no list of several, or none is.
 * *index: its place. */
const char *ranks_own_ip(const struct config *c, size_t *index);

#endif
