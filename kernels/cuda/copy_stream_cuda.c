/* copy_stream_cuda.c - a copy stream of a GPU: a CUDA stream of the highest priority, so that
 * small, urgent work does not queue behind the next layer.
 *
 * Host functions have a stream of their own, which waits for an event of the first one: a stream
 * stands still until its host function has returned, 10 us and more, and the copies of the next put
 * need not. Of the device it uses only the events, which never change after open. A copy stream
 * reports its own failure; the engine sees the same failure in its next call, because CUDA's errors
 * are sticky.
 * Source: CUDA Runtime API. Thread: one per copy stream, any. */
#include "kernels/copy_stream.h"

#include "kernels/cuda/device_cuda.h"
#include "kernels/cuda/kv/kv_checksum.h"
#include "kernels/cuda/kv/kv_convert.h"
#include "kernels/cuda/kv/kv_copy.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

struct cuda_copy_stream {
    struct copy_stream base;
    const struct cuda_device *device;
    cudaStream_t stream, host_fn_stream;
    cudaEvent_t before_host_fn; /* recorded for each: a wait captures the last record of its time */
    bool failed;                /* it was logged */
};

static struct cuda_copy_stream *cuda_copy_stream_of(struct copy_stream *s)
{
    return (struct cuda_copy_stream *)s;
}

static enum status checked(struct cuda_copy_stream *s, cudaError_t e, const char *what)
{
    if (e == cudaSuccess) return OK;
    if (!s->failed) log_error("the GPU failed", "what=\"%s\" error=%s", what, cudaGetErrorName(e));
    s->failed = true;
    return ERR_NODEV;
}

/* Also of one that was opened in part. */
static void close_stream(struct copy_stream *base)
{
    struct cuda_copy_stream *s = cuda_copy_stream_of(base);
    if (s->stream) (void)cudaStreamSynchronize(s->stream);
    if (s->host_fn_stream) {
        (void)cudaStreamSynchronize(s->host_fn_stream);
        (void)cudaStreamDestroy(s->host_fn_stream);
    }
    if (s->before_host_fn) (void)cudaEventDestroy(s->before_host_fn);
    if (s->stream) (void)cudaStreamDestroy(s->stream);
    mem_free(s);
}

static enum status wait_event(struct copy_stream *base, uint64_t event)
{
    struct cuda_copy_stream *s = cuda_copy_stream_of(base);
    return checked(s,
                   cudaStreamWaitEvent(s->stream, s->device->events[event % DEVICE_EVENTS_MAX], 0),
                   "waiting for a layer");
}

static enum status copy(struct copy_stream *base, const struct copy_stream_strided *c)
{
    struct cuda_copy_stream *s = cuda_copy_stream_of(base);
    cudaError_t e = c->n == 1
                        ? cudaMemcpyAsync(c->to, c->from, c->bytes, cudaMemcpyDefault, s->stream)
                        : cudaMemcpy2DAsync(c->to, c->to_stride, c->from, c->from_stride, c->bytes,
                                            c->n, cudaMemcpyDefault, s->stream);
    return checked(s, e, "a copy of KV");
}

/* Multiprocessors that copy to another GPU: by estimate they have more in flight than NVLink takes
 * (2 MB), and the others go on computing, whose kernels find no room beside copies. */
enum { FAR_MULTIPROCESSORS = 16 };

/* How many copy. A GPU that CUDA_VISIBLE_DEVICES hides from this process may pass for its own. */
static int multiprocessors_for(const struct cuda_copy_stream *s, const void *to)
{
    struct cudaPointerAttributes a;
    const int all = s->device->n_multiprocessors;
    if (cudaPointerGetAttributes(&a, to) != cudaSuccess) {
        (void)cudaGetLastError(); /* what is wrong shows at the launch */
        return all;
    }
    const bool is_far = a.type == cudaMemoryTypeDevice && a.device != 0;
    return is_far && all > FAR_MULTIPROCESSORS ? FAR_MULTIPROCESSORS : all;
}

static enum status gather(struct copy_stream *base, const struct copy_stream_pair *pairs,
                          uint32_t n)
{
    struct cuda_copy_stream *s = cuda_copy_stream_of(base);
    if (n == 0) return OK;
    return checked(s, kv_copy_run(s->stream, pairs, n, multiprocessors_for(s, pairs[0].to)),
                   "copies of KV");
}

static enum status convert(struct copy_stream *base, const struct copy_stream_conversion *c)
{
    struct cuda_copy_stream *s = cuda_copy_stream_of(base);
    return checked(s, kv_convert_run(s->stream, c), "KV in another layout");
}

static enum status checksum(struct copy_stream *base,
                            const struct copy_stream_checksum_range *pieces, uint32_t n,
                            uint64_t *out)
{
    struct cuda_copy_stream *s = cuda_copy_stream_of(base);
    const int all = s->device->n_multiprocessors,
              most = n > 0 && pieces[0].to ? multiprocessors_for(s, pieces[0].to) : all;
    return checked(s, kv_checksum_run(s->stream, pieces, n, out, most), "checksums of KV");
}

static enum status launch_host_fn(struct copy_stream *base, void (*fn)(void *arg), void *arg)
{
    struct cuda_copy_stream *s = cuda_copy_stream_of(base);
    cudaError_t e = cudaEventRecord(s->before_host_fn, s->stream);
    if (e == cudaSuccess) e = cudaStreamWaitEvent(s->host_fn_stream, s->before_host_fn, 0);
    if (e == cudaSuccess) e = cudaLaunchHostFunc(s->host_fn_stream, fn, arg);
    return checked(s, e, "a host function on its stream");
}

static enum status synchronize(struct copy_stream *base)
{
    struct cuda_copy_stream *s = cuda_copy_stream_of(base);
    cudaError_t e = cudaStreamSynchronize(s->stream);
    if (e == cudaSuccess) e = cudaStreamSynchronize(s->host_fn_stream);
    return checked(s, e, "copies of KV");
}

static const struct copy_stream_ops COPY_STREAM_CUDA_OPS = {
    .close = close_stream,
    .wait_event = wait_event,
    .copy = copy,
    .gather = gather,
    .convert = convert,
    .checksum = checksum,
    .launch_host_fn = launch_host_fn,
    .synchronize = synchronize,
};

static cudaError_t open_streams(struct cuda_copy_stream *s)
{
    int least = 0, greatest = 0;
    cudaError_t e = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithPriority(&s->stream, cudaStreamNonBlocking, greatest);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithPriority(&s->host_fn_stream, cudaStreamNonBlocking, greatest);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&s->before_host_fn, cudaEventDisableTiming);
    return e;
}

enum status copy_stream_cuda_open(struct device *d, struct copy_stream **out, struct err *err)
{
    struct cuda_copy_stream *s = mem_try_calloc(1, sizeof *s);
    if (!s) return err_set(err, ERR_NOMEM, "no memory for a copy stream");
    s->base.ops = &COPY_STREAM_CUDA_OPS;
    s->device = cuda_device_of(d);
    const cudaError_t e = open_streams(s);
    if (e != cudaSuccess) {
        close_stream(&s->base);
        return err_set(err, ERR_NODEV, "the GPU has no stream for copies: %s",
                       cudaGetErrorString(e));
    }
    *out = &s->base;
    return OK;
}
