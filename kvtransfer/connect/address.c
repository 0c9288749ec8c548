/* address.c - resolves names at start, works with numeric addresses afterwards; see address.h. No
 * state. */
#include "kvtransfer/connect/address.h"

#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "shared/base/address/port.h"

enum { BACKLOG = 128, TEXT_MAX = 80 };

static enum status resolve(const char *host, const char *service, int flags, struct addrinfo **out)
{
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC,
        .ai_socktype = SOCK_STREAM,
        .ai_flags = flags | AI_NUMERICSERV,
    };
    return getaddrinfo(host, service, &hints, out) == 0 ? OK : ERR_NOT_FOUND;
}

static int listen_on(const struct addrinfo *a)
{
    int one = 1, fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    /* a restart on the same port must not wait for TIME_WAIT */
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0) return fd;
    int code = errno;
    close(fd);
    errno = code;
    return -1;
}

static uint16_t port_of(const struct sockaddr_storage *a)
{
    if (a->ss_family == AF_INET6) return ntohs(((const struct sockaddr_in6 *)a)->sin6_port);
    return ntohs(((const struct sockaddr_in *)a)->sin_port);
}

/* Opens a listening, non-blocking socket; *bound gets its port. */
static enum status open_listener(const char *host, uint16_t port, const char *option, int *fd,
                                 uint16_t *bound, struct err *err)
{
    char service[8];
    snprintf(service, sizeof service, "%u", port);
    struct addrinfo *list;
    if (resolve(host, service, AI_PASSIVE, &list) != OK)
        return err_set(err, ERR_CONFIG, "the address '%s' to receive KV on cannot be resolved",
                       host);
    *fd = listen_on(list);
    int code = errno;
    freeaddrinfo(list);
    if (*fd < 0) return port_fail(code, host, port, option, err);
    struct sockaddr_storage a = { 0 };
    socklen_t n = sizeof a;
    (void)getsockname(*fd, (struct sockaddr *)&a, &n);
    *bound = port_of(&a);
    return OK;
}

static bool is_wildcard(const struct sockaddr *a)
{
    if (a->sa_family == AF_INET)
        return ((const struct sockaddr_in *)a)->sin_addr.s_addr == htonl(INADDR_ANY);
    return a->sa_family == AF_INET6 &&
           IN6_IS_ADDR_UNSPECIFIED(&((const struct sockaddr_in6 *)a)->sin6_addr);
}

static bool numeric(const struct sockaddr *a, char out[TEXT_MAX])
{
    socklen_t n = a->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                           : sizeof(struct sockaddr_in);
    return getnameinfo(a, n, out, TEXT_MAX, NULL, 0, NI_NUMERICHOST) == 0;
}

/* The first IPv4 address of an interface that is up and not loopback, otherwise loopback. */
static void first_interface(char out[TEXT_MAX])
{
    struct ifaddrs *list = NULL;
    snprintf(out, TEXT_MAX, "127.0.0.1");
    if (getifaddrs(&list) != 0) return;
    for (const struct ifaddrs *i = list; i; i = i->ifa_next) {
        if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || !(i->ifa_flags & IFF_UP) ||
            (i->ifa_flags & IFF_LOOPBACK))
            continue;
        if (numeric(i->ifa_addr, out)) break;
    }
    freeifaddrs(list);
}

/* Appends "address port", numeric: of `advertise`, or of `host` if that is NULL. For a wildcard it
 * is the address of the first interface that is up. */
static enum status advertise_port(const char *advertise, const char *host, uint16_t port,
                                  struct buf *out, struct err *err)
{
    const char *name = advertise ? advertise : host;
    struct addrinfo *list;
    if (resolve(name, "0", 0, &list) != OK)
        return err_set(err, ERR_CONFIG, "the address '%s' to tell peers cannot be resolved", name);
    char text[TEXT_MAX];
    bool ok = true;
    if (is_wildcard(list->ai_addr)) first_interface(text);
    else ok = numeric(list->ai_addr, text);
    freeaddrinfo(list);
    if (!ok)
        return err_set(err, ERR_CONFIG, "the address '%s' to tell peers has no numeric form", name);
    buf_printf(out, "%s %u", text, port);
    return OK;
}

