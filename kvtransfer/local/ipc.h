/* ipc.h - the copy methods of transport ipc. What comes with WELCOME decides which one a connection
 * uses: the pool's memfd, an address, or a descriptor that carries a handle of GPU memory.
 * Thread: transfer. */
#ifndef BATON_KVTRANSFER_LOCAL_IPC_H
#define BATON_KVTRANSFER_LOCAL_IPC_H

#include "kvtransfer/local/local.h"

/* Attaches to address `value` of process c->pid by process_vm_writev, for pools that are not shared
 * memory; see local_address_method.attach. */
enum status ipc_cma_attach(struct local_conn *c, uint64_t value, char *text, size_t text_max);

/* GPU memory. */
enum { IPC_DEVICE_OFFER_BYTES = 80 };
/* Creates a descriptor that carries the pool's handle (device_mem_export). ERR_UNSUPPORTED: the
 * device has no handles; ERR_NODEV: it cannot share this memory. */
enum status ipc_device_offer(const struct kvt_env *env, int *fd, struct err *err) MUST_CHECK;
/* closes fd */
enum status ipc_device_attach(struct local_conn *c, int fd, char *text, size_t text_max);
/* Whether `fd` carries a handle of GPU memory. */
bool ipc_is_device_offer(int fd);

#endif
