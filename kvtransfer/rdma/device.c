/* device.c - asks libibverbs and sysfs what RDMA devices this host has. Opens each device for a
 * moment; keeps nothing open. Thread: any; blocks for milliseconds per device. */
#include "kvtransfer/rdma/device.h"

#include <assert.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shared/base/mem.h"

enum {
    GIDS_MAX =
        1024 /* the answer of ibv_query_gid_table is one ioctl attribute: at most 65,535 bytes of 32
              * each */
    ,
    NUMA_SAMPLES = 16
};

/* First line of a file of sysfs, without its end; "" when there is none. */
static const char *read_line(const char *path, char *out, size_t cap)
{
    FILE *f = fopen(path, "r");
    out[0] = 0;
    if (f && fgets(out, (int)cap, f)) out[strcspn(out, "\n")] = 0;
    if (f) fclose(f);
    return out;
}

/* Where the device is plugged in: the target of its `device` link ends in the PCI address.
 * Emulations have no such link. */
static void read_pci_address(const char *ibdev_path, struct rdma_port *p)
{
    char path[512], text[512];
    unsigned domain, bus, slot, function;
    p->numa_node = -1;
    p->software = true;
    snprintf(path, sizeof path, "%s/device", ibdev_path);
    ssize_t n = readlink(path, text, sizeof text - 1);
    if (n <= 0) return;
    text[n] = 0;
    const char *name = strrchr(text, '/');
    name = name ? name + 1 : text;
    if (sscanf(name, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4 ||
        strlen(name) >= sizeof p->pci)
        return;
    p->software = false;
    snprintf(p->pci, sizeof p->pci, "%.*s", (int)sizeof p->pci - 1, name);
    snprintf(path, sizeof path, "%s/device/numa_node", ibdev_path);
    if (read_line(path, text, sizeof text)[0]) p->numa_node = atoi(text);
}

static void read_abilities(struct ibv_context *ctx, struct rdma_port *p)
{
    struct ibv_device_attr_ex a = { 0 };
    const unsigned windows = IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    if (ibv_query_device_ex(ctx, NULL, &a) != 0) {
        memset(&a, 0, sizeof a);
        if (ibv_query_device(ctx, &a.orig_attr) != 0) return;
    }
    p->max_sge = (uint32_t)a.orig_attr.max_sge;
    p->max_qp_wr = (uint32_t)a.orig_attr.max_qp_wr;
    p->max_cqe = (uint32_t)a.orig_attr.max_cqe;
    p->max_rd_atomic = (uint32_t)a.orig_attr.max_qp_rd_atom;
    p->max_mr_bytes = a.orig_attr.max_mr_size;
    p->has_mw = (a.orig_attr.device_cap_flags & windows) != 0 && a.orig_attr.max_mw > 0;
    uint32_t odp = a.odp_caps.general_caps & IBV_ODP_SUPPORT
                       ? a.odp_caps.per_transport_caps.rc_odp_caps
                       : 0;
    p->odp_write = odp & IBV_ODP_SUPPORT_WRITE;
    p->odp_read = odp & IBV_ODP_SUPPORT_READ;
}

/* Speeds that the eight bits of active_speed cannot hold (XDR and on) stand in sysfs: "800 Gb/sec
 * (4X XDR)". */
static uint64_t sysfs_rate(const char *ibdev_path, unsigned number)
{
    char path[512], text[64];
    double gbit = 0;
    snprintf(path, sizeof path, "%s/ports/%u/rate", ibdev_path, number);
    return sscanf(read_line(path, text, sizeof text), "%lf Gb/sec", &gbit) == 1 && gbit > 0
               ? (uint64_t)(gbit * 1e9 / 8)
               : 0;
}

static void read_port(struct ibv_context *ctx, const char *ibdev_path, struct rdma_port *p)
{
    static const char *const states[] = {
        "NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"
    };
    struct ibv_port_attr a = { 0 };
    snprintf(p->state, sizeof p->state, "%s", "unreadable");
    if (ibv_query_port(ctx, p->number, &a) != 0) return;
    snprintf(p->state, sizeof p->state, "%s",
             (unsigned)a.state < COUNT_OF(states) ? states[a.state] : "unknown");
    p->active = a.state == IBV_PORT_ACTIVE;
    p->link = a.link_layer == IBV_LINK_LAYER_ETHERNET     ? RDMA_LINK_ETHERNET
              : a.link_layer == IBV_LINK_LAYER_INFINIBAND ? RDMA_LINK_INFINIBAND
                                                          : RDMA_LINK_UNKNOWN;
    p->mtu = rdma_mtu_bytes(a.active_mtu);
    p->mtu_max = rdma_mtu_bytes(a.max_mtu);
    p->lid = p->link == RDMA_LINK_INFINIBAND ? a.lid : 0;
    if (p->software) return; /* an emulation's speed codes say nothing about the wire */
    p->bytes_per_s = rdma_link_speed(p->link, a.active_width, a.active_speed);
    if (p->bytes_per_s == 0) p->bytes_per_s = sysfs_rate(ibdev_path, p->number);
}

static void take_gid(const struct ibv_gid_entry *e, struct rdma_gid *g)
{
    static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };
    memcpy(g->raw, e->gid.raw, 16);
    g->index = e->gid_index;
    g->type = e->gid_type == IBV_GID_TYPE_IB        ? RDMA_GID_IB
              : e->gid_type == IBV_GID_TYPE_ROCE_V1 ? RDMA_GID_ROCE_V1
                                                    : RDMA_GID_ROCE_V2;
    g->ipv4 = memcmp(g->raw, mapped, sizeof mapped) == 0;
    g->link_local = g->ipv4 ? g->raw[12] == 169 && g->raw[13] == 254
                            : g->raw[0] == 0xfe && (g->raw[1] & 0xc0) == 0x80;
    if (e->ndev_ifindex) if_indextoname(e->ndev_ifindex, g->netdev);
}

