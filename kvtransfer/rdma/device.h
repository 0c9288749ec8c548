/* device.h - the RDMA devices of this host: list them (rdma_devices_list), choose ports
 * (rdma_devices_choose), and choose the address (GID) of each (rdma_gid_choose). qp.h and
 * memory.h have queue pairs and memory.
 *
 * Listing opens every device for a moment and keeps none open; choosing is pure, so tests use
 * tables written by hand. Ports are plain values that may be copied.
 * Thread: any; listing takes milliseconds per device (loop thread at start, main for the doctor).
 */
#ifndef BATON_KVTRANSFER_RDMA_DEVICE_H
#define BATON_KVTRANSFER_RDMA_DEVICE_H

#include <net/if.h>
#include <stddef.h>
#include <sys/socket.h>

#include "kvtransfer/tuning.h"
#include "shared/base/buf.h"
#include "shared/base/err.h"

enum {
    RDMA_NAME_MAX = 64, /* IBV_SYSFS_NAME_MAX */
    RDMA_RAILS_MAX = 8, /* ports used at once; FastDeploy's limit for KVCACHE_RDMA_NICS */
    RDMA_DEVICES_MAX = 64,
    RDMA_PORT_TEXT_MAX = RDMA_NAME_MAX + 8,
    RDMA_GID_TEXT_MAX = 96
};

enum rdma_link { RDMA_LINK_UNKNOWN, RDMA_LINK_INFINIBAND, RDMA_LINK_ETHERNET };
enum rdma_gid_type { RDMA_GID_IB, RDMA_GID_ROCE_V1, RDMA_GID_ROCE_V2 };

struct rdma_gid {
    uint8_t raw[16];
    uint32_t index; /* in the port's table */
    enum rdma_gid_type type;
    bool ipv4;                /* ::ffff:a.b.c.d */
    bool link_local;          /* fe80::/10, or 169.254/16 */
    char netdev[IF_NAMESIZE]; /* "" when the kernel names none (InfiniBand) */
};

struct rdma_port {
    char device[RDMA_NAME_MAX]; /* "mlx5_0" */
    uint8_t number;             /* from 1 */
    enum rdma_link link;
    bool active;
    char state[24];           /* "ACTIVE", "DOWN", "INIT", ...: for sentences */
    uint64_t bytes_per_s;     /* of the link, one direction, as the hardware reports; 0: not known,
                               * or an emulation */
    uint32_t mtu, mtu_max;    /* bytes: active, and the port's maximum */
    uint16_t lid;             /* InfiniBand; 0 on Ethernet */
    char netdev[IF_NAMESIZE]; /* of the first GID that has one; "" when none */
    int numa_node;            /* -1: not known */
    char pci[16];             /* "0000:3b:00.0"; "" for emulations */
    bool software;            /* no PCI device below it: rdma_rxe, siw */
    struct rdma_gid *gids;    /* valid entries, in the table's order; owned by the list */
    size_t n_gids;
    /* Limits and abilities of the device (the same for its ports). */
    uint32_t max_sge, max_qp_wr, max_cqe, max_rd_atomic;
    uint64_t max_mr_bytes;
    bool has_mw;              /* type 2 memory windows (2A or 2B) */
    bool odp_write, odp_read; /* on-demand paging for RDMA WRITE, READ (no registration by
                               * locking) */
};

struct rdma_devices {
    struct rdma_port *ports;
    size_t n;
    size_t n_left_out; /* of a choice: ports beyond RDMA_RAILS_MAX */
};

/* Lists every port of every device, sorted by device name, then number. OK with n = 0: the host has
 * none (or no /dev/infiniband/uverbs* may be opened). ERR_NODEV: there are devices, but this
 * process may not open any; err names the first and the reason. */
enum status rdma_devices_list(struct rdma_devices *out, struct err *err) MUST_CHECK;
void rdma_devices_release(struct rdma_devices *d);

/* Chooses at most RDMA_RAILS_MAX ports (out->n_left_out counts the others). With t->nics: the named
 * ones in that order ("mlx5_0" means all its active ports, "mlx5_0:2" that one; repeated names
 * count once). Without: every active port, hardware before emulations, and if there are several,
 * those on `numa_node` (-1: not known) if any are, fastest first. `out` has copies; release it too.
 * ERR_CONFIG: an unknown name, a port that is not active, a malformed list. ERR_NODEV: no device,
 * or no active port. Each sentence names the existing ports. */
enum status rdma_devices_choose(const struct rdma_devices *all, const struct kvt_rdma_tuning *t,
                                int numa_node, struct rdma_devices *out,
                                struct err *err) MUST_CHECK;
/* Lists, then chooses. */
enum status rdma_devices_find(const struct kvt_rdma_tuning *t, int numa_node,
                              struct rdma_devices *out, struct err *err) MUST_CHECK;

/* Chooses the GID for queue pairs of this port. With t->gid_given that index, which must exist.
 * Otherwise on Ethernet RoCE v2 before v1 (which cannot be routed), then the address of `local`
 * (NULL: none; the control connection's address, which the peer is known to reach), then IPv4, then
 * routable before link-local; on InfiniBand the first entry. The same table gives the same choice.
 * *out points into p. ERR_CONFIG: no such index. ERR_NODEV: the port has no GID (its network
 * interface has no address). */
enum status rdma_gid_choose(const struct rdma_port *p, const struct sockaddr *local,
                            const struct kvt_rdma_tuning *t, const struct rdma_gid **out,
                            struct err *err) MUST_CHECK;

/* Bytes per second of a link from its width and speed codes (IBA 1.6 vol. 1, PortInfo:
 * LinkWidthActive, LinkSpeedActive and the extended speeds): on InfiniBand the rate after line
 * coding; on Ethernet lanes times the nominal lane rate, because drivers choose codes whose product
 * is the interface's rate. 0 for unknown codes. */
uint64_t rdma_link_speed(enum rdma_link link, unsigned width, unsigned speed);
/* Converts an MTU code (1: 256 ... 5: 4096) to bytes and back; 0 for anything else. */
uint32_t rdma_mtu_bytes(unsigned code);
unsigned rdma_mtu_code(uint32_t bytes);

/* "mlx5_0:1", and "3 (RoCE v2 10.0.0.1)", for sentences and reports. Both return `out`. */
const char *rdma_port_text(const struct rdma_port *p, char out[RDMA_PORT_TEXT_MAX]);
const char *rdma_gid_text(const struct rdma_gid *g, char out[RDMA_GID_TEXT_MAX]);

/* Opens the device of a port; the caller closes it with ibv_close_device. ERR_NODEV: it is gone, or
 * not permitted. */
struct ibv_context;
enum status rdma_port_open(const struct rdma_port *p, struct ibv_context **out,
                           struct err *err) MUST_CHECK;

/* The NUMA node of [p, p + bytes), from a sample of its pages; -1: several, none yet, or not
 * known. */
int rdma_numa_node_of(const void *p, size_t bytes);

#endif
