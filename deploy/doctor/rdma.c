/* rdma.c - checks the RDMA devices of this host, and the ports that a node with these options would
 * use. Thread: main. */
#include "kvtransfer/rdma/device.h"

#include <stdio.h>
#include <string.h>

#include "deploy/doctor/doctor.h"

static const char LOADED[] = "is its driver loaded, and /dev/infiniband there for this user (in a "
                             "container: --device /dev/infiniband)?";

static bool is_used(const struct rdma_devices *used, const struct rdma_port *p)
{
    for (size_t i = 0; i < used->n; i++)
        if (used->ports[i].number == p->number && strcmp(used->ports[i].device, p->device) == 0)
            return true;
    return false;
}

/* Adds one line for all ports that would not be used; state, rate and place show why. */
static void add_unused(struct doctor *d, const struct rdma_devices *all,
                       const struct rdma_devices *used)
{
    char name[RDMA_PORT_TEXT_MAX];
    struct buf out = { 0 };
    size_t n = 0;
    for (size_t i = 0; i < all->n; i++) {
        const struct rdma_port *p = &all->ports[i];
        if (is_used(used, p)) continue;
        if (n++ < 8)
            buf_printf(&out, "%s%s (%s%s, NUMA node %d)", n > 1 ? ", " : "",
                       rdma_port_text(p, name), p->state, p->software ? ", emulated" : "",
                       p->numa_node);
    }
    if (n > 8) buf_printf(&out, " and %zu more", n - 8);
    if (n) doctor_add(d, "RDMA", DOCTOR_OK, "not used: %s", out.data);
    buf_release(&out);
}

static void check_used(struct doctor *d, const struct rdma_devices *all, enum doctor_asked asked)
{
    struct rdma_devices used = { 0 };
    struct err err = { 0 };
    /* prefers devices on the node that will hold the KV cache */
    enum status st = rdma_devices_choose(all, &d->tuning.rdma, doctor_only_node(), &used, &err);
    /* A wrong KVCACHE_RDMA_NICS always fails; missing links fail only when no other way is left. */
    if (st != OK) {
        doctor_fix(doctor_add(d, "RDMA", st == ERR_CONFIG ? DOCTOR_FAIL : doctor_missing(asked),
                              "%s", err.text),
                   st == ERR_CONFIG
                       ? "deploy/get_rdma_nics.sh gpu chooses; without KVCACHE_RDMA_NICS every "
                         "active port is used"
                       : "check cables and switch ports; ibv_devinfo shows each port's state");
        add_unused(d, all, &used);
        return;
    }
    for (size_t i = 0; i < used.n; i++) doctor_check_port(d, &used.ports[i]);
    add_unused(d, all, &used);
    rdma_devices_release(&used);
}

void doctor_check_rdma(struct doctor *d)
{
    enum doctor_asked asked = doctor_asked_for(d->c, "rdma");
    struct rdma_devices all = { 0 };
    struct err err = { 0 };
    if (asked == DOCTOR_NOT_ALLOWED) {
        doctor_add(d, "RDMA", DOCTOR_OK,
                   "not asked for: --cache-transfer-protocol does not name rdma");
        return;
    }
    const char *nics = d->tuning.rdma.nics;
    enum status st = rdma_devices_list(&all, &err);
    if (st != OK || all.n == 0) {
        bool named = nics && nics[0];
        struct doctor_line *line = doctor_add(
            d, "RDMA", named ? DOCTOR_FAIL : doctor_missing(asked), "%s%s%s%s",
            st != OK ? err.text : "this host has no RDMA device",
            named ? "; KVCACHE_RDMA_NICS=" : "", named ? nics : "",
            asked == DOCTOR_ALLOWED && !named ? "; not asked for by name, so KV takes ipc or tcp"
                                              : "");
        if (line->result != DOCTOR_OK) doctor_fix(line, "%s", LOADED);
    } else {
        check_used(d, &all, asked);
    }
    rdma_devices_release(&all);
}
