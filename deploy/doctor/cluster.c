/* cluster.c - checks what a node needs from others: the shared secret and the directory server.
 * Thread: main. */
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "deploy/doctor/doctor.h"
#include "deploy/node/node_options.h"
#include "shared/base/address/host_port.h"

enum { CONNECT_MS = 2000 };

static bool is_here(const char *host)
{
    return strcmp(host, "localhost") == 0 || strncmp(host, "127.", 4) == 0 ||
           strcmp(host, "::1") == 0 || strcmp(host, "0.0.0.0") == 0;
}

/* Does this node need a secret? Nodes on one host meet on loopback without one; others cannot. */
static bool has_far_peers(const struct config *c)
{
    const char *router = config_string(c, "router");
    if (node_options_in_redis(c) && !is_here(config_string(c, "scheduler-host"))) return true;
    return router && strncmp(router, "127.", 4) != 0 && strncmp(router, "localhost", 9) != 0 &&
           strncmp(router, "0.0.0.0", 7) != 0;
}

static void check_secret(struct doctor *d)
{
    const char *file = config_string(d->c, "cluster-secret-file"),
               *env = getenv("BATON_CLUSTER_SECRET");
    if (file && access(file, R_OK) != 0) {
        doctor_fix(doctor_add(d, "secret", DOCTOR_FAIL, "--cluster-secret-file %s: %s", file,
                              strerror(errno)),
                   "give a file that this user can read");
    } else if (file || (env && *env)) {
        doctor_add(d, "secret", DOCTOR_OK, "from %s; nodes listen on all addresses",
                   file ? file : "BATON_CLUSTER_SECRET");
    } else if (has_far_peers(d->c)) {
        doctor_fix(doctor_add(d, "secret", DOCTOR_FAIL,
                              "none: node-to-node ports stay on 127.0.0.1, so nodes of other hosts "
                              "cannot reach this one"),
                   "set the same BATON_CLUSTER_SECRET on every host");
    } else {
        doctor_add(d, "secret", DOCTOR_OK,
                   "none: node-to-node ports stay on 127.0.0.1, enough for one host");
    }
}

/* Connects within CONNECT_MS; 0 or the errno. */
static int try_connect(const char *host, const char *port)
{
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *ai = NULL;
    int error = 0;
    socklen_t len = sizeof error;
    if (getaddrinfo(host, port, &hints, &ai) != 0) return EHOSTUNREACH;
    int fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) error = errno;
    else if (connect(fd, ai->ai_addr, ai->ai_addrlen) != 0 && errno != EINPROGRESS) error = errno;
    else if (poll(&(struct pollfd){ .fd = fd, .events = POLLOUT }, 1, CONNECT_MS) != 1)
        error = ETIMEDOUT;
    else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len) != 0) error = errno;
    if (fd >= 0) close(fd);
    freeaddrinfo(ai);
    return error;
}

static void check_directory_server(struct doctor *d, const char *option, const char *host,
                                   const char *port)
{
    int error = try_connect(host, port);
    if (error == 0) {
        doctor_add(d, "cluster view", DOCTOR_OK, "%s:%s (--%s) takes connections", host, port,
                   option);
        return;
    }
    /* No failure: nodes may start in any order. */
    doctor_fix(doctor_add(d, "cluster view", DOCTOR_WARN, "%s:%s (--%s): %s", host, port, option,
                          strerror(error)),
               "start the directory server; this node registers as soon as it is there");
}

void doctor_check_cluster(struct doctor *d)
{
    const char *router = config_string(d->c, "router"),
               *innode = config_list(d->c, "innode-prefill-ports", 0, NULL);
    check_secret(d);
    if (innode) check_directory_server(d, "innode-prefill-ports", "127.0.0.1", innode);
    if (!router) return;
    char host[HOST_TEXT_MAX], number[8];
    uint16_t port;
    if (!host_port_parse(router, host, &port) || !host[0]) {
        doctor_fix(
            doctor_add(d, "cluster view", DOCTOR_FAIL, "--router %s is not host:port", router),
            "give host:port; an IPv6 address stands in brackets");
        return;
    }
    snprintf(number, sizeof number, "%u", port);
    check_directory_server(d, "router", host_is_wildcard(host) ? host_loopback(host) : host,
                           number);
}
