/* tuning.h - what an operator may set about the transports. Zero means "choose" or "off".
 *
 * kvt_create copies the struct; its strings are borrowed until kvt_free. kvt_tuning_set knows the
 * names (KVCACHE_* and BATON_* variables); deploy knows where values come from.
 * Thread: any. */
#ifndef BATON_KVTRANSFER_TUNING_H
#define BATON_KVTRANSFER_TUNING_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/err.h"
#include "shared/base/str.h"

enum kvt_switch { KVT_AUTO, KVT_ON, KVT_OFF };

/* How a peer gets and loses the right to write. */
enum kvt_rdma_key {
    KVT_RDMA_KEY_AUTO,
    KVT_RDMA_KEY_WINDOW, /* type 2 memory window, bound to the one queue pair that may use it */
    KVT_RDMA_KEY_REGION  /* a separate protection domain and memory region per connection */
};

struct kvt_rdma_tuning {
    const char *nics; /* comma list of devices, "mlx5_0,mlx5_1:1" (:port); NULL: all active ports */
    uint16_t port;    /* of the listener that sets up queue pairs; 0: any free one */
    uint8_t gid_index; /* if gid_given; else choose: RoCE v2, an address the peer can route to */
    bool gid_given;
    uint32_t mtu;          /* bytes: 256, 512, 1024, 2048, 4096; 0: the smaller of both ports' */
    uint32_t qps_per_rail; /* 0: choose */
    uint8_t timeout;       /* ack timeout exponent, 4.096 us * 2^n; 0: choose */
    uint8_t retries;       /* 1..7; 0: choose */
    uint8_t traffic_class, service_level;
    bool traffic_class_given;
    bool relaxed_ordering; /* KVCACHE_RELAX_ORDERING */
    bool flush_read;       /* KVCACHE_GDRCOPY_FLUSH_ENABLE: RDMA READ after a put's last write */
    bool verify_read;      /* KVCACHE_VERIFY_READ: read every put back and compare (slow) */
    bool rdma_cm;          /* librdmacm connects queue pairs; the same on both sides */
    enum kvt_rdma_key key;
    enum kvt_switch odp; /* on-demand paging instead of locked memory; auto: if locking fails */
};

struct kvt_tuning {
    struct kvt_rdma_tuning rdma;
    const char *socket_ifname; /* KVCACHE_SOCKET_IFNAME: the interface of control connections */
    /* Allowed UCX transports; NULL: all whose writes can be fenced (no shared memory). */
    const char *ucx_tls;
    uint16_t ucx_port; /* 0: any free one */
    /* ipc: threads that copy, including the transfer thread; 0: choose; at most 16. */
    uint32_t copiers;
    enum kvt_switch cma;      /* ipc: process_vm_writev instead of mapping the pool */
    uint32_t tcp_connections; /* per peer, 1..16; 0: choose */
    enum kvt_switch zerocopy; /* tcp: MSG_ZEROCOPY */
    bool lossy;               /* allow peers with a less precise element type: answers may differ */
    const char *fault;        /* a fault plan (fault.h); NULL: none. For tests */
};

/* Sets one value by its environment name ("KVCACHE_RDMA_NICS", "KVCACHE_IB_TIMEOUT",
 * "BATON_TCP_CONNECTIONS", ...). *known says whether there is such a name. An empty value changes
 * nothing. Only the syntax is checked; whether a device or interface exists is checked when the
 * transport opens. ERR_CONFIG: err->field is the name, the sentence has the name, the value and
 * what would be right, and *t is unchanged. `value` is borrowed as long as *t is used. */
enum status kvt_tuning_set(struct kvt_tuning *t, const char *name, const char *value, bool *known,
                           struct err *err) MUST_CHECK;
/* The names that kvt_tuning_set knows, in the order in which to set them (of two names for one
 * setting the later wins), with their values and one line of help; a NULL name ends the array.
 * `no_effect`: FastDeploy has it; here its value is not read. */
struct kvt_tuning_name {
    const char *name, *values, *help;
    bool no_effect;
};
extern const struct kvt_tuning_name kvt_tuning_names[];

#endif
