/* tuning.h - what an operator may set about the transports; every zero means "choose" or "off". One
 * value, copied into a kvt when it is created.
 *
 * Where a value comes from (flag, KVCACHE_* or BATON_* variable) is deploy's affair: kvt_tuning_set
 * knows the names. Strings are borrowed until kvt_free. Thread: any (a value). */
#ifndef BATON_KVTRANSFER_TUNING_H
#define BATON_KVTRANSFER_TUNING_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/err.h"
#include "shared/base/str.h"

enum kvt_switch { KVT_AUTO, KVT_ON, KVT_OFF };

/* How a peer's right to write is given and taken away. */
enum kvt_rdma_key {
    KVT_RDMA_KEY_AUTO,
    KVT_RDMA_KEY_WINDOW, /* type 2 memory window, bound to the one queue pair that may use it */
    KVT_RDMA_KEY_REGION  /* a protection domain and region of the connection's own */
};

struct kvt_rdma_tuning {
    const char *nics;  /* comma list of devices ("mlx5_0,mlx5_1" or "mlx5_0:1" with a
                        * port); NULL: every active port */
    uint16_t port;     /* of the listener that sets queue pairs up
                        * (--rdma-comm-ports); 0: any free one */
    uint8_t gid_index; /* when gid_given; else choose: RoCE v2, an address the peer
                        * can route to */
    bool gid_given;
    uint32_t mtu;          /* bytes: 256, 512, 1024, 2048, 4096; 0: the smaller of both
                            * active ones */
    uint32_t qps_per_rail; /* 0: choose */
    uint8_t timeout;       /* ack timeout exponent, 4.096 us * 2^n; 0: choose */
    uint8_t retries;       /* 1..7; 0: choose */
    uint8_t traffic_class, service_level;
    bool traffic_class_given;
    bool relaxed_ordering; /* KVCACHE_RELAX_ORDERING */
    bool flush_read;       /* KVCACHE_GDRCOPY_FLUSH_ENABLE: an RDMA READ after the last
                            * write of a put */
    bool verify_read;      /* KVCACHE_VERIFY_READ: read every put back and compare
                            * (slow; for finding faults) */
    bool rdma_cm;          /* librdmacm connects queue pairs; the same on both sides */
    enum kvt_rdma_key key;
    enum kvt_switch odp; /* on-demand paging instead of locked memory; auto: where
                          * locking fails */
};

struct kvt_tuning {
    struct kvt_rdma_tuning rdma;
    const char *socket_ifname; /* KVCACHE_SOCKET_IFNAME: control connections listen on
                                * and leave from this interface */
    const char *ucx_tls;       /* UCX transports allowed; NULL: every one whose writes
                                * can be fenced (no shared memory) */
    uint16_t ucx_port;         /* 0: any free one */
    uint32_t copiers;          /* ipc: threads that copy, the transfer thread among
                                * them; 0: choose; at most 16 */
    enum kvt_switch cma;       /* ipc: process_vm_writev instead of mapping the pool */
    uint32_t tcp_connections;  /* per peer, 1..16; 0: choose */
    enum kvt_switch zerocopy;  /* tcp: MSG_ZEROCOPY */
    bool lossy;                /* let a peer of a narrower element type connect: its
                                * answers may differ */
    const char *fault;         /* a fault plan (fault.h); NULL: none. For tests */
};

/* Set one value by its environment name ("KVCACHE_RDMA_NICS", "KVCACHE_IB_TIMEOUT",
 * "BATON_TCP_CONNECTIONS", ...). *known says whether the name is one of these. An empty value is
 * like no value: nothing changes. Whether a device or an interface exists is the row's question,
 * asked at open; here only the form is checked. ERR_CONFIG: err->field is the name, the sentence
 * has it, the value and what would be right, and *t is as before. `value` is borrowed as long as *t
 * is used. */
enum status kvt_tuning_set(struct kvt_tuning *t, const char *name, const char *value, bool *known,
                           struct err *err) MUST_CHECK;
/* The names kvt_tuning_set knows, in the order in which they are to be set (of two names for one
 * thing the later wins), each with the values it takes and one line of help; NULL name ends.
 * `no_effect`: FastDeploy has it, here its value is neither read nor judged. */
struct kvt_tuning_name {
    const char *name, *values, *help;
    bool no_effect;
};
extern const struct kvt_tuning_name kvt_tuning_names[];

#endif
