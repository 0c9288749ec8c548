/* devices.h - the network devices of the ucx row, in the order in which both ends number them. No
 * UCX in it: names, sysfs and the environment.
 *
 * Why the row names devices to UCX one by one: given several, UCX 1.13 puts the lanes of an
 * endpoint on whichever it scores best, and an endpoint that has a lane over a rail that is down
 * never comes up, for as long as that rail is down; and all puts of an endpoint use one of its
 * lanes (ucp_rkey_resolve), so that several give a connection no more speed. With a context per
 * device a connection needs one rail. Thread: any (values, and files that are read). */
#ifndef BATON_KVTRANSFER_UCX_DEVICES_H
#define BATON_KVTRANSFER_UCX_DEVICES_H

#include "shared/base/buf.h"
#include "shared/base/str.h"

enum { UCX_DEVICES_MAX = 32, UCX_DEVICE_NAME_MAX = 80 };

struct ucx_devices {
    uint32_t n;                                      /* at least 1 */
    char name[UCX_DEVICES_MAX][UCX_DEVICE_NAME_MAX]; /* "mlx5_0:1", device and port; "":
                                                      * whatever UCX_NET_DEVICES allows */
};

/* Every entry of a comma list as KVCACHE_RDMA_NICS or UCX_NET_DEVICES has it ("mlx5_0,mlx5_1:2"):
 * port 1 where none is named, in the order given. A list that is no list of names ("all",
 * "^mlx5_0", patterns), or is empty, or tells more than UCX_DEVICES_MAX: one entry "". */
void ucx_devices_of_list(struct str list, struct ucx_devices *out);
/* Those to use: UCX_NET_DEVICES if set, else `nics` (NULL: none), else every RDMA port of the host
 * that is active, by name (mlx5_2 before mlx5_10). `any`: the transports are not those of RDMA
 * devices, one entry "". */
void ucx_devices_choose(const char *nics, bool any, struct ucx_devices *out);
/* False exactly when the system says that the port of that name is not active. */
bool ucx_device_active(const char *name);

#endif
