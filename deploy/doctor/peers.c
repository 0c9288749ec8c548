/* peers.c - checks the hosts of --peers: each answers, and KV gets from each to each. Makes the
 * lines; mesh.c measures. Thread: main. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/doctor/doctor.h"
#include "deploy/doctor/mesh.h"
#include "deploy/node/node_options.h"
#include "deploy/probe/server.h"
#include "shared/base/address/host_port.h"
#include "shared/base/address/port.h"
#include "shared/base/log.h"

enum { LINES_MAX = 24 }; /* lines of one kind; the matrix has all */

/* ---- lines about one host ---- */

static const char *host_name(const struct mesh *m, uint32_t i)
{
    return m->hosts[i].where[0] ? m->hosts[i].where : "this host";
}

/* A port of another host counts as free. */
static bool is_port_free(const char *host, uint16_t port)
{
    struct err err = { 0 };
    int fd;
    enum status st = port_hold(host, port, "--listen", &fd, &err);
    if (st == OK) close(fd);
    return st == OK || !strstr(err.text, "in use");
}

/* Writes where a probe server can listen on the host of a peer, whose own port is taken. */
static const char *place_for_probe(const struct mesh_host *h, char out[HOST_PORT_TEXT_MAX])
{
    enum { PORT_FIRST = 7001, PORT_END = PORT_FIRST + 100 };
    char host[HOST_TEXT_MAX];
    uint16_t taken, port = PORT_FIRST;
    if (!host_port_parse(h->where, host, &taken)) return h->where;
    while (port < PORT_END && (port == taken || !is_port_free(host, port))) port++;
    return host_port_text(host, port, out);
}

/* What to do about a peer that is not a probe server of this cluster. */
static void fix_peer(struct doctor_line *line, const struct mesh_host *h)
{
    char at[HOST_PORT_TEXT_MAX];
    const char *free_place = place_for_probe(h, at);
    switch (h->error.code) {
    case ERR_UNAUTHORIZED:
        doctor_fix(line,
                   "set the same BATON_CLUSTER_SECRET (or --cluster-secret-file) on both hosts; a "
                   "`baton launch` that was given none has one that nobody else knows: measure "
                   "beside its nodes, with `baton doctor --listen %s` there and --peers %s here",
                   free_place, free_place);
        break;
    case ERR_CONFIG: doctor_fix(line, "give --peers as host:port,host:port"); break;
    case ERR_PEER_REFUSED:
    case ERR_BUSY:
        doctor_fix(
            line,
            "to measure start `baton doctor --listen %s` there (that port, or another that nothing "
            "uses), and give --peers %s here",
            free_place, free_place);
        break;
    default:
        doctor_fix(line,
                   "if a node was there it has ended, and its own log says why: start it again (it "
                   "takes another port: `baton status`); to measure without it start `baton doctor "
                   "--listen %s` there, with the same BATON_CLUSTER_SECRET; if one of them runs, "
                   "look for a firewall on the way",
                   h->where);
    }
}

static void report_peer(struct doctor *d, const struct mesh_host *h)
{
    const struct probe_peer *p = h->client ? probe_peer(h->client) : NULL;
    if (p && strcmp(p->version, BATON_VERSION) != 0) {
        doctor_fix(doctor_add(d, "peer", DOCTOR_WARN, "%s (%s) runs version %s, this host %s",
                              h->where, h->name, p->version, BATON_VERSION),
                   "run the same version everywhere");
        return;
    }
    if (p) {
        doctor_add(d, "peer", DOCTOR_OK, "%s (%s) answers; it was built with %s", h->where, h->name,
                   p->transports);
        return;
    }
    /* A node that runs has let this host in, so it is not at fault. */
    fix_peer(doctor_add(d, "peer", h->error.code == ERR_BUSY ? DOCTOR_WARN : DOCTOR_FAIL, "%s",
                        h->error.text),
             h);
}

