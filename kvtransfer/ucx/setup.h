/* setup.h - what the ucx row needs once per transport: for every rail (a network device, devices.h)
 * a UCP context over allowed transports, the registered pool, and what peers are told of it.
 *
 * Which UCX transports are allowed: a list of names from a fixed table. Shared memory (posix, sysv,
 * xpmem, cma, knem) is never allowed: a peer that has mapped or may copy into this process's memory
 * can write after its connection has been torn down, so its writes could not be fenced. UCX's tcp
 * and ud are allowed only by name, for tests: their puts are active messages that the receiving
 * worker places and answers. Its tcp takes them for any address from whoever connects to its port
 * (no key, no ticket), and UCX 1.13 ends the process (ucp_put_handler, "unexpected error") when the
 * sender vanishes before the answer is sent. So without an RDMA device the row is not available. A
 * pool in a card's memory is registered as such (GPUDirect RDMA); puts come from staging memory,
 * which is the processor's. UCX knows a card's memory where it was built with CUDA; cuda_copy,
 * which brings that knowledge, is then allowed beside the others. Compiled, and run on an emulated
 * card alone. Thread: creator's (open), then transfer. */
#ifndef BATON_KVTRANSFER_UCX_SETUP_H
#define BATON_KVTRANSFER_UCX_SETUP_H

#include <ucp/api/ucp.h>

#include "kvtransfer/transport.h"
#include "kvtransfer/ucx/devices.h"

enum { UCX_ADDRESS_MAX = 64 * 1024, UCX_KEY_MAX = 1024, UCX_FORGIVE_MS = 10000 };

/* One way to the peers. A rail that cannot be opened keeps its number, so that both ends mean the
 * same one. */
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

/* What a receiver tells about its pool. */
struct ucx_region {
    uint64_t base, bytes;   /* the pool, as an address of its process */
    uint32_t address_bytes; /* of the worker address that came before, 1..UCX_ADDRESS_MAX */
    struct str key;         /* packed rkey, at most UCX_KEY_MAX bytes; borrowed from the input */
};

/* The value for UCX_TLS: `tls`, or the default when NULL. ERR_CONFIG names the entry that is not
 * allowed and why. */
enum status ucx_check_tls(const char *tls, struct buf *out, struct err *err) MUST_CHECK;
/* The GID to speak from; false: UCX chooses. UCX's wire-up over UD does not get through between
 * IPv4 GIDs of Soft-RoCE; its first GID is IPv6 (link-local, RoCE v2) and works, so that is taken
 * where all devices are Soft-RoCE. */
bool ucx_gid_index(const struct kvt_rdma_tuning *rdma, unsigned *out);
/* Open every rail that can be. ERR_NODEV: none can with the allowed transports, or none can
 * register a card's memory; ERR_CONFIG: tuning, or the pool cannot be registered. `s` is zeroed by
 * the caller and released by ucx_release in any case. */
enum status ucx_setup(const struct kvt_env *env, struct ucx_setup *s, struct err *err) MUST_CHECK;
void ucx_release(struct ucx_setup *s);
/* The rail for a new outgoing connection: an active one rather than one that is down, then one over
 * which none failed in the last UCX_FORGIVE_MS, then that which failed longest ago, then the least
 * used. */
struct ucx_rail *ucx_rail_choose(struct ucx_setup *s);
/* What a peer means by that number: any number tells one that is available. */
struct ucx_rail *ucx_rail_by_number(struct ucx_setup *s, uint32_t number);

void ucx_region_encode(const struct ucx_region *r, struct buf *out);
enum status ucx_region_decode(struct str in, struct ucx_region *out) MUST_CHECK;

#endif
