/* weight_upload.c - see weight_upload.h. */
#include "kernels/cuda/weight_upload.h"

#include "kernels/cuda/cuda_backend.h"
#include "shared/base/arith.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"

enum { ROOM_STEP = 256 };

static bool begin(struct cuda_ctx *c)
{
    struct weight_upload *s = &c->upload;
    if (s->stream) return true;
    return cuda_check(c->device, cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking),
                      "making a stream") &&
           cuda_check(c->device,
                      cudaEventCreateWithFlags(&s->matrix_copied, cudaEventDisableTiming),
                      "making an event");
}

/* ---- buffers ---- */

static bool alloc_buffer(struct cuda_ctx *c, struct weight_upload_buffer *b, size_t bytes)
{
    void *host = NULL;
    if (b->host && !cuda_check(c->device, cudaFreeHost(b->host), "freeing pinned memory"))
        return false;
    b->host = NULL;
    b->bytes = b->used = 0;
    if (!b->arrived &&
        !cuda_check(c->device, cudaEventCreateWithFlags(&b->arrived, cudaEventDisableTiming),
                    "making an event"))
        return false;
    if (!cuda_check(c->device, cudaMallocHost(&host, bytes), "getting pinned memory for weights"))
        return false;
    b->host = host;
    b->bytes = bytes;
    return true;
}

/* Waits until the buffer's copy is complete, and makes it hold `bytes`. */
static bool drain_buffer(struct cuda_ctx *c, struct weight_upload_buffer *b, size_t bytes)
{
    const uint64_t t0 = clock_ns();
    if (b->used > 0 &&
        !cuda_check(c->device, cudaEventSynchronize(b->arrived), "uploading weights"))
        return false;
    c->upload.wait_ns += clock_ns() - t0;
    b->used = 0;
    return bytes <= b->bytes ||
           alloc_buffer(c, b,
                        bytes < WEIGHT_UPLOAD_BUFFER_BYTES ? WEIGHT_UPLOAD_BUFFER_BYTES : bytes);
}

void *weight_upload_reserve(struct cuda_ctx *c, size_t bytes)
{
    struct weight_upload *s = &c->upload;
    if (!begin(c)) return NULL;
    bytes = round_up(bytes, ROOM_STEP);
    if (s->buffers[s->at].used + bytes > s->buffers[s->at].bytes) {
        if (s->buffers[s->at].used > 0) s->at = (s->at + 1) % WEIGHT_UPLOAD_BUFFERS;
        if (!drain_buffer(c, &s->buffers[s->at], bytes)) return NULL;
    }
    struct weight_upload_buffer *b = &s->buffers[s->at];
    void *room = b->host + b->used;
    b->used += bytes;
    return room;
}

void weight_upload_copy(struct cuda_ctx *c, void *to, const void *room, size_t bytes)
{
    struct weight_upload *s = &c->upload;
    if (cuda_check(c->device, cudaMemcpyAsync(to, room, bytes, cudaMemcpyHostToDevice, s->stream),
                   "uploading weights"))
        (void)cuda_check(c->device, cudaEventRecord(s->buffers[s->at].arrived, s->stream),
                         "uploading weights");
}

void weight_upload_stream_wait(struct cuda_ctx *c)
{
    struct weight_upload *s = &c->upload;
    if (cuda_check(c->device, cudaEventRecord(s->matrix_copied, s->stream), "uploading weights"))
        (void)cuda_check(c->device, cudaStreamWaitEvent(c->device->stream, s->matrix_copied, 0),
                         "uploading weights");
}

bool weight_upload_scratch(struct cuda_ctx *c, size_t n)
{
    struct weight_upload *s = &c->upload;
    if (n <= s->elements) return true;
    mem_free(s->f32);
    mem_free(s->q);
    s->elements = 0;
    s->f32 = mem_try_calloc(n, sizeof *s->f32);
    s->q = mem_try_calloc(n, sizeof *s->q);
    if (!s->f32 || !s->q) return false;
    s->elements = n;
    return true;
}

/* ---- end ---- */

void weight_upload_release(struct cuda_ctx *c)
{
    struct weight_upload *s = &c->upload;
    if (s->stream)
        (void)cuda_check(c->device, cudaStreamSynchronize(s->stream), "uploading weights");
    for (size_t i = 0; i < WEIGHT_UPLOAD_BUFFERS; i++) {
        struct weight_upload_buffer *b = &s->buffers[i];
        if (b->host) (void)cuda_check(c->device, cudaFreeHost(b->host), "freeing pinned memory");
        if (b->arrived)
            (void)cuda_check(c->device, cudaEventDestroy(b->arrived), "ending an event");
    }
    if (s->matrix_copied)
        (void)cuda_check(c->device, cudaEventDestroy(s->matrix_copied), "ending an event");
    if (s->stream) (void)cuda_check(c->device, cudaStreamDestroy(s->stream), "ending a stream");
    mem_free(s->f32);
    mem_free(s->q);
    *s = (struct weight_upload){ 0 };
}

enum status weight_upload_finish(struct kernel_ctx *base, struct weight_times *out, struct err *err)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    const uint64_t t0 = clock_ns();
    device_wait(base->device); /* also for dummy weights that are computed there */
    const uint64_t wait_ns = c->upload.wait_ns + clock_ns() - t0;
    weight_upload_release(c);
    TRY(device_fault(base->device, err));
    *out = (struct weight_times){ .copy_wait_ns = wait_ns };
    return OK;
}
