/* copy_stream_cuda.c - a copy stream of a GPU: a CUDA stream of the highest priority, so that
 * small, urgent work does not queue behind the next layer.
 *
 * It uses only the device's events, which never change after open. A copy stream reports its own
 * failure; the engine sees the same failure in its next call, because CUDA's errors are sticky.
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
    cudaStream_t stream;
    bool failed; /* it was logged */
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

static void close_stream(struct copy_stream *base)
{
    struct cuda_copy_stream *s = cuda_copy_stream_of(base);
    (void)cudaStreamSynchronize(s->stream);
    (void)cudaStreamDestroy(s->stream);
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

static enum status gather(struct copy_stream *base, const struct copy_stream_pair *pairs,
                          uint32_t n)
{
    struct cuda_copy_stream *s = cuda_copy_stream_of(base);
    return checked(s, kv_copy_run(s->stream, pairs, n), "copies of KV");
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
    return checked(s, kv_checksum_run(s->stream, pieces, n, out), "checksums of KV");
}

static enum status launch_host_fn(struct copy_stream *base, void (*fn)(void *arg), void *arg)
{
    struct cuda_copy_stream *s = cuda_copy_stream_of(base);
    return checked(s, cudaLaunchHostFunc(s->stream, fn, arg), "a host function on its stream");
}

static enum status synchronize(struct copy_stream *base)
{
    struct cuda_copy_stream *s = cuda_copy_stream_of(base);
    return checked(s, cudaStreamSynchronize(s->stream), "copies of KV");
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

enum status copy_stream_cuda_open(struct device *d, struct copy_stream **out, struct err *err)
{
    struct cuda_copy_stream *s = mem_try_calloc(1, sizeof *s);
    if (!s) return err_set(err, ERR_NOMEM, "no memory for a copy stream");
    s->base.ops = &COPY_STREAM_CUDA_OPS;
    s->device = cuda_device_of(d);
    int least = 0, greatest = 0;
    cudaError_t e = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithPriority(&s->stream, cudaStreamNonBlocking, greatest);
    if (e != cudaSuccess) {
        mem_free(s);
        return err_set(err, ERR_NODEV, "the GPU has no stream for copies: %s",
                       cudaGetErrorString(e));
    }
    *out = &s->base;
    return OK;
}
