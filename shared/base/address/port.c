/* port.c - see port.h. */
#include "shared/base/address/port.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shared/base/address/host_port.h"

enum { TCP_STATE_LISTEN = 0x0a, HOLD_BACKLOG = 1 };

/* ---- who has a port ---- */

/* The address that was asked for; `any`: it is not known, and every listener on the port fits. */
struct wanted {
    uint16_t port;
    int family;
    struct in6_addr ip; /* of AF_INET the first four bytes */
    bool any;
};

static void resolve_wanted(const char *host, uint16_t port, struct wanted *out)
{
    struct addrinfo hints = { .ai_family = AF_UNSPEC,
                              .ai_socktype = SOCK_STREAM,
                              .ai_flags = AI_PASSIVE, },
                    *list = NULL;
    *out = (struct wanted){ .port = port, .any = true };
    if (!host || getaddrinfo(host, NULL, &hints, &list) != 0) return;
    out->any = false;
    out->family = list->ai_family;
    if (out->family == AF_INET6)
        out->ip = ((const struct sockaddr_in6 *)(const void *)list->ai_addr)->sin6_addr;
    else
        memcpy(&out->ip, &((const struct sockaddr_in *)(const void *)list->ai_addr)->sin_addr,
               sizeof(struct in_addr));
    freeaddrinfo(list);
}

/* An address of /proc/net/tcp or tcp6: words of 32 bits as the CPU reads them. */
static bool parse_address(const char *hex, struct in6_addr *out)
{
    size_t n = strlen(hex) / 8;
    *out = (struct in6_addr){ 0 };
    for (size_t i = 0; i < n && i < 4; i++) {
        uint32_t word;
        if (sscanf(hex + 8 * i, "%8" SCNx32, &word) != 1) return false;
        memcpy(out->s6_addr + 4 * i, &word, sizeof word);
    }
    return n == 1 || n == 4;
}

/* Returns whether a listener of `family` on `ip` keeps the wanted address from being bound: one of
 * the two is the other, or all of the host's addresses. :: has those of IPv4 too. */
static bool is_in_the_way(const struct wanted *w, int family, const struct in6_addr *ip)
{
    static const struct in6_addr all = { 0 };
    bool has_all = memcmp(ip, &all, sizeof all) == 0,
         wants_all = memcmp(&w->ip, &all, sizeof all) == 0;
    if (w->any) return true;
    if (family == w->family) return has_all || wants_all || memcmp(ip, &w->ip, sizeof *ip) == 0;
    return family == AF_INET6 ? has_all : wants_all;
}

/* Returns the inode of the socket in the way in a table of /proc/net; 0: none. */
static unsigned long inode_of(const char *table, int family, const struct wanted *w)
{
    FILE *f = fopen(table, "r");
    if (!f) return 0;
    char line[512], address[33];
    unsigned long found = 0;
    while (found == 0 && fgets(line, sizeof line, f)) {
        unsigned local_port, state;
        unsigned long inode;
        struct in6_addr ip;
        int n = sscanf(line, " %*d: %32[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*s %*s %*s %*d %*d %lu",
                       address, &local_port, &state, &inode);
        if (n == 4 && state == TCP_STATE_LISTEN && local_port == w->port &&
            parse_address(address, &ip) && is_in_the_way(w, family, &ip))
            found = inode;
    }
    fclose(f);
    return found;
}

static bool process_has(const char *pid, const char *link)
{
    char dir[300];
    snprintf(dir, sizeof dir, "/proc/%.20s/fd", pid);
    DIR *d = opendir(dir);
    if (!d) return false;
    bool found = false;
    for (struct dirent *e; !found && (e = readdir(d)) != NULL;) {
        char path[600], target[128];
        snprintf(path, sizeof path, "%s/%.255s", dir, e->d_name);
        ssize_t n = readlink(path, target, sizeof target - 1);
        if (n <= 0) continue;
        target[n] = 0;
        found = strcmp(target, link) == 0;
    }
    closedir(d);
    return found;
}

/* Writes "process 4711 (nginx)", or "another process" when it belongs to another user; false: this
 * process has the port itself. */
static bool name_holder(const char *host, uint16_t port, char *out, size_t n)
{
    struct wanted w;
    bool is_other = true;
    snprintf(out, n, "another process");
    resolve_wanted(host, port, &w);
    unsigned long inode = inode_of("/proc/net/tcp", AF_INET, &w);
    if (inode == 0) inode = inode_of("/proc/net/tcp6", AF_INET6, &w);
    DIR *d = inode ? opendir("/proc") : NULL;
    if (!d) return true;
    char link[64];
    snprintf(link, sizeof link, "socket:[%lu]", inode);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (e->d_name[0] < '1' || e->d_name[0] > '9' || !process_has(e->d_name, link)) continue;
        is_other = strtol(e->d_name, NULL, 10) != getpid();
        char path[64], name[64] = "";
        snprintf(path, sizeof path, "/proc/%.20s/comm", e->d_name);
        FILE *f = fopen(path, "r");
        if (f && fgets(name, sizeof name, f)) name[strcspn(name, "\n")] = 0;
        if (f) fclose(f);
        snprintf(out, n, "process %.20s (%s)", e->d_name, name);
        break;
    }
    closedir(d);
    return is_other;
}

enum status port_fail(int code, const char *host, uint16_t port, const char *option,
                      struct err *err)
{
    char holder[128], at[HOST_PORT_TEXT_MAX], where[sizeof at + 64];
    snprintf(where, sizeof where, "cannot listen on %s%s%.32s%s", host_port_text(host, port, at),
             option ? " (" : "", option ? option : "", option ? ")" : "");
    switch (code) {
    case EADDRINUSE:
        if (!name_holder(host, port, holder, sizeof holder))
            return err_set(err, ERR_CONFIG,
                           "%s: another port option of this node has the same port; give each "
                           "option its own",
                           where);
        return err_set(err, ERR_CONFIG,
                       "%s: the port is in use by %s; stop it or choose another port", where,
                       holder);
    case EADDRNOTAVAIL:
        return err_set(err, ERR_CONFIG,
                       "%s: this machine has no such address; 0.0.0.0 means all of its addresses",
                       where);
    case EACCES:
        return err_set(err, ERR_CONFIG,
                       "%s: ports below 1024 need privileges; choose a higher port", where);
    default: return err_set(err, ERR_CONFIG, "%s: %s", where, strerror(code));
    }
}

/* ---- holding a port ---- */

static int listen_on(const struct addrinfo *a)
{
    int one = 1, fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    /* as those who will listen here */
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, HOLD_BACKLOG) == 0) return fd;
    int code = errno;
    close(fd);
    errno = code;
    return -1;
}

enum status port_hold(const char *host, uint16_t port, const char *option, int *fd, struct err *err)
{
    struct addrinfo hints = { .ai_family = AF_UNSPEC,
                              .ai_socktype = SOCK_STREAM,
                              .ai_flags = AI_PASSIVE | AI_NUMERICSERV, },
                    *list = NULL;
    char service[8];
    *fd = -1;
    if (port == 0) return OK;
    if (!host) host = "127.0.0.1";
    snprintf(service, sizeof service, "%u", port);
    int rc = getaddrinfo(host, service, &hints, &list);
    if (rc != 0)
        return err_set(err, ERR_CONFIG, "cannot listen on %s:%u (%s): %s", host, port, option,
                       gai_strerror(rc));
    *fd = listen_on(list);
    int code = errno;
    freeaddrinfo(list);
    return *fd >= 0 ? OK : port_fail(code, host, port, option, err);
}
