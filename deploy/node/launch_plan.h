/* launch_plan.h - which processes `baton launch` starts, with which arguments. Thread: main. */
#ifndef BATON_DEPLOY_NODE_LAUNCH_PLAN_H
#define BATON_DEPLOY_NODE_LAUNCH_PLAN_H

#include "deploy/options/config.h"
#include "scheduler/directory/directory.h"
#include "shared/base/mem.h"

enum { LAUNCH_NODES_MAX = 256, LAUNCH_ARGS_MAX = 256 };

struct launch_node {
    enum node_role role;
    uint16_t port;               /* never 0: a restarted node keeps its address */
    char *argv[LAUNCH_ARGS_MAX]; /* NULL-ended; in the plan's arena */
};

struct launch_plan {
    struct arena arena;
    struct launch_node *nodes;
    size_t n;
};

/* `directory_address` is host:port of the launcher's own directory, NULL when the nodes use Redis.
 * ERR_CONFIG names the option at fault. */
enum status launch_plan_make(const struct config *c, const char *program,
                             const char *directory_address, struct launch_plan *out,
                             struct err *err) MUST_CHECK;
/* Reads entry i of a list of ports: -1 where there is none, or where "-1" leaves the choice. */
enum status launch_listed_port(const struct config *c, const char *name, size_t i, int64_t *out,
                               struct err *err) MUST_CHECK;
void launch_plan_release(struct launch_plan *p);

#endif
