/* simt_ipc.cc - device memory of another process: its memfd, found through /proc and identified by
 * the random number in its name. Thread: any. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/simt/simt_machine.h"
#include "tests/simt/simt_memory.h"
#include "tests/simt/simt_stream.h"
#include "tests/simt/simt_table.h"

/* What a cudaIpcMemHandle_t holds. */
struct ipc_handle {
    char magic[8];
    uint64_t pid, fd, data_bytes, bytes, nonce;
};
static_assert(sizeof(ipc_handle) <= CUDA_IPC_HANDLE_SIZE, "the handle's room");
static const char MAGIC[8] = { 'b', 't', 'n', 's', 'i', 'm', 't', '1' };

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *p)
{
    SIMT_ENTER();
    SIMT_STATE;
    const simt_allocation *a = simt_find_device(p);
    if (!handle || !a || a->is_imported) return simt_leave(cudaErrorInvalidValue);
    ipc_handle h = { {}, (uint64_t)getpid(), (uint64_t)a->fd, a->data_bytes, a->bytes, a->nonce };
    memcpy(h.magic, MAGIC, sizeof MAGIC);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &h, sizeof h);
    return cudaSuccess;
}

/* The exporter's descriptor, if that process is alive and the memory is still the same. */
static int open_exported(const ipc_handle &h)
{
    char path[64], target[80], wanted[80];
    snprintf(path, sizeof path, "/proc/%llu/fd/%llu", (unsigned long long)h.pid,
             (unsigned long long)h.fd);
    snprintf(wanted, sizeof wanted, "/memfd:baton-simt-%016llx (deleted)",
             (unsigned long long)h.nonce);
    ssize_t n = readlink(path, target, sizeof target - 1);
    if (n < 0) return -1;
    target[n] = 0;
    if (strcmp(target, wanted) != 0) return -1;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat s;
    if (fd >= 0 && (fstat(fd, &s) != 0 || (uint64_t)s.st_size != h.data_bytes)) {
        close(fd);
        return -1;
    }
    return fd;
}

cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned flags)
{
    SIMT_ENTER();
    ipc_handle h;
    memcpy(&h, &handle, sizeof h);
    if (!p || flags != cudaIpcMemLazyEnablePeerAccess || memcmp(h.magic, MAGIC, sizeof MAGIC) != 0)
        return simt_leave(cudaErrorInvalidValue);
    if (!h.bytes || h.bytes > h.data_bytes || h.data_bytes % simt_page_bytes() ||
        simt_round_up(h.bytes, SIMT_ALIGNMENT) > h.data_bytes)
        return simt_leave(cudaErrorInvalidValue); /* the handle comes from another process and may
                                                   * be invalid */
    /* what the driver calls an invalid context */
    if (h.pid == (uint64_t)getpid()) return simt_leave(cudaErrorDeviceUninitialized);
    SIMT_STATE;
    for (auto &i : simt_tables_of().device)
        if (i.second.is_imported && i.second.owner == h.nonce) {
            i.second.n_opened++;
            *p = i.second.p;
            return cudaSuccess;
        }
    simt_allocation a = simt_allocation();
    a.fd = open_exported(h);
    if (a.fd < 0) return simt_leave(cudaErrorInvalidValue);
    a.data = simt_map(a.fd, h.data_bytes);
    if (!a.data) {
        close(a.fd);
        return simt_leave(cudaErrorMapBufferObjectFailed);
    }
    a.data_bytes = h.data_bytes, a.bytes = h.bytes, a.owner = h.nonce, a.is_imported = true,
    a.n_opened = 1;
    a.p = a.data + a.data_bytes - simt_round_up(a.bytes, SIMT_ALIGNMENT);
    simt_poison_slack(a);
    if (!simt_tables_of().is_open) simt_protect(a, PROT_NONE);
    simt_tables_of().device[a.p] = a;
    simt_run_by_itself();
    *p = a.p;
    return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *p)
{
    SIMT_ENTER();
    return simt_leave(simt_free_device(p, true));
}
