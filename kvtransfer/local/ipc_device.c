/* ipc_device.c - copies between GPU pools on one host: the writer opens the receiver's exported
 * memory handle and copies into it on a copy stream.
 *
 * The handle travels in a small sealed memfd. A put's copies run on one of the connection's streams
 * after the event of their layer; a host callback then returns the put through the copier's
 * mailbox. So PUT_DONE comes after the last byte, and a message that waits behind the put comes
 * after its bytes. Puts take the streams in turn: the copies of one begin while the last of the put
 * before still run. Detaching waits for the streams before it closes the memory and sends BYE; the
 * receiver frees its pool only after BYE (local.c, drain_writers). The driver decides what happens
 * to copies in flight when the receiver is killed: at worst the writer's context ends, and with it
 * the writer's node. LIMIT: abandoned puts run to their end, as a copy in a stream cannot be
 * cancelled. Thread: transfer; on_copied on a thread of the driver. */
#include "kvtransfer/local/ipc.h"

#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/copy_stream.h"
#include "shared/base/assert.h"
#include "shared/base/mem.h"

static const uint8_t MAGIC[8] = { 'b', 't', 'n', 'c', 'u', 'd', 'a', '1' };

static_assert(IPC_DEVICE_OFFER_BYTES == sizeof MAGIC + DEVICE_HANDLE_BYTES + sizeof(uint64_t),
              "magic, handle, bytes");

bool ipc_is_device_offer(int fd)
{
    uint8_t bytes[sizeof MAGIC];
    struct stat s;
    return fd >= 0 && fstat(fd, &s) == 0 && s.st_size == IPC_DEVICE_OFFER_BYTES &&
           pread(fd, bytes, sizeof bytes, 0) == sizeof bytes &&
           memcmp(bytes, MAGIC, sizeof MAGIC) == 0;
}

enum status ipc_device_offer(const struct kvt_env *env, int *fd, struct err *err)
{
    uint8_t bytes[IPC_DEVICE_OFFER_BYTES];
    uint64_t n = env->mem->bytes;
    enum status st = device_mem_export(env->device, env->mem, bytes + sizeof MAGIC, err);
    if (st != OK) {
        err_prefix(err, "ipc: ");
        return st;
    }
    memcpy(bytes, MAGIC, sizeof MAGIC);
    memcpy(bytes + sizeof MAGIC + DEVICE_HANDLE_BYTES, &n, sizeof n);
    int made = memfd_create("baton-cuda", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made < 0 || pwrite(made, bytes, sizeof bytes, 0) != sizeof bytes ||
        fcntl(made, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) != 0) {
        if (made >= 0) close(made);
        return err_set(err, ERR_CONFIG, "ipc: no descriptor for a handle of GPU memory");
    }
    *fd = made;
    return OK;
}

/* Host callback of the stream: it may not call the device and only reports. */
static void on_copied(void *arg)
{
    struct local_put *p = arg;
    copier_done(p->conn->lt->copier, (struct copier_job){ .put = p, .worker = COPIER_EXTERNAL });
}

enum { STREAMS = 2, PAIRS_AT_ONCE = 1360 };

/* A connection's method_state. */
struct device_streams {
    struct copy_stream *v[STREAMS];
    uint64_t n_put;
};

/* Address of a copy's source: pieces of another layout were converted in device memory. */
static const char *source(const struct kvt_env *env, uint64_t local)
{
    return local < KVT_STAGING ? (const char *)env->mem->ptr + local
                               : (const char *)env->staging_device->ptr + (local - KVT_STAGING);
}

/* Begins the copies of a put. */
static enum status begin_copies(const struct local_conn *c, const struct local_put *p,
                                struct copy_stream *stream)
{
    enum status st = OK;
    for (uint32_t i = 0, n; i < p->n_copies && st == OK; i += n) {
        struct copy_stream_pair pairs[PAIRS_AT_ONCE];
        for (n = 0; n < PAIRS_AT_ONCE && i + n < p->n_copies; n++)
            pairs[n] = (struct copy_stream_pair){
                .to = c->remote + p->copies[i + n].remote,
                .from = source(c->lt->env, p->copies[i + n].local),
                .bytes = p->copies[i + n].bytes,
            };
        st = copy_stream_gather(stream, pairs, n);
    }
    return st;
}

