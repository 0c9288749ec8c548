/* node_ports.c - see node_ports.h. */
#include "deploy/node/node_ports.h"

#include <dirent.h>
#include <string.h>
#include <unistd.h>

#include "shared/base/address/port.h"

static bool has_rdma_device(void)
{
    DIR *d = opendir("/sys/class/infiniband");
    bool found = false;
    for (struct dirent *e; d && !found && (e = readdir(d)) != NULL;) found = e->d_name[0] != '.';
    if (d) closedir(d);
    return found;
}

enum status node_ports_hold(const struct node_options *o, struct node_ports *p, struct err *err)
{
    TRY(port_hold(o->cluster_host, o->kv_port, "--cache-queue-port", &p->kv_fd, err));
    /* Without a device nobody listens there, so that nodes of such a host may share the port. */
    if (!strstr(o->protocols, "rdma") || !has_rdma_device()) return OK;
    return port_hold(o->cluster_host, o->tuning.rdma.port, "--rdma-comm-ports", &p->rdma_fd, err);
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
