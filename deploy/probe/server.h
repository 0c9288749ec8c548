/* probe/server.h - the other side of `baton doctor --peers` and `baton bench kv --peers`: answers whoever
 * proves the cluster secret.
 *
 *   listener ─▶ link (shared/cluster/link.h: both sides prove the secret) ─▶ visitor ─▶ one step at a time on a worker ─▶ reply
 *
 * Bounded: AGENT_VISITORS_MAX connections, one step each at a time, a visitor that asks nothing for
 * AGENT_IDLE_MS is sent away, a pool is at most PROBE_POOL_MAX. Without a secret it listens on
 * loopback only. Life cycle: create, run until a signal or agent_stop, free. Thread: the one that
 * calls run becomes the loop thread. */
#ifndef BATON_DEPLOY_PROBE_SERVER_H
#define BATON_DEPLOY_PROBE_SERVER_H

#include "kvtransfer/tuning.h"
#include "shared/base/err.h"
#include "shared/base/str.h"

enum { AGENT_VISITORS_MAX = 16, AGENT_IDLE_MS = 60000 };

struct agent;

struct agent_options {
    const char *host;         /* numeric; ERR_CONFIG when it is not loopback and there is no
                               * secret */
    uint16_t port;            /* 0: any free one */
    struct str secret;        /* borrowed until free */
    struct kvt_tuning tuning; /* its strings are borrowed */
};

enum status agent_create(const struct agent_options *o, struct agent **out,
                         struct err *err) MUST_CHECK;
uint16_t agent_port(const struct agent *a);
/* Serve until SIGINT or SIGTERM. */
void agent_run(struct agent *a);
void agent_free(struct agent *a);

/* An agent in a process of its own on a loopback port, ended with its parent: this host's part in a
 * measurement. Call it before threads are started. *pid is the child's; agent_child_end stops and
 * reaps it. */
enum status agent_fork(const struct agent_options *o, int *pid, uint16_t *port,
                       struct err *err) MUST_CHECK;
void agent_child_end(int pid);

#endif
