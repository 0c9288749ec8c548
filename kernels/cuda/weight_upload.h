/* weight_upload.h - uploads packed weights to the GPU: pinned buffers that are filled in turn, and
 * a stream of copies next to the device's own.
 *
 *     room = weight_upload_reserve(c, n); .. write it ..; weight_upload_copy(c, to, room, n);
 *                                         any number of times
 *     weight_upload_stream_wait(c);       once a matrix is complete
 *     weight_upload_finish(c, ..)         once all are: waits, frees the buffers
 *
 * While one buffer is copied the next is filled, so packing and copying overlap, and many small
 * matrices share a buffer. The host waits only for a buffer that is still being copied. Failures
 * become the device's fault. Thread: loading. */
#ifndef BATON_KERNELS_CUDA_WEIGHT_UPLOAD_H
#define BATON_KERNELS_CUDA_WEIGHT_UPLOAD_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shared/base/err.h"

enum {
    WEIGHT_UPLOAD_BUFFERS = 3,
    WEIGHT_UPLOAD_BUFFER_BYTES =
        16 << 20 /* about 0.3 ms of a fast link, long compared with the start of a copy */
};

struct weight_upload_buffer {
    char *host; /* NULL: not needed so far */
    size_t bytes, used;
    cudaEvent_t arrived; /* of its last copy */
};

struct weight_upload {
    cudaStream_t stream;       /* NULL: nothing was uploaded so far */
    cudaEvent_t matrix_copied; /* the last matrix */
    struct weight_upload_buffer buffers[WEIGHT_UPLOAD_BUFFERS];
    int at;           /* the buffer being filled */
    uint64_t wait_ns; /* waiting for buffers being copied */
    /* Scratch of packing, kept from matrix to matrix. */
    float *f32;
    uint8_t *q;
    size_t elements; /* of either */
};

struct cuda_ctx;
struct kernel_ctx;
struct weight_times;

/* Pinned memory for the next weight_upload_copy; the previous one must not be written any more.
 * NULL: the GPU failed. */
void *weight_upload_reserve(struct cuda_ctx *c, size_t bytes);
void weight_upload_copy(struct cuda_ctx *c, void *to, const void *room, size_t bytes);
/* Makes later work of the device wait for what was uploaded so far. */
void weight_upload_stream_wait(struct cuda_ctx *c);
/* Makes scratch of `n` f32 and `n` bytes. False: no memory. */
bool weight_upload_scratch(struct cuda_ctx *c, size_t n);
void weight_upload_release(struct cuda_ctx *c);
enum status weight_upload_finish(struct kernel_ctx *c, struct weight_times *out,
                                 struct err *err) MUST_CHECK;

#endif