enum status kvt_address_parse(struct str text, struct sockaddr_storage *out, socklen_t *len)
{
    char host[TEXT_MAX], service[8];
    size_t space = str_find_char(text, ' ');
    if (space >= sizeof host || space >= text.n || text.n - space - 1 >= sizeof service ||
        memchr(text.p, 0, text.n))
        return ERR_FORMAT;
    snprintf(host, sizeof host, "%.*s", (int)space, text.p);
    snprintf(service, sizeof service, "%.*s", (int)(text.n - space - 1), text.p + space + 1);
    int64_t port;
    struct addrinfo *list;
    if (str_to_i64(str_of(service), &port) != OK || port < 1 || port > UINT16_MAX)
        return ERR_FORMAT;
    if (resolve(host, service, AI_NUMERICHOST, &list) != OK) return ERR_FORMAT;
    memcpy(out, list->ai_addr, list->ai_addrlen);
    *len = list->ai_addrlen;
    freeaddrinfo(list);
    return OK;
}

/* ---- interfaces ---- */

static bool is_wildcard_host(const char *host)
{
    struct addrinfo *list;
    if (!host) return false; /* loopback */
    if (resolve(host, "0", AI_NUMERICHOST, &list) != OK) return false;
    bool yes = is_wildcard(list->ai_addr);
    freeaddrinfo(list);
    return yes;
}

/* The interface's address of `family` (AF_UNSPEC: IPv4, else IPv6); false: it has none. */
static bool interface_address(const char *ifname, int family, struct sockaddr_storage *out,
                              socklen_t *n)
{
    struct ifaddrs *list = NULL;
    bool found = false;
    if (getifaddrs(&list) != 0) return false;
    for (int pass = 0; pass < 2 && !found; pass++) {
        int want = pass ? AF_INET6 : AF_INET;
        for (const struct ifaddrs *i = list; i && !found && (family == AF_UNSPEC || family == want);
             i = i->ifa_next) {
            if (!i->ifa_addr || i->ifa_addr->sa_family != want || strcmp(i->ifa_name, ifname) != 0)
                continue;
            /* a peer would also need the interface to use a link-local address */
            if (want == AF_INET6 &&
                IN6_IS_ADDR_LINKLOCAL(
                    &((const struct sockaddr_in6 *)(const void *)i->ifa_addr)->sin6_addr))
                continue;
            *n = want == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
            memcpy(out, i->ifa_addr, *n);
            found = true;
        }
    }
    freeifaddrs(list);
    return found;
}

enum status kvt_address_of_interface(const char *ifname, struct buf *out, struct err *err)
{
    struct sockaddr_storage a;
    socklen_t n;
    char text[TEXT_MAX];
    if (interface_address(ifname, AF_UNSPEC, &a, &n) &&
        numeric((const struct sockaddr *)&a, text)) {
        buf_printf(out, "%s", text);
        return OK;
    }
    struct buf names = { 0 };
    struct if_nameindex *all = if_nameindex();
    for (struct if_nameindex *i = all; i && i->if_index; i++)
        buf_printf(&names, "%s%s", names.len ? ", " : "", i->if_name);
    if (all) if_freenameindex(all);
    enum status st = err_set(
        err, ERR_CONFIG,
        "the network interface '%s' (KV_CACHE_SOCKET_IFNAME or KVCACHE_SOCKET_IFNAME) does not "
        "exist or has no address; there are: %s",
        ifname, names.len ? names.data : "none");
    buf_release(&names);
    return st;
}

static bool is_here(const char *host)
{
    struct addrinfo *list;
    struct sockaddr_storage a = { 0 };
    if (!host || resolve(host, "9", 0, &list) != OK) return false; /* any port: nothing is sent */
    memcpy(&a, list->ai_addr, list->ai_addrlen);
    bool yes = kvt_address_is_local(&a, list->ai_addrlen);
    freeaddrinfo(list);
    return yes;
}

enum status kvt_address_listen_host(const char *host, const char *ifname, struct buf *out,
                                    struct err *err)
{
    if (ifname && *ifname) {
        struct buf of_interface = { 0 };
        enum status st = kvt_address_of_interface(ifname, &of_interface, err);
        if (st == OK && is_wildcard_host(host)) buf_add_str(out, buf_str(&of_interface));
        buf_release(&of_interface);
        TRY(st);
    }
    if (out->len == 0) buf_add_c(out, host ? host : "127.0.0.1");
    return OK;
}

