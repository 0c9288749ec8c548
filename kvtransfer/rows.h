/* rows.h - the names of the transports that exist, for transport.c's array alone. */
#ifndef BATON_KVTRANSFER_ROWS_H
#define BATON_KVTRANSFER_ROWS_H

#include "kvtransfer/transport.h"

extern const struct kvt_transport_ops kvt_mem_ops, kvt_ipc_ops, kvt_tcp_ops;

#endif
