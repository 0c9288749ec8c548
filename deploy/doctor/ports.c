/* ports.c - checks the ports in the options: each is free and has only one purpose.
 * Thread: main. */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "deploy/doctor/doctor.h"

enum { PORTS_MAX = 64 };

struct port_use {
    uint16_t port;
    const char *option;
};

struct port_uses {
    struct port_use list[PORTS_MAX];
    size_t n;
};

/* Binds to the port; 0 or the errno. A port in TIME_WAIT counts as free: nodes bind with
 * SO_REUSEADDR. */
static int try_bind(const char *host, uint16_t port)
{
    char service[8];
    struct addrinfo hints = { .ai_flags = AI_PASSIVE | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM },
                    *ai = NULL;
    int one = 1, error = 0;
    snprintf(service, sizeof service, "%u", port);
    if (getaddrinfo(host, service, &hints, &ai) != 0) return EADDRNOTAVAIL;
    int fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) != 0 ||
        bind(fd, ai->ai_addr, ai->ai_addrlen) != 0 || listen(fd, 1) != 0)
        error = errno;
    if (fd >= 0) close(fd);
    freeaddrinfo(ai);
    return error;
}

static void add_failure(struct doctor *d, const char *option, const char *host, uint16_t port,
                        int error)
{
    bool given = config_is_set(d->c, option);
    struct doctor_line *line = doctor_add(
        d, "port", given ? DOCTOR_FAIL : DOCTOR_WARN, "%s:%u (--%s%s): %s", host, port, option,
        given ? "" : ", by default", error == EADDRINUSE ? "in use" : strerror(error));
    if (error == EADDRINUSE)
        doctor_fix(
            line,
            "another program listens there (ss -ltnp 'sport = :%u' names it); choose another port",
            port);
    else if (error == EACCES)
        doctor_fix(line, "ports below 1024 need root or CAP_NET_BIND_SERVICE");
    else doctor_fix(line, "--host must be an address of this host, or 0.0.0.0");
}

static void check_port(struct doctor *d, struct port_uses *p, const char *option, const char *host,
                       int64_t number)
{
    if (number <= 0 || number > 65535 || p->n == PORTS_MAX) return; /* 0: any free one */
    uint16_t port = (uint16_t)number;
    for (size_t i = 0; i < p->n; i++) {
        if (p->list[i].port != port) continue;
        doctor_fix(doctor_add(d, "port", DOCTOR_FAIL, "%u is given twice: by --%s and by --%s",
                              port, p->list[i].option, option),
                   "give each its own port");
        return;
    }
    p->list[p->n++] = (struct port_use){ port, option };
    int error = try_bind(host, port);
    if (error) add_failure(d, option, host, port, error);
}

static void check_list(struct doctor *d, struct port_uses *p, const char *option, const char *host)
{
    const char *item;
    for (size_t i = 0; (item = config_list(d->c, option, i, NULL)); i++) {
        int64_t port = 0;
        if (str_to_i64(str_trim(str_of(item)), &port) != OK || port < 0 || port > 65535)
            doctor_fix(doctor_add(d, "port", DOCTOR_FAIL, "--%s: '%s' is not a port", option, item),
                       "give numbers from 0 to 65535");
        else check_port(d, p, option, host, port);
    }
}

void doctor_check_ports(struct doctor *d)
{
    static const char *const lists[] = { "engine-worker-queue-port", "pd-comm-port",
                                         "cache-queue-port", "rdma-comm-ports" };
    struct port_uses p = { 0 };
    size_t n_before = d->n;
    const char *host = config_string(d->c, "host");
    check_list(d, &p, "ports", host);
    check_list(d, &p, "metrics-ports", host);
    check_list(d, &p, "grpc-ports", host);
    if (!config_is_set(d->c, "ports")) check_port(d, &p, "port", host, config_int(d->c, "port"));
    check_port(d, &p, "metrics-port", host, config_int(d->c, "metrics-port"));
    check_port(d, &p, "grpc-port", host, config_int(d->c, "grpc-port"));
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        check_list(d, &p, lists[i], "0.0.0.0");
    if (d->n > n_before) return;
    struct buf list = { 0 };
    for (size_t i = 0; i < p.n; i++) buf_printf(&list, "%s%u", i ? ", " : "", p.list[i].port);
    doctor_add(d, "ports", DOCTOR_OK, "free: %s",
               list.len ? list.data : "none was named, any free ones are taken");
    buf_release(&list);
}
