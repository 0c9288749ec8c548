/* rdma_port.c - checks one RDMA port that a node would use: link, MTU, GID, flow control, distance
 * to the CPUs. Thread: main. */
#include <errno.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "deploy/doctor/doctor.h"
#include "kvtransfer/rdma/device.h"

/* Bytes that RoCE v2 adds to a packet's payload at most: IPv6 40, UDP 8, base transport header 12,
 * RDMA extended header 16, immediate 4, checksum 4 (IBA annex A17). An interface's MTU counts all
 * of them. */
enum { ROCE_HEADERS = 84, MTU_MAX = 4096 };

static void check_link(struct doctor *d, const struct rdma_port *p)
{
    static const char *const links[] = { [RDMA_LINK_UNKNOWN] = "unknown link",
                                         [RDMA_LINK_INFINIBAND] = "InfiniBand",
                                         [RDMA_LINK_ETHERNET] = "Ethernet" };
    char name[RDMA_PORT_TEXT_MAX], rate[48] = "rate not known", place[64] = "";
    if (p->bytes_per_s) snprintf(rate, sizeof rate, "%.0f Gbit/s", (double)p->bytes_per_s * 8e-9);
    if (p->pci[0]) snprintf(place, sizeof place, ", %s, NUMA node %d", p->pci, p->numa_node);
    struct doctor_line *line = doctor_add(
        d, "RDMA port", p->software ? DOCTOR_WARN : DOCTOR_OK, "%s: %s, %s %s%s%s%s%s",
        rdma_port_text(p, name), p->state, links[p->link],
        p->software ? "emulated in software (rdma_rxe or siw)" : rate,
        p->netdev[0] ? ", interface " : "", p->netdev, place, p->has_mw ? ", memory windows" : "");
    if (p->software)
        doctor_fix(line, "right for tests; for speed use tcp, or a NIC that does RDMA itself");
}

static uint32_t interface_mtu(const char *netdev)
{
    char path[128], text[32];
    snprintf(path, sizeof path, "/sys/class/net/%s/mtu", netdev);
    return netdev[0] && doctor_read_line(path, text, sizeof text)
               ? (uint32_t)strtoul(text, NULL, 10)
               : 0;
}

static void check_mtu(struct doctor *d, const struct rdma_port *p)
{
    char name[RDMA_PORT_TEXT_MAX], interface[64] = "";
    uint32_t mtu = interface_mtu(p->netdev), given = d->tuning.rdma.mtu;
    rdma_port_text(p, name);
    if (mtu) snprintf(interface, sizeof interface, " (%s: %u)", p->netdev, mtu);
    if (given > p->mtu) {
        doctor_fix(doctor_add(d, "RDMA MTU", DOCTOR_FAIL,
                              "%s: active MTU %u%s, less than BATON_RDMA_MTU=%u", name, p->mtu,
                              interface, given),
                   "raise the interface's MTU to %u or more, or lower BATON_RDMA_MTU",
                   given + ROCE_HEADERS);
        return;
    }
    bool could = p->mtu < MTU_MAX && p->mtu_max >= MTU_MAX;
    struct doctor_line *line = doctor_add(d, "RDMA MTU", could ? DOCTOR_WARN : DOCTOR_OK,
                                          "%s: active MTU %u%s, the port can do %u", name, p->mtu,
                                          interface, p->mtu_max);
    if (!could) return;
    if (p->link == RDMA_LINK_INFINIBAND)
        doctor_fix(line, "let the subnet manager give the partition an MTU of %d", MTU_MAX);
    else
        doctor_fix(line,
                   "where every switch and peer takes jumbo frames: ip link set %s mtu %d (or "
                   "9000), on every host",
                   p->netdev, MTU_MAX + ROCE_HEADERS);
}

static void check_gid(struct doctor *d, const struct rdma_port *p)
{
    char name[RDMA_PORT_TEXT_MAX], text[RDMA_GID_TEXT_MAX];
    const struct rdma_gid *g;
    struct err err = { 0 };
    rdma_port_text(p, name);
    if (rdma_gid_choose(p, NULL, &d->tuning.rdma, &g, &err) != OK) {
        struct doctor_line *failed = doctor_add(d, "RDMA GID", DOCTOR_FAIL, "%s", err.text);
        if (p->n_gids)
            doctor_fix(failed, "unset KVCACHE_RDMA_GID_INDEX: one is chosen that peers can reach");
        else
            doctor_fix(failed, "ip addr add ADDRESS/BITS dev %s",
                       p->netdev[0] ? p->netdev : "INTERFACE");
        return;
    }
    bool v1 = g->type == RDMA_GID_ROCE_V1, local = g->type != RDMA_GID_IB && g->link_local;
    struct doctor_line *line = doctor_add(
        d, "RDMA GID", v1 || local ? DOCTOR_WARN : DOCTOR_OK, "%s: %s%s of %zu", name,
        d->tuning.rdma.gid_given ? "given by KVCACHE_RDMA_GID_INDEX: " : "", rdma_gid_text(g, text),
        p->n_gids);
    if (v1)
        doctor_fix(line, "RoCE v1 does not pass routers, and both peers must speak it: choose an "
                         "index of RoCE v2");
    else if (local)
        doctor_fix(line,
                   "a link-local address reaches this link only: give %s an address of the "
                   "cluster's network",
                   p->netdev);
}

