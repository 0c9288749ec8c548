/* ipc.h - the ways of the ipc row into another process's pool. What came with WELCOME says which
 * one a connection takes: a descriptor of the pool's memfd, an address, or a descriptor that
 * carries a handle of GPU memory. Thread: transfer. */
#ifndef BATON_KVTRANSFER_LOCAL_IPC_H
#define BATON_KVTRANSFER_LOCAL_IPC_H

#include "kvtransfer/local/local.h"

/* By process_vm_writev to address `value` of the process c->pid: pools that are not shared memory.
 * As local_address_method.attach. */
enum status ipc_cma_attach(struct local_conn *c, uint64_t value, char *text, size_t text_max);

/* GPU memory. */
enum { IPC_DEVICE_OFFER_BYTES = 80 };
/* A descriptor that carries the pool's handle (device_mem_export). ERR_UNSUPPORTED: the device has
 * none; ERR_NODEV: it will not share it. */
enum status ipc_device_offer(const struct kvt_env *env, int *fd, struct err *err) MUST_CHECK;
/* closes fd */
enum status ipc_device_attach(struct local_conn *c, int fd, char *text, size_t text_max);
/* Does `fd` carry a handle of GPU memory? */
bool ipc_is_device_offer(int fd);

#endif
