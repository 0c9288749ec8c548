/* port.h - TCP ports of this host: says who has one, and holds one until its user is ready.
 * Thread: the loop, at start (/proc is read only after an error). */
#ifndef BATON_BASE_ADDRESS_PORT_H
#define BATON_BASE_ADDRESS_PORT_H

#include <stdint.h>

#include "shared/base/err.h"

/* Sets the error of a bind or listen that failed with errno `code`, and returns ERR_CONFIG. When
 * the port is in use the sentence names the process that has it, or says that this one does for
 * another option. `option` is the one that chose the
 * port; NULL: none. */
enum status port_fail(int code, const char *host, uint16_t port, const char *option,
                      struct err *err);
/* Listens on a port without accepting, so that nobody else takes it before its user listens; the
 * caller closes *fd just before that. Port 0: *fd is -1. host NULL: 127.0.0.1. */
enum status port_hold(const char *host, uint16_t port, const char *option, int *fd,
                      struct err *err) MUST_CHECK;

#endif