/* Reports a transport that a host lacks or cannot open, once per host. */
static void report_missing(struct doctor *d, const struct mesh *m, uint32_t t)
{
    for (uint32_t host = 0; host < m->n_hosts; host++)
        for (uint32_t i = 0; i < m->n_hosts * m->n_hosts; i++) {
            const struct mesh_cell *c = mesh_cell(m, t, i / m->n_hosts, i % m->n_hosts);
            if ((c->state != MESH_NOT_BUILT && c->state != MESH_UNAVAILABLE) || c->culprit != host)
                continue;
            enum doctor_result result = config_is_set(d->c, "cache-transfer-protocol") ? DOCTOR_WARN
                                                                                       : DOCTOR_OK;
            struct doctor_line *line = doctor_add(
                d, "peers", result, "%s is not available on %s: %s", m->transports[t],
                host_name(m, host),
                c->state == MESH_NOT_BUILT ? "it was built without it" : c->text);
            if (result == DOCTOR_WARN)
                doctor_fix(line,
                           "fix it there (`baton doctor` on that host says more), or take %s out "
                           "of --cache-transfer-protocol",
                           m->transports[t]);
            break;
        }
}

/* ---- lines about pairs ---- */

static void report_failed(struct doctor *d, const struct mesh *m, uint32_t t, uint32_t from,
                          uint32_t to)
{
    const struct mesh_cell *c = mesh_cell(m, t, from, to);
    struct doctor_line *line = doctor_add(d, "peers", DOCTOR_FAIL, "%s -> %s over %s: %s",
                                          host_name(m, from), host_name(m, to), m->transports[t],
                                          c->text);
    if (str_eq_c(str_of(m->transports[t]), "ipc"))
        doctor_fix(line, "both must run on one kernel in one network and PID namespace; otherwise "
                         "leave ipc out");
    else if (str_eq_c(str_of(m->transports[t]), "tcp"))
        doctor_fix(line, "let TCP connections to any port through between the two, or fix one with "
                         "--cache-queue-port");
    else
        doctor_fix(line, "`baton doctor` on both hosts shows devices, GIDs and MTU; both must be "
                         "in one fabric or routed network");
}

/* Reports rates far below the link's speed. */
static void report_slow(struct doctor *d, const struct mesh *m, uint32_t t, uint32_t from,
                        uint32_t to)
{
    const struct mesh_cell *c = mesh_cell(m, t, from, to);
    struct doctor_line *line = doctor_add(d, "peers", DOCTOR_WARN,
                                          "%s -> %s over %s: %.2f GB/s, the link has %.2f",
                                          host_name(m, from), host_name(m, to), m->transports[t],
                                          c->rate / 1e9, (double)c->link_speed / 1e9);
    doctor_fix(line, "compare MTU and flow control of both ends and the switch, and whether the "
                     "device is near the memory (NUMA); `baton bench kv --peers` shows the limit");
}

static bool is_slow(const struct mesh_cell *c)
{
    return c->state == MESH_MEASURED && c->link_speed && c->rate * 4 < (double)c->link_speed;
}

/* Adds one line for all good pairs and one for each failed pair, as far as there is room. */
static void report_transport(struct doctor *d, const struct mesh *m, uint32_t t)
{
    uint32_t n_good = 0, n_bad = 0, n_slow = 0;
    double least = 0, most = 0;
    for (uint32_t i = 0; i < m->n_hosts * m->n_hosts; i++) {
        const struct mesh_cell *c = mesh_cell(m, t, i / m->n_hosts, i % m->n_hosts);
        if (c->state == MESH_FAILED && n_bad++ < LINES_MAX)
            report_failed(d, m, t, i / m->n_hosts, i % m->n_hosts);
        if (is_slow(c) && n_slow++ < LINES_MAX)
            report_slow(d, m, t, i / m->n_hosts, i % m->n_hosts);
        if (c->state != MESH_MEASURED) continue;
        if (n_good++ == 0 || c->rate < least) least = c->rate;
        if (c->rate > most) most = c->rate;
    }
    if (n_bad > LINES_MAX)
        doctor_add(d, "peers", DOCTOR_FAIL, "%" PRIu32 " more pairs over %s; the matrix has them",
                   n_bad - LINES_MAX, m->transports[t]);
    if (n_good)
        doctor_add(d, "peers", DOCTOR_OK,
                   "%s: %" PRIu32 " of %" PRIu32 " pairs that should connect do, %.2f to %.2f GB/s",
                   m->transports[t], n_good, n_good + n_bad, least / 1e9, most / 1e9);
    report_missing(d, m, t);
}