static void read_gids(struct ibv_context *ctx, const char *ibdev_path, struct rdma_port *p)
{
    char path[512], parent[64];
    struct ibv_gid_entry *entries = MEM_ARRAY(struct ibv_gid_entry, GIDS_MAX);
    ssize_t n = ibv_query_gid_table(ctx, entries, GIDS_MAX, 0);
    p->gids = MEM_ARRAY(struct rdma_gid, n > 0 ? n : 0);
    for (ssize_t i = 0; i < n; i++)
        if (entries[i].port_num == p->number) take_gid(&entries[i], &p->gids[p->n_gids++]);
    for (size_t i = 0; i < p->n_gids && !p->netdev[0]; i++)
        memcpy(p->netdev, p->gids[i].netdev, sizeof p->netdev);
    if (!p->netdev[0]) { /* no address yet; emulations name their interface all the same */
        snprintf(path, sizeof path, "%s/parent", ibdev_path);
        snprintf(p->netdev, sizeof p->netdev, "%.*s", IF_NAMESIZE - 1,
                 read_line(path, parent, sizeof parent));
    }
    mem_free(entries);
}

static void add_device(struct rdma_devices *out, struct ibv_device *device, struct ibv_context *ctx)
{
    struct ibv_device_attr a = { 0 };
    unsigned n_ports = ibv_query_device(ctx, &a) == 0 ? a.phys_port_cnt : 0;
    for (unsigned number = 1; number <= n_ports; number++) {
        out->ports = mem_realloc(out->ports, out->n + 1, sizeof *out->ports);
        struct rdma_port *p = &out->ports[out->n++];
        *p = (struct rdma_port){ .number = (uint8_t)number };
        snprintf(p->device, sizeof p->device, "%s", ibv_get_device_name(device));
        read_pci_address(device->ibdev_path, p);
        read_abilities(ctx, p);
        read_port(ctx, device->ibdev_path, p);
        read_gids(ctx, device->ibdev_path, p);
    }
}

static int by_name(const void *a, const void *b)
{
    const struct rdma_port *x = a, *y = b;
    int order = strverscmp(x->device, y->device); /* mlx5_2 before mlx5_10 */
    return order ? order : x->number - y->number;
}

enum status rdma_devices_list(struct rdma_devices *out, struct err *err)
{
    int n = 0, error = 0;
    const char *refused = NULL;
    char name[RDMA_NAME_MAX];
    *out = (struct rdma_devices){ 0 };
    struct ibv_device **list = ibv_get_device_list(&n); /* NULL, too, when the kernel has no
                                                         * ib_uverbs: then there are none */
    for (int i = 0; list && i < n; i++) {
        struct ibv_context *ctx = ibv_open_device(list[i]);
        if (!ctx && !refused) {
            error = errno;
            snprintf(name, sizeof name, "%s", ibv_get_device_name(list[i]));
            refused = name;
        }
        if (!ctx) continue;
        add_device(out, list[i], ctx);
        ibv_close_device(ctx);
    }
    if (list) ibv_free_device_list(list);
    if (out->n == 0 && refused)
        return err_set(err, ERR_NODEV,
                       "the RDMA device %s cannot be opened: %s; this user needs to read and write "
                       "/dev/infiniband/uverbs*",
                       refused, strerror(error));
    if (out->n) qsort(out->ports, out->n, sizeof *out->ports, by_name);
    return OK;
}

void rdma_devices_release(struct rdma_devices *d)
{
    for (size_t i = 0; i < d->n; i++) mem_free(d->ports[i].gids);
    mem_free(d->ports);
    *d = (struct rdma_devices){ 0 };
}

enum status rdma_devices_find(const struct kvt_rdma_tuning *t, int numa_node,
                              struct rdma_devices *out, struct err *err)
{
    struct rdma_devices all;
    TRY(rdma_devices_list(&all, err));
    enum status st = rdma_devices_choose(&all, t, numa_node, out, err);
    rdma_devices_release(&all);
    return st;
}

enum status rdma_port_open(const struct rdma_port *p, struct ibv_context **out, struct err *err)
{
    int n = 0;
    struct ibv_device **list = ibv_get_device_list(&n), *found = NULL;
    for (int i = 0; list && i < n; i++)
        if (strcmp(ibv_get_device_name(list[i]), p->device) == 0) found = list[i];
    struct ibv_context *ctx = found ? ibv_open_device(found) : NULL;
    int error = errno;
    if (list) ibv_free_device_list(list);
    if (!found) return err_set(err, ERR_NODEV, "the RDMA device %s is gone", p->device);
    if (!ctx)
        return err_set(err, ERR_NODEV, "the RDMA device %s cannot be opened: %s", p->device,
                       strerror(error));
    *out = ctx;
    return OK;
}

int rdma_numa_node_of(const void *p, size_t bytes)
{
    void *pages[NUMA_SAMPLES];
    int status[NUMA_SAMPLES], node = -1;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    if (bytes == 0) return -1;
    for (size_t i = 0; i < NUMA_SAMPLES; i++)
        pages[i] = (void *)(((uintptr_t)p + (bytes - 1) / NUMA_SAMPLES * i) & ~(page - 1));
    if (syscall(SYS_move_pages, 0, (unsigned long)NUMA_SAMPLES, pages, NULL, status, 0) != 0)
        return -1;
    for (size_t i = 0; i < NUMA_SAMPLES; i++) {
        if (status[i] < 0) continue; /* a page that nobody has touched yet */
        if (node >= 0 && node != status[i]) return -1;
        node = status[i];
    }
    return node;
}
