/* supervisor.h - starts the processes of a launch_plan, restarts those that end, stops them all.
 *
 * A process that dies is restarted at the same port after a pause: 0.5 s, doubling to 10 s, back to
 * 0.5 s for one that lived 30 s. One that ends with an error before it has ever served means wrong
 * options: everything stops. Processes run in sessions of their own, so Ctrl-C and a terminal that
 * closes reach only their parent. Life cycle: start, stop (again: at once), on_ended, free.
 * Owner: the command that starts them. Thread: loop. */
#ifndef BATON_DEPLOY_LAUNCH_SUPERVISOR_H
#define BATON_DEPLOY_LAUNCH_SUPERVISOR_H

#include "deploy/launch/launch_plan.h"
#include "shared/net/loop.h"

struct supervisor;

struct supervisor_options {
    struct loop *loop;
    const struct config *c;         /* --restart, --drain-timeout, --api-key */
    const struct launch_plan *plan; /* all borrowed until supervisor_free */
    const char *address;            /* where their ports of the API are asked */
    bool apart; /* each is ready by itself; else once it sees all nodes of the plan */
    /* All of them are ready, for the first time. */
    void (*on_ready)(void *arg);
    /* The process of this port answers, and says why it is not ready; "": it is. May be NULL. */
    void (*on_waiting)(void *arg, uint16_t port, const char *why);
    /* One ended with an error before it had served: supervisor_stop has begun. May be NULL. */
    void (*on_hopeless)(void *arg);
    /* A terminal closed. With --log-dir SIGHUP opens the logs again instead, here and there. */
    void (*on_hangup)(void *arg);
    /* All have ended after supervisor_stop; supervisor_free may be called. */
    void (*on_ended)(void *arg);
    void *arg;
};

struct supervisor *supervisor_start(const struct supervisor_options *o);
/* Asks all to end; those that take too long are killed. A second call ends them at once. */
void supervisor_stop(struct supervisor *s, int exit_status);
bool supervisor_is_stopping(const struct supervisor *s);
size_t supervisor_n_running(const struct supervisor *s);
/* What the first supervisor_stop said, or the status of the process that stopped everything. */
int supervisor_exit_status(const struct supervisor *s);
/* The fingerprint of the model that they serve; 0: none has been ready. */
uint64_t supervisor_model(const struct supervisor *s);
/* Prints which process stopped everything, if one did. */
void supervisor_say_culprit(const struct supervisor *s, const char *who);
void supervisor_free(struct supervisor *s);

#endif
