/* copy_stream_cuda.c - a lane of a card: a stream of the highest priority, so that what is small and awaited does not stand behind the next layer.
 *
 * A lane touches nothing of its device but the marks, which never change after open; what fails is the lane's own to say, and the engine sees
 * the same failure in its next call, since CUDA's errors stay. Source: CUDA Runtime API. Thread: one per lane, any. */
#include "kernels/copy_stream.h"

#include "kernels/cuda/device_cuda.h"
#include "kernels/cuda/kv/kv_checksum.h"
#include "kernels/cuda/kv/kv_convert.h"
#include "kernels/cuda/kv/kv_copy.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

struct cuda_lane {
    struct copy_stream               base;
    const struct cuda_device *device;
    cudaStream_t              stream;
    bool                      failed; /* it was logged */
};

static struct cuda_lane *cuda_lane_of(struct copy_stream *l) { return (struct cuda_lane *)l; }

static enum status checked(struct cuda_lane *l, cudaError_t e, const char *what)
{
    if (e == cudaSuccess) return OK;
    if (!l->failed) log_error("the GPU failed", "what=\"%s\" error=%s", what, cudaGetErrorName(e));
    l->failed = true;
    return ERR_NODEV;
}

static void close_lane(struct copy_stream *base)
{
    struct cuda_lane *l = cuda_lane_of(base);
    (void)cudaStreamSynchronize(l->stream);
    (void)cudaStreamDestroy(l->stream);
    mem_free(l);
}

static enum status after(struct copy_stream *base, uint64_t mark)
{
    struct cuda_lane *l = cuda_lane_of(base);
    return checked(l, cudaStreamWaitEvent(l->stream, l->device->marks[mark % DEVICE_EVENTS_MAX], 0), "waiting for a layer");
}

static enum status copy(struct copy_stream *base, const struct copy_stream_strided *c)
{
    struct cuda_lane *l = cuda_lane_of(base);
    cudaError_t e = c->n == 1 ? cudaMemcpyAsync(c->to, c->from, c->bytes, cudaMemcpyDefault, l->stream)
                              : cudaMemcpy2DAsync(c->to, c->to_stride, c->from, c->from_stride, c->bytes, c->n, cudaMemcpyDefault, l->stream);
    return checked(l, e, "a copy of KV");
}

static enum status gather(struct copy_stream *base, const struct copy_stream_pair *pairs, uint32_t n)
{
    struct cuda_lane *l = cuda_lane_of(base);
    return checked(l, kv_copy_run(l->stream, pairs, n), "copies of KV");
}

static enum status convert(struct copy_stream *base, const struct copy_stream_conversion *c)
{
    struct cuda_lane *l = cuda_lane_of(base);
    return checked(l, kv_convert_run(l->stream, c), "KV in another layout");
}

static enum status sums(struct copy_stream *base, const struct copy_stream_checksum_range *pieces, uint32_t n, uint64_t *out)
{
    struct cuda_lane *l = cuda_lane_of(base);
    return checked(l, kv_checksum_run(l->stream, pieces, n, out), "checksums of KV");
}

static enum status tell(struct copy_stream *base, void (*fn)(void *arg), void *arg)
{
    struct cuda_lane *l = cuda_lane_of(base);
    return checked(l, cudaLaunchHostFunc(l->stream, fn, arg), "a word from its stream");
}

static enum status wait(struct copy_stream *base)
{
    struct cuda_lane *l = cuda_lane_of(base);
    return checked(l, cudaStreamSynchronize(l->stream), "copies of KV");
}

static const struct copy_stream_ops LANE_CUDA = { .close = close_lane, .wait_event = after, .copy = copy, .gather = gather,
                                          .convert = convert, .checksum = sums, .launch_host_fn = tell, .synchronize = wait };

enum status lane_cuda_open(struct device *d, struct copy_stream **out, struct err *err)
{
    struct cuda_lane *l = mem_try_calloc(1, sizeof *l);
    if (!l) return err_set(err, ERR_NOMEM, "no memory for a lane");
    l->base.ops = &LANE_CUDA;
    l->device = cuda_device_of(d);
    int least = 0, greatest = 0;
    cudaError_t e = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (e == cudaSuccess) e = cudaStreamCreateWithPriority(&l->stream, cudaStreamNonBlocking, greatest);
    if (e != cudaSuccess) {
        mem_free(l);
        return err_set(err, ERR_NODEV, "the GPU has no stream for copies: %s", cudaGetErrorString(e));
    }
    *out = &l->base;
    return OK;
}
