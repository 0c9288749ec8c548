/* address.h - socket addresses of the transports: what to listen on, what to tell peers.
 * Thread: at start, any but the loop while it serves, because name resolution may block; functions
 * below the line: any, they look nothing up. */
#ifndef BATON_KVTRANSFER_CONNECT_ADDRESS_H
#define BATON_KVTRANSFER_CONNECT_ADDRESS_H

#include <stdbool.h>
#include <sys/socket.h>

#include "shared/base/buf.h"
#include "shared/base/err.h"

/* What a transport listens on and tells its peers. An interface must have an address. If `host` is
 * a wildcard, that address is listened on, and replaces an `advertise` that is another address of
 * this host, where nobody would listen. An `advertise` of another host (translated on the way) is
 * told as it is. A single address in `host` is used whatever the interface. */
struct kvt_listener {
    const char *host, *advertise; /* advertise NULL: of `host`; host NULL: 127.0.0.1 */
    const char *ifname;           /* NULL or "": none */
    uint16_t port;                /* in: 0 any; out: the one it got */
    const char *port_option; /* the option that set the port, for error sentences; NULL: none */
    int fd;                  /* out */
    struct buf *address;     /* out, appended: "address port" */
};
enum status kvt_address_serve(struct kvt_listener *l, struct err *err) MUST_CHECK;
/* Sets `out`, which is empty, to the host that kvt_address_serve listens on. */
enum status kvt_address_listen_host(const char *host, const char *ifname, struct buf *out,
                                    struct err *err) MUST_CHECK;
/* Appends the address of an interface ("eth0") as text, IPv4 before IPv6. ERR_CONFIG names it and
 * the existing interfaces. */
enum status kvt_address_of_interface(const char *ifname, struct buf *out,
                                     struct err *err) MUST_CHECK;

/* ---- */

/* Parses "address port"; only numeric, so that nothing is looked up. */
enum status kvt_address_parse(struct str text, struct sockaddr_storage *out,
                              socklen_t *len) MUST_CHECK;
/* Whether the address is this host's; whether both ends of a connected socket are on this host. */
bool kvt_address_is_local(const struct sockaddr_storage *a, socklen_t n);
bool kvt_address_same_host(int fd);
/* Binds `fd` to the address of that interface; NULL: the kernel chooses. ERR_CONFIG: it has no
 * address of that family. */
enum status kvt_address_bind_interface(int fd, const char *ifname, int family,
                                       struct err *err) MUST_CHECK;
/* Bytes per second of the interface that a connected socket uses, as its driver reports in
 * /sys/class/net; 0: not known. */
uint64_t kvt_address_link_speed(int fd);

#endif
