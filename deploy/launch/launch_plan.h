/* launch_plan.h - which processes `baton launch` starts, or `baton serve` for the ranks behind its
 * port, with which arguments. Thread: main. */
#ifndef BATON_DEPLOY_LAUNCH_LAUNCH_PLAN_H
#define BATON_DEPLOY_LAUNCH_LAUNCH_PLAN_H

#include "deploy/launch/ranks.h"
#include "scheduler/directory/directory.h"
#include "shared/base/address/port_claim.h"
#include "shared/base/mem.h"

enum { LAUNCH_NODES_MAX = 256, LAUNCH_ARGS_MAX = 256 };

struct launch_node {
    enum node_role role;
    uint16_t port;               /* of the API: a restarted node keeps its address; 0: a process
                                  * that follows the first of its node has none */
    size_t first;                /* the process that its node begins with: itself, if alone */
    uint16_t meet_port;          /* where the processes of its node meet; 0: it is alone */
    char *argv[LAUNCH_ARGS_MAX]; /* NULL-ended; in the plan's arena */
};

struct launch_plan {
    struct arena arena;
    struct launch_node *nodes;
    size_t n;
    struct ranks ranks; /* of the nodes; its port is chosen */
    struct port_claims claims;
};

struct launch_args {
    const char *program;
    const char *directory; /* host:port where the nodes register; NULL: as their options say */
    bool holds_view;       /* the directory is the parent's: its control port is no node's */
    bool behind;           /* ranks of `serve`, behind its port; else the nodes of `launch` */
    enum node_role role;   /* of those ranks */
    struct ranks ranks;    /* ranks_read, or RANKS_NONE */
};

/* How many nodes `launch` was asked for. */
size_t launch_plan_n_nodes(const struct config *c);
/* ERR_CONFIG names the option at fault. The caller releases `out` in any case. */
enum status launch_plan_make(const struct config *c, const struct launch_args *w,
                             struct launch_plan *out, struct err *err) MUST_CHECK;
/* Reads entry i of a list of ports: -1 where there is none, or where "-1" leaves the choice. */
enum status launch_listed_port(const struct config *c, const char *name, size_t i, int64_t *out,
                               struct err *err) MUST_CHECK;
/* A port that nobody has, nor a list of the command names, nor the plan; 0: none. */
uint16_t launch_plan_free_port(struct launch_plan *p, const struct config *c);
/* Appends the ports of the API, " 8000, 8001"; processes without one are left out. */
void launch_plan_print_ports(const struct launch_plan *p, struct buf *out);
void launch_plan_release(struct launch_plan *p);

#endif
