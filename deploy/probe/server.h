/* server.h - the probe server, the remote side of `baton doctor --peers` and `baton bench kv
 * --peers`: it answers clients that prove the cluster secret.
 *
 *   listener ─▶ link (both sides prove the secret) ─▶ session ─▶ one step at a time on a worker
 *            ─▶ reply
 *
 * Bounds: PROBE_SERVER_CLIENTS_MAX connections with one step each; a client that is silent for
 * PROBE_SERVER_IDLE_MS is disconnected; a pool has at most PROBE_POOL_MAX bytes. Without a secret
 * the server listens on loopback only.
 * Life cycle: create, run until a signal, free.
 * Thread: the one that calls run becomes the loop thread. */
#ifndef BATON_DEPLOY_PROBE_SERVER_H
#define BATON_DEPLOY_PROBE_SERVER_H

#include "kvtransfer/tuning.h"
#include "shared/base/err.h"
#include "shared/base/str.h"

enum { PROBE_SERVER_CLIENTS_MAX = 16, PROBE_SERVER_IDLE_MS = 60000 };

struct probe_server;

struct probe_server_options {
    const char *host;         /* numeric; ERR_CONFIG if not loopback without a secret */
    uint16_t port;            /* 0: any free one */
    struct str secret;        /* borrowed until free */
    struct kvt_tuning tuning; /* its strings are borrowed */
};

enum status probe_server_create(const struct probe_server_options *o, struct probe_server **out,
                                struct err *err) MUST_CHECK;
uint16_t probe_server_port(const struct probe_server *s);
/* Serves until SIGINT or SIGTERM. */
void probe_server_run(struct probe_server *s);
void probe_server_free(struct probe_server *s);

/* Forks a probe server on a loopback port: this host's side of a measurement. It ends with its
 * parent. Call before any thread is started. probe_server_child_stop stops and reaps *pid. */
enum status probe_server_fork(const struct probe_server_options *o, int *pid, uint16_t *port,
                              struct err *err) MUST_CHECK;
void probe_server_child_stop(int pid);

#endif
