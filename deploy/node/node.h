/* node.h - one whole node in one process: loop, engine, KV transfer, prefill and decode workers,
 * scheduler, API server.
 *
 * The node only composes: it creates every part in order and hands it to the parts that need it.
 * It listens before the model is loaded and answers 503 until it is ready.
 *   start: loop, HTTP ports, cluster, directory ─▶ model, engine, KV transfer (made on a worker
 *          thread) ─▶ workers, scheduler, serve ─▶ READY
 *   stop:  the first signal leaves the directory and lets running requests end (up to
 *          shutdown_s); then every part is taken down in reverse order
 *
 * Thread: node_create and node_run on the main thread, which becomes the loop thread. */
#ifndef BATON_DEPLOY_NODE_NODE_H
#define BATON_DEPLOY_NODE_NODE_H

#include "deploy/node/node_options.h"
#include "shared/net/loop.h"
#include "shared/serve/serve.h"

struct node;

enum status node_create(const struct node_options *o, struct node **out,
                        struct err *err) MUST_CHECK;
/* Runs until a signal or node_stop; returns the process's exit status. */
int node_run(struct node *n);
void node_free(struct node *n);

/* For the parent of ranks (node_options.no_engine), which runs the loop and takes the signals
 * itself: begins to load, instead of node_run. on_failed: it cannot start, and has said why; the
 * owner calls node_stop. */
void node_start(struct node *n, void (*on_failed)(void *arg), void *arg);
/* All ranks have been ready; model: the fingerprint in their records. */
void node_ranks_ready(struct node *n, uint64_t model);
/* Why the rank of this port is not ready, for /ready; "": it is. */
void node_ranks_wait(struct node *n, uint16_t port, const char *why);
bool node_is_ready(const struct node *n);
/* Takes no more requests; on_drained comes once, when those that run have ended or have had
 * shutdown_s. Only of a node that is ready. */
void node_drain(struct node *n, void (*on_drained)(void *arg), void *arg);
uint16_t node_http_port(const struct node *n);
/* Where others register; 0: it is no directory server. */
uint16_t node_directory_port(const struct node *n);

/* For subcommands that use a node without HTTP (generate): calls fn on the loop once the
 * node is ready. */
void node_on_ready(struct node *n, void (*fn)(void *arg), void *arg);
/* Calls fn on the loop at the first signal to a ready node, instead of waiting for running
 * requests; fn calls node_stop. */
void node_on_signal(struct node *n, void (*fn)(void *arg), void *arg);
struct serve *node_serve(struct node *n);
struct loop *node_loop(struct node *n);
/* Ends node_run with this exit status. Thread: loop. */
void node_stop(struct node *n, int exit_status);

#endif
