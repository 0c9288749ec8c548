/* setup.h - what transport ucx creates once: for every rail (a network device, devices.h) a UCP
 * context over allowed UCX transports, the registered pool, and what peers are told of it.
 *
 * A fixed table lists the allowed UCX transports. Shared memory (posix, sysv, xpmem, cma, knem) is
 * never allowed: a peer that has mapped this process's memory can write after its connection was
 * torn down, so it could not be fenced. UCX's tcp and ud are allowed only by name, for tests: the
 * receiving worker executes their puts, tcp from anybody who connects to its port (no key, no
 * ticket), and UCX 1.13 ends the process (ucp_put_handler, "unexpected error") when the sender
 * vanishes before the answer. So without an RDMA device this transport is not available. A pool in
 * GPU memory is registered as such (GPUDirect RDMA), and puts come from staging memory in host
 * memory. It needs a UCX built with CUDA, whose cuda_copy is then allowed too; that has run only on
 * an emulated GPU.
 * Thread: creator's (open), then transfer. */
#ifndef BATON_KVTRANSFER_UCX_SETUP_H
#define BATON_KVTRANSFER_UCX_SETUP_H

#include <ucp/api/ucp.h>

#include "kvtransfer/transport.h"
#include "kvtransfer/ucx/devices.h"

enum { UCX_ADDRESS_MAX = 64 * 1024, UCX_KEY_MAX = 1024, UCX_FORGIVE_MS = 10000 };

/* One network device. A rail that cannot be opened keeps its number, so that both ends number them
 * alike. */
struct ucx_rail {
    char device[UCX_DEVICE_NAME_MAX]; /* "": whatever UCX finds */
    ucp_context_h context;            /* NULL: not available */
    ucp_mem_h pool, staging;          /* staging: NULL when there is none */
    void *key;                        /* packed rkey of the pool */
    size_t key_bytes;
    uint32_t n_begun;   /* outgoing connections so far */
    uint64_t failed_ms; /* when the last one failed; 0: none did */
};

struct ucx_setup {
    struct ucx_rail rails[UCX_DEVICES_MAX];
    uint32_t n_rails;
};

/* What a receiver tells its peers about its pool. */
struct ucx_region {
    uint64_t base, bytes;   /* the pool, as an address of its process */
    uint32_t address_bytes; /* of the worker address that came before, 1..UCX_ADDRESS_MAX */
    struct str key;         /* packed rkey, at most UCX_KEY_MAX bytes; borrowed from the input */
};

/* Appends the value for UCX_TLS: `tls`, or the default if NULL. ERR_CONFIG names the entry that is
 * not allowed and says why. */
enum status ucx_check_tls(const char *tls, struct buf *out, struct err *err) MUST_CHECK;
/* The index of the GID to use. False: UCX chooses. UCX's wire-up over UD fails between IPv4 GIDs of
 * Soft-RoCE. Its first GID is IPv6 (link-local, RoCE v2) and works, so it is used if all devices
 * are Soft-RoCE. */
bool ucx_gid_index(const struct kvt_rdma_tuning *rdma, unsigned *out);
/* Opens every rail that works. ERR_NODEV: none does with the allowed transports, or none can
 * register GPU memory; ERR_CONFIG: tuning, or the pool cannot be registered. The caller zeroes `s`
 * and calls ucx_release in any case. */
enum status ucx_setup(const struct kvt_env *env, struct ucx_setup *s, struct err *err) MUST_CHECK;
void ucx_release(struct ucx_setup *s);
/* The rail for a new outgoing connection. It prefers an active rail, then one without a failure in
 * the last UCX_FORGIVE_MS, then the one whose failure is longest ago, then the least used. */
struct ucx_rail *ucx_rail_choose(struct ucx_setup *s);
/* The available rail for a peer's number; every number gives one. */
struct ucx_rail *ucx_rail_by_number(struct ucx_setup *s, uint32_t number);

void ucx_region_encode(const struct ucx_region *r, struct buf *out);
enum status ucx_region_decode(struct str in, struct ucx_region *out) MUST_CHECK;

#endif
