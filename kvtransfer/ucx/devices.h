/* devices.h - the network devices of transport ucx, in the order in which both ends number them. It
 * knows names, sysfs and the environment, not UCX.
 *
 * UCX gets one device per context, for two reasons. Given several, UCX 1.13 puts an endpoint's
 * lanes on the devices that it scores best, and an endpoint with a lane over a rail that is down
 * never comes up. And all puts of an endpoint use one lane (ucp_rkey_resolve), so several devices
 * would not make a connection faster. Thread: any (values, and files that are read). */
#ifndef BATON_KVTRANSFER_UCX_DEVICES_H
#define BATON_KVTRANSFER_UCX_DEVICES_H

#include "shared/base/buf.h"
#include "shared/base/str.h"

enum { UCX_DEVICES_MAX = 32, UCX_DEVICE_NAME_MAX = 80 };

struct ucx_devices {
    uint32_t n;                                      /* at least 1 */
    char name[UCX_DEVICES_MAX][UCX_DEVICE_NAME_MAX]; /* "mlx5_0:1"; "": what UCX_NET_DEVICES
                                                      * allows */
};

/* Parses a comma list as in KVCACHE_RDMA_NICS or UCX_NET_DEVICES ("mlx5_0,mlx5_1:2"), in its order;
 * the port is 1 if none is named. A list without names ("all", "^mlx5_0", patterns), an empty one
 * or one with more than UCX_DEVICES_MAX gives one entry "". */
void ucx_devices_of_list(struct str list, struct ucx_devices *out);
/* The devices to use: UCX_NET_DEVICES if set, otherwise `nics` (NULL: none), otherwise every active
 * RDMA port of the host by name (mlx5_2 before mlx5_10). `any`: the UCX transports do not need RDMA
 * devices, so one entry "". */
void ucx_devices_choose(const char *nics, bool any, struct ucx_devices *out);
/* False if the system says that the port of that name is not active. */
bool ucx_device_active(const char *name);

#endif