bool doctor_priorities_on(const char *folder, char out[24])
{
    char path[256], text[16];
    bool there = false;
    size_t n = 0;
    out[0] = 0;
    for (int i = 0; i < 8; i++) {
        snprintf(path, sizeof path, "%s/%d", folder, i);
        if (!doctor_read_line(path, text, sizeof text)) continue;
        there = true;
        if (strtol(text, NULL, 10) == 1)
            n += (size_t)snprintf(out + n, 24 - n, "%s%d", n ? "," : "", i);
    }
    return there;
}

/* Reads the link-level pause settings, as `ethtool -a` does; false when the driver does not say. */
static bool read_pause(const char *netdev, struct ethtool_pauseparam *out)
{
    struct ifreq request = { 0 };
    *out = (struct ethtool_pauseparam){ .cmd = ETHTOOL_GPAUSEPARAM };
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return false;
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", netdev);
    request.ifr_data = (void *)out;
    bool ok = ioctl(fd, SIOCETHTOOL, &request) == 0;
    close(fd);
    return ok;
}

/* RoCE recovers slowly from lost packets, so the network should lose none: use pause frames, or PFC
 * with ECN. The settings of the switch are not visible here. */
static void check_flow_control(struct doctor *d, const struct rdma_port *p)
{
    char name[RDMA_PORT_TEXT_MAX], path[128], pfc[24], ecn[24], text[200];
    struct ethtool_pauseparam pause;
    if (p->link != RDMA_LINK_ETHERNET || !p->netdev[0]) return;
    bool has_pause = read_pause(p->netdev, &pause);
    snprintf(path, sizeof path, "/sys/class/net/%s/qos/pfc", p->netdev);
    bool has_pfc = doctor_read_line(path, pfc, sizeof pfc) ||
                   (snprintf(path, sizeof path, "/sys/class/net/%s/pfc/enable", p->netdev),
                    doctor_priorities_on(path, pfc));
    snprintf(path, sizeof path, "/sys/class/net/%s/ecn/roce_np/enable", p->netdev);
    bool has_ecn = doctor_priorities_on(path, ecn);
    int n = snprintf(text, sizeof text, "pause frames %s",
                     !has_pause                         ? "not visible"
                     : pause.rx_pause && pause.tx_pause ? "on"
                     : pause.rx_pause || pause.tx_pause ? "one way"
                                                        : "off");
    n += snprintf(text + n, sizeof text - (size_t)n, ", PFC %s%s",
                  has_pfc ? "priorities " : "not visible", has_pfc ? (pfc[0] ? pfc : "none") : "");
    snprintf(text + n, sizeof text - (size_t)n, ", ECN %s%s",
             has_ecn ? "priorities " : "not visible", has_ecn ? (ecn[0] ? ecn : "none") : "");
    bool lossy = has_pause && !pause.rx_pause && !pause.tx_pause && has_pfc &&
                 (!pfc[0] || strspn(pfc, "0,") == strlen(pfc));
    struct doctor_line *line = doctor_add(d, "flow control",
                                          lossy && !p->software ? DOCTOR_WARN : DOCTOR_OK, "%s: %s",
                                          rdma_port_text(p, name), text);
    if (lossy && !p->software)
        doctor_fix(line,
                   "one lost packet costs milliseconds: switch PFC on for RoCE's priority, on the "
                   "host (mlnx_qos -i %s --pfc ...) and the switch",
                   p->netdev);
    else if (!has_pfc && !p->software)
        doctor_fix(line,
                   "the driver does not show PFC: 'dcb pfc show dev %s' may, and the switch's own "
                   "counters",
                   p->netdev);
}

/* A put reads the KV cache through the PCIe root of the device; on another NUMA node every byte
 * crosses the link between the sockets. */
static void check_numa(struct doctor *d, const struct rdma_port *p)
{
    char name[RDMA_PORT_TEXT_MAX];
    /* a single node: everything is near */
    if (p->numa_node < 0 || access("/sys/devices/system/node/node1", F_OK) != 0) return;
    bool cpus = doctor_runs_on_node(p->numa_node), memory = doctor_memory_on_node(p->numa_node);
    struct doctor_line *line = doctor_add(d, "NUMA", cpus && memory ? DOCTOR_OK : DOCTOR_WARN,
                                          "%s: on node %d, where this process may use %s",
                                          rdma_port_text(p, name), p->numa_node,
                                          cpus && memory ? "CPUs and memory"
                                          : cpus         ? "CPUs but no memory"
                                          : memory       ? "memory but no CPU"
                                                         : "neither CPUs nor memory");
    if (!cpus || !memory)
        doctor_fix(line,
                   "numactl --cpunodebind=%d --membind=%d baton serve ..., or name a device of "
                   "this process's node in KVCACHE_RDMA_NICS",
                   p->numa_node, p->numa_node);
}

void doctor_check_port(struct doctor *d, const struct rdma_port *p)
{
    check_link(d, p);
    check_mtu(d, p);
    check_gid(d, p);
    check_flow_control(d, p);
    check_numa(d, p);
}