enum status kvt_address_serve(struct kvt_listener *l, struct err *err)
{
    struct buf at = { 0 };
    const char *advertise = l->advertise;
    bool named = l->ifname && *l->ifname;
    enum status st = kvt_address_listen_host(l->host, l->ifname, &at, err);
    if (named && is_wildcard_host(l->host) && is_here(advertise)) advertise = NULL;
    if (st == OK) st = open_listener(at.data, l->port, l->port_option, &l->fd, &l->port, err);
    if (st == OK) st = advertise_port(advertise, at.data, l->port, l->address, err);
    buf_release(&at);
    return st;
}

enum status kvt_address_bind_interface(int fd, const char *ifname, int family, struct err *err)
{
    struct sockaddr_storage a;
    socklen_t n;
    if (!ifname || !*ifname) return OK;
    if (!interface_address(ifname, family, &a, &n))
        return err_set(err, ERR_CONFIG,
                       "the network interface '%s' (KV_CACHE_SOCKET_IFNAME or "
                       "KVCACHE_SOCKET_IFNAME) has no %s address",
                       ifname, family == AF_INET6 ? "IPv6" : "IPv4");
    if (a.ss_family == AF_INET6) ((struct sockaddr_in6 *)&a)->sin6_port = 0;
    else ((struct sockaddr_in *)&a)->sin_port = 0;
    if (bind(fd, (struct sockaddr *)&a, n) != 0)
        return err_set(err, ERR_PEER_LOST, "cannot leave from interface '%s': %s", ifname,
                       strerror(errno));
    return OK;
}

static bool same_address(const struct sockaddr_storage *a, const struct sockaddr_storage *b)
{
    if (a->ss_family != b->ss_family) return false;
    if (a->ss_family == AF_INET6)
        return IN6_ARE_ADDR_EQUAL(&((const struct sockaddr_in6 *)a)->sin6_addr,
                                  &((const struct sockaddr_in6 *)b)->sin6_addr);
    return ((const struct sockaddr_in *)a)->sin_addr.s_addr ==
           ((const struct sockaddr_in *)b)->sin_addr.s_addr;
}

bool kvt_address_same_host(int fd)
{
    struct sockaddr_storage mine = { 0 }, theirs = { 0 };
    socklen_t n = sizeof mine, m = sizeof theirs;
    return getsockname(fd, (struct sockaddr *)&mine, &n) == 0 &&
           getpeername(fd, (struct sockaddr *)&theirs, &m) == 0 && same_address(&mine, &theirs);
}

/* For an address of this host the kernel chooses that same address as the source; connecting a
 * datagram socket asks it without sending anything. */
bool kvt_address_is_local(const struct sockaddr_storage *a, socklen_t n)
{
    int fd = socket(a->ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool yes = fd >= 0 && connect(fd, (const struct sockaddr *)a, n) == 0 &&
               kvt_address_same_host(fd);
    if (fd >= 0) close(fd);
    return yes;
}

uint64_t kvt_address_link_speed(int fd)
{
    struct sockaddr_storage mine = { 0 };
    socklen_t n = sizeof mine;
    struct ifaddrs *list = NULL;
    char path[IF_NAMESIZE + 32] = "";
    if (getsockname(fd, (struct sockaddr *)&mine, &n) != 0 || getifaddrs(&list) != 0) return 0;
    for (const struct ifaddrs *i = list; i; i = i->ifa_next) {
        if (!i->ifa_addr || i->ifa_addr->sa_family != mine.ss_family) continue;
        struct sockaddr_storage a = { 0 };
        memcpy(&a, i->ifa_addr,
               mine.ss_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                          : sizeof(struct sockaddr_in));
        if (same_address(&a, &mine))
            snprintf(path, sizeof path, "/sys/class/net/%.*s/speed", IF_NAMESIZE, i->ifa_name);
    }
    freeifaddrs(list);
    FILE *f = path[0] ? fopen(path, "re") : NULL;
    long long mbit = 0; /* -1: a virtual device without a speed */
    if (f && fscanf(f, "%lld", &mbit) != 1) mbit = 0;
    if (f) fclose(f);
    return mbit > 0 ? (uint64_t)mbit * 125000 : 0;
}
