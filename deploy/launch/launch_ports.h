/* launch_ports.h - free ports of this host for the processes that a launcher starts.
 *
 * Between the choice of a port and the bind of the process that gets it another launcher may choose
 * the same one. So whoever chooses at random claims it first, by the name of a socket that all
 * launchers of the host see until it is released. Thread: main. */
#ifndef BATON_DEPLOY_LAUNCH_LAUNCH_PORTS_H
#define BATON_DEPLOY_LAUNCH_LAUNCH_PORTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct launch_claims {
    int *fds; /* [n] */
    size_t n;
};

/* Does nobody listen on the port, at any address of this host? */
bool launch_port_is_free(uint16_t port);
/* False: another launcher has claimed it. */
bool launch_port_claim(struct launch_claims *c, uint16_t port);
void launch_claims_release(struct launch_claims *c);

#endif
