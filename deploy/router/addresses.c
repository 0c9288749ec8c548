/* addresses.c - see addresses.h. Thread: any. */
#include "deploy/router/addresses.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/mem.h"

enum { NODES_MAX = 1024, COUNT_MAX = 1024 };

/* The options of one role. */
struct lists {
    enum node_role role;
    const char *hosts, *hosts_num, *ports, *ports_inc;
};

static const struct lists LISTS[] = {
    { ROLE_PREFILL, "prefiller-hosts", "prefiller-hosts-num", "prefiller-ports",
      "prefiller-ports-inc" },
    { ROLE_DECODE, "decoder-hosts", "decoder-hosts-num", "decoder-ports", "decoder-ports-inc" },
};

static size_t n_of(const struct config *c, const char *name)
{
    size_t n = 0;
    config_list(c, name, 0, &n);
    return n;
}

/* Item i of a list of numbers. */
static enum status number_of(const struct config *c, const char *name, size_t i, int64_t max,
                             int64_t *out, struct err *err)
{
    const char *text = config_list(c, name, i, NULL);
    if (str_to_i64(str_of(text), out) == OK && *out >= 1 && *out <= max) return OK;
    return err_field(err, ERR_CONFIG, name, "--%s: '%.40s' is not a whole number from 1 to %lld",
                     name, text, (long long)max);
}

/* How often item i of `of` counts: 1, where the option is not given. */
static enum status count_of(const struct config *c, const char *name, const char *of, size_t i,
                            int64_t *out, struct err *err)
{
    const size_t n = n_of(c, name), n_items = n_of(c, of);
    *out = 1;
    if (n == 0) return OK;
    if (n != n_items)
        return err_field(err, ERR_CONFIG, name,
                         "--%s has %zu numbers and --%s %zu items; give one number for each", name,
                         n, of, n_items);
    return number_of(c, name, i, COUNT_MAX, out, err);
}

static bool is_host(const char *text)
{
    for (const char *p = text; *p; p++)
        if (!isalnum((unsigned char)*p) && !strchr(".:-_%", *p)) return false;
    return text[0] != 0;
}

static enum status set_host(const char *text, const char *given_as, struct node_at *out,
                            struct err *err)
{
    char host[HOST_TEXT_MAX];
    if (!host_copy(text, host) || !is_host(host))
        return err_field(err, ERR_CONFIG, given_as, "%s: '%.80s' is not a host name or an address",
                         given_as, text);
    snprintf(out->host, sizeof out->host, "%s",
             host_is_wildcard(host) ? host_loopback(host) : host);
    return OK;
}

static enum status too_many(const char *name, struct err *err)
{
    return err_field(err, ERR_CONFIG, name, "--%s: more than %d nodes are listed", name, NODES_MAX);
}

static enum status add_hosts(const struct config *c, const struct lists *l, struct addresses *out,
                             struct err *err)
{
    char given_as[64];
    int64_t n;
    snprintf(given_as, sizeof given_as, "--%s", l->hosts);
    for (size_t i = 0; i < n_of(c, l->hosts); i++) {
        struct node_at one = { .role = l->role };
        TRY(set_host(config_list(c, l->hosts, i, NULL), given_as, &one, err));
        TRY(count_of(c, l->hosts_num, l->hosts, i, &n, err));
        if (out->n + (size_t)n > NODES_MAX) return too_many(l->hosts, err);
        out->nodes = mem_realloc(out->nodes, out->n + (size_t)n, sizeof *out->nodes);
        while (n-- > 0) out->nodes[out->n++] = one;
    }
    return OK;
}

/* Gives the nodes from `first` on their ports, and counts those there are. */
static enum status set_ports(const struct config *c, const struct lists *l, size_t first,
                             struct addresses *out, size_t *n_ports, struct err *err)
{
    int64_t port, n;
    *n_ports = 0;
    for (size_t i = 0; i < n_of(c, l->ports); i++) {
        TRY(number_of(c, l->ports, i, UINT16_MAX, &port, err));
        TRY(count_of(c, l->ports_inc, l->ports, i, &n, err));
        if (port + n - 1 > UINT16_MAX)
            return err_field(err, ERR_CONFIG, l->ports_inc,
                             "--%s: %lld ports from %lld on go beyond %d", l->ports_inc,
                             (long long)n, (long long)port, UINT16_MAX);
        for (; n > 0; n--, port++, ++*n_ports)
            if (first + *n_ports < out->n) out->nodes[first + *n_ports].port = (uint16_t)port;
    }
    return OK;
}

static enum status read_role(const struct config *c, const struct lists *l, struct addresses *out,
                             struct err *err)
{
    const size_t first = out->n;
    size_t n_ports;
    TRY(add_hosts(c, l, out, err));
    TRY(set_ports(c, l, first, out, &n_ports, err));
    const size_t n_hosts = out->n - first;
    if (n_hosts == n_ports && (n_hosts || (!n_of(c, l->hosts_num) && !n_of(c, l->ports_inc))))
        return OK;
    return err_field(err, ERR_CONFIG, l->hosts,
                     "--%s with --%s are %zu hosts, and --%s with --%s are %zu ports; each host "
                     "needs one",
                     l->hosts, l->hosts_num, n_hosts, l->ports, l->ports_inc, n_ports);
}

enum status addresses_read(const struct config *c, struct addresses *out, struct err *err)
{
    *out = (struct addresses){ 0 };
    for (size_t i = 0; i < COUNT_OF(LISTS); i++) TRY(read_role(c, &LISTS[i], out, err));
    return OK;
}

void addresses_release(struct addresses *a)
{
    mem_free(a->nodes);
    *a = (struct addresses){ 0 };
}

enum status address_parse(const char *text, enum node_role role, struct node_at *out,
                          struct err *err)
{
    char host[HOST_TEXT_MAX];
    struct node_at at = { .role = role };
    if (!host_port_parse(text, host, &at.port) || !host[0] || at.port == 0)
        return err_set(err, ERR_INVALID,
                       "'%.80s' is not host:port (an IPv6 address stands in brackets, "
                       "[::1]:8000)",
                       text);
    if (set_host(host, "the host", &at, err) != OK) return ERR_INVALID;
    *out = at;
    return OK;
}
