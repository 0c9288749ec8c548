/* tcp_address.h - names and numbers of the tcp transport: what to listen on, what to tell peers. Thread: loop, at start (may block on
 * name resolution), except tcp_address_parse (any). */
#ifndef BATON_KVTRANSFER_TCP_ADDRESS_H
#define BATON_KVTRANSFER_TCP_ADDRESS_H

#include <sys/socket.h>

#include "shared/base/buf.h"
#include "shared/base/err.h"

/* A listening, non-blocking socket; *port gets the number the kernel gave. host NULL: 127.0.0.1. */
enum status tcp_address_listen(const char *host, uint16_t port, int *fd, uint16_t *bound, struct err *err) MUST_CHECK;
/* "address port", numeric: of `advertise`, or `host` when NULL; of a wildcard the first interface that is up. */
enum status tcp_address_advertise(const char *advertise, const char *host, uint16_t port, struct buf *out, struct err *err) MUST_CHECK;
/* The same text back; numeric only, so that nothing is looked up. */
enum status tcp_address_parse(struct str text, struct sockaddr_storage *out, socklen_t *len) MUST_CHECK;

#endif
