/* port.c - see port.h. */
#include "shared/base/address/port.h"

#include <dirent.h>
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shared/base/address/host_port.h"

enum { TCP_STATE_LISTEN = 0x0a, HOLD_BACKLOG = 1 };

/* ---- who has a port ---- */

/* Returns the inode of the socket that listens on `port` in a table of /proc/net; 0: none. */
static unsigned long inode_of(const char *table, uint16_t port)
{
    FILE *f = fopen(table, "r");
    if (!f) return 0;
    char line[512];
    unsigned long found = 0;
    while (found == 0 && fgets(line, sizeof line, f)) {
        unsigned local_port, state;
        unsigned long inode;
        int n = sscanf(line, " %*d: %*[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*s %*s %*s %*d %*d %lu",
                       &local_port, &state, &inode);
        if (n == 3 && state == TCP_STATE_LISTEN && local_port == port) found = inode;
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

/* Writes "process 4711 (nginx)", or "another process" when it belongs to another user. */
static void name_holder(uint16_t port, char *out, size_t n)
{
    snprintf(out, n, "another process");
    unsigned long inode = inode_of("/proc/net/tcp", port);
    if (inode == 0) inode = inode_of("/proc/net/tcp6", port);
    DIR *d = inode ? opendir("/proc") : NULL;
    if (!d) return;
    char link[64];
    snprintf(link, sizeof link, "socket:[%lu]", inode);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (e->d_name[0] < '1' || e->d_name[0] > '9' || !process_has(e->d_name, link)) continue;
        char path[64], name[64] = "";
        snprintf(path, sizeof path, "/proc/%.20s/comm", e->d_name);
        FILE *f = fopen(path, "r");
        if (f && fgets(name, sizeof name, f)) name[strcspn(name, "\n")] = 0;
        if (f) fclose(f);
        snprintf(out, n, "process %.20s (%s)", e->d_name, name);
        break;
    }
    closedir(d);
}

enum status port_fail(int code, const char *host, uint16_t port, const char *option,
                      struct err *err)
{
    char holder[128], at[HOST_PORT_TEXT_MAX], where[sizeof at + 64];
    snprintf(where, sizeof where, "cannot listen on %s%s%.32s%s", host_port_text(host, port, at),
             option ? " (" : "", option ? option : "", option ? ")" : "");
    switch (code) {
    case EADDRINUSE:
        name_holder(port, holder, sizeof holder);
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
