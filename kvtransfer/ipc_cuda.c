/* ipc_cuda.c - same host, GPU pools: the receiver's memory by cudaIpcGetMemHandle, opened by the writer, copied into on a stream.
 *
 * The handle travels in a small sealed memfd. A put is its copies on the connection's stream and one host callback behind them, which
 * gives the put back through the copier's box: so PUT_DONE comes when the last byte has landed, and the message that waits behind the put
 * is later than its bytes. Detaching waits for the stream before it closes the handle; that is what BYE then says. Source: CUDA Runtime
 * API, interprocess communication (cudaIpcGetMemHandle, cudaIpcOpenMemHandle) and cudaLaunchHostFunc.
 * LIMIT: abandoned puts run to their end; a copy on a stream cannot be taken back. Checksums need a pool that the processor can read.
 * libcudart is linked statically and looks for the driver when it is first called: a machine without one starts, and gets ERR_NODEV.
 * Thread: transfer; the callback on a thread of the driver. */
#include "kvtransfer/ipc.h"

#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shared/base/mem.h"

static const uint8_t MAGIC[8] = { 'b', 't', 'n', 'c', 'u', 'd', 'a', '1' };

bool ipc_is_cuda_offer(int fd)
{
    uint8_t bytes[sizeof MAGIC];
    struct stat s;
    return fd >= 0 && fstat(fd, &s) == 0 && s.st_size == IPC_CUDA_OFFER_BYTES && pread(fd, bytes, sizeof bytes, 0) == sizeof bytes &&
           memcmp(bytes, MAGIC, sizeof MAGIC) == 0;
}

#ifdef BATON_HAVE_CUDA
#include <cuda_runtime_api.h>

static_assert(sizeof(cudaIpcMemHandle_t) == IPC_CUDA_HANDLE_BYTES, "the handle's place in an offer");
static_assert(IPC_CUDA_OFFER_BYTES == sizeof MAGIC + IPC_CUDA_HANDLE_BYTES + sizeof(uint64_t), "magic, handle, bytes");

struct cuda_conn {
    cudaStream_t stream;
};

enum status ipc_cuda_offer(const struct dev_mem *mem, int *fd, struct err *err)
{
    cudaIpcMemHandle_t handle;
    cudaError_t e = cudaIpcGetMemHandle(&handle, mem->ptr);
    if (e != cudaSuccess) return err_set(err, ERR_NODEV, "ipc: the GPU's memory cannot be shared: %s", cudaGetErrorString(e));
    uint8_t bytes[IPC_CUDA_OFFER_BYTES];
    uint64_t n = mem->bytes;
    memcpy(bytes, MAGIC, sizeof MAGIC);
    memcpy(bytes + sizeof MAGIC, &handle, sizeof handle);
    memcpy(bytes + sizeof MAGIC + sizeof handle, &n, sizeof n);
    int made = memfd_create("baton-cuda", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made < 0 || pwrite(made, bytes, sizeof bytes, 0) != sizeof bytes ||
        fcntl(made, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) != 0) {
        if (made >= 0) close(made);
        return err_set(err, ERR_CONFIG, "ipc: no descriptor for a CUDA handle");
    }
    *fd = made;
    return OK;
}

/* A host callback may not call CUDA; it only tells. */
static void on_copied(void *arg)
{
    struct local_put *p = arg;
    copier_done(p->conn->lt->copier, (struct copier_job){ .put = p, .worker = COPIER_FOREIGN });
}

static bool begin(struct local_conn *c, struct local_put *p)
{
    const struct cuda_conn *cc = c->way_state;
    cudaError_t e = cudaSuccess;
    for (uint32_t i = 0; i < p->n_copies && e == cudaSuccess; i++)
        e = cudaMemcpyAsync(c->remote + p->copies[i].remote, kvt_source(c->lt->env, p->copies[i].local), p->copies[i].bytes, cudaMemcpyDefault, cc->stream);
    if (e == cudaSuccess) e = cudaLaunchHostFunc(cc->stream, on_copied, p);
    p->n_jobs = e == cudaSuccess;
    if (e != cudaSuccess) (void)cudaStreamSynchronize(cc->stream); /* what had begun reads the source no more when DOWN is said */
    return e == cudaSuccess;
}

/* Not used: begin does the whole put. */
static bool move(struct local_conn *c, const struct kvt_copy *copies, uint64_t skip, uint64_t bytes)
{
    (void)c, (void)copies, (void)skip, (void)bytes;
    return false;
}

static void detach(struct local_conn *c)
{
    struct cuda_conn *cc = c->way_state;
    (void)cudaStreamSynchronize(cc->stream);
    (void)cudaStreamDestroy(cc->stream);
    (void)cudaIpcCloseMemHandle(c->remote);
    mem_free(cc);
    c->way_state = NULL;
    c->remote = NULL;
}

static const struct local_way CUDA = { .name = "cuda", .move = move, .begin = begin, .detach = detach };

enum status ipc_cuda_attach(struct local_conn *c, int fd, char *text, size_t text_max)
{
    uint8_t bytes[IPC_CUDA_OFFER_BYTES];
    bool good = ipc_is_cuda_offer(fd) && pread(fd, bytes, sizeof bytes, 0) == sizeof bytes;
    if (fd >= 0) close(fd);
    cudaIpcMemHandle_t handle;
    uint64_t n = 0;
    if (good) {
        memcpy(&handle, bytes + sizeof MAGIC, sizeof handle);
        memcpy(&n, bytes + sizeof MAGIC + sizeof handle, sizeof n);
    }
    if (n < c->need_bytes) {
        snprintf(text, text_max, "%s", good ? "the receiver's memory is smaller than its layout says" : "this node's pool is in GPU memory and the receiver's is not");
        return ERR_UNSUPPORTED;
    }
    struct cuda_conn *cc = MEM_NEW(struct cuda_conn);
    void *p = NULL;
    cudaError_t e = cudaStreamCreateWithFlags(&cc->stream, cudaStreamNonBlocking);
    if (e == cudaSuccess && (e = cudaIpcOpenMemHandle(&p, handle, cudaIpcMemLazyEnablePeerAccess)) != cudaSuccess) (void)cudaStreamDestroy(cc->stream);
    if (e != cudaSuccess) {
        mem_free(cc);
        snprintf(text, text_max, "the receiver's GPU memory cannot be opened: %s", cudaGetErrorString(e));
        return ERR_UNSUPPORTED;
    }
    c->way = &CUDA;
    c->way_state = cc;
    c->remote = p;
    c->remote_bytes = n;
    return OK;
}

#else

enum status ipc_cuda_offer(const struct dev_mem *mem, int *fd, struct err *err)
{
    (void)mem, (void)fd;
    return err_set(err, ERR_UNSUPPORTED, "ipc: the KV pool is in GPU memory and this build has no CUDA");
}

enum status ipc_cuda_attach(struct local_conn *c, int fd, char *text, size_t text_max)
{
    (void)c;
    if (fd >= 0) close(fd);
    snprintf(text, text_max, "this build has no CUDA");
    return ERR_UNSUPPORTED;
}
#endif
