/* cm_address.c - the IP address that stands for a port. Asks the kernel for the addresses of
 * interfaces; keeps nothing. Thread: any. */
#include <arpa/inet.h>
#include <dirent.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtransfer/rdma/cm.h"

static void ipv4(const void *bytes, struct sockaddr_storage *out)
{
    struct sockaddr_in a = { .sin_family = AF_INET };
    memcpy(&a.sin_addr, bytes, sizeof a.sin_addr);
    memset(out, 0, sizeof *out);
    memcpy(out, &a, sizeof a);
}

/* An IPv6 address; a link-local one needs its interface. */
static void ipv6(const void *bytes, const char *netdev, struct sockaddr_storage *out)
{
    struct sockaddr_in6 a = { .sin6_family = AF_INET6 };
    memcpy(&a.sin6_addr, bytes, sizeof a.sin6_addr);
    if (IN6_IS_ADDR_LINKLOCAL(&a.sin6_addr)) a.sin6_scope_id = if_nametoindex(netdev);
    memset(out, 0, sizeof *out);
    memcpy(out, &a, sizeof a);
}

/* Finds the interface of a port whose GIDs name none: among those of the same PCI function, the one
 * with the port's number. */
static void find_netdev(const struct rdma_port *p, char out[IF_NAMESIZE])
{
    char path[512];
    snprintf(path, sizeof path, "/sys/class/infiniband/%s/device/net", p->device);
    DIR *d = opendir(path);
    for (const struct dirent *e; d && !out[0] && (e = readdir(d)) != NULL;) {
        unsigned number = 0;
        snprintf(path, sizeof path, "/sys/class/net/%.32s/dev_port", e->d_name);
        FILE *f = e->d_name[0] != '.' ? fopen(path, "re") : NULL;
        if (f && fscanf(f, "%u", &number) == 1 && number + 1 == p->number)
            snprintf(out, IF_NAMESIZE, "%.*s", IF_NAMESIZE - 1, e->d_name);
        if (f) fclose(f);
    }
    if (d) closedir(d);
}

static bool address_of_interface(const char *netdev, struct sockaddr_storage *out)
{
    struct ifaddrs *all = NULL;
    bool found = false;
    if (!netdev[0] || getifaddrs(&all) != 0) return false;
    for (int family = 0; family < 2 && !found; family++)
        for (const struct ifaddrs *a = all; a && !found; a = a->ifa_next) {
            if (!a->ifa_addr || strcmp(a->ifa_name, netdev) != 0 ||
                a->ifa_addr->sa_family != (family == 0 ? AF_INET : AF_INET6))
                continue;
            if (family == 0)
                ipv4(&((const struct sockaddr_in *)(const void *)a->ifa_addr)->sin_addr, out);
            else
                ipv6(&((const struct sockaddr_in6 *)(const void *)a->ifa_addr)->sin6_addr, netdev,
                     out);
            found = true;
        }
    freeifaddrs(all);
    return found;
}

bool rdma_cm_address(const struct rdma_port *p, const struct rdma_port_addr *mine,
                     struct sockaddr_storage *out)
{
    static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };
    char netdev[IF_NAMESIZE];
    memcpy(netdev, p->netdev, sizeof netdev);
    if (mine->link == RDMA_LINK_ETHERNET && mine->gid_type != RDMA_GID_IB) {
        if (memcmp(mine->gid, mapped, sizeof mapped) == 0) ipv4(mine->gid + sizeof mapped, out);
        else ipv6(mine->gid, netdev, out);
        return true;
    }
    if (!netdev[0]) find_netdev(p, netdev);
    return address_of_interface(netdev, out);
}

void rdma_cm_address_of(const struct rdma_port *p, const struct rdma_invite *m,
                        struct sockaddr_storage *out)
{
    if (m->ipv6) {
        ipv6(m->address, p->netdev, out);
        ((struct sockaddr_in6 *)(void *)out)->sin6_port = htons(m->port);
    } else {
        ipv4(m->address, out);
        ((struct sockaddr_in *)(void *)out)->sin_port = htons(m->port);
    }
}
