/* transports.h - the ops tables of all transports. Only transport.c includes it, for its array.
 * Thread: any (a constant table). */
#ifndef BATON_KVTRANSFER_TRANSPORTS_H
#define BATON_KVTRANSFER_TRANSPORTS_H

#include "kvtransfer/transport.h"

/* Only in builds with BATON_HAVE_RDMA and BATON_HAVE_UCX. */
extern const struct kvt_transport_ops kvt_rdma_ops, kvt_ucx_ops;
extern const struct kvt_transport_ops kvt_mem_ops, kvt_ipc_ops, kvt_tcp_ops;

#endif