/* Reports pairs without any usable transport: they cannot exchange KV at all. */
static void report_unconnected(struct doctor *d, const struct mesh *m)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->n_hosts * m->n_hosts; i++) {
        uint32_t from = i / m->n_hosts, to = i % m->n_hosts;
        bool connects = from == to || !m->hosts[from].client || !m->hosts[to].client,
             failed = false;
        for (uint32_t t = 0; t < m->n_transports; t++) {
            connects |= mesh_cell(m, t, from, to)->state == MESH_MEASURED;
            failed |= mesh_cell(m, t, from, to)->state == MESH_FAILED; /* reported already */
        }
        if (connects || failed || n++ >= LINES_MAX) continue;
        doctor_fix(doctor_add(d, "peers", DOCTOR_FAIL,
                              "%s -> %s: none of the allowed transports can be used between them",
                              host_name(m, from), host_name(m, to)),
                   "add one that both have to --cache-transfer-protocol, such as tcp");
    }
}

/* ---- measuring ---- */

static void add_transports(struct doctor *d, struct mesh *m)
{
    const char *p;
    for (size_t i = 0; (p = config_list(d->c, "cache-transfer-protocol", i, NULL)) &&
                       m->n_transports < MESH_TRANSPORTS_MAX;
         i++) {
        bool twice = false;
        for (uint32_t t = 0; t < m->n_transports; t++)
            twice |= str_eq_c(str_of(p), m->transports[t]);
        if (!twice) snprintf(m->transports[m->n_transports++], PROBE_NAME_MAX, "%s", p);
    }
}

static void run_mesh(struct doctor *d, struct mesh *m, const char *here)
{
    const char *where;
    mesh_dial(m, "", here);
    for (size_t i = 0; (where = config_list(d->c, "peers", i, NULL)); i++) {
        if (mesh_dial(m, where, where)) report_peer(d, &m->hosts[m->n_hosts - 1]);
        else
            doctor_fix(doctor_add(d, "peer", DOCTOR_FAIL,
                                  "%s is left out: --peers may name %d hosts", where,
                                  MESH_HOSTS_MAX - 1),
                       "measure in groups");
        if (i >= 2 * MESH_HOSTS_MAX) break;
    }
    add_transports(d, m);
    mesh_measure(m, config_bool(d->c, "kv-checksum"));
    for (uint32_t t = 0; t < m->n_transports; t++) report_transport(d, m, t);
    report_unconnected(d, m);
    mesh_print_text(m, &d->tables);
    mesh_print_json(m, &d->members);
}

static enum status check(struct doctor *d, struct arena *arena, struct err *err)
{
    struct probe_server_options o = { .host = "127.0.0.1", .tuning = d->tuning };
    struct mesh *m = MEM_NEW(struct mesh);
    int pid = 0;
    uint16_t port = 0;
    char here[32];
    enum status st = node_options_secret(d->c, arena, &o.secret, err);
    if (st == OK) st = probe_server_fork(&o, &pid, &port, err);
    if (st == OK) st = probe_dialer_create(o.secret, &m->dialer, err);
    snprintf(here, sizeof here, "127.0.0.1:%u", port);
    if (st == OK) run_mesh(d, m, here);
    mesh_release(m);
    mem_free(m);
    probe_server_child_stop(pid);
    return st;
}

void doctor_check_peers(struct doctor *d)
{
    struct err err = { 0 };
    struct arena arena;
    if (!config_is_set(d->c, "peers")) return;
    log_set_level(LOG_ERROR); /* the servers' errors are in their replies */
    arena_init(&arena);
    if (check(d, &arena, &err) != OK)
        doctor_fix(doctor_add(d, "peers", DOCTOR_FAIL, "%s", err.text),
                   "fix this first: nothing was measured");
    arena_release(&arena);
}
