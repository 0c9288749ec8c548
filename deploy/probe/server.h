/* probe/server.h - the other side of `baton doctor --peers` and `baton bench kv --peers`: answers
 * whoever proves the cluster secret.
 *
 *   listener ─▶ link (shared/cluster/link.h: both sides prove the secret) ─▶ visitor ─▶ one step at a time on a worker ─▶ reply
 *
 * Bounded: PROBE_SERVER_CLIENTS_MAX connections, one step each at a time, a visitor that asks
 * nothing for PROBE_SERVER_IDLE_MS is sent away, a pool is at most PROBE_POOL_MAX. Without a secret
 * it listens on loopback only. Life cycle: create, run until a signal or probe_server_stop, free.
 * Thread: the one that calls run becomes the loop thread. */
#ifndef BATON_DEPLOY_PROBE_SERVER_H
#define BATON_DEPLOY_PROBE_SERVER_H

#include "kvtransfer/tuning.h"
#include "shared/base/err.h"
#include "shared/base/str.h"

enum { PROBE_SERVER_CLIENTS_MAX = 16, PROBE_SERVER_IDLE_MS = 60000 };

struct probe_server;

struct probe_server_options {
    const char *host;         /* numeric; ERR_CONFIG when it is not loopback and there is no
                               * secret */
    uint16_t port;            /* 0: any free one */
    struct str secret;        /* borrowed until free */
    struct kvt_tuning tuning; /* its strings are borrowed */
};

enum status probe_server_create(const struct probe_server_options *o, struct probe_server **out,
                                struct err *err) MUST_CHECK;
uint16_t probe_server_port(const struct probe_server *s);
/* Serve until SIGINT or SIGTERM. */
void probe_server_run(struct probe_server *s);
void probe_server_free(struct probe_server *s);

/* An agent in a process of its own on a loopback port, ended with its parent: this host's part in a
 * measurement. Call it before threads are started. *pid is the child's; probe_server_child_stop
 * stops and reaps it. */
enum status probe_server_fork(const struct probe_server_options *o, int *pid, uint16_t *port,
                              struct err *err) MUST_CHECK;
void probe_server_child_stop(int pid);

#endif
