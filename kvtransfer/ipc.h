/* ipc.h - the ways of the ipc row into another process's pool. What came with WELCOME says which one a connection takes: a descriptor of the
 * pool's memfd, an address, or a descriptor of a CUDA handle. Thread: transfer. */
#ifndef BATON_KVTRANSFER_IPC_H
#define BATON_KVTRANSFER_IPC_H

#include "kvtransfer/local.h"

/* By process_vm_writev to address `value` of the process c->pid: pools that are not shared memory. As local_kind.attach. */
enum status ipc_cma_attach(struct local_conn *c, uint64_t value, char *text, size_t text_max);

/* GPU memory. A build without CUDA has functions that say so. */
enum { IPC_CUDA_HANDLE_BYTES = 64, IPC_CUDA_OFFER_BYTES = 80 };
/* A descriptor that carries the pool's handle. ERR_UNSUPPORTED: no CUDA in this build; ERR_NODEV: no GPU here. */
enum status ipc_cuda_offer(const struct dev_mem *mem, int *fd, struct err *err);
enum status ipc_cuda_attach(struct local_conn *c, int fd, char *text, size_t text_max); /* closes fd */
/* Does `fd` carry a CUDA handle? */
bool        ipc_is_cuda_offer(int fd);

#endif
