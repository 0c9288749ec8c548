/* http_listen.c - binds the server's socket; when the port is in use, finds the process that has
 * it. Thread: loop, at start (/proc is read only after an error). */
#include <dirent.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shared/net/http/http_conn.h"

enum { LISTEN_BACKLOG = 1024, TCP_STATE_LISTEN = 0x0a };

/* Returns the inode of the socket that listens on `port` in a table of /proc/net; 0: none. */
static unsigned long listen_inode(const char *table, uint16_t port)
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

static bool listen_pid_has(const char *pid, const char *link)
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
static void listen_holder(uint16_t port, char *out, size_t n)
{
    snprintf(out, n, "another process");
    unsigned long inode = listen_inode("/proc/net/tcp", port);
    if (inode == 0) inode = listen_inode("/proc/net/tcp6", port);
    DIR *d = inode ? opendir("/proc") : NULL;
    if (!d) return;
    char link[64];
    snprintf(link, sizeof link, "socket:[%lu]", inode);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (e->d_name[0] < '1' || e->d_name[0] > '9' || !listen_pid_has(e->d_name, link)) continue;
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

static enum status listen_fail(int rc, const char *host, uint16_t port, struct err *err)
{
    char holder[128];
    switch (rc) {
    case UV_EADDRINUSE:
        listen_holder(port, holder, sizeof holder);
        return err_set(
            err, ERR_CONFIG,
            "cannot listen on %s:%u: the port is in use by %s; stop it or choose another port",
            host, port, holder);
    case UV_EADDRNOTAVAIL:
        return err_set(err, ERR_CONFIG,
                       "cannot listen on %s:%u: this machine has no such address; 0.0.0.0 means "
                       "all of its addresses",
                       host, port);
    case UV_EACCES:
        return err_set(
            err, ERR_CONFIG,
            "cannot listen on %s:%u: ports below 1024 need privileges; choose a higher port", host,
            port);
    default:
        return err_set(err, ERR_CONFIG, "cannot listen on %s:%u: %s", host, port, uv_strerror(rc));
    }
}

static enum status listen_resolve(const char *host, uint16_t port, struct sockaddr_storage *out,
                                  struct err *err)
{
    struct addrinfo hints = { .ai_family = AF_UNSPEC,
                              .ai_socktype = SOCK_STREAM,
                              .ai_flags = AI_PASSIVE | AI_NUMERICSERV, },
                    *list = NULL;
    char service[8];
    snprintf(service, sizeof service, "%u", port);
    int rc = getaddrinfo(host, service, &hints, &list);
    if (rc != 0)
        return err_set(err, ERR_CONFIG, "cannot listen on %s:%u: %s", host, port, gai_strerror(rc));
    memcpy(out, list->ai_addr, list->ai_addrlen);
    freeaddrinfo(list);
    return OK;
}

enum status http_listen(uv_tcp_t *listener, const char *host, uint16_t port, uv_connection_cb cb,
                        uint16_t *bound, struct err *err)
{
    struct sockaddr_storage a = { 0 };
    TRY(listen_resolve(host, port, &a, err));
    /* libuv sets SO_REUSEADDR (a restart finds its port) and not SO_REUSEPORT (two servers must not
     * share one by accident). */
    int rc = uv_tcp_bind(listener, (const struct sockaddr *)&a, 0);
    if (rc == 0) rc = uv_listen((uv_stream_t *)listener, LISTEN_BACKLOG, cb);
    if (rc != 0) return listen_fail(rc, host, port, err);
    int n = sizeof a;
    rc = uv_tcp_getsockname(listener, (struct sockaddr *)&a, &n);
    if (rc != 0) return listen_fail(rc, host, port, err);
    *bound = ntohs(a.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&a)->sin6_port
                                           : ((struct sockaddr_in *)&a)->sin_port);
    return OK;
}
