/* launch_view.h - where the processes of one parent find each other, and the secret they share.
 * Thread: main, at start. */
#ifndef BATON_DEPLOY_LAUNCH_LAUNCH_VIEW_H
#define BATON_DEPLOY_LAUNCH_LAUNCH_VIEW_H

#include "deploy/launch/ranks.h"

struct launch_view {
    const char *address;                /* as this host is reached by its own processes */
    bool own_secret;                    /* made here, in the environment: nobody else has it */
    bool here;                          /* the parent is the directory server, */
    uint16_t port;                      /* with this port; 0: any free one */
    char elsewhere[HOST_PORT_TEXT_MAX]; /* "" or the directory server on the host of rank 0 */
};

/* Nodes that only this parent brings together get a common secret of their own, through the
 * environment, when the user gave none. Those that meet others elsewhere, or here (is_joined),
 * cannot: nobody could join them. ERR_CONFIG: ranks of several hosts without a secret, or a port
 * that is none. */
enum status launch_view_choose(const struct config *c, const struct ranks *r, bool is_joined,
                               struct launch_view *out, struct err *err) MUST_CHECK;
/* Did the user give a cluster secret? */
bool launch_view_has_secret(const struct config *c);
/* Where to ask for the API of processes that listen at --host. */
const char *launch_view_api_host(const struct config *c);

#endif