/* The same, with checksums in the same pass. */
static enum status begin_summed_copies(const struct local_conn *c, const struct kvt_put_sums *p,
                                       struct copy_stream *stream)
{
    for (uint32_t i = 0; i < p->n; i++) {
        p->pieces[i].to = c->remote + (uintptr_t)p->pieces[i].to;
        p->pieces[i].tail.to = c->remote + (uintptr_t)p->pieces[i].tail.to;
    }
    return copy_stream_checksum(stream, p->pieces, p->n, p->values);
}

static bool begin(struct local_conn *c, struct local_put *p)
{
    struct device_streams *streams = c->method_state;
    struct copy_stream *stream = streams->v[streams->n_put++ % STREAMS];
    enum status st = copy_stream_wait_event(stream, p->event);
    if (st == OK)
        st = p->on_device.n ? begin_summed_copies(c, &p->on_device, stream)
                            : begin_copies(c, p, stream);
    if (st == OK) st = copy_stream_launch_host_fn(stream, on_copied, p);
    p->n_jobs = st == OK;
    /* Copies that have begun must not read the source after DOWN; a failed device runs none. */
    const enum status ended = st == OK ? OK : copy_stream_synchronize(stream);
    c->n_jobs += p->n_jobs;
    return st == OK && ended == OK;
}

/* Never called: begin makes no jobs for copiers. */
static bool move(struct local_conn *c, struct local_put *p, const struct copier_job *j)
{
    (void)c, (void)p, (void)j;
    assert_fail("a copier has a job of the GPU", __FILE__, __LINE__, __func__);
}

static bool synchronize_streams(struct local_conn *c)
{
    struct device_streams *streams = c->method_state;
    bool good = true;
    for (int i = 0; i < STREAMS; i++) good &= copy_stream_synchronize(streams->v[i]) == OK;
    return good;
}

static void free_streams(struct device_streams *streams)
{
    for (int i = 0; i < STREAMS; i++) copy_stream_close(streams->v[i]); /* waits */
    mem_free(streams);
}

static enum status open_streams(struct device *d, struct device_streams **out, struct err *err)
{
    struct device_streams *streams = MEM_NEW(struct device_streams);
    enum status st = OK;
    for (int i = 0; i < STREAMS && st == OK; i++) st = device_copy_stream(d, &streams->v[i], err);
    if (st == OK) *out = streams;
    else free_streams(streams);
    return st;
}

static void detach(struct local_conn *c)
{
    free_streams(c->method_state);
    device_mem_unimport(c->lt->env->device, c->remote);
    c->method_state = NULL;
    c->remote = NULL;
}

static const struct local_copy_method DEVICE = {
    .name = "device", .move = move, .begin = begin, .wait = synchronize_streams, .detach = detach
};

/* The handle and size of an offer; false: it is none. */
static bool read_offer(int fd, uint8_t handle[DEVICE_HANDLE_BYTES], uint64_t *n)
{
    uint8_t bytes[IPC_DEVICE_OFFER_BYTES];
    if (!ipc_is_device_offer(fd) || pread(fd, bytes, sizeof bytes, 0) != sizeof bytes) return false;
    memcpy(handle, bytes + sizeof MAGIC, DEVICE_HANDLE_BYTES);
    memcpy(n, bytes + sizeof MAGIC + DEVICE_HANDLE_BYTES, sizeof *n);
    return true;
}

enum status ipc_device_attach(struct local_conn *c, int fd, char *text, size_t text_max)
{
    struct device *device = c->lt->env->device;
    uint8_t handle[DEVICE_HANDLE_BYTES];
    uint64_t n = 0;
    bool good = read_offer(fd, handle, &n);
    if (fd >= 0) close(fd);
    if (!good || n < c->need_bytes) {
        snprintf(text, text_max, "%s",
                 good ? "the receiver's memory is smaller than its layout says"
                      : "this node's pool is in GPU memory and the receiver's is not");
        return ERR_UNSUPPORTED;
    }
    struct device_streams *streams = NULL;
    struct err err = { 0 };
    void *p = NULL;
    enum status st = open_streams(device, &streams, &err);
    if (st == OK) st = device_mem_import(device, handle, &p, &err);
    if (st != OK) {
        if (streams) free_streams(streams);
        snprintf(text, text_max, "%.90s", err.text);
        return ERR_UNSUPPORTED;
    }
    c->method = &DEVICE;
    c->method_state = streams;
    c->remote = p;
    c->remote_bytes = n;
    return OK;
}
