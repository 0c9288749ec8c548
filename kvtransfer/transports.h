/* transports.h - the names of the transports that exist, for transport.c's array alone. */
#ifndef BATON_KVTRANSFER_TRANSPORTS_H
#define BATON_KVTRANSFER_TRANSPORTS_H

#include "kvtransfer/transport.h"

/* Defined only where BATON_HAVE_RDMA and BATON_HAVE_UCX are. */
extern const struct kvt_transport_ops kvt_rdma_ops, kvt_ucx_ops;
extern const struct kvt_transport_ops kvt_mem_ops, kvt_ipc_ops, kvt_tcp_ops;

#endif
