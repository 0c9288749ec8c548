/* port_claim.h - free ports of this host for processes that are started later.
 *
 * Between the choice of a port and the bind of the process that gets it somebody else may choose
 * the same one. So whoever chooses at random claims it first, by the name of a socket that all
 * launchers and tests of the host see until it is released. Thread: one per struct. */
#ifndef BATON_BASE_ADDRESS_PORT_CLAIM_H
#define BATON_BASE_ADDRESS_PORT_CLAIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct port_claims {
    int *fds; /* [n] */
    size_t n;
};

/* Does nobody listen on the port, at any address of this host? */
bool port_is_free(uint16_t port);
/* False: somebody else has claimed it. */
bool port_claim(struct port_claims *c, uint16_t port);
void port_claims_release(struct port_claims *c);

#endif
