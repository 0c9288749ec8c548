/* address.h - names and numbers of the tcp transport: what to listen on, what to tell peers.
 * Thread: loop, at start (may block on name resolution), except those below the line (any; nothing
 * is looked up). */
#ifndef BATON_KVTRANSFER_CONNECT_ADDRESS_H
#define BATON_KVTRANSFER_CONNECT_ADDRESS_H

#include <stdbool.h>
#include <sys/socket.h>

#include "shared/base/buf.h"
#include "shared/base/err.h"

/* A listening, non-blocking socket; *port gets the number the kernel gave. host NULL: 127.0.0.1. */
enum status kvt_address_listen(const char *host, uint16_t port, int *fd, uint16_t *bound,
                               struct err *err) MUST_CHECK;
/* "address port", numeric: of `advertise`, or `host` when NULL; of a wildcard the first interface
 * that is up. */
enum status kvt_address_advertise(const char *advertise, const char *host, uint16_t port,
                                  struct buf *out, struct err *err) MUST_CHECK;
/* What a transport listens on and tells its peers. With an interface: it must have an address;
 * where every address was allowed (`host` is a wildcard) that one is listened on, and told instead
 * of an `advertise` that is another address of this host, at which nobody would listen. An address
 * of another host (translated on the way) is told as it is. Where `host` is one address that
 * remains the only one. */
struct kvt_listener {
    const char *host, *advertise; /* as for kvt_address_listen and kvt_address_advertise */
    const char *ifname;           /* NULL or "": none */
    uint16_t port;                /* in: 0 any; out: the one it got */
    const char *port_option;      /* what gave the port, for the sentence when it is taken; NULL:
                                   * not said */
    int fd;                       /* out */
    struct buf *address;          /* out, appended: "address port" */
};
enum status kvt_address_serve(struct kvt_listener *l, struct err *err) MUST_CHECK;
/* The address of an interface ("eth0"), IPv4 before IPv6, appended as text. ERR_CONFIG names it and
 * those there are. */
enum status kvt_address_of_interface(const char *ifname, struct buf *out,
                                     struct err *err) MUST_CHECK;
bool kvt_address_is_wildcard(const char *host); /* a wildcard address */

/* ---- */

/* The same text back; numeric only, so that nothing is looked up. */
enum status kvt_address_parse(struct str text, struct sockaddr_storage *out,
                              socklen_t *len) MUST_CHECK;
/* Is that an address of this host? Of a connected socket: are both ends on this host? */
bool kvt_address_is_local(const struct sockaddr_storage *a, socklen_t n);
bool kvt_address_same_host(int fd);
/* Connections of `fd` leave with the address of that interface; NULL: the kernel chooses.
 * ERR_CONFIG: it has no address of that family. */
enum status kvt_address_bind_interface(int fd, const char *ifname, int family,
                                       struct err *err) MUST_CHECK;
/* Bytes per second of the interface that a connected socket uses, as its driver says in
 * /sys/class/net; 0: not known. */
uint64_t kvt_address_link_speed(int fd);

#endif
