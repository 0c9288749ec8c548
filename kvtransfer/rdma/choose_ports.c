/* choose_ports.c - chooses the RDMA ports that a node uses: those that the operator named, or the
 * active ones nearest to its memory. Thread: any (pure functions). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtransfer/rdma/device.h"
#include "shared/base/mem.h"

/* "mlx5_0:1 (ACTIVE), mlx5_1:1 (DOWN)" */
static void add_ports(const struct rdma_devices *all, struct buf *out)
{
    char port[RDMA_PORT_TEXT_MAX];
    for (size_t i = 0; i < all->n; i++)
        buf_printf(out, "%s%s (%s)", i ? ", " : "", rdma_port_text(&all->ports[i], port),
                   all->ports[i].state);
    if (all->n == 0) buf_add_c(out, "none");
}

static enum status refuse(const struct rdma_devices *all, const struct kvt_rdma_tuning *t,
                          struct str item, const char *why, struct err *err)
{
    struct buf there = { 0 };
    add_ports(all, &there);
    enum status st = err_field(err, ERR_CONFIG, "KVCACHE_RDMA_NICS",
                               "KVCACHE_RDMA_NICS=%s: '%.*s' %s; RDMA ports here: %s", t->nics,
                               STR_ARG(item), why, there.data);
    buf_release(&there);
    return st;
}

/* Appends a copy unless there is one; counts it if the list is full. */
static void take(struct rdma_devices *out, const struct rdma_port *p)
{
    for (size_t i = 0; i < out->n; i++)
        if (out->ports[i].number == p->number && strcmp(out->ports[i].device, p->device) == 0)
            return;
    if (out->n == RDMA_RAILS_MAX) {
        out->n_left_out++;
        return;
    }
    out->ports = mem_realloc(out->ports, out->n + 1, sizeof *out->ports);
    out->ports[out->n] = *p;
    out->ports[out->n].gids = MEM_ARRAY(struct rdma_gid, p->n_gids);
    if (p->n_gids) memcpy(out->ports[out->n].gids, p->gids, p->n_gids * sizeof *p->gids);
    out->n++;
}

static enum status take_named(const struct rdma_devices *all, const struct kvt_rdma_tuning *t,
                              struct str item, struct rdma_devices *out, struct err *err)
{
    struct str rest = item, name;
    int64_t number = 0;
    bool known = false, right_port = false;
    size_t n_active = 0;
    if (!str_split(&rest, ':', &name) || name.n == 0)
        return refuse(all, t, item, "is an empty name", err);
    if (rest.p && (str_to_i64(rest, &number) != OK || number < 1 || number > 255))
        return refuse(all, t, item, "has no port number after the colon", err);
    for (size_t i = 0; i < all->n; i++) {
        const struct rdma_port *p = &all->ports[i];
        if (!str_eq_c(name, p->device)) continue;
        known = true;
        if (number && p->number != number) continue;
        right_port = true;
        if (!p->active) continue;
        n_active++;
        take(out, p);
    }
    if (!known) return refuse(all, t, item, "is not an RDMA device of this host", err);
    if (!right_port) return refuse(all, t, item, "is a port that the device does not have", err);
    if (!n_active)
        return refuse(all, t, item, number ? "is not active" : "has no active port", err);
    return OK;
}

static int by_speed(const void *a, const void *b)
{
    const struct rdma_port *x = a, *y = b;
    if (x->bytes_per_s != y->bytes_per_s) return x->bytes_per_s < y->bytes_per_s ? 1 : -1;
    int order = strverscmp(x->device, y->device);
    return order ? order : x->number - y->number;
}

/* Takes every active port, except emulations if there is hardware, and far ports if there are ports
 * near the memory. */
static enum status take_nearest(const struct rdma_devices *all, int numa_node,
                                struct rdma_devices *out, struct err *err)
{
    struct buf there = { 0 };
    bool hardware = false, near = false;
    for (size_t i = 0; i < all->n; i++) hardware |= all->ports[i].active && !all->ports[i].software;
    for (size_t i = 0; i < all->n; i++)
        near |= all->ports[i].active && all->ports[i].software != hardware && numa_node >= 0 &&
                all->ports[i].numa_node == numa_node;
    struct rdma_port *sorted = mem_dup(all->ports, all->n * sizeof *all->ports);
    qsort(sorted, all->n, sizeof *sorted, by_speed);
    for (size_t i = 0; i < all->n; i++)
        if (sorted[i].active && sorted[i].software != hardware &&
            (!near || sorted[i].numa_node == numa_node))
            take(out, &sorted[i]);
    mem_free(sorted);
    if (out->n) return OK;
    add_ports(all, &there);
    enum status st = err_set(err, ERR_NODEV, "no RDMA port is active; RDMA ports here: %s",
                             there.data);
    buf_release(&there);
    return st;
}

enum status rdma_devices_choose(const struct rdma_devices *all, const struct kvt_rdma_tuning *t,
                                int numa_node, struct rdma_devices *out, struct err *err)
{
    struct rdma_devices chosen = { 0 };
    enum status st = OK;
    if (all->n == 0)
        return t->nics && t->nics[0] ? refuse(all, t, str_of(t->nics),
                                              "cannot be had: this host has no RDMA device", err)
                                     : err_set(err, ERR_NODEV,
                                               "this host has no RDMA device (ibv_devices lists "
                                               "them; are its driver and ib_uverbs loaded?)");
    if (t->nics && t->nics[0]) {
        struct str rest = str_of(t->nics), item;
        while (st == OK && str_split(&rest, ',', &item))
            st = take_named(all, t, str_trim(item), &chosen, err);
    } else {
        st = take_nearest(all, numa_node, &chosen, err);
    }
    if (st != OK) {
        rdma_devices_release(&chosen);
        return st;
    }
    *out = chosen;
    return OK;
}
