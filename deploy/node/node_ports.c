/* node_ports.c - see node_ports.h. */
#include "deploy/node/node_ports.h"

#include <dirent.h>
#include <unistd.h>

#include "kvtransfer/connect/address.h"
#include "shared/base/address/port.h"

static bool has_rdma_device(void)
{
    DIR *d = opendir("/sys/class/infiniband");
    bool found = false;
    for (struct dirent *e; d && !found && (e = readdir(d)) != NULL;) found = e->d_name[0] != '.';
    if (d) closedir(d);
    return found;
}

static bool allows(const struct node_options *o, const char *protocol)
{
    struct str rest = str_of(o->protocols), item;
    while (str_split(&rest, ',', &item))
        if (str_eq_c(item, protocol)) return true;
    return false;
}

/* Ports on which nobody will listen are left to others: nodes of a host may be given the same. */
enum status node_ports_hold(const struct node_options *o, struct node_ports *p, struct err *err)
{
    struct buf host = { 0 };
    bool tcp = allows(o, "tcp"), rdma = allows(o, "rdma") && has_rdma_device();
    if (!tcp && !rdma) return OK;
    enum status st = kvt_address_listen_host(o->cluster_host, o->tuning.socket_ifname, &host, err);
    if (st == OK && tcp)
        st = port_hold(host.data, o->kv_port, "--cache-queue-port", &p->kv_fd, err);
    if (st == OK && rdma)
        st = port_hold(host.data, o->tuning.rdma.port, "--rdma-comm-ports", &p->rdma_fd, err);
    buf_release(&host);
    return st;
}

static void release_port(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

void node_ports_release(struct node_ports *p)
{
    release_port(&p->kv_fd);
    release_port(&p->rdma_fd);
}
