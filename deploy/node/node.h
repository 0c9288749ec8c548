/* node.h - one whole node in one process: loop, engine, transfer, both workers, the entry side, the
 * HTTP face.
 *
 * Composition only: every part is made here, in order, and handed to the parts that need it;
 * nothing else knows more than its own header. The node listens before the model is loaded and
 * answers 503 until it is.
 *   start:  loop, HTTP ports ─▶ model (worker thread) ─▶ engine, kvtransfer, cluster, directory, workers, scheduler, serve ─▶ READY
 *   stop: first signal: leave the directory, let running requests end (up to shutdown_s), then take
 *   everything down in reverse
 * Thread: node_create and node_run on the main thread, which becomes the loop thread. */
#ifndef BATON_DEPLOY_NODE_NODE_H
#define BATON_DEPLOY_NODE_NODE_H

#include "deploy/node/node_options.h"
#include "shared/net/loop.h"
#include "shared/serve/serve.h"

struct node;

enum status node_create(const struct node_options *o, struct node **out,
                        struct err *err) MUST_CHECK;
/* Until a signal or node_stop; returns the process's exit status. */
int node_run(struct node *n);
void node_free(struct node *n);

/* For subcommands that use a node without HTTP (generate): called on the loop once it is ready. */
void node_on_ready(struct node *n, void (*fn)(void *arg), void *arg);
/* Called on the loop for the first signal once it is ready, in place of letting running requests
 * end; it calls node_stop. */
void node_on_signal(struct node *n, void (*fn)(void *arg), void *arg);
struct serve *node_serve(struct node *n);
struct loop *node_loop(struct node *n);
/* End node_run with this exit status. Thread: loop. */
void node_stop(struct node *n, int exit_status);

#endif
