/* ep_nccl_fake.c - NCCL's functions between processes on the emulated GPU, for ep.h's backend nccl.
 * It tests that backend's calls, their order and sizes, and how it waits for ranks that do not
 * come; it says nothing about NCCL itself.
 *
 * The ranks share mailboxes in a memfd of rank 0, one for every ordered pair, each with a chunk of
 * one message at a time. A communicator never blocks: operations in flight progress whenever
 * somebody asks for its state (ncclCommGetAsyncError). Messages are matched by order, and their
 * sizes are compared, which a GPU would not do. One communicator at a time. Thread: one. */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/simt/include/nccl.h"

enum { RANKS = 8, CHANNEL_BYTES = 4096, OPS = 64 };

struct fake_channel {
    atomic_int full;
    size_t total, bytes; /* of the message; of this chunk */
    char data[CHANNEL_BYTES];
};

struct fake_channels {
    atomic_int came;
    struct fake_channel channel[RANKS][RANKS]; /* [from][to] */
};

struct op {
    char *send; /* in host memory; NULL for a receive */
    char *recv;
    void *to;
    size_t bytes, done;
    int peer;
    cudaStream_t stream;
};

struct ncclComm {
    struct fake_channels *channels;
    int rank, size, n_ops, n_grouped;
    struct op ops[OPS];
};

static int group_depth;
static struct ncclComm *grouped; /* the communicator of the open group's operations */

ncclResult_t ncclGetVersion(int *version)
{
    *version = 22809;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t r)
{
    return r == ncclSuccess ? "no error" : r == ncclInvalidUsage ? "invalid usage" : "an error";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    int fd = memfd_create("baton-nccl", 0); /* kept open, so that the others can open it through
                                             * /proc */
    if (fd < 0 || ftruncate(fd, sizeof(struct fake_channels)) != 0) return ncclSystemError;
    snprintf(id->internal, sizeof id->internal, "/proc/%d/fd/%d", (int)getpid(), fd);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int n_ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    if (n_ranks > RANKS || config->blocking) return ncclInvalidArgument;
    int fd = open(id.internal, O_RDWR | O_CLOEXEC);
    if (fd < 0) return ncclSystemError;
    void *p = mmap(NULL, sizeof(struct fake_channels), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED) return ncclSystemError;
    struct ncclComm *c = calloc(1, sizeof *c);
    *c = (struct ncclComm){ .channels = p, .rank = rank, .size = n_ranks };
    atomic_fetch_add(&c->channels->came, 1);
    *comm = c;
    return ncclInProgress;
}

static void drop(struct ncclComm *c)
{
    for (int i = 0; i < c->n_ops; i++) {
        free(c->ops[i].send);
        free(c->ops[i].recv);
    }
    munmap(c->channels, sizeof *c->channels);
    free(c);
}

ncclResult_t ncclCommFinalize(ncclComm_t c) { return c->n_ops ? ncclInProgress : ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t c)
{
    drop(c);
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t c)
{
    drop(c);
    return ncclSuccess;
}

/* ---- operations ---- */

ncclResult_t ncclGroupStart(void)
{
    group_depth++;
    return ncclSuccess;
}

/* Is an earlier operation of the same kind with the same peer in flight? Messages keep their
 * order. */
static int waits_for_another(const struct ncclComm *c, int i)
{
    for (int j = 0; j < i; j++)
        if (c->ops[j].peer == c->ops[i].peer && !c->ops[j].send == !c->ops[i].send &&
            c->ops[j].done < c->ops[j].bytes)
            return 1;
    return 0;
}

static ncclResult_t move(struct ncclComm *c, struct op *o)
{
    struct fake_channel *b = o->send ? &c->channels->channel[c->rank][o->peer]
                                     : &c->channels->channel[o->peer][c->rank];
    if (atomic_load(&b->full) == !!o->send) return ncclSuccess;
    if (o->send) {
        b->total = o->bytes;
        b->bytes = o->bytes - o->done < CHANNEL_BYTES ? o->bytes - o->done : CHANNEL_BYTES;
        memcpy(b->data, o->send + o->done, b->bytes);
    } else {
        if (b->total != o->bytes) return ncclInvalidUsage;
        memcpy(o->recv + o->done, b->data, b->bytes);
    }
    o->done += b->bytes;
    atomic_store(&b->full, !!o->send);
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *error)
{
    int left = 0;
    *error = ncclInProgress;
    if (atomic_load(&c->channels->came) < c->size) return ncclSuccess;
    for (int i = 0; i < c->n_ops; i++) {
        const ncclResult_t r = c->ops[i].done < c->ops[i].bytes && !waits_for_another(c, i)
                                   ? move(c, &c->ops[i])
                                   : ncclSuccess;
        if (r != ncclSuccess) *error = r;
        if (r != ncclSuccess) return ncclSuccess;
        left += c->ops[i].done < c->ops[i].bytes;
    }
    if (left) return ncclSuccess;
    for (int i = 0; i < c->n_ops; i++) {
        struct op *o = &c->ops[i];
        if (o->recv && cudaMemcpyAsync(o->to, o->recv, o->bytes, cudaMemcpyHostToDevice,
                                       o->stream) != cudaSuccess)
            return ncclUnhandledCudaError;
        if (o->recv && cudaStreamSynchronize(o->stream) != cudaSuccess)
            return ncclUnhandledCudaError;
        free(o->send);
        free(o->recv);
    }
    c->n_ops = 0;
    *error = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    if (--group_depth > 0 || !grouped) return ncclSuccess;
    struct ncclComm *c = grouped;
    grouped = NULL;
    for (int i = 0; i < c->n_ops; i++) { /* sends what the stream has computed by now */
        struct op *o = &c->ops[i];
        if (!o->send) continue;
        if (cudaMemcpyAsync(o->send, o->to, o->bytes, cudaMemcpyDeviceToHost, o->stream) !=
            cudaSuccess)
            return ncclUnhandledCudaError;
        if (cudaStreamSynchronize(o->stream) != cudaSuccess) return ncclUnhandledCudaError;
    }
    return ncclInProgress;
}

static ncclResult_t add(ncclComm_t c, int is_send, void *at, size_t bytes, int peer,
                        cudaStream_t stream)
{
    if (c->n_ops == OPS || peer < 0 || peer >= c->size || bytes == 0) return ncclInvalidArgument;
    char *host = malloc(bytes);
    c->ops[c->n_ops++] = (struct op){
        .send = is_send ? host : NULL,
        .recv = is_send ? NULL : host,
        .to = at,
        .bytes = bytes,
        .peer = peer,
        .stream = stream,
    };
    grouped = c;
    return ncclInProgress; /* NCCL may return this within a group too */
}

static size_t bytes_of(size_t count, ncclDataType_t type)
{
    return type == ncclInt32 ? 4 * count : count;
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t stream)
{
    return group_depth ? add(c, 1, (void *)from, bytes_of(count, type), peer, stream)
                       : ncclInvalidUsage;
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t stream)
{
    return group_depth ? add(c, 0, to, bytes_of(count, type), peer, stream) : ncclInvalidUsage;
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclComm_t c, cudaStream_t stream)
{
    ncclResult_t r = ncclGroupStart();
    for (int i = 0; i < c->size && (r == ncclSuccess || r == ncclInProgress); i++) {
        r = ncclSend(from, count, type, i, c, stream);
        if (r == ncclInProgress)
            r = ncclRecv((char *)to + (size_t)i * bytes_of(count, type), count, type, i, c, stream);
    }
    return r == ncclInProgress ? ncclGroupEnd() : r;
}
