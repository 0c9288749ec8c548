/* mesh.c - measures every pair; see mesh.h. */
#include "deploy/doctor/mesh.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtransfer/transport.h"
#include "shared/base/mem.h"

/* Large enough for a rate, small enough that a mesh of ten hosts on a 1 Gbit/s network takes a
 * minute. */
enum {
    PIECE = 256 * 1024,
    LAYERS = 4,
    BLOCKS = 16,
    ROUNDS = 3,
    SMALL_PIECE = 4096,
    SMALL_TRANSFERS = 64
};

bool mesh_dial(struct mesh *m, const char *where, const char *address)
{
    if (m->n_hosts == MESH_HOSTS_MAX) return false;
    struct mesh_host *h = &m->hosts[m->n_hosts++];
    snprintf(h->where, sizeof h->where, "%s", where);
    if (probe_dial(m->dialer, address, &h->client, &h->error) == OK)
        snprintf(h->name, sizeof h->name, "%s", probe_peer(h->client)->host);
    else h->client = NULL;
    return true;
}

struct mesh_cell *mesh_cell(const struct mesh *m, uint32_t transport, uint32_t from, uint32_t to)
{
    return &m->cells[((size_t)transport * m->n_hosts + from) * m->n_hosts + to];
}

void mesh_release(struct mesh *m)
{
    for (uint32_t i = 0; i < m->n_hosts; i++) probe_hang_up(m->hosts[i].client);
    probe_dialer_free(m->dialer);
    mem_free(m->cells);
}

static bool has_transport(const struct mesh_host *h, const char *name)
{
    struct str rest = str_of(probe_peer(h->client)->transports), item;
    while (str_split(&rest, ',', &item))
        if (str_eq_c(item, name)) return true;
    return false;
}

/* The state that is known without trying; MESH_NOT_TRIED when the pair should connect. */
static enum mesh_state predict_state(const struct mesh *m, const char *transport, uint32_t from,
                                     uint32_t to, struct mesh_cell *c)
{
    const struct mesh_host *a = &m->hosts[from], *b = &m->hosts[to];
    c->culprit = has_transport(a, transport) ? to : from;
    if (!has_transport(a, transport) || !has_transport(b, transport)) return MESH_NOT_BUILT;
    bool one_host = probe_peer(a->client)->boot_id[0] &&
                    strcmp(probe_peer(a->client)->boot_id, probe_peer(b->client)->boot_id) == 0;
    unsigned caps = kvt_transport_caps(str_of(transport));
    if ((caps & KVT_CAP_SAME_PROCESS) || ((caps & KVT_CAP_SAME_HOST) && !one_host))
        return MESH_OUT_OF_REACH;
    return MESH_NOT_TRIED;
}

static struct measurement make_measurement(const struct mesh *m, const char *transport,
                                           uint32_t from, uint32_t to, bool checksum)
{
    struct measurement p = {
        .sender = m->hosts[from].client,
        .receiver = m->hosts[to].client,
        .piece_bytes = PIECE,
        .n_layers = LAYERS,
        .n_blocks = BLOCKS,
        .checksum = checksum,
    };
    snprintf(p.transport, sizeof p.transport, "%s", transport);
    /* This host is reached at its address towards the other host; probe servers learn theirs from
     * the connection. */
    if (from == 0) p.sender_address = probe_peer(p.receiver)->local;
    if (to == 0) p.receiver_address = probe_peer(p.sender)->local;
    return p;
}

static enum status measure_rate(struct measurement *p, struct mesh_cell *c,
                                struct measurement_round *r, struct err *err)
{
    for (int i = 0; i <= ROUNDS; i++) { /* the first run is the warm-up */
        TRY(measurement_run(p, 1, BLOCKS, r, err));
        double rate = r->total_ns ? (double)r->n_bytes * 1e9 / (double)r->total_ns : 0;
        if (i > 0 && rate > c->rate) c->rate = rate;
    }
    return OK;
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static enum status measure(struct measurement *p, struct mesh_cell *c, struct measurement_round *r,
                           struct err *err)
{
    TRY(measurement_begin(p, err));
    c->link_speed = p->link_speed;
    enum status st = measure_rate(p, c, r, err);
    measurement_end(p);
    if (st != OK) return st;
    p->piece_bytes = SMALL_PIECE;
    p->n_layers = p->n_blocks = 1;
    TRY(measurement_begin(p, err));
    st = measurement_run(p, SMALL_TRANSFERS, 1, r, err);
    measurement_end(p);
    if (st != OK) return st;
    qsort(r->ns, r->n, sizeof *r->ns, by_value);
    c->p50_us = (double)r->ns[r->n / 2] / 1e3;
    return OK;
}

static void measure_cell(struct mesh *m, const char *transport, uint32_t from, uint32_t to,
                         bool checksum, struct measurement_round *r, struct mesh_cell *c)
{
    struct err err = { 0 };
    if (from == to || !m->hosts[from].client || !m->hosts[to].client) return;
    c->state = predict_state(m, transport, from, to, c);
    if (c->state != MESH_NOT_TRIED) return;
    struct measurement p = make_measurement(m, transport, from, to, checksum);
    if (measure(&p, c, r, &err) == OK) {
        c->state = MESH_MEASURED;
        return;
    }
    c->state = p.step == PROBE_OPEN ? MESH_UNAVAILABLE : MESH_FAILED;
    c->culprit = p.at_sender ? from : to;
    snprintf(c->text, sizeof c->text, "%.*s", (int)sizeof c->text - 1, err.text);
}

void mesh_measure(struct mesh *m, bool checksum)
{
    struct measurement_round *r = MEM_NEW(struct measurement_round);
    m->cells = MEM_ARRAY(struct mesh_cell, (size_t)m->n_transports * m->n_hosts * m->n_hosts);
    for (uint32_t t = 0; t < m->n_transports; t++)
        for (uint32_t from = 0; from < m->n_hosts; from++)
            for (uint32_t to = 0; to < m->n_hosts; to++)
                measure_cell(m, m->transports[t], from, to, checksum, r, mesh_cell(m, t, from, to));
    mem_free(r);
}
